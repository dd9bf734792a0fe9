"""A round's results, as every member stages them: plan, reducers' manifests, and the encoded result of each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Manifest, Proposal
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import PART_BYTES, Part, from_mask, mask_bytes
from spes_p2p.rounds.planned import DerivePlan, Plan
from spes_p2p.rounds.remembered import remembered
from spes_p2p.rounds.result_file import ResultFile, part_offsets
from spes_p2p.rounds.revisions import moved_parts
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import frame_record, read_frame

ABSENT = bytes(32)
"""Digest of a part without contributions, in a manifest."""
RESULTS_OF = "results-"
BODIES_OF = "bodies-of-"

KEPT_ROUNDS = 4
"""Bounds the rounds whose results a peer keeps, for peers that missed them."""
MAX_KEPT_ROUNDS = 16
"""The same while a peer downloads an older base, after which it replays the following rounds."""
REPLAYED_SHARE = 0.25
"""Helpers keep results up to this share of a base's bytes, for joiners that make base 0 themselves and replay all rounds."""


def replayable_rounds(layout: Layout, codecs: GroupCodecs, outer: OuterConfig) -> int:
    """Return the number of rounds whose results a helper keeps: replaying more would take nearly as long as a download."""
    most = REPLAYED_SHARE * 4 * base_size(layout, outer)
    return max(KEPT_ROUNDS, int(most) // codecs.encoded_bytes(layout))


class Results:
    """One plan's results at one member, possibly incomplete. The manifests that are present verify them.

    When reducers are lost, `revise` moves their parts to other reducers. Each revision has its own part table and manifests;
    the last table that contains a part counts.
    """

    def __init__(self, plan: Plan, parts: tuple[Part, ...]):
        self.plan = plan
        self.planned = parts
        """Every part, as of the plan."""
        self.parts = parts
        """Every part, as of the last revision."""
        self.lost: tuple[tuple[int, ...], ...] = ()
        """Members lost before each revision."""
        self.encoded: dict[int, bytes | memoryview] = {}
        """Encoded results by part index."""
        self.file: ResultFile | None = None
        """Holds the results; None: they are in memory."""
        self.on_put: Callable[[int], None] = lambda index: None
        """Called with the index of each new result."""
        self.digests: dict[int, bytes] = {}
        """Digests of the results that are present, by part index."""
        self.manifests: dict[tuple[int, int], Manifest] = {}
        """By revision and reducer."""
        self._tables = [_by_reducer(parts)]
        self._places = _places(self._tables[0])

    @classmethod
    def empty(
        cls,
        plan: Plan,
        layout: Layout,
        codecs: GroupCodecs,
        part_bytes: int = PART_BYTES,
        lost: tuple[tuple[int, ...], ...] = (),
    ) -> Results:
        """Return results without any part. `lost`: of each revision. Raises WireError when it is invalid."""
        results = cls(plan, part_table(layout, plan.members, codecs, part_bytes, plan.is_last))
        for newly_lost in lost:
            results.revise(newly_lost)
        return results

    @property
    def revision(self) -> int:
        """Number of the last revision."""
        return len(self.lost)

    def revise(self, newly_lost: tuple[int, ...]) -> None:
        """Move the parts of lost members. Raises WireError for non-members and for members already lost."""
        before = {i for lost in self.lost for i in lost}
        if not newly_lost or before & set(newly_lost) or not all(0 <= i < len(self.plan.members) for i in newly_lost):
            raise WireError("a revision must name members that are not lost yet")
        self.lost = (*self.lost, newly_lost)
        moved = moved_parts(self.parts, self.plan.members, newly_lost, before | set(newly_lost), self.revision)
        self.parts = tuple(moved.get(part.index, part) for part in self.parts)
        self._tables.append(_by_reducer(tuple(moved.values())))
        self._places = self._places | _places(self._tables[-1])
        for index in moved:
            self.drop(index)

    def put(self, index: int, encoded: bytes | memoryview) -> None:
        """Add a part's result."""
        self.encoded[index] = encoded if self.file is None else self.file.put(index, encoded)
        self.digests[index] = content_digest(encoded)
        self.on_put(index)

    def drop(self, index: int) -> None:
        """Remove a part's result, if present."""
        self.encoded.pop(index, None)
        self.digests.pop(index, None)

    def table(self, revision: int) -> list[Part]:
        """Return the parts of one revision's table, ascending."""
        return sorted((part for own in self._tables[revision].values() for part in own), key=lambda part: part.index)

    def reduced_by(self, reducer: int, revision: int = 0) -> list[Part]:
        """Return the parts of a reducer in one revision's table, ascending."""
        return self._tables[revision].get(reducer, [])

    def add_manifest(self, manifest: Manifest) -> None:
        """Check and add a manifest. Raises WireError as `check_manifest`."""
        self.check_manifest(manifest)
        self.manifests[manifest.revision, manifest.reducer] = manifest

    def check_manifest(self, manifest: Manifest) -> None:
        """Check a manifest. Raises WireError if no reducer of this plan can send it."""
        known = 0 <= manifest.revision <= self.revision
        own = self.reduced_by(manifest.reducer, manifest.revision) if known else []
        width = mask_bytes(len(self.plan.members))
        masks = {len(manifest.masks), len(manifest.clipped)}
        digests = {len(manifest.digests), len(manifest.inputs)}
        if manifest.plan != self.plan.id or digests != {32 * len(own)} or masks != {width * len(own)}:
            raise WireError("the manifest does not fit the plan")
        for place, part in enumerate(own):
            here = slice(width * place, width * (place + 1))
            included, clipped = from_mask(manifest.masks[here]), from_mask(manifest.clipped[here])
            absent = manifest.digests[32 * place : 32 * (place + 1)] == ABSENT
            if not set(clipped) <= set(included) <= set(part.contributors) or absent != (not included):
                raise WireError(f"part {part.index} has impossible contributors in the manifest")

    def roots(self) -> tuple[bytes, ...]:
        """Return the roots of the manifests, `[revisions * members]`; empty bytes for missing ones."""
        members, revisions = range(len(self.plan.members)), range(self.revision + 1)
        found = (self.manifests.get((revision, reducer)) for revision in revisions for reducer in members)
        return tuple(manifest.root if manifest is not None else b"" for manifest in found)

    def reduced_at(self, place: int) -> list[Part]:
        """Return the parts of the manifest at this index in `roots`; empty for a member that reduces none."""
        revision, reducer = divmod(place, len(self.plan.members))
        return self.reduced_by(reducer, revision)

    def root_place(self, part: Part) -> int:
        """Return the index of the part's manifest in `roots`."""
        return part.revision * len(self.plan.members) + part.reducer

    def digest_of(self, part: Part) -> bytes | None:
        """Return the digest of the part's result in its reducer's manifest; None without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        place = self._places[part.revision, part.index]
        return None if manifest is None else manifest.digests[32 * place : 32 * place + 32]

    def inputs_of(self, part: Part) -> bytes:
        """Return the digest of the inputs that the part's reducer names; empty without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        place = self._places[part.revision, part.index]
        return b"" if manifest is None else manifest.inputs[32 * place : 32 * place + 32]

    def contributors(self, part: Part) -> tuple[int, ...]:
        """Return the members whose update is in the part's result; empty without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        return () if manifest is None else self._members_in(manifest.masks, part)

    def clipped(self, part: Part) -> tuple[int, ...]:
        """Return the contributors whose update of the part the reducer clipped; empty without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        return () if manifest is None else self._members_in(manifest.clipped, part)

    def _members_in(self, masks: bytes, part: Part) -> tuple[int, ...]:
        width, place = mask_bytes(len(self.plan.members)), self._places[part.revision, part.index]
        return from_mask(masks[width * place : width * place + width])

    def verified(self, part: Part) -> bool:
        """Return whether the part's result is present and matches the manifest."""
        digest = self.digests.get(part.index)
        return digest is not None and digest == self.digest_of(part)

    def discard_unverified(self, revision: int | None = None) -> None:
        """Remove results (of one revision, or all) that do not match a manifest."""
        for part in self.parts:
            if revision in (None, part.revision) and not self.verified(part):
                self.drop(part.index)

    def committed(self, commit: Commit) -> list[Part]:
        """Return the parts that every member applies. Needs the commit's revisions and the manifests of its roots."""
        dropped = set(commit.dropped)
        return [
            part for part in self.parts
            if part.index not in dropped
            and commit.roots[self.root_place(part)]
            and self.digest_of(part) not in (None, ABSENT)
        ]

    def emptied(self, lost: tuple[tuple[int, ...], ...]) -> Results:
        """Return empty results of the same plan under these revisions. Raises WireError when they are invalid."""
        other = Results(self.plan, self.planned)
        for newly_lost in lost:
            other.revise(newly_lost)
        return other

    def with_revisions(self, lost: tuple[tuple[int, ...], ...]) -> Results:
        """Return results of the same plan under these revisions, with the manifests and results that remain valid."""
        if lost == self.lost:
            return self
        other = self.emptied(lost)
        for (revision, _), manifest in self.manifests.items():
            if lost[:revision] == self.lost[:revision] and revision <= len(lost):
                other.add_manifest(manifest)
        other.encoded, other.digests, other.file = dict(self.encoded), dict(self.digests), self.file
        other.discard_unverified()
        return other


@remembered(4)
def _by_reducer(parts: tuple[Part, ...]) -> Mapping[int, list[Part]]:
    table: dict[int, list[Part]] = {}
    for part in parts:
        table.setdefault(part.reducer, []).append(part)
    return table


@remembered(4)
def _places(table: Mapping[int, list[Part]]) -> dict[tuple[int, int], int]:
    """Return each part's position in its reducer's manifest, by revision and part index."""
    return {(part.revision, part.index): place for own in table.values() for place, part in enumerate(own)}


@dataclass(frozen=True)
class _Saved:
    """Header of a results blob."""

    proposal: bytes
    lost: tuple[tuple[int, ...], ...]
    manifests: tuple[bytes, ...]
    present: bytes
    """One byte a part: 1 if its result is in the result file."""


def save_results(store: Store, results: Results) -> None:
    """Write the results durably: the result file first, then the header that describes it."""
    present = bytes(part.index in results.encoded for part in results.parts)
    manifests = tuple(pack(results.manifests[key]) for key in sorted(results.manifests))
    saved = _Saved(pack(results.plan.proposal), results.lost, manifests, present)
    if results.file is not None:
        results.file.publish()
    store.write(results_name(results.plan), [frame_record(pack(saved))])


def load_results(
    store: Store, name: str, derive: DerivePlan, layout: Layout, codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> Results | None:
    """Load the results with this name (`results_name`), or None. Raises WireError when the header is damaged, and as `derive`.

    Parts that do not match their manifest were damaged on disk and are left out.
    """
    header, bodies = store.read(name), store.read(bodies_name(name))
    if header is None:
        return None
    try:
        saved = unpack(_Saved, read_frame(header)[0])
    except ValueError as error:
        raise WireError(f"{name}: {error}") from None
    results = Results.empty(derive(unpack(Proposal, saved.proposal)), layout, codecs, part_bytes, saved.lost)
    for manifest in saved.manifests:
        results.add_manifest(unpack(Manifest, manifest))
    if len(saved.present) != len(results.parts):
        raise WireError("results of another part table")
    for part, start, is_present in zip(results.parts, part_offsets(results.parts), saved.present, strict=False):
        if is_present and bodies is not None:
            results.put(part.index, bodies[start : start + part.encoded_bytes])
    results.discard_unverified()
    return results


def results_name(plan: Plan) -> str:
    """Return the name of the header's blob. Attempts have separate blobs, since an earlier attempt may be the decided one."""
    return f"{RESULTS_OF}{plan.round}-{plan.id[:16]}"


def bodies_name(name: str) -> str:
    """Return the name of the result file that belongs to a header."""
    return BODIES_OF + name


def round_of(name: str) -> int:
    """Return the round of a header or result file, given its name."""
    return int(name.removeprefix(BODIES_OF).removeprefix(RESULTS_OF).split("-")[0])
