"""Losses beside the cross-entropy, and the repetition filter."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import on_each_device
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import tiny_model, tiny_training
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from spes_p2p.model.build import build_model, initial_state
from spes_p2p.model.memory import LOSS_CHUNK
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training.filter import is_repetitive
from spes_p2p.training.head_loss import head_loss
from spes_p2p.training.losses import forward_losses, load_balancing_loss, next_token_loss, router_z_loss, z_loss

MODEL = tiny_model()


def routed_to(experts: list[list[int]], num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a router that surely sends token t to `experts[t]`, and its assignments."""
    logits = torch.zeros(len(experts), num_experts)
    for row, chosen in zip(logits, experts, strict=True):
        row[chosen] = 50.0
    return logits, torch.tensor(experts).flatten().bincount(minlength=num_experts)


def balance(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return float(load_balancing_loss([logits for logits, _ in layers], [counts for _, counts in layers]))


def test_balanced_routing_costs_one_and_collapsed_routing_experts_over_top_k() -> None:
    balanced = routed_to([[0, 1], [2, 3]] * 4, 4)
    collapsed = routed_to([[0, 1]] * 8, 4)
    assert balance([balanced, balanced]) == pytest.approx(1)
    assert balance([collapsed, collapsed]) == pytest.approx(4 / 2)
    assert balance([balanced, collapsed]) == pytest.approx(1.5)


def test_layers_collapsed_onto_different_experts_are_not_balanced() -> None:
    layers = [routed_to([[0, 1]] * 8, 4), routed_to([[2, 3]] * 8, 4)]
    transformers_own = load_balancing_loss_func(tuple(logits for logits, _ in layers), 4, 2)
    assert float(transformers_own) == pytest.approx(2)  # its value for balanced layers: k
    assert balance(layers) == pytest.approx(2)  # ours for collapsed ones: E / k; balanced: 1


def test_balance_gradient_moves_probability_away_from_the_busy_expert() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8, requires_grad=True)
    load_balancing_loss([logits], [torch.tensor([8, 0, 0, 0])]).backward()
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


def test_z_loss_is_the_mean_square_of_the_log_partition() -> None:
    layers = [torch.log(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])), torch.zeros(2, 3)]
    expected = np.mean([(np.log(6) ** 2 + np.log(15) ** 2) / 2, np.log(3) ** 2])
    assert float(router_z_loss(layers)) == pytest.approx(expected, rel=1e-6)


def test_cross_entropy_pairs_each_position_with_the_next_token() -> None:
    model, ids = build_model(MODEL, initial_state(MODEL), ()), torch.arange(6).view(2, 3)
    matrix = model.get_output_embeddings().weight.data.zero_()
    matrix[:32] = 100 * torch.eye(32)
    hidden = torch.zeros(2, 3, 32)
    hidden[:, :2].scatter_(2, ids[:, 1:, None], 1.0)
    assert float(next_token_loss(model, hidden, ids).cross_entropy) == pytest.approx(0, abs=1e-6)
    assert float(next_token_loss(model, 0 * hidden, ids).cross_entropy) == pytest.approx(np.log(64))


def whole_logits(hidden: Tensor, head: Tensor, targets: Tensor, z_weight: float) -> tuple[Tensor, Tensor]:
    logits = (hidden @ head.t()).float()
    return F.cross_entropy(logits, targets), z_weight * z_loss(logits)


def head_and_tokens(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator).requires_grad_()
    head = (0.5 * torch.randn(100, 16, generator=generator)).requires_grad_()
    return hidden, head, torch.randint(100, (tokens,), generator=generator)


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [1, LOSS_CHUNK, 2 * LOSS_CHUNK + 3])
def test_the_loss_in_chunks_and_its_gradients_are_those_of_the_whole_logits(tokens: int, z_weight: float) -> None:
    hidden, head, targets = head_and_tokens(tokens)
    cross_entropy, z = whole_logits(hidden, head, targets, z_weight)
    expected = torch.autograd.grad(0.25 * (cross_entropy + z), (hidden, head))
    found = head_loss(hidden, head, targets, z_weight, share=0.25)
    torch.testing.assert_close((found.cross_entropy, z_weight * found.z_loss), (cross_entropy.detach(), z.detach()))
    torch.testing.assert_close(found.total, 0.25 * (cross_entropy + z))
    actual = (*torch.autograd.grad(found.total, hidden), head.grad)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


def test_the_heads_gradient_adds_up_over_micro_batches_in_the_array_that_is_there() -> None:
    hidden, head, targets = head_and_tokens(64)
    (expected,) = torch.autograd.grad(whole_logits(hidden, head, targets, 0.1)[0], head)
    head_loss(hidden[:16], head, targets[:16], share=0.25).total.backward()
    assert head.grad is not None
    place = head.grad.data_ptr()
    head_loss(hidden[16:], head, targets[16:], share=0.75).total.backward()
    assert head.grad.data_ptr() == place
    torch.testing.assert_close(head.grad, expected, rtol=1e-5, atol=1e-8)


@on_each_device
def test_the_loss_in_chunks_computes_in_the_autocast_dtype_and_adds_up_in_float32(device: str) -> None:
    hidden, head, targets = (t.detach().to(device).requires_grad_(t.requires_grad) for t in head_and_tokens(4 * LOSS_CHUNK))
    expected = torch.autograd.grad(torch.stack(whole_logits(hidden, head, targets, 0.1)).sum(), (hidden, head))
    with torch.autocast(device, torch.bfloat16):
        (of_hidden,) = torch.autograd.grad(head_loss(hidden, head, targets, 0.1).total, hidden)
    assert head.grad is not None
    actual = (of_hidden, head.grad)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float32
        assert 1e-4 < (mine - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("training", [True, False])
def test_logits_of_more_than_a_chunk_of_tokens_are_never_there(training: bool) -> None:
    class LargestResult(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
            return result

    inputs = head_and_tokens(3 * LOSS_CHUNK)
    with LargestResult() as largest, torch.set_grad_enabled(training):
        loss = head_loss(*inputs, 0.1).total
        if training:
            loss.backward()
    assert largest.elements == LOSS_CHUNK * 100


def test_a_second_backward_pass_is_refused() -> None:
    loss = head_loss(*head_and_tokens(5)).total
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_total_is_the_cross_entropy_and_the_weighted_others() -> None:
    model = build_model(MODEL, initial_state(MODEL), (0, 3))
    blocks = [module for module in model.modules() if isinstance(module, PartitionedExperts)]
    ids = torch.arange(48).view(3, 16)
    outputs = model(input_ids=ids, output_router_logits=True)
    counts = [logits.topk(2).indices.flatten().bincount(minlength=4) for logits in outputs.router_logits]
    logits = outputs.logits[:, :-1]
    balance, router = load_balancing_loss(outputs.router_logits, counts), router_z_loss(outputs.router_logits)
    head, cross_entropy = z_loss(logits), F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    for weights in ((0.5, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.2), (0.5, 0.3, 0.2)):
        names = ("moe_loss_weight", "moe_zloss_weight", "lm_head_zloss_weight")
        losses = forward_losses(model, blocks, ids, tiny_training(**dict(zip(names, weights, strict=True))))
        auxiliary = weights[0] * balance + weights[1] * router + weights[2] * head
        torch.testing.assert_close(losses.cross_entropy, cross_entropy.detach())
        torch.testing.assert_close(losses.auxiliary, auxiliary)
        torch.testing.assert_close(losses.total, cross_entropy + auxiliary)
        assert losses.total.requires_grad


def longest_repetition(sample: list[int], max_period: int) -> int:
    """Most repetitions in a row of any pattern of 1 to `max_period` tokens, by looking at every start and length."""
    best = 0
    for period in range(1, min(max_period, len(sample) // 3) + 1):
        for start in range(len(sample)):
            stop = start + period
            while stop < len(sample) and sample[stop] == sample[stop - period]:
                stop += 1
            if stop <= len(sample):
                best = max(best, (stop - start) // period)
    return best


@settings(max_examples=4 * settings().max_examples)
@given(st.lists(st.integers(0, 1), min_size=6, max_size=24), st.integers(1, 5), st.integers(3, 8))
def test_filter_finds_the_samples_with_enough_repetitions(sample: list[int], max_period: int, min_count: int) -> None:
    expected = longest_repetition(sample, max_period) >= min_count
    assert is_repetitive(np.array([sample]), max_period, min_count).tolist() == [expected]


def test_filter_judges_each_sample_by_itself() -> None:
    distinct = np.arange(200)
    repeated = np.concatenate([np.arange(100), np.tile([7, 8, 9], 33), [5]])
    samples = np.stack([distinct, repeated, distinct])
    assert is_repetitive(samples, 13, 32).tolist() == [False, True, False]
    assert is_repetitive(samples, 13, 34).tolist() == [False, False, False]
    assert is_repetitive(samples, 2, 32).tolist() == [False, False, False]
