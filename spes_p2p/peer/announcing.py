"""What this peer brings to a round: its capacity, its pending work frozen as one update, and the announcement of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.consensus.signed import sign
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.rounds import Announcement, Unanswered
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.samples import UntrainedSamples
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.parts import to_mask


@dataclass(frozen=True)
class Capacity:
    """What a peer can do in a round; plans are made from it."""

    experts: int
    """Most experts that it trains; 0 for a helper."""
    bandwidth: float = 1.0
    """Share of the measured upload bandwidth that plans count; 0 for a peer that must not reduce."""
    is_dialable: Callable[[], bool] = lambda: True
    """Whether others can open connections to it now."""

    def announced(self, bytes_per_s: float) -> float:
        """Return the bandwidth for plans, from the measured one; 0 for a peer that cannot be dialled."""
        return self.bandwidth * bytes_per_s if self.is_dialable() else 0.0


NOTHING_TO_TRAIN = Capacity(experts=0)


class Announcer:
    """Freezes the update of the next round, then describes it to each coordinator that is tried."""

    def __init__(
        self, node: Node, replica: Replica, capacity: Capacity, samples: UntrainedSamples, phases: PhaseRunner,
        unanswered: Callable[[], tuple[Unanswered, ...]], audited: Callable[[], tuple[Audited, ...]],
    ):
        """`unanswered`: the reducers that did not let this peer check them. `audited`: its audits of others."""
        self._unanswered, self._audited = unanswered, audited
        self._node, self._replica, self._capacity = node, replica, capacity
        self._samples, self._phases = samples, phases
        self._frozen_at_s = 0.0
        """Loop time."""
        self._near = b""

    async def freeze_update(self) -> None:
        """Take all pending work as the update of the next round."""
        self._frozen_at_s = asyncio.get_running_loop().time()
        node = self._node
        await node.world.run_blocking(self._replica.announce)
        self._samples.announce()
        base = self._replica.base
        members = node.log.commit_at(base.round).members if node.log.has(base.commit, base.round) else ()
        near = node.endpoint.nearness.near(members)
        self._near = to_mask({i for i, peer in enumerate(members) if peer in near}, len(members)) if near else b""

    def announcement(self, attempt: int) -> Signed:
        """Return the signed announcement for this attempt's coordinator."""
        node, base, announced = self._node, self._replica.base, self._replica.ledger.announced
        trains = node.role == "trainer"
        announcement = Announcement(
            campaign=node.campaign_hash,
            protocol=node.world.protocol,
            round=base.round + 1,
            attempt=attempt,
            waited_s=asyncio.get_running_loop().time() - self._frozen_at_s,
            trains=trains,
            commit=base.commit,
            base_digest=base.digest,
            tokens=announced.tokens,
            routed=announced.routed,
            capacity=self._capacity.experts,
            tokens_per_second=self._phases.tokens_per_s,
            bandwidth=self._capacity.announced(node.endpoint.upload.bytes_per_s()),
            loss=announced.loss,
            validation_loss=node.base_loss,
            untrained=self._samples.untrained,
            in_flight=trains and node.campaign.config.sync.overlap and self._phases.assigned_steps > 0,
            archived=tuple(archived_rounds(node.world.store)),
            invitation=node.invitation,
            unanswered=self._unanswered(),
            name=node.named[0],
            team=node.named[1],
            moments=self._phases.moments.digest(base.round + 1),
            audited=self._audited(),
            near=self._near,
        )
        return sign(announcement, node.world.identity)
