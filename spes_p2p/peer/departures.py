"""Peers that said they leave the next round: what they gave back, and the farewells of electors among them."""

from __future__ import annotations

from spes_p2p.messages.consensus import Farewell, Leave
from spes_p2p.messages.samples import Interval


class Departures:
    """What a peer has heard about others that leave, until a later round is decided."""

    def __init__(self) -> None:
        self._left: dict[str, Leave] = {}
        self._came_back: set[str] = set()

    def hear(self, peer: str, leave: Leave) -> None:
        """A peer leaves, or is back: what it said as it left then stays known, since its seat stays given up."""
        if leave.back:
            self._left.setdefault(peer, leave)
            self._came_back.add(peer)
        else:
            self._left[peer] = leave
            self._came_back.discard(peer)

    def see(self, peer: str) -> None:
        """A peer takes part: if it had left, it is back."""
        if peer in self._left:
            self._came_back.add(peer)

    def forget(self, round_number: int) -> None:
        """This round is decided."""
        self._left = {peer: leave for peer, leave in self._left.items() if leave.round > round_number}
        self._came_back &= self._left.keys()

    def returned(self, round_number: int) -> dict[str, tuple[Interval, ...]]:
        """What each peer that left this round, and is not back, gave back."""
        gone = {peer: leave for peer, leave in self._left.items() if peer not in self._came_back}
        return {peer: leave.untrained for peer, leave in gone.items() if leave.round == round_number}

    @property
    def farewells(self) -> tuple[Farewell, ...]:
        """Of electors that left, back or not."""
        return tuple(leave.farewell for leave in self._left.values() if leave.farewell is not None)
