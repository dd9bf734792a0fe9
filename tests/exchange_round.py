"""One round's exchange among real `Exchange` objects on an in-memory network, and what follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.consensus import Ballot, Commit, Signed
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.rounds import Proposal, PullRequest, PushHeader, Staged
from spes_p2p.messages.samples import Cursor
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchange_context import ExchangeContext
from spes_p2p.peer.own_work import taken
from spes_p2p.rounds.apply import next_base_pieces
from spes_p2p.rounds.codecs import GroupCodecs, group_codecs
from spes_p2p.rounds.commit import make_commit, own_manifests, staged_report
from spes_p2p.rounds.parts import Part, part_ranges, weight
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import Results
from spes_p2p.testing.in_memory_world import inline
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulated_identity import SimulatedIdentity

LAYOUT = Layout(
    [TensorSpec("embed", (40, 8), "shared"), TensorSpec("gate", (4, 8), "router", 0)]
    + [
        TensorSpec(f"experts.{e}.{name}", shape, "expert", 0, e)
        for e in range(4)
        for name, shape in (("gate_up_proj", (12, 8)), ("down_proj", (8, 6)))
    ]
)
PART_BYTES = 256
SILENCE_S = 2.0

Updates = dict[str, np.ndarray]
Behind = Callable[[Part], int]
"""Tokens behind a part's update."""


def codecs(name: str) -> GroupCodecs:
    """One codec for all groups."""
    return group_codecs(CodecConfig.model_validate(name))


def member(peer: str, tokens: int, routed: tuple[int, ...], bandwidth: float = 1.0) -> Member:
    return Member(peer, tokens, routed, bandwidth)


def planned(m: Member) -> Behind:
    """As many as the plan says."""
    return lambda part: weight(m, part.group)


def make_plan_of(members: Iterable[Member]) -> Plan:
    members = tuple(members)
    signed = tuple(Signed(m.peer, repr(m).encode(), b"") for m in members)
    return Plan(
        proposal=Proposal(1, "parent", Ballot(1, members[0].peer), signed), campaign="c", term=0, base_digest="digest",
        members=members, tokens=sum(m.tokens for m in members), loss=0.0, step=10, merge=None,
        assignments=(), cursor=Cursor(),
    )


def commit_before(plan: Plan) -> Commit:
    return Commit(
        campaign="c", term=0, round=0, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=1000,
        members=tuple(m.peer for m in plan.members), owners=((),) * LAYOUT.num_experts, cursor=Cursor(), helpers=(),
        electorate=tuple(m.peer for m in plan.members), incarnations=("0" * 16,) * len(plan.members),
    )


def random_updates(plan: Plan, seed: int = 0, layout: Layout = LAYOUT) -> dict[str, Updates]:
    """By peer, an update of every group that it has a weight for."""
    rng = np.random.default_rng(seed)
    return {
        m.peer: {g.name: rng.standard_normal(g.size, np.float32) for g in layout.groups if weight(m, g) > 0}
        for m in plan.members
    }


@dataclass
class Round:
    """A plan and its members' exchanges; call `run`, then `commit`."""

    plan: Plan
    codecs: GroupCodecs
    network: MemoryNetwork
    endpoints: dict[str, RpcEndpoint]
    exchanges: dict[str, Exchange]
    layout: Layout
    part_bytes: int

    @classmethod
    async def open(
        cls,
        plan: Plan,
        updates: Mapping[str, Updates],
        codec: str = "none",
        network: MemoryNetwork | None = None,
        residuals: Mapping[str, Mapping[int, np.ndarray]] | None = None,
        timeout_s: float = 60.0,
        layout: Layout = LAYOUT,
        part_bytes: int = PART_BYTES,
        behind: Mapping[str, Behind] | None = None,
        clips: bool = False,
        run_blocking: Callable[..., Awaitable[Any]] = inline,
        round_s: float = 0.0,
    ) -> Round:
        network = MemoryNetwork(latency_s=0.05) if network is None else network
        opened = cls(plan, codecs(codec), network, {}, {}, layout, part_bytes)
        for m in plan.members:
            endpoint = RpcEndpoint(network.transport(m.peer), SILENCE_S)
            own, weighs = (residuals or {}).get(m.peer, {}), (behind or {}).get(m.peer, planned(m))
            exchange = Exchange(ExchangeContext(
                endpoint, SimulatedIdentity(m.peer), opened.empty(), opened.encoded(updates[m.peer]), own, timeout_s, weighs,
                run_blocking, clips=clips, round_s=round_s,
            ))
            opened.endpoints[m.peer], opened.exchanges[m.peer] = endpoint, exchange
            await _serve(endpoint, exchange)
        return opened

    def empty(self) -> Results:
        return Results.empty(self.plan, self.layout, self.codecs, self.part_bytes)

    def encoded(self, updates: Updates) -> dict[int, memoryview]:
        """What a ledger that announces these would keep, by start of its part."""
        encoded = {}
        for group, start, stop in part_ranges(self.layout, self.codecs, self.part_bytes):
            if group.name in updates:
                values = updates[group.name][start - group.start : stop - group.start]
                encoded[start] = memoryview(self.codecs.of(group).encode(values) if np.isfinite(values).all() else b"")
        return encoded

    async def run(self, peers: Iterable[str] | None = None) -> None:
        """Let these members (default: all) do their exchange; the others do not move."""
        await asyncio.gather(*(self.network.run_peer(peer, self.exchanges[peer].run()) for peer in peers or self.exchanges))

    def staged(self, peers: Iterable[str] | None = None) -> dict[int, Staged]:
        reports = {}
        for peer in peers or self.exchanges:
            results, me = self.exchanges[peer].results, self.exchanges[peer].me
            reports[me] = staged_report(results, me, "0" * 16)
        return reports

    def commit(self, peers: Iterable[str] | None = None, helpers: tuple[str, ...] = ()) -> Commit:
        parent = replace(commit_before(self.plan), helpers=helpers)
        return make_commit(parent, self.plan, self.collected(), self.staged(peers))

    def collected(self) -> Results:
        """What a coordinator has of the results: each reducer's own manifests."""
        results = self.empty()
        for exchange in self.exchanges.values():
            for manifest in own_manifests(exchange.results, exchange.me):
                results.add_manifest(manifest)
        return results

    def new_base(self, peer: str, commit: Commit, base: np.ndarray) -> np.ndarray:
        results = self.exchanges[peer].results
        return np.concatenate(list(next_base_pieces(base, self.layout, results.committed(commit), results.encoded, None)))


async def _serve(endpoint: RpcEndpoint, exchange: Exchange) -> None:
    async def on_push(stream: Stream) -> None:
        unpack(PushHeader, await stream.message())
        await exchange.on_push(stream)

    async def on_pull(stream: Stream) -> None:
        await exchange.on_pull(stream, unpack(PullRequest, await stream.message()))

    await endpoint.serve(PUSH, on_push)
    await endpoint.serve(PULL, on_pull)


async def trained_and_accounted(plan: Plan, codec: str, rounds: int, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Play rounds of one plan. Return the base with all that was trained, and the last base with all that waits to be sent.

    The residual of a cell's mean counts as the cell does.
    """
    pending: dict[str, dict[str, np.ndarray]] = {m.peer: {} for m in plan.members}
    residuals: dict[str, dict[int, np.ndarray]] = {m.peer: {} for m in plan.members}
    trained, now = base.astype(np.float64), base
    for seed in range(rounds):
        work = random_updates(plan, seed)
        trained = reference(plan, work, trained)
        for peer, own in work.items():
            pending[peer] = {name: pending[peer].get(name, 0) + update for name, update in own.items()}
        played = await Round.open(plan, pending, codec, residuals=residuals)
        await played.run()
        now = played.new_base(plan.members[0].peer, played.commit(), now)
        for peer, exchange in played.exchanges.items():
            residuals[peer] = exchange.new_residuals
            for part, sent in exchange.sent.values():
                here = slice(part.start - part.group.start, part.stop - part.group.start)
                pending[peer][part.group.name][here] -= taken(exchange.results, part, sent)
    accounted, at = reference(plan, pending, now), {part.start: part for part in played.empty().parts}
    for peer, each in residuals.items():
        for key, dropped in each.items():
            part, share = at[key if key >= 0 else ~key], 1.0
            if key < 0:
                tokens = [weight(m, part.group) for m in plan.members]
                share = sum(tokens[i] for i in part.in_cell(played.exchanges[peer].me)) / sum(tokens)
            accounted[part.start : part.stop] += share * dropped
    return trained, accounted


def reference(plan: Plan, updates: Mapping[str, Updates], base: np.ndarray) -> np.ndarray:
    """The new base in float64: each group moves by the weighted mean of its contributors' updates."""
    new = base.astype(np.float64)  # a copy
    for group in LAYOUT.groups:
        weights = {m.peer: weight(m, group) for m in plan.members if group.name in updates[m.peer] and weight(m, group) > 0}
        for peer, own in weights.items():
            new[group.start : group.stop] += updates[peer][group.name].astype(np.float64) * own / sum(weights.values())
    return new
