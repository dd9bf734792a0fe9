"""Local training steps on a torch model, whose parameters are exchanged with the flat state."""

from __future__ import annotations

import bisect
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, build_model, exact_expert, layout_of
from spes_p2p.model.flops import peak_flops, training_flops_per_token
from spes_p2p.model.layout import Group, Layout
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.storage.tensor_file import Source
from spes_p2p.storage.threads import ahead
from spes_p2p.training.batches import split_samples
from spes_p2p.training.compiled import TOLERANCE_BF16, forms_of, keep_what_helps, trial_of
from spes_p2p.training.documents import Documents, is_crossed
from spes_p2p.training.filter import is_repetitive
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.losses import Losses, forward_losses, next_token_loss
from spes_p2p.training.optimizer import OwnedOptimizer
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.ranks import ALONE, Begin, Ranks, Step
from spes_p2p.training.rates import learning_rate

logger = logging.getLogger(__name__)

Samples = npt.NDArray[np.int64]

MAX_CONSECUTIVE_SKIPS = 10
"""Abort after this many consecutive non-finite steps."""
READ_AHEAD = 2
"""Batches read while one is trained on."""
COPY_ELEMENTS = 2**20
"""Copy chunk size, in elements."""


class Reader(Protocol):
    """Source of samples `[n, sequence_length]` (int64)."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""

    def read(self, interval: Interval) -> Samples:
        """Return the samples at positions of an epoch's shuffled order."""

    def read_spread(self, count: int) -> Samples:
        """Return up to `count` samples spread over the files; deterministic."""


class TorchTrainer:
    """Trains shared weights, routers and owned experts on one device, or as one of several ranks. Not thread-safe.

    A step whose loss or gradient is not finite changes neither weights nor moments. Its samples count as trained, so that they
    are not handed out again; its tokens, routing and loss do not count.
    """

    def __init__(
        self,
        config: CampaignConfig,
        base: State,
        owned: tuple[int, ...],
        samples: Reader | None,
        validation: Reader | None = None,
        device: str | torch.device = "cpu",
        options: TrainingOptions | None = None,
        ranks: Ranks = ALONE,
        eos_token_id: int | None = None,
    ):
        """Raises UserError, naming the alternatives, for options that this device or installation does not support.

        `ranks`: `train` of the first uses all of them; the others only do what `follow` is told, and need no samples.
        `eos_token_id`: ends each document of the samples, where `training.intra_document_masking` asks for it.
        """
        options = options or TrainingOptions()
        is_masked = config.training.intra_document_masking
        if is_masked and eos_token_id is None and ranks.rank == 0:
            raise UserError("training.intra_document_masking = true: unknown here which token ends a document; leave it out")
        self._eos_token_id = eos_token_id if is_masked else None
        self._config, self._samples, self._validation, self._ranks = config, samples, validation, ranks
        self._device = torch.device(device)
        self._layout = layout_of(config.model)
        self._owned = tuple(sorted(owned))
        stored = options.stored or ("fp32" if self._device.type == "cpu" else "bf16")
        with self._selected():
            self._model = build_model(
                config.model, base, self._owned, stored, self._device, options.stored_on, options.backend
            )
            if is_masked and eos_token_id is not None and is_crossed(self._model.eval(), eos_token_id, self._device):
                raise UserError(
                    f"training.intra_document_masking = true: with transformers {transformers.__version__}, attention of "
                    f"{config.model.architecture} crosses documents here; install the version in constraints.txt"
                )
        if options.activation_checkpointing:
            checkpoint_activations(self._model)
        named = self._model.named_modules()
        self._blocks = {name: module for name, module in named if isinstance(module, PartitionedExperts)}
        self._optimizer = OwnedOptimizer(self._model, self._layout, config.training, options.optimizer)
        self._micro_batch_size = (
            options.micro_batch_size or config.training.micro_batch_size or config.training.batch_size
        )
        self._is_tuned = not options.compiles or self._device.type == "cpu"
        self._consecutive_skips = 0
        self._parameters = dict(sorted(self._model.named_parameters()))

    @property
    def layout(self) -> Layout:
        """See Trainer."""
        return self._layout

    @property
    def owned(self) -> tuple[int, ...]:
        """See Trainer."""
        return self._owned

    @property
    def model(self) -> PreTrainedModel:
        """The model, for measurements."""
        return self._model

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients, moments and stored experts, without activations."""
        trained: int = sum(tensor.nbytes for tensor in self._model.parameters())
        stored: int = sum(tensor.nbytes for block in self._blocks.values() for tensor in block.stored_tensors())
        return 2 * trained + stored + self._optimizer.state_bytes()

    def load_base(self, base: State) -> None:
        """See Trainer."""
        for group in self._layout.groups:
            self.write(group, base[group.start : group.stop])

    def assign(self, owned: tuple[int, ...], base: State) -> None:
        """See Trainer."""
        if tuple(sorted(owned)) == self._owned:
            return
        self._optimizer.zero_grad()
        self._owned = tuple(sorted(owned))
        with self._selected():
            for name, block in self._blocks.items():
                block.assign(self._owned, partial(exact_expert, base, self._layout, name))
        self._optimizer.regroup(self._model)
        self._parameters = dict(sorted(self._model.named_parameters()))

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Run the phase's steps, or fewer if `should_stop` returns True or the slices run out of complete batches.

        Raises UserError after MAX_CONSECUTIVE_SKIPS non-finite steps, counted across phases, and if another rank ends.
        """
        self._tune()
        started = time.perf_counter()
        if phase.first_step == 0:
            self._optimizer.skip_ramps()
        self._optimizer.average_over(phase.averaged_peers)
        totals = _Totals(len(self._blocks), self._config.model.moe_num_experts, self._device)
        schedule = phase.training or self._config.training
        planned = min(phase.steps - phase.done, sum(map(len, phase.slices)) // self._config.training.batch_size)
        batches = ahead(self._read_batch, self._batch_slices(phase, planned), 1, READ_AHEAD)
        done = 0
        self._model.train()
        with self._selected():
            self._begin_on_all_ranks(phase.averaged_peers)
        try:
            while done < planned and not should_stop():
                campaign_step = phase.first_step + phase.campaign_steps * (phase.done + done) / phase.steps
                step = Step(next(batches), learning_rate(campaign_step, schedule))
                self._ranks.tell(step)
                with self._selected():
                    self._step(step, totals)
                done += 1
                self._abort_if_diverged()
                on_step(done, totals.tokens / (time.perf_counter() - started))
        finally:
            batches.close()
        self._ranks.check()
        _, untrained = split_samples(phase.slices, done * self._config.training.batch_size)
        seconds = time.perf_counter() - started
        flops = totals.tokens * training_flops_per_token(
            self._config.model, self._config.training.sequence_length, self._owned
        )
        peak = peak_flops(device_name(self._device))
        peak = peak and peak * self._ranks.count
        report = totals.report(done, self._owned, seconds, untrained, flops / seconds, peak)
        utilisation = "" if math.isnan(report.mfu) else f", {100 * report.mfu:.1f} % MFU"
        logger.debug(
            "trained %d steps: %.0f tokens/s, %.3g TFLOP/s%s",
            report.steps, report.tokens / report.seconds, report.flops_per_second / 1e12, utilisation,
        )
        return report

    def follow(self, command: Begin | Step) -> None:
        """Do this rank's part of what rank 0 begins (`ranks.py`)."""
        if isinstance(command, Step):
            self._step(command, _Totals(len(self._blocks), self._config.model.moe_num_experts, self._device))
            return
        self._model.train()
        self.assign(command.owned, no_base(self._config.model))
        self._eos_token_id = command.eos_token_id
        self._optimizer.average_over(command.averaged_peers)
        self._optimizer.become(command.ages, command.moments)
        self._share_state()
        self._tune()

    def read(self, group: Group, start: int = 0, stop: int | None = None) -> State:
        """See Trainer."""
        values = np.empty((group.size if stop is None else stop) - start, np.float32)
        for place, weights in self._trained_views(group, start, start + values.size):
            torch.from_numpy(values[place]).copy_(weights)
        return values

    def add(self, group: Group, delta: State, start: int = 0) -> None:
        """See Trainer."""
        for place, weights in self._trained_views(group, start, start + delta.size):
            weights.add_(_tensor(delta[place]).to(self._device))

    def refresh(self, group: Group, values: State) -> None:
        """See Trainer."""
        if group.expert is None or group.expert in self._owned:
            raise ValueError(f"{group.name} is trained here; only add() changes it")
        self.write(group, values)

    def write(self, group: Group, values: State) -> None:
        """See Trainer."""
        if group.expert is None or group.expert in self._owned:
            for start in range(0, group.size, COPY_ELEMENTS):
                stop = min(start + COPY_ELEMENTS, group.size)
                for place, weights in self._trained_views(group, start, stop):
                    weights.copy_(_tensor(values[start:stop][place]))
            return
        for placed in self._layout.tensors_of(group):
            expert, _, matrix = placed.spec.name.rpartition(".")
            block, _, _ = expert.rpartition(".")
            flat = _tensor(values[placed.start - group.start : placed.stop - group.start])
            self._blocks[block].write_foreign(group.expert, matrix, flat.view(placed.spec.shape))

    def validation_loss(self) -> float:
        """See Trainer."""
        if self._validation is None:
            return float("nan")
        samples = self._validation.read_spread(self._config.evaluation.max_samples)
        return float(self.losses_of(samples).mean())

    def held_out_losses(self, seed: int, count: int) -> npt.NDArray[np.float64]:
        """See Trainer."""
        if self._validation is None:
            return np.zeros(0)
        there = self._validation.num_samples
        positions = random.Random(seed).sample(range(there), min(count, there))
        samples = [self._validation.read(Interval(0, position, position + 1)) for position in positions]
        return self.losses_of(np.concatenate(samples)) if samples else np.zeros(0)

    def losses_of(self, samples: Samples) -> npt.NDArray[np.float64]:
        """Return the mean cross-entropy of each sample."""
        losses, documents = [], self._documents_of(samples)
        self._model.eval()
        with torch.no_grad(), self._selected(), self._autocast():
            for start in range(0, len(samples), self._micro_batch_size):
                ids = self._to_device(samples[start : start + self._micro_batch_size])
                positions = documents.positions(ids) if documents else None
                hidden = self._model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                for i in range(len(ids)):
                    loss = next_token_loss(self._model, hidden[i : i + 1], ids[i : i + 1], documents=documents).cross_entropy
                    losses.append(loss.double())
        return torch.stack(losses).cpu().numpy()

    def optimizer_state(self) -> dict[str, Source]:
        """See Trainer."""
        return {name: _source(tensor) for name, tensor in self._optimizer.tensors().items()}

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See Trainer."""
        self._optimizer.load_state(state)

    def _tune(self) -> None:
        """Before the first step on a GPU, take the forms of the layers outside the experts that help (`compiled.py`)."""
        if self._is_tuned:
            return
        self._is_tuned = True
        size = (self._micro_batch_size, self._config.training.sequence_length)
        generator = torch.Generator(self._device).manual_seed(0)
        ids = torch.randint(self._config.model.vocab_size, size, device=self._device, generator=generator)
        documents = None
        if self._eos_token_id is not None:
            ids[:, size[1] // 2] = self._eos_token_id
            documents = Documents(self._eos_token_id, 0)
        self._model.train()
        with self._selected():
            forms, attempt = forms_of(self._model, documents is not None), partial(
                trial_of, self._model, ids, documents, self._autocast
            )
            keep_what_helps(forms, attempt, TOLERANCE_BF16)

    def _begin_on_all_ranks(self, averaged_peers: float) -> None:
        if self._ranks.count > 1:
            moments = {name: (_dtype(each), tuple(each.shape)) for name, each in self._optimizer.moments().items()}
            self._ranks.tell(Begin(self._owned, averaged_peers, self._optimizer.ages(), moments, self._eos_token_id))
            self._share_state()

    def _share_state(self) -> None:
        """Broadcast everything that a step reads and the next one does not compute: weights, stored experts, moments."""
        for parameter in self._parameters.values():
            self._ranks.broadcast(parameter)
        for block in self._blocks.values():
            block.overwrite_stored(self._ranks.broadcast)
        for _, tensor in sorted(self._optimizer.moments().items()):
            self._ranks.broadcast(tensor)

    def _step(self, command: Step, totals: _Totals) -> None:
        samples = command.samples
        step = _Totals(len(self._blocks), self._config.model.moe_num_experts, self._device)
        documents = self._documents_of(samples)
        for chunk in self._micro_batches(samples):
            self._pass(chunk, len(chunk) / len(samples), step, documents)
        if len(samples) == 0:
            return
        step.tokens = samples.size
        self._ranks.sum(step.losses)
        self._ranks.sum_gradients(self._parameters.values())
        if self._optimizer.step(command.rate, step.losses):
            totals.add(step)
            self._consecutive_skips = 0
        else:
            totals.skipped += 1
            self._consecutive_skips += 1

    def _pass(self, chunk: Tensor, share: float, step: _Totals, documents: Documents | None) -> None:
        """Add the gradients of these samples, which are the part `share` of the step's, and their losses."""
        if len(chunk) == 0:  # the other ranks have the rest of the batch
            step.assignments += self._ranks.sum(torch.zeros_like(step.assignments))
            return
        with self._autocast():
            losses = forward_losses(
                self._model, list(self._blocks.values()), chunk, self._config.training, share, self._ranks.sum, documents
            )
        losses.total.backward()  # type: ignore[no-untyped-call]
        step.add_pass(chunk.numel(), losses)

    def _abort_if_diverged(self) -> None:
        if self._consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise UserError(
                f"training on {self._device}: loss or gradient not finite in {self._consecutive_skips} consecutive steps; "
                "this peer stops and sends nothing of the phase; restart it on its run-dir, and if this repeats while other "
                "peers train well, check this machine's memory and device, otherwise lower training.learning_rate"
            )

    def _batch_slices(self, phase: Phase, steps: int) -> Iterator[tuple[Interval, ...]]:
        rest = phase.slices
        for _ in range(steps):
            batch, rest = split_samples(rest, self._config.training.batch_size)
            yield batch

    def _read_batch(self, slices: tuple[Interval, ...]) -> Samples:
        assert self._samples is not None
        samples = np.concatenate([self._samples.read(interval) for interval in slices])
        if self._config.training.instance_filter:
            samples = samples[~is_repetitive(samples)]
        return samples

    def _documents_of(self, samples: Samples) -> Documents | None:
        if self._eos_token_id is None:
            return None
        return Documents(self._eos_token_id, int(np.count_nonzero(samples[:, :-1] != self._eos_token_id)))

    def _micro_batches(self, samples: Samples) -> Iterator[Tensor]:
        """Yield this rank's part of each pass; the ranks divide the samples of a pass as equally as possible."""
        of_all_ranks = self._micro_batch_size * self._ranks.count
        for start in range(0, len(samples), of_all_ranks):
            parts = np.array_split(samples[start : start + of_all_ranks], self._ranks.count)
            yield self._to_device(parts[self._ranks.rank])

    def _to_device(self, samples: Samples) -> Tensor:
        chunk = torch.from_numpy(samples)
        if self._device.type == "cuda":
            chunk = chunk.pin_memory()
        return chunk.to(self._device, non_blocking=True)

    def _selected(self) -> torch.cuda.device:
        """Make a GPU this thread's current one, which pinned memory and kernels of other libraries use."""
        return torch.cuda.device(self._device if self._device.type == "cuda" else -1)

    def _autocast(self) -> torch.autocast:
        # Each matrix is used once in a pass, so a cache would only keep the copies that checkpointing drops.
        is_cuda = self._device.type == "cuda"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_cuda, cache_enabled=False)

    def _trained_views(self, group: Group, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (range within `[start, stop)`, flat view of the local weights) for elements `[start, stop)` of a group."""
        if group.expert is not None and group.expert not in self._owned:
            raise ValueError(f"{group.name} is not trained here; owned experts: {self._owned}")
        begin, end, tensors = group.start + start, group.start + stop, self._layout.tensors_of(group)
        for placed in tensors[bisect.bisect_right(tensors, begin, key=lambda placed: placed.stop) :]:
            if placed.start >= end:
                break
            a, b = max(begin, placed.start), min(end, placed.stop)
            weights = self._parameters[placed.spec.name].detach().view(-1)
            yield slice(a - begin, b - begin), weights[a - placed.start : b - placed.start]


class _Totals:
    """Sums over forward passes. Losses and routing stay on the device until the report."""

    def __init__(self, layers: int, num_experts: int, device: torch.device):
        self.tokens = 0
        self.skipped = 0
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Cross-entropy and auxiliary loss, each multiplied by tokens."""
        self.assignments = torch.zeros(layers, num_experts, dtype=torch.int64, device=device)

    def add_pass(self, tokens: int, losses: Losses) -> None:
        self.losses += torch.stack((losses.cross_entropy, losses.auxiliary)) * tokens
        self.assignments += losses.assignments

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


def no_base(model: ModelSection) -> State:
    """Return a base of zeros that takes no memory, for a follower: rank 0 sends its weights."""
    return np.broadcast_to(np.float32(0), layout_of(model).size)


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing. Non-reentrant, because the reentrant form drops the gradient of the router's losses."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _tensor(values: State) -> Tensor:
    """Convert to a tensor, without a copy if the array is writable."""
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _dtype(tensor: Tensor) -> str:
    """Return the name of numpy's dtype."""
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype.name


def _source(tensor: Tensor) -> Source:
    """Wrap a tensor, possibly on a GPU, as a source that is copied in chunks."""
    return Source(
        np.dtype(_dtype(tensor)), tuple(tensor.shape),
        lambda: (piece.cpu().numpy() for piece in torch.split(tensor.reshape(-1), COPY_ELEMENTS)),
    )
