"""Which rank of a peer holds what, where weights are divided among its ranks. Pure functions of the layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from spes_p2p.model.layout import Layout


def rank_of_layer(layer: int, ranks: int) -> int:
    """Return the rank that holds a layer: its weights, the foreign experts stored for it, and its moments."""
    return layer % ranks


@lru_cache(maxsize=16)
def ranks_outside_layers(layout: Layout, ranks: int) -> Mapping[str, int]:
    """Return for each tensor outside the layers, which all ranks hold, the rank that has its moments and steps it.

    The largest come first, each to the rank that has the fewest elements so far, those of its layers included.
    """
    load = [0] * ranks
    for placed in layout.tensors:
        if placed.spec.layer is not None and not placed.spec.expert:  # every peer trains one expert or more, all alike
            load[rank_of_layer(placed.spec.layer, ranks)] += placed.spec.size
    found = {}
    for spec in sorted((t.spec for t in layout.tensors if t.spec.layer is None), key=lambda spec: (-spec.size, spec.name)):
        found[spec.name] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[found[spec.name]] += spec.size
    return found
