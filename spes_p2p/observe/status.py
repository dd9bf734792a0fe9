"""The status of a peer, updated by events."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from spes_p2p.messages.fields import LONGEST_WORD, MAX_AUDITS
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe import events
from spes_p2p.observe.events import BaseRestored, Event, RoundCommitted, seconds_by_stage
from spes_p2p.observe.pace import PACE_ROUNDS

KEPT_STAGES = 12
"""Maximum number of recorded stages of the current round; a stalled round can have many."""


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
        self._caught_up = -1
        """The last round that was decided without this peer: such rounds say nothing about the pace."""

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
                if event.name == "paused":
                    self._set(tokens_per_second=0.0)
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
            case events.CaughtUp():
                self._caught_up = event.round
            case RoundCommitted():
                self._round_committed(event)
            case events.Controlled():
                self._set(state=event.state, control=event.order[:LONGEST_WORD])
            case events.WorkDropped():
                self._set(dropped_tokens=self._status.dropped_tokens + event.tokens)
            case events.RoundFailed():
                failures, failing = Counter(self._status.failures), Counter(self._status.failing)
                self._set(failures=dict(failures + Counter([event.reason])), failing=dict(failing + Counter([event.reason])))
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
                self._set(
                    trainers_alive=event.trainers, helpers_alive=event.helpers, electorate=event.electorate,
                    vouched_alive=event.vouched,
                )

    def _base_restored(self, event: BaseRestored) -> None:
        """Clear the last round's fields, unless the base is a repair: this peer took no part in that round."""
        if event.round != self._status.round:
            self._set(
                members=(), loss=math.nan, round_tokens=0, round_sent_bytes=0, round_received_bytes=0, round_seconds={}
            )
        self._base_is(event)

    def _round_committed(self, event: RoundCommitted) -> None:
        if event.round > self._caught_up:
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
            failing={},
        )
        if event.owners:
            owned = tuple(expert for expert, owners in enumerate(event.owners) if peer_id in owners)
            self._set(owners=event.owners, owned=owned)

    def _seconds_left(self) -> float:
        if len(self._commits) < 2 or self._status.state != "running":
            return math.nan
        pace = statistics.median(
            (at - at_before) / max(1, number - before) for (before, at_before), (number, at) in pairwise(self._commits)
        )
        last_round, last_at = self._commits[-1]
        rounds_left = max(0, self._status.total_rounds - last_round)
        under_way = min(self._clock() - last_at, pace) if rounds_left else 0.0
        return rounds_left * pace - under_way

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
