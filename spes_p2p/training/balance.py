"""How evenly routers use the experts, from counts of assignments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def load_violation(counts: Sequence[Sequence[int]]) -> list[float]:
    """For each layer's counts by expert: the busiest expert's over the mean, less 1. 0 is balance, E - 1 all on one expert."""
    return [max(layer) * len(layer) / total - 1 if (total := sum(layer)) else 0.0 for layer in counts]


def share_of(counts: Sequence[Sequence[int]], experts: Iterable[int]) -> float:
    """Share of all layers' assignments that go to these experts; 0 where there are none."""
    total = sum(map(sum, counts))
    chosen = tuple(experts)
    return sum(layer[expert] for layer in counts for expert in chosen) / total if total else 0.0
