"""What processes decided and held, compared after a run: their logs of commits lie on disk, and say it best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.consensus.output import LOG
from spes_p2p.consensus.reform import is_reform
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.storage.store import parse_records
from spes_p2p.testing.simulate.audit import Audit


@dataclass(frozen=True)
class Held:
    """A base that a peer had."""

    at_s: float
    peer: str
    round: int
    digest: str


def commits_of(run_dir: Path) -> list[Commit]:
    """All commits that a peer ever had in its log, those that it gave up too."""
    try:
        content = (run_dir / LOG).read_bytes()
    except FileNotFoundError:
        return []
    return [unpack(CertifiedCommit, record).commit for record in parse_records(content)]


def compare(audit: Audit, now_s: float, logs: Mapping[str, Iterable[Commit]], bases: Iterable[Held]) -> None:
    """Did all decide the same commits, and was what each held after a round what the next commit says?

    A round that was given up by a reform may be held again, with other bits: a base belongs to the commit that its digest
    names, or else to one that nothing follows, the end of a branch.
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
