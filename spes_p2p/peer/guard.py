"""The owner's guard of the model: when the held-out loss runs away, its bootstrap peer orders a rollback."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import dataclass, field, replace

from spes_p2p.campaign.orders import CampaignView, pause, rollback
from spes_p2p.consensus.control import is_paused, owner_of, runs, signed
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.fields import Round
from spes_p2p.observe.units import human_loss
from spes_p2p.peer.durable import read_record
from spes_p2p.peer.node import Node
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.audits import are_audited
from spes_p2p.rounds.held_out import evaluators, reported_loss
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.runaway import Course, HeldOut
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import frame_record

logger = logging.getLogger(__name__)

GUARD = "guard"
"""The file of `_Memory`."""


@dataclass(frozen=True)
class _Memory:
    """What the guard knows, kept over restarts. All of it comes from decided plans: the journal has what others tell, too."""

    course: Course = field(default_factory=Course)
    returned_to: Round = -1
    """The round of the last rollback ordered here."""


class Guard:
    """Watches the held-out losses of a campaign that this peer owns.

    The first time the loss runs away it orders a rollback to the last good archived base. When that happens again from the
    same base, or no good base is archived, it orders a pause, since a rollback would only repeat what went wrong. It begins
    anew when the owner resumes the campaign.
    """

    def __init__(self, node: Node, key: str):
        """`key`: the file of this peer's key, for people."""
        self._node, self._key = node, key
        self._is_owner = node.peer_id == owner_of(node.log.genesis)
        self._memory = _read(node.world.store) if self._is_owner else _Memory()

    def saw(self, parent: Plan | None, plan: Plan) -> None:
        """Take the held-out loss of the parent's base that a decided plan reports, and act if it has run away.

        `parent`: the plan of that base, if it has one. Raises UserError (disk full).
        """
        if not self._is_owner:
            return
        node, config = self._node, self._node.campaign.config
        if is_paused(node.log.commit_at(plan.round - 1).control) and runs(plan.proposal.control):
            self._remember(_Memory())
        evaluation = reported_loss(parent, plan, config)
        if evaluation is None or evaluation.round % config.evaluation.every_rounds:
            return
        if any(member.is_stranger for member in evaluators(parent, config)):
            return
        course = self._memory.course.after(evaluation)
        self._remember(_Memory(course, self._memory.returned_to))
        good, order = course.last_good_round, node.controls.newest
        if good is not None and runs(order) and order == node.log.last.control:
            self._act(good, evaluation, plan)

    def _remember(self, memory: _Memory) -> None:
        self._memory = memory
        self._node.world.store.write(GUARD, [frame_record(pack(memory))])

    def _act(self, good: int, newest: HeldOut, plan: Plan) -> None:
        node, best = self._node, self._memory.course.best
        assert best is not None
        archived = archived_rounds(node.world.store)
        target = max((kept for kept in archived if kept <= good), default=-1)
        view = CampaignView(
            node.campaign_hash, node.peer_id, node.campaign.config, node.controls.newest, node.log.round, node.log.last.step,
            tuple(archived),
        )
        found = (
            f"the held-out loss has run away: {human_loss(newest.loss)} after round {newest.round}, "
            f"and it was still good after round {good}"
        )
        if target < 0 or target == self._memory.returned_to:
            why = "no base of then is archived" if target < 0 else f"a rollback to round {target} did not help"
            passes = plan.cursor.epoch + plan.cursor.position / node.rules.num_samples
            control = f"spes-p2p control {node.world.transport.addresses[0]} --key {shlex.quote(self._key)}"
            loss, audits = plan.loss if plan.tokens else math.inf, are_audited(node.campaign.config)
            logger.error(
                "%s; %s: pausing the campaign; %s; continue with %s resume", found, why,
                advice(best.loss, loss, passes, target, f"{control} audit PEER" if audits else ""), control,
            )
            order = pause(view)
        else:
            logger.error("%s; rolling back to round %d", found, target)
            order = rollback(target, view)
        self._remember(_Memory(self._memory.course.without_latest(), target))
        node.decisions.take_control(signed(replace(order, by_guard=True), node.world.identity))


def advice(best_loss: float, training_loss: float, passes: float, archived: int, audit: str) -> str:
    """Return what to do about a loss that has run away.

    `best_loss`: held-out. `passes`: how often the text was read. `archived`: round of a good base; -1: none. `audit`: the
    command, where there are audits; an honest stranger is clipped, too, beside vouched trainers of which most steps are
    missing.
    """
    if passes > 1 and training_loss < best_loss:
        back = f"order rollback {archived} and stop, or " if archived >= 0 else ""
        return (f"the training loss is {training_loss:.3g} and the text was read {passes:.1f} times, so the model probably "
                f"overfits: {back}start a campaign with more text")
    if audit:
        return (f"have strangers that 'clipped' warnings name in round after round audited ({audit}) and ban those that fail, "
                "or reduce the learning rate")
    return "look for peers that 'clipped' warnings name in round after round and ban them, or reduce the learning rate"


def _read(store: Store) -> _Memory:
    record = read_record(store, GUARD, "held-out losses are compared from now on only")
    try:
        return unpack(_Memory, record) if record is not None else _Memory()
    except WireError:
        return _Memory()

