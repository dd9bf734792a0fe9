"""How long rounds wait beyond need: for peers that come late, and for strangers after all others.

Anybody can be late in every round, and identities cost nothing. So what a peer waits is bounded over all rounds, by a share of
the time. Where the time does not suffice, it is saved until it does: strangers are then complete in some rounds, instead of in
none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

LATE_SHARE, LAST_SHARE, REDUCERS_SHARE = 0.02, 0.02, 0.03
"""A coordinator waits for late arrivals, and for strangers' announcements and reports; a reducer for strangers' updates."""
LEAST_SHARE, LEAST_S = 0.01, 0.5
"""At least this share of a round is waited for strangers' announcements, for their updates and for their reports: no two peers
end in the same moment. For announcements, and at least so many seconds: a peer that is told to stop ends its step first."""
KNOWN_PATIENCE = 2.0
"""Wait for members that are no strangers for this many times what their lines need, and what half of them took; where most
members are strangers, for half of the others and so long."""
SLOW_SHARE = 0.005
"""Beyond that, each of them may hold up each other one by `silence_s`, and for this share of the time. It is small: one liar
can hold up a different one in each round."""
EARLY_S = 1e-3
"""A wait is over this much early: event loops round timers."""


class Courtesy:
    """Time to wait for peers that need not be waited for. It fills with a share of the time, and rounds spend it."""

    def __init__(self, share: float):
        self._share, self._left_s, self._filled_at = share, math.inf, -math.inf
        self._saves = False
        """Whether the last wait was in vain."""

    def begin(self, most_s: float, least_s: float = 0.0, sharers: int = 1) -> Wait:
        """Begin to wait, at most `most_s`, which is also the most that is saved, and at least `least_s`.

        `sharers`: peers that take turns, each with an account.
        """
        self._left_s = min(most_s, self.left_s(sharers))
        limit_s = 0.0 if self._saves and self._left_s < most_s else self._left_s
        return Wait(self, asyncio.get_running_loop().time(), max(least_s, limit_s))

    def left_s(self, sharers: int = 1) -> float:
        """Return the seconds on the account."""
        now = asyncio.get_running_loop().time()
        self._left_s += self._share / sharers * (now - self._filled_at)
        self._filled_at = now
        return self._left_s

    def spend(self, waited_s: float, is_in_vain: bool) -> None:
        """Note that a round waited. `is_in_vain`: some did not come."""
        self._left_s, self._saves = max(0.0, self._left_s - waited_s), is_in_vain


class Wait:
    """One wait at the expense of a `Courtesy`."""

    def __init__(self, courtesy: Courtesy, began: float, limit_s: float):
        self.began, self.limit_s = began, limit_s
        """Loop time, and seconds."""
        self._courtesy = courtesy

    def left_s(self, limit_s: float | None = None) -> float:
        """Return the seconds until it is over, at its own limit or this one; 0 from then on."""
        limit_s = self.limit_s if limit_s is None else limit_s
        left_s = self.began + limit_s - asyncio.get_running_loop().time()
        return left_s if left_s > EARLY_S else 0.0

    def end(self, is_in_vain: bool, at: float | None = None) -> None:
        """Take the time off the account, up to now or up to this loop time. Call it once."""
        waited_s = (asyncio.get_running_loop().time() if at is None else at) - self.began
        self._courtesy.spend(min(max(0.0, waited_s), self.limit_s), is_in_vain)


class Lateness:
    """For how long others have held up this peer, as reducer and as coordinator, beyond KNOWN_PATIENCE.

    Who held it up by `silence_s` is waited for no longer than that until SLOW_SHARE of the time has made up for half of it. So
    one that is always late takes part in some rounds, and the share bounds what it costs.
    """

    def __init__(self, silence_s: float):
        self._silence_s = silence_s
        self._owed: dict[str, tuple[float, float]] = {}
        """By peer: seconds, as of a loop time."""
        self._late: set[str] = set()

    def add(self, peers: Iterable[str], seconds: float) -> None:
        """Note that this peer waited for these for so long beyond need."""
        if seconds > 0:
            self._owed |= {peer: (self._owed_s(peer) + seconds, asyncio.get_running_loop().time()) for peer in peers}

    def late(self) -> set[str]:
        """Return the peers that are not waited for beyond need now; forget those that owe nothing."""
        owed_s = {peer: self._owed_s(peer) for peer in self._owed}
        self._owed = {peer: owed for peer, owed in self._owed.items() if owed_s[peer] > 0}
        self._late = {peer for peer, each in owed_s.items() if each > self._silence_s / (2 if peer in self._late else 1)}
        return self._late

    def _owed_s(self, peer: str) -> float:
        owed_s, at = self._owed.get(peer, (0.0, 0.0))
        return max(0.0, owed_s - SLOW_SHARE * (asyncio.get_running_loop().time() - at))
