"""How evenly routers use the experts, from counts of assignments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def load_violation(counts: Sequence[Sequence[int]]) -> list[float]:
    """Return max / mean - 1 of each layer's counts by expert: 0 is balanced, E - 1 is all on one expert."""
    return [max(layer) * len(layer) / total - 1 if (total := sum(layer)) else 0.0 for layer in counts]


def share_of(counts: Sequence[Sequence[int]], experts: Iterable[int]) -> float:
    """Return the share of all layers' assignments that go to these experts; 0 without assignments."""
    total = sum(map(sum, counts))
    chosen = tuple(experts)
    return sum(layer[expert] for layer in counts for expert in chosen) / total if total else 0.0
