"""Each family of mixtures of experts comes in and goes out without a difference, or is refused by name in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import balance_routers
from model_classes import classes_of
from model_shapes import tiny_campaign, tiny_training
from moe_families import MOE_TYPES, small_config
from one_trainer import CountingText, phase_of, train
from round_trip import IDS, difference, export, keys_of, started
from sample_text import CONFIGS
from transformers import PreTrainedModel

from spes_p2p.campaign.planner import plan_peer
from spes_p2p.campaign.room import Device
from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.config.model import TransformersModel
from spes_p2p.config.problems import validated
from spes_p2p.errors import UserError
from spes_p2p.model.build import build_model, exact_tensor, initial_state, layout_of, transformers_config
from spes_p2p.model.families import check_family
from spes_p2p.model.memory import Setup, device_bytes
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.trainer import TorchTrainer

UPCYCLING = CONFIGS.parent / "docs/upcycling.md"


def documented() -> list[str]:
    """The families that docs/upcycling.md lists."""
    _, _, after = UPCYCLING.read_text().partition("<!-- families -->")
    return [name.strip(" `\n") for name in after.partition("<!-- end of families -->")[0].split(",")]


ACCEPTED = documented()


def test_the_documented_families_are_those_of_the_installed_transformers() -> None:
    assert len(ACCEPTED) > 15
    assert sorted(set(ACCEPTED)) == ACCEPTED
    assert set(ACCEPTED) < set(MOE_TYPES)


def saved(family: str, folder: Path) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A checkpoint with random weights, and what it holds that no gradient changes."""
    torch.manual_seed(0)
    original = classes_of(family)[1](small_config(family)).float().eval()
    fixed = balance_routers(original)
    original.save_pretrained(folder)
    shutil.copy(CONFIGS / "demo_text/tokenizer_512.json", folder / "tokenizer.json")
    return original, fixed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ACCEPTED)
def test_a_family_comes_in_trains_the_same_function_and_goes_out_without_a_difference(family: str, tmp_path: Path) -> None:
    original, _ = saved(family, tmp_path / "original")
    start, state = started(tmp_path / "original")
    assert difference(original, plain_model(start.model, state).eval()) == 0.0
    with torch.no_grad():
        partitioned = build_model(start.model, state, (0, 3), stored="fp32").eval()
        logits = partitioned(input_ids=IDS).logits
        torch.testing.assert_close(logits, original(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
        hidden = partitioned.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        assert torch.equal(partitioned.get_output_embeddings()(hidden), logits), "the logits that are trained"
    assert difference(original, export(start, state, tmp_path / "exported")) == 0.0
    assert keys_of(tmp_path / "exported") == keys_of(tmp_path / "original")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ACCEPTED)
def test_training_changes_a_familys_weights_and_leaves_what_no_gradient_changes(family: str, tmp_path: Path) -> None:
    _, fixed = saved(family, tmp_path / "original")
    start, state = started(tmp_path / "original")
    layout = layout_of(start.model)
    trainer = TorchTrainer(tiny_campaign(start.model, tiny_training(decay_norm_and_bias=True)), state, (0, 3), CountingText())
    assert train(trainer, phase_of(2)).steps == 2
    trained = state.copy()
    for group in layout.groups:
        if group.expert is None or group.expert in trainer.owned:
            trained[group.start : group.stop] = trainer.read(group)
            assert not np.array_equal(trained[group.start : group.stop], state[group.start : group.stop])
    loaded = export(start, trained, tmp_path / "exported")
    assert difference(plain_model(start.model, trained).eval(), loaded) == 0.0
    for name, values in fixed.items():
        assert torch.equal(loaded.state_dict()[name], values)
        assert layout.by_name[name].spec.is_fixed
        assert layout.by_name[name].spec.kind == "router" or layout.num_experts not in values.shape[-1:]
        assert not [moment for moment in trainer.optimizer_state() if moment.endswith(name)]


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax"])
def test_random_weights_begin_with_transformers_values_of_what_no_gradient_changes(family: str) -> None:
    config = small_config(family)
    model = TransformersModel(config=json.loads(config.to_json_string(use_diff=False)), init_cutoff_factor=3.0)
    state, layout = initial_state(model), layout_of(model)
    made = classes_of(family)[1](config)
    buffers = {name: tensor for name, tensor in made.named_buffers() if name in made.state_dict()}
    assert buffers
    for name, values in buffers.items():
        assert torch.equal(exact_tensor(state, layout, name), values)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"])
def test_random_weights_of_a_family_are_as_large_as_transformers_makes_them(family: str) -> None:
    config = small_config(family)
    model = TransformersModel(config=json.loads(config.to_json_string(use_diff=False)))
    state, layout = initial_state(model), layout_of(model)
    torch.manual_seed(1)
    made = classes_of(family)[1](config)
    for placed in layout.tensors:
        name, values = placed.spec.name, exact_tensor(state, layout, placed.spec.name)
        block, _, matrix = name.rpartition(".")
        expected = made.state_dict().get(name)
        if expected is None:
            expected = made.state_dict()[f"{block.rpartition('.')[0]}.{matrix}"][placed.spec.expert]
        assert values.square().mean().sqrt() == pytest.approx(expected.square().mean().sqrt().item(), rel=0.5, abs=1e-6), name


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax", "mixtral"])
def test_what_no_gradient_changes_is_planned_without_gradients_and_moments(family: str) -> None:
    """MiniMax's tables of decay are a large part of its weights."""
    model = TransformersModel(config=json.loads(small_config(family).to_json_string(use_diff=False)))
    parameters = list(build_model(model, initial_state(model), (0, 3)).parameters())
    bytes_ = device_bytes(model, 16, Setup(2, "fp32", "adamw", 1, "cpu", False))
    trained = sum(each.nbytes for each in parameters if each.requires_grad)
    assert (bytes_.weights, bytes_.gradients, bytes_.moments) == (sum(each.nbytes for each in parameters), trained, 2 * trained)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ACCEPTED)
def test_a_family_can_begin_with_random_weights(family: str) -> None:
    model = TransformersModel(config=json.loads(small_config(family).to_json_string(use_diff=False)))
    assert np.isfinite(initial_state(model)).all()


def test_weights_that_transformers_gives_no_value_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformersModel(config=json.loads(small_config("qwen3_next").to_json_string(use_diff=False)))
    monkeypatch.setattr(classes_of("qwen3_next")[1], "_init_weights", lambda self, module: None)
    with pytest.raises(UserError, match=r"'qwen3_next': transformers gives model\.embed_tokens\.weight no initial"):
        initial_state(model)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", sorted(set(MOE_TYPES) - set(ACCEPTED)))
def test_any_other_family_is_refused_in_one_line(family: str) -> None:
    try:
        config = small_config(family)
    except (AttributeError, TypeError, ValueError):
        config = classes_of(family)[0]()
    with pytest.raises(UserError) as refusal:
        check_family(validated(TransformersModel, {"config": json.loads(config.to_json_string())}, lambda location: "config"))
    assert "\n" not in str(refusal.value)


@pytest.mark.long
def test_qwen3_30b_a3b_can_be_said_and_planned_without_its_memory() -> None:
    campaign = load_campaign_config(CONFIGS / "30b.yaml")
    assert isinstance(campaign.model, TransformersModel)
    check_family(campaign.model)
    config, layout = transformers_config(campaign.model), layout_of(campaign.model)
    assert (config.head_dim, config.rope_parameters["rope_theta"], config.norm_topk_prob) == (128, 1e6, True)
    expert = 48 * 3 * 768 * 2048
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 2 * 2048
    assert layout.num_experts == 128
    assert {layout.expert(number).size for number in range(128)} == {expert}
    assert layout.group("router").size == 48 * 128 * 2048
    assert layout.group("shared").size == 2 * 151936 * 2048 + 48 * attention + 2048
    assert layout.size == 30_532_122_624
    made = plan_peer(campaign, Device("cuda", 80 * 2**30), 1e9, None, "--memory")
    assert 0 < made.choice.setup.owned < 128
    assert made.choice.device.total <= 80 * 2**30
