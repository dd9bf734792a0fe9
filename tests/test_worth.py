"""What a peer's experts are worth: the loss of a model that has lost them, with its tokens sent to the others."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from network_swarm import LocalPeers, call, write_variant
from recorded_run import run_dir
from torch.nn import functional
from transformers import PreTrainedModel

from spes_p2p.campaign.files import CampaignFiles, keep_campaign, read_campaign
from spes_p2p.campaign.genesis import make_genesis
from spes_p2p.client import worth
from spes_p2p.client.me import own_share, render
from spes_p2p.client.worth import masked_losses, worth_of
from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import initial_state, layout_of
from spes_p2p.observe.events import PeerStarted, RoundCommitted
from spes_p2p.observe.worth import WORTH_FILE
from spes_p2p.rounds.base import Base, save_base
from spes_p2p.rounds.digest import state_digest
from spes_p2p.rounds.outer import first_base
from spes_p2p.session.own_state import STATE_FILE
from spes_p2p.session.text import held_out_samples, open_text
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.plain_model import plain_model

MINE = (1, 3)


def without(model: PreTrainedModel, experts: tuple[int, ...]) -> PreTrainedModel:
    """The same model of transformers with only the other experts."""
    for layer in model.model.layers:
        block = layer.mlp
        kept = [expert for expert in range(block.experts.num_experts) if expert not in experts]
        for module, name in ((block.gate, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
            setattr(module, name, torch.nn.Parameter(getattr(module, name)[kept].detach()))
        block.experts.num_experts = block.gate.num_experts = len(kept)
    return model


def losses(model: PreTrainedModel, samples: np.ndarray) -> np.ndarray:
    found = []
    with torch.no_grad():
        for ids in torch.from_numpy(samples):
            logits = model.eval()(input_ids=ids[None]).logits[0]
            found.append(float(functional.cross_entropy(logits[:-1].double(), ids[1:])))
    return np.array(found)


def spread(config: ModelSection) -> np.ndarray:
    """Weights that are far enough from each other for experts to matter."""
    base = initial_state(config)
    return (base + 0.3 * np.random.default_rng(0).standard_normal(base.size)).astype(np.float32)


@pytest.fixture
def files(campaign: Path) -> CampaignFiles:
    return read_campaign(campaign)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("architecture", ["olmoe", "qwen3_moe"])
def test_the_loss_without_experts_is_that_of_a_model_which_has_not_got_them(
    files: CampaignFiles, tmp_path: Path, architecture: str, normed: bool
) -> None:
    config = files.campaign.config
    model = config.model.model_copy(update={"architecture": architecture, "norm_topk_prob": normed})
    changed = config.model_copy(update={"model": model})
    files = replace(files, campaign=files.campaign.model_copy(update={"config": changed}))
    base = spread(model)
    found = masked_losses(files, tmp_path, base, MINE)
    samples = held_out_samples(files, open_text(files, tmp_path, None), lambda file, pieces: None)
    assert found[0] == pytest.approx(losses(plain_model(model, base), samples), rel=1e-5)
    assert found[1] == pytest.approx(losses(without(plain_model(model, base), MINE), samples), rel=1e-5)
    assert np.abs(found[1] - found[0]).min() > 1e-3


def trainers_run_dir(folder: Path, files: CampaignFiles, values: np.ndarray, number: int = 5) -> Path:
    keep_campaign(files, make_genesis(files.campaign, "QmOwner", np.zeros(4, np.float32), "0" * 32), folder)
    config = files.campaign.config
    whole = first_base(values, layout_of(config.model), config.outer)
    save_base(DirectoryStore(folder), Base("c" * 64, number, whole, state_digest(whole), None))
    return folder


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process: one of its own imports torch again. The network test below has one."""
    monkeypatch.setattr(worth, "run_apart_telling", lambda tell, function, *args: function(tell, *args))
    monkeypatch.setattr(os, "nice", lambda increment: 0)


@pytest.mark.usefixtures("measured_here")
def test_a_result_is_kept_for_the_base_and_the_experts_that_it_is_of(files: CampaignFiles, tmp_path: Path) -> None:
    base, data = spread(files.campaign.config.model), files.folders
    folder = trainers_run_dir(tmp_path, files, base)
    told = list[tuple[int, int]]()
    first = worth_of(folder, MINE, (), data, lambda *progress: told.append(progress))
    assert told == [(done, 2 * first.samples) for done in range(2 * first.samples)]
    expected = masked_losses(files, tmp_path, base, MINE)
    difference = expected[1] - expected[0]
    assert (first.round, first.samples, first.experts) == (5, files.campaign.config.evaluation.max_samples, MINE)
    assert first.nats == pytest.approx(difference.mean(), rel=1e-4)
    assert first.error == pytest.approx(difference.std(ddof=1) / len(difference) ** 0.5, rel=1e-4)
    kept = json.loads((folder / WORTH_FILE).read_text())
    (folder / WORTH_FILE).write_text(json.dumps({**kept, "loss": 1.0}))
    assert worth_of(folder, MINE, (), data).loss == 1.0
    assert worth_of(folder, (0, 1), (), data).loss != 1.0
    trainers_run_dir(tmp_path, files, base + np.float32(0.1), 6)
    assert worth_of(folder, (0, 1), (), data).round == 6


@pytest.mark.usefixtures("measured_here")
def test_what_cannot_be_measured_is_one_line(files: CampaignFiles, tmp_path: Path) -> None:
    folder = trainers_run_dir(tmp_path, files, spread(files.campaign.config.model))
    with pytest.raises(UserError, match="owns no experts yet"):
        worth_of(folder, (), (), files.folders)
    with pytest.raises(UserError, match="the worth of 3 of 4 experts cannot be measured: too few would remain, since each"):
        worth_of(folder, (0, 1, 2), (), files.folders)
    with pytest.raises(UserError, match="the held-out text is not all here; start the trainer"):
        worth_of(folder, MINE)
    (folder / WORTH_FILE).write_text("{}")
    worth = worth_of(folder, MINE, (), files.folders)
    shown = render(replace(own_share([], "QmMe", 20, None, 0.0), worth=worth))
    assert f"  worth    experts 1 3: {worth.nats:+.4f} ± {worth.error:.4f} nats per token" in shown


@pytest.mark.usefixtures("measured_here")
def test_the_usual_figures_are_printed_where_the_worth_cannot_be_measured(tmp_path: Path) -> None:
    all_mine = RoundCommitted(
        round=5, campaign_step=25, total_steps=40, tokens=300, total_tokens=1000, loss=4.0, members=("QmMe",),
        owners=(("QmMe",),) * 4, base_digest="d", parts=4, dropped_parts=0, sent_bytes=0, received_bytes=0,
        contributions=(("QmMe", 300, 20),),
    )
    run_dir(tmp_path, [], PeerStarted("QmMe"), all_mine)
    (tmp_path / STATE_FILE).write_text("")
    told = call("me", str(tmp_path), "--worth")
    assert (told.code, "300 trained here are in the model, 30.0 % of all" in told.stdout) == (2, True)
    assert told.stderr.splitlines()[-1] == (
        "error: the worth of 4 of 4 experts cannot be measured: too few would remain, since each token needs 2; wait for more "
        "trainers, which take some over, or join with --experts 2"
    )


@pytest.mark.network
def test_a_volunteer_is_told_what_its_experts_are_worth(campaign: Path, tmp_path: Path) -> None:
    text = {"experts": {"experts_per_peer": 2}, "evaluation": {"every_rounds": 30}}  # the second trainer never evaluates
    config = write_variant(campaign, "worth.yaml", **text, training={"total_steps": 400_000}, merge={"merge_interval": 10})
    with LocalPeers(tmp_path, niceness=18) as swarm:
        address = swarm.bootstrap(config).address
        for name in ("peer-0", "peer-1"):
            swarm.join(name, address)
        swarm.wait_for_round(3, 240)
        told = call("me", str(swarm["peer-0"].run_dir), "--worth", "--json")
        assert told.code == 0, told.stderr
        assert told.stderr.startswith("measuring the loss without your experts, at the lowest priority\n")
        found = json.loads(told.stdout)["worth"]
        assert len(found["experts"]) == 2
        assert found["round"] >= 2
        assert 0 < found["error"] < 1
