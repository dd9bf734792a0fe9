"""One process of ./tools/bench link: a peer on a shaped line, whose trainer takes a fixed time per phase, as on a GPU.

It reads its settings as one line of JSON, and reports each round as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from round_contenders import EXPERTS, Spec, live, our_layout, say

TOKENS_PER_PHASE = 1000


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if spec["kind"] == "alone":
        alone(spec)
    else:
        import uvloop

        uvloop.install()
        asyncio.run(run_peer(spec))


def alone(spec: Spec) -> None:
    """Train without rounds."""
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
        """Leaves the cores idle for `phase_s` seconds, as a GPU does, then changes all trained weights a little."""

        def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
            time.sleep(spec["phase_s"])
            for group in self.layout.groups:
                if group.expert is None or group.expert in self.owned:
                    self._local[group.start : group.stop] *= np.float32(1 + 1e-3 * (spec["member"] + 1))
            routed = tuple(TOKENS_PER_PHASE if expert in self.owned else 0 for expert in range(EXPERTS))
            return PhaseReport(phase.steps, TOKENS_PER_PHASE, routed, 1.0, 0.0, spec["phase_s"], (), 0)

    return PacedTrainer(layout, base, owned, TOKENS_PER_PHASE, spec["phase_s"], spec["member"])


async def run_peer(spec: Spec) -> None:
    """Run a trainer that reports each round, or the bootstrap peer, which stays as a helper."""
    from spes_p2p.observe.events import Event, RoundCommitted

    def report(peer: Any, event: Event) -> None:
        if isinstance(event, RoundCommitted) and spec["kind"] != "bootstrap":
            say(round=event.round, at=time.monotonic(), cpu_seconds=cpu_seconds(), digest=event.base_digest,
                sent=event.sent_bytes, received=event.received_bytes, phases=event.seconds, dropped=event.dropped_parts,
                lost=event.lost, disputed=event.disputed, peer=peer.node.peer_id, owners=event.owners)

    layout = our_layout(spec["elements"])
    await live(spec, lambda base, owned: paced_trainer(spec, layout, base, owned), report)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its libp2p daemon."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = psutil.Process().children(recursive=True)
    return own.ru_utime + own.ru_stime + sum(sum(child.cpu_times()[:2]) for child in children)


if __name__ == "__main__":
    main()
