"""In an open campaign everybody trains, and strangers decide nothing, reduce nothing and own nothing alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from exchange_round import LAYOUT, PART_BYTES, Round, codecs, make_plan_of, random_updates
from hypothesis import given
from hypothesis import strategies as st
from open_campaign import ELECTOR, GENESIS, OPEN, PHASE_TOKENS, RECENT, announce

from spes_p2p.consensus.admission import PROBATION_AUDITS, PROBATION_ROUNDS, Service, add_service, signed_invitation
from spes_p2p.consensus.commit_log import KEPT_READ, CommitLog
from spes_p2p.consensus.control import rollback_commit
from spes_p2p.consensus.reform import reform_commit
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Invitation, Standing
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Control, Workload
from spes_p2p.messages.rounds import Announcement, Proposal
from spes_p2p.rounds.audits import auditors
from spes_p2p.rounds.claims import NEWCOMERS_WEIGHT, bounded_strangers
from spes_p2p.rounds.commit import lost_reducers
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import to_mask, weight
from spes_p2p.rounds.plan import LEAST_NEWCOMERS, NEWCOMER_WEIGHT, Rules, crowded_out, make_plan
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import ABSENT
from spes_p2p.rounds.revisions import moved_parts
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

RULES = Rules(OPEN.config, OPEN.hash, NUM_SAMPLES)
AUDITED = [replace(RECENT[0], vouched=(0,))]
"""RECENT with an auditor: A."""
STANDINGS: tuple[Standing, ...] = get_args(Standing)
MEMBERS = st.lists(
    st.tuples(st.integers(0, 9), st.tuples(*[st.integers(0, 5)] * 4), st.sampled_from([0.0, 0.5, 4.0]),
              st.sampled_from(STANDINGS)),
    min_size=1, max_size=6,
).map(lambda rows: tuple(
    Member("ABCDEF"[i], tokens, routed, bandwidth, True, standing)
    for i, (tokens, routed, bandwidth, standing) in enumerate(rows)))


def elector(name: str) -> Invitation:
    return signed_invitation(Invitation(OPEN.hash, name, ELECTOR, 2**40, b""), SimulatedIdentity("W"))


def plan_of(
    announcements: dict[str, Announcement], services: dict[str, Service] | None = None, recent: list[Commit] = RECENT,
    rules: Rules = RULES,
) -> Plan:
    return make_plan(recent, Proposal(1, recent[0].id, Ballot(1, "W"), ()), announcements, (), rules, services or {})


# Parts ------------------------------------------------------------------------------------------------------------------


@given(MEMBERS, st.sets(st.integers(0, 5)))
def test_newcomers_reduce_nothing_and_proven_strangers_only_where_nobody_else_can(
    members: tuple[Member, ...], lost: set[int]
) -> None:
    parts = part_table(LAYOUT, members, codecs("none"), PART_BYTES)
    able = {i for i, member in enumerate(members) if member.bandwidth > 0}
    trusted = {i for i in able if members[i].standing in ("vouched", "invited")}
    proven = {i for i in able if members[i].standing == "proven"}
    assert {part.reducer for part in parts} <= (trusted or proven)
    moved = moved_parts(parts, members, tuple(sorted(lost)), lost, 1)
    assert {part.reducer for part in moved.values()} <= ((trusted - lost) or (proven - lost))


@given(MEMBERS)
def test_an_expert_that_only_newcomers_trained_keeps_its_values(members: tuple[Member, ...]) -> None:
    for part in part_table(LAYOUT, members, codecs("none"), PART_BYTES):
        assert part.group.expert is None or {members[i].standing for i in part.contributors} != {"newcomer"}


async def test_an_expert_keeps_its_values_where_its_vouched_owner_s_update_does_not_come_and_a_newcomer_s_does() -> None:
    routed = {"A": (5,) * EXPERTS, "B": (0, *[5] * (EXPERTS - 1)), "C": (0, *[5] * (EXPERTS - 1))}
    newcomer = Member("X", 5, (5,) * EXPERTS, 0.0, True, "newcomer")
    plan = make_plan_of([*(Member(name, 5, each, 1.0) for name, each in routed.items()), newcomer])
    played = await Round.open(plan, random_updates(plan))
    await played.run("BCX")
    commit, results = played.commit("BC"), played.collected()
    absent = {part.group.expert for part in results.parts if results.digest_of(part) == ABSENT}
    assert absent == {0}
    assert not commit.dropped, "which would let others claim a phase once more"
    assert 3 in commit.heard, "its shared weights count"


async def test_a_part_that_only_strangers_hold_beside_its_reducer_is_not_in_the_base_and_moves_when_that_is_lost() -> None:
    strangers = [Member(name, 5, (5,) * EXPERTS, 0.0, True, "newcomer") for name in "XY"]
    plan = make_plan_of([*(Member(name, 5, (5,) * EXPERTS, 1.0) for name in "AB"), *strangers])
    played = await Round.open(plan, random_updates(plan))
    await played.run()
    with pytest.raises(Refused, match="too few"):
        played.commit("AXY")
    assert not played.commit("AB").dropped
    results, staged = played.collected(), played.staged()
    others = {part.index for part in results.parts if part.reducer != 0}
    staged[1] = replace(staged[1], parts=to_mask(others, len(results.parts)))
    assert lost_reducers(results, staged, {1, 2, 3}, all_reported=True) == (0,)


# Plans ------------------------------------------------------------------------------------------------------------------


def test_the_standing_of_a_member_follows_from_invitation_and_served_rounds() -> None:
    announcements = {name: announce() for name in "CDE"} | {"A": announce(invitation=elector("A")), "W": announce()}
    plan = plan_of(announcements, {"C": Service(PROBATION_ROUNDS), "D": Service(PROBATION_ROUNDS - 1)})
    found = {member.peer: member.standing for member in plan.members}
    assert found == {"A": "vouched", "W": "vouched", "C": "proven", "D": "newcomer", "E": "newcomer"}


def test_where_somebody_audits_probation_waits_for_a_passed_audit() -> None:
    services = {
        "C": Service(PROBATION_ROUNDS, PROBATION_AUDITS), "D": Service(PROBATION_ROUNDS - 1, PROBATION_AUDITS),
        "E": Service(10 * PROBATION_ROUNDS, PROBATION_AUDITS - 1),
    }
    announcements = {name: announce() for name in services} | {"A": announce(invitation=elector("A"), capacity=2)}
    plan = plan_of(announcements, services, AUDITED)
    found = {member.peer: member.standing for member in plan.members}
    assert found == {"A": "vouched", "C": "proven", "D": "newcomer", "E": "newcomer"}
    owned = {plan.members[each.member].peer: len(each.owned) for each in plan.assignments}
    assert max(owned["D"], owned["E"]) <= 2, "no more than its auditor has room for"
    assert plan_of(announcements, services).members[3].standing == "proven", "without an auditor it waits for none"


@given(st.integers(8, 2 * PHASE_TOKENS), st.integers(0, PROBATION_ROUNDS - 1))
def test_a_newcomers_weight_is_bounded_in_every_group(tokens: int, rounds: int) -> None:
    plan = plan_of({"A": announce(tokens, elector("A")), "X": announce(tokens)}, {"X": Service(rounds)})
    vouched, newcomer = plan.members
    assert vouched.tokens == min(tokens, PHASE_TOKENS)
    most = min(tokens, int(NEWCOMER_WEIGHT * PHASE_TOKENS), int(NEWCOMERS_WEIGHT * vouched.tokens))
    for group in LAYOUT.groups:
        assert weight(newcomer, group) == most


def bounded_weights(members: tuple[Member, ...]) -> Iterator[dict[Standing, list[tuple[int, int]]]]:
    """Yield for each group, by standing, the weights before and after; those of vouched and invited members together."""
    bounded = bounded_strangers(members)
    for group in LAYOUT.groups:
        found: dict[Standing, list[tuple[int, int]]] = {"vouched": [], "proven": [], "newcomer": []}
        for before, after in zip(members, bounded, strict=True):
            found[before.standing if before.is_stranger else "vouched"].append((weight(before, group), weight(after, group)))
        yield found


@given(MEMBERS)
def test_all_strangers_together_weigh_at_most_as_much_as_the_others(members: tuple[Member, ...]) -> None:
    for found in bounded_weights(members):
        assert all(before == after for before, after in found["vouched"])
        known = sum(before for before, _ in found["vouched"])
        strangers = [pair for pair in found["proven"] + found["newcomer"] if pair[0]]
        if known:
            assert sum(after for _, after in strangers) <= max(known, known // 4 + len(strangers)), "one token each at least"
        else:
            assert all(before == after for before, after in found["proven"])


@given(MEMBERS)
def test_all_newcomers_together_weigh_at_most_a_quarter_of_the_others(members: tuple[Member, ...]) -> None:
    for found in bounded_weights(members):
        others = sum(before for before, _ in found["vouched"]) or sum(before for before, _ in found["proven"])
        new = [pair for pair in found["newcomer"] if pair[0]]
        if others:
            assert sum(after for _, after in new) <= max(NEWCOMERS_WEIGHT * others, len(new)), "one token each at least"
        else:
            assert all(before == after for before, after in new)


def test_newcomers_do_not_push_out_strangers_past_probation() -> None:
    def strangers(standing: Standing, count: int, tokens: int) -> list[Member]:
        return [Member(f"{standing}-{i}", tokens, (tokens,) * EXPERTS, 1.0, True, standing) for i in range(count)]

    vouched = strangers("vouched", 3, 100)
    bounded = bounded_strangers([*vouched, *strangers("proven", 10, 100), *strangers("newcomer", 32, 25)])
    of: dict[Standing, int] = {
        standing: sum(each.tokens for each in bounded if each.standing == standing) for standing in STANDINGS
    }
    assert of["vouched"] == 300
    assert 32 <= of["newcomer"] <= 75
    assert 300 - of["newcomer"] - 10 < of["proven"] <= 300 - of["newcomer"], "they have what newcomers leave"


def test_the_slow_among_strangers_lose_least() -> None:
    slow, fast = (Member(name, tokens, (0,) * EXPERTS, 1.0, True, "proven") for name, tokens in (("X", 10), ("Y", 1000)))
    bounded = bounded_strangers([Member("A", 100, (0,) * EXPERTS, 1.0), slow, fast])
    assert [each.tokens for each in bounded] == [100, 10, 90]


def test_strangers_cannot_change_how_many_steps_the_others_do() -> None:
    known = {name: announce(invitation=elector(name), tokens_per_second=10.0) for name in "AB"}
    sybils = {name: announce(tokens_per_second=1000.0) for name in "UVXYZ"}
    plan = plan_of(known | sybils, {"Z": Service(PROBATION_ROUNDS)})
    steps = {plan.members[each.member].peer: each.steps for each in plan.assignments}
    assert steps == dict.fromkeys("AB", 10) | dict.fromkeys("UVXY", 10) | {"Z": 40}, "Z is no newcomer"


@pytest.mark.parametrize("loss", [0.0, 1e6])
def test_the_shown_loss_is_that_of_the_vouched_trainers(loss: float) -> None:
    strangers = {name: announce(4 * PHASE_TOKENS, loss=loss) for name in "UVX"}
    assert plan_of({"A": announce(PHASE_TOKENS, elector("A"), loss=2.5)} | strangers).loss == 2.5
    plan = plan_of({"A": announce(0, elector("A")), "X": announce(PHASE_TOKENS, loss=3.0)})
    assert plan.loss == 3.0, "where they bring no work, that of the others"


def test_the_schedule_advances_with_work_of_vouched_trainers_only_unless_the_campaign_needs_none() -> None:
    def step(vouched: int, min_peers: int) -> int:
        config = campaign(admission="open", sync={"min_peers": min_peers}).config
        rules = Rules(config, OPEN.hash, NUM_SAMPLES)
        announcements = {"A": announce(vouched, elector("A")), "P": announce(PHASE_TOKENS), "X": announce(PHASE_TOKENS)}
        return plan_of(announcements, {"P": Service(PROBATION_ROUNDS)}, rules=rules).step

    assert [step(0, 3), step(PHASE_TOKENS, 3), step(0, 0)] == [RECENT[0].step, RECENT[0].step + 10, RECENT[0].step + 10]
    assert step(PHASE_TOKENS // 5, 3) == RECENT[0].step + 2, "what strangers train beside an auditor does not count"


@given(st.dictionaries(st.sampled_from("ABCDEF"), st.tuples(st.sampled_from(["elector", "proven", "newcomer"]),
                                                            st.integers(0, EXPERTS)), min_size=1))
def test_every_expert_has_two_owners_of_whom_one_is_past_probation(peers: dict[str, tuple[str, int]]) -> None:
    announcements = {
        name: announce(invitation=elector(name) if kind == "elector" else None, capacity=capacity)
        for name, (kind, capacity) in peers.items()
    }
    plan = plan_of(announcements, {name: Service(PROBATION_ROUNDS) for name, (kind, _) in peers.items() if kind == "proven"})
    trusted = {i for i, member in enumerate(plan.members) if member.standing != "newcomer"}
    for expert in range(EXPERTS):
        owners = {each.member for each in plan.assignments if expert in each.owned}
        assert not owners or owners & trusted
        if len([1 for _, capacity in peers.values() if capacity == EXPERTS]) >= 2 and owners:
            assert len(owners) == 2


def test_newcomers_that_own_experts_make_room_for_a_stranger_past_probation() -> None:
    """Identities of one attacker had all places of strangers as long as they stayed."""
    names = [f"S{number}" for number in range(8)]
    held = replace(RECENT[0], members=("A", *names), owners=tuple((0, 1 + expert) for expert in range(EXPERTS)))
    announcements = {name: announce() for name in (*names, "X")} | {"A": announce(invitation=elector("A"))}

    def owned(services: dict[str, Service]) -> int:
        plan = plan_of(announcements, services, [held])
        return sum(len(each.owned) for each in plan.assignments if plan.members[each.member].peer == "X")

    assert owned({}) == 0
    assert owned({"X": Service(PROBATION_ROUNDS)}) == 1


def test_among_friends_an_invitation_changes_no_plan() -> None:
    rules = Rules(campaign().config, campaign().hash, NUM_SAMPLES)
    proposal = Proposal(1, RECENT[0].id, Ballot(1, "W"), ())
    plain, *others = [
        make_plan(RECENT, proposal, {"A": announce(5, given), "X": announce(10**9)}, (), rules)
        for given in (None, elector("A"), elector("B"))
    ]
    assert others == [plain, plain]
    assert {member.standing for member in plain.members} == {"vouched"}
    assert plain.members[1].tokens == 4 * PHASE_TOKENS, "all that was assigned"


def test_a_round_has_room_for_as_many_newcomers_as_for_others() -> None:
    others: dict[str, Standing] = {f"known-{i}": "proven" for i in range(40)}
    newcomers: dict[str, Standing] = {f"new-{i:03d}": "newcomer" for i in range(100)}
    working = [peer for peer in newcomers if peer < "new-030"]
    services = dict.fromkeys(working, Service(1)) | {"new-029": Service(3)} | dict.fromkeys(list(newcomers)[30:], Service(9))
    parent = replace(RECENT[0], members=tuple(working), heard=tuple(range(30)))

    def drawn(standings: dict[str, Standing], seed: int) -> frozenset[str]:
        return crowded_out(standings, services, parent, random.Random(seed))

    out = drawn(others | newcomers, 0)
    stay = newcomers.keys() - out
    assert len(stay) == len(others)
    assert "new-029" in stay
    assert 20 <= len(stay.intersection(working)) < 30, "half of the room is for those who worked, half is drawn"
    assert out == drawn(dict(reversed((others | newcomers).items())), 0)
    assert out != drawn(others | newcomers, 1), "nobody can tell the draw, and make identities that win it"
    assert len(newcomers) - len(drawn(newcomers, 0)) == LEAST_NEWCOMERS


# Probation --------------------------------------------------------------------------------------------------------------


def commit_after(parent: Commit, members: tuple[str, ...], heard: tuple[int, ...], term: int = 0) -> CertifiedCommit:
    changes: dict[str, Any] = {"term": term, "plan": "p", "members": members, "heard": heard}
    commit = replace(parent, round=parent.round + 1, parent=parent.id, **changes)
    return CertifiedCommit(commit, Ballot(1, "W"), ())


def counts(log: CommitLog, number: int) -> dict[str, int]:
    return {peer: each.rounds for peer, each in log.services(number).items()}


def test_served_rounds_are_those_of_the_log_also_when_a_branch_is_given_up() -> None:
    log = CommitLog(SimulatedIdentity("A"), GENESIS)
    for heard in ((0, 1), (1,), ()):
        log.put(commit_after(log.last, ("C", "D"), heard))
    assert [counts(log, number) for number in (-1, 0, 1, 2)] == [{}, {"C": 1, "D": 1}, {"C": 1, "D": 2}, {"C": 1, "D": 2}]
    log.put(commit_after(log.commit_at(0), ("C", "D"), (0,), term=1))
    assert [counts(log, number) for number in (0, 1)] == [{"C": 1, "D": 1}, {"C": 2, "D": 1}]
    for _ in range(2 * KEPT_READ):
        log.put(commit_after(log.last, ("C", "D"), (1,), term=1))
    last = log.round
    assert (counts(log, last)["D"], counts(log, last - KEPT_READ)["D"], counts(log, 1)["D"]) == (last, last - KEPT_READ, 1)
    log.put(commit_after(log.commit_at(3), ("C", "D"), (0, 1), term=2))
    assert counts(log, log.round) == {"C": 3, "D": 4}, "also a branch longer than what is at hand"


def test_rounds_that_move_no_work_serve_nobody_and_rounds_go_on_after_them() -> None:
    work = (Workload(10, ()), Workload(10, ()))
    parent = replace(
        commit_after(GENESIS, ("C", "D"), (0, 1)).commit, vouched=(0,), workloads=work, lost=((1,),), suspected=(1,),
    )
    services: dict[str, Service] = {}
    add_service(services, parent)
    announcements = {"C": announce(invitation=elector("C")), "D": announce()}
    for commit in (
        reform_commit(parent, 1, "W", "", ()),
        rollback_commit(parent, Control(OPEN.hash, 1, "running", (), 0, b""), "d", 0),
    ):
        add_service(services, commit)
        assert services == {"C": Service(1), "D": Service(1)}
        assert auditors(commit) == ()
        assert (commit.lost, commit.suspected) == ((), ())
        for recent in ([commit], [commit, parent], [replace(parent, round=commit.round + 1, parent=commit.id), commit, parent]):
            plan = plan_of(announcements, services, recent)
            assert [member.standing for member in plan.members] == ["vouched", "newcomer"]
            assert all(each.steps for each in plan.assignments)
