"""A reducer: takes contributors' updates of its parts, makes and encodes the means, and serves them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.fields import UPDATES_PER_SIGNATURE
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, PullRequest, Pushed, Update
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.exchange_context import ExchangeContext, SentUpdate
from spes_p2p.peer.kept_inputs import Input, KeptInputs
from spes_p2p.peer.part_frames import Deadline, numbered, read_update
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part, mask_bytes, pulls, push_turns, stall_rates, to_mask
from spes_p2p.rounds.plan import MAX_TOKENS
from spes_p2p.rounds.results import ABSENT
from spes_p2p.rounds.sums import encode_mean, inputs_digest, make_mean, to_residual
from spes_p2p.storage.scratch import scratch_arrays

PUSH_SHARE = 0.5
"""Share of the exchange's time limit after which missing updates are left out, so that the results can still be pulled."""


@dataclass(frozen=True)
class EncodedMean:
    """What a reducer makes of a part with several contributors."""

    encoded: bytes
    clipped: set[int]
    """Members whose updates were clipped."""
    inputs: bytes
    """The inputs' digest, as the manifest names it."""


class Reducer:
    """The parts of one part table that this member reduces.

    A part is closed once no further update of it can arrive. Closed parts are reduced one after the other, in worker threads,
    which write only what nobody else reads: the state of the exchange changes on the event loop.
    """

    def __init__(self, context: ExchangeContext, update: SentUpdate, revision: int):
        self.context, self._update, self._revision = context, update, revision
        self.new_residuals: dict[int, np.ndarray] = {}
        """Residuals of this round's encodings, by start of the part's range."""
        self._mine = {part.index: part for part in context.results.reduced_by(context.me, revision)}
        several = {index: part for index, part in self._mine.items() if len(part.contributors) > 1}
        self._means = scratch_arrays(context.scratch, "means", {index: part.size for index, part in several.items()})
        """By part index: the mean; the new residual once the part is closed."""
        self.inputs = KeptInputs(several, context.scratch)
        """What the means are made from."""
        self._unsigned: dict[int, dict[int, Input]] = {}
        """By contributor and part index: updates that wait for the contributor's signature."""
        self._arrived: dict[int, dict[int, Input]] = {}
        """By part index and contributor: signed updates, until the part is closed."""
        self._masks: dict[int, bytes] = {}
        self._clipped: dict[int, bytes] = {}
        self._inputs: dict[int, bytes] = {}
        self._awaited = {index: set(part.contributors) - {context.me} for index, part in self._mine.items()}
        """By part index: contributors whose update is still waited for."""
        self._gone: set[int] = set()
        """Contributors that were removed from these, as they are lost or have finished."""
        self._lost: set[int] = set()
        """Members whose updates are not waited for."""
        self._pushing: set[int] = set()
        """Members that opened a stream for their updates."""
        self._finished_pushing: set[int] = set()
        """Those of them whose stream has ended."""
        self._deadlines: dict[int, Deadline] = {}
        """By contributor: the time until which more of its updates must arrive."""
        self._turns, self._rates = push_turns(context.results.parts), stall_rates(context.plan.members)
        self._closed: set[int] = set()
        self._waiting: deque[Part] = deque()
        """Closed parts that are not reduced yet."""
        self._reduced: list[int] = []
        """Indices of reduced parts, in the order in which they were."""
        self._next_reduced = asyncio.Event()
        self._manifest_ready = asyncio.Event()
        self._news = asyncio.Event()
        """Set when a part is closed, and when a contributor is done or lost."""
        self._is_over = False

    def give_up(self, lost: Collection[int]) -> None:
        """Wait no longer for these members' updates."""
        self._lose(lost)
        self._news.set()

    def _lose(self, lost: Collection[int]) -> None:
        if not self._lost.issuperset(lost):
            self._lost |= set(lost)
            self._close_complete()

    def end(self) -> None:
        """Refuse requests for parts that are not reduced, and pushes, from now on."""
        self._is_over = True
        self._next_reduced.set()
        self._manifest_ready.set()

    async def run(self) -> None:
        """Reduce all parts: each when its last update arrives or the sender is lost. Then write the manifest."""
        clock, detector = asyncio.get_running_loop().time, self.context.endpoint.detector
        started = clock()
        self._close_complete()
        while len(self._reduced) < len(self._mine):
            while self._waiting:
                await self._reduce(self._waiting.popleft())
            if len(self._reduced) == len(self._mine):
                break
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), self.context.endpoint.silence_s / 4)
            waited_s = clock() - started
            unheard = set().union(*self._awaited.values()) - self._pushing - self._lost
            lost = {i for i in unheard if waited_s >= detector.bound(self.context.names[i])}
            lost |= {i for i in self._pushing if clock() >= self._push_due_at(i, started)}
            if waited_s >= PUSH_SHARE * self.context.timeout_s:
                lost |= set(self.context.others)
            self._lose(lost)
        self._write_manifest()

    def _push_due_at(self, contributor: int, started: float) -> float:
        deadline = self._deadlines.get(contributor)
        return started + self._patience_s(contributor) if deadline is None or deadline.at is None else deadline.at

    def _patience_s(self, contributor: int) -> float:
        """Return for how long nothing may arrive from a contributor, which sends to other reducers, too."""
        turn_bytes = self._turns.get(contributor, (0, 0))[1]
        return self.context.endpoint.silence_s + turn_bytes / self._rates[contributor]

    async def take_updates(self, stream: Stream, sender: int) -> None:
        """Take a contributor's updates of parts."""
        self._pushing.add(sender)
        deadline = self._deadlines.setdefault(sender, Deadline(self._turns.get(sender, (0, 0))[0], self._rates[sender]))
        try:
            while (message := await stream.any_message()).kind != Kind.END:
                deadline.extend(len(message.body), self._patience_s(sender))
                if message.kind == Kind.PART:
                    self._take(sender, memoryview(message.body))
                elif message.kind == Kind.PUSHED:
                    self._take_signature(sender, unpack(Signed, message.body))
                else:
                    raise WireError(f"a frame of kind {message.kind} where an update belongs")
            await stream.send()
        finally:
            self._unsigned.pop(sender, None)
            self._finished_pushing.add(sender)
            self._close_complete()
            self._news.set()

    async def serve_results(self, stream: Stream, puller: int, request: PullRequest) -> None:
        """Serve results as they are reduced: none waits for the updates of another part."""
        wanted = [index for index, part in self._mine.items() if pulls(part, puller)]
        in_lane = set(wanted[request.lane :: request.lanes])
        served = 0
        while served < len(self._mine):
            if served == len(self._reduced):
                self._require_going_on()
                await stream.alive(self._next_reduced.wait())
                continue
            index = self._reduced[served]
            if index in in_lane:
                await stream.send(numbered(index), self.context.results.encoded.get(index, b""), kind=Kind.PART)
            served += 1
        if request.lane == 0:
            await stream.alive(self._manifest_ready.wait())
            manifest = self.context.results.manifests.get((self._revision, self.context.me))
            if manifest is None:
                raise Refused(Code.NOT_HERE, "no manifest in this exchange")
            await stream.send(pack(manifest), kind=Kind.MANIFEST)

    def _require_going_on(self) -> None:
        if self._is_over:
            raise Refused(Code.CLOSED, "this exchange is over")

    def _take(self, sender: int, message: memoryview) -> None:
        index, tokens, body = read_update(message)
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
        if not part.codec.is_valid(body, part.size):
            raise Refused(Code.MALFORMED, f"part {index} has values that are not finite")
        if index in unsigned or index in self._closed or sender in self._arrived.get(index, {}):
            body = memoryview(bytes(body))  # counts once: what came first stays as it is
        elif index in self._means:
            body = self.inputs.store(part, sender, body)
        unsigned[index] = Input(Update(index, tokens, content_digest(body)), body)

    def _take_signature(self, sender: int, signed: Signed) -> None:
        """Use the updates that the contributor has signed now. Raises Refused unless it signed exactly those that it sent."""
        unsigned, pushed = self._unsigned.pop(sender, {}), read_signed(Pushed, signed, self.context.identity)
        if signed.peer != self.context.names[sender] or pushed.plan != self.context.plan.id:
            raise Refused(Code.NOT_PROVEN, "a signature under updates of another peer or plan")
        if pushed.updates != tuple(each.update for each in unsigned.values()):
            raise Refused(Code.NOT_PROVEN, "a signature under other updates than those that came")
        for index, each in unsigned.items():
            arrived = self._arrived.setdefault(index, {})
            if sender in arrived or index in self._closed:
                continue
            arrived[sender] = Input(each.update, each.body, signed)
            self._awaited[index].discard(sender)
            if not self._awaited[index]:
                self._close(self._mine[index])

    def _close_complete(self) -> None:
        gone = (self._lost | self._finished_pushing) - self._gone
        self._gone |= gone
        for index, part in self._mine.items():
            self._awaited[index] -= gone
            if index not in self._closed and not self._awaited[index]:
                self._close(part)

    def _close(self, part: Part) -> None:
        self._closed.add(part.index)
        self._waiting.append(part)
        self._news.set()

    async def _reduce(self, part: Part) -> None:
        """Make, keep and serve the result of a closed part, unless the exchange ends meanwhile."""
        me, updates = self.context.me, self._arrived.pop(part.index, {})
        own = await self._update.encode(part) if me in part.contributors else None
        several = len(part.contributors) > 1
        if own is not None:  # like all others, so that a member that checks the mean needs nothing else
            kept = self.inputs.store(part, me, own) if several else memoryview(own)
            updates[me] = Input(Update(part.index, self._update.tokens_of(part), content_digest(own)), kept)
        mean: EncodedMean | None = None
        if updates and several:
            mean = await self.context.run_blocking(self.encode_mean, part, updates)
        if self._is_over:
            return
        if mean is not None:
            self._keep(part, updates, mean)
        if updates:
            encoded = updates[part.contributors[0]].body if mean is None else mean.encoded
            self.context.put(part, self._revision, encoded)
            self._masks[part.index] = to_mask(set(updates), len(self.context.names))
        self._reduced.append(part.index)
        self._next_reduced.set()
        self._next_reduced = asyncio.Event()

    def _keep(self, part: Part, updates: dict[int, Input], mean: EncodedMean) -> None:
        """Keep a mean's inputs for members that check it, its residual for the next round, and its line of the manifest."""
        self.inputs.of_part[part.index] = updates
        self._inputs[part.index] = mean.inputs
        self._clipped[part.index] = to_mask(mean.clipped, len(self.context.names))
        if part.codec.is_lossy:
            self.new_residuals[part.start] = self._means[part.index]

    def encode_mean(self, part: Part, updates: Mapping[int, Input]) -> EncodedMean:
        """Encode the clipped, token-weighted mean of these updates, by member, plus some of the part's residual.

        In a worker thread. The part's place in `_means` gets the new residual.
        """
        mean = self._means[part.index]
        decoders = {i: (each.update.tokens, partial(part.codec.decode, each.body, part.size)) for i, each in updates.items()}
        clipped = make_mean(part, self.context.plan.members, decoders, mean, self.context.clips)
        residual = self.context.residuals.get(part.start)
        if residual is not None and residual.size != mean.size:
            residual = None
        encoded, decoded = encode_mean(part, mean, residual)
        if part.codec.is_lossy:
            to_residual(part, mean, residual, decoded)
        inputs = inputs_digest({i: each.update for i, each in updates.items()})
        return EncodedMean(encoded, clipped, inputs)

    def _write_manifest(self) -> None:
        if self._mine:
            results, no_mask = self.context.results, bytes(mask_bytes(len(self.context.names)))

            def joined(values: Mapping[int, bytes], default: bytes) -> bytes:
                return b"".join(values.get(index, default) for index in self._mine)

            results.add_manifest(Manifest(
                self.context.plan.id, self.context.me, self._revision, joined(results.digests, ABSENT),
                joined(self._masks, no_mask), joined(self._clipped, no_mask), joined(self._inputs, ABSENT),
            ))
        self._manifest_ready.set()
