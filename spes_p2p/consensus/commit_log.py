"""The certified commits since genesis, as one peer knows them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from spes_p2p.consensus.admission import served
from spes_p2p.consensus.certificate import equivocators, proves
from spes_p2p.consensus.control import is_rollback, rollback_commit, rolls_back
from spes_p2p.consensus.output import LOG, Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Commit, Control
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)

RECENT = 8
"""Commits that a plan is made from: those whose assignments may be pending, and some reforms between them."""
KEPT_READ = 32
"""Commits that are held as objects, for all that a round looks up."""


class _Chain:
    """Certified commits by round. Those before the last KEPT_READ are held as bytes, which take much less memory."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._last: list[CertifiedCommit] = []

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, number: int) -> CertifiedCommit:
        place = number - len(self._packed)
        if place >= -len(self._last):
            return self._last[place]
        return unpack(CertifiedCommit, self._packed[number])

    def append(self, decided: CertifiedCommit) -> None:
        self._packed.append(pack(decided))
        self._last = [*self._last[1 - KEPT_READ :], decided]

    def cut(self, length: int) -> None:
        """Drop all but the first `length`."""
        left = range(max(0, length - KEPT_READ), length)
        self._last = [self[number] for number in left]
        del self._packed[length:]


class CommitLog:
    """A chain of commits, each proven by its certificate.

    Of two commits for one round, the one of the higher term wins: only a reform can fork the log, and this rule heals it.
    """

    def __init__(self, identity: Identity, genesis: Commit, records: Sequence[bytes] = ()):
        """`records`: of the durable file. The first one that does not follow and all after it are dropped."""
        self._identity = identity
        self.genesis = genesis
        self._decided = _Chain()
        self._given_up: set[str] = set()
        self._served: Counter[str] = Counter()
        """By peer, its rounds of service in this log."""
        self._reported: set[tuple[int, str]] = set()
        """Electors that signed two commits in one ballot, by round."""
        self.intact = 0
        """How many records of the durable file were loaded."""
        while self.intact < len(records) and self._load(records[self.intact]):
            self.intact += 1
        if self.intact < len(records):
            logger.warning("%s: record %d does not follow; the commits from there on are learned again", LOG, self.intact)

    @property
    def last(self) -> Commit:
        """The last certified commit (genesis before round 0)."""
        return self._decided[len(self._decided) - 1].commit if self._decided else self.genesis

    @property
    def round(self) -> int:
        """Number of the last decided round; -1 before round 0."""
        return self.last.round

    def at(self, round_number: int) -> CertifiedCommit:
        """Return a round's certified commit. Raises IndexError when it is not known."""
        if not 0 <= round_number < len(self._decided):
            raise IndexError(round_number)
        return self._decided[round_number]

    def commit_at(self, round_number: int) -> Commit:
        """Return a round's commit; round -1 is genesis."""
        return self.genesis if round_number < 0 else self.at(round_number).commit

    def has(self, commit: str, round_number: int) -> bool:
        """Return whether that round decided the commit with this id."""
        return round_number <= self.round and self.commit_at(round_number).id == commit

    def gave_up(self, commit: str) -> bool:
        """Return whether this commit is of a branch that was given up for one of a higher term."""
        return commit in self._given_up

    def recent(self, round_number: int) -> tuple[Commit, ...]:
        """Return the last RECENT commits up to this round, newest first."""
        return tuple(self.commit_at(each) for each in range(round_number, max(-2, round_number - RECENT), -1))

    def rounds_served(self, round_number: int) -> Mapping[str, int]:
        """Return by peer its rounds of service up to this one (`admission.served`), which end its probation."""
        later = Counter[str]()
        for decided in self.since(round_number):
            later.update(served(decided.commit))
        return self._served - later

    def since(self, round_number: int, count: int | None = None) -> tuple[CertifiedCommit, ...]:
        """Return the certified commits after that round; the first `count`, or all."""
        first, end = max(-1, round_number) + 1, len(self._decided)
        return tuple(self._decided[number] for number in range(first, end if count is None else min(end, first + count)))

    def admits(self, decided: CertifiedCommit) -> bool:
        """Return True for the next commit or one that replaces a branch, False for a known one.

        Raises Refused when it does not follow or is not proven.
        """
        commit = decided.commit
        if commit.round <= self.round:
            if commit.id == self.commit_at(commit.round).id:
                return False
            if commit.term <= self.commit_at(commit.round).term:
                self._report(commit.round, equivocators(decided, self.at(commit.round), self._identity))
                raise Refused(Code.NOT_PROVEN, f"round {commit.round} was decided otherwise")
        if commit.round > self.round + 1:
            raise Refused(Code.NOT_PROVEN, f"round {commit.round} does not follow round {self.round}")
        parent = self.commit_at(commit.round - 1)
        if not proves(decided, parent, self._identity) or (commit.term == parent.term and not self.leads_to(parent, commit)):
            raise Refused(Code.NOT_PROVEN, f"the certificate of round {commit.round} does not hold")
        return True

    def put(self, decided: CertifiedCommit) -> None:
        """Append an admitted commit; known commits of its round and later ones, all of lower terms, are given up."""
        for old in self.since(decided.commit.round - 1):
            self._given_up.add(old.commit.id)
            self._served.subtract(served(old.commit))
        if decided.commit.round < len(self._decided):
            self._decided.cut(decided.commit.round)
        self._decided.append(decided)
        self._served.update(served(decided.commit))

    def leads_to(self, parent: Commit, commit: Commit) -> bool:
        """Return whether a plan or a rollback can lead from `parent`, in this log, to this commit of the same term."""
        if commit.plan:
            return not rolls_back(commit.control, parent)
        return commit == self.rolled_back(parent, commit.control)

    def rolled_back(self, parent: Commit, control: Control | None) -> Commit | None:
        """Return the commit after `parent` by which this record rolls back; None when it does not or cannot."""
        if control is None or not rolls_back(control, parent):
            return None
        digest = self._digest_of_base(control.rollback, parent)
        return rollback_commit(parent, control, digest, self.commit_at(control.rollback).step) if digest is not None else None

    def _digest_of_base(self, round_number: int, last: Commit) -> str | None:
        """Return the digest of the base after this round if the commits up to `last` certify it, else None."""
        if round_number >= last.round:
            return None
        if is_rollback(self.commit_at(round_number)):
            return self.commit_at(round_number).base_digest
        for later in map(self.commit_at, range(round_number + 1, last.round + 1)):
            if is_rollback(later):
                return None
            if later.plan:
                return later.base_digest
        return None

    def _report(self, round_number: int, liars: Sequence[str]) -> None:
        """Log each of these electors once a round: whoever holds the other commit sends it again and again."""
        if new := [peer for peer in liars if (round_number, peer) not in self._reported]:
            self._reported |= {(round_number, peer) for peer in new}
            logger.error("round %d: signed two commits in one ballot: %s", round_number, ", ".join(new))

    def _load(self, record: bytes) -> bool:
        try:
            decided = unpack(CertifiedCommit, record)
        except WireError:
            return False
        if decided.commit.round > self.round + 1 or decided.commit.parent != self.commit_at(decided.commit.round - 1).id:
            return False
        self.put(decided)
        return True
