"""Regions: peers that measured slow lines between them sum on either side first, and send one copy across."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import exchange_round
import pytest
from exchange_round import Round, codecs, make_plan_of, member, random_updates
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net import nearness
from spes_p2p.net.nearness import KEPT_ROUNDS, KEPT_TRANSFERS, Nearness
from spes_p2p.rounds import parts as parts_module
from spes_p2p.rounds.cells import make_cells
from spes_p2p.rounds.checks import ACROSS, IN_REGION, drawn, weight_of_checks
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import pulls, to_mask
from spes_p2p.rounds.planned import Member, Place
from spes_p2p.rounds.regions import IN_COMMON, SMALLEST_REGION, VISIT_EVERY, regions_of
from spes_p2p.rounds.traffic import traffic
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

SIZE = 8
WIDE = Layout([TensorSpec("embed", (2**12, 2**9), "shared")] + [
    TensorSpec(f"experts.{e}.down_proj", (2**7, 2**7), "expert", 0, e) for e in range(2 * SIZE)
])
PART_BYTES = 2**12
NAMES = tuple(f"{i:04d}" for i in range(2 * SIZE))


def members_of(*sizes: int, bandwidth: float = 1e6) -> tuple[Member, ...]:
    """Members in regions of these sizes, taken in turns, each with one expert."""
    places = sorted((place, region) for region, size in enumerate(sizes) for place in range(size))
    count = len(places)
    return tuple(
        replace(member(f"{i:04d}", 10 + i % 7, tuple(5 * (e == i) for e in range(2 * SIZE)), bandwidth), place=Place(region))
        for i, (_, region) in enumerate(places[:count])
    )


def crossing(members: tuple[Member, ...]) -> list[int]:
    """Return the bytes that leave each region."""
    parts, left = part_table(WIDE, members, codecs("int4"), PART_BYTES), [0] * (1 + max(m.place.region for m in members))
    for part in parts:
        for i, m in enumerate(members):
            parent = part.parent(i)
            if members[parent].place.region == m.place.region:
                continue
            left[m.place.region] += part.pushes(i) * part.encoded_bytes
            left[members[parent].place.region] += pulls(part, i) * part.encoded_bytes
    return left


def of_all(members: tuple[Member, ...]) -> int:
    """Return the bytes of one copy of everything."""
    return sum(part.encoded_bytes for part in part_table(WIDE, members, codecs("int4"), PART_BYTES))


def test_one_copy_crosses_between_two_regions() -> None:
    members = members_of(SIZE, SIZE)
    assert make_cells(members, range(2 * SIZE)) is not None
    flat = tuple(replace(m, place=Place()) for m in members)
    assert make_cells(flat, range(2 * SIZE)) is None
    both = crossing(members)
    parts = part_table(WIDE, members, codecs("int4"), PART_BYTES)
    shared = sum(part.encoded_bytes for part in parts if part.group.expert is None)
    assert sum(both) == of_all(members) + shared, "an update crosses in a region's sum, a result once"
    assert max(both) <= 1.1 * sum(both) / 2
    up, _ = traffic(parts, len(members))
    assert sum(up) == (len(members) - 1) * (of_all(members) + shared)


@pytest.mark.parametrize(("sizes", "are_cells"), [
    ((16,), False), ((8, 8), True), ((12, 4), True), ((9, 8, 7), True), ((64, 4), True), ((65, 4), False), ((4,) * 65, False),
])
def test_regions_are_cells_unless_that_makes_many_neighbours(sizes: tuple[int, ...], are_cells: bool) -> None:
    members = members_of(*sizes)
    found = make_cells(members, range(len(members)))
    if not are_cells:
        assert found == make_cells(tuple(replace(m, place=Place()) for m in members), range(len(members)))
        return
    assert found is not None
    assert found.of == tuple(m.place.region for m in members)
    for column in found.columns:
        assert [found.of[hub] for hub in column] == list(range(len(sizes)))


def test_guests_are_no_hubs() -> None:
    members = tuple(replace(m, place=Place(m.place.region, is_guest=i < 6)) for i, m in enumerate(members_of(8, 8)))
    parts = part_table(WIDE, members, codecs("int4"), PART_BYTES)
    assert {hub for part in parts for hub in part.hubs} == set(range(6, 16))
    assert any(part.parent(0) != part.reducer for part in parts)


def test_where_a_cell_has_too_few_contributors_to_tell_one_that_stands_out_all_push_to_the_reducer() -> None:
    members = tuple(
        replace(m, tokens=10 * (i < 11), routed=tuple(5 * (e == i % 4 and i < 8) for e in range(16)))
        for i, m in enumerate(members_of(8, 8))
    )
    both = {len(part.contributors): part for part in part_table(WIDE, members, codecs("int4"), PART_BYTES)}
    assert both[11].summing, "six and five"
    assert both[2].contributors == (3, 7), "of one region"
    assert both[2].hubs
    few = tuple(replace(m, tokens=10 * (i in (0, 1, 2, 4))) for i, m in enumerate(members))
    shared = next(part for part in part_table(WIDE, few, codecs("int4"), PART_BYTES) if part.group.expert is None)
    assert shared.hubs, "results cross once"
    assert not shared.summing, "three and one"


def test_without_a_reducer_in_each_region_there_are_no_cells() -> None:
    members = members_of(8, 8)
    assert make_cells(members, [i for i, m in enumerate(members) if m.place.region == 0]) is None


def test_a_thin_hub_reduces_less() -> None:
    members = tuple(replace(m, bandwidth=1e5) if m.place.region == 0 else m for m in members_of(8, 8))
    reduced = [0, 0]
    for part in part_table(WIDE, members, codecs("int4"), PART_BYTES):
        if part.group.expert is None:
            reduced[members[part.reducer].place.region] += part.encoded_bytes
    assert 5 * reduced[0] < reduced[1]


def test_reducers_in_other_regions_are_checked_an_eighth_as_often_and_those_of_the_own_one_twice_as_often() -> None:
    members = members_of(2, 2)
    plan, rng = make_plan_of(members), Random(0)
    weights = [[weight_of_checks(plan, one.peer, other.peer) for other in members] for one in members]
    assert weights == [[IN_REGION, ACROSS] * 2, [ACROSS, IN_REGION] * 2] * 2
    flat = make_plan_of(tuple(replace(m, place=Place(1)) for m in members))
    assert weight_of_checks(flat, NAMES[0], NAMES[1]) == 1.0
    opened = make_plan_of((*members[:3], replace(members[3], standing="newcomer")))
    assert weight_of_checks(opened, NAMES[0], NAMES[1]) == 1.0
    means = part_table(WIDE, members, codecs("int4"), PART_BYTES)[:10]
    count = {more: sum(len(drawn(means, 32, more, rng)) for _ in range(4000)) / 1000 for more in (1.0, IN_REGION, ACROSS)}
    assert count == pytest.approx({1.0: 1.0, IN_REGION: 2.0, ACROSS: 0.125}, rel=0.2)


def announcement(near: set[int], bandwidth: float = 1.0, trains: bool = True) -> Announcement:
    mask = to_mask(near, 2 * SIZE)
    return Announcement("c", 10, 9, 0, 0.0, "", "", 0, (), 0, 0.0, bandwidth, 0.0, None, (), trains, near=mask)


def places(
    near: Mapping[int, set[int]], round_number: int = 0, undialled: Sequence[int] = (), helpers: Sequence[int] = ()
) -> list[str]:
    """Return the members of each region, guests in brackets."""
    announcements = {NAMES[i]: announcement(each, float(i not in undialled), i not in helpers) for i, each in near.items()}
    found = {int(peer): place for peer, place in regions_of(announcements, NAMES, round_number).items()}
    own = {place.region: [str(i) for i in found if found[i] == Place(place.region)] for place in found.values()}
    guests = {region: [f"({i})" for i in found if found[i] == Place(region, is_guest=True)] for region in own}
    return [" ".join([*own[region], *guests[region]]) for region in sorted(own)]


def ring(*members: int) -> dict[int, set[int]]:
    """Each is near the two beside it in a ring, mutually, and calls the one after these near; of four each is near all."""
    count = len(members)
    return {member: {members[(i + step) % count] for step in (-1, 1, 2)} for i, member in enumerate(members)}


TWO = ring(0, 1, 2, 3) | ring(4, 5, 6, 7)


def test_a_region_is_what_mutual_nearness_connects() -> None:
    assert places(TWO) == ["0 1 2 3", "4 5 6 7"]
    assert places(TWO | {3: {0, 2, 4}}) == ["0 1 2 3", "4 5 6 7"], "4 does not say that 3 is near"
    all_near = {i: set(range(8)) - {i} for i in range(8)}
    assert places(all_near) == ["0 1 2 3 4 5 6 7"], "one region is none"


def test_a_pair_across_two_sites_that_is_near_by_chance_does_not_make_them_one() -> None:
    assert places(TWO | {3: {0, 1, 2, 4}, 4: {3, 5, 6, 7}}) == ["0 1 2 3", "4 5 6 7"]
    assert len(places(ring(*range(8)) | ring(*range(8, 16)))) == 1, "in a large ring neighbours have none in common"


@pytest.mark.parametrize("seed", range(20))
def test_two_sites_are_found_where_every_seventh_call_is_wrong(seed: int) -> None:
    rng = Random(seed)
    near = {i: {j for j in range(16) if j != i and (i % 2 == j % 2) != (rng.random() < 1 / 7)} for i in range(16)}
    found = places(near)
    assert len(found) == 2
    for site, of_site in zip((0, 1), found, strict=True):
        assert sum(int(member) % 2 == site for member in of_site.replace("(", " ").replace(")", " ").split()) >= 7


@pytest.mark.parametrize("count", [16, 32, 48])
def test_chance_rarely_makes_regions(count: int) -> None:
    found = 0
    for seed in range(100):
        rng, names = Random(seed), tuple(f"{i:04d}" for i in range(count))
        share = {i: rng.uniform(0.1, 0.5) for i in range(count)}
        near = {i: {j for j in range(count) if j != i and rng.random() < share[i]} for i in range(count)}
        announcements = {names[i]: replace(announcement(set()), near=to_mask(each, count)) for i, each in near.items()}
        found += len({place.region for place in regions_of(announcements, names, 1).values()}) > 1
    assert found <= 1


def test_sites_that_hold_less_than_half_of_all_are_no_regions() -> None:
    others = {i: set[int]() for i in range(8, 16)}
    assert len(places(TWO | others)) == 2
    assert len(places(TWO | others | {7: set()})) == 1


def test_a_region_whose_own_lines_are_slow_belongs_to_the_one_that_it_calls_near() -> None:
    slow = {i: {*each, *range(4)} if i >= 4 else each for i, each in TWO.items()}
    assert places(slow) == ["0 1 2 3 4 5 6 7"]
    assert places(slow | ring(8, 9, 10, 11)) == ["0 1 2 3 4 5 6 7", "8 9 10 11"]
    assert places(TWO | {4: {0, 1, 2, 3, 5, 6, 7}}) == ["0 1 2 3", "4 5 6 7"], "one member alone unites nothing"


def test_who_reduces_nothing_is_in_the_only_region_of_whose_reducers_it_calls_most_near() -> None:
    near = TWO | {8: {0, 1, 2, 4}, 9: {4, 5}, 10: {9, 5, 6, 12}}
    for round_number in (0, 1):
        assert places(near, round_number, undialled=(7, 8, 9, 10)) == ["0 1 2 3 8", "4 5 6 7 9 10"]


def test_a_newcomer_to_whom_nobody_has_sent_is_so_too_but_visits_each_region_in_turn() -> None:
    near = TWO | {8: {0, 1, 2}}
    assert [places(near, round_number) for round_number in (1, 2, VISIT_EVERY - 1)] == [["0 1 2 3 8", "4 5 6 7"]] * 3
    assert places(near, VISIT_EVERY) == ["0 1 2 3", "4 5 6 7 (8)"]
    assert places(near, 2 * VISIT_EVERY) == ["0 1 2 3 (8)", "4 5 6 7"]


def test_a_helper_which_sends_nothing_is_in_the_region_in_which_by_far_most_call_it_near() -> None:
    def near_with(helpers: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """`helpers`: who calls each of them near."""
        by = {i: {*each, *(helper for helper in helpers if i in helpers[helper])} for i, each in TWO.items()}
        return by | {helper: set[int]() for helper in helpers}

    for round_number in (1, VISIT_EVERY):
        assert places(near_with({8: {0, 1, 3, 4}, 9: {5}}), round_number, helpers=(8, 9)) == ["0 1 2 3 8", "4 5 6 7 9"]
    for torn in (near_with({8: set()}), near_with({8: {0, 1, 4}}), near_with({8: {0}}) | {8: {4}}):
        assert [places(torn, number, helpers=[8]) for number in (1, 2)] == [
            ["0 1 2 3", "4 5 6 7 (8)"], ["0 1 2 3 (8)", "4 5 6 7"],
        ]


def test_others_are_guests_of_each_region_in_turn() -> None:
    near = TWO | {8: {0, 1, 2, 4, 5, 6}, 9: set(), 10: {11}, 11: {10}}
    assert places(near, 1) == ["0 1 2 3 (9) (11)", "4 5 6 7 (8) (10)"]
    assert places(near, 2) == ["0 1 2 3 (8) (10)", "4 5 6 7 (9) (11)"]


def test_few_trainers_and_those_whom_nobody_can_dial_begin_no_region() -> None:
    assert places(ring(0, 1, 2, 3) | ring(4, 5, 6) | {7: {4}}) == ["0 1 2 3 4 5 6 7"], "7 alone says that it is near"
    assert places(TWO, helpers=[7]) == ["0 1 2 3 4 5 6 7"]
    assert places(TWO, undialled=(4, 5, 6, 7)) == ["0 1 2 3 4 5 6 7"]
    assert places(TWO, undialled=(4, 5, 6)) == ["0 1 2 3", "4 5 6 7"]


def test_a_mask_beyond_the_members_and_peers_that_are_away_mean_nothing() -> None:
    assert regions_of({"a": announcement({0, 1, 2, 15})}, ("b", "a"), 1) == {"a": Place()}


@given(st.dictionaries(st.integers(0, 15), st.sets(st.integers(0, 15)), min_size=1), st.integers(0, 3), st.randoms())
def test_regions_keep_neighbours_together_and_do_not_depend_on_order(
    near: dict[int, set[int]], round_number: int, random: Random
) -> None:
    announcements = [(NAMES[i], announcement(each)) for i, each in near.items()]
    found = regions_of(dict(announcements), NAMES, round_number)
    random.shuffle(announcements)
    assert regions_of(dict(announcements), NAMES, round_number) == found
    mutual = {i: {j for j in near[i] & near.keys() if i in near[j]} - {i} for i in near}
    for i in near:
        linked, todo = {i}, [i]
        while todo:
            one = todo.pop()
            todo += [
                other for other in mutual[one] - linked if (common := len(mutual[one] & mutual[other]))
                and common >= IN_COMMON * (min(len(mutual[one]), len(mutual[other])) - 1)
            ]
            linked.update(todo)
        assert len(linked) < SMALLEST_REGION or len({found[NAMES[j]] for j in linked}) == 1


FOUR = ("lab", "desk", "abroad", "moon")


def note(
    lately: Nearness, peer: str, size: float, seconds: float, is_confirmed: bool = True, began_s: float = 0.0
) -> None:
    lately.note(peer, int(size), began_s, began_s + seconds, is_confirmed)


def test_near_is_who_is_reached_about_as_fast_as_anybody_by_the_best_of_the_latest_transfers() -> None:
    lately = Nearness()
    for number, (peer, seconds) in enumerate(zip(FOUR, (1.0, 2.9, 3.1, 1000.0), strict=True)):
        note(lately, peer, 1e7, seconds, began_s=10.0 * number)
    assert lately.near((*FOUR, "new")) == {"lab", "desk"}
    assert lately.near(("abroad", "new")) == frozenset(), "nobody is far"
    for seconds in (2.0, 5.0):
        note(lately, "abroad", 1e7, seconds, began_s=2000.0 + 10 * seconds)
    assert lately.near(FOUR) == {"lab", "desk", "abroad"}
    for number in range(KEPT_TRANSFERS):
        note(lately, "abroad", 1e7, 5.0, is_confirmed=False, began_s=3000.0 + 10 * number)
    assert lately.near(FOUR) == {"lab", "desk"}


def test_the_last_transfers_on_a_full_line_put_nobody_far_but_those_that_leave_it_idle_do() -> None:
    for seconds, is_far in ((3.0, False), (9.0, True)):
        lately = Nearness()
        for number in range(10):
            note(lately, f"{number}", 1e6, 0.1 * (1 + number))
        note(lately, "last", 1e6, seconds)
        assert lately.near((*map(str, range(10)), "last")) == (frozenset(map(str, range(10))) if is_far else frozenset())


def test_a_late_transfer_counts_only_what_moved_meanwhile() -> None:
    lately = Nearness()
    for number in range(10):
        note(lately, f"{number}", 1e6, 10.0)
    note(lately, "late", 7e4, 1.1, began_s=8.9)
    assert lately.near((*map(str, range(10)), "late")) == frozenset(), "all at the same rate"


def test_transfers_that_were_cancelled_do_not_count_as_fast() -> None:
    lately = Nearness()
    for number in range(10):
        note(lately, f"{number}", 1e6, 10.0)
        note(lately, f"{number}", 1e7, 1.1, is_confirmed=False, began_s=20.0)
    note(lately, "abroad", 1e6, 100.0, began_s=30.0)
    assert lately.near((*map(str, range(10)), "abroad")) == frozenset(map(str, range(10)))


def test_small_and_short_transfers_put_nobody_far() -> None:
    lately = Nearness()
    note(lately, "lab", 1e7, 0.5)
    note(lately, "small", 1e4, 100.0)
    note(lately, "short", 1e6, 0.9)
    assert lately.near(("lab", "small", "short")) == frozenset()
    note(lately, "abroad", 1e6, 1.0)
    assert lately.near(("lab", "short", "abroad")) == {"lab", "short"}


def test_what_only_reached_a_buffer_shows_no_fast_line() -> None:
    lately = Nearness()
    note(lately, "lab", 1e7, 1.0)
    note(lately, "abroad", 1e6, 2.0, began_s=9.0)
    note(lately, "abroad", 1e6, 0.01, is_confirmed=False, began_s=20.0)
    assert lately.near(("lab", "abroad")) == {"lab"}


def test_a_line_that_was_not_used_for_many_rounds_is_unknown_again() -> None:
    lately = Nearness()
    note(lately, "abroad", 1e6, 2.0, began_s=9.0)
    for _ in range(KEPT_ROUNDS):
        note(lately, "lab", 1e7, 1.0)
        assert lately.near(("lab", "abroad")) == {"lab"}
    assert lately.near(("lab", "abroad")) == frozenset()


def site_of(peer: str) -> int:
    return int(peer) % 2


async def exchanged(members: tuple[Member, ...], between: float) -> tuple[float, float, Round]:
    """Exchange between two sites of members that are connected by a line of these bytes per second.

    Return the seconds, the bytes that crossed in the direction that carried more, and the round.
    """
    plan, network = make_plan_of(members), MemoryNetwork(latency_s=0.01)
    for site in (0, 1):
        network.share_line([m.peer for m in members if site_of(m.peer) == site], between, between)
    for m in members:
        network.set_bandwidth(m.peer, m.bandwidth, m.bandwidth)
    updates = random_updates(plan, layout=WIDE)
    played = await Round.open(plan, updates, "int4", network, timeout_s=600, layout=WIDE, part_bytes=PART_BYTES)
    began = asyncio.get_running_loop().time()
    await played.run()
    took = asyncio.get_running_loop().time() - began
    assert all(each.results.verified(part) for each in played.exchanges.values() for part in played.empty().parts)
    across = [0, 0]
    for (source, target), size in network.sent_bytes.items():
        across[site_of(source)] += size * (site_of(source) != site_of(target))
    return took, max(across), played


@pytest.mark.parametrize(("inside", "between"), [(5e6, 2.5e5), (1.25e8, 6.25e6)], ids=["thin", "gigabit"])
@pytest.mark.long
async def test_two_sites_send_one_copy_across_once_they_have_measured_the_line_between(
    inside: float, between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_round, "SILENCE_S", 10.0)
    members = members_of(SIZE, SIZE, bandwidth=inside)
    first_s, first_bytes, first = await exchanged(tuple(replace(m, place=Place()) for m in members), between)
    for peer, endpoint in first.endpoints.items():
        assert endpoint.nearness.near(NAMES) == {other for other in NAMES if site_of(other) == site_of(peer)} - {peer}
    then_s, then_bytes, _ = await exchanged(members, between)
    parts = part_table(WIDE, members, codecs("int4"), PART_BYTES)
    one_copy = sum(part.encoded_bytes for part in parts if part.group.expert is None or part.group.expert % 2)
    assert then_bytes <= 1.1 * one_copy
    assert 6 * then_bytes < first_bytes
    assert 4 * then_s < first_s


@pytest.mark.long
async def test_a_swarm_on_two_sites_finds_its_regions_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearness, "CONFIRMED_BYTES", 1)
    monkeypatch.setattr(nearness, "LONG_S", 0.2)
    monkeypatch.setattr(parts_module, "SMALL_BYTES", 8)
    swarm = VirtualSwarm(campaign(total_steps=200, codec="none", sync={"min_peers": 8}, experts={"redundancy": 2}))
    for one, other in combinations("ABCDEFGHIJ", 2):
        swarm.network.set_latency(one, other, 0.005 if (one in "ABCD") == (other in "ABCD") else 0.5)
    swarm.start_all("ABCDEFGH")

    def regions_now() -> set[str]:
        """Return the trainers of each region in the last round."""
        plan = swarm.peers["A"].replica.base.plan
        assert plan is not None
        of = {m.peer: m.place.region for m in plan.members if m.trains}
        return {"".join(sorted(peer for peer in of if of[peer] == region)) for region in set(of.values())}

    await swarm.until_round(1)
    assert regions_now() == {"ABCDEFGH"}, "nobody has measured anything"
    for number in range(3, 6):
        await swarm.until_round(number)
        assert regions_now() == {"ABCD", "EFGH"}
    results = swarm.peers["A"].replica.results.by_plan.values()
    assert any(part.summing for each in results for part in each.parts)
    swarm.kill("F")
    await swarm.until_round(7)
    assert regions_now() == {"ABCDEGH"}, "three are no region"
    swarm.start_again("F")
    swarm.start("I")
    await swarm.until_round(12)
    assert regions_now() == {"ABCD", "EFGHI"}
    swarm.start("J")
    await swarm.until_finished()
    assert regions_now() == {"ABCD", "EFGHIJ"}, "a newcomer finds the region that is its own"
    swarm.assert_replicas_agree()
