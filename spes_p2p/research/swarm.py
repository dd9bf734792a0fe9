"""One training run: real peers on the in-memory network in virtual time, measured from outside.

Training, plan, exchange, commit, outer step, merge and accounting are the product's; only clock, transport and disk are in
memory. All phases take equal time, so all peers do the same number of steps. A centralised run is a swarm of one peer with the
whole batch.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.campaign import Campaign, CampaignConfig, TrainingConfig
from spes_p2p.data.samples import SampleReader, Samples
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, initial_state, layout_of
from spes_p2p.model.layout import Group, Layout
from spes_p2p.model.shape import shape_of
from spes_p2p.observe.events import (
    Event,
    PhaseTrained,
    RoundCommitted,
    RoundFailed,
    RoundMeasured,
    UpdatesClipped,
    WorkDropped,
)
from spes_p2p.peer.announcing import NOTHING_TO_TRAIN, Capacity
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.peer.life import Peer
from spes_p2p.peer.node import Node
from spes_p2p.research import probe
from spes_p2p.research.donors import donors_of_the_aggregate
from spes_p2p.research.ledgers import decaying_error_buffers
from spes_p2p.research.series import RoundSeries
from spes_p2p.research.spec import Run
from spes_p2p.research.text import Text
from spes_p2p.research.upcycle import split_experts
from spes_p2p.rounds.outer import first_base
from spes_p2p.rounds.plan import Rules
from spes_p2p.storage.tensor_file import Source
from spes_p2p.testing.attacks.kinds import ATTACKS
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual
from spes_p2p.training.batches import Reader
from spes_p2p.training.interface import Phase, PhaseReport, Trainer
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

Record = dict[str, Any]

BOOTSTRAP, FIRST_PEER = "bootstrap", "peer-0"


@dataclass(frozen=True)
class Work:
    """A peer's work in a phase before a round with diagnostics."""

    routed: tuple[int, ...]
    tokens: int
    owned: tuple[int, ...]
    updates: Mapping[str, State]
    """Local weights minus base by group."""
    loss: float
    """Held-out loss of the peer's local weights before the round."""
    routing: probe.Routing


class WatchedTrainer(TorchTrainer):
    """A trainer whose phases take equal time and are recorded."""

    watch: Watch

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """Run the phase's steps at their place in the whole run's schedule."""
        place = replace(phase, first_step=phase.first_step + self.watch.first_step, training=self.watch.schedule)
        report = super().train(place, should_stop, on_step)
        self.watch.trained(self, phase, report)
        return replace(report, seconds=float(report.steps))

    def optimizer_state(self, in_full: bool = False) -> dict[str, Source]:
        """Return nothing: no peer restarts here, so moments need not be saved."""
        return {}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


@dataclass
class Watch:
    """Collects the results of one stage: held-out losses, bytes, and diagnostics of some rounds."""

    run: Run
    config: CampaignConfig
    judge: probe.Judge
    base: State
    schedule: TrainingConfig
    """Training config of the whole run."""
    first_step: int
    """First step of the stage in the whole run."""
    curve: list[Record] = field(default_factory=list)
    rounds: list[Record] = field(default_factory=list)
    work: dict[int, list[Work]] = field(default_factory=dict)
    sent_bytes: int = 0
    """Sent by all peers."""
    failed: int = 0
    dropped_tokens: int = 0
    clipped_parts: Counter[str] = field(default_factory=Counter)
    """By peer, over all rounds."""
    bounded_steps: Counter[str] = field(default_factory=Counter)
    """By group: rounds in which its step was scaled down."""
    layout: Layout = field(init=False)
    train_losses: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    series: RoundSeries = field(default_factory=RoundSeries)
    last_round: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = layout_of(self.config.model)

    def trained(self, trainer: TorchTrainer, phase: Phase, report: PhaseReport) -> None:
        """Record a completed phase for the round's diagnostics."""
        self.memory_bytes = max(self.memory_bytes, trainer.state_bytes())
        self.series.trained(phase.round, report, trainer.owned)
        if phase.round not in spread(self.config.total_rounds, self.run.experiment.measured_rounds):
            return
        groups = [g for g in trainer.layout.groups if g.expert is None or g.expert in trainer.owned]
        updates = {g.name: trainer.read(g) - self.base[g.start : g.stop] for g in groups}
        loss = probe.loss_of(trainer.model, self.judge.fixed)
        routing = probe.routing_of(trainer.model, self.judge.fixed)
        self.work.setdefault(phase.round, []).append(
            Work(report.routed, report.tokens, trainer.owned, updates, loss, routing)
        )

    def observe(self, name: str, event: Event) -> None:
        """Record a peer's event."""
        if isinstance(event, RoundFailed):
            self.failed += 1
        elif isinstance(event, WorkDropped):
            self.dropped_tokens += event.tokens
        elif isinstance(event, UpdatesClipped) and name == FIRST_PEER:
            self.clipped_parts.update(dict(event.parts))
            self.bounded_steps.update(group for group, _ in event.groups)
        elif isinstance(event, PhaseTrained):
            self.train_losses.append(event.loss)
        elif isinstance(event, RoundMeasured):
            self.series.measured(event)
        elif isinstance(event, RoundCommitted):
            self.sent_bytes += event.sent_bytes
            if event.round > self.last_round:
                self.last_round = event.round
                self._committed(event, self.peers[name].replica.base.values)

    def _committed(self, event: RoundCommitted, new: State) -> None:
        experiment, total = self.run.experiment, self.config.total_rounds
        if event.round in self.work:
            self.rounds.append(self._diagnose(event, new, self.work.pop(event.round)))
        if event.round in spread(total, experiment.evaluations):
            last = event.round == total
            losses = self.judge.losses(new, experiment.final_samples if last else experiment.samples)
            self.curve.append({
                "step": event.campaign_step, "tokens": event.total_tokens, "sent_bytes": self.sent_bytes // self.run.members,
                "loss": float(np.mean(list(losses.values()))), "domains": losses,
                "train_loss": float(np.mean(self.train_losses)) if self.train_losses else None,
                "expert_similarity": probe.similarity(new, self.layout), "weight_norms": probe.norms(new, self.layout),
            })
            self.train_losses.clear()
        self.base = new.copy()

    def _diagnose(self, event: RoundCommitted, new: State, work: Sequence[Work]) -> Record:
        layout, shape = self.layout, shape_of(self.config.model)
        before, after = self.judge.routing(self.base), self.judge.routing(new)
        assignments = shape.top_k * shape.num_hidden_layers * sum(w.tokens for w in work)
        owner_tokens = np.sum([w.routed for w in work], axis=0)
        updates: dict[Group, list[State]] = {}
        for each in work:
            for name, update in each.updates.items():
                updates.setdefault(layout.group(name), []).append(update)
        drifts: dict[str, list[dict[str, float]]] = {}
        for group, of_group in updates.items():
            if (drift := probe.drift(of_group)) is not None:
                drifts.setdefault(group.kind, []).append(drift)
        return {
            "round": event.round, "step": event.campaign_step, "tokens": event.total_tokens,
            "drift": {kind: {key: float(np.mean([d[key] for d in each])) for key in each[0]} for kind, each in drifts.items()},
            "loss_before": float(np.mean([w.loss for w in work])),
            "loss_after": self.judge.loss(new, self.judge.fixed),
            "owner_share": (owner_tokens / assignments * layout.num_experts).tolist(),
            "topk_agreement_local": float(np.mean([probe.agreement(w.routing, after) for w in work])),
            "topk_agreement_base": probe.agreement(before, after),
            "load_violation": probe.load_violation(after, layout.num_experts),
            "owned_share_local": float(np.mean([sum(w.routed) / (assignments * w.tokens / sum(v.tokens for v in work))
                                                for w in work])),
            "owned_share_global": float(np.mean([probe.share_of(after, w.owned) for w in work])),
            "expert_similarity": probe.similarity(new, layout),
            "update_norms": probe.norms(new[: layout.size] - self.base[: layout.size], layout),
            "weight_norms": probe.norms(new, layout),
            "merge_alpha": event.merge_alpha,
        }


def train(run: Run, text: Text, keep: Callable[[State], None] = lambda base: None) -> Record:
    """Do a run; return its results as JSON values. `keep` receives the final weights."""
    started, cpu = time.monotonic(), time.process_time()
    config, layout = run.config, layout_of(run.config.model)
    watches: list[Watch] = []
    for stage, first_step in run.stages:
        base0 = _first_base_of(stage, watches[-1] if watches else None)
        watch = Watch(stage, stage.config, _judge(stage, base0, text), base0, config.training, first_step)
        readers = readers_of(run, text, first_step * config.training.batch_size * run.members)
        with _rules_of(stage):
            run_virtual(_live(stage, stage.config, watch.layout, base0, readers, watch))
        watches.append(watch)
    last, peers = watches[-1], run.members
    keep(last.base[: layout.size])
    tested = last.judge.test_losses(last.base, run.experiment.test_samples) if run.experiment.test_samples else {}
    curve = _joined([watch.curve for watch in watches], ("step", "tokens", "sent_bytes"))
    return {
        "experiment": run.experiment.name, "arm": run.arm.name, "mode": run.arm.mode, "rate": run.rate, "seed": run.seed,
        "device": run.experiment.device, "key": run.key(text.digest), "peers": peers, "owners": run.arm.owners,
        "sync_steps": config.training.sync_steps,
        "batch_tokens": config.training.batch_size * config.training.sequence_length,
        "steps": config.training.total_steps,
        "tokens": curve[-1]["tokens"], "loss": curve[-1]["loss"], "domains": curve[-1]["domains"],
        **({"test_loss": float(np.mean(list(tested.values()))), "test_domains": tested} if tested else {}),
        "memory_bytes": max(watch.memory_bytes for watch in watches), "base_bytes": base0.nbytes,
        "sent_bytes": sum(watch.sent_bytes for watch in watches) // peers,
        "failed_rounds": sum(watch.failed for watch in watches),
        "dropped_tokens": sum(watch.dropped_tokens for watch in watches),
        "clipped_parts": dict(last.clipped_parts), "bounded_steps": dict(last.bounded_steps),
        "cpu_seconds": round(time.process_time() - cpu, 1), "seconds": round(time.monotonic() - started, 1),
        "campaign": run.arm.campaign, "curve": curve,
        "rounds": _joined([watch.rounds for watch in watches], ("round", "step", "tokens")),
        "series": last.series.columns(),
    }


@contextmanager
def _rules_of(run: Run) -> Iterator[None]:
    """Apply the arm's changes to the product's rules during the block."""
    with ExitStack() as changes:
        if run.arm.donors == "aggregate":
            changes.enter_context(donors_of_the_aggregate())
        if run.arm.error_buffer:
            changes.enter_context(decaying_error_buffers())
        yield


def _first_base_of(stage: Run, before: Watch | None) -> State:
    """Return fresh weights, or those of the previous stage with its experts split."""
    config = stage.config
    layout = layout_of(config.model)
    if before is None:
        weights = initial_state(config.model)
    else:
        weights = split_experts(before.base[: before.layout.size], before.layout, layout, stage.seed)
    return first_base(weights, layout, config.outer)


def _judge(stage: Run, base0: State, text: Text) -> probe.Judge:
    held_out = text.held_out_readers(stage.config.training.sequence_length)
    return probe.Judge(stage.config, base0, held_out, stage.experiment.device)


def _joined(stages: Sequence[Sequence[Record]], counted: Sequence[str]) -> list[Record]:
    """Concatenate the stages' records; `counted` fields continue from the previous stage."""
    joined: list[Record] = []
    for records in stages:
        before = {name: joined[-1][name] if joined else 0 for name in counted}
        joined += [{**record, **{name: record[name] + before[name] for name in counted}} for record in records]
    return joined


def readers_of(run: Run, text: Text, first_sample: int = 0) -> list[Reader]:
    """Return each peer's reader of training text, for the positions that the plan assigns.

    `first_sample`: number of samples that earlier stages trained.
    """
    training = run.config.training
    if run.arm.domains == "mixed":
        found = [text.reader(training.sequence_length, training.seed)] * run.members
    else:
        found = [
            text.reader(training.sequence_length, training.seed, [text.domains[number % len(text.domains)]])
            for number in range(run.members)
        ]
    return [_From(reader, first_sample) for reader in found] if first_sample else list(found)


@dataclass(frozen=True)
class _From:
    """A reader that skips the first samples of each epoch."""

    reader: SampleReader
    first: int

    @property
    def num_samples(self) -> int:
        return self.reader.num_samples - self.first

    def read(self, interval: Interval) -> Samples:
        return self.reader.read(Interval(interval.epoch, interval.start + self.first, interval.stop + self.first))

    def read_spread(self, count: int) -> Samples:
        return self.reader.read_spread(count)


async def _live(
    run: Run, config: CampaignConfig, layout: Layout, base0: State, readers: Sequence[Reader], watch: Watch
) -> None:
    """Run all peers on one network until every trainer has finished the campaign."""
    campaign = Campaign(config=config, manifest_sha256="0" * 64, validation_manifest_sha256=None, tokenizer_sha256="0" * 64)
    network = MemoryNetwork(run.seed)

    def ignore(event: Event) -> None:
        pass

    world = in_memory_world(network, BOOTSTRAP)
    genesis = make_genesis(campaign, BOOTSTRAP, base0, voter_incarnation(world.store, world.rng))
    rules = Rules(config, campaign.hash, min(reader.num_samples for reader in readers))

    save_base_0(world.store, genesis, base0)
    node = Node(world, campaign, genesis, rules, "helper", {}, ignore)
    helper = Peer(node, layout, None, NOTHING_TO_TRAIN, ignore, lambda: b"", BOOTSTRAP)
    network.run_peer(BOOTSTRAP, helper.run())
    lives = []
    for number, reader in enumerate(readers):
        name, make_trainer = f"peer-{number}", partial(_trainer, run, config, watch, reader)
        observer = partial(watch.observe, name)
        world = in_memory_world(network, name)
        if run.arm.attack is not None and number >= run.members - run.arm.attackers:
            world = ATTACKS[run.arm.attack].around(Liar(world, config))
        node = Node(world, campaign, genesis, rules, "trainer", {}, observer)
        peer = Peer(node, layout, make_trainer, Capacity(run.experts_per_peer), observer, lambda: b"", name)
        watch.peers[name] = peer
        lives.append(network.run_peer(name, peer.run()))
    await asyncio.gather(*lives)
    helper.leave()


def _trainer(
    run: Run, config: CampaignConfig, watch: Watch, reader: Reader, base: State, owned: tuple[int, ...]
) -> Trainer:
    options = TrainingOptions(stored="fp32")
    trainer = WatchedTrainer(config, base, owned, reader, device=run.experiment.device, options=options)
    trainer.watch = watch
    return trainer


def spread(total: int, count: int) -> frozenset[int]:
    """Return at most `count` evenly spaced rounds of 1 to `total`, the last one included."""
    return frozenset(-(-total * i // count) for i in range(1, count + 1)) if count else frozenset()
