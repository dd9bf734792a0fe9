"""A small checkpoint of each family goes through `init --from`, a swarm with the real trainer, and export, and loads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import DENSE, MOE, make_checkpoint
from counting_text import CountingText
from network_swarm import call, write_variant
from sample_text import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.campaign.start import base_0
from spes_p2p.client.export import Exportable
from spes_p2p.client.model_card import origin_of
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, layout_of
from spes_p2p.rounds.digest import state_digest
from spes_p2p.testing.simulate.swarm import VirtualSwarm, simulate
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

WORDNET = str(TEXT / "train/wordnet.jsonl")
TRAINING = {"sequence_length": 16, "batch_size": 4, "micro_batch_size": 2, "total_steps": 15, "sync_steps": 5,
            "learning_rate": 3e-3, "warmup_steps": 1}


class VirtualTrainer(TorchTrainer):
    """The real trainer; a step takes a virtual second."""

    def train(self, phase: Phase, *callbacks: object) -> PhaseReport:
        report = super().train(phase, *callbacks)  # type: ignore[arg-type]
        return replace(report, seconds=float(report.steps))


def trained_by_a_swarm(files: CampaignFiles, weights: State) -> State:
    """The last base of four trainers that own all experts together."""
    config = files.campaign.config

    async def main() -> State:
        swarm = VirtualSwarm(
            files.campaign, layout=layout_of(config.model), weights=weights,
            make_trainer=lambda base, owned: VirtualTrainer(config, base, owned, CountingText(), CountingText()),
        )
        swarm.start_all("ABCD")
        await swarm.until_finished()
        swarm.assert_replicas_agree()
        assert max(swarm.recorders["A"].commits()) == config.total_rounds
        return np.array(swarm.peers["A"].replica.base.values)

    return simulate(main)


@torch.no_grad()
def loss(model: PreTrainedModel) -> float:
    ids = torch.from_numpy(CountingText().read(Interval(0, 0, 40)))
    return float(model(input_ids=ids, labels=ids, output_router_logits=False).loss)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", [*MOE, *DENSE])
def test_from_a_checkpoint_through_a_swarm_to_a_checkpoint(family: str, tmp_path: Path) -> None:
    original = make_checkpoint(family, tmp_path / "original")
    upcycling = ("--experts", "4", "--upcycle", "copy") if family in DENSE else ()
    start = ("--from", str(tmp_path / "original"), *upcycling)
    ended = call("init", str(tmp_path / "made"), *start, "--text", WORDNET, "--peers", "4")
    assert ended.code == 0, ended.stderr
    files = read_campaign(write_variant(tmp_path / "made/campaign.yaml", "short.yaml", training=TRAINING, merge={}))
    weights = np.empty(layout_of(files.campaign.config.model).size, np.float32)
    base_0(files, weights)
    first, last = weights.copy(), trained_by_a_swarm(files, weights)
    for placed in layout_of(files.campaign.config.model).tensors:
        stays = placed.spec.name.endswith("e_score_correction_bias")
        assert np.array_equal(first[placed.start : placed.stop], last[placed.start : placed.stop]) == stays
    losses = [loss(original)]
    for name, values in (("first", first), ("last", last)):
        origin = origin_of(files.campaign, 1, state_digest(values), ())
        Exportable(files, values, origin).write(tmp_path / name)
        losses.append(loss(AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] < losses[1] - 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "last").eos_token == "<|endoftext|>"
    assert "trained from `original`" in (tmp_path / "last/README.md").read_text()


@pytest.mark.parametrize(("options", "message"), [
    (("--from", "nowhere"), "nowhere: no such checkpoint folder"),
    (("--from", "ORIGINAL", "--size", "tiny"), "--size tiny: the model is the checkpoint's; leave out --size"),
    (("--from", "ORIGINAL", "--tokenizer", "512"), "--tokenizer 512: a checkpoint needs the tokenizer"),
    (("--from", "ORIGINAL", "--experts", "4"), "has experts already"),
    (("--experts", "4"), "--experts 4: for a dense checkpoint; name one with --from"),
    (("--from", "ORIGINAL", "--experts", "1"), "--experts 1: must be 2 to 4096"),
    (("--from", "ORIGINAL", "--experts", "4", "--top-k", "5"), "--top-k 5: must be 1 to the number of --experts"),
    (("--from", "ORIGINAL", "--experts", "4", "--upcycle", "magic"), "--upcycle magic: must be copy, drop or spes"),
    (("--from", "ORIGINAL", "--tokenizer", "LARGER"), "has 4096 ids, the model only 512"),
])
def test_options_that_do_not_fit_leave_one_line_and_no_folder(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path / "original")
    places = {"ORIGINAL": str(tmp_path / "original"), "LARGER": str(TEXT / "tokenizer.json")}
    ended = call("init", str(tmp_path / "made"), "--text", WORDNET, *(places.get(option, option) for option in options))
    assert ended.code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "made").exists()
