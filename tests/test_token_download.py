"""Volunteers who have nothing but an address: the text that they train on comes from the swarm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from network_swarm import LocalPeers
from sample_text import TEXT, write_test_campaign
from text_server import text_server

from spes_p2p.campaign import read_campaign
from spes_p2p.data.tokenizing import tokenize

pytestmark = pytest.mark.network


def test_trainers_without_token_files_complete_a_campaign(tmp_path: Path) -> None:
    (tmp_path / "campaign").mkdir()
    config = write_test_campaign(tmp_path / "campaign")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        for name in ("peer-0", "peer-1"):
            swarm.join(name, address, "--data-dir", str(nowhere))
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
    assert list(nowhere.iterdir()) == []


def test_trainers_complete_a_campaign_whose_text_lies_on_a_web_server(tmp_path: Path) -> None:
    (tmp_path / "campaign").mkdir()
    config = write_test_campaign(tmp_path / "campaign")
    parts = ("train", "held_out")
    with text_server({f"/{part}/wordnet.jsonl": (TEXT / part / "wordnet.jsonl").read_bytes() for part in parts}) as server:
        for part in parts:
            tokenize([TEXT / part / "wordnet.jsonl"], config.with_name("tokenizer.json"), config.parent, prefix=f"{part}_",
                     overwrite=True, source_prefix=f"{server.url}/{part}")
        for path in config.parent.glob("*.npy"):
            path.unlink()
        server.asked.clear()
        with LocalPeers(tmp_path) as swarm:
            bootstrap = swarm.bootstrap(config)
            for name in ("peer-0", "peer-1"):
                swarm.join(name, bootstrap.address, "--data-dir", str(tmp_path))
            swarm.wait(lambda: not swarm.trainers, 150, "the campaign completes")
            peers = [swarm[name] for name in ("peer-0", "peer-1")]
            assert [peer.process.returncode for peer in peers] == [0, 0], peers[0].log
            losses = swarm.held_out_losses()
            assert losses[-1] < losses[0] - 1.0
            assert "volunteers stream it from http://127.0.0.1" in bootstrap.log
            assert "streaming it from http://127.0.0.1" in peers[0].log + peers[1].log
        assert {path for path, _, _ in server.asked} == {f"/{part}/wordnet.jsonl" for part in parts}
    assert list(config.parent.glob("*.npy")) == []
