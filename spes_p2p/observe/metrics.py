"""What Prometheus sees of one peer. The table in `docs/metrics.md` is generated from here."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
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
from prometheus_client.metrics import MetricWrapperBase

from spes_p2p import __version__
from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.errors import UserError
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

M = TypeVar("M", bound=MetricWrapperBase)


PHASE_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""From a quick announcement to an hour of training."""


@dataclass(frozen=True)
class Described:
    """One row of the table of metrics."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


class Metrics:
    """Observer that turns events into metrics in a registry of its own, so that several peers can live in one process."""

    def __init__(
        self, peer_id: str = "", campaign: str = "", campaign_hash: str = "", wall_time: Callable[[], float] = time.time
    ):
        self.registry = CollectorRegistry()
        self.described: list[Described] = []
        self._peer_id = peer_id
        self._wall_time = wall_time
        self._last_commit = 0.0
        self._make_campaign_metrics()
        self._make_work_metrics()
        self._make_learning_metrics()
        self._make_trouble_metrics()
        self._make(Info, "spes_build", "Version of the program, identity of campaign and peer; always 1.").info(
            {
                "version": __version__,
                "protocol": str(PROTOCOL_VERSION),
                "campaign": campaign,
                "campaign_hash": campaign_hash,
                "peer_id": peer_id,
            }
        )
        ProcessCollector(registry=self.registry)

    def _make_campaign_metrics(self) -> None:
        make = self._make
        self._round = make(Gauge, "spes_round", "Last round in the base; round 0 only assembles the swarm.")
        self._step = make(Gauge, "spes_campaign_step", "Campaign steps that the base contains.")
        self._planned_steps = make(Gauge, "spes_campaign_planned_steps", "Campaign steps until the end of the campaign.")
        self._campaign_tokens = make(Gauge, "spes_campaign_tokens", "Tokens in the base: trained by anybody and committed.")
        self._committed_at = make(
            Gauge, "spes_last_commit_timestamp_seconds", "Unix time of the last commit applied here; 0 before the first."
        )
        self._interval = make(
            Gauge, "spes_round_interval_seconds", "Seconds between the last two commits applied here; 0 before there are two."
        )
        self._loss = make(Gauge, "spes_loss", "Training loss of the last committed round, nats a token, all members.")
        self._validation_loss = make(Gauge, "spes_validation_loss", "Held-out loss of the last evaluated base, nats a token.")
        self._learning_rate = make(Gauge, "spes_learning_rate", "Learning rate at the last commit.")
        self._merge_alpha = make(Gauge, "spes_merge_alpha", "Strength of the last round's expert merge; 0 when it had none.")
        self._peers = make(Gauge, "spes_peers", "Living peers in the registry, by role: trainer, helper.", "role")
        self._members = make(Gauge, "spes_round_members", "Members of the last committed round.")
        self._expert_owners = make(Gauge, "spes_expert_owners", "Peers that train the expert.", "expert")
        self._experts = make(Gauge, "spes_owned_experts", "Experts that this peer trains.")
        self._held = make(Gauge, "spes_campaign_held", "1 while its owner has the campaign paused, or stopped it; otherwise 0.")
        for unknown in (self._loss, self._validation_loss):
            unknown.set(math.nan)

    def _make_work_metrics(self) -> None:
        make = self._make
        self._tokens = make(Counter, "spes_tokens_total", "Tokens trained by this peer.")
        self._steps = make(Counter, "spes_steps_total", "Local optimizer steps of this peer.")
        self._skipped_steps = make(
            Counter, "spes_skipped_steps_total", "Local steps of which nothing was applied: loss or gradient was not finite."
        )
        self._speed = make(Gauge, "spes_tokens_per_second", "Training speed of this peer at its last local step.")
        self._flops = make(
            Gauge, "spes_flops_per_second", "Operations a second that the last phase's steps needed, by formula; 0: not known."
        )
        self._mfu = make(
            Gauge, "spes_model_flops_utilization", "Those over the device's bf16 peak, 0 to 1; NaN on a device of unknown peak."
        )
        self._mfu.set(math.nan)
        self._aux_loss = make(Gauge, "spes_auxiliary_loss", "Auxiliary losses of this peer in its last phase.")
        self._rounds = make(Counter, "spes_rounds_total", "Rounds committed while this peer ran, round 0 included.")
        self._bytes = make(
            Counter,
            "spes_bytes_total",
            "Payload bytes across the transport; kind: push, pull, download, control; direction: sent, received.",
            "kind",
            "direction",
        )
        self._phase_seconds = self._make_phase_seconds()
        for kind in BYTE_KINDS:
            for direction in ("sent", "received"):
                self._bytes.labels(kind, direction)

    def _make_learning_metrics(self) -> None:
        make, kinds = self._make, "kind: shared, router, expert."
        self._update_norm = make(
            Gauge, "spes_update_norm", f"L2 norm of the update that this peer sent in the last round; {kinds}", "kind"
        )
        self._shrink = make(
            Gauge, "spes_update_shrink", f"Length of the base's last step over that of this peer's update; {kinds}", "kind"
        )
        self._cosine = make(
            Gauge, "spes_update_cosine", f"Cosine of this peer's update and the base's step; {kinds}", "kind"
        )
        self._expert_tokens = make(
            Gauge, "spes_expert_tokens", "Tokens that trained the expert for the last round, over owners and layers.", "expert"
        )
        self._load_violation = make(
            Gauge, "spes_load_violation", "On this peer's tokens: those of the layer's busiest expert over the mean, less 1.",
            "layer",
        )
        self._owned_routing = make(
            Gauge, "spes_owned_routing_share", "Share of this peer's routing that went to experts that it trains."
        )
        self._owned_routing.set(math.nan)

    def _make_trouble_metrics(self) -> None:
        make = self._make
        self._failures = make(
            Counter,
            "spes_round_failures_total",
            f"Attempts at a round that did not commit, by reason: {', '.join(FAILURE_REASONS)}.",
            "reason",
        )
        self._dropped_parts = make(
            Counter, "spes_dropped_parts_total", "Parts that committed rounds left out; the base keeps its old value there."
        )
        self._dropped_tokens = make(Counter, "spes_dropped_tokens_total", "Tokens whose pending work was given up.")
        self._reforms = make(
            Counter, "spes_reforms_total", "Reforms: most electors were gone, or all who had the newest base."
        )
        self._mismatches = make(
            Counter, "spes_digest_mismatches_total", "Times this peer's base differed from the agreed one and was replaced."
        )
        for reason in FAILURE_REASONS:
            self._failures.labels(reason)

    def _make(self, kind: type[M], name: str, description: str, *labels: str) -> M:
        if kind is Info:
            self.described.append(Described(f"{name}_info", "gauge", labels, description))
        else:
            self.described.append(Described(name, kind.__name__.lower(), labels, description))
        return kind(name, description, labels, registry=self.registry)

    def _make_phase_seconds(self) -> Histogram:
        name, description = "spes_phase_seconds", "Seconds by phase: train, announce, exchange, commit, apply."
        self.described.append(Described(name, "histogram", ("phase",), description))
        return Histogram(name, description, ("phase",), registry=self.registry, buckets=PHASE_BUCKETS_S)

    def tell(self, event: Event) -> None:
        """Take note of the event."""
        match event:
            case TrainingProgress():
                self._speed.set(event.tokens_per_second)
            case PhaseTrained():
                self._phase_trained(event)
            case RoundCommitted():
                self._round_committed(event)
            case RoundMeasured():
                self._round_measured(event)
            case BaseRestored():
                self._base_is(event)
                self._reforms.inc(event.source == "reform")
            case RoundFailed():
                self._failures.labels(event.reason).inc()
            case WorkDropped():
                self._dropped_tokens.inc(event.tokens)
            case DigestMismatch():
                self._mismatches.inc()
            case Evaluated():
                self._validation_loss.set(event.validation_loss)
            case PeersSeen():
                self._peers.labels("trainer").set(event.trainers)
                self._peers.labels("helper").set(event.helpers)
            case Controlled():
                self._held.set(event.state != "running")
            case BytesMoved():
                self._bytes.labels(event.kind, "sent").inc(event.sent)
                self._bytes.labels(event.kind, "received").inc(event.received)

    def _phase_trained(self, event: PhaseTrained) -> None:
        self._tokens.inc(event.tokens)
        self._steps.inc(event.steps)
        self._skipped_steps.inc(event.skipped_steps)
        self._aux_loss.set(event.aux_loss)
        self._flops.set(event.flops_per_second)
        self._mfu.set(event.mfu)
        self._phase_seconds.labels("train").observe(event.seconds)
        self._owned_routing.set(event.owned_routing)
        for layer, violation in enumerate(event.load_violation):
            self._load_violation.labels(str(layer)).set(violation)

    def _round_committed(self, event: RoundCommitted) -> None:
        self._base_is(event)
        self._rounds.inc()
        self._members.set(len(event.members))
        self._note_time()
        self._loss.set(event.loss)
        self._learning_rate.set(event.learning_rate)
        self._merge_alpha.set(event.merge_alpha)
        self._dropped_parts.inc(event.dropped_parts)
        for phase, seconds in sync_phases(event.seconds).items():
            self._phase_seconds.labels(phase).observe(seconds)

    def _round_measured(self, event: RoundMeasured) -> None:
        for kind, drift in event.drift.items():
            self._update_norm.labels(kind).set(drift.sent)
            self._shrink.labels(kind).set(drift.shrink)
            self._cosine.labels(kind).set(drift.cosine)
        for expert, tokens in enumerate(event.expert_tokens):
            self._expert_tokens.labels(str(expert)).set(tokens)

    def _note_time(self) -> None:
        now = self._wall_time()
        if self._last_commit:
            self._interval.set(now - self._last_commit)
        self._last_commit = now
        self._committed_at.set(now)

    def _base_is(self, event: RoundCommitted | BaseRestored) -> None:
        self._round.set(max(0, event.round))
        self._step.set(event.campaign_step)
        self._planned_steps.set(event.total_steps)
        self._campaign_tokens.set(event.total_tokens)
        if not event.owners:
            return
        for expert, owners in enumerate(event.owners):
            self._expert_owners.labels(str(expert)).set(len(owners))
        self._experts.set(sum(self._peer_id in owners for owners in event.owners))

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
        for row in Metrics().described
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
