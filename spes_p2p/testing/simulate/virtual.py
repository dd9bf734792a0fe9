"""The fast form of the simulator: real peers in this process, in virtual time, with seeded faults.

One seed is one run, with attackers one run without attack and one for each kind. Seed and scenario determine the swarm (speeds,
capacities, codec) and the faults, so a seed gives the same event log every time, given the same PYTHONHASHSEED.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spes_p2p.config.campaign import Campaign
from spes_p2p.consensus.reform import is_reform
from spes_p2p.messages.codec import share_records
from spes_p2p.net.die_with_parent import die_with
from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import (
    BaseRestored,
    BytesMoved,
    Event,
    PeersSeen,
    RoundCommitted,
    TrainingProgress,
    UpdatesClipped,
    WorkDropped,
)
from spes_p2p.peer.life import Peer
from spes_p2p.peer.reporter import BYTES_BY_KIND
from spes_p2p.rounds.digest import state_digest
from spes_p2p.testing.attacks.kinds import ATTACKS, Attack
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.churn import keep_churning
from spes_p2p.testing.simulate.injector import Injector, now
from spes_p2p.testing.simulate.points import point_of_event, point_of_write
from spes_p2p.testing.simulate.report import Attacked, RunReport, found_out
from spes_p2p.testing.simulate.scenario import BOOTSTRAP, WARM_ROUNDS, Scenario, runs_of
from spes_p2p.testing.simulate.swarm import LAYOUT, VirtualSwarm, campaign
from spes_p2p.testing.simulate.wiring import connect, connect_bootstrap
from spes_p2p.testing.simulate.work import ROUNDING, Work
from spes_p2p.testing.virtual_loop import run_virtual, running_peer

if TYPE_CHECKING:
    from spes_p2p.testing.simulate.language import Lessons

SYNC_STEPS = 4
SILENCE_S, REFORM_AFTER_S = 5.0, 30.0
STUCK_S, STUCK_PHASES = 400.0, 4
"""A living trainer is stuck if it commits no round for this long, or for so many phases, without a fault."""
QUIET_ROUNDS = 3
"""Rounds that every trainer must commit after all faults are lifted."""
SPEEDS = (0.5, 1.0, 1.0, 1.0, 2.0)
START_TOGETHER, START_S, STARTS_PER_S = 64, 40.0, 5.0
"""Start at most this many peers at once, and all others over the next seconds, at most so many a second: peers serve outsiders
at a bounded pace."""
SHARED_RECORDS_PER_PEER = 64
"""Records that peers read alike: a contact and a signed announcement of each in every round, and the commits."""
OBJECTS_PER_COLLECTION = 1_000_000
"""Allocations between two garbage collections: each visits what all peers hold, for the little that is in cycles."""
FAULTS_PER_COLLECTION = 64
"""Collect everything after this many faults: what a peer held in a life that ended is in cycles, a megabyte or more."""
LOOK_EVERY_S = 0.1
"""Look this often whether a majority of the electors is gone: the logs of all peers say who these are."""
PROGRESS_EVERY_S = 1.0
"""Look this often how far all runs are."""
MEMBERS_LOGGED = 32
"""A line of the event log names at most this many members of a round."""
UNLOGGED = (TrainingProgress, BytesMoved, PeersSeen)
"""Events that are not logged."""


def run_seed(scenario: Scenario, seed: int, on_round: Callable[[int], None] = lambda number: None) -> RunReport:
    """Run one seed to its end. `on_round` gets the number of rounds that are done, with the quiet ones at the end."""
    run, cpu_before_s = _Run(scenario, seed, on_round), time.process_time()
    share_records(SHARED_RECORDS_PER_PEER * len(scenario.peer_names))
    with _LoggedErrors(run.error), _rarely_collecting():
        run_virtual(run.main())
    share_records(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(run.result(), cpu_s=time.process_time() - cpu_before_s, memory_peak_bytes=peak)


def run_seeds(
    scenario: Scenario, seeds: range, jobs: int, on_progress: Callable[[int, int], None]
) -> list[RunReport]:
    """Run each seed; return the results by seed. The worker processes end with this one. `on_progress` counts rounds.

    All workers have the same hash seed, so that a seed gives the same run on every call.
    """
    runs = [(each, seed) for seed in seeds for each in runs_of(scenario)]
    os.environ.update(PYTHONHASHSEED="0", OMP_NUM_THREADS="1")  # of the workers
    spawning = multiprocessing.get_context("spawn")
    rounds = spawning.RawArray("i", len(runs))
    with ProcessPoolExecutor(min(jobs, len(runs)), spawning, _begin_worker, (os.getpid(), rounds)) as pool:
        try:
            futures = [pool.submit(_run_counted, place, *run) for place, run in enumerate(runs)]
            running = set(futures)
            while running:
                ended, running = wait(running, PROGRESS_EVERY_S, FIRST_COMPLETED)
                for future in ended:
                    future.result()
                on_progress(sum(rounds), (scenario.rounds + QUIET_ROUNDS) * len(runs))
        except BaseException:  # the pool would wait for runs that nobody wants
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
    return [future.result() for future in futures]


_rounds: MutableSequence[int] = []
"""In a worker process: how far each run is, shared with the others."""


def _begin_worker(parent: int, rounds: MutableSequence[int]) -> None:
    global _rounds
    die_with(parent)
    _rounds = rounds


def _run_counted(place: int, scenario: Scenario, seed: int) -> RunReport:
    def on_round(number: int) -> None:
        _rounds[place] = max(_rounds[place], number)

    result = run_seed(scenario, seed, on_round)
    on_round(scenario.rounds + QUIET_ROUNDS)
    return result


@contextlib.contextmanager
def _rarely_collecting() -> Iterator[None]:
    gc.collect()  # the peers of an earlier run
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Run:
    """A swarm, its faults, and their audit."""

    def __init__(self, scenario: Scenario, seed: int, on_round: Callable[[int], None] = lambda number: None):
        self._scenario, self._on_round = scenario, on_round
        self._seed = seed
        self._rng = random.Random(f"simulate/{seed}")
        self._liars = frozenset(scenario.liars)
        self._looked_at, self._lacks = -math.inf, False
        self._codec = _codec(scenario, seed, self._rng)
        self._campaign = _campaign(scenario, self._codec, self._rng)
        self._lessons = _lessons(scenario, self._campaign, seed) if scenario.attackers else None
        self._experts = self._campaign.config.model.moe_num_experts
        self._audit = Audit(self._experts, lacks_majority=self._lacks_majority, overlap=scenario.overlap, liars=self._liars)
        self._work = Work(LAYOUT, scenario.overlap, ROUNDING.get(self._codec, 0.0))
        self._log: list[str] = []
        self._swarm: VirtualSwarm
        self._faults: Injector
        self._names = list(dict.fromkeys((*scenario.peer_names, *scenario.liars)))
        self._control_bytes: dict[str, tuple[int, int]] = {}
        """By peer: what it has sent and received."""
        self._most_control_bytes: dict[int, tuple[int, int]] = {}
        """By round: the most that one peer sent, and that one received."""
        self._pending_tokens = 0
        self._ended_s = 0.0
        self._lies = 0
        self._clipped: dict[str, int] = {}
        """By peer: last round that moved the base by less than was sent, for instance by the work of several rounds at once."""
        self._last_base: np.ndarray | None = None
        """The base of the scenario's last round."""
        self._collected_at = 0
        """Faults that had struck when garbage was collected last."""
        self._memory_before: int | None = None
        """Resident memory after the first rounds, which load libraries; None before."""
        self._memory_bytes = 0
        """The most that was seen."""

    async def main(self) -> None:
        """Start all peers, let the faults strike, lift them, and wait until all peers have continued."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        self._start_swarm()
        starting = asyncio.create_task(self._start_others())
        names, day_s = self._scenario.peer_names, self._scenario.churn
        churning = asyncio.create_task(keep_churning(names, day_s, self._rng, self._faults.strike)) if day_s else None
        if await self._until(lambda: starting.done() and self._audit.newest_round >= self._scenario.rounds):
            if churning is not None:
                churning.cancel()
            self._faults.lift()
            goal = self._audit.newest_round + QUIET_ROUNDS
            if await self._until(lambda: self._all_have(goal)):
                self._check_end()
        self._ended_s = now()
        self._pending_tokens = sum(peer.replica.ledger.pending.tokens for name, peer in self._honest())

    def result(self) -> RunReport:
        """Return the run's results."""
        sent, received = zip(*self._most_control_bytes.values() or ((0, 0),), strict=True)
        connections = self._swarm.network.connections
        trainers = [count for peer, count in connections.items() if peer != BOOTSTRAP]
        return RunReport(
            self._seed, self._audit.figures(self._pending_tokens), tuple(self._audit.violations), dict(self._faults.struck),
            dict(self._faults.struck_at), virtual_s=round(self._ended_s, 3),
            control_bytes=(max(sent), max(received)),
            control_bytes_median=(int(statistics.median(sent)), int(statistics.median(received))),
            sent_bytes_per_round=self._sent_bytes_per_round(),
            registry_bytes_per_min=self._registry_bytes_per_min(),
            relayed_bytes=sum(self._swarm.network.relayed_bytes.values()),
            connections_max=max(connections.values(), default=0), connections_max_trainer=max(trainers, default=0),
            connections_median=int(statistics.median(connections.values() or (0,))), log=tuple(self._log),
            attacked=self._attacked() if self._scenario.attackers else None,
        )

    def _attacked(self) -> Attacked:
        assert self._lessons is not None
        loss = None if self._last_base is None else self._lessons.held_out_loss(self._last_base)
        logs = ([decided.commit for decided in peer.node.log.since(-1)] for _, peer in self._honest())
        grown = None if self._memory_before is None else self._memory_bytes - self._memory_before
        captured = self._scenario.are_captured
        return Attacked(self._scenario.attack, loss, grown, self._lies, are_captured=captured, **found_out(logs, self._liars))

    def error(self, text: str, at_s: float | None = None) -> None:
        """Record an unexpected exception, at `at_s` or now. Those of attackers do not count."""
        if running_peer() in self._liars:
            return
        self._audit.violated(now() if at_s is None else at_s, "error", text)
        self._note("", f"error: {text}")

    def _start_swarm(self) -> None:
        scenario = self._scenario
        network = MemoryNetwork(self._seed, latency_s=scenario.latency_s, jitter=0.2)
        self._swarm = VirtualSwarm(
            self._campaign, self._seed, scenario.step_s, network, BOOTSTRAP, lambda name, recorder: partial(self.observe, name),
            **_real_training(self._lessons) if self._lessons is not None else {},
        )
        for name in scenario.liars:
            assert scenario.attack is not None
            self._swarm.around[name] = partial(self._lying, name, ATTACKS[scenario.attack])
        self._swarm.invitations = {name: self._swarm.invitation(name, ("trainer", "elector")) for name in scenario.vouched}
        self._faults = Injector(self._swarm, scenario, self._rng, self._audit, self._start_trainer, self._note)
        network.tap = self._faults.on_frame
        connect_bootstrap(network, scenario)
        self._make_store(BOOTSTRAP)
        self._swarm.start_bootstrap()
        for name in self._names[:START_TOGETHER]:
            self._start_trainer(name)

    async def _start_others(self) -> None:
        others = self._names[START_TOGETHER:]
        for name in others:
            await asyncio.sleep(max(START_S / len(others), 1 / STARTS_PER_S))
            self._start_trainer(name)

    def _lying(self, name: str, attack: Attack, world: World) -> World:
        """Return an attacker's world."""

        def tell(lie: str) -> None:
            self._lies += 1
            self._note(name, f"lie: {lie}")

        return attack.around(Liar(world, self._swarm.campaign.config, tell))

    def _start_trainer(self, name: str) -> None:
        """Start a new trainer with the machine and link that the scenario or the seed gives it."""
        scenario = self._scenario
        machine = scenario.machine(name)
        speed = machine.speed if machine.speed is not None else self._rng.choice(SPEEDS) if scenario.vary else 1.0
        experts = machine.experts or (self._rng.choice((1, 2, self._experts)) if scenario.vary else self._experts)
        if name in scenario.vouched and machine.experts is None:
            experts = self._experts  # an expert needs a vouched owner
        connect(self._swarm.network, scenario, self._seed, name)
        self._audit.capacities[name] = experts
        self._make_store(name)
        self._swarm.start(name, speed, experts)

    def _make_store(self, name: str) -> None:
        def on_write(point: str, blob: str) -> None:
            reached = None if point == "delete" else point_of_write(blob)
            if reached is not None:
                self._faults.reached(name, reached)

        self._swarm.stores.setdefault(name, MemoryStore(on_write))

    def observe(self, peer: str, event: Event) -> None:
        """Record a peer's event."""
        if isinstance(event, UNLOGGED):
            return
        self._note(peer, _line(event))
        before = self._audit.newest_round
        self._audit.observed(now(), peer, event)
        if isinstance(event, (BaseRestored, WorkDropped)):
            self._work.forget(peer)
        if isinstance(event, UpdatesClipped):
            self._clipped[peer] = event.round
        if isinstance(event, RoundCommitted) and peer in self._swarm.peers:
            self._check_work(peer, event)
            if event.round == WARM_ROUNDS and self._memory_before is None:
                self._memory_before = self._memory_bytes = _resident_bytes()
            if event.round == self._scenario.rounds and peer not in self._liars:
                self._last_base = self._swarm.peers[peer].replica.base.values
        if isinstance(event, (RoundCommitted, BaseRestored)) and peer in self._swarm.peers:
            self._check_base(peer)
        if isinstance(event, (RoundCommitted, BaseRestored)) and peer in self._swarm.nodes:
            self._count_control_bytes(peer, event.round)
        if self._audit.newest_round > before:
            self._faults.round_committed(self._audit.newest_round)
            self._on_round(min(self._audit.newest_round, self._scenario.rounds))
        point = point_of_event(event)
        if point is not None:
            self._faults.reached(peer, point)

    def _note(self, peer: str, text: str) -> None:
        self._log.append(f"{now():.4f} {peer} {text}")

    def _check_base(self, peer: str) -> None:
        """Compare a peer's base and commit with the others'."""
        node, base = self._swarm.peers[peer].node, self._swarm.peers[peer].replica.base
        digest = state_digest(base.values) if self._audit.is_suspect(peer) else base.digest
        self._audit.has_base(now(), peer, base.commit, base.round, digest)
        if max(0, node.log.begins) <= base.round <= node.log.round:
            commit = node.log.commit_at(base.round)
            self._audit.decided(now(), peer, commit.parent, commit.term, commit.id, is_reform(commit))

    def _check_work(self, peer: str, event: RoundCommitted) -> None:
        """Compare the change of the base with what its contributors sent.

        Called before `_check_base`, which may clear a peer whose base was corrupted: relative to that base, the corruption
        counts as its work even if the next base is right.
        """
        replica, trainer = self._swarm.peers[peer].replica, self._swarm.trainers.get(peer)
        if self._scenario.attackers:  # the base moves by what is left after clipping, and by what liars sent
            return
        if trainer is None or replica.base.round != event.round or self._audit.is_suspect(peer):
            self._work.forget(peer)
            return
        state = self._work.state(event.round, replica.base.values, trainer.local, trainer.changes, trainer.tokens)
        contributors = {name: tokens for name, tokens, _ in event.contributions if tokens}
        error = self._work.committed(peer, state, event.base_digest, contributors)
        plan = replica.base.plan
        may_weigh_less = plan is None or any(member.is_stranger and member.tokens for member in plan.members)
        if error is not None and self._clipped.get(peer) != event.round and not may_weigh_less:
            text = f"round {event.round} changed the base by something else than what was sent: {error:.2g}"
            self._audit.violated(now(), "work", text)

    def _lacks_majority(self) -> bool:
        if now() >= self._looked_at + LOOK_EVERY_S:
            commits = (node.log.last for node in self._swarm.nodes.values())
            newest = max(commits, key=lambda commit: (commit.term, commit.round))
            self._looked_at, self._lacks = now(), not self._faults.leaves_majority(newest.electorate)
        return self._lacks

    def _count_control_bytes(self, peer: str, round_number: int) -> None:
        endpoint, most = self._swarm.nodes[peer].endpoint, self._most_control_bytes
        sent, received = (
            sum(count for method, count in moved.items() if method not in BYTES_BY_KIND)
            for moved in (endpoint.sent, endpoint.received)
        )
        before, (most_sent, most_received) = self._control_bytes.get(peer, (0, 0)), most.get(round_number, (0, 0))
        most[round_number] = max(most_sent, sent - before[0]), max(most_received, received - before[1])
        self._control_bytes[peer] = sent, received

    def _sent_bytes_per_round(self) -> int:
        sent = dict.fromkeys(self._swarm.nodes, 0)
        for (source, _), count in self._swarm.network.sent_bytes.items():
            if source in sent:
                sent[source] += count
        return round(statistics.median(sent.values()) / max(1, self._audit.newest_round))

    def _registry_bytes_per_min(self) -> tuple[float, float]:
        network, minutes = self._swarm.network, max(self._ended_s, 1.0) / 60
        received = [network.registry_received[peer] for peer in self._swarm.nodes]
        sent = max(network.registry_sent.values(), default=0)
        return round(sent / minutes), round(statistics.median(received or [0]) / minutes)

    def _honest(self) -> Iterable[tuple[str, Peer]]:
        """Return the trainers that do not attack, by name."""
        return ((name, peer) for name, peer in self._swarm.peers.items() if name not in self._liars)

    def _slowest(self) -> int:
        return min((self._swarm.round_of(name) for name, _ in self._honest()), default=-1)

    def _all_have(self, goal: int) -> bool:
        """Return whether all trainers have committed the last quiet round; tell how many of them all have."""
        left = max(0, goal - self._slowest())
        self._on_round(self._scenario.rounds + max(0, QUIET_ROUNDS - left))
        return not left

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if a peer fails or is stuck."""
        moved: dict[str, tuple[int, float]] = {}
        stuck_s = max(STUCK_S, STUCK_PHASES * self._campaign.config.training.sync_steps * self._scenario.step_s)
        while not condition():
            await asyncio.sleep(1.0)
            if self._faults.struck.total() >= self._collected_at + FAULTS_PER_COLLECTION:
                self._collected_at = self._faults.struck.total()
                gc.collect()
            self._memory_bytes = max(self._memory_bytes, _resident_bytes())
            for name, task in self._swarm.tasks.items():
                if name not in self._liars and task.done() and not task.cancelled() and task.exception() is not None:
                    self.error(f"{name} ended: {task.exception()!r}")
                    return False
            rounds = {name: self._swarm.round_of(name) for name, _ in self._honest()}
            for name, number in rounds.items():
                if name not in moved or moved[name][0] != number:
                    moved[name] = number, now()
                since_s = self._audit.newest_at_s if self._scenario.churn else self._faults.last_s
                if now() - max(moved[name][1], since_s) > stuck_s:
                    self._audit.violated(now(), "stuck", f"{name} is at round {number} for {stuck_s:g} s; rounds: {rounds}")
                    return False
        return True

    def _check_end(self) -> None:
        """Check that all peers have the same commits and bases at the end."""
        common = min(peer.replica.base.round for _, peer in self._honest())
        commits = {peer.node.log.commit_at(common).id for _, peer in self._honest()}
        if len(commits) != 1:
            self._audit.violated(now(), "fork", f"round {common}: commits {sorted(each[:8] for each in commits)} at the end")
        for name in self._swarm.peers:
            self._check_base(name)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not loop.is_running():  # a task of an excluded attacker, collected after the run
            return
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.error(f"{context.get('message')}: {error!r}", loop.time())


def _lessons(scenario: Scenario, the_campaign: Campaign, seed: int) -> Lessons:
    from spes_p2p.testing.simulate.language import lessons  # importing torch takes seconds

    return lessons(the_campaign.config, seed, scenario.config, scenario.device)


def _real_training(lessons: Lessons) -> dict[str, Any]:
    """Return the swarm's arguments for real training."""
    from spes_p2p.testing.simulate.language import first_weights

    layout, weights = first_weights(lessons.config)
    return {
        "make_trainer": lessons.trainer, "layout": layout, "weights": weights, "num_samples": lessons.text.num_samples,
    }


def _resident_bytes() -> int:
    """Return the memory of this process, in which all peers of the run live."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _codec(scenario: Scenario, seed: int, rng: random.Random) -> str:
    """Return the run's codec; every third seed has the default codec, which rounds most."""
    precise = rng.choice(("none", "fp16")) if scenario.vary else "fp16"
    return "int4" if scenario.vary and seed % 3 == 0 else precise


def _campaign(scenario: Scenario, codec: str, rng: random.Random) -> Campaign:
    """Return the campaign of one run; the seed decides what the scenario leaves open."""
    vary = scenario.vary
    settings: dict[str, dict[str, Any]] = {
        "training": {"sync_steps": SYNC_STEPS},
        "experts": {"redundancy": rng.choice((1, 1, 2)) if vary else 1},
        "merge": {"merge_interval": 2 * SYNC_STEPS if vary and rng.random() < 0.5 else None, "merge_decay_steps": 10**6},
        "sync": {
            "min_peers": max(1, min(len(scenario.peer_names), START_TOGETHER) // 2),
            "silence_s": SILENCE_S, "reform_after_s": REFORM_AFTER_S,
            "overlap": scenario.overlap,
            "audited_share": scenario.audited_share,
        },
        "evaluation": {"every_rounds": 0},
    }
    if scenario.attackers:
        from spes_p2p.testing.simulate.language import settings_of

        real = settings_of(scenario.config)
        settings = {name: {**settings.get(name, {}), **real.get(name, {})} for name in (*settings, *real)}
    total_steps = settings["training"]["sync_steps"] * 100_000
    return campaign(total_steps, codec, admission=scenario.admission, **settings)


class _LoggedErrors(logging.Handler):
    """Reports errors that a peer only logs, and suppresses other logging."""

    def __init__(self, report: Callable[[str], None]):
        super().__init__(logging.ERROR)
        self._report = report

    def __enter__(self) -> None:
        self._logger = logging.getLogger("spes_p2p")
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.ERROR)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        """Report the record with its exception."""
        error = record.exc_info[1] if record.exc_info else None
        self._report(f"{record.getMessage()}: {error!r}" if error is not None else record.getMessage())


def _line(event: Event) -> str:
    """Return an event as a line of the event log."""
    if isinstance(event, RoundCommitted):
        members = ",".join(event.members[:MEMBERS_LOGGED])
        return f"commit {event.round} digest {event.base_digest[:12]} tokens {event.total_tokens} members {members}"
    return str(event)
