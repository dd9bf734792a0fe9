"""Which rank of a peer holds what, where weights are divided among its ranks. Pure functions of the layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from spes_p2p.model.layout import Layout


@lru_cache(maxsize=16)
def ranks_of_layers(layout: Layout, ranks: int) -> Mapping[int, int]:
    """Return by layer the rank that holds it: its weights, the foreign experts stored for it, and its moments.

    The largest come first, each to the rank that has the fewest elements so far; so ranks take turns at layers that are alike.
    """
    sizes = Counter[int]()
    for placed in layout.tensors:
        if placed.spec.layer is not None:
            sizes[placed.spec.layer] += placed.spec.size
    load, found = [0] * ranks, {}
    for layer, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        found[layer] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[found[layer]] += size
    return found


@lru_cache(maxsize=16)
def ranks_outside_layers(layout: Layout, ranks: int) -> Mapping[str, int]:
    """Return for each tensor outside the layers, which all ranks hold, the rank that has its moments and steps it.

    The largest come first, each to the rank that has the fewest elements so far, those of its layers included.
    """
    load = [0] * ranks
    for placed in layout.tensors:
        if placed.spec.layer is not None and not placed.spec.expert:  # every peer trains one expert or more, all alike
            load[ranks_of_layers(layout, ranks)[placed.spec.layer]] += placed.spec.size
    found = {}
    for spec in sorted((t.spec for t in layout.tensors if t.spec.layer is None), key=lambda spec: (-spec.size, spec.name)):
        found[spec.name] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[found[spec.name]] += spec.size
    return found


def rank_that_steps(layout: Layout, ranks: int, name: str) -> int:
    """Return the rank that steps these weights, and has their moments."""
    layer = layout.by_name[name].spec.layer
    return ranks_outside_layers(layout, ranks)[name] if layer is None else ranks_of_layers(layout, ranks)[layer]
