"""The files that a campaign's owner starts a Prometheus, a Grafana and a bootstrap peer with: right by themselves, and all that
they name exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import typer.main
import yaml
from monitoring_files import BOOTSTRAP, DASHBOARD, ROOT, alert_rules, dashboard_queries

from spes_p2p.cli import make_app
from spes_p2p.client.dashboard.swarm_metrics import NAMES
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.observe.metrics import METRICS

BY_HISTOGRAMS = ("_bucket", "_sum", "_count")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize("arguments", [
    ("check", "config", "bootstrap/prometheus.yml"),
    ("check", "rules", "bootstrap/alerts.yml"),
    ("test", "rules", "tests/alerts_test.yml"),
], ids=" ".join)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    check = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_alert_has_a_test_that_it_fires_and_one_that_it_does_not() -> None:
    tests = [test for case in yaml.safe_load((ROOT / "tests/alerts_test.yml").read_text())["tests"]
             for test in case["alert_rule_test"]]
    names = {rule["alert"] for rule in alert_rules()}
    assert {test["alertname"] for test in tests if test["exp_alerts"]} == names
    assert {test["alertname"] for test in tests if not test["exp_alerts"]} == names


@pytest.mark.parametrize("queries", [dashboard_queries(), {rule["alert"]: rule["expr"] for rule in alert_rules()}],
                         ids=["dashboard", "alerts"])
def test_every_metric_of_a_query_is_served(queries: dict[str, str]) -> None:
    served = {*(row.name for row in METRICS), *NAMES}
    served |= {row.name + suffix for row in METRICS if row.kind == "histogram" for suffix in BY_HISTOGRAMS}
    for where, query in queries.items():
        assert set(re.findall(r"spes_\w+", query)) <= served, where


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def container_command(text: str, name: str) -> list[str]:
    found = re.search(rf"^{name} (\[.*\])$", text, re.MULTILINE)
    assert found, name
    return list(json.loads(found[1]))


def bootstrap_commands() -> dict[str, list[str]]:
    compose = yaml.safe_load((BOOTSTRAP / "compose.yaml").read_text())["services"]["bootstrap"]["command"]
    unit = (BOOTSTRAP / "spes-p2p-bootstrap.service").read_text().replace("\\\n", " ")
    start = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert start
    container = (BOOTSTRAP / "Containerfile").read_text()
    entry = container_command(container, "ENTRYPOINT")
    return {
        "compose.yaml": [*entry, *compose],
        "Containerfile": [*entry, *container_command(container, "CMD")],
        "systemd": [Path(word).name if i == 0 else word for i, word in enumerate(shlex.split(start[1]))],
    }


@pytest.mark.parametrize("place", ["compose.yaml", "Containerfile", "systemd"])
def test_the_command_line_knows_every_option_that_a_bootstrap_peer_is_started_with(place: str) -> None:
    program, command, *options = bootstrap_commands()[place]
    assert (program, command) == ("spes-p2p", "bootstrap")
    known = typer.main.get_command(make_app()).commands["bootstrap"]  # type: ignore[attr-defined]
    context = known.make_context("bootstrap", [re.sub(r"\$\{.*\}", "/ip4/203.0.113.7/tcp/31337", word) for word in options])
    assert list(context.params["announce"] or ()) in ([], ["/ip4/203.0.113.7/tcp/31337"])


def test_files_that_compose_mounts_are_there() -> None:
    services = yaml.safe_load((BOOTSTRAP / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith("./") and not (BOOTSTRAP / path).is_file()] == []


def test_the_trainers_container_is_started_with_options_of_join() -> None:
    text = (BOOTSTRAP / "Containerfile.trainer").read_text()
    assert container_command(text, "ENTRYPOINT") == ["spes-p2p"]
    started = re.search(r"spes-p2p-trainer join ADDRESS (.*?)\nFROM", text, re.DOTALL)
    assert started
    options = started[1].replace("\\\n#", " ").replace("YOUR.PUBLIC.IP", "203.0.113.7").split()
    known = typer.main.get_command(make_app()).commands["join"]  # type: ignore[attr-defined]
    context = known.make_context("join", [EXAMPLE_ADDRESS, *options])
    assert context.params["announce"] == ["/ip4/203.0.113.7/tcp/31337"]


@pytest.mark.parametrize("container", ["Containerfile", "Containerfile.trainer"])
def test_files_that_the_containers_copy_are_there(container: str) -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (BOOTSTRAP / container).read_text(), re.MULTILINE)
    assert [path for paths in copied for path in paths.split() if not (ROOT / path).exists()] == []
    compose = yaml.safe_load((BOOTSTRAP / "compose.yaml").read_text())["services"]["bootstrap"]["build"]
    assert (BOOTSTRAP / compose["context"] / compose["dockerfile"]).resolve() == BOOTSTRAP / "Containerfile"


def options_of(command: list[str]) -> dict[str, str]:
    words = [part for word in command for part in word.split("=", 1)]
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


def test_ports_and_paths_of_the_containers_fit_together() -> None:
    services = yaml.safe_load((BOOTSTRAP / "compose.yaml").read_text())["services"]
    options, container = options_of(services["bootstrap"]["command"]), (BOOTSTRAP / "Containerfile").read_text()
    listen = options["--listen"].rsplit("/", 1)[-1]
    assert services["bootstrap"]["ports"] == [f"{listen}:{listen}"]
    assert f"EXPOSE {listen}\n" in container
    inside = {volume.split(":")[-1 if volume.count(":ro") == 0 else -2] for volume in services["bootstrap"]["volumes"]}
    assert inside == {options["--run-dir"], str(Path(options["--config"]).parent)}
    assert f"VOLUME {options['--run-dir']}\n" in container
    targets = [job["static_configs"] for job in yaml.safe_load((BOOTSTRAP / "prometheus.yml").read_text())["scrape_configs"]]
    assert targets[0][0]["targets"] == [f"bootstrap:{options['--metrics-port']}"]
    source = yaml.safe_load((BOOTSTRAP / "grafana/datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]


def test_the_rules_and_dashboards_are_mounted_where_they_are_looked_for() -> None:
    services = yaml.safe_load((BOOTSTRAP / "compose.yaml").read_text())["services"]
    mounted = {volume.split(":")[1] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]}
    rules = yaml.safe_load((BOOTSTRAP / "prometheus.yml").read_text())["rule_files"]
    assert {f"/etc/prometheus/{path}" for path in rules} <= mounted
    providers = yaml.safe_load((BOOTSTRAP / "grafana/dashboards.yml").read_text())["providers"]
    assert any(path.startswith(providers[0]["options"]["path"]) and path.endswith(DASHBOARD.name) for path in mounted)


def test_systemd_keeps_the_state_and_restarts_only_what_can_go_well() -> None:
    unit = (BOOTSTRAP / "spes-p2p-bootstrap.service").read_text()
    readme = (BOOTSTRAP / "README.md").read_text()
    options = options_of(bootstrap_commands()["systemd"])
    assert Path(options["--run-dir"]) == Path("/var/lib") / re.findall(r"^StateDirectory=(.*)$", unit, re.MULTILINE)[0]
    assert str(Path(options["--config"]).parent) in readme
    assert re.findall(r"^EnvironmentFile=(.*)$", unit, re.MULTILINE)[0] in readme
    assert re.findall(r"^ExecStart=(\S+)/.venv", unit, re.MULTILINE)[0] in readme
    assert "RestartPreventExitStatus=2\n" in unit
