"""Who evaluates a round's base on held-out text, and the loss that they report in the next round. Pure functions."""

from __future__ import annotations

import statistics

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.rounds import Announcement
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.runaway import HeldOut, whose_turn


def evaluators(plan: Plan | None, config: CampaignConfig) -> tuple[Member, ...]:
    """Return the members that evaluate the base of this plan's round; none of a base without a plan.

    The trainers take turns. In an open campaign all trainers that the owner vouched for evaluate, as long as there are any.
    """
    every = config.evaluation.every_rounds
    trainers = tuple(member for member in plan.members if member.trains) if plan is not None else ()
    if plan is None or not every or not trainers:
        return ()
    vouched = tuple(member for member in trainers if member.standing == "vouched")
    if config.admission == "open" and vouched:
        return vouched
    return (whose_turn(plan.round, every, trainers),)


def reported_loss(parent: Plan | None, plan: Plan, config: CampaignConfig) -> HeldOut | None:
    """Return the held-out loss of the parent's base: the median of what its evaluators announced; None if none of them did.

    `parent`: the plan of the parent's base. `plan`: of the next round, whose announcements carry the losses.
    """
    asked = {member.peer for member in evaluators(parent, config)}
    if parent is None or parent.round != plan.round - 1 or not asked:
        return None
    announced = (unpack(Announcement, each.record) for each in plan.proposal.announcements if each.peer in asked)
    losses = [each.validation_loss for each in announced if each.validation_loss is not None]
    if not losses:
        return None
    takes_turns = len(asked) == 1 and sum(member.trains for member in parent.members) > 1
    by = next(iter(asked)) if takes_turns and config.admission != "open" else ""
    return HeldOut(parent.round, statistics.median_low(losses), by)
