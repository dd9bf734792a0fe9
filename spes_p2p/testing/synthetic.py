"""A trainer without a model, for simulations of the swarm: it changes its weights at random, at a modelled speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from spes_p2p.messages.samples import Interval
from spes_p2p.model.layout import Group, Layout
from spes_p2p.storage.tensor_file import Source
from spes_p2p.training.batches import split_samples
from spes_p2p.training.interface import Phase, PhaseReport


class SyntheticTrainer:
    """A `training.interface.Trainer` that adds noise to the weights it trains, which follows from its seed and the samples."""

    def __init__(
        self, layout: Layout, base: np.ndarray, owned: tuple[int, ...], tokens_per_step: int, seconds_per_step: float, seed: int
    ):
        self.layout = layout
        self.owned = owned
        self.trained_samples: list[Interval] = []
        self._local = base[: self.layout.size].copy()
        self._tokens_per_step = tokens_per_step
        self.seconds_per_step = seconds_per_step
        self._seed = seed

    @property
    def local(self) -> np.ndarray:
        """Copy of all local weights, float64."""
        return self._local.astype(np.float64)

    def load_base(self, base: np.ndarray) -> None:
        """See Trainer."""
        self._local = base[: self.layout.size].copy()

    def assign(self, owned: tuple[int, ...], base: np.ndarray) -> None:
        """See Trainer."""
        for expert in set(owned) ^ set(self.owned):
            group = self.layout.expert(expert)
            self._local[group.start : group.stop] = base[group.start : group.stop]
        self.owned = owned

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Add noise to the shared weights and the owned experts."""
        steps = 0
        planned = phase.steps - phase.done
        for step in range(planned):
            if should_stop():
                break
            _, rest = split_samples(phase.slices, step * sum(map(len, phase.slices)) // planned)
            place = (rest[0].epoch, rest[0].start) if rest else (0, step)
            for number, group in enumerate(self.layout.groups):
                if group.expert is None or group.expert in self.owned:
                    rng = np.random.default_rng((self._seed, *place, number))
                    noise = rng.standard_normal(group.size, np.float32) * np.float32(1e-3)
                    self._local[group.start : group.stop] += noise
            steps += 1
            on_step(step + 1, self._tokens_per_step / self.seconds_per_step)
        tokens = steps * self._tokens_per_step
        experts = self.layout.num_experts
        routed = [tokens // experts + 1 if steps and expert in self.owned else 0 for expert in range(experts)]
        trained, untrained = split_samples(phase.slices, steps * sum(map(len, phase.slices)) // max(1, planned))
        self.trained_samples += trained
        return PhaseReport(
            steps, tokens, tuple(routed), 5.0 / (1 + phase.first_step), 0.0, steps * self.seconds_per_step, untrained, 0
        )

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See Trainer."""
        return self._local[group.start : group.stop][start:stop].copy()

    def add(self, group: Group, delta: np.ndarray, start: int = 0) -> None:
        """See Trainer."""
        self._local[group.start + start : group.start + start + delta.size] += delta

    def refresh(self, group: Group, values: np.ndarray) -> None:
        """See Trainer."""
        self._local[group.start : group.stop] = values

    def write(self, group: Group, values: np.ndarray) -> None:
        """See Trainer."""
        self._local[group.start : group.stop] = values

    def held_out_losses(self, seed: int, count: int) -> np.ndarray:
        """Return the same loss for each sample."""
        return np.full(count, self.validation_loss())

    def validation_loss(self) -> float:
        """Return the root mean square of the weights, which depends on all of them."""
        return float(np.sqrt(np.mean(self._local.astype(np.float64) ** 2)))

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        """Return nothing: there are no moments."""
        return {}

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Nothing to load."""
