"""A joiner makes base 0 itself where it can, and replays the campaign's first rounds instead of downloading a base."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from network_swarm import call
from sample_text import TEXT, write_test_campaign

from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.campaign.start import base_0
from spes_p2p.config.campaign import OuterConfig, PeerConfig
from spes_p2p.content.bases import Snapshots
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.presence import Contact
from spes_p2p.model.build import layout_of
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import BaseRestored
from spes_p2p.rounds.base import BASE
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.results import KEPT_ROUNDS, replayable_rounds
from spes_p2p.session import genesis as session_genesis
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

SILENCE_S = 2.0
ALL_SPARSE = {"router": "sparse", "shared": "sparse", "experts": "sparse"}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process what a peer runs in one of its own, also for small models."""
    monkeypatch.setattr(session_genesis, "run_apart", lambda function, *args: function(*args))
    monkeypatch.setattr(session_genesis, "WORTH_MAKING_BYTES", 0)


def base_0_of(files: CampaignFiles) -> np.ndarray:
    layout = layout_of(files.campaign.config.model)
    values = np.zeros(base_size(layout, files.campaign.config.outer), np.float32)
    base_0(files, values[: layout.size])
    return values


def joined(files: CampaignFiles, run_dir: Path, rounds: int, genesis: Commit | None = None, **settings: Any) -> bool:
    """Join a campaign of this many rounds; return whether base 0 was made."""
    genesis = genesis or make_genesis(files.campaign, "owner", base_0_of(files), "1")

    async def main() -> bool:
        network, snapshots, store = MemoryNetwork(), Snapshots(), DirectoryStore(run_dir)
        owner = RpcEndpoint(network.transport("owner"), SILENCE_S)
        snapshots.publish("f" * 64, rounds - 1, np.zeros(8, np.float32))
        await snapshots.serve(owner, ContentServer(owner))
        endpoint = RpcEndpoint(network.transport("me"), SILENCE_S)
        peer = PeerConfig(run_dir=run_dir, **settings)
        session_genesis.require_checkpoint(peer, files.campaign.config)
        await session_genesis.join_with_base_0(endpoint, ["owner"], files, genesis, peer, store)
        return store.read(BASE) is not None

    return simulate(main)


@pytest.mark.parametrize(("codec", "rounds"), [("none", KEPT_ROUNDS), ("int4", KEPT_ROUNDS), (ALL_SPARSE, 27)])
def test_helpers_keep_results_of_as_many_rounds_as_fit_in_a_quarter_of_a_base(codec: Any, rounds: int) -> None:
    config = campaign(sync={"codec": codec}, model={"hidden_size": 64, "intermediate_size": 256, "vocab_size": 500}).config
    layout, codecs = layout_of(config.model), group_codecs(config.sync.codec)
    assert replayable_rounds(layout, codecs, OuterConfig()) == rounds
    assert rounds == KEPT_ROUNDS or rounds * codecs.encoded_bytes(layout) <= layout.size


def joins_with_base_0(rounds: int) -> list[str]:
    """Sources of the bases of a trainer that joins with base 0 after this many rounds."""
    async def main() -> list[str]:
        swarm = VirtualSwarm(campaign(total_steps=10 * (rounds + 6), sync={"min_peers": 2}))
        swarm.start_all("AB")
        await swarm.until_round(rounds - 1)
        store = swarm.stores["D"] = MemoryStore()
        save_base_0(store, swarm.genesis, swarm.base0)
        swarm.start("D")
        await swarm.until_finished()
        swarm.assert_replicas_agree()
        return [event.source for event in swarm.recorders["D"].of(BaseRestored)]

    return simulate(main)


@pytest.mark.long
def test_a_joiner_with_base_0_replays_the_first_rounds() -> None:
    assert joins_with_base_0(KEPT_ROUNDS - 1) == ["disk"]


@pytest.mark.long
def test_a_joiner_with_base_0_downloads_a_base_when_results_are_gone() -> None:
    assert joins_with_base_0(KEPT_ROUNDS + 4) == ["disk", "download"]


def test_random_weights_are_made_here_while_the_rounds_since_can_be_replayed(tmp_path: Path, at_once: None) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    assert joined(files, tmp_path / "young", KEPT_ROUNDS)
    assert not joined(files, tmp_path / "old", KEPT_ROUNDS + 1)


def test_a_small_base_is_downloaded(tmp_path: Path) -> None:
    assert not joined(read_campaign(write_test_campaign(tmp_path)), tmp_path / "young", 1)


def test_random_weights_of_another_machine_are_not_kept(
    tmp_path: Path, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    theirs = make_genesis(files.campaign, "owner", base_0_of(files) + 1, "1")
    with caplog.at_level(logging.INFO):
        assert not joined(files, tmp_path / "peer", 1, theirs)
    assert "is not the campaign's; downloading a base" in caplog.text


@pytest.fixture
def started(tmp_path: Path) -> Callable[[], CampaignFiles]:
    """Makes a campaign from the checkpoint `tmp_path/original`, as a joiner sees it."""
    def make() -> CampaignFiles:
        make_checkpoint("olmoe", tmp_path / "original")
        ended = call("init", str(tmp_path / "made"), "--from", str(tmp_path / "original"),
                     "--text", str(TEXT / "train/wordnet.jsonl"), "--peers", "3")
        assert ended.code == 0, ended.stderr
        return read_campaign(tmp_path / "made/campaign.yaml")
    return make


def test_a_checkpoint_on_this_machine_gives_base_0(
    tmp_path: Path, at_once: None, started: Callable[[], CampaignFiles]
) -> None:
    files = started()
    genesis = make_genesis(files.campaign, "owner", base_0_of(files), "1")
    make_checkpoint("olmoe", tmp_path / "copy")
    make_checkpoint("mixtral", tmp_path / "other")
    foreign = replace(files, home=tmp_path / "nowhere")
    assert not joined(foreign, tmp_path / "without", 1, genesis)
    assert joined(foreign, tmp_path / "with", 1, genesis, checkpoint=tmp_path / "copy")
    with pytest.raises(UserError, match="nowhere: no such checkpoint folder"):
        joined(foreign, tmp_path / "missing", 1, genesis, checkpoint=tmp_path / "nowhere")
    with pytest.raises(UserError, match="other"):
        joined(foreign, tmp_path / "wrong", 1, genesis, checkpoint=tmp_path / "other")


def test_a_campaign_from_random_weights_takes_no_checkpoint(tmp_path: Path, at_once: None) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    with pytest.raises(UserError, match="starts from random weights; leave out --from"):
        joined(files, tmp_path / "peer", 1, checkpoint=tmp_path)


def test_a_bootstrap_peer_that_begins_a_campaign_anew_says_who_is_in_later_rounds(caplog: pytest.LogCaptureFixture) -> None:
    address = "/ip4/203.0.113.7/tcp/4001/p2p/QmTrainer"
    rounds = {"QmNew": -1, "QmTrainer": 337}
    contacts = {peer: Contact("c", 10, "trainer", number, "", (address,)) for peer, number in rounds.items()}
    for log_round, warns in ((-1, True), (0, False)):
        node: Any = SimpleNamespace(log=SimpleNamespace(round=log_round), contacts=contacts)
        caplog.clear()
        asyncio.run(asyncio.wait_for(session_genesis.warn_of_earlier_start(node), 5.0))
        assert ("says that it is in round 338 of this campaign, which begins anew here" in caplog.text) == warns
        assert caplog.text.rstrip().endswith(f"--peer {address}") == warns
