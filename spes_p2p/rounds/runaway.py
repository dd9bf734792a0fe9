"""When the held-out loss has run away, and which base was still good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from annotated_types import MaxLen

from spes_p2p.messages.fields import Loss, PeerId, Round
from spes_p2p.messages.presence import RoundRecord

T = TypeVar("T")

RUNAWAY_NATS = 0.5
"""A base this far above the best one has run away. Healthy runs stay within some hundredths of their best evaluation."""
GOOD_NATS = 0.1
"""A base within this of the best one is good to return to."""
CONFIRMATIONS, LATEST = 3, 4
"""CONFIRMATIONS of the LATEST evaluations must agree: where three or more trainers take turns, one that lies can neither bring
that about nor prevent it."""


@dataclass(frozen=True)
class HeldOut:
    """An evaluation of a round's base, or of two: then the higher loss, at the round of the first."""

    round: Round
    loss: Loss
    """Nats per token."""
    by: PeerId = ""
    """The trainer whose turn it was; empty if it was everybody's turn, or nobody else could have had it."""


@dataclass(frozen=True)
class Course:
    """The evaluations of a campaign that can still decide whether the loss has run away.

    A loss counts as good only when the next evaluation, by another trainer, confirms it: as the higher of the two. So no single
    trainer sets the mark that others are compared with, or the base to return to.
    """

    latest: Annotated[tuple[HeldOut, ...], MaxLen(LATEST)] = ()
    """By round, ascending."""
    best: HeldOut | None = None
    """The lowest confirmed loss before these."""
    good: HeldOut | None = None
    """The last confirmed loss before these that is within GOOD_NATS of the best."""

    def after(self, evaluation: HeldOut) -> Course:
        """Return the course with one more evaluation. It drops those of its round and later ones: their branch was given up."""
        number = evaluation.round
        earlier = tuple(each for each in self.latest if each.round < number)
        best = self.best if self.best is not None and self.best.round < number else None
        good = self.good if best is not None and self.good is not None and self.good.round < number else best
        latest = (*earlier, evaluation)
        if len(latest) <= LATEST:
            return Course(latest, best, good)
        first, second = latest[:2]
        if first.by and first.by == second.by:
            return Course(latest[1:], best, good)
        confirmed = HeldOut(first.round, max(first.loss, second.loss))
        best = confirmed if best is None or confirmed.loss <= best.loss else best
        return Course(latest[1:], best, confirmed if good is None or confirmed.loss <= best.loss + GOOD_NATS else good)

    @property
    def last_good_round(self) -> int | None:
        """The last round whose base was good, if the loss has run away since; otherwise None."""
        if self.best is None or self.good is None:
            return None
        high = sum(each.loss > self.best.loss + RUNAWAY_NATS for each in self.latest)
        return self.good.round if high >= CONFIRMATIONS else None

    def without_latest(self) -> Course:
        """Return the course of a campaign that returned to a good base."""
        return replace(self, latest=())


def whose_turn(round_number: int, every_rounds: int, trainers: Sequence[T]) -> T:
    """Return the trainer that evaluates a round's base. `trainers`: of that round, in the plan's order."""
    return trainers[(round_number // every_rounds) % len(trainers)]


def recorded_course(records: Sequence[RoundRecord], every_rounds: int, takes_turns: bool) -> Course:
    """Return the course as the owner's guard sees it: of the evaluations that are due, since the owner last resumed.

    `records`: by round. `takes_turns`: whether one trainer evaluates at a time.
    """
    course = Course()
    for record, following in zip(records, [*records, None][1:], strict=True):
        if following is not None and record.control.startswith("paused") and not following.control.startswith("paused"):
            course = Course()
        if every_rounds and record.round % every_rounds == 0 and math.isfinite(record.validation_loss):
            trainers = [each.peer for each in record.contributions]
            by = whose_turn(record.round, every_rounds, trainers) if takes_turns and len(trainers) > 1 else ""
            course = course.after(HeldOut(record.round, record.validation_loss, by))
    return course
