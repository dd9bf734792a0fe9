"""When the held-out loss has run away, and which base was still good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RUNAWAY_NATS = 0.5
"""A base this far above the best one has run away. Healthy runs stay within some hundredths of their best evaluation."""
GOOD_NATS = 0.1
"""A base within this of the best one is good to return to."""
CONFIRMATIONS = 3
"""Consecutive evaluations that must agree. Trainers take turns, so that no single one decides."""


@dataclass(frozen=True)
class HeldOut:
    """An evaluation of a round's base."""

    round: int
    loss: float
    """Nats per token."""


def last_good_round(evaluations: Sequence[HeldOut]) -> int | None:
    """Return the last round whose base was good, if the loss has run away since; otherwise None.

    `evaluations`: by round, ascending.
    """
    earlier, latest = evaluations[:-CONFIRMATIONS], evaluations[-CONFIRMATIONS:]
    if not earlier:
        return None
    best = min(each.loss for each in earlier)
    if any(each.loss <= best + RUNAWAY_NATS for each in latest):
        return None
    return max(each.round for each in earlier if each.loss <= best + GOOD_NATS)


def decisive(evaluations: Sequence[HeldOut]) -> list[HeldOut]:
    """Return the evaluations that `last_good_round` depends on, now and after more of them: CONFIRMATIONS + 2 at most."""
    earlier, latest = evaluations[:-CONFIRMATIONS], evaluations[-CONFIRMATIONS:]
    if not earlier:
        return list(latest)
    best = min(earlier, key=lambda each: each.loss)
    good = max((each for each in earlier if each.loss <= best.loss + GOOD_NATS), key=lambda each: each.round)
    return [*([best] if best is not good else []), good, *latest]
