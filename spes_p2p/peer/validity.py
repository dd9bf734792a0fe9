"""Which plans and commits this peer takes: those that it derives itself from what the members signed.

A coordinator sends inputs: a proposal in place of a plan, reports beside a commit. Every peer computes plan and commit with the
same pure functions (`rounds/proposal.py`, `rounds/commit.py`), so a coordinator can choose among inputs, not make up results.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from spes_p2p.consensus.acceptor import VoteState
from spes_p2p.consensus.admission import Service
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.output import Identity
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Commit, Signed
from spes_p2p.messages.methods import PING
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Evidence, Manifest, Ping, Proposal
from spes_p2p.model.layout import Layout
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.proofs import Proofs
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.commit import derive_commit, misfit
from spes_p2p.rounds.merge import are_nearest
from spes_p2p.rounds.plan import Rules
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.proposal import derive_plan
from spes_p2p.rounds.results import Results


class Validity:
    """Checks proposals and commits of the round after the log's last commit."""

    def __init__(
        self,
        world: World,
        endpoint: RpcEndpoint,
        fetcher: Fetcher,
        log: CommitLog,
        rules: Rules,
        layout: Layout,
        codecs: GroupCodecs,
        base: Callable[[], Base | None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ):
        """`base`: this peer's newest one. `spawn` runs a coroutine in the background."""
        self.kept = KeptResults(world, self.derive, layout, codecs)
        self.proofs = Proofs(world, endpoint, fetcher, log, rules, self.kept, spawn)
        self._world, self._endpoint, self._fetcher, self._log, self._rules = world, endpoint, fetcher, log, rules
        self._layout, self._codecs, self._base = layout, codecs, base
        self._valid: dict[str, tuple[Commit, bytes, tuple[bytes, ...]]] = {}
        """Commits after the log's last one that were derived here, by id: with evidence, and what that names by hash."""

    def derive(self, proposal: Proposal) -> Plan:
        """Return the plan of a round of this log. Raises Refused where none follows from the proposal."""
        return derive_plan(*self._inputs(proposal))

    async def derive_in_worker(self, proposal: Proposal) -> Plan:
        """As `derive`, in a worker thread."""
        plan: Plan = await self._world.run_blocking(derive_plan, *self._inputs(proposal))
        return plan

    async def derive_on_base(self, proposal: Proposal) -> Plan:
        """As `derive_in_worker`, with the proofs against accused peers.

        A peer that holds the base which the round starts from also checks its digest and the donors.
        """
        plan, base = await self.derive_in_worker(proposal), self._base()
        await self.proofs.require(proposal)
        if base is None or base.commit != proposal.parent:
            return plan
        if plan.base_digest != base.digest:
            raise Refused(Code.DIGEST, "the plan starts from another base than this peer's")
        if plan.merge is not None and not await self._world.run_blocking(
            are_nearest, base.values, self._layout, plan.merge.donors
        ):
            raise Refused(Code.NOT_PROVEN, "a proposal with donors that are not the most similar experts")
        return plan

    def _inputs(self, proposal: Proposal) -> tuple[Proposal, Sequence[Commit], Rules, Identity, Mapping[str, Service]]:
        """Return what `derive_plan` needs. Raises Refused for a round far ahead."""
        last = proposal.round - 1
        if not -1 <= last <= self._log.round:
            raise Refused(Code.NOT_PROVEN, f"a proposal for round {proposal.round}, which does not follow this log")
        return proposal, self._log.recent(last), self._rules, self._world.identity, self._log.services(last)

    def is_valid(self, commit: Commit) -> bool:
        """Return whether this commit was derived here."""
        return commit.id in self._valid

    def evidence_of(self, commit: Commit) -> bytes:
        """Return the evidence of a commit that was derived here; empty for one without a plan."""
        if commit.plan and commit.id not in self._valid:
            raise Refused(Code.CLOSED, "this round is decided already")
        return self._valid[commit.id][1] if commit.plan else b""

    def attachments(self, commit: Commit) -> tuple[bytes, ...]:
        """Return what the commit's evidence names by hash."""
        return self._valid[commit.id][2] if commit.plan else ()

    def recall(self, votes: VoteState) -> None:
        """Take up the evidence that is durable with this peer's own vote."""
        if votes.accepted is not None and votes.accepted.plan:
            self._hold(votes.accepted, votes.evidence, votes.attachments)

    def hold(self, commit: Commit, results: Results, reports: Sequence[Signed]) -> None:
        """Keep the evidence of a commit that this peer made as the coordinator. `results`: with the reducers' manifests."""
        by_root = {manifest.root: pack(manifest) for manifest in results.manifests.values()}
        pieces = (pack(results.plan.proposal), *(by_root.get(root, b"") for root in commit.roots))
        self._hold(commit, pack(Evidence(tuple(reports))), pieces)

    async def require(self, commit: Commit, evidence: bytes, peer: str) -> None:
        """Check a commit after the log's last one by evidence of which `peer` has all. Raises Refused."""
        parent = self._log.last
        if not commit.plan or self.is_valid(commit):
            return
        if commit.parent != parent.id:
            raise Refused(Code.CANNOT_VOTE, f"this peer's last commit is round {parent.round}")
        try:
            pieces = await self.kept.collect_evidence(commit, self._fetcher, [peer])
            plan = await self.derive_on_base(await unpack_beside(Proposal, pieces[0]))
            await self._require_absent(plan.proposal)
            derived = await self._world.run_blocking(self._derive_commit, parent, plan, commit, evidence, pieces)
        except (WireError, PeerUnreachable) as error:
            raise Refused(Code.NOT_PROVEN, f"the evidence of a commit: {error}") from None
        if derived != commit:
            wrong = [f.name for f in dataclasses.fields(Commit) if getattr(commit, f.name) != getattr(derived, f.name)]
            raise Refused(Code.NOT_PROVEN, f"a commit that does not follow from its evidence: {', '.join(wrong)}")
        self._hold(commit, evidence, pieces)

    def require_fit(self, decided: CertifiedCommit) -> None:
        """Refuse a certified commit that contradicts its plan, where the plan is known here. Raises Refused.

        Only liars among a majority of the electors can certify one.
        """
        results = self.kept.by_plan.get(decided.commit.plan)
        wrong = misfit(decided.commit, results.plan) if results is not None else ""
        if wrong:
            raise Refused(Code.NOT_PROVEN, f"the commit of round {decided.commit.round} contradicts its plan ({wrong}); "
                          f"signed by {', '.join(vote.elector for vote in decided.votes)}")

    def _derive_commit(self, parent: Commit, plan: Plan, commit: Commit, evidence: bytes, pieces: Sequence[bytes]) -> Commit:
        known = self.kept.by_plan.get(plan.id)  # has the part table, which takes a second at 9B
        table = known if known is not None else Results.empty(plan, self._layout, self._codecs)
        results = table.emptied(commit.lost)
        for piece in filter(None, pieces[1:]):
            results.add_manifest(unpack(Manifest, piece))
        return derive_commit(parent, results, unpack(Evidence, evidence).reports, self._world.identity)

    async def look_for(self, electors: Sequence[str]) -> None:
        """Ask electors whether they are there. The detector remembers for a while who is silent."""
        await absent_of(self._endpoint, electors)

    async def _require_absent(self, proposal: Proposal) -> None:
        """Raise Refused when an elector that the proposal calls absent is there: a coordinator may not unseat the others."""
        if self._endpoint.peer_id in proposal.absent:
            raise Refused(Code.NOT_PROVEN, "this elector is there and keeps its seat")
        there = set(proposal.absent).difference(await absent_of(self._endpoint, proposal.absent))
        if there:
            raise Refused(Code.NOT_PROVEN, f"{min(there)[-6:]} is there and keeps its seat")

    def _hold(self, commit: Commit, evidence: bytes, pieces: tuple[bytes, ...]) -> None:
        known = {each: value for each, value in self._valid.items() if value[0].parent == commit.parent}
        self._valid = {**known, commit.id: (commit, evidence, pieces)}
        self.kept.evidence = {each.plan: own for each, _, own in self._valid.values()}


async def absent_of(endpoint: RpcEndpoint, electors: Sequence[str]) -> tuple[str, ...]:
    """Return those of these electors that do not answer."""
    answers = await asyncio.gather(*(endpoint.is_there(peer, PING, pack(Ping(-1))) for peer in electors))
    return tuple(peer for peer, answer in zip(electors, answers, strict=True) if answer is None)
