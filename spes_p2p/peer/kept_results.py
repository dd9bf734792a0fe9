"""Results of the last rounds, by plan: kept for peers that replay the rounds, completed from peers that have them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from hashlib import sha256

from spes_p2p.content.fetcher import Fetcher, Tiers
from spes_p2p.content.pieces import Body, Content, Piece, from_hex, single
from spes_p2p.content.transfer import BUSY_RETRY_S, ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.content import ContentKind
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, Proposal
from spes_p2p.model.layout import Layout
from spes_p2p.net.interfaces import World
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.commit import misfit
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import DerivePlan, Plan
from spes_p2p.rounds.result_file import ResultFile
from spes_p2p.rounds.results import (
    BODIES_OF,
    MAX_KEPT_ROUNDS,
    RESULTS_OF,
    Results,
    bodies_name,
    load_results,
    results_name,
    round_of,
    save_results,
)

logger = logging.getLogger(__name__)

KINDS: tuple[ContentKind, ...] = ("plan", "manifests", "parts")
MAX_CONCURRENT_UPLOADS = 8
"""Bounds the peers that replay rounds from this one at the same time."""
ENOUGH_BYTES = 2**17
"""Who has given this much of proposals in a round sends each further peer elsewhere once. All members have the same proposals,
and of a hundred that join a large swarm at once, some draw the same member."""


class KeptResults:
    """Staged or fetched results, spooled to disk as they arrive."""

    def __init__(self, world: World, derive: DerivePlan, layout: Layout, codecs: GroupCodecs):
        self.by_plan: dict[str, Results] = {}
        self.evidence: dict[str, tuple[bytes, ...]] = {}
        """Evidence of commits that this peer proposed or voted for, by plan: the proposal, then the manifest of each root."""
        self._given_bytes, self._sent_elsewhere = 0, set[str]()
        """Of proposals, since the last round was applied, and the peers that were refused one."""
        self._store, self._run, self._derive = world.store, world.run_blocking, derive
        self._layout, self._codecs = layout, codecs

    def load(self) -> None:
        """Load the results that were staged before a restart; damaged ones, and those that no plan here has, are skipped."""
        for name in self._store.names(RESULTS_OF):
            try:
                results = load_results(self._store, name, self._derive, self._layout, self._codecs)
            except (ValueError, Refused) as error:
                logger.warning("%s is left out: %s", name, error)
                continue
            if results is not None:
                self.by_plan[results.plan.id] = results

    async def serve(self, server: ContentServer) -> None:
        """Answer requests from now on."""
        await server.serve("plan", self._plan, MAX_CONCURRENT_UPLOADS)
        await server.serve("manifests", self._manifest, MAX_CONCURRENT_UPLOADS)
        await server.serve("parts", self._part, MAX_CONCURRENT_UPLOADS)

    def send_elsewhere(self, peer: str) -> None:
        """Raise Refused (busy), once to each peer, when this one has given enough proposals in this round."""
        if self._given_bytes >= ENOUGH_BYTES and peer not in self._sent_elsewhere:
            self._sent_elsewhere.add(peer)
            raise Refused(Code.BUSY, "others got the proposal here, and all members have it", retry_s=BUSY_RETRY_S)

    def begin(self, plan: Plan, lost: tuple[tuple[int, ...], ...] = ()) -> Results:
        """Begin to keep the results of a plan. Raises WireError when `lost` names other than members of the plan."""
        results = Results.empty(plan, self._layout, self._codecs, lost=lost)
        if results.parts:
            results.file = ResultFile(self._store.draft(bodies_name(results_name(plan))), results.parts)
        self.by_plan[plan.id] = results
        return results

    async def stage(self, results: Results) -> None:
        """Make results durable before they are reported as staged."""
        await self._run(save_results, self._store, results)

    async def stage_fetched(self, results: Results) -> None:
        """Make results durable of which some were fetched after the exchange: a restart computes the base again from them."""
        if results.file is not None and not results.file.is_durable:
            await self.stage(results)

    def forget(self, base_round: int, kept_rounds: int, durable_round: int, pinned_round: int | None) -> None:
        """Delete results before the last `kept_rounds`, but none after `durable_round`, that of the base on disk.

        `pinned_round`: round of the oldest base that a peer is downloading.
        """
        self._given_bytes, self._sent_elsewhere = 0, set()
        oldest = min(base_round - kept_rounds, durable_round)
        if pinned_round is not None:
            oldest = min(oldest, max(pinned_round, base_round - MAX_KEPT_ROUNDS))
        for plan_id in [plan_id for plan_id, results in self.by_plan.items() if results.plan.round <= oldest]:
            del self.by_plan[plan_id]
        for name in (*self._store.names(RESULTS_OF), *self._store.names(BODIES_OF)):
            if round_of(name) <= oldest:
                self._store.delete(name)

    async def complete(self, commit: Commit, fetcher: Fetcher, peers: Iterable[str]) -> Results | None:
        """Return the commit's results with every committed part, fetching missing ones from these peers.

        None when a part cannot be had. Raises Refused for a commit that does not follow from its plan.
        """
        peers = list(peers)
        donors = [fetcher.peers(peers)]
        with contextlib.suppress(PeerUnreachable, WireError):
            results = await self.described(commit, fetcher, peers)
            results.discard_unverified()
            await self._fetch_parts(commit, results, fetcher, donors)
            if all(results.verified(part) for part in results.committed(commit)):
                return results
        return None

    async def described(self, commit: Commit, fetcher: Fetcher, peers: Iterable[str]) -> Results:
        """Return the commit's results with its manifests, perhaps not all parts.

        Raises PeerUnreachable, WireError, Refused.
        """
        donors = [fetcher.peers(peers)]
        results = await self._of(commit, fetcher, donors)
        await self._fetch_manifests(commit, results, fetcher, donors)
        return results

    async def result(self, results: Results, part: Part, fetcher: Fetcher, peers: Iterable[str]) -> Body:
        """Return the encoded result of a part that the manifests name. Raises PeerUnreachable."""
        if results.verified(part):
            return results.encoded[part.index]
        content = Content("parts", results.plan.id, lambda index: Piece(results.digest_of(part) or b"", part.encoded_bytes))
        found: list[Body] = []

        async def keep(index: int, body: Body) -> None:
            found.append(body)

        if await fetcher.fetch(content, [part.index], [fetcher.peers(peers)], keep):
            raise PeerUnreachable(f"nobody has the result of part {part.index}")
        return found[0]

    async def _of(self, commit: Commit, fetcher: Fetcher, donors: Tiers) -> Results:
        """Return what is kept of the commit's results; fetches the proposal if needed.

        Raises PeerUnreachable, WireError, Refused.
        """
        results = self.by_plan.get(commit.plan)
        if results is None:
            plan = self._derive(await unpack_beside(Proposal, await self._fetch_proposal(commit, fetcher, donors)))
            _require_fit(commit, plan)
            return self.begin(plan, commit.lost)
        _require_fit(commit, results.plan)
        results = self.by_plan[commit.plan] = results.with_revisions(commit.lost)
        return results

    async def _fetch_proposal(self, commit: Commit, fetcher: Fetcher, donors: Tiers) -> bytes:
        content = single("plan", commit.plan, from_hex(commit.plan), MAX_FRAME_BYTES)
        return bytes(await fetcher.fetch_single(content, donors))

    async def collect_evidence(self, commit: Commit, fetcher: Fetcher, peers: Iterable[str]) -> tuple[bytes, ...]:
        """Return the proposal of the commit's plan, then the manifest of each root; fetches what is missing here.

        Raises PeerUnreachable, WireError.
        """
        donors, digests = [fetcher.peers(peers)], [from_hex(commit.plan), *commit.roots]
        known = [self._evidence_piece(commit.plan, i) for i in range(len(digests))]
        found = [k if k is not None and sha256(k).digest() == d else b"" for k, d in zip(known, digests, strict=True)]
        if not found[0]:
            found[0] = await self._fetch_proposal(commit, fetcher, donors)

        async def keep(place: int, body: Body) -> None:
            found[1 + place] = bytes(body)

        missing = [place for place, root in enumerate(commit.roots) if root and not found[1 + place]]
        if await fetcher.fetch(_manifests_of(commit), missing, donors, keep):
            raise PeerUnreachable("no peer has the manifests")
        return tuple(found)

    def proposal(self, plan: str) -> bytes | None:
        """Return the bytes of a plan's proposal, where it is kept here."""
        return self._evidence_piece(plan, 0)

    def _evidence_piece(self, plan: str, index: int) -> bytes | None:
        """Return the proposal of a plan (index 0), or the manifest of the place before the index."""
        if plan in self.evidence:
            return self.evidence[plan][index] or None if index < len(self.evidence[plan]) else None
        if plan not in self.by_plan:
            return None
        results = self.by_plan[plan]
        if index == 0:
            return pack(results.plan.proposal)
        manifest = results.manifests.get(divmod(index - 1, len(results.plan.members)))
        return None if manifest is None else pack(manifest)

    async def _fetch_manifests(self, commit: Commit, results: Results, fetcher: Fetcher, donors: Tiers) -> None:
        """Fetch the manifests that the commit names. Raises PeerUnreachable when no peer has them."""
        places = enumerate(zip(results.roots(), commit.roots, strict=True))
        missing = [place for place, (kept, root) in places if root and kept != root]

        async def keep(place: int, body: Body) -> None:
            results.add_manifest(await unpack_beside(Manifest, bytes(body)))

        if await fetcher.fetch(_manifests_of(commit), missing, donors, keep):
            raise PeerUnreachable("no peer has the manifests")

    async def _fetch_parts(self, commit: Commit, results: Results, fetcher: Fetcher, donors: Tiers) -> None:
        def piece(index: int) -> Piece:
            part = results.parts[index]
            return Piece(results.digest_of(part) or b"", part.encoded_bytes)

        async def keep(index: int, body: Body) -> None:
            results.put(index, body)

        missing = [part.index for part in results.committed(commit) if part.index not in results.encoded]
        await fetcher.fetch(Content("parts", commit.plan, piece), missing, donors, keep)

    async def _plan(self, plan: str, index: int) -> Body | None:
        proposal = self.proposal(plan) if index == 0 else None
        self._given_bytes += len(proposal or b"")
        return proposal

    async def _manifest(self, plan: str, place: int) -> Body | None:
        return self._evidence_piece(plan, 1 + place)

    async def _part(self, plan: str, index: int) -> Body | None:
        results = self._find(plan)
        if not 0 <= index < len(results.parts) or not results.verified(results.parts[index]):
            return None
        return results.encoded[index]

    def _find(self, plan: str) -> Results:
        if plan not in self.by_plan:
            raise Refused(Code.NOT_HERE, "no results of that plan here")
        return self.by_plan[plan]


def _manifests_of(commit: Commit) -> Content:
    return Content("manifests", commit.plan, lambda place: Piece(commit.roots[place], MAX_FRAME_BYTES))


def _require_fit(commit: Commit, plan: Plan) -> None:
    """Raise Refused for a commit that contradicts its plan, whoever signed it."""
    wrong = misfit(commit, plan)
    if wrong:
        raise Refused(Code.NOT_PROVEN, f"it contradicts its plan: {wrong}")
