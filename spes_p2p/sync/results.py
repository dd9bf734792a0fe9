"""What a round produced, as every member stages it: the plan, the reducers' manifests, the encoded result of each part."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.interfaces import Store
from spes_p2p.swarm.records import Head, Manifest, Plan
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.codecs import GroupCodecs
from spes_p2p.sync.parts import Part, from_mask, mask_bytes, part_table

ABSENT = bytes(32)
"""Digest of a part that got no contribution."""


@dataclass
class Results:
    """One plan's results at one member: complete or not, verified against the manifests that are there."""

    plan: Plan
    parts: tuple[Part, ...]
    encoded: dict[int, bytes] = field(default_factory=dict)
    """By part index."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """sha256 of each result that is here, by part index."""
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """By reducer."""

    @classmethod
    def empty(cls, plan: Plan, layout: Layout, codecs: GroupCodecs, part_bytes: int) -> Results:
        """Nothing received yet."""
        return cls(plan, part_table(layout, plan.members, codecs, part_bytes))

    def put(self, index: int, encoded: bytes) -> None:
        """Take a part's result."""
        self.encoded[index] = encoded
        self.digests[index] = hashlib.sha256(encoded).digest()

    def reduced_by(self, reducer: int) -> list[Part]:
        """The parts of one reducer, in order."""
        return [part for part in self.parts if part.reducer == reducer]

    def add_manifest(self, manifest: Manifest) -> None:
        """Take a manifest of this plan. Raises WireError when it says what no reducer of this plan could."""
        own = self.reduced_by(manifest.reducer)
        width = mask_bytes(len(self.plan.members))
        if manifest.plan != self.plan.id or len(manifest.digests) != 32 * len(own) or len(manifest.masks) != width * len(own):
            raise WireError("the manifest does not fit the plan")
        for place, part in enumerate(own):
            included = from_mask(manifest.masks[width * place : width * (place + 1)])
            absent = manifest.digests[32 * place : 32 * (place + 1)] == ABSENT
            if not set(included) <= set(part.contributors) or absent != (not included):
                raise WireError(f"part {part.index} cannot be made of what the manifest says")
        self.manifests[manifest.reducer] = manifest

    def digest_of(self, part: Part) -> bytes | None:
        """sha256 of the part's result as its reducer's manifest says; None without the manifest."""
        manifest = self.manifests.get(part.reducer)
        place = self._places[part.index]
        return None if manifest is None else manifest.digests[32 * place : 32 * place + 32]

    def contributors(self, part: Part) -> tuple[int, ...]:
        """Members whose update is in the part's result; empty without the manifest."""
        manifest = self.manifests.get(part.reducer)
        if manifest is None:
            return ()
        width, place = mask_bytes(len(self.plan.members)), self._places[part.index]
        return from_mask(manifest.masks[width * place : width * place + width])

    def verified(self, part: Part) -> bool:
        """Is the part's result here, and is it the one of the manifest?"""
        digest = self.digests.get(part.index)
        return digest is not None and digest == self.digest_of(part)

    def discard_unverified(self) -> None:
        """Forget results that do not match their manifest or have none."""
        for part in self.parts:
            if part.index in self.encoded and not self.verified(part):
                del self.encoded[part.index], self.digests[part.index]

    def committed(self, head: Head) -> list[Part]:
        """The parts that this head says everybody applies. Needs the manifests whose roots the head names."""
        dropped = set(head.dropped)
        return [
            part for part in self.parts
            if part.index not in dropped and head.roots[part.reducer] and self.digest_of(part) not in (None, ABSENT)
        ]

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where in its reducer's manifest each part stands."""
        counts: Counter[int] = Counter()
        places = {}
        for part in self.parts:
            places[part.index] = counts[part.reducer]
            counts[part.reducer] += 1
        return places


@dataclass(frozen=True)
class _Saved:
    """Header of a results blob."""

    plan: bytes
    manifests: tuple[bytes, ...]
    lengths: tuple[int, ...]
    """Bytes of each part's result, -1 where it is missing."""


def save_results(store: Store, results: Results) -> None:
    """Make the results durable under their round and plan."""
    lengths = tuple(len(results.encoded.get(part.index, b"")) or -1 for part in results.parts)
    header = pack(_Saved(pack(results.plan), tuple(pack(m) for m in results.manifests.values()), lengths))
    bodies = [results.encoded[part.index] for part in results.parts if part.index in results.encoded]
    store.write(results_name(results.plan.round), [len(header).to_bytes(8, "little"), header, *bodies])


def load_results(store: Store, round_number: int, layout: Layout, codecs: GroupCodecs, part_bytes: int) -> Results | None:
    """The results last staged for a round; None when there are none."""
    blob = store.read(results_name(round_number))
    if blob is None:
        return None
    size = int.from_bytes(blob[:8], "little")
    saved = unpack(_Saved, blob[8 : 8 + size])
    results = Results.empty(unpack(Plan, saved.plan), layout, codecs, part_bytes)
    for manifest in saved.manifests:
        results.add_manifest(unpack(Manifest, manifest))
    offset = 8 + size
    for part, length in zip(results.parts, saved.lengths, strict=True):
        if length >= 0:
            results.put(part.index, bytes(blob[offset : offset + length]))
            offset += length
    return results


def results_name(round_number: int) -> str:
    """Name of the blob; an attempt that fails is overwritten by the next one of the same round."""
    return f"results-{round_number}"
