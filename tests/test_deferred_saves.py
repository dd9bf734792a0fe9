"""What a peer has not written yet, it can compute again: from the base on its disk, the results of the rounds since, and the
last checkpoint of its work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from exchange_round import codecs

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.messages.consensus import Commit
from spes_p2p.observe.events import BaseRestored
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.base import BASE, load_base
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.parts import part_ranges
from spes_p2p.rounds.results import KEPT_ROUNDS, Results
from spes_p2p.storage.tensor_file import Source, read_tensors, whole
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import LAYOUT, RecordingTrainer, VirtualSwarm, campaign
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.checkpoint import (
    checkpoint_names,
    load_checkpoint,
    take_checkpoint,
    take_moments,
    write_checkpoint,
)
from spes_p2p.training.interface import Phase, PhaseReport

NEVER_S = 1e9
STEP_S, STEPS = 60.0, 10
RANGES = part_ranges(LAYOUT, group_codecs(CodecConfig.model_validate("none")), 1024)


class Writes:
    """Counts a store's writes by blob, and kills its peer at one of them."""

    def __init__(self, swarm: VirtualSwarm, victim: str, kill_at: int = -1):
        self.by_blob: Counter[str] = Counter()
        self.killed = False
        self._swarm, self._victim, self._kill_at, self._seen = swarm, victim, kill_at, 0

    def fault(self, point: str, name: str) -> None:
        self.by_blob[name.partition("-")[0]] += point == "write:done"
        if name == BASE or name.startswith("checkpoint"):
            self._seen += 1
        if self._seen == self._kill_at and not self.killed:
            self.killed = True
            self._swarm.kill(self._victim)
            raise asyncio.CancelledError


def in_memory_swarm(checkpoint_every_s: float, kill_at: int = -1) -> tuple[VirtualSwarm, Writes]:
    """W, A and C keep their bases in files, B in memory."""
    swarm = VirtualSwarm(campaign(140, sync={"min_peers": 3}), checkpoint_every_s=checkpoint_every_s)
    writes = Writes(swarm, "B", kill_at)
    swarm.stores["B"] = MemoryStore(writes.fault)
    swarm.start_all("AC")
    swarm.start("B", base_in_memory=True)
    return swarm, writes


def base_on_disk(swarm: VirtualSwarm, name: str) -> int:
    base = load_base(swarm.stores[name], base_size(LAYOUT, swarm.campaign.config.outer), name)
    assert base is not None
    return base.round


@pytest.mark.long
async def test_a_base_in_memory_is_written_every_few_rounds_and_at_the_end() -> None:
    swarm, writes = in_memory_swarm(NEVER_S)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    last = swarm.nodes["W"].log.round
    assert last == 14
    assert writes.by_blob[BASE] <= last // KEPT_ROUNDS + 2, "the first one, every fourth one, the last one"
    assert writes.by_blob["checkpoint"] == 2, "that of the first round, and the moments at the end"
    assert base_on_disk(swarm, "B") == last


@pytest.mark.parametrize("after_round", range(1, 8))
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_after_a_kill_a_base_in_memory_is_computed_again(after_round: int) -> None:
    swarm, _ = in_memory_swarm(NEVER_S)
    await swarm.until(lambda: swarm.round_of("B") == after_round)
    assert after_round - KEPT_ROUNDS <= base_on_disk(swarm, "B") <= after_round
    swarm.restart("B")
    await swarm.until(lambda: [event.source for event in swarm.recorders["B"].of(BaseRestored)] == ["download", "disk"])
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize("kill_at", range(1, 25))
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_a_kill_at_any_write_of_base_or_checkpoint_is_survived(kill_at: int) -> None:
    swarm, writes = in_memory_swarm(15.0, kill_at)
    while not all(swarm.tasks[name].done() for name in "AC"):
        await asyncio.sleep(0.5)
        if writes.killed and "B" not in swarm.peers:
            swarm.start_again("B")
    assert writes.killed
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.long
async def test_a_peer_killed_in_a_phase_trains_only_what_the_last_checkpoint_lacks(in_memory: bool) -> None:
    swarm = VirtualSwarm(
        campaign(40, sync={"min_peers": 1}, training={"sync_steps": STEPS}), seconds_per_step=STEP_S,
        checkpoint_every_s=2 * STEP_S,
    )
    swarm.start_bootstrap()
    swarm.start("A", base_in_memory=in_memory)
    await swarm.until_round(1)
    await asyncio.sleep(7.5 * STEP_S)
    before = swarm.trainers["A"].local
    swarm.restart("A")
    await swarm.until(lambda: "A" in swarm.peers and swarm.peers["A"].phases.lock.locked())
    commit, done = swarm.peers["A"].replica.progress
    assert commit == swarm.nodes["A"].log.last.id
    assert 7 - 3 <= done <= 7
    moved = swarm.trainers["A"].local - swarm.peers["A"].replica.base.values[: LAYOUT.size]
    assert np.linalg.norm(moved) > 0.4 * np.linalg.norm(before - swarm.peers["A"].replica.base.values[: LAYOUT.size])
    await swarm.until_round(2)
    assert swarm.phases["A"][2].done == 0 or swarm.phases["A"][2].done >= done
    tokens = swarm.campaign.config.training
    assert swarm.recorders["A"].commits()[2].tokens == STEPS * tokens.batch_size * tokens.sequence_length
    await swarm.until_finished()
    swarm.assert_replicas_agree()


class WithMoments(SyntheticTrainer):
    """Has one moment."""

    moment = np.zeros(3, np.float32)

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        return {"moment": whole(self.moment)}

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.moment = state["moment"].copy()


def with_moments(value: float) -> WithMoments:
    trainer = WithMoments(LAYOUT, np.zeros(LAYOUT.size, np.float32), (0,), 32, 1.0, seed=0)
    trainer.moment = np.full(3, value, np.float32)
    trainer.add(LAYOUT.group("shared"), np.full(LAYOUT.group("shared").size, value, np.float32))
    return trainer


def kept(store: MemoryStore, value: float, round_number: int, before: str | None, steps: int = 0) -> str:
    ledger, base = Ledger(LAYOUT, RANGES, codecs("none")), np.zeros(LAYOUT.size, np.float32)
    trainer, commit = with_moments(value), f"c{round_number}"
    checkpoint = take_checkpoint(store, trainer, ledger, base, commit, round_number, before, steps)
    write_checkpoint(checkpoint)
    return checkpoint.name


def test_of_two_checkpoints_of_a_phase_the_later_one_counts_unless_it_is_damaged() -> None:
    store = MemoryStore()
    first = kept(store, 1.0, 4, None, steps=3)
    second = kept(store, 2.0, 4, first, steps=6)
    trainer = with_moments(0.0)
    found = load_checkpoint(store, trainer, Ledger(LAYOUT, RANGES, codecs("none")), LAYOUT, "c4", 4)
    assert found is not None
    assert (found.name, found.is_whole, found.steps, trainer.moment[0]) == (second, True, 6, 2.0)
    blob = bytearray(store.read(second) or b"")
    blob[-1] ^= 1
    store.write(second, [bytes(blob)])
    found = load_checkpoint(store, trainer := with_moments(0.0), Ledger(LAYOUT, RANGES, codecs("none")), LAYOUT, "c4", 4)
    assert found is not None
    assert (found.name, found.steps, trainer.moment[0]) == (first, 3, 1.0)


def test_of_a_checkpoint_of_another_round_only_the_moments_are_taken() -> None:
    store = MemoryStore()
    name = kept(store, 5.0, 4, None)
    assert name in checkpoint_names(7)
    trainer = with_moments(0.0)
    found = load_checkpoint(store, trainer, Ledger(LAYOUT, RANGES, codecs("none")), LAYOUT, "c7", 7)
    assert found is not None
    assert (found.is_whole, found.steps, trainer.moment[0]) == (False, 0, 5.0)
    assert not trainer.local.any(), "its pending work is relative to another base"


def test_moments_alone_are_taken_without_a_warning_and_without_work(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    before = kept(store, 5.0, 4, None)
    write_checkpoint(take_moments(store, with_moments(6.0), 7, before))
    assert {int(read_tensors(store.read(name) or b"")[1]["round"]) for name in checkpoint_names(0)} == {4, 7}
    trainer, ledger = with_moments(0.0), Ledger(LAYOUT, RANGES, codecs("none"))
    found = load_checkpoint(store, trainer, ledger, LAYOUT, "c7", 7)
    assert found is not None
    assert (found.is_whole, found.steps, trainer.moment[0], trainer.local.any()) == (False, 0, 6.0, False)
    assert ledger.max_pending_tokens == 0
    assert caplog.records == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_decided", [False, True])
async def test_who_left_within_a_phase_and_is_back_continues_it_unless_others_have_its_samples(
    overlap: bool, is_decided: bool
) -> None:
    swarm = VirtualSwarm(
        campaign(200, "none", sync={"overlap": overlap, "min_peers": 2}), seconds_per_step=10.0, checkpoint_every_s=9.0
    )
    swarm.start_all("ABC")
    await swarm.until_round(3)
    await asyncio.sleep(55)
    number = swarm.nodes["A"].log.round
    swarm.peers["B"].leave()
    await swarm.until(swarm.tasks["B"].done)
    if is_decided:
        await swarm.until(lambda: swarm.nodes["A"].log.round > number)
    swarm.restart("B")
    replica = swarm.peers["B"].replica
    while replica.trainer is None or not (replica.ledger.announced.tokens or swarm.peers["B"].phases.lock.locked()):
        await asyncio.sleep(0.001)
    assert bool(replica.ledger.announced.tokens) == (not is_decided)
    await swarm.until_round(8)
    swarm.assert_replicas_agree()


async def test_rounds_that_are_applied_again_say_nothing_of_the_update_that_was_sent_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = Replica.complete_results

    async def all_but_the_last(replica: Replica, commit: Commit) -> Results | None:
        is_there = replica.node.peer_id != "B" or commit.round < 2
        return await complete(replica, commit) if is_there else None

    swarm, _ = in_memory_swarm(1.0)
    await swarm.until(lambda: swarm.round_of("B") == 2)
    await swarm.peers["B"].replica.store.durable()
    monkeypatch.setattr(Replica, "complete_results", all_but_the_last)
    swarm.restart("B")
    replica = swarm.peers["B"].replica
    while replica.trainer is None:
        await asyncio.sleep(0.001)
    assert replica.base.round == 1
    assert replica.work.sent_update_lost


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
async def test_work_in_a_checkpoint_outlasts_a_kill_after_rounds_without_this_peer(overlap: bool, in_memory: bool) -> None:
    """Each base leaves the checkpoint of the one before useless, and one in memory is computed again."""
    swarm = VirtualSwarm(
        campaign(200, "none", sync={"overlap": overlap, "min_peers": 2}), seconds_per_step=10.0, checkpoint_every_s=29.0
    )
    swarm.start_bootstrap()
    for name in "ABC":
        swarm.start(name, base_in_memory=in_memory)
    await swarm.until_round(3)
    await asyncio.sleep(55)
    number = swarm.nodes["A"].log.round
    swarm.kill("B")
    await swarm.until(lambda: swarm.nodes["A"].log.round >= number + 2)
    swarm.start_again("B")
    replica = swarm.peers["B"].replica
    await swarm.until(lambda: replica.has_base and swarm.round_of("B") >= number + 2)
    await replica.store.durable()
    pending = replica.ledger.pending
    assert pending.tokens >= 3 * 32
    swarm.restart("B")
    replica = swarm.peers["B"].replica
    while replica.trainer is None or not (replica.ledger.pending.tokens or swarm.peers["B"].phases.lock.locked()):
        await asyncio.sleep(0.001)
    assert replica.ledger.pending == pending
    await swarm.until_round(number + 5)
    swarm.assert_replicas_agree()


async def test_a_checkpoint_since_a_peer_is_back_counts_more_than_the_moments_with_which_it_left() -> None:
    swarm = VirtualSwarm(campaign(200, "none", sync={"min_peers": 2}), seconds_per_step=10.0, checkpoint_every_s=39.0)
    swarm.start_all("ABC")
    await swarm.until_round(3)
    number = swarm.nodes["A"].log.round
    swarm.peers["B"].leave()
    await swarm.until(swarm.tasks["B"].done)
    swarm.restart("B")
    replica = swarm.peers["B"].replica
    await swarm.until(lambda: replica.saved[1] == 4)
    await asyncio.sleep(5)
    assert swarm.nodes["A"].log.round == number
    swarm.kill("B")
    await swarm.until(lambda: swarm.nodes["A"].log.round > number)
    swarm.start_again("B")
    replica = swarm.peers["B"].replica
    while replica.trainer is None or not (replica.ledger.announced.tokens or swarm.peers["B"].phases.lock.locked()):
        await asyncio.sleep(0.001)
    assert replica.ledger.pending.tokens == 4 * 32
    await swarm.until_round(number + 4)
    swarm.assert_replicas_agree()


class CountingTrainer(RecordingTrainer):
    """Has the number of its steps as its moment."""

    moment = np.zeros(1, np.float32)

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        report = super().train(phase, should_stop, on_step)
        self.moment = self.moment + np.float32(report.steps)
        return report

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        return {"moment": whole(self.moment)}

    def load_optimizer_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.moment = state["moment"].copy()


def steps_of(trainer: RecordingTrainer) -> float:
    assert isinstance(trainer, CountingTrainer)
    return float(trainer.moment[0])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.long
async def test_who_leaves_within_a_phase_has_its_moments_when_it_is_back_rounds_later(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = VirtualSwarm(
        campaign(200, sync={"overlap": overlap}), checkpoint_every_s=NEVER_S,
        make_trainer=lambda base, owned: CountingTrainer(LAYOUT, base, owned, 64, 1.0, 0),
    )
    swarm.start_all("ABC")
    await swarm.until_round(3)
    await swarm.until(swarm.peers["B"].phases.lock.locked)
    swarm.peers["B"].leave()
    await swarm.until(swarm.tasks["B"].done)
    had = steps_of(swarm.trainers["B"])
    assert had > 10
    await swarm.until(lambda: swarm.round_of("A") >= 9)
    swarm.restart("B")
    await swarm.until(lambda: swarm.peers["B"].replica.trainer is not None)
    assert steps_of(swarm.trainers["B"]) == had
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
