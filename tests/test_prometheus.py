"""A real Prometheus scrapes a real swarm: every alert rule is evaluated, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring_files import ALERTS, BOOTSTRAP, alert_rules, dashboard_queries
from network_swarm import COMMAND_TIMEOUT_S, START_TIMEOUT_S, LocalPeers, free_port, wait_until, write_variant

from spes_p2p.net.die_with_parent import under_guard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian package prometheus)"),
]

TRAINERS = ("peer-0", "peer-1")
JOB = "spes-p2p"


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str
    log: Path

    def get(self, path: str, **parameters: str) -> Any:
        address = f"{self.url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=COMMAND_TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of an instant query, without unknown values."""
        found = [(entry["metric"], float(entry["value"][1])) for entry in self.get("api/v1/query", query=query)["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def value(self, query: str) -> float:
        (_, value), = self.query(query)
        return value

    def is_ready(self) -> bool:
        try:
            return bool(self.get("api/v1/targets")["activeTargets"])
        except OSError:
            return False


@pytest.fixture(scope="module")
def swarm(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """A bootstrap, two trainers and a dashboard that serve their metrics; the campaign lasts longer than these tests."""
    training, merge = {"total_steps": 400_000, "sync_steps": 20}, {"merge_interval": 20}
    config = write_variant(campaign, "endless.yaml", training=training, merge=merge)
    with LocalPeers(tmp_path_factory.mktemp("swarm")) as peers:
        address = peers.bootstrap(config, "/ip4/127.0.0.1/tcp/0", "--metrics-port", "0").address
        for name in TRAINERS:
            of_its_user = ("--team", "Night owls", "--quota", "100GB/day")
            peers.join(name, address, "--metrics-port", "0", "--metrics-host", "127.0.0.1", *of_its_user)
        peers.wait_for_round(2, 90)
        peers.run("dashboard", ["dashboard", address, "--port", "0"], run_dir_option=False)
        yield peers


@pytest.fixture(scope="module")
def prometheus(swarm: LocalPeers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the configuration that the project carries, but for the peers' ports and a faster clock."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((BOOTSTRAP / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    bootstrap, trainers = config["scrape_configs"][0]["static_configs"]
    bootstrap["targets"] = [host_and_port(swarm["bootstrap"].metrics_url)]
    trainers["targets"] = [host_and_port(swarm[name].metrics_url) for name in TRAINERS]
    dashboard = swarm["dashboard"]
    wait_until(lambda: "dashboard on " in dashboard.log, START_TIMEOUT_S, "the dashboard says its address")
    url = dashboard.log.split("dashboard on ")[1].strip()
    config["scrape_configs"][1]["static_configs"][0]["targets"] = [host_and_port(url)]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(ALERTS, folder)
    port, log = free_port(), folder / "log.txt"
    guard = under_guard()
    command = [
        str(shutil.which("prometheus")), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([*guard, *command], stdout=output, stderr=output)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}", log)
        wait_until(server.is_ready, 30, f"Prometheus starts: {log}")
        wait_until(lambda: len(server.query("up == 1")) == 2 + len(TRAINERS), 30, "Prometheus scrapes peers and dashboard")
        yield server
    finally:
        process.terminate()
        process.wait()


def host_and_port(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


@pytest.mark.parametrize("panel", dashboard_queries())
def test_every_query_of_the_dashboard_returns_data(panel: str, prometheus: Prometheus) -> None:
    query = dashboard_queries()[panel].replace("$job", JOB).replace("$__rate_interval", "10s")
    wait_until(lambda: prometheus.query(query), 60, f"{panel}: {query}")


def test_the_dashboards_choice_of_campaigns_is_filled(prometheus: Prometheus) -> None:
    assert {labels["job"] for labels, _ in prometheus.query("spes_round")} == {JOB}


def test_prometheus_sees_what_the_peers_wrote_down(swarm: LocalPeers, prometheus: Prometheus) -> None:
    def agrees() -> bool:
        seen = int(prometheus.value("max(spes_round)"))
        tokens = prometheus.value("max(spes_campaign_tokens)")
        return seen <= swarm.newest_round() and tokens == swarm.commit(seen).total_tokens

    wait_until(agrees, 30, "round and tokens of one commit")
    owners = {labels["expert"]: value for labels, value in prometheus.query("max by (expert) (spes_expert_owners)")}
    assert owners == {str(expert): 1.0 for expert in range(4)}
    assert prometheus.value('max(spes_peers{role="trainer"})') == len(TRAINERS)


def test_the_bootstrap_peer_alone_tells_of_the_rounds(swarm: LocalPeers, prometheus: Prometheus) -> None:
    wait_until(lambda: prometheus.value('spes_round{role="bootstrap"}') >= 2, 60, "the bootstrap learns of rounds")
    assert prometheus.value('spes_last_commit_timestamp_seconds{role="bootstrap"}') > 0
    assert {labels["expert"] for labels, _ in prometheus.query('spes_expert_owners{role="bootstrap"}')} == set("0123")


def test_rules_are_evaluated_and_none_fires_while_all_is_well(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        rules = [rule for group in prometheus.get("api/v1/rules")["groups"] for rule in group["rules"]]
        return len(rules) == len(alert_rules()) and all(rule["health"] == "ok" for rule in rules)

    wait_until(evaluated, 30, "all rules are evaluated")
    assert prometheus.get("api/v1/alerts")["alerts"] == []


def test_a_peer_that_is_killed_is_about_to_raise_its_alert(swarm: LocalPeers, prometheus: Prometheus) -> None:
    gone = host_and_port(swarm["peer-1"].metrics_url)
    swarm.kill("peer-1")

    def pending() -> list[tuple[str, str]]:
        alerts = prometheus.get("api/v1/alerts")["alerts"]
        return [(alert["labels"]["alertname"], alert["labels"].get("instance", "")) for alert in alerts]

    wait_until(lambda: ("SpesPeerDown", gone) in pending(), 30, "the alert waits for its five minutes")
