"""Compare what processes decided and held after a run, from the commit logs on their disks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.output import LOG
from spes_p2p.consensus.reform import is_reform
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import CertifiedCommit, Commit, Milestone
from spes_p2p.storage.store import parse_records
from spes_p2p.testing.simulate.audit import Audit


@dataclass(frozen=True)
class Held:
    """A base that a peer held."""

    at_s: float
    peer: str
    round: int
    digest: str


def commits_of(run_dir: Path) -> list[Commit]:
    """Return all commits that a peer has in its log's file, including those of abandoned branches."""
    try:
        content = (run_dir / LOG).read_bytes()
    except FileNotFoundError:
        return []
    return [_commit_of(record) for record in parse_records(content)]


def _commit_of(record: bytes) -> Commit:
    try:
        return unpack(CertifiedCommit, record).commit
    except WireError:
        return unpack(Milestone, record).decided.commit


def compare(audit: Audit, now_s: float, logs: Mapping[str, Iterable[Commit]], bases: Iterable[Held]) -> None:
    """Check that all decided the same commits, and that each base is the one that the next commit names.

    A round abandoned by a reform may be repeated with another base. So a base belongs to the commit whose successor names its
    digest, or else to one without a successor: the end of a branch.
    """
    named: dict[int, dict[str, str]] = defaultdict(dict)
    decided: dict[int, set[str]] = defaultdict(set)
    for peer, commits in logs.items():
        for commit in commits:
            audit.decided(now_s, peer, commit.parent, commit.term, commit.id, is_reform(commit))
            decided[commit.round].add(commit.id)
            if commit.plan:
                named[commit.round - 1][commit.base_digest] = commit.parent
    for round_number, digests in named.items():
        for digest, parent in digests.items():
            audit.has_base(now_s, "the next commit", parent, round_number, digest)
    for held in bases:
        known = named[held.round]
        ends = decided[held.round] - set(known.values())
        after = known.get(held.digest) or min(ends or known.values(), default=f"round {held.round}")
        audit.has_base(held.at_s, held.peer, after, held.round, held.digest)
