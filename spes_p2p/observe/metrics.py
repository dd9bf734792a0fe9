"""Prometheus metrics of one peer. The table in `docs/metrics.md` is generated from this module."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from spes_p2p.errors import UserError
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.observe.events import (
    BaseRestored,
    BytesMoved,
    Controlled,
    DigestMismatch,
    Evaluated,
    Event,
    PeersSeen,
    PhaseTrained,
    RoundCommitted,
    RoundFailed,
    RoundMeasured,
    TrainingProgress,
    WorkDropped,
    sync_phases,
)

BYTE_KINDS = ("push", "pull", "download", "control")
FAILURE_REASONS = ("coordinator_lost", "quorum_lost", "refused", "malformed", "exchange", "timeout")
"""Series created at the start: an alert on an increase would miss the first sample of a new series."""

hide_created_series: Callable[[], None] = disable_created_metrics
hide_created_series()

PHASE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""From a fast announcement to an hour of training."""
_BY_KIND = "kind: shared, router, expert."


@dataclass(frozen=True)
class Described:
    """One row of the table of metrics."""

    name: str
    kind: str
    description: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, description: str, *labels: str) -> Described:
    return Described(name, "gauge", description, labels)


def _counter(name: str, description: str, *labels: str) -> Described:
    return Described(name, "counter", description, labels)


DESCRIBED = (
    _gauge("spes_round", "Last round in the base; round 0 only assembles the swarm."),
    _gauge("spes_campaign_step", "Campaign steps in the base."),
    _gauge("spes_campaign_planned_steps", "Campaign steps at the end of the campaign."),
    _gauge("spes_campaign_tokens", "Tokens in the base, trained by all peers."),
    _gauge("spes_last_commit_timestamp_seconds", "Unix time of the last commit applied by this peer; 0 before the first."),
    _gauge("spes_round_interval_seconds", "Seconds between the last two commits applied by this peer; 0 before the second."),
    _gauge("spes_loss", "Training loss of the last committed round, mean over all members, nats per token."),
    _gauge("spes_validation_loss", "Held-out loss of the last evaluated base, nats per token."),
    _gauge("spes_learning_rate", "Learning rate at the last commit."),
    _gauge("spes_merge_alpha", "Alpha of the last round's expert merge; 0 if it had none."),
    _gauge("spes_peers", "Living peers in the registry, by role: trainer, helper.", "role"),
    _gauge("spes_round_members", "Members of the last committed round."),
    _gauge("spes_expert_owners", "Peers that train the expert.", "expert"),
    _gauge("spes_owned_experts", "Experts that this peer trains."),
    _gauge("spes_campaign_held", "1 if the owner has paused or stopped the campaign, otherwise 0."),
    _counter("spes_tokens_total", "Tokens trained by this peer."),
    _counter("spes_steps_total", "Local optimizer steps of this peer."),
    _counter("spes_skipped_steps_total", "Local steps skipped because of a non-finite loss or gradient."),
    _gauge("spes_tokens_per_second", "Training speed of this peer at its last local step."),
    _gauge("spes_flops_per_second", "Computed floating-point operations per second of the last phase; 0: unknown."),
    _gauge("spes_model_flops_utilization", "spes_flops_per_second over the bf16 peak, 0 to 1; NaN if the peak is unknown."),
    _gauge("spes_auxiliary_loss", "Auxiliary loss of this peer in its last phase."),
    _counter("spes_rounds_total", "Rounds committed while this peer ran, round 0 included."),
    _counter("spes_bytes_total",
             f"Payload bytes over the transport; kind: {', '.join(BYTE_KINDS)}; direction: sent, received.",
             "kind", "direction"),
    Described("spes_phase_seconds", "histogram", "Seconds by phase: train, announce, exchange, commit, apply.", ("phase",)),
    _gauge("spes_update_norm", f"L2 norm of the update that this peer sent in the last round; {_BY_KIND}", "kind"),
    _gauge("spes_update_shrink", f"L2 norm of the base's last step over that of this peer's update; {_BY_KIND}", "kind"),
    _gauge("spes_update_cosine", f"Cosine of this peer's update and the base's step; {_BY_KIND}", "kind"),
    _gauge("spes_expert_tokens", "Tokens that trained the expert in the last round, summed over owners and layers.", "expert"),
    _gauge("spes_load_violation", "Tokens of the busiest expert over the mean, minus 1, on this peer's tokens.", "layer"),
    _gauge("spes_owned_routing_share", "Share of this peer's token routings that go to experts it trains."),
    _counter("spes_round_failures_total",
             f"Attempts at a round that did not commit, by reason: {', '.join(FAILURE_REASONS)}.", "reason"),
    _counter("spes_dropped_parts_total", "Parts dropped from committed rounds; the base is unchanged there."),
    _counter("spes_dropped_tokens_total", "Tokens whose pending work was discarded."),
    _counter("spes_reforms_total", "Reforms after the loss of most electors or of all peers with the newest base."),
    _counter("spes_digest_mismatches_total", "Times that this peer's base differed from the agreed one and was replaced."),
    Described("spes_build_info", "gauge", "Program version and identity of campaign and peer; always 1."),
)
UNKNOWN_AT_FIRST = ("spes_loss", "spes_validation_loss", "spes_model_flops_utilization", "spes_owned_routing_share")
"""Gauges that are NaN until the first measurement."""


def _made(row: Described, registry: CollectorRegistry) -> Any:
    match row.kind:
        case "counter":
            return Counter(row.name, row.description, row.labels, registry=registry)
        case "histogram":
            return Histogram(row.name, row.description, row.labels, registry=registry, buckets=PHASE_BUCKETS_S)
        case _ if row.name.endswith("_info"):
            return Info(row.name.removesuffix("_info"), row.description, registry=registry)
    return Gauge(row.name, row.description, row.labels, registry=registry)


class Metrics:
    """Observer that updates metrics in its own registry, so that several peers can share a process."""

    described = DESCRIBED

    def __init__(
        self, peer_id: str = "", campaign: str = "", campaign_hash: str = "", wall_time: Callable[[], float] = time.time
    ):
        self.registry = CollectorRegistry()
        self._peer_id = peer_id
        self._wall_time = wall_time
        self._last_commit = 0.0
        self._metrics = {row.name: _made(row, self.registry) for row in DESCRIBED}
        for name in UNKNOWN_AT_FIRST:
            self._of(name).set(math.nan)
        for kind in BYTE_KINDS:
            for direction in ("sent", "received"):
                self._of("spes_bytes_total", kind, direction)
        for reason in FAILURE_REASONS:
            self._of("spes_round_failures_total", reason)
        self._of("spes_build_info").info({
            "version": __version__, "protocol": str(PROTOCOL_VERSION), "campaign": campaign, "campaign_hash": campaign_hash,
            "peer_id": peer_id,
        })
        ProcessCollector(registry=self.registry)

    def _of(self, name: str, *labels: object) -> Any:
        """Return the metric, or its series with these labels."""
        return self._metrics[name].labels(*labels) if labels else self._metrics[name]

    def tell(self, event: Event) -> None:
        """Update the metrics that the event concerns."""
        match event:
            case TrainingProgress():
                self._of("spes_tokens_per_second").set(event.tokens_per_second)
            case PhaseTrained():
                self._phase_trained(event)
            case RoundCommitted():
                self._round_committed(event)
            case RoundMeasured():
                self._round_measured(event)
            case BaseRestored():
                self._base_is(event)
                self._of("spes_reforms_total").inc(event.source == "reform")
            case RoundFailed():
                self._of("spes_round_failures_total", event.reason).inc()
            case WorkDropped():
                self._of("spes_dropped_tokens_total").inc(event.tokens)
            case DigestMismatch():
                self._of("spes_digest_mismatches_total").inc()
            case Evaluated():
                self._of("spes_validation_loss").set(event.validation_loss)
            case PeersSeen():
                self._of("spes_peers", "trainer").set(event.trainers)
                self._of("spes_peers", "helper").set(event.helpers)
            case Controlled():
                self._of("spes_campaign_held").set(event.state != "running")
            case BytesMoved():
                self._of("spes_bytes_total", event.kind, "sent").inc(event.sent)
                self._of("spes_bytes_total", event.kind, "received").inc(event.received)

    def _phase_trained(self, event: PhaseTrained) -> None:
        self._of("spes_tokens_total").inc(event.tokens)
        self._of("spes_steps_total").inc(event.steps)
        self._of("spes_skipped_steps_total").inc(event.skipped_steps)
        self._of("spes_auxiliary_loss").set(event.aux_loss)
        self._of("spes_flops_per_second").set(event.flops_per_second)
        self._of("spes_model_flops_utilization").set(event.mfu)
        self._of("spes_phase_seconds", "train").observe(event.seconds)
        self._of("spes_owned_routing_share").set(event.owned_routing)
        for layer, violation in enumerate(event.load_violation):
            self._of("spes_load_violation", layer).set(violation)

    def _round_committed(self, event: RoundCommitted) -> None:
        self._base_is(event)
        now, before = self._wall_time(), self._last_commit
        self._last_commit = now
        self._of("spes_last_commit_timestamp_seconds").set(now)
        self._of("spes_round_interval_seconds").set(now - before if before else 0)
        self._of("spes_rounds_total").inc()
        self._of("spes_round_members").set(len(event.members))
        self._of("spes_loss").set(event.loss)
        self._of("spes_learning_rate").set(event.learning_rate)
        self._of("spes_merge_alpha").set(event.merge_alpha)
        self._of("spes_dropped_parts_total").inc(event.dropped_parts)
        for phase, seconds in sync_phases(event.seconds).items():
            self._of("spes_phase_seconds", phase).observe(seconds)

    def _round_measured(self, event: RoundMeasured) -> None:
        for kind, drift in event.drift.items():
            self._of("spes_update_norm", kind).set(drift.sent)
            self._of("spes_update_shrink", kind).set(drift.shrink)
            self._of("spes_update_cosine", kind).set(drift.cosine)
        for expert, tokens in enumerate(event.expert_tokens):
            self._of("spes_expert_tokens", expert).set(tokens)

    def _base_is(self, event: RoundCommitted | BaseRestored) -> None:
        self._of("spes_round").set(max(0, event.round))
        self._of("spes_campaign_step").set(event.campaign_step)
        self._of("spes_campaign_planned_steps").set(event.total_steps)
        self._of("spes_campaign_tokens").set(event.total_tokens)
        for expert, owners in enumerate(event.owners):
            self._of("spes_expert_owners", expert).set(len(owners))
        if event.owners:
            self._of("spes_owned_experts").set(sum(self._peer_id in owners for owners in event.owners))

    def serve(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Serve HTTP on host:port (0: any free port) until `close`. Raises UserError if the port is not available."""
        if not 0 <= port <= 65535:
            raise UserError(f"--metrics-port {port}: must be 0 to 65535")
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise UserError(_cannot_listen(port, host, error)) from None
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


def _cannot_listen(port: int, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--metrics-host {host}: not an address of this machine; give one of its own, or 0.0.0.0 for all of them"
    why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return f"--metrics-port {port}: cannot listen on {host}:{port} ({why}); choose another port"


def metrics_document() -> str:
    """Return the content of `docs/metrics.md`."""
    rows = [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels) or '-'} | {row.description} |"
        for row in DESCRIBED
    ]
    return "\n".join([_DOCUMENT_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


_DOCUMENT_HEAD = """\
# Metrics

Generated by `python -m spes_p2p.observe.metrics > docs/metrics.md`; a test keeps it current.

A peer started with `--metrics-port P` serves these metrics at `http://127.0.0.1:P/metrics`; with `--metrics-host 0.0.0.0`,
other machines and containers can scrape them too. Units are seconds, bytes, tokens and nats. Counters start at 0.
`process_*` metrics (CPU, memory, open files) are included. [bootstrap/alerts.yml](../bootstrap/alerts.yml) has alert rules,
[bootstrap/grafana](../bootstrap/grafana/spes_p2p.json) a dashboard.
"""


if __name__ == "__main__":
    print(metrics_document(), end="")
