"""The schedule that the page draws: recorded values for past rounds, then the schedule under the owner's orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.config.campaign import CampaignConfig, TrainingConfig
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.rounds.merge import merge_alpha
from spes_p2p.rounds.schedule import scheduled
from spes_p2p.training.rates import learning_rate

SCHEDULE_POINTS = 120

Point = tuple[float, int, float, float]
"""Round (a part of one within a phase), campaign step, learning rate, strength of a merge that would happen there."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps under the same training config."""

    round: int
    """The last committed round when the first step begins."""
    first: int
    last: int
    training: TrainingConfig


def schedule(records: Sequence[RoundRecord], config: CampaignConfig, control: Control | None) -> list[Point]:
    """From round 0 to the end. `records`: by round. `control`: the owner's newest record."""
    alpha = config.merge.merge_alpha_start if config.merge.merge_interval is not None else 0.0

    def point(round_number: float, step: int, rate: float) -> Point:
        return round_number, step, rate, merge_alpha(step, alpha, config.merge.merge_decay_steps)

    past = [point(record.round, record.campaign_step, record.learning_rate) for record in records]
    round_number, step = (records[-1].round, records[-1].campaign_step) if records else (0, 0)
    stretches = list(stretches_ahead(round_number, step, config, control))
    total = sum(each.last - each.first for each in stretches)
    ahead = []
    for each in stretches:
        count = max(1, round(SCHEDULE_POINTS * (each.last - each.first) / max(1, total)))
        for at in sorted({each.first + i * (each.last - each.first) // count for i in range(count + 1)}):
            done = each.round + (at - each.first) / each.training.sync_steps
            ahead.append(point(done, at, learning_rate(at, each.training)))
    return [*past[:: max(1, len(past) // SCHEDULE_POINTS)], *ahead]


def stretches_ahead(round_number: int, step: int, config: CampaignConfig, control: Control | None) -> Iterator[Stretch]:
    """Yield the stretches after this round, whose campaign step is `step`, split where an order changes the schedule."""
    orders = control.changes if control is not None else ()
    cuts = sorted({change.round - 1 for change in orders if change.round - 1 > round_number})
    for cut in (*cuts, None):
        training = scheduled(config, control, round_number + 1).training
        last = training.total_steps
        if cut is not None:
            last = min(last, step + (cut - round_number) * training.sync_steps)
        yield Stretch(round_number, step, max(step, last), training)
        if cut is None or last >= training.total_steps:
            return
        round_number, step = cut, last
