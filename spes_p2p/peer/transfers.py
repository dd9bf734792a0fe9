"""What a member pushes to and pulls from reducers and hubs in one exchange, and which of them stall.

In a round with cells a result comes from the hub of this member's cell, the part's `parent`, and an update goes to it if it
sums the cell's updates. If a hub is lost, hubs of other cells hand on the same results.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from functools import cached_property
from itertools import chain

from spes_p2p.consensus.signed import sign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.fields import UPDATES_PER_SIGNATURE
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.rounds import Manifest, PullRequest, Pushed, PushHeader, Update
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.peer.exchange_context import ExchangeContext, SentUpdate, next_batch
from spes_p2p.peer.part_frames import Deadline, numbered, read_part, weighted
from spes_p2p.peer.serving import Serving
from spes_p2p.rounds.parts import Part, pulls, to_mask
from spes_p2p.rounds.results import ABSENT
from spes_p2p.rounds.traffic import stall_rates

logger = logging.getLogger(__name__)

PUSH_FIRST = 2.0
"""Bounds how long results wait for this peer's updates, which go first because reducers wait for them: in multiples of the time
that the upload bandwidth needs for the updates."""
PULL_STREAMS = 16
"""Bounds the streams in which results arrive, over all reducers (but one each). libp2p's muxer keeps 256 KiB of a stream in
flight: window updates queue behind this peer's own uploads, so one stream would leave a slow link's downstream half empty."""
LANE_BYTES = 2**20
"""Give each of these streams at least this many bytes to carry."""
WINDOW_BYTES, IN_FLIGHT_S = 2**18, 1.5
"""Bounds the time that the data in flight of all streams takes on the slower link: everything else queues behind it."""
COMPLAINT_SILENCES = 2.0
"""A member complains about a reducer after this many times `silence_s`: a reducer leaves out silent contributors after one.
With cells after twice as many, since hubs wait for their cells first."""

SIGN_AFTER = 0.25
"""On a slow line, sign after this share of `silence_s`."""

TellStalled = Callable[[int, int], Awaitable[None]]
"""Called with a reducer that lives and makes no progress, and the revision."""


class Transfers:
    """The streams that this member opens to reducers and hubs of one part table."""

    def __init__(self, context: ExchangeContext, update: SentUpdate, serving: Serving, revision: int):
        self.context, self._update, self._serving, self._revision = context, update, serving, revision
        me, parts = context.me, context.results.table(revision)
        self._handed: dict[int, list[Part]] = {}
        """By parent: the parts whose results it hands on to this peer, or whose reducer's manifest."""
        self._pushes: dict[int, list[Part]] = {}
        """By receiver: the parts of which this peer pushes its update, or its cell's mean."""
        for part in parts:
            if (parent := part.parent(me)) != me:
                self._handed.setdefault(parent, []).append(part)
            if part.pushes(me):
                self._pushes.setdefault(part.pushed_to(me), []).append(part)
        for its in self._pushes.values():  # what the receiver can hand on as it comes goes first
            its.sort(key=lambda part: len(part.contributors) > 1)
        self._silences = COMPLAINT_SILENCES * (2 if any(part.hubs for part in parts) else 1)
        self._pulling: dict[int, set[asyncio.Task[bool]]] = {}
        """By peer that is asked for results."""
        self._sent_to = {i: asyncio.Event() for i in self._pushes}
        """By receiver; set when it has this peer's own updates, or will not get them."""
        self._sending = set(self._pushes)
        """Receivers to which updates are under way, or about to be."""
        self._bytes_to = Counter[int]()
        """By receiver: bytes of updates sent to it."""
        self._news_of_sent = asyncio.Event()
        """Set when one of them has these updates, or will not get them."""
        self._sent_at = math.inf
        """Loop time at which this peer last sent an update to anybody, or began."""
        self._pushing: dict[int, list[asyncio.Task[None]]] = {}
        """By receiver."""
        self._part_bytes = max((part.encoded_bytes for part in context.results.parts), default=0)
        self._rate = stall_rates(context.plan.members)[context.me]
        self._deadline = Deadline(1, self._rate)
        """Until it, something must move between this member and a reducer."""
        self._bytes_left = 0
        """What is still to be sent to and received from all reducers."""
        self._open_streams = 0
        self._is_over = False

    @property
    def others(self) -> list[int]:
        """The members to which this peer pushes, or from which it pulls, ascending."""
        return sorted({*self._handed, *self._pushes})

    def begin(self, tell_stalled: TellStalled) -> list[asyncio.Task[None]]:
        """Open all streams; return their tasks."""
        self._sent_at = asyncio.get_running_loop().time()
        tasks = []
        pulling: list[asyncio.Task[None]] = []
        for i in self.others:
            if i in self._pushes:
                self._pushing[i] = [asyncio.create_task(self._push_to(i))]
                tasks += self._pushing[i]
            if i in self._handed:
                pulling += [asyncio.create_task(each) for each in self._pulls_from(i, tell_stalled)]
        tasks += pulling
        self._open_streams, self._deadline = len(tasks), Deadline(len(tasks), self._rate)
        pulled = (part for its in self._handed.values() for part in its if pulls(part, self.context.me))
        self._bytes_left = sum(part.encoded_bytes for part in chain(pulled, *self._pushes.values()))
        for task in tasks:
            task.add_done_callback(self._stream_ended)
        self._moved(0)
        return [*tasks, asyncio.create_task(self._pull_again(pulling, tell_stalled))]

    def give_up(self, lost: Collection[int]) -> None:
        """Cancel the transfers with these members; what a hub would have handed on comes from others."""
        for member in lost:
            for task in (*self._pulling.get(member, ()), *self._pushing.get(member, ())):
                task.cancel()

    def end(self) -> None:
        """Complain about nobody and hold up no results from now on."""
        self._is_over = True
        self._sending.clear()
        self._news_of_sent.set()
        for sent in self._sent_to.values():
            sent.set()
        self._pushing.clear()  # failed tasks refer back to this exchange: its files would wait to be collected

    async def wait_until_sent_to(self, member: int) -> None:
        """Wait until this member has what this peer sends it, and nothing is under way to others; results wait no longer.

        Nor do they wait for others that take nothing for `silence_s`: all members would complain about all reducers.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sent_to_all_and(member), PUSH_FIRST * self.push_s)

    async def _sent_to_all_and(self, member: int) -> None:
        if member in self._sent_to:
            await self._sent_to[member].wait()
        clock, silence_s = asyncio.get_running_loop().time, self.context.endpoint.silence_s
        while self._sending and (left_s := self._sent_at + silence_s - clock()) > 0:
            self._news_of_sent.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news_of_sent.wait(), min(left_s, silence_s))

    @cached_property
    def push_s(self) -> float:
        """Seconds that this peer's updates take at its announced bandwidth; 0 when that is 0 (not dialable)."""
        pushed = sum(part.encoded_bytes for part in chain(*self._pushes.values()))
        bandwidth = self.context.plan.members[self.context.me].bandwidth
        return pushed / bandwidth if bandwidth else 0.0

    async def watch(self, tell_stalled: TellStalled) -> None:
        """Complain about each reducer that is not done when nothing moves any more."""
        told = set[int]()
        while not self._is_over:
            await asyncio.sleep(self.context.endpoint.silence_s / 4)
            stalled = self.stalled() - told
            told |= stalled
            for reducer in sorted(stalled):
                logger.info("nothing moves between %s and this peer", self.context.names[reducer][-6:])
                await tell_stalled(reducer, self.context.results.revision)
                if self._other_hubs(reducer):
                    self._deadline = Deadline(self._open_streams, self._rate)
                    self._moved(0)
                    for pull in self._pulling.get(reducer, ()):
                        pull.cancel()

    def stalled(self) -> set[int]:
        """Return the reducers that are not done, if nothing moves any more."""
        if self._deadline.at is None or asyncio.get_running_loop().time() < self._deadline.at:
            return set()
        streams = (*self._pulling.items(), *self._pushing.items())
        return {peer for peer, tasks in streams if any(not task.done() for task in tasks)}

    def _moved(self, size: int) -> None:
        """Note that these bytes went to a reducer or came from one. The line may carry a part of each stream at once."""
        self._bytes_left -= size
        silence_s = self._silences * self.context.endpoint.silence_s
        under_way = min(self._open_streams * self._part_bytes, max(0, self._bytes_left))
        self._deadline.extend(size, silence_s + under_way / self._rate)

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        self._open_streams -= 1

    async def _push_to(self, reducer: int) -> None:
        endpoint, clock, name = self.context.endpoint, asyncio.get_running_loop().time, self.context.names[reducer]
        began, is_confirmed = math.inf, False
        try:
            async with endpoint.stream(name, PUSH) as stream:
                began = clock()
                await self._send_updates(stream, reducer)
                await stream.message()
                is_confirmed = True
                endpoint.upload.confirm(self._bytes_to[reducer], began, clock())
        except (PeerUnreachable, Refused, WireError) as error:
            logger.info("push to %s: %s", name[-6:], error)
        finally:
            if not any(self.context.me in part.summing for part in self._pushes[reducer]):  # a hub waits for its cell
                endpoint.nearness.note(name, self._bytes_to[reducer], began, clock(), is_confirmed)
            self._has_sent(reducer)

    async def _send_updates(self, stream: Stream, reducer: int) -> None:
        await stream.send(pack(PushHeader(self.context.plan.id, self._revision)))
        me, parts, signing = self.context.me, self._pushes[reducer], _SignedUpdates(stream, self.context)
        waiting = deque(part for part in parts if me not in part.summing)
        while waiting:
            for each in await self._update.take(next_batch(waiting)):
                if not pulls(each.part, me):
                    self.context.put(each.part, self._revision, each.body)
                    self._serving.settle(each.part.index)
                await self._send_update(signing, reducer, each.update, each.body)
        await signing.sign()
        self._has_sent(reducer)  # no result waits for a cell's mean, which waits for the whole cell
        for part in parts:
            if me in part.summing and (mean := await self.context.cell_means.get(part.index)) is not None:
                await self._send_update(signing, reducer, mean.update, mean.body)
        await signing.sign()
        await stream.send(kind=Kind.END)

    async def _send_update(self, signing: _SignedUpdates, reducer: int, update: Update, body: bytes | memoryview) -> None:
        """Send one update or cell's mean."""
        await signing.send(update, body)
        self._moved(len(body))
        self._bytes_to[reducer] += len(body)
        self._sent_at = asyncio.get_running_loop().time()

    def _has_sent(self, reducer: int) -> None:
        """Note that this reducer has this peer's own updates, or will not get them."""
        self._sent_to[reducer].set()
        self._sending.discard(reducer)
        self._news_of_sent.set()

    def _pulls_from(self, parent: int, tell_stalled: TellStalled) -> Iterator[Coroutine[None, None, None]]:
        """Yield one coroutine for each stream in which this parent's results come."""
        wanted = [part for part in self._handed[parent] if pulls(part, self.context.me)]
        lanes = self._lanes(parent, sum(part.encoded_bytes for part in wanted))
        for lane in range(lanes):
            yield self._pull(parent, lane, lanes, {part.index: part for part in wanted[lane::lanes]}, tell_stalled)

    def _lanes(self, parent: int, size: int) -> int:
        """Return the number of streams for `size` bytes from this parent."""
        parents = len(self._handed)
        bandwidth = min(self.context.endpoint.upload.last_bytes_per_s, self.context.plan.members[parent].bandwidth)
        bearable = bandwidth * IN_FLIGHT_S / WINDOW_BYTES / parents
        return max(1, int(min(bearable, PULL_STREAMS / parents, size / LANE_BYTES)))

    async def _pull(
        self, parent: int, lane: int, lanes: int, wanted: dict[int, Part], tell_stalled: TellStalled
    ) -> None:
        """Pull the wanted parts (by index) from their parent, or what that does not give from hubs of other cells."""
        in_lane = tuple(wanted)
        missing = {part.reducer for part in self._handed[parent]} if lane == 0 else set[int]()
        try:
            plan, revision = self.context.plan.id, self._revision
            request = PullRequest(plan, revision, lane, lanes)
            if await self._given_by(parent, request, wanted, missing, tell_stalled):
                return
            for hub in self._other_hubs(parent):
                if not wanted and not missing:
                    return
                asked = {index: part for index, part in wanted.items() if hub in part.hubs}
                for index in asked:
                    del wanted[index]
                mask = to_mask(tuple(asked), len(self.context.results.parts))
                await self._given_by(hub, PullRequest(plan, revision, parts=mask), asked, missing, tell_stalled)
                wanted |= asked
        finally:
            self._serving.settle(*in_lane)
            for reducer in missing:
                self._serving.settle_manifest(reducer)

    async def _pull_again(self, pulling: Sequence[asyncio.Task[None]], tell_stalled: TellStalled) -> None:
        """Pull from reducers what hubs gave otherwise than the manifests say, or not at all."""
        if not pulling:
            return
        await asyncio.wait(pulling)
        results, wanted = self.context.results, dict[int, dict[int, Part]]()
        for part in (part for parent, its in self._handed.items() for part in its if parent != part.reducer):
            if pulls(part, self.context.me) and not results.verified(part) and results.digest_of(part) != ABSENT:
                wanted.setdefault(part.reducer, {})[part.index] = part
        for reducer, its in wanted.items():
            lacks = set() if (self._revision, reducer) in results.manifests else {reducer}
            request = PullRequest(results.plan.id, self._revision, parts=to_mask(tuple(its), len(results.parts)))
            await self._given_by(reducer, request, its, lacks, tell_stalled)

    async def _given_by(
        self, peer: int, request: PullRequest, wanted: dict[int, Part], missing: set[int], tell_stalled: TellStalled
    ) -> bool:
        """As `_pull_from`; False, too, when the peer is given up meanwhile."""
        pull = asyncio.ensure_future(self._pull_from(peer, request, wanted, missing, tell_stalled))
        self._pulling.setdefault(peer, set()).add(pull)
        try:
            await asyncio.wait({pull})
            return not pull.cancelled() and pull.result()
        finally:
            self._pulling[peer].discard(pull)
            await end_tasks([pull])

    async def _pull_from(
        self, peer: int, request: PullRequest, wanted: dict[int, Part], missing: set[int], tell_stalled: TellStalled
    ) -> bool:
        """Pull from one peer; take what comes out of `wanted` (by index). Return whether it gave all that it was asked for.

        `missing`: reducers whose manifests it may hand on; those that come are taken out.
        """
        known = frozenset(missing)
        try:
            async with self.context.endpoint.stream(self.context.names[peer], PULL) as stream:
                await stream.send(pack(request))
                for _ in range(len(wanted)):
                    message = await stream.message_view(Kind.PART)
                    self._moved(len(message))
                    self._serving.settle(self._store(message, wanted))
                while request.lane == 0 and (body := await stream.receive(Kind.MANIFEST)) is not None:
                    manifest = await unpack_beside(Manifest, body)
                    if manifest.reducer in known or not request.parts:  # of others, too, if it is asked in a hub's place
                        missing.discard(self._take_manifest(known, manifest))
            return True
        except (PeerUnreachable, Refused, WireError) as error:
            logger.info("pull from %s: %s", self.context.names[peer][-6:], error)
            if not self._is_over:  # one that lives and ends its streams early would cost its parts in every round
                with contextlib.suppress(PeerUnreachable):
                    await tell_stalled(peer, self._revision)
            return False

    def _other_hubs(self, parent: int) -> list[int]:
        """Return the hubs of other cells that hand on the results of this hub, the next cell's first."""
        handed = self._handed.get(parent, ())
        part = next((part for part in handed if parent in part.hubs and part.reducer != parent), None)
        if part is None:
            return []
        place, me = part.hubs.index(parent), self.context.me
        hubs = dict.fromkeys((*part.hubs[place + 1 :], *part.hubs[:place]))  # a moved part may name one twice
        return [hub for hub in hubs if hub not in (parent, me)]

    def _store(self, message: memoryview, wanted: dict[int, Part]) -> int:
        """Store one of the wanted parts (by index); return its index. Raises WireError for another one, or another size."""
        index, body = read_part(message)
        part = wanted.pop(index, None)
        if part is None:
            raise WireError(f"part {index} was not asked for")
        if body:
            if len(body) != part.encoded_bytes:
                raise WireError(f"part {index} has {len(body)} bytes")
            if not part.codec.is_valid(body, part.size):
                raise WireError(f"part {index} has values that are not finite")
            self.context.put(part, part.revision, body)
        return index

    def _take_manifest(self, reducers: Collection[int], manifest: Manifest) -> int:
        if manifest.revision != self._revision or manifest.reducer not in reducers:
            raise WireError("a manifest of another reducer")
        self.context.results.add_manifest(manifest)
        self._serving.settle_manifest(manifest.reducer)
        return manifest.reducer


class _SignedUpdates:
    """The updates in one stream, and the signatures under them.

    A reducer uses what is signed. So the first update has a signature of its own, and each signature stands under twice as many
    as the one before: the reducer and those behind it begin early, and later signatures cost little.
    """

    def __init__(self, stream: Stream, context: ExchangeContext):
        self._stream, self._context = stream, context
        self._unsigned: list[Update] = []
        self._due = 1
        """With how many updates the next signature comes."""
        self._signed_at = math.inf
        """Loop time of the last signature, or of the first update."""

    async def send(self, update: Update, body: bytes | memoryview) -> None:
        """Send one update, and the signature if it is due."""
        await self._stream.send(numbered(update.part), weighted(update.tokens), body, kind=Kind.PART)
        self._unsigned.append(update)
        now = asyncio.get_running_loop().time()
        self._signed_at = min(self._signed_at, now)
        if len(self._unsigned) >= self._due or now - self._signed_at >= SIGN_AFTER * self._context.endpoint.silence_s:
            await self.sign()
            self._due, self._signed_at = min(2 * self._due, UPDATES_PER_SIGNATURE), now

    async def sign(self) -> None:
        """Send a signature of the updates that have none."""
        if self._unsigned:
            pushed = Pushed(self._context.plan.id, tuple(self._unsigned))
            self._unsigned.clear()
            await self._stream.send(pack(sign(pushed, self._context.identity)), kind=Kind.PUSHED)
