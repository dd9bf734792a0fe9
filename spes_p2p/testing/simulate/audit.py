"""Watches a simulated swarm from outside: which invariants were broken, and the figures of exclusion, new owners and joiners.

It sees what the peers tell (`observe/events.py`: the kinds that a history keeps) and when, and which faults struck. So both
forms of the simulator, in this process and as real processes, are judged by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from spes_p2p.observe.events import (
    BaseRestored,
    DigestMismatch,
    Event,
    PhaseTrained,
    RoundCommitted,
    RoundFailed,
    WorkDropped,
)


@dataclass(frozen=True)
class Violation:
    """A broken invariant."""

    time_s: float
    rule: str
    """One of: digest, fork, lost round, ownerless, tokens, work, error, stuck."""
    detail: str


@dataclass(frozen=True)
class Figures:
    """What a run came to. Times in seconds of the run's clock (virtual or real)."""

    rounds_committed: int = 0
    """Rounds that moved the swarm on: distinct (term, round) that anybody committed, without the one that assembled it."""
    rounds_retried: int = 0
    """Of these, the ones for which somebody saw an attempt fail before."""
    attempts_failed: int = 0
    """Failed attempts, over all peers."""
    digest_mismatches: int = 0
    """Heads of which two peers had different bits, other than by a `corrupt` fault in a base."""
    repairs: int = 0
    """Times that a peer found its bits to differ and downloaded the right ones."""
    reforms: int = 0
    """Epochs that were opened because a majority of the electors was gone."""
    exclude_s: tuple[float, ...] = ()
    """For each peer that was killed, stopped or cut off alone and that a round was then committed without: the longest time
    that a round of the others was held up by it, from the moment when all of its living members had trained (or the fault,
    when that was later) to the commit; over the rounds until the first one without it."""
    no_majority_s: tuple[float, ...] = ()
    """The same where a majority of the electors was gone or spoke garbage meanwhile: then nobody can decide a round."""
    reown_rounds: tuple[int, ...] = ()
    """For each fault that took all owners of an expert: rounds planned after it, by members with room for all experts, until
    every such expert had a living owner again; 1 is the best possible."""
    joiner_first_contribution_s: tuple[float, ...] = ()
    """For each peer that joined later: from its start to the commit of the first round that includes tokens it trained."""
    round_s: tuple[float, ...] = ()
    """From one commit to the next, each as the first peer had it."""
    tokens_trained: int = 0
    """In phases that were ended, by all peers in all of their lives."""
    tokens_included: int = 0
    """In the newest base."""
    work_lost_tokens: int = 0
    """Trained, not included, and not pending at a living peer at the end."""
    tokens_dropped: int = 0
    """Of the lost ones, those that a peer said it gave up (WorkDropped)."""


@dataclass
class _Gone:
    """A peer that a fault has hold of, or has ended."""

    peer: str
    since_s: float
    orphaned: set[int]
    """Experts whose last living owner it was."""
    held_up_s: float = 0.0
    rounds: int = 0
    excluded: bool = False
    lacked_majority: bool = False
    """Was there no majority of electors for some time since?"""


@dataclass
class Audit:
    """Is told everything; `violations` and `figures` say what came of it."""

    num_experts: int
    capacities: dict[str, int] = field(default_factory=dict)
    """Most experts of each peer; of those not named: all."""
    reforms: int = 0
    """Epochs that were opened."""
    violations: list[Violation] = field(default_factory=list)
    lacks_majority: Callable[[], bool] = lambda: False
    """Is a majority of the electors gone right now? Real processes cannot tell."""
    overlap: bool = False
    """Is the work of a phase announced for the round after the one that it ends with?"""
    newest: RoundCommitted | None = None
    """The last commit of the furthest peer."""
    newest_at_s: float = 0.0
    _commits: dict[tuple[int, str], tuple[str, float]] = field(default_factory=dict)
    _digests: dict[str, set[str]] = field(default_factory=dict)
    _suspect: set[str] = field(default_factory=set)
    _corrupted: set[str] = field(default_factory=set)
    _decided: dict[tuple[str, int], str] = field(default_factory=dict)
    _failed_rounds: Counter[int] = field(default_factory=Counter)
    _retried: set[int] = field(default_factory=set)
    _ready_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a peer had trained what it announces for a round."""
    _gone: dict[str, _Gone] = field(default_factory=dict)
    _joined_at: dict[str, float] = field(default_factory=dict)
    _ownerless_since: dict[int, int] = field(default_factory=dict)
    _exclude_s: list[float] = field(default_factory=list)
    _no_majority_s: list[float] = field(default_factory=list)
    _reown_rounds: list[int] = field(default_factory=list)
    _joiner_s: list[float] = field(default_factory=list)
    _round_s: list[float] = field(default_factory=list)
    _branched: bool = False
    """Did somebody pass a reform? A branch with more tokens may have been given up then."""
    _excess: int = 0
    _mismatches: int = 0
    _repairs: int = 0
    _trained: int = 0
    _dropped: int = 0

    # What it is told ---------------------------------------------------------------------------------------------------

    def told(self, now_s: float, peer: str, event: Event) -> None:
        """A peer told an event."""
        if self._gone and self.lacks_majority():
            for gone in self._gone.values():
                gone.lacked_majority = True
        if isinstance(event, PhaseTrained):
            self._trained += event.tokens
            self._ready_at[peer, event.round + self.overlap] = now_s
        elif isinstance(event, RoundFailed):
            self._failed_rounds[event.round] += 1
        elif isinstance(event, WorkDropped):
            self._dropped += event.tokens
        elif isinstance(event, DigestMismatch):
            self._repairs += 1
        elif isinstance(event, BaseRestored) and event.source == "disk" and peer in self._corrupted:
            self._suspect.add(peer)
        elif isinstance(event, BaseRestored) and event.source == "reform":
            self._branched = True
            for gone in self._gone.values():
                gone.lacked_majority = True
        elif isinstance(event, RoundCommitted):
            self._committed(now_s, event)

    def decided(self, now_s: float, peer: str, parent: str, term: int, commit: str, is_reform: bool) -> None:
        """A peer has a certificate of this commit in its log."""
        is_news = (parent, term) not in self._decided
        known = self._decided.setdefault((parent, term), commit)
        self.reforms += is_news and is_reform
        if known != commit and not is_reform:
            has = f"{peer} has commit {commit[:8]} after {parent[:8]} in term {term}"
            self._violated(now_s, "fork", f"{has}, others {known[:8]}")

    def has_base(self, now_s: float, peer: str, commit: str, round_number: int, digest: str) -> None:
        """A peer's base after this commit has this digest."""
        digests = self._digests.setdefault(commit, set())
        if peer in self._suspect:
            if digest in digests:
                self._suspect.discard(peer)
            return
        if digests and digest not in digests:
            self._mismatches += 1
            self._violated(now_s, "digest", f"round {round_number}: {peer} has {digest[:8]}, others {min(digests)[:8]}")
        digests.add(digest)

    def gone(self, now_s: float, peer: str) -> None:
        """A fault took the peer away: it is dead, stopped or cut off."""
        orphaned = set()
        if self.newest is not None:
            absent = {peer, *self._gone}
            orphaned = {e for e, owners in enumerate(self.newest.owners) if peer in owners and set(owners) <= absent}
        self._gone.setdefault(peer, _Gone(peer, now_s, orphaned))

    def back(self, peer: str) -> None:
        """It is there again."""
        self._gone.pop(peer, None)

    def joined(self, now_s: float, peer: str) -> None:
        """A new peer was started."""
        self._joined_at[peer] = now_s

    def corrupted(self, peer: str) -> None:
        """Bits of its base were changed: its digests say nothing until one is right; its disk may be wrong for longer."""
        self._suspect.add(peer)
        self._corrupted.add(peer)

    def is_suspect(self, peer: str) -> bool:
        """Is its base still the one that was changed?"""
        return peer in self._suspect

    def violated(self, now_s: float, rule: str, detail: str) -> None:
        """A rule that somebody else checks."""
        self._violated(now_s, rule, detail)

    # What it finds -----------------------------------------------------------------------------------------------------

    def figures(self, pending_tokens: int) -> Figures:
        """All figures; `pending_tokens`: trained and not yet included at the peers that live."""
        included = self.newest.total_tokens if self.newest is not None else 0
        return Figures(
            rounds_committed=sum(number > 0 for number, _ in self._commits),
            rounds_retried=len(self._retried),
            attempts_failed=sum(self._failed_rounds.values()),
            digest_mismatches=self._mismatches,
            repairs=self._repairs,
            reforms=self.reforms,
            exclude_s=tuple(round(each, 3) for each in self._exclude_s),
            no_majority_s=tuple(round(each, 3) for each in self._no_majority_s),
            reown_rounds=tuple(self._reown_rounds),
            joiner_first_contribution_s=tuple(round(each, 3) for each in self._joiner_s),
            round_s=tuple(round(each, 3) for each in self._round_s),
            tokens_trained=self._trained,
            tokens_included=included,
            work_lost_tokens=max(0, self._trained - included - pending_tokens),
            tokens_dropped=self._dropped,
        )

    def _committed(self, now_s: float, event: RoundCommitted) -> None:
        key = (event.round, event.base_digest)
        if key in self._commits:
            return
        self._commits[key] = (event.base_digest, now_s)
        if self._failed_rounds[event.round]:
            self._retried.add(event.round)
        if self.newest is not None and event.round <= self.newest.round:
            return
        if self.newest is not None and event.round == self.newest.round + 1:
            self._round_s.append(now_s - self.newest_at_s)
        self._check_tokens(now_s, event)
        self._check_owners(now_s, event)
        planned_s = now_s - sum(event.seconds.get(phase, 0.0) for phase in ("exchange", "commit", "apply"))
        for gone in list(self._gone.values()):
            self._follow_gone(gone, event, now_s, planned_s)
        for peer, tokens, _ in event.contributions:
            if peer in self._joined_at and tokens:
                self._joiner_s.append(now_s - self._joined_at.pop(peer))
        self.newest, self.newest_at_s = event, now_s

    def _follow_gone(self, gone: _Gone, event: RoundCommitted, now_s: float, planned_s: float) -> None:
        if not gone.excluded:
            living = [(peer, event.round) for peer in event.members if peer not in self._gone]
            ready = [self._ready_at[key] for key in living if key in self._ready_at]
            gone.held_up_s = max(gone.held_up_s, now_s - max([gone.since_s, *ready]))
            if gone.peer not in event.members:
                gone.excluded = True
                (self._no_majority_s if gone.lacked_majority else self._exclude_s).append(gone.held_up_s)
        if gone.orphaned and planned_s >= gone.since_s and self._can_train_all(event):
            gone.rounds += 1
            if all(set(event.owners[expert]) - set(self._gone) for expert in gone.orphaned):
                self._reown_rounds.append(gone.rounds)
                gone.orphaned = set()

    def _check_tokens(self, now_s: float, event: RoundCommitted) -> None:
        excess, self._excess = self._excess, max(self._excess, event.total_tokens - self._trained)
        if self._excess > excess:
            self._violated(
                now_s, "tokens", f"round {event.round} includes {event.total_tokens} tokens, only {self._trained} were trained"
            )
        if self.newest is not None and not self._branched and event.total_tokens < self.newest.total_tokens:
            self._violated(now_s, "tokens", f"round {event.round} has fewer tokens than the round before")

    def _check_owners(self, now_s: float, event: RoundCommitted) -> None:
        strangers = {owner for owners in event.owners for owner in owners} - set(event.members)
        if strangers:
            self._violated(now_s, "ownerless", f"round {event.round}: owned by {sorted(strangers)}, which are no members")
        if not self._can_train_all(event):
            return
        for expert in range(self.num_experts):
            if event.owners[expert]:
                self._ownerless_since.pop(expert, None)
            elif event.round - self._ownerless_since.setdefault(expert, event.round) >= 1:
                self._violated(now_s, "ownerless", f"expert {expert} has no owner after round {event.round} either")

    def _can_train_all(self, event: RoundCommitted) -> bool:
        """Have the members room for all experts?"""
        return sum(self.capacities.get(peer, self.num_experts) for peer in event.members) >= self.num_experts

    def _violated(self, now_s: float, rule: str, detail: str) -> None:
        self.violations.append(Violation(round(now_s, 3), rule, detail))
