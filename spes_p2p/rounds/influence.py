"""Bounded influence: how far one contributor can move a part's mean, and one round a group of weights.

Two checks, on different machines, of different evidence:

- A *reducer* has the updates of all contributors to a part (`clipped_mean`). It leaves out each that is far beyond the median,
  and clips the others to a multiple of the median. Those that are less trusted can cancel the mean of the others at most,
  however many they are. With four or more it also clips around the mean: one step of CenteredClip (Karimireddy, He, Jaggi,
  ICML 2021, arXiv 2012.10333; for peers without a server: Gorbunov et al. 2021, arXiv 2106.11257).
- *Every member* has the results of all parts, so it can bound the step of each group of weights (`bound_steps`): by the group's
  own record, which is in the base, and an expert also by the other experts. This is what bounds the sole owner of an expert,
  a reducer, and one of two contributors that are trusted alike.

Medians are of the contributors that are no strangers, where there are any, else of those past probation: an attacker has as
many identities as it wants. Among strangers alone, as in a cell, weight times norm of each is at most that of a median update.
Two that are trusted alike are not clipped: nobody can tell which of them lies.

Norms are compared per root of tokens: the update of t tokens grows between sqrt(t), if steps are noise, and t, if they agree.
What clipping takes away is gone, as in gradient clipping: it does not return as pending work, and the round's report counts it.
All arithmetic gives the same bits on every machine: elementwise float32, sums in a fixed order, scalars in float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.messages.admission import Standing
from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.outer import records_of
from spes_p2p.rounds.parts import ENOUGH_TO_CLIP, Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.results import Results
from spes_p2p.storage.threads import in_threads

WEIGHT_RATIO = 4.0
"""Bounds a contributor's weight, in medians. Assigned steps differ from the median peer's by at most as much."""
NORM_RATIO = 3.0
"""Bounds an update's norm, in medians, before the mean is taken."""
OUTLIER_RATIO = 30.0
"""Leaves out an update whose norm is more medians than this. Honest ones came to 11."""
DISTANCE_RATIO = 2.0
"""Bounds an update's distance from that mean, in medians."""
STEP_RATIO = 4.0
"""Bounds the step of a group: in multiples of its record, and of an expert also in multiples of the median expert's."""
RECORD_RATE = np.float32(0.25)
"""Weight of a round in a group's record. A campaign's warm-up stays within STEP_RATIO of it."""
ENOUGH_TO_CENTRE, ENOUGH_EXPERTS = 4, 3
"""The least for a median that one liar cannot be."""
BLOCK = 2**15
"""Elements that are squared and added up at a time: with their sums they stay in the processor's cache."""
DECODED_BYTES = 2**26
"""Bounds the decoded updates of a part that are held at once; above, they are decoded again for each pass."""


def square_sum(values: np.ndarray) -> float:
    """Return the sum of squares of float32 values, in a fixed order; inf where it exceeds float32."""
    width = min(BLOCK, values.size)
    sums, squares = np.zeros(max(1, width), np.float32), np.empty(width, np.float32)
    with np.errstate(over="ignore"):
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            np.multiply(block, block, out=squares[: block.size])
            np.add(sums[: block.size], squares[: block.size], out=sums[: block.size])
        while width > 1:
            half = (width + 1) // 2
            np.add(sums[: width - half], sums[half:width], out=sums[: width - half])
            width = half
    return float(sums[0])


@dataclass(frozen=True)
class Contribution:
    """One member's update of a part."""

    tokens: int
    decode: Callable[[], np.ndarray]
    """Returns the update: float32, finite."""
    standing: Standing = "vouched"
    """Its sender's."""
    trained: int = 0
    """Tokens that a stranger says it trained, where its weight is cut; 0: its weight. They explain the norm of its update."""
    members: int = 1
    """Members whose updates it is the mean of. Such a mean is no longer than their updates, and weighs as much as all."""


def clipped_mean(
    contributions: Sequence[Contribution], mean: np.ndarray, clips: bool, in_cell: bool = False
) -> tuple[int, ...]:
    """Write the token-weighted mean to `mean`; return the places of the contributions that were clipped.

    Without clipped ones the result is the plain mean, bit for bit; but the less trusted weigh less where their updates would
    outweigh the others', and are named only where they lose more than phases of WEIGHT_RATIO times the steps explain. The order
    of the contributions matters to the bits.

    `in_cell`: of a hub, whose mean a reducer bounds again. Among strangers it leaves out nothing, and where fewer than
    ENOUGH_TO_CLIP of them are past probation it clips to no less than the median of all: a tiny update, even of one of two past
    probation, would else make all others stand out.
    """
    tokens = [each.tokens for each in contributions]
    judges = _judges([each.standing for each in contributions])
    updates, factors, scratch = _Updates(contributions, mean.size), [1.0] * len(tokens), np.empty_like(mean)
    weights = tokens
    several = [each.members for each in contributions]
    if clips and (len(tokens) >= ENOUGH_TO_CLIP or len(judges) < len(tokens)):
        bound = int(WEIGHT_RATIO * statistics.median_low(max(1, tokens[i] // several[i]) for i in judges))
        tokens = [min(count, bound * members) for count, members in zip(tokens, several, strict=True)]
        trained = [min(max(1, max(each.trained, each.tokens) // each.members), bound) for each in contributions]
        square_sums = [square_sum(updates[i]) for i in range(len(tokens))]
        are_strangers = contributions[judges[0]].standing in ("proven", "newcomer")
        if in_cell and are_strangers and len(judges) < ENOUGH_TO_CLIP:
            judges = max(judges, list(range(len(tokens))), key=lambda whom: _median_norm(square_sums, trained, whom))
        factors = _factors(square_sums, trained, judges, NORM_RATIO)
        if not (in_cell and are_strangers):
            tokens = [count if each * OUTLIER_RATIO >= NORM_RATIO else 0 for count, each in zip(tokens, factors, strict=True)]
        weights = tokens
        if are_strangers:
            alike, whom = _factors(square_sums, trained, judges, 1.0), range(len(tokens)) if in_cell else judges
            weights = [max(1, int(count * alike[i])) if count and i in whom else count for i, count in enumerate(tokens)]
            judges = list(whom)
        judges = [i for i in judges if tokens[i]]
        if len(judges) < len(tokens):
            _write_mean(updates, [count * (i in judges) for i, count in enumerate(weights)], factors, mean, scratch)
            norms = [factor * math.sqrt(each) if factor else 0.0 for factor, each in zip(factors, square_sums, strict=True)]
            weights = _outweighed(weights, norms, judges, math.sqrt(square_sum(mean)))
    _write_mean(updates, weights, factors, mean, scratch)
    centred = [1.0] * len(tokens)
    if clips and len(tokens) >= ENOUGH_TO_CENTRE:
        each_trained = [count // members for count, members in zip(tokens, several, strict=True)]
        centred = _centre(updates, each_trained, weights, judges, factors, mean, scratch)
    return tuple(
        i for i, each in enumerate(contributions)
        if factors[i] < 1 or centred[i] < 1 or tokens[i] < each.tokens or WEIGHT_RATIO * weights[i] < tokens[i]
    )


def _judges(standings: Sequence[Standing]) -> list[int]:
    """Return the places of the contributors whose medians count."""
    known = [i for i, standing in enumerate(standings) if standing in ("vouched", "invited")]
    known = known or [i for i, standing in enumerate(standings) if standing == "proven"]
    return known or list(range(len(standings)))


def _outweighed(tokens: Sequence[int], norms: Sequence[float], judges: Sequence[int], norm_of_judges: float) -> list[int]:
    """Return weights such that the others, all together, cancel the judges' mean of this norm at most.

    Weight times norm of each is at most its share of that, by tokens, so what one sends costs no other its weight. Cutting
    norms instead would shorten the step where the others are honest.
    """
    known = sum(tokens[i] for i in judges)
    bound = norm_of_judges * (known / max(1, sum(tokens) - known))
    return [
        count if i in judges or norm <= bound else int(count * bound / norm)
        for i, (count, norm) in enumerate(zip(tokens, norms, strict=True))
    ]


def _write_mean(
    updates: _Updates, weights: Sequence[int], factors: Sequence[float], mean: np.ndarray, scratch: np.ndarray
) -> None:
    """Write the mean with these weights of the updates times these factors, in their order."""
    total, out = sum(weights), mean
    for i, (weight, factor) in enumerate(zip(weights, factors, strict=True)):
        if weight:
            np.multiply(updates[i], np.float32(factor * weight / total), out=out)
            if out is scratch:
                np.add(mean, scratch, out=mean)
            out = scratch


def _centre(
    updates: _Updates, tokens: Sequence[int], weights: Sequence[int], judges: Sequence[int], factors: Sequence[float],
    mean: np.ndarray, scratch: np.ndarray,
) -> list[float]:
    """Move the mean by one step of CenteredClip from itself; return the factors of the distances.

    With v the mean by weights w, sum of w_i (u_i - v) is 0: v + sum of w_i clip(u_i - v) takes only the terms that are clipped.
    """

    def distance(i: int) -> np.ndarray:
        update = updates[i] if factors[i] == 1 else np.multiply(updates[i], np.float32(factors[i]), out=scratch)
        np.subtract(update, mean, out=scratch)
        return scratch

    clip = _factors([square_sum(distance(i)) for i in range(len(tokens))], tokens, judges, DISTANCE_RATIO)
    if min(clip) < 1:
        step, total = np.zeros_like(mean), sum(weights)
        for i, factor in enumerate(clip):
            if factor < 1:
                far = distance(i)
                np.multiply(far, np.float32((factor - 1) * weights[i] / total), out=far)
                np.add(step, far, out=step)
        np.add(mean, step, out=mean)
    return clip


def _median_norm(square_sums: Sequence[float], tokens: Sequence[int], judges: Sequence[int]) -> float:
    """Return the lower median of the judges' norms per root of tokens, as `_factors` has it."""
    least = statistics.median_high(tokens[i] for i in judges)
    return statistics.median_low(math.sqrt(square_sums[i] / max(tokens[i], least)) for i in judges)


def _factors(square_sums: Sequence[float], tokens: Sequence[int], judges: Sequence[int], ratio: float) -> list[float]:
    """Return the factor of each vector that brings its norm per root of tokens to at most `ratio` times the lower median.

    Fewer tokens than the upper median count as that: a straggler's small update is as far from the mean as the mean is long.
    Both medians are of the judges, the contributors at these places.
    """
    least = statistics.median_high(tokens[i] for i in judges)
    norms = [math.sqrt(total / max(count, least)) for total, count in zip(square_sums, tokens, strict=True)]
    bound = ratio * _median_norm(square_sums, tokens, judges)
    return [bound / norm if norm > bound else 1.0 for norm in norms]


class _Updates:
    """The decoded updates of a part: held where they are few, otherwise decoded each time."""

    def __init__(self, contributions: Sequence[Contribution], size: int):
        self._contributions = contributions
        self._held: dict[int, np.ndarray] = {}
        self._holds = 4 * size * len(contributions) <= DECODED_BYTES

    def __getitem__(self, place: int) -> np.ndarray:
        update = self._held.get(place)
        if update is None:
            update = self._contributions[place].decode()
            if self._holds:
                self._held[place] = update
        return update


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
        return square_sum(part.codec.decode(results.encoded[part.index], part.size))

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
