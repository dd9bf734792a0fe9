"""Evaluation of the base on held-out text; the next announcement carries the loss."""

from __future__ import annotations

import math
import statistics

from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.reporter import EventReporter
from spes_p2p.rounds.held_out import evaluators
from spes_p2p.rounds.schedule import is_over


def has_last_base(node: Node, replica: Replica) -> bool:
    """Return whether the base includes the last round: the one at the last step, or in which the owner stopped the campaign.

    An order that adds steps counts from its arrival on: the next round applies it.
    """
    commit = node.log.last
    records = (commit.control, node.controls.newest)
    ends = all(is_over(commit, node.campaign.config, record) for record in records)
    return ends and replica.has_base and replica.base.commit == commit.id


class Evaluation:
    """This peer's turns at evaluating the base, and the loss of the last base, which no announcement carries."""

    def __init__(self, node: Node, replica: Replica, reporter: EventReporter):
        self._node, self._replica, self._reporter = node, replica, reporter
        self._every_rounds = node.campaign.config.evaluation.every_rounds
        """0: never."""

    async def evaluate_if_due(self) -> None:
        """Evaluate a new base when it is this peer's turn."""
        base, is_last = self._replica.base, has_last_base(self._node, self._replica)
        if self._node.peer_id not in self._evaluators() or (base.round % self._every_rounds and not is_last):
            return
        self._reporter.set_state("evaluating")
        loss = float(await self._node.world.run_blocking(self._replica.validation_loss))
        if math.isfinite(loss):
            self._node.evaluated = base.commit, loss
            self._reporter.evaluated(base.round, loss)

    def learn_last_loss(self) -> bool:
        """Take the loss of the last base from its evaluator's contact; return whether it is known or will never be."""
        base, evaluators = self._replica.base, self._evaluators()
        contacts = [self._node.contacts[peer] for peer in evaluators if peer in self._node.contacts]
        losses = [each.validation_loss for each in contacts if each.commit == base.commit and each.validation_loss is not None]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite and self._reporter.evaluated_round != base.round:
            self._reporter.evaluated(base.round, statistics.median_low(finite))
        return not evaluators or self._reporter.evaluated_round == base.round

    def _evaluators(self) -> tuple[str, ...]:
        """Return the trainers that evaluate this base."""
        return tuple(member.peer for member in evaluators(self._replica.base.plan, self._node.campaign.config))
