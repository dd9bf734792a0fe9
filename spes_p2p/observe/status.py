"""The status of a peer, updated by events, and the state of a swarm, merged from the statuses of its peers."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spes_p2p.messages.fields import LONGEST_WORD, MAX_AUDITS
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.messages.rounds import Audited
from spes_p2p.observe import events
from spes_p2p.observe.events import BaseRestored, Event, RoundCommitted, seconds_by_stage
from spes_p2p.observe.json_values import to_json

KEPT_STAGES = 12
"""Maximum number of recorded stages of the current round; a stalled round can have many."""
PACE_ROUNDS = 8
"""Estimate the time left from the median duration of this many rounds."""
SLOW_LINE = 4.0
"""A line is slow if its upload is less than the median by this factor."""
WAITING_SHARE = 0.25
"""Rounds that take less than this share of the training before them are not worth a remark."""


class StatusBoard:
    """Observer that updates a peer's status. `clock` is monotonic, in seconds."""

    def __init__(self, status: PeerStatus, clock: Callable[[], float]):
        """`status` identifies the peer; events set the other fields."""
        self._status = status
        self._clock = clock
        self._started = clock()
        self._stages: deque[tuple[str, float]] = deque([(status.stage, self._started)], maxlen=KEPT_STAGES)
        self._train_seconds = 0.0
        self._commits: deque[tuple[int, float]] = deque(maxlen=PACE_ROUNDS + 1)

    @property
    def status(self) -> PeerStatus:
        """The current status."""
        now = self._clock()
        return replace(
            self._status,
            seconds_left=self._seconds_left(),
            stage_seconds=now - self._stages[-1][1],
            stages=tuple((name, now - began) for name, began in self._stages),
            uptime_s=now - self._started,
        )

    def update(self, event: Event) -> None:
        """Update the status."""
        match event:
            case events.StateEntered():
                self._stages.append((event.name, self._clock()))
                self._set(stage=event.name)
            case BaseRestored():
                self._base_restored(event)
            case events.TrainingProgress():
                self._set(
                    steps_done=event.steps_done,
                    steps_planned=event.steps_planned,
                    tokens_per_second=event.tokens_per_second,
                )
            case events.PhaseTrained():
                self._train_seconds = event.seconds
                self._set(local_loss=event.loss)
            case RoundCommitted():
                self._round_committed(event)
            case events.Controlled():
                self._set(state=event.state, control=event.order[:LONGEST_WORD])
            case events.WorkDropped():
                self._set(dropped_tokens=self._status.dropped_tokens + event.tokens)
            case events.RoundFailed():
                failures = self._status.failures
                self._set(failures={**failures, event.reason: failures.get(event.reason, 0) + 1})
            case events.DigestMismatch():
                self._set(digest_mismatches=self._status.digest_mismatches + 1)
            case events.Evaluated():
                self._set(validation_loss=event.validation_loss, validation_round=max(0, event.round))
            case events.PhaseAudited():
                self._set(audits=(*self._status.audits, event.audit)[-MAX_AUDITS:])
            case events.StepsJudged():
                self._set(scores=dict(event.scores))
            case events.TasksEvaluated():
                self._set(task_round=event.round, task_scores=event.scores)
            case events.PromptsContinued():
                self._set(continued_round=event.round, continuations=event.continuations)
            case events.PeersSeen():
                self._set(trainers_alive=event.trainers, helpers_alive=event.helpers, electorate=event.electorate)

    def _base_restored(self, event: BaseRestored) -> None:
        """Clear the last round's fields, unless the base is a repair: this peer took no part in that round."""
        if event.round != self._status.round:
            self._set(
                members=(), loss=math.nan, round_tokens=0, round_sent_bytes=0, round_received_bytes=0, round_seconds={}
            )
        self._base_is(event)

    def _round_committed(self, event: RoundCommitted) -> None:
        if set(event.seconds) != {"apply"}:  # a round replayed to catch up says nothing about the pace
            self._commits.append((event.round, self._clock()))
        self._stages = deque([(self._status.stage, self._clock())], maxlen=KEPT_STAGES)
        self._base_is(event)
        trained = {"train": self._train_seconds} if self._train_seconds else {}
        self._set(
            members=event.members,
            loss=event.loss,
            learning_rate=event.learning_rate,
            merge_alpha=event.merge_alpha,
            round_tokens=event.tokens,
            round_sent_bytes=event.sent_bytes,
            round_received_bytes=event.received_bytes,
            round_seconds={**trained, **seconds_by_stage(event.seconds)},
            sent_bytes=self._status.sent_bytes + event.sent_bytes,
            received_bytes=self._status.received_bytes + event.received_bytes,
            upload=event.upload,
            steps_done=0,
            steps_planned=0,
        )
        self._train_seconds = 0.0

    def _base_is(self, event: RoundCommitted | BaseRestored) -> None:
        peer_id = self._status.peer_id
        self._set(
            round=max(0, event.round),
            campaign_step=event.campaign_step,
            total_steps=event.total_steps,
            total_tokens=event.total_tokens,
            base_digest=event.base_digest,
            total_rounds=event.total_rounds or self._status.total_rounds,
        )
        if event.owners:
            owned = tuple(expert for expert, owners in enumerate(event.owners) if peer_id in owners)
            self._set(owners=event.owners, owned=owned)

    def _seconds_left(self) -> float:
        if len(self._commits) < 2 or self._status.state != "running":
            return math.nan
        seconds_per_round = []
        round_before, time_before = self._commits[0]
        for committed_round, committed_at in list(self._commits)[1:]:
            seconds_per_round.append((committed_at - time_before) / max(1, committed_round - round_before))
            round_before, time_before = committed_round, committed_at
        pace = statistics.median(seconds_per_round)
        rounds_left = max(0, self._status.total_rounds - round_before)
        under_way = min(self._clock() - time_before, pace) if rounds_left else 0.0
        return rounds_left * pace - under_way

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)


@dataclass(frozen=True)
class SwarmStatus:
    """State of the swarm as the queried peers know it. The leading peers are those with the newest base."""

    campaign: str
    campaign_hash: str
    protocol: int
    round: int
    """The last committed round; round 0 only assembles the swarm."""
    total_rounds: int
    """Number of the campaign's last round."""
    campaign_step: int
    total_steps: int
    total_tokens: int
    loss: float
    validation_loss: float
    validation_round: int
    """The last round in the newest evaluated base."""
    learning_rate: float
    merge_alpha: float
    tokens_per_second: float
    """Sum over the trainers."""
    seconds_left: float
    base_digest: str
    digests_equal: bool
    """Whether all leading peers report the same digest."""
    round_tokens: int
    round_sent_bytes: int
    """Sum over the leading peers in the last round."""
    round_received_bytes: int
    round_seconds: Mapping[str, float]
    """Seconds of the last round by stage, maximum over the leading peers."""
    owners: tuple[tuple[str, ...], ...]
    ownerless: tuple[int, ...]
    """Experts without a trainer, once the swarm is assembled."""
    electorate: tuple[str, ...]
    """The electors of the next round."""
    electors_missing: tuple[str, ...]
    """Electors that did not answer."""
    failures: Mapping[str, int]
    """Failed attempts by reason, maximum over the peers: all members count the same attempt."""
    digest_mismatches: int
    dropped_tokens: int
    """Tokens of discarded work, sum over the peers."""
    peers: tuple[PeerStatus, ...]
    """Trainers first, then by id."""
    state: str
    """State set by the owner: running, paused, stopped."""
    control: str
    """Description of the owner's orders; empty if there are none."""
    scores: Mapping[str, float]
    """By member, in an open campaign: nats per token by which its experts' last steps lower the held-out loss. The median over
    the vouched trainers that judged; negative: harm."""
    audits: Mapping[str, Audited]
    """By member, in an open campaign: the last audit of its training, by any auditor."""

    @property
    def assembled(self) -> bool:
        """Whether round 0 has assigned the experts."""
        return any(self.owners)

    @property
    def majority_missing(self) -> bool:
        """Whether too few electors answer to decide a round."""
        return bool(self.electorate) and 2 * (len(self.electorate) - len(self.electors_missing)) <= len(self.electorate)

    @property
    def done(self) -> bool:
        """Whether the campaign's last round is committed."""
        return self.assembled and self.round >= self.total_rounds


_OF_ONE_PEER = ("campaign", "campaign_hash", "protocol", "total_rounds", "campaign_step", "total_steps", "total_tokens", "loss",
                "learning_rate", "merge_alpha", "base_digest", "round_tokens", "owners", "electorate", "state", "control")
"""Fields of SwarmStatus that are copied from the best informed leading peer."""


def gather(statuses: Sequence[PeerStatus]) -> SwarmStatus:
    """Merge the peers' answers. Raises ValueError if there is none."""
    if not statuses:
        raise ValueError("no peer answered")
    peers = tuple(sorted(statuses, key=lambda status: (status.role != "trainer", status.peer_id)))
    with_base = [status for status in peers if status.base_digest] or peers
    newest = max(status.round for status in with_base)
    leading = [status for status in with_base if status.round == newest]
    agreeing = Counter((status.base_digest, status.loss) for status in leading)

    def standing(status: PeerStatus) -> tuple[bool, bool, int]:
        """A peer that only downloaded the base has no loss or pace: prefer one that took part, and says what most say."""
        return status.peer_id in status.members, math.isfinite(status.loss), agreeing[status.base_digest, status.loss]

    best = max(leading, key=standing)
    lefts = (status.seconds_left for status in (best, *leading, *peers))
    validation_round, validation_loss = _held_out(with_base)
    return SwarmStatus(
        **{name: getattr(best, name) for name in _OF_ONE_PEER},
        round=newest,
        validation_loss=validation_loss,
        validation_round=validation_round,
        tokens_per_second=sum(status.tokens_per_second for status in peers if status.role == "trainer"),
        seconds_left=next((left for left in lefts if math.isfinite(left)), math.nan),
        digests_equal=len({status.base_digest for status in leading if status.base_digest}) <= 1,
        round_sent_bytes=sum(status.round_sent_bytes for status in leading),
        round_received_bytes=sum(status.round_received_bytes for status in leading),
        round_seconds=_largest([status.round_seconds for status in leading]),
        ownerless=tuple(expert for expert, owners in enumerate(best.owners) if not owners) if any(best.owners) else (),
        electors_missing=tuple(sorted(set(best.electorate) - {status.peer_id for status in peers})),
        failures={reason: int(count) for reason, count in _largest([status.failures for status in peers]).items()},
        digest_mismatches=sum(status.digest_mismatches for status in peers),
        dropped_tokens=sum(status.dropped_tokens for status in peers),
        peers=peers,
        scores=_scores(peers),
        audits=_audits(peers),
    )


def _held_out(peers: Sequence[PeerStatus]) -> tuple[int, float]:
    """Return the newest evaluated round that at least two peers name, any of two peers at most, and the median of its losses.

    The evaluator is the first to know a loss; the others hear it with the next round.
    """
    by_round: dict[int, list[float]] = {}
    for status in peers:
        if math.isfinite(status.validation_loss):
            by_round.setdefault(status.validation_round, []).append(status.validation_loss)
    needed = 2 if len(peers) > 2 else 1
    found = [number for number, losses in by_round.items() if len(losses) >= needed] or list(by_round)
    return (max(found), statistics.median_low(by_round[max(found)])) if found else (0, math.nan)


def _scores(peers: Sequence[PeerStatus]) -> dict[str, float]:
    members = sorted({member for status in peers for member in status.scores})
    return {each: statistics.median(status.scores[each] for status in peers if each in status.scores) for each in members}


def _audits(peers: Sequence[PeerStatus]) -> dict[str, Audited]:
    made = (audit for status in peers for audit in status.audits)
    return {audit.peer: audit for audit in sorted(made, key=lambda audit: audit.round)}


def swarm_status(statuses: Sequence[PeerStatus]) -> dict[str, Any]:
    """Return the document of `spes-p2p status --json`: SwarmStatus as JSON values (unknown numbers are null)."""
    document: dict[str, Any] = to_json(gather(statuses))
    return document


def holds_rounds_up(upload: float, median_upload: float, round_seconds: Mapping[str, float]) -> bool:
    """Whether a line is much slower than the median, in bytes per second (0: unknown), where rounds take time worth saving."""
    train_s = round_seconds.get("train", 0.0)
    return 0 < SLOW_LINE * upload < median_upload and sync_seconds(round_seconds) > WAITING_SHARE * train_s


def sync_seconds(round_seconds: Mapping[str, float]) -> float:
    """Return the seconds of a round without training."""
    return sum(seconds_by_stage(round_seconds).values())


def _largest(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for mapping in counts:
        for name, value in mapping.items():
            largest[name] = max(value, largest.get(name, value))
    return largest
