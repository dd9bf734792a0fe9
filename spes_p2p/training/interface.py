"""What the life of a peer asks of whatever trains: the real trainer (`trainer.py`) or a synthetic one in simulations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spes_p2p.config.campaign import TrainingConfig
from spes_p2p.messages.samples import Interval
from spes_p2p.model.layout import Group, Layout
from spes_p2p.storage.tensor_file import Source


@dataclass(frozen=True)
class Phase:
    """The local steps that one peer does between two rounds."""

    round: int
    first_step: int
    """Campaign step at which the phase starts; it decides learning rate."""
    campaign_steps: int
    """Campaign steps that the phase spans (`sync_steps`); `steps` local ones are spread evenly over them."""
    steps: int
    """Local optimizer steps to do."""
    slices: tuple[Interval, ...]
    """The samples to train on, in this order: `steps * batch_size` of them."""
    training: TrainingConfig | None = None
    """Whose learning rate holds; None: the campaign's own."""
    averaged_peers: float = 1.0
    """Peers whose work in this phase is averaged, as `averaged_peers` counts them."""


def averaged_peers(steps: Sequence[int]) -> float:
    """As many peers alike would average noise away as these do that train so many steps each: (sum s)^2 / sum s^2 (Kish).

    At least 1.
    """
    return max(1.0, sum(steps) ** 2 / max(1, sum(each * each for each in steps)))


@dataclass(frozen=True)
class PhaseReport:
    """What a peer did in a phase."""

    steps: int
    tokens: int
    routed: tuple[int, ...]
    """For each of the E experts: tokens that this peer's routers sent there, summed over layers; 0 where it is no owner."""
    loss: float
    """Mean cross-entropy per token (nats), without auxiliary losses; NaN when no step was done."""
    aux_loss: float
    seconds: float
    untrained: tuple[Interval, ...]
    """What of the slices was not trained."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite: nothing was applied."""
    flops_per_second: float = 0.0
    """Floating-point operations that the steps needed, by formula (model/flops.py), a second; 0 when it is not known."""
    mfu: float = math.nan
    """Model FLOPs utilisation: that over the device's bf16 peak; NaN when the peak is not known."""
    assignments: tuple[tuple[int, ...], ...] = ()
    """For each layer and expert: tokens that this peer's router sent there, whoever owns it; empty when it is not known."""


class Trainer(Protocol):
    """Local weights, optimizer and data of one peer. Called from one worker thread at a time."""

    @property
    def layout(self) -> Layout:
        """The model's layout."""

    @property
    def owned(self) -> tuple[int, ...]:
        """Experts that are trained here, ascending."""

    def load_base(self, base: np.ndarray) -> None:
        """Set all local weights to the base (flat float32 `[layout.size]`)."""

    def assign(self, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Train these experts from now on. A new one starts from its exact base rows, with fresh moments."""

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Do the phase's steps. `should_stop` is asked between two; `on_step(steps_done, tokens_per_second)` follows each.

        Raises UserError when this peer cannot go on; what it trained is not to be sent then.
        """

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A float32 copy of the local weights `[start, stop)` of a group that is trained here; all of it by default."""

    def add(self, group: Group, delta: np.ndarray, start: int = 0) -> None:
        """local += delta (float32) on a group that is trained here, from element `start` on."""

    def refresh(self, group: Group, values: np.ndarray) -> None:
        """Set a group that is not trained here (a foreign expert) to these values."""

    def validation_loss(self) -> float:
        """Mean cross-entropy per token of the current local weights on the campaign's held-out text; NaN when it has none."""

    def optimizer_state(self) -> dict[str, Source]:
        """Moments and whatever else a restart needs, by name; read before the next step, which changes them."""

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Undo of `optimizer_state`, for the same owned experts; entries that do not fit are ignored."""
