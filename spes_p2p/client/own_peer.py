"""Commands about one's own trainer on this machine: `spes-p2p pause` and `resume`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spes_p2p.errors import Broken
from spes_p2p.session.own_state import OwnState, order_pause, read_own_state

OBEYS_WITHIN_S = 60.0
"""Bounds how long a command waits until the trainer has finished its step and has left."""
LOOK_EVERY_S = 0.2


def give_pause_order(run_dir: Path, pauses: bool, on_wait: Callable[[], None] = lambda: None) -> OwnState | None:
    """Order the trainer with this run-dir to pause or to go on; return what it does then, None if none runs.

    One that is preparing looks for an order before it trains, which may take minutes: a pause does not wait for that. The order
    to go on waits until it trains or waits for the campaign's owner, but not longer than OBEYS_WITHIN_S. `on_wait` is called if
    it does not obey at once.

    Raises UserError if it is no trainer's run-dir, and Broken if the trainer does not obey in time.
    """
    order_pause(run_dir, pauses)
    deadline, is_first = time.monotonic() + OBEYS_WITHIN_S, True
    while True:
        state = read_own_state(run_dir)
        obeys = state is None or (_is_paused_by_order(state) if pauses else state.reason != "user")
        is_late = time.monotonic() > deadline
        is_settled = state is None or state.trains or state.reason or state.waits_for_owner
        if obeys and (pauses or is_late or is_settled):
            return state
        if is_first:
            on_wait()
            is_first = False
        if is_late:
            order = "pause" if pauses else "go on"
            told = f"{run_dir}: the trainer was ordered to {order} and has not done so after {OBEYS_WITHIN_S:g} s"
            raise Broken(f"{told}; it does after what it is busy with, unless it hangs")
        time.sleep(LOOK_EVERY_S)


def _is_paused_by_order(state: OwnState) -> bool:
    """Return whether it is paused and says that the order is why, or prepares and looks for orders later."""
    return state.is_preparing or (state.state, state.reason) == ("paused", "user")
