"""Bases as content: serving the newest ones, choosing among offers, and downloading one.

Pieces are requested in the order of the flat state, so the shared weights arrive first. They are kept on disk until the base is
complete, so a restarted joiner resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spes_p2p.content.fetcher import Fetcher, widening
from spes_p2p.content.floats import pack_floats, packed_bytes, unpack_floats
from spes_p2p.content.pieces import BadPiece, Body, Content, from_hex, listed, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import SnapshotInfo, SnapshotRequest
from spes_p2p.messages.methods import SNAPSHOT
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.rounds.digest import PIECE_ELEMENTS, num_pieces, piece_digests, root_digest
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.scratch import Scratch, memory_scratch

logger = logging.getLogger(__name__)

DOWNLOAD = "download-"
SLOT_PIECES = 16
"""Pieces in one file of a partial download: 4 MiB, so that writes are few."""
KEPT_SNAPSHOTS, MAX_SNAPSHOTS = 2, 3
"""Bounds the bases that are served: the newest ones; the same with pinned ones."""
PINNED_S = 60.0
"""A base stays pinned for this long after the last request for one of its pieces."""
MAX_CONCURRENT_UPLOADS = 4
"""Bounds the peers that download a base from this peer at a time."""


@dataclass(frozen=True)
class Offer:
    """A base that a donor says it has."""

    donor: str
    info: SnapshotInfo


class Snapshots:
    """The bases that this peer serves: the current one, its predecessor, and an older one while a peer downloads it."""

    def __init__(self) -> None:
        self.on_invitation: Callable[[str, Invitation], None] = lambda peer, invitation: None
        """Called with the invitation that a peer shows."""
        self._bases: dict[str, tuple[SnapshotInfo, np.ndarray, bytes]] = {}
        self._used_at: dict[str, float] = {}
        self._clock: Callable[[], float] = lambda: 0.0

    @property
    def oldest_pinned_round(self) -> int | None:
        """The round of the oldest pinned base: the results after it are still needed. None without pinned bases."""
        bases = self._bases
        return min((bases[commit][0].round for commit in self._pinned(bases)), default=None)

    @property
    def infos(self) -> tuple[SnapshotInfo, ...]:
        """What is served."""
        return tuple(info for info, _, _ in self._bases.values())

    async def serve(self, endpoint: RpcEndpoint, server: ContentServer) -> None:
        """Start to serve bases."""
        self._clock = asyncio.get_running_loop().time
        await endpoint.serve(SNAPSHOT, self._on_snapshot)
        await server.serve("base_hashes", self._digests, MAX_CONCURRENT_UPLOADS, self._all_digests)
        await server.serve("base", self._piece, MAX_CONCURRENT_UPLOADS, self._whole)

    def publish(self, commit: str, round_number: int, base: np.ndarray, digests: bytes | None = None) -> str:
        """Serve this base, which must not change any more; return its digest. `digests`: of its pieces, if known.

        In a worker thread where a base may no longer be served then: unmapping it takes long.
        """
        digests = piece_digests(base) if digests is None else digests
        digest = root_digest(digests)
        bases = {**self._bases, commit: (SnapshotInfo(commit, round_number, base.size, digest), base, digests)}
        kept = {*list(bases)[-KEPT_SNAPSHOTS:], *self._pinned(bases)[: MAX_SNAPSHOTS - KEPT_SNAPSHOTS]}
        self._bases = {each: served for each, served in bases.items() if each in kept}
        for old in set(bases) - kept:
            self._used_at.pop(old, None)
        return digest

    def _pinned(self, bases: Collection[str]) -> list[str]:
        """Return which of these commits' bases are pinned; those that only a pin keeps come first, the last requested first."""
        now, newest, used_at = self._clock(), list(bases)[-KEPT_SNAPSHOTS:], dict(self._used_at)
        used = [commit for commit, at in used_at.items() if now - at < PINNED_S and commit in bases]
        return sorted(used, key=lambda commit: (commit in newest, -used_at[commit]))

    async def _on_snapshot(self, stream: Stream) -> None:
        request = unpack(SnapshotRequest, await stream.message())
        if request.invitation is not None:
            self.on_invitation(stream.remote, request.invitation)
        await stream.send(pack(self._find(request.commit)[0]))

    async def _digests(self, commit: str, index: int) -> Body | None:
        return self._find(commit)[2] if index == 0 else None

    async def _piece(self, commit: str, index: int) -> Body | None:
        _, base, _ = self._find(commit)
        self._used_at[commit] = self._clock()
        start = index * PIECE_ELEMENTS
        if not 0 <= start < base.size:
            return None
        # The disk may be slow to give it, and the event loop must not wait for a page.
        return await asyncio.to_thread(pack_floats, base[start : start + PIECE_ELEMENTS])

    def _whole(self) -> float:
        """Return the bytes of a base: who was sent more downloads for no good reason."""
        return max((4.0 * info.elements for info in self.infos), default=math.inf)

    def _all_digests(self) -> float:
        """Return the same of the digests of a base's pieces."""
        return max((len(digests) for _, _, digests in self._bases.values()), default=math.inf)

    def _find(self, commit: str) -> tuple[SnapshotInfo, np.ndarray, bytes]:
        if not self._bases:
            raise Refused(Code.NOT_HERE, "this peer has no base yet")
        if not commit:
            return next(reversed(self._bases.values()))
        if commit not in self._bases:
            raise Refused(Code.NOT_HERE, "this peer lacks that base")
        return self._bases[commit]


class PartialDownload:
    """A partial download on disk, SLOT_PIECES pieces a blob. The digests tell which pieces are usable."""

    def __init__(self, store: Store):
        self._store = store

    def copy_into(self, state: np.ndarray) -> bool:
        """Copy what is kept into the flat state; return whether there was anything."""
        names = self._store.names(DOWNLOAD)
        for name in names:
            blob = self._store.read(name)
            place = _slot(state, int(name.removeprefix(DOWNLOAD)))
            if blob is not None and len(blob) == 4 * place.size:
                place[:] = np.frombuffer(blob, "<f4")
        return bool(names)

    def save(self, slot: int, state: np.ndarray) -> None:
        """Write one slot of the state durably."""
        self._store.write(f"{DOWNLOAD}{slot:06d}", [np.ascontiguousarray(_slot(state, slot), "<f4").data.cast("B")])

    def clear(self) -> None:
        """Delete what is kept."""
        for name in self._store.names(DOWNLOAD):
            self._store.delete(name)


def base_content(commit: str, digests: bytes) -> Content:
    """Return a commit's base as content. `digests`: of its pieces."""
    listing = listed("base", commit, digests, packed_bytes(PIECE_ELEMENTS))
    return replace(listing, unpacked=lambda packed: unpack_floats(packed, PIECE_ELEMENTS))


async def collect_offers(
    endpoint: RpcEndpoint,
    donors: Sequence[str],
    commit: str,
    elements: int,
    known: AbstractSet[str] = frozenset(),
    digest: str = "",
    invitation: Invitation | None = None,
) -> list[Offer]:
    """Ask donors for a commit's base, more and more of them until there are offers; return those with this digest.

    They are in the order of their answers: donors that are near, or have little to do, come first. Without a digest, the most
    common one counts; other offers are logged. `known`: peers that are asked first. Without a digest, only their offers count
    where any of them answers, also that it has not applied this commit yet: anybody can register any number of strangers.
    `invitation`: shown to the donors.
    """
    offers, lacking = list[Offer](), set[str]()
    is_wanted, request = False, SnapshotRequest(commit, invitation)
    for some in widening(sorted(donors, key=lambda donor: donor not in known)):
        found = await _ask_all(endpoint, some, request, lacking)
        offers += [each for each in found if _is_offer(each.info, commit, elements)]
        is_wanted = any(not digest or offer.info.digest == digest for offer in offers)
        if is_wanted:
            break
    if not is_wanted:
        return []
    counting = [offer for offer in offers if offer.donor in known]
    if not counting and not digest and lacking & known:
        return []
    counting = counting or offers
    agreed = digest or Counter(offer.info.digest for offer in counting).most_common(1)[0][0]
    for offer in offers:
        if offer.info.digest != agreed:
            logger.warning("%s offers a base that differs from the agreed one; ignored", offer.donor[-6:])
    return [offer for offer in offers if offer.info.digest == agreed]


async def _ask_all(
    endpoint: RpcEndpoint, donors: Sequence[str], request: SnapshotRequest, lacking: set[str]
) -> list[Offer]:
    """Return the offers; add the donors that say that they lack the base to `lacking`."""
    offers = list[Offer]()

    async def ask(donor: str) -> None:
        try:
            offers.append(Offer(donor, await _ask_info(endpoint, donor, request)))
        except (PeerUnreachable, Refused, WireError) as error:
            if isinstance(error, Refused) and error.code is Code.NOT_HERE:
                lacking.add(donor)
            logger.debug("no base from %s: %s", donor[-6:], error)

    await asyncio.gather(*map(ask, donors))
    return offers


async def newest_bases(endpoint: RpcEndpoint, peers: Iterable[str]) -> list[SnapshotInfo]:
    """Return the newest base of each of these peers that has one and answers."""
    return [offer.info for offer in await _ask_all(endpoint, list(peers), SnapshotRequest(""), set())]


def _is_offer(info: SnapshotInfo, commit: str, elements: int) -> bool:
    with contextlib.suppress(WireError):
        return (info.commit, info.elements) == (commit, elements) and bool(from_hex(info.digest))
    return False


async def _ask_info(endpoint: RpcEndpoint, donor: str, request: SnapshotRequest) -> SnapshotInfo:
    async with endpoint.stream(donor, SNAPSHOT) as stream:
        await stream.send(pack(request))
        return unpack(SnapshotInfo, bytes(await stream.prompt_message()))


async def download(
    fetcher: Fetcher,
    offers: Sequence[Offer],
    have: np.ndarray | None,
    on_progress: Callable[[int, int], None],
    partial: PartialDownload | None = None,
    scratch: Scratch = memory_scratch,
    run_blocking: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    threads: int = 1,
) -> tuple[np.ndarray, bytes]:
    """Download the offered base: float32 `[elements]`, every piece verified, and the digests of its pieces.

    `have`: a base whose correct pieces are reused. `on_progress(done, total)` counts slots. `partial` keeps pieces on disk
    until the caller clears it. `scratch` allocates the result. Raises PeerUnreachable when no donor is left.
    """
    info, donors = offers[0].info, [fetcher.peers(offer.donor for offer in offers)]
    count = num_pieces(info.elements)
    listing = single("base_hashes", info.commit, from_hex(info.digest), 32 * count)
    digests = bytes(await fetcher.fetch_single(listing, donors))
    if len(digests) != 32 * count:
        raise PeerUnreachable("the offered base has a wrong number of pieces")
    state: np.ndarray
    missing: list[int]
    state, missing = await run_blocking(_begin, info.elements, digests, have, partial, scratch, threads)
    left = Counter(index // SLOT_PIECES for index in missing)
    total, arrived = len(left), set[int]()

    async def keep(index: int, body: Body) -> None:
        if index in arrived:
            return
        place = _piece(state, index)
        if len(body) != place.nbytes:
            raise BadPiece(f"piece {index} of the offered base has {len(body)} bytes")
        arrived.add(index)
        place[:] = np.frombuffer(body, "<f4")
        slot = index // SLOT_PIECES
        left[slot] -= 1
        if not left[slot]:
            del left[slot]
            if partial is not None:
                await run_blocking(partial.save, slot, state)
            on_progress(total - len(left), total)

    if await fetcher.fetch(base_content(info.commit, digests), missing, donors, keep):
        raise PeerUnreachable("no donor is left and the base is incomplete")
    return state, digests


def _begin(
    elements: int, digests: bytes, have: np.ndarray | None, partial: PartialDownload | None, scratch: Scratch, threads: int
) -> tuple[np.ndarray, list[int]]:
    """Return the array of a download with what is here already, and the pieces that are missing or wrong."""
    state = scratch("download", elements)
    if have is not None:
        np.copyto(state, have)
    resumed = partial is not None and partial.copy_into(state)
    if have is None and not resumed:
        return state, list(range(len(digests) // 32))
    found = piece_digests(state, threads)
    return state, [n for n in range(len(digests) // 32) if found[32 * n : 32 * n + 32] != digests[32 * n : 32 * n + 32]]


def _slot(state: np.ndarray, slot: int) -> np.ndarray:
    return state[slot * SLOT_PIECES * PIECE_ELEMENTS : (slot + 1) * SLOT_PIECES * PIECE_ELEMENTS]


def _piece(state: np.ndarray, index: int) -> np.ndarray:
    return state[index * PIECE_ELEMENTS : (index + 1) * PIECE_ELEMENTS]
