"""The interface between a peer and its trainer: the real one (`trainer.py`) or a synthetic one in simulations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from spes_p2p.config.campaign import TrainingConfig
from spes_p2p.messages.samples import Interval
from spes_p2p.model.layout import Group, Layout
from spes_p2p.storage.tensor_file import Source


@dataclass(frozen=True)
class Phase:
    """The local steps of one peer between two rounds."""

    round: int
    first_step: int
    """Campaign step at which the phase starts; determines the learning rate."""
    campaign_steps: float
    """Campaign steps that the phase spans (`sync_steps`); the local `steps` are spread evenly over them."""
    steps: int
    """Local optimizer steps to run."""
    slices: tuple[Interval, ...]
    """The samples to train on, in order: `batch_size` for each step after `done`."""
    training: TrainingConfig | None = None
    """Learning rate schedule in force; None: the campaign's."""
    averaged_peers: float = 1.0
    """Effective number of peers whose updates of this phase are averaged (`averaged_peers`)."""
    done: int = 0
    """Steps that were trained before; the trainer runs the others."""

    def shortened(self, steps: int) -> Phase:
        """Return a phase of the first `steps` steps, at the same learning rates."""
        return replace(self, steps=steps, campaign_steps=self.campaign_steps * steps / self.steps)


def averaged_peers(steps: Sequence[int]) -> float:
    """Return the effective number of peers that train this many steps each: (sum s)^2 / sum s^2 (Kish), at least 1.

    That many equal peers would reduce the noise of an average by the same factor.
    """
    return max(1.0, sum(steps) ** 2 / max(1, sum(each * each for each in steps)))


@dataclass(frozen=True)
class PhaseReport:
    """Result of one peer's phase."""

    steps: int
    tokens: int
    routed: tuple[int, ...]
    """Tokens routed to each of the E experts by this peer, summed over layers; 0 for experts it does not own."""
    loss: float
    """Mean cross-entropy per token (nats), without auxiliary losses; NaN if no step ran."""
    aux_loss: float
    seconds: float
    untrained: tuple[Interval, ...]
    """The part of the slices that was not trained."""
    skipped_steps: int
    """Steps with a non-finite loss or gradient, which were not applied."""
    flops_per_second: float = 0.0
    """Model FLOP/s by formula (model/flops.py); 0 if unknown."""
    mfu: float = math.nan
    """Model FLOPs utilisation: `flops_per_second` over the device's bf16 peak; NaN if the peak is unknown."""
    assignments: tuple[tuple[int, ...], ...] = ()
    """`[layers][E]`: tokens that this peer's router sent to each expert, owned or not; empty if unknown."""


def joined(reports: Sequence[PhaseReport]) -> PhaseReport:
    """Return one report of a phase that was trained in several goes."""
    if len(reports) == 1:
        return reports[0]
    tokens, seconds = sum(each.tokens for each in reports), sum(each.seconds for each in reports)
    trained = [each for each in reports if each.tokens]
    layers = [each.assignments for each in reports if each.assignments]
    flops = sum(each.flops_per_second * each.seconds for each in reports)
    return PhaseReport(
        steps=sum(each.steps for each in reports),
        tokens=tokens,
        routed=tuple(map(sum, zip(*(each.routed for each in reports), strict=True))),
        loss=sum(each.loss * each.tokens for each in trained) / tokens if tokens else math.nan,
        aux_loss=sum(each.aux_loss * each.tokens for each in trained) / tokens if tokens else math.nan,
        seconds=seconds,
        untrained=reports[-1].untrained,
        skipped_steps=sum(each.skipped_steps for each in reports),
        flops_per_second=flops / seconds if seconds else 0.0,
        mfu=sum(each.mfu * each.seconds for each in reports) / seconds if seconds else math.nan,
        assignments=tuple(
            tuple(map(sum, zip(*layer, strict=True))) for layer in zip(*layers, strict=True)
        ),
    )


class Trainer(Protocol):
    """Local weights, optimizer and data of one peer. Called by one worker thread at a time."""

    @property
    def layout(self) -> Layout:
        """The model's layout."""

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that are trained here, ascending."""

    def load_base(self, base: np.ndarray) -> None:
        """Set all local weights to the base (flat float32 `[layout.size]`)."""

    def assign(self, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Train these experts from now on. A new one starts from its exact base rows, with fresh moments."""

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Run the phase's steps after `done`.

        `should_stop()` is called before and `on_step(steps_done, tokens_per_second)` after each, counting from `done`.

        Raises UserError if this peer cannot continue; its updates must not be sent then.
        """

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return a float32 copy of the local weights `[start, stop)` of a group that is trained here; by default all."""

    def add(self, group: Group, delta: np.ndarray, start: int = 0) -> None:
        """Add `delta` (float32) to the local weights of a group that is trained here, from element `start` on."""

    def refresh(self, group: Group, values: np.ndarray) -> None:
        """Set a group that is not trained here (a foreign expert) to these values."""

    def write(self, group: Group, values: np.ndarray) -> None:
        """Set a group's weights, trained here or not, to these values for a measurement; moments stay as they are."""

    def held_out_losses(self, seed: int, count: int) -> np.ndarray:
        """Return the cross-entropy per token (nats) of each of `count` random held-out samples, float64; empty without text."""

    def validation_loss(self) -> float:
        """Return the mean cross-entropy per token (nats) of the local weights on the held-out text; NaN without such text."""

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        """Return the optimizer state by name. The sources must be read before the next step, which changes them.

        `in_full`: moments in float32 that any trainer can load, where this one has them in 8 bits.
        """

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the state by an `optimizer_state` of the same owned experts; what is missing or does not fit is fresh."""
