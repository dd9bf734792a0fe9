"""SPES's expert-merging warm-up (arXiv 2602.11543): similar experts are drawn together a little, so that all learn faster.

Which experts are similar is computed by one peer and published in the plan, since sums and sorts may differ between machines.
The merge itself is elementwise, one numpy operation a call in a fixed order, so that all peers get the same bits.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.model.layout import Layout

Donors = tuple[tuple[tuple[int, ...], ...], ...]


def merge_alpha(step: int, alpha_start: float, decay_steps: int) -> float:
    """alpha = alpha_start * max(0, 1 - step / decay_steps)."""
    return alpha_start * max(0.0, 1.0 - step / decay_steps)


def nearest_experts(state: np.ndarray, layout: Layout, top_k: int) -> Donors:
    """For each layer and expert the `top_k` most similar other experts (fewer when there are fewer), nearest first.

    Similarity is the cosine of the flattened gate projections: the first half of an expert's `gate_up_proj`. Ties go to the
    lower expert. Returns `[layers][experts][k]`.
    """
    donors = []
    for layer in _layers(layout):
        gates = np.stack([_gate(state, layout, layer, expert) for expert in range(layout.num_experts)]).astype(np.float64)
        norms = np.maximum(np.linalg.norm(gates, axis=1, keepdims=True), 1e-30)
        cosine = (gates / norms) @ (gates / norms).T
        np.fill_diagonal(cosine, -np.inf)
        order = np.argsort(-cosine, axis=1, kind="stable")[:, : min(top_k, layout.num_experts - 1)]
        donors.append(tuple(tuple(int(e) for e in row) for row in order))
    return tuple(donors)


def merge_experts(state: np.ndarray, layout: Layout, donors: Donors, alpha: float) -> None:
    """In place, for each layer and expert, over all of its matrices: w <- w + alpha (mean(donors) - w).

    Donors give the values that they had before the merge. `donors` is `[layers][experts][k]`; an expert without donors stays.
    """
    a = np.float32(alpha)
    for layer, rows in zip(_layers(layout), donors, strict=True):
        before = [_expert_rows(state, layout, layer, expert).copy() for expert in range(layout.num_experts)]
        for expert, chosen in enumerate(rows):
            if not chosen:
                continue
            total = before[chosen[0]].copy()
            for donor in chosen[1:]:
                np.add(total, before[donor], out=total)
            np.divide(total, np.float32(len(chosen)), out=total)
            np.subtract(total, before[expert], out=total)
            np.multiply(total, a, out=total)
            np.add(before[expert], total, out=_expert_rows(state, layout, layer, expert))


def _layers(layout: Layout) -> list[int]:
    return sorted({t.spec.layer for t in layout.tensors if t.spec.kind == "expert" and t.spec.layer is not None})


def _expert_rows(state: np.ndarray, layout: Layout, layer: int, expert: int) -> np.ndarray:
    """View of all of one expert's matrices in one layer; they lie side by side."""
    places = layout.tensors_of_expert_layer(expert, layer)
    return state[places[0].start : places[-1].stop]


def _gate(state: np.ndarray, layout: Layout, layer: int, expert: int) -> np.ndarray:
    gate_up = next(t for t in layout.tensors_of_expert_layer(expert, layer) if t.spec.name.endswith("gate_up_proj"))
    return state[gate_up.start : gate_up.start + gate_up.spec.size // 2]
