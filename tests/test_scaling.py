"""A small form of each command of docs/scaling.md that no other test runs gives its figures, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from network_swarm import CHILDREN_END_WITHIN_S, COMMAND_TIMEOUT_S, ENVIRONMENT, ROOT

from spes_p2p.testing.simulate.namespaces import why_unavailable

BLOCKED = why_unavailable()
needs_namespaces = pytest.mark.skipif(BLOCKED is not None, reason=f"no shaped lines here: {BLOCKED}")


def printed(folder: Path, tool: str, *options: str) -> str:
    """What a tool prints. Nothing of it is left in the folder, which is its TMPDIR, nor in the system."""
    command = [sys.executable, str(ROOT / "tools" / tool), *options]
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            out, err = run.communicate(timeout=COMMAND_TIMEOUT_S)
        finally:
            run.terminate()  # it removes its namespaces then
    assert run.returncode == 0, err
    known = psutil.process_iter(["environ"])
    left = [process for process in known if (process.info["environ"] or {}).get("TMPDIR") == str(folder)]
    assert not psutil.wait_procs(left, CHILDREN_END_WITHIN_S)[1]
    places = [place for place in ("/run/netns", "/sys/class/net") if os.path.isdir(place)]
    assert not [name for place in places for name in os.listdir(place) if re.search(rf"\D{run.pid}\D", name)]
    assert list(folder.iterdir()) == []
    return out


def link(folder: Path, case: str, *options: str) -> Any:
    return json.loads(printed(folder, "bench", "link", "--only", case, "--folder", str(folder), *options))[case]


def table(folder: Path, *options: str) -> list[dict[str, str]]:
    lines = [line for line in printed(folder, "reliability", *options).splitlines() if line.startswith("| ")]
    heads, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(heads, row, strict=True)) for row in rows]


@pytest.mark.network
@needs_namespaces
def test_peers_on_shaped_lines_and_simulated_ones_send_what_a_round_needs_and_lose_nobody(tmp_path: Path) -> None:
    small = ("--predicted-peers", "4", "--predicted-phase", "1", "--predicted-mbit", "16", "8", "--rounds", "1", "--fair")
    found = link(tmp_path, "predicted", *small)
    shared, expert = 0.4, 0.2  # MB in int8, of 8 MB in float32; each of the four peers owns one expert
    needed = 2 * 3 * shared + 4 * 3 * expert
    for kind in ("predicted", "real"):
        each = found[kind]
        assert each["replicas_identical"], kind
        assert [each[why] for why in ("left_out", "dropped_parts", "lost", "disputed")] == [0, 0, 0, 0], kind
        assert 0.8 < sum(each["megabytes_sent"]) / needed < 1.6, "reducers are checked, too"
        assert each["round_without_phase_s"] > each["exchange_s"] > 0, kind
        assert 0 < each["share_of_fullest_line"] < 1.5, kind
    assert min(found["real_over_predicted"].values()) > 0.5, "lines bound real rounds, too"


@pytest.mark.network
@needs_namespaces
def test_between_two_sites_a_copy_crosses_at_least_and_at_most_what_a_plan_without_regions_sends(tmp_path: Path) -> None:
    """Whether real peers find their sites depends on how busy the machine is; in `test_regions.py`, simulated ones do."""
    small = ("--region-peers", "4", "--region-megabytes", "16", "--region-mbit", "80", "16", "--rounds", "2")
    rounds = link(tmp_path, "regions", *small)["rounds"]
    assert [each["round"] for each in rounds] == [1, 2]
    assert [(each["lost"], each["disputed"]) for each in rounds] == [(0, 0)] * 2
    for side in range(2):
        crossed, copies = (sum(each[of][side] for each in rounds) for of in ("crossed_megabytes", "one_copy_megabytes"))
        assert 1 < crossed / copies < 7, "a copy for each of four members and the bootstrap peer, checks and headers"
        assert 8 * crossed / 16 < 1.2 * sum(each["seconds"] for each in rounds), "the line between has 16 Mbit/s"


@pytest.mark.long
def test_simulated_peers_round_takes_hardly_longer_than_any_assignment_of_reducers_must(tmp_path: Path) -> None:
    small = ("--predicted-peers", "4", "--predicted-mbit", "16", "8", "--predicted-megabytes", "8", "--predicted-phase", "1")
    found = link(tmp_path, "whole", *small, "--rounds", "1")
    assert found["replicas_identical"]
    assert 1 < found["over_least"] < 1.15
    assert [found[why] for why in ("left_out", "dropped_parts", "lost", "disputed")] == [0, 0, 0, 0]


@pytest.mark.long
def test_simulated_sites_send_each_other_little_more_than_a_copy_once_they_are_found(tmp_path: Path) -> None:
    small = ("--region-peers", "4", "--region-megabytes", "16", "--region-mbit", "80", "16", "--rounds", "4")
    _start, first, *_, last = link(tmp_path, "across", *small)["rounds"]
    assert min(first["copies_to"].values()) > 3, "a copy for each of four members"
    assert all(1 <= copies < 1.1 for copies in last["copies_to"].values())
    assert set(last["megabytes_to"]) == {"here", "there"}


@pytest.mark.long
def test_with_four_times_the_peers_control_takes_less_than_half_as_many_bytes_again(tmp_path: Path) -> None:
    plot, folder = tmp_path / "growth.png", tmp_path / "empty"
    folder.mkdir()
    rows = table(folder, "growth", "--most-peers", "64", "--plot", str(plot))
    assert [row["peers"] for row in rows] == ["4", "16", "64"]
    before, after = (
        int(row["control bytes of the peer that sends most: median round"].replace(",", "")) for row in rows[1:]
    )
    assert 0 < before < after < 1.5 * before
    for row in rows:
        assert int(row["rounds"]) >= 12
        assert 0 < float(row["beyond training, s"]) < 3
    for row in rows[:2]:
        assert row["connections: owner's peer, trainer with most, median peer"] == ", ".join([row["peers"]] * 3)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_volunteers_that_come_and_go_lose_little_work_and_violate_no_rule(tmp_path: Path) -> None:
    (row,) = table(tmp_path, "churn", "--most-peers", "8")
    assert (row["peers"], row["violations"]) == ("8", "0")
    assert int(row["went"]) > 10
    assert int(row["retried"]) < int(row["rounds"]) / 5 > 12
    assert float(row["tokens in the base"].removesuffix(" %")) > 97
    assert 1 <= int(row["rounds until new owners"]) <= 2
    median, mean = re.findall(r"\d+\.\d", row["round, s"])[:2]
    assert 10 < float(median) <= float(mean) < 13, "training takes 10 s"
