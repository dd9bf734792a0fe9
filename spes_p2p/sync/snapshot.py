"""Downloading a base from several donors at once, piece by verified piece; donors serve from a base that does not change."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.digest import PIECE_ELEMENTS, piece_digest, piece_digests, root_digest

logger = logging.getLogger(__name__)

SNAPSHOT, PIECES = "snapshot", "pieces"
PIECES_A_REQUEST = 16
DIGESTS_A_MESSAGE = 2**16
KEPT_SNAPSHOTS = 2


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
    """What this peer serves: its current base, and the one before for who is in the middle of a download."""

    def __init__(self) -> None:
        self._bases: dict[str, tuple[SnapshotInfo, np.ndarray, bytes]] = {}

    def publish(self, head: str, round_number: int, base: np.ndarray, digests: bytes | None = None) -> str:
        """Serve this base from now on; it must never change. Returns its digest. `digests`: of its pieces, where known."""
        digests = piece_digests(base) if digests is None else digests
        digest = root_digest(digests)
        self._bases[head] = (SnapshotInfo(head, round_number, base.size, digest), base, digests)
        while len(self._bases) > KEPT_SNAPSHOTS:
            del self._bases[next(iter(self._bases))]
        return digest

    async def on_snapshot(self, talk: Talk) -> None:
        """Answer what I have."""
        info, _, digests = self._find(unpack(SnapshotRequest, await talk.message()).head)
        await talk.send(pack(info))
        for a in range(0, len(digests), 32 * DIGESTS_A_MESSAGE):
            await talk.send(digests[a : a + 32 * DIGESTS_A_MESSAGE])

    async def on_pieces(self, talk: Talk) -> None:
        """Serve pieces."""
        request = unpack(PiecesRequest, await talk.message())
        _, base, _ = self._find(request.head)
        for piece in request.pieces:
            start = piece * PIECE_ELEMENTS
            if not 0 <= start < base.size:
                raise Refused(f"piece {piece} does not exist")
            await talk.send(base[start : start + PIECE_ELEMENTS].astype("<f4").tobytes())

    def _find(self, head: str) -> tuple[SnapshotInfo, np.ndarray, bytes]:
        if not self._bases:
            raise Refused("no base here yet")
        if not head:
            return next(reversed(self._bases.values()))
        if head not in self._bases:
            raise Refused("that base is not here")
        return self._bases[head]


async def collect_offers(board: Switchboard, donors: Sequence[str], head: str, elements: int) -> list[Offer]:
    """Ask all donors for a head's base. Only offers that most of them agree on come back; the others are logged."""

    async def ask(donor: str) -> Offer | None:
        try:
            async with board.talk(donor, SNAPSHOT) as talk:
                await talk.send(pack(SnapshotRequest(head)))
                info = unpack(SnapshotInfo, await talk.message())
                if info.elements != elements or info.head != head:
                    raise WireError(f"a base of {info.elements} elements, this campaign's has {elements}")
                digests = b""
                while len(digests) < 32 * -(-elements // PIECE_ELEMENTS):
                    message = await talk.message()
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
    agreed = Counter(offer.info.digest for offer in offers).most_common(1)[0][0]
    for offer in offers:
        if offer.info.digest != agreed:
            logger.warning("%s offers a base that differs from most others'; it is not used", offer.donor[-6:])
    return [offer for offer in offers if offer.info.digest == agreed]


async def download(
    board: Switchboard, offers: Sequence[Offer], have: np.ndarray | None, on_progress: Callable[[int, int], None]
) -> np.ndarray:
    """The offered base, float32 `[elements]`. Every piece is verified; a donor that dies or lies costs its request only.

    `have`: a base of which pieces that are right already are kept. Raises PeerUnreachable when no donor is left.
    """
    info, digests = offers[0].info, offers[0].digests
    state = np.empty(info.elements, np.float32) if have is None else have.copy()
    count = -(-info.elements // PIECE_ELEMENTS)
    missing = [i for i in range(count) if have is None or piece_digest(_piece(state, i)) != digests[32 * i : 32 * i + 32]]
    queue = [missing[a : a + PIECES_A_REQUEST] for a in range(0, len(missing), PIECES_A_REQUEST)]
    total, done = len(queue), 0
    living = [offer.donor for offer in offers]

    async def serve_from(donor: str) -> None:
        nonlocal done
        while queue:
            batch = queue.pop(0)
            try:
                await _fetch_batch(board, donor, info.head, batch, state, digests)
                done += 1
                on_progress(done, total)
            except (PeerUnreachable, Refused, WireError) as error:
                logger.warning("donor %s dropped: %s", donor[-6:], error)
                queue.insert(0, batch)
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
    async with board.talk(donor, PIECES) as talk:
        await talk.send(pack(PiecesRequest(head, tuple(batch))))
        for index in batch:
            piece = _piece(state, index)
            body = await talk.message()
            if len(body) != 4 * piece.size:
                raise WireError(f"piece {index} has {len(body)} bytes")
            values = np.frombuffer(body, "<f4")
            if piece_digest(values) != digests[32 * index : 32 * index + 32]:
                raise WireError(f"piece {index} is not what was offered")
            piece[:] = values


def _piece(state: np.ndarray, index: int) -> np.ndarray:
    return state[index * PIECE_ELEMENTS : (index + 1) * PIECE_ELEMENTS]
