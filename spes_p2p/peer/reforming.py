"""The owner's answer to trainers that cannot go on: a new term, when a majority or the base has been missing for long, or a
round was decided twice.
"""

from __future__ import annotations

import asyncio
import logging

from spes_p2p.consensus.control import owner_of
from spes_p2p.consensus.farewell import remaining
from spes_p2p.consensus.reform import Outage, OutageWatch, has_lasted, sees_majority
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Decide, ReformRequest
from spes_p2p.messages.methods import PING, REFORM
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Ping, Pong
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.newest_base import NewestBase
from spes_p2p.peer.node import Node

logger = logging.getLogger(__name__)


class ReformService:
    """Opens a term when a majority of the electors, or the last base, has been missing for `sync.reform_after_s`.

    At once when a round was decided twice: two certificates prove it.
    """

    def __init__(self, node: Node, newest: NewestBase):
        self._node, self._newest = node, newest
        self._watch = OutageWatch()

    async def serve(self) -> None:
        """Answer requests from now on."""
        await self._node.endpoint.serve(REFORM, self._on_reform)

    async def no_majority_since(self) -> float:
        """Return the loop time since when no majority answers. Raises Refused when one does."""
        before = self._watch.outage
        outage = await self._look()
        if outage is None:
            raise Refused(Code.NO_REFORM, "a majority of the electors is there")
        if outage is not before:
            self._node.spawn(self._keep_looking(outage))
        return outage.since

    async def _on_reform(self, stream: Stream) -> None:
        """Answer with the commit that the trainer lacks, or the one that opens a term."""
        asked_for, log = unpack(ReformRequest, await stream.message()).commit, self._node.log
        other_branches = self._node.decisions.other_branches
        if self._node.peer_id != owner_of(log.genesis):
            raise Refused(Code.NOT_ALLOWED, "not the owner of this campaign")
        if asked_for != log.last.id and other_branches.fork is None:
            await self._node.decisions.learn_from(stream.remote)
        if asked_for != log.last.id and other_branches.fork is None:
            await stream.send(pack(Decide(log.since(log.round - 1))))
            return
        last, lost_since, parent = log.last.id, self._newest.lost_since(), log.round
        if lost_since is not None:
            self._require_patience(f"no reachable peer has the base of round {log.round}", lost_since)
            parent = await self._newest_round(stream.remote)
        if parent == log.round and other_branches.fork is None:
            since = await self.no_majority_since()
            if not self._all_left():
                self._require_patience("no majority of the electors", since)
        if last != log.last.id or self._newest.lost_since() != lost_since:
            raise Refused(Code.NO_REFORM, "the swarm goes on")
        await stream.send(pack(Decide((self._open_term(parent),))))

    async def _newest_round(self, asker: str) -> int:
        """Return the last round whose base this peer or another one has. Raises Refused when there is none."""
        node, commit = self._node, self._node.log.last
        peers = sorted({*node.others(), *commit.members, *commit.electorate, asker} - {node.peer_id})
        node.endpoint.detector.forget_losses()  # a peer that was silent may be back before the registry shows it
        parent = await self._newest.at_hand(peers)
        await node.decisions.learn_from_all(peers)  # a base that this log does not know means that the swarm goes on elsewhere
        if parent is None:
            raise Refused(Code.NOT_HERE, "no reachable peer has a base of this campaign")
        return parent

    def _all_left(self) -> bool:
        """Return whether each elector has said that it leaves, and not come back: nobody is waited for."""
        return set(self._node.log.last.electorate) <= self._node.departures.gone(self._node.log.last.id).keys()

    def _require_patience(self, what: str, since: float) -> None:
        patience_s = self._node.campaign.config.sync.reform_after_s
        if not has_lasted(since, asyncio.get_running_loop().time(), patience_s):
            raise Refused(Code.NO_REFORM, f"{what}; a reform follows when that lasts for {patience_s:g} s")

    async def _keep_looking(self, outage: Outage) -> None:
        """Look until the outage ends: trainers may not ask again before it has ended and another one has begun."""
        while self._watch.outage is outage:
            await asyncio.sleep(self._node.endpoint.silence_s)
            if self._watch.outage is outage:
                await self._look()

    async def _look(self) -> Outage | None:
        node, commit = self._node, self._node.log.last
        electorate = remaining(commit, node.departures.farewells(), node.world.identity)
        answers = await asyncio.gather(*(node.endpoint.is_there(peer, PING, pack(Ping(-1))) for peer in electorate))
        moved_on = commit.id != node.log.last.id
        majority = moved_on or sees_majority(map(_pong, answers), electorate, commit.round)
        return self._watch.saw(commit.id, majority, asyncio.get_running_loop().time())

    def _open_term(self, parent: int) -> CertifiedCommit:
        """Open a term after this round; its next round gathers whichever peers are there."""
        last, all_left, is_forked = self._node.log.last, self._all_left(), self._node.decisions.other_branches.fork is not None
        decided = self._node.decisions.open_term(parent)
        lost = f"no reachable peer has the base of round {last.round}: the rounds after {parent} are given up"
        reason = "all electors left" if all_left else "no majority of the electors"
        reason = "a round was decided twice" if is_forked else lost if parent < last.round else reason
        level = logging.INFO if all_left else logging.WARNING
        logger.log(level, "%s: term %d begins at round %d", reason, decided.commit.term, decided.commit.round)
        return decided


def _pong(answer: bytes | None) -> Pong | None:
    try:
        return unpack(Pong, answer) if answer is not None else None
    except WireError:
        return None
