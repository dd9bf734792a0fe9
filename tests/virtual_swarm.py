"""A whole swarm in this process under virtual time, with the code of real peers; only the trainer is synthetic."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from spes_p2p.config import Campaign, parse_campaign_config
from spes_p2p.helper import Helper, make_genesis
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.observe.events import Event, RoundCommitted
from spes_p2p.peer import Capacity, Peer
from spes_p2p.swarm.memory import MemoryNetwork, in_memory_world
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.store import MemoryStore
from spes_p2p.sync.plan import Rules
from spes_p2p.training.synthetic import SyntheticTrainer

EXPERTS, NUM_SAMPLES = 4, 1000
LAYOUT = Layout(
    [TensorSpec("embed", (50, 8), "shared"), TensorSpec("gate", (EXPERTS, 8), "router", 0)]
    + [
        TensorSpec(f"experts.{e}.{name}", shape, "expert", 0, e)
        for e in range(EXPERTS)
        for name, shape in (("gate_up_proj", (16, 8)), ("down_proj", (8, 8)))
    ]
)


def campaign(total_steps=60, codec="float16", **sections) -> Campaign:
    raw = {
        "name": "virtual",
        "model": dict(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                      num_key_value_heads=1, max_position_embeddings=16, moe_num_experts=EXPERTS, moe_top_k=2),
        "training": dict(sequence_length=16, batch_size=2, total_steps=total_steps, sync_steps=10, learning_rate=1e-3),
        "merge": dict(merge_interval=20, merge_alpha_start=0.1, merge_decay_steps=100),
        "sync": dict(codec=codec, part_bytes=1024, min_peers=3, silence_s=5.0),
        "data": dict(manifest="m", tokenizer="t"),
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return Campaign(
        config=parse_campaign_config(raw, "test"), manifest_sha256="0" * 64, validation_manifest_sha256=None, tokenizer_sha256="1" * 64
    )


@dataclass
class Recorder:
    """Remembers what a peer told."""

    events: list[Event] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def commits(self) -> dict[int, RoundCommitted]:
        return {e.round: e for e in self.events if isinstance(e, RoundCommitted)}


class VirtualSwarm:
    """A bootstrap and trainers by name, on one in-memory network."""

    def __init__(self, the_campaign: Campaign, seed: int = 0, seconds_per_step: float = 1.0):
        self.campaign = the_campaign
        self.network = MemoryNetwork(seed, latency_s=0.05)
        self.rules = Rules(the_campaign.config, the_campaign.hash, NUM_SAMPLES)
        self.base0 = np.random.default_rng(0).standard_normal(LAYOUT.size, np.float32)
        self.genesis = make_genesis(the_campaign, "W", self.base0)
        self.peers: dict[str, Peer] = {}
        self.tasks: dict[str, asyncio.Task] = {}
        self.recorders: dict[str, Recorder] = {}
        self.stores: dict[str, MemoryStore] = {}
        self._seconds_per_step = seconds_per_step

    def start_bootstrap(self) -> None:
        store = self.stores.setdefault("W", MemoryStore())
        world = in_memory_world(self.network, "W", store=store)
        recorder = self.recorders.setdefault("W", Recorder())
        node = Node(world, self.campaign, self.genesis, self.rules, "helper", {}, recorder)
        helper = Helper(node, LAYOUT, self.base0, recorder, lambda: b"")
        self.tasks["W"] = self.network.run_peer("W", helper.run())

    def start(self, name: str, speed: float = 1.0, experts: int = EXPERTS, bandwidth: float = 1.0) -> None:
        store = self.stores.setdefault(name, MemoryStore())
        step_s = self._seconds_per_step / speed

        def seconds(function, args):
            is_training = getattr(function, "__name__", "") == "train"
            return args[0].steps * step_s if is_training else 0.01

        world = in_memory_world(self.network, name, store=store, seconds=seconds)
        recorder = self.recorders.setdefault(name, Recorder())
        node = Node(world, self.campaign, self.genesis, self.rules, "trainer", {}, recorder)
        training = self.campaign.config.training
        tokens_per_step = training.batch_size * training.sequence_length

        def make_trainer(base, owned):
            return SyntheticTrainer(LAYOUT, base, owned, tokens_per_step, step_s, seed=hash(name) % 1000)

        peer = Peer(node, LAYOUT, make_trainer, Capacity(experts, bandwidth), recorder, lambda: b"", name)
        self.peers[name] = peer
        self.tasks[name] = self.network.run_peer(name, peer.run())

    def restart(self, name: str) -> None:
        """Kill -9, then start again on the same disk."""
        self.kill(name)
        self.stores[name] = self.stores[name].reopen()
        self.start(name)

    def kill(self, name: str) -> None:
        self.network.kill(name)
        self.peers.pop(name, None)
        self.tasks.pop(name, None)

    async def until(self, condition, timeout_s: float = 2000.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError("the condition did not come true in time")
            for name, task in self.tasks.items():
                if task.done() and task.exception() is not None:
                    raise AssertionError(f"{name} failed") from task.exception()
            await asyncio.sleep(0.5)

    def round_of(self, name: str) -> int:
        replica = self.peers[name].replica
        return replica.base.round if hasattr(replica, "base") else -2

    def digests(self) -> dict[int, set[str]]:
        """Digests of each round, over all peers that ever committed it."""
        found: dict[int, set[str]] = {}
        for recorder in self.recorders.values():
            for number, event in recorder.commits().items():
                found.setdefault(number, set()).add(event.base_digest)
        return found
