"""Two certified commits for one round of one term: electors lied. The owner's next term decides which branch goes on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spes_p2p.consensus.certificate import equivocators, proves
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.output import Identity
from spes_p2p.messages.consensus import CertifiedCommit, Commit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fork:
    """The first round that was decided twice."""

    mine: CertifiedCommit
    """In this peer's log."""
    other: CertifiedCommit
    liars: tuple[str, ...]
    """Electors that signed both in one ballot, which no honest one does. Empty: some hid their votes in promises."""


class OtherBranches:
    """Commits of the branches that are not in the log, as far as others offered them. In memory: they are offered again."""

    def __init__(self, log: CommitLog, identity: Identity):
        self._log, self._identity = log, identity
        self._fork: Fork | None = None
        self._branches: list[list[CertifiedCommit]] = []

    @property
    def fork(self) -> Fork | None:
        """Where the branches part; None when no round of the log's term is known to be decided twice."""
        return self._fork if self._fork is not None and self._fork.mine.commit.term == self._log.last.term else None

    @property
    def held(self) -> int:
        """Number of commits of other branches."""
        return sum(map(len, self._branches))

    def holds(self, commit: Commit) -> bool:
        """Return whether this commit is on another branch."""
        return self.fork is not None and any(commit.id == each.commit.id for branch in self._branches for each in branch)

    def offered(self, decided: CertifiedCommit) -> tuple[CertifiedCommit, ...]:
        """Look at a commit that does not follow the log. Return its branch if the owner opens a term with it."""
        if self.fork is None:
            self._branches = []
        branch = next((each for each in self._branches if each[-1].commit.id == decided.commit.parent), None)
        if branch is None:
            self._begin(decided)
        elif proves(decided, branch[-1].commit, self._identity):
            branch.append(decided)
            if decided.commit.term > self._log.last.term:
                return tuple(branch)
        return ()

    def _begin(self, other: CertifiedCommit) -> None:
        log, number = self._log, other.commit.round
        if not log.begins < number <= log.round or other.commit.term != log.last.term or log.has(other.commit.id, number):
            return
        if self.holds(other.commit) or not proves(other, log.commit_at(number - 1), self._identity):
            return
        liars = equivocators(other, log.at(number), self._identity)
        self._fork = Fork(log.at(number), other, liars)
        self._branches.append([other])
        who = f"signed two commits in one ballot: {', '.join(liars)}" if liars else "electors lied"
        logger.error("round %d was decided twice: %s; the owner's next term decides", number, who)
