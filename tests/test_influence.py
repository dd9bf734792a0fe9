"""What one contributor sends moves a mean, and what one round brings moves the base, by a bounded amount, everywhere alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
from exchange_round import LAYOUT, PART_BYTES, Round, codecs, make_plan_of, member, random_updates
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.messages.admission import Standing
from spes_p2p.rounds import influence
from spes_p2p.rounds.apply import NextBase, next_base_pieces
from spes_p2p.rounds.claims import bounded_strangers
from spes_p2p.rounds.influence import (
    DISTANCE_RATIO,
    NORM_RATIO,
    OUTLIER_RATIO,
    WEIGHT_RATIO,
    Contribution,
    clipped_mean,
    square_sum,
)
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.step_bounds import STEP_RATIO, StepBounds, bound_steps, bounds_of
from spes_p2p.rounds.sums import make_mean

SIZE = 300
WORST = {
    "huge": np.full(SIZE, 3e38, np.float32),
    "denormal": np.full(SIZE, 1e-45, np.float32),
    "zero": np.zeros(SIZE, np.float32),
    "one huge value": np.eye(1, SIZE, dtype=np.float32)[0] * np.float32(-3e38),
    "huge and tiny": np.where(np.arange(SIZE) % 2, 3e38, 1e-45).astype(np.float32),
}


def honest(count: int, seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    """Updates with a common direction under as much noise."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(SIZE)
    return [((common + rng.standard_normal(SIZE)) * scale).astype(np.float32) for _ in range(count)]


def mean_of(
    updates: Sequence[np.ndarray], tokens: Sequence[int] | None = None, clips: bool = True
) -> tuple[np.ndarray, tuple[int, ...]]:
    mean = np.empty(updates[0].size, np.float32)
    weights = tokens or [10] * len(updates)
    contributions = [Contribution(count, partial(np.copy, each)) for count, each in zip(weights, updates, strict=True)]
    return mean, clipped_mean(contributions, mean, clips)


def norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def plain(updates: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean(np.array(updates, np.float64), axis=0)


# Means --------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.integers(1, 3))
def test_square_sums_are_right_and_do_not_depend_on_blocks_of_the_machine(values: list[float], repeat: int) -> None:
    array = np.array(values * repeat, np.float32)
    exact = float(np.sum(array.astype(np.float64) ** 2))
    found = square_sum(array)
    assert math.isinf(found) if exact > 2e38 and math.isinf(found) else found == pytest.approx(exact, rel=1e-4, abs=1e-30)
    assert square_sum(array) == found


def test_a_square_sum_is_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(influence, "BLOCK", 7)
    assert square_sum(np.ones(100, np.float32)) == 100.0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_without_a_liar_the_mean_is_the_plain_one_bit_for_bit(count: int) -> None:
    updates = honest(count)
    clipped, who = mean_of(updates)
    assert who == ()
    assert clipped.tobytes() == mean_of(updates, clips=False)[0].tobytes()
    equal = [updates[0]] * count
    assert mean_of(equal)[0].tobytes() == mean_of(equal, clips=False)[0].tobytes()


@pytest.mark.parametrize("tokens", [[10, 40, 10, 10], [40, 10, 3, 12], [1, 30, 30, 30], [1, 1, 4, 4]])
def test_unequal_steps_are_no_lie(tokens: list[int]) -> None:
    """Noisy steps: norms grow with the root of the tokens. Agreeing ones: with the tokens, up to the longest phase."""
    noise = [update * np.float32(math.sqrt(count)) for update, count in zip(honest(4), tokens, strict=True)]
    assert mean_of(noise, tokens)[1] == ()


@pytest.mark.parametrize("count", [3, 4, 6, 10])
@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("place", [0, -1])
def test_one_liar_moves_the_mean_by_a_bounded_amount(count: int, worst: str, place: int) -> None:
    updates = honest(count)
    updates[place] = WORST[worst]
    others = [each for i, each in enumerate(updates) if i != place % count]
    mean, _ = mean_of(updates)
    typical = norm(others[0]) * 1.2
    assert np.isfinite(mean).all()
    assert norm(mean - plain(others)) <= (NORM_RATIO + 1) * typical / count


@given(st.integers(4, 9), st.floats(-1e30, 1e30), st.integers(0, 10**6))
def test_with_four_or_more_a_liar_counts_as_one_that_is_twice_as_far_as_others(count: int, factor: float, seed: int) -> None:
    updates = honest(count, seed)
    others = updates[1:]
    updates[0] = (updates[0] * np.float64(factor)).astype(np.float32)
    mean, _ = mean_of(updates)
    spread = max(norm(each - plain(others)) for each in others)
    before = norm(plain(others)) * (1 + NORM_RATIO) / count
    assert norm(mean - plain(others)) <= 1.1 * (DISTANCE_RATIO * (spread + before) + before) / count + before / count


def test_a_liar_is_named_and_the_honest_are_not() -> None:
    updates = [*honest(5), honest(1)[0] * np.float32(1000)]
    assert mean_of(updates)[1] == (5,)


def test_an_update_far_beyond_the_others_leaves_their_mean_as_it_is() -> None:
    for far in (honest(1)[0] * np.float32(1000), WORST["huge"]):
        np.testing.assert_array_equal(mean_of([*honest(5), far])[0], mean_of(honest(5))[0])
    near = honest(1)[0] * np.float32(0.9 * OUTLIER_RATIO)
    assert np.any(mean_of([*honest(5), near])[0] != mean_of(honest(5))[0])


def test_a_weight_counts_up_to_a_few_medians() -> None:
    updates = honest(5)
    lied = [10, 10, 2**40, 10, 10]
    fair = [10, 10, int(WEIGHT_RATIO * 10), 10, 10]
    assert mean_of(updates, lied)[0].tobytes() == mean_of(updates, fair)[0].tobytes()
    assert mean_of(updates, lied)[1] == (2,)


@pytest.mark.parametrize("size", [0, 1e-6, 0.1, 1e6])
def test_strangers_set_no_median_whatever_their_number(size: float) -> None:
    """Three known contributors and eight strangers, which agree on the size of their updates and on their weights."""
    updates = [*honest(3), *(each * np.float32(size) for each in honest(8, seed=1))]
    tokens, mean = [10, 10, 10, *[10**6] * 8], np.empty(SIZE, np.float32)
    contributions = [
        Contribution(tokens[i], partial(np.copy, update), "newcomer" if i >= 3 else "vouched")
        for i, update in enumerate(updates)
    ]
    clipped = clipped_mean(contributions, mean, clips=True)
    assert set(clipped) == set(range(3, 11))
    fair = [replace(each, tokens=min(each.tokens, int(WEIGHT_RATIO * 10))) for each in contributions]
    again = np.empty_like(mean)
    clipped_mean(fair, again, clips=True)
    assert again.tobytes() == mean.tobytes()


def test_strangers_alone_are_clipped_against_each_other() -> None:
    updates, mean = [*honest(5), WORST["huge"]], np.empty(SIZE, np.float32)
    assert clipped_mean([Contribution(10, partial(np.copy, each), "proven") for each in updates], mean, clips=True) == (5,)


@pytest.mark.parametrize(("standing", "clipped"), [("proven", set()), ("vouched", {2})])
def test_a_stranger_whose_weight_is_cut_sends_the_norm_of_what_it_trained(standing: Standing, clipped: set[int]) -> None:
    vouched = [member(name, 1000, (0,) * LAYOUT.num_experts) for name in "ABX"]
    members = (*vouched[:2], replace(vouched[2], standing=standing))
    part = next(each for each in part_table(LAYOUT, members, codecs("none"), PART_BYTES) if each.group.expert is None)
    one, mean = np.ones(part.size, np.float32), np.empty(part.size, np.float32)
    updates = {i: (tokens, partial(np.copy, one * np.float32(norm)))
               for i, (tokens, norm) in enumerate(((1000, 1), (1000, 1), (2000, 1.3 * NORM_RATIO)))}
    assert make_mean(part, members, updates, mean, clips=True) == clipped


@pytest.mark.parametrize(("strange", "left"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(("standing", "other"), [("newcomer", "vouched"), ("proven", "vouched"), ("newcomer", "proven")])
def test_of_two_contributors_the_less_trusted_one_is_measured_by_the_other(
    strange: int, left: int, standing: Standing, other: Standing
) -> None:
    updates, mean = [honest(1)[0]] * 2, np.empty(SIZE, np.float32)

    def found(factor: float, tokens: int = 1000, trained: int = 0) -> tuple[int, ...]:
        """Those that were clipped, where the less trusted one sends this multiple of the other's update, in `mean`."""
        updates[strange] = updates[left] * np.float32(factor)
        contributions = [
            Contribution(tokens, partial(np.copy, each), standing, trained) if i == strange
            else Contribution(1000, partial(np.copy, each), other)
            for i, each in enumerate(updates)
        ]
        return clipped_mean(contributions, mean, clips=True)

    assert found(1000) == (strange,)
    np.testing.assert_array_equal(mean, updates[left])
    assert found(-0.9 * OUTLIER_RATIO) == (strange,)
    assert norm(mean) < 1e-3 * norm(updates[left])
    assert found(-1, tokens=10**6) == (strange,)
    assert norm(mean) < 1e-3 * norm(updates[left])
    assert found(-0.99 * NORM_RATIO, tokens=250) == ()
    np.testing.assert_allclose(mean, updates[left] * (4 - 0.99 * NORM_RATIO) / 5, rtol=1e-4)
    assert found(-0.9 * OUTLIER_RATIO, trained=10**9) == (strange,)
    assert norm(mean) < 1e-2 * norm(updates[left]), "whatever it says"
    assert found(1.3 * NORM_RATIO) == (strange,)
    assert found(1.3 * NORM_RATIO, trained=2000) == (), "twice as many steps as weight"
    for fair in (2.9, 1.9, 1, 0):
        assert found(fair) == ()
        np.testing.assert_allclose(mean, updates[left] * (1 + min(1, fair)) / (1 + 1 / max(1, fair)), rtol=2e-3)


@given(
    st.floats(-1e20, 1e20) | st.floats(-OUTLIER_RATIO, OUTLIER_RATIO), st.integers(1, 10**9), st.integers(0, 10**6),
    st.sampled_from(["vouched", "proven"]), st.integers(1, 4), st.integers(1, 5),
)
def test_the_less_trusted_cancel_the_others_at_most_however_many_they_are(
    factor: float, tokens: int, seed: int, other: Standing, known: int, strangers: int
) -> None:
    *trusted, noise = honest(known + 1, seed)
    step = np.mean(trusted, axis=0)
    strange, mean = (noise * np.float64(factor)).astype(np.float32), np.empty(SIZE, np.float32)
    for update in (strange, step * np.float32(math.copysign(norm(strange) / norm(step), factor))):
        clipped_mean(
            [
                *(Contribution(1000, partial(np.copy, each), other) for each in trusted),
                *[Contribution(tokens, partial(np.copy, update), "newcomer")] * strangers,
            ],
            mean, clips=True,
        )
        assert float(mean @ step) >= -1e-4 * norm(step) ** 2
        assert norm(mean) <= 2.001 * norm(step)


def test_a_stranger_that_outweighs_the_vouched_costs_no_other_stranger_its_weight() -> None:
    update, mean = honest(1)[0], np.empty(SIZE, np.float32)
    liar = update * np.float32(-2.9)
    clipped_mean(
        [
            Contribution(1000, partial(np.copy, update), "vouched"), Contribution(500, partial(np.copy, update), "proven"),
            Contribution(500, partial(np.copy, liar), "proven"),
        ],
        mean, clips=True,
    )
    np.testing.assert_allclose(mean, update * (1 + 0.5 - 0.5) / (1 + 0.5 + 0.5 / 2.9), rtol=2e-3)


def with_strangers(known: int, strangers: int, steps: int, alike: float) -> tuple[float, tuple[int, ...]]:
    """How far a mean goes in the direction that all have in common, in steps of a vouched trainer; who was clipped.

    The strangers' phases have this many times the steps. `alike`: the cosine of two updates of the shortest phases.
    """
    rng = np.random.default_rng(0)
    common, mean = rng.standard_normal(10 * SIZE) * math.sqrt(alike), np.empty(10 * SIZE, np.float32)
    members = bounded_strangers([
        *(Member(f"A{i}", 1000, (), 1.0) for i in range(known)),
        *(Member(f"X{i}", 1000 * steps, (), 1.0, standing="proven") for i in range(strangers)),
    ])
    contributions = []
    for each in members:
        length = steps if each.standing == "proven" else 1
        noise = rng.standard_normal(mean.size) * math.sqrt((1 - alike) * length)
        update = (common * length + noise).astype(np.float32)
        contributions.append(Contribution(each.tokens, partial(np.copy, update), each.standing))
    clipped = clipped_mean(contributions, mean, clips=True)
    return float(mean @ common) / norm(common) ** 2, clipped


@pytest.mark.parametrize("alike", [0.25, 0.5, 0.95])
@pytest.mark.parametrize(("known", "strangers"), [(1, 1), (2, 3), (8, 8), (8, 1)])
def test_honest_strangers_lengthen_the_step_also_with_phases_four_times_as_long(
    known: int, strangers: int, alike: float
) -> None:
    step, clipped = with_strangers(known, strangers, 1, alike)
    assert (step, clipped) == (pytest.approx(1, abs=0.05), ())
    twice, clipped = with_strangers(known, strangers, 2, alike)
    assert (1.15 < twice < 1.5, clipped) == (True, ())
    assert 1.35 < with_strangers(known, strangers, 4, alike)[0] < 1.9


@pytest.mark.parametrize("standing", get_args(Standing))
def test_two_contributors_of_one_standing_are_not_clipped_against_each_other(standing: Standing) -> None:
    """Nobody can tell which of two lies: a zero update would clip away the honest one."""
    updates, mean = [honest(1)[0], WORST["zero"]], np.empty(SIZE, np.float32)
    assert clipped_mean([Contribution(10, partial(np.copy, each), standing) for each in updates], mean, clips=True) == ()
    np.testing.assert_allclose(mean, updates[0] / 2, rtol=1e-6)


def test_many_large_updates_are_decoded_again_instead_of_held(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [*honest(5), WORST["huge"]]
    held = mean_of(updates)[0]
    monkeypatch.setattr(influence, "DECODED_BYTES", 0)
    assert mean_of(updates)[0].tobytes() == held.tobytes()


# Steps of groups ----------------------------------------------------------------------------------------------------------

MEMBERS = (member("A", 10, (10, 10, 0, 0)), member("B", 10, (0, 0, 10, 0)), member("C", 10, (0, 0, 0, 10)))
GROUPS = {group.name: place for place, group in enumerate(LAYOUT.groups)}


def table(members: Sequence[Member] = MEMBERS) -> tuple[Part, ...]:
    return part_table(LAYOUT, tuple(members), codecs("none"), PART_BYTES)


def sums_of(parts: Sequence[Part], sizes: dict[str, float]) -> dict[int, float]:
    """Square sums of updates whose root mean square is a group's size (default 1) per root of ten tokens."""
    return {part.index: part.size * 10 * sizes.get(part.group.name, 1.0) ** 2 for part in parts}


def records(**known: float) -> np.ndarray:
    found = np.ones(len(GROUPS), np.float32)
    for name, value in known.items():
        found[GROUPS[name.replace("_", ".")]] = value
    return found


def bounds(sizes: dict[str, float], before: np.ndarray, members: Sequence[Member] = MEMBERS) -> StepBounds:
    parts = table(members)
    return bound_steps(LAYOUT, members, parts, sums_of(parts, sizes), before)


def test_an_honest_round_is_not_bounded_and_sets_the_records() -> None:
    found = bounds({}, np.zeros(len(GROUPS), np.float32))
    assert found.factors == {}
    np.testing.assert_allclose(found.records, 1, rtol=1e-6)
    assert bounds({"shared": 2.0}, found.records).factors == {}


@pytest.mark.parametrize("size", [100.0, 1e18, math.inf])
def test_a_sole_owners_expert_is_bounded_by_the_others(size: float) -> None:
    found = bounds({"expert.3": size}, np.zeros(len(GROUPS), np.float32))
    assert found.factors == {"expert.3": np.float32(STEP_RATIO / size)}


@pytest.mark.parametrize("name", ["shared", "router", "expert.0"])
def test_a_step_is_bounded_by_the_groups_own_record(name: str) -> None:
    """Also a reducer's lie about a mean, which no expert can show."""
    found = bounds({name: 1000.0}, records())
    assert found.factors == {name: np.float32(STEP_RATIO / 1000)}
    assert found.records[GROUPS[name]] == pytest.approx(1 + (STEP_RATIO - 1) * 0.25)


def test_an_owner_that_let_its_record_shrink_does_not_hold_back_the_next_one() -> None:
    assert bounds({}, records(expert_3=1e-9)).factors == {}
    assert "expert.3" in bounds({"expert.3": 100.0}, records(expert_3=1e9)).factors


def test_a_trainer_alone_is_not_bounded() -> None:
    alone = (member("A", 10, (10, 10, 10, 10)), replace(member("W", 0, (0, 0, 0, 0)), trains=False))
    assert bounds({"shared": 1000.0}, records(), alone).factors == {}


def test_a_bounded_step_changes_the_weights_by_the_factor_and_the_base_ends_with_the_records() -> None:
    parts = table()
    rng = np.random.default_rng(1)
    base = np.concatenate([rng.standard_normal(LAYOUT.size, np.float32), np.zeros(len(GROUPS), np.float32)])
    updates = {part.index: rng.standard_normal(part.size, np.float32) for part in parts}
    encoded = {index: update.tobytes() for index, update in updates.items()}
    found = StepBounds({"expert.2": np.float32(0.125)}, records(shared=7.0))
    new = np.concatenate(list(next_base_pieces(base, LAYOUT, parts, encoded, None, bounds=found)))
    for part in parts:
        factor = np.float32(0.125 if part.group.name == "expert.2" else 1)
        np.testing.assert_array_equal(new[part.start : part.stop], base[part.start : part.stop] + updates[part.index] * factor)
    np.testing.assert_array_equal(new[LAYOUT.size :], found.records)


def test_a_replaced_result_is_decoded_anew() -> None:
    part = table()[0]
    base, encoded = np.zeros(LAYOUT.size + len(GROUPS), np.float32), {part.index: np.ones(part.size, np.float32).tobytes()}
    new = NextBase(base, LAYOUT, [part], encoded, None)
    assert new.piece(0)[part.start] == 1
    encoded[part.index] = np.full(part.size, 2, np.float32).tobytes()
    assert new.piece(0)[part.start] == 2


# Rounds -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "fp16", "int4"])
@pytest.mark.parametrize("liar", ["A", "F"])
async def test_a_round_with_a_liar_stays_near_the_round_without_and_names_it(codec: str, liar: str) -> None:
    """Shared weights and its own expert; whoever reduces which part."""
    plan = make_plan_of([member(peer, 10, tuple(10 * (e == i) for e in range(4))) for i, peer in enumerate("ABCDEF")])
    truth, lies = random_updates(plan), random_updates(plan)
    for update in lies[liar].values():
        update *= np.float32(1000)
    base = np.concatenate([np.zeros(LAYOUT.size, np.float32), np.full(len(GROUPS), 1 / math.sqrt(10), np.float32)])
    bases = []
    for updates in (truth, lies):
        played = await Round.open(plan, updates, codec, clips=True)
        await played.run()
        commit = played.commit()
        found = []
        for exchange in played.exchanges.values():
            results = exchange.results
            bound = bounds_of(base, LAYOUT, commit, results)
            pieces = next_base_pieces(base, LAYOUT, results.committed(commit), results.encoded, None, bounds=bound)
            found.append(np.concatenate(list(pieces)))
        assert len({each.tobytes() for each in found}) == 1
        bases.append(found[0])
        clipped = {i for part in results.committed(commit) for i in results.clipped(part)}
        assert clipped == (set() if updates is truth else {"ABCDEF".index(liar)})
    clean, attacked = bases
    for group in LAYOUT.groups:
        here = slice(group.start, group.stop)
        limit = STEP_RATIO + 1 if group.expert is not None else (NORM_RATIO + 1) / 6 + 0.2
        assert norm(attacked[here] - clean[here]) <= 1.3 * limit * math.sqrt(group.size)
