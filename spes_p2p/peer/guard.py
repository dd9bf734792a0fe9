"""The owner's guard of the model: when the held-out loss runs away, its bootstrap peer orders a rollback."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from spes_p2p.campaign.orders import CampaignView, pause, rollback
from spes_p2p.consensus.control import owner_of, runs, signed
from spes_p2p.peer.node import Node
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.runaway import CONFIRMATIONS, HeldOut, last_good_round

logger = logging.getLogger(__name__)


class Guard:
    """Watches the held-out losses of a campaign that this peer owns.

    The first time the loss runs away it orders a rollback to the last good archived base. When that happens again from the
    same base, or no good base is archived, it orders a pause, since a rollback would only repeat what went wrong.
    """

    def __init__(self, node: Node, known: Iterable[HeldOut] = ()):
        """`known`: evaluations before this peer's start, from its journal."""
        self._node = node
        self._evaluations = sorted(known, key=lambda each: each.round)
        self._returned_to = -1
        """The round of the last rollback ordered here."""

    def saw(self, plan: Plan) -> None:
        """Take the held-out loss that a decided plan reports of its parent's base, and act if it has run away."""
        number, loss, every = plan.round - 1, plan.validation_loss, self._node.campaign.config.evaluation.every_rounds
        if loss is None or not every or number % every or not _is_vouched_for(plan):
            return
        self._evaluations.append(HeldOut(number, loss))
        good, order = last_good_round(self._evaluations), self._node.controls.newest
        if good is not None and self._is_owner and runs(order) and order == self._node.log.last.control:
            self._act(good)

    @property
    def _is_owner(self) -> bool:
        return self._node.peer_id == owner_of(self._node.log.genesis)

    def _act(self, good: int) -> None:
        node = self._node
        archived = archived_rounds(node.world.store)
        target = max((kept for kept in archived if kept <= good), default=-1)
        view = CampaignView(
            node.campaign_hash, node.peer_id, node.campaign.config, node.controls.newest, node.log.round, node.log.last.step,
            tuple(archived),
        )
        found = (
            f"the held-out loss has run away: {self._evaluations[-1].loss:.3g} after round {self._evaluations[-1].round}, "
            f"and it was still good after round {good}"
        )
        if target < 0 or target == self._returned_to:
            why = "no base of then is archived" if target < 0 else f"a rollback to round {target} did not help"
            logger.error(
                "%s; %s: pausing the campaign; look for peers in 'clipped' warnings and ban them, or reduce the learning rate; "
                "continue with spes-p2p control ADDRESS resume", found, why,
            )
            order = pause(view)
        else:
            logger.error("%s; rolling back to round %d", found, target)
            order = rollback(target, view)
        node.decisions.take_control(signed(order, node.world.identity))
        self._returned_to = target
        del self._evaluations[-CONFIRMATIONS:]


def _is_vouched_for(plan: Plan) -> bool:
    """Return whether no stranger reports the plan's held-out loss."""
    strangers = any(member.standing in ("newcomer", "proven") for member in plan.members)
    return not strangers or any(member.standing == "vouched" and member.trains for member in plan.members)
