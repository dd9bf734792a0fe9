"""The outer step: what a round's mean update does to the base. Plain averaging, or SGD with Nesterov momentum (DiLoCo).

The base is one float32 vector: all weights (`[layout.size]`), then the momentum of the groups whose momentum is not 0, in the
layout's order. So whoever has the base has the momentum too: digest, file and download cover it, and who joins late applies the
next round to the same bits. Momentum costs four bytes a parameter of those groups, where the base is kept, and nothing on the
wire of a round.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.model.layout import Group, Layout


def outer_settings(group: Group, outer: OuterConfig) -> tuple[float, float]:
    """(learning rate, momentum) of a group."""
    if group.kind == "shared":
        return outer.shared_learning_rate, outer.shared_momentum
    if group.kind == "router":
        return outer.router_learning_rate, outer.router_momentum
    return outer.experts_learning_rate, outer.experts_momentum


def momentum_offsets(layout: Layout, outer: OuterConfig) -> dict[str, int]:
    """Where in the base the momentum of each group begins, by the group's name; groups without momentum have none."""
    offsets: dict[str, int] = {}
    stop = layout.size
    for group in layout.groups:
        if outer_settings(group, outer)[1] > 0:
            offsets[group.name] = stop
            stop += group.size
    return offsets


def base_size(layout: Layout, outer: OuterConfig) -> int:
    """float32 elements of a base: weights and momentum."""
    return layout.size + sum(layout.group(name).size for name in momentum_offsets(layout, outer))


def first_base(weights: np.ndarray, layout: Layout, outer: OuterConfig) -> np.ndarray:
    """Base 0: the weights (float32 `[layout.size]`), and no momentum yet."""
    return np.concatenate([weights, np.zeros(base_size(layout, outer) - layout.size, np.float32)])


def next_momentum(momentum: np.ndarray, update: np.ndarray, mu: float) -> np.ndarray:
    """m' = mu m + update, elementwise; float32, a new array. One operation a call, in a fixed order."""
    new: np.ndarray = np.multiply(momentum, np.float32(mu))
    np.add(new, update, out=new)
    return new


def next_weights(weights: np.ndarray, update: np.ndarray, momentum: np.ndarray | None, rate: float, mu: float) -> None:
    """In place: w <- w + rate (update + mu m'), where `momentum` is m' of `next_momentum`, or None for plain averaging.

    SGD with Nesterov momentum as torch has it, whose gradient is minus the update (DiLoCo, arXiv 2311.08105).
    """
    if momentum is not None:
        ahead = np.multiply(momentum, np.float32(mu))
        update = np.add(ahead, update, out=ahead)
    if np.float32(rate) != 1:
        update = np.multiply(update, np.float32(rate))
    np.add(weights, update, out=weights)
