"""One member's side of a round's exchange: push updates to reducers, reduce, pull all results.

A contributor pushes its encoded update of each part to the part's reducer, with the number of tokens it was trained on, and
signs every few updates; a reducer uses what is signed. It closes a part when every contributor has sent, is lost or is too
late: it clips updates that stand out, averages by these weights, encodes the mean once, and serves it. Its manifest lists the
digests, the contributors, who was clipped, and a digest of the inputs, which it keeps for members that check the mean. A
part's only contributor reduces it itself where its bandwidth allows; otherwise its codes are passed on unchanged and not sent
back to it. Every member pulls every other part. Sender, part and size are checked against the plan before anything is decoded,
and values that are not finite are refused.

When a reducer is lost, a further exchange covers the parts that moved to backups (a revision of the part table).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from itertools import chain

import numpy as np

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.fields import UPDATES_PER_SIGNATURE
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, PullRequest, Pushed, PushHeader, Update
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.kept_inputs import Input, KeptInputs
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part, mask_bytes, pulls, to_mask
from spes_p2p.rounds.plan import MAX_TOKENS
from spes_p2p.rounds.results import ABSENT, Results
from spes_p2p.rounds.sums import carried, inputs_digest, make_mean
from spes_p2p.storage.scratch import Scratch, memory_scratch, scratch_arrays

logger = logging.getLogger(__name__)

PUSH_SHARE = 0.5
"""Share of the exchange's time limit after which missing updates are left out, so that the results can still be pulled."""
PUSH_FIRST = 2.0
"""Bounds how long results wait for this peer's updates, which go first because reducers wait for them: in multiples of the time
that the upload bandwidth needs for the updates."""
PULL_STREAMS, LANE_BYTES = 16, 2**20
"""Bound the streams in which results arrive, over all reducers (but one each), and from below the bytes that each carries.
libp2p's muxer keeps 256 KiB of a stream in flight: window updates queue behind this peer's own uploads, so one stream would
leave a slow link's downstream half empty."""
WINDOW_BYTES, IN_FLIGHT_S = 2**18, 1.5
"""Bounds the time that the data in flight of all streams takes on the slower link: everything else queues behind it."""
INDEX_BYTES, WEIGHT_BYTES = 8, 8
"""A part's index and an update's tokens, little-endian; sized to keep the values behind them aligned."""
SLOWEST_BYTES_PER_S: float = SLOWEST_LINE_BITS / 8
"""A member that moves less is taken to stall, whatever its heartbeats say."""
STALLED_SILENCES = 2.0
"""A member complains about a reducer after this many times `silence_s`: a reducer leaves out silent contributors after one."""
YIELD_EVERY = 8
"""Yield to other tasks after encoding this many parts."""


class Exchange:
    """The exchange of one part table of a plan at one member. `run` ends when everything that will come has come."""

    def __init__(
        self,
        endpoint: RpcEndpoint,
        identity: Identity,
        results: Results,
        pending: Mapping[str, np.ndarray],
        residuals: Mapping[int, np.ndarray],
        timeout_s: float,
        behind: Callable[[Part], int],
        revision: int = 0,
        scratch: Scratch = memory_scratch,
        clips: bool = False,
    ):
        """`pending`: this peer's update by group name; overwritten with what was sent. `behind`: tokens of a part of it.

        `residuals`: this reducer's, by start of the part. `revision`: of the results' part table. `scratch`: for means and new
        residuals. `clips`: `sync.bound_influence`.
        """
        self.results = results
        self.plan = results.plan
        self.revision = revision
        self.sent: dict[int, tuple[Part, np.ndarray]] = {}
        """This peer's contributions as the reducers decode them, by part index."""
        self.new_residuals: dict[int, np.ndarray] = {}
        """Residuals of this peer's encodings as a reducer in this round, by start of the part's range."""
        me = self.plan.index(endpoint.peer_id)
        if me is None:
            raise ValueError("not a member of this plan")
        self.me = me
        self._endpoint, self._identity = endpoint, identity
        self._pending = pending
        self._residuals = residuals
        self._timeout_s = timeout_s
        self._behind = behind
        self._scratch = scratch
        self._names = [member.peer for member in self.plan.members]
        self._clips = clips
        self._unsigned: dict[int, dict[int, Input]] = {}
        """By contributor and part index: updates that wait for the contributor's signature."""
        self._arrived: dict[int, dict[int, Input]] = {}
        """By part index and contributor: signed updates, until the part is closed."""
        self._masks: dict[int, bytes] = {}
        self._clipped: dict[int, bytes] = {}
        self._inputs: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._pushing: set[int] = set()
        self._mine = {part.index: part for part in self._reduced_by(me)}
        several = {index: part for index, part in self._mine.items() if len(part.contributors) > 1}
        self._means = scratch_arrays(scratch, "means", {index: part.size for index, part in several.items()})
        """By part index: the mean; the new residual once the part is closed."""
        self.inputs = KeptInputs(several, scratch)
        """What this peer's means are made from."""
        self._closed: set[int] = set()
        self._order: list[int] = []
        """Indices of this peer's parts, in the order in which they were closed."""
        self._next_closed = asyncio.Event()
        self._manifest_ready = asyncio.Event()
        self._is_over = False
        self._pushed = {i: asyncio.Event() for i in range(len(self._names))}
        """By member; set when its updates are sent or, for a member that reduces nothing, when all are."""
        self._unsent = set(range(len(self._names))) - {me}
        """Members to which updates are still being sent."""
        self._someone_left = asyncio.Event()
        self.tell_stalled: Callable[[int, int], Awaitable[None]] = _tell_nobody
        """Called with a reducer that lives and does not go on, and the revision."""
        self._transfers: dict[int, list[asyncio.Task[None]]] = {}
        """What this member pushes to and pulls from each reducer."""
        self._part_bytes = max((part.encoded_bytes for part in results.parts), default=0)
        self._due_at: float | None = None
        """Loop time until which something must move between this member and a reducer."""
        self._push_due_at: dict[int, float] = {}
        """The same for the updates of each contributor to this reducer."""

    def with_revision(self, revision: int) -> Exchange:
        """Return an exchange of the same updates over the parts that this revision of the part table moved."""
        shared = self._endpoint, self._identity, self.results, self._pending, self._residuals, self._timeout_s, self._behind
        later = Exchange(*shared, revision, self._scratch, self._clips)
        later.tell_stalled = self.tell_stalled
        return later

    def give_up(self, lost: Collection[int]) -> None:
        """Wait no longer for members whose parts have moved to backups."""
        for member in lost:
            for task in self._transfers.get(member, ()):
                task.cancel()
        self._lost |= set(lost)
        self._someone_left.set()

    async def run(self) -> None:
        """Push, reduce and pull. A member that is lost costs its parts, nothing else.

        Once this has ended or was cancelled, requests for parts that are not reduced, and pushes, are refused.
        """
        others = [i for i in range(len(self._names)) if i != self.me]
        self._transfers = {i: [asyncio.create_task(each) for each in (self._push_to(i), *self._pulls_from(i))] for i in others}
        tasks = [asyncio.create_task(self._reduce()), *chain(*self._transfers.values())]
        self._moved(0)
        watching = asyncio.create_task(self._watch_reducers())
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s)
        finally:
            self._is_over = True
            for awaited in (self._next_closed, self._manifest_ready, *self._pushed.values()):
                awaited.set()
            await end_tasks([*tasks, watching])
            self._transfers.clear()  # failed tasks refer back to this exchange: its files would wait to be collected
        self.results.discard_unverified(self.revision)

    # Serving -----------------------------------------------------------------------------------------------------------

    async def on_push(self, stream: Stream) -> None:
        """Take a contributor's parts."""
        sender = self.plan.index(stream.remote)
        if sender is None or sender == self.me:
            raise Refused(Code.NOT_ALLOWED, "not a contributor of this plan")
        self._pushing.add(sender)
        try:
            while (message := await stream.any_message()).kind != Kind.END:
                size = len(message.body)
                self._push_due_at[sender] = self._extended(self._push_due_at.get(sender), self._push_patience_s(), size)
                if message.kind == Kind.PART:
                    self._take(sender, memoryview(message.body))
                elif message.kind == Kind.PUSHED:
                    self._take_signature(sender, unpack(Signed, message.body))
                else:
                    raise WireError(f"a frame of kind {message.kind} where an update belongs")
            await stream.send()
        finally:
            self._unsigned.pop(sender, None)
            self._lost.add(sender)
            self._someone_left.set()

    async def on_pull(self, stream: Stream, request: PullRequest) -> None:
        """Serve results as they are reduced: none waits for the updates of another part."""
        puller = self.plan.index(stream.remote)
        if puller is None:
            raise Refused(Code.NOT_ALLOWED, "not a member of this plan")
        if not 0 <= request.lane < request.lanes <= PULL_STREAMS:
            raise Refused(Code.MALFORMED, f"no lane {request.lane} of {request.lanes}")
        wanted = [index for index, part in self._mine.items() if pulls(part, puller)]
        in_lane = set(wanted[request.lane :: request.lanes])
        with contextlib.suppress(asyncio.TimeoutError):
            await stream.alive(asyncio.wait_for(self._pushed[puller].wait(), PUSH_FIRST * self._push_s()))
        served = 0
        while served < len(self._mine):
            if served == len(self._order):
                self._require_going_on()
                await stream.alive(self._next_closed.wait())
                continue
            index = self._order[served]
            if index in in_lane:
                await stream.send(_numbered(index), self.results.encoded.get(index, b""), kind=Kind.PART)
            served += 1
        if request.lane == 0:
            await stream.alive(self._manifest_ready.wait())
            manifest = self.results.manifests.get((self.revision, self.me))
            if manifest is None:
                raise Refused(Code.NOT_HERE, "no manifest in this exchange")
            await stream.send(pack(manifest), kind=Kind.MANIFEST)

    def _require_going_on(self) -> None:
        if self._is_over:
            raise Refused(Code.CLOSED, "this exchange is over")

    def _take(self, sender: int, message: memoryview) -> None:
        index, tokens, body = _unframe_push(message)
        part = self._mine.get(index)
        if part is None or sender not in part.contributors:
            raise Refused(Code.NOT_ALLOWED, f"part {index} is not yours to push here")
        if len(self._closed) < len(self._mine):
            self._require_going_on()
        unsigned = self._unsigned.setdefault(sender, {})
        if len(unsigned) == UPDATES_PER_SIGNATURE:
            raise Refused(Code.MALFORMED, f"more than {UPDATES_PER_SIGNATURE} updates without a signature")
        if len(body) != part.encoded_bytes:
            raise Refused(Code.MALFORMED, f"part {index}: {len(body)} bytes, the plan says {part.encoded_bytes}")
        if not 0 < tokens <= MAX_TOKENS:
            raise Refused(Code.MALFORMED, f"part {index} cannot have a weight of {tokens} tokens")
        if not part.codec.is_finite(body, part.size):
            raise Refused(Code.MALFORMED, f"part {index} has values that are not finite")
        if index in unsigned or index in self._closed or sender in self._arrived.get(index, {}):
            body = memoryview(bytes(body))  # counts once: what came first stays as it is
        elif index in self._means:
            body = self.inputs.store(part, sender, body)
        unsigned[index] = Input(Update(index, tokens, content_digest(body)), body)

    def _take_signature(self, sender: int, signed: Signed) -> None:
        """Use the updates that the contributor has signed now. Raises Refused unless it signed exactly those that it sent."""
        unsigned, pushed = self._unsigned.pop(sender, {}), read_signed(Pushed, signed, self._identity)
        if signed.peer != self._names[sender] or pushed.plan != self.plan.id:
            raise Refused(Code.NOT_PROVEN, "a signature under updates of another peer or plan")
        if pushed.updates != tuple(each.update for each in unsigned.values()):
            raise Refused(Code.NOT_PROVEN, "a signature under other updates than those that came")
        for index, each in unsigned.items():
            arrived = self._arrived.setdefault(index, {})
            if sender in arrived or index in self._closed:
                continue
            arrived[sender] = Input(each.update, each.body, signed)
            if self._complete(self._mine[index]):
                self._close(self._mine[index])
        if len(self._closed) == len(self._mine):
            self._someone_left.set()

    # Reducing ----------------------------------------------------------------------------------------------------------

    async def _reduce(self) -> None:
        """Close this peer's parts: each when the last update arrives or its sender is lost."""
        await self._close_complete()
        started = asyncio.get_running_loop().time()
        while len(self._closed) < len(self._mine):
            self._someone_left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._someone_left.wait(), self._endpoint.silence_s / 4)
            waited_s = asyncio.get_running_loop().time() - started
            silent = {i for i, peer in enumerate(self._names) if waited_s >= self._endpoint.detector.bound(peer)}
            self._lost |= silent - self._pushing - {self.me}
            now, begun = asyncio.get_running_loop().time(), started + self._push_patience_s()
            self._lost |= {i for i in self._pushing if now >= self._push_due_at.get(i, begun)}
            if waited_s >= PUSH_SHARE * self._timeout_s:
                self._lost |= set(range(len(self._names))) - {self.me}
            await self._close_complete()
        self._write_manifest()

    async def _close_complete(self) -> None:
        for count, (index, part) in enumerate(self._mine.items()):
            if index not in self._closed and self._complete(part):
                self._close(part)
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    def _write_manifest(self) -> None:
        """Write the manifest of this peer's parts."""
        own = self._reduced_by(self.me)
        if own:
            no_mask = bytes(mask_bytes(len(self._names)))
            digests = b"".join(self.results.digests.get(part.index, ABSENT) for part in own)
            masks = b"".join(self._masks.get(part.index, no_mask) for part in own)
            clipped = b"".join(self._clipped.get(part.index, no_mask) for part in own)
            inputs = b"".join(self._inputs.get(part.index, ABSENT) for part in own)
            self.results.add_manifest(Manifest(self.plan.id, self.me, self.revision, digests, masks, clipped, inputs))
        self._manifest_ready.set()

    def _complete(self, part: Part) -> bool:
        expected = set(part.contributors) - {self.me}
        return expected <= self._arrived.get(part.index, {}).keys() | self._lost

    def _close(self, part: Part) -> None:
        arrived = self._arrived.pop(part.index, {})
        contributors = set(arrived) | ({self.me} if self._has_update(part) else set())
        if contributors:
            if len(part.contributors) > 1:
                codes: bytes | memoryview = self._encode_mean(part, arrived)
            else:
                codes = self._encode_own(part) if self.me in contributors else arrived[part.contributors[0]].body
            self._put(part, codes)
            self._masks[part.index] = to_mask(contributors, len(self._names))
        self._closed.add(part.index)
        self._order.append(part.index)
        self._next_closed.set()
        self._next_closed = asyncio.Event()

    def _encode_mean(self, part: Part, arrived: dict[int, Input]) -> bytes:
        """Encode the clipped, token-weighted mean of what arrived and this peer's own update, plus some of the part's residual.

        The own update is encoded like all others, so that a member that checks the mean needs nothing else.
        """
        if self._has_update(part):
            codes = self._encode_own(part)
            own = Update(part.index, self._behind(part), content_digest(codes))
            arrived[self.me] = Input(own, self.inputs.store(part, self.me, codes))
        self.inputs.of_part[part.index] = arrived
        self._inputs[part.index] = inputs_digest({i: each.update for i, each in arrived.items()})
        mean = self._means[part.index]
        updates = {i: (each.update.tokens, partial(part.codec.decode, each.body, part.size)) for i, each in arrived.items()}
        clipped = make_mean(part, self.plan.members, updates, mean, self._clips)
        self._clipped[part.index] = to_mask(clipped, len(self._names))
        residual = self._residuals.get(part.start)
        if residual is None or residual.size != mean.size:
            codes = part.codec.encode(mean)
        else:
            codes = part.codec.encode(mean + carried(part, mean, residual))
            np.add(mean, residual, out=mean)
        if part.codec.is_lossy:
            np.subtract(mean, part.codec.decode(codes, part.size), out=mean)
            self.new_residuals[part.start] = mean
        return codes

    def _reduced_by(self, reducer: int) -> list[Part]:
        return self.results.reduced_by(reducer, self.revision)

    def _put(self, part: Part, encoded: bytes | memoryview) -> None:
        """Store a result, unless a later revision has moved its part."""
        if self.results.parts[part.index].revision == self.revision:
            self.results.put(part.index, encoded)

    def _own(self, part: Part) -> np.ndarray:
        return self._pending[part.group.name][part.start - part.group.start : part.stop - part.group.start]

    def _has_update(self, part: Part) -> bool:
        """Return whether this peer contributes to a part: not where the last round took all of its work on it."""
        return self.me in part.contributors and self._behind(part) > 0 and bool(np.isfinite(self._own(part)).all())

    def _encode_own(self, part: Part) -> bytes:
        """Encode this peer's update and replace it by what the others decode: the rest stays pending."""
        update = self._own(part)
        codes = part.codec.encode(update)
        if part.codec.is_lossy:
            np.copyto(update, part.codec.decode(codes, part.size))
        self.sent[part.index] = (part, update)
        return codes

    # Progress ----------------------------------------------------------------------------------------------------------

    def _moved(self, size: int) -> None:
        """Note that these bytes went to a reducer or came from one."""
        self._due_at = self._extended(self._due_at, self._patience_s(), size)

    def _extended(self, due_at: float | None, patience_s: float, size: int) -> float:
        """Return the new deadline after `size` bytes: they buy the time that the slowest line needs for them, up to a limit."""
        limit = asyncio.get_running_loop().time() + patience_s
        return limit if due_at is None else min(limit, due_at + size / SLOWEST_BYTES_PER_S * max(1, len(self._names) - 1))

    def _patience_s(self) -> float:
        """Return for how long nothing may move: the slowest line carries a part of each open stream meanwhile."""
        open_streams = sum(not task.done() for tasks in self._transfers.values() for task in tasks)
        return STALLED_SILENCES * self._endpoint.silence_s + open_streams * self._part_bytes / SLOWEST_BYTES_PER_S

    def _push_patience_s(self) -> float:
        """Return for how long nothing may come from a contributor, which sends to other reducers, too."""
        return self._endpoint.silence_s + (len(self._names) - 1) * self._part_bytes / SLOWEST_BYTES_PER_S

    async def _watch_reducers(self) -> None:
        """Complain about each reducer that is not done when nothing moves any more."""
        told = set[int]()
        while not self._is_over:
            await asyncio.sleep(self._endpoint.silence_s / 4)
            if self._due_at is not None and asyncio.get_running_loop().time() >= self._due_at:
                stalled = {i for i, tasks in self._transfers.items() if any(not task.done() for task in tasks)} - told
                told |= stalled
                for reducer in sorted(stalled):
                    logger.info("nothing moves between %s and this peer", self._names[reducer][-6:])
                    await self.tell_stalled(reducer, self.results.revision)

    # Calling -----------------------------------------------------------------------------------------------------------

    def _push_s(self) -> float:
        """Return the seconds that this peer's updates take at its announced bandwidth; 0 when that is 0 (not dialable)."""
        others = (part for i in range(len(self._names)) if i != self.me for part in self._reduced_by(i))
        pushed = sum(part.encoded_bytes for part in others if self.me in part.contributors)
        bandwidth = self.plan.members[self.me].bandwidth
        return pushed / bandwidth if bandwidth else 0.0

    async def _push_to(self, reducer: int) -> None:
        mine = [part for part in self._reduced_by(reducer) if self.me in part.contributors]
        if mine:
            try:
                async with self._endpoint.stream(self._names[reducer], PUSH) as stream:
                    await self._send_updates(stream, mine)
                    self._pushed[reducer].set()
                    self._has_sent(reducer)
                    await stream.message()
            except (PeerUnreachable, Refused, WireError) as error:
                logger.info("push to %s: %s", self._names[reducer][-6:], error)
        self._has_sent(reducer)

    async def _send_updates(self, stream: Stream, parts: list[Part]) -> None:
        await stream.send(pack(PushHeader(self.plan.id, self.revision)))
        unsigned: list[Update] = []
        for part in filter(self._has_update, parts):
            tokens = self._behind(part)
            codes = self._encode_own(part)
            if not pulls(part, self.me):
                self._put(part, codes)
            await stream.send(_numbered(part.index), tokens.to_bytes(WEIGHT_BYTES, "little"), codes, kind=Kind.PART)
            self._moved(part.encoded_bytes)
            unsigned.append(Update(part.index, tokens, content_digest(codes)))
            if len(unsigned) == UPDATES_PER_SIGNATURE:
                await self._send_signature(stream, unsigned)
                unsigned = []
        if unsigned:
            await self._send_signature(stream, unsigned)
        await stream.send(kind=Kind.END)

    async def _send_signature(self, stream: Stream, updates: list[Update]) -> None:
        await stream.send(pack(sign(Pushed(self.plan.id, tuple(updates)), self._identity)), kind=Kind.PUSHED)

    def _has_sent(self, reducer: int) -> None:
        """Note that this reducer has this peer's updates, or will not get them."""
        self._unsent.discard(reducer)
        if not self._unsent:
            for pushed in self._pushed.values():
                pushed.set()

    def _pulls_from(self, reducer: int) -> Iterator[Coroutine[None, None, None]]:
        """Yield one coroutine for each stream in which this reducer's results come."""
        reduced = self._reduced_by(reducer)
        if reduced:
            wanted = [part for part in reduced if pulls(part, self.me)]
            lanes = self._lanes(reducer, sum(part.encoded_bytes for part in wanted))
            for lane in range(lanes):
                yield self._pull(reducer, lane, lanes, {part.index: part for part in wanted[lane::lanes]})

    def _lanes(self, reducer: int, size: int) -> int:
        """Return the number of streams for `size` bytes from this reducer."""
        others = len(self._names) - 1
        bandwidth = min(self._endpoint.upload.last_bytes_per_s, self.plan.members[reducer].bandwidth)
        bearable = bandwidth * IN_FLIGHT_S / WINDOW_BYTES / others
        return max(1, int(min(bearable, PULL_STREAMS / others, size / LANE_BYTES)))

    async def _pull(self, reducer: int, lane: int, lanes: int, wanted: dict[int, Part]) -> None:
        try:
            async with self._endpoint.stream(self._names[reducer], PULL) as stream:
                await stream.send(pack(PullRequest(self.plan.id, self.revision, lane, lanes)))
                for _ in range(len(wanted)):
                    message = await stream.message_view(Kind.PART)
                    self._moved(len(message))
                    _store_part(self.results, message, wanted)
                if lane == 0:
                    self._take_manifest(reducer, await stream.message(Kind.MANIFEST))
        except (PeerUnreachable, Refused, WireError) as error:
            logger.info("pull from %s: %s", self._names[reducer][-6:], error)
            if not self._is_over:  # one that lives and ends its streams early would cost its parts in every round
                with contextlib.suppress(PeerUnreachable):
                    await self.tell_stalled(reducer, self.revision)

    def _take_manifest(self, reducer: int, message: bytes) -> None:
        manifest = unpack(Manifest, message)
        if (manifest.revision, manifest.reducer) != (self.revision, reducer):
            raise WireError("a manifest of another reducer")
        self.results.add_manifest(manifest)


def _store_part(results: Results, message: memoryview, wanted: dict[int, Part]) -> None:
    """Store one of the wanted parts (by index). Raises WireError when it is none of them or has another size.

    A part that a later revision moved comes from its backup instead.
    """
    index, body = _unframe(message)
    part = wanted.pop(index, None)
    if part is None:
        raise WireError(f"part {index} was not asked for")
    if body:
        if len(body) != part.encoded_bytes:
            raise WireError(f"part {index} has {len(body)} bytes")
        if not part.codec.is_finite(body, part.size):
            raise WireError(f"part {index} has values that are not finite")
        if results.parts[index].revision == part.revision:
            results.put(index, body)


async def _tell_nobody(reducer: int, revision: int) -> None:
    """Where there is no coordinator to complain to."""


def _numbered(index: int) -> bytes:
    """Return the bytes that precede a part in a message."""
    return index.to_bytes(INDEX_BYTES, "little")


def _unframe(message: memoryview) -> tuple[int, memoryview]:
    if len(message) < INDEX_BYTES:
        raise WireError("a part without its index")
    return int.from_bytes(message[:INDEX_BYTES], "little"), message[INDEX_BYTES:]


def _unframe_push(message: memoryview) -> tuple[int, int, memoryview]:
    """Return the part's index, the update's tokens, and the encoded update."""
    index, rest = _unframe(message)
    if len(rest) < WEIGHT_BYTES:
        raise WireError("an update without its tokens")
    return index, int.from_bytes(rest[:WEIGHT_BYTES], "little"), rest[WEIGHT_BYTES:]
