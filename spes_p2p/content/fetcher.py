"""Downloading pieces from several donors at once, each piece verified: the policies of every download of this peer.

- A donor is asked for a few pieces at a time, in the order in which they are wanted; what arrives and is right is kept at once.
- A donor that lies, dies or stalls costs the pieces that it was asked for: others are asked for them, and it is dropped for the
  rest of this download. Stalled is one from which nothing comes for two silences, or less than MIN_BYTES_PER_S.
- The pieces of a request that is late, but not stalled, are asked of an idle donor too: no slow donor holds up the end.
- A donor that is busy is asked again later; one that lacks a piece is not asked for it again, and one that gives nothing in
  EMPTY_REQUESTS requests in a row is dropped.
- Donors come in tiers: a piece is asked of a tier when no donor of the tiers before it can give it now.
- One donor serves at most REQUESTS_A_PEER requests of this peer, over all its downloads, and at most DONORS_AT_ONCE serve one
  download.

The rate limits of the line hold for every message (`limits.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from spes_p2p.content.pieces import BadPiece, Body, Content, Donor, Keep
from spes_p2p.content.transfer import BUSY_RETRY_S, REQUESTS_A_PEER, PeerDonor
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.content import PIECES_A_REQUEST
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint
from spes_p2p.net.tasks import end_tasks

logger = logging.getLogger(__name__)

DONORS_AT_ONCE = 8
"""Bounds the connections of a download, and what lies unread in them; late requests do not count."""
MAX_BUSY_RETRY_S = 10.0
BUSY_PATIENCE_S = 120.0
"""Drop a donor that has been busy for this long; its caller looks for donors anew."""
EMPTY_REQUESTS = 4
MIN_BYTES_PER_S = 2**10
"""Drop donors below this rate: eight of them together are less than any line that can train."""
LATE_SILENCES = 0.25
LATE_BYTES_PER_S = 2**16
"""A request is late when nothing comes for this share of a silence, or less than this rate."""


Tiers = Sequence[Sequence[Donor]]


class Fetcher:
    """All downloads of one peer."""

    def __init__(self, board: RpcEndpoint):
        self._board = board
        self._slots: dict[str, asyncio.Semaphore] = {}

    @property
    def stalled_s(self) -> float:
        """Drop a donor from which nothing comes for this long."""
        return STALLED_SILENCES * self._board.silence_s

    @property
    def late_s(self) -> float:
        """Ask others too when nothing comes for this long."""
        return LATE_SILENCES * self._board.silence_s

    def peers(self, names: Iterable[str]) -> list[Donor]:
        """These peers as donors, those that were silent a moment ago last."""
        now, detector = asyncio.get_running_loop().time(), self._board.detector
        living = sorted(dict.fromkeys(names), key=lambda name: detector.is_lost(name, now))
        return [PeerDonor(self._board, name) for name in living]

    async def fetch(self, content: Content, wanted: Iterable[int], donors: Tiers, keep: Keep) -> list[int]:
        """Download these pieces; returns those that no donor gave.

        What `keep` raises, but for BadPiece, ends the download; what arrived before is kept.
        """
        return await _Download(self, content, wanted, donors, keep).run()

    async def fetch_single(self, content: Content, donors: Tiers) -> Body:
        """Download the only piece of a content. Raises PeerUnreachable when no donor gives it."""
        found: list[Body] = []

        async def keep(index: int, body: Body) -> None:
            found.append(body)

        if await self.fetch(content, [0], donors, keep):
            raise PeerUnreachable(f"nobody gives {content.kind} {content.name[:12]}")
        return found[0]

    def slot(self, donor: Donor) -> asyncio.Semaphore:
        """What bounds the open requests at a donor."""
        return self._slots.setdefault(donor.name, asyncio.Semaphore(REQUESTS_A_PEER))


class _Request:
    """A batch that a donor was asked for, and the progress of its delivery."""

    def __init__(self, download: _Download, donor: Donor, batch: Sequence[int]):
        self.pending = set(batch)
        self.given, self.bytes = 0, 0
        self.retry_s: float | None = None
        """When a donor that is busy wants to be asked again."""
        self._download, self._donor, self._batch = download, donor, batch
        self._clock = asyncio.get_running_loop().time
        self._began_at = self._moved_at = self._clock()

    async def run(self) -> None:
        """Until everything was given. Raises PeerUnreachable (also of a stalled donor), Refused, WireError, BadPiece."""
        stalled_s = self._donor.patience_s or self._download.fetcher.stalled_s
        giving = asyncio.ensure_future(self._donor.give(self._download.content, self._batch, self))
        try:
            while not giving.done():
                left_s = self._due_at(stalled_s, MIN_BYTES_PER_S) - self._clock()
                if left_s <= 0:
                    raise PeerUnreachable(f"lives, but gave {self.bytes} bytes in {self._clock() - self._began_at:.0f} s")
                await asyncio.wait({giving}, timeout=left_s)
            giving.result()
        finally:
            await end_tasks([giving])

    def is_late(self) -> bool:
        """Is it slow enough that others are asked for the same?"""
        return self._clock() >= self._due_at(self._download.fetcher.late_s, LATE_BYTES_PER_S)

    def count(self, size: int) -> None:
        """Bytes have arrived."""
        self.bytes += size
        if size:
            self._moved_at = self._clock()

    async def put(self, index: int, body: Body | None) -> None:
        """A piece has arrived, or is not there. Raises BadPiece."""
        self.pending.discard(index)
        self.given += body is not None
        await self._download.take(self._donor, index, body)

    def _due_at(self, silent_s: float, bytes_per_s: float) -> float:
        """When more must have come: after so much silence, or when the mean rate falls below this one."""
        return min(self._moved_at + silent_s, self._began_at + silent_s + self.bytes / bytes_per_s)


class _Download:
    """One call of `Fetcher.fetch`."""

    def __init__(self, fetcher: Fetcher, content: Content, wanted: Iterable[int], donors: Tiers, keep: Keep):
        self.fetcher, self.content = fetcher, content
        self._missing = dict.fromkeys(wanted)
        self._keep = keep
        self._tiers = [list(tier) for tier in donors]
        self._lacks: dict[str, set[int]] = {donor.name: set() for tier in donors for donor in tier}
        self._unavailable: set[str] = set()
        """Donors that are dropped, or busy at the moment."""
        self._requests: set[_Request] = set()
        self._changed = asyncio.Event()
        self._complete = asyncio.Event()

    async def run(self) -> list[int]:
        """Returns the pieces that nobody gave."""
        if not self._missing:
            return []
        ends = [
            asyncio.ensure_future(self._fetch_from(donor, number)) for number, tier in enumerate(self._tiers) for donor in tier
        ]
        everything, complete = asyncio.gather(*ends), asyncio.ensure_future(self._complete.wait())
        try:
            either: set[asyncio.Future[Any]] = {everything, complete}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                everything.result()
        finally:
            await end_tasks([*ends, everything, complete])
        return list(self._missing)

    async def take(self, donor: Donor, index: int, body: Body | None) -> None:
        """What a donor gave for a piece. Raises BadPiece."""
        if body is None:
            self._lacks[donor.name].add(index)
        elif not self.content.proves(index, body):
            raise BadPiece(f"sent another piece {index} of {self.content.kind} {self.content.name[:12]} than the right one")
        elif index in self._missing:
            await self._keep(index, body)
            self._missing.pop(index, None)
            if not self._missing:
                self._complete.set()
        self._tell()

    async def _fetch_from(self, donor: Donor, tier: int) -> None:
        """Ask one donor for batch after batch, until it has nothing more to give or is dropped."""
        clock = asyncio.get_running_loop().time
        served_at, empty = clock(), 0
        while any(index not in self._lacks[donor.name] for index in self._missing):
            async with self.fetcher.slot(donor):
                batch = self._batch_for(donor, tier)
                request = await self._ask(donor, batch) if batch else None
            if request is None:
                await self._wait_for_change()
                continue
            if request.retry_s is None:
                served_at, empty = clock(), 0 if request.given else empty + 1
            elif clock() - served_at < BUSY_PATIENCE_S:
                await asyncio.sleep(request.retry_s)
                continue
            if empty == EMPTY_REQUESTS:
                self._unavailable.add(donor.name)
            if donor.name in self._unavailable:
                return

    async def _ask(self, donor: Donor, batch: Sequence[int]) -> _Request:
        """One request, until it is over. A donor that failed or is busy is not available any more."""
        request = _Request(self, donor, batch)
        self._unavailable.discard(donor.name)
        self._requests.add(request)
        try:
            await request.run()
        except (PeerUnreachable, Refused, WireError, BadPiece) as error:
            self._unavailable.add(donor.name)
            if isinstance(error, Refused) and error.code is Code.BUSY:
                request.retry_s = min(error.refusal.retry_s or BUSY_RETRY_S, MAX_BUSY_RETRY_S)
                return request
            level = logging.WARNING if isinstance(error, WireError | BadPiece) else logging.INFO
            logger.log(level, "donor %s dropped: %s", donor.name[-6:], error)
        finally:
            self._requests.discard(request)
            self._tell()
        return request

    def _batch_for(self, donor: Donor, tier: int) -> list[int]:
        """The next pieces that nobody is giving at the moment, as far as it is this donor's turn."""
        prompt = [request for request in self._requests if not request.is_late()]
        if len(prompt) >= DONORS_AT_ONCE:
            return []
        under_way = {index for request in prompt for index in request.pending}
        before = [other.name for earlier in self._tiers[:tier] for other in earlier if other.name not in self._unavailable]
        batch = []
        for index in self._missing:
            if index in self._lacks[donor.name] or index in under_way:
                continue
            if all(index in self._lacks[name] for name in before):
                batch.append(index)
                if len(batch) == PIECES_A_REQUEST:
                    break
        return batch

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Until a request went on, or may have become late."""
        try:
            await asyncio.wait_for(self._changed.wait(), self.fetcher.late_s)
        except asyncio.TimeoutError:
            return
