"""./tools/bench state --billions X: what a peer does with the whole state, on this machine's disk and memory.

One peer's own code (replica, base store, trainer, checkpoint) in a swarm of four lives through rounds of an X-billion-parameter
model whose results the benchmark makes up. `reduce N` is a reducer of eight parts with N contributors (reducer_benchmark.py).
For each operation: seconds, the longest time for which the event loop stood still, and the bytes that this process gave the
kernel to write (/proc/self/io). `written_over_changed`: bytes written in the measured rounds, without those of files that were
deleted before the kernel wrote them, over the bytes of base, moments and pending work that these rounds changed. Ends in one
line where the machine cannot bear the size.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from bench_json import end_on_signals, report_file, write
from benchmarks import RandomText
from reducer_benchmark import CONTRIBUTORS, reduce_parts

from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.campaign.host_memory import host_bytes
from spes_p2p.campaign.planner import disk_bytes
from spes_p2p.campaign.room import Choice
from spes_p2p.config.campaign import Campaign, CampaignConfig, parse_campaign_config
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import LOG
from spes_p2p.consensus.signed import sign
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Signed
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.messages.rounds import Announcement, Manifest, Proposal
from spes_p2p.model.build import layout_of
from spes_p2p.model.layout import Layout
from spes_p2p.model.memory import Setup, device_bytes
from spes_p2p.net.interfaces import World
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.first_base import begin_training, restore
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.codecs import Codec
from spes_p2p.rounds.commit import make_commit, staged_report
from spes_p2p.rounds.digest import PIECE_ELEMENTS, piece_digests
from spes_p2p.rounds.merge import nearest_experts
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.parts import mask_bytes, to_mask
from spes_p2p.rounds.plan import Rules, alpha_due
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.storage.threads import keep_loaded_objects, threads_here
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

T = TypeVar("T")
Report = dict[str, Any]

ME, MEMBERS, EXPERTS = "A", "ABCD", 16
OWNED = EXPERTS // len(MEMBERS)
SEQUENCE, SPEED, BANDWIDTH = 16, 1000.0, 1e7
PROBE_S = 0.002
WARM_UP_ROUNDS = 2
"""Round 0 assembles the swarm; in round 1 files are written that later rounds reuse."""
PROGRAM_BYTES = 2**31
"""Memory of Python, torch and the results that the benchmark makes up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=0.1, metavar="X", help="parameters, in billions (default 0.1)")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds; every second one merges (default 4)")
    parser.add_argument("--base", choices=("disk", "arrays", "ram"), default="disk",
                        help="as `join --base`; arrays: only a round's arrays are in memory (default disk)")
    parser.add_argument("--checkpoint-minutes", type=float, default=0.0, help="default 0: one checkpoint in each round")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where a run-dir is made and removed (default runs)")
    parser.add_argument("--json", nargs="?", const="-", type=report_file, metavar="FILE",
                        help="print JSON, or write it to a file")
    arguments = parser.parse_args()
    end_on_signals()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: at least 2, one of them with a merge")
    if not 0.01 <= arguments.billions <= 100:
        parser.error(f"--billions {arguments.billions:g}: must be 0.01 to 100")
    config = campaign_of(arguments.billions, arguments.rounds)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    problem = why_not(config, arguments.folder, arguments.base)
    if problem:
        parser.error(f"--billions {arguments.billions:g}: {problem}")
    with tempfile.TemporaryDirectory(prefix="state-", dir=arguments.folder) as folder:
        report = asyncio.run(measure(config, Path(folder), arguments.rounds, arguments.base, 60 * arguments.checkpoint_minutes))
    if arguments.json == Path("-"):
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
        write(report, arguments.json)
    if report["digest"] != report["digest_after_restart"]:
        print("error: the restart has another base than the peer that died", file=sys.stderr)
        return 1
    return 0


def campaign_of(billions: float, rounds: int) -> CampaignConfig:
    """Return a campaign of a model with about this many parameters; every second round merges."""
    small = billions < 0.5
    hidden, width, vocabulary = (512, 512, 8192) if small else (2048, 1024, 50304)
    model = {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": SEQUENCE, "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
    }
    layer = 4 * hidden * hidden + 3 * EXPERTS * hidden * width
    model["num_hidden_layers"] = max(1, round((billions * 1e9 - 2 * vocabulary * hidden) / layer))
    return parse_campaign_config({
        "name": "state", "model": model,
        "training": {"sequence_length": SEQUENCE, "batch_size": 1, "total_steps": 1000, "sync_steps": 1, "learning_rate": 1e-4},
        "experts": {"experts_per_peer": OWNED},
        "merge": {"merge_interval": 2, "merge_alpha_start": 0.05, "merge_decay_steps": 1000},
        "evaluation": {"every_rounds": 0}, "data": {"manifest": "-", "tokenizer": "-"},
    }, "bench")


def why_not(config: CampaignConfig, folder: Path, base: str) -> str:
    """Say what this machine lacks for this model; "" when it has all."""
    setup = Setup(OWNED, "int8", "adamw", 1, "cpu", bf16=False)
    choice = Choice(setup, device_bytes(config.model, SEQUENCE, setup))
    memory = choice.device.total + host_bytes(config, choice.setup, base == "ram", base == "arrays").total + PROGRAM_BYTES
    disk = disk_bytes(config, choice).total
    has_memory, has_disk = psutil.virtual_memory().available, shutil.disk_usage(folder).free
    if memory > has_memory:
        return f"needs {memory / 1e9:.0f} GB of memory, {has_memory / 1e9:.0f} GB are free"
    if disk > has_disk:
        return f"needs {disk / 1e9:.0f} GB of disk in {folder}, {has_disk / 1e9:.0f} GB are free"
    if _file_system(folder) in ("tmpfs", "ramfs"):
        return f"{folder} is in memory, where writes are not counted; give --folder on a disk"
    return ""


def _file_system(folder: Path) -> str:
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


class Meter:
    """Seconds, the event loop's longest stall, and bytes written, by operation."""

    def __init__(self) -> None:
        self.operations: dict[str, Report] = {}

    @asynccontextmanager
    async def measured(self, name: str) -> AsyncIterator[None]:
        """Add what happens in this block to the operation."""
        stalls = [0.0]
        probe = asyncio.ensure_future(_probe(stalls))
        await asyncio.sleep(5 * PROBE_S)
        stalls[:], given, started = [0.0], given_bytes(), time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            await asyncio.sleep(5 * PROBE_S)  # a stall in the last step shows only now
            probe.cancel()
            kept = self.operations.setdefault(name, {"seconds": [], "longest_stall_s": 0.0, "written_bytes": 0})
            kept["seconds"].append(round(seconds, 4))
            kept["longest_stall_s"] = max(kept["longest_stall_s"], round(max(stalls), 4))
            kept["written_bytes"] += given_bytes() - given


async def _probe(stalls: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(PROBE_S)
        stalls.append(time.monotonic() - before - PROBE_S)


def given_bytes() -> int:
    """Return the bytes that this process has given the kernel to write to disks."""
    return _io_counts()["write_bytes"]


def written_bytes() -> int:
    """Return those of them that the kernel has written or still will: not those of files that were deleted before.

    Such a file may be deleted long after it was filled, so this can fall during one operation.
    """
    counts = _io_counts()
    return counts["write_bytes"] - counts["cancelled_write_bytes"]


def _io_counts() -> dict[str, int]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(count) for name, count in lines}


async def measure(
    config: CampaignConfig, folder: Path, rounds: int, base: str, checkpoint_every_s: float
) -> Report:
    """Return the costs of the operations in this many rounds, and of a restart after them."""
    campaign = Campaign(
        config=config, manifest_sha256="0" * 64, validation_manifest_sha256=None, tokenizer_sha256="1" * 64
    )
    layout, store, meter = layout_of(config.model), DirectoryStore(folder), Meter()
    genesis = make_base_0(campaign, layout, store)
    keep_loaded_objects()  # as a trainer does
    peer = OnePeer(campaign, layout, genesis, folder, base, checkpoint_every_s)
    await peer.restart()
    changed = written = 0
    for number in range(WARM_UP_ROUNDS + rounds):
        is_warm = number >= WARM_UP_ROUNDS
        before = piece_digests(peer.replica.base.values) if is_warm else b""
        started = written_bytes()
        await peer.round(meter if is_warm else Meter())
        if is_warm:
            written += written_bytes() - started
            changed += _changed_bytes(before, piece_digests(peer.replica.base.values)) + peer.work_bytes()
    digest = peer.replica.base.digest
    peer.forget()
    gc.collect()
    async with meter.measured("restart"):
        await peer.restart()
    restarted = peer.replica.base.digest
    for contributors in CONTRIBUTORS:
        async with meter.measured(f"reduce {contributors}"):
            await reduce_parts(contributors, folder)
    return {
        "parameters": layout.size, "state_bytes": 4 * base_size(layout, config.outer), "rounds": rounds,
        "base": base, "digest": digest, "digest_after_restart": restarted,
        "owned": f"{OWNED} of {EXPERTS} experts", "cores": os.cpu_count(), "threads": peer.world.threads,
        "longest_stall_s": max(each["longest_stall_s"] for each in meter.operations.values()),
        "written_over_changed": round(written / changed, 3), "written_bytes": written, "changed_bytes": changed,
        "operations": meter.operations,
    }


def make_base_0(campaign: Campaign, layout: Layout, store: Store) -> Commit:
    """Write random weights, and return the genesis commit."""
    values, rng = store.scratch("temporary", base_size(layout, campaign.config.outer)), np.random.default_rng(0)
    values[layout.size :] = 0
    for start in range(0, layout.size, PIECE_ELEMENTS):
        here = values[start : min(start + PIECE_ELEMENTS, layout.size)]
        rng.standard_normal(out=here, dtype=np.float32)
        here *= np.float32(0.02)
    genesis = make_genesis(campaign, ME, values, voter_incarnation(store, random.Random(0)))
    save_base_0(store, genesis, values)
    return genesis


def _changed_bytes(before: bytes, after: bytes) -> int:
    return sum(before[a : a + 32] != after[a : a + 32] for a in range(0, len(after), 32)) * 4 * PIECE_ELEMENTS


class OnePeer:
    """One peer, and what the rest of its swarm would send it."""

    def __init__(
        self, campaign: Campaign, layout: Layout, genesis: Commit, folder: Path, base: str, checkpoint_every_s: float
    ):
        self.campaign, self.layout, self.genesis, self.folder = campaign, layout, genesis, folder
        self._base, self._checkpoint_every_s = base, checkpoint_every_s
        self.rules = Rules(campaign.config, campaign.hash, RandomText.num_samples)
        self.replica: Replica
        self.world: World
        self._codes: dict[tuple[str, int], bytes] = {}

    def forget(self) -> None:
        """Die."""
        del self.replica, self.node, self.world, self.store

    async def restart(self) -> None:
        """Begin a life on the run-dir, as `Peer` does."""
        network = MemoryNetwork()
        self.store = await asyncio.to_thread(DirectoryStore, self.folder)
        self.world = World(
            network.transport(ME), network.registry(ME), SimulatedIdentity(ME), self.store, time.time, random.Random(0),
            asyncio.to_thread, threads=threads_here(),
        )
        self.node = Node(self.world, self.campaign, self.genesis, self.rules, "trainer", {}, lambda event: None)
        self.replica = Replica(
            self.node, self.layout, lambda event: None, self._base == "ram", self._checkpoint_every_s, self._base == "arrays"
        )
        await self.replica.start()
        assert await restore(self.replica, str(self.folder))
        await begin_training(self.replica, self._trainer, restored=True)
        await self.replica.advance()

    def _trainer(self, base: np.ndarray, owned: tuple[int, ...]) -> TorchTrainer:
        config = self.campaign.config
        return TorchTrainer(
            config, base, owned, RandomText(config), options=TrainingOptions(stored="int8", backend="eager")
        )

    def work_bytes(self) -> int:
        """Return the bytes of moments and pending work."""
        trainer = self.replica.trainer
        assert trainer is not None
        trained = sum(g.size for g in self.layout.groups if g.expert is None or g.expert in trainer.owned)
        return 4 * trained + sum(source.nbytes for source in trainer.optimizer_state().values())

    async def round(self, meter: Meter) -> None:
        """Train a phase, then live through a round in which all four members take part."""
        replica, run = self.replica, self.world.run_blocking
        await self._train()
        async with meter.measured("announce"):
            await run(replica.announce)
        plan = await run(self._plan)
        async with meter.measured("receive"):
            exchange = await replica.open_exchange(plan)
            await self._exchange(exchange)
        async with meter.measured("stage"):
            await replica.results.stage(exchange.results)
        self._decide(plan, exchange.results)
        del exchange
        async with meter.measured("apply" if plan.merge is None else "merge"):
            await replica.advance()
        async with meter.measured("save"):
            await replica.store.durable()

    async def _train(self) -> None:
        base, trainer = self.replica.base, self.replica.trainer
        assignment = base.assignment(ME)
        if assignment is None or base.plan is None or trainer is None:
            return
        phase = Phase(base.round + 1, base.plan.phase_step, 1, assignment.steps, assignment.slices)
        report: PhaseReport = await self.world.run_blocking(trainer.train, phase, lambda: False, lambda done, speed: None)
        self.replica.ledger.add_phase(report)

    def _plan(self) -> Plan:
        """Return the plan that follows from what four equal members announce."""
        base, last, announced = self.replica.base, self.node.log.last, self.replica.ledger.announced
        donors = None
        if alpha_due(last, len(MEMBERS) * announced.tokens, self.rules) > 0:
            donors = nearest_experts(base.values, self.layout, self.campaign.config.merge.merge_top_k)
        announcements = tuple(self._announcement(peer, last, base.digest, announced.tokens) for peer in MEMBERS)
        ballot = Ballot(1, coordinator_order(last)[0])
        return self.replica.validity.derive(
            Proposal(last.round + 1, last.id, ballot, announcements, (), (), donors, (), None)
        )

    def _announcement(self, peer: str, last: Commit, digest: str, tokens: int) -> Signed:
        place = MEMBERS.index(peer)
        owned = [expert for expert, owners in enumerate(last.owners) if place in owners]
        routed = tuple(tokens if expert in owned else 0 for expert in range(EXPERTS))
        if peer == ME:
            routed = self.replica.ledger.announced.routed
        announcement = Announcement(
            campaign=self.campaign.hash, protocol=PROTOCOL_VERSION, round=last.round + 1, attempt=0, waited_s=0.0,
            commit=last.id, base_digest=digest, tokens=tokens, routed=routed, capacity=OWNED, tokens_per_second=SPEED,
            bandwidth=BANDWIDTH, loss=1.0, validation_loss=None, untrained=(),
        )
        return sign(announcement, SimulatedIdentity(peer))

    async def _exchange(self, exchange: Exchange) -> None:
        """Put this peer's update and all results in place, one after the other, as they arrive from the network."""
        results, update = exchange.results, self.replica.ledger.update
        for part in results.parts:
            if exchange.me in part.contributors and part.start in update:
                exchange.sent[part.index] = part, partial(part.codec.decode, update[part.start], part.size)
            results.put(part.index, self._code(part.codec, part.size))
            await asyncio.sleep(0)
        for reducer in range(len(MEMBERS)):
            own_parts = results.reduced_by(reducer)
            if own_parts:
                digests = b"".join(results.digests[part.index] for part in own_parts)
                masks = b"".join(to_mask(set(part.contributors), len(MEMBERS)) for part in own_parts)
                nobody = bytes(mask_bytes(len(MEMBERS))) * len(own_parts)
                inputs = b"".join(results.digests[part.index] for part in own_parts)  # as long as those of real means
                results.add_manifest(Manifest(results.plan.id, reducer, 0, digests, masks, nobody, inputs))

    def _code(self, codec: Codec, size: int) -> bytes:
        """Return an encoded update; the same for all parts of one size, which changes no cost."""
        if (codec.name, size) not in self._codes:
            values = np.random.default_rng(size).standard_normal(size, np.float32) * np.float32(1e-4)
            self._codes[codec.name, size] = codec.encode(values)
        return self._codes[codec.name, size]

    def _decide(self, plan: Plan, results: Results) -> None:
        """Append the commit that all members would report for to the log."""
        staged = {place: staged_report(results, place, "0" * 16) for place in range(len(MEMBERS))}
        last = self.node.log.last
        commit = make_commit(last, plan, results, staged)
        decided = CertifiedCommit(commit, plan.proposal.ballot, ())
        self.store.append(LOG, pack(decided))
        self.node.log.put(decided)


def print_table(report: Report) -> None:
    print(f"{report['parameters'] / 1e9:.3g} B parameters, {report['owned']} owned, {report['threads']} threads")
    print(f"{'operation':<10}{'seconds':>10}{'longest stall':>16}{'GB written':>13}")
    for name, each in report["operations"].items():
        seconds = sum(each["seconds"]) / len(each["seconds"])
        written = each["written_bytes"] / len(each["seconds"]) / 1e9
        print(f"{name:<10}{seconds:>10.2f}{each['longest_stall_s']:>14.3f} s{written:>13.2f}")
    print(f"longest stall {report['longest_stall_s']:.3f} s; written over changed {report['written_over_changed']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
