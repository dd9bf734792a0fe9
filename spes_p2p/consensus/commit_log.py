"""The certified heads from genesis on, as one peer knows them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spes_p2p.consensus.certificate import proves
from spes_p2p.consensus.control import is_rollback, rollback_head, rolls_back
from spes_p2p.consensus.output import LOG, Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Control, Decided, Head
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)


class CommitLog:
    """A chain of heads, each proven by its certificate.

    Of two heads for one round the one of the higher term wins: a reform is the only way to a fork, and this heals it.
    """

    def __init__(self, identity: Identity, genesis: Head, records: Sequence[bytes] = ()):
        """`records`: what the durable file holds; from the first one on that does not follow, they are dropped."""
        self._identity = identity
        self.genesis = genesis
        self._decided: list[Decided] = []
        self._given_up: set[str] = set()
        self.intact = 0
        """Records of the durable file that were taken up."""
        while self.intact < len(records) and self._take_up(records[self.intact]):
            self.intact += 1
        if self.intact < len(records):
            logger.warning("%s: record %d does not follow; what comes after it is learned again", LOG, self.intact)

    @property
    def head(self) -> Head:
        """The last certified head (genesis before round 0)."""
        return self._decided[-1].head if self._decided else self.genesis

    @property
    def round(self) -> int:
        """Number of the last decided round; -1 before round 0."""
        return self.head.round

    def at(self, round_number: int) -> Decided:
        """The certificate of a round; IndexError when it is not known."""
        if not 0 <= round_number < len(self._decided):
            raise IndexError(round_number)
        return self._decided[round_number]

    def head_at(self, round_number: int) -> Head:
        """The head of a round; round -1 is genesis."""
        return self.genesis if round_number < 0 else self.at(round_number).head

    def has(self, head: str, round_number: int) -> bool:
        """Is the head with this id the one that was decided in that round?"""
        return round_number <= self.round and self.head_at(round_number).id == head

    def gave_up(self, head: str) -> bool:
        """Was this head decided in a branch that was given up for one of a higher term?"""
        return head in self._given_up

    def since(self, round_number: int) -> tuple[Decided, ...]:
        """All certificates after that round."""
        return tuple(self._decided[max(-1, round_number) + 1 :])

    def admits(self, decided: Decided) -> bool:
        """Is this the next head, or one that replaces a branch? False when it is known already.

        Raises Refused when it does not follow or is not proven.
        """
        head = decided.head
        if head.round <= self.round:
            if head.id == self.head_at(head.round).id:
                return False
            if head.epoch <= self.head_at(head.round).epoch:
                raise Refused(Code.NOT_PROVEN, f"round {head.round} was decided otherwise")
        if head.round > self.round + 1:
            raise Refused(Code.NOT_PROVEN, f"round {head.round} does not follow round {self.round}")
        parent = self.head_at(head.round - 1)
        if not proves(decided, parent, self._identity) or (head.epoch == parent.epoch and not self.leads_to(parent, head)):
            raise Refused(Code.NOT_PROVEN, f"the certificate of round {head.round} does not hold")
        return True

    def put(self, decided: Decided) -> None:
        """Make an admitted head the last one. Heads of its round and later ones, in a lower term, are given up."""
        self._given_up.update(old.head.id for old in self._decided[decided.head.round :])
        del self._decided[decided.head.round :]
        self._decided.append(decided)

    def leads_to(self, parent: Head, head: Head) -> bool:
        """Can a plan, or a record that rolls back, lead from a head of this log to this one, in the same term?"""
        if head.plan:
            return not rolls_back(head.control, parent)
        return head == self.rolled_back(parent, head.control)

    def rolled_back(self, parent: Head, control: Control | None) -> Head | None:
        """The head after `parent` that rolls back as this record says; None when it says no such thing or that cannot be."""
        if control is None or not rolls_back(control, parent):
            return None
        digest = self._digest_of_base(control.rollback, parent)
        return rollback_head(parent, control, digest, self.head_at(control.rollback).step) if digest is not None else None

    def _digest_of_base(self, round_number: int, last: Head) -> str | None:
        """Of the base after this round, as the heads up to `last` certify it; None when they do not."""
        if round_number >= last.round:
            return None
        if is_rollback(self.head_at(round_number)):
            return self.head_at(round_number).base_digest
        for later in map(self.head_at, range(round_number + 1, last.round + 1)):
            if is_rollback(later):
                return None
            if later.plan:
                return later.base_digest
        return None

    def _take_up(self, record: bytes) -> bool:
        try:
            decided = unpack(Decided, record)
        except WireError:
            return False
        if decided.head.round > self.round + 1 or decided.head.parent != self.head_at(decided.head.round - 1).id:
            return False
        self.put(decided)
        return True
