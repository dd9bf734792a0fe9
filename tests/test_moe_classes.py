"""Every mixture-of-experts class of the installed transformers is computed right, or refused by name with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_classes import classes_of
from model_shapes import tiny_model
from moe_families import MOE_TYPES
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spes_p2p.errors import UserError
from spes_p2p.model.build import empty_model, layout_of_model
from spes_p2p.model.layout import Layout
from spes_p2p.model.partitioned import PartitionedExperts, expert_blocks

EXPERTS, HIDDEN, FFN = 4, 16, 24


def model_on_meta(config_class: Any, model_class: Any) -> nn.Module:
    """Four layers of the default shape, without memory; skips what cannot be made from its defaults."""
    try:
        config = config_class()
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:4]
        config.num_hidden_layers = 4
        with torch.device("meta"):
            model: nn.Module = model_class(config)
    except (AttributeError, TypeError, ValueError) as problem:
        pytest.skip(f"{model_class.__name__} needs more than its default configuration: {problem}")
    return model


def experts_or_reason(model: nn.Module) -> tuple[nn.Module | None, str]:
    """The first experts block, or why there is none."""
    try:
        return next(expert_blocks(model))[1], ""
    except UserError as refusal:
        return None, str(refusal)


def layout_or_reason(model: nn.Module) -> tuple[Layout | None, str]:
    """The layout, or why there is none."""
    try:
        return layout_of_model(model), ""
    except UserError as refusal:
        return None, str(refusal)


def shrunk(block: Any) -> nn.Module:
    """The same block with few and small experts, and real weights."""
    generator = torch.Generator().manual_seed(0)
    block.num_experts = EXPERTS
    block.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator) / 4)
    block.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN, generator=generator) / 4)
    block.config._experts_implementation = "eager"
    return block


def test_there_are_mixture_of_experts_classes() -> None:
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) > 50
    assert len(MOE_TYPES) > 20


@pytest.mark.sampled(15)
@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_a_class_is_computed_right_or_refused_by_name(model_type: str) -> None:
    model = model_on_meta(*classes_of(model_type))
    block, reason = experts_or_reason(model)
    if block is None:
        assert reason.split(":")[0] in {type(module).__name__ for module in model.modules()}
        assert "\n" not in reason
        return
    reference = shrunk(block)
    rows = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    mine = PartitionedExperts(reference, (0, 3), "fp32", torch.device("cpu"), lambda expert, name: rows[name][expert])
    hidden, index = torch.randn(12, HIDDEN), torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(12)])
    weights = torch.rand(12, 2)
    torch.testing.assert_close(mine(hidden, index, weights), reference(hidden, index, weights))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_what_chooses_among_experts_is_the_router_group_or_the_class_is_refused(model_type: str) -> None:
    model = model_on_meta(*classes_of(model_type))
    layout, reason = layout_or_reason(model)
    if layout is None:
        assert "\n" not in reason
        return
    blocks = dict(expert_blocks(model))
    routed = {placed.spec.name for placed in layout.tensors if placed.spec.kind == "router"}
    for name, block in blocks.items():
        layer = name.removesuffix("experts")
        beside = [n for n, _ in model.named_parameters() if n.startswith(layer) and not n.startswith(name)]
        assert any(model.get_parameter(n).ndim == 2 for n in routed.intersection(beside))
        left = [n for n in beside if n not in routed and "shared" not in n]
        assert not [n for n in left if model.get_parameter(n).shape[:1] == (block.num_experts,)]


def test_a_layer_without_a_router_is_refused() -> None:
    model = empty_model(tiny_model())
    del model.base_model.layers[1].mlp.gate
    with pytest.raises(UserError, match=r"^OlmoeSparseMoeBlock: no router beside its experts"):
        layout_of_model(model)
