"""What a reducer makes of several peers' updates."""

from __future__ import annotations

import numpy as np
import pytest

from spes_p2p.sync.means import MeanKind, RunningMean


def mean(kind: MeanKind, updates: list[list[float]], shares: list[float]) -> np.ndarray:
    running = RunningMean(kind, np.full((RunningMean.rows(kind), len(updates[0])), np.nan, np.float32))
    for update, share in zip(updates, shares, strict=True):
        running.add(np.array(update, np.float32), share)
    return running.result(sum(shares))


@pytest.mark.parametrize("kind", ["tokens", "magnitude"])
def test_equal_updates_are_their_own_mean(kind: MeanKind) -> None:
    assert mean(kind, [[1.0, -2.0, 0.0]] * 3, [0.5, 0.25, 0.25]).tolist() == [1.0, -2.0, 0.0]


def test_the_mean_by_tokens_weighs_and_makes_up_for_who_is_missing() -> None:
    assert mean("tokens", [[4.0], [0.0]], [0.75, 0.25]).tolist() == [3.0]
    assert mean("tokens", [[4.0]], [0.25]).tolist() == [4.0]


def test_by_magnitude_an_element_that_one_peer_alone_moved_counts_in_full_and_opposite_ones_cancel() -> None:
    assert mean("magnitude", [[4.0, 0.0, 1.0], [0.0, -2.0, -1.0]], [0.5, 0.5]).tolist() == [4.0, -2.0, 0.0]
    assert mean("magnitude", [[3.0], [1.0]], [0.5, 0.5]).tolist() == [2.5]
    assert mean("magnitude", [[3.0], [1.0]], [0.25, 0.75]).tolist() == [2.0]


def test_independent_noise_keeps_about_the_length_that_one_peer_has() -> None:
    noise = np.random.default_rng(0).standard_normal((4, 10_000)).astype(np.float32)
    lengths = {kind: np.linalg.norm(mean(kind, noise.tolist(), [0.25] * 4)) / 100 for kind in ("tokens", "magnitude")}
    assert lengths["tokens"] == pytest.approx(0.5, abs=0.02)
    assert lengths["magnitude"] == pytest.approx(0.87, abs=0.05)
