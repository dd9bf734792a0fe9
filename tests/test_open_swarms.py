"""Swarms of an open campaign: strangers that are late, slow, silent or lie stop nobody, and honest ones take part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from exchange_round import LAYOUT
from open_campaign import ELECTOR, OPEN, PHASE_TOKENS, RECENT, WIDE, announce, unaudited_swarm

from spes_p2p.consensus.admission import PROBATION_AUDITS, PROBATION_ROUNDS, signed_invitation
from spes_p2p.consensus.control import is_rollback, signed
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.reform import is_reform
from spes_p2p.consensus.signed import sign
from spes_p2p.data.slices import MAX_RETURNED
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit, Control, Leave, Signed
from spes_p2p.messages.fields import MAX_EXPERTS
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import LEAVE, ROUND
from spes_p2p.messages.presence import Contact, Probation
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, Report, Stalled
from spes_p2p.messages.samples import Interval
from spes_p2p.model.layout import Layout
from spes_p2p.net.interfaces import Registry, World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.events import PeersSeen, RoundFailed
from spes_p2p.peer import collecting, coordinator, gathering
from spes_p2p.peer.attempt import RoundMember
from spes_p2p.peer.collecting import StagedReports
from spes_p2p.peer.courtesy import Courtesy
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.gathering import MAX_LATE, LateArrivals
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.transfers import Transfers
from spes_p2p.rounds import traffic
from spes_p2p.rounds.archive import NO_ARCHIVE, Archive
from spes_p2p.rounds.audits import can_be_audited
from spes_p2p.rounds.claims import COUNT_BYTES, STRANGERS_BYTES, Outstanding, longest_of_stranger
from spes_p2p.rounds.commit import staged_report
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.plan import MAX_SPEED_RATIO, NEWCOMER_WEIGHT
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results
from spes_p2p.session.admission import standing_in
from spes_p2p.testing.attacks.deciding import altered
from spes_p2p.testing.attacks.kinds import ATTACKS, AttackKind
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import EXPERTS, VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.testing.wrapped import Wrapped


async def plans_until_finished(swarm: VirtualSwarm) -> dict[int, Plan]:
    """The plans of all rounds, by round."""
    found: dict[int, Plan] = {}

    def is_over() -> bool:
        for peer in swarm.peers.values():
            base = peer.replica.base if peer.replica.has_base else None
            if base is not None and base.plan is not None:
                found[base.round] = base.plan
        return all(swarm.tasks[name].done() for name in swarm.peers)

    await swarm.until(is_over)
    return found


def open_swarm(total_steps: int, trusted: str, strangers: str, archive: Archive = NO_ARCHIVE) -> VirtualSwarm:
    """W and, as electors, `trusted`; strangers, of whom each newcomer is audited."""
    min_peers = len(trusted + strangers) if trusted else 0
    sync = {"min_peers": min_peers, "audited_share": 0.25, "reform_after_s": 30.0}
    swarm = VirtualSwarm(campaign(total_steps, admission="open", sync=sync), archive=archive)
    for name in trusted:
        made = Invitation(swarm.campaign.hash, name, ELECTOR, 2**40, b"")
        swarm.invitations[name] = signed_invitation(made, SimulatedIdentity("W"))
    swarm.start_all(trusted + strangers)
    return swarm


@pytest.mark.long
async def test_strangers_train_and_decide_nothing_reduce_nothing_and_own_nothing_alone() -> None:
    swarm = open_swarm(160, "AB", "XY")
    await swarm.until_round(3)
    swarm.start("Z")
    swarm.restart("X")
    plans = await plans_until_finished(swarm)
    commits = {decided.commit.round: decided.commit for decided in swarm.nodes["W"].log.since(-1)}
    assert plans.keys() >= set(range(5, 17))
    ended: dict[str, int] = {}
    for number, plan in sorted(plans.items()):
        names = [member.peer for member in plan.members]
        standings = {member.peer: member.standing for member in plan.members}
        trusted = {peer for peer, standing in standings.items() if standing != "newcomer"}
        assert {standings[peer] for peer in "WAB" if peer in standings} == {"vouched"}
        assert set(commits[number].electorate) <= set("WAB")
        assert set(coordinator_order(commits[number])) <= set("WAB")
        parts = part_table(swarm.layout, plan.members, swarm.peers["A"].replica.codecs)
        assert {names[part.reducer] for part in parts} <= set("WAB")
        for expert in range(EXPERTS):
            owners = {names[each.member] for each in plan.assignments if expert in each.owned}
            assert owners & trusted
            assert len(owners) == 2
        for member in plan.members:
            assert member.standing != "newcomer" or member.tokens <= NEWCOMER_WEIGHT * PHASE_TOKENS
            if member.standing == "proven":
                ended.setdefault(member.peer, number)
    assert {"X", "Y"} <= ended.keys(), "probation ends"
    assert ended["Y"] >= PROBATION_ROUNDS
    served = {name: node.log.services(node.log.round) for name, node in swarm.nodes.items()}
    assert all(each == served["W"] for each in served.values()), "everybody counts alike, after a restart and joining late"
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()


class ClaimsOrders(Wrapped):
    """A registry into which contacts are put with a far round and an order that nobody gave."""

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        claim = replace(unpack(Contact, value), round=2**40, commit="f" * 64, control=10**6)
        await self._inner.put(key, pack(claim), ttl_s)


@pytest.mark.long
async def test_members_that_claim_orders_and_prove_none_hide_no_order_that_only_the_bootstrap_peer_has() -> None:
    """They are in the last commit, too, and claim more than the bootstrap peer."""
    swarm, clock = unaudited_swarm("ABC", "", min_peers=2), asyncio.get_running_loop().time
    liars = [f"S{number}" for number in range(12)]

    def lying(world: World) -> World:
        tampered_world = ATTACKS["contacts"].around(Liar(world, swarm.campaign.config))
        return replace(tampered_world, registry=cast(Registry, ClaimsOrders(world.registry)))

    for name in liars:
        swarm.around[name] = lying
    for name in ("A", "B", "C", *liars):
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 5 and log.last.participants >= {*liars})
    await asyncio.sleep(20)
    order = Control(swarm.campaign.hash, 1, "paused", (), -1, b"")
    swarm.nodes["W"].decisions.take_control(signed(order, SimulatedIdentity("W")))
    began = clock()
    await swarm.until(lambda: log.last.control is not None)
    assert clock() - began < 60


async def test_strangers_that_train_one_step_and_claim_a_phase_stop_nobody_early() -> None:
    swarm = VirtualSwarm(campaign(total_steps=30, admission="open", sync={"min_peers": 6, "audited_share": 0.0}))
    for name in "VXYZ":
        swarm.around[name] = lambda world: ATTACKS["sybils"].around(Liar(world, swarm.campaign.config))
    for name in "AB":
        swarm.invitations[name] = swarm.invitation(name, ELECTOR)
    swarm.start_all("ABVXYZ")
    await swarm.until_finished()
    for name in "AB":
        samples = sum(len(each) for of_round in swarm.samples[name].values() for each in of_round)
        assert samples == 30 * swarm.campaign.config.training.batch_size, "a full phase in every round"


@pytest.mark.long
@pytest.mark.parametrize("are_waited_for", [False, True])
async def test_complaints_of_strangers_take_no_parts_from_a_reducer(
    are_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_waited_for:  # so that only the rule on complaints holds
        monkeypatch.setattr(collecting, "KNOWN_PATIENCE", 1e9)
    swarm = VirtualSwarm(campaign(total_steps=30, admission="open", sync={"min_peers": 7, "audited_share": 0.0}))
    told = list[str]()
    for name in "UVXYZ":
        swarm.around[name] = lambda world: ATTACKS["slander"].around(Liar(world, swarm.campaign.config, told.append))
    for name in "AB":
        swarm.invitations[name] = swarm.invitation(name, ELECTOR)
    swarm.start_all("ABUVXYZ")
    await swarm.until_finished()
    assert told
    commits = [decided.commit for decided in swarm.nodes["W"].log.since(0)]
    assert any(set("UVXYZ") <= set(commit.members) for commit in commits[1:])
    assert not any(commit.lost for commit in commits)


@pytest.mark.parametrize(
    ("layout", "bandwidth"), [(LAYOUT, 1.0), pytest.param(WIDE, 0.012, marks=pytest.mark.long)],
    ids=["as-fast-as-announced", "faster-than-announced"],
)
def test_a_stranger_on_a_slow_line_that_holds_its_updates_back_takes_no_parts_from_reducers(
    layout: Layout, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes for one part, the others complain of each other after seconds, and its account lasts as long."""
    honest = Transfers._send_update

    async def held(self: Transfers, *update: Any) -> Any:
        if self.context.names[self.context.me] == "X":
            await asyncio.sleep(60)
        return await honest(self, *update)

    monkeypatch.setattr(Transfers, "_send_update", held)
    monkeypatch.setattr(traffic, "SLOWEST_BYTES_PER_S", 10.0)

    async def main() -> list[Commit]:
        swarm = unaudited_swarm("AB", "XY", seconds_per_step=100.0, layout=layout)
        for name in "ABXY":
            swarm.start(name, bandwidth=1e-12 if name == "X" else bandwidth)
        await swarm.until(lambda: swarm.round_of("A") >= 4, 6000)
        return [decided.commit for decided in swarm.nodes["W"].log.since(0)]

    for commit in simulate(main, 10_000.0):
        assert not commit.lost
        assert {"A", "B", "Y"} <= {commit.members[i] for i in commit.heard}


async def seconds_of_rounds(kind: AttackKind | None, vouched: str, rounds: int = 10) -> float:
    """Return how long rounds after the first ones take vouched trainers, with two strangers of this kind, and an honest one."""
    swarm = VirtualSwarm(
        campaign(total_steps=10**6, admission="open", sync={"min_peers": 3 + len(vouched), "audited_share": 0.0}),
        seconds_per_step=10.0,
    )
    if kind is not None:
        for name in "XY":
            swarm.around[name] = lambda world: ATTACKS[kind].around(Liar(world, swarm.campaign.config))
    for name in vouched:
        swarm.invitations[name] = swarm.invitation(name, ELECTOR)
        swarm.network.set_latency("Z", name, 0.2)
    swarm.start_all(f"{vouched}XYZ")
    clock = asyncio.get_running_loop().time
    await swarm.until(lambda: min(map(swarm.round_of, vouched)) >= 5, 20_000.0)
    began = clock()
    await swarm.until(lambda: min(map(swarm.round_of, vouched)) >= 5 + rounds, 20_000.0)
    for decided in swarm.nodes[vouched[0]].log.since(6):
        assert decided.commit.members.index("Z") in decided.commit.heard, "an honest stranger is far away, and in each round"
    return clock() - began


@pytest.mark.long
@pytest.mark.parametrize(("kind", "vouched"), [("tarpit", "A"), ("slander", "ABC")])
def test_strangers_that_are_late_in_every_round_hold_up_all_rounds_together_by_a_tenth(kind: AttackKind, vouched: str) -> None:
    durations = [
        simulate(lambda each=each: seconds_of_rounds(each, vouched), 40_000.0) for each in (None, kind)  # type: ignore[misc]
    ]
    assert durations[1] <= 1.1 * durations[0]


def test_strangers_that_come_late_take_no_electors_place() -> None:
    late, commit = LateArrivals(), replace(RECENT[0], electorate=("A",))
    for i in range(2 * MAX_LATE):
        late.add(f"new-{i}", commit)
    assert len(late.peers) == MAX_LATE
    late.add("A", commit)
    late.add("B", commit, is_invited=True)
    assert {"A", "B"} <= late.peers


async def test_strangers_alone_are_at_most_as_fast_as_they_may_be_beside_vouched_trainers() -> None:
    swarm = unaudited_swarm("A", "XY", min_peers=0, seconds_per_step=4.0)
    swarm.start("A")
    for name in "XY":
        swarm.start(name, speed=1e4)
    log, clock = swarm.nodes["W"].log, asyncio.get_running_loop().time
    await swarm.until(lambda: log.round >= 1)
    began, step = clock(), log.last.step
    await swarm.until(lambda: log.round >= 3)
    round_s, step = (clock() - began) / 2, log.last.step
    swarm.kill("A")
    await asyncio.sleep(2 * round_s)
    round_s, steps = round_s, log.last.step - step
    assert round_s > 40
    assert 0 < steps <= 2 * MAX_SPEED_RATIO * OPEN.config.training.sync_steps


async def test_a_vouched_trainer_without_a_seat_is_trusted_and_audits_also_where_no_stranger_is() -> None:
    """Otherwise a stranger that comes back after some such rounds is past its probation without an audit."""
    swarm = open_swarm(160, "ABC", "")
    await swarm.until_round(2)
    log, shares = swarm.nodes["W"].log, swarm.nodes["W"].endpoint.shares
    assert len(log.last.electorate) < len("WABC")
    assert all(map(shares.is_trusted, "WABC"))
    assert can_be_audited(swarm.campaign.config, [log.last])
    swarm.start("X")
    await swarm.until(lambda: "X" in log.last.members)
    assert [*filter(shares.is_trusted, "WABCX")] == [*"WABC"]
    await swarm.until(lambda: "X" in log.services(log.round))
    served = log.services(log.round)["X"].rounds
    for name, expected in (
        ("X", ("newcomer", Probation(served, PROBATION_ROUNDS, 0, PROBATION_AUDITS))), ("A", ("vouched", None)),
    ):
        assert standing_in(log, name, swarm.campaign.config, swarm.invitations.get(name)) == expected


@pytest.mark.parametrize("restarts", [False, True])
async def test_strangers_alone_neither_begin_a_campaign_nor_advance_its_schedule(restarts: bool) -> None:
    swarm = unaudited_swarm("A", "XY", seconds_per_step=4.0)
    for name in "XYZ":
        swarm.start(name, speed=1e4)
    log = swarm.nodes["W"].log
    await asyncio.sleep(60)
    assert log.round < 0
    assert {swarm.recorders[name].of(PeersSeen)[-1].vouched for name in "WXYZ"} == {0}, "for people"
    swarm.start("A")
    await swarm.until(lambda: log.last.step > 0)
    assert {swarm.recorders[name].of(PeersSeen)[-1].vouched for name in "WXYZ"} == {1}
    swarm.kill("A")
    if restarts:
        swarm.restart("W")
        log = swarm.nodes["W"].log
    await swarm.until(lambda: "A" not in log.last.members)
    step, round_number = log.last.step, log.round
    await swarm.until(lambda: log.round >= round_number + 2)
    assert log.last.tokens > 0
    assert log.last.step == step
    swarm.start_again("A")
    await swarm.until(lambda: log.last.step > step)


async def test_strangers_that_are_done_at_once_and_late_keep_no_invited_elector_out(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Replica.advance

    class Spent(Courtesy):
        """The account for peers that come too late: they come so often that it is empty."""

        def left_s(self, sharers: int = 1) -> float:
            return 0.0

    async def slowly(self: Replica) -> Any:
        if self.node.peer_id == "A":
            await asyncio.sleep(2)
        return await advance(self)

    monkeypatch.setattr(gathering, "Courtesy", Spent)
    monkeypatch.setattr(Replica, "advance", slowly)
    swarm = unaudited_swarm("", "XY", min_peers=0, seconds_per_step=4.0)
    for name in "XY":
        swarm.start(name, speed=1e4)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 3)
    swarm.invitations["A"] = swarm.invitation("A", ELECTOR)
    swarm.start("A")
    await swarm.until(lambda: "A" in log.last.members, 30)


class Announces(Tamper):
    """Announces something else."""

    def __init__(self, identity: Identity, **changes: Any):
        self._identity, self._changes = identity, changes

    async def send(self, frame: Frame) -> Frame:
        if (frame.method, frame.is_answer, frame.kind) != (ROUND, False, Kind.MESSAGE):
            return frame
        return changed(frame, Signed, lambda signed: altered(signed, self._identity, self._identity, **self._changes))


async def test_what_strangers_announce_takes_little_memory_and_none_once_they_are_gone() -> None:
    swarm = unaudited_swarm("A", "", seconds_per_step=60.0)
    swarm.start("A")
    await swarm.until(lambda: swarm.round_of("A") >= 1, 3000)
    await asyncio.sleep(100)
    node, coordinator = swarm.nodes["W"], swarm.nodes["W"].coordinators()[0]
    announced = announce(
        campaign=swarm.campaign.hash, round=node.log.round + 1, commit=node.log.last.id,
        untrained=tuple(Interval(0, 2 * i, 2 * i + 1) for i in range(200)), archived=tuple(range(1000, 3000)),
    )

    async def stay(name: str, seconds: float) -> None:
        record = pack(sign(announced, SimulatedIdentity(name)))
        async with RpcEndpoint(swarm.network.transport(name), 5.0).stream(coordinator, ROUND) as stream:
            await stream.send(record)
            await stream.alive(asyncio.sleep(seconds))

    staying = [asyncio.ensure_future(stay(f"stays-{i}", 200.0)) for i in range(3)]
    await asyncio.gather(*(stay(f"goes-{i}", 50.0) for i in range(3)))
    await asyncio.sleep(1)
    attempt = (swarm.helper if coordinator == "W" else swarm.peers[coordinator]).coordinators._attempt
    assert attempt is not None
    assert set(attempt._members.announced) - {"A", "W"} == {f"stays-{i}" for i in range(3)}
    assert attempt._members.signed.keys() == attempt._members.announced.keys()
    assert not any(each.untrained or each.archived for each in attempt._members.announced.values())
    for each in staying:
        each.cancel()
    await swarm.until(lambda: swarm.round_of("A") >= 3, 3000)


async def test_a_stranger_that_announces_more_than_its_work_explains_is_in_no_plan() -> None:
    swarm = unaudited_swarm("A", "Y")
    fat = {"archived": (2**40,) * (STRANGERS_BYTES // COUNT_BYTES)}
    for name in "AX":
        swarm.around[name] = lambda world: tampered(Liar(world, swarm.campaign.config), Announces(world.identity, **fat))
    for name in "AXY":
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 4, 400)
    assert all({"A", "Y"} <= set(each.commit.members) for each in log.since(1))
    assert not any("X" in each.commit.members for each in log.since(-1))


async def test_a_stranger_that_leaves_says_no_more_than_its_work_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a proposal has no room for all that leave, vouched peers go first."""
    swarm = unaudited_swarm("AB", "XY")
    for name in "ABXY":
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: {*"ABXY"} <= {*log.last.members})
    left = log.last
    for name in "BXY":
        swarm.kill(name)

    async def leave(name: str, intervals: int) -> int:
        said = Leave(left.id, tuple(Interval(0, 2 * i, 2 * i + 1) for i in range(intervals)))
        signed = sign(said, SimulatedIdentity(name))
        endpoint = RpcEndpoint(swarm.network.transport(name), 5.0)
        for elector in "WA":
            await endpoint.ask(elector, LEAVE, pack(signed), 5.0)
        return len(pack(signed))

    await leave("X", 100)
    monkeypatch.setattr(coordinator, "RETURNED_BYTES", await leave("B", 4000))
    with pytest.raises(Refused) as refused:
        await leave("Y", 4000)
    assert refused.value.code is Code.MALFORMED
    assert swarm.nodes["W"].departures.gone(left.id).keys() == {*"BX"}
    await swarm.until(lambda: swarm.round_of("A") > left.round)
    plan = swarm.peers["A"].replica.base.plan
    assert plan is not None
    assert [each.peer for each in plan.proposal.returned] == ["B"]


def test_a_stranger_may_announce_a_token_count_for_each_expert_and_all_its_samples() -> None:
    samples = tuple(Interval(2**40, 2**50 + 2 * i, 2**50 + 2 * i + 1) for i in range(MAX_RETURNED))
    honest = announce(untrained=samples, routed=(2**48,) * MAX_EXPERTS)
    work = Outstanding(10, frozenset(), (samples[:1], samples[1:]))
    assert STRANGERS_BYTES < len(sign(honest, SimulatedIdentity("X")).record) <= longest_of_stranger(work, MAX_EXPERTS)


async def test_strangers_of_the_last_round_do_not_keep_a_vouched_trainer_out_of_a_full_plan(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = unaudited_swarm("A", "XY")
    swarm.invitations["B"] = swarm.invitation("B", ELECTOR)
    for name in "AXY":
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: set("WAXY") <= set(log.last.members), 400)
    plan = swarm.peers["A"].replica.base.plan
    assert plan is not None
    sizes = [len(pack(each)) for each in plan.proposal.announcements]
    monkeypatch.setattr(coordinator, "ANNOUNCED_BYTES", sum(sizes) + min(sizes) // 2)
    swarm.start("B")
    await swarm.until(lambda: "B" in log.last.members, 400)
    assert len(log.last.members) < 5


async def test_a_stranger_that_reports_a_manifest_of_nothing_makes_nobody_report_again(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, asked = RoundMember._report, list[Sequence[str]]()

    def report(self: RoundMember, exchange: Exchange, in_full: bool = False) -> bytes:
        if self._node.peer_id != "X":
            return honest(self, exchange, in_full)
        manifest = Manifest(exchange.plan.id, exchange.me, 0, b"", b"", b"", b"")
        staged = staged_report(exchange.results, exchange.me, self._node.decisions.incarnation, in_full)
        return pack(Report(sign(replace(staged, manifests=(manifest.root,)), self._node.world.identity), (manifest,)))

    async def ask_in_full(self: StagedReports, peers: Sequence[str]) -> None:
        asked.append(peers)

    monkeypatch.setattr(RoundMember, "_report", report)
    monkeypatch.setattr(StagedReports, "_ask_in_full", ask_in_full)
    swarm = unaudited_swarm("AB", "X")
    for name in "ABX":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("A") >= 2 or bool(asked), 400)
    assert not asked


async def test_a_complaint_that_is_repeated_makes_the_coordinator_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, looks = StagedReports.wait, list[bool]()

    async def wait(self: StagedReports) -> None:
        changed = self._members.changed
        for _ in range(2):
            changed.clear()
            self.complain(1, Stalled(self.results.plan.id, 0, self.results.revision))
            looks.append(changed.is_set())
        self._complaints.clear()
        await honest(self)

    monkeypatch.setattr(StagedReports, "wait", wait)
    swarm = unaudited_swarm("AB", "")
    for name in "AB":
        swarm.start(name)
    await swarm.until(lambda: bool(looks), 400)
    assert looks[:2] == [True, False]


async def test_a_stranger_that_counts_attempts_hides_no_straggler_delays() -> None:
    swarm = unaudited_swarm("AB", "X")
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), Announces(world.identity, attempt=3))
    for name in "ABX":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("A") >= 3, 400)
    plan = swarm.peers["A"].replica.base.plan
    assert plan is not None
    assert len(plan.members) == 4
    assert len(plan.proposal.straggler_delay) == 2


@pytest.mark.long
async def test_strangers_in_the_majority_do_not_choose_the_base() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60, admission="open", sync={"min_peers": 6}))
    for name in "VXYZ":
        swarm.around[name] = lambda world: tampered(
            Liar(world, swarm.campaign.config), Announces(world.identity, base_digest="ab" * 32)
        )
    for name in "AB":
        swarm.invitations[name] = swarm.invitation(name, ELECTOR)
    swarm.start_all("ABVXYZ")
    await swarm.until(lambda: min(swarm.round_of("A"), swarm.round_of("B")) >= 4, 400)
    assert swarm.recorders["A"].of(RoundFailed) == []


async def test_an_invitation_is_believed_of_whom_the_owner_named_in_it_until_it_expires() -> None:
    swarm = unaudited_swarm("", "")
    node, good = swarm.nodes["W"], swarm.invitation("C", ELECTOR)
    now_s, is_trusted = int(node.world.wall_time()), node.endpoint.shares.is_trusted
    owner = SimulatedIdentity("W")
    for shown in (
        good, replace(good, peer="X"), swarm.invitation("X", ("trainer",)), swarm.invitation("", ELECTOR),
        signed_invitation(replace(good, peer="X"), SimulatedIdentity("X")),
        signed_invitation(replace(good, peer="X", campaign="ab" * 32), owner),
        signed_invitation(replace(good, peer="X", expires=now_s), owner),
    ):
        node.see_invitation("X", shown)
        assert not is_trusted("X")
    node.see_invitation("C", signed_invitation(replace(good, expires=now_s + 100), owner))
    assert is_trusted("C")
    await asyncio.sleep(101.0)
    assert not is_trusted("C")
    node.see_invitation("C", good)
    assert is_trusted("C")


async def goes_on(swarm: VirtualSwarm, members: str, where: Callable[[Commit], bool]) -> None:
    """Wait until the owner's log has such a commit, and the strangers' work is in rounds after it."""
    log = swarm.nodes["W"].log

    def has_work_of_all() -> bool:
        after = [each.commit for each in log.since(-1)]
        while after and not where(after[0]):
            after.pop(0)
        return any({commit.members[i] for i in commit.heard} == set(members) for commit in after)

    await swarm.until(has_work_of_all, 400)
    swarm.assert_same_commits()


async def test_an_open_campaign_goes_on_with_its_strangers_after_a_rollback() -> None:
    swarm = open_swarm(10_000, "AB", "XY", Archive(2, 2))
    await swarm.until_round(5)
    order = signed(Control(swarm.campaign.hash, 1, "running", (), 4, b""), SimulatedIdentity("W"))
    swarm.nodes["W"].decisions.take_control(order)
    await goes_on(swarm, "ABXY", is_rollback)


async def test_no_rollback_is_decided_to_a_base_that_only_a_stranger_says_it_keeps() -> None:
    swarm = open_swarm(10_000, "AB", "")
    swarm.around["X"] = lambda world: tampered(
        Liar(world, swarm.campaign.config), Announces(world.identity, archived=(2,))
    )
    swarm.start("X")
    await swarm.until_round(5)
    order = signed(Control(swarm.campaign.hash, 1, "running", (), 2, b""), SimulatedIdentity("W"))
    swarm.nodes["W"].decisions.take_control(order)
    await swarm.until_round(9, 400)
    log = swarm.nodes["W"].log
    assert any("X" in each.commit.members for each in log.since(5))
    assert not any(is_rollback(each.commit) for each in log.since(5))


async def test_an_open_campaign_goes_on_with_its_strangers_after_a_reform() -> None:
    swarm = open_swarm(10_000, "AB", "XY")
    await swarm.until_round(3)
    for name in "AB":
        swarm.kill(name)
    await swarm.until(lambda: is_reform(swarm.nodes["W"].log.last), 400)
    swarm.start_again("A")
    await goes_on(swarm, "AXY", is_reform)


async def test_a_lone_vouched_trainer_on_a_slow_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, slow = KeptResults.stage, list[KeptResults]()

    async def stage(self: KeptResults, results: Results) -> None:
        if self in slow:
            await asyncio.sleep(9)
        await honest(self, results)

    monkeypatch.setattr(KeptResults, "stage", stage)
    swarm = unaudited_swarm("A", "XYZ")
    for name in "AXYZ":
        swarm.start(name)
    slow.append(swarm.peers["A"].replica.results)
    await swarm.until(lambda: swarm.round_of("A") >= 3, 1000)
    assert swarm.recorders["A"].of(RoundFailed) == []


@pytest.mark.long
async def test_strangers_alone_train_the_shared_weights_until_their_probation_ends() -> None:
    swarm = open_swarm(160, "", "XY")
    plans = await plans_until_finished(swarm)
    for plan in plans.values():
        everybody_is_new = all(member.standing == "newcomer" for member in plan.members if member.trains)
        assert any(each.owned for each in plan.assignments) != everybody_is_new
    assert set(swarm.nodes["X"].log.last.electorate) == {"W"}
    first, last = swarm.recorders["X"].commits()[2], swarm.nodes["X"].log.last
    assert first.tokens > 0
    assert all(last.owners)
    swarm.assert_replicas_agree()


async def test_a_stranger_that_only_serves_is_refused() -> None:
    swarm = open_swarm(10_000, "A", "X")
    await swarm.until_round(1)
    swarm.nodes["X"].role = "helper"
    life = swarm.tasks.pop("X")
    swarm.peers.pop("X")
    await asyncio.wait({life}, timeout=100)
    with pytest.raises(UserError, match="admits helpers by invitation only"):
        life.result()


@pytest.mark.long
def test_strangers_that_report_at_once_do_not_end_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three strangers say that they have all results, two vouched trainers need longer than `silence_s` for theirs."""
    honest, strangers = RoundMember._exchange, "UVX"

    async def exchange(self: RoundMember, stream: Stream, plan: Plan, seconds: dict[str, float], known: bytes) -> Any:
        async def report() -> None:
            exchanges = self._replica.exchanges.by_plan
            while (plan.id, 0) not in exchanges:
                await asyncio.sleep(0.02)
            running = exchanges[plan.id, 0]
            while True:
                staged = staged_report(running.results, running.me, self._node.decisions.incarnation)
                staged = replace(staged, missing=(), parts=b"")
                await stream.send(pack(Report(sign(staged, self._node.world.identity), ())), kind=Kind.REPORT)
                await asyncio.sleep(0.05)

        if self._node.peer_id not in strangers:
            return await honest(self, stream, plan, seconds, known)
        lies = asyncio.ensure_future(report())
        try:
            return await honest(self, stream, plan, seconds, known)
        finally:
            lies.cancel()

    after = RoundMember._after_refusal

    async def after_refusal(self: RoundMember, coordinator: str, target: Any, attempt: int, *rest: Any) -> Any:
        if self._node.peer_id not in strangers:
            return await after(self, coordinator, target, attempt, *rest)
        await asyncio.sleep(0.1)
        return attempt

    monkeypatch.setattr(RoundMember, "_exchange", exchange)
    monkeypatch.setattr(RoundMember, "_after_refusal", after_refusal)

    async def main() -> list[Commit]:
        swarm = unaudited_swarm("AB", strangers, layout=WIDE)
        for name in "AB" + strangers:
            swarm.network.set_bandwidth(name, 1e6, 1e6)
            swarm.start(name, bandwidth=1e6)
        await asyncio.sleep(100)
        return list(swarm.nodes["W"].log.recent(swarm.nodes["W"].log.round))[:-1]

    commits = simulate(main, 1000.0)
    assert len(commits) >= 3
    assert all({"A", "B"} <= set(commit.members) for commit in commits)


@pytest.mark.long
def test_strangers_that_announce_before_the_coordinator_has_the_last_base_do_not_have_the_round(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, strangers = Replica.advance, "UVX"

    async def slowly(self: Replica) -> Any:
        if self.node.peer_id not in strangers:
            await asyncio.sleep(1)
        return await advance(self)

    monkeypatch.setattr(Replica, "advance", slowly)

    async def main() -> list[Commit]:
        swarm = unaudited_swarm("AB", strangers, seconds_per_step=4.0)
        for name in "AB" + strangers:
            swarm.start(name, speed=1e4 if name in strangers else 1.0)
        await asyncio.sleep(200)
        return list(swarm.nodes["W"].log.recent(swarm.nodes["W"].log.round))[:-1]

    commits = simulate(main, 1000.0)
    assert len(commits) >= 3
    assert all({"A", "B"} <= set(commit.members) for commit in commits)
