"""Bases as content: serving the newest ones, agreeing with the donors on which bits are right, downloading one.

Pieces come in the order of the flat state, so that shared weights are there first. What arrived is kept on disk until the whole
is: a joiner that is restarted goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import BadPiece, Body, from_hex, listed, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import SnapshotInfo, SnapshotRequest
from spes_p2p.messages.methods import SNAPSHOT
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.rounds.digest import PIECE_ELEMENTS, piece_digest, piece_digests, root_digest
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.scratch import Scratch, memory_scratch

logger = logging.getLogger(__name__)

DOWNLOAD = "download-"
SLOT_PIECES = 16
"""Pieces that are written to disk together."""
KEPT_SNAPSHOTS, MAX_SNAPSHOTS = 2, 3
"""Bases that are served: the newest ones; with those that somebody downloads."""
PINNED_S = 60.0
"""A base is kept for this long after somebody asked for a piece of it."""
UPLOADS_AT_ONCE = 4
"""Peers that download a base from this one at the same time."""
PIECES_A_BREATH = 64
"""Pieces that are hashed before the event loop gets its turn."""


@dataclass(frozen=True)
class Offer:
    """A donor and what it says it has."""

    donor: str
    info: SnapshotInfo


class Snapshots:
    """What this peer serves: its current base, the one before, and an older one while somebody is downloading it."""

    def __init__(self) -> None:
        self._bases: dict[str, tuple[SnapshotInfo, np.ndarray, bytes]] = {}
        self._used_at: dict[str, float] = {}
        self._clock: Callable[[], float] = lambda: 0.0

    @property
    def oldest_pinned_round(self) -> int | None:
        """Of the bases that somebody downloads, or has just downloaded and brings up to date; None when there are none."""
        return min((self._bases[commit][0].round for commit in self._pinned()), default=None)

    @property
    def infos(self) -> tuple[SnapshotInfo, ...]:
        """Of all bases that are served."""
        return tuple(info for info, _, _ in self._bases.values())

    async def serve(self, board: RpcEndpoint, server: ContentServer) -> None:
        """Answer from now on."""
        self._clock = asyncio.get_running_loop().time
        await board.serve(SNAPSHOT, self._on_snapshot)
        await server.serve("base_hashes", self._digests, UPLOADS_AT_ONCE)
        await server.serve("base", self._piece, UPLOADS_AT_ONCE)

    def publish(self, commit: str, round_number: int, base: np.ndarray, digests: bytes | None = None) -> str:
        """Serve this base from now on; it must never change. Returns its digest. `digests`: of its pieces, where known."""
        digests = piece_digests(base) if digests is None else digests
        digest = root_digest(digests)
        self._bases[commit] = (SnapshotInfo(commit, round_number, base.size, digest), base, digests)
        kept = {*list(self._bases)[-KEPT_SNAPSHOTS:], *self._pinned()[: MAX_SNAPSHOTS - KEPT_SNAPSHOTS]}
        for old in set(self._bases) - kept:
            del self._bases[old]
            self._used_at.pop(old, None)
        return digest

    def _pinned(self) -> list[str]:
        """Heads whose bases are in use; older than the newest ones first, of these the last used one."""
        now, newest = self._clock(), list(self._bases)[-KEPT_SNAPSHOTS:]
        used = [commit for commit, at in self._used_at.items() if now - at < PINNED_S and commit in self._bases]
        return sorted(used, key=lambda commit: (commit in newest, -self._used_at[commit]))

    async def _on_snapshot(self, stream: Stream) -> None:
        await stream.send(pack(self._find(unpack(SnapshotRequest, await stream.message()).commit)[0]))

    async def _digests(self, commit: str, index: int) -> Body | None:
        return self._find(commit)[2] if index == 0 else None

    async def _piece(self, commit: str, index: int) -> Body | None:
        _, base, _ = self._find(commit)
        self._used_at[commit] = self._clock()
        start = index * PIECE_ELEMENTS
        if not 0 <= start < base.size:
            return None
        return np.ascontiguousarray(base[start : start + PIECE_ELEMENTS], "<f4").data.cast("B")

    def _find(self, commit: str) -> tuple[SnapshotInfo, np.ndarray, bytes]:
        if not self._bases:
            raise Refused(Code.NOT_HERE, "no base here yet")
        if not commit:
            return next(reversed(self._bases.values()))
        if commit not in self._bases:
            raise Refused(Code.NOT_HERE, "that base is not here")
        return self._bases[commit]


class KeptPieces:
    """What has arrived of a base, on disk, a blob for SLOT_PIECES pieces. What it is worth the digests tell."""

    def __init__(self, store: Store):
        self._store = store

    def put_into(self, state: np.ndarray) -> bool:
        """Copy what is here into the flat state; was there anything?"""
        names = self._store.names(DOWNLOAD)
        for name in names:
            blob = self._store.read(name)
            place = _slot(state, int(name.removeprefix(DOWNLOAD)))
            if blob is not None and len(blob) == 4 * place.size:
                place[:] = np.frombuffer(blob, "<f4")
        return bool(names)

    def save(self, slot: int, state: np.ndarray) -> None:
        """Keep one slot of the state. Durable."""
        self._store.write(f"{DOWNLOAD}{slot:06d}", [np.ascontiguousarray(_slot(state, slot), "<f4").data.cast("B")])

    def clear(self) -> None:
        """Forget everything: the base is complete."""
        for name in self._store.names(DOWNLOAD):
            self._store.delete(name)


async def collect_offers(
    board: RpcEndpoint, donors: Sequence[str], commit: str, elements: int, known: Collection[str] = ()
) -> list[Offer]:
    """Ask all donors for a commit's base. Only offers that most of them agree on come back; the others are logged.

    `known`: peers whose word counts, when one of them answers; of strangers in the registry there may be any number.
    """
    infos = zip(donors, await asyncio.gather(*(_ask_info(board, donor, commit) for donor in donors)), strict=True)
    offers = [Offer(donor, info) for donor, info in infos if info and _is_offer(info, commit, elements)]
    if not offers:
        return []
    counting = [offer for offer in offers if offer.donor in known] or offers
    agreed = Counter(offer.info.digest for offer in counting).most_common(1)[0][0]
    for offer in offers:
        if offer.info.digest != agreed:
            logger.warning("%s offers a base that differs from most others'; it is not used", offer.donor[-6:])
    return [offer for offer in offers if offer.info.digest == agreed]


async def newest_bases(board: RpcEndpoint, peers: Iterable[str]) -> list[SnapshotInfo]:
    """What these peers say of the newest base that they have; who has none, or does not answer, is left out."""
    infos = await asyncio.gather(*(_ask_info(board, peer, "") for peer in peers))
    return [info for info in infos if info is not None]


def _is_offer(info: SnapshotInfo, commit: str, elements: int) -> bool:
    with contextlib.suppress(WireError):
        return (info.commit, info.elements) == (commit, elements) and bool(from_hex(info.digest))
    return False


async def _ask_info(board: RpcEndpoint, donor: str, commit: str) -> SnapshotInfo | None:
    try:
        async with board.stream(donor, SNAPSHOT) as stream:
            await stream.send(pack(SnapshotRequest(commit)))
            return unpack(SnapshotInfo, bytes(await stream.prompt_message()))
    except (PeerUnreachable, Refused, WireError) as error:
        logger.debug("no base from %s: %s", donor[-6:], error)
        return None


async def download(
    fetcher: Fetcher,
    offers: Sequence[Offer],
    have: np.ndarray | None,
    on_progress: Callable[[int, int], None],
    kept: KeptPieces | None = None,
    scratch: Scratch = memory_scratch,
) -> np.ndarray:
    """The offered base, float32 `[elements]`, every piece verified.

    `have`: a base of which pieces that are right already are kept. `on_progress` is told (slots here, slots wanted).
    `kept`: where pieces outlive this process, until the caller clears it. `scratch`: where the base is put together.
    Raises PeerUnreachable when no donor is left.
    """
    info, donors = offers[0].info, [fetcher.peers(offer.donor for offer in offers)]
    count = -(-info.elements // PIECE_ELEMENTS)
    listing = single("base_hashes", info.commit, from_hex(info.digest), 32 * count)
    digests = bytes(await fetcher.fetch_single(listing, donors))
    if len(digests) != 32 * count:
        raise PeerUnreachable("the offered base has another number of pieces")
    state = scratch("download", info.elements)
    if have is not None:
        np.copyto(state, have)
    resumed = kept is not None and kept.put_into(state)
    missing = list(range(count)) if have is None and not resumed else await _wrong_pieces(state, digests)
    left = Counter(index // SLOT_PIECES for index in missing)
    total, arrived = len(left), set[int]()

    async def keep(index: int, body: Body) -> None:
        if index in arrived:
            return
        place = _piece(state, index)
        if len(body) != place.nbytes:
            raise BadPiece(f"agrees on a base whose piece {index} has {len(body)} bytes")
        arrived.add(index)
        place[:] = np.frombuffer(body, "<f4")
        slot = index // SLOT_PIECES
        left[slot] -= 1
        if not left[slot]:
            del left[slot]
            if kept is not None:
                kept.save(slot, state)
            on_progress(total - len(left), total)

    if await fetcher.fetch(listed("base", info.commit, digests, 4 * PIECE_ELEMENTS), missing, donors, keep):
        raise PeerUnreachable("all donors are gone before the base was complete")
    return state


async def _wrong_pieces(state: np.ndarray, digests: bytes) -> list[int]:
    wrong = []
    for index in range(len(digests) // 32):
        if piece_digest(_piece(state, index)) != digests[32 * index : 32 * index + 32]:
            wrong.append(index)
        if index % PIECES_A_BREATH == 0:
            await asyncio.sleep(0)
    return wrong


def _slot(state: np.ndarray, slot: int) -> np.ndarray:
    return state[slot * SLOT_PIECES * PIECE_ELEMENTS : (slot + 1) * SLOT_PIECES * PIECE_ELEMENTS]


def _piece(state: np.ndarray, index: int) -> np.ndarray:
    return state[index * PIECE_ELEMENTS : (index + 1) * PIECE_ELEMENTS]
