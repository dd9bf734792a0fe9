"""What a campaign's owner should look at: a pure function of the swarm's state and its rounds so far."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.messages.presence import PeerStatus, RoundRecord
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.swarm_status import (
    NO_MAJORITY,
    SwarmStatus,
    gather,
    lacking_vouched,
    slow_lines,
    swarm_status,
    usual_upload,
)
from spes_p2p.observe.units import counted, human_count, human_indices, human_loss, human_seconds, short_peer
from spes_p2p.rounds.runaway import recorded_course

KINDS = (
    "nobody_answers", "loss_runs_away", "no_trainers", "no_vouched_trainer", "electors_missing", "no_round",
    "experts_without_owner", "bases_differ", "slow_line",
)
PACE_ROUNDS, USUAL_ROUNDS, PATIENCE_S = 8, 3, 300.0
"""No round for three times the median of the last eight and five minutes: the bound of SpesRoundsStalled in alerts.yml."""


@dataclass(frozen=True)
class Alert:
    """Something that lasts until it is dealt with."""

    kind: str
    """One of KINDS."""
    severity: str
    """critical: rounds do not happen, or make the model worse; warning: they still do."""
    text: str


NOBODY_ANSWERS = Alert("nobody_answers", "critical", "no peer of the campaign answers")
NO_TRAINERS = Alert("no_trainers", "critical", "no trainer is here; rounds go on when one joins")


def alerts(
    swarm: SwarmStatus, records: Sequence[RoundRecord], now: float, were_slow: Collection[str] = (),
    config: CampaignConfig | None = None,
) -> list[Alert]:
    """Return the alerts, the worst first. `records`: by round, as far as known, at the clock of `now` (Unix time).

    `were_slow`: trainers whose lines held rounds up at the last look. `config`: of the campaign; no loss is judged without it.
    """
    found = [_vouched(swarm), _experts(swarm), _bases(swarm), _lines(swarm, were_slow)]
    if not swarm.done and swarm.state != "stopped":
        found += [NO_TRAINERS] if swarm.is_asleep else [_electors(swarm), _stall(swarm, records, now)]
        found += [_loss(records, config)] if config is not None else []
    return sorted((each for each in found if each is not None), key=lambda each: (each.severity, KINDS.index(each.kind)))


def status_document(statuses: Sequence[PeerStatus], found: Sequence[Alert] | None = None) -> dict[str, Any]:
    """Return the document of `spes-p2p status --json`. `found`: the alerts; None: those that need no records of rounds."""
    if found is None:
        found = alerts(gather(statuses), (), time.time())
    return {**swarm_status(statuses), "alerts": to_json(found)}


def _loss(records: Sequence[RoundRecord], config: CampaignConfig) -> Alert | None:
    """By the rule of the owner's bootstrap peer, which then rolls back."""
    course = recorded_course(records, config.evaluation.every_rounds, config.admission != "open")
    good, best = course.last_good_round, course.best
    if good is None or best is None:
        return None
    newest = course.latest[-1]
    text = (f"the held-out loss runs away: {human_loss(newest.loss)} after round {newest.round}, "
            f"{human_loss(best.loss)} at best in two evaluations in a row")
    return Alert("loss_runs_away", "critical", f"{text}; the base of round {good} was still good")


def _vouched(swarm: SwarmStatus) -> Alert | None:
    if not swarm.lacks_vouched:
        return None
    severity = "warning" if swarm.assembled else "critical"
    return Alert("no_vouched_trainer", severity, lacking_vouched(swarm.assembled, swarm.rounds_go_on))


def _electors(swarm: SwarmStatus) -> Alert | None:
    """Some are missing, and without one more no majority is left."""
    total, missing = len(swarm.electorate), len(swarm.electors_missing)
    if not missing or 2 * (total - missing - 1) > total:
        return None
    text = f"no answer from {missing} of {counted(total, 'elector')} ({', '.join(map(short_peer, swarm.electors_missing))})"
    if swarm.majority_missing:
        return Alert("electors_missing", "critical", f"{text}; {NO_MAJORITY}")
    return Alert("electors_missing", "warning", f"{text}; if one more is missing, no round is decided")


def _stall(swarm: SwarmStatus, records: Sequence[RoundRecord], now: float) -> Alert | None:
    last = records[-PACE_ROUNDS - 1 :]
    if not last or swarm.state != "running":
        return None
    pace = statistics.median([after.time - before.time for before, after in pairwise(last)] or [0.0])
    waited = now - last[-1].time
    if waited <= USUAL_ROUNDS * pace + PATIENCE_S:
        return None
    text = f"no round for {human_seconds(waited)}; the last ones took {human_seconds(pace)}"
    return Alert("no_round", "critical", text)


def _experts(swarm: SwarmStatus) -> Alert | None:
    if not swarm.ownerless or swarm.done or swarm.state == "stopped":
        return None
    return Alert("experts_without_owner", "warning", f"no peer trains expert {human_indices(swarm.ownerless)}")


def _bases(swarm: SwarmStatus) -> Alert | None:
    if swarm.digests_equal:
        return None
    return Alert("bases_differ", "warning", f"peers at round {swarm.round} hold different bases")


def _lines(swarm: SwarmStatus, were_slow: Collection[str]) -> Alert | None:
    uploads = {peer.peer_id: peer.upload for peer in swarm.peers if peer.role == "trainer" and peer.upload > 0}
    slow = [peer for peer in slow_lines(swarm.peers, were_slow) if peer in uploads]
    if not slow or swarm.done:
        return None
    median = usual_upload(swarm.peers)
    lines = ", ".join(f"{short_peer(peer)} {human_count(8 * uploads[peer])}bit/s" for peer in slow)
    text = f"rounds wait for slow lines: {lines} up; the median is {human_count(8 * median)}bit/s"
    return Alert("slow_line", "warning", text)
