"""The certified commits since genesis or a milestone, as one peer knows them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spes_p2p.consensus.admission import Service, add_service
from spes_p2p.consensus.certificate import proves
from spes_p2p.consensus.control import is_rollback, rollback_commit, rolls_back
from spes_p2p.consensus.milestone import ROLLBACK_ROUNDS, may_roll_back, place_of_next, proves_milestone
from spes_p2p.consensus.output import LOG, Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import MAX_LISTS, WireError, pack, pack_list, unpack, unpack_first
from spes_p2p.messages.consensus import CertifiedCommit, Commit, Control, Milestone, PastBase, Served, Verdict, Workload
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)

PAGE_BYTES = 2**20
"""Bounds what a peer reads at once before it can check any of it."""
PAGE_LISTS = MAX_LISTS // 2
RECENT = 8
"""Commits that a plan is made from: those whose assignments may be pending, and some reforms between them."""
KEPT_READ = 32
"""Commits that are held as objects, for all that a round looks up."""


class _Chain:
    """Certified commits by round. Those before the last KEPT_READ are held as bytes, which take much less memory."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        """Round of the first one."""
        self._packed: list[bytes] = []
        self._lists: list[int] = []
        """`_lists_in` each of them."""
        self._last: list[CertifiedCommit] = []

    @property
    def end(self) -> int:
        """The round after the last one."""
        return self.first + len(self._packed)

    @property
    def newest(self) -> CertifiedCommit | None:
        """The last one; None when there is none."""
        if self._last:
            return self._last[-1]
        return self[self.end - 1] if self._packed else None

    def __getitem__(self, number: int) -> CertifiedCommit:
        place = number - self.end
        if place >= -len(self._last):
            return self._last[place]
        return unpack(CertifiedCommit, self._packed[number - self.first])

    @property
    def sizes(self) -> list[int]:
        """Bytes of each of them."""
        return list(map(len, self._packed))

    def append(self, decided: CertifiedCommit) -> None:
        self._packed.append(pack(decided))
        self._lists.append(_lists_in(decided.commit))
        self._last = [*self._last[1 - KEPT_READ :], decided]

    def append_unread(self, packed: bytes, lists: int) -> None:
        """Append one that is not held as an object. `lists`: `_lists_in` it."""
        self._packed.append(packed)
        self._lists.append(lists)
        self._last = []

    def cut(self, end: int) -> None:
        """Drop those from round `end` on."""
        left = range(max(self.first, end - KEPT_READ), end)
        self._last = [self[number] for number in left]
        del self._packed[end - self.first :], self._lists[end - self.first :]

    def packed(self, first: int, end: int | None = None) -> list[bytes]:
        """Return those from round `first` on, as bytes; up to round `end`, or all."""
        return self._packed[first - self.first : None if end is None else end - self.first]

    def page_end(self, first: int, count: int) -> int:
        """Return the round after a page of those from round `first` on: `count`, PAGE_BYTES, PAGE_LISTS, and at least one."""
        size = lists = 0
        for number in range(first, min(self.end, first + count)):
            size, lists = size + len(self._packed[number - self.first]), lists + self._lists[number - self.first]
            if number > first and (size > PAGE_BYTES or lists > PAGE_LISTS):
                return number
        return min(self.end, first + count)

    def begin_at(self, first: int) -> None:
        """Drop those before round `first`."""
        self._lists = self._lists[first - self.first :]
        self._packed, self.first = self.packed(first), first
        self._last = self._last[-len(self._packed) :]


class CommitLog:
    """A chain of commits, each proven by its certificate.

    Of two commits for one round, the one of the higher term wins: only a reform forks the log while no elector lies, and this
    rule heals it.
    """

    def __init__(self, identity: Identity, genesis: Commit, records: Sequence[bytes] = ()):
        """`records`: of the durable file. The first one that does not follow and all after it are dropped."""
        self._identity = identity
        self.genesis = genesis
        self._begin()
        self._load(records, len(records) - KEPT_READ)
        if self.intact < len(records):
            self._begin()
            self._load(records, 0)
        if self.intact < len(records):
            logger.warning("%s: record %d does not follow; the commits from there on are learned again", LOG, self.intact)

    def _begin(self) -> None:
        self.milestone: Milestone | None = None
        """Where the log begins; None: with genesis."""
        self._decided = _Chain()
        self._given_up: set[str] = set()
        self._first_services: dict[str, Service] = {}
        """By peer, up to where the log begins."""
        self._services, self._counted = dict[str, Service](), -1
        """The same up to a round some time ago: a branch of later rounds may be given up."""
        self._asked: tuple[Commit, Mapping[str, Service]] | None = None
        """What `services` returned last, for the round of this commit."""
        self.intact = 0
        """How many records of the durable file were loaded."""

    @property
    def last(self) -> Commit:
        """The last certified commit (genesis before round 0)."""
        newest = self._decided.newest
        return self.genesis if newest is None else newest.commit

    @property
    def begins(self) -> int:
        """Round of the first commit that is held: the milestone's, or -1, genesis."""
        return -1 if self.milestone is None else self.milestone.decided.commit.round

    @property
    def earliest_reform(self) -> int:
        """The first round after which the owner may open a term: every log holds that commit."""
        return self.begins

    @property
    def is_long(self) -> bool:
        """Whether a newer milestone is due."""
        return place_of_next(self._decided.sizes) > 0

    @property
    def round(self) -> int:
        """Number of the last decided round; -1 before round 0."""
        return self.last.round

    def at(self, round_number: int) -> CertifiedCommit:
        """Return a round's certified commit. Raises IndexError when it is not known."""
        if not self._decided.first <= round_number < self._decided.end:
            raise IndexError(round_number)
        return self._decided[round_number]

    def commit_at(self, round_number: int) -> Commit:
        """Return a round's commit; round -1 is genesis."""
        return self.genesis if round_number < 0 else self.at(round_number).commit

    def has(self, commit: str, round_number: int) -> bool:
        """Return whether that round decided the commit with this id; False for a round before the milestone."""
        return self.begins <= round_number <= self.round and self.commit_at(round_number).id == commit

    def gave_up(self, commit: str) -> bool:
        """Return whether this commit is of a branch that was given up for one of a higher term."""
        return commit in self._given_up

    def recent(self, round_number: int) -> tuple[Commit, ...]:
        """Return the last RECENT commits up to this round, newest first."""
        oldest = max(self.begins, round_number - RECENT + 1)
        return tuple(self.commit_at(each) for each in range(round_number, oldest - 1, -1))

    def services(self, round_number: int) -> Mapping[str, Service]:
        """Return by peer its service up to this round (`admission.add_service`), which ends its probation."""
        found, counted = self._known_services(round_number)
        if counted == round_number and self._asked is not None and found is self._asked[1]:
            return found
        found = dict(found)
        for number in range(counted + 1, round_number + 1):
            add_service(found, self.commit_at(number))
        self._asked = self.commit_at(round_number), found
        return found

    def _known_services(self, round_number: int) -> tuple[Mapping[str, Service], int]:
        """Return services up to a round that is not later than this one, and that round."""
        if self._asked is not None:
            commit, services = self._asked
            if self._counted <= commit.round <= round_number and self.has(commit.id, commit.round):
                return services, commit.round
        if round_number >= self._counted:
            return self._services, self._counted
        return self._first_services, self.begins

    def since(self, round_number: int, count: int | None = None) -> tuple[CertifiedCommit, ...]:
        """Return the certified commits after that round; the first `count`, or all."""
        first, end = max(self._decided.first, round_number + 1), self._decided.end
        return tuple(self._decided[number] for number in range(first, end if count is None else min(end, first + count)))

    def page(self, round_number: int, count: int) -> tuple[CertifiedCommit, ...]:
        """Return the first certified commits after that round: at most `count`, PAGE_BYTES, PAGE_LISTS, and at least one."""
        first = max(self._decided.first, round_number + 1)
        return tuple(self._decided[number] for number in range(first, self._decided.page_end(first, count)))

    def packed_page(self, round_number: int, count: int) -> bytes:
        """Return such a page as a packed Decide. No commit is read or packed for it, so anybody may ask for as many."""
        first = max(self._decided.first, round_number + 1)
        return pack_list(self._decided.packed(first, self._decided.page_end(first, count)))

    def admits(self, decided: CertifiedCommit) -> bool:
        """Return True for the next commit or one that replaces a branch, False for a known one.

        Raises Refused when it does not follow or is not proven.
        """
        commit = decided.commit
        if commit.round < self.begins:
            return False
        if commit.round <= self.round:
            if commit.id == self.commit_at(commit.round).id:
                return False
            if commit.term <= self.commit_at(commit.round).term:
                raise Refused(Code.NOT_PROVEN, f"round {commit.round} was decided otherwise")
        if commit.round == self.begins:
            raise Refused(Code.NOT_PROVEN, f"the owner's milestone has another commit of round {commit.round}")
        if commit.round > self.round + 1:
            raise Refused(Code.NOT_PROVEN, f"round {commit.round} does not follow round {self.round}")
        parent = self.commit_at(commit.round - 1)
        if not proves(decided, parent, self._identity) or (commit.term == parent.term and not self.leads_to(parent, commit)):
            raise Refused(Code.NOT_PROVEN, f"the certificate of round {commit.round} does not hold")
        return True

    def require_branch(self, branch: Sequence[CertifiedCommit]) -> None:
        """Raise Refused unless these commits follow one of the log, one after the other, and end in a later term.

        Only electors that lie make a branch that begins in the log's own term. The owner's signature on the last commit, which
        names the others by their hashes, says that it goes on.
        """
        parent = self.commit_at(branch[0].commit.round - 1)
        if branch[-1].commit.term <= self.last.term:
            raise Refused(Code.NOT_PROVEN, "a branch that does not end in a later term")
        for decided in branch:
            if not proves(decided, parent, self._identity):
                raise Refused(Code.NOT_PROVEN, f"the certificate of round {decided.commit.round} does not hold")
            parent = decided.commit

    def put(self, decided: CertifiedCommit) -> None:
        """Append an admitted commit; known commits of its round and later ones, all of lower terms, are given up."""
        for old in self.since(decided.commit.round - 1):
            self._given_up.add(old.commit.id)
        if decided.commit.round < self._decided.end:
            self._decided.cut(decided.commit.round)
        if decided.commit.round <= self._counted:
            self._services, self._counted = self._first_services.copy(), self.begins
        self._decided.append(decided)
        while self._counted <= self.round - KEPT_READ:
            self._counted += 1
            add_service(self._services, self.commit_at(self._counted))

    def next_milestone(self) -> Milestone | None:
        """Return the milestone that the owner may sign now, without its signature; None when none is due.

        It stands at a commit with a plan, which certifies the base before it.
        """
        first = self._decided.first + place_of_next(self._decided.sizes)
        if not self.is_long or not self.commit_at(first).plan:
            return None
        served = tuple(Served(peer, each.rounds, each.audits) for peer, each in sorted(self.services(first).items()))
        return Milestone(self.at(first), served, b"", self._past(first))

    def _past(self, first: int) -> tuple[PastBase, ...]:
        """Return the bases of the last ROLLBACK_ROUNDS rounds before this one, which has a plan."""
        oldest, digest = max(0, self.begins, first - ROLLBACK_ROUNDS), self.commit_at(first).base_digest
        found = list[PastBase]()
        for commit in map(self.commit_at, range(first - 1, oldest - 1, -1)):
            found.append(PastBase(commit.base_digest if is_rollback(commit) else digest, commit.step))
            if commit.plan or is_rollback(commit):
                digest = commit.base_digest if commit.plan else ""
        earlier = self.milestone.past if self.milestone is not None else ()
        return (*earlier, *reversed(found))[-ROLLBACK_ROUNDS:]

    def admits_milestone(self, milestone: Milestone) -> bool:
        """Return whether the log may begin at this milestone; False when it begins no earlier.

        Raises Refused when the owner did not sign it, or it is of a branch that the owner has given up.
        """
        commit = milestone.decided.commit
        if commit.round <= self.begins:
            return False
        if not proves_milestone(milestone, self.genesis, self._identity):
            raise Refused(Code.NOT_PROVEN, "a milestone that the owner of this campaign did not sign")
        if commit.round <= self.round and commit.term < self.commit_at(commit.round).term:
            raise Refused(Code.NOT_PROVEN, f"round {commit.round} was decided otherwise")
        return True

    def records_from(self, milestone: Milestone) -> list[bytes]:
        """Return the durable file of a log that begins at this admitted milestone."""
        commit = milestone.decided.commit
        follows = self._decided.packed(commit.round + 1) if self.has(commit.id, commit.round) else []
        return [pack(milestone), *follows]

    def begin_at(self, milestone: Milestone) -> None:
        """Forget what is before an admitted milestone, and everything else where the log does not lead there."""
        commit = milestone.decided.commit
        is_known = self.has(commit.id, commit.round)
        if is_known:
            self._decided.begin_at(commit.round)
        else:
            self._given_up.update(each.commit.id for each in self.since(commit.round - 1))
            self._decided = _Chain(commit.round)
            self._decided.append(milestone.decided)
        self._first_services = {each.peer: Service(each.rounds, each.audits) for each in milestone.served}
        if self._counted < commit.round or not is_known:
            self._services, self._counted = self._first_services.copy(), commit.round
        self.milestone = milestone

    def leads_to(self, parent: Commit, commit: Commit) -> bool:
        """Return whether a plan or a rollback can lead from `parent`, in this log, to this commit of the same term."""
        if commit.plan:
            return not rolls_back(commit.control, parent)
        return commit == self.rolled_back(parent, commit.control)

    def rolled_back(self, parent: Commit, control: Control | None) -> Commit | None:
        """Return the commit after `parent` by which this record rolls back; None when it does not or cannot."""
        if control is None or not rolls_back(control, parent):
            return None
        base = self._base_of(control.rollback, parent)
        return rollback_commit(parent, control, base.digest, base.step) if base is not None else None

    def _base_of(self, round_number: int, last: Commit) -> PastBase | None:
        """Return the base after this round if the commits up to `last` certify it, else None."""
        if not may_roll_back(round_number, last.round):
            return None
        if round_number < self.begins:
            past = self.milestone.past if self.milestone is not None else ()
            base = past[round_number - self.begins] if self.begins - round_number <= len(past) else None
            return base if base is not None and base.digest else None
        digest = self._digest_of_base(round_number, last)
        return None if digest is None else PastBase(digest, self.commit_at(round_number).step)

    def _digest_of_base(self, round_number: int, last: Commit) -> str | None:
        if is_rollback(self.commit_at(round_number)):
            return self.commit_at(round_number).base_digest
        for later in map(self.commit_at, range(round_number + 1, last.round + 1)):
            if is_rollback(later):
                return None
            if later.plan:
                return later.base_digest
        return None

    def _load(self, records: Sequence[bytes], unread: int) -> None:
        """Load records as far as they follow. Of the first `unread` read what services take; whole those of a branch."""
        last = self.genesis.id
        for number, record in enumerate(records):
            skimmed = self._skim(record, last) if number < unread else None
            if skimmed is None and not self._load_whole(record):
                return
            last = skimmed or self.last.id
            self.intact += 1

    def _skim(self, record: bytes, parent: str) -> str | None:
        """Load a record of the commit after the last one, `parent`; return its id. None when it must be read whole."""
        try:
            commit, commit_id = unpack_first(Commit, record)
            verdicts = tuple(Verdict(*each) for each in commit.verdicts)
            workloads = tuple(Workload(*each) for each in commit.workloads)
        except (WireError, TypeError):
            return None
        if not commit.round == self._decided.end == self._counted + 1 or commit.parent != parent:
            return None
        self._decided.append_unread(record, _lists_in(replace(commit, workloads=workloads)))
        add_service(self._services, replace(commit, verdicts=verdicts))
        self._counted = commit.round
        return commit_id

    def _load_whole(self, record: bytes) -> bool:
        try:
            if self.intact == 0 and (milestone := _milestone(record)) is not None:
                if proves_milestone(milestone, self.genesis, self._identity):
                    self.begin_at(milestone)
                return self.milestone is not None
            decided = unpack(CertifiedCommit, record)
        except WireError:
            return False
        if not self.begins < decided.commit.round <= self.round + 1:
            return False
        if decided.commit.parent != self.commit_at(decided.commit.round - 1).id:
            return False
        self.put(decided)
        return True


def _lists_in(commit: Commit) -> int:
    """Return about how many lists and nested records a certified commit has, rather too many."""
    return 64 + len(commit.owners) + 4 * len(commit.members) + sum(2 + len(workload.slices) for workload in commit.workloads)


def _milestone(record: bytes) -> Milestone | None:
    try:
        return unpack(Milestone, record)
    except WireError:
        return None
