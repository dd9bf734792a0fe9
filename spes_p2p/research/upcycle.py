"""Split a model with few experts into one with more: each expert is copied, and training separates the copies.

A router's row is copied with its expert. If the small model chooses k experts per token and the large one m k of m times as
many, it chooses all m copies of each, with weight 1 / m: it computes the same, as long as weights are the softmax over all
experts (OLMoE; sparse upcycling: arXiv 2212.05055). A little noise in the routers breaks the tie between copies.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.errors import UserError
from spes_p2p.model.build import State
from spes_p2p.model.layout import Layout

ROUTER_NOISE = 0.01
"""Standard deviation, relative to the root mean square of a router's weights."""


def split_experts(few: State, few_layout: Layout, layout: Layout, seed: int, noise: float = ROUTER_NOISE) -> State:
    """Convert flat float32 `[few_layout.size]` to `[layout.size]`: expert e of E becomes copies e, e + E, e + 2 E, ...

    Raises UserError if the models differ in more than the number of experts, or that number is not a multiple.
    """
    if layout.num_experts % few_layout.num_experts:
        raise UserError(f"{few_layout.num_experts} experts cannot be split into {layout.num_experts}: not a multiple")
    state, rng = np.empty(layout.size, np.float32), np.random.default_rng(seed)
    copies = layout.num_experts // few_layout.num_experts
    for placed in layout.tensors:
        spec, name = placed.spec, placed.spec.name
        if spec.expert is not None:
            expert, _, matrix = name.rpartition(".")
            name = f"{expert.rpartition('.')[0]}.{spec.expert % few_layout.num_experts}.{matrix}"
            values, shape = _read(few, few_layout, name)
        elif spec.kind == "router":
            values, (rows, *rest) = _read(few, few_layout, name)
            values = np.tile(values.reshape(rows, -1), (copies, 1))
            values = values + noise * np.sqrt(np.mean(values**2)) * rng.standard_normal(values.shape)
            shape = (copies * rows, *rest)
        else:
            values, shape = _read(few, few_layout, name)
            if spec.is_low_rank:
                values, shape = np.tile(values, copies), (copies * shape[0], *shape[1:])
        if shape != spec.shape:
            raise UserError(f"{spec.name}: has shape {shape} in the small model, {spec.shape} in the large one")
        state[placed.start : placed.stop] = values.reshape(-1)
    return state


def _read(state: State, layout: Layout, name: str) -> tuple[State, tuple[int, ...]]:
    placed = layout.by_name.get(name)
    if placed is None:
        raise UserError(f"{name}: the small model has no such tensor")
    return state[placed.start : placed.stop], placed.spec.shape
