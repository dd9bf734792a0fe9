"""Prometheus metrics of one peer. The table in `docs/metrics.md` is generated from this module."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from spes_p2p import __version__
from spes_p2p.errors import UserError, cannot_listen
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.observe import events
from spes_p2p.observe.contributed import Contributed
from spes_p2p.observe.events import (
    PAUSE_REASONS,
    BaseRestored,
    Event,
    PhaseTrained,
    RoundCommitted,
    RoundMeasured,
    seconds_by_stage,
)
from spes_p2p.observe.pace import PACE_ROUNDS, pace_s
from spes_p2p.observe.worth import Worth, kept_worth

BYTE_KINDS = ("push", "pull", "download", "control")
FAILURE_REASONS = ("coordinator_lost", "quorum_lost", "refused", "malformed", "exchange", "timeout")
"""Series created at the start: an alert on an increase would miss the first sample of a new series."""

hide_created_series: Callable[[], None] = disable_created_metrics
hide_created_series()

MAX_PEERS = 2**8
"""Bounds the series of a metric by peer: strangers come and go under ever new names, and a series stays until a restart."""
STAGE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""From a fast announcement to an hour of training."""
_BY_KIND = "kind: shared, router, expert."


@dataclass(frozen=True)
class Metric:
    """One metric, and how events change it: a gauge is set, a counter incremented, a histogram gets an observation."""

    name: str
    kind: str
    description: str
    changed_by: type[Event] | tuple[type[Event], ...] = ()
    """Empty: `Metrics` sets it itself."""
    value: Callable[[Any], Any] = lambda event: 1
    """The value in an event; for a metric with labels, values by label (a tuple of several)."""
    labels: tuple[str, ...] = ()


def _gauge(name: str, description: str, changed_by: Any = (), value: Any = None, *labels: str) -> Metric:
    return Metric(name, "gauge", description, changed_by, value, labels)


def _counter(name: str, description: str, changed_by: Any, value: Any, *labels: str) -> Metric:
    return Metric(name, "counter", description, changed_by, value, labels)


_BASE = (RoundCommitted, BaseRestored)

METRICS = (
    _gauge("spes_round", "Last round in the base; round 0 only assembles the swarm.", _BASE, lambda e: max(0, e.round)),
    _gauge("spes_campaign_step", "Campaign steps in the base.", _BASE, lambda e: e.campaign_step),
    _gauge("spes_campaign_planned_steps", "Campaign steps at the end of the campaign.", _BASE, lambda e: e.total_steps),
    _gauge("spes_campaign_tokens", "Tokens in the base, trained by all peers.", _BASE, lambda e: e.total_tokens),
    _gauge("spes_last_commit_timestamp_seconds", "Unix time of the last commit applied by this peer; 0 before the first."),
    _gauge("spes_round_interval_seconds", "Seconds between the last two commits applied by this peer; 0 before the second."),
    _gauge("spes_next_round_timestamp_seconds", "Unix time at which the next round is expected, at the median pace of the last"
           f" {PACE_ROUNDS}; NaN: unknown, or none follows now."),
    _gauge("spes_loss", "Training loss of the last committed round, mean over all members, nats per token.",
           RoundCommitted, lambda e: e.loss),
    _gauge("spes_validation_loss", "Held-out loss of the last evaluated base, nats per token.",
           events.Evaluated, lambda e: e.validation_loss),
    _gauge("spes_learning_rate", "Learning rate at the last commit.", RoundCommitted, lambda e: e.learning_rate),
    _gauge("spes_merge_alpha", "Alpha of the last round's expert merge; 0 if it had none.",
           RoundCommitted, lambda e: e.merge_alpha),
    _gauge("spes_peers", "Living peers in the registry, by role: trainer, helper.",
           events.PeersSeen, lambda e: {"trainer": e.trainers, "helper": e.helpers}, "role"),
    _gauge("spes_round_members", "Members of the last committed round.", RoundCommitted, lambda e: len(e.members)),
    _gauge("spes_expert_owners", "Peers that train the expert.",
           _BASE, lambda e: {expert: len(owners) for expert, owners in enumerate(e.owners)}, "expert"),
    _gauge("spes_upload_bytes_per_second", "Measured upload rate of this peer's line; 0: unknown.",
           RoundCommitted, lambda e: e.upload),
    _gauge("spes_others_upload_bytes_per_second", "Median upload rate that the other trainers announced; 0: unknown.",
           RoundCommitted, lambda e: e.median_upload),
    _gauge("spes_owned_experts", "Experts that this peer trains."),
    _gauge("spes_campaign_held", "1 if the owner has paused or stopped the campaign, otherwise 0.",
           events.Controlled, lambda e: e.state != "running"),
    _gauge("spes_paused", f"1 while this trainer pauses for its user, otherwise 0; reason: {', '.join(PAUSE_REASONS)}.",
           events.Paused, lambda e: {reason: reason == e.reason for reason in PAUSE_REASONS}, "reason"),
    _gauge("spes_quota_bytes", "Traffic that this trainer's user allows in a day (--quota); 0: no limit.",
           events.QuotaForecast, lambda e: e.quota_bytes),
    _gauge("spes_quota_used_bytes", "Traffic of this day that counts towards the quota.",
           events.QuotaForecast, lambda e: e.used_bytes),
    _gauge("spes_quota_pause_timestamp_seconds", "Unix time at which the quota will pause this trainer, at the rate so far;"
           " +Inf: not today, NaN: not known yet.", events.QuotaForecast, lambda e: e.pauses_at),
    _gauge("spes_contributed_tokens", "Tokens trained by this peer that are in the base, since it first joined; over"
           " spes_campaign_tokens, its share (spes-p2p me)."),
    _gauge("spes_contributed_rounds", "Committed rounds with work of this peer, since it first joined."),
    _gauge("spes_contributed_expert_steps", "Local steps times experts trained in them, in these rounds."),
    _gauge("spes_contributed_seconds", "Time that this peer has spent in training steps, since it first joined."),
    _gauge("spes_experts_worth", "Nats per token by which the experts that this peer owned lowered the held-out loss, as"
           " spes-p2p me --worth measured last; NaN before."),
    _gauge("spes_experts_worth_round", "Last round in the base that it measured; NaN before."),
    _counter("spes_tokens_total", "Tokens trained by this peer.", PhaseTrained, lambda e: e.tokens),
    _counter("spes_steps_total", "Local optimizer steps of this peer.", PhaseTrained, lambda e: e.steps),
    _counter("spes_skipped_steps_total", "Local steps skipped because of a non-finite loss or gradient.",
             PhaseTrained, lambda e: e.skipped_steps),
    _gauge("spes_tokens_per_second", "Training speed of this peer at its last local step.",
           events.TrainingProgress, lambda e: e.tokens_per_second),
    _gauge("spes_flops_per_second", "Computed floating-point operations per second of the last phase; 0: unknown.",
           PhaseTrained, lambda e: e.flops_per_second),
    _gauge("spes_model_flops_utilization", "spes_flops_per_second over the bf16 peak, 0 to 1; NaN if the peak is unknown.",
           PhaseTrained, lambda e: e.mfu),
    _gauge("spes_auxiliary_loss", "Auxiliary loss of this peer in its last phase.", PhaseTrained, lambda e: e.aux_loss),
    _counter("spes_rounds_total", "Rounds committed while this peer ran, round 0 included.", RoundCommitted, lambda e: 1),
    _counter("spes_bytes_total",
             f"Payload bytes over the transport; kind: {', '.join(BYTE_KINDS)}; direction: sent, received.",
             events.BytesMoved, lambda e: {(e.kind, "sent"): e.sent, (e.kind, "received"): e.received}, "kind", "direction"),
    Metric("spes_stage_seconds", "histogram", "Seconds by stage: train, announce, exchange, commit, apply.",
           (PhaseTrained, RoundCommitted),
           lambda e: {"train": e.seconds} if isinstance(e, PhaseTrained) else seconds_by_stage(e.seconds), ("stage",)),
    _gauge("spes_update_norm", f"L2 norm of the update that this peer sent in the last round; {_BY_KIND}",
           RoundMeasured, lambda e: {kind: drift.sent for kind, drift in e.drift.items()}, "kind"),
    _gauge("spes_update_shrink", f"L2 norm of the base's last step over that of this peer's update; {_BY_KIND}",
           RoundMeasured, lambda e: {kind: drift.shrink for kind, drift in e.drift.items()}, "kind"),
    _gauge("spes_update_cosine", f"Cosine of this peer's update and the base's step; {_BY_KIND}",
           RoundMeasured, lambda e: {kind: drift.cosine for kind, drift in e.drift.items()}, "kind"),
    _gauge("spes_expert_tokens", "Tokens that trained the expert in the last round, summed over owners and layers.",
           RoundMeasured, lambda e: dict(enumerate(e.expert_tokens)), "expert"),
    _gauge("spes_load_violation", "Tokens of the busiest expert over the mean, minus 1, on this peer's tokens.",
           PhaseTrained, lambda e: dict(enumerate(e.load_violation)), "layer"),
    _gauge("spes_owned_routing_share", "Share of this peer's token routings that go to experts it trains.",
           PhaseTrained, lambda e: e.owned_routing),
    _gauge("spes_member_score", "Nats per token by which the last steps of a member's experts lower the held-out loss, as"
           " this judge of an open campaign measured; negative: harm.", events.StepsJudged, lambda e: dict(e.scores), "peer"),
    _gauge("spes_audit_cosine", "Cosine of a member's update with that of training its phase again, as this auditor of an open"
           " campaign found last; 0 where the member did not show its moments.", events.PhaseAudited,
           lambda e: {e.audit.peer: e.audit.cosine if e.audit.steps else 0.0}, "peer"),
    _gauge("spes_audit_passed", "Whether a member passed this auditor's last audit of it.", events.PhaseAudited,
           lambda e: {e.audit.peer: float(e.audit.passed)}, "peer"),
    _gauge("spes_task_score", "Result of an lm-eval task on the base that this peer evaluated last (--evaluate-tasks).",
           events.TasksEvaluated, lambda e: {score[:2]: score[2] for score in e.scores}, "task", "metric"),
    _counter("spes_round_failures_total",
             f"Attempts at a round that did not commit, by reason: {', '.join(FAILURE_REASONS)}.",
             events.RoundFailed, lambda e: {e.reason: 1}, "reason"),
    _counter("spes_dropped_parts_total", "Parts left out of committed rounds; the base is unchanged there.",
             RoundCommitted, lambda e: e.dropped_parts),
    _counter("spes_dropped_tokens_total", "Tokens whose pending work was discarded.", events.WorkDropped, lambda e: e.tokens),
    _counter("spes_reforms_total", "Reforms after the loss of most electors or of all peers with the newest base.",
             BaseRestored, lambda e: e.source == "reform"),
    _counter("spes_digest_mismatches_total", "Times that this peer's base differed from the agreed one and was replaced.",
             events.DigestMismatch, lambda e: 1),
    Metric("spes_build_info", "gauge", "Program version and identity of campaign and peer; always 1."),
)
UNKNOWN_AT_FIRST = (
    "spes_loss", "spes_validation_loss", "spes_model_flops_utilization", "spes_owned_routing_share",
    "spes_next_round_timestamp_seconds", "spes_experts_worth", "spes_experts_worth_round",
)
"""Gauges that are NaN until the first measurement."""
_CHANGES = {"gauge": "set", "counter": "inc", "histogram": "observe"}
"""Method of the client library that applies an event's value, by kind."""


def _made(row: Metric, registry: CollectorRegistry) -> Any:
    match row.kind:
        case "counter":
            return Counter(row.name, row.description, row.labels, registry=registry)
        case "histogram":
            return Histogram(row.name, row.description, row.labels, registry=registry, buckets=STAGE_BUCKETS_S)
        case _ if row.name.endswith("_info"):
            return Info(row.name.removesuffix("_info"), row.description, registry=registry)
    return Gauge(row.name, row.description, row.labels, registry=registry)


class Metrics:
    """Observer that updates metrics in its own registry, so that several peers can share a process."""

    def __init__(
        self, peer_id: str = "", campaign: str = "", campaign_hash: str = "", wall_time: Callable[[], float] = time.time
    ):
        self.registry = CollectorRegistry()
        self._peer_id = peer_id
        self._wall_time = wall_time
        self._last_commit = 0.0
        self._commits: deque[float] = deque(maxlen=PACE_ROUNDS + 1)
        self._caught_up = -1
        self._metrics = {row.name: _made(row, self.registry) for row in METRICS}
        self._peers: dict[str, dict[str, None]] = {row.name: {} for row in METRICS if row.labels == ("peer",)}
        """By metric: the peers that have a series, those measured last at the end."""
        for name in UNKNOWN_AT_FIRST:
            self._metrics[name].set(math.nan)
        for kind in BYTE_KINDS:
            for direction in ("sent", "received"):
                self._metrics["spes_bytes_total"].labels(kind, direction)
        for reason in PAUSE_REASONS:
            self._metrics["spes_paused"].labels(reason)
        for reason in FAILURE_REASONS:
            self._metrics["spes_round_failures_total"].labels(reason)
        self._metrics["spes_build_info"].info({
            "version": __version__, "protocol": str(PROTOCOL_VERSION), "campaign": campaign, "campaign_hash": campaign_hash,
            "peer_id": peer_id,
        })
        ProcessCollector(registry=self.registry)

    def update(self, event: Event) -> None:
        """Update the metrics that the event changes."""
        for row in METRICS:
            if row.changed_by and isinstance(event, row.changed_by):
                metric, value, change = self._metrics[row.name], row.value(event), _CHANGES[row.kind]
                if not row.labels:
                    getattr(metric, change)(value)
                    continue
                for labels, of_series in value.items():
                    getattr(metric.labels(*(labels if isinstance(labels, tuple) else (labels,))), change)(of_series)
                if row.name in self._peers:
                    self._forget_peers(row.name, value)
        if isinstance(event, _BASE) and event.owners:
            self._metrics["spes_owned_experts"].set(sum(self._peer_id in owners for owners in event.owners))
        match event:
            case events.CaughtUp():
                self._caught_up = event.round
            case RoundCommitted():
                self._committed(event)
            case events.Paused(reason=str(reason)) if reason:
                self._metrics["spes_next_round_timestamp_seconds"].set(math.nan)
            case events.Controlled(state="paused" | "stopped"):
                self._metrics["spes_next_round_timestamp_seconds"].set(math.nan)

    def _forget_peers(self, name: str, measured: Iterable[str]) -> None:
        """Drop the series of the peers that were measured longest ago, beyond MAX_PEERS. `measured`: now."""
        known = self._peers[name]
        for peer in measured:
            known.pop(peer, None)
            known[peer] = None
        for peer in list(known)[:-MAX_PEERS]:
            del known[peer]
            self._metrics[name].remove(peer)

    def _committed(self, event: RoundCommitted) -> None:
        now, before = self._wall_time(), self._last_commit
        self._last_commit = now
        self._metrics["spes_round_interval_seconds"].set(now - before if before else 0)
        self._metrics["spes_last_commit_timestamp_seconds"].set(now)
        if event.round > self._caught_up:  # rounds that were decided without this peer say nothing about the pace
            self._commits.append(now)
        is_last = event.round == event.total_rounds
        self._metrics["spes_next_round_timestamp_seconds"].set(math.nan if is_last else now + pace_s(self._commits))

    def follow(self, contributed: Contributed, run_dir: Path) -> None:
        """Show what the peer has contributed, from its journal, so that a restart loses nothing, and what that is worth."""
        self._metrics["spes_contributed_tokens"].set_function(lambda: contributed.tokens)
        self._metrics["spes_contributed_rounds"].set_function(lambda: contributed.rounds)
        self._metrics["spes_contributed_expert_steps"].set_function(lambda: contributed.expert_steps)
        self._metrics["spes_contributed_seconds"].set_function(lambda: contributed.trained_s)

        def worth(figure: Callable[[Worth], float]) -> Callable[[], float]:
            return lambda: math.nan if (kept := kept_worth(run_dir)) is None else figure(kept)

        self._metrics["spes_experts_worth"].set_function(worth(lambda kept: kept.nats))
        self._metrics["spes_experts_worth_round"].set_function(worth(lambda kept: kept.round))

    def serve(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Serve HTTP on host:port (0: any free port) until `close`. Raises UserError if the port is not available."""
        if not 0 <= port <= 65535:
            raise UserError(f"--metrics-port {port}: must be 0 to 65535")
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise cannot_listen(host, port, error, "metrics-") from None
        return MetricsServer(server, thread)


class MetricsServer:
    """A `/metrics` endpoint, served by its own thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        """URL for Prometheus to scrape."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_document() -> str:
    """Return the content of `docs/metrics.md`."""
    rows = [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels) or '-'} | {row.description} |"
        for row in METRICS
    ]
    return "\n".join([_DOCUMENT_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


_DOCUMENT_HEAD = """\
# Metrics

Generated by `python -m spes_p2p.observe.metrics > docs/metrics.md`; a test keeps it current.

A peer started with `--metrics-port P` serves these metrics at `http://127.0.0.1:P/metrics`; with `--metrics-host 0.0.0.0`,
other machines and containers can scrape them too. Units are seconds, bytes, tokens and nats. Counters start at 0. Metrics
with a label `peer` have the 256 peers measured last. `process_*` metrics (CPU, memory, open files) are included.
[bootstrap/alerts.yml](../bootstrap/alerts.yml) has alert rules, [bootstrap/grafana](../bootstrap/grafana/spes_p2p.json) a
dashboard. `dashboard` and `directory` serve others, about [alerts](dashboard.md#alerts), everybody's tokens, and [several
campaigns](dashboard.md#several-campaigns-on-one-page).
"""


if __name__ == "__main__":
    print(metrics_document(), end="")
