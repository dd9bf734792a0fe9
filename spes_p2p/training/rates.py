"""Learning rates by step. Without torch: observers and the dashboard show them too."""

from __future__ import annotations

import math

from spes_p2p.config.campaign import TrainingConfig


def learning_rate(step: float, config: TrainingConfig) -> float:
    """Return the rate at a (fractional) campaign step: linear warm-up to the peak at `warmup_steps`, then cosine decay to
    `min_lr_ratio` of the peak at `decay_steps`, or `total_steps`. The rate at step 0 is not 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    last = config.decay_steps or config.total_steps
    progress = min(1.0, (step - config.warmup_steps) / (last - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def ramp(age: int, config: TrainingConfig) -> float:
    """Return the learning rate factor of a group whose moments are `age` steps old: reaches 1 at `new_owner_ramp_steps`."""
    return min(1.0, (age + 1) / (config.new_owner_ramp_steps + 1))
