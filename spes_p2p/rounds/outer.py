"""The outer step: applies a round's mean update to the base. Plain averaging, or SGD with Nesterov momentum (DiLoCo).

The base is one float32 vector: all weights (`[layout.size]`), then the momentum of the groups with momentum, in the layout's
order, then one record of each group's updates (step_bounds.py). So the base's digest, file and download cover them all, and a
late joiner applies the next round to the same bits. Momentum costs four bytes a parameter of these groups, and nothing in a
round's exchange.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.model.layout import Group, Layout


def outer_settings(group: Group, outer: OuterConfig) -> tuple[float, float]:
    """Return the learning rate and momentum of a group."""
    if group.kind == "shared":
        return outer.shared_learning_rate, outer.shared_momentum
    if group.kind == "router":
        return outer.router_learning_rate, outer.router_momentum
    return outer.experts_learning_rate, outer.experts_momentum


def momentum_offsets(layout: Layout, outer: OuterConfig) -> dict[str, int]:
    """Return the start of each group's momentum in the base, by group name, for groups with momentum."""
    offsets: dict[str, int] = {}
    stop = layout.size
    for group in layout.groups:
        if outer_settings(group, outer)[1] > 0:
            offsets[group.name] = stop
            stop += group.size
    return offsets


def base_size(layout: Layout, outer: OuterConfig) -> int:
    """Return the float32 elements of a base: weights, momentum and records."""
    momentum = sum(layout.group(name).size for name in momentum_offsets(layout, outer))
    return layout.size + momentum + len(layout.groups)


def records_of(base: np.ndarray, layout: Layout) -> np.ndarray:
    """Return a view of the records, float32 `[groups]`, at the end of a base."""
    return base[base.size - len(layout.groups) :]


def first_base(weights: np.ndarray, layout: Layout, outer: OuterConfig) -> np.ndarray:
    """Return base 0: the weights (float32 `[layout.size]`), zero momentum, and no records."""
    return np.concatenate([weights, np.zeros(base_size(layout, outer) - layout.size, np.float32)])


def next_momentum(momentum: np.ndarray, update: np.ndarray, mu: float) -> np.ndarray:
    """Return m' = mu m + update, float32, a new array. Elementwise operations in a fixed order."""
    new: np.ndarray = np.multiply(momentum, np.float32(mu))
    np.add(new, update, out=new)
    return new


def next_weights(weights: np.ndarray, update: np.ndarray, momentum: np.ndarray | None, rate: float, mu: float) -> None:
    """Update in place: w <- w + rate (update + mu m'), where `momentum` is m' of `next_momentum`; None: plain averaging.

    This is torch's SGD with Nesterov momentum on the gradient -update (DiLoCo, arXiv 2311.08105).
    """
    if momentum is not None:
        ahead = np.multiply(momentum, np.float32(mu))
        update = np.add(ahead, update, out=ahead)
    if np.float32(rate) != 1:
        update = np.multiply(update, np.float32(rate))
    np.add(weights, update, out=weights)
