"""The base and its file: values, the commit that they belong to, and that round's proposal (its plan has this phase's
assignments).

The values come first in the file, aligned for memory mapping; the header and its length follow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from spes_p2p.errors import Damaged, Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.rounds import Proposal
from spes_p2p.rounds.digest import PIECE_ELEMENTS, piece_digest, piece_digests, root_digest
from spes_p2p.rounds.planned import Assignment, DerivePlan, Plan
from spes_p2p.storage.interfaces import Draft, Store
from spes_p2p.storage.store import frame_record, read_frame
from spes_p2p.storage.threads import in_threads

logger = logging.getLogger(__name__)

BASE = "base"
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Base:
    """The state after one commit, equal on all members bit for bit."""

    commit: str
    round: int
    values: np.ndarray
    """float32 `[base_size]` (outer.py), read-only: weights, then outer momentum. Memory-mapped, or `in_memory`."""
    digest: str
    plan: Plan | None
    """The plan of that round; None for base 0 and for a downloaded base."""
    pieces: bytes = b""
    """Digest of each piece (digest.py), concatenated, where they are known."""

    def assignment(self, peer: str) -> Assignment | None:
        """Return the peer's assignment in the phase after this base, if any."""
        index = self.plan.index(peer) if self.plan is not None else None
        return None if self.plan is None or index is None else self.plan.assignments[index]

    def known_of(self, peer: str) -> bytes:
        """Return the dictionary of a peer's next announcement (`messages/compact.py`); empty if the plan lacks the peer."""
        index = self.plan.index(peer) if self.plan is not None else None
        if self.plan is None or index is None:
            return b""
        return pack(self.plan.proposal.announcements[index]) + (self.commit + self.digest).encode()


@dataclass(frozen=True)
class BuiltBase:
    """A base that is computed and usable, but not yet durable."""

    base: Base
    draft: Draft | None
    """Holds it on disk; None for a base in memory."""
    bounded: tuple[tuple[str, float], ...] = ()
    """By name, the groups whose step was scaled down, and the factor."""


@dataclass(frozen=True)
class _Header:
    commit: str
    round: int
    elements: int
    digest: str
    proposal: Proposal | None


def write_base(
    store: Store, commit: str, round_number: int, plan: Plan | None, pieces: Iterable[np.ndarray], name: str = BASE,
    threads: int = 1,
) -> BuiltBase:
    """Write a base to a draft. `pieces`: float32 `[PIECE_ELEMENTS]`, the last one shorter.

    The stored base stays until the draft is published.
    """
    draft, elements = store.draft(name), 0

    def write(numbered: tuple[int, np.ndarray]) -> tuple[bytes, int]:
        number, piece = numbered
        return write_piece(draft, number, piece), piece.size

    digests: list[bytes] = []
    for digest, size in in_threads(write, enumerate(pieces), threads):
        digests.append(digest)
        elements += size
    return close_base(draft, commit, round_number, plan, elements, b"".join(digests))


def write_piece(draft: Draft, number: int, piece: np.ndarray) -> bytes:
    """Write one piece of a base to its draft; return its digest."""
    draft.write(4 * PIECE_ELEMENTS * number, np.ascontiguousarray(piece, "<f4").data)
    return piece_digest(piece)


def close_base(
    draft: Draft, commit: str, round_number: int, plan: Plan | None, elements: int, digests: bytes
) -> BuiltBase:
    """Map a base's pieces, and write its header after them."""
    digest = root_digest(digests)
    values = np.frombuffer(draft.view(), "<f4", elements)
    header = frame_record(pack(_Header(commit, round_number, elements, digest, plan.proposal if plan else None)))
    draft.write(4 * elements, header + len(header).to_bytes(LENGTH_BYTES, "little"))
    return BuiltBase(Base(commit, round_number, values, digest, plan, digests), draft)


def close_in_memory(values: np.ndarray, commit: str, round_number: int, plan: Plan | None, digests: bytes) -> BuiltBase:
    """Return a base whose pieces are all in this array, float32, which must not change any more."""
    values.flags.writeable = False
    return BuiltBase(Base(commit, round_number, values, root_digest(digests), plan, digests), None)


def in_memory(base: Base) -> Base:
    """Return a copy of the base with values in memory instead of a mapped file."""
    values = np.array(base.values)
    values.flags.writeable = False
    return replace(base, values=values)


def pieces_of(values: np.ndarray) -> Iterable[np.ndarray]:
    """Return views of a base's pieces."""
    return (values[a : a + PIECE_ELEMENTS] for a in range(0, values.size, PIECE_ELEMENTS))


def save_base(store: Store, base: Base, name: str = BASE, threads: int = 1) -> None:
    """Replace the stored base durably."""
    draft = write_base(store, base.commit, base.round, base.plan, pieces_of(base.values), name, threads).draft
    assert draft is not None
    draft.publish()


def load_base(
    store: Store, elements: int, where: str, name: str = BASE, derive: DerivePlan | None = None, threads: int = 1
) -> Base | None:
    """Return the stored base after checking its digest, or None. Raises Damaged, also when it is another model's.

    `where` names the run-dir in the error. `derive`: derives the plan; the base has none where no plan follows.
    """
    blob = store.read(name)
    if blob is None:
        return None
    advice = "start its peer again, which downloads the base anew" if name == BASE else "delete this file"
    damaged = Damaged(f"{where}/{name}: cut short or damaged; {advice}")
    try:
        end = len(blob) - LENGTH_BYTES
        start = end - int.from_bytes(blob[end:], "little")
        if not 0 <= start <= end:
            raise damaged
        header = unpack(_Header, read_frame(blob[start:end])[0])
        if 4 * header.elements != start:
            raise damaged
        values = np.frombuffer(blob, "<f4", header.elements)
    except ValueError:
        raise damaged from None
    if header.elements != elements:
        raise Damaged(f"{where}/{name}: holds {header.elements} values, this campaign's model has {elements}; {advice}")
    digests = piece_digests(values, threads)
    if root_digest(digests) != header.digest:
        raise damaged
    plan = None
    if derive is not None and header.proposal is not None:
        try:
            plan = derive(header.proposal)
        except Refused as refused:
            logger.warning(
                "%s/%s: without the assignments of round %d (%s); nothing is to be done: the next round assigns new work",
                where, name, header.round, refused,
            )
    return Base(header.commit, header.round, values, header.digest, plan, digests)


def stored_round(store: Store) -> int | None:
    """Return the round of the stored base as its header says, unchecked; None without one."""
    blob = store.read(BASE)
    if blob is None:
        return None
    end = len(blob) - LENGTH_BYTES
    try:
        return unpack(_Header, read_frame(blob[max(0, end - int.from_bytes(blob[end:], "little")) : end])[0]).round
    except ValueError:
        return None
