"""Local steps of one peer on a real model: forward, backward, AdamW, between the flat state and torch's parameters."""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, build_model, exact_expert, layout_of
from spes_p2p.model.flops import peak_flops, training_flops_per_token
from spes_p2p.model.layout import Group, Layout
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.storage.tensor_file import Source
from spes_p2p.training.batches import read_ahead, split_samples
from spes_p2p.training.filter import is_repetitive
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.losses import forward_losses, next_token_loss
from spes_p2p.training.optimizer import OwnedOptimizer, learning_rate
from spes_p2p.training.options import TrainingOptions

logger = logging.getLogger(__name__)

Samples = npt.NDArray[np.int64]

MAX_SKIPPED_IN_A_ROW = 10
"""So many steps in a row that are not finite stop the peer."""
COPIED_ELEMENTS = 2**20
"""Of a tensor, at a time."""


class Reader(Protocol):
    """Where samples `[n, sequence_length]` come from."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""

    def read(self, interval: Interval) -> Samples:
        """Samples at positions of an epoch's shuffled order."""

    def read_spread(self, count: int) -> Samples:
        """`count` samples, at most all, spread over the files: always the same."""


class TorchTrainer:
    """Trains shared weights, routers and owned experts on one device; one thread at a time.

    A step whose loss or gradient is not finite changes neither weights nor moments; its samples count as trained, so that they
    are not handed out again, but its tokens, routing and loss do not. Many such steps in a row end `train` with a UserError.
    """

    def __init__(
        self,
        config: CampaignConfig,
        base: State,
        owned: tuple[int, ...],
        samples: Reader,
        validation: Reader | None = None,
        device: str | torch.device = "cpu",
        options: TrainingOptions | None = None,
    ):
        """Raises UserError, naming what is possible, for options that this device or this installation cannot do."""
        options = options or TrainingOptions()
        self._config, self._samples, self._validation = config, samples, validation
        self._device = torch.device(device)
        self._layout = layout_of(config.model)
        self._owned = tuple(sorted(owned))
        stored = options.stored or ("fp32" if self._device.type == "cpu" else "bf16")
        self._model = build_model(
            config.model, base, self._owned, stored, self._device, options.stored_on, options.backend
        )
        if options.activation_checkpointing:
            checkpoint_activations(self._model)
        named = self._model.named_modules()
        self._blocks = {name: module for name, module in named if isinstance(module, PartitionedExperts)}
        self._optimizer = OwnedOptimizer(self._model, self._layout, config.training, options.optimizer)
        self._micro_batch_size = (
            options.micro_batch_size or config.training.micro_batch_size or config.training.batch_size
        )
        self._skipped_in_a_row = 0
        self._parameters = dict(self._model.named_parameters())

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return self._layout

    @property
    def owned(self) -> tuple[int, ...]:
        """Experts that are trained here, ascending."""
        return self._owned

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, for whoever measures it."""
        return self._model

    def state_bytes(self) -> int:
        """Bytes of weights, gradients, moments and stored experts as tensors; activations are not among them."""
        trained: int = sum(tensor.nbytes for tensor in self._model.parameters())
        stored: int = sum(tensor.nbytes for block in self._blocks.values() for tensor in block.stored_tensors())
        return 2 * trained + stored + self._optimizer.state_bytes()

    def load_base(self, base: State) -> None:
        """Set all local weights to the base (flat float32 `[layout.size]`)."""
        for group in self._layout.groups:
            self._write(group, base[group.start : group.stop])

    def assign(self, owned: tuple[int, ...], base: State) -> None:
        """Train these experts from now on. A new one starts from its base rows, without moments."""
        if tuple(sorted(owned)) == self._owned:
            return
        self._optimizer.zero_grad()
        self._owned = tuple(sorted(owned))
        for name, block in self._blocks.items():
            block.assign(self._owned, partial(exact_expert, base, self._layout, name))
        self._optimizer.regroup(self._model)
        self._parameters = dict(self._model.named_parameters())

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Do the phase's steps, or fewer when `should_stop` or when the slices have no more whole batch.

        Raises UserError after many steps in a row, over phases too, whose loss or gradient was not finite.
        """
        started = time.perf_counter()
        if phase.first_step == 0:
            self._optimizer.skip_ramps()
        self._optimizer.average_over(phase.averaged_peers)
        totals = _Totals(len(self._blocks), self._config.model.moe_num_experts, self._device)
        schedule = phase.training or self._config.training
        planned = min(phase.steps, sum(map(len, phase.slices)) // self._config.training.batch_size)
        batches = read_ahead(self._read_batch, self._batch_slices(phase, planned))
        done = 0
        self._model.train()
        try:
            while done < planned and not should_stop():
                campaign_step = phase.first_step + phase.campaign_steps * done / phase.steps
                self._step(next(batches), learning_rate(campaign_step, schedule), totals)
                done += 1
                self._stop_if_broken()
                on_step(done, totals.tokens / (time.perf_counter() - started))
        finally:
            batches.close()
        _, untrained = split_samples(phase.slices, done * self._config.training.batch_size)
        seconds = time.perf_counter() - started
        flops = totals.tokens * training_flops_per_token(
            self._config.model, self._config.training.sequence_length, self._owned
        )
        report = totals.report(done, self._owned, seconds, untrained, flops / seconds, peak_flops(device_name(self._device)))
        self._log(report)
        return report

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> State:
        """A float32 copy of the local weights `[start, stop)` of a group that is trained here; all of it by default."""
        values = np.empty((group.size if stop is None else stop) - start, np.float32)
        for place, weights in self._trained(group, start, start + values.size):
            torch.from_numpy(values[place]).copy_(weights)
        return values

    def add(self, group: Group, delta: State, start: int = 0) -> None:
        """local += delta (float32) on a group that is trained here, from element `start` on."""
        for place, weights in self._trained(group, start, start + delta.size):
            weights.add_(_tensor(delta[place]).to(self._device))

    def refresh(self, group: Group, values: State) -> None:
        """Set a group that is not trained here (a foreign expert) to these values."""
        if group.expert is None or group.expert in self._owned:
            raise ValueError(f"{group.name} is trained here; only add() changes it")
        self._write(group, values)

    def validation_loss(self) -> float:
        """Mean cross-entropy per token of the current local weights on the campaign's held-out text; NaN when it has none."""
        if self._validation is None:
            return float("nan")
        samples = self._validation.read_spread(self._config.evaluation.max_samples)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._model.eval()
        with torch.no_grad(), self._autocast():
            for chunk in self._micro_batches(samples):
                hidden = self._model.base_model(input_ids=chunk, use_cache=False).last_hidden_state
                total += next_token_loss(self._model, hidden, chunk).cross_entropy * len(chunk)
        return float(total) / len(samples)

    def optimizer_state(self) -> dict[str, Source]:
        """Moments and whatever else a restart needs, by name; read before the next step, which changes them."""
        return {name: _source(tensor) for name, tensor in self._optimizer.tensors().items()}

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Undo of `optimizer_state`, for the same owned experts; entries that do not fit are ignored."""
        self._optimizer.load_state(state)

    def _step(self, samples: Samples, rate: float, totals: _Totals) -> None:
        step = _Totals(len(self._blocks), self._config.model.moe_num_experts, self._device)
        for chunk in self._micro_batches(samples):
            with self._autocast():
                losses = forward_losses(self._model, list(self._blocks.values()), chunk, self._config.training)
            (losses.total * (len(chunk) / len(samples))).backward()  # type: ignore[no-untyped-call]
            step.add_pass(chunk.numel(), losses.cross_entropy, losses.auxiliary, self._blocks.values())
        if len(samples) == 0:
            return
        if self._optimizer.step(rate, step.losses):
            totals.add(step)
            self._skipped_in_a_row = 0
        else:
            totals.skipped += 1
            self._skipped_in_a_row += 1

    def _stop_if_broken(self) -> None:
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"training on {self._device}: loss or gradients were not finite in {self._skipped_in_a_row} steps in a row; "
                "this peer stops and sends nothing of the phase; start it again on its run-dir, and if that repeats while "
                "others train well, check this machine's memory and device, else lower training.learning_rate"
            )

    def _log(self, report: PhaseReport) -> None:
        """One line a phase: steps, speed, and what share of the device's peak that is, where the device is known."""
        utilisation = "" if math.isnan(report.mfu) else f", {100 * report.mfu:.1f} % MFU"
        logger.debug(
            "trained %d steps: %.0f tokens/s, %.3g TFLOP/s%s",
            report.steps, report.tokens / report.seconds, report.flops_per_second / 1e12, utilisation,
        )

    def _batch_slices(self, phase: Phase, steps: int) -> Iterator[tuple[Interval, ...]]:
        rest = phase.slices
        for _ in range(steps):
            batch, rest = split_samples(rest, self._config.training.batch_size)
            yield batch

    def _read_batch(self, slices: tuple[Interval, ...]) -> Samples:
        samples = np.concatenate([self._samples.read(interval) for interval in slices])
        if self._config.training.instance_filter:
            samples = samples[~is_repetitive(samples)]
        return samples

    def _micro_batches(self, samples: Samples) -> Iterator[Tensor]:
        for start in range(0, len(samples), self._micro_batch_size):
            chunk = torch.from_numpy(samples[start : start + self._micro_batch_size])
            if self._device.type == "cuda":
                chunk = chunk.pin_memory()
            yield chunk.to(self._device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda")

    def _trained(self, group: Group, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Local weights of the elements `[start, stop)` of a group: flat views, and where among these elements each stands."""
        if group.expert is not None and group.expert not in self._owned:
            raise ValueError(f"{group.name} is not trained here; owned experts: {self._owned}")
        begin, end, tensors = group.start + start, group.start + stop, self._layout.tensors_of(group)
        for placed in tensors[bisect.bisect_right(tensors, begin, key=lambda placed: placed.stop) :]:
            if placed.start >= end:
                break
            a, b = max(begin, placed.start), min(end, placed.stop)
            weights = self._parameters[placed.spec.name].detach().view(-1)
            yield slice(a - begin, b - begin), weights[a - placed.start : b - placed.start]

    def _write(self, group: Group, values: State) -> None:
        if group.expert is None or group.expert in self._owned:
            for start in range(0, group.size, COPIED_ELEMENTS):
                stop = min(start + COPIED_ELEMENTS, group.size)
                for place, weights in self._trained(group, start, stop):
                    weights.copy_(_tensor(values[start:stop][place]))
            return
        for placed in self._layout.tensors_of(group):
            expert, _, matrix = placed.spec.name.rpartition(".")
            block, _, _ = expert.rpartition(".")
            flat = _tensor(values[placed.start - group.start : placed.stop - group.start])
            self._blocks[block].write_foreign(group.expert, matrix, flat.view(placed.spec.shape))


class _Totals:
    """Sums over forward passes; losses and routing stay on the device until the report."""

    def __init__(self, layers: int, num_experts: int, device: torch.device):
        self.tokens = 0
        self.skipped = 0
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Cross-entropy and auxiliary loss, each times tokens."""
        self.assignments = torch.zeros(layers, num_experts, dtype=torch.int64, device=device)

    def add_pass(self, tokens: int, cross_entropy: Tensor, auxiliary: Tensor, blocks: Any) -> None:
        self.tokens += tokens
        self.losses += torch.stack((cross_entropy, auxiliary)) * tokens
        self.assignments += torch.stack([block.routed for block in blocks])

    def add(self, other: _Totals) -> None:
        self.tokens += other.tokens
        self.losses += other.losses
        self.assignments += other.assignments

    def report(
        self, steps: int, owned: tuple[int, ...], seconds: float, untrained: tuple[Interval, ...], flops_per_second: float,
        peak: float | None,
    ) -> PhaseReport:
        cross_entropy, auxiliary = (self.losses / self.tokens).tolist() if self.tokens else (float("nan"), float("nan"))
        assignments = tuple(tuple(layer) for layer in self.assignments.tolist())
        routed = tuple(count if e in owned else 0 for e, count in enumerate(map(sum, zip(*assignments, strict=True))))
        return PhaseReport(
            steps, self.tokens, routed, cross_entropy, auxiliary, seconds, untrained, self.skipped, flops_per_second,
            mfu=flops_per_second / peak if peak else math.nan, assignments=assignments,
        )


def device_name(device: torch.device) -> str:
    """What the driver calls the card; "cpu" for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make layers compute their activations again in the backward pass instead of keeping them.

    Non-reentrant, because the reentrant form drops the gradient of the router's auxiliary losses.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _tensor(values: State) -> Tensor:
    """Without a copy where the array is writable."""
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _source(tensor: Tensor) -> Source:
    """A tensor, perhaps on a device, that is copied piece by piece."""
    return Source(
        torch.empty(0, dtype=tensor.dtype).numpy().dtype, tuple(tensor.shape),
        lambda: (piece.cpu().numpy() for piece in torch.split(tensor.reshape(-1), COPIED_ELEMENTS)),
    )
