"""Downloading a base from several donors at once, piece by verified piece; donors serve from a base that does not change.

Pieces come in the order of the flat state, so that shared weights are there first. What arrived is kept on disk until the whole
is: a joiner that is restarted goes on. A donor that dies, lies or sends nothing costs the piece that it was asked for; one that
serves enough others says so, and is asked again later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.swarm.interfaces import Store
from spes_p2p.swarm.rpc import STALLED_SILENCES, Switchboard, Talk
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.digest import PIECE_ELEMENTS, piece_digest, piece_digests, root_digest
from spes_p2p.sync.scratch import Scratch, memory_scratch

logger = logging.getLogger(__name__)

SNAPSHOT, PIECES = "snapshot", "pieces"
DOWNLOAD = "download-"
PIECES_A_REQUEST = 16
DIGESTS_A_MESSAGE = 2**16
KEPT_SNAPSHOTS, MAX_SNAPSHOTS = 2, 3
"""Bases that are served: the newest ones; with those that somebody downloads."""
PINNED_S = 60.0
"""A base is kept so long after somebody asked for a piece of it."""
UPLOADS_AT_ONCE = 4
BUSY = "busy"
BUSY_RETRY_S = 1.0
PIECES_A_BREATH = 64
"""Pieces that are hashed before the event loop gets its turn."""


@dataclass(frozen=True)
class SnapshotRequest:
    """Ask for a base: of this head, or the newest one ("")."""

    head: str


@dataclass(frozen=True)
class SnapshotInfo:
    """A donor's answer; its piece digests follow, DIGESTS_A_MESSAGE at a time."""

    head: str
    round: int
    elements: int
    digest: str


@dataclass(frozen=True)
class PiecesRequest:
    """Pieces of a head's base, sent back in this order."""

    head: str
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """A donor and what it says it has."""

    donor: str
    info: SnapshotInfo
    digests: bytes


class Snapshots:
    """What this peer serves: its current base, the one before, and an older one while somebody is downloading it."""

    def __init__(self, silence_s: float) -> None:
        self.stalled_s = STALLED_SILENCES * silence_s
        self._bases: dict[str, tuple[SnapshotInfo, np.ndarray, bytes]] = {}
        self._used_at: dict[str, float] = {}
        self._clock: Callable[[], float] = lambda: 0.0
        self._uploads = 0

    @property
    def oldest_pinned_round(self) -> int | None:
        """Of the bases that somebody downloads, or has just downloaded and brings up to date; None when there are none."""
        return min((self._bases[head][0].round for head in self._pinned()), default=None)

    @property
    def infos(self) -> tuple[SnapshotInfo, ...]:
        """Of all bases that are served."""
        return tuple(info for info, _, _ in self._bases.values())

    def publish(self, head: str, round_number: int, base: np.ndarray, digests: bytes | None = None) -> str:
        """Serve this base from now on; it must never change. Returns its digest. `digests`: of its pieces, where known."""
        digests = piece_digests(base) if digests is None else digests
        digest = root_digest(digests)
        self._bases[head] = (SnapshotInfo(head, round_number, base.size, digest), base, digests)
        kept = {*list(self._bases)[-KEPT_SNAPSHOTS:], *self._pinned()[: MAX_SNAPSHOTS - KEPT_SNAPSHOTS]}
        for old in set(self._bases) - kept:
            del self._bases[old]
            self._used_at.pop(old, None)
        return digest

    def _pinned(self) -> list[str]:
        """Heads whose bases are in use; older than the newest ones first, of these the last used one."""
        now, newest = self._clock(), list(self._bases)[-KEPT_SNAPSHOTS:]
        used = [head for head, at in self._used_at.items() if now - at < PINNED_S and head in self._bases]
        return sorted(used, key=lambda head: (head in newest, -self._used_at[head]))

    async def on_snapshot(self, talk: Talk) -> None:
        """Answer what I have."""
        info, _, digests = self._find(unpack(SnapshotRequest, await talk.message()).head)
        await talk.send(pack(info))
        for a in range(0, len(digests), 32 * DIGESTS_A_MESSAGE):
            await talk.send(digests[a : a + 32 * DIGESTS_A_MESSAGE])

    async def on_pieces(self, talk: Talk) -> None:
        """Serve pieces, to a few peers at a time: uploads must leave room for this peer's own rounds."""
        request = unpack(PiecesRequest, await talk.message())
        _, base, _ = self._find(request.head)
        self._clock = asyncio.get_running_loop().time
        self._used_at[request.head] = self._clock()
        if self._uploads >= UPLOADS_AT_ONCE:
            raise Refused(f"{BUSY}: {self._uploads} peers are served")
        self._uploads += 1
        try:
            for piece in request.pieces:
                start = piece * PIECE_ELEMENTS
                if not 0 <= start < base.size:
                    raise Refused(f"piece {piece} does not exist")
                body = base[start : start + PIECE_ELEMENTS].astype("<f4").tobytes()
                await self._unless_stalled(talk, body)
                self._used_at[request.head] = self._clock()
        finally:
            self._uploads -= 1

    async def _unless_stalled(self, talk: Talk, body: bytes) -> None:
        try:
            await asyncio.wait_for(talk.send(body), self.stalled_s)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{talk.remote[-6:]} lives, but takes nothing for {self.stalled_s:g} s") from None

    def _find(self, head: str) -> tuple[SnapshotInfo, np.ndarray, bytes]:
        if not self._bases:
            raise Refused("no base here yet")
        if not head:
            return next(reversed(self._bases.values()))
        if head not in self._bases:
            raise Refused("that base is not here")
        return self._bases[head]


class KeptPieces:
    """What has arrived of a base, on disk, a blob for PIECES_A_REQUEST pieces. What it is worth the digests tell."""

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
    board: Switchboard, donors: Sequence[str], head: str, elements: int, known: Collection[str] = ()
) -> list[Offer]:
    """Ask all donors for a head's base. Only offers that most of them agree on come back; the others are logged.

    `known`: peers whose word counts, when one of them answers; of strangers in the registry there may be any number.
    """

    async def ask(donor: str) -> Offer | None:
        try:
            async with board.talk(donor, SNAPSHOT) as talk:
                await talk.send(pack(SnapshotRequest(head)))
                info = unpack(SnapshotInfo, bytes(await talk.prompt_message()))
                if info.elements != elements or info.head != head:
                    raise WireError(f"a base of {info.elements} elements, this campaign's has {elements}")
                digests = b""
                while len(digests) < 32 * -(-elements // PIECE_ELEMENTS):
                    message = await talk.prompt_message()
                    if not message:
                        raise WireError("too few piece digests")
                    digests += message
                if root_digest(digests) != info.digest:
                    raise WireError("piece digests that do not fit the digest")
                return Offer(donor, info, digests)
        except (PeerUnreachable, Refused, WireError) as error:
            logger.debug("no base from %s: %s", donor[-6:], error)
            return None

    offers = [offer for offer in await asyncio.gather(*map(ask, donors)) if offer is not None]
    if not offers:
        return []
    counting = [offer for offer in offers if offer.donor in known] or offers
    agreed = Counter(offer.info.digest for offer in counting).most_common(1)[0][0]
    for offer in offers:
        if offer.info.digest != agreed:
            logger.warning("%s offers a base that differs from most others'; it is not used", offer.donor[-6:])
    return [offer for offer in offers if offer.info.digest == agreed]


async def newest_bases(board: Switchboard, peers: Iterable[str]) -> list[SnapshotInfo]:
    """What these peers say of the newest base that they have; who has none, or does not answer, is left out."""

    async def ask(peer: str) -> SnapshotInfo | None:
        try:
            async with board.talk(peer, SNAPSHOT) as talk:
                await talk.send(pack(SnapshotRequest("")))
                return unpack(SnapshotInfo, bytes(await talk.prompt_message()))
        except (PeerUnreachable, Refused, WireError):
            return None

    return [info for info in await asyncio.gather(*map(ask, peers)) if info is not None]


async def download(
    board: Switchboard,
    offers: Sequence[Offer],
    have: np.ndarray | None,
    on_progress: Callable[[int, int], None],
    kept: KeptPieces | None = None,
    scratch: Scratch = memory_scratch,
) -> np.ndarray:
    """The offered base, float32 `[elements]`. Every piece is verified; a donor that fails costs the piece it was asked for.

    `have`: a base of which pieces that are right already are kept. `kept`: where pieces outlive this process, until the caller
    clears it. `scratch`: where the base is put together. Raises PeerUnreachable when no donor is left.
    """
    info, digests = offers[0].info, offers[0].digests
    state = scratch("download", info.elements)
    if have is not None:
        np.copyto(state, have)
    resumed = kept is not None and kept.put_into(state)
    count = -(-info.elements // PIECE_ELEMENTS)
    missing = list(range(count)) if have is None and not resumed else await _wrong_pieces(state, digests)
    queue = [list(batch) for _, batch in itertools.groupby(missing, lambda piece: piece // PIECES_A_REQUEST)]
    total, done = len(queue), 0
    living = [offer.donor for offer in offers]

    async def serve_from(donor: str) -> None:
        nonlocal done
        while queue:
            batch = queue.pop(0)
            slot = batch[0] // PIECES_A_REQUEST
            try:
                await _fetch_batch(board, donor, info.head, batch, state, digests)
                if kept is not None:
                    kept.save(slot, state)
                done += 1
                on_progress(done, total)
            except (PeerUnreachable, Refused, WireError) as error:
                queue.insert(0, batch)
                if isinstance(error, Refused) and str(error).startswith(BUSY):
                    await asyncio.sleep(BUSY_RETRY_S)
                    continue
                logger.warning("donor %s dropped: %s", donor[-6:], error)
                living.remove(donor)
                return

    while queue:
        if not living:
            raise PeerUnreachable("all donors are gone before the base was complete")
        await asyncio.gather(*map(serve_from, tuple(living)))
    return state


async def _fetch_batch(
    board: Switchboard, donor: str, head: str, batch: list[int], state: np.ndarray, digests: bytes
) -> None:
    """Takes each piece off the batch that arrived and is right."""
    async with board.talk(donor, PIECES) as talk:
        await talk.send(pack(PiecesRequest(head, tuple(batch))))
        while batch:
            index = batch[0]
            piece = _piece(state, index)
            body = await talk.prompt_message()
            if len(body) != 4 * piece.size:
                raise WireError(f"piece {index} has {len(body)} bytes")
            values = np.frombuffer(body, "<f4")
            if piece_digest(values) != digests[32 * index : 32 * index + 32]:
                raise WireError(f"piece {index} is not what was offered")
            piece[:] = values
            del batch[0]


async def _wrong_pieces(state: np.ndarray, digests: bytes) -> list[int]:
    wrong = []
    for index in range(len(digests) // 32):
        if piece_digest(_piece(state, index)) != digests[32 * index : 32 * index + 32]:
            wrong.append(index)
        if index % PIECES_A_BREATH == 0:
            await asyncio.sleep(0)
    return wrong


def _slot(state: np.ndarray, slot: int) -> np.ndarray:
    return state[slot * PIECES_A_REQUEST * PIECE_ELEMENTS : (slot + 1) * PIECES_A_REQUEST * PIECE_ELEMENTS]


def _piece(state: np.ndarray, index: int) -> np.ndarray:
    return state[index * PIECE_ELEMENTS : (index + 1) * PIECE_ELEMENTS]
