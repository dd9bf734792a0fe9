"""The partitioned experts block computes what transformers' block computes, and nothing for foreign experts."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from devices import on_each_device
from model_shapes import tiny_model
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from spes_p2p.config.model import ModelConfig
from spes_p2p.model.backends import GroupedMM
from spes_p2p.model.build import build_model, initial_state, layout_of
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.trainer import checkpoint_activations

OWNED = [(), (2,), (0, 3), (0, 1, 2, 3)]


def ids(config: ModelConfig, samples: int = 3, length: int = 16) -> Tensor:
    return torch.randint(config.vocab_size, (samples, length), generator=torch.Generator().manual_seed(0))


def eager(config: ModelConfig, base: np.ndarray) -> nn.Module:
    model = plain_model(config, base)
    model.set_experts_implementation("eager")
    return model


def reference_gradient(model: nn.Module, name: str) -> Tensor:
    """The plain model's gradient of a tensor of the layout: an expert's is a row of the fused one."""
    block, _, matrix = name.rpartition(".")
    fused, _, expert = block.rpartition(".")
    parameters = dict(model.named_parameters())
    gradient = parameters[f"{fused}.{matrix}" if expert.isdigit() else name].grad
    assert gradient is not None
    return gradient[int(expert)] if expert.isdigit() else gradient


def assert_same_gradients(model: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        expected = reference_gradient(reference, name)
        torch.testing.assert_close(parameter.grad, expected, msg=partial("{}: {}".format, name), **tolerance)


@pytest.mark.parametrize("architecture", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize("owned", OWNED, ids=str)
def test_equals_transformers_eager_block(architecture: str, owned: tuple[int, ...]) -> None:
    config = tiny_model(architecture=architecture, norm_topk_prob=architecture == "qwen3_moe")
    base = initial_state(config)
    reference, model = eager(config, base), build_model(config, base, owned)
    tokens = ids(config)
    expected = reference(input_ids=tokens, labels=tokens, output_router_logits=True)
    actual = model(input_ids=tokens, labels=tokens, output_router_logits=True)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
    expected.loss.backward()
    actual.loss.backward()
    assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)


def test_equals_mixtrals_block_with_every_gradient() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    reference = MixtralExperts(config)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.1)
    rows = {name: p.detach() for name, p in reference.named_parameters()}
    block = PartitionedExperts(reference, (0, 3), "fp32", torch.device("cpu"), lambda e, name: rows[name][e])
    inputs = [(torch.randn(8, 32).requires_grad_(), torch.rand(8, 2).requires_grad_()) for _ in range(2)]
    for mine, theirs in zip(*inputs, strict=True):
        theirs.data.copy_(mine.data)
    index = torch.randint(4, (8, 2))
    outputs = [b(hidden, index, weights) for b, (hidden, weights) in zip((block, reference), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for name, parameter in block.named_parameters():
        expert, _, matrix = name.partition(".")
        torch.testing.assert_close(parameter.grad, reference.get_parameter(matrix).grad[int(expert)], msg=name)


def test_foreign_experts_have_neither_parameters_nor_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_model()
    groups: list[int] = []
    outer = GroupedMM.weight_gradients

    def counted(backend: GroupedMM, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        groups.append(len(ends))
        return outer(backend, grad, x, ends)

    monkeypatch.setattr(GroupedMM, "weight_gradients", counted)
    model = build_model(config, initial_state(config), (1,))
    tokens = ids(config)
    model(input_ids=tokens, labels=tokens).loss.backward()
    experts = {name.split(".experts.")[1] for name, _ in model.named_parameters() if ".experts." in name}
    assert experts == {"1.gate_up_proj", "1.down_proj"}
    assert groups == [1] * 4  # two matrices in each of two layers, one expert in each
    assert not any(buffer.requires_grad for buffer in model.buffers())


@pytest.mark.parametrize(("stored", "error"), [("bf16", 5e-3), ("int8", 2e-2)])
def test_stored_formats_stay_within_their_error_and_size(stored: StoredFormat, error: float) -> None:
    config = tiny_model()
    base = initial_state(config)
    hidden = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(1))
    index = torch.arange(128).remainder(4).view(64, 2)
    weights = torch.full((64, 2), 0.5)
    exact, quantised = (build_model(config, base, (0,), s).model.layers[0].mlp.experts for s in ("fp32", stored))
    expected, actual = exact(hidden, index, weights), quantised(hidden, index, weights)
    assert 0 < (actual - expected).norm() / expected.norm() < error
    codes = sum(b.nbytes for n, b in quantised.named_buffers() if n.endswith("codes"))
    assert codes == 3 * 3 * 32 * 48 * {"bf16": 2, "int8": 1}[stored]


@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_decoded_matrices_are_not_kept_for_the_backward_pass(stored: StoredFormat) -> None:
    config = tiny_model()
    block = build_model(config, initial_state(config), (0,), stored).model.layers[0].mlp.experts
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hidden = torch.randn(8, config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(hidden, torch.arange(16).remainder(4).view(8, 2), torch.full((8, 2), 0.5))
    assert not any(t.is_floating_point() and t.dim() == 3 and t.shape[0] == 3 for t in saved)


@on_each_device
@pytest.mark.parametrize("stored", ["fp32", "int8"])
def test_bf16_autocast_is_close_to_float32_and_gives_float32_gradients(stored: StoredFormat, device: str) -> None:
    config = tiny_model()
    base = initial_state(config)
    reference, model = eager(config, base), build_model(config, base, (0, 3), stored, device)
    tokens = ids(config)
    reference(input_ids=tokens, labels=tokens).loss.backward()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
    loss.backward()
    bound = 0.1 if device == "cpu" else 0.3  # where rounding sends a token to another expert
    for name, parameter in model.named_parameters():
        expected = reference_gradient(reference, name)
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad.cpu() - expected).norm() < bound * expected.norm() + 1e-4, name


def test_autocast_reaches_the_grouped_gemms() -> None:
    config = tiny_model()
    block = block_of(config, initial_state(config), (0, 3))
    arguments = torch.randn(8, config.hidden_size), torch.arange(16).remainder(4).view(8, 2), torch.full((8, 2), 0.5)
    exact = block(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = block(*arguments)
    assert rounded.dtype == exact.dtype
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 2e-2


@pytest.mark.parametrize("chosen", [(0, 3), (1, 2)], ids=["only owned", "only foreign"])
def test_experts_that_no_token_chose_get_a_gradient_of_zero(chosen: tuple[int, int]) -> None:
    config = tiny_model()
    block = block_of(config, initial_state(config), (0, 3))
    hidden = torch.randn(8, config.hidden_size, requires_grad=True)
    block(hidden, torch.tensor([chosen] * 8), torch.full((8, 2), 0.5)).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().min() > 0
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) is (chosen == (0, 3)), name


def test_checkpointing_keeps_the_routers_auxiliary_gradient_and_the_counts() -> None:
    config = tiny_model()
    base = initial_state(config)
    plain, checkpointed = build_model(config, base, (0, 3)), build_model(config, base, (0, 3))
    checkpoint_activations(checkpointed)
    tokens = ids(config)
    for model in (plain, checkpointed):
        model.train()
        outputs = model.base_model(input_ids=tokens, use_cache=False, output_router_logits=True)
        torch.stack([logits.logsumexp(-1).square().mean() for logits in outputs.router_logits]).mean().backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)
    for a, b in zip(plain.model.layers, checkpointed.model.layers, strict=True):
        assert a.mlp.experts.routed.tolist() == b.mlp.experts.routed.tolist()


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    config = tiny_model()
    base = initial_state(config)
    whole, parts = build_model(config, base, (0, 3)), build_model(config, base, (0, 3))
    tokens = ids(config, samples=4)
    whole(input_ids=tokens, labels=tokens).loss.backward()
    for half in tokens.split(2):
        (parts(input_ids=half, labels=half).loss / 2).backward()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_gradients_of_owned_experts_are_rows_of_one_array_to_which_later_passes_add() -> None:
    config = tiny_model()
    model = build_model(config, initial_state(config), (0, 2))
    block = next(module for module in model.modules() if isinstance(module, PartitionedExperts))
    parameters = [block.get_parameter(f"{expert}.down_proj") for expert in block.owned]
    tokens = ids(config, samples=4)

    def gradients() -> list[Tensor]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    once = [each.clone() for each in gradients()]
    twice = gradients()
    assert len({each.untyped_storage().data_ptr() for each in twice}) == 1
    torch.testing.assert_close(twice, [2 * each for each in once])
    parameters[0].grad, parameters[1].grad = None, twice[1].clone()
    torch.testing.assert_close(gradients(), [once[0], 3 * once[1]])


def test_counts_are_the_routers_assignments() -> None:
    config = tiny_model()
    model = build_model(config, initial_state(config), (1,))
    tokens = ids(config)
    logits = model(input_ids=tokens, output_router_logits=True).router_logits
    for layer, chosen in zip(model.model.layers, logits, strict=True):
        expected = chosen.softmax(-1).topk(config.moe_top_k).indices.flatten().bincount(minlength=4)
        assert layer.mlp.experts.routed.tolist() == expected.tolist()


def block_of(config: ModelConfig, base: np.ndarray, owned: tuple[int, ...], stored: str = "fp32") -> PartitionedExperts:
    block = build_model(config, base, owned, stored).model.layers[0].mlp.experts  # type: ignore[arg-type]
    assert isinstance(block, PartitionedExperts)
    return block


def rows_of(config: ModelConfig, base: np.ndarray) -> Callable[[int, str], Tensor]:
    placed = layout_of(config).by_name

    def rows(expert: int, matrix: str) -> Tensor:
        at = placed[f"model.layers.0.mlp.experts.{expert}.{matrix}"]
        return torch.from_numpy(base[at.start : at.stop].copy()).view(at.spec.shape)

    return rows


@pytest.mark.parametrize("before", OWNED, ids=str)
@pytest.mark.parametrize("after", [*OWNED, (1, 2)], ids=str)
@pytest.mark.parametrize("stored", ["fp32", "int8"])
@pytest.mark.sampled(14)
def test_after_a_change_of_owners_the_block_is_as_if_built_so(
    before: tuple[int, ...], after: tuple[int, ...], stored: str
) -> None:
    config = tiny_model()
    base = initial_state(config)
    block, expected = block_of(config, base, before, stored), block_of(config, base, after, stored)
    block.assign(after, rows_of(config, base))
    assert block.owned == after
    assert {n: p.tolist() for n, p in block.named_parameters()} == {n: p.tolist() for n, p in expected.named_parameters()}
    hidden = torch.randn(8, config.hidden_size, requires_grad=True)
    arguments = hidden, torch.arange(16).remainder(4).view(8, 2), torch.full((8, 2), 0.5)
    assert torch.equal(block(*arguments), expected(*arguments))


def test_a_kept_expert_keeps_its_parameters_and_trained_values() -> None:
    config = tiny_model()
    base = initial_state(config)
    block = block_of(config, base, (0, 3))
    kept = block.get_parameter("3.down_proj")
    kept.detach().add_(1)
    values = kept.detach().clone()
    block.assign((1, 2, 3), rows_of(config, base))
    assert block.get_parameter("3.down_proj") is kept
    assert torch.equal(kept, values)
    hidden, index, weights = torch.ones(1, config.hidden_size), torch.tensor([[3, 1]]), torch.ones(1, 2)
    before = block(hidden, index, weights)
    kept.detach().mul_(2)
    assert not torch.equal(block(hidden, index, weights), before)  # the Parameter is what the GEMM reads


def test_moving_or_copying_the_module_keeps_parameters_and_gemm_together() -> None:
    config = tiny_model()
    hidden, index, weights = torch.ones(1, config.hidden_size), torch.tensor([[0, 1]]), torch.ones(1, 2)
    for change in (copy.deepcopy, lambda block: block.to(torch.float64).to(torch.float32)):
        block = change(block_of(config, initial_state(config), (0,)))
        before = block(hidden, index, weights)
        block.get_parameter("0.down_proj").detach().zero_()
        assert not torch.equal(block(hidden, index, weights), before)
