"""What this peer had before its last phases, moments and pending work, for those that audit it (`rounds/audits.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import numpy as np

from spes_p2p.consensus.admission import standing_of
from spes_p2p.content.pieces import Body
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.codec import pack
from spes_p2p.messages.methods import PING
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Ping
from spes_p2p.peer.node import Node
from spes_p2p.rounds.audits import KEPT_MOMENTS_ROUNDS, are_audited, auditor_of, drawn_work
from spes_p2p.rounds.digest import content_digest
from spes_p2p.storage.interfaces import Draft
from spes_p2p.training.interface import Trainer
from spes_p2p.training.moments import moments_chunks

FILES = "moments-"
"""What names of files begin with, before the round."""
PIECE_BYTES = 2**18
MAX_CONCURRENT_UPLOADS = KEPT_MOMENTS_ROUNDS
"""One for each auditor that may ask: an upload that outlasts a round keeps no other auditor waiting, which would fail this
peer."""
MEET_EVERY_S = 5.0
"""Connections are closed once they were unused for 30 s (`net/connections.py`)."""


@dataclass(frozen=True)
class _Kept:
    """One state, in a file."""

    content: memoryview
    digests: bytes
    """Of its pieces, 32 bytes each."""
    draft: Draft | None
    """Of the file, which a restart loses until it is published; None: an earlier run did that."""

    @property
    def root(self) -> bytes:
        return content_digest(self.digests)


class KeptMoments:
    """Keeps the state before the phase under way and before the last one, and longer what was drawn."""

    def __init__(self, node: Node):
        self._node = node
        self._of_round: dict[int, _Kept] = {}

    @property
    def are_wanted(self) -> bool:
        """Whether others may audit this peer's phases: the campaign has audits, and its owner does not vouch for it."""
        node = self._node
        is_vouched = standing_of("open", node.peer_id, node.invitation, node.log.last.helpers) == "vouched"
        return are_audited(node.campaign.config) and not is_vouched

    async def serve(self) -> None:
        """Answer auditors from now on."""
        self._node.content.admit["moments"] = self._admit
        await self._node.content.serve("moments", self._piece, MAX_CONCURRENT_UPLOADS)

    def keep(self, round_number: int, trainer: Trainer, base: np.ndarray) -> None:
        """Keep the state before the phase whose work goes into this round. In a worker thread, before the first step."""
        draft, size = self._node.world.store.draft(f"{FILES}{round_number}"), 0
        for chunk in moments_chunks(trainer, base, round_number):
            draft.write(size, chunk)
            size += memoryview(chunk).nbytes
        self._of_round[round_number] = _kept(draft.view(), draft)

    def save(self, round_number: int) -> None:
        """Keep the state before this round's phase over a restart, if it is kept at all. In a worker thread.

        Needed from the first checkpoint within the phase on, from which a restart continues it, and while it is drawn.
        """
        kept = self._of_round.get(round_number)
        if kept is not None and kept.draft is not None:
            kept.draft.publish()
            if round_number not in self._of_round:  # dropped meanwhile
                self._node.world.store.delete(f"{FILES}{round_number}")

    async def load(self) -> None:
        """Take up what an earlier run saved, and meet the auditors who wait for it."""
        node = self._node
        self._of_round = await node.world.run_blocking(self._saved)
        self.forget()
        for number in self._of_round:
            self._meet_auditor_of(number)

    def _saved(self) -> dict[int, _Kept]:
        store = self._node.world.store
        found = ((int(name.removeprefix(FILES)), store.read(name)) for name in store.names(FILES))
        return {number: _kept(content, None) for number, content in found if content is not None}

    def digest(self, round_number: int) -> bytes:
        """Return what this peer commits to in the announcement for a round; empty where it keeps nothing."""
        kept = self._of_round.get(round_number)
        return b"" if kept is None else kept.root

    def forget(self) -> None:
        """Drop what nobody may ask for any more. After a round was applied."""
        for number in [number for number in self._of_round if not self._may_be_asked(number)]:
            del self._of_round[number]
            self._node.world.store.delete(f"{FILES}{number}")

    def meet_auditor(self) -> None:
        """Stay connected with the auditor of what the last round draws of this peer, after it was applied.

        The auditor may not be able to dial this peer, and a relay carries less than a piece.
        """
        self._meet_auditor_of(self._node.log.round)

    def _meet_auditor_of(self, number: int) -> None:
        log, me = self._node.log, self._node.peer_id
        if number in self._of_round and number <= log.round and self._is_drawn(number):
            auditor = auditor_of(log.commit_at(number), me)
            if auditor is not None:
                self._node.spawn(self._keep_meeting(auditor, number))

    async def _keep_meeting(self, auditor: str, number: int) -> None:
        with contextlib.suppress(UserError):  # the disk is full: only a restart would need it
            await self._node.world.run_blocking(self.save, number)
        while number in self._of_round:
            await self._node.endpoint.is_there(auditor, PING, pack(Ping(-1)))
            await asyncio.sleep(MEET_EVERY_S)

    def _may_be_asked(self, number: int) -> bool:
        log = self._node.log
        return number >= log.round or (number > max(log.begins, log.round - KEPT_MOMENTS_ROUNDS) and self._is_drawn(number))

    def _is_drawn(self, number: int) -> bool:
        log = self._node.log
        return self._node.peer_id in drawn_work(log.recent(number), log.services(number), self._node.campaign.config)

    def _admit(self, peer: str, root: str) -> None:
        """Raise Refused for others than the auditor whose turn it is."""
        number = next((number for number, kept in self._of_round.items() if kept.root.hex() == root), None)
        if number is None:
            raise Refused(Code.NOT_HERE, "these moments are not kept here")
        if number > self._node.log.round:
            raise Refused(Code.BEHIND, "that round is not known here yet")
        if auditor_of(self._node.log.commit_at(number), self._node.peer_id) != peer:
            raise Refused(Code.NOT_ALLOWED, "another member audits this peer")

    async def _piece(self, root: str, index: int) -> Body | None:
        kept = next((each for each in self._of_round.values() if each.root.hex() == root), None)
        if kept is None:
            raise Refused(Code.NOT_HERE, "these moments are not kept here")
        if index == 0:
            return kept.digests
        piece = kept.content[(index - 1) * PIECE_BYTES : index * PIECE_BYTES]
        return piece or None


def _kept(content: memoryview, draft: Draft | None) -> _Kept:
    pieces = (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))
    return _Kept(content, b"".join(map(content_digest, pieces)), draft)
