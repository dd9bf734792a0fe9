"""The service by which trainers that cannot go on ask the bootstrap peer to open a new term."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from spes_p2p.consensus.control import owner_of
from spes_p2p.consensus.farewell import remaining
from spes_p2p.consensus.reform import Outage, OutageWatch, has_lasted, sees_majority
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Decide, ReformRequest
from spes_p2p.messages.methods import PING
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Ping, Pong
from spes_p2p.net.rpc import Stream

if TYPE_CHECKING:
    from spes_p2p.peer.node import Node

logger = logging.getLogger(__name__)



class ReformService:
    """Looks for a majority, and for a base, and opens a term when either has been missing for `sync.reform_after_s`."""

    def __init__(self, node: Node):
        self._node = node
        self._watch = OutageWatch()

    async def on_reform(self, stream: Stream) -> None:
        """A trainer finds no majority, or no base: check, and answer with the commit that it lacks or that opens a term."""
        asked_for, log = unpack(ReformRequest, await stream.message()).commit, self._node.log
        if self._node.peer_id != owner_of(log.genesis):
            raise Refused(Code.NOT_ALLOWED, "not a helper of this campaign")
        if asked_for != log.last.id:
            await self._node.learn_commits(stream.remote)
        if asked_for != log.last.id:
            await stream.send(pack(Decide(log.since(log.round - 1))))
            return
        lost_since, parent = self._node.hooks.base_lost_since(), log.round
        if lost_since is not None:
            self._require_patience(f"nobody who is there has the base of round {log.round}", lost_since)
            parent = await self._newest_base(stream.remote)
        if parent == log.round:
            self._require_patience("no majority of the electors", await self.no_majority_since())
        if asked_for != log.last.id or self._node.hooks.base_lost_since() != lost_since:
            raise Refused(Code.NO_REFORM, "the swarm goes on")
        await stream.send(pack(Decide((self._open_term(parent),))))

    async def no_majority_since(self) -> float:
        """Loop time. Raises Refused when there is a majority."""
        before = self._watch.outage
        outage = await self._look()
        if outage is None:
            raise Refused(Code.NO_REFORM, "a majority of the electors is there")
        if outage is not before:
            self._node.spawn(self._keep_looking(outage))
        return outage.since

    async def _newest_base(self, asker: str) -> int:
        """The last round whose base this peer or another one has. Raises Refused when there is none."""
        node, commit = self._node, self._node.log.last
        peers = sorted({*node.others(), *commit.members, *commit.electorate, asker} - {node.peer_id})
        node.board.detector.forget_losses()  # a peer that was silent may be back before the registry shows it
        parent = await node.hooks.newest_base(peers)
        await node.learn_from_all(peers)  # a base that this log does not know means that the swarm goes on elsewhere
        if parent is None:
            raise Refused(Code.NOT_HERE, "nobody who is there has a base of this campaign")
        return parent

    def _require_patience(self, what: str, since: float) -> None:
        patience_s = self._node.campaign.config.sync.reform_after_s
        if not has_lasted(since, asyncio.get_running_loop().time(), patience_s):
            raise Refused(Code.NO_REFORM, f"{what}; I reform the swarm when that lasts for {patience_s:g} s")

    async def _keep_looking(self, outage: Outage) -> None:
        """Look until the outage ends: trainers may not ask again before it has ended and another one has begun."""
        while self._watch.outage is outage:
            await asyncio.sleep(self._node.board.silence_s)
            if self._watch.outage is outage:
                await self._look()

    async def _look(self) -> Outage | None:
        node, commit = self._node, self._node.log.last
        electorate = remaining(commit, node.farewells(), node.world.identity)
        answers = await asyncio.gather(*(node.board.is_there(peer, PING, pack(Ping(-1))) for peer in electorate))
        moved_on = commit.id != node.log.last.id
        majority = moved_on or sees_majority(map(_pong, answers), electorate, commit.round)
        return self._watch.saw(commit.id, majority, asyncio.get_running_loop().time())

    def _open_term(self, parent: int) -> CertifiedCommit:
        """Open a term after this round; its next round is gathered from the peers that are there."""
        last = self._node.log.last
        decided = self._node.open_term(parent)
        lost = f"nobody has the base of round {last.round}, what came after round {parent} is given up"
        reason = lost if parent < last.round else "no majority of the electors"
        commit = decided.commit
        logger.warning("%s: epoch %d begins at round %d with whoever is there", reason, commit.term, commit.round)
        return decided


def _pong(answer: bytes | None) -> Pong | None:
    try:
        return unpack(Pong, answer) if answer is not None else None
    except WireError:
        return None
