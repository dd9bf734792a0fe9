"""Audits of training: who is drawn, what an auditor finds when it trains a phase again, and what follows from the verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from exchange_round import LAYOUT, commit_before, make_plan_of, member
from rich.console import Console

from spes_p2p.campaign.orders import CampaignView, parse_order
from spes_p2p.client.audit import PeerAudits, peer_audits, render_audits
from spes_p2p.consensus.admission import PROBATION_AUDITS, PROBATION_ROUNDS, Service, add_service, is_past_probation
from spes_p2p.consensus.control import describe, describe_news
from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.consensus import Commit, Verdict, Workload
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.messages.rounds import Announcement
from spes_p2p.peer.auditing import Auditing
from spes_p2p.rounds.audits import (
    LEAST_SHARED,
    WAITING_SHARE,
    Replayed,
    Score,
    audited_work,
    auditor_of,
    auditors,
    auditors_share,
    compared,
    convicted_by,
    drawn_work,
    has_passed,
    in_order,
    is_drawn,
    is_urgent,
    pending_share,
    still_convicted,
    verdicts_of,
    worse_of,
)
from spes_p2p.rounds.planned import Member
from spes_p2p.storage.tensor_file import Source, whole
from spes_p2p.testing.simulate.swarm import campaign
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.moments import (
    are_plausible,
    from_bf16,
    load_moments,
    moments_chunks,
    read_moments,
    to_bf16,
)

BASE = np.zeros(LAYOUT.size, np.float32)

PROVEN = Service(PROBATION_ROUNDS, PROBATION_AUDITS)
STANDINGS: dict[str, Standing] = {"A": "vouched", "B": "vouched", "C": "vouched", "X": "newcomer", "Y": "proven"}


def commits(count: int, electorate: str = "ABC", members: str = "ABCXY", **fields: Any) -> list[Commit]:
    """A chain, newest first, in which everybody trains and is heard."""
    work = Workload(4, ())
    found: list[Commit] = []
    for number in range(count):
        commit = replace(
            commit_before(make_plan_of(tuple(member(name, 10, (10,) * LAYOUT.num_experts) for name in members))),
            round=number, plan="0" * 64, electorate=tuple(electorate), members=tuple(members), helpers=("W",),
            vouched=tuple(i for i, name in enumerate(members) if name in electorate),
            heard=tuple(range(len(members))), workloads=(work,) * len(members), parent=found[0].id if found else "", **fields,
        )
        found.insert(0, commit)
    return found


def everybody(changes: Mapping[str, Standing] = STANDINGS) -> list[Member]:
    return [replace(member(name, 10, ()), standing=standing) for name, standing in {**STANDINGS, **changes}.items()]


def announced(audited: Audited) -> Announcement:
    return Announcement("c", 10, 9, 0, 0.0, "", "", 0, (), 0, 0.0, 0.0, 0.0, None, (), audited=(audited,))


def failed(number: int, peer: str = "X") -> Audited:
    return Audited(number, peer, False, 4, 0.1, 0.2)


def test_an_auditor_is_a_vouched_trainer_and_each_peer_has_one_that_the_commit_draws() -> None:
    recent = commits(2)
    recent[0] = replace(recent[0], workloads=(Workload(4, ()), Workload(0, ()), *recent[0].workloads[2:]))
    assert auditors(recent[0]) == ("A", "C"), "B does not train"
    assert audited_work(recent[0], recent[1]).keys() == {"X", "Y"}, "no vouched peers"
    assert auditors(replace(recent[0], electorate=("W",))) == ("A", "C"), "also without a vote"
    drawn = {auditor_of(replace(recent[0], tokens=number), "X") for number in range(50)}
    assert drawn == {"A", "C"}
    assert auditor_of(replace(recent[0], vouched=()), "X") is None


def test_only_work_that_is_in_the_base_after_an_assignment_is_audited() -> None:
    last, before = commits(2)
    assert audited_work(replace(last, heard=(0, 1, 4)), before).keys() == {"Y"}
    assert not audited_work(replace(last, parent="0"), before), "no other commit's work"
    assert not audited_work(last, replace(before, plan="")), "nobody has assignments from a reform"
    idle = (*before.workloads[:3], Workload(0, ()), before.workloads[4])
    newer, changed = replace(last, parent=replace(before, workloads=idle).id), replace(before, workloads=idle)
    assert audited_work(newer, changed).keys() == {"Y"}


def test_newcomers_are_drawn_more_often_and_who_failed_always() -> None:
    found = [replace(each, tokens=number) for number in range(2000) for each in commits(1)]
    newcomer = Service(0, 5)
    share = {each: np.mean([is_drawn(commit, "X", 0.05, each, [commit]) for commit in found]) for each in (newcomer, PROVEN)}
    assert share[newcomer] == pytest.approx(0.2, abs=0.03)
    assert share[PROVEN] == pytest.approx(0.05, abs=0.015)
    waiting = [is_drawn(commit, "X", 1e-9, Service(PROBATION_ROUNDS, 0), [commit]) for commit in found]
    assert np.mean(waiting) == pytest.approx(WAITING_SHARE, abs=0.03), "its probation waits for this"
    suspect = replace(found[0], verdicts=(Verdict("A", "X", 0, False),))
    assert is_drawn(found[0], "X", 1e-9, PROVEN, [suspect])
    assert not is_drawn(found[0], "X", 1e-9, PROVEN, [replace(suspect, verdicts=(Verdict("A", "X", 0, True),))])
    assert not is_drawn(found[0], "X", 1e-9, PROVEN, [replace(suspect, convicted=(3,))]), "that is punished already"


def test_whose_work_on_shared_weights_is_left_out_as_harmful_is_drawn() -> None:
    last, before = commits(2)
    harmed = replace(last, heard=(), suspected=(4,))
    assert audited_work(harmed, before).keys() == {"Y"}
    assert is_drawn(harmed, "Y", 1e-9, PROVEN, [harmed])
    assert not is_drawn(harmed, "X", 1e-9, PROVEN, [harmed])


def test_a_verdict_counts_once_and_only_from_the_vouched_auditor_whose_turn_it_was() -> None:
    recent = commits(4)
    auditor = auditor_of(recent[0], "X")
    assert auditor is not None
    other = next(name for name in "ABC" if name != auditor)
    said = announced(failed(recent[0].round))
    (verdict,) = verdicts_of({auditor: said, other: said, "Y": said}, everybody(), recent, "XY")
    assert verdict == Verdict(auditor, "X", recent[0].round, False)
    known = [replace(recent[0], verdicts=(verdict,)), *recent[1:]]
    assert not verdicts_of({auditor: said}, everybody(), known, "XY")
    assert not verdicts_of({auditor: said}, everybody({auditor: "proven"}), recent, "XY"), "the owner no longer vouches for it"
    assert not verdicts_of({auditor: announced(failed(99))}, everybody(), recent, "XY")
    assert not verdicts_of({auditor: announced(failed(recent[0].round, "W"))}, everybody(), recent, "XY")


def test_no_verdict_counts_about_a_phase_that_nobody_drew() -> None:
    recent = commits(4)
    said = {auditor_of(each, "X") or "": announced(failed(each.round)) for each in recent[:2]}
    assert not verdicts_of(said, everybody(), recent, "Y")
    assert not verdicts_of(said, everybody(), [replace(recent[0], drawn=("Y",)), *recent[1:]], "Y")
    found = verdicts_of(said, everybody(), [replace(recent[0], drawn=("X",)), *recent[1:]], "X")
    assert {each.round for each in found} == {audited.round for each in said.values() for audited in each.audited}


def test_an_auditor_without_time_still_takes_whom_it_would_convict_and_whom_the_owner_names() -> None:
    recent = commits(4)
    failing = [replace(recent[0], verdicts=(Verdict("A", "X", 1, False),)), *recent[1:]]
    assert (is_urgent(failing, "X", "B"), is_urgent(failing, "X", "A"), is_urgent(failing, "Y", "B")) == (True, False, False)
    alone = [replace(each, vouched=(0,)) for each in failing]
    assert is_urgent(alone, "X", "A"), "it convicts by itself"
    ordered = replace(recent[0], control=parse_order(["audit", PEER])(view()))
    assert is_urgent([ordered], PEER, "A")
    shares = [campaign(admission="open", sync={"audited_share": share}).config for share in (0.02, 0.5)]
    assert list(map(auditors_share, shares)) == [0.2, 1.0]


def test_who_has_failed_an_audit_holds_no_place_before_others() -> None:
    orders = [in_order(replace(commit, tokens=number), "XY") for number in range(200) for commit in commits(1)]
    assert np.mean([first == "X" for first, _ in orders]) == pytest.approx(0.5, abs=0.1)


def test_two_auditors_convict_and_one_alone_does_not_however_often_it_fails_a_peer() -> None:
    recent = commits(8)
    recent[1] = replace(recent[1], verdicts=tuple(Verdict("A", "X", number, False) for number in range(4)))
    assert convicted_by([], everybody(), recent) == ()
    assert convicted_by([Verdict("A", "X", 5, False)], everybody(), recent) == ()
    assert convicted_by([Verdict("B", "X", 5, True)], everybody(), recent) == ()
    assert convicted_by([Verdict("B", "Y", 5, False)], everybody(), recent) == ()
    assert convicted_by([Verdict("B", "X", 5, False)], everybody(), recent) == (3,)
    assert convicted_by([Verdict("B", "X", 5, False)], everybody({"X": "vouched"}), recent) == ()


def test_where_there_is_one_auditor_two_rounds_convict() -> None:
    recent = commits(8, electorate="AW")
    one = Verdict("A", "X", 5, False)
    assert convicted_by([one], everybody(), recent) == ()
    assert convicted_by([one, Verdict("A", "X", 6, False)], everybody(), recent) == (3,)


def test_a_convicted_peer_gets_no_work_while_the_last_commits_name_it_and_begins_its_probation_again() -> None:
    last, before = commits(2)
    convicting = replace(before, convicted=(3,))
    assert still_convicted([last, convicting]) == {"X"}
    services = {"X": Service(100, 7), "Y": Service(100, 7)}
    add_service(services, convicting)
    assert services.get("X") is None
    assert services["Y"] == Service(101, 7)


def test_what_a_peer_passed_before_its_probation_began_again_does_not_end_it() -> None:
    recent = commits(4)
    auditor, number = auditor_of(recent[1], "X"), recent[1].round
    assert auditor is not None
    passed, failing = announced(Audited(number, "X", True, 4, 1.0, 1.0)), announced(failed(number))
    recent[0] = replace(recent[0], drawn=("X",))
    assert [each.passed for each in verdicts_of({auditor: passed}, everybody(), recent, ())] == [True]
    stepped_out = commits(4, members="ABCY")[0]
    for setback in (
        replace(recent[0], rejected=(3,)), replace(recent[0], convicted=(3,)),
        replace(recent[0], verdicts=(Verdict("Z", "X", number, False),)),
    ):
        since = [setback, *recent[1:]]
        assert not verdicts_of({auditor: passed}, everybody(), since, ())
        assert [each.passed for each in verdicts_of({auditor: failing}, everybody(), since, ())] == [False]
    away = [replace(stepped_out, round=recent[0].round + 1, drawn=("X",)), *recent]
    assert not verdicts_of({auditor: passed}, everybody(), away, ()), "nor does an older one after it left a later audit"
    of_the_draw = replace(away[0], round=recent[0].round, drawn=("X",))
    assert len(verdicts_of({auditor: passed}, everybody(), [of_the_draw, *recent[1:]], ())) == 1


def test_who_was_drawn_and_is_away_or_failed_is_on_probation_until_it_passes_an_audit() -> None:
    last, before = commits(2, members="ABCY")
    services = {"X": Service(100, 3), "Y": Service(100, 3)}
    add_service(services, replace(before, drawn=("X", "Y")))
    assert services == {**services, "X": Service(100, 0), "Y": Service(101, 3)}, "who takes part has time to show its moments"
    assert not is_past_probation(services["X"], needs_audit=True)
    add_service(services, replace(last, verdicts=(Verdict("A", "X", 1, True), Verdict("B", "Y", 1, False))))
    assert services == {**services, "X": Service(100, 1), "Y": Service(102, 0)}, "a verdict counts all the same"
    add_service(services, replace(last, drawn=("Z",)))
    assert "Z" not in services


def test_a_commit_draws_strangers_only_and_only_where_somebody_audits() -> None:
    config = campaign(admission="open", sync={"audited_share": 1.0}).config
    recent = commits(3)
    assert drawn_work(recent, {}, config).keys() == {"X", "Y"}
    assert not drawn_work(recent[:1], {}, config)
    assert not drawn_work([replace(recent[0], vouched=()), *recent[1:]], {}, config), "nobody audits"
    assert not drawn_work(recent, {}, campaign().config)


def test_a_passed_audit_counts_for_the_peer_that_was_audited() -> None:
    services: dict[str, Service] = {}
    add_service(services, replace(commits(1)[0], verdicts=(Verdict("A", "X", 0, True), Verdict("B", "Y", 0, False))))
    assert (services["X"], services["Y"]) == (Service(1, 1), Service(1, 0))


# Scores -----------------------------------------------------------------------------------------------------------------


def test_what_is_shown_and_like_training_passes() -> None:
    assert has_passed(Score(4, *LEAST_SHARED))
    for score in (Score(0), Score(4), Score(4, LEAST_SHARED[0] - 0.01, 1.0), Score(4, 1.0, 0.4), Score(4, 1.0, 2.5)):
        assert not has_passed(score)


def test_pending_work_beyond_what_rounding_and_lost_rounds_leave_fails() -> None:
    """It is the member's word: an honest phase on invented pending work would move the base anywhere."""
    assert has_passed(Score(4, 1.0, 1.0, 0.15, 0.97))
    assert not has_passed(Score(4, 1.0, 1.0, 1.0, 0.7))
    assert not has_passed(Score(4, 1.0, 1.0, 0.4, 0.3))
    made, pending = np.full(4, 2.0, np.float32), np.full(4, -3.0, np.float32)
    assert [pending_share(pending, made, left_out) for left_out in (0, 1)] == [1.5, -0.5]
    assert pending_share(pending, np.zeros(4), 0) == math.inf


def test_a_router_is_compared_apart_from_the_shared_weights_beside_which_it_is_small() -> None:
    rng = np.random.default_rng(0)
    shared, router, none = *(rng.standard_normal(n).astype(np.float32) for n in (4096, 64)), np.zeros(64, np.float32)
    right = Replayed(shared, shared, np.zeros_like(shared), kind="shared")
    assert has_passed(compared(1, [right, Replayed(router, router, none, kind="router")]))
    for wrong in (-router, 3 * router, rng.permutation(router), none):
        score = compared(1, [right, Replayed(wrong, router, none, kind="router")])
        assert not has_passed(score)
        assert worse_of(score) == score.router, "people see why"
    assert not has_passed(compared(1, []))
    assert not has_passed(compared(1, [Replayed(router, router, none, kind="router")])), "nor a router alone"


def test_after_a_longer_phase_rounding_may_have_left_more_than_a_short_one_moves() -> None:
    rng = np.random.default_rng(0)
    made, pending = rng.standard_normal(10**4, np.float32), 3 * rng.standard_normal(10**4, np.float32)
    honest, invented = (Replayed(made + each, made, each) for each in (pending, 10 * pending))
    assert not has_passed(compared(1, [honest]))
    assert has_passed(compared(1, [honest], 16.0))
    assert not has_passed(compared(1, [invented], 16.0))


def test_pending_work_in_experts_beyond_what_rounds_may_have_left_out_fails() -> None:
    """Shared weights that train beside invented experts go wherever these lead them."""
    made = np.random.default_rng(0).standard_normal(10**4, np.float32)
    right = [Replayed(made, made, np.zeros_like(made))]
    for passes, longer, experts in (
        (True, 1.0, ()), (True, 1.0, ((4.0, 1.0), (0.0, 0.0))), (False, 1.0, ((5.0, 1.0), (0.0, 0.1))),
        (True, 4.0, ((5.0, 1.0),)), (True, 1.0, ((5.0, 0.0),)),
    ):
        assert has_passed(compared(1, right, longer, experts)) == passes, experts


def test_how_much_longer_a_phase_lately_was_follows_from_the_commits() -> None:
    given = {9: {"X": 4}, 8: {"A": 64}, 7: {"X": 32}}
    commits = [SimpleNamespace(members=tuple(each), workloads=[Workload(steps, ()) for steps in each.values()])
               for each in given.values()]
    auditing = object.__new__(Auditing)
    auditing._node = cast(Any, SimpleNamespace(log=SimpleNamespace(recent=lambda number: commits if number == 9 else ())))

    def longer(steps: int) -> float:
        case: Any = SimpleNamespace(peer="X", base=SimpleNamespace(round=9), phase=SimpleNamespace(steps=steps))
        return auditing._longer(case)

    assert [longer(4), longer(32), longer(40)] == [8.0, 1.0, 1.0]


def test_pending_phases_of_a_part_are_those_since_a_round_that_took_it() -> None:
    auditing, part, other = object.__new__(Auditing), SimpleNamespace(start=3), SimpleNamespace(start=5)
    known = dict[str, Service]()

    def commit_at(number: int) -> Any:
        return SimpleNamespace(members="AX" if number in were or number >= 4 else "A")

    were = set[int]()
    log: Any = SimpleNamespace(
        begins=-1, commit_at=commit_at, services=lambda number: known, recent=lambda number: [commit_at(number - 1)]
    )
    auditing._node = cast(Any, SimpleNamespace(log=log))

    def left_out(after: int, part: Any) -> int:
        case: Any = SimpleNamespace(peer="X", base=SimpleNamespace(round=after))
        return auditing._left_out(case, part)

    both, none = {3: frozenset("AX"), 5: frozenset("A")}, dict[int, frozenset[str]]()
    auditing._included = {7: none, 8: both, 9: both, 11: both}
    assert [left_out(9, part), left_out(9, other), left_out(11, other), left_out(7, part)] == [0, 2, 2, 2]
    assert left_out(5, part) == 1, "its first phase was that after round 4"
    assert left_out(4, part) == 0
    were.add(2)
    assert left_out(4, part) == 1, "it was away, and brings work back"
    were.clear()
    known["X"] = Service(9, 1)
    assert left_out(4, part) == 1, "also after long"


class Holding(SyntheticTrainer):
    """Has this optimizer state."""

    held: Mapping[str, np.ndarray]

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        return {name: whole(values) for name, values in self.held.items()}


def written(held: Mapping[str, np.ndarray], pending: float = 0.0) -> bytes:
    trainer = Holding(LAYOUT, BASE, (0,), 32, 1.0, 0)
    trainer.held = held
    trainer.add(LAYOUT.group("shared"), np.full(LAYOUT.group("shared").size, pending, np.float32))
    return b"".join(map(bytes, moments_chunks(trainer, BASE, 3)))


def test_moments_and_pending_work_are_rounded_to_8_bits_and_nothing_else_changes() -> None:
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32) * np.float32(1e-9)
    found = read_moments(written({"exp_avg/a": values, "step/a": np.array(7.0, np.float32), "age/shared": np.array(3)}, 0.5))
    np.testing.assert_allclose(found["exp_avg/a"], values, rtol=2**-8)
    assert (float(found["step/a"]), int(found["age/shared"])) == (7.0, 3)
    trainer = SyntheticTrainer(LAYOUT, np.ones_like(BASE), (0,), 32, 1.0, 0)
    assert load_moments(trainer, BASE, found).keys() == {"shared"}, "nothing else is pending"
    np.testing.assert_array_equal(trainer.read(LAYOUT.group("shared")), 0.5)
    exact = np.array([0.0, 1.0, -1.5, 2.0**100], np.float32)
    np.testing.assert_array_equal(from_bf16(to_bf16(exact)), exact)
    for wrong in (
        {"exp_avg/a": values * np.nan}, {"exp_avg_sq/a": -np.abs(values)}, {"exp_avg/a": np.ones(3, np.int64)},
        {"step/a": np.array(-1.0, np.float32)}, {"exp_avg.codes/a": values, "exp_avg.scales/a": values},
    ):
        with pytest.raises(ValueError, match="no training"):
            read_moments(written(wrong))


def test_moments_take_no_more_memory_than_was_fetched() -> None:
    entry = {"dtype": "BF16", "shape": [512], "data_offsets": [0, 1024]}
    header = json.dumps({f"exp_avg/{number}": entry for number in range(100)}).encode()
    with pytest.raises(ValueError, match="overlap"):
        read_moments(len(header).to_bytes(8, "little") + header + bytes(1024))
    with pytest.raises(ValueError, match="too long"):
        read_moments((2**30).to_bytes(8, "little") + header)


def test_moments_that_no_training_leaves_are_not_plausible() -> None:
    rng = np.random.default_rng(0)
    usual = {"exp_avg/a": rng.standard_normal(50).astype(np.float32) * np.float32(0.2), "exp_avg_sq/a": np.ones(50, np.float32)}
    after = {name: whole(values) for name, values in usual.items()}
    assert are_plausible(usual, after, 0.5)
    assert are_plausible({}, after, 0.5), "a new peer has none"
    forged = {"exp_avg/a": np.float32(3) * usual["exp_avg/a"]}
    assert not are_plausible({**usual, **forged}, after, 0.5), "it would move on by itself"
    assert not are_plausible({"exp_avg/a": usual["exp_avg/a"], "exp_avg_sq/a": np.zeros(50, np.float32)}, after, 0.5)
    one_zero = np.ones(50, np.float32)
    one_zero[7] = 0
    assert not are_plausible({**usual, "exp_avg_sq/a": one_zero}, after, 0.5), "without a gradient it moves by m / eps"
    for shape in ((50, 1), (3,)):
        other = {"exp_avg_sq/a": np.ones(shape, np.float32)}
        assert not are_plausible({**usual, **other}, after, 0.5), "not what the trainer holds"
    large = np.full(50, 1000, np.float32)
    frozen = {**after, "exp_avg_sq/a": whole(np.float32(0.5) * large + np.float32(0.5))}
    assert not are_plausible({**usual, "exp_avg_sq/a": large}, frozen, 0.5), "gradients would not matter"


# What people see --------------------------------------------------------------------------------------------------------


def status(peer: str, *made: Audited) -> PeerStatus:
    return PeerStatus(peer, "trainer", "c", "h", 10, audits=made)


def seen(recent: Sequence[Commit], *statuses: PeerStatus) -> PeerAudits:
    return audits_of("X", recent, *statuses)


def audits_of(peer: str, recent: Sequence[Commit], *statuses: PeerStatus) -> PeerAudits:
    services = {"X": Service(12, 2)} if peer == "X" else {}
    log = SimpleNamespace(round=recent[0].round, last=recent[0], recent=lambda number: recent, services=lambda number: services)
    return peer_audits(statuses, log, peer)  # type: ignore[arg-type]


def text_of(found: PeerAudits) -> str:
    console = Console(width=120, file=StringIO())
    console.print(render_audits(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_audits_of_a_peer_are_one_table() -> None:
    recent = commits(4)
    found = seen(recent, status("B", failed(2)), status("A", Audited(1, "X", True, 4, 0.987, 1.01), failed(1, "Y")))
    assert [(each.auditor, each.audit.round) for each in found.audits] == [("A", 1), ("B", 2)]
    assert (found.passed, found.gets_work) == (False, True)
    lines = text_of(found).splitlines()
    assert lines[0] == "X at round 3: gets work"
    assert lines[2].split() == ["1", "A", "4", "0.987", "1.01", "passed"]
    assert lines[3].split() == ["2", "B", "4", "0.100", "0.20", "failed"]
    hidden = seen(recent, status("B", Audited(2, "X", False, 0, math.nan, math.nan)))
    assert text_of(hidden).splitlines()[2].split()[2:9] == ["0", "-", "-", "failed:", "shows", "no", "moments"]
    assert not seen([replace(recent[0], convicted=(3,)), *recent[1:]], status("A", Audited(1, "X", True, 4, 1.0, 1.0))).passed


def test_a_peer_that_nobody_audited_costs_one_line_that_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"no vouched trainer .* lately, and it passed 2 audits before; .* --key KEY audit X"):
        seen(commits(2), status("A", failed(1, "Y")))
    with pytest.raises(UserError, match="B: the owner vouches for this peer"):
        audits_of("B", commits(2), status("A", failed(1, "Y")))


def view(**changes: Any) -> CampaignView:
    config = campaign(admission="open").config
    return replace(CampaignView("c", "W", config, None, 5, 50, ()), **changes)


PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_the_owner_can_have_each_phase_of_a_peer_audited_and_end_that() -> None:
    control = parse_order(["audit", PEER])(view())
    assert (control.audited, describe(control, 0)) == ((PEER,), f"audits of {PEER[-6:]}")
    assert describe(replace(control, audited=tuple("WXYZ")), 0) == "audits of 4 peers"
    assert describe_news(control, None, 0) == f"audits of {PEER[-6:]}"
    assert describe_news(replace(control, audited=()), control, 0) == f"no more audits of {PEER[-6:]}"
    ordered = [replace(each, control=replace(control, audited=("X",))) for each in commits(1)]
    assert is_drawn(ordered[0], "X", 1e-9, PROVEN, ordered)
    assert not is_drawn(ordered[0], "Y", 1e-9, PROVEN, ordered)
    assert parse_order(["unaudit", PEER])(view(newest=control)).audited == ()
    with pytest.raises(UserError, match="audited already"):
        parse_order(["audit", PEER])(view(newest=control))
    with pytest.raises(UserError, match="you vouch for this peer"):
        parse_order(["audit", PEER])(view(trusted={PEER}))
    with pytest.raises(UserError, match="not audited by order"):
        parse_order(["unaudit", PEER])(view())
    with pytest.raises(UserError, match="only open campaigns"):
        parse_order(["audit", PEER])(view(config=campaign().config))


@pytest.mark.parametrize("sync", [
    {"overlap": True}, {"codec": {"experts": "sparse"}}, {"codec": {"shared": "ternary"}}, {"audited_share": 0},
], ids=str)  # fmt: skip
def test_an_order_to_audit_is_refused_where_nobody_audits(sync: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^audit {PEER}: this campaign has no audits"):
        parse_order(["audit", PEER])(view(config=campaign(admission="open", sync=sync).config))
