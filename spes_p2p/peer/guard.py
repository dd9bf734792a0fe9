"""The owner's guard of the model: when the held-out loss runs away, its bootstrap peer orders a rollback."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen

from spes_p2p.campaign.orders import CampaignView, pause, rollback
from spes_p2p.consensus.control import owner_of, runs, signed
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.fields import Loss, Round
from spes_p2p.peer.durable import read_record
from spes_p2p.peer.node import Node
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.runaway import CONFIRMATIONS, HeldOut, decisive, last_good_round
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import frame_record

logger = logging.getLogger(__name__)

GUARD = "guard"
"""The file of `_Memory`."""


@dataclass(frozen=True)
class _Memory:
    """What the guard knows, kept over restarts. All of it comes from decided plans: the journal has what others tell, too."""

    evaluations: Annotated[tuple[tuple[Round, Loss], ...], MaxLen(CONFIRMATIONS + 2)] = ()
    """Round and held-out loss, by round: those that can still decide."""
    returned_to: Round = -1
    """The round of the last rollback ordered here."""


class Guard:
    """Watches the held-out losses of a campaign that this peer owns.

    The first time the loss runs away it orders a rollback to the last good archived base. When that happens again from the
    same base, or no good base is archived, it orders a pause, since a rollback would only repeat what went wrong.
    """

    def __init__(self, node: Node):
        self._node = node
        self._is_owner = node.peer_id == owner_of(node.log.genesis)
        self._memory = _read(node.world.store) if self._is_owner else _Memory()

    def saw(self, plan: Plan) -> None:
        """Take the held-out loss that a decided plan reports of its parent's base, and act if it has run away.

        Raises UserError (disk full).
        """
        number, loss, every = plan.round - 1, plan.validation_loss, self._node.campaign.config.evaluation.every_rounds
        if not self._is_owner or loss is None or not every or number % every or not _is_vouched_for(plan):
            return
        known = [HeldOut(*each) for each in self._memory.evaluations if each[0] < number]  # others were given up, or come again
        evaluations = decisive([*known, HeldOut(number, loss)])
        self._remember(evaluations, self._memory.returned_to)
        good, order = last_good_round(evaluations), self._node.controls.newest
        if good is not None and runs(order) and order == self._node.log.last.control:
            self._act(good, evaluations)

    def _remember(self, evaluations: Sequence[HeldOut], returned_to: int) -> None:
        self._memory = _Memory(tuple((each.round, each.loss) for each in evaluations), returned_to)
        self._node.world.store.write(GUARD, [frame_record(pack(self._memory))])

    def _act(self, good: int, evaluations: Sequence[HeldOut]) -> None:
        node = self._node
        archived = archived_rounds(node.world.store)
        target = max((kept for kept in archived if kept <= good), default=-1)
        view = CampaignView(
            node.campaign_hash, node.peer_id, node.campaign.config, node.controls.newest, node.log.round, node.log.last.step,
            tuple(archived),
        )
        found = (
            f"the held-out loss has run away: {evaluations[-1].loss:.3g} after round {evaluations[-1].round}, "
            f"and it was still good after round {good}"
        )
        if target < 0 or target == self._memory.returned_to:
            why = "no base of then is archived" if target < 0 else f"a rollback to round {target} did not help"
            logger.error(
                "%s; %s: pausing the campaign; look for peers in 'clipped' warnings and ban them, or reduce the learning rate; "
                "continue with spes-p2p control ADDRESS resume", found, why,
            )
            order = pause(view)
        else:
            logger.error("%s; rolling back to round %d", found, target)
            order = rollback(target, view)
        self._remember(evaluations[:-CONFIRMATIONS], target)
        node.decisions.take_control(signed(order, node.world.identity))


def _read(store: Store) -> _Memory:
    record = read_record(store, GUARD)
    try:
        return unpack(_Memory, record) if record is not None else _Memory()
    except WireError:
        return _Memory()


def _is_vouched_for(plan: Plan) -> bool:
    """Return whether no stranger reports the plan's held-out loss."""
    strangers = any(member.standing in ("newcomer", "proven") for member in plan.members)
    return not strangers or any(member.standing == "vouched" and member.trains for member in plan.members)
