"""Layout, first state and model: three views of the same tensors."""

import numpy as np
import pytest
import torch
from model_shapes import tiny_model
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM

from spes_p2p.config.model import TransformersModel
from spes_p2p.errors import UserError
from spes_p2p.model.build import build_model, initial_state, layout_of, layout_of_model
from spes_p2p.model.shape import shape_of
from spes_p2p.model.sizes import sizes_of
from spes_p2p.testing.plain_model import plain_model

ARCHITECTURES = ("olmoe", "qwen3_moe")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_layout_covers_each_weight_once(architecture: str, tied: bool) -> None:
    config = tiny_model(architecture=architecture, tie_word_embeddings=tied)
    layout = layout_of(config)
    model = plain_model(config, initial_state(config))
    assert layout.size == sum(p.numel() for p in model.parameters())
    assert [t.start for t in layout.tensors[1:]] == [t.stop for t in layout.tensors[:-1]]
    assert ("lm_head.weight" in layout.by_name) is not tied
    assert layout.group("router").size == config.num_hidden_layers * config.moe_num_experts * config.hidden_size
    assert layout.num_experts == config.moe_num_experts
    names = [t.spec.name for t in layout.tensors_of(layout.expert(1))]
    assert names == [f"model.layers.{n}.mlp.experts.1.{m}_proj" for n in range(2) for m in ("gate_up", "down")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("low_rank", [0, 8])
def test_sizes_known_by_formula_are_those_of_transformers(architecture: str, tied: bool, low_rank: int) -> None:
    config = tiny_model(architecture=architecture, tie_word_embeddings=tied, moe_low_rank=low_rank, num_key_value_heads=1)
    assert sizes_of(config).tensors == layout_of(config).tensors
    whole = TransformersModel(config=config.config_json, moe_low_rank=low_rank)
    assert shape_of(config) == shape_of(whole)


def test_a_model_that_is_too_large_is_refused_before_it_is_built() -> None:
    config = tiny_model(hidden_size=2**19, vocab_size=2**22, intermediate_size=2**10)
    with pytest.raises(UserError, match=r"model: \d+ parameters: must be at most"):
        sizes_of(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_first_state_is_seeded_and_shaped_like_transformers_own(architecture: str) -> None:
    config = tiny_model(architecture=architecture, initializer_range=0.05)
    state = initial_state(config)
    assert state.dtype == np.float32
    np.testing.assert_array_equal(state, initial_state(config))
    assert not np.array_equal(state, initial_state(config.model_copy(update={"seed": 1})))
    for placed in layout_of(config).tensors:
        values = state[placed.start : placed.stop]
        if "norm" in placed.spec.name:
            assert (values == 1).all()
        else:
            assert values.std() == pytest.approx(0.05, rel=0.2), placed.spec.name


def test_first_state_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    initial_state(tiny_model())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_built_model_has_everything_real_and_ties_what_is_tied(architecture: str, tied: bool) -> None:
    config = tiny_model(architecture=architecture, tie_word_embeddings=tied)
    model = build_model(config, initial_state(config), (0, 3))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    foreign = [layout_of(config).expert(e) for e in range(4) if e not in (0, 3)]
    assert sum(p.numel() for p in model.parameters()) == layout_of(config).size - sum(g.size for g in foreign)


def test_other_plain_layouts_have_a_layout_too() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                                 num_attention_heads=2, num_key_value_heads=2, num_local_experts=4))
    layout = layout_of_model(model)
    assert layout.size == sum(p.numel() for p in model.parameters())
    assert layout.num_experts == 4
    assert layout.group("router").size == 2 * 4 * 16


def test_other_layouts_are_refused_by_name_with_the_reason() -> None:
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                               num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, head_dim=8))
    with pytest.raises(UserError, match=r"GptOssExperts.*transposed.*interleaved.*biases") as refusal:
        layout_of_model(model)
    assert "\n" not in str(refusal.value)
    with torch.device("meta"):
        llama = Llama4ForCausalLM(Llama4TextConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                                   num_attention_heads=2, num_key_value_heads=2, num_local_experts=4))
    with pytest.raises(UserError, match=r"Llama4TextExperts: .* its matrices are not \[E, 2F, H\] and \[E, H, F\]"):
        layout_of_model(llama)
    with pytest.raises(UserError, match="Linear: has no experts"):
        layout_of_model(torch.nn.Linear(2, 2))


def test_a_partitioned_model_refuses_to_be_saved_as_if_it_were_whole() -> None:
    config = tiny_model()
    with pytest.raises(RuntimeError, match="export the base"):
        build_model(config, initial_state(config), (0,)).state_dict()


def test_unknown_stored_format_is_refused_with_the_possible_ones() -> None:
    config = tiny_model()
    with pytest.raises(UserError, match=r"fp8.*fp32, bf16, int8"):
        build_model(config, initial_state(config), (0,), "fp8")  # type: ignore[arg-type]
