"""The recipes are SPES's, field by field; what they need beyond transformers' defaults does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_shapes import tiny_model, tiny_training
from safetensors.torch import save_file

from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.config.model import ModelConfig
from spes_p2p.data.mix import whole_weights
from spes_p2p.model.build import exact_tensor, initial_state, layout_of, transformers_config
from spes_p2p.model.checkpoint import Checkpoint
from spes_p2p.model.upcycle import upcycled_state
from spes_p2p.training.rates import learning_rate

ROOT = Path(__file__).parents[1]

SPES: dict[str, dict[str, Any]] = {
    "1b": {
        "model.hidden_size": 768, "model.num_hidden_layers": 12, "model.moe_num_experts": 16, "model.moe_top_k": 2,
        "model.rope_theta": 5e5, "model.vocab_size": 151665, "training.learning_rate": 5e-4, "training.warmup_steps": 2000,
        "training.total_steps": 50_000, "training.sync_steps": 100, "merge.merge_alpha_start": 0.01,
        "merge.merge_decay_steps": 10_000,
    },
    "7b": {
        "model.hidden_size": 2048, "model.num_hidden_layers": 16, "model.moe_num_experts": 32, "model.moe_top_k": 4,
        "model.rope_theta": 32e3, "model.vocab_size": 151665, "training.learning_rate": 4e-4, "training.warmup_steps": 2000,
        "training.total_steps": 500_000, "training.batch_size": 1024, "merge.merge_alpha_start": 0.01,
    },
    "9b": {
        "model.hidden_size": 2048, "model.num_hidden_layers": 28, "model.moe_num_experts": 8, "model.moe_top_k": 2,
        "model.norm_topk_prob": True, "model.num_key_value_heads": 8, "training.learning_rate": 1e-4,
        "training.warmup_steps": 1000, "training.total_steps": 200_000, "training.decay_steps": 100_000,
        "training.batch_size": 256, "merge.merge_alpha_start": 0.05, "merge.merge_decay_steps": 20_000,
        "start.upcycle": "spes",
    },
}
"""What SPES's files say (docs/comparison.md)."""
MIXES = {
    "7b": {"ultra-fineweb": 1040, "slimpajama": 442, "starcoder": 107, "arxiv": 12, "pes2o": 8, "algebraic-stack": 7,
           "open-web-math": 6},
    "9b": {"nemotron-cc": 821, "nemotron-math": 212, "nemotron-code": 154, "nemotron-sft": 108},
}
"""The files of each source there."""
FILES = {"7b": 1622, "9b": 1295}


@pytest.mark.parametrize("name", SPES)
def test_a_recipe_says_what_speses_files_say(name: str) -> None:
    config = load_campaign_config(ROOT / "configs" / f"{name}.yaml")
    for field, value in SPES[name].items():
        section, _, key = field.partition(".")
        assert getattr(getattr(config, section), key) == value, field
    training = config.training
    assert (training.beta1, training.beta2, training.eps, training.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (training.decay_norm_and_bias, training.decay_embeddings, training.max_grad_norm) == (True, True, 1.0)
    assert (training.moe_loss_weight, training.moe_zloss_weight, training.lm_head_zloss_weight) == (0.01, 0.001, 1e-5)
    assert (training.min_lr_ratio, config.merge.merge_interval, config.merge.merge_top_k) == (0.1, 500, 4)
    assert transformers_config(config.model).rms_norm_eps == 1e-6
    assert {source.name: source.weight for source in config.data.train} == MIXES.get(name, {})
    if config.data.train:
        assert sum(whole_weights([source.weight for source in config.data.train])) == FILES[name]
    if config.start is None:
        assert isinstance(config.model, ModelConfig)
        assert (config.model.init_cutoff_factor, config.model.initializer_range) == (3.0, 0.02)


def test_cut_off_weights_are_normal_up_to_the_bound() -> None:
    changes: dict[str, Any] = {"hidden_size": 128, "initializer_range": 0.05}
    state = initial_state(tiny_model(init_cutoff_factor=2.0, **changes))
    np.testing.assert_array_equal(state, initial_state(tiny_model(init_cutoff_factor=2.0, **changes)))
    for placed in layout_of(tiny_model(**changes)).tensors:
        values = state[placed.start : placed.stop]
        if "norm" in placed.spec.name:
            assert (values == 1).all()
        else:
            assert np.abs(values).max() <= 0.1
            # Of a normal distribution cut off at 2 deviations, the deviation is 0.880.
            assert values.std() == pytest.approx(0.880 * 0.05, rel=0.05), placed.spec.name
    assert np.abs(initial_state(tiny_model(**changes))).max() > 0.1


def test_without_the_new_fields_a_model_is_what_it_was() -> None:
    assert "rms_norm_eps" not in tiny_model().config_json
    assert transformers_config(tiny_model()).rms_norm_eps == 1e-5
    assert transformers_config(tiny_model(rms_norm_eps=1e-6)).rms_norm_eps == 1e-6
    assert transformers_config(tiny_model(architecture="qwen3_moe")).rms_norm_eps == 1e-6


def test_the_learning_rate_stays_at_its_final_value_after_the_decay() -> None:
    config = tiny_training(total_steps=200, decay_steps=100, warmup_steps=10, learning_rate=1.0)
    half = tiny_training(total_steps=100, warmup_steps=10, learning_rate=1.0)
    for step in (0, 10, 50, 99):
        assert learning_rate(step, config) == learning_rate(step, half)
    assert learning_rate(100, config) == learning_rate(199, config) == pytest.approx(0.1)


def test_a_decay_within_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="must be greater than warmup_steps = 10"):
        tiny_training(decay_steps=10, warmup_steps=10)


def test_a_head_of_its_own_starts_as_a_tied_dense_models_embedding(tmp_path: Path) -> None:
    model = tiny_model(architecture="qwen3_moe")
    layout, tensors = layout_of(model), {}
    for placed in layout.tensors:
        name = placed.spec.name
        if placed.spec.expert is None and placed.spec.kind != "router" and name != "lm_head.weight":
            tensors[name] = torch.randn(placed.spec.shape)
    for layer in range(2):
        for matrix, shape in (("gate_proj", (48, 32)), ("up_proj", (48, 32)), ("down_proj", (32, 48))):
            tensors[f"model.layers.{layer}.mlp.{matrix}.weight"] = torch.randn(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": True}))
    state = np.empty(layout.size, np.float32)
    upcycled_state(model, Checkpoint(tmp_path), "spes", state)
    head, embedding = (exact_tensor(state, layout, name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(head, embedding)
