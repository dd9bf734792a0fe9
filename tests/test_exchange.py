"""A round's exchange: the mean that it makes, the bits that it shares, the bytes that it costs, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from exchange_round import (
    LAYOUT,
    PART_BYTES,
    SILENCE_S,
    Round,
    make_plan_of,
    member,
    random_updates,
    reference,
    trained_and_accounted,
)

from spes_p2p.consensus.signed import sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, PullRequest, Pushed, PushHeader, Update
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.interfaces import Channel
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.throughput import UNKNOWN_BYTES_PER_S
from spes_p2p.peer.own_work import taken
from spes_p2p.peer.part_frames import INDEX_BYTES, WEIGHT_BYTES
from spes_p2p.peer.push_patience import STRANGERS_SHARE
from spes_p2p.peer.serving import MAX_BARE
from spes_p2p.peer.transfers import IN_FLIGHT_S, WINDOW_BYTES
from spes_p2p.rounds.blockwise import Blockwise
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part, mask_bytes, to_mask
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import ABSENT
from spes_p2p.rounds.traffic import SLOWEST_BYTES_PER_S
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity

SHARED_ONLY = (0, 0, 0, 0)
MEMBERS = {
    "two, each expert one owner": [member("A", 100, (5, 7, 0, 0)), member("B", 300, (0, 0, 3, 1))],
    "two, an expert with several owners": [member("A", 100, (5, 7, 0, 0)), member("B", 50, (50, 0, 3, 0))],
    "three, an expert with three owners": [
        member("A", 10, (1, 0, 0, 0)), member("B", 20, (2, 4, 0, 0)), member("C", 1, (997, 0, 9, 0)),
    ],
    "four, one did not train": [
        member("A", 64, (9, 0, 0, 0)), member("B", 64, (0, 9, 0, 0)), member("C", 0, SHARED_ONLY), member("D", 7, (0, 3, 2, 8)),
    ],
    "three, one cannot be dialled and owns an expert alone": [
        member("A", 10, (1, 0, 0, 0)), member("B", 20, (0, 4, 0, 0)), member("C", 5, (0, 0, 9, 9), bandwidth=0.0),
    ],
    "four, one hands its expert on": [
        member("A", 10, (9, 0, 0, 0), 0.05), member("B", 20, (0, 4, 0, 0)), member("C", 5, (0, 0, 9, 9)),
        member("D", 0, SHARED_ONLY),
    ],
}


ROUNDING = {
    "none": 0.0, "fp16": 2**-11, "int8": 1 / 127, "int4": 1 / 7, "ternary": 1.0, "sparse16": 1.0, "sparse": 1.0,
    "sparse64": 1.0,
}
"""Of a sum of two encodings, the sender's and the reducer's, as a share of the largest value."""


def base() -> np.ndarray:
    return np.random.default_rng(99).standard_normal(LAYOUT.size, np.float32)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", MEMBERS)
async def test_the_new_base_is_the_weighted_mean_and_bit_identical_everywhere(case: str, codec: str) -> None:
    plan = make_plan_of(MEMBERS[case])
    updates = random_updates(plan)
    played = await Round.open(plan, updates, codec)
    await played.run()
    commit = played.commit()
    assert commit.dropped == ()
    bases = [played.new_base(m.peer, commit, base()) for m in plan.members]
    assert len({new.tobytes() for new in bases}) == 1
    largest = max(np.abs(update).max() for own in updates.values() for update in own.values())
    tolerance = 1e-6 + largest * ROUNDING[codec]
    np.testing.assert_allclose(bases[0], reference(plan, updates, base()), rtol=0, atol=tolerance)


async def test_updates_and_means_are_computed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[str] = []

    async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
        beside.append(function.__name__)
        try:
            return function(*args)
        finally:
            beside.pop()

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert beside
            return method(*args)

        return call

    plan = make_plan_of(MEMBERS["three, an expert with three owners"])
    played = await Round.open(plan, random_updates(plan), "int4", run_blocking=run_blocking)
    with monkeypatch.context() as patch:
        for name in ("encode", "decode"):
            patch.setattr(Blockwise, name, watched(getattr(Blockwise, name)))
        await played.run()
    assert played.commit().dropped == ()


@pytest.mark.parametrize("unfinished", ["_read", "encode_mean"])
async def test_what_is_still_computed_when_an_exchange_ends_changes_nothing(unfinished: str) -> None:
    async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
        found = function(*args)
        if function.__name__ == unfinished:
            await asyncio.sleep(100)
        return found

    plan = make_plan_of(MEMBERS["three, an expert with three owners"])
    updates = random_updates(plan)
    played = await Round.open(plan, updates, "int4", timeout_s=20, run_blocking=run_blocking)
    await played.run()
    await asyncio.sleep(200)
    for exchange in played.exchanges.values():
        assert not exchange.new_residuals
        assert not exchange.inputs.of_part
        assert bool(exchange.sent) == (unfinished != "_read")


async def test_an_expert_that_nobody_trained_is_not_sent_and_keeps_its_bits() -> None:
    plan = make_plan_of([member("A", 10, (3, 0, 0, 0)), member("B", 10, (0, 2, 0, 0))])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    new = played.new_base("A", played.commit(), base())
    for expert in (2, 3):
        group = LAYOUT.expert(expert)
        assert not any(part.group == group for part in played.exchanges["A"].results.parts)
        np.testing.assert_array_equal(new[group.start : group.stop], base()[group.start : group.stop])


async def test_what_each_member_sent_is_what_the_result_holds_of_it() -> None:
    """The accounting rule subtracts `sent`: it must be the values that were summed, after encoding."""
    plan = make_plan_of(MEMBERS["three, an expert with three owners"])
    played = await Round.open(plan, random_updates(plan), "fp16")
    await played.run()
    results = played.exchanges["A"].results
    for part in results.parts:
        sent = {i: played.exchanges[plan.members[i].peer].sent[part.index][1]() for i in part.contributors}
        weights = {i: plan.members[i].tokens if part.group.expert is None else plan.members[i].routed[part.group.expert]
                   for i in part.contributors}
        mean = sum(sent[i].astype(np.float64) * weights[i] for i in sent) / sum(weights.values())
        np.testing.assert_allclose(part.codec.decode(results.encoded[part.index], part.size), mean, rtol=1e-3, atol=1e-5)
        assert results.contributors(part) == part.contributors


async def test_an_update_weighs_the_tokens_behind_it_and_one_without_any_is_not_in_the_mean() -> None:
    """Rounds before this one took other parts of A's work than of B's. No push weighs more than the plan says."""
    behind = {0: 0, 1: 700, 2: 25}
    plan = make_plan_of([member("A", 100, SHARED_ONLY), member("B", 300, SHARED_ONLY)])
    updates = random_updates(plan)
    played = await Round.open(plan, updates, behind={"A": lambda part: behind.get(part.index, 100)}, clips=True)
    await played.run()
    results = played.exchanges["B"].results
    for part in results.parts:
        tokens = {"A": min(100, behind.get(part.index, 100)), "B": 300}
        place = slice(part.start - part.group.start, part.stop - part.group.start)
        mean = sum(updates[peer][part.group.name][place] * (tokens[peer] / sum(tokens.values())) for peer in "AB")
        np.testing.assert_allclose(part.codec.decode(results.encoded[part.index], part.size), mean, atol=1e-6)
        assert results.contributors(part) == ((0, 1) if tokens["A"] else (1,))
        assert (part.index in played.exchanges["A"].sent) == bool(tokens["A"])


async def test_what_the_reducers_encoding_drops_is_in_the_next_result() -> None:
    plan = make_plan_of([member("A", 1, SHARED_ONLY), member("B", 1, SHARED_ONLY)])
    updates = {peer: {g.name: np.full(g.size, v, np.float32) for g in LAYOUT.groups[:2]}
               for peer, v in (("A", 1.0), ("B", 1.0 + 2.0**-10))}
    first = await Round.open(plan, updates, "fp16")
    await first.run()
    part = first.exchanges["A"].results.parts[0]
    reducer = plan.members[part.reducer].peer
    dropped = first.exchanges[reducer].new_residuals[part.start]
    assert np.abs(dropped).max() == 2.0**-11
    again = await Round.open(plan, updates, "fp16", residuals={reducer: {part.start: dropped}})
    await again.run()
    decoded = [part.codec.decode(r.exchanges["A"].results.encoded[0], part.size).astype(np.float64) for r in (first, again)]
    np.testing.assert_array_equal(decoded[0] + decoded[1], np.full(part.size, 2 * (1.0 + 2.0**-11)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", MEMBERS)
async def test_over_rounds_the_base_moves_by_all_that_was_trained_but_for_pending_and_residuals(case: str, codec: str) -> None:
    """Mean work of all rounds = applied + mean of what is pending + carried by the reducers, whatever a codec drops."""
    trained, accounted = await trained_and_accounted(make_plan_of(MEMBERS[case]), codec, 4, base())
    np.testing.assert_allclose(accounted, trained, rtol=0, atol=2e-5)


async def test_of_an_experts_pending_work_only_what_its_owner_sent_counts_after_a_restart() -> None:
    """The owner no longer has its codes then, but the result tells what the codec left out of them."""
    plan = make_plan_of(MEMBERS["two, each expert one owner"])
    updates = random_updates(plan)
    played = await Round.open(plan, updates, "sparse")
    await played.run()
    exchange, group = played.exchanges["A"], LAYOUT.expert(0)
    for part, sent in exchange.sent.values():
        if part.group == group:
            pending = updates["A"][group.name][part.start - group.start : part.stop - group.start]
            counted = taken(exchange.results, part, partial(np.copy, pending))
            assert 0 < np.count_nonzero(sent()) < part.size
            np.testing.assert_array_equal(counted != 0, sent() != 0)


async def test_traffic_is_at_the_floor() -> None:
    """Each of N members sends 2 S (N-1)/N + E (N-1)/N bytes when every expert has one owner."""
    count = 4
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (100, 200), "expert", 0, e) for e in range(count)]
    layout = Layout([TensorSpec("embed", (320, 128), "shared"), *experts])
    plan = make_plan_of(member(name, 100, tuple(9 * (e == i) for e in range(count))) for i, name in enumerate("ABCD"))
    played = await Round.open(plan, random_updates(plan, layout=layout), layout=layout, part_bytes=4096)
    await played.run()
    shared_bytes, expert_bytes = 4 * 320 * 128, 4 * count * 100 * 200
    floor = (2 * shared_bytes + expert_bytes) * (count - 1) / count
    for board in played.endpoints.values():
        assert floor <= board.sent[PUSH] + board.sent[PULL] < 1.04 * floor, "signatures are 2 %, of parts as small as these"


@pytest.mark.parametrize(("bandwidth", "lanes"), [(UNKNOWN_BYTES_PER_S, 8), (4 * WINDOW_BYTES / IN_FLIGHT_S, 2), (1.0, 1)])
async def test_results_come_in_as_many_streams_as_lines_bear(
    bandwidth: float, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[tuple[str, str], list[PullRequest]] = {}

    def see(frame: Frame) -> Frame:
        if frame.method == PULL and not frame.is_answer and frame.index == 0:
            asked.setdefault((frame.sender, frame.receiver), []).append(unpack(PullRequest, frame.body))
        return frame

    monkeypatch.setattr("spes_p2p.peer.transfers.LANE_BYTES", 100)
    experts = {"A": (9, 0, 0, 0), "B": (0, 9, 0, 0), "C": (0, 0, 9, 9)}
    plan = make_plan_of([member(name, 10, routed, bandwidth) for name, routed in experts.items()])
    updates = random_updates(plan)
    played = await Round.open(plan, updates)
    played.network.tap = see
    await played.run()
    new = played.new_base("A", played.commit(), base())
    assert all(new.tobytes() == played.new_base(peer, played.commit(), base()).tobytes() for peer in "BC")
    np.testing.assert_allclose(new, reference(plan, updates, base()), rtol=0, atol=1e-6)
    streams = {pair: sorted((request.lane, request.lanes) for request in requests) for pair, requests in asked.items()}
    assert streams == {pair: [(lane, lanes) for lane in range(lanes)] for pair in permutations("ABC", 2)}


@pytest.mark.parametrize(("lane", "lanes"), [(1, 1), (-1, 2), (0, 0), (0, 10**9)])
async def test_a_lane_that_cannot_be_is_refused(lane: int, lanes: int) -> None:
    plan = make_plan_of(MEMBERS["two, each expert one owner"])
    played = await Round.open(plan, random_updates(plan))
    async with played.endpoints["B"].stream("A", PULL) as stream:
        await stream.send(pack(PullRequest(plan.id, 0, lane, lanes)))
        with pytest.raises(Refused) as refused:
            await stream.message()
        assert refused.value.code is Code.MALFORMED


async def test_nobody_gets_the_same_results_twice() -> None:
    plan = make_plan_of(MEMBERS["two, each expert one owner"])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    for lane in range(2):
        async with played.endpoints["B"].stream("A", PULL) as stream:
            await stream.send(pack(PullRequest(plan.id, 0, lane, 2)))
            with pytest.raises(Refused, match="asked for before"):
                await stream.message(Kind.PART)
    mask = bytes(mask_bytes(len(played.empty().parts)))
    for _ in range(MAX_BARE):
        async with played.endpoints["B"].stream("A", PULL) as stream:
            await stream.send(pack(PullRequest(plan.id, 0, parts=mask)))
            assert (await stream.any_message()).kind == Kind.END
    async with played.endpoints["B"].stream("A", PULL) as stream:
        await stream.send(pack(PullRequest(plan.id, 0, parts=mask)))
        with pytest.raises(Refused, match="asked for before"):
            await stream.any_message()


async def test_an_owner_with_a_thin_line_sends_its_expert_once_and_gets_nothing_of_it_back() -> None:
    plan = make_plan_of(MEMBERS["four, one hands its expert on"])
    played, pushed = await Round.open(plan, random_updates(plan)), []

    def note(frame: Frame) -> Frame:
        if (frame.sender, frame.method, frame.kind) == ("A", PUSH, Kind.PART):
            pushed.append(len(frame.body) - INDEX_BYTES - WEIGHT_BYTES)
        return frame

    played.network.tap = note
    await played.run()
    owner = played.exchanges["A"].results
    own = [part for part in owner.parts if part.contributors == (0,)]
    assert own
    assert not any(part.reducer == 0 for part in owner.parts)
    updates = sum(part.encoded_bytes for part in owner.parts if 0 in part.contributors)
    assert sum(pushed) == updates, "one copy, not three"
    others = sum(part.encoded_bytes for part in owner.parts if part.contributors != (0,))
    digests = 110 * len(owner.parts)
    assert others <= played.endpoints["A"].received[PULL] < others + digests
    assert all(owner.verified(part) for part in owner.parts)


async def test_what_an_owner_handed_on_counts_only_as_the_reducer_says() -> None:
    """The owner dies before its push, or its reducer before it served: nobody keeps, or commits, what the others lack."""
    plan = make_plan_of(MEMBERS["four, one hands its expert on"])
    own = {part.index for part in (await Round.open(plan, random_updates(plan))).empty().parts if part.contributors == (0,)}
    played = await Round.open(plan, random_updates(plan))
    played.network.kill("A")
    await played.run("BCD")
    commit = played.commit("BCD")
    assert {part.index for part in played.exchanges["B"].results.committed(commit)}.isdisjoint(own)
    assert len({played.new_base(peer, commit, base()).tobytes() for peer in "BCD"}) == 1

    played = await Round.open(plan, random_updates(plan))
    (reducer, *_) = (plan.members[played.empty().parts[index].reducer].peer for index in own)
    played.network.kill(reducer)
    await played.run(peer for peer in "ABCD" if peer != reducer)
    lost = {index for index in own if plan.members[played.empty().parts[index].reducer].peer == reducer}
    assert lost
    assert lost.isdisjoint(played.exchanges["A"].results.encoded)


@pytest.mark.parametrize("victim", ["A", "B", "C"])
async def test_a_member_that_never_comes_costs_its_own_contribution_and_the_parts_it_reduces(victim: str) -> None:
    plan = make_plan_of([member(peer, 10 * (i + 1), (i + 1, 0, 0, 0)) for i, peer in enumerate("ABC")])
    updates = random_updates(plan)
    played = await Round.open(plan, updates)
    played.network.kill(victim)
    living = [peer for peer in "ABC" if peer != victim]
    await played.run(living)
    commit = played.commit(living)
    bases = [played.new_base(peer, commit, base()) for peer in living]
    assert bases[0].tobytes() == bases[1].tobytes()
    expected = reference(plan, {**updates, victim: {}}, base())
    for part in played.exchanges[living[0]].results.parts:
        dead = plan.members[part.reducer].peer == victim
        place = slice(part.start, part.stop)
        np.testing.assert_allclose(bases[0][place], base()[place] if dead else expected[place], rtol=0, atol=1e-6)
    assert commit.tokens == 1000 + sum(m.tokens for m in plan.members if m.peer != victim)


async def test_a_member_that_is_too_slow_is_left_out_and_the_others_work_is_in() -> None:
    plan = make_plan_of([member("A", 10, SHARED_ONLY), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY, 1e-9)])
    updates = random_updates(plan)
    network = MemoryNetwork(latency_s=0.05)
    network.set_bandwidth("C", 400.0, 1e9)
    played = await Round.open(plan, updates, network=network, timeout_s=4.0)
    await played.run()
    commit = played.commit()
    new = played.new_base("A", commit, base())
    assert new.tobytes() == played.new_base("B", commit, base()).tobytes()
    results = played.exchanges["A"].results
    late = [part for part in results.parts if results.contributors(part) == (0, 1)]
    assert late
    assert commit.dropped == ()
    expected = reference(plan, {**updates, "C": {}}, base())
    for part in late:
        np.testing.assert_allclose(new[part.start : part.stop], expected[part.start : part.stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strangers_s", [0.0, 20.0])
async def test_a_stranger_on_the_slowest_line_holds_up_the_others_no_longer_than_a_share_of_the_round(
    strangers_s: float
) -> None:
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4)]
    layout, slow = Layout([TensorSpec("embed", (2048, 1024), "shared"), *experts]), SLOWEST_BYTES_PER_S
    known = [member(name, 10, SHARED_ONLY, 1e9) for name in "AB"]
    plan = make_plan_of([*known, replace(member("X", 10, SHARED_ONLY, slow), standing="newcomer")])
    network = MemoryNetwork(latency_s=0.05)
    network.set_bandwidth("X", slow, 1e9)
    played = await Round.open(
        plan, random_updates(plan, layout=layout), network=network, timeout_s=900.0, layout=layout, part_bytes=2**16,
        round_s=strangers_s / STRANGERS_SHARE,
    )
    dripping = asyncio.ensure_future(played.run("X"))
    await played.run("AB")
    least_s = 8.0 * 2**20 / slow
    waited_s = asyncio.get_running_loop().time()
    assert strangers_s <= waited_s <= max(strangers_s, SILENCE_S) + 2.0 < least_s / 2
    results = played.exchanges["A"].results
    assert all(results.verified(part) for part in results.parts)
    assert {results.contributors(part) for part in results.parts} == {(0, 1), (0, 1, 2)}, "what came in time is in"
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)


async def test_what_a_stranger_began_to_send_is_dropped_long_before_an_exchange_ends() -> None:
    slow = SLOWEST_BYTES_PER_S
    known = [member("A", 10, SHARED_ONLY, 1e9), member("B", 10, SHARED_ONLY, slow)]
    plan = make_plan_of([*known, replace(member("X", 10, SHARED_ONLY, 1e9), standing="newcomer")])
    layout, network = Layout([TensorSpec("embed", (2048, 1024), "shared")]), MemoryNetwork(latency_s=0.05)
    network.set_bandwidth("B", slow, 1e9)
    played = await Round.open(
        plan, random_updates(plan, layout=layout), network=network, timeout_s=900.0, layout=layout, part_bytes=2**16
    )
    running = asyncio.ensure_future(played.run("AB"))

    async def hold() -> None:
        async with played.endpoints["X"].stream("A", PUSH) as stream:
            await stream.send(pack(PushHeader(plan.id)))
            await stream.message()

    with pytest.raises(Refused, match="nothing more comes"):
        await network.run_peer("X", hold())
    assert asyncio.get_running_loop().time() < 3 * SILENCE_S
    assert not running.done()
    await running


async def test_what_is_ready_is_served_while_other_parts_wait_for_their_updates() -> None:
    members = [member("A", 10, (9, 0, 0, 0)), member("B", 10, (0, 9, 0, 0)), member("C", 10, (0, 0, 9, 0))]
    played = await Round.open(make_plan_of(members), random_updates(make_plan_of(members)))
    running = asyncio.ensure_future(played.run("AB"))
    await asyncio.sleep(SILENCE_S / 4)
    results = played.exchanges["B"].results
    of_a = [part for part in results.parts if part.reducer == 0]
    ready = {part.index for part in of_a if part.contributors == (0,)}
    assert ready
    assert min(part.index for part in of_a) < min(ready)
    assert {part.index for part in of_a if part.index in results.encoded} == ready
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_results_wait_while_updates_are_under_way_to_other_members() -> None:
    """The member that asks may have its update long before others have theirs, and means wait for these."""
    members = [member("A", 10, (9, 0, 0, 0), 2.0), member("B", 10, (0, 0, 9, 0), 2.0), member("C", 10, SHARED_ONLY, 3.0)]
    plan, network = make_plan_of(members), MemoryNetwork(latency_s=0.01)
    played = await Round.open(plan, random_updates(plan), network=network)
    order: list[str] = []

    def note(frame: Frame) -> Frame:
        if frame.sender == "A" and frame.kind == Kind.PART:
            order.append(frame.method)
        return frame

    network.set_bandwidth("A", 1e3, 1e6)
    network.tap = note
    await played.run()
    assert order == sorted(order, key=lambda method: method != PUSH)
    assert set(order) == {PULL, PUSH}


async def test_results_wait_while_streams_for_updates_to_other_members_are_being_opened() -> None:
    members = [member("A", 10, SHARED_ONLY, 0.0), member("B", 10, SHARED_ONLY, 3.0), member("C", 10, (9, 9, 9, 9), 0.5)]
    plan, network, order = make_plan_of(members), MemoryNetwork(latency_s=0.01), list[str]()
    played = await Round.open(plan, random_updates(plan), network=network)

    def note(frame: Frame) -> Frame:
        if frame.sender == "C" and frame.kind == Kind.PART:
            order.append(frame.method)
        return frame

    network.set_bandwidth("C", 1e3, 1e6)
    network.set_latency("B", "C", 0.2)
    network.tap = note
    await played.run()
    assert order == sorted(order, key=lambda method: method != PUSH)
    assert set(order) == {PULL, PUSH}


def test_nobody_complains_about_others_where_one_member_takes_no_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Stream.send

    async def held_up(stream: Stream, *body: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        if stream.remote == "D" and kind == Kind.PART:  # as where its window is full
            await asyncio.Event().wait()
        await send(stream, *body, kind=kind)

    async def main() -> None:
        plan, told = make_plan_of([member(peer, 10, SHARED_ONLY, 50.0) for peer in "ABCD"]), set[int]()
        played = await Round.open(plan, random_updates(plan), timeout_s=40.0)

        async def tell_stalled(reducer: int, revision: int) -> None:
            told.add(reducer)

        await asyncio.gather(*(played.exchanges[peer].run(tell_stalled) for peer in "ABC"))
        assert told == {3}

    monkeypatch.setattr(Stream, "send", held_up)
    simulate(main)


async def test_what_others_can_hand_on_at_once_goes_to_them_first() -> None:
    members = [member("A", 10, (9, 9, 9, 9), 1.0), *(member(peer, 10, SHARED_ONLY, 4.0) for peer in "BCD")]
    plan, network, order = make_plan_of(members), MemoryNetwork(), list[tuple[str, int]]()
    played = await Round.open(plan, random_updates(plan), network=network)

    def note(frame: Frame) -> Frame:
        if frame.sender == "A" and frame.kind == Kind.PART and frame.method == PUSH:
            order.append((frame.receiver, int.from_bytes(frame.body[:INDEX_BYTES], "little")))
        return frame

    network.tap = note
    await played.run()
    for peer in "BCD":
        alone = [played.empty().parts[index].contributors == (0,) for target, index in order if target == peer]
        assert alone == sorted(alone, reverse=True)
        assert len(set(alone)) == 2


@pytest.mark.parametrize(("update_s", "expected"), [(0.0, [1, 2, 4, 8, 8]), (0.4, [1, 2, 2, 2, 2])], ids=["fast", "slow"])
async def test_each_signature_stands_under_twice_as_many_updates_as_the_one_before_or_on_a_slow_line_comes_sooner(
    update_s: float, expected: list[int]
) -> None:
    """A reducer uses what is signed, so it begins long before it has all updates."""
    plan, network = make_plan_of([member(name, 10, SHARED_ONLY) for name in "AB"]), MemoryNetwork()
    layout = Layout([TensorSpec("embed", (2560, 64), "shared"),
                     *(TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4))])
    if update_s:
        network.set_bandwidth("A", 2**13 / update_s, 1e9)
    played = await Round.open(plan, random_updates(plan, layout=layout), network=network, layout=layout, part_bytes=2**13)
    signed, unsigned = list[int](), 0

    def note(frame: Frame) -> Frame:
        nonlocal unsigned
        if (frame.sender, frame.method) == ("A", PUSH):
            unsigned += frame.kind == Kind.PART
            if frame.kind == Kind.PUSHED:
                signed.append(unsigned)
                unsigned = 0
        return frame

    network.tap = note
    await played.run()
    assert signed[:5] == expected
    assert (sum(signed), unsigned) == (40, 0)


async def test_a_part_that_only_one_of_several_members_holds_is_dropped() -> None:
    plan = make_plan_of(MEMBERS["two, each expert one owner"])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    lacking = next(part for part in played.exchanges["A"].results.parts if part.reducer == 0)
    del played.exchanges["B"].results.encoded[lacking.index], played.exchanges["B"].results.digests[lacking.index]
    commit = played.commit()
    assert commit.dropped == (lacking.index,)
    new = played.new_base("A", commit, base())
    assert new.tobytes() == played.new_base("B", commit, base()).tobytes()
    np.testing.assert_array_equal(new[lacking.start : lacking.stop], base()[lacking.start : lacking.stop])


# What is refused ----------------------------------------------------------------------------------------------------------


async def push_by_hand(played: Round, peer: str, reducer: str, *frames: bytes) -> None:
    """As `peer`, push these frames; raises what the reducer answers."""
    async with played.endpoints[peer].stream(reducer, PUSH) as stream:
        await stream.send(pack(PushHeader(played.plan.id)))
        for frame in frames:
            await stream.send(frame, kind=Kind.PART)
            await stream.send(pack(signature(played, peer, frame)), kind=Kind.PUSHED)
        await stream.send(kind=Kind.END)
        await stream.message()


def signature(played: Round, peer: str, frame: bytes) -> Signed:
    index, tokens = (int.from_bytes(frame[at : at + 8], "little") for at in (0, INDEX_BYTES))
    update = Update(index % 2**20, tokens % 2**48, content_digest(frame[16:]))
    return sign(Pushed(played.plan.id, (update,)), SimulatedIdentity(peer))


def frame(part: Part, body: bytes, tokens: int = 10) -> bytes:
    return part.index.to_bytes(INDEX_BYTES, "little") + tokens.to_bytes(8, "little") + body


def shared_parts_of(played: Round, reducer: int) -> list[Part]:
    return [part for part in played.empty().parts if part.reducer == reducer and len(part.contributors) > 1]


REFUSED_PUSHES: dict[str, Callable[[Round, Part], bytes]] = {
    "a part that is not in the plan": lambda played, part: (10**6).to_bytes(INDEX_BYTES, "little") + bytes(8 + PART_BYTES),
    "a part of another reducer": lambda played, part: frame(shared_parts_of(played, 1)[0], bytes(4 * part.size)),
    "a part that the sender does not train": lambda played, part: frame(
        next(p for p in played.empty().parts if p.contributors == (0,)), bytes(4 * part.size)),
    "too few bytes": lambda played, part: frame(part, bytes(4 * part.size - 4)),
    "too many bytes": lambda played, part: frame(part, bytes(4 * part.size + 4)),
    "no weight": lambda played, part: part.index.to_bytes(4, "little") + bytes(7),
    "nothing behind it": lambda played, part: frame(part, bytes(4 * part.size), tokens=0),
    "too much behind it": lambda played, part: frame(part, bytes(4 * part.size), tokens=2**48 + 1),
    "no index": lambda played, part: b"\x00\x00",
    "values that are not finite": lambda played, part: frame(part, np.full(part.size, np.nan, "<f4").tobytes()),
    "infinite values": lambda played, part: frame(part, np.full(part.size, np.inf, "<f4").tobytes()),
}


@pytest.mark.parametrize("what", REFUSED_PUSHES)
async def test_a_reducer_refuses_and_goes_on_with_the_others(what: str) -> None:
    plan = make_plan_of([member("A", 10, (4, 0, 0, 0)), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY)])
    updates = random_updates(plan)
    played = await Round.open(plan, updates)
    part = shared_parts_of(played, 0)[0]
    with pytest.raises(Refused):
        await push_by_hand(played, "B", "A", REFUSED_PUSHES[what](played, part))
    await played.run(["A", "C"])
    assert played.exchanges["A"].results.contributors(part) == (0, 2)
    mean = part.codec.decode(played.exchanges["A"].results.encoded[part.index], part.size)
    expected = (updates["A"]["shared"] + updates["C"]["shared"]) / 2
    np.testing.assert_allclose(mean, expected[part.start : part.stop], rtol=0, atol=1e-6)


async def test_a_sole_owner_that_cannot_be_dialled_cannot_slip_in_values_that_are_not_finite() -> None:
    plan = make_plan_of([member("A", 10, SHARED_ONLY), member("B", 10, (0, 0, 5, 0), bandwidth=0.0)])
    played = await Round.open(plan, random_updates(plan))
    part = next(p for p in played.empty().parts if p.contributors == (1,))
    with pytest.raises(Refused, match="finite"):
        await push_by_hand(played, "B", "A", frame(part, np.full(part.size, np.nan, "<f4").tobytes()))


async def test_a_stranger_can_neither_push_nor_pull_a_running_exchange() -> None:
    plan = make_plan_of(MEMBERS["two, each expert one owner"])
    played = await Round.open(plan, random_updates(plan))
    part = shared_parts_of(played, 0)[0]
    stranger = type(played.endpoints["A"])(played.network.transport("X"), SILENCE_S)
    played.endpoints["X"] = stranger
    with pytest.raises(Refused, match="not a contributor"):
        await push_by_hand(played, "X", "A", frame(part, bytes(4 * part.size)))


async def test_an_update_that_comes_twice_counts_once() -> None:
    plan = make_plan_of([member("A", 10, SHARED_ONLY), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY)])
    updates = random_updates(plan)
    played = await Round.open(plan, updates)
    part = shared_parts_of(played, 0)[0]
    own = updates["B"]["shared"][part.start : part.stop].tobytes()
    await push_by_hand(played, "B", "A", frame(part, own), frame(part, own))
    await played.run()
    new = played.new_base("C", played.commit(), base())
    expected = reference(plan, updates, base())
    np.testing.assert_allclose(new[part.start : part.stop], expected[part.start : part.stop], rtol=0, atol=1e-6)


LIES: dict[str, Callable[[Plan, list[Part], Manifest], Manifest]] = {
    "a digest of other bytes": lambda plan, own, m: replace(m, digests=b"\x01" * 32 + m.digests[32:]),
    "somebody who has nothing there": lambda plan, own, m: replace(m, masks=to_mask((0, 1, 2), 3) * len(own)),
    "a result of nobody": lambda plan, own, m: replace(m, masks=bytes(len(own))),
    "no result of somebody": lambda plan, own, m: replace(m, digests=ABSENT * len(own)),
    "too few parts": lambda plan, own, m: replace(m, digests=m.digests[32:], masks=m.masks[1:]),
    "another plan": lambda plan, own, m: replace(m, plan="other"),
    "a revision that is not known": lambda plan, own, m: replace(m, revision=1),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_a_reducers_manifest_lies_about_is_not_taken(lie: str) -> None:
    plan = make_plan_of([member("A", 10, (4, 0, 0, 0), 2.0), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY)])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    results, own = played.empty(), played.empty().reduced_by(0)
    honest = played.exchanges["A"].results.manifests[0, 0]
    for part in own:
        results.put(part.index, played.exchanges["A"].results.encoded[part.index])
    manifest = LIES[lie](plan, own, honest)
    if lie == "a digest of other bytes":
        results.add_manifest(manifest)
    else:
        with pytest.raises(WireError):
            results.add_manifest(manifest)
    results.discard_unverified()
    assert own[0].index not in results.encoded


@pytest.mark.parametrize("codec", CODECS)
async def test_values_of_mine_that_are_not_finite_go_nowhere(codec: str) -> None:
    """A codec would clip an infinite value to a finite one: it must be found before it is encoded."""
    plan = make_plan_of([member("A", 10, (3, 0, 0, 0)), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY)])
    updates = random_updates(plan)
    updates["A"]["shared"][:] = np.inf
    updates["A"]["expert.0"][:] = np.nan
    played = await Round.open(plan, updates, codec)
    await played.run()
    new = played.new_base("B", played.commit(), base())
    mine = {"router": updates["A"]["router"]}
    tolerance = 1e-6 + 5 * ROUNDING[codec]
    np.testing.assert_allclose(new, reference(plan, {**updates, "A": mine}, base()), rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", [PUSH, PULL])
async def test_a_member_that_falls_silent_in_the_middle_is_waited_for_no_longer_than_the_bound(method: str) -> None:
    plan = make_plan_of([member("A", 10, SHARED_ONLY), member("B", 10, SHARED_ONLY)])
    played = await Round.open(plan, random_updates(plan))

    def fall_silent(peer: str, its_method: str, index: int) -> None:
        if (peer, its_method, index) == ("B", method, 1):
            played.network.pause("B")

    played.network.hook = fall_silent
    both = (played.network.run_peer(peer, played.exchanges[peer].run()) for peer in "AB")
    await asyncio.wait_for(asyncio.gather(*both), 4 * SILENCE_S)
    lost = {part.reducer for part in played.empty().parts if not played.exchanges["A"].results.verified(part)}
    assert lost == {1}


async def test_a_member_whose_full_line_opens_streams_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats on an idle line say little about how long its packets queue once it is full."""
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4)]
    layout = Layout([TensorSpec("embed", (256, 1024), "shared"), *experts])
    plan = make_plan_of([member(name, 10, SHARED_ONLY, SLOWEST_BYTES_PER_S) for name in "ABC"])
    played = await Round.open(plan, random_updates(plan, layout=layout), timeout_s=900.0, layout=layout, part_bytes=2**16)
    for name in "AB":
        monkeypatch.setattr(played.endpoints[name].detector, "bound", lambda peer: SILENCE_S / 2)
    opened = played.endpoints["C"].transport.open

    async def open_late(peer: str, method: str) -> Channel:
        await asyncio.sleep(0.75 * SILENCE_S)
        return await opened(peer, method)

    monkeypatch.setattr(played.endpoints["C"].transport, "open", open_late)
    await played.run("ABC")
    results = played.exchanges["A"].results
    assert all(results.contributors(part) == (0, 1, 2) for part in results.parts)


async def test_a_member_that_lives_and_gives_its_exchange_up_is_not_waited_for() -> None:
    plan = make_plan_of([member("A", 10, SHARED_ONLY), member("B", 10, SHARED_ONLY), member("C", 10, SHARED_ONLY)])
    played = await Round.open(plan, random_updates(plan))
    played.network.pause("C")
    giving_up = asyncio.ensure_future(played.run("B"))
    going_on = asyncio.ensure_future(played.run("A"))
    await asyncio.sleep(SILENCE_S / 4)
    assert not giving_up.done()
    giving_up.cancel()
    await asyncio.gather(giving_up, return_exceptions=True)
    await asyncio.wait_for(asyncio.shield(going_on), 2 * SILENCE_S)
    results = played.exchanges["A"].results
    assert {part.reducer for part in results.parts if results.verified(part)} == {0}


@pytest.mark.long
@pytest.mark.parametrize("pushed", [0, 1])
async def test_among_many_members_one_that_lives_and_pushes_nothing_more_is_left_out_soon(pushed: int) -> None:
    """How long a reducer waits follows from what the contributor pushes by the plan, not from the number of members."""
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4)]
    layout = Layout([TensorSpec("embed", (1024, 64), "shared"), *experts])
    names = [f"{i:02d}" for i in range(24)]
    tarpit, others = names[0], names[1:]
    plan = make_plan_of([member(name, 10, SHARED_ONLY, 0.0 if name == tarpit else 12.5e6) for name in names])
    played = await Round.open(plan, random_updates(plan, layout=layout), timeout_s=900.0, layout=layout, part_bytes=4096)

    async def dawdle(part: Part) -> None:
        async with played.endpoints[tarpit].stream(names[part.reducer], PUSH) as stream:
            await stream.send(pack(PushHeader(plan.id)))
            for _ in range(pushed):
                await stream.send(frame(part, bytes(4 * part.size)), kind=Kind.PART)
            await stream.message()

    dawdling = [asyncio.ensure_future(dawdle(part)) for part in played.empty().parts]
    await played.run(others)
    assert asyncio.get_running_loop().time() < 2 * SILENCE_S
    assert all(played.exchanges[others[0]].results.verified(part) for part in played.empty().parts)
    await end_tasks(dawdling)


async def test_a_member_that_sends_the_same_update_again_and_again_is_left_out_soon() -> None:
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4)]
    layout = Layout([TensorSpec("embed", (256, 1024), "shared"), *experts])
    plan = make_plan_of([member(name, 10, SHARED_ONLY, 0.0 if name == "C" else SLOWEST_BYTES_PER_S) for name in "ABC"])
    updates = random_updates(plan, layout=layout)
    played = await Round.open(plan, updates, timeout_s=900.0, layout=layout, part_bytes=2**16)

    async def repeat(reducer: int) -> None:
        part = shared_parts_of(played, reducer)[0]
        async with played.endpoints["C"].stream("ABC"[reducer], PUSH) as stream:
            await stream.send(pack(PushHeader(plan.id)))
            while True:
                one = frame(part, bytes(4 * part.size))
                await stream.send(one, kind=Kind.PART)
                await stream.send(pack(signature(played, "C", one)), kind=Kind.PUSHED)
                await asyncio.sleep(0.5 * len(one) / SLOWEST_BYTES_PER_S)

    repeating = [asyncio.ensure_future(repeat(reducer)) for reducer in (0, 1)]
    await played.run("AB")
    assert asyncio.get_running_loop().time() < 8 * SILENCE_S
    await end_tasks(repeating)


@pytest.mark.parametrize("thin", ["A", "B"])
async def test_a_member_that_gives_up_is_neither_waited_for_nor_sent_more_on_thin_lines(thin: str) -> None:
    """B gives up while it pushes (its own line is thin), or while A still pushes to it."""
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2, 2), "expert", 0, e) for e in range(4)]
    layout = Layout([TensorSpec("embed", (4000, 64), "shared"), *experts])
    bandwidths = {name: 10_000.0 if name == thin else 40_000.0 for name in "ABC"}
    plan = make_plan_of([member(name, 10, SHARED_ONLY, bandwidths[name]) for name in "ABC"])
    network = MemoryNetwork(latency_s=0.05)
    for name, bandwidth in bandwidths.items():
        network.set_bandwidth(name, bandwidth, 1e6)
    updates = random_updates(plan, layout=layout)
    played = await Round.open(plan, updates, network=network, timeout_s=900.0, layout=layout, part_bytes=4096)
    lives = {name: asyncio.ensure_future(played.run(name)) for name in "ABC"}
    await asyncio.sleep(2.0)
    lives["B"].cancel()
    await asyncio.gather(lives["B"], return_exceptions=True)
    await asyncio.gather(lives["A"], lives["C"])
    to_b = sum(part.encoded_bytes for part in played.empty().parts if part.reducer == 1)
    if thin == "A":
        assert network.sent_bytes["A", "B"] < to_b / 2
    else:
        assert asyncio.get_running_loop().time() < played.exchanges["B"]._transfers.push_s
