"""The log of a peer: one line per round, and problems as soon as they occur."""

from __future__ import annotations

import logging
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spes_p2p.messages.presence import PeerStatus, RoundRecord
from spes_p2p.observe import events
from spes_p2p.observe.events import BEFORE_TRAINING, BaseRestored, Event, RoundCommitted
from spes_p2p.observe.log import EVENT
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.swarm_status import NO_MAJORITY, gather, holds_rounds_up, lacking_vouched, own_standing, sync_seconds
from spes_p2p.observe.units import (
    counted,
    human_bytes,
    human_count,
    human_indices,
    human_loss,
    human_rate,
    human_scores,
    human_seconds,
    percent,
    short_peer,
    time_left,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 60.0
"""Log progress after this long without a line in the log."""
HELPER_EVERY_S = 600.0
"""Interval at which a helper repeats that it waits for the first round's trainers, which may take days."""
DOWNLOAD_EVERY_S = 10.0
"""Minimum interval between two lines about one download."""

FORECAST_EVERY_S = 3600.0
"""Repeat what the quota leaves after this long."""
SLOW_LINK_EVERY_S = 3600.0
"""Minimum interval between two remarks about this peer's link."""

LARGE_STEP, REPEATED_ROUNDS = 0.5, 3
"""A step that is scaled down is worth a warning below this factor, or in so many rounds in a row."""

PEER_ID = re.compile(r"\b(Qm|12D)\w{40,60}\b")

_SOURCES = {"disk": "base {} is in place",  # made just now, or kept from before
            "download": "downloaded base {}",
            "rollback": "base {} is that of an earlier round",
            "reform": "without the electors that are gone the campaign goes on from base {}"}

WHY_CLIPPED = ("; there this peer's update was larger than those of others, and counts for less: you need not do anything, but "
               "tell the campaign's owner if it goes on for many rounds")

CLIPPED_AGAIN_ROUNDS = 100
"""That a member's update was clipped is told again after so many rounds."""
NAMED_GROUPS = 3
"""At most so many groups are named whose steps were scaled down."""
_OF_ROUNDS = (events.Evaluated, events.UpdatesClipped, events.StepsRejected, events.VerdictsTaken, events.Controlled)
"""Events of a committed round that are no news once later rounds are decided."""


def to_continue(run_dir: Path, identity: Path | None, again: str = "join again") -> str:
    """Say how a peer goes on after it left; `identity`: as given to its command."""
    also = f" --identity {shlex.quote(str(identity))}" if identity else ""
    return f"to continue, {again} with --run-dir {shlex.quote(str(run_dir))}{also}"


def farewell(status: PeerStatus, records: Iterable[RoundRecord], run_dir: Path, identity: Path | None = None) -> str:
    """Return a trainer's last line: its contribution according to `records`, and how to continue."""
    own = sum(each.tokens for record in records for each in record.contributions if each.peer == status.peer_id)
    work = f"{human_count(own)} tokens trained here are in the base" if own else "no round includes work of this peer yet"
    if gather([status]).done:
        ended = "was stopped by its owner" if status.state == "stopped" else "is done"
        return f"the campaign {ended} · {work} · {_to_export(run_dir)}"
    return f"left · {work} · {to_continue(run_dir, identity)}"


def farewell_of_bootstrap(status: PeerStatus, run_dir: Path, identity: Path | None = None) -> str:
    """Return a bootstrap peer's last line: how to continue, or what is left to do once the campaign is over."""
    if not gather([status]).done:
        return f"left · {to_continue(run_dir, identity, 'start it again')}"
    ended = "was stopped by its owner" if status.state == "stopped" else "is done"
    return f"left · the campaign {ended} · {_to_export(run_dir)} · for others to export it from here, start this peer again"


def _to_export(run_dir: Path) -> str:
    return f"export it: spes-p2p export --run-dir {shlex.quote(str(run_dir))} --output checkpoint"


@dataclass
class _Failing:
    """Attempts at a round that failed."""

    round: int
    since: float
    attempts: int = 0
    reasons: set[str] = field(default_factory=set)
    is_explained: bool = False


class RoundLog:
    """Observer that logs one line per round. Round 0 assembles the swarm; later rounds move weights."""

    def __init__(self, board: StatusBoard, clock: Callable[[], float], min_peers: int = 1):
        """`board` must receive each event before this observer; `clock` is monotonic, in seconds.

        `min_peers`: trainers that the first round waits for.
        """
        self._board, self._min_peers, self._present = board, min_peers, -1
        self._is_new = True
        """Whether what holds is old: neither a round nor an order has come since this peer has its base."""
        self._caught_up: events.CaughtUp | None = None
        self._missed_order = False
        self._missing = ""
        """The electors that are not in the registry, for people."""
        self._looks_without_trainer = 0
        """In a row. After a start the first may come before this peer has found the others."""
        self._looks_without_vouched = 0
        """The same where trainers are here, but none for whom the owner vouches and without whom the schedule waits."""
        self._nobody_trains = self._slept = False
        """Whether no trainer is here now, and whether none was since the last round."""
        self._failing = _Failing(-1, 0.0)
        self._clock = clock
        self._spoke_at = clock()
        self._living: frozenset[str] | None = None
        self._bounded_at, self._bounded = -1, dict[str, int]()
        """The last round with steps scaled down, and by group for how many rounds in a row."""
        self._clipped_at = dict[str, int]()
        """By member: the last round for which it was told that its update was clipped."""
        self._has_explained = False
        """Whether this peer's user was told what it means that its update is clipped."""
        self._complained_at = self._forecast_at = -math.inf
        self._knows_quota = False
        self._slow_rounds = 0
        """Rounds in a row that waited for this peer's line. The first may have measured too little to judge."""
        self._utilisation = ""
        """Device utilisation in the last phase; empty if the device's peak is unknown."""
        self._waiting = {"announcing": "waiting for the plan", "downloading": "waiting for a peer that has the base"}

    def show(self, event: Event) -> None:
        """Log the event if it is of interest to the user."""
        if isinstance(event, events.PhaseTrained):
            self._utilisation = "" if math.isnan(event.mfu) else f" at {100 * event.mfu:.0f} % MFU"
        silent_s = self._clock() - self._spoke_at
        if isinstance(event, events.TrainingProgress) and silent_s < HEARTBEAT_S:
            return
        if isinstance(event, events.DownloadProgress) and (silent_s < DOWNLOAD_EVERY_S or event.done >= event.total):
            return  # BaseRestored says that it is complete
        line = self._line(event)
        if line:
            level = _LEVELS.get(type(event), logging.INFO)
            if isinstance(event, events.UpdatesClipped) and not self._is_alarming(event):
                level = logging.DEBUG
            else:
                self._spoke_at = self._clock()
            logger.log(level, "%s", line, extra={EVENT: event})

    def _is_alarming(self, event: events.UpdatesClipped) -> bool:
        """Whether a member's update stood out, a step by far, or the same one repeatedly: in healthy campaigns steps vary.

        Of a member once in CLIPPED_AGAIN_ROUNDS: some newcomers' updates are clipped in each round.
        """
        before = self._bounded if event.round == self._bounded_at + 1 else {}
        self._bounded_at, self._bounded = event.round, {name: before.get(name, 0) + 1 for name, _ in event.groups}
        repeated = any(count >= REPEATED_ROUNDS for count in self._bounded.values())
        due = {peer for peer, _ in event.parts if event.round - self._clipped_at.get(peer, -math.inf) >= CLIPPED_AGAIN_ROUNDS}
        self._clipped_at = {peer: at for peer, at in self._clipped_at.items() if event.round - at < CLIPPED_AGAIN_ROUNDS}
        self._clipped_at |= dict.fromkeys(due, event.round)
        return bool(due) or repeated or any(factor < LARGE_STEP for _, factor in event.groups)

    def _line(self, event: Event) -> str | None:
        if isinstance(event, _OF_ROUNDS) and self._caught_up is not None and event.round < self._caught_up.round:
            self._missed_order |= isinstance(event, events.Controlled)
            return None
        match event:
            case events.CaughtUp():
                self._caught_up = event
            case BaseRestored():
                return self._restored(event)
            case events.TrainingProgress():
                done = percent(event.steps_done, event.steps_planned)
                return f"{self._nth(event.round)} · training, {done} · {human_rate(event.tokens_per_second)}"
            case events.DownloadProgress():
                return f"downloading {event.what}: {percent(event.done, event.total)}"
            case events.PeersSeen():
                self._missing = self._missing_electors(event)
                told = self._assembling(event) or self._lost_vouched() or self._membership_change(event)
                return told or self._lost_majority() or self._still_waiting()
            case events.PhaseTrained() if event.skipped_steps:
                return f"{self._nth(event.round)}: skipped {event.skipped_steps} steps with a non-finite loss or gradient"
            case RoundCommitted():
                return self._committed(event)
            case events.Controlled():
                return self._ordered(event)
            case events.Evaluated():
                when = "" if event.round > 0 else " before training"
                return f"{self._nth(event.round)} · held-out loss {human_loss(event.validation_loss)}{when}"
            case events.TasksEvaluated():
                return f"{self._nth(event.round)} · tasks: {human_scores(event.scores)}"
            case events.PromptsContinued():
                return f"{self._nth(event.round)} · the first prompt goes on: {event.continuations[0].strip()}"
            case events.QuotaForecast():
                return self._quota(event)
            case events.RoundFailed():
                return self._failed(event)
            case events.WorkDropped():
                return f"{self._nth(event.round)}: discarded work on {human_count(event.tokens)} tokens ({event.reason})"
            case events.UpdatesClipped():
                me = self._board.status.peer_id
                whose = {peer: "this peer" if peer == me else peer[-6:] for peer, _ in event.parts}
                parts = [f"{counted(count, 'part')} of {whose[peer]}'s update" for peer, count in event.parts]
                steps = _scaled(event.groups)
                why = WHY_CLIPPED if not self._has_explained and me in dict(event.parts) else ""
                self._has_explained |= bool(why)
                return f"{self._nth(event.round)}: clipped {', '.join(parts + steps)}{why}"
            case events.ResultsChecked() if event.wrong or event.unanswered:
                wrong = [f"{peer[-6:]} served a wrong result and is excluded by proof" for peer in event.wrong]
                silent = [f"{peer[-6:]} did not show what its result was made from" for peer in event.unanswered]
                return f"{self._nth(event.round)}: {', '.join(wrong + silent)}"
            case events.StepsRejected():
                who = ", ".join(peer[-6:] for peer in event.peers)
                return f"{self._nth(event.round)}: left out experts of {who}, whose step makes the held-out loss worse"
            case events.VerdictsTaken() if event.convicted or any(not audit.passed for _, audit in event.audits):
                failed = [f"{auditor[-6:]} found that {audit.peer[-6:]}'s update for round {audit.round} was not trained"
                          for auditor, audit in event.audits if not audit.passed]
                lost = [f"{peer[-6:]} gets no work for some rounds" for peer in event.convicted]
                return f"{self._nth(event.round)}: {', '.join(failed + lost)}"
            case events.StandingChanged():
                return f"{self._nth(event.round)}: {own_standing(event.standing, None)}"
            case events.DigestMismatch():
                digests = f"agreed {event.agreed[:12]}, local {event.mine[:12]}"
                return f"{self._nth(event.round)}: the local base differs from the agreed one ({digests}); downloading it again"
        return None

    def _assembling(self, event: events.PeersSeen) -> str | None:
        """Report how many trainers of those that the first round waits for are there, when that changes."""
        status, before = self._board.status, self._present
        is_assembling = status.base_digest and not status.has_begun
        is_waiting = is_assembling and event.trainers < self._min_peers
        self._present = event.trainers if is_waiting else -1
        if self._present in (before, -1):
            return None
        self._living = frozenset(event.living) - {status.peer_id}
        return f"waiting for trainers: {self._of_all()}"

    def _lost_vouched(self) -> str | None:
        """Report once that the schedule waits for a trainer for whom the owner vouches.

        A helper is told of round 0 by its coordinator, which knows the invitations.
        """
        status = self._board.status
        is_under_way = status.has_begun and status.round < status.total_rounds
        waits = status.base_digest and (is_under_way or self._awaits_first_vouched())
        is_lacking = waits and status.vouched_alive == 0 and status.trainers_alive > 0 and status.state == "running"
        self._looks_without_vouched = self._looks_without_vouched + 1 if is_lacking else 0
        stand = NO_MAJORITY in self._missing or self._failing.round > status.round
        return lacking_vouched(is_under_way, not stand) if self._looks_without_vouched == 2 else None

    def _awaits_first_vouched(self) -> bool:
        """Whether this trainer waits for round 0, for which enough trainers are here."""
        status = self._board.status
        return status.role == "trainer" and not status.has_begun and self._present < 0

    def _of_all(self) -> str:
        return f"{self._present} of the {self._min_peers} that the first round needs"

    def _membership_change(self, event: events.PeersSeen) -> str | None:
        """Report arrivals and departures, on helpers only, and once that nobody trains."""
        status = self._board.status
        living = frozenset(event.living) - {status.peer_id}
        before, self._living = self._living, living
        is_told, left_one = self._nobody_trains, bool((before or frozenset()) - living)
        self._looks_without_trainer = self._looks_without_trainer + 1 if self._sees_no_trainer() else 0
        self._nobody_trains = self._looks_without_trainer > (0 if left_one or is_told else 1)
        self._slept |= self._nobody_trains
        nobody = "no trainer is here: rounds wait until one joins" if self._nobody_trains and not is_told else ""
        if status.role != "helper" or living == (before or frozenset()):
            return nobody or None
        came = "is here" if before is None else "joined"
        joined = [f"{short_peer(peer)} {came}" for peer in sorted(living - (before or frozenset()))]
        left = [f"{short_peer(peer)} left" for peer in sorted((before or frozenset()) - living)]
        return f"{', '.join(joined + left)} · {nobody or counted(event.trainers, 'trainer')}"

    def _sees_no_trainer(self) -> bool:
        """Whether this is a helper of a campaign that is under way, with no trainer in the registry."""
        status = self._board.status
        goes_on = status.state == "running" and status.has_begun and status.round < status.total_rounds
        return status.role == "helper" and goes_on and not status.trainers_alive

    def _missing_electors(self, event: events.PeersSeen) -> str:
        missing = sorted(set(event.electorate) - set(event.living) - {self._board.status.peer_id})
        if not missing:
            return ""
        names, electors = ", ".join(short_peer(peer) for peer in missing), len(event.electorate)
        wait = f"; {NO_MAJORITY}" if 2 * len(missing) >= electors else ""
        return f" · {len(missing)} of {counted(electors, 'elector')} missing ({names}){wait}"

    def _lost_majority(self) -> str | None:
        """Report once for a round that fails why: it takes a while until dead electors vanish from the registry."""
        failing, is_waiting = self._failing, NO_MAJORITY in self._missing and not self._sees_no_trainer()
        if not is_waiting or failing.is_explained or failing.round <= self._board.status.round:
            return None
        failing.is_explained = True
        return f"{self._nth(failing.round)}{self._missing}"

    def _still_waiting(self) -> str | None:
        """Report a long wait, and the electors that are missing from the registry."""
        status = self._board.status
        what = self._waiting.get(status.stage)
        if what is None and not (self._present >= 0 and status.stage == "waiting"):
            return None
        every_s = HEARTBEAT_S if what else HELPER_EVERY_S
        if min(status.stage_seconds, self._clock() - self._spoke_at) < every_s:
            return None
        waited = human_seconds(status.stage_seconds)
        if self._present >= 0:  # the first round has not begun
            return f"waiting for trainers for {waited}: {self._of_all()}{self._missing}"
        if self._looks_without_vouched and self._awaits_first_vouched():
            return f"waiting for {waited}: {lacking_vouched(False, False)}"
        return f"{self._nth(status.round + 1)} · {what} for {waited}{self._missing}"

    def _failed(self, event: events.RoundFailed) -> str | None:
        """Report a round's first failure for each reason, then one a minute; none while nobody trains."""
        if event.round != self._failing.round:
            self._failing = _Failing(event.round, self._clock())
        failing = self._failing
        failing.attempts += 1
        is_first = event.reason not in failing.reasons
        if self._sees_no_trainer() or not (is_first or self._clock() - self._spoke_at >= HEARTBEAT_S):
            return None
        failing.reasons.add(event.reason)
        why = f"{event.reason}: {PEER_ID.sub(_short, event.detail)}" if event.detail else event.reason
        if is_first:
            return f"{self._nth(event.round)}, attempt {event.attempt} failed ({why}); nothing applied, work kept"
        since = human_seconds(self._clock() - failing.since)
        return f"{self._nth(event.round)}: {failing.attempts} attempts failed in {since}, the last: {why}{self._missing}"

    def _ordered(self, event: events.Controlled) -> str | None:
        """Report what an order changes; of orders that were in force before this peer came only that it waits."""
        is_old, self._is_new = self._is_new, False
        if is_old:
            return f"ordered by the owner: {event.order.split(', ')[0]}" if event.state != "running" else None
        return f"{self._nth(event.round)} · ordered by the owner: {event.news}" if event.news else None

    def _restored(self, event: BaseRestored) -> str:
        caught_up, self._caught_up = self._caught_up, None
        what = _SOURCES.get(event.source, _SOURCES["disk"]).format(max(0, event.round))
        what += f" (digest {event.base_digest[:12]})"
        if caught_up is not None and event.source == "download":
            what += f", caught up from round {caught_up.since} in {human_seconds(caught_up.seconds)}"
        if event.round == BEFORE_TRAINING:
            upcoming = "next: assembling the swarm"
        elif event.round >= self._board.status.total_rounds:
            upcoming = f"the campaign is done{self._serves_on()}"
        elif event.source == "disk":
            upcoming = "asking for the rounds since"
        else:
            upcoming = f"next: {self._nth(event.round + 1)}"
        return f"{what}; {upcoming}"

    def _assembled(self, event: RoundCommitted) -> list[str]:
        status = self._board.status
        others = [peer for peer in event.members if peer != status.peer_id]
        owned = [(peer, [expert for expert, owners in enumerate(event.owners) if peer in owners]) for peer in others]
        return [
            self._nth(event.round),
            f"swarm assembled: {counted(len(event.members), 'trainer')}",
            f"training experts {human_indices(status.owned)}" if status.role == "trainer" else "",
            ", ".join(f"{short_peer(peer)} {human_indices(experts)}" for peer, experts in owned),
        ]

    def _committed(self, event: RoundCommitted) -> str | None:
        """Report a round, and of those that were decided without this peer only the last."""
        caught_up, self._is_new = self._caught_up, False
        if caught_up is not None and event.round < caught_up.round:
            return None
        self._caught_up = None
        remarks = []
        if caught_up is not None:
            remarks.append(f"caught up from round {max(0, caught_up.since)} in {human_seconds(caught_up.seconds)}")
        if self._missed_order and self._board.status.control:
            remarks.append(f"ordered by the owner: {self._board.status.control}")
        if self._slept:
            remarks.append("rounds go on")
        elif event.round == self._failing.round:
            remarks.append(f"decided after {counted(self._failing.attempts, 'failed attempt')}")
        self._slept = self._missed_order = False
        parts = self._round(event, caught_up is None) if event.round > 0 else self._assembled(event)
        status = self._board.status
        left = time_left(status.seconds_left) if 0 < event.round < status.total_rounds else ""
        if left and self._looks_without_vouched > 1:
            left = "the schedule waits"
        if event.round >= status.total_rounds and self._serves_on():
            left = f"the campaign is over{self._serves_on()}"
        return " · ".join(part for part in (*parts, *remarks, left) if part)

    def _serves_on(self) -> str:
        """Of a helper after the last round: what it is still there for."""
        return "; others can export it from this peer until you end it" if self._board.status.role == "helper" else ""

    def _round(self, event: RoundCommitted, took_part: bool) -> list[str]:
        status = self._board.status
        train_s = status.round_seconds.get("train", 0.0)
        sync_s = sync_seconds(event.seconds)
        trains = status.role == "trainer"
        parts = [
            self._nth(event.round),
            f"loss {human_loss(event.loss)}",
            (human_rate(status.tokens_per_second) if train_s else "") if trains else f"{human_count(event.tokens)} tokens",
            f"experts {human_indices(status.owned)}" if trains and (took_part or status.owned) else "",
            counted(len(event.members), "trainer"),
        ]
        if took_part:
            trained = f"trained {human_seconds(train_s)}{self._utilisation}" if train_s else "trained nothing"
            traffic = f"{human_bytes(event.sent_bytes)} up, {human_bytes(event.received_bytes)} down"
            parts += [trained if trains else "", f"synced {human_seconds(sync_s)}, {traffic}"]
        is_slow = trains and holds_rounds_up(
            event.upload, event.median_upload, status.round_seconds, self._slow_rounds > 0
        )
        self._slow_rounds = self._slow_rounds + 1 if is_slow else 0
        if self._slow_rounds > 1 and self._clock() - self._complained_at >= SLOW_LINK_EVERY_S:
            self._complained_at = self._clock()
            parts.append(f"rounds wait for this link: {human_count(8 * event.upload)}bit/s up, the others' median is "
                         f"{human_count(8 * event.median_upload)}bit/s; fewer --experts send less")
        if event.dropped_parts:
            parts.append(f"{event.dropped_parts} of {event.parts} parts left out")
        return parts

    def _quota(self, event: events.QuotaForecast) -> str | None:
        """Report the forecast at the start, once there is a rate to tell by, and now and then."""
        is_known = not math.isnan(event.pauses_at)
        is_due = self._clock() - self._forecast_at >= FORECAST_EVERY_S or (is_known and not self._knows_quota)
        self._knows_quota |= is_known
        if not is_due:
            return None
        self._forecast_at = self._clock()
        return f"quota: {event.line}"

    def _nth(self, number: int) -> str:
        return f"round {max(0, number)}/{self._board.status.total_rounds}"


def _scaled(groups: Sequence[tuple[str, float]]) -> list[str]:
    """Name the groups whose steps were scaled down, the most first; of many, those and the number of the others."""
    ordered = sorted(groups, key=lambda group: group[1])
    named = [f"the step of {name} to {factor:.2g} of its size" for name, factor in ordered[:NAMED_GROUPS]]
    others = len(ordered) - len(named)
    return [*named, f"those of {others} more groups by less"] if others > 0 else named


def _short(peer_id: re.Match[str]) -> str:
    return short_peer(peer_id[0])


_LEVELS: dict[type, int] = {
    events.PhaseTrained: logging.WARNING,
    events.RoundFailed: logging.WARNING,
    events.WorkDropped: logging.WARNING,
    events.UpdatesClipped: logging.WARNING,
    events.ResultsChecked: logging.WARNING,
    events.StepsRejected: logging.WARNING,
    events.VerdictsTaken: logging.WARNING,
    events.DigestMismatch: logging.ERROR,
}
