"""How long rounds wait beyond need: for peers that come late, and for strangers after all others."""

from __future__ import annotations

import asyncio
import math

COURTESY_SHARE = 0.05
"""Wait at a coordinator, and at a reducer, for at most this share of the time: anybody can be late in every round, and
identities cost nothing."""
EARLY_S = 1e-3
"""A wait is over this much early: event loops round timers."""


class Courtesy:
    """Time to wait for peers that need not be waited for. It fills with a share of the time, and rounds spend it."""

    def __init__(self) -> None:
        self._left_s, self._filled_at = math.inf, -math.inf

    def begin(self, most_s: float, sharers: int = 1) -> Wait:
        """Begin to wait. `most_s`: the most that is waited, and saved. `sharers`: peers in turn, each with an account."""
        now = _now()
        self._left_s = min(most_s, self._left_s + COURTESY_SHARE / sharers * (now - self._filled_at))
        self._filled_at = now
        return Wait(self, now, max(0.0, self._left_s))

    def spend(self, waited_s: float) -> None:
        """Note that a round waited."""
        self._left_s -= waited_s


class Wait:
    """One wait at the expense of a `Courtesy`."""

    def __init__(self, courtesy: Courtesy, began: float, limit_s: float):
        self.began, self.limit_s = began, limit_s
        """Loop time, and seconds."""
        self._courtesy = courtesy

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return _now() - self.began

    def left_s(self, limit_s: float | None = None) -> float:
        """Return the seconds until it is over, at its own limit or this one; 0 from then on."""
        left_s = (self.limit_s if limit_s is None else limit_s) - self.waited_s
        return left_s if left_s > EARLY_S else 0.0

    def end(self) -> None:
        """Take the time off the account. Call it once."""
        self._courtesy.spend(self.waited_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
