"""AdamW with state that is saved and restored by parameter: torch's in float32, torchao's with 8-bit moments."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError
from spes_p2p.model.memory import OptimizerKind

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES, SCALES = ".codes", ".scales"
CONVERTED_ELEMENTS = 2**20
"""Elements that are converted to 8 bits at a time, which takes several times their memory; a multiple of torchao's blocks."""

Arrays = dict[str, npt.NDArray[Any]]


def own_share(batches: float, beta1: float) -> float:
    """Return a in [0, 1] for which `a g^2 + (1 - a) m^2` is as noisy as the squared gradient of a batch `batches` times larger.

    g is a batch's gradient, with noise of variance v; m is the first moment, with variance v (1 - beta1) / (1 + beta1); the
    larger batch's gradient has v / batches. The result is 0 if m is noisier than the larger batch.
    """
    moments = (1 - beta1) / (1 + beta1)
    return max(0.0, (1 / batches - moments) / (1 - moments)) if moments < 1 else 1.0


class AdamW:
    """AdamW with float32 moments.

    A group with `batches` > 1 is stepped as if its second moment came from a batch that many times larger: averaging peers'
    updates averages their noise, and dividing by one peer's noise would make steps shorter than those of one large batch.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float):
        # Fused, since the other implementations have temporary memory of the size of a parameter group.
        self.torch_optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def step(self, rates: list[float]) -> None:
        """Apply the gradients with one learning rate per parameter group."""
        self._expect_larger_batches()
        for group, rate in zip(self.torch_optimizer.param_groups, rates, strict=True):
            group["lr"] = self._rate(rate)
        with self._mode():
            self.torch_optimizer.step()

    def state_of(self, parameter: nn.Parameter, in_full: bool = False) -> dict[str, Tensor]:
        """Return a parameter's moments and step count by name, not copies; empty before its first step.

        `in_full`: 8-bit moments undivided, as tensors that `dequantize` makes float32.
        """
        tensors: dict[str, Tensor] = {}
        for key, value in self.torch_optimizer.state.get(parameter, {}).items():
            tensors.update({key: value.detach()} if in_full else self._tensors(key, value))
        return tensors

    def load_state_of(self, parameter: nn.Parameter, arrays: Arrays, device: torch.device) -> bool:
        """Restore `state_of`; return False and change nothing if the arrays do not match this parameter.

        `device`: the parameter's, or main memory for a state that only waits here.
        """
        if "step" not in arrays:
            return False
        state: dict[str, Tensor] = {"step": self._step_count(device, float(arrays["step"]))}
        for key in MOMENTS:
            moment = self._moment(parameter, key, arrays, device)
            if moment is None:
                return False
            state[key] = moment
        self.torch_optimizer.state[parameter] = state
        return True

    def _expect_larger_batches(self) -> None:
        """Correct the second moments of groups with `batches` > 1 so that this step makes them those of the larger batch."""
        for group in self.torch_optimizer.param_groups:
            unexplained = 1 - own_share(group["batches"], group["betas"][0])
            for parameter in group["params"] if unexplained > 0 else ():
                state = self.torch_optimizer.state.get(parameter)
                if state and parameter.grad is not None:
                    state["exp_avg_sq"].add_(_excess(parameter.grad, state, group["betas"]), alpha=-unexplained)

    def _step_count(self, device: torch.device, steps: float) -> Tensor:
        return torch.tensor(steps, device=device)

    def _rate(self, rate: float) -> float | Tensor:
        return rate

    def _mode(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _tensors(self, key: str, value: Any) -> dict[str, Tensor]:
        return {key: value.detach()}

    def _moment(self, parameter: nn.Parameter, key: str, arrays: Arrays, device: torch.device) -> Tensor | None:
        values = arrays.get(key)
        if values is None or values.shape != tuple(parameter.shape):
            return None
        return torch.tensor(values, device=device)


class AdamW8bit(AdamW):
    """torchao's AdamW: 8-bit moments with one scale per 256 values (arXiv 2110.02861); small tensors keep float32.

    Second moments below 1.6e-7 of the largest of their 256 round up to the smallest code instead of to 0. A first moment does
    not round to 0 with them, and without a gradient AdamW would move such a weight by rate * m / eps.
    Its step is compiled, which keeps temporary memory small; on a CPU it runs eagerly, which needs no compiler.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float):
        check_optimizer("adamw8bit")
        if any(group["batches"] > 1 for group in groups):
            raise UserError("optimizer adamw8bit: does not support the campaign's training.second_moment_peers; "
                            "possible here: adamw")
        self.torch_optimizer = importlib.import_module("torchao.optim").AdamW8bit(groups, lr=0.0, betas=betas, eps=eps)
        self._on_cpu = all(each.device.type == "cpu" for group in groups for each in group["params"])

    def step(self, rates: list[float]) -> None:
        """Apply the gradients, and leave no second moment at 0 that they changed."""
        super().step(rates)
        for parameter, state in self.torch_optimizer.state.items():
            if parameter.grad is not None:
                _round_zeros_up(state["exp_avg_sq"])

    def _expect_larger_batches(self) -> None:
        """Not supported by 8-bit moments: with `second_moment_peers: auto` they stay those of this peer's batch."""

    def _step_count(self, device: torch.device, steps: float) -> Tensor:
        return torch.tensor(steps)

    def _rate(self, rate: float) -> float | Tensor:
        return torch.tensor(rate)

    def _mode(self) -> AbstractContextManager[Any]:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager" if self._on_cpu else "default")
        return stance

    def _tensors(self, key: str, value: Any) -> dict[str, Tensor]:
        if hasattr(value, "codes"):
            return {key + CODES: value.codes.detach(), key + SCALES: value.scale.detach()}
        return super()._tensors(key, value)

    def _moment(self, parameter: nn.Parameter, key: str, arrays: Arrays, device: torch.device) -> Tensor | None:
        codes, scales = arrays.get(key + CODES), arrays.get(key + SCALES)
        restored: Any
        if codes is None or scales is None:
            moment = super()._moment(parameter, key, arrays, device)
            restored = moment if moment is None else self._in_8_bits(moment, key == "exp_avg")
        elif codes.shape != tuple(parameter.shape) or codes.size % max(1, scales.size):
            return None
        else:
            restored = _zeros(codes.shape, key == "exp_avg", codes.size // scales.size, device)
            restored.codes.copy_(torch.from_numpy(np.array(codes)))
            restored.scale.copy_(torch.from_numpy(np.array(scales)))
        if key == "exp_avg_sq":
            _round_zeros_up(restored)
        return restored  # type: ignore[no-any-return]

    def _in_8_bits(self, moment: Tensor, is_signed: bool) -> Any:
        """Return a moment of a trainer with float32 moments as this optimizer keeps it: its memory was planned for that."""
        kept: Any = self.torch_optimizer._new_buffer(moment, is_signed)  # type: ignore[attr-defined]
        if not hasattr(kept, "codes"):
            return moment
        block, values = kept.block_size, moment.view(-1)
        for start in range(0, len(values), CONVERTED_ELEMENTS):
            piece = values[start : start + CONVERTED_ELEMENTS]
            converted = _zeros(piece.shape, is_signed, block, moment.device).copy_(piece)
            kept.codes.view(-1)[start : start + len(piece)] = converted.codes
            kept.scale[start // block : (start + len(piece)) // block] = converted.scale
        return kept


def _zeros(shape: tuple[int, ...], is_signed: bool, block: int, device: torch.device) -> Any:
    """Return an 8-bit moment of zeros with one scale per `block` values."""
    return importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit.zeros(shape, is_signed, block, device)


def _round_zeros_up(second: Any) -> None:
    """Replace code 0, whose value is 0, in an 8-bit second moment."""
    if hasattr(second, "codes"):
        second.codes.clamp_(min=1)


def _excess(gradient: Tensor, state: Mapping[str, Tensor], betas: tuple[float, float]) -> Tensor:
    """Return (g^2 - m^2) (1 - b2) / b2: what to subtract before AdamW's step to have m^2 instead of g^2 in the second moment.

    m is the first moment after the step, bias-corrected.
    """
    beta1, beta2 = betas
    moment = torch.lerp(state["exp_avg"], gradient, 1 - beta1).div_(1 - beta1 ** (float(state["step"]) + 1))
    return gradient.square().sub_(moment.square_()).mul_((1 - beta2) / beta2)


def check_optimizer(kind: OptimizerKind) -> None:
    """Raise UserError if the optimizer's package is missing."""
    if kind == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        raise UserError("optimizer adamw8bit: torchao is not installed; pip install torchao; possible here: adamw")


def make_adamw(kind: OptimizerKind, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> AdamW:
    """Create the optimizer of that kind. Raises UserError if its package is missing."""
    return {"adamw": AdamW, "adamw8bit": AdamW8bit}[kind](groups, betas, eps)


def state_tensors(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of one parameter's state."""
    return [
        part
        for value in state.values()
        for part in ((value.codes, value.scale, value.qmap) if hasattr(value, "codes") else (value,))
    ]
