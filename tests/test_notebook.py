"""The notebook joins a campaign: its cells are run in order, except the one that installs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import ENVIRONMENT, ROOT, LocalPeers, write_variant

CELLS = json.loads((ROOT / "docs/notebooks/join.ipynb").read_text())["cells"]


@pytest.mark.network
def test_the_notebook_trains_until_the_campaign_ends(campaign: Path, tmp_path: Path) -> None:
    training = {"total_steps": 4, "sync_steps": 2, "warmup_steps": 1}
    short = write_variant(campaign, "short.yaml", training=training, merge={"merge_interval": 2})
    code = [cell for cell in CELLS if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", [])]
    said = ""
    with LocalPeers(tmp_path) as swarm:
        names = {"ADDRESS": swarm.bootstrap(short).address}
        swarm.join("other", names["ADDRESS"])
        for cell in code:
            line = "".join(cell["source"])
            if not line.startswith("!spes-p2p "):
                assert line.startswith("ADDRESS = ")
                continue
            words = shlex.split(line.removeprefix("!spes-p2p ").format(**names))
            command = [sys.executable, "-m", "spes_p2p", *words]
            ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            said += ended.stdout + ended.stderr
    assert "reachability" in said
    assert "the campaign is done" in said
