"""Bounded steps: how far one round can move a group of weights.

Every member has the results of all parts, so it can bound the step of each group: by the group's own record, which is in the
base, and an expert also by the other experts. This is what bounds the sole owner of an expert, a reducer, and one of two
contributors that are trusted alike, whom the bounds of a mean (`influence.py`) do not.

All arithmetic gives the same bits on every machine: elementwise float32, sums in a fixed order, scalars in float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.influence import square_sum
from spes_p2p.rounds.outer import records_of
from spes_p2p.rounds.parts import Part, decode_result
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.results import Results
from spes_p2p.storage.threads import in_threads

STEP_RATIO = 4.0
"""Bounds the step of a group: in multiples of its record, and of an expert also in multiples of the median expert's."""
RECORD_RATE = np.float32(0.25)
"""Weight of a round in a group's record. A campaign's warm-up stays within STEP_RATIO of it."""
ENOUGH_EXPERTS = 3
"""The least for a median that one liar cannot be."""


@dataclass(frozen=True)
class StepBounds:
    """What a round's steps are bounded to, the same at every member."""

    factors: Mapping[str, np.float32]
    """By name, of the groups whose updates are scaled down; below 1."""
    records: np.ndarray
    """float32 `[groups]`: the record of each group after the round, in the layout's order."""

    @property
    def bounded(self) -> tuple[tuple[str, float], ...]:
        """The factors, for the report."""
        return tuple((name, float(factor)) for name, factor in self.factors.items())


def bound_steps(
    layout: Layout, members: Sequence[Member], committed: Sequence[Part], square_sums: Mapping[int, float], records: np.ndarray
) -> StepBounds:
    """Return the bounds of a round. `square_sums`: of each committed part's decoded result, by index. `records`: in the base.

    A group's size is its update's root mean square per root of its contributors' mean tokens; its record is a moving average of
    that, 0 before its first update. An expert's record never binds below the median of the round's experts, so that an owner
    that let it shrink does not hold back the next one. With fewer than two trainers nothing is bounded.
    """
    sizes = _sizes(members, committed, square_sums)
    experts = [size for group, size in sizes.items() if group.expert is not None]
    typical = statistics.median_low(experts) if len(experts) >= ENOUGH_EXPERTS else math.inf
    is_swarm = sum(member.trains for member in members) > 1
    factors, after = {}, records.copy()
    for place, group in enumerate(layout.groups):
        if group not in sizes:
            continue
        size, record = sizes[group], records[place]
        bound = STEP_RATIO * float(record) if record > 0 else math.inf
        if group.expert is not None and typical < math.inf:
            bound = min(STEP_RATIO * typical, max(bound, typical))
        if is_swarm and size > bound:
            factors[group.name] = np.float32(bound / size)
            size = bound
        taken = np.float32(min(size, float(np.finfo(np.float32).max)))
        after[place] = record + (taken - record) * RECORD_RATE if record > 0 else taken
    return StepBounds(factors, after)


def bounds_of(
    base: np.ndarray, layout: Layout, commit: Commit, results: Results, known: Mapping[int, float] | None = None,
    threads: int = 1,
) -> StepBounds:
    """Return the bounds of a decided round, from its base and its complete results. `known`: square sums taken before."""

    def square_sum_of(part: Part) -> float:
        return square_sum(decode_result(part, results.encoded[part.index], layout))

    committed = results.committed(commit)
    square_sums = dict(known or {})
    missing = [part for part in committed if part.index not in square_sums]
    square_sums.update(zip((part.index for part in missing), in_threads(square_sum_of, missing, threads), strict=True))
    return bound_steps(layout, results.plan.members, committed, square_sums, records_of(base, layout))


def _sizes(members: Sequence[Member], committed: Sequence[Part], square_sums: Mapping[int, float]) -> dict[Group, float]:
    """Return the size of each group's update."""
    sums: dict[Group, float] = {}
    elements: dict[Group, int] = {}
    tokens: dict[Group, float] = {}
    for part in committed:
        sums[part.group] = sums.get(part.group, 0.0) + square_sums[part.index]
        elements[part.group] = elements.get(part.group, 0) + part.size
        tokens[part.group] = sum(members[i].tokens for i in part.contributors) / len(part.contributors)
    return {group: math.sqrt(total / elements[group] / max(1.0, tokens[group])) for group, total in sums.items()}
