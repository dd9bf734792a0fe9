"""A member's claims count only as far as public records bear them out, and an honest member never exceeds them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exchange_round import LAYOUT, Round, codecs, make_plan_of, member, random_updates, reference

from spes_p2p.campaign.genesis import make_genesis
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.consensus import Ballot, Commit, Workload
from spes_p2p.messages.rounds import Announcement, Proposal
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds import claims
from spes_p2p.rounds.accounting import MAX_PENDING_ROUNDS
from spes_p2p.rounds.claims import LOST_ROUNDS, clamped, demoted, outstanding
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.plan import Rules, make_plan
from spes_p2p.rounds.planned import BANDWIDTH_RATIO, Member, Place, Plan
from spes_p2p.rounds.reducers import shares
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES, VirtualSwarm, campaign

CAMPAIGN = campaign()
RULES = Rules(CAMPAIGN.config, CAMPAIGN.hash, NUM_SAMPLES)
PHASE = 10 * 2 * 16
"""Tokens of a phase: steps, batch, length."""


def after(before: Commit, heard: str = "", **changes: Any) -> Commit:
    """The commit after a round of A (experts 0, 1) and B (2, 3), with phases of 10 steps; it includes the work of `heard`."""
    number = before.round + 1
    common: dict[str, Any] = {
        "round": number, "parent": before.id, "plan": "p", "members": ("A", "B"), "owners": ((0,), (0,), (1,), (1,)),
        "heard": tuple("AB".index(peer) for peer in heard), "vouched": (0, 1), "cursor": Cursor(0, 40 * number + 40),
        "workloads": tuple(Workload(10, (Interval(0, 40 * number + 20 * i, 40 * number + 20 * i + 20),)) for i in range(2)),
    }
    return dataclasses.replace(before, **common | changes)


def chain(*heard: str, **last: Any) -> tuple[Commit, ...]:
    """Commits from round 0 on, newest first: each round includes the work of those named."""
    commits = [make_genesis(CAMPAIGN, "W", np.zeros(4, np.float32), "0" * 16)]
    for number, peers in enumerate(heard):
        commits.append(after(commits[-1], peers, **(last if number == len(heard) - 1 else {})))
    return tuple(reversed(commits))


def announce(tokens: int = 0, routed: tuple[int, ...] = (0,) * EXPERTS, **changes: Any) -> Announcement:
    announcement = Announcement(
        campaign=CAMPAIGN.hash, protocol=1, round=0, attempt=0, waited_s=0.0, commit="h", base_digest="d", tokens=tokens,
        routed=routed, capacity=EXPERTS, tokens_per_second=0.0, bandwidth=1.0, loss=5.0, validation_loss=None, untrained=(),
    )
    return dataclasses.replace(announcement, **changes)


def test_a_phase_counts_until_a_round_includes_its_work() -> None:
    assert outstanding(chain(""), "A", False).steps == 10
    assert outstanding(chain("", "A"), "A", False).steps == 10
    assert outstanding(chain("", "B"), "A", False).steps == 20
    assert outstanding(chain("", "B", "A"), "A", False).steps == 10
    assert outstanding(chain("", "B"), "C", False) == claims.Outstanding(0, frozenset(), ())


def test_of_a_stranger_no_phase_counts_that_a_round_left_out_though_it_took_part() -> None:
    """It could train one phase of three and claim all of them with it: an audit trains the last one."""
    both, first, stranger = chain("", "B"), chain(""), {"vouched": ()}
    assert outstanding(both, "A", False).steps == 20
    work = outstanding((after(first[0], "B", **stranger), *first), "A", False)
    assert (work.steps, work.samples) == (10, ((Interval(0, 40, 60),),))
    for reason in ({"dropped": (3,)}, {"lost": (1,)}):
        assert outstanding((after(first[0], "B", **stranger, **reason), *first), "A", False).steps == 20
    away = after(first[0], "", **stranger, members=("C", "B"))
    assert outstanding((away, *first), "A", False).steps == 10


def test_with_overlap_a_phase_counts_one_round_later() -> None:
    assert outstanding(chain(""), "A", True).steps == 0
    assert outstanding(chain("", ""), "A", True).steps == 10
    assert outstanding(chain("", "", "A"), "A", True).steps == 10
    assert outstanding(chain("", "", "B"), "A", True).steps == 20


def test_work_that_was_left_out_too_often_no_longer_counts() -> None:
    """Its peer has discarded it: nobody can save up weight for one large blow."""
    assert outstanding(chain(*[""] * 20), "A", False).steps == 10 * (MAX_PENDING_ROUNDS + 1)


def test_a_reform_keeps_what_is_pending_and_a_rollback_voids_it() -> None:
    recent = chain("")
    reform = dataclasses.replace(recent[0], round=1, plan="", base_digest="", members=(), owners=(), workloads=())
    assert outstanding((reform, *recent), "A", False).steps == 10
    back = dataclasses.replace(recent[0], round=1, plan="", base_digest="d", workloads=())
    assert outstanding((back, *recent), "A", False).steps == 0


def test_tokens_count_up_to_the_assigned_steps_and_only_for_owned_experts() -> None:
    lies = {"A": announce(2**40, (2**40,) * EXPERTS), "B": announce(7, (0, 0, 3, 4)), "C": announce(5, (5,) * EXPERTS)}
    found = clamped(lies, chain(""), CAMPAIGN.config)
    assert (found["A"].tokens, found["A"].routed) == (PHASE, (PHASE, PHASE, 0, 0))
    assert (found["B"].tokens, found["B"].routed) == (7, (0, 0, 3, 4))
    assert (found["C"].tokens, found["C"].routed) == (0, (0,) * EXPERTS)


def test_a_lost_expert_may_be_announced_once_more() -> None:
    recent = chain("", "A", owners=((1,), (0,), (1,), (0,)))
    assert outstanding(recent, "A", False).experts == {0, 1, 3}


@pytest.mark.parametrize("claimed", [8.0, 1e15])
def test_bandwidth_counts_up_to_a_few_times_the_median_unless_the_owner_vouches(claimed: float) -> None:
    honest = {name: announce(bandwidth=1.0) for name in "BCD"}
    found = clamped({"A": announce(bandwidth=claimed), **honest, "E": announce(bandwidth=0.0)}, chain(""), CAMPAIGN.config)
    assert [found[name].bandwidth for name in "ABCDE"] == [BANDWIDTH_RATIO, 1.0, 1.0, 1.0, 0.0]
    assert clamped({"W": announce(bandwidth=claimed), **honest}, chain(""), CAMPAIGN.config)["W"].bandwidth == claimed


def test_who_comes_anew_and_has_measured_nothing_counts_for_no_more_than_the_median_of_the_last_rounds_members() -> None:
    members = {name: announce(bandwidth=1.0) for name in "AB"}
    new = {f"new-{number}": announce(bandwidth=100.0) for number in range(9)} | {"thin": announce(bandwidth=0.5)}
    found = clamped(members | new, chain(""), CAMPAIGN.config)
    assert {found[name].bandwidth for name in members} == {1.0}
    assert {name: found[name].bandwidth for name in new} == dict.fromkeys(new, 1.0) | {"thin": 0.5}
    alone = clamped({"A": announce(bandwidth=1e15)} | new, chain(""), CAMPAIGN.config)
    assert alone["A"].bandwidth == 4 * alone["new-0"].bandwidth == 400.0, "the only one that is left sets no median"


def test_strangers_of_an_open_campaign_do_not_move_the_medians() -> None:
    config = campaign(admission="open").config
    invitation = Invitation(CAMPAIGN.hash, "", ("trainer",), 0, b"")
    vouched = {name: announce(bandwidth=100.0, tokens=1, invitation=replace(invitation, roles=("elector",))) for name in "AB"}
    strangers = {name: announce(bandwidth=1e-3, tokens=1, loss=1e-3) for name in "UVXYZ"}
    found = clamped(vouched | strangers, chain(""), config)
    assert [(found[name].bandwidth, found[name].loss) for name in "AB"] == [(100.0, 5.0)] * 2
    assert clamped(strangers, chain(""), config)["U"].bandwidth == 1e-3


def test_who_was_lost_or_disputed_in_the_last_rounds_is_demoted_and_keeps_its_bandwidth() -> None:
    said = {name: announce(bandwidth=1.0) for name in "AB"}
    for named, why in (({"lost": ((1,),)}, "lost"), ({"disputed": (1,)}, "disputed")):
        for later in range(LOST_ROUNDS + 1):
            recent = chain("", **named)
            for _ in range(later):
                recent = (after(recent[0], lost=(), disputed=()), *recent)
            assert demoted(recent, said, "friends") == ({"B": why} if later < LOST_ROUNDS else {})
            members = make_plan(recent, Proposal(recent[0].round + 1, "", Ballot(1, "A"), ()), said, (), RULES).members
            assert [each.demoted for each in members] == ["", why if later < LOST_ROUNDS else ""]
            assert [each.bandwidth for each in members] == [1.0, 1.0]


@pytest.mark.parametrize(("peers", "liars"), [(4, 1), (6, 1), (8, 2), (30, 1), (30, 4), (33, 1), (64, 1), (64, 8)])
@pytest.mark.parametrize("owners", [0, 3, 24])
@pytest.mark.parametrize("admission", ["friends", "open"])
def test_who_exaggerates_its_bandwidth_reduces_a_bounded_share(peers: int, liars: int, owners: int, admission: str) -> None:
    """Of what others trained, too, each gets at most four shares, however full with experts the lines of others are.

    So one of six reduces at most 4 / 9. Strangers of an open campaign reduce nothing.
    """
    names = [f"{number:02d}" for number in range(peers)]
    said = {name: announce(bandwidth=1e15 if number < liars else 1.0) for number, name in enumerate(names)}
    members = tuple(
        Member(name, 1, tuple(int(e == peers - 1 - i) for e in range(owners)), each.bandwidth,
               standing="newcomer" if admission == "open" and i < liars else "vouched")
        for i, (name, each) in enumerate(clamped(said, chain(""), CAMPAIGN.config).items())
    )
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2**14, 2**8), "expert", 0, e) for e in range(owners)]
    parts = part_table(Layout([TensorSpec("embed", (2**25,), "shared"), *experts]), members, codecs("int4"))
    common = [part for part in parts if part.group.expert is None]
    theirs = sum(part.size for part in common if part.reducer < liars) / 2**25
    most = 4 * liars / (3 + peers) if admission == "friends" else 0.0
    assert theirs <= most + 0.02
    assert owners or theirs >= 0.7 * most


@pytest.mark.parametrize(("peers", "parts"), [(16, 4), (30, 4), (30, 40)])
def test_who_exaggerates_reduces_one_part_at_most_where_parts_are_larger_than_shares(peers: int, parts: int) -> None:
    members = tuple(Member(f"{i:02d}", 1, (), 1.0 if i else 4.0) for i in range(peers))
    table = part_table(Layout([TensorSpec("embed", (parts, 2**15), "shared")]), members, codecs("int4"))
    assert len(table) >= parts
    assert sum(part.reducer == 0 for part in table) <= max(1, len(table) * 4 / (peers + 3))


@pytest.mark.parametrize("vouched", [6, 9])
def test_few_owners_beside_cells_do_not_push_all_experts_to_one_that_exaggerates(vouched: int) -> None:
    members = tuple(
        Member(f"{i:02d}", 1, (int(i in (vouched - 1, vouched - 2)),) * 8, 1.0 if i else 4.0, lot=bytes([i]),
               standing="vouched" if i < vouched else "proven")
        for i in range(vouched + 12)
    )
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (2**12, 2**8), "expert", 0, e) for e in range(8)]
    parts = part_table(Layout([TensorSpec("embed", (2**20,), "shared"), *experts]), members, codecs("int4"))
    assert all(part.hubs for part in parts)
    theirs = sum(part.encoded_bytes for part in parts if part.reducer == 0)
    assert theirs <= 4 / (vouched + 3) * sum(part.encoded_bytes for part in parts)


@pytest.mark.parametrize("first_site", [4, 20])
def test_who_exaggerates_in_a_small_region_reduces_no_more_than_in_a_large_one(first_site: int) -> None:
    """Its region's few hubs are in several columns each."""
    members = tuple(Member(f"{i:02d}", 1, (), 1.0 if i else 4.0, place=Place(int(i >= first_site))) for i in range(24))
    parts = part_table(Layout([TensorSpec("embed", (2**25,), "shared")]), members, codecs("int4"))
    assert all(part.hubs for part in parts)
    assert sum(part.size for part in parts if part.reducer == 0) <= 4 / (24 + 3) * 2**25


def test_shares_follow_from_the_exact_sum_of_all_bandwidths() -> None:
    """Versions of Python add floats up in different ways, and peers with different shares would plan different reducers."""
    rates = dict(enumerate([0.1] * 10 + [9.0]))
    assert shares(2**20, rates) == shares(2**20, dict(reversed(rates.items())))


def test_one_loss_does_not_hide_the_others() -> None:
    peers = {name: announce(PHASE, loss=loss) for name, loss in (("A", 1e15), ("B", 5.0))}
    plan = make_plan(chain(""), Proposal(1, "", Ballot(1, "A"), ()), peers, (), RULES)
    assert plan.loss == pytest.approx(7.5)


def test_a_member_returns_only_the_end_of_its_assignment() -> None:
    """It trains in order, so no honest member returns every other sample: a commit would have an interval for each."""
    recent = chain("")
    every_other = tuple(Interval(0, place, place + 1) for place in range(1, 20, 2))
    for untrained, back in ((every_other, (Interval(0, 19, 20),)), ((Interval(0, 5, 20),), (Interval(0, 5, 20),)),
                            ((Interval(0, 0, 19),), ()), ((Interval(0, 12, 40),), (Interval(0, 12, 20),))):
        assert clamped({"A": announce(untrained=untrained)}, recent, CAMPAIGN.config)["A"].untrained == back


def test_a_member_returns_the_end_of_each_assignment_that_no_round_includes() -> None:
    both = (Interval(0, 15, 20), Interval(0, 40, 60))
    assert clamped({"A": announce(untrained=both)}, chain("", "B"), CAMPAIGN.config)["A"].untrained == both[::-1]
    assert clamped({"A": announce(untrained=both)}, chain("", "A"), CAMPAIGN.config)["A"].untrained == both[1:]


def test_another_members_samples_are_not_handed_out_again() -> None:
    recent = chain("")
    announcements = {"A": announce(untrained=(Interval(0, 0, 40),)), "B": announce()}
    plan = make_plan(recent, Proposal(1, "", Ballot(1, "A"), ()), announcements, (), RULES)
    assert [each.slices for each in plan.assignments] == [(Interval(0, 0, 20),), (Interval(0, 40, 60),)]


async def test_a_push_weighs_no_more_than_the_plan_says() -> None:
    nothing = (0,) * 4
    plan = make_plan_of([member("A", 10, nothing), member("B", 10, nothing), member("W", 0, nothing)])
    updates = random_updates(plan)
    played = await Round.open(plan, updates, behind={"B": lambda part: 2**40}, clips=True)
    await played.run()
    base = np.zeros(LAYOUT.size, np.float32)
    assert np.allclose(played.new_base("W", played.commit(), base), reference(plan, updates, base), atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.long
async def test_no_claim_of_an_honest_swarm_is_clamped(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a straggler that returns samples, one that dies, and one that joins late."""
    made: list[tuple[Plan, dict[str, Announcement]]] = []

    def make_and_note(recent: Any, proposal: Any, announced: dict[str, Announcement], *rest: Any) -> Plan:
        found = clamped(announced, recent, campaign(sync={"overlap": overlap}).config)
        assert [each.untrained for each in found.values()] == [each.untrained for each in announced.values()]
        made.append((make_plan(recent, proposal, announced, *rest), announced))
        return made[-1][0]

    monkeypatch.setattr("spes_p2p.rounds.proposal.make_plan", make_and_note)
    swarm = VirtualSwarm(campaign(total_steps=100, sync={"overlap": overlap}))
    swarm.start_all("ABC")
    await swarm.until_round(2)
    included = swarm.nodes["W"].log.commit_at(2)
    assert {included.members[i] for i in included.heard} == set("ABC")
    swarm.slow("B", 8.0)
    await swarm.until_round(4)
    swarm.kill("C")
    swarm.start("D")
    await swarm.until(lambda: all(swarm.tasks[peer].done() for peer in "ABD"))
    assert any(announced.untrained for _, peers in made for announced in peers.values())
    for plan, peers in made:
        for each in plan.members:
            announced = peers[each.peer]
            assert (each.tokens, each.routed, each.bandwidth) == (announced.tokens, announced.routed, announced.bandwidth)
        assert plan.tokens == sum(announced.tokens for announced in peers.values())
    assert sum(plan.tokens > 0 for plan, _ in made) > 5
