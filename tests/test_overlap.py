"""Rounds that go on while their peers train (`sync.overlap`): weights, base and pending work after each of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spes_p2p.config.campaign import Campaign
from spes_p2p.observe.events import Event, Observer, RoundCommitted
from spes_p2p.rounds.base import load_base
from spes_p2p.rounds.parts import Part
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import LAYOUT, NUM_SAMPLES, Recorder, VirtualSwarm, campaign, samples, simulate
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.interface import Phase

STEPS = 10
PEERS = ("A", "B")


def overlapping(total_steps: int = 60, codec: str = "fp16", peers: int = 3, **sections: dict[str, Any]) -> Campaign:
    return campaign(total_steps, codec, sync={"overlap": True, "min_peers": peers}, **sections)


@dataclass(frozen=True)
class Seen:
    """What a peer holds when it has applied a round."""

    parts: tuple[Part, ...]
    members: tuple[str, ...]
    base: np.ndarray
    local: np.ndarray
    trained: np.ndarray
    """What training has added to its weights in this life."""
    residuals: dict[int, np.ndarray]


class Watching:
    """A peer's observer: keeps what the peer holds after each round."""

    def __init__(self, swarm: Callable[[], VirtualSwarm], name: str, recorder: Recorder):
        self._swarm, self._name, self._recorder = swarm, name, recorder
        self.seen: dict[int, Seen] = {}

    def __call__(self, event: Event) -> None:
        self._recorder.record(event)
        if isinstance(event, RoundCommitted) and self._name in PEERS:
            replica, trainer = self._swarm().peers[self._name].replica, self._swarm().trainers[self._name]
            results = next(each for each in replica.results.by_plan.values() if each.plan.round == event.round)
            members = tuple(member.peer for member in results.plan.members)
            residuals = {start: values.copy() for start, values in replica.work.residuals.by_key.items()}
            self.seen[event.round] = Seen(
                results.parts, members, replica.base.values[: LAYOUT.size].copy(), trainer.local, trainer.changes.copy(),
                residuals,
            )


class Reference:
    """The formula of `rounds/accounting.py` for peers that trained as many tokens each."""

    def __init__(self, base: np.ndarray):
        self.base = base.copy()
        self.local = {name: base.copy() for name in PEERS}
        self.residuals: dict[tuple[str, int], np.ndarray] = {}
        """By reducer and start of the part; another reducer begins with nothing."""
        self._trained = {name: np.zeros_like(base) for name in PEERS}

    def reduce(self, parts: tuple[Part, ...], members: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Announce what is pending now: the next base, and what each peer sent as the others decoded it."""
        update = {name: self.local[name] - self.base for name in PEERS}
        sent = {name: np.zeros_like(self.base) for name in PEERS}
        base = self.base.copy()
        for part in parts:
            place = slice(part.start, part.stop)
            contributors, reducer = [members[i] for i in part.contributors], members[part.reducer]
            for name in contributors:
                sent[name][place] = decoded(part, update[name][place])
            mean = np.sum([sent[name][place] for name in contributors], axis=0) / len(contributors)
            if len(contributors) > 1:
                residual, step = self.residuals.get((reducer, part.start), np.zeros_like(mean)), part.codec.rounding(mean)
                exact, mean = mean, decoded(part, mean + np.clip(residual, -step, step))
                if part.codec.leaves_out:  # the value stays pending with all contributors
                    exact = exact * (mean != 0)
                    for name in contributors:
                        sent[name][place] *= mean != 0
                self.residuals = {key: values for key, values in self.residuals.items() if key[1] != part.start}
                self.residuals[reducer, part.start] = exact + residual - mean
            base[place] += mean
        return base, sent

    def train(self, name: str, trained: np.ndarray) -> None:
        """Train up to what training has added in all."""
        self.local[name] += trained - self._trained[name]
        self._trained[name] = trained

    def apply(self, base: np.ndarray, sent: dict[str, np.ndarray]) -> None:
        for name in PEERS:
            self.local[name] += (base - self.base) - sent[name]
        self.base = base


def decoded(part: Part, values: np.ndarray) -> np.ndarray:
    return part.codec.decode(part.codec.encode(values), part.size)


@pytest.mark.parametrize("codec", ["none", "int8", "int4", "ternary", "sparse", "sparse64"])
async def test_two_peers_hold_what_the_formula_says_after_every_round(codec: str) -> None:
    watching: dict[str, Watching] = {}

    def watch(name: str, recorder: Recorder) -> Observer:
        watching[name] = Watching(lambda: swarm, name, recorder)
        return watching[name]

    swarm = VirtualSwarm(overlapping(40, codec, 2, merge={"merge_interval": None}), make_observer=watch)
    base0 = swarm.base0[: LAYOUT.size]
    swarm.start_all("AB")
    await swarm.until_finished()
    reference = Reference(base0)
    for number in range(1, 6):
        seen = {name: watching[name].seen[number] for name in PEERS}
        base, sent = reference.reduce(seen["A"].parts, seen["A"].members)
        for name in PEERS:
            reference.train(name, seen[name].trained)
        reference.apply(base, sent)
        for name in PEERS:
            np.testing.assert_allclose(seen[name].base, reference.base, atol=1e-6)
            np.testing.assert_allclose(seen[name].local, reference.local[name], atol=1e-6)
            np.testing.assert_allclose(
                seen[name].local - seen[name].base, reference.local[name] - reference.base, atol=1e-6
            )
            for start, residual in seen[name].residuals.items():
                np.testing.assert_allclose(residual, reference.residuals[name, start], atol=1e-6)
        np.testing.assert_array_equal(seen["A"].base, seen["B"].base)
    assert not np.array_equal(reference.base, base0)


@pytest.mark.long
@pytest.mark.parametrize(("codec", "left"), [("fp16", 1e-4), ("ternary", 2e-3), ("sparse64", 2e-3)])
async def test_an_update_is_applied_one_phase_after_it_was_announced_and_all_of_it_in_the_end(codec: str, left: float) -> None:
    swarm = VirtualSwarm(overlapping(codec=codec))
    swarm.start_all()
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders["A"].commits()
    assert sorted(commits) == list(range(8))
    assert [commits[number].tokens for number in range(8)] == [0, 0, *[960] * 6]
    assert commits[7].campaign_step == 60
    assert swarm.trained_tokens() == commits[7].total_tokens
    for name, peer in swarm.peers.items():
        assert not peer.replica.ledger.pending.tokens
        assert np.abs(swarm.trainers[name].local - peer.replica.base.values[: LAYOUT.size]).max() < left


@pytest.mark.long
def test_a_round_that_is_shorter_than_a_phase_costs_no_time() -> None:
    rounds = 6

    def seconds(overlap: bool) -> float:
        async def main() -> float:
            network = MemoryNetwork(latency_s=0.05)
            swarm = VirtualSwarm(campaign(300, "none", sync={"overlap": overlap}), network=network)
            for name in "WABC":
                network.set_bandwidth(name, 8000.0, 8000.0)
            swarm.start_all()
            await swarm.until_round(2)
            started = asyncio.get_running_loop().time()
            await swarm.until_round(2 + rounds)
            return asyncio.get_running_loop().time() - started

        return simulate(main)

    assert seconds(overlap=False) > rounds * STEPS * 1.3
    assert seconds(overlap=True) < rounds * STEPS * 1.05


@pytest.mark.parametrize("away_s", [0.0, 5.0, 60.0])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_crashes_with_a_round_in_flight_sends_nothing_twice(away_s: float) -> None:
    """Its update is in the new base, its codes died with it; the checkpoint has the update, and how much work that is."""
    watching: dict[str, Watching] = {}

    def watch(name: str, recorder: Recorder) -> Observer:
        watching.setdefault(name, Watching(lambda: swarm, name, recorder))
        return watching[name]

    swarm = VirtualSwarm(overlapping(120, "none", merge={"merge_interval": None}), make_observer=watch)
    swarm.start_all()
    await swarm.until_round(3)
    await swarm.until(lambda: swarm.trainers["B"].samples_by_round.get(4) is not None, 100)
    victim = next(name for name in PEERS if name != swarm.peers["C"].node.coordinators()[0])
    kill_at_vote(swarm, victim)
    await swarm.until(lambda: victim not in swarm.peers, 200)
    await asyncio.sleep(away_s)
    swarm.start_again(victim)
    await swarm.until(lambda: 5 in watching[victim].seen, 100)
    seen = watching[victim].seen[5]
    commits = swarm.recorders[victim].commits()
    assert [tokens for peer, tokens, _ in commits[5].contributions if peer == victim] == [320]
    np.testing.assert_allclose(seen.local - seen.base, seen.trained, atol=1e-6)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert swarm.recorders["C"].commits()[13].total_tokens <= swarm.trained_tokens()


async def swarm_in_round_4(step_s: float, watching: dict[str, Watching], steps_at_risk: int = 1) -> VirtualSwarm:
    """Return a swarm that begins a phase beside round 4. `steps_at_risk`: a checkpoint is due after so many."""
    swarm = VirtualSwarm(
        overlapping(100, "none", merge={"merge_interval": None}), network=MemoryNetwork(latency_s=0.05),
        seconds_per_step=step_s, checkpoint_every_s=(steps_at_risk - 0.1) * step_s,
        make_observer=lambda name, recorder: watching.setdefault(name, Watching(lambda: swarm, name, recorder)),
    )
    swarm.start_all()
    await swarm.until_round(3)
    return swarm


def test_those_killed_during_phase_and_exchange_continue_both() -> None:
    """What is trained follows from the samples: the bases are those of a swarm in which nobody is killed."""

    async def bases(kills: bool) -> list[np.ndarray]:
        watching: dict[str, Watching] = {}
        swarm = await swarm_in_round_4(0.1, watching)
        if kills:
            await asyncio.sleep(0.5)
            assert all(peer.replica.exchanges.by_plan and peer.replica.progress[1] for peer in swarm.peers.values())
            assert {node.log.round for node in swarm.nodes.values()} == {3}
            for name in "WABC":
                swarm.kill(name)
            for name in "WABC":
                swarm.start_again(name)
            await swarm.until(lambda: all(peer.phases.lock.locked() for peer in swarm.peers.values()))
            assert all(peer.replica.progress[0] == peer.replica.base.commit for peer in swarm.peers.values())
            assert all(trainer.phases_by_round[4].done for trainer in swarm.trainers.values())
        await swarm.until_round(5)
        commits = swarm.recorders["C"].commits()
        assert [commits[number].tokens for number in (4, 5)] == [960, 960]
        return [watching["A"].seen[number].base for number in (4, 5)]

    quiet, struck = simulate(lambda: bases(False)), simulate(lambda: bases(True))
    np.testing.assert_allclose(struck, quiet, atol=1e-6)


async def test_who_is_killed_in_a_phase_after_its_round_was_decided_sends_what_the_checkpoint_has_and_returns_the_rest(

) -> None:
    swarm = await swarm_in_round_4(10.0, {})
    await asyncio.sleep(35)
    assert swarm.nodes["B"].log.round == 4
    phase = swarm.peers["B"].replica.base.assignment("B")
    assert phase is not None
    swarm.restart("B")
    await swarm.until(lambda: swarm.peers["B"].phases.lock.locked())
    replica, trainer = swarm.peers["B"].replica, swarm.trainers["B"]
    done = replica.progress[1]
    assert 2 <= done <= 3
    assert (replica.base.round, replica.ledger.announced.tokens) == (4, done * 32)
    again = SyntheticTrainer(LAYOUT, np.zeros(LAYOUT.size, np.float32), phase.owned, 32, 1.0, swarm.network.seed)
    steps = iter(range(done))
    again.train(Phase(4, 0, 10, phase.steps, phase.slices), lambda: next(steps, None) is None, lambda done, speed: None)
    pending = trainer.local - trainer.changes - replica.base.values[: LAYOUT.size]
    np.testing.assert_allclose(pending, again.local, atol=1e-5)
    await swarm.until_round(7)
    included = {peer: tokens for peer, tokens, _ in swarm.recorders["C"].commits()[5].contributions}
    assert included["B"] == done * 32
    left = set(samples(list(phase.slices))[done * 2 :])
    later = Counter(
        sample for by_round in swarm.samples.values() for number, each in by_round.items() if number > 5
        for sample in samples(each)
    )
    assert all(later[sample] == 1 for sample in left)


async def test_who_leaves_after_a_restart_gives_back_the_samples_of_the_phase_before_it() -> None:
    swarm = await swarm_in_round_4(10.0, {})
    await asyncio.sleep(35)
    phase = swarm.peers["B"].replica.base.assignment("B")
    assert phase is not None
    swarm.restart("B")
    await swarm.until(lambda: swarm.peers["B"].phases.lock.locked())
    assert swarm.peers["B"].replica.base.round == 4
    swarm.peers["B"].leave()
    await swarm.until(swarm.tasks["B"].done)
    del swarm.peers["B"]
    await swarm.until_round(8)
    later = Counter(
        sample for name in "AC" for number, each in swarm.samples[name].items() if number > 5 for sample in samples(each)
    )
    assert all(later[sample] == 1 for sample in samples(list(phase.slices)))


@pytest.mark.parametrize("killed_after_s", [0.6, 4.5], ids=["before its round is decided", "before it is applied"])
async def test_who_leaves_at_once_after_a_restart_gives_back_all_that_no_round_includes(killed_after_s: float) -> None:
    """What it announced was trained before the crash, and is in no round: the base's plan does not name these samples."""
    swarm = VirtualSwarm(overlapping(400), network=MemoryNetwork(latency_s=0.2))
    swarm.start_all()
    await swarm.until_round(3)
    await asyncio.sleep(killed_after_s)
    swarm.restart("B")
    swarm.peers["B"].leave()
    await swarm.until(swarm.tasks["B"].done)
    del swarm.peers["B"]
    await swarm.until_round(12)
    commits = {each.commit.round: each.commit for each in swarm.nodes["A"].log.since(0)}
    others = Counter(sample for name in "AC" for each in swarm.samples[name].values() for sample in samples(each))
    for number, commit in commits.items():
        if "B" in commit.members:
            assigned = samples(list(commit.workloads[commit.members.index("B")].slices))
            later = commits[number + 2]  # a phase is in the round after the next one
            is_included = "B" in later.members and later.members.index("B") in later.heard
            assert {others[sample] for sample in assigned} <= {0 if is_included else 1}


async def test_a_phase_that_a_checkpoint_has_in_part_is_in_the_next_one_as_soon_as_its_round_is_applied() -> None:
    """The base goes on then, and the checkpoint is of the last one."""
    swarm = await swarm_in_round_4(10.0, {}, steps_at_risk=7)
    while (stored := load_base(swarm.stores["B"], swarm.base0.size, "B")) is None or stored.round < 4:
        await asyncio.sleep(0.01)
    swarm.restart("B")
    await swarm.until_round(5)
    included = {peer: tokens for peer, tokens, _ in swarm.recorders["C"].commits()[5].contributions}
    assert included["B"] == 320


@pytest.mark.long
async def test_within_an_epoch_no_sample_is_trained_twice_and_none_is_left_out() -> None:
    swarm = VirtualSwarm(overlapping(200))
    swarm.start_all()
    await swarm.until_finished()
    trained = Counter(
        sample for by_round in swarm.samples.values() for each in by_round.values() for sample in samples(each)
    )
    assert set(trained.values()) == {1}
    epochs = Counter(epoch for epoch, _ in trained)
    assert all(epochs[epoch] == NUM_SAMPLES for epoch in range(max(epochs)))


@pytest.mark.parametrize("delay_s", [0.3, 3.0, 9.9, 10.2])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_leaves_politely_gives_back_the_samples_of_all_work_that_was_not_included(delay_s: float) -> None:
    swarm = VirtualSwarm(overlapping(300))
    swarm.start_all()
    await swarm.until_round(3)
    await asyncio.sleep(delay_s)
    swarm.peers["B"].leave()
    await swarm.until(lambda: swarm.tasks["B"].done())
    commits = swarm.recorders["B"].commits()
    included = sum(tokens for commit in commits.values() for peer, tokens, _ in commit.contributions if peer == "B")
    del swarm.peers["B"]
    await swarm.until_round(15)
    others = Counter(
        sample for name in "AC" for each in swarm.samples[name].values() for sample in samples(each)
    )
    mine = [sample for number in sorted(swarm.samples["B"]) for sample in samples(swarm.samples["B"][number])]
    lost = mine[included // swarm.campaign.config.training.sequence_length :]
    assert all(others[sample] == 1 for sample in lost)
    assert not any(others[sample] for sample in mine[: len(mine) - len(lost)])


def kill_at_vote(swarm: VirtualSwarm, victim: str, number: int = 5) -> None:
    """The victim dies when somebody else asks for or casts the first vote on this round."""

    def hook(peer: str, its_method: str, index: int) -> None:
        if (
            its_method == "accept" and peer != victim and victim in swarm.peers
            and swarm.peers[victim].node.log.round == number - 1
        ):
            swarm.network.hook = None
            swarm.kill(victim)

    swarm.network.hook = hook
