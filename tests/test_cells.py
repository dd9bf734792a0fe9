"""Cells: large rounds have the same means and bytes as small ones, few neighbours each, and lose little with a hub."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from exchange_round import (
    LAYOUT,
    PART_BYTES,
    Round,
    codecs,
    make_plan_of,
    member,
    random_updates,
    reference,
    trained_and_accounted,
)
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.codec import pack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.rounds import PullRequest, Update
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.rpc import Stream
from spes_p2p.observe.events import ResultsChecked, RoundCommitted
from spes_p2p.peer.cell_means import CellMean
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.part_frames import read_part
from spes_p2p.peer.reducer import EncodedMean, Reducer
from spes_p2p.rounds import cells
from spes_p2p.rounds.cells import FLAT_MEMBERS, make_cells
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.part_table import part_table, table_of
from spes_p2p.rounds.parts import Part, from_mask, pulls, to_mask, waits_for, weight
from spes_p2p.rounds.planned import Member, Place, Plan
from spes_p2p.rounds.revisions import moved_parts
from spes_p2p.rounds.sums import check_contributors
from spes_p2p.rounds.traffic import traffic
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

WIDE = Layout([TensorSpec("embed", (2**10, 2**8), "shared")] + [
    TensorSpec(f"experts.{e}.down_proj", (2**7, 2**6), "expert", 0, e) for e in range(16)
])


WIDE_OF_4 = Layout([TensorSpec("embed", (2**9, 2**8), "shared"), TensorSpec("gate", (4, 2**8), "router", 0)] + [
    TensorSpec(f"experts.{e}.down_proj", (2**7, 2**6), "expert", 0, e) for e in range(4)
])


def members_of(count: int, experts: int = 4, bandwidths: Sequence[float] = (1e6,)) -> tuple[Member, ...]:
    """Members of whom the first own one expert each, and all train the shared weights."""
    return tuple(
        member(f"{i:04d}", 10 + i % 7, tuple(5 * (e == i) for e in range(experts)), bandwidths[i % len(bandwidths)])
        for i in range(count)
    )


def neighbours(parts: Sequence[Part], count: int) -> list[set[int]]:
    """Return with whom each member exchanges anything."""
    found: list[set[int]] = [set() for _ in range(count)]
    for part in parts:
        for i in range(count):
            met = [part.pushed_to(i)] * part.pushes(i) + [part.parent(i)] * pulls(part, i)
            for other in met:
                found[i].add(other)
                found[other].add(i)
    return found


@pytest.mark.parametrize("count", [FLAT_MEMBERS + 1, 64, 256, 1000])
def test_a_large_round_has_few_neighbours_and_sends_as_many_bytes_as_a_small_one(count: int) -> None:
    members = members_of(count, 16)
    parts = part_table(WIDE, members, codecs("int4"))
    assert all(part.hubs for part in parts)
    up, down = traffic(parts, count)
    by_kind = {kind: sum(part.encoded_bytes for part in parts if part.group.kind == kind) for kind in ("shared", "expert")}
    assert sum(up) == sum(down) == (2 * by_kind["shared"] + by_kind["expert"]) * (count - 1)
    assert max(map(len, neighbours(parts, count))) <= 2 * math.ceil(math.sqrt(count))


def test_several_owners_of_an_expert_push_it_themselves_to_few_and_hubs_hand_on_the_result() -> None:
    members = members_of(256, 16)
    members = tuple(replace(m, routed=tuple(5 * (i // 4 == e) for e in range(16))) for i, m in enumerate(members))
    parts = part_table(WIDE, members, codecs("int4"), 2**9)
    experts = [part for part in parts if part.group.kind == "expert"]
    assert {len(part.contributors) for part in experts} == {4}
    assert not any(part.summing for part in experts)
    assert max(map(len, neighbours(parts, 256))) <= 3 * 16
    sent, _ = traffic(parts, 256)
    assert max(sent) < 1.3 * sum(sent) / 256


def test_only_those_that_exchange_with_a_reducer_are_to_complain_about_it() -> None:
    """Not all members, also where contributors push to the reducer themselves: half of all would never complain."""
    count = 64
    for part in part_table(WIDE, members_of(count, 16), codecs("int4")):
        met = neighbours([part], count)[part.reducer]
        assert {i for i in range(count) if waits_for(part, i)} == met
        assert len(met) < count / 2


def test_a_round_of_few_members_or_of_few_strangers_that_can_be_hubs_has_no_cells() -> None:
    for members in (members_of(FLAT_MEMBERS), open_members(30, 8), open_members(4, 36, newcomers=31), open_members(0, 40)):
        assert not any(part.hubs for part in part_table(LAYOUT, members, codecs("int4"), PART_BYTES))


def open_members(vouched: int, strangers: int, newcomers: int = 0, experts: int = 4) -> tuple[Member, ...]:
    """Members of an open campaign; each expert has a vouched owner and a stranger."""
    members = list(members_of(vouched + strangers, 0))
    for i, each in enumerate(members):
        standing: Standing = "vouched" if i < vouched else "newcomer" if i < vouched + newcomers else "proven"
        owns = i % max(1, vouched) if i < vouched else i - vouched
        members[i] = replace(each, standing=standing, routed=tuple(5 * (e == owns) for e in range(experts)))
    return tuple(members)


@pytest.mark.parametrize(("vouched", "strangers", "newcomers"), [(5, 200, 32), (2, 40, 10), (8, 1000, 100)])
def test_vouched_reducers_exchange_with_one_hub_of_each_cell_of_strangers(vouched: int, strangers: int, newcomers: int) -> None:
    members, cell_count = open_members(vouched, strangers, newcomers), math.isqrt(strangers)
    parts = part_table(WIDE_OF_4, members, codecs("int4"), 2**11)
    assert {part.reducer for part in parts} == set(range(vouched))
    for part in parts:
        assert all(members[hub].standing == "proven" for hub in part.hubs)
        assert part.group.kind == "expert" or len(part.summing) == cell_count
    met = neighbours(parts, len(members))
    columns = math.ceil((strangers - newcomers) // cell_count / vouched)
    assert max(len(met[i]) for i in range(vouched)) <= vouched - 1 + cell_count * columns + 4
    assert max(len(met[i]) for i in range(vouched, len(members))) <= 2 * cell_count + vouched + 2
    up, down = traffic(parts, len(members))
    size = sum(part.encoded_bytes for part in parts)
    assert max(up[:vouched]) < 1.3 * size * (vouched + cell_count) / vouched
    assert max(up[vouched:]) < 2.5 * size + max(up[:vouched]) / 10
    assert sum(up) == sum(down)


def test_lots_draw_who_meets_whom_among_strangers_with_lines_alike() -> None:
    members = tuple(replace(m, bandwidth=1e6 * (1 + 3 * (i % 2))) for i, m in enumerate(open_members(3, 60)))
    rng = random.Random(0)
    found = [make_cells(tuple(replace(m, lot=rng.randbytes(4)) for m in members), range(3)) for _ in range(2)]
    assert found[0] != found[1]
    for each in found:
        assert each is not None
        alike = [len({members[hub].bandwidth for hub in column}) for column in each.columns]
        assert sum(count > 1 for count in alike) <= 1


def test_strangers_that_claim_faster_lines_than_others_are_no_whole_column() -> None:
    rng, liars, whole = random.Random(0), set(range(3, 10)), 0
    members = tuple(replace(m, bandwidth=4e6 if i in liars else 1e6) for i, m in enumerate(open_members(3, 60)))
    for _ in range(50):
        found = make_cells(tuple(replace(m, lot=rng.randbytes(32)) for m in members), range(3))
        assert found is not None
        whole += any(set(column) <= liars for column in found.columns)
    assert whole == 0


@given(
    st.lists(st.sampled_from([0.0, 1e5, 1e6, 1e7]), min_size=FLAT_MEMBERS + 1, max_size=80),
    st.lists(st.lists(st.integers(0, 79), min_size=1, max_size=3), min_size=4, max_size=4),
    st.sampled_from(["int4", "sparse"]),
)
def test_every_update_reaches_its_reducer_and_every_result_every_member(
    bandwidths: list[float], owners: list[list[int]], codec: str
) -> None:
    count = len(bandwidths)
    members = tuple(
        member(f"{i:04d}", 5, tuple(int(i in {o % count for o in own}) for own in owners), bandwidth)
        for i, bandwidth in enumerate(bandwidths)
    )
    reducers = [i for i, bandwidth in enumerate(bandwidths) if bandwidth]
    parts = part_table(LAYOUT, members, codecs(codec), PART_BYTES)
    assert bool(parts) == bool(reducers)
    for part in parts:
        assert part.contributors == tuple(i for i, m in enumerate(members) if weight(m, part.group))
        assert bandwidths[part.reducer]
        assert all(bandwidths[hub] for hub in part.hubs)
        for i in range(count):
            assert part.reducer in (part.parent(i), part.parent(part.parent(i)))
            assert part.reducer in (part.pushed_to(i), part.pushed_to(part.pushed_to(i)))
        summed = [part.in_cell(hub) for hub in part.summing] or [part.contributors]
        assert sorted(i for cell in summed for i in cell) == list(part.contributors)
        assert not (part.summing and part.codec.leaves_out)
        if not part.summing:
            assert all(part.pushed_to(i) == part.reducer for i in part.contributors)


@pytest.mark.parametrize("bandwidths", [(1e6,), (1e6, 2e6), (1e6, 4e6), (1e6, 1e7), (1e6, 1e7, 1e7, 1e7)])
@pytest.mark.parametrize("count", [64, 256])
def test_the_busiest_line_sends_for_little_longer_than_any_assignment_needs(count: int, bandwidths: tuple[float, ...]) -> None:
    members = members_of(count, count, bandwidths)
    experts = [TensorSpec(f"experts.{e}.down_proj", (2**7, 2**6), "expert", 0, e) for e in range(count)]
    parts = part_table(Layout([TensorSpec("embed", (2**11, 2**8), "shared"), *experts]), members, codecs("int4"), 2**9)
    assert all(len({members[hub].bandwidth for hub in part.hubs}) == 1 for part in parts)
    sent_s = [sent / m.bandwidth for sent, m in zip(traffic(parts, count)[0], members, strict=True)]
    own_s = [sum(p.encoded_bytes for p in parts if i in p.contributors) / m.bandwidth for i, m in enumerate(members)]
    all_s = sum(s * m.bandwidth for s, m in zip(sent_s, members, strict=True)) / sum(m.bandwidth for m in members)
    assert max(sent_s) <= 1.3 * max(max(own_s), all_s)


@pytest.mark.parametrize(("count", "bandwidths"), [(40, (1e6,)), (57, (1e6,)), (40, (1e6, 2e6)), (64, (4e6, 2e6, 1.5e6))])
def test_columns_use_most_of_all_lines_whatever_the_number_of_members(count: int, bandwidths: tuple[float, ...]) -> None:
    members = members_of(count, 0, bandwidths)
    cells = make_cells(members, range(count))
    assert cells is not None
    used = sum(len(hubs) * min(members[hub].bandwidth for hub in hubs) for hubs in cells.columns)
    assert used >= 0.93 * sum(m.bandwidth for m in members)


@pytest.mark.parametrize(("count", "liars"), [(64, 6), (64, 7), (256, 12), (256, 15)])
def test_fewer_liars_than_cells_are_no_column(count: int, liars: int) -> None:
    """Nor do they choose the number of cells, with lines four times as fast as others."""
    cells = make_cells(members_of(count, 0, (4e6,) * liars + (1e6,) * (count - liars)), range(count))
    assert cells is not None
    assert len(cells.columns[0]) == math.isqrt(count)
    assert not any(set(hubs) <= set(range(liars)) for hubs in cells.columns)


@pytest.mark.parametrize("count", [64, 256])
def test_a_thin_line_that_results_fill_receives_few_updates(count: int) -> None:
    """None, but for what exceeds the share of faster columns."""
    members = members_of(count, 8, (4e6, 2e6, 1.5e6))
    experts = [TensorSpec(f"experts.{e}.down_proj", (2**7, 2**7), "expert", 0, e) for e in range(8)]
    parts = part_table(Layout([TensorSpec("embed", (2**8, 2**7), "shared"), *experts]), members, codecs("int8"), 2**9)
    received, least_s = traffic(parts, count)[1], sum(part.encoded_bytes for part in parts) / 1.5e6
    assert max(size / m.bandwidth for size, m in zip(received, members, strict=True)) <= 1.06 * least_s


@pytest.mark.parametrize("lost", [0, 1, 5])
@pytest.mark.parametrize(("count", "regions"), [(64, 1), (100, 1), (256, 1), (16, 2), (40, 2)])
@pytest.mark.parametrize("experts", [8, 16])
def test_few_owners_are_busy_for_little_longer_than_others_also_after_a_loss(
    count: int, regions: int, experts: int, lost: int
) -> None:
    """Owners are where hubs of one cell would come from, and demoted members send their updates once."""
    layout = Layout([TensorSpec("embed", (2**7, 2**8), "shared")] + [
        TensorSpec(f"experts.{e}.down_proj", (2**17 // experts,), "expert", 0, e) for e in range(experts)
    ])
    members = tuple(
        replace(member(f"{i:04d}", 10, tuple(5 * (i == e * count // experts) for e in range(experts)), 1e6),
                place=Place(i % regions), demoted="lost" if 0 < i <= lost else "")
        for i in range(count)
    )
    parts = part_table(layout, members, codecs("int8"), 2**9)
    assert all(part.hubs for part in parts)
    sent, own = traffic(parts, count)[0], [0] * count
    for part in parts:
        for i in part.contributors:
            own[i] += part.encoded_bytes
    able = [i for i, m in enumerate(members) if not m.demoted]
    assert max(sent[i] for i in able) <= 1.3 * max(sum(sent[i] for i in able) / len(able), *(own[i] for i in able))
    assert all(sent[i] == own[i] for i in range(count) if i not in able)


def test_cells_hardly_change_when_lines_are_measured_anew() -> None:
    before = make_cells(members_of(64, 0, (1e6, 4e6)), range(64))
    after = make_cells(members_of(64, 0, (1.1e6, 3.9e6)), range(64))
    assert before == after


def large_plan(count: int = 40) -> Plan:
    """A round in which two members own one expert together, and a member that cannot be dialled owns one alone."""
    members = list(members_of(count))
    members[7] = replace(members[7], routed=(0, 9, 0, 0))
    members[3] = replace(members[3], bandwidth=0.0)
    return make_plan_of(members)


def open_plan() -> Plan:
    """A large round of an open campaign, in which a stranger that cannot be dialled owns an expert alone."""
    members = list(open_members(3, 40, newcomers=8))
    members[11] = replace(members[11], routed=(0, 9, 0, 0))
    members[3] = replace(members[3], bandwidth=0.0)
    members[42] = replace(members[42], bandwidth=0.0, routed=(0, 0, 0, 9))
    return make_plan_of(replace(m, routed=(*m.routed[:3], m.routed[3] * (i == 42))) for i, m in enumerate(members))


def base() -> np.ndarray:
    return np.random.default_rng(99).standard_normal(LAYOUT.size, np.float32)


@pytest.mark.parametrize("make_plan", [large_plan, open_plan])
@pytest.mark.parametrize(("codec", "rounding"), [("none", 0.0), ("int8", 1 / 127), ("int4", 1 / 7)])
async def test_the_new_base_is_the_weighted_mean_and_bit_identical_everywhere(
    codec: str, rounding: float, make_plan: Callable[[], Plan]
) -> None:
    plan = make_plan()
    updates = random_updates(plan)
    played = await Round.open(plan, updates, codec)
    await played.run()
    commit = played.commit()
    assert commit.dropped == ()
    assert commit.heard == tuple(range(len(plan.members)))
    bases = {played.new_base(m.peer, commit, base()).tobytes() for m in plan.members}
    assert len(bases) == 1
    largest = max(np.abs(update).max() for own in updates.values() for update in own.values())
    new = np.frombuffer(bases.pop(), np.float32)
    np.testing.assert_allclose(new, reference(plan, updates, base()), rtol=0, atol=1e-5 + 1.5 * largest * rounding)


async def test_a_signature_under_own_updates_does_not_wait_for_a_cells_mean_in_the_same_stream() -> None:
    """A hub's mean waits for its whole cell; a reducer needs the hub's update of an expert before."""
    members = [
        replace(m, routed=tuple(5 * (i // 2 == e) for e in range(4))) for i, m in enumerate(members_of(FLAT_MEMBERS + 1))
    ]
    layout = Layout([TensorSpec("embed", (2**8, 2**7), "shared"), TensorSpec("gate", (4, 2**8), "router", 0)] + [
        TensorSpec(f"experts.{e}.down_proj", (2**8, 2**8), "expert", 0, e) for e in range(4)
    ])
    plan, network = make_plan_of(members), MemoryNetwork(latency_s=0.05)
    played = await Round.open(plan, random_updates(plan, layout=layout), "int4", network, layout=layout, part_bytes=2**10)
    parts, names = part_table(layout, plan.members, codecs("int4"), 2**10), [m.peer for m in members]
    unsigned: dict[tuple[str, str], set[int]] = defaultdict(set)
    waited: list[bool] = []

    def note(frame: Frame) -> Frame:
        own = unsigned[frame.sender, frame.receiver]
        if frame.method == PUSH and frame.kind == Kind.PUSHED:
            own.clear()
        elif frame.method == PUSH and frame.kind == Kind.PART:
            index, _ = read_part(memoryview(frame.body))
            if names.index(frame.sender) not in parts[index].summing:
                own.add(index)
            elif (frame.sender, frame.receiver) in both:
                waited.append(bool(own))
        return frame

    def receivers(i: int, is_mean: bool) -> set[str]:
        return {names[part.pushed_to(i)] for part in parts if part.pushes(i) and (i in part.summing) == is_mean}

    both = {(names[i], each) for i in range(len(names)) for each in receivers(i, False) & receivers(i, True)}
    network.tap = note
    await played.run()
    assert len(waited) >= len(both) > 0
    assert not any(waited)


@pytest.mark.long
async def test_peers_open_streams_with_their_neighbours_only() -> None:
    plan, network = large_plan(64), MemoryNetwork(latency_s=0.05)
    met: dict[str, set[str]] = defaultdict(set)

    def note(frame: Frame) -> Frame:
        met[frame.sender].add(frame.receiver)
        met[frame.receiver].add(frame.sender)
        return frame

    network.tap = note
    played = await Round.open(plan, random_updates(plan), "int4", network)
    await played.run()
    assert played.commit().dropped == ()
    assert max(map(len, met.values())) <= 2 * 8


@pytest.mark.long
@pytest.mark.parametrize("make_plan", [large_plan, open_plan])
@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4", "sparse"])
async def test_over_rounds_the_base_moves_by_all_that_was_trained_but_for_pending_and_residuals(
    codec: str, make_plan: Callable[[], Plan]
) -> None:
    trained, accounted = await trained_and_accounted(make_plan(), codec, 3, base())
    np.testing.assert_allclose(accounted, trained, rtol=0, atol=1e-4)


@pytest.mark.long
async def test_a_lost_hub_costs_its_cells_work_on_its_column_and_no_result() -> None:
    plan = large_plan()
    played = await Round.open(plan, random_updates(plan), "int4")
    dead = next(hub for part in played.empty().parts for hub in part.summing if hub not in (part.reducer, 0))
    name = plan.members[dead].peer
    played.network.hook = lambda peer, method, index: (
        played.network.kill(name) if (peer, method, index) == (name, "push", 1) else None
    )
    others = [m.peer for m in plan.members if m.peer != name]
    running = played.run(others)
    dying = played.network.run_peer(name, played.exchanges[name].run())
    await running
    assert dying.done()
    for part in played.empty().parts:
        if part.reducer == dead:
            continue
        lost = set(part.in_cell(dead)) if dead in part.summing else {dead}
        for peer in others:
            results = played.exchanges[peer].results
            assert results.verified(part)
            assert set(results.contributors(part)) >= set(part.contributors) - lost - {dead}


async def test_results_that_wait_for_nobody_arrive_before_a_late_member_has_sent_its_update() -> None:
    """Hubs hand on what one member alone has trained while they wait for their cells' updates."""
    members = [replace(m, bandwidth=10.0 if i < 30 else 0.0) for i, m in enumerate(members_of(40))]
    plan = make_plan_of(members)
    played = await Round.open(plan, random_updates(plan), "int4", MemoryNetwork(latency_s=0.05))
    parts, *others, late = played.empty().parts, *(m.peer for m in plan.members)
    assert any(part.cell_of.index(part.cell_of[39], 30) < 39 for part in parts), "its cell has another that is no hub"
    running = asyncio.create_task(played.run(others))
    await asyncio.sleep(1.0)
    for part in parts:
        if len(part.contributors) == 1:
            assert all(part.index in played.exchanges[peer].results.encoded for peer in others)
    await asyncio.gather(running, played.run([late]))
    assert played.commit().dropped == ()


async def test_a_hub_that_lives_and_hands_on_nothing_costs_no_result() -> None:
    plan = large_plan()
    played = await Round.open(plan, random_updates(plan), "int4")
    silent = next(hub for part in played.empty().parts for hub in part.summing if hub not in (part.reducer, 0))
    endpoint = played.endpoints[plan.members[silent].peer]

    async def wait(stream: Stream) -> None:
        await stream.alive(asyncio.sleep(1000))

    for method in (PUSH, PULL):
        await endpoint.serve(method, wait)
    others = [m.peer for i, m in enumerate(plan.members) if i != silent]
    await played.run(others)
    for part in played.empty().parts:
        if part.reducer != silent:
            assert all(played.exchanges[peer].results.verified(part) for peer in others)


@pytest.mark.parametrize("others_lost", [0, 3])
def test_when_a_reducer_is_lost_hubs_push_again_and_nobody_else(others_lost: int) -> None:
    """And their means may have updates of members that were lost after they had pushed."""
    members = members_of(64)
    parts = part_table(LAYOUT, members, codecs("int4"), PART_BYTES)
    before = next(part for part in parts if part.summing)
    hub = next(hub for hub in before.summing if hub != before.reducer)
    gone = [i for i in before.in_cell(hub) if i not in before.summing][:others_lost]
    lost = tuple(sorted({before.reducer, *gone}))
    for part in moved_parts(parts, members, lost, set(lost), 1).values():
        assert part.reducer not in lost
        if part.summing:
            assert [i for i in range(64) if part.pushes(i)] == [i for i in part.summing if i != part.reducer]
            for its in part.summing:
                mask = to_mask(parts[part.index].in_cell(its), 64)
                named = Update(part.index, 64, bytes(32), mask, to_mask((), 64), bytes(32))
                check_contributors(named, part, its, 64)


@pytest.mark.long
async def test_a_hub_may_be_as_slow_as_the_slowest_member_of_its_cell() -> None:
    """Roots wait for means that come far more slowly than their hub's line allows."""
    members, network = list(members_of(40, 0, (1e7,))), MemoryNetwork(latency_s=0.05)
    members[39] = replace(members[39], bandwidth=2e5)
    network.set_bandwidth(members[39].peer, 1.4e5, 1e9)
    plan, layout = make_plan_of(members), Layout([TensorSpec("embed", (2**11, 2**8), "shared")])
    updates = random_updates(plan, layout=layout)
    played = await Round.open(plan, updates, "none", network, timeout_s=600.0, layout=layout, part_bytes=2**14)
    await played.run()
    parts = played.empty().parts
    assert not any(39 in part.hubs for part in parts)
    assert all(played.exchanges["0000"].results.contributors(part) == part.contributors for part in parts)


async def test_a_mask_that_does_not_fit_is_refused_and_one_is_read_in_linear_time() -> None:
    plan = large_plan()
    played = await Round.open(plan, random_updates(plan), "int4")

    async def ask() -> None:
        async with played.endpoints["0001"].stream("0000", PULL) as stream:
            await stream.send(pack(PullRequest(plan.id, parts=b"1" * 2**10)))
            await stream.message(Kind.PART)

    with pytest.raises(Refused, match="mask"):
        await played.network.run_peer("0001", ask())
    assert len(from_mask(b"\xff" * 2**17)) == 2**20


def test_a_hub_that_names_contributors_of_another_cell_is_refused() -> None:
    part = next(part for part in part_table(LAYOUT, members_of(40), codecs("int4"), PART_BYTES) if part.summing)
    hub = next(hub for hub in part.summing if hub != part.reducer)
    own, strange, none = part.in_cell(hub), part.in_cell(part.reducer), to_mask((), 40)
    fitting = Update(part.index, len(own), bytes(32), to_mask(own, 40), none, bytes(32))
    check_contributors(fitting, part, hub, 40)
    wrong = (to_mask((*own, *strange), 40), none), (none, none), (b"", b""), (to_mask(own[:1], 40), to_mask(own, 40))
    for named, clipped in wrong:
        with pytest.raises(Refused):
            check_contributors(replace(fitting, members=named, clipped=clipped), part, hub, 40)
    with pytest.raises(Refused):
        check_contributors(replace(fitting, inputs=b""), part, hub, 40)
    with pytest.raises(Refused):
        check_contributors(replace(fitting, tokens=len(own) - 1), part, hub, 40)
    direct = replace(part, hubs=(), summing=())
    with pytest.raises(Refused):
        check_contributors(fitting, direct, own[0], 40)


# Swarms -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give rounds of nine members cells: three of three, with three columns."""
    monkeypatch.setattr(cells, "FLAT_MEMBERS", 8)
    table_of.cache_clear()
    yield
    table_of.cache_clear()


def hubs_seen(swarm: VirtualSwarm) -> bool:
    return any(part.summing for results in swarm.peers["A"].replica.results.by_plan.values() for part in results.parts)


@pytest.mark.usefixtures("_small_cells")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.long
async def test_a_swarm_with_cells_trains_and_checks_its_reducers(overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=60, codec="int4", sync={"min_peers": 9, "overlap": overlap}))
    swarm.start_all("ABCDEFGHI")
    await swarm.until_round(3)
    assert hubs_seen(swarm)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    found = [event for recorder in swarm.recorders.values() for event in recorder.of(ResultsChecked)]
    last = max(each.round for each in found)
    assert sum(each.results for each in found) > 8
    assert not [each for each in found if each.wrong or (each.unanswered and each.round < last)]
    assert swarm.nodes["W"].log.last.tokens == sum(recorded_tokens(swarm))


def recorded_tokens(swarm: VirtualSwarm) -> list[int]:
    return [event.tokens for event in swarm.recorders["A"].of(RoundCommitted)]


@pytest.mark.usefixtures("_small_cells")
@pytest.mark.parametrize("method", ["push", "pull"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_members_killed_in_an_exchange_with_cells_cost_no_round(method: str, seed: int) -> None:
    """Whatever each of them was in that round: hub, reducer, contributor."""
    swarm = VirtualSwarm(campaign(total_steps=60, sync={"min_peers": 7, "silence_s": 5.0}))
    swarm.start_all("ABCDEFGHI")
    await swarm.until_round(2)
    victims, killed = random.Random(seed).sample("ABCDEFGHI", 2), set[str]()

    def hook(peer: str, its_method: str, index: int) -> None:
        if peer in victims and peer not in killed and its_method == method and index >= 1 + seed % 2:
            killed.add(peer)
            swarm.kill(peer)

    swarm.network.hook = hook
    await swarm.until_finished()
    assert killed == set(victims)
    swarm.assert_replicas_agree()


@pytest.mark.usefixtures("_small_cells")
@pytest.mark.long
def test_a_reducer_that_serves_wrong_results_is_excluded_in_a_round_with_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Reducer.encode_mean

    def encode_mean(self: Reducer, part: Part, updates: Mapping[int, Input]) -> EncodedMean:
        mean = honest(self, part, updates)
        if self.context.endpoint.peer_id != "A" or not part.summing or self.context.plan.round < 2:
            return mean
        return replace(mean, encoded=part.codec.encode(part.codec.decode(mean.encoded, part.size) * np.float32(1.5)))

    monkeypatch.setattr(Reducer, "encode_mean", encode_mean)
    simulate(until_a_is_excluded)


async def until_a_is_excluded() -> None:
    swarm = VirtualSwarm(campaign(total_steps=4000, codec="int8", sync={"min_peers": 9}))
    swarm.start_all("ABCDEFGHI")
    await until_only_this_one_is_excluded(swarm, "A")


async def until_only_this_one_is_excluded(swarm: VirtualSwarm, liar: str) -> None:
    life, log = swarm.tasks[liar], swarm.nodes["W"].log
    await swarm.until(lambda: liar in log.last.excluded)
    assert log.last.excluded == (liar,)
    await asyncio.wait({life}, timeout=200)
    with pytest.raises(UserError, match="a proof excludes this peer"):
        life.result()


def wrong_values(mean: CellMean, part: Part) -> CellMean:
    body = part.codec.encode(part.codec.decode(mean.body, part.size) * np.float32(1.5))
    return CellMean(replace(mean.update, digest=content_digest(body)), body)


def more_tokens(mean: CellMean, part: Part) -> CellMean:
    return replace(mean, update=replace(mean.update, tokens=mean.update.tokens + 1))


HubsLie = Callable[[CellMean, Part], CellMean]


def lie_as_hub(liar: str, lie: HubsLie, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one peer lie in all means of its cells, from round 2 on."""
    honest = Reducer._cell_mean

    def cell_mean(self: Reducer, part: Part, updates: Mapping[int, Input], mean: EncodedMean | None) -> CellMean:
        made = honest(self, part, updates, mean)
        lies = self.context.endpoint.peer_id == liar and self.context.plan.round >= 2
        return lie(made, part) if lies else made

    monkeypatch.setattr(Reducer, "_cell_mean", cell_mean)


@pytest.mark.usefixtures("_small_cells")
@pytest.mark.parametrize("lie", [wrong_values, more_tokens])
@pytest.mark.long
def test_a_hub_that_falsifies_its_cells_mean_is_excluded(lie: HubsLie, monkeypatch: pytest.MonkeyPatch) -> None:
    lie_as_hub("A", lie, monkeypatch)
    simulate(until_a_is_excluded)


@pytest.mark.usefixtures("_small_cells")
@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.long
def test_a_hub_that_shows_other_inputs_or_none_is_disputed_and_not_excluded(
    hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Exchanges.inputs_of

    def inputs_of(self: Exchanges, plan: str, part: int, of_cell: bool = False) -> dict[int, Input] | None:
        found = honest(self, plan, part, of_cell)
        if self._node.peer_id != "A" or not of_cell or found is None:
            return found
        return None if hides else dict(list(found.items())[1:])

    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=4000, codec="int8", sync={"min_peers": 9}))
        swarm.start_all("ABCDEFGHI")
        log = swarm.nodes["W"].log
        await swarm.until(lambda: bool(log.last.disputed))
        assert "A" in {log.last.members[i] for i in log.last.disputed}
        assert not log.last.excluded

    monkeypatch.setattr(Exchanges, "inputs_of", inputs_of)
    simulate(main)
