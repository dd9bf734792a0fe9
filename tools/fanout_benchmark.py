"""Measure an exchange of many peers: owners that serve their experts, reducers planned by bandwidth, and cells.

./tools/bench fanout [--peers 16 32] [--cases equal ...] [--reducers "in cells"] [--megabytes 2] [--json FILE]

The exchange is real, on an in-memory network in virtual time, so the seconds are those of the transfers. "Sent" and "received
over" are the most that one peer sends and receives relative to what the plan has it send and receive. "Neighbours" are the most
others with which one peer had open streams at a time. The last column is the minimum for any assignment: max(own updates / own
upload, all bytes / all upload).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import numpy as np
from bench_json import parser_of, write

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.consensus import Ballot
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.rounds import Proposal, PullRequest, PushHeader
from spes_p2p.messages.samples import Cursor
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchange_context import ExchangeContext
from spes_p2p.rounds import cells
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.part_table import part_table, table_of
from spes_p2p.rounds.parts import Part, weight
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.traffic import traffic
from spes_p2p.testing.in_memory_world import inline
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.testing.virtual_loop import run_virtual

CODECS = group_codecs(CodecConfig.model_validate("int8"))
SHARED, EXPERTS = 100_000, 900_000
"""Number of values in each megabyte of the state: nine tenths are experts, as in configs/9b.yaml."""
PART_BYTES = 2048
"""Size of a part in each megabyte."""
LINE_BYTES_PER_S = 50_000.0
"""Full bandwidth, for each megabyte: it carries the state in about 20 s, as 100 Mbit/s do with 250 MB."""
PATIENCE_S = 1e6
EITHER = {"owners": 2**20, "by line": 2**20, "in cells": 2}
"""By what is compared: the most members of a round without cells."""

Case = Callable[[int], tuple[list[float], list[int]]]
"""For N peers: each peer's share of the full upload bandwidth, and its number of experts. All download at full bandwidth."""

CASES: dict[str, Case] = {
    "equal lines and experts": lambda n: ([1.0] * n, [1] * n),
    "one line a fifth": lambda n: ([0.2] + [1.0] * (n - 1), [1] * n),
    "every other line a tenth": lambda n: ([0.1, 1.0] * (n // 2), [1] * n),
    "equal lines, a quarter owns all": lambda n: ([1.0] * n, [1] * (n // 4) + [0] * (n - n // 4)),
    "an open campaign": lambda n: ([1.0] * n, [1] * n),
}
VOUCHED = {"an open campaign": 5}
"""Peers for which the owner vouches; the others are strangers past probation. In other cases, all."""


@dataclass(frozen=True)
class Measured:
    """One exchange."""

    case: str
    peers: int
    reducers: str
    seconds: float
    most_sent_bytes: int
    """By one peer."""
    sent_bytes: int
    """By all peers."""
    sent_over: float
    """The most that one peer sent, relative to what the plan has it send."""
    received_over: float
    neighbours: int
    least_seconds: float


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 32], help="how many take part (default 16 32)")
    parser.add_argument("--megabytes", type=int, default=2, help="encoded state (default 2); parts and lines grow with it")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help="the first words of some cases")
    parser.add_argument("--reducers", nargs="+", choices=EITHER, default=list(EITHER), help="default: all")
    arguments = parser.parse_args()
    if any(peers < 4 or peers % 4 for peers in arguments.peers):
        parser.error("--peers: multiples of 4")
    cases = [case for case in CASES if case.startswith(tuple(arguments.cases))]
    measured = []
    print(f"{'case':33}{'N':>4} {'reducers':10}{'seconds':>8}{'most sent':>11}{'all sent':>11}{'sent over':>11}{'received':>10}"
          f"{'neighbours':>11}{'least':>9}")
    for peers in arguments.peers:
        for case in cases:
            for reducers in arguments.reducers:
                with patch.object(cells, "FLAT_MEMBERS", EITHER[reducers]):
                    table_of.cache_clear()
                    m = measure(case, peers, reducers, arguments.megabytes)
                measured.append(m)
                print(f"{m.case:33}{m.peers:4} {m.reducers:10}{m.seconds:8.1f}{m.most_sent_bytes / 1e6:8.2f} MB"
                      f"{m.sent_bytes / 1e6:8.1f} MB{m.sent_over:11.3f}{m.received_over:10.3f}{m.neighbours:11}"
                      f"{m.least_seconds:9.1f}", flush=True)
    write([asdict(m) for m in measured], arguments.json)


def measure(case: str, peers: int, reducers: str, megabytes: int) -> Measured:
    """Measure one exchange with reducers as planned, or with "owners" that serve their experts."""
    uploads, owned = CASES[case](peers)
    owners = [peer for peer, count in enumerate(owned) for _ in range(count)]
    size, full = megabytes * EXPERTS // len(owners), megabytes * LINE_BYTES_PER_S
    experts = [TensorSpec(f"experts.{e}.gate_up_proj", (size,), "expert", 0, e) for e in range(len(owners))]
    layout = Layout([TensorSpec("embed", (megabytes * SHARED,), "shared"), *experts])
    members = tuple(
        Member(
            f"{i:03d}", 1, tuple(int(i == owner) for owner in owners), full * upload,
            standing="vouched" if i < VOUCHED.get(case, peers) else "proven",
        )
        for i, upload in enumerate(uploads)
    )
    proposal = Proposal(1, "", Ballot(1, members[0].peer), ())
    plan = Plan(proposal, "c", 0, "", members, peers, 0.0, 1, None, (), Cursor())
    parts = part_table(layout, members, CODECS, megabytes * PART_BYTES)
    if reducers == "owners":
        parts = tuple(replace(p, reducer=p.contributors[0]) if len(p.contributors) == 1 else p for p in parts)
    network = MemoryNetwork(latency_s=0.02)
    for m in members:
        network.set_bandwidth(m.peer, m.bandwidth, full)
    seconds = run_virtual(_exchange(network, plan, parts))
    sent, received = (
        [sum(count for pair, count in network.sent_bytes.items() if pair[end] == m.peer) for m in members] for end in (0, 1)
    )
    sent_over, received_over = (
        max(count / must for count, must in zip(moved, planned, strict=True) if must)
        for moved, planned in zip((sent, received), traffic(parts, peers), strict=True)
    )
    own_s = [sum(p.encoded_bytes for p in parts if i in p.contributors) / m.bandwidth for i, m in enumerate(members)]
    least_s = max(max(own_s), sum(sent) / sum(m.bandwidth for m in members))
    neighbours = max(network.connections.values())
    return Measured(
        case, peers, reducers, seconds, max(sent), sum(sent), sent_over, received_over, neighbours, least_s
    )


async def _exchange(network: MemoryNetwork, plan: Plan, parts: tuple[Part, ...]) -> float:
    """Return the seconds until every member has every result."""
    rng, exchanges = np.random.default_rng(0), {}
    for m in plan.members:
        its = (part for part in parts if weight(m, part.group))
        update = {part.start: memoryview(part.codec.encode(rng.standard_normal(part.size, np.float32))) for part in its}
        endpoint = RpcEndpoint(network.transport(m.peer), PATIENCE_S)
        exchanges[m.peer] = Exchange(ExchangeContext(
            endpoint, SimulatedIdentity(m.peer), Results(plan, parts), update, {}, PATIENCE_S, lambda part: 1, inline
        ))
        await _serve(endpoint, exchanges[m.peer])
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(network.run_peer(peer, exchange.run()) for peer, exchange in exchanges.items()))
    seconds = asyncio.get_running_loop().time() - started
    for exchange in exchanges.values():
        if not all(exchange.results.verified(part) for part in parts):
            raise RuntimeError("a result is missing")
        if exchange.results.digests != exchanges[plan.members[0].peer].results.digests:
            raise RuntimeError("results differ")
    return seconds


async def _serve(endpoint: RpcEndpoint, exchange: Exchange) -> None:
    async def on_push(stream: Stream) -> None:
        unpack(PushHeader, await stream.message())
        await exchange.on_push(stream)

    async def on_pull(stream: Stream) -> None:
        await exchange.on_pull(stream, unpack(PullRequest, await stream.message()))

    await endpoint.serve(PUSH, on_push)
    await endpoint.serve(PULL, on_pull)


if __name__ == "__main__":
    main()
