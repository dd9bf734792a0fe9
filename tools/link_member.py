"""One process of ./tools/bench link: a peer behind a shaped line; its trainer takes a fixed time a phase, as one on a GPU does.

It reads what it is as one line of JSON and reports one line of JSON a round, with CPU seconds since the one before.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from round_contenders import EXPERTS, Spec, our_campaign, our_layout, say

TOKENS_A_PHASE = 1000


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if spec["kind"] == "alone":
        alone(spec)
    else:
        import uvloop

        uvloop.install()
        asyncio.run(live(spec))


def alone(spec: Spec) -> None:
    """Train and never sync."""
    from spes_p2p.training.interface import Phase

    layout = our_layout(spec["elements"])
    trainer = paced_trainer(spec, layout, np.zeros(layout.size, np.float32), tuple(range(spec["owned"])))
    for number in range(1, spec["rounds"] + 1):
        trainer.train(Phase(number, 0, 1, 1, ()), lambda: False, lambda done, speed: None)
        say(round=number, at=time.monotonic(), cpu_seconds=cpu_seconds())


def paced_trainer(spec: Spec, layout: Any, base: np.ndarray, owned: tuple[int, ...]) -> Any:
    from spes_p2p.testing.synthetic import SyntheticTrainer
    from spes_p2p.training.interface import Phase, PhaseReport

    class PacedTrainer(SyntheticTrainer):
        """Its device computes for `phase_s` seconds while the cores are free; then all that is trained moves a bit."""

        def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
            time.sleep(spec["phase_s"])
            for group in self.layout.groups:
                if group.expert is None or group.expert in self.owned:
                    self._local[group.start : group.stop] *= np.float32(1 + 1e-3 * (spec["member"] + 1))
            routed = tuple(TOKENS_A_PHASE if expert in self.owned else 0 for expert in range(EXPERTS))
            return PhaseReport(phase.steps, TOKENS_A_PHASE, routed, 1.0, 0.0, spec["phase_s"], (), 0)

    return PacedTrainer(layout, base, owned, TOKENS_A_PHASE, spec["phase_s"], spec["member"])


async def live(spec: Spec) -> None:
    """A trainer, or the bootstrap peer, which stays as a helper."""
    from spes_p2p.campaign.genesis import make_genesis, save_base_0
    from spes_p2p.messages.codec import pack, unpack
    from spes_p2p.messages.consensus import Commit
    from spes_p2p.net.interfaces import World
    from spes_p2p.net.libp2p import start_libp2p
    from spes_p2p.observe.events import Event, RoundCommitted
    from spes_p2p.peer.announcing import NOTHING_TO_TRAIN, Capacity
    from spes_p2p.peer.durable import voter_incarnation
    from spes_p2p.peer.life import Peer
    from spes_p2p.peer.node import Node
    from spes_p2p.rounds.plan import Rules
    from spes_p2p.storage.store import DirectoryStore
    from spes_p2p.testing.latency import delayed

    class Observer:
        """Reports each round."""

        def tell(self, event: Event) -> None:
            if isinstance(event, RoundCommitted) and not helps:
                say(round=event.round, at=time.monotonic(), cpu_seconds=cpu_seconds(), digest=event.base_digest,
                    sent=event.sent_bytes, received=event.received_bytes, phases=event.seconds, dropped=event.dropped_parts)

    helps = spec["kind"] == "bootstrap"
    folder, campaign, layout = Path(spec["folder"]), our_campaign(spec), our_layout(spec["elements"])
    net = await start_libp2p(folder / "identity.key", [f"/ip4/{spec['address']}/tcp/0"], (), spec.get("addresses", ()))
    store, base0 = DirectoryStore(folder), np.random.default_rng(0).standard_normal(layout.size, np.float32)
    genesis = unpack(Commit, bytes.fromhex(spec["genesis"])) if "genesis" in spec else (
        make_genesis(campaign, net.identity.peer_id, base0, voter_incarnation(store, random.Random())))
    save_base_0(store, genesis, base0)
    transport = delayed(net.transport, spec["latency_s"])
    world = World(transport, net.registry, net.identity, store, time.time, random.Random(), asyncio.to_thread)
    rules = Rules(campaign.config, campaign.hash, 10**6)
    node = Node(world, campaign, genesis, rules, "helper" if helps else "trainer", {}, Observer())
    peer = Peer(
        node, layout, None if helps else lambda base, owned: paced_trainer(spec, layout, base, owned),
        NOTHING_TO_TRAIN if helps else Capacity(spec["owned"]), Observer(), lambda: b"", str(folder),
    )
    if helps:
        say(address=net.transport.addresses[0], genesis=pack(genesis).hex())
    try:
        await peer.run()
    finally:
        await net.close()


def cpu_seconds() -> float:
    """Of this process and its libp2p daemon until now."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = psutil.Process().children(recursive=True)
    return own.ru_utime + own.ru_stime + sum(sum(child.cpu_times()[:2]) for child in children)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG: end with the benchmark
    main()
