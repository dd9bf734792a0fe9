"""The page's data as JSON values: pure functions of the peers' answers. Peers are referenced by their index in the list."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from spes_p2p.client.dashboard.lines import lines
from spes_p2p.client.dashboard.schedule import schedule
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.presence import Contribution, PeerStatus, RoundRecord
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.rounds import Totals
from spes_p2p.observe.swarm_status import gather

MAX_POINTS = 600
"""Maximum number of points per curve; more are not visible."""
MAX_CONTINUED_ROUNDS = 100
"""Rounds whose continuations are sent to a browser: at most 160 kB, mostly 80."""
MAX_GONE = 256
"""Peers that are gone, and teams, with most tokens, that are sent to a browser: strangers come and go under ever new names."""
TIMELINE_ROUNDS = 8

Traffic = Mapping[int, Mapping[str, tuple[int, int]]]
"""Bytes (sent, received) by round and reporting peer."""
Stages = Mapping[int, Mapping[str, Mapping[str, float]]]
"""Seconds by round, reporting peer and stage."""
STAGES = ("train", "announce", "exchange", "commit", "apply")


def swarm_view(
    statuses: Sequence[PeerStatus], rounds: Mapping[str, Sequence[RoundRecord]], totals: Totals, now: float,
    slow: Collection[str] = (),
) -> dict[str, Any]:
    """Return the state of the swarm, with the field names of `status --json`.

    `rounds`: each peer's own records of the last rounds, by the local clock. `now`: Unix time. `slow`: the trainers whose
    lines hold rounds up.
    """
    swarm, totals = gather(statuses), totals.named_by(statuses)
    places = {status.peer_id: place for place, status in enumerate(swarm.peers)}
    tokens = {each.peer: each.tokens for each in totals.contributions}
    steps = {each.peer: each.expert_steps for each in totals.contributions}
    of_lines = lines(swarm.peers, rounds, slow)
    document: dict[str, Any] = to_json(replace(swarm, peers=(), owners=(), audits={}))
    document["peers"] = [
        {
            **_lean(status),
            **_called(totals, status.peer_id),
            "tokens": tokens.get(status.peer_id, 0),
            "expert_steps": steps.get(status.peer_id, 0),
            "score": swarm.scores.get(status.peer_id),
            "audit": to_json(swarm.audits.get(status.peer_id)),
            "line": of_lines.get(status.peer_id),
            "timeline": _timeline(status, rounds.get(status.peer_id, ()), now),
        }
        for status in swarm.peers
    ]
    document["owners"] = [[places[peer] for peer in owners if peer in places] for owners in swarm.owners]
    gone = [each for each in totals.ranked() if each.peer not in places and (each.tokens or each.expert_steps)]
    document["gone"] = [
        {"peer_id": each.peer, **_called(totals, each.peer), "tokens": each.tokens, "expert_steps": each.expert_steps}
        for each in gone[:MAX_GONE]
    ]
    document["contributed"], document["left"] = totals.tokens, len(gone)
    document["teams"] = totals.teams()[:MAX_GONE]
    document["assembled"], document["done"], document["waits"] = swarm.assembled, swarm.done, swarm.waits
    return document


def series(
    records: Sequence[RoundRecord], traffic: Traffic, config: CampaignConfig, control: Control | None = None,
    stages: Stages | None = None,
) -> dict[str, Any]:
    """Return curves since the start of the campaign, one column per quantity, and the schedule to its end.

    `records`: by round. `control`: the owner's newest record.
    """
    rates = _rates(records)
    sent, received = ([_mean_bytes(traffic.get(record.round, {}), i) for record in records] for i in (0, 1))
    kept = thinned(len(records), MAX_POINTS)
    copied = ("round", "time", "loss", "members", "dropped_parts", "failed_attempts", "merge_alpha")
    columns = {
        **{name: [getattr(records[i], name) for i in kept] for name in copied},
        "step": [records[i].campaign_step for i in kept],
        "tokens": [records[i].total_tokens for i in kept],
        "tokens_per_second": [rates[i] for i in kept],
        "sent_bytes": [sent[i] for i in kept],
        "received_bytes": [received[i] for i in kept],
        **{stage: [_mean_seconds((stages or {}).get(records[i].round, {}), stage) for i in kept] for stage in STAGES},
    }
    evaluated = [record for record in records if math.isfinite(record.validation_loss)]
    held_out = [evaluated[i] for i in thinned(len(evaluated), MAX_POINTS)]
    document: dict[str, Any] = to_json(
        {
            "rounds": columns,
            "held_out": [(record.round, record.total_tokens, record.validation_loss) for record in held_out],
            "prompts": config.evaluation.prompts,
            "evaluate_every": config.evaluation.every_rounds,
            "continuations": _continuations(records),
            "schedule": schedule(records, config, control),
        }
    )
    return document


def peer_rounds(peer: str, records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return what the last rounds were for one peer, newest first. `records`: its own."""
    rows = []
    for record in reversed(records):
        own = next((each for each in record.contributions if each.peer == peer), Contribution(peer, 0, 0))
        rows.append({
            "round": record.round, "time": record.time, "tokens": own.tokens, "expert_steps": own.expert_steps,
            "seconds": dict(record.seconds), "sent_bytes": record.sent_bytes, "received_bytes": record.received_bytes,
            "failed_attempts": record.failed_attempts,
        })
    document: list[dict[str, Any]] = to_json(rows)
    return document


def _continuations(records: Sequence[RoundRecord]) -> list[tuple[int, tuple[str, ...]]]:
    """Return what the model wrote after the prompts, by round."""
    told = [record for record in records if record.continuations]
    return [(told[i].round, told[i].continuations) for i in thinned(len(told), MAX_CONTINUED_ROUNDS)]


def _mean_bytes(told: Mapping[str, tuple[int, int]], direction: int) -> float:
    """Return the mean over the peers; NaN without data."""
    return sum(pair[direction] for pair in told.values()) / len(told) if told else math.nan


def _mean_seconds(told: Mapping[str, Mapping[str, float]], stage: str) -> float:
    """Return the mean over the peers that trained; NaN without data."""
    seconds = [by_stage.get(stage, 0.0) for by_stage in told.values() if "train" in by_stage]
    return round(sum(seconds) / len(seconds), 3) if seconds else math.nan


def thinned(count: int, at_most: int) -> list[int]:
    """Return at most `at_most` of the indices 0 to count - 1, evenly spaced, the last one included."""
    if count <= at_most:
        return list(range(count))
    return [(i + 1) * count // at_most - 1 for i in range(at_most)]


def _called(totals: Totals, peer: str) -> dict[str, str]:
    named = totals.called(peer)
    return {"name": named.name, "team": named.team}


def _lean(status: PeerStatus) -> dict[str, Any]:
    """Return a status without long fields that are the same for all peers."""
    lean = replace(status, owners=(), members=(), electorate=(), scores={}, audits=(), continuations=())
    document: dict[str, Any] = to_json(lean)
    for name in ("owners", "members", "electorate", "stages", "scores", "audits", "continuations"):
        del document[name]
    return document


def _timeline(status: PeerStatus, records: Sequence[RoundRecord], now: float) -> list[tuple[str, float, float]]:
    """(stage, began, ended) of the last rounds and the one under way, in seconds before `now`; the present stage ends at 0."""
    spans: list[tuple[str, float, float]] = []
    for record in records[-TIMELINE_ROUNDS:]:
        ended, in_round = now - record.time, []
        for stage, seconds in reversed(record.seconds):
            in_round.append((stage, ended + seconds, ended))
            ended += seconds
        spans.extend(reversed(in_round))
    under_way = status.stages or ((status.stage, status.stage_seconds),)
    ends = [*(began for _, began in under_way[1:]), 0.0]
    spans.extend((_SHORT.get(name, name), began, end) for (name, began), end in zip(under_way, ends, strict=True))
    return [(stage, round(began, 2), round(ended, 2)) for stage, began, ended in spans]


_SHORT = {"training": "train", "announcing": "announce", "exchanging": "exchange", "committing": "commit", "applying": "apply"}


def _rates(records: Sequence[RoundRecord]) -> list[float]:
    """Return the swarm's tokens per second in each round; NaN if the previous round is unknown."""
    rates = [math.nan] * len(records)
    for i, (before, record) in enumerate(pairwise(records), start=1):
        seconds = record.time - before.time
        if record.round == before.round + 1 and seconds > 0:
            rates[i] = record.tokens / seconds
    return rates
