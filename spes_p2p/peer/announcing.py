"""What this peer brings to a round: its pending work, frozen as one update, and the announcement that describes it."""

from __future__ import annotations

import asyncio

from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.messages.rounds import Announcement
from spes_p2p.peer.capacity import Capacity
from spes_p2p.peer.evaluation import Evaluation
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.samples import AssignedSamples
from spes_p2p.rounds.archive import archived_rounds


class Announcer:
    """Freezes the update of the next round, then describes it to each coordinator that is tried."""

    def __init__(
        self,
        node: Node,
        replica: Replica,
        capacity: Capacity,
        samples: AssignedSamples,
        phases: PhaseRunner,
        evaluation: Evaluation,
    ):
        self._node, self._replica, self._capacity = node, replica, capacity
        self._samples, self._phases, self._evaluation = samples, phases, evaluation
        self._frozen_at_s = 0.0
        """Loop time."""

    async def freeze_update(self) -> None:
        """All work that is pending now goes with the next round."""
        self._frozen_at_s = asyncio.get_running_loop().time()
        await self._node.world.run_blocking(self._replica.announce)
        self._samples.announce()

    def announcement(self, attempt: int) -> Announcement:
        """For the coordinator of this attempt."""
        node, base, announced = self._node, self._replica.base, self._replica.ledger.announced
        trains = node.role == "trainer"
        return Announcement(
            campaign=node.campaign_hash,
            protocol=PROTOCOL_VERSION,
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
            bandwidth=self._capacity.announced(node.board.upload.bytes_per_s()),
            loss=announced.loss,
            validation_loss=self._evaluation.loss,
            untrained=self._samples.untrained,
            in_flight=trains and node.campaign.config.sync.overlap and self._phases.assigned_steps > 0,
            archived=tuple(archived_rounds(node.world.store)),
        )
