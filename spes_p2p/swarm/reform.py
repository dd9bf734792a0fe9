"""How a swarm goes on that could not: a helper opens a new epoch. The only way to fork, so it waits, asks first, and is loud.

Two things stop a swarm. A majority of the electors is gone: nothing can be decided after the last head. Or nobody has the base
of the last head, because all who did are gone: nothing can be trained on top of it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spes_p2p.errors import Refused
from spes_p2p.swarm.coordinator import PING, Decide, Ping
from spes_p2p.swarm.electors import quorum, reform_head, remaining, vote_message
from spes_p2p.swarm.records import Ballot, Decided, Pong, Vote
from spes_p2p.swarm.rpc import Talk
from spes_p2p.swarm.wire import WireError, pack, unpack

if TYPE_CHECKING:
    from spes_p2p.swarm.node import Node

logger = logging.getLogger(__name__)

REFORM = "reform"


@dataclass(frozen=True)
class _Outage:
    """No majority of the electors, seen again and again."""

    head: str
    """After which there was none."""
    since: float
    """Loop time."""


class Reformer:
    """A helper's answer to trainers that cannot go on."""

    def __init__(self, node: Node):
        self._node = node
        self._outage: _Outage | None = None

    async def on_reform(self, talk: Talk) -> None:
        """A trainer finds no majority, or no base: look for it myself, and reform when there was none for long enough."""
        asked_for, log = (await talk.message()).decode(errors="replace"), self._node.log
        if self._node.peer_id not in log.genesis.helpers:
            raise Refused("not a helper of this campaign")
        if asked_for != log.head.id:
            await self._node.learn_heads(talk.remote)
        if asked_for != log.head.id:
            await talk.send(pack(Decide(log.since(log.round - 1))))
            return
        lost_since, parent = self._node.hooks.base_lost_since(), log.round
        if lost_since is not None:
            self._require_patience(f"nobody who is there has the base of round {log.round}", lost_since)
            parent = await self._newest_base(talk.remote)
        if parent == log.round:
            self._require_patience("no majority of the electors", await self._no_majority_since())
        if asked_for != log.head.id or self._node.hooks.base_lost_since() != lost_since:
            raise Refused("the swarm goes on")
        await talk.send(pack(Decide((self._open_epoch(parent),))))

    async def _newest_base(self, asker: str) -> int:
        """The round that I can go on from. Raises Refused when there is none."""
        node, head = self._node, self._node.log.head
        peers = sorted({*node.others(), *head.members, *head.electorate, asker} - {node.peer_id})
        node.board.detector.forget_losses()  # who was silent a moment ago may be there, and the registry not know it yet
        parent = await node.hooks.newest_base(peers)
        await node.learn_from_all(peers)  # a base that my log does not know of says that somebody goes on without me
        if parent is None:
            raise Refused("nobody who is there has a base of this campaign")
        return parent

    def _require_patience(self, what: str, since: float) -> None:
        patience_s = self._node.campaign.config.sync.reform_after_s
        if asyncio.get_running_loop().time() - since < patience_s:
            raise Refused(f"{what}; I reform the swarm when that lasts for {patience_s:g} s")

    async def _no_majority_since(self) -> float:
        """Loop time. Raises Refused when there is a majority."""
        head = self._node.log.head.id
        if await self._sees_majority() or head != self._node.log.head.id:
            self._outage = None
            raise Refused("a majority of the electors is there")
        if self._outage is None or self._outage.head != head:
            self._outage = _Outage(head, asyncio.get_running_loop().time())
            self._node.spawn(self._watch(self._outage))
        return self._outage.since

    async def _watch(self, outage: _Outage) -> None:
        """Look again and again by myself: trainers may need long until they ask once more, and it may end meanwhile."""
        while self._outage is outage:
            await asyncio.sleep(self._node.board.silence_s)
            has_ended = self._node.log.head.id != outage.head or await self._sees_majority()
            if has_ended and self._outage is outage:
                self._outage = None

    async def _sees_majority(self) -> bool:
        electorate, board = self._electorate(), self._node.board
        answers = await asyncio.gather(*(board.is_there(peer, PING, pack(Ping(-1))) for peer in electorate))
        return sum(answer is not None and self._counts(answer) for answer in answers) >= quorum(electorate)

    def _electorate(self) -> tuple[str, ...]:
        return remaining(self._node.log.head, self._node.farewells(), self._node.world.identity)

    def _counts(self, pong: bytes) -> bool:
        """Can the elector that answers this vote in the next round? One that is at another round may be able to, then."""
        try:
            answer = unpack(Pong, pong)
        except WireError:
            return False
        return answer.votes or answer.round != self._node.log.round

    def _open_epoch(self, parent: int) -> Decided:
        """A new epoch after this round of mine: its next round is gathered by me from whoever is there."""
        node, last = self._node, self._node.log.head
        head = reform_head(node.log.head_at(parent), last.epoch + 1, node.peer_id, node.disk)
        ballot = Ballot(0, node.peer_id)
        vote = Vote(node.peer_id, node.world.identity.sign(vote_message(ballot, head.id)))
        lost = f"nobody has the base of round {last.round}, what came after round {parent} is given up"
        reason = lost if parent < last.round else "no majority of the electors"
        logger.warning("%s: epoch %d begins at round %d with whoever is there", reason, head.epoch, head.round)
        decided = Decided(head, ballot, (vote,))
        node.learn(decided)
        return decided
