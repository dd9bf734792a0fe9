"""Commands about one's own trainer on this machine: `spes-p2p pause` and `resume`."""

from __future__ import annotations

import time
from pathlib import Path

from spes_p2p.session.own_state import OwnState, order_pause, read_own_state

OBEYS_WITHIN_S = 60.0
"""Bounds how long a command waits until the trainer has finished its step and has left."""
LOOK_EVERY_S = 0.2


def give_pause_order(run_dir: Path, pauses: bool) -> OwnState | None:
    """Order the trainer with this run-dir to pause or to go on; return what it does then, None if none runs.

    Raises UserError if there is no such run-dir.
    """
    order_pause(run_dir, pauses)
    deadline = time.monotonic() + OBEYS_WITHIN_S
    while True:
        state = read_own_state(run_dir)
        obeys = state is None or (state.state == "paused" if pauses else state.reason != "user")
        if obeys or time.monotonic() > deadline:
            return state
        time.sleep(LOOK_EVERY_S)
