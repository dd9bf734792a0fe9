"""The notebook joins a campaign from behind a router: its cells are run in order, except the one that installs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import ENVIRONMENT, ROOT, LocalPeers, write_variant

from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable

CELLS = json.loads((ROOT / "docs/notebooks/join.ipynb").read_text())["cells"]
BLOCKED = why_unavailable(routers=True)
LISTEN = "/ip4/0.0.0.0/tcp/31337"


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_cell_shows_lines_without_spinners_and_colours(in_notebook: bool, tmp_path: Path) -> None:
    """IPython gives a command a terminal, but a cell moves no cursor: each frame of a spinner would stay."""
    environment = {**ENVIRONMENT, "TERM": "xterm-color", **({"JPY_PARENT_PID": "1"} if in_notebook else {})}
    if not in_notebook:
        environment.pop("JPY_PARENT_PID", None)
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "spes_p2p", "report", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdin=its, stdout=its, stderr=its, timeout=240, check=False)
    said = os.read(ours, 2**16).decode()
    os.close(ours)
    os.close(its)
    assert ended.returncode == 2
    assert "starting" in said
    assert "not a peer's run-dir" in said
    assert ("\x1b" in said) is not in_notebook


def test_the_notebook_installs_the_tested_versions_for_a_gpu() -> None:
    (installing,) = ("".join(cell["source"]) for cell in CELLS if "install" in cell["metadata"].get("tags", []))
    assert "pip install -c constraints.txt '.[cuda]'" in (ROOT / "README.md").read_text()
    assert "%pip install -q -c spes_p2p/constraints.txt './spes_p2p[cuda]'" in installing


@pytest.mark.network
@pytest.mark.skipif(BLOCKED is not None, reason=f"no networks with routers here: {BLOCKED}")
def test_the_notebook_trains_until_the_campaign_ends(campaign: Path, tmp_path: Path) -> None:
    training = {"total_steps": 4, "sync_steps": 2, "warmup_steps": 1}
    short = write_variant(campaign, "short.yaml", training=training, merge={"merge_interval": 2})
    code = [cell for cell in CELLS if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", [])]
    said = ""
    with contextlib.closing(Namespaces()) as machines, LocalPeers(tmp_path) as swarm:
        for name in ("bootstrap", "other", "notebook"):
            machines.add(name, 12.5e6, nat="symmetric" if name == "notebook" else "open")
        first = swarm.run(
            "bootstrap", ["bootstrap", "--config", str(short), "--listen", LISTEN], before=tuple(machines.command("bootstrap"))
        )
        swarm.wait(lambda: first.address or not first.is_running, 240, "the bootstrap says its address")
        names = {"ADDRESS": first.address}
        swarm.run("other", ["join", names["ADDRESS"]], before=tuple(machines.command("other")))
        for cell in code:
            line = "".join(cell["source"])
            if not line.startswith("!spes-p2p "):
                assert line.startswith("ADDRESS = ")
                continue
            words = shlex.split(line.removeprefix("!spes-p2p ").format(**names))
            command = [*machines.command("notebook"), sys.executable, "-m", "spes_p2p", *words]
            ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            said += ended.stdout + ended.stderr
    assert "peers reach it through a relay" in said
    assert "others cannot dial this peer" in said
    assert "the campaign is done" in said
