"""The optimizer of a peer whose owned experts change: AdamW, or Muon for matrices and AdamW for the rest.

Each expert is a parameter group of its own, with its own age and ramp. Shared weights and routers form further groups: with and
without weight decay, embedding and output head, and matrices stepped by Muon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spes_p2p.config.campaign import TrainingConfig
from spes_p2p.model.layout import Layout
from spes_p2p.model.memory import OptimizerKind, is_muons
from spes_p2p.training.adamw import AdamW, Arrays, make_adamw, state_tensors
from spes_p2p.training.muon import Muon
from spes_p2p.training.rates import ramp

MUONS = "matrices"
"""Name of the parameter group of shared weights that Muon steps."""
VOCABULARY = " vocabulary"
"""Suffix of the parameter groups of the embedding and the output head."""


Moments = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (numpy's name) and shape of each of `OwnedOptimizer.moments`."""


class OwnedOptimizer:
    """Optimizer of a partitioned model's trainable parameters: AdamW (float32 or 8-bit moments), optionally Muon for matrices.

    Parameters are identified by their layout name. `regroup` preserves the moments of kept parameters; new ones start with a
    ramp.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, config: TrainingConfig, kind: OptimizerKind = "adamw",
        waits_on_host: Callable[[str], bool] = lambda name: False,
    ):
        """`waits_on_host`: whether moments of weights of this name, which are never stepped here, belong in main memory."""
        self._waits_on_host = waits_on_host
        self._layout, self._config = layout, config
        embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
        head = {id(p) for p in model.get_output_embeddings().parameters()}
        self._parameters = dict(sorted(model.named_parameters()))
        self._undecayed = {
            name
            for name, p in self._parameters.items()
            if (p.ndim < 2 and not config.decay_norm_and_bias) or (id(p) in embeddings and not config.decay_embeddings)
        }
        self._vocabulary = {name for name, p in self._parameters.items() if id(p) in embeddings | head}
        self._averaged_peers = 1.0
        groups = [self._group(name, names) for name, names in self._wanted().items()]
        muons = [group for group in groups if self._is_muons(group["name"])]
        rest = [group for group in groups if not self._is_muons(group["name"])]
        self._adamw: AdamW | Muon = make_adamw(kind, rest, (config.beta1, config.beta2), config.eps)
        self._muon = Muon(muons) if muons else None

    def regroup(self, model: PreTrainedModel) -> None:
        """Update the parameter groups after a change of owned experts."""
        self._parameters = dict(sorted(model.named_parameters()))
        wanted = self._wanted()
        for kind in self._kinds():
            optimizer = kind.torch_optimizer
            for group in optimizer.param_groups:
                if group["name"] not in wanted:
                    for parameter in group["params"]:
                        optimizer.state.pop(parameter, None)
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["name"] in wanted]
        known = {group["name"] for _, group in self._groups()}
        for name, names in wanted.items():
            if name not in known:
                self._kind_of(name).torch_optimizer.add_param_group(self._group(name, names))

    def skip_ramps(self) -> None:
        """Give every group its full learning rate: at the start of a campaign the schedule's warm-up suffices."""
        for _, group in self._groups():
            group["age"] = max(group["age"], self._config.new_owner_ramp_steps)

    def average_over(self, peers: float) -> None:
        """Set the number of peers whose updates of shared weights and routers are averaged (`second_moment_peers: auto`)."""
        if self._config.second_moment_peers == "auto":
            self._averaged_peers = peers
            for _, group in self._groups():
                group["batches"] = self._batches(group["name"])

    def forget_momentum(self) -> None:
        """Begin Muon's momentum anew."""
        if self._muon is not None:
            self._muon.torch_optimizer.state.clear()

    def step(self, rate: float, loss: Tensor, over_ranks: Callable[[Tensor], Tensor] = lambda square_norm: square_norm) -> bool:
        """Clip the gradients by global norm and apply them; return False, unchanged, if they or the loss are not finite.

        Parameters without gradient stay as they are. `over_ranks`: the squared norm of the gradients here -> of all.
        """
        # In one order at all ranks, which must round alike.
        there = [parameter for parameter in self._parameters.values() if parameter.grad is not None]
        norm = over_ranks(nn.utils.get_total_norm([parameter.grad for parameter in there]).square()).sqrt()
        nn.utils.clip_grads_with_norm_(there, self._config.max_grad_norm, norm)
        finite = bool(torch.isfinite(norm + loss.sum()))
        if finite:
            for kind in self._kinds():
                groups = kind.torch_optimizer.param_groups
                kind.step([rate * group["lr_ratio"] * ramp(group["age"], self._config) for group in groups])
                for group in groups:
                    group["age"] += 1
        self.zero_grad()
        return finite

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for kind in self._kinds():
            kind.torch_optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        """Return the bytes of the moments."""
        states = (state for kind in self._kinds() for state in kind.torch_optimizer.state.values())
        return sum(t.nbytes for state in states for t in state_tensors(state))

    def tensors(self, in_full: bool = False) -> dict[str, Tensor]:
        """Return each parameter's state (`exp_avg/NAME`, `step/NAME`, ...), not copies, and each group's `age/GROUP`.

        `in_full`: see `AdamW.state_of`.
        """
        ages = {name: torch.tensor(age, dtype=torch.int64) for name, age in self.ages().items()}
        return ages | self.moments(in_full)

    def ages(self) -> dict[str, int]:
        """Return each group's `age/GROUP`."""
        return {f"age/{group['name']}": group["age"] for _, group in self._groups()}

    def moments(self, in_full: bool = False) -> dict[str, Tensor]:
        """Return each parameter's state, not copies."""
        tensors: dict[str, Tensor] = {}
        for kind, group in self._groups():
            for name, parameter in zip(group["names"], group["params"], strict=True):
                tensors.update({f"{key}/{name}": value for key, value in kind.state_of(parameter, in_full).items()})
        return tensors

    def shapes(self) -> Moments:
        """Return dtype and shape of each of `moments`."""
        return {name: (numpy_dtype(each).name, tuple(each.shape)) for name, each in self.moments().items()}

    def become(self, ages: Mapping[str, int], moments: Moments) -> None:
        """Take these ages, and moments of these dtypes and shapes, whose values the caller then overwrites."""
        self.load_state({name: np.array(age) for name, age in ages.items()} | _zeros(moments))

    def make_room(self, moments: Moments) -> None:
        """Have moments of these dtypes and shapes where parameters have none, whose values the caller then overwrites."""
        by_parameter = _by_parameter(_zeros(moments))
        for kind, group in self._groups():
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if name in by_parameter and parameter not in kind.torch_optimizer.state:
                    kind.load_state_of(parameter, by_parameter[name], self._home_of(name, parameter))

    def load_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace the state by `tensors`. A parameter with missing or mismatched entries is fresh; its group then ramps up."""
        for kind in self._kinds():
            kind.torch_optimizer.state.clear()
        by_parameter = _by_parameter(arrays)
        for kind, group in self._groups():
            fits = [
                kind.load_state_of(parameter, by_parameter[name], self._home_of(name, parameter))
                for name, parameter in zip(group["names"], group["params"], strict=True)
                if name in by_parameter
            ]
            group["age"] = int(arrays.get(f"age/{group['name']}", 0)) if all(fits) else 0

    def _home_of(self, name: str, parameter: nn.Parameter) -> torch.device:
        return torch.device("cpu") if self._waits_on_host(name) else parameter.device

    def _wanted(self) -> dict[str, list[str]]:
        """Return the parameter names of each group, for the current parameters."""
        wanted: dict[str, list[str]] = {}
        for name in self._parameters:
            spec = self._layout.by_name[name].spec
            shared = "undecayed" if name in self._undecayed else "decayed"
            if name in self._vocabulary:
                shared += VOCABULARY
            elif self._config.optimizer == "muon" and is_muons(spec):
                shared = MUONS
            wanted.setdefault(shared if spec.expert is None else f"expert.{spec.expert}", []).append(name)
        return wanted

    def _is_muons(self, group: str) -> bool:
        """Return whether Muon steps this group. All of an expert's matrices are Muon's."""
        return self._config.optimizer == "muon" and (group == MUONS or group.startswith("expert."))

    def _kind_of(self, group: str) -> AdamW | Muon:
        return self._muon if self._muon is not None and self._is_muons(group) else self._adamw

    def _kinds(self) -> tuple[AdamW | Muon, ...]:
        return (self._adamw,) if self._muon is None else (self._adamw, self._muon)

    def _groups(self) -> Iterator[tuple[AdamW | Muon, dict[str, Any]]]:
        """Yield every parameter group with its optimizer."""
        return ((kind, group) for kind in self._kinds() for group in kind.torch_optimizer.param_groups)

    def _group(self, name: str, names: list[str]) -> dict[str, Any]:
        ratio = self._config.embedding_lr_ratio if name.endswith(VOCABULARY) else 1.0
        decay = 0.0 if name.startswith("undecayed") else self._config.weight_decay
        return {
            "params": [self._parameters[n] for n in names], "name": name, "names": names, "age": 0,
            "weight_decay": decay / ratio, "lr_ratio": ratio,
            "batches": self._batches(name),
        }

    def _batches(self, group: str) -> float:
        """Return the number of batches whose average's noise the second moment should have; experts are not averaged."""
        wanted = self._config.second_moment_peers
        return 1.0 if group.startswith("expert.") else self._averaged_peers if wanted == "auto" else wanted


def numpy_dtype(tensor: Tensor) -> np.dtype[Any]:
    """Return numpy's name for a tensor's dtype."""
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


def _zeros(moments: Moments) -> Arrays:
    """Return arrays of zeros that take no memory."""
    return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (dtype, shape) in moments.items()}


def _by_parameter(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Arrays]:
    found: dict[str, Arrays] = {}
    for key, value in arrays.items():
        what, _, name = key.partition("/")
        found.setdefault(name, {})[what] = value
    return found
