"""What a round produced, as every member stages it: the plan, the reducers' manifests, the encoded result of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Manifest, Plan
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import PART_BYTES, Part, from_mask, mask_bytes, moved_parts, part_table
from spes_p2p.rounds.spool import Spool, places_of
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import frame_record, read_frame

ABSENT = bytes(32)
"""Digest of a part that got no contribution."""
RESULTS_OF = "results-"
BODIES_OF = "bodies-of-"

KEPT_ROUNDS = 4
"""Rounds whose results a peer keeps for those that missed them."""
MAX_KEPT_ROUNDS = 16
"""The same while somebody downloads an older base, and will replay the rounds after it."""


class Results:
    """One plan's results at one member: complete or not, verified against the manifests that are there.

    When reducers are lost, `revise` moves their parts to backups. Each revision has a part table and manifests of its own; what
    counts of a part is the last table that has it.
    """

    def __init__(self, plan: Plan, parts: tuple[Part, ...]):
        self.plan = plan
        self.parts = parts
        """Every part, as the last revision says."""
        self.lost: tuple[tuple[int, ...], ...] = ()
        """Members lost before each revision."""
        self.encoded: dict[int, bytes | memoryview] = {}
        """By part index."""
        self.spool: Spool | None = None
        """Where what is put here is kept; None: in memory."""
        self.on_put: Callable[[int], None] = lambda index: None
        """Told of each result that is put here."""
        self.digests: dict[int, bytes] = {}
        """Of each result that is here, by part index."""
        self.manifests: dict[tuple[int, int], Manifest] = {}
        """By revision and reducer."""
        self._tables: list[dict[int, list[Part]]] = [_by_reducer(parts)]
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
        """Nothing received yet. Raises WireError when `lost` names no members of the plan."""
        results = cls(plan, part_table(layout, plan.members, codecs, part_bytes))
        for newly_lost in lost:
            results.revise(newly_lost)
        return results

    @property
    def revision(self) -> int:
        """Number of the last revision."""
        return len(self.lost)

    def revise(self, newly_lost: tuple[int, ...]) -> None:
        """Members are lost: move their parts. Raises WireError when they are no members, or lost already."""
        before = {i for lost in self.lost for i in lost}
        if not newly_lost or before & set(newly_lost) or not all(0 <= i < len(self.plan.members) for i in newly_lost):
            raise WireError("a revision that loses nobody, a stranger, or somebody twice")
        self.lost = (*self.lost, newly_lost)
        moved = moved_parts(self.parts, self.plan.members, newly_lost, before | set(newly_lost), self.revision)
        self.parts = tuple(moved.get(part.index, part) for part in self.parts)
        self._tables.append(_by_reducer(tuple(moved.values())))
        self._places |= _places(self._tables[-1])
        for index in moved:
            self.drop(index)

    def put(self, index: int, encoded: bytes | memoryview) -> None:
        """Take a part's result."""
        self.encoded[index] = encoded if self.spool is None else self.spool.keep(index, encoded)
        self.digests[index] = content_digest(encoded)
        self.on_put(index)

    def drop(self, index: int) -> None:
        """Forget a part's result, if it is here."""
        self.encoded.pop(index, None)
        self.digests.pop(index, None)

    def reduced_by(self, reducer: int, revision: int = 0) -> list[Part]:
        """The parts that one revision's table gives to a reducer, in order."""
        return self._tables[revision].get(reducer, [])

    def add_manifest(self, manifest: Manifest) -> None:
        """Take a manifest of this plan. Raises WireError when it says what no reducer of this plan could."""
        self.check_manifest(manifest)
        self.manifests[manifest.revision, manifest.reducer] = manifest

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises WireError when a manifest says what no reducer of this plan could."""
        known = 0 <= manifest.revision <= self.revision
        own = self.reduced_by(manifest.reducer, manifest.revision) if known else []
        width = mask_bytes(len(self.plan.members))
        if manifest.plan != self.plan.id or len(manifest.digests) != 32 * len(own) or len(manifest.masks) != width * len(own):
            raise WireError("the manifest does not fit the plan")
        for place, part in enumerate(own):
            included = from_mask(manifest.masks[width * place : width * (place + 1)])
            absent = manifest.digests[32 * place : 32 * (place + 1)] == ABSENT
            if not set(included) <= set(part.contributors) or absent != (not included):
                raise WireError(f"part {part.index} cannot be made of what the manifest says")

    def roots(self) -> tuple[bytes, ...]:
        """Roots of the manifests that are here, `[revisions][members]`; empty bytes for the others."""
        members, revisions = range(len(self.plan.members)), range(self.revision + 1)
        found = (self.manifests.get((revision, reducer)) for revision in revisions for reducer in members)
        return tuple(manifest.root if manifest is not None else b"" for manifest in found)

    def root_place(self, part: Part) -> int:
        """Where in such roots the part's manifest stands."""
        return part.revision * len(self.plan.members) + part.reducer

    def digest_of(self, part: Part) -> bytes | None:
        """Digest of the part's result as its reducer's manifest says; None without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        place = self._places[part.revision, part.index]
        return None if manifest is None else manifest.digests[32 * place : 32 * place + 32]

    def contributors(self, part: Part) -> tuple[int, ...]:
        """Members whose update is in the part's result; empty without the manifest."""
        manifest = self.manifests.get((part.revision, part.reducer))
        if manifest is None:
            return ()
        width, place = mask_bytes(len(self.plan.members)), self._places[part.revision, part.index]
        return from_mask(manifest.masks[width * place : width * place + width])

    def verified(self, part: Part) -> bool:
        """Is the part's result here, and is it the one of the manifest?"""
        digest = self.digests.get(part.index)
        return digest is not None and digest == self.digest_of(part)

    def discard_unverified(self, revision: int | None = None) -> None:
        """Forget results (of one revision's parts) that do not match their manifest or have none."""
        for part in self.parts:
            if revision in (None, part.revision) and not self.verified(part):
                self.drop(part.index)

    def committed(self, commit: Commit) -> list[Part]:
        """The parts that this commit says everybody applies. Needs the commit's revisions and the manifests of its roots."""
        dropped = set(commit.dropped)
        return [
            part for part in self.parts
            if part.index not in dropped
            and commit.roots[self.root_place(part)]
            and self.digest_of(part) not in (None, ABSENT)
        ]

    def emptied(self) -> Results:
        """The same plan and revisions, nothing received."""
        other = Results(self.plan, self._first_parts())
        for newly_lost in self.lost:
            other.revise(newly_lost)
        return other

    def under(self, lost: tuple[tuple[int, ...], ...]) -> Results:
        """The same plan with these revisions; what is here and still fits goes along."""
        if lost == self.lost:
            return self
        other = Results(self.plan, self._first_parts())
        for newly_lost in lost:
            other.revise(newly_lost)
        for (revision, _), manifest in self.manifests.items():
            if lost[:revision] == self.lost[:revision] and revision <= len(lost):
                other.add_manifest(manifest)
        other.encoded, other.digests, other.spool = dict(self.encoded), dict(self.digests), self.spool
        other.discard_unverified()
        return other

    def _first_parts(self) -> tuple[Part, ...]:
        return tuple(sorted((part for own in self._tables[0].values() for part in own), key=lambda part: part.index))


def _by_reducer(parts: tuple[Part, ...]) -> dict[int, list[Part]]:
    table: dict[int, list[Part]] = {}
    for part in parts:
        table.setdefault(part.reducer, []).append(part)
    return table


def _places(table: dict[int, list[Part]]) -> dict[tuple[int, int], int]:
    """Where in its reducer's manifest each part stands, by revision and part index."""
    return {(part.revision, part.index): place for own in table.values() for place, part in enumerate(own)}


@dataclass(frozen=True)
class _Saved:
    """Header of a results blob."""

    plan: bytes
    lost: tuple[tuple[int, ...], ...]
    manifests: tuple[bytes, ...]
    here: bytes
    """One byte a part: 1 if its result is in the blob of bodies."""


def save_results(store: Store, results: Results) -> None:
    """Make the results durable under their round and plan: bodies first, then what they are."""
    here = bytes(part.index in results.encoded for part in results.parts)
    saved = _Saved(pack(results.plan), results.lost, tuple(pack(m) for m in results.manifests.values()), here)
    if results.spool is not None:
        results.spool.publish()
    store.write(results_name(results.plan), [frame_record(pack(saved))])


def load_results(
    store: Store, name: str, layout: Layout, codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> Results | None:
    """Results that were staged under this name (`results_name`); None when they are gone. Raises WireError when damaged.

    A part that does not match its manifest is not taken: it was damaged on the disk.
    """
    header, bodies = store.read(name), store.read(bodies_name(name))
    if header is None:
        return None
    try:
        saved = unpack(_Saved, read_frame(header)[0])
    except ValueError as error:
        raise WireError(f"{name}: {error}") from None
    results = Results.empty(unpack(Plan, saved.plan), layout, codecs, part_bytes, saved.lost)
    for manifest in saved.manifests:
        results.add_manifest(unpack(Manifest, manifest))
    if len(saved.here) != len(results.parts):
        raise WireError("results of another part table")
    for part, start, is_here in zip(results.parts, places_of(results.parts), saved.here, strict=False):
        if is_here and bodies is not None:
            results.put(part.index, bodies[start : start + part.encoded_bytes])
    results.discard_unverified()
    return results


def results_name(plan: Plan) -> str:
    """Name of the blob: each attempt at a round has its own, since an earlier one may turn out to be the decided one."""
    return f"{RESULTS_OF}{plan.round}-{plan.id[:16]}"


def bodies_name(name: str) -> str:
    """Name of the blob that holds the bodies of the results of that name."""
    return BODIES_OF + name


def round_of(name: str) -> int:
    """The round of a blob of results or of their bodies, by its name."""
    return int(name.removeprefix(BODIES_OF).removeprefix(RESULTS_OF).split("-")[0])
