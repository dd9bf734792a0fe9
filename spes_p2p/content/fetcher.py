"""The one way to download verified content: several donors at once, one set of policies for every kind.

- A donor is asked for a few pieces at a time, in the order in which they are wanted. Each piece is verified and stored on
  arrival, so a caller that stores durably can resume.
- A donor that sends a wrong piece, dies or stalls costs only the pieces requested from it: other donors are asked for them, and
  it is dropped for the rest of the download. A donor stalls when nothing arrives for two `silence_s`, or its mean rate falls
  below MIN_BYTES_PER_S.
- Pieces of a late request (slow, but not stalled) are also requested from another donor, after those of no request: no slow
  donor delays the end. A request is late to a donor that was itself faster, so donors that are equally slow repeat nothing.
- A busy donor is asked again later. A donor is not asked again for a piece that it lacks, and is dropped after EMPTY_REQUESTS
  consecutive requests without a piece.
- Donors come in tiers: a piece is requested from a tier when no available donor of an earlier tier has it.
- A donor gets at most REQUESTS_PER_PEER concurrent requests from this peer, over all downloads; a download uses at most
  MAX_CONCURRENT_DONORS donors at a time.

The endpoint's rate limits (`net/limits.py`) apply to every message.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, islice
from weakref import WeakValueDictionary

from spes_p2p.content.pieces import BadPiece, Body, Content, Donor, Keep
from spes_p2p.content.transfer import BUSY_RETRY_S, MAX_BUSY_RETRY_S, REQUESTS_PER_PEER, PeerDonor
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.content import PIECES_PER_REQUEST
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint
from spes_p2p.net.tasks import end_tasks

logger = logging.getLogger(__name__)

MAX_CONCURRENT_DONORS = 8
"""Bounds a download's connections and their receive buffers; late requests do not count."""
CLOCK_S = 1e-3
"""Shorter times are none."""
TELL_EVERY_S = 10.0
"""Say after this long that all donors are busy, and again."""
BUSY_PATIENCE_S, VISITORS_PATIENCE_S = 120.0, 3600.0
"""Drop a donor that has been busy for this long: a peer then looks for newer content and has kept its place; the second is for
visiting commands, which would end."""
EMPTY_REQUESTS = 4
"""Drop a donor after this many consecutive requests that gave no piece."""
MIN_BYTES_PER_S = 2**10
"""Drop donors below this rate: eight of them are slower than any usable link."""
LATE_SILENCES, LATE_BYTES_PER_S = 0.25, 2**16
"""A request is late when nothing arrives for this fraction of `silence_s`, or below this mean rate."""
MUCH_FASTER = 2.0
"""To a donor that gave before, a request is late below its own last rate divided by this instead: a liar that was fast once
makes only itself repeat more."""
TIER_BYTES_PER_S = 2**18
"""To a donor of a later tier, a request is late below this mean rate instead: no donor may have given before."""

FIRST_ASKED, WIDENING = 16, 4
"""Ask this many peers for what many have, then this many times more, until somebody has it."""

Tiers = Sequence[Sequence[Donor]]


def widening(peers: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the peers in groups, each several times as large as the one before; an empty one if there are none."""
    yield peers[:FIRST_ASKED]
    begin, size = FIRST_ASKED, WIDENING * FIRST_ASKED
    while begin < len(peers):
        yield peers[begin : begin + size]
        begin, size = begin + size, WIDENING * size


class Fetcher:
    """All downloads of one peer."""

    def __init__(self, endpoint: RpcEndpoint, busy_patience_s: float = BUSY_PATIENCE_S):
        self.busy_patience_s = busy_patience_s
        """Drop a donor that has been busy for this long."""
        self._endpoint = endpoint
        self._slots = WeakValueDictionary[str, asyncio.Semaphore]()
        """By donor, while a request to it waits or is under way."""

    @property
    def stalled_s(self) -> float:
        """Drop a donor after this long without a byte."""
        return STALLED_SILENCES * self._endpoint.silence_s

    @property
    def late_s(self) -> float:
        """Duplicate a request after this long without a byte."""
        return LATE_SILENCES * self._endpoint.silence_s

    def peers(self, names: Iterable[str]) -> list[Donor]:
        """Return these peers as donors, without duplicates: those first for which the owner vouches, believed lost ones last.

        Strangers could give just fast enough, and of records whose length only the donor knows, what is none in the end.
        """
        now, detector = asyncio.get_running_loop().time(), self._endpoint.detector
        ordered = sorted(dict.fromkeys(names), key=lambda name: (detector.is_lost(name, now), not self.is_trusted(name)))
        return [PeerDonor(self._endpoint, name) for name in ordered]

    def is_trusted(self, name: str) -> bool:
        """Return whether the owner vouches for a peer."""
        return self._endpoint.shares.is_trusted(name)

    async def fetch(self, content: Content, wanted: Iterable[int], donors: Tiers, keep: Keep) -> list[int]:
        """Download these pieces into `keep`; return the indices that no donor gave.

        Any error of `keep` except BadPiece ends the download.
        """
        return await _Download(self, content, wanted, donors, keep).run()

    async def fetch_single(self, content: Content, donors: Tiers) -> Body:
        """Download content of one piece. Raises PeerUnreachable when no donor gives it."""
        found: list[Body] = []

        async def keep(index: int, body: Body) -> None:
            found.append(body)

        if await self.fetch(content, [0], donors, keep):
            raise PeerUnreachable(f"no donor has {content.kind} {content.name[:12]}")
        return found[0]

    def slot(self, donor: Donor) -> asyncio.Semaphore:
        """Return the semaphore that bounds this peer's concurrent requests to a donor."""
        return self._slots.setdefault(donor.name, asyncio.Semaphore(REQUESTS_PER_PEER))


class _Request:
    """One batch requested from one donor, and its progress."""

    def __init__(self, download: _Download, donor: Donor, tier: int, batch: Sequence[int]):
        self.pending = set(batch)
        self.given, self.bytes = 0, 0
        self.retry_s: float | None = None
        """Set when the donor is busy: seconds until it may be asked again."""
        self.donor, self.tier = donor, tier
        self._download, self._batch = download, batch
        self._clock = asyncio.get_running_loop().time
        self._began_at = self._moved_at = self._clock()

    async def run(self) -> None:
        """Wait for the whole batch. Raises PeerUnreachable (also for a stalled donor), Refused, WireError, BadPiece."""
        stalled_s = self.donor.patience_s or self._download.fetcher.stalled_s
        giving = asyncio.ensure_future(self.donor.give(self._download.content, self._batch, self))
        try:
            while not giving.done():
                left_s = self._due_at(stalled_s, MIN_BYTES_PER_S) - self._clock()
                if left_s <= 0:
                    raise PeerUnreachable(f"stalled after {self.bytes} bytes in {self._clock() - self._began_at:.0f} s")
                await asyncio.wait({giving}, timeout=left_s)
            giving.result()
        finally:
            await end_tasks([giving])

    def is_late(self, bytes_per_s: float) -> bool:
        """Return whether the request is silent, or slower than this, so that it may be duplicated at another donor."""
        if self.donor.patience_s is not None:
            return self.patience_left_s <= CLOCK_S
        return self._clock() >= self._due_at(self._download.fetcher.late_s, bytes_per_s)

    @property
    def patience_left_s(self) -> float:
        """Seconds until a request to a donor with its own patience is late."""
        return math.inf if self.donor.patience_s is None else self._began_at + self.donor.patience_s - self._clock()

    @property
    def bytes_per_s(self) -> float:
        """Mean rate so far."""
        return self.bytes / max(1e-3, self._clock() - self._began_at)

    def count(self, size: int) -> None:
        """Record the arrival of `size` bytes."""
        self.bytes += size
        if size:
            self._moved_at = self._clock()

    async def put(self, index: int, body: Body | None) -> None:
        """Pass on a piece; None: the donor lacks it. Raises BadPiece."""
        self.pending.discard(index)
        self.given += body is not None
        await self._download.take(self.donor, index, body)

    def _due_at(self, silent_s: float, bytes_per_s: float) -> float:
        """Return the deadline for the next bytes: the end of a silence, or when the mean rate falls below the bound."""
        return min(self._moved_at + silent_s, self._began_at + silent_s + self.bytes / bytes_per_s)


class _Download:
    """One call of `Fetcher.fetch`."""

    def __init__(self, fetcher: Fetcher, content: Content, wanted: Iterable[int], donors: Tiers, keep: Keep):
        self.fetcher, self.content = fetcher, content
        self._missing = dict.fromkeys(wanted)
        self._keep = keep
        self._tiers = [list(tier) for tier in donors]
        self._lacks: dict[str, set[int]] = {donor.name: set() for tier in donors for donor in tier}
        self._dropped: set[str] = set()
        self._busy: set[str] = set()
        """Donors that refused the last request and are asked again later."""
        self._busy_since: dict[str, float] = {}
        self._empty: dict[str, int] = {}
        """Consecutive requests that gave no piece, by donor."""
        self._requests: set[_Request] = set()
        self._bytes_per_s: dict[str, float] = {}
        """Mean rate of the last request that gave any, by donor."""
        self._changed = asyncio.Event()
        self._told_at = asyncio.get_running_loop().time()

    async def run(self) -> list[int]:
        """Download; return the indices that no donor gave."""
        idle = [(donor, number) for number, tier in enumerate(self._tiers) for donor in tier]
        place = {donor.name: index for index, (donor, _) in enumerate(idle)}
        at_work: dict[asyncio.Task[None], tuple[Donor, int]] = {}
        try:
            while self._missing:
                for task in [task for task in at_work if task.done()]:
                    insort(idle, at_work.pop(task), key=lambda each: place[each[0].name])
                    task.result()
                idle = await self._put_to_work(idle, at_work)
                if not at_work:
                    break
                await self._wait_for_change()
        finally:
            await end_tasks(at_work)
        return list(self._missing)

    async def _put_to_work(
        self, idle: list[tuple[Donor, int]], at_work: dict[asyncio.Task[None], tuple[Donor, int]]
    ) -> list[tuple[Donor, int]]:
        """Let idle donors give what nobody is asked for yet; return those that stay idle, less those that cannot give more."""
        stay: list[tuple[Donor, int]] = []
        under_way: dict[tuple[int, float | None], Set[int] | None] = {}
        for donor, tier in idle:
            view = tier, self._bytes_per_s.get(donor.name)
            if view not in under_way:
                under_way[view] = self._under_way(*view)
            if under_way[view] is None:
                stay.append((donor, tier))
                continue
            if donor.name in self._dropped or all(index in self._lacks[donor.name] for index in self._missing):
                continue
            if not self._batch_for(donor, tier, under_way[view]):
                stay.append((donor, tier))
                continue
            task = asyncio.create_task(self._fetch_from(donor, tier))
            task.add_done_callback(lambda task: self._notify())
            at_work[task] = (donor, tier)
            await asyncio.sleep(0)  # until it has begun its request
            under_way.clear()
        return stay

    async def take(self, donor: Donor, index: int, body: Body | None) -> None:
        """Verify and store what a donor gave for a piece; None: it lacks the piece. Raises BadPiece."""
        if body is None:
            self._lacks[donor.name].add(index)
        elif not self.content.matches(index, body):
            raise BadPiece(f"piece {index} of {self.content.kind} {self.content.name[:12]} has a wrong hash")
        elif index in self._missing:
            await self._keep(index, body)
            self._missing.pop(index, None)
        self._notify()

    async def _fetch_from(self, donor: Donor, tier: int) -> None:
        """Request batches from one donor until it has nothing more to give at present, or is dropped."""
        clock, name = asyncio.get_running_loop().time, donor.name
        while name not in self._dropped:
            async with self.fetcher.slot(donor):
                if not (batch := self._batch_for(donor, tier, self._under_way(tier, self._bytes_per_s.get(name)))):
                    return
                request = await self._ask(donor, tier, batch)
            if request.retry_s is None:
                self._busy_since.pop(name, None)
                self._empty[name] = 0 if request.given else self._empty.get(name, 0) + 1
                if self._empty[name] == EMPTY_REQUESTS:
                    self._dropped.add(name)
            elif clock() - self._busy_since.setdefault(name, clock()) < self.fetcher.busy_patience_s:
                await asyncio.sleep(request.retry_s)
            else:
                self._dropped.add(name)

    async def _ask(self, donor: Donor, tier: int, batch: Sequence[int]) -> _Request:
        """Run one request; drop a donor that fails."""
        request = _Request(self, donor, tier, batch)
        self._busy.discard(donor.name)
        self._requests.add(request)
        try:
            await request.run()
            if request.bytes:
                self._bytes_per_s[donor.name] = request.bytes_per_s
        except (PeerUnreachable, Refused, WireError, BadPiece) as error:
            if isinstance(error, Refused) and error.code is Code.BUSY:
                self._busy.add(donor.name)
                request.retry_s = max(BUSY_RETRY_S, min(error.refusal.retry_s or 0.0, MAX_BUSY_RETRY_S))
                self._tell_of_wait(request, donor, error)
                return request
            self._dropped.add(donor.name)
            level = logging.WARNING if isinstance(error, WireError | BadPiece) else logging.INFO
            if isinstance(error, PeerUnreachable) or (isinstance(error, Refused) and error.code is Code.NOT_HERE):
                level = logging.DEBUG  # as usual for a peer that left, or that keeps a part of the text
            logger.log(level, "donor %s dropped: %s", donor.name[-6:], error)
        finally:
            self._requests.discard(request)
            self._notify()
        return request

    def _tell_of_wait(self, request: _Request, donor: Donor, error: Refused) -> None:
        """Say now and then that nothing comes, and how many wait before this peer."""
        now = asyncio.get_running_loop().time()
        if self._requests <= {request} and now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            logger.info("waiting for a turn to download %s: %s says that %s", self.content.kind, donor.name[-6:], error)

    def _batch_for(self, donor: Donor, tier: int, under_way: Set[int] | None) -> list[int]:
        """Return the next pieces for a donor: first those of no request that no available donor of an earlier tier can give."""
        if under_way is None:
            return []
        late = {request.donor.name for request in self._requests if request.is_late(TIER_BYTES_PER_S)}
        unavailable = self._dropped | self._busy | late
        before = [other.name for earlier in self._tiers[:tier] for other in earlier if other.name not in unavailable]
        asked, lacks = {index for request in self._requests for index in request.pending}, self._lacks[donor.name]
        new = (index for index in self._missing if index not in asked and all(index in self._lacks[name] for name in before))
        again = (index for index in self._missing if index in asked and index not in under_way)
        found: Iterable[int] = (index for index in chain(new, again) if index not in lacks)
        if self.content.is_chained:  # what other requests bring in between may come later
            first = next(iter(self._missing), 0)
            found = (index for place, index in enumerate(sorted(found), first) if index == place)
        return list(islice(found, PIECES_PER_REQUEST))

    def _under_way(self, tier: int, bytes_per_s: float | None) -> Set[int] | None:
        """Return the pieces that are about to come, to a donor of this tier and last rate.

        None where there are enough requests, or nothing is left to ask for.
        """
        late_below = LATE_BYTES_PER_S if bytes_per_s is None else bytes_per_s / MUCH_FASTER
        prompt = [each for each in self._requests if not each.is_late(TIER_BYTES_PER_S if each.tier < tier else late_below)]
        coming = {index for request in prompt for index in request.pending}
        return None if len(prompt) >= MAX_CONCURRENT_DONORS or self._missing.keys() <= coming else coming

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self) -> None:
        """Wait until a request makes progress, or may have become late."""
        left_s = [request.patience_left_s for request in self._requests if request.patience_left_s > CLOCK_S]
        try:
            await asyncio.wait_for(self._changed.wait(), min([self.fetcher.late_s, *left_s]))
        except asyncio.TimeoutError:
            return
