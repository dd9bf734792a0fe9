"""Volunteers who have nothing but an address: the text that they train on comes from the swarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_server import file_server
from network_swarm import LOOPBACK, LocalPeers
from sample_text import write_test_campaign

from spes_p2p.campaign.files import read_campaign
from spes_p2p.data.manifest import publish_at, read_manifest, write_manifest

pytestmark = pytest.mark.network


def test_trainers_without_token_files_complete_a_campaign(tmp_path: Path) -> None:
    (tmp_path / "campaign").mkdir()
    config = write_test_campaign(tmp_path / "campaign")
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        for name in ("peer-0", "peer-1"):
            swarm.run(name, ["join", address, "--listen", LOOPBACK])
        swarm.wait(lambda: not swarm.trainers, 150, "the campaign completes")
        peers = [swarm[name] for name in ("peer-0", "peer-1")]
        assert [peer.process.returncode for peer in peers] == [0, 0], peers[0].log
        losses = swarm.held_out_losses()
        assert losses[-1] < losses[0] - 1.0

        right = np.concatenate([np.fromfile(path, np.uint16) for path in sorted(config.parent.glob("train_*.npy"))])
        (file,) = read_campaign(config).training_manifest.files
        for peer in peers:
            cached = np.fromfile(peer.run_dir / "tokens" / f"{file.pieces_sha256}.tokens", np.uint16)
            assert len(cached) == len(right)
            assert ((cached == right) | (cached == 0)).all()
            assert (cached == right).mean() > 0.2


def test_trainers_complete_a_campaign_whose_token_files_lie_on_a_web_server(tmp_path: Path) -> None:
    (tmp_path / "campaign").mkdir()
    config = write_test_campaign(tmp_path / "campaign")
    token_files = {f"/tokens/{path.name}": path.read_bytes() for path in config.parent.glob("*.npy")}
    with file_server(token_files) as server:
        for path in config.parent.glob("*_manifest.json"):
            manifest = read_manifest(path)
            write_manifest(replace(manifest, files=publish_at(manifest.files, f"{server.url}/tokens")), path)
        for path in config.parent.glob("*.npy"):
            path.unlink()
        with LocalPeers(tmp_path) as swarm:
            bootstrap = swarm.bootstrap(config)
            for name in ("peer-0", "peer-1"):
                swarm.join(name, bootstrap.address)
            swarm.wait(lambda: not swarm.trainers, 150, "the campaign completes")
            peers = [swarm[name] for name in ("peer-0", "peer-1")]
            assert [peer.process.returncode for peer in peers] == [0, 0], peers[0].log
            losses = swarm.held_out_losses()
            assert losses[-1] < losses[0] - 1.0
            assert "volunteers read it from http://127.0.0.1" in bootstrap.log
        assert {path for path, _, _ in server.asked} == set(token_files)
    assert list(config.parent.glob("*.npy")) == []
