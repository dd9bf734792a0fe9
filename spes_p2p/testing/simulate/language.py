"""What peers of a simulated swarm train, so that it has a held-out loss that attacks can harm.

By default an artificial language and a small real model of it. A word follows from the one before it by one of three rules,
drawn by chance: the least possible loss is the entropy of that draw, 1.04 nats a token. Six honest peers come from 4.17 to 1.33
in 15 rounds. Or the model and text of a campaign file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spes_p2p.campaign.files import read_campaign
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.data.local_files import open_corpus
from spes_p2p.data.samples import SampleReader, Samples
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, initial_state, layout_of
from spes_p2p.model.layout import Layout
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES
from spes_p2p.training.batches import Reader
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


@dataclass(frozen=True)
class Lessons:
    """The real training of one run."""

    config: CampaignConfig
    text: Reader
    held_out: Reader
    device: str = "cpu"

    def trainer(self, base: State, owned: tuple[int, ...]) -> LanguageTrainer:
        """Return a peer's trainer. One thread, so that a seed gives the same run."""
        torch.set_num_threads(1)
        return LanguageTrainer(self.config, base, owned, self.text, self.held_out, self.device)

    def held_out_loss(self, base: State) -> float:
        """Return the mean loss of a base on held-out text, in nats a token."""
        weights = base[: layout_of(self.config.model).size]
        return self.trainer(weights, tuple(range(self.config.model.moe_num_experts))).validation_loss()


def first_weights(config: CampaignConfig) -> tuple[Layout, State]:
    """Return the model's layout and its weights before training."""
    return layout_of(config.model), initial_state(config.model)


def lessons(config: CampaignConfig, seed: int, file: Path | None, device: str) -> Lessons:
    """Return a run's lessons: the language of its seed, or the text of a campaign file. `config`: with its `settings_of`."""
    if file is None:
        return Lessons(config, Sentences(seed), Sentences(HELD_OUT_SEED + seed), device)
    return Lessons(config, *_texts(file), device)


def settings_of(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return what differs from other simulations: model, training, and the number of evaluated samples. Raises UserError."""
    if file is None:
        return SETTINGS
    campaign = read_campaign(file)
    if campaign.held_out_manifest is None or campaign.training_manifest.sources:
        raise UserError(f"{file}: give a campaign with one data.manifest and a data.validation_manifest")
    config = campaign.campaign.config
    training = config.training.model_dump(mode="json", exclude_unset=True, exclude={"total_steps"})
    model = config.model.model_dump(mode="json", exclude_unset=True)
    return {"model": model, "training": training, "evaluation": {"max_samples": config.evaluation.max_samples}}


@cache
def _texts(file: Path) -> tuple[Reader, Reader]:
    campaign = read_campaign(file)
    training = campaign.campaign.config.training
    assert campaign.held_out_manifest is not None
    text, held_out = (
        SampleReader(open_corpus(manifest, campaign.folders), training.sequence_length, training.seed)
        for manifest in (campaign.training_manifest, campaign.held_out_manifest)
    )
    return text, held_out


@lru_cache(2**14)
def _sentence(seed: int, epoch: int, position: int) -> np.ndarray:
    rng = np.random.default_rng((seed, epoch, position))
    words, offsets = [int(rng.integers(WORDS))], rng.choice(OFFSETS, LENGTH - 1)
    for offset in offsets.tolist():
        words.append((FACTOR * words[-1] + offset) % WORDS)
    return np.array(words, np.int64)
