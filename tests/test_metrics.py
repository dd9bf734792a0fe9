"""What Prometheus sees: every event in its metric, names that promtool accepts, a table in the docs that is current."""

import json
import math
import shutil
import subprocess
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from network_swarm import COMMAND_TIMEOUT_S
from observed_events import COMMIT, EVENTS
from prometheus_client import generate_latest

from spes_p2p.errors import UserError
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.observe.contributed import Contributed
from spes_p2p.observe.events import (
    BEFORE_TRAINING,
    BaseRestored,
    CaughtUp,
    Controlled,
    Event,
    Paused,
    PhaseTrained,
    RoundCommitted,
    StepsJudged,
)
from spes_p2p.observe.history import History
from spes_p2p.observe.metrics import MAX_PEERS, METRICS, Metrics, metrics_document
from spes_p2p.observe.worth import WORTH_FILE, Worth

PHASE = next(event for event in EVENTS if isinstance(event, PhaseTrained))
DOCUMENT = Path(__file__).parents[1] / "docs/metrics.md"


@pytest.fixture
def told() -> Metrics:
    metrics = Metrics("me", "demo", "abc", wall_time=lambda: 1000.5)
    for event in EVENTS:
        metrics.update(event)
    return metrics


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("spes_round", {}, 7),
        ("spes_campaign_step", {}, 70),
        ("spes_campaign_planned_steps", {}, 600),
        ("spes_campaign_tokens", {}, 8000),
        ("spes_last_commit_timestamp_seconds", {}, 1000.5),
        ("spes_loss", {}, 4.5),
        ("spes_validation_loss", {}, 4.25),
        ("spes_learning_rate", {}, 3e-4),
        ("spes_merge_alpha", {}, 0.05),
        ("spes_peers", {"role": "trainer"}, 5),
        ("spes_peers", {"role": "helper"}, 2),
        ("spes_round_members", {}, 2),
        ("spes_expert_owners", {"expert": "1"}, 2),
        ("spes_expert_owners", {"expert": "2"}, 0),
        ("spes_owned_experts", {}, 2),
        ("spes_tokens_total", {}, 500),
        ("spes_steps_total", {}, 10),
        ("spes_skipped_steps_total", {}, 3),
        ("spes_tokens_per_second", {}, 1234.5),
        ("spes_flops_per_second", {}, 2e12),
        ("spes_model_flops_utilization", {}, 0.25),
        ("spes_auxiliary_loss", {}, 0.1),
        ("spes_rounds_total", {}, 1),
        ("spes_update_norm", {"kind": "shared"}, 4),
        ("spes_update_shrink", {"kind": "shared"}, 0.75),
        ("spes_update_cosine", {"kind": "shared"}, 0.6),
        ("spes_expert_tokens", {"expert": "0"}, 40),
        ("spes_expert_tokens", {"expert": "1"}, 0),
        ("spes_load_violation", {"layer": "1"}, 1.5),
        ("spes_owned_routing_share", {}, 0.75),
        ("spes_bytes_total", {"kind": "push", "direction": "sent"}, 35),
        ("spes_bytes_total", {"kind": "push", "direction": "received"}, 46),
        ("spes_stage_seconds_sum", {"stage": "train"}, 12),
        ("spes_stage_seconds_sum", {"stage": "exchange"}, 2),
        ("spes_round_failures_total", {"reason": "timeout"}, 2),
        ("spes_member_score", {"peer": "X"}, -0.25),
        ("spes_audit_cosine", {"peer": "X"}, 0.75),
        ("spes_audit_passed", {"peer": "X"}, 1),
        ("spes_task_score", {"task": "piqa", "metric": "acc"}, 0.5),
        ("spes_dropped_parts_total", {}, 2),
        ("spes_dropped_tokens_total", {}, 77),
        ("spes_digest_mismatches_total", {}, 1),
    ],
)
def test_event_arrives_in_its_metric(told: Metrics, name: str, labels: dict[str, str], expected: float) -> None:
    assert told.registry.get_sample_value(name, labels) == expected


def test_build_info_names_protocol_campaign_and_peer(told: Metrics) -> None:
    info = next(family for family in told.registry.collect() if family.name == "spes_build").samples[0].labels
    assert (info["protocol"], info["campaign"], info["campaign_hash"]) == (str(PROTOCOL_VERSION), "demo", "abc")
    assert info["peer_id"] == "me"


def test_losses_are_unknown_and_failures_zero_before_the_first_round() -> None:
    fresh = Metrics().registry
    assert math.isnan(fresh.get_sample_value("spes_loss") or 0)
    assert math.isnan(fresh.get_sample_value("spes_validation_loss") or 0)
    assert fresh.get_sample_value("spes_round_failures_total", {"reason": "coordinator_lost"}) == 0
    assert fresh.get_sample_value("spes_bytes_total", {"kind": "download", "direction": "received"}) == 0


def test_restart_shows_the_round_before_the_next_commit() -> None:
    metrics = Metrics("me")
    metrics.update(BaseRestored(12, 120, 600, 9000, "d", "disk", (("me",),)))
    assert metrics.registry.get_sample_value("spes_round") == 12
    assert metrics.registry.get_sample_value("spes_rounds_total") == 0
    assert metrics.registry.get_sample_value("spes_owned_experts") == 1


def test_base_0_shows_round_0() -> None:
    metrics = Metrics("me")
    metrics.update(BaseRestored(BEFORE_TRAINING, 0, 600, 0, "d", "download", ((),)))
    assert metrics.registry.get_sample_value("spes_round") == 0


def test_seconds_between_two_commits_are_known_from_the_second_on() -> None:
    clock = iter([1000.0, 1060.0])
    metrics = Metrics("me", wall_time=lambda: next(clock))
    metrics.update(COMMIT)
    assert metrics.registry.get_sample_value("spes_round_interval_seconds") == 0
    metrics.update(replace(COMMIT, round=8))
    assert metrics.registry.get_sample_value("spes_round_interval_seconds") == 60
    assert metrics.registry.get_sample_value("spes_last_commit_timestamp_seconds") == 1060


def test_the_next_round_is_expected_at_the_pace_of_the_last_ones_unless_none_follows() -> None:
    clock = iter([1000.0, 1060.0, 1180.0, 1185.0, 1240.0, 1300.0, 1360.0, 1420.0])
    metrics = Metrics("me", wall_time=lambda: next(clock))

    def after(*events: Event) -> float:
        for event in events:
            metrics.update(event)
        return metrics.registry.get_sample_value("spes_next_round_timestamp_seconds") or 0.0

    assert math.isnan(after(replace(COMMIT, round=7)))
    assert after(replace(COMMIT, round=8)) == 1120
    assert after(CaughtUp(8, 10, 5.0), replace(COMMIT, round=9), replace(COMMIT, round=10)) == 1185 + 60
    assert after(replace(COMMIT, round=11)) == 1240 + (60 + 180) / 2
    assert math.isnan(after(Paused("hours")))
    assert after(Paused(""), replace(COMMIT, round=12)) == 1360
    assert math.isnan(after(Controlled(12, 1, "paused")))
    assert after(Controlled(12, 2, "running"), replace(COMMIT, round=13)) == 1420
    assert math.isnan(after(replace(COMMIT, round=14, total_rounds=14)))


def test_what_the_experts_were_worth_last_is_read_from_the_run_dir(tmp_path: Path) -> None:
    metrics = Metrics("me")
    metrics.follow(Contributed("me"), tmp_path)

    def shown() -> list[float]:
        return [metrics.registry.get_sample_value(name) or 0.0 for name in ("spes_experts_worth", "spes_experts_worth_round")]

    assert [math.isnan(value) for value in shown()] == [True, True]
    worth = Worth(41, "d", (1, 2), 64, loss=3.5, loss_without=3.75, error=0.01)
    (tmp_path / WORTH_FILE).write_text(json.dumps(asdict(worth)))
    assert shown() == [0.25, 41]


def test_a_reform_is_counted_and_is_no_round() -> None:
    metrics = Metrics("me")
    metrics.update(BaseRestored(4, 30, 600, 500, "d", "reform", ((), ())))
    assert metrics.registry.get_sample_value("spes_reforms_total") == 1
    assert metrics.registry.get_sample_value("spes_rounds_total") == 0


def test_what_the_peer_has_contributed_outlives_a_restart(tmp_path: Path) -> None:
    def committed(number: int, tokens: int) -> RoundCommitted:
        return replace(COMMIT, round=number, contributions=(("me", tokens, 20), ("other", 900, 10)))

    first = History("me", tmp_path)
    for event in (committed(1, 300), committed(2, 400), committed(3, 0), replace(PHASE, seconds=8.0)):
        first.record(event)
    first.close()
    history, metrics = History("me", tmp_path), Metrics("me")
    metrics.follow(history.contributed, tmp_path)

    def shown() -> list[float | None]:
        names = ("tokens", "rounds", "expert_steps", "seconds")
        return [metrics.registry.get_sample_value(f"spes_contributed_{name}") for name in names]

    assert shown() == [700, 2, 40, 8]
    history.record(committed(4, 500))
    assert shown() == [1200, 3, 60, 8]
    history.record(BaseRestored(1, 10, 600, 1200, "d", "rollback"))
    assert shown() == [300, 1, 20, 8]


def test_repair_that_knows_no_owners_keeps_the_known_ones(told: Metrics) -> None:
    told.update(BaseRestored(7, 70, 600, 8000, "d", "download"))
    assert told.registry.get_sample_value("spes_owned_experts") == 2


def test_strangers_that_come_and_go_leave_a_bounded_number_of_series() -> None:
    metrics = Metrics()
    for number in range(MAX_PEERS):
        scores = tuple((f"{number}-{i}", 0.1) for i in range(4))
        metrics.update(StepsJudged(number, (*scores, ("stays", 0.2)), ()))
    left = {sample.labels["peer"] for family in metrics.registry.collect() for sample in family.samples
            if sample.name == "spes_member_score"}
    assert len(left) == MAX_PEERS
    assert {"stays", *(name for name, _ in scores)} < left


def test_every_series_is_in_the_table(told: Metrics) -> None:
    described = {row.name for row in METRICS}
    served = {sample.name for family in told.registry.collect() for sample in family.samples}
    suffixes = ("_bucket", "_sum", "_count")
    ours = {name for name in served if name.startswith("spes_")}
    histograms = {row.name + suffix for row in METRICS if row.kind == "histogram" for suffix in suffixes}
    assert ours - histograms == described - {row.name for row in METRICS if row.kind == "histogram"}


def test_table_in_the_docs_is_current() -> None:
    assert DOCUMENT.read_text() == metrics_document(), "run: python -m spes_p2p.observe.metrics > docs/metrics.md"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize("events", [(), EVENTS], ids=["fresh", "told"])
def test_promtool_accepts_the_metrics(events: tuple[Event, ...]) -> None:
    metrics = Metrics("me", "demo", "abc")
    for event in events:
        metrics.update(event)
    ours = b"".join(line for line in generate_latest(metrics.registry).splitlines(keepends=True) if b"process_" not in line)
    check = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, b"")


@pytest.mark.long
def test_metrics_are_served_over_http_until_closed(told: Metrics) -> None:
    server = told.serve(0)
    address = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(address, timeout=COMMAND_TIMEOUT_S) as answer:
        assert b"\nspes_round 7.0\n" in answer.read()
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=COMMAND_TIMEOUT_S)
    told.serve(server.port).close()


def test_port_in_use_is_named_with_the_option_to_change(told: Metrics) -> None:
    server = told.serve(0)
    try:
        with pytest.raises(UserError, match=rf"--metrics-port {server.port}: .*in use.*choose another --metrics-port"):
            Metrics().serve(server.port)
    finally:
        server.close()


def test_an_address_of_another_machine_is_named_with_the_option_to_change(told: Metrics) -> None:
    with pytest.raises(UserError, match=r"--metrics-host 203.0.113.7: not an address of this machine; give .* 0.0.0.0"):
        told.serve(0, "203.0.113.7")


def test_url_is_what_prometheus_scrapes(told: Metrics) -> None:
    server = told.serve(0, "0.0.0.0")
    try:
        assert server.url == f"http://0.0.0.0:{server.port}/metrics"
    finally:
        server.close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_impossible_port_is_refused(told: Metrics, port: int) -> None:
    with pytest.raises(UserError, match=f"--metrics-port {port}: must be 0 to 65535"):
        told.serve(port)
