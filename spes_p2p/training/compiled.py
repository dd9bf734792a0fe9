"""Other forms of what is outside the experts, each used only after it agreed with the plain form on this device.

A trial runs forward and backward passes on one micro-batch, with experts that return 0: rounding would otherwise send tokens to
other experts, which hides what it should show. The output, the gradient of the input and the norms of the weights' gradients
are compared. A form that fails, differs or is no faster is undone; the step then runs as it would without this module.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from spes_p2p.errors import first_line
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training.documents import Documents

logger = logging.getLogger(__name__)

TOLERANCE, TOLERANCE_BF16 = 1e-3, 5e-2
"""Bounds the relative difference of a trial's tensors. Fused operations round less often than bf16 ones in a row."""
TIMED_PASSES = 3
LEAST_GAIN = 1.02
"""Below this, a form is not taken as faster."""


@dataclass(frozen=True)
class Form:
    """Another form of the same computation."""

    name: str
    use: Callable[[], object]
    undo: Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """What one form computed, and how long a pass took."""

    tensors: tuple[Tensor, ...]
    seconds: float

    def difference(self, other: Trial) -> float:
        """Return the largest relative difference of a tensor, by norm; NaN if one is not finite."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return float(torch.stack([(a - b).norm() / b.norm().clamp(min=1e-30) for a, b in pairs]).max())


def keep_what_helps(forms: Sequence[Form], attempt: Callable[[], Trial], tolerance: float) -> None:
    """Try the forms in order, each on top of those that were kept; log one line for each."""
    plain = attempt()
    fastest = plain.seconds
    for form in forms:
        try:
            form.use()
            trial = attempt()
            difference, gain = trial.difference(plain), fastest / trial.seconds
            is_kept = difference <= tolerance and gain >= LEAST_GAIN
            found = f"relative difference {difference:.1e}, {gain:.2f} times as fast"
        except Exception as error:  # compilers raise their own types
            is_kept, found = False, first_line(error)
        if is_kept:
            fastest = trial.seconds
            # What does not compile in another shape, such as a last batch of fewer samples, runs as it is.
            torch._dynamo.config.suppress_errors = True
        else:
            form.undo()
        logger.info("%s: %s (%s)", form.name, "used" if is_kept else "not used", found)


def forms_of(model: PreTrainedModel, is_masked: bool) -> list[Form]:
    """Return what a GPU may compute faster: FlashAttention, with masks between documents FlexAttention, compiled layers.

    FlashAttention is tried where its package is installed: transformers would otherwise take the kernel from the Hub. It keeps
    documents apart in passes of one sample only; in others the trial finds the difference.
    """
    parts = [*_outside_experts(model)]

    def compile_them() -> None:
        for part in parts:
            part.compile(dynamic=False)

    def take_back() -> None:
        for part in parts:
            part._compiled_call_impl = None

    forms = [attention(model, "FlashAttention", "flash_attention_2")] if is_flash_attn_2_available() else []
    if is_masked:
        forms.append(attention(model, "FlexAttention", "flex_attention"))
    return [*forms, Form("compiled layers", compile_them, take_back)]


def attention(model: PreTrainedModel, name: str, implementation: str) -> Form:
    """Return the form with this attention of transformers; undone, the model has the one that it had before."""
    before: list[str] = []

    def use() -> None:
        before.append(model.config._attn_implementation)
        model.set_attn_implementation(implementation)

    return Form(name, use, lambda: model.set_attn_implementation(before.pop()))


def trial_of(
    model: PreTrainedModel, ids: Tensor, documents: Documents | None, autocast: Callable[[], torch.autocast]
) -> Trial:
    """Return what the model without its experts computes for samples `[B, S]`. Leaves no gradients."""
    generator = torch.Generator(ids.device).manual_seed(0)
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    weights = torch.randn(inputs.shape, generator=generator, device=ids.device)
    positions = documents.positions(ids) if documents else None
    seconds = []
    with _without_experts(model):
        for _ in range(1 + TIMED_PASSES):
            model.zero_grad()
            inputs.grad = None
            started = _clock(ids.device)
            with autocast():
                output = model.base_model(inputs_embeds=inputs, position_ids=positions, use_cache=False).last_hidden_state
            (output.float() * weights).sum().backward()
            seconds.append(_clock(ids.device) - started)
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    assert inputs.grad is not None
    return Trial((output.detach(), inputs.grad, norms), min(seconds[1:]))


def _outside_experts(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the parts of each layer that hold no experts."""
    for layer in model.base_model.layers:
        for part in layer.children():
            if not any(isinstance(module, PartitionedExperts) for module in part.modules()):
                yield part


@contextlib.contextmanager
def _without_experts(model: PreTrainedModel) -> Iterator[None]:
    blocks = [module for module in model.modules() if isinstance(module, PartitionedExperts)]
    for block in blocks:
        block.forward = lambda hidden, index, weights: torch.zeros_like(hidden)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
