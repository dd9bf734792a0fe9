"""An artificial language and a small real model of it, so that a simulated swarm has a held-out loss that attacks can harm.

A word follows from the one before it by one of three rules, drawn by chance: the least possible loss is the entropy of that
draw, 1.04 nats a token. Six honest peers come from 4.17 to 1.33 in 15 rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.data.samples import Samples
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, initial_state, layout_of
from spes_p2p.model.layout import Layout
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

WORDS, LENGTH = 32, 32
FACTOR, OFFSETS = 7, (1, 1, 2, 5)
"""The next word is FACTOR times the last one plus one of OFFSETS, modulo WORDS."""
HELD_OUT_SEED = 10**9
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "moe_num_experts": EXPERTS, "moe_top_k": 2,
    },
    "training": {
        "sequence_length": LENGTH, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 4, "new_owner_ramp_steps": 4,
    },
    "evaluation": {"max_samples": 256},
}
"""Campaign settings that differ from those of other simulations."""


class Sentences:
    """A `training.trainer.Reader` of one seed's text."""

    def __init__(self, seed: int):
        self._seed = seed

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return NUM_SAMPLES

    def read(self, interval: Interval) -> Samples:
        """Return the samples at these positions."""
        positions = range(interval.start, interval.stop)
        return np.stack([_sentence(self._seed, interval.epoch, position) for position in positions])

    def read_spread(self, count: int) -> Samples:
        """Return the first samples."""
        return self.read(Interval(0, 0, count))


class LanguageTrainer(TorchTrainer):
    """The real trainer, at the modelled speed of its peer."""

    seconds_per_step: float

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """See Trainer. Nothing in the report depends on the clock of the machine."""
        report = super().train(phase, should_stop, on_step)
        return replace(report, seconds=report.steps * self.seconds_per_step, flops_per_second=0.0)


def first_weights(config: CampaignConfig) -> tuple[Layout, State]:
    """Return the model's layout and its weights before training."""
    return layout_of(config.model), initial_state(config.model)


def make_trainer(config: CampaignConfig, seed: int) -> Callable[[State, tuple[int, ...]], Any]:
    """Return what makes a peer's trainer from a base and its experts. One thread, so that a seed gives the same run."""
    torch.set_num_threads(1)
    text, held_out = Sentences(seed), Sentences(HELD_OUT_SEED + seed)
    return lambda base, owned: LanguageTrainer(config, base, owned, text, held_out)


def held_out_loss(config: CampaignConfig, seed: int, base: State) -> float:
    """Return the mean loss of a base on the seed's held-out text, in nats a token."""
    weights = base[: layout_of(config.model).size]
    trainer = TorchTrainer(config, weights, tuple(range(EXPERTS)), Sentences(seed), Sentences(HELD_OUT_SEED + seed))
    return trainer.validation_loss()


@lru_cache(2**14)
def _sentence(seed: int, epoch: int, position: int) -> np.ndarray:
    rng = np.random.default_rng((seed, epoch, position))
    words, offsets = [int(rng.integers(WORDS))], rng.choice(OFFSETS, LENGTH - 1)
    for offset in offsets.tolist():
        words.append((FACTOR * words[-1] + offset) % WORDS)
    return np.array(words, np.int64)
