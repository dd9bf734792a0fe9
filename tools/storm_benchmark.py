"""./tools/bench storm: many peers join at once. How long do they wait, and how much longer do rounds take meanwhile?

Trainers and a bootstrap peer on equal lines, all in one process, in virtual time; so many joiners start in the same second.
Seconds until a joiner has its base count from there. Rounds: of the first trainer, the median of those before, the longest of
those that end until each joiner has taken part in two, and the median of the next ones.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from itertools import pairwise
from typing import Any

from bench_json import parser_of, tell
from round_contenders import our_campaign, our_layout

from spes_p2p.observe.events import BaseRestored, RoundCommitted, RoundFailed
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import VirtualSwarm
from spes_p2p.testing.virtual_loop import run_virtual

BEFORE, MEANWHILE, AFTER = 6, 2, 5
"""Rounds: until the storm, of the first of which the warm-up has no part; of each joiner; and afterwards."""
WARM_UP = 2
LATENCY_S = 0.05
LIMIT_S = 20_000.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trainers", type=int, default=8, help="before the storm (default 8)")
    parser.add_argument("--joiners", type=int, default=100, help="default 100")
    parser.add_argument("--megabytes", type=float, default=8.0, help="fp32 state (default 8)")
    parser.add_argument("--mbit", type=float, default=8.0, help="bandwidth of each line, each way (default 8)")
    parser.add_argument("--phase", type=float, default=40.0, help="seconds per phase (default 40)")
    parser.add_argument("--codec", default="int8", help="codec of shared weights and experts (default int8)")
    arguments = parser.parse_args()
    found = run_virtual(storm(arguments))
    tell({**vars(arguments), **found, "json": None}, arguments.json)


async def storm(arguments: argparse.Namespace) -> dict[str, Any]:
    spec = {"codec": arguments.codec, "sync": {"min_peers": arguments.trainers}}
    trainers, joiners = ([f"{kind}-{i}" for i in range(count)] for kind, count in (
        ("trainer", arguments.trainers), ("joiner", arguments.joiners),
    ))
    clock, network = asyncio.get_running_loop().time, MemoryNetwork(latency_s=LATENCY_S)
    at: dict[int, float] = {}
    based: dict[str, float] = {}
    took_part = dict.fromkeys(joiners, 0)
    failed = 0

    def observer(name: str, recorder: Any) -> Any:
        def observe(event: Any) -> None:
            nonlocal failed
            if isinstance(event, RoundCommitted) and name == trainers[0]:
                at[event.round] = clock()
            elif isinstance(event, RoundCommitted) and name in took_part:
                took_part[name] += 1
            elif isinstance(event, BaseRestored):
                based.setdefault(name, clock())
            failed += isinstance(event, RoundFailed)
        return observe

    swarm = VirtualSwarm(
        our_campaign(spec), seconds_per_step=arguments.phase, network=network, make_observer=observer,
        layout=our_layout(int(arguments.megabytes * 1e6) // 4),
    )
    for name in (swarm.bootstrap, *trainers, *joiners):
        network.set_bandwidth(name, *(arguments.mbit * 1e6 / 8,) * 2)
    swarm.start_bootstrap()
    for name in trainers:
        swarm.start(name, experts=1)
    await swarm.until(lambda: len(at) >= WARM_UP + BEFORE, LIMIT_S)
    began, first, failed = clock(), max(at), 0
    for name in joiners:
        swarm.start(name, experts=1)
    await swarm.until(lambda: min(took_part.values()) >= MEANWHILE, LIMIT_S)
    last, lost = max(at), failed
    await swarm.until(lambda: max(at) >= last + AFTER, LIMIT_S)
    ordered = sorted(at)
    took = {number: at[number] - at[before] for before, number in pairwise(ordered)}
    usual = statistics.median(took[number] for number in ordered[WARM_UP:] if number <= first)
    meanwhile = [took[number] for number in ordered if first < number <= last]
    waits = [based[name] - began for name in joiners]
    return {
        "base_s_median": round(statistics.median(waits), 1), "base_s_last": round(max(waits), 1),
        "round_s_before": round(usual, 1), "round_s_meanwhile": [round(each, 1) for each in meanwhile],
        "longest_over_before": round(max(meanwhile) / usual, 3),
        "round_s_after": round(statistics.median(took[number] for number in ordered if number > last), 1),
        "attempts_lost_by_members": lost,
    }


if __name__ == "__main__":
    main()
