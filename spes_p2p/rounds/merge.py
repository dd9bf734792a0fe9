"""SPES's expert-merging warm-up (arXiv 2602.11543): each expert moves towards the mean of its most similar experts.

The coordinator computes the similarities and proposes the donors, since sums and sorts may differ between machines; whoever
holds the base checks them. The merge itself is elementwise, in a fixed order of numpy operations, so all peers get the same
bits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.model.layout import Layout

BLOCK_ELEMENTS = 2**16
"""Elements of each expert that are compared at a time; bounds the float64 copies."""

SIMILARITY_ERROR = 1e-6
"""Bounds how much the cosines that two machines compute may differ; float64 sums of a billion products agree to 1e-9."""

Donors = tuple[tuple[tuple[int, ...], ...], ...]


def merge_alpha(step: int, alpha_start: float, decay_steps: int) -> float:
    """Return the merge strength: alpha_start * max(0, 1 - step / decay_steps)."""
    return alpha_start * max(0.0, 1.0 - step / decay_steps)


def nearest_experts(state: np.ndarray, layout: Layout, top_k: int) -> Donors:
    """Return for each layer and expert the `top_k` most similar other experts, nearest first: `[layers][experts][k]`.

    Similarity is the cosine of the flattened gate projections: the first half of an expert's `gate_up_proj`, without low-rank
    terms. Ties go to the lower expert.
    """
    donors = []
    for cosine in _similarities(state, layout):
        order = np.argsort(-cosine, axis=1, kind="stable")[:, : min(top_k, layout.num_experts - 1)]
        donors.append(tuple(tuple(int(e) for e in row) for row in order))
    return tuple(donors)


def are_nearest(state: np.ndarray, layout: Layout, donors: Donors) -> bool:
    """Return whether these are the most similar experts, `[layers][experts][k]`, up to rounding on another machine."""
    for cosine, its_donors in zip(_similarities(state, layout), donors, strict=True):
        for row, chosen in zip(cosine, its_donors, strict=True):
            if chosen and row[list(chosen)].min() < np.sort(row)[-len(chosen)] - SIMILARITY_ERROR:
                return False
    return True


@dataclass(frozen=True)
class MergedRows:
    """One expert's range `[start, stop)` of the state in one layer, and the distances to its donors' ranges."""

    start: int
    stop: int
    donors: tuple[int, ...]


def merged_rows(layout: Layout, donors: Donors) -> tuple[MergedRows, ...]:
    """Return all ranges that a merge changes, ascending. `donors`: `[layers][experts][k]`; an expert without donors stays."""
    rows = []
    for layer, its_donors in zip(layout.expert_layers, donors, strict=True):
        for places in _places_of_experts(layout, layer):
            for own, chosen in zip(places, its_donors, strict=True):
                if chosen:
                    rows.append(MergedRows(own.start, own.stop, tuple(places[donor].start - own.start for donor in chosen)))
    return tuple(sorted(rows, key=lambda row: row.start))


def merge_range(
    before: Callable[[int, int], np.ndarray], rows: Sequence[MergedRows], alpha: float, start: int, stop: int
) -> np.ndarray:
    """Return the range `[start, stop)` of the state after the merge, float32: w <- w + alpha (mean(donors) - w) in `rows`.

    `before(a, b)` returns a new array of the values before the merge, also the donors'.
    """
    merged = before(start, stop)
    for row in rows[bisect.bisect_right([row.stop for row in rows], start) :]:
        a, b = max(start, row.start), min(stop, row.stop)
        if a >= b:
            break
        total = before(a + row.donors[0], b + row.donors[0])
        for distance in row.donors[1:]:
            np.add(total, before(a + distance, b + distance), out=total)
        np.divide(total, np.float32(len(row.donors)), out=total)
        values = merged[a - start : b - start]
        np.subtract(total, values, out=total)
        np.multiply(total, np.float32(alpha), out=total)
        np.add(values, total, out=values)
    return merged


def _similarities(state: np.ndarray, layout: Layout) -> Iterator[np.ndarray]:
    """Yield the cosines between the experts of each layer, float64 `[experts, experts]`, with -inf on the diagonal."""
    for layer in layout.expert_layers:
        products = _inner_products([_gate(state, layout, layer, expert) for expert in range(layout.num_experts)])
        norms = np.maximum(np.sqrt(np.diag(products)), 1e-30)
        cosine = products / norms / norms[:, None]
        np.fill_diagonal(cosine, -np.inf)
        yield cosine


def _inner_products(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return float64 `[n, n]`."""
    products = np.zeros((len(rows), len(rows)))
    for start in range(0, rows[0].size, BLOCK_ELEMENTS):
        block = np.stack([row[start : start + BLOCK_ELEMENTS] for row in rows]).astype(np.float64)
        products += block @ block.T
    return products


def _places_of_experts(layout: Layout, layer: int) -> Iterator[list[slice]]:
    """Yield `[experts]` slices of a layer: each expert's matrices, then its rows of each low-rank term."""
    experts = range(layout.num_experts)
    matrices = [layout.tensors_of_expert_layer(expert, layer) for expert in experts]
    yield [slice(places[0].start, places[-1].stop) for places in matrices]
    for placed in layout.tensors:
        if placed.spec.is_low_rank and placed.spec.layer == layer:
            size = placed.spec.size // len(experts)
            yield [slice(placed.start + expert * size, placed.start + (expert + 1) * size) for expert in experts]


def _gate(state: np.ndarray, layout: Layout, layer: int, expert: int) -> np.ndarray:
    gate_up = next(t for t in layout.tensors_of_expert_layer(expert, layer) if t.spec.name.endswith("gate_up_proj"))
    return state[gate_up.start : gate_up.start + gate_up.spec.size // 2]
