"""Documents in one sample that do not see each other: what a document computes packed is what it computes alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from model_classes import classes_of
from model_shapes import tiny_campaign, tiny_model, tiny_training
from one_trainer import CountingText, bits, phase_of, train
from sample_text import write_test_campaign
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.campaign.files import read_campaign
from spes_p2p.config.campaign import MASKED_FAMILIES, CampaignConfig, load_campaign_config
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import build_model, initial_state, layout_of
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.documents import Documents
from spes_p2p.training.losses import next_token_loss
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

EOS = 0
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}
SHORT: tuple[int, ...] = (5, 9, 7, EOS)
LONG: tuple[int, ...] = (3, 8, 30, 41, 12, 6, EOS)
MODEL = tiny_model()
BASE = initial_state(MODEL)
LAYOUT = layout_of(MODEL)


def small_model(model_type: str) -> PreTrainedModel:
    """A model of the family with few and small layers, whose attention matters."""
    config_class, model_class = classes_of(model_type)
    known = config_class()
    torch.manual_seed(0)
    model = model_class(config_class(**{name: value for name, value in SMALL.items() if hasattr(known, name)})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits(model: PreTrainedModel, samples: list[tuple[int, ...]], documents: Documents | None = None) -> Tensor:
    ids = torch.tensor(samples)
    positions = documents.positions(ids) if documents else None
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def test_positions_restart_after_each_end_and_at_the_start_of_a_sample() -> None:
    ids = torch.tensor([[5, 6, EOS, 7, EOS, EOS, 8, 9], [1, 2, 3, 4, 5, 6, 7, EOS]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]
    assert Documents(EOS, 0).positions(ids).tolist() == expected


def test_what_follows_an_end_is_no_label() -> None:
    ids = torch.tensor([[5, 6, EOS, 7, EOS, EOS, 8, EOS]])
    assert Documents(EOS, 0).has_label(ids).tolist() == [[True, True, False, True, False, False, True]]


@pytest.mark.parametrize("model_type", MASKED_FAMILIES)
def test_a_documents_logits_are_those_it_has_alone(model_type: str) -> None:
    model, documents = small_model(model_type), Documents(EOS, 0)
    alone = {document: logits(model, [document])[0] for document in (SHORT, LONG)}
    packed = logits(model, [(*SHORT, *LONG), (*LONG, *SHORT)], documents)
    for sample, order in zip(packed, ((SHORT, LONG), (LONG, SHORT)), strict=True):
        for part, document in zip(sample.split([len(each) for each in order]), order, strict=True):
            torch.testing.assert_close(part, alone[document], rtol=1e-4, atol=1e-4)
    mixed = logits(model, [(*SHORT, *LONG)])[0, len(SHORT) :]
    assert (mixed - alone[LONG]).abs().max() > 0.1


def test_other_families_are_refused_by_the_campaign_file(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text("""
name: recurrent
model: {config: {model_type: qwen3_next, vocab_size: 64, num_hidden_layers: 2, max_position_embeddings: 64, num_experts: 4}}
training:
  {sequence_length: 16, batch_size: 1, total_steps: 9, sync_steps: 9, learning_rate: 0.1, intra_document_masking: true}
data: {manifest: m, tokenizer: t}
""")
    with pytest.raises(UserError, match=r"_masking = true: must be false for qwen3_next; possible for .*olmoe"):
        load_campaign_config(path)


def test_text_whose_documents_end_with_another_token_is_refused(tmp_path: Path) -> None:
    path = write_test_campaign(tmp_path)
    written = yaml.safe_load(path.read_text())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    other = next(token for token, number in vocabulary.items() if number == 40)
    written["data"]["eos_token"] = other
    path.write_text(yaml.safe_dump(written))
    read_campaign(path)
    written["training"]["intra_document_masking"] = True
    path.write_text(yaml.safe_dump(written))
    with pytest.raises(UserError) as refused:
        read_campaign(path)
    assert str(refused.value) == (
        f"{tmp_path}/train_manifest.json: its documents end with id 0, but data.eos_token = {other!r} is id 40, which "
        "training.intra_document_masking goes by; tokenize with that --eos-token"
    )
    del written["data"]["eos_token"]
    path.write_text(yaml.safe_dump(written))
    assert read_campaign(path).training_manifest.eos_token_id == 0


class Packed:
    """Samples of two documents and the beginning of a third."""

    num_samples = 64

    def read(self, interval: Interval) -> np.ndarray:
        places = np.arange(interval.start, interval.stop)[:, None] + np.arange(16)
        samples = 1 + places % 60
        samples[:, 4] = samples[:, 11] = EOS
        samples[::2, 7] = EOS  # every other sample has one more, so samples differ in their number of labels
        return samples

    def read_spread(self, count: int) -> np.ndarray:
        return self.read(Interval(0, 0, count))


def campaign(**training: object) -> CampaignConfig:
    return tiny_campaign(MODEL, tiny_training(intra_document_masking=True, **training))


def trainer_of(config: CampaignConfig, micro_batch_size: int | None = None) -> TorchTrainer:
    options = TrainingOptions(micro_batch_size=micro_batch_size)
    return TorchTrainer(config, BASE, (0, 1, 2, 3), Packed(), Packed(), options=options, eos_token_id=EOS)


def losses_by_document(sample: np.ndarray) -> list[float]:
    """Cross-entropies of a sample's labels, each document computed alone by transformers' model."""
    ends = [*(np.flatnonzero(sample == EOS) + 1), len(sample)]
    found: list[float] = []
    for start, stop in zip([0, *ends], ends, strict=False):
        if stop - start < 2:
            continue
        ids = torch.from_numpy(sample[start:stop])[None]
        with torch.no_grad():
            scores = plain_model(MODEL, BASE).eval()(input_ids=ids).logits[0, :-1]
        found += F.cross_entropy(scores, ids[0, 1:], reduction="none").tolist()
    return found


def test_held_out_loss_is_the_mean_over_documents_that_stand_alone() -> None:
    expected = [np.mean(losses_by_document(sample)) for sample in Packed().read_spread(8)]
    trainer = trainer_of(campaign())
    assert trainer.validation_loss() == pytest.approx(np.mean(expected), rel=1e-5)
    assert len(trainer.held_out_losses(1, 3)) == 3


def test_training_loss_counts_each_label_once_however_samples_are_divided() -> None:
    """Steps with micro-batches of unequal numbers of labels are those of the whole batch."""
    big = {"eps": 10.0, "learning_rate": 10.0, "weight_decay": 0.0, "max_grad_norm": 1e9, "moe_loss_weight": 0.0}
    whole, divided = trainer_of(campaign(**big)), trainer_of(campaign(**big), 1)
    reports = [train(trainer, phase_of(1)) for trainer in (whole, divided)]
    expected = np.mean([loss for sample in Packed().read(Interval(0, 0, 4)) for loss in losses_by_document(sample)])
    assert reports[0].loss == pytest.approx(expected, rel=1e-5)
    shared = LAYOUT.group("shared")
    np.testing.assert_allclose(whole.read(shared), divided.read(shared), atol=2e-6)
    assert bits(whole.read(shared)) != bits(BASE[shared.start : shared.stop])


def test_an_installation_whose_attention_crosses_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Documents, "positions", lambda self, ids: torch.arange(ids.shape[1])[None])
    with pytest.raises(UserError, match=r"attention of olmoe crosses documents here; install the version in constraints.txt"):
        trainer_of(campaign())


def test_a_sample_without_labels_adds_nothing() -> None:
    model, ids = build_model(MODEL, BASE, ()), torch.full((1, 6), EOS)
    head = next_token_loss(model, torch.randn(1, 6, 32), ids, documents=Documents(EOS, 0))
    assert float(head.total) == float(head.cross_entropy) == 0


def test_a_trainer_that_does_not_know_where_documents_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"^training.intra_document_masking = true: unknown here which token ends"):
        TorchTrainer(campaign(), BASE, (0,), Packed())


def test_without_the_option_documents_are_read_as_before() -> None:
    text = CountingText()
    with_id = TorchTrainer(tiny_campaign(), BASE, (0,), text, text, eos_token_id=EOS)
    without = TorchTrainer(tiny_campaign(), BASE, (0,), text, text)
    assert with_id.validation_loss() == without.validation_loss()
    assert math.isfinite(with_id.validation_loss())
