"""A reducer, and a hub: takes updates of its parts, makes and encodes their means."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_

import numpy as np

from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.fields import UPDATES_PER_SIGNATURE
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, Pushed, Update
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.cell_means import CellMean
from spes_p2p.peer.exchange_context import EncodedUpdate, ExchangeContext, SentUpdate, next_batch
from spes_p2p.peer.kept_inputs import Input, KeptInputs
from spes_p2p.peer.part_frames import Deadline, read_update
from spes_p2p.peer.push_patience import PushPatience
from spes_p2p.peer.serving import Serving
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part, is_unwatched, mask_bytes, to_mask
from spes_p2p.rounds.plan import MAX_TOKENS
from spes_p2p.rounds.planned import trusted
from spes_p2p.rounds.reducer_residual import residual_key
from spes_p2p.rounds.results import ABSENT
from spes_p2p.rounds.sums import (
    behind_means,
    check_contributors,
    encode_mean,
    inputs_digest,
    make_mean,
    may_be_summed,
    to_residual,
    tokens_behind,
)
from spes_p2p.rounds.traffic import stall_rates
from spes_p2p.storage.scratch import scratch_arrays

ANY_RATE = 1.0
"""Bytes per second, for a sender that counts as stalled only when nothing comes."""


@dataclass(frozen=True)
class EncodedMean:
    """What a reducer makes of a part with several contributors."""

    encoded: bytes
    clipped: set[int]
    """Members whose updates were clipped."""
    inputs: bytes
    """The inputs' digest, as the manifest names it."""


class Reducer:
    """The sums of one part table that this member makes: of the parts that it reduces, and as a hub of its cell's updates.

    A sum is closed once no further update of it can arrive. Closed sums are made one after the other, in worker threads,
    which write only what nobody else reads: the state of the exchange changes on the event loop.
    """

    def __init__(self, context: ExchangeContext, update: SentUpdate, serving: Serving, revision: int):
        self.context, self._update, self._serving, self._revision = context, update, serving, revision
        self.new_residuals: dict[int, np.ndarray] = {}
        """Residuals of this round's encodings, by `residual_key`."""
        self._mine = {part.index: part for part in context.results.reduced_by(context.me, revision)}
        self._cells = {} if revision else _cell_sums(context)
        self._sums = self._mine | self._cells
        """By key: a part's index, or for a cell's sum that plus the number of parts."""
        several = {key: part for key, part in self._sums.items() if len(part.inputs) > 1}
        self._means = scratch_arrays(context.scratch, "means", {key: part.size for key, part in several.items()})
        """By key: the mean; the new residual once the sum is made."""
        self.inputs = KeptInputs(several, context.scratch)
        """What the means are made from."""
        self._unsigned: dict[int, dict[int, Input]] = {}
        """By contributor and part index: updates that wait for the contributor's signature."""
        self._arrived: dict[int, dict[int, Input]] = {}
        """By key and contributor: signed updates, until the sum is closed."""
        self._masks: dict[int, bytes] = {}
        self._clipped: dict[int, bytes] = {}
        self._inputs: dict[int, bytes] = {}
        own = {key for key, part in self._mine.items() if context.me in part.summing}
        self._awaited = {key: set(part.inputs) - (set() if key in own else {context.me}) for key, part in self._sums.items()}
        """By key: contributors whose update, or hubs whose cell's mean, is still waited for."""
        self._gone: set[int] = set()
        """Contributors that were removed from these, as they are lost or have finished."""
        self._lost: set[int] = set()
        """Members whose updates are not waited for."""
        self._pushing: set[int] = {context.me}
        """Members that opened a stream for their updates."""
        self._streams: dict[int, Stream] = {}
        """Their streams."""
        self._finished_pushing: set[int] = set()
        """Those of them whose stream has ended."""
        self._counted_at = self._closed_at = -math.inf
        """Loop times at which the last updates were signed, and the last sum was closed."""
        self._deadlines: dict[int, Deadline] = {}
        """By contributor: the time until which more of its updates must arrive."""
        self._hubs = {hub for part in self._mine.values() for hub in part.summing}
        self._turns, self._rates = context.push_turns, stall_rates(context.plan.members)
        self._closed: set[int] = set()
        """Keys of closed sums."""
        self._waiting: deque[Part] = deque()
        """Closed sums that are not made yet; the index of each is its key."""
        self._made: set[int] = set()
        self._news = asyncio.Event()
        """Set when a sum is closed, and when a contributor is done or lost."""
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
        """Refuse pushes from now on."""
        self._is_over = True
        if not self._revision:
            self.context.cell_means.end()

    async def run(self) -> None:
        """Make all sums: each when its last update arrives or the sender is lost. Then write the manifest."""
        started = asyncio.get_running_loop().time()
        patience = PushPatience(self.context, self._hubs, bool(self._cells), self._awaited_now())
        self._close_complete()
        taking = asyncio.create_task(self._take_own_cells())
        try:
            while True:
                while self._waiting:
                    await self._make(next_batch(self._waiting, lambda part: len(part.contributors) == 1))
                if len(self._made) == len(self._sums):
                    break
                self._news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), patience.next_look_s())
                awaited = self._awaited_now()
                given_up = patience.given_up(awaited, self._counted_at, self._closed_at)
                self._lose(given_up | self._unheard(awaited, started) | self._stalled(started))
        finally:
            patience.end()
            await end_tasks([taking])
        self._write_manifest()

    def _unheard(self, awaited: Set[int], started: float) -> set[int]:
        """Return the awaited members that have opened no stream, and were silent in all others for as long as a peer may be.

        On a full line a stream may open late, but no later than updates must follow once it is open.
        """
        now, dead_at = asyncio.get_running_loop().time(), self.context.endpoint.detector.dead_at
        unheard = awaited - self._pushing - self._lost
        return {i for i in unheard if now >= min(dead_at(self.context.names[i], started), self._push_due_at(i, started))}

    def _stalled(self, started: float) -> set[int]:
        """Return the members whose updates do not go on; end the streams of strangers among them."""
        now, known = asyncio.get_running_loop().time(), trusted(self.context.plan.members)
        stalled = {i for i in self._pushing - {self.context.me} if now >= self._push_due_at(i, started)}
        for i in stalled - known - self._finished_pushing:  # what it has begun to send takes memory
            self._streams[i].break_off(Refused(Code.CLOSED, "nothing more comes from you"))
        return stalled

    def _awaited_now(self) -> set[int]:
        return set().union(*self._awaited.values())

    async def _take_own_cells(self) -> None:
        """Take this hub's own means of its cell for the parts that it also reduces."""
        me = self.context.me
        for key, part in self._mine.items():
            if me in part.summing:
                mean = await self.context.cell_means.get(key)
                if mean is not None and key not in self._closed:
                    body = self.inputs.store(part, me, mean.body) if key in self._means else memoryview(mean.body)
                    self._arrived.setdefault(key, {})[me] = Input(mean.update, body)
                self._awaited[key].discard(me)
                if not self._awaited[key] and key not in self._closed:
                    self._close(key)

    def _push_due_at(self, contributor: int, started: float) -> float:
        deadline = self._deadlines.get(contributor)
        return started + self._patience_s(contributor) if deadline is None or deadline.at is None else deadline.at

    def _patience_s(self, contributor: int) -> float:
        """Return for how long nothing may arrive from a contributor, which sends to other reducers, too."""
        own_s = self.context.endpoint.silence_s + self._turn_s(contributor)
        if contributor not in self._hubs:
            return own_s
        # Between two means for this root, a member of the hub's cell may send each of the hub's parts for the other roots.
        return own_s + self.context.endpoint.silence_s + len(self._hubs) * max(map(self._turn_s, self._turns))

    def _turn_s(self, contributor: int) -> float:
        return self._turns.get(contributor, (0, 0))[1] / self._rates[contributor]

    async def take_updates(self, stream: Stream, sender: int) -> None:
        """Take a contributor's updates of parts."""
        self._pushing.add(sender)
        self._streams[sender] = stream
        rate = ANY_RATE if sender in self._hubs else self._rates[sender]  # a hub sends no faster than its slowest member
        deadline = self._deadlines.setdefault(sender, Deadline(self._turns.get(sender, (0, 0))[0], rate))
        try:
            while (message := await stream.any_message()).kind != Kind.END:
                if message.kind == Kind.PART:
                    is_new = self._take(sender, memoryview(message.body))
                elif message.kind == Kind.PUSHED:
                    is_new = self._take_signature(sender, unpack(Signed, message.body))
                else:
                    raise WireError(f"a frame of kind {message.kind} where an update belongs")
                deadline.extend(len(message.body) if is_new else 0, self._patience_s(sender))
            await stream.send()
        finally:
            self._unsigned.pop(sender, None)
            self._finished_pushing.add(sender)
            self._close_complete()
            self._news.set()

    def _key(self, index: int, sender: int) -> int | None:
        """Return the sum to which a member's update of a part belongs, or None."""
        part = self._mine.get(index)
        if part is not None and sender in part.inputs:
            return index
        key = index + len(self.context.results.parts)
        return key if key in self._cells and sender in self._cells[key].contributors else None

    def _take(self, sender: int, message: memoryview) -> bool:
        """Take an update; return whether it is new."""
        index, tokens, body = read_update(message)
        key = self._key(index, sender)
        if key is None:
            raise Refused(Code.NOT_ALLOWED, f"part {index} is not yours to push here")
        part = self._sums[key]
        if len(self._closed) < len(self._sums) and self._is_over:
            raise Refused(Code.CLOSED, "this exchange is over")
        unsigned = self._unsigned.setdefault(sender, {})
        if len(unsigned) == UPDATES_PER_SIGNATURE:
            raise Refused(Code.MALFORMED, f"more than {UPDATES_PER_SIGNATURE} updates without a signature")
        if len(body) != part.encoded_bytes:
            raise Refused(Code.MALFORMED, f"part {index}: {len(body)} bytes, the plan says {part.encoded_bytes}")
        if not 0 < tokens <= MAX_TOKENS:
            raise Refused(Code.MALFORMED, f"part {index} cannot have a weight of {tokens} tokens")
        if not may_be_summed(part, sender, body):
            raise Refused(Code.MALFORMED, f"part {index} has values that are not finite, or far too large")
        is_new = not (index in unsigned or key in self._closed or sender in self._arrived.get(key, {}))
        if not is_new:
            body = memoryview(bytes(body))  # counts once: what came first stays as it is
        elif key in self._means:
            body = self.inputs.store(part, sender, body)
        unsigned[index] = Input(Update(index, tokens, content_digest(body)), body)
        return is_new

    def _take_signature(self, sender: int, signed: Signed) -> bool:
        """Use the updates that the contributor has signed now; return whether one is new.

        Raises Refused unless it signed exactly those that it sent.
        """
        unsigned, pushed = self._unsigned.pop(sender, {}), read_signed(Pushed, signed, self.context.identity)
        if signed.peer != self.context.names[sender] or pushed.plan != self.context.plan.id:
            raise Refused(Code.NOT_PROVEN, "a signature under updates of another peer or plan")
        bare = [replace(each, members=b"", clipped=b"", inputs=b"") for each in pushed.updates]
        if bare != [each.update for each in unsigned.values()]:
            raise Refused(Code.NOT_PROVEN, "a signature under other updates than those that came")
        counted = 0
        for update in pushed.updates:
            key = self._key(update.part, sender)
            assert key is not None
            check_contributors(update, self._sums[key], sender, len(self.context.names))
            arrived = self._arrived.setdefault(key, {})
            if sender in arrived or key in self._closed:
                continue
            counted += 1
            arrived[sender] = Input(update, unsigned[update.part].body, signed)
            self._awaited[key].discard(sender)
            if not self._awaited[key]:
                self._close(key)
        if counted:
            self._counted_at = asyncio.get_running_loop().time()
        return counted > 0

    def _close_complete(self) -> None:
        gone = (self._lost | self._finished_pushing) - self._gone
        self._gone |= gone
        for key in self._sums:
            self._awaited[key] -= gone
            if key not in self._closed and not self._awaited[key]:
                self._close(key)

    def _close(self, key: int) -> None:
        self._closed.add(key)
        self._closed_at = asyncio.get_running_loop().time()
        self._waiting.append(self._sums[key])
        self._news.set()

    async def _make(self, batch: Sequence[Part]) -> None:
        """Make closed sums, unless the exchange ends meanwhile; keep and hand on what follows from them."""
        me = self.context.me
        mine = [self._original(part) for part in batch if me in part.inputs and me not in part.summing]
        own = {each.part.index: each for each in await self._update.take(mine)} if mine else {}
        for part in batch:
            await self._make_sum(part, own.get(self._original(part).index))
        self._serving.settle(*(part.index for part in batch if part.index in self._made.intersection(self._mine)))

    def _original(self, part: Part) -> Part:
        """Return the part of the table of which this sum is made."""
        parts = self.context.results.parts
        return parts[part.index - len(parts)] if part.index in self._cells else part

    async def _make_sum(self, part: Part, own: EncodedUpdate | None) -> None:
        me, updates, mean = self.context.me, self._arrived.pop(part.index, {}), None
        several = len(part.inputs) > 1
        if own is not None:  # like all others, so that a member that checks the mean needs nothing else
            updates[me] = Input(own.update, self.inputs.store(part, me, own.body) if several else memoryview(own.body))
        if part.index in self._mine and is_unwatched(self.context.plan.members, part.group, _contributors(updates)):
            updates = {}
        if updates and several:
            mean = await self.context.run_blocking(self.encode_mean, part, updates)
        if self._is_over:
            return
        if part.index in self._cells:
            self.context.cell_means.put(self._original(part).index, self._cell_mean(part, updates, mean) if updates else None)
        else:
            if updates:
                encoded = updates[part.inputs[0]].body if mean is None else mean.encoded
                self.context.put(part, self._revision, encoded)
                self._note_contributors(part.index, updates, set() if mean is None else mean.clipped)
            if updates and part.is_mean:
                self._keep(part, updates, mean)
        self._made.add(part.index)

    def _cell_mean(self, part: Part, updates: Mapping[int, Input], mean: EncodedMean | None) -> CellMean:
        """Return the mean of a cell with its contributors; keep its inputs, and its residual for the next round."""
        index, members, made_from = self._original(part).index, self.context.plan.members, _updates(updates)
        if mean is not None and part.codec.is_lossy:
            self.new_residuals[residual_key(part, is_cell=True)] = self._means[part.index]
        body = updates[part.contributors[0]].body if mean is None else mean.encoded
        clipped = set() if mean is None else mean.clipped
        self.inputs.of_cell[index] = dict(updates)
        return CellMean(Update(
            index, tokens_behind(part, members, made_from, self.context.clips), content_digest(body),
            self._mask(set(updates)), self._mask(clipped), inputs_digest(made_from),
        ), body)

    def _note_contributors(self, index: int, updates: Mapping[int, Input], clipped: set[int]) -> None:
        """Note who is in a result, and whose update was clipped, here or by a hub."""
        behind = {i: each.update.members or self._mask({i}) for i, each in updates.items()}
        self._masks[index] = _union(behind.values())
        self._clipped[index] = _union([self._mask(set()), *(each.update.clipped for each in updates.values()),
                                       *(behind[i] for i in clipped)])

    def _keep(self, part: Part, updates: dict[int, Input], mean: EncodedMean | None) -> None:
        """Keep a mean's inputs for members that check it, their digest, and its residual for the next round.

        `mean`: None where a single cell's is the result.
        """
        self.inputs.of_part[part.index] = updates
        self._inputs[part.index] = inputs_digest(_updates(updates)) if mean is None else mean.inputs
        if part.codec.is_lossy and mean is not None:
            self.new_residuals[residual_key(part)] = self._means[part.index]

    def _mask(self, members: set[int]) -> bytes:
        return to_mask(members, len(self.context.names))

    def encode_mean(self, part: Part, updates: Mapping[int, Input]) -> EncodedMean:
        """Encode the clipped, token-weighted mean of these updates, by member, plus some of the part's residual.

        In a worker thread. The part's place in `_means` gets the new residual. The index of `part` is the sum's key.
        """
        mean = self._means[part.index]
        decoders = {i: (each.update.tokens, partial(part.codec.decode, each.body, part.size)) for i, each in updates.items()}
        made_from = _updates(updates)
        clipped = make_mean(part, self.context.plan.members, decoders, mean, self.context.clips, behind_means(made_from))
        residual = self.context.residuals.get(residual_key(part, part.index in self._cells))
        if residual is not None and residual.size != mean.size:
            residual = None
        encoded, decoded = encode_mean(part, mean, residual)
        if part.codec.is_lossy:
            to_residual(part, mean, residual, decoded)
        return EncodedMean(encoded, clipped, inputs_digest(made_from))

    def _write_manifest(self) -> None:
        if self._mine:
            results, no_mask = self.context.results, bytes(mask_bytes(len(self.context.names)))

            def joined(values: Mapping[int, bytes], default: bytes) -> bytes:
                return b"".join(values.get(index, default) for index in self._mine)

            results.add_manifest(Manifest(
                self.context.plan.id, self.context.me, self._revision, joined(results.digests, ABSENT),
                joined(self._masks, no_mask), joined(self._clipped, no_mask), joined(self._inputs, ABSENT),
            ))
        self._serving.settle_manifest(self.context.me)


def _cell_sums(context: ExchangeContext) -> dict[int, Part]:
    """Return what this member sums for its cell, by key: parts of its cell's contributors alone."""
    me, parts = context.me, context.results.parts
    mine = ((part.index + len(parts), part) for part in parts if me in part.summing)
    return {key: replace(part.of_cell(me), index=key) for key, part in mine}


def _updates(inputs: Mapping[int, Input]) -> dict[int, Update]:
    return {i: each.update for i, each in inputs.items()}


def _contributors(inputs: Mapping[int, Input]) -> set[int]:
    """Return the members whose work these updates and means of cells contain."""
    behind = behind_means(_updates(inputs))
    return {j for i in inputs for j in behind.get(i, (i,))}


def _union(masks: Collection[bytes]) -> bytes:
    """Return a mask of the members in any of these."""
    return reduce(or_, (int.from_bytes(mask, "little") for mask in masks)).to_bytes(max(map(len, masks)), "little")
