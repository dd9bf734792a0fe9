"""Members that lie, are silent, or take their time where others depend on what they serve."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.content import SnapshotInfo
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PULL, PUSH, ROUND, SNAPSHOT
from spes_p2p.messages.rounds import Pushed
from spes_p2p.net.interfaces import World
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.part_frames import INDEX_BYTES, WEIGHT_BYTES
from spes_p2p.peer.reducer import EncodedMean, Reducer
from spes_p2p.peer.transfers import TellStalled, Transfers
from spes_p2p.rounds.codecs import CODECS, Codec
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part
from spes_p2p.testing.attacks.tamper import Liar, Tamper, Tell, changed, tampered
from spes_p2p.testing.attacks.updates import with_bandwidth
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.wrapped import Wrapped

TARPIT_S = 2.0
"""Below the silence at which a peer counts as dead."""
CONTENT = ("file", "base_hashes", "base", "token_hashes", "tokens", "plan", "manifests", "parts", "record")


class Forger(Tamper):
    """Reverses all updates that come to it and invents signatures for them: its means, digests and manifests agree with each
    other, and it has nothing to show to whoever checks them.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self._digests: dict[tuple[str, int], bytes] = {}
        """By contributor and part, of the reversed updates."""

    def receive(self, frame: Frame) -> Frame:
        """Reverse a pushed update, and say so in what its contributor signed. One in another codec stays as it is."""
        if frame.method != PUSH or frame.is_answer:
            return frame
        if frame.kind == Kind.PUSHED:
            return changed(frame, Signed, self._resign)
        head, codes = frame.body[: INDEX_BYTES + WEIGHT_BYTES], frame.body[INDEX_BYTES + WEIGHT_BYTES :]
        elements = self._codec.elements(len(codes))
        if frame.kind != Kind.PART or self._codec.encoded_bytes(elements) != len(codes):
            return frame
        codes = self._codec.encode(np.negative(self._codec.decode(codes, elements)))
        self._digests[frame.sender, int.from_bytes(head[:INDEX_BYTES], "little")] = content_digest(codes)
        return replace(frame, body=head + codes)

    def _resign(self, signed: Signed) -> Signed:
        pushed = unpack(Pushed, signed.record)
        updates = (replace(each, digest=self._digests.get((signed.peer, each.part), each.digest)) for each in pushed.updates)
        return replace(signed, record=pack(replace(pushed, updates=tuple(updates))))


class _Credulous(Wrapped):
    def verify(self, peer_id: str, message: bytes, signature: bytes) -> bool:
        return True


class _Lying(Wrapped):
    """The identity of a reducer whose means are reversed by `_encode_lie`."""

    tell: Tell


_encode_mean = Reducer.encode_mean


def _encode_lie(reducer: Reducer, part: Part, updates: Mapping[int, Input]) -> EncodedMean:
    honest, identity = _encode_mean(reducer, part, updates), reducer.context.identity
    if not isinstance(identity, _Lying):
        return honest
    identity.tell(f"mean {part.index}")
    return replace(honest, encoded=part.codec.encode(np.negative(part.codec.decode(honest.encoded, part.size))))


class SilentReducer(Tamper):
    """Takes updates and serves no results, while its streams stay alive."""

    async def send(self, frame: Frame) -> Frame | None:
        """Leave out results, manifests and confirmations of pushes."""
        return None if frame.is_answer and frame.method in (PULL, PUSH) else frame


class LyingDonor(Tamper):
    """Serves wrong bytes of bases and of all other content, and names wrong bases."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    async def send(self, frame: Frame) -> Frame:
        """Change a byte of what is served."""
        if frame.is_answer and frame.method == SNAPSHOT:
            return changed(frame, SnapshotInfo, lambda info: replace(info, digest=f"{self._rng.getrandbits(256):064x}"))
        if not frame.is_answer or frame.method not in CONTENT or len(frame.body) < 16:
            return frame
        place = self._rng.randrange(8, len(frame.body))
        return replace(frame, body=frame.body[:place] + bytes([frame.body[place] ^ 255]) + frame.body[place + 1 :])


class Tarpit(Tamper):
    """Sends everything late."""

    async def send(self, frame: Frame) -> Frame:
        """Wait before each frame."""
        self.tell(f"late {frame.method}")
        await asyncio.sleep(TARPIT_S)
        return frame


class _Slanderous(Wrapped):
    """The identity of a member that complains about all that it exchanges with, and reports nothing."""

    tell: Tell


_begin_transfers = Transfers.begin


def _begin_slandering(transfers: Transfers, tell_stalled: TellStalled) -> list[asyncio.Task[None]]:
    tasks, identity = _begin_transfers(transfers, tell_stalled), transfers.context.identity
    if isinstance(identity, _Slanderous):
        tasks.append(asyncio.create_task(_complain(transfers, identity.tell, tell_stalled)))
    return tasks


async def _complain(transfers: Transfers, tell: Tell, tell_stalled: TellStalled) -> None:
    for reducer in transfers.others:
        tell(f"complaint {reducer}")
        await tell_stalled(reducer, transfers.context.results.revision)


class _NoReport(Tamper):
    async def send(self, frame: Frame) -> Frame | None:
        return None if (frame.method, frame.kind) == (ROUND, Kind.REPORT) else frame


def lying_reducer(liar: Liar) -> World:
    """Wrap the world of a reducer that reverses the means of its parts, and claims BANDWIDTH to get many.

    A mean is made inside the exchange, where no world reaches: its method is replaced, and lies for this identity only.
    """
    Reducer.encode_mean = _encode_lie  # type: ignore[method-assign, assignment]
    identity = _Lying(liar.world.identity)
    identity.tell = liar.tell
    return replace(with_bandwidth(liar), identity=cast(Identity, identity))


def forger(liar: Liar) -> World:
    """Wrap the world of a reducer that invents the updates of its parts, and claims BANDWIDTH to get many."""
    world = tampered(liar, Forger(CODECS[liar.config.sync.codec.shared]), with_bandwidth(liar))
    return replace(world, identity=cast(Identity, _Credulous(world.identity)))


def silent_reducer(liar: Liar) -> World:
    """Wrap the world of a reducer that lives and serves nothing, and claims BANDWIDTH to get many parts."""
    return tampered(liar, SilentReducer(), with_bandwidth(liar))


def slandering(liar: Liar) -> World:
    """Wrap the world of a member that says of all reducers that they stall, and keeps the round waiting for its report.

    As in `lying_reducer`, what no world reaches is replaced, for this identity only.
    """
    Transfers.begin = _begin_slandering  # type: ignore[method-assign, assignment]
    identity = _Slanderous(liar.world.identity)
    identity.tell = liar.tell
    return replace(tampered(liar, _NoReport()), identity=cast(Identity, identity))


def lying_donor(liar: Liar) -> World:
    """Wrap the world of a donor of wrong bytes."""
    return tampered(liar, LyingDonor(liar.world.rng))


def tarpit(liar: Liar) -> World:
    """Wrap the world of a peer that is late with everything."""
    return tampered(liar, Tarpit())
