"""Peers that leave the next round, this one included: the samples they return, and the seats that electors give up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Farewell, Leave
from spes_p2p.messages.methods import LEAVE
from spes_p2p.messages.samples import Interval
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.peer.decisions import Decisions
from spes_p2p.rounds.claims import outstanding, within

LEAVE_TIMEOUT_S = 2.0
"""A leaving peer does not wait longer for electors that do not answer."""


class Departures:
    """What electors tell each other about peers that leave the next round, or are back."""

    def __init__(self, endpoint: RpcEndpoint, decisions: Decisions, overlap: bool):
        self._endpoint, self._decisions, self._overlap = endpoint, decisions, overlap
        self._left: dict[str, Leave] = {}
        """By peer. Stays when the peer is back: its seat stays given up for the round."""
        self._came_back: set[str] = set()

    async def serve(self) -> None:
        """Answer requests from now on."""
        await self._endpoint.serve(LEAVE, self._on_leave)

    async def leave(self, untrained: tuple[Interval, ...]) -> None:
        """Tell the electors that this peer leaves, so that its experts and samples are reassigned at once."""
        await self._tell(Leave(self._decisions.log.round + 1, untrained, self._decisions.leave()))

    async def come_back(self) -> None:
        """Tell the electors that this peer is back. A seat that it gave up stays given up until the next round."""
        await self._tell(Leave(self._decisions.log.round + 1, (), self._decisions.farewell(), back=True))

    def see(self, peer: str) -> None:
        """Note that a peer takes part: if it had left, it is back."""
        if peer in self._left:
            self._came_back.add(peer)

    def returned(self, round_number: int) -> dict[str, tuple[Interval, ...]]:
        """Return the samples that each peer returned which left this round and is not back."""
        gone = {peer: leave for peer, leave in self._left.items() if peer not in self._came_back}
        return {peer: leave.untrained for peer, leave in gone.items() if leave.round == round_number}

    def farewells(self) -> tuple[Farewell, ...]:
        """Return the farewells of electors that left, whether or not they are back."""
        said = (self._decisions.farewell(), *(leave.farewell for leave in self._left.values()))
        return tuple(farewell for farewell in said if farewell is not None)

    async def _tell(self, leave: Leave) -> None:
        request, others = pack(leave), sorted(set(self._decisions.log.last.electorate) - {self._endpoint.peer_id})
        asked = (self._endpoint.ask(peer, LEAVE, request, LEAVE_TIMEOUT_S) for peer in others)
        await asyncio.gather(*asked, return_exceptions=True)

    async def _on_leave(self, stream: Stream) -> None:
        leave, peer = unpack(Leave, await stream.message()), stream.remote
        commit = self._decisions.log.last
        if peer in {*commit.members, *commit.electorate} and leave.round == commit.round + 1:
            assigned = outstanding(self._decisions.log.recent(commit.round), peer, self._overlap).samples
            leave = replace(leave, untrained=within(leave.untrained, assigned))
            self._left = {each: known for each, known in self._left.items() if known.round == leave.round}
            self._came_back &= self._left.keys()
            if leave.back:
                self._left.setdefault(peer, leave)
                self._came_back.add(peer)
            else:
                self._left[peer] = leave
                self._came_back.discard(peer)
        await stream.send(b"")
