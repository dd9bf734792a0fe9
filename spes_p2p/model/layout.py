"""The model as one flat float32 vector: the position and the group of each tensor.

All weights on the network are ranges of this vector. Groups are contiguous: `shared`, then `router`, then one group per expert
(`expert.0`, `expert.1`, ...), within an expert layer by layer, within a layer `gate_up_proj` then `down_proj`. A group is
weighted and owned as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from spes_p2p.errors import UserError

Kind = Literal["shared", "router", "expert"]
MAX_PARAMETERS = 2**42
"""4 * 10^12: more than the largest published models."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model. Experts' fused parameters `[E, ...]` are E tensors, one per expert."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None
    expert: int | None = None
    is_fixed: bool = False
    """Whether it keeps the values of base 0, such as a bias that balanced a router in pretraining."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_low_rank(self) -> bool:
        """Whether this is a low-rank term of a layer's experts, `[E, rows, rank]` (`low_rank.py`)."""
        return ".low_rank." in self.name


@dataclass(frozen=True)
class Placed:
    """A tensor and its range `[start, stop)` in the flat state."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Group:
    """A contiguous range of the flat state with the same owners: the shared weights, the router, or one expert."""

    name: str
    kind: Kind
    expert: int | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Layout:
    """The position of every tensor in the flat state: a pure function of the tensor specs, the same on every peer."""

    def __init__(self, specs: Iterable[TensorSpec]):
        rank = {"shared": 0, "router": 1, "expert": 2}
        # The sort is stable: tensors keep the model's order within a group, and within a layer of an expert.
        ordered = sorted(
            specs,
            key=lambda s: (rank[s.kind], -1 if s.expert is None else s.expert, s.layer or 0 if s.kind == "expert" else 0),
        )
        placed: list[Placed] = []
        groups: list[Group] = []
        offset = 0
        for spec in ordered:
            name = spec.kind if spec.expert is None else f"expert.{spec.expert}"
            stop = offset + spec.size
            if groups and groups[-1].name == name:
                groups[-1] = Group(name, spec.kind, spec.expert, groups[-1].start, stop)
            else:
                groups.append(Group(name, spec.kind, spec.expert, offset, stop))
            placed.append(Placed(spec, offset, stop))
            offset = stop
        self.tensors: tuple[Placed, ...] = tuple(placed)
        self.groups: tuple[Group, ...] = tuple(groups)
        self.size = offset

    @cached_property
    def by_name(self) -> dict[str, Placed]:
        """Tensors by name."""
        return {t.spec.name: t for t in self.tensors}

    @cached_property
    def fixed(self) -> tuple[Placed, ...]:
        """The tensors that keep the values of base 0."""
        return tuple(placed for placed in self.tensors if placed.spec.is_fixed)

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor that is trained."""
        return max(placed.spec.size for placed in self.tensors if not placed.spec.is_fixed)

    @cached_property
    def num_experts(self) -> int:
        """Experts per layer (0 for a dense model)."""
        return sum(1 for g in self.groups if g.kind == "expert")

    @cached_property
    def expert_shape(self) -> tuple[int, int]:
        """(hidden size, intermediate size) of the experts."""
        hidden_size, intermediate_size = next(t.spec.shape for t in self.tensors if t.spec.name.endswith(".0.down_proj"))
        return hidden_size, intermediate_size

    @cached_property
    def expert_layers(self) -> list[int]:
        """The layers that have experts, ascending."""
        return sorted({t.spec.layer for t in self.tensors if t.spec.kind == "expert" and t.spec.layer is not None})

    def group(self, name: str) -> Group:
        """Return the group of that name. Raises KeyError."""
        return self._groups_by_name[name]

    def expert(self, expert: int) -> Group:
        """Return the group of one expert."""
        return self._groups_by_name[f"expert.{expert}"]

    def tensors_of(self, group: Group) -> tuple[Placed, ...]:
        """Return the adjacent tensors of a group, in order."""
        return self._by_group[group.name]

    def tensors_of_expert_layer(self, expert: int, layer: int) -> tuple[Placed, ...]:
        """Return the adjacent matrices of one expert in one layer, in order."""
        return self._by_expert_layer[expert, layer]

    @cached_property
    def _by_expert_layer(self) -> dict[tuple[int, int], tuple[Placed, ...]]:
        found: dict[tuple[int, int], tuple[Placed, ...]] = {}
        for t in self.tensors:
            if t.spec.expert is not None and t.spec.layer is not None:
                key = (t.spec.expert, t.spec.layer)
                found[key] = (*found.get(key, ()), t)
        return found

    @cached_property
    def _by_group(self) -> dict[str, tuple[Placed, ...]]:
        return {g.name: tuple(t for t in self.tensors if g.start <= t.start < g.stop) for g in self.groups}

    @cached_property
    def _groups_by_name(self) -> dict[str, Group]:
        return {g.name: g for g in self.groups}


def check_size(layout: Layout) -> None:
    """Raise UserError if the model is too large."""
    if layout.size > MAX_PARAMETERS:
        raise UserError(f"model: {layout.size} parameters: must be at most {MAX_PARAMETERS}; reduce its sizes")
