"""Watch a simulated swarm from outside: check invariants, and measure exclusion, new owners and joiners.

The audit sees the peers' events (`observe/events.py`: the kinds that a history keeps) with their times, and the faults, so
virtual swarms and real processes are judged by the same rules.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from spes_p2p.observe import events
from spes_p2p.observe.events import BaseRestored, Event, RoundCommitted


@dataclass(frozen=True)
class Violation:
    """A broken invariant."""

    time_s: float
    rule: str
    """digest, fork, ownerless, tokens, work, error or stuck."""
    detail: str


@dataclass
class Figures:
    """Results of a run. Times in seconds of the run's clock (virtual or real)."""

    rounds_committed: int = 0
    """Distinct committed rounds, without round 0."""
    rounds_retried: int = 0
    """Those of them for which an attempt failed before."""
    attempts_failed: int = 0
    """Failed attempts, over all peers."""
    digest_mismatches: int = 0
    """Commits after which two peers had different bases, other than by a `corrupt` fault in a base."""
    repairs: int = 0
    """Times that a peer found its base to differ and downloaded the right one."""
    reforms: int = 0
    """Terms that were opened because a majority of the electors was gone."""
    exclude_s: list[float] = field(default_factory=list)
    """For each peer that was killed, stopped or cut off alone, and that a round was then committed without: the longest time by
    which it delayed a round of the others, from the moment when all living members had trained (or the fault, if that was
    later) to the commit; over the rounds until the first one without it."""
    no_majority_s: list[float] = field(default_factory=list)
    """The same if a majority of the electors was gone or corrupt meanwhile, so that no round could be decided."""
    reown_rounds: list[int] = field(default_factory=list)
    """For each fault that hit all owners of an expert: rounds planned after it, by members with room for all experts, until
    every such expert had a living owner again; 1 is the best possible."""
    joiner_first_contribution_s: list[float] = field(default_factory=list)
    """For each peer that joined later: from its start to the commit of the first round that includes its tokens."""
    round_s: list[float] = field(default_factory=list)
    """From one commit to the next, each at the first peer that had it."""
    training_s: list[float] = field(default_factory=list)
    """For each of these rounds: the median of the phases that ended in it; 0 without any."""
    tokens_trained: int = 0
    """In completed phases, by all peers in all of their lives."""
    tokens_included: int = 0
    """In the newest base."""
    work_lost_tokens: int = 0
    """Trained, not included, and not pending at a living peer at the end."""
    tokens_dropped: int = 0
    """Lost tokens that a peer reported (WorkDropped)."""


@dataclass
class _Gone:
    """A peer that is killed, stopped or cut off."""

    peer: str
    since_s: float
    orphaned: set[int]
    """Experts whose last living owner it was."""
    held_up_s: float = 0.0
    rounds: int = 0
    excluded: bool = False
    lacked_majority: bool = False
    """Whether there was no majority of electors at some time since."""


@dataclass
class Audit:
    """Receives events and faults; `violations` and `figures` are the results."""

    num_experts: int
    capacities: dict[str, int] = field(default_factory=dict)
    """Maximum number of experts by peer; default: all."""
    violations: list[Violation] = field(default_factory=list)
    lacks_majority: Callable[[], bool] = lambda: False
    """Return whether a majority of the electors is gone now; unknown for real processes."""
    overlap: bool = False
    """Whether the work of a phase is announced for the round after the one that it ends with."""
    liars: frozenset[str] = frozenset()
    """Peers that attack: what they report does not count, nor do they have to hold any rule."""
    newest: RoundCommitted | None = None
    """The last commit of the furthest peer."""
    newest_at_s: float = 0.0
    measured: Figures = field(default_factory=Figures)
    """Figures so far, without those that `figures` computes."""
    _commits: set[tuple[int, str]] = field(default_factory=set)
    _digests: dict[str, set[str]] = field(default_factory=dict)
    _suspect: set[str] = field(default_factory=set)
    _corrupted: set[str] = field(default_factory=set)
    _decided: dict[tuple[str, int], str] = field(default_factory=dict)
    _failed_rounds: Counter[int] = field(default_factory=Counter)
    _retried: set[int] = field(default_factory=set)
    _ready_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a peer had trained what it announces for a round."""
    _phases_s: list[float] = field(default_factory=list)
    """Seconds of the phases that ended since the last commit."""
    _gone: dict[str, _Gone] = field(default_factory=dict)
    _joined_at: dict[str, float] = field(default_factory=dict)
    _ownerless_since: dict[int, int] = field(default_factory=dict)
    _branched: bool = False
    """Whether a peer passed a reform, which may have given up a branch with more tokens."""
    _excess: int = 0
    _claimed: dict[int, int] = field(default_factory=dict)
    """By round: tokens of liars that it includes."""

    def observed(self, now_s: float, peer: str, event: Event) -> None:
        """Record a peer's event."""
        if peer in self.liars:
            return
        if self._gone and self.lacks_majority():
            for gone in self._gone.values():
                gone.lacked_majority = True
        match event:
            case events.PhaseTrained():
                self.measured.tokens_trained += event.tokens
                self._phases_s.append(event.seconds)
                self._ready_at[peer, event.round + self.overlap] = now_s
            case events.RoundFailed():
                self._failed_rounds[event.round] += 1
            case events.WorkDropped():
                self.measured.tokens_dropped += event.tokens
            case events.DigestMismatch():
                self.measured.repairs += 1
            case BaseRestored(source="disk") if peer in self._corrupted:
                self._suspect.add(peer)
            case BaseRestored(source="reform"):
                self._branched = True
                for gone in self._gone.values():
                    gone.lacked_majority = True
            case RoundCommitted():
                self._committed(now_s, event)

    def decided(self, now_s: float, peer: str, parent: str, term: int, commit: str, is_reform: bool) -> None:
        """Record that a peer's log has a certificate of this commit."""
        if peer in self.liars:
            return
        is_news = (parent, term) not in self._decided
        known = self._decided.setdefault((parent, term), commit)
        self.measured.reforms += is_news and is_reform
        if known != commit and not is_reform:
            has = f"{peer} has commit {commit[:8]} after {parent[:8]} in term {term}"
            self.violated(now_s, "fork", f"{has}, others {known[:8]}")

    def has_base(self, now_s: float, peer: str, commit: str, round_number: int, digest: str) -> None:
        """Record the digest of a peer's base after this commit."""
        if peer in self.liars:
            return
        digests = self._digests.setdefault(commit, set())
        if peer in self._suspect:
            if digest in digests:
                self._suspect.discard(peer)
            return
        if digests and digest not in digests:
            self.measured.digest_mismatches += 1
            self.violated(now_s, "digest", f"round {round_number}: {peer} has {digest[:8]}, others {min(digests)[:8]}")
        digests.add(digest)

    def gone(self, now_s: float, peer: str) -> None:
        """Record that a fault killed, stopped or cut off the peer."""
        orphaned = set()
        if self.newest is not None:
            absent = {peer, *self._gone}
            orphaned = {e for e, owners in enumerate(self.newest.owners) if peer in owners and set(owners) <= absent}
        self._gone.setdefault(peer, _Gone(peer, now_s, orphaned))

    def back(self, peer: str) -> None:
        """Record that the peer is back."""
        self._gone.pop(peer, None)

    def joined(self, now_s: float, peer: str) -> None:
        """Record the start of a new peer."""
        self._joined_at[peer] = now_s

    def corrupted(self, peer: str) -> None:
        """Record a change in a peer's base: ignore its digests until one is right. Its disk may be wrong for longer."""
        self._suspect.add(peer)
        self._corrupted.add(peer)

    def is_suspect(self, peer: str) -> bool:
        """Return whether the peer still has a changed base."""
        return peer in self._suspect

    def violated(self, now_s: float, rule: str, detail: str) -> None:
        """Record a broken rule."""
        self.violations.append(Violation(round(now_s, 3), rule, detail))

    @property
    def newest_round(self) -> int:
        """The last round that any peer committed; -1 before the first."""
        return self.newest.round if self.newest is not None else -1

    def figures(self, pending_tokens: int) -> Figures:
        """Return all figures. `pending_tokens`: trained and not yet included at living peers."""
        found = self.measured
        found.rounds_committed = sum(number > 0 for number, _ in self._commits)
        found.rounds_retried, found.attempts_failed = len(self._retried), sum(self._failed_rounds.values())
        found.tokens_included = self.newest.total_tokens if self.newest is not None else 0
        found.work_lost_tokens = max(0, found.tokens_trained - found.tokens_included - pending_tokens)
        return found

    def _committed(self, now_s: float, event: RoundCommitted) -> None:
        self._claimed[event.round] = sum(tokens for peer, tokens, _ in event.contributions if peer in self.liars)
        key = (event.round, event.base_digest)
        if key in self._commits:
            return
        self._commits.add(key)
        if self._failed_rounds[event.round]:
            self._retried.add(event.round)
        if event.round <= self.newest_round:
            return
        if self.newest is not None and event.round == self.newest.round + 1:
            self.measured.round_s.append(round(now_s - self.newest_at_s, 3))
            self.measured.training_s.append(round(statistics.median(self._phases_s or [0.0]), 3))
        self._phases_s.clear()
        self._check_tokens(now_s, event)
        self._check_owners(now_s, event)
        planned_s = now_s - sum(event.seconds.get(stage, 0.0) for stage in ("exchange", "commit", "apply"))
        for gone in list(self._gone.values()):
            self._follow_gone(gone, event, now_s, planned_s)
        for peer, tokens, _ in event.contributions:
            if peer in self._joined_at and tokens:
                self.measured.joiner_first_contribution_s.append(round(now_s - self._joined_at.pop(peer), 3))
        self.newest, self.newest_at_s = event, now_s

    def _follow_gone(self, gone: _Gone, event: RoundCommitted, now_s: float, planned_s: float) -> None:
        if not gone.excluded:
            living = [(peer, event.round) for peer in event.members if peer not in self._gone]
            ready = [self._ready_at[key] for key in living if key in self._ready_at]
            gone.held_up_s = max(gone.held_up_s, now_s - max([gone.since_s, *ready]))
            if gone.peer not in event.members:
                gone.excluded = True
                delays = self.measured.no_majority_s if gone.lacked_majority else self.measured.exclude_s
                delays.append(round(gone.held_up_s, 3))
        if gone.orphaned and planned_s >= gone.since_s and self._can_train_all(event):
            gone.rounds += 1
            if all(set(event.owners[expert]) - set(self._gone) for expert in gone.orphaned):
                self.measured.reown_rounds.append(gone.rounds)
                gone.orphaned = set()

    def _check_tokens(self, now_s: float, event: RoundCommitted) -> None:
        trained = self.measured.tokens_trained + sum(self._claimed.values())
        excess, self._excess = self._excess, max(self._excess, event.total_tokens - trained)
        if self._excess > excess:
            included = f"round {event.round} includes {event.total_tokens} tokens"
            self.violated(now_s, "tokens", f"{included}, only {trained} were trained")
        if self.newest is not None and not self._branched and event.total_tokens < self.newest.total_tokens:
            self.violated(now_s, "tokens", f"round {event.round} has fewer tokens than the round before")

    def _check_owners(self, now_s: float, event: RoundCommitted) -> None:
        strangers = {owner for owners in event.owners for owner in owners} - set(event.members)
        if strangers:
            self.violated(now_s, "ownerless", f"round {event.round}: owners {sorted(strangers)} are not members")
        if not self._can_train_all(event):
            return
        for expert in range(self.num_experts):
            if event.owners[expert]:
                self._ownerless_since.pop(expert, None)
            elif event.round - self._ownerless_since.setdefault(expert, event.round) >= 1:
                self.violated(now_s, "ownerless", f"expert {expert} has no owner for the second round, {event.round}")

    def _can_train_all(self, event: RoundCommitted) -> bool:
        """Return whether the members have room for all experts."""
        return sum(self.capacities.get(peer, self.num_experts) for peer in event.members) >= self.num_experts
