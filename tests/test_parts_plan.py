"""Parts and plans are pure functions of what the members announced, and malformed announcements and reports are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from exchange_round import LAYOUT, PART_BYTES, Round, codecs, make_plan_of, member, random_updates
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.campaign.genesis import make_genesis
from spes_p2p.config.campaign import SLOWEST_LINE_BITS, SyncConfig
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.consensus import Ballot, Commit, Workload
from spes_p2p.messages.rounds import Announcement, Proposal
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds import parts as part_rules
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.commit import check_staged
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import Part, from_mask, mask_bytes, pulls, to_mask, weight
from spes_p2p.rounds.plan import Rules, alpha_due, campaign_step, check_announcement, local_steps, make_plan
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.reducers import DELEGATION_RATIO, extra_copies
from spes_p2p.rounds.traffic import SHORTEST_LIMIT_S, SLOWEST_BYTES_PER_S, exchange_limit_s, traffic
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES, campaign

CAMPAIGN = campaign()
RULES = Rules(CAMPAIGN.config, CAMPAIGN.hash, NUM_SAMPLES)

MEMBER_LISTS = st.lists(
    st.tuples(st.integers(0, 9), st.tuples(*[st.integers(0, 5)] * 4), st.sampled_from([0.0, 0.5, 1.0, 4.0])),
    min_size=1,
    max_size=6,
).map(lambda rows: tuple(Member("ABCDEF"[i], *row) for i, row in enumerate(rows)))


@given(MEMBER_LISTS, st.sampled_from(sorted(CODECS)))
def test_parts_cover_exactly_what_was_trained_once(members: tuple[Member, ...], codec: str) -> None:
    parts = part_table(LAYOUT, members, codecs(codec), PART_BYTES)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert all(members[part.reducer].bandwidth > 0 for part in parts)
    assert all(0 < part.encoded_bytes <= max(PART_BYTES, part.codec.encoded_bytes(1)) for part in parts)
    for group in LAYOUT.groups:
        contributors = tuple(i for i, m in enumerate(members) if weight(m, group) > 0)
        its = [part for part in parts if part.group == group]
        assert all(part.contributors == contributors for part in its)
        places = [group.start, *(part.stop for part in its)]
        assert [part.start for part in its] == places[:-1]
        expected = bool(contributors) and any(m.bandwidth > 0 for m in members)
        assert places[-1] == (group.stop if expected else group.start)


@pytest.mark.parametrize("codec", CODECS)
def test_parts_of_a_large_model_are_bounded_in_bytes_and_in_elements(codec: str) -> None:
    """What members decode at a time is 4 MiB of float32 at most, however few bytes a codec makes of it."""
    layout = Layout([TensorSpec("embed", (2**14, 2**14), "shared"), TensorSpec("e", (2**14, 2**13), "expert", 0, 0)])
    sizes = [stop - start for _, start, stop in part_rules.part_ranges(layout, codecs(codec))]
    assert sum(sizes) == layout.size
    assert max(sizes) <= 2**20
    assert max(map(CODECS[codec].encoded_bytes, sizes)) <= part_rules.PART_BYTES
    assert max(sizes) == min(2**20, CODECS[codec].elements(part_rules.PART_BYTES))


def sent_seconds(parts: tuple[Part, ...], members: tuple[Member, ...]) -> list[float]:
    """How long each member that can be dialled sends: its updates to their reducers, results to everybody who pulls them."""
    everybody = range(len(members))
    sent = [0] * len(members)
    for part in parts:
        for i in part.contributors:
            sent[i] += part.encoded_bytes * (i != part.reducer)
        sent[part.reducer] += part.encoded_bytes * sum(pulls(part, i) for i in everybody)
        assert sum(pulls(part, i) for i in everybody) == extra_copies(part, part.reducer, len(members)) + (
            part.reducer in part.contributors
        )
    up, down = traffic(parts, len(members))
    assert up == sent
    assert sum(up) == sum(down)
    return [sent[i] / members[i].bandwidth if members[i].bandwidth else 0.0 for i in everybody]


def test_a_sole_contributor_reduces_its_parts_unless_it_cannot_be_dialled() -> None:
    members = (member("A", 5, (3, 0, 0, 0)), member("B", 5, (0, 3, 0, 0), bandwidth=0.0))
    for part in part_table(LAYOUT, members, codecs("none"), PART_BYTES):
        assert part.reducer == 0


@pytest.mark.parametrize("count", [2, 4, 16])
def test_on_equal_lines_owners_serve_their_experts_and_reducing_is_shared_evenly(count: int) -> None:
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (16, 16), "expert", 0, e) for e in range(count)]
    layout = Layout([TensorSpec("embed", (64, count), "shared"), *experts])
    members = tuple(member(f"{i:02d}", 5, tuple(int(e == i) for e in range(count))) for i in range(count))
    parts = part_table(layout, members, codecs("none"), 64)
    assert all(part.contributors == (part.reducer,) for part in parts if part.group.expert is not None)
    reduced = [sum(part.size for part in parts if part.reducer == i) for i in range(count)]
    assert max(reduced) == min(reduced)


def test_on_the_slowest_line_a_part_takes_less_than_half_the_longest_silence_of_a_living_peer() -> None:
    assert SyncConfig().silence_s / 2 > 8 * part_rules.PART_BYTES / SLOWEST_LINE_BITS


@pytest.mark.parametrize("values", [2**21, 2**24])
def test_reducers_alike_get_alike_shares_of_a_small_model_too(values: int) -> None:
    layout = Layout([TensorSpec("embed", (values // 64, 64), "shared")])
    members = tuple(member(f"{i:02d}", 5, ()) for i in range(16))
    parts = part_table(layout, members, codecs("int8"))
    reduced = [sum(part.encoded_bytes for part in parts if part.reducer == i) for i in range(16)]
    assert max(reduced) <= 1.1 * min(reduced)
    assert all(2**13 < part.encoded_bytes <= 2**19 for part in parts)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 20.0]), min_size=3, max_size=9), st.integers(1, 5), st.integers(0, 3),
    st.sets(st.integers(0, 8), max_size=7),
)
def test_the_busiest_line_is_busy_for_little_longer_than_any_assignment_needs(
    bandwidths: list[float], most_owned: int, helpers: int, demoted: set[int]
) -> None:
    """Whoever owns how much: no line carries N - 1 copies while others are free. Demoted members send their updates once."""
    count, trainers = len(bandwidths), max(1, len(bandwidths) - helpers)
    owner = [e % min(trainers, most_owned) for e in range(8)]
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (32, 16), "expert", 0, e) for e in range(8)]
    layout = Layout([TensorSpec("embed", (1, 16), "shared"), *experts])
    members = tuple(
        dataclasses.replace(
            member(f"{i:02d}", 5 * (i < trainers), tuple(int(i == o) for o in owner), bandwidth),
            demoted="lost" if i in demoted else "",
        )
        for i, bandwidth in enumerate(bandwidths)
    )
    parts = part_table(layout, members, codecs("none"), 64)
    able = [i for i in range(count) if i not in demoted] or list(range(count))
    own_s = [sum(p.encoded_bytes for p in parts if i in p.contributors) / m.bandwidth for i, m in enumerate(members)]
    sent = sent_seconds(parts, members)
    all_s = sum(sent[i] * bandwidths[i] for i in able) / sum(bandwidths[i] for i in able)
    slack_s = 2 * count * 64 / min(bandwidths)
    assert max(sent[i] for i in able) <= DELEGATION_RATIO * max(all_s, *(own_s[i] for i in able)) + slack_s
    assert all(sent[i] == pytest.approx(own_s[i]) for i in range(count) if i not in able)


@pytest.mark.parametrize("bandwidths", [(4.0,), (4.0, 2.0, 1.0), (10.0, 10.0, 1.0)])
@pytest.mark.parametrize(("count", "owners"), [(16, 8), (24, 4), (24, 24)])
def test_the_busiest_line_receives_little_more_than_the_results_or_its_share(
    count: int, owners: int, bandwidths: tuple[float, ...]
) -> None:
    """A thin line is full with results alone, and where lines are alike all receive updates."""
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (32, 64), "expert", 0, e) for e in range(owners)]
    layout = Layout([TensorSpec("embed", (owners * 8, 64), "shared"), *experts])
    members = tuple(
        member(f"{i:02d}", 5, tuple(int(e == i) for e in range(owners)), bandwidths[i % len(bandwidths)]) for i in range(count)
    )
    parts = part_table(layout, members, codecs("none"), 64)
    received = traffic(parts, count)[1]
    results_s = sum(part.encoded_bytes for part in parts) / min(bandwidths)
    share_s = sum(received) / sum(m.bandwidth for m in members)
    assert max(size / m.bandwidth for size, m in zip(received, members, strict=True)) <= 1.05 * max(results_s, share_s)


def test_lines_that_are_alike_but_for_their_measurement_do_not_hand_on() -> None:
    layout = Layout([TensorSpec(f"experts.{e}.gate_up_proj", (32, 16), "expert", 0, e) for e in range(8)])
    members = tuple(member(f"{i}", 5, tuple(int(e == i) for e in range(8)), 1.0 + 0.1 * (i % 4)) for i in range(8))
    assert all(part.contributors == (part.reducer,) for part in part_table(layout, members, codecs("none"), 64))


def test_a_thin_line_sends_its_expert_once_and_others_send_the_copies() -> None:
    layout = Layout([TensorSpec(f"experts.{e}.gate_up_proj", (32, 16), "expert", 0, e) for e in range(8)])
    members = tuple(
        member(f"{i}", 5, tuple(int(e == i) for e in range(8)), 1.0 if i == 0 else 10.0) for i in range(8)
    )
    parts = part_table(layout, members, codecs("none"), 64)
    assert not any(part.reducer == 0 for part in parts)
    assert sent_seconds(parts, members)[0] == 4 * 32 * 16
    assert max(sent_seconds(parts, members)) == 4 * 32 * 16


@pytest.mark.parametrize("trainers", [1, 2])
def test_members_without_work_hand_on_what_few_trained(trainers: int) -> None:
    """As when many join at once: they need not wait for a mean."""
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (32, 16), "expert", 0, e) for e in range(8)]
    layout = Layout([TensorSpec("embed", (8, 16), "shared"), *experts])
    members = tuple(
        member(f"{i}", 5 * (i < trainers), tuple(int(e % trainers == i) for e in range(8))) for i in range(trainers + 5)
    )
    parts = part_table(layout, members, codecs("none"), 64)
    sent = sent_seconds(parts, members)
    own_s = sum(part.encoded_bytes for part in parts if 0 in part.contributors)
    assert max(sent) <= 1.1 * max(own_s, sum(sent) / len(members))


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_masks_round_trip(case: tuple[int, set[int]]) -> None:
    count, contributors = case
    mask = to_mask(contributors, count)
    assert len(mask) == mask_bytes(count)
    assert from_mask(mask) == tuple(sorted(contributors))


# Announcements ------------------------------------------------------------------------------------------------------------


def commit_with(**changes: Any) -> Commit:
    genesis = make_genesis(CAMPAIGN, "W", np.zeros(4, np.float32), "0" * 16)
    return dataclasses.replace(genesis, **changes)


def announce(**changes: Any) -> Announcement:
    announcement = Announcement(
        campaign=CAMPAIGN.hash, protocol=1, round=0, attempt=0, waited_s=0.0, commit="h", base_digest="d", tokens=0,
        routed=(0,) * EXPERTS, capacity=EXPERTS, tokens_per_second=0.0, bandwidth=1.0, loss=0.0, validation_loss=None,
        untrained=(),
    )
    return dataclasses.replace(announcement, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"routed": (0,) * (EXPERTS - 1)}, {"routed": (-1,) * EXPERTS}, {"routed": ()}, {"tokens": -1}, {"capacity": -1},
        {"waited_s": -1.0}, {"waited_s": math.inf},
        {"tokens_per_second": math.nan}, {"tokens_per_second": -1.0}, {"bandwidth": math.inf}, {"bandwidth": -0.5},
        {"loss": math.nan}, {"validation_loss": math.inf}, {"in_flight": True},
    ],
    ids=str,
)
def test_a_malformed_announcement_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="malformed"):
        check_announcement(announce(**changes), RULES)


# Plans --------------------------------------------------------------------------------------------------------------------


def plan_of(commit: Commit, announcements: dict[str, Announcement], returned: tuple[Interval, ...] = ()) -> Plan:
    return make_plan((commit,), Proposal(commit.round + 1, commit.id, Ballot(1, "A"), ()), announcements, returned, RULES)


@given(speeds=st.lists(st.floats(0, 1e6), min_size=1, max_size=5), untrained=st.booleans())
def test_duties_are_disjoint_and_move_the_cursor_by_what_they_hand_out(speeds: list[float], untrained: bool) -> None:
    back = (Interval(0, 7, 20),) if untrained else ()
    commit = commit_with(cursor=Cursor(0, 985), round=3, plan="p", members=("A",), workloads=(Workload(10, back),))
    announcements = {"ABCDE"[i]: announce(tokens_per_second=speed) for i, speed in enumerate(speeds)}
    announcements["A"] = dataclasses.replace(announcements["A"], untrained=back)
    plan = plan_of(commit, announcements, ())
    handed = [(i.epoch, p) for assignment in plan.assignments for i in assignment.slices for p in range(i.start, i.stop)]
    assert len(set(handed)) == len(handed)
    batch_size = CAMPAIGN.config.training.batch_size
    assert all(sum(map(len, each.slices)) == each.steps * batch_size for each in plan.assignments)
    assert [assignment.member for assignment in plan.assignments] == list(range(len(speeds)))
    assert set(handed[: len(back) * 13]) == {(0, p) for p in range(7, 20)} & set(handed)
    moved = plan.cursor.epoch * NUM_SAMPLES + plan.cursor.position - 985
    assert moved + sum(map(len, back)) == len(handed) + sum(map(len, plan.cursor.returned))


def test_faster_peers_do_more_steps_within_bounds() -> None:
    assert local_steps(10, {"A": 100.0, "B": 100.0, "C": 25.0}, "ABC") == {"A": 10, "B": 10, "C": 2}
    assert local_steps(10, {"A": 1.0, "B": 10.0, "C": 1000.0}, "ABC") == {"A": 2, "B": 10, "C": 40}
    assert local_steps(10, {"A": 0.0, "B": 50.0}, "AB") == {"A": 10, "B": 10}
    assert local_steps(10, {"A": 0.0}, "A") == {"A": 10}


def test_the_pace_is_set_by_those_named_where_their_speed_is_known() -> None:
    assert local_steps(10, {"A": 10.0, "X": 20.0, "Y": 20.0}, "A") == {"A": 10, "X": 20, "Y": 20}
    assert local_steps(10, {"A": 0.0, "X": 10.0, "Y": 20.0, "Z": 10.0}, "A") == {"A": 10, "X": 10, "Y": 20, "Z": 10}


STEP_TOKENS = CAMPAIGN.config.training.batch_size * CAMPAIGN.config.training.sequence_length


def test_the_schedule_advances_by_no_more_steps_than_were_trained_in_all() -> None:
    for trained, advanced in ((0, 0), (1, 1), (3, 3), (10, 10), (30, 10)):
        assert campaign_step(commit_with(step=20), trained * STEP_TOKENS, RULES) == 20 + advanced


def test_merges_are_due_every_interval_and_only_after_training() -> None:
    """merge_interval 20, sync_steps 10, alpha 0.1 falling to 0 at step 100."""
    assert alpha_due(commit_with(step=0), 10 * STEP_TOKENS, RULES) == 0
    assert alpha_due(commit_with(step=10), 10 * STEP_TOKENS, RULES) == pytest.approx(0.08)
    assert alpha_due(commit_with(step=10), 0, RULES) == 0
    assert alpha_due(commit_with(step=30), 10 * STEP_TOKENS, RULES) == pytest.approx(0.06)
    assert alpha_due(commit_with(step=35), 10 * STEP_TOKENS, RULES) == pytest.approx(0.055), "also where a round is passed over"
    assert alpha_due(commit_with(step=40), 3 * STEP_TOKENS, RULES) == 0


def test_after_the_last_step_nobody_has_anything_to_do() -> None:
    commit = commit_with(step=50, round=5, plan="p", members=("A",), workloads=(Workload(10, ()),))
    plan = plan_of(commit, {"A": announce(tokens=10 * STEP_TOKENS, tokens_per_second=5.0)}, ())
    assert plan.step == 60
    assert [assignment.steps for assignment in plan.assignments] == [0]


def test_what_leavers_gave_back_is_handed_out_first() -> None:
    commit = commit_with(cursor=Cursor(0, 100), round=3)
    plan = plan_of(commit, {"A": announce()}, (Interval(0, 40, 50),))
    assert plan.assignments[0].slices == (Interval(0, 40, 50), Interval(0, 100, 110))


# Reports and commits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"plan": "other"}, {"roots": (b"",) * 3}, {"parts": bytes(9)}, {"missing": (2,)}, {"incarnation": "0"}], ids=str
)
async def test_a_report_that_does_not_fit_the_plan_is_refused(wrong: dict[str, Any]) -> None:
    plan = make_plan_of([member("A", 10, (4, 0, 0, 0)), member("B", 10, (0, 4, 0, 0))])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    reports = played.staged()
    check_staged(reports[0], played.empty())
    with pytest.raises(WireError):
        check_staged(dataclasses.replace(reports[0], **wrong), played.empty())


async def test_a_round_of_which_nothing_is_held_is_not_proposed() -> None:
    plan = make_plan_of([member("A", 10, (4, 0, 0, 0)), member("B", 10, (0, 4, 0, 0))])
    played = await Round.open(plan, random_updates(plan))
    await played.run(["A"])
    with pytest.raises(Refused, match="too few members hold any part"):
        played.commit(["A"])


async def test_who_cannot_be_dialled_is_no_elector() -> None:
    dialable = [member(peer, 10, (0,) * 4) for peer in "ACD"]
    plan = make_plan_of([*dialable, member("B", 10, (0,) * 4, 0.0)])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    assert played.commit().electorate == ("A", "C", "D")


@pytest.mark.parametrize(("bandwidths", "electorate"), [
    ({"A": 1.0, "W": 1.0}, ("A",)),
    ({"A": 1.0, "B": 0.0, "W": 1.0}, ("W",)),
    ({"A": 1.0, "B": 0.0, "C": 1.0, "W": 1.0}, ("A", "C", "W")),
    ({"A": 0.0, "B": 0.0, "W": 1.0}, ("W",)),
    ({"A": 1.0, "B": 0.0}, ("A",)),
], ids=str)
async def test_of_several_trainers_none_decides_alone_where_a_helper_can(
    bandwidths: dict[str, float], electorate: tuple[str, ...]
) -> None:
    plan = make_plan_of(
        Member(peer, 0, (0,) * 4, bandwidth, trains=peer != "W") for peer, bandwidth in bandwidths.items()
    )
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    assert played.commit(helpers=("W",) if "W" in bandwidths else ()).electorate == electorate


BIG = Layout(
    [TensorSpec("embed", (2**22,), "shared"), TensorSpec("gate", (4, 8), "router", 0)]
    + [TensorSpec(f"experts.{e}.down_proj", (2**22, 2), "expert", 0, e) for e in range(4)]
)


def big_round(bandwidths: tuple[float, ...]) -> tuple[tuple[Part, ...], tuple[Member, ...], int]:
    """Parts and members of a round in which each trains one expert, and the bytes that the busiest line carries one way."""
    members = tuple(
        Member(name, 10, tuple(int(e == i) for e in range(4)), bandwidth)
        for i, (name, bandwidth) in enumerate(zip("ABCD", bandwidths, strict=True))
    )
    parts = part_table(BIG, members, codecs("int8"))
    return parts, members, sum(part.encoded_bytes for part in parts)


def test_the_time_limit_of_an_exchange_suffices_for_a_line_of_20_mbit_that_is_not_measured_yet() -> None:
    parts, members, size = big_round((12.5e6,) * 4)
    assert exchange_limit_s(parts, members) > SHORTEST_LIMIT_S + size / (20e6 / 8)


def test_the_time_limit_follows_the_slowest_line_but_not_any_claim() -> None:
    fast, slow, liar = (
        exchange_limit_s(*big_round((25e6, 25e6, 25e6, last))[:2]) - SHORTEST_LIMIT_S for last in (25e6, 2.5e6, 1e-9)
    )
    assert 4 * fast < slow < 12 * fast
    assert slow < liar < 2 * slow * 2.5e6 / SLOWEST_BYTES_PER_S
    undialable = exchange_limit_s(*big_round((25e6, 25e6, 2.5e6, 0.0))[:2])
    assert undialable >= exchange_limit_s(*big_round((25e6, 25e6, 2.5e6, 2.5e6))[:2]) / 2
