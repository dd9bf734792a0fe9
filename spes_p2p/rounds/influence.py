"""Bounded influence: how far one contributor can move a part's mean, which a reducer or hub makes of all updates of the part.

It leaves out each update that is far beyond the median, and clips the others to a multiple of the median. Those that are less
trusted can cancel the mean of the others at most, however many they are. With four or more it also clips around the mean: one
step of CenteredClip (Karimireddy, He, Jaggi, ICML 2021, arXiv 2012.10333; for peers without a server: Gorbunov et al. 2021,
arXiv 2106.11257). What this cannot tell, bounds of whole steps can (`step_bounds.py`).

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spes_p2p.messages.admission import Standing

WEIGHT_RATIO = 4.0
"""Bounds a contributor's weight, in medians. Assigned steps differ from the median peer's by at most as much."""
NORM_RATIO = 3.0
"""Bounds an update's norm, in medians, before the mean is taken."""
OUTLIER_RATIO = 30.0
"""Leaves out an update whose norm is more medians than this. Honest ones came to 11."""
DISTANCE_RATIO = 2.0
"""Bounds an update's distance from that mean, in medians."""
ENOUGH_TO_CLIP, ENOUGH_TO_CENTRE = 3, 4
"""Contributors, for a median that one liar cannot be."""
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

    `in_cell`: of a hub, whose mean a reducer bounds again.
    """
    bounded = _BoundedSum(contributions, mean)
    if not clips or not bounded.can_be_judged:
        bounded.write_mean(bounded.everyone)
        return ()
    bounded.bound_tokens()
    if bounded.is_of_strangers:
        _bound_strangers(bounded, in_cell)
    else:
        bounded.bound_norms()
        bounded.leave_out_outliers()
    bounded.bound_others()
    bounded.write_mean(bounded.everyone)
    if len(contributions) >= ENOUGH_TO_CENTRE:
        bounded.centre()
    return bounded.clipped


def _bound_strangers(bounded: _BoundedSum, in_cell: bool) -> None:
    """Bound norms and weights where all contributors are strangers: weights of the judges, or in a cell of everyone.

    A cell's sum leaves out nothing. Where fewer than ENOUGH_TO_CLIP are past probation it clips to no less than the median of
    all: a tiny update, even of one of two past probation, would otherwise make all others stand out.
    """
    if in_cell and len(bounded.judges) < ENOUGH_TO_CLIP:
        bounded.judges = max(bounded.judges, bounded.everyone, key=bounded.median_norm)
    bounded.bound_norms()
    if in_cell:
        bounded.bound_weights(bounded.everyone)
        bounded.judges = bounded.everyone
    else:
        bounded.leave_out_outliers()
        bounded.bound_weights(bounded.judges)


class _BoundedSum:
    """The contributions to a part's mean, and what the bounds leave of each. Judges are those whose medians count."""

    def __init__(self, contributions: Sequence[Contribution], mean: np.ndarray):
        self.everyone: Sequence[int] = range(len(contributions))
        self.judges = _judges([each.standing for each in contributions])
        """Places, ascending."""
        self._contributions, self._mean = contributions, mean
        self._updates, self._scratch = _Updates(contributions, mean.size), np.empty_like(mean)
        self._tokens = [each.tokens for each in contributions]
        """0: the contribution is left out."""
        self._weights = self._tokens
        self._trained = self._tokens
        """Tokens of one member that explain the norm."""
        self._factors = [1.0] * len(contributions)
        """Of the updates, by their norms."""
        self._centred = self._factors
        """Of their distances from the mean."""

    @property
    def can_be_judged(self) -> bool:
        """Whether there are enough contributors for a median, or some are less trusted."""
        return len(self.everyone) >= ENOUGH_TO_CLIP or len(self.judges) < len(self.everyone)

    @property
    def is_of_strangers(self) -> bool:
        """Whether all contributors are strangers."""
        return self._contributions[self.judges[0]].standing in ("proven", "newcomer")

    @property
    def clipped(self) -> tuple[int, ...]:
        """Places of the contributions that were clipped."""
        return tuple(
            i for i, each in enumerate(self._contributions)
            if self._factors[i] < 1 or self._centred[i] < 1 or self._tokens[i] < each.tokens
            or WEIGHT_RATIO * self._weights[i] < self._tokens[i]
        )

    @cached_property
    def _square_sums(self) -> list[float]:
        return [square_sum(self._updates[i]) for i in self.everyone]

    def bound_tokens(self) -> None:
        """Bound the tokens of each member to WEIGHT_RATIO times the judges' median."""
        per_member = [max(1, each.tokens // each.members) for each in self._contributions]
        bound = int(WEIGHT_RATIO * statistics.median_low(per_member[i] for i in self.judges))
        self._weights = self._tokens = [min(each.tokens, bound * each.members) for each in self._contributions]
        self._trained = [min(max(1, max(each.trained, each.tokens) // each.members), bound) for each in self._contributions]

    def bound_norms(self) -> None:
        """Bound the norm of each update to NORM_RATIO times the judges' median."""
        self._factors = _factors(self._square_sums, self._trained, self.judges, NORM_RATIO)

    def leave_out_outliers(self) -> None:
        """Leave out each update whose norm is more than OUTLIER_RATIO times the judges' median."""
        self._weights = self._tokens = [
            count if factor * OUTLIER_RATIO >= NORM_RATIO else 0
            for count, factor in zip(self._tokens, self._factors, strict=True)
        ]

    def bound_weights(self, of: Collection[int]) -> None:
        """Bound weight times norm of each of these to that of the judges' median update."""
        alike = _factors(self._square_sums, self._trained, self.judges, 1.0)
        self._weights = [
            max(1, int(count * alike[i])) if count and i in of else count for i, count in enumerate(self._weights)
        ]

    def bound_others(self) -> None:
        """Bound weights such that all who are no judges together cancel the judges' mean at most.

        Weight times norm of each is at most its share of that, by tokens, so what one sends costs no other its weight. Cutting
        norms instead would shorten the step where the others are honest.
        """
        self.judges = [i for i in self.judges if self._tokens[i]]
        if len(self.judges) == len(self.everyone):
            return
        self.write_mean(self.judges)
        known = sum(self._weights[i] for i in self.judges)
        bound = math.sqrt(square_sum(self._mean)) * (known / max(1, sum(self._weights) - known))
        norms = [
            factor * math.sqrt(total) if factor else 0.0 for factor, total in zip(self._factors, self._square_sums, strict=True)
        ]
        self._weights = [
            count if i in self.judges or norm <= bound else int(count * bound / norm)
            for i, (count, norm) in enumerate(zip(self._weights, norms, strict=True))
        ]

    def write_mean(self, of: Sequence[int]) -> None:
        """Write the mean of these contributions, in their order."""
        total, out = sum(self._weights[i] for i in of), self._mean
        for i in of:
            if self._weights[i]:
                np.multiply(self._updates[i], np.float32(self._factors[i] * self._weights[i] / total), out=out)
                if out is self._scratch:
                    np.add(self._mean, self._scratch, out=self._mean)
                out = self._scratch

    def centre(self) -> None:
        """Move the mean by one step of CenteredClip from itself.

        With v the mean by weights w, sum of w_i (u_i - v) is 0: v + sum of w_i clip(u_i - v) takes only the terms that are
        clipped.
        """
        trained = [count // each.members for count, each in zip(self._tokens, self._contributions, strict=True)]
        distances = [square_sum(self._distance(i)) for i in self.everyone]
        self._centred = _factors(distances, trained, self.judges, DISTANCE_RATIO)
        if min(self._centred) < 1:
            step, total = np.zeros_like(self._mean), sum(self._weights)
            for i, factor in enumerate(self._centred):
                if factor < 1:
                    far = self._distance(i)
                    np.multiply(far, np.float32((factor - 1) * self._weights[i] / total), out=far)
                    np.add(step, far, out=step)
            np.add(self._mean, step, out=self._mean)

    def median_norm(self, judges: Sequence[int]) -> float:
        """Return the median of these contributors' norms, to which `bound_norms` compares if they are the judges."""
        return _median_norm(self._square_sums, self._trained, judges)

    def _distance(self, i: int) -> np.ndarray:
        """Return an update's distance from the mean, in scratch memory."""
        update, factor = self._updates[i], self._factors[i]
        if factor != 1:
            update = np.multiply(update, np.float32(factor), out=self._scratch)
        np.subtract(update, self._mean, out=self._scratch)
        return self._scratch


def _judges(standings: Sequence[Standing]) -> Sequence[int]:
    """Return the places of the contributors whose medians count."""
    known = [i for i, standing in enumerate(standings) if standing in ("vouched", "invited")]
    known = known or [i for i, standing in enumerate(standings) if standing == "proven"]
    return known or range(len(standings))


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
