"""A swarm of real peers in one process under virtual time, with synthetic trainers.

Used by the scripted tests and by the simulator (`testing/simulate/virtual.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.campaign import Campaign, parse_campaign_config
from spes_p2p.consensus.admission import signed_invitation
from spes_p2p.messages.admission import Invitation, Role
from spes_p2p.messages.samples import Interval
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import Event, Observer, PhaseTrained, RoundCommitted
from spes_p2p.peer.announcing import NOTHING_TO_TRAIN, Capacity
from spes_p2p.peer.auditing import Auditing
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.peer.life import Peer
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.archive import NO_ARCHIVE, Archive
from spes_p2p.rounds.base import BASE
from spes_p2p.rounds.outer import first_base
from spes_p2p.rounds.plan import Rules
from spes_p2p.storage.interfaces import Store
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.testing.virtual_loop import run_virtual
from spes_p2p.training.interface import Phase, PhaseReport

T = TypeVar("T")
E = TypeVar("E", bound=Event)

EXPERTS, NUM_SAMPLES = 4, 1000
LAYOUT = Layout(
    [TensorSpec("embed", (50, 8), "shared"), TensorSpec("gate", (EXPERTS, 8), "router", 0)]
    + [
        TensorSpec(f"experts.{e}.{name}", shape, "expert", 0, e)
        for e in range(EXPERTS)
        for name, shape in (("gate_up_proj", (16, 8)), ("down_proj", (8, 8)))
    ]
)


def campaign(total_steps: int = 60, codec: str = "fp16", **changes: Any) -> Campaign:
    """Return a campaign of the tiny model; `changes` replace top-level fields, and fields inside sections."""
    raw: dict[str, Any] = {
        "name": "virtual",
        "model": {
            "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "max_position_embeddings": 16, "moe_num_experts": EXPERTS, "moe_top_k": 2,
        },
        "training": {
            "sequence_length": 16, "batch_size": 2, "total_steps": total_steps, "sync_steps": 10, "learning_rate": 1e-3,
        },
        "merge": {"merge_interval": 20, "merge_alpha_start": 0.1, "merge_decay_steps": 100},
        "sync": {"codec": codec, "min_peers": 3, "silence_s": 5.0},
        "data": {"manifest": "m", "tokenizer": "t"},
    }
    for name, value in changes.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return Campaign(
        config=parse_campaign_config(raw, "test"),
        manifest_sha256="0" * 64,
        validation_manifest_sha256=None,
        tokenizer_sha256="1" * 64,
    )


@dataclass
class Recorder:
    """Records a peer's events across restarts."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Append."""
        self.events.append(event)

    def commits(self) -> dict[int, RoundCommitted]:
        """Return the commit events by round."""
        return {e.round: e for e in self.events if isinstance(e, RoundCommitted)}

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


class RecordingTrainer(SyntheticTrainer):
    """Records each round's phase and samples, and how training changed its weights."""

    samples_by_round: dict[int, list[Interval]]
    phases_by_round: dict[int, Phase]
    changes: np.ndarray
    """Sum of the changes in all phases, float64 `[layout.size]`."""
    tokens: int
    """Tokens in all phases."""

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """See Trainer."""
        if phase.round < max(self.phases_by_round, default=phase.round):  # an audit of another peer's work
            return super().train(phase, should_stop, on_step)
        self.phases_by_round[phase.round] = phase
        before, weights = len(self.trained_samples), self.local
        report = super().train(phase, should_stop, on_step)
        self.changes += self.local - weights
        self.tokens += report.tokens
        earlier = self.samples_by_round.get(phase.round, []) if phase.done else []
        self.samples_by_round[phase.round] = [*earlier, *self.trained_samples[before:]]
        return report


@dataclass(frozen=True)
class Machine:
    """The simulated machine of one trainer."""

    speed: float = 1.0
    """Training speed relative to `seconds_per_step`."""
    experts: int = EXPERTS
    """Maximum number of experts it trains."""
    bandwidth: float = 1.0
    """Relative bandwidth that it announces; 0, also behind a NAT: it cannot be dialled."""
    base_in_memory: bool = False


MakeObserver = Callable[[str, Recorder], Observer]
"""(Peer, the peer's recorder) -> the peer's observer."""


class VirtualSwarm:
    """A bootstrap peer `W` and trainers by name, on one in-memory network."""

    def __init__(
        self,
        the_campaign: Campaign,
        seed: int = 0,
        seconds_per_step: float = 1.0,
        network: MemoryNetwork | None = None,
        bootstrap: str = "W",
        make_observer: MakeObserver = lambda name, recorder: recorder.record,
        archive: Archive = NO_ARCHIVE,
        make_trainer: Callable[[np.ndarray, tuple[int, ...]], Any] | None = None,
        layout: Layout = LAYOUT,
        weights: np.ndarray | None = None,
        num_samples: int = NUM_SAMPLES,
        checkpoint_every_s: float = 0.0,
    ):
        """`make_trainer`: makes real trainers from a base and owned experts; `layout`: their model's; `weights`: base 0;
        `num_samples`: in an epoch of their text.
        """
        self.campaign = the_campaign
        self.layout = layout
        self.bootstrap = bootstrap
        self.network = MemoryNetwork(seed, latency_s=0.05) if network is None else network
        self.rules = Rules(the_campaign.config, the_campaign.hash, num_samples)
        if weights is None:
            weights = np.random.default_rng(seed).standard_normal(layout.size, np.float32)
        self.base0 = first_base(weights, layout, the_campaign.config.outer)
        self.stores: dict[str, MemoryStore] = {bootstrap: MemoryStore()}
        disk = voter_incarnation(self.stores[bootstrap], random.Random(seed))
        self.genesis = make_genesis(the_campaign, bootstrap, self.base0, disk)
        self.nodes: dict[str, Node] = {}
        self.peers: dict[str, Peer] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.recorders: dict[str, Recorder] = {}
        self.trainers: dict[str, RecordingTrainer] = {}
        """Each peer's latest trainer."""
        self.samples: dict[str, dict[int, list[Interval]]] = {}
        """Samples that each peer trained for each round, the last time if it was restarted."""
        self.phases: dict[str, dict[int, Phase]] = {}
        """Each peer's phase for each round."""
        self.machines: dict[str, Machine] = {}
        self.invitations: dict[str, Invitation] = {}
        """By peer, for campaigns that ask for them."""
        self.around: dict[str, Callable[[World], World]] = {}
        """Wrapper of a peer's world, applied when it starts, by peer."""
        self.evaluation_s = 0.01
        """Duration of one evaluation."""
        self._slowness: dict[str, float] = {}
        self._seconds_per_step = seconds_per_step
        self._make_observer = make_observer
        self._archive = archive
        self._make_trainer = make_trainer
        self._checkpoint_every_s = checkpoint_every_s

    def invitation(self, name: str, roles: tuple[Role, ...]) -> Invitation:
        """Return the owner's invitation of a peer."""
        unsigned = Invitation(self.campaign.hash, name, roles, 2**40, b"")
        return signed_invitation(unsigned, SimulatedIdentity(self.bootstrap))

    def start_bootstrap(self) -> None:
        """Start the bootstrap peer on its store."""
        name = self.bootstrap
        store = self.stores.setdefault(name, MemoryStore())
        world = self.around.get(name, _unchanged)(in_memory_world(self.network, name, store=store))
        observer = self._make_observer(name, self.recorders.setdefault(name, Recorder()))
        node = self.nodes[name] = Node(world, self.campaign, self.genesis, self.rules, "helper", {}, observer)
        if not world.store.read(BASE):
            save_base_0(world.store, self.genesis, self.base0)
        self.helper = Peer(node, self.layout, None, NOTHING_TO_TRAIN, observer, lambda: b"", name, self._archive)
        self.tasks[name] = self.network.run_peer(name, _life(self.helper))

    def start(
        self,
        name: str,
        speed: float = 1.0,
        experts: int = EXPERTS,
        bandwidth: float = 1.0,
        store: Store | None = None,
        where: str = "",
        base_in_memory: bool = False,
    ) -> None:
        """Start a trainer on its store, or on `store`, which messages call `where`."""
        machine = self.machines[name] = Machine(speed, experts, bandwidth, base_in_memory)
        store = self.stores.setdefault(name, MemoryStore()) if store is None else store
        world = in_memory_world(self.network, name, store=store, seconds=self._blocking_s)
        world = self.around.get(name, _unchanged)(self._at_training_speed(world, name))
        observer = self._make_observer(name, self.recorders.setdefault(name, Recorder()))
        node = self.nodes[name] = Node(
            world, self.campaign, self.genesis, self.rules, "trainer", {}, observer, self.invitations.get(name)
        )
        training = self.campaign.config.training
        tokens_per_step = training.batch_size * training.sequence_length

        def make_trainer(base: np.ndarray, owned: tuple[int, ...]) -> SyntheticTrainer:
            trainer: RecordingTrainer = (
                self._make_trainer(base, owned) if self._make_trainer is not None
                else RecordingTrainer(self.layout, base, owned, tokens_per_step, self.step_s(name), self.network.seed)
            )
            trainer.seconds_per_step = self.step_s(name)
            trainer.changes, trainer.tokens = np.zeros(self.layout.size), 0
            trainer.samples_by_round = self.samples.setdefault(name, {})
            trainer.phases_by_round = self.phases.setdefault(name, {})
            self.trainers[name] = trainer
            return trainer

        capacity = Capacity(machine.experts, machine.bandwidth, is_dialable=lambda: self.network.nats.is_open(name))
        peer = Peer(
            node, self.layout, make_trainer, capacity, observer, lambda: b"", where or name, base_in_memory=base_in_memory,
            checkpoint_every_s=self._checkpoint_every_s,
        )
        self.peers[name] = peer
        self.tasks[name] = self.network.run_peer(name, _life(peer))

    def start_all(self, names: str = "ABC") -> None:
        """Start the bootstrap peer and identical trainers of these names."""
        self.start_bootstrap()
        for name in names:
            self.start(name)

    def _blocking_s(self, function: Callable[..., Any], args: Sequence[Any]) -> float:
        """Return the seconds that blocking work other than training takes."""
        is_evaluation = getattr(function, "__func__", None) is Replica.validation_loss
        return self.evaluation_s if is_evaluation else 0.01

    def _at_training_speed(self, world: World, name: str) -> World:
        """Make training take time step by step, so that a peer can be stopped, paused or killed between two steps."""

        async def run_blocking(function: Callable[..., T], *args: Any) -> T:
            if getattr(function, "__func__", None) is Auditing._score:
                audit, most, should_stop = args
                phase = audit.case.phase
                phase = dataclasses.replace(phase, done=audit.done, steps=min(phase.steps, audit.done + most))
                return function(audit, await _steps_in_time(phase, should_stop, lambda: self.step_s(name)), lambda: False)
            if name not in self.trainers or function != self.trainers[name].train:
                return await world.run_blocking(function, *args)  # type: ignore[no-any-return]
            phase, should_stop, on_step = args
            steps = await _steps_in_time(phase, should_stop, lambda: self.step_s(name))
            done = iter(range(steps))
            return function(phase, lambda: next(done, None) is None, on_step)

        return dataclasses.replace(world, run_blocking=run_blocking)

    def step_s(self, name: str) -> float:
        """Return the current duration of one of this peer's local steps."""
        return self._seconds_per_step / self.machines[name].speed * self._slowness.get(name, 1.0)

    def slow(self, name: str, factor: float) -> None:
        """Make the peer train `factor` times slower than its machine from now on; 1 restores its speed."""
        self._slowness[name] = factor
        if name in self.trainers:
            self.trainers[name].seconds_per_step = self.step_s(name)

    def kill(self, name: str) -> None:
        """Kill the peer at once, preserving its disk."""
        self.network.kill(name)
        self.nodes.pop(name, None)
        self.peers.pop(name, None)
        self.tasks.pop(name, None)

    def start_again(self, name: str) -> None:
        """Start a killed peer with its disk and machine."""
        self.stores[name] = self.stores[name].reopen()
        if name == self.bootstrap:
            self.start_bootstrap()
        else:
            machine = self.machines[name]
            self.start(
                name, machine.speed, machine.experts, machine.bandwidth, base_in_memory=machine.base_in_memory
            )

    def restart(self, name: str) -> None:
        """Kill the peer and start it on the same disk."""
        self.kill(name)
        self.start_again(name)

    def lose_disk(self, name: str) -> None:
        """Kill the peer and start it with the same identity on an empty disk."""
        self.kill(name)
        self.stores[name] = MemoryStore()
        self.start_again(name)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 2000.0) -> None:
        """Wait for a condition. Raises AssertionError on timeout or if a peer fails."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"the condition did not come true in time; rounds: {self.rounds()}")
            for name, task in self.tasks.items():
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise AssertionError(f"{name} failed") from task.exception()
            await asyncio.sleep(0.5)

    async def until_round(self, number: int, timeout_s: float = 2000.0) -> None:
        """Wait until every trainer has committed this round."""
        await self.until(lambda: all(self.round_of(name) >= number for name in self.peers), timeout_s)

    async def until_finished(self, timeout_s: float = 2000.0) -> None:
        """Wait until every trainer has finished."""
        await self.until(lambda: all(self.tasks[name].done() for name in self.peers), timeout_s)

    def round_of(self, name: str) -> int:
        """Return the round of the peer's base; -2 without a base."""
        replica = self.peers[name].replica
        return replica.base.round if replica.has_base else -2

    def rounds(self) -> dict[str, int]:
        """Return the round of each trainer's base."""
        return {name: self.round_of(name) for name in self.peers}

    def digests(self) -> dict[int, set[str]]:
        """Return the base digests of each round, over all peers that ever committed it."""
        found: dict[int, set[str]] = {}
        for recorder in self.recorders.values():
            for number, event in recorder.commits().items():
                found.setdefault(number, set()).add(event.base_digest)
        return found

    def final_digests(self) -> set[str]:
        """Return the digests of the trainers' bases."""
        return {peer.replica.base.digest for peer in self.peers.values()}

    def trained_tokens(self) -> int:
        """Return the tokens of all completed phases."""
        return sum(event.tokens for recorder in self.recorders.values() for event in recorder.of(PhaseTrained))

    def assert_same_commits(self) -> None:
        """Assert that the peers' logs agree up to the shortest."""
        logs = [peer.node.log for peer in self.peers.values()]
        for number in range(max(0, *(log.begins for log in logs)), min(log.round for log in logs) + 1):
            assert len({log.commit_at(number).id for log in logs}) == 1

    def assert_replicas_agree(self) -> None:
        """Assert one digest per round among all peers that committed it, and one final digest."""
        differing = {number: digests for number, digests in self.digests().items() if len(digests) != 1}
        assert not differing
        assert len(self.final_digests()) == 1


def _unchanged(world: World) -> World:
    return world


async def _life(peer: Peer) -> None:
    """Run a peer; its transport closes when it ends."""
    try:
        await peer.run()
    finally:
        await peer.node.world.transport.close()


async def _steps_in_time(phase: Phase, should_stop: Callable[[], bool], step_s: Callable[[], float]) -> int:
    for step in range(phase.steps - phase.done):
        if should_stop():
            return step
        await asyncio.sleep(step_s())
    return phase.steps - phase.done


def samples(intervals: list[Interval]) -> list[tuple[int, int]]:
    """Return (epoch, position) of each sample."""
    return [(i.epoch, position) for i in intervals for position in range(i.start, i.stop)]


def simulate(main: Callable[[], Coroutine[Any, Any, T]], limit_s: float = 5000.0) -> T:
    """Run a test under virtual time, with a timeout of `limit_s` virtual seconds."""

    async def bounded() -> T:
        return await asyncio.wait_for(main(), limit_s)

    return run_virtual(bounded())
