"""Large rounds of an open campaign: strangers sum among themselves, and hubs among them are bounded, checked and audited."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from exchange_round import LAYOUT, PART_BYTES, Round, codecs, make_plan_of, random_updates
from open_campaign import GENESIS, announce, unaudited_swarm
from test_audited_swarms import attacking, audited_swarm, audits
from test_cells import (
    WIDE_OF_4,
    HubsLie,
    lie_as_hub,
    more_tokens,
    open_members,
    open_plan,
    until_only_this_one_is_excluded,
    wrong_values,
)

from spes_p2p.consensus import admission
from spes_p2p.consensus.control import signed
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Inputs, PullRequest, Unanswered
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import Stream
from spes_p2p.observe.events import ResultsChecked
from spes_p2p.peer.cell_means import CellMean
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.exchange_context import EncodedUpdate, SentUpdate
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.own_work import taken
from spes_p2p.peer.part_frames import numbered
from spes_p2p.peer.reducer import EncodedMean, Reducer
from spes_p2p.rounds.cells import make_cells
from spes_p2p.rounds.checks import checkers, disputed
from spes_p2p.rounds.commit import _lacks
from spes_p2p.rounds.influence import Contribution, clipped_mean
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import Part, pulls
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducer_residual import ReducerResiduals
from spes_p2p.rounds.revisions import moved_parts
from spes_p2p.rounds.sums import behind_means, is_wrong, make_mean, read_inputs
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.testing.simulate.swarm import VirtualSwarm, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity

STRANGERS = "NOPQRSTUV"


@pytest.fixture
def _short_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two rounds, nine strangers have cells: three of three, with three columns."""
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 2)


def have_cells(swarm: VirtualSwarm, hub: str | None = None) -> bool:
    """Return whether strangers summed among themselves in the last rounds, one of them by this hub."""
    recent = swarm.peers["A"].replica.results.by_plan.values()
    columns = [{results.plan.members[i].peer for i in part.summing} for results in recent for part in results.parts]
    return any(hub in column if hub else column for column in columns)


@pytest.mark.usefixtures("_short_probation")
@pytest.mark.long
async def test_a_swarm_with_strangers_in_cells_trains_and_its_hubs_pass_checks() -> None:
    swarm = unaudited_swarm("AB", STRANGERS, seconds_per_step=2.0)
    swarm.start_all("AB" + STRANGERS)
    await swarm.until(lambda: have_cells(swarm))
    log = swarm.nodes["W"].log
    began = log.round
    await swarm.until_round(began + 8)
    swarm.assert_replicas_agree()
    assert not log.last.excluded
    commits = [decided.commit for decided in log.since(began + 1)]
    assert all(set(commit.heard) == set(range(len(commit.members))) - {commit.members.index("W")} for commit in commits)
    checks = [event for recorder in swarm.recorders.values() for event in recorder.of(ResultsChecked)]
    assert sum(each.results for each in checks if each.round > began) > 8
    assert not [each for each in checks if each.wrong or each.unanswered]


@pytest.mark.usefixtures("_short_probation")
@pytest.mark.parametrize("lie", [wrong_values, more_tokens])
@pytest.mark.long
def test_a_stranger_that_falsifies_its_cells_mean_is_excluded(lie: HubsLie, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = unaudited_swarm("AB", STRANGERS)
        swarm.start_all("AB" + STRANGERS)
        await until_only_this_one_is_excluded(swarm, "N")

    lie_as_hub("N", lie, monkeypatch)
    simulate(main)


@pytest.mark.usefixtures("_short_probation")
@pytest.mark.long
def test_a_hub_that_shows_no_inputs_is_no_hub_for_a_while_and_its_checker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Exchanges.inputs_of

    def inputs_of(self: Exchanges, plan: str, part: int, of_cell: bool = False) -> dict[int, Input] | None:
        return None if of_cell and self._node.peer_id == "N" else honest(self, plan, part, of_cell)

    async def main() -> None:
        swarm = unaudited_swarm("AB", STRANGERS)
        swarm.start_all("AB" + STRANGERS)
        log = swarm.nodes["W"].log
        await swarm.until(lambda: bool(log.last.disputed))
        assert {log.last.members[i] for i in log.last.disputed} == {"N"}
        await swarm.until_round(log.round + 1)
        plan = next(reversed(swarm.peers["A"].replica.results.by_plan.values()))
        assert not any(part.hub_of(i) == plan.plan.index("N") for part in plan.parts for i in range(len(plan.plan.members)))

    monkeypatch.setattr(Exchanges, "inputs_of", inputs_of)
    simulate(main)


@pytest.mark.usefixtures("_short_probation")
@pytest.mark.long
async def test_audits_see_what_strangers_push_to_hubs_and_what_hubs_push() -> None:
    """Of honest ones, and of one that trains no more once it is past probation."""
    swarm, trains = audited_swarm(STRANGERS, vouched="AB"), [True]

    def lying_later(world: World) -> World:
        lying = attacking(swarm, "free-ride")(world)

        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            return await (world if trains[0] else lying).run_blocking(function, *args)

        return replace(world, run_blocking=run_blocking)

    swarm.around["N"] = lying_later
    swarm.start_all("AB" + STRANGERS)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: have_cells(swarm))
    began = log.round
    await swarm.until_round(began + 15)
    made = [audit for name in STRANGERS for audit in audits(swarm, name)]
    assert len([each for each in made if each.round > began]) > 10
    assert all(each.passed for each in made)
    trains[0] = False
    await swarm.until(lambda: not all(each.passed for each in audits(swarm, "N")))
    assert all(each.passed for name in STRANGERS[1:] for each in audits(swarm, name))


def owned_by(owners: Callable[[Callable[[int, str], list[int]]], list[int]], newcomers: int = 8) -> tuple[Member, ...]:
    """Members of an open campaign whose expert 3 only some strangers own.

    `owners` returns them; it is given a function that returns the members of a cell that have a standing.
    """
    members = open_members(3, 40, newcomers)
    made = make_cells(members, range(3))
    assert made is not None
    own = owners(lambda cell, standing: [i for i, of in enumerate(made.of) if of == cell and members[i].standing == standing])
    return tuple(replace(m, routed=(*m.routed[:3], 9 * (i in own))) for i, m in enumerate(members))


def test_a_hub_that_gives_several_members_one_token_stops_no_reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Reducer._cell_mean

    def cell_mean(self: Reducer, part: Part, updates: Mapping[int, Input], mean: EncodedMean | None) -> CellMean:
        made = honest(self, part, updates, mean)
        return replace(made, update=replace(made.update, tokens=1)) if part.group.expert == 3 else made

    async def main() -> None:
        plan = make_plan_of(owned_by(lambda of: [*of(0, "proven")[:3], of(1, "proven")[0], of(2, "newcomer")[0]]))
        played = await Round.open(plan, random_updates(plan), "int4", clips=True)
        await played.run()
        for i in range(3):
            results = played.exchanges[plan.members[i].peer].results
            assert all(results.verified(part) for part in results.parts)

    monkeypatch.setattr(Reducer, "_cell_mean", cell_mean)
    simulate(main)


def test_newcomers_of_one_cell_are_bounded_as_newcomers() -> None:
    """Where their hub, which is past probation, does not own the expert itself."""
    members = owned_by(lambda of: [*of(0, "newcomer")[:3], of(1, "proven")[0]], newcomers=20)
    part = next(each for each in part_table(LAYOUT, members, codecs("none"), PART_BYTES) if each.group.expert == 3)
    hub, step = part.summing[0], np.random.default_rng(0).standard_normal(part.size).astype(np.float32)
    updates = {i: (9, partial(np.copy, -100 * step if i == hub else step)) for i in part.inputs}
    mean = np.empty(part.size, np.float32)
    make_mean(part, members, updates, mean, True, {hub: part.in_cell(hub)})
    assert mean @ step > -1e-3 * (step @ step)


async def test_a_cells_mean_that_is_the_result_alone_can_be_checked() -> None:
    plan = make_plan_of(owned_by(lambda of: of(0, "proven")[:3]))
    played = await Round.open(plan, random_updates(plan), "int4", clips=True)
    await played.run()
    part = next(each for each in played.empty().parts if each.group.expert == 3)
    reducer = played.exchanges[plan.members[part.reducer].peer]
    assert part.inputs == part.summing
    kept = reducer.inputs.of_part[part.index]
    inputs = Inputs(tuple(each.signed for each in kept.values() if each.signed is not None))
    found = read_inputs(inputs, part, reducer.results, SimulatedIdentity("0000"))
    bodies = {i: (each.update.tokens, each.body) for i, each in kept.items()}
    result, behind = reducer.results.encoded[part.index], behind_means(found)
    assert not is_wrong(part, plan.members, bodies, result, True, behind)
    other = part.codec.encode(part.codec.decode(result, part.size) * np.float32(1.5))
    assert is_wrong(part, plan.members, bodies, other, True, behind)


@pytest.mark.usefixtures("_short_probation")
@pytest.mark.long
def test_a_stranger_that_gives_its_work_to_itself_alone_and_shows_it_to_nobody_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    hides, has, on_inputs = [False], SentUpdate.has, Checking._on_inputs

    def gives(self: SentUpdate, part: Part) -> bool:
        me, is_liar = self.context.me, hides[0] and self.context.endpoint.peer_id == "N"
        return has(self, part) and not (is_liar and part.group.expert is None and part.hub_of(me) != me)

    async def refuse(self: Checking, stream: Stream) -> None:
        if hides[0] and self._node.peer_id == "N":
            raise Refused(Code.NOT_HERE, "nothing to see here")
        await on_inputs(self, stream)

    async def main() -> None:
        swarm = audited_swarm(STRANGERS, vouched="AB")
        swarm.start_all("AB" + STRANGERS)
        await swarm.until(lambda: have_cells(swarm, hub="N"))
        hides[0] = True
        order = Control(swarm.campaign.hash, 1, "running", (), -1, b"", audited=("N",))  # few rounds have any of its work
        swarm.nodes["W"].decisions.take_control(signed(order, SimulatedIdentity("W")))
        await swarm.until(lambda: not all(each.passed for each in audits(swarm, "N")))
        assert all(each.passed for name in STRANGERS[1:] for each in audits(swarm, name))

    monkeypatch.setattr(SentUpdate, "has", gives)
    monkeypatch.setattr(Checking, "_on_inputs", refuse)
    simulate(main)


async def test_a_lost_hub_costs_its_cells_work_on_its_column_and_no_result() -> None:
    plan = open_plan()
    played = await Round.open(plan, random_updates(plan), "int4")
    parts = played.empty().parts
    lost = next(part.summing[0] for part in parts if part.summing)
    name = plan.members[lost].peer
    others = [m.peer for m in plan.members if m.peer != name]
    played.network.hook = lambda peer, method, index: (
        played.network.kill(name) if (peer, method, index) == (name, "push", 1) else None
    )
    running = played.run(others)
    dying = played.network.run_peer(name, played.exchanges[name].run())
    await running
    assert dying.done()
    for part in parts:
        without = set(part.in_cell(lost)) if lost in part.summing else {lost}
        for peer in others:
            results = played.exchanges[peer].results
            assert results.verified(part)
            assert set(results.contributors(part)) >= set(part.contributors) - without - {lost}


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("fault", ["lost", "lies", "withholds"])
def test_a_hub_puts_no_member_of_its_cell_on_probation(fault: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is lost or leaves them out. Who sends updates of experts alone is on probation if two hubs tell."""
    members = open_members(3, 60, newcomers=60 - 7 * columns)
    plan = make_plan_of(replace(m, routed=(3 * (i % 4 == 0), 0, 0, 0)) for i, m in enumerate(members))
    parts = part_table(LAYOUT, plan.members, codecs("int4"), 64)
    first = next(part for part in parts if part.group.kind == "shared")
    assert len({part.hubs for part in parts if part.group.kind == "shared"}) == columns
    expert = next(part for part in parts if part.group.expert == 0)
    cell = {first.cell_of[i]: [j for j in expert.contributors if first.cell_of[j] == first.cell_of[i]]
            for i in expert.contributors if expert.hub_of(i) not in expert.summing}
    direct = [i for i in next(its for each, its in cell.items() if each != -1) if i not in first.hubs]
    hub = first.hub_of(direct[0])
    assert hub is not None
    honest_sum, honest_has = Reducer._make_sum, SentUpdate.has

    async def make_sum(self: Reducer, part: Part, own: EncodedUpdate | None) -> None:
        if fault == "lies" and self.context.me == hub and part.index in self._cells:
            self._arrived.pop(part.index, None)
        await honest_sum(self, part, own)

    def has(self: SentUpdate, part: Part) -> bool:
        withholds = fault == "withholds" and self.context.me == direct[0] and part.group.kind == "shared"
        return not withholds and honest_has(self, part)

    async def main() -> None:
        played = await Round.open(plan, random_updates(plan), "int4", part_bytes=64)
        peers = [m.peer for i, m in enumerate(plan.members) if i != hub or fault != "lost"]
        if fault == "lost":
            played.network.kill(plan.members[hub].peer)
        await played.run(peers)
        withheld = played.commit(peers).withholding
        assert withheld == ((direct[0],) if fault == "withholds" and columns > 1 else ())

    monkeypatch.setattr(Reducer, "_make_sum", make_sum)
    monkeypatch.setattr(SentUpdate, "has", has)
    simulate(main)


@pytest.mark.long
async def test_small_steps_add_up_also_where_lots_draw_other_hubs_each_round() -> None:
    """Steps far below what `int4` rounds to: each hub keeps what it dropped until it makes a mean of the part again."""
    rounds, small = 48, 0.03
    rng, members, total = np.random.default_rng(0), open_members(3, 48, experts=0), np.zeros(LAYOUT.size)
    members = tuple(replace(m, tokens=10, routed=(0,) * 4) for m in members)
    step = np.full(LAYOUT.size, small, np.float32)
    step[::128] = 1.0
    groups = [group for group in LAYOUT.groups if group.expert is None]
    pending = {m.peer: {group.name: np.zeros(group.size, np.float32) for group in groups} for m in members}
    kept = {m.peer: ReducerResiduals(memory_scratch) for m in members}
    for _ in range(rounds):
        plan = make_plan_of(replace(m, lot=rng.bytes(8)) for m in members)
        for its in pending.values():
            for group in groups:
                noise = rng.standard_normal(group.size).astype(np.float32) * np.float32(0.02)
                its[group.name] += step[group.start : group.stop] + noise * (step[group.start : group.stop] < 1)
        played = await Round.open(plan, pending, "int4", residuals={peer: each.by_key for peer, each in kept.items()})
        await played.run()
        total += played.new_base("0000", played.commit(), np.zeros(LAYOUT.size, np.float32))
        for peer, exchange in played.exchanges.items():
            kept[peer].settle([exchange], exchange.results, {part.index for part in exchange.results.parts})
            for part, sent in exchange.sent.values():
                here = slice(part.start - part.group.start, part.stop - part.group.start)
                pending[peer][part.group.name][here] -= taken(exchange.results, part, sent)
    moved = total[groups[0].start : groups[0].stop]
    assert moved[step[groups[0].start : groups[0].stop] < 1].mean() > 0.9 * rounds * small


@pytest.mark.parametrize("loses_a_hub", [False, True])
def test_when_a_reducer_is_lost_another_vouched_one_gets_the_means_again(loses_a_hub: bool) -> None:
    """And the updates themselves of members whose hub is lost, too."""
    members = open_members(3, 60, newcomers=8)
    parts = part_table(LAYOUT, members, codecs("int4"), PART_BYTES)
    before = next(part for part in parts if part.summing)
    gone = before.summing[0]
    lost = tuple(sorted({before.reducer, *([gone] if loses_a_hub else [])}))
    after = moved_parts(parts, members, lost, set(lost), 1)[before.index]
    assert members[after.reducer].standing == "vouched"
    assert after.reducer not in lost
    left = set(before.contributors) - set(lost)
    pushing = {i for i in range(len(members)) if after.pushes(i)}
    orphans = left.intersection(before.in_cell(gone)) if loses_a_hub else set()
    assert pushing == (set(after.summing) | orphans | {0, 1, 2}) - set(lost) - {after.reducer}
    assert all(after.pushed_to(i) == after.reducer for i in pushing)
    assert all(after.parent(i) not in lost for i in left)


def test_a_cells_mean_weighs_as_its_members_and_is_clipped_as_one_update() -> None:
    members = open_members(20, 40)
    part = next(each for each in part_table(LAYOUT, members, codecs("none"), PART_BYTES) if each.summing)
    behind = {hub: part.in_cell(hub) for hub in part.summing}
    rng = np.random.default_rng(0)
    step = rng.standard_normal(part.size).astype(np.float32)

    def mean_of(liar: np.ndarray | None) -> tuple[np.ndarray, set[int]]:
        updates = {i: (10**6, partial(np.copy, step)) for i in part.inputs}
        if liar is not None:
            updates[part.summing[0]] = (10**6, partial(np.copy, liar))
        mean = np.empty(part.size, np.float32)
        return mean, make_mean(part, members, updates, mean, True, behind)

    honest, clipped = mean_of(None)
    np.testing.assert_allclose(honest, step, rtol=1e-5)
    assert not clipped
    noise = rng.standard_normal(part.size).astype(np.float32)
    for liar in (1000 * noise, 10 * noise, -10 * step):
        found, clipped = mean_of(liar)
        assert np.linalg.norm(found - honest) < 0.75 * np.linalg.norm(honest)
        assert clipped == {part.summing[0]}


@pytest.mark.parametrize(("share", "left"), [(0.0, 0.95), (0.1, 0.85), (0.5, 0.25), (1.0, 0.2)])
@pytest.mark.parametrize("cosine", [0.5, 0.04])
def test_strangers_in_cells_that_reverse_the_step_leave_as_much_of_it(share: float, left: float, cosine: float) -> None:
    """Of 60 beside three vouched trainers, whose updates have this cosine; docs/attacks.md has the figures."""
    rng, size, noise = np.random.default_rng(0), 8000, math.sqrt(1 / cosine - 1)
    step = _of_length_1(rng.standard_normal(size))
    known, honest = (step + noise * _of_length_1(rng.standard_normal((count, size))) for count in (3, 60))
    reverse = -3 * math.sqrt(1 + noise**2) * _of_length_1(known.mean(0))
    updates = np.where(rng.permutation(60)[:, None] < 60 * share, reverse, honest)
    mean, means = np.empty(size, np.float32), []
    for cell in np.array_split(updates, 7):
        clipped_mean([_contribution(each, 50, "proven") for each in cell], mean, clips=True, in_cell=True)
        means.append(_contribution(mean.copy(), 50 * len(cell), "proven", len(cell)))
    clipped_mean([*(_contribution(each, 1000, "vouched") for each in known), *means], mean, clips=True)
    assert left < mean @ step < 1.05
    if share == 0:
        assert np.linalg.norm(mean - step) < 0.9 * np.linalg.norm(known.mean(0) - step)


def _of_length_1(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = values / np.linalg.norm(values, axis=-1, keepdims=True)
    return found


def _contribution(update: np.ndarray, tokens: int, standing: Standing, members: int = 1) -> Contribution:
    return Contribution(tokens, partial(np.copy, update.astype(np.float32)), standing, 1000 * members, members)


def test_one_that_stalls_in_each_cell_keeps_out_its_own_work_only() -> None:
    """Also where reducers have waited for strangers for as long as they may."""
    plan = make_plan_of(open_members(3, 60, newcomers=16))
    stalling = range(3, 10)

    async def main() -> None:
        played = await Round.open(plan, random_updates(plan), "int4", round_s=60.0, clips=True)
        for exchange in played.exchanges.values():
            exchange._context.strangers.spend(math.inf, is_in_vain=True)
            if exchange.me in stalling:
                exchange._transfers._send_updates = stall  # type: ignore[method-assign]
        running = asyncio.create_task(played.run())
        await asyncio.sleep(5.0)
        shared = [part for part in played.empty().parts if part.group.expert is None]
        for part in shared:
            found = played.exchanges[plan.members[part.reducer].peer].results.contributors(part)
            assert set(found) == set(range(63)) - set(stalling)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def stall(stream: Stream, reducer: int) -> None:
        await stream.alive(asyncio.sleep(100))

    simulate(main)


async def test_what_a_hub_hands_on_empty_comes_from_the_reducer() -> None:
    plan = make_plan_of(open_members(3, 60, newcomers=16))
    played = await Round.open(plan, random_updates(plan), "int4")
    parts = played.empty().parts
    liar = next(part.summing[0] for part in parts if part.summing)
    serving = played.exchanges[plan.members[liar].peer]._serving

    async def hand_on_nothing(stream: Stream) -> None:
        request, puller = unpack(PullRequest, await stream.message()), plan.index(stream.remote)
        assert puller is not None
        its = [part for part in serving._of(puller, request.parts) if pulls(part, puller)]
        for part in its[request.lane :: request.lanes]:
            await stream.send(numbered(part.index), b"", kind=Kind.PART)
        await stream.send(kind=Kind.END)

    await played.endpoints[plan.members[liar].peer].serve(PULL, hand_on_nothing)
    await played.run()
    for exchange in played.exchanges.values():
        assert all(exchange.results.verified(part) for part in parts)


def test_a_tiny_update_of_one_of_two_past_probation_takes_no_others_work_in_its_cell() -> None:
    step = _of_length_1(np.random.default_rng(0).standard_normal(1000))
    updates = [_contribution(1e-4 * step, 1000, "proven"), _contribution(step, 1000, "proven")]
    updates += [_contribution(step, 250, "newcomer") for _ in range(6)]
    mean = np.empty(1000, np.float32)
    clipped_mean(updates, mean, clips=True, in_cell=True)
    assert mean @ step > 0.6


def test_newcomers_that_blame_hubs_demote_nobody_beside_a_vouched_member() -> None:
    names = tuple("ABCDEFGHIW")
    commit = replace(GENESIS, round=5, plan="p", members=names, vouched=())
    assert commit.trusted.intersection(names) == {"W"}
    checker_of = checkers(commit, "open")
    told = {
        peer: announce(unanswered=tuple(Unanswered(5, each) for each in names if checker_of[each] == peer)) for peer in names
    }
    blamed = {peer for peer, by in checker_of.items() if by == "W"}
    assert disputed([commit], told, "open") == blamed


async def test_a_stranger_whose_shared_weights_only_itself_has_as_a_hub_withholds_them() -> None:
    plan = make_plan_of(open_members(3, 60))
    played = await Round.open(plan, random_updates(plan), "int4", layout=WIDE_OF_4, part_bytes=2**10)
    parts = [part for part in played.empty().parts if part.group.kind == "shared"]
    hub = next(part.summing[0] for part in parts)
    givers = {part.index: set(part.contributors) - ({hub} if part.hub_of(hub) != hub else set()) for part in parts}
    assert _lacks(parts, givers, hub)
    assert not any(_lacks(parts, givers, i) for i in range(63) if i != hub)
    one = next(part.hub_of(hub) for part in parts if part.hub_of(hub) != hub)
    lost = {part.index: set(part.contributors) - ({hub} if part.hub_of(hub) == one else set()) for part in parts}
    assert not _lacks(parts, lost, hub)
