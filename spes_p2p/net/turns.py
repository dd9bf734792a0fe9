"""The order in which a peer reads what outsiders sent: those that took least first, at one pace for all of them."""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass

from spes_p2p.errors import Refused
from spes_p2p.messages.refusals import Code
from spes_p2p.net.limits import Pacer

WAITING_S = 8.0
"""Bounds what may wait, in seconds of the common pace. The streams and short requests of 256 outsiders fit."""
RETRY_S = 1.0
"""Who is refused asks again after so long: where others flood a peer, the more often it asks, the more it gets."""
LAG = 4.0
"""A peer that took a second's worth lets others pass that come up to this many seconds later. A newcomer's short request thus
comes before all frames of the greatest length, which wait for less than four times an outsider's burst."""


@dataclass(eq=False)
class _Turn:
    due: float
    cost: int
    may_pass: asyncio.Future[bool]


class Turns:
    """Lets outsiders pass one by one, at a pace.

    Whoever took less comes first; the time of coming counts too, so nobody is overtaken for ever. Where too much waits, the one
    that would be last is refused, unless nobody else waits. One that gives up costs nothing.
    """

    def __init__(self, bits_per_s: float, burst_s: float, most_s: float = WAITING_S):
        """`burst_s`: unused time that may be caught up on. `most_s`: what may wait, in seconds of the pace."""
        self._pacer, self._most_s = Pacer(bits_per_s, burst_s), most_s
        self._waiting: list[_Turn] = []
        """By when they are due."""
        self._cost = 0
        """Of all that wait."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting_s(self) -> float:
        """Return how long all that waits takes."""
        return self._cost / self._pacer.bytes_per_s

    async def wait(self, cost: int, taken_s: float) -> None:
        """Return when it is this one's turn. `taken_s`: what its peer took lately, in seconds of its own pace.

        Raises Refused (BUSY).
        """
        loop = asyncio.get_running_loop()
        turn = _Turn(loop.time() + LAG * taken_s, cost, loop.create_future())
        insort(self._waiting, turn, key=lambda each: each.due)
        self._cost += cost
        self._go_on()
        while self.waiting_s > self._most_s and len(self._waiting) > 1:
            self._end(-1, may_pass=False)
        try:
            if not await turn.may_pass:
                raise Refused(Code.BUSY, "too many newcomers ask at a time", retry_s=RETRY_S)
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._cost -= cost

    def _go_on(self) -> None:
        """Let the next ones pass, as many as the pace allows."""
        while self._waiting and self._timer is None:
            turn = self._end(0, may_pass=True)
            if not turn.may_pass.cancelled() and (carried_in_s := self._pacer.take(turn.cost)) > 0:
                self._timer = asyncio.get_running_loop().call_later(carried_in_s, self._wake)

    def _end(self, place: int, may_pass: bool) -> _Turn:
        turn = self._waiting.pop(place)
        self._cost -= turn.cost
        if not turn.may_pass.cancelled():  # its task may have been, and not have run yet
            turn.may_pass.set_result(may_pass)
        return turn

    def _wake(self) -> None:
        self._timer = None
        self._go_on()
