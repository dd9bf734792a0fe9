"""The expert merge against a straightforward reference, and its schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds.merge import Donors, merge_alpha, merge_range, merged_rows, nearest_experts


def layout_of(layers: int, experts: int) -> Layout:
    return Layout(
        [TensorSpec("embed", (5, 4), "shared"), TensorSpec("gate", (experts, 4), "router", 0)]
        + [
            TensorSpec(f"layers.{layer}.experts.{e}.{name}", shape, "expert", layer, e)
            for layer in range(layers)
            for e in range(experts)
            for name, shape in (("gate_up_proj", (6, 4)), ("down_proj", (4, 3)))
        ]
    )


def tensor(state: np.ndarray, layout: Layout, name: str) -> np.ndarray:
    place = layout.by_name[name]
    return state[place.start : place.stop].reshape(place.spec.shape)


def merge_in_pieces(state: np.ndarray, layout: Layout, donors: Donors, alpha: float, size: int) -> np.ndarray:
    rows = merged_rows(layout, donors)
    starts = range(0, state.size, size)
    pieces = [merge_range(lambda a, b: state[a:b].copy(), rows, alpha, a, min(a + size, state.size)) for a in starts]
    return np.concatenate(pieces)


def reference_donors(state: np.ndarray, layout: Layout, layer: int, expert: int, top_k: int) -> tuple[int, ...]:
    """The `top_k` other experts whose gate projection has the greatest cosine similarity."""

    def gate(e: int) -> np.ndarray:
        return tensor(state, layout, f"layers.{layer}.experts.{e}.gate_up_proj")[:3].astype(np.float64).ravel()

    def cosine(e: int) -> float:
        return float(gate(e) @ gate(expert) / np.linalg.norm(gate(e)) / np.linalg.norm(gate(expert)))

    others = sorted((e for e in range(layout.num_experts) if e != expert), key=cosine, reverse=True)
    return tuple(others[:top_k])


@pytest.mark.parametrize("experts", [2, 3, 6])
@pytest.mark.parametrize(("top_k", "size"), [(1, 1000), (4, 7), (9, 36)])
def test_merge_agrees_with_the_reference_whatever_pieces_it_is_made_in(experts: int, top_k: int, size: int) -> None:
    layout = layout_of(2, experts)
    state = np.random.default_rng(experts).standard_normal(layout.size, np.float32)
    donors = nearest_experts(state, layout, top_k)
    merged = merge_in_pieces(state, layout, donors, 0.25, size)
    for layer in range(2):
        for expert in range(experts):
            chosen = reference_donors(state, layout, layer, expert, top_k)
            assert donors[layer][expert] == chosen
            assert len(chosen) == min(top_k, experts - 1)
            for name in ("gate_up_proj", "down_proj"):
                old = [tensor(state, layout, f"layers.{layer}.experts.{e}.{name}").astype(np.float64) for e in range(experts)]
                expected = old[expert] + 0.25 * (np.mean([old[e] for e in chosen], axis=0) - old[expert])
                found = tensor(merged, layout, f"layers.{layer}.experts.{expert}.{name}")
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    shared = layout.group("router").stop
    assert merged[:shared].tobytes() == state[:shared].tobytes()


def test_only_the_gate_half_decides_who_is_similar() -> None:
    layout = layout_of(1, 3)
    state = np.random.default_rng(0).standard_normal(layout.size, np.float32)
    before = nearest_experts(state, layout, 1)
    for expert in range(3):
        tensor(state, layout, f"layers.0.experts.{expert}.gate_up_proj")[3:] = 7.0
        tensor(state, layout, f"layers.0.experts.{expert}.down_proj")[:] = -3.0
    assert nearest_experts(state, layout, 1) == before


def test_a_lone_expert_and_one_of_zeros_are_no_trouble() -> None:
    lone = layout_of(1, 1)
    state = np.ones(lone.size, np.float32)
    assert nearest_experts(state, lone, 4) == (((),),)
    assert (merge_in_pieces(state, lone, (((),),), 0.5, 10) == 1).all()
    assert nearest_experts(np.zeros(layout_of(1, 3).size, np.float32), layout_of(1, 3), 2) == (((1, 2), (0, 2), (0, 1)),)


@given(step=st.integers(0, 2000), start=st.floats(0, 1), decay=st.integers(1, 1000))
def test_alpha_falls_linearly_to_zero(step: int, start: float, decay: int) -> None:
    alpha = merge_alpha(step, start, decay)
    assert 0 <= alpha <= start
    assert alpha == pytest.approx(start * (decay - step) / decay if step < decay else 0.0, abs=1e-12)
