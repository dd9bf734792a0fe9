"""Local training steps on a torch model."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.config.model import ModelSection
from spes_p2p.errors import Diverged, UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, layout_of
from spes_p2p.model.flops import peak_flops, training_flops_per_token
from spes_p2p.model.sharding import rank_that_steps
from spes_p2p.storage.tensor_file import Source
from spes_p2p.training.batches import Reader, Samples, batches_of, split_samples
from spes_p2p.training.compiled import TOLERANCE_BF16, forms_of, keep_what_helps, trial_of
from spes_p2p.training.device import autocast, bound_memory, device_name, selected, sent_to
from spes_p2p.training.documents import Documents, is_crossed
from spes_p2p.training.flat_model import COPY_ELEMENTS, FlatModel
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.losses import forward_losses, next_token_loss
from spes_p2p.training.optimizer import OwnedOptimizer, numpy_dtype
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.ranks import ALONE, Begin, Command, End, Ranks, Step
from spes_p2p.training.rates import learning_rate
from spes_p2p.training.shards import Replicas, Shards, home_of
from spes_p2p.training.totals import Totals

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_SKIPS = 10
"""Abort after this many consecutive non-finite steps."""


class TorchTrainer(FlatModel):
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
        bound_memory(torch.device(device), options.memory_bytes)
        self._is_divided = is_divided = options.sharded and ranks.count > 1
        shares = options.stored_on == "host" and ranks.count > 1
        super().__init__(
            config.model, base, owned, device, options,
            partial(home_of, ranks, layout_of(config.model)) if is_divided else lambda layer: "device",
            "host" if not shares else "shared" if ranks.rank == 0 else "absent",
        )
        self._optimizer = OwnedOptimizer(
            self.model, self.layout, config.training, options.optimizer,
            lambda name: is_divided and rank_that_steps(self.layout, ranks.count, name) != ranks.rank,
        )
        self._held = (Shards if is_divided else Replicas)(self, self._optimizer, ranks, shares)
        with selected(self.device):
            if is_masked and eos_token_id is not None and is_crossed(self.model.eval(), eos_token_id, self.device):
                raise UserError(
                    f"training.intra_document_masking = true: with transformers {transformers.__version__}, attention of "
                    f"{config.model.architecture} crosses documents here; install the version in constraints.txt"
                )
        if options.activation_checkpointing or is_divided:
            checkpoint_activations(self.model)
        self._micro_batch_size = (
            options.micro_batch_size or config.training.micro_batch_size or config.training.batch_size
        )
        self._is_tuned = not options.compiles or self.device.type == "cpu" or is_divided
        self._consecutive_skips = 0

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients, moments and stored experts, without activations."""
        trained: int = sum(tensor.nbytes for tensor in self.model.parameters())
        stored: int = sum(tensor.nbytes for block in self.blocks.values() for tensor in block.stored_tensors())
        return 2 * trained + stored + self._optimizer.state_bytes()

    def assign(self, owned: tuple[int, ...], base: State) -> None:
        """See Trainer."""
        if tuple(sorted(owned)) != self.owned:
            self._optimizer.zero_grad()
            super().assign(owned, base)
            self._optimizer.regroup(self.model)

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Run the phase's steps, or fewer if `should_stop` returns True or the slices run out of complete batches.

        Raises Diverged after MAX_CONSECUTIVE_SKIPS non-finite steps, counted across phases; UserError if a rank ends or fails,
        and what reading samples raises. Then this rank has all weights and moments again, unless a rank ended or failed.
        """
        self._tune()
        started = time.perf_counter()
        if phase.first_step == 0:
            self._optimizer.skip_ramps()
        self._optimizer.average_over(phase.averaged_peers)
        if phase.done == 0 and self._config.admission == "open":
            self._optimizer.forget_momentum()  # an auditor would have to take the trainer's word for it
        totals = self._no_totals()
        schedule = phase.training or self._config.training
        planned = min(phase.steps - phase.done, sum(map(len, phase.slices)) // self._config.training.batch_size)
        assert self._samples is not None
        batches = batches_of(self._samples, phase.slices, planned, self._config.training)
        done = 0
        self.model.train()
        with selected(self.device):
            self._begin_on_all_ranks(phase.averaged_peers)
        try:
            while done < planned and not should_stop():
                campaign_step = phase.first_step + phase.campaign_steps * (phase.done + done) / phase.steps
                step = Step(next(batches), learning_rate(campaign_step, schedule))
                self._ranks.tell(step)
                with selected(self.device), self._ranks.together():
                    self._step(step, totals)
                done += 1
                self._abort_if_diverged()
                on_step(done, totals.tokens / (time.perf_counter() - started))
        finally:
            batches.close()
            with selected(self.device):
                self._end_on_all_ranks()
        _, untrained = split_samples(phase.slices, done * self._config.training.batch_size)
        return self._report(totals, done, time.perf_counter() - started, untrained)

    def _report(self, totals: Totals, steps: int, seconds: float, untrained: tuple[Interval, ...]) -> PhaseReport:
        model, length = self._config.model, self._config.training.sequence_length
        flops_per_second = totals.tokens * training_flops_per_token(model, length, self.owned) / seconds
        peak = peak_flops(device_name(self.device))
        report = totals.report(
            steps, self.owned, seconds, untrained, flops_per_second, peak and peak * self._ranks.count
        )
        utilisation = "" if math.isnan(report.mfu) else f", {100 * report.mfu:.1f} % MFU"
        logger.debug(
            "trained %d steps: %.0f tokens/s, %.3g TFLOP/s%s",
            steps, report.tokens / seconds, flops_per_second / 1e12, utilisation,
        )
        return report

    def follow(self, command: Command) -> None:
        """Do this rank's part of what rank 0 begins (`ranks.py`)."""
        if isinstance(command, Step):
            self._step(command, self._no_totals())
            return
        if isinstance(command, End):
            self._held.end()
            return
        self.model.train()
        self.assign(command.owned, no_base(self._config.model))
        self._eos_token_id = command.eos_token_id
        self._optimizer.average_over(command.averaged_peers)
        self._optimizer.become(command.ages, self._held.moments_here(command.moments))
        self._held.begin()
        self._tune()

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
        self.model.eval()
        with torch.no_grad(), selected(self.device), autocast(self.device):
            for start in range(0, len(samples), self._micro_batch_size):
                ids = sent_to(self.device, samples[start : start + self._micro_batch_size])
                positions = documents.positions(ids) if documents else None
                hidden = self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                for i in range(len(ids)):
                    loss = next_token_loss(self.model, hidden[i : i + 1], ids[i : i + 1], documents=documents).cross_entropy
                    losses.append(loss.double())
        return torch.stack(losses).cpu().numpy()

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        """See Trainer."""
        return {name: _source(tensor) for name, tensor in self._optimizer.tensors(in_full).items()}

    def load_optimizer_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See Trainer. Steps that were not finite before count no longer: they may have been another's, in an audit."""
        self._optimizer.load_state(state)
        self._consecutive_skips = 0

    def _tune(self) -> None:
        """Before the first step on a GPU, take the forms of the layers outside the experts that help (`compiled.py`)."""
        if self._is_tuned:
            return
        self._is_tuned = True
        size = (self._micro_batch_size, self._config.training.sequence_length)
        generator = torch.Generator(self.device).manual_seed(0)
        ids = torch.randint(self._config.model.vocab_size, size, device=self.device, generator=generator)
        documents = None
        if self._eos_token_id is not None:
            ids[:, size[1] // 2] = self._eos_token_id
            documents = Documents(self._eos_token_id, 0)
        self.model.train()
        with selected(self.device):
            forms, attempt = forms_of(self.model, documents is not None), partial(
                trial_of, self.model, ids, documents, partial(autocast, self.device)
            )
            keep_what_helps(forms, attempt, TOLERANCE_BF16)

    def _begin_on_all_ranks(self, averaged_peers: float) -> None:
        if self._ranks.count > 1:
            ages, shapes = self._optimizer.ages(), self._optimizer.shapes()
            self._ranks.tell(Begin(self.owned, averaged_peers, ages, shapes, self._eos_token_id))
            self._held.begin()

    def _end_on_all_ranks(self) -> None:
        if self._ranks.count > 1:
            self._ranks.tell(End())
            self._held.end()

    def _no_totals(self) -> Totals:
        return Totals(len(self.blocks), self._config.model.moe_num_experts, self.device)

    def _step(self, command: Step, totals: Totals) -> None:
        samples = command.samples
        step = self._no_totals()
        documents = self._documents_of(samples)
        for chunk in self._micro_batches(samples):
            self._pass(chunk, len(chunk) / len(samples), step, documents)
        if len(samples) == 0:
            return
        step.tokens = samples.size
        self._ranks.sum(step.losses)
        self._held.sum_gradients()
        if self._optimizer.step(command.rate, step.losses, self._held.over_ranks):
            self._held.stepped()
            totals.add(step)
            self._consecutive_skips = 0
        else:
            totals.skipped += 1
            self._consecutive_skips += 1

    def _pass(self, chunk: Tensor, share: float, step: Totals, documents: Documents | None) -> None:
        """Add the gradients of these samples, which are the part `share` of the step's, and their losses."""
        if len(chunk) == 0:  # the other ranks have the rest of the batch
            nothing = self._of_no_sample() if self._is_divided else None
            step.assignments += self._ranks.sum(torch.zeros_like(step.assignments))
            if nothing is not None:
                self._held.backward(nothing)
            return
        with autocast(self.device):
            losses = forward_losses(
                self.model, list(self.blocks.values()), chunk, self._config.training, share, self._ranks.sum, documents
            )
        self._held.backward(losses.total)
        step.add_pass(chunk.numel(), losses)

    def _of_no_sample(self) -> Tensor:
        """Return a loss whose gradients are 0, for a rank that only sends and receives layers in a pass."""
        ids = torch.zeros(1, self._config.training.sequence_length, dtype=torch.int64, device=self.device)
        with autocast(self.device):
            hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return 0 * hidden.float().sum()

    def _abort_if_diverged(self) -> None:
        if self._consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise Diverged(
                f"training on {self.device}: loss or gradient not finite in {self._consecutive_skips} consecutive steps; "
                "this peer stops and sends nothing of the phase; restart it on its run-dir, and if this repeats while other "
                "peers train well, check this machine's memory and device, otherwise lower training.learning_rate"
            )

    def _documents_of(self, samples: Samples) -> Documents | None:
        if self._eos_token_id is None:
            return None
        return Documents(self._eos_token_id, int(np.count_nonzero(samples[:, :-1] != self._eos_token_id)))

    def _micro_batches(self, samples: Samples) -> Iterator[Tensor]:
        """Yield this rank's part of each pass; the ranks divide the samples of a pass as equally as possible."""
        of_all_ranks = self._micro_batch_size * self._ranks.count
        for start in range(0, len(samples), of_all_ranks):
            parts = np.array_split(samples[start : start + of_all_ranks], self._ranks.count)
            yield sent_to(self.device, parts[self._ranks.rank])


def no_base(model: ModelSection) -> State:
    """Return a base of zeros that takes no memory, for a follower: rank 0 sends its weights."""
    return np.broadcast_to(np.float32(0), layout_of(model).size)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing. Non-reentrant, because the reentrant form drops the gradient of the router's losses."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _source(tensor: Tensor) -> Source:
    """Wrap a tensor, possibly on a GPU or in 8 bits, as a source that is copied in chunks."""
    if hasattr(tensor, "codes"):
        return Source(
            np.dtype(np.float32), tuple(tensor.shape),
            lambda: (piece.cpu().numpy() for piece in torch.split(tensor.dequantize().float().reshape(-1), COPY_ELEMENTS)),
        )
    return Source(
        numpy_dtype(tensor), tuple(tensor.shape),
        lambda: (piece.cpu().numpy() for piece in torch.split(tensor.reshape(-1), COPY_ELEMENTS)),
    )
