"""What Prometheus sees of one peer. The table in `docs/metrics.md` is generated from here."""

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
"""Series that exist from the start: an alert on an increase would miss a first one that comes from nowhere."""

hide_created_series: Callable[[], None] = disable_created_metrics
hide_created_series()

PHASE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""From a quick announcement to an hour of training."""
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
    _gauge("spes_campaign_step", "Campaign steps that the base contains."),
    _gauge("spes_campaign_planned_steps", "Campaign steps until the end of the campaign."),
    _gauge("spes_campaign_tokens", "Tokens in the base: trained by anybody and committed."),
    _gauge("spes_last_commit_timestamp_seconds", "Unix time of the last commit applied here; 0 before the first."),
    _gauge("spes_round_interval_seconds", "Seconds between the last two commits applied here; 0 before there are two."),
    _gauge("spes_loss", "Training loss of the last committed round, nats a token, all members."),
    _gauge("spes_validation_loss", "Held-out loss of the last evaluated base, nats a token."),
    _gauge("spes_learning_rate", "Learning rate at the last commit."),
    _gauge("spes_merge_alpha", "Strength of the last round's expert merge; 0 when it had none."),
    _gauge("spes_peers", "Living peers in the registry, by role: trainer, helper.", "role"),
    _gauge("spes_round_members", "Members of the last committed round."),
    _gauge("spes_expert_owners", "Peers that train the expert.", "expert"),
    _gauge("spes_owned_experts", "Experts that this peer trains."),
    _gauge("spes_campaign_held", "1 while its owner has the campaign paused, or stopped it; otherwise 0."),
    _counter("spes_tokens_total", "Tokens trained by this peer."),
    _counter("spes_steps_total", "Local optimizer steps of this peer."),
    _counter("spes_skipped_steps_total", "Local steps of which nothing was applied: loss or gradient was not finite."),
    _gauge("spes_tokens_per_second", "Training speed of this peer at its last local step."),
    _gauge("spes_flops_per_second", "Operations a second that the last phase's steps needed, by formula; 0: not known."),
    _gauge("spes_model_flops_utilization", "Those over the device's bf16 peak, 0 to 1; NaN on a device of unknown peak."),
    _gauge("spes_auxiliary_loss", "Auxiliary losses of this peer in its last phase."),
    _counter("spes_rounds_total", "Rounds committed while this peer ran, round 0 included."),
    _counter("spes_bytes_total",
             f"Payload bytes across the transport; kind: {', '.join(BYTE_KINDS)}; direction: sent, received.",
             "kind", "direction"),
    Described("spes_phase_seconds", "histogram", "Seconds by phase: train, announce, exchange, commit, apply.", ("phase",)),
    _gauge("spes_update_norm", f"L2 norm of the update that this peer sent in the last round; {_BY_KIND}", "kind"),
    _gauge("spes_update_shrink", f"Length of the base's last step over that of this peer's update; {_BY_KIND}", "kind"),
    _gauge("spes_update_cosine", f"Cosine of this peer's update and the base's step; {_BY_KIND}", "kind"),
    _gauge("spes_expert_tokens", "Tokens that trained the expert for the last round, over owners and layers.", "expert"),
    _gauge("spes_load_violation", "On this peer's tokens: those of the layer's busiest expert over the mean, less 1.", "layer"),
    _gauge("spes_owned_routing_share", "Share of this peer's routing that went to experts that it trains."),
    _counter("spes_round_failures_total",
             f"Attempts at a round that did not commit, by reason: {', '.join(FAILURE_REASONS)}.", "reason"),
    _counter("spes_dropped_parts_total", "Parts that committed rounds left out; the base keeps its old value there."),
    _counter("spes_dropped_tokens_total", "Tokens whose pending work was given up."),
    _counter("spes_reforms_total", "Reforms: most electors were gone, or all who had the newest base."),
    _counter("spes_digest_mismatches_total", "Times this peer's base differed from the agreed one and was replaced."),
    Described("spes_build_info", "gauge", "Version of the program, identity of campaign and peer; always 1."),
)
UNKNOWN_AT_FIRST = ("spes_loss", "spes_validation_loss", "spes_model_flops_utilization", "spes_owned_routing_share")
"""Gauges that are NaN until they are told."""


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
    """Observer that turns events into metrics in a registry of its own, so that several peers can live in one process."""

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
        """The metric, or its series with these labels."""
        return self._metrics[name].labels(*labels) if labels else self._metrics[name]

    def tell(self, event: Event) -> None:
        """Take note of the event."""
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
        """Answer HTTP on host:port (0: any free port) until `close`. Raises UserError when the port cannot be had."""
        if not 0 <= port <= 65535:
            raise UserError(f"--metrics-port {port}: a port is a number from 0 to 65535")
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise UserError(_cannot_listen(port, host, error)) from None
        return MetricsServer(server, thread)


class MetricsServer:
    """A running `/metrics` endpoint in a thread of its own."""

    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        """What Prometheus scrapes."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening and free the port. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _cannot_listen(port: int, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--metrics-host {host}: not an address of this machine; give one of its own, or 0.0.0.0 for all of them"
    why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return f"--metrics-port {port}: cannot listen on {host}:{port} ({why}); choose another port"


def metrics_document() -> str:
    """The whole of `docs/metrics.md`."""
    rows = [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels) or '-'} | {row.description} |"
        for row in DESCRIBED
    ]
    return "\n".join([_DOCUMENT_HEAD, "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


_DOCUMENT_HEAD = """\
# Metrics

Generated by `python -m spes_p2p.observe.metrics > docs/metrics.md`; a test keeps it current.

Every peer and the bootstrap serve these at `http://127.0.0.1:P/metrics` when started with `--metrics-port P`; with
`--metrics-host 0.0.0.0` other machines and containers can scrape them too. Units are base units: seconds, bytes, tokens, nats.
Counters start at 0 with the process. `process_*` (CPU, memory, open files) are there too. Alert rules on them are in
[bootstrap/alerts.yml](../bootstrap/alerts.yml), a dashboard in [bootstrap/grafana](../bootstrap/grafana/spes_p2p.json).
"""


if __name__ == "__main__":
    print(metrics_document(), end="")
