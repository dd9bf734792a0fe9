"""Peers that leave the next round, this one included: the samples they return, and the seats that electors give up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from spes_p2p.consensus import electorate
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit, Decide, Farewell, Leave, Signed
from spes_p2p.messages.methods import DECIDE, LEAVE
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.unpacking import beside
from spes_p2p.peer.decisions import Decisions
from spes_p2p.rounds.checks import checkers
from spes_p2p.rounds.claims import longest_of_stranger, outstanding
from spes_p2p.rounds.plan import Rules
from spes_p2p.rounds.proposal import read_leave

LEAVE_TIMEOUT_S = 2.0
"""A leaving peer does not wait longer for peers that do not answer."""


class Departures:
    """What peers tell each other about those that leave the next round, or are back."""

    def __init__(self, endpoint: RpcEndpoint, identity: Identity, decisions: Decisions, rules: Rules):
        self._endpoint, self._identity, self._decisions, self._rules = endpoint, identity, decisions, rules
        self._left: dict[str, tuple[Leave, Signed]] = {}
        """By peer. Stays when the peer is back: its seat stays given up for the round."""
        self._left_at: dict[str, float] = {}
        """By peer: loop time."""
        self._came_back: set[str] = set()
        self.returns = Counter[str]()
        """How often each peer has said in this round that it is back."""

    async def serve(self) -> None:
        """Answer requests from now on."""
        await self._endpoint.serve(LEAVE, self._on_leave)

    async def leave(self) -> None:
        """Tell other peers that this peer leaves, so that its experts and samples are reassigned at once.

        By the log, which survives a crash: it has the samples of all work that no round includes. Those of before the last time
        that this peer was away may have been returned then.
        """
        farewell, log, me = self._decisions.leave(), self._decisions.log, self._endpoint.peer_id
        work = outstanding(_since_away(log.recent(log.round), me), me, self._rules.config.sync.overlap)
        await self._tell(Leave(log.last.id, tuple(chain(*work.samples)), farewell))

    async def come_back(self) -> None:
        """Tell them that this peer is back. A seat that it gave up stays so until the next round."""
        await self._tell(Leave(self._decisions.log.last.id, (), self._decisions.farewell(), back=True))

    def see(self, peer: str) -> None:
        """Note that a peer takes part: if it had left, it is back."""
        if peer in self._left:
            self._came_back.add(peer)

    def left_within(self, seconds: float) -> set[str]:
        """Return the peers that said in this time that they leave, and not that they are back."""
        since = asyncio.get_running_loop().time() - seconds
        self._left_at = {peer: at for peer, at in self._left_at.items() if at > since}
        return {peer for peer in self._left_at if self.has_left(peer)}

    def has_left(self, peer: str) -> bool:
        """Return whether this peer said that it leaves, and not that it is back."""
        return peer in self._left and peer not in self._came_back

    def gone(self, parent: str) -> dict[str, Signed]:
        """Return the statements of the peers that left the round after this commit and are not back."""
        gone = {peer: left for peer, left in self._left.items() if self.has_left(peer)}
        return {peer: signed for peer, (leave, signed) in gone.items() if leave.parent == parent}

    def farewells(self) -> tuple[Farewell, ...]:
        """Return the farewells of electors that left, whether or not they are back."""
        said = (self._decisions.farewell(), *(leave.farewell for leave, _ in self._left.values()))
        return tuple(farewell for farewell in said if farewell is not None)

    async def _tell(self, leave: Leave) -> None:
        """Tell all whom it concerns, if this peer is a member or elector: nobody takes another peer's word.

        These are the next round's coordinators and the peer that checks this one. An elector tells all members: else they
        would wait for it as a coordinator. Where these are more than a home router bears, helpers coordinate before it.
        """
        last, me = self._decisions.log.last, self._endpoint.peer_id
        if me not in {*last.members, *last.electorate}:
            return
        request = pack(sign(leave, self._identity))
        checker = checkers(last, self._rules.config.admission).get(me, me)
        may_wait = me in last.electorate and len(last.members) <= electorate.HOME_CONNECTIONS
        concerned = {*last.electorate, *last.helpers, *(last.members if may_wait else (checker,))}
        others = sorted(concerned - {me})
        await asyncio.gather(*(self._tell_one(peer, request) for peer in others), return_exceptions=True)

    async def _tell_one(self, peer: str, request: bytes) -> None:
        """Tell a peer; one that does not know the last commit yet refuses, so it gets that first."""
        try:
            await self._endpoint.ask(peer, LEAVE, request, LEAVE_TIMEOUT_S)
        except Refused:
            last = self._decisions.log.since(self._decisions.log.round - 1, 1)
            await self._endpoint.ask(peer, DECIDE, pack(Decide(last)), LEAVE_TIMEOUT_S)
            await self._endpoint.ask(peer, LEAVE, request, LEAVE_TIMEOUT_S)

    async def _on_leave(self, stream: Stream) -> None:
        signed, peer, commit = unpack(Signed, await stream.message()), stream.remote, self._decisions.log.last
        if signed.peer != peer:
            raise Refused(Code.NOT_ALLOWED, "the statement of another peer")
        recent = self._decisions.log.recent(commit.round)
        work = outstanding(recent, peer, self._rules.config.sync.overlap)
        if not self._endpoint.shares.is_trusted(peer) and len(signed.record) > longest_of_stranger(work):
            raise Refused(Code.MALFORMED, "malformed statement: too long for your outstanding work")
        leave = await beside(len(signed.record), read_leave, signed, recent, self._rules, self._identity)
        if self._decisions.log.last.id != commit.id:
            raise Refused(Code.NOT_PROVEN, f"{peer[-6:]} does not leave this round")
        self._left = {each: known for each, known in self._left.items() if known[0].parent == leave.parent}
        self._came_back &= self._left.keys()
        self.returns = Counter({each: count for each, count in self.returns.items() if each in self._left})
        if leave.back:
            self._left.setdefault(peer, (leave, signed))
            self._came_back.add(peer)
            self.returns[peer] += 1
        else:
            self._left[peer], self._left_at[peer] = (leave, signed), asyncio.get_running_loop().time()
            self._came_back.discard(peer)
        await stream.send(b"")


def _since_away(recent: Sequence[Commit], peer: str) -> list[Commit]:
    """Return the commits after the last round that a peer missed and took part again. `recent`: newest first."""
    found = list[Commit]()
    for commit in recent:
        if commit.plan and peer not in commit.members and any(peer in each.members for each in found):
            break
        found.append(commit)
    return found
