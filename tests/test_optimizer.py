"""AdamW whose experts come and go, and its learning rate."""

import gc
import importlib.util
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from devices import on_each_device
from model_shapes import tiny_model, tiny_training

from spes_p2p.config.campaign import parse_campaign_config
from spes_p2p.errors import UserError
from spes_p2p.model.build import build_model, exact_expert, initial_state, layout_of
from spes_p2p.model.memory import OptimizerKind, Setup, device_bytes
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training import adamw
from spes_p2p.training.adamw import make_adamw, own_share
from spes_p2p.training.interface import averaged_peers
from spes_p2p.training.moments import MOMENTUM
from spes_p2p.training.muon import Muon
from spes_p2p.training.optimizer import OwnedOptimizer
from spes_p2p.training.rates import learning_rate, ramp

MODEL = tiny_model(intermediate_size=128)  # experts' matrices are large enough for 8-bit moments
LAYOUT = layout_of(MODEL)
BASE = initial_state(MODEL)


class Training:
    """A partitioned model with its optimizer."""

    def __init__(self, owned: tuple[int, ...], kind: OptimizerKind = "adamw", device: str = "cpu", **settings):
        self.model = build_model(MODEL, BASE, owned, device=device)
        self.optimizer = OwnedOptimizer(self.model, LAYOUT, tiny_training(**settings), kind)

    def step(self, rate: float = 1e-2, gradient: float | None = None) -> bool:
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            random = torch.randn(parameter.shape, generator=generator)
            parameter.grad = random.to(parameter.device) if gradient is None else torch.full_like(parameter, gradient)
        return self.optimizer.step(rate, torch.zeros(2))

    def assign(self, owned: tuple[int, ...]) -> None:
        for name, block in self.model.named_modules():
            if isinstance(block, PartitionedExperts):
                block.assign(owned, partial(exact_expert, BASE, LAYOUT, name))
        self.optimizer.regroup(self.model)

    def values(self) -> dict[str, np.ndarray]:
        return {n: np.array(p.detach().cpu()) for n, p in self.model.named_parameters()}


def state_of(optimizer: OwnedOptimizer) -> dict[str, np.ndarray]:
    """Copies of its tensors."""
    return {name: np.array(tensor.cpu()) for name, tensor in optimizer.tensors().items()}


def test_learning_rate_warms_up_to_the_peak_and_ends_at_its_floor() -> None:
    config = tiny_training(learning_rate=0.5, warmup_steps=9, min_lr_ratio=0.1)
    assert learning_rate(0, config) == pytest.approx(0.05)
    assert learning_rate(9, config) == 0.5
    assert learning_rate(8.999, config) == pytest.approx(0.5, rel=1e-3)
    assert learning_rate((100 + 9) / 2, config) == pytest.approx(0.5 * 0.55)
    assert learning_rate(100, config) == learning_rate(1000, config) == pytest.approx(0.05)
    rates = [learning_rate(step / 4, config) for step in range(400)]
    assert rates[:37] == sorted(rates[:37])
    assert rates[36:] == sorted(rates[36:], reverse=True)
    assert learning_rate(0, tiny_training(warmup_steps=0, learning_rate=0.5)) == 0.5


def test_ramp_reaches_one_after_its_steps() -> None:
    config = tiny_training(new_owner_ramp_steps=4)
    assert [ramp(age, config) for age in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert ramp(0, tiny_training(new_owner_ramp_steps=0)) == 1


@pytest.mark.parametrize(("norms", "embeddings"), [(False, False), (True, False), (False, True), (True, True)])
def test_weight_decay_touches_what_the_config_says(norms: bool, embeddings: bool) -> None:
    training = Training((1,), decay_norm_and_bias=norms, decay_embeddings=embeddings, new_owner_ramp_steps=0)
    before = training.values()
    training.step(gradient=0.0)
    for name, value in training.values().items():
        decays = norms if "norm" in name else embeddings if "embed" in name else True
        np.testing.assert_allclose(value, before[name] * (1 - 1e-2 * 0.1) if decays else before[name], rtol=1e-6, err_msg=name)


def test_embedding_and_head_have_a_learning_rate_of_their_own_and_decay_as_the_others() -> None:
    plain, faster = (Training((1,), embedding_lr_ratio=ratio, weight_decay=0.0) for ratio in (1.0, 4.0))
    before = plain.values()
    for training in (plain, faster):
        training.step(gradient=1.0)
    for name, value in faster.values().items():
        ratio = 4 if "embed" in name or "lm_head" in name else 1
        np.testing.assert_allclose(value - before[name], ratio * (plain.values()[name] - before[name]), rtol=1e-3, err_msg=name)
    decayed, faster = (Training((1,), embedding_lr_ratio=ratio) for ratio in (1.0, 4.0))
    for training in (decayed, faster):
        training.step(gradient=0.0)
    for name, value in faster.values().items():
        np.testing.assert_allclose(value, decayed.values()[name], rtol=1e-6, err_msg=name)


def test_change_of_owners_keeps_moments_of_the_kept_and_gives_none_to_the_new() -> None:
    training = Training((0, 3))
    training.step()
    before, values = state_of(training.optimizer), training.values()
    training.assign((1, 3))
    after = state_of(training.optimizer)
    assert set(after) == {key for key in before if ".experts.0." not in key and key != "age/expert.0"} | {"age/expert.1"}
    for key in after:
        if key != "age/expert.1":
            np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    assert after["age/expert.1"] == 0
    for name, value in training.values().items():
        if ".experts.1." not in name:
            np.testing.assert_array_equal(value, values[name], err_msg=name)
        else:
            placed = LAYOUT.by_name[name]
            np.testing.assert_array_equal(value.reshape(-1), BASE[placed.start : placed.stop], err_msg=name)


def test_nothing_of_a_lost_expert_stays_in_memory() -> None:
    training = Training((0, 3))
    training.step()
    lost = weakref.ref(training.model.get_parameter("model.layers.0.mlp.experts.0.down_proj"))
    training.assign((3,))
    gc.collect()
    assert lost() is None


def test_kept_weights_step_as_if_no_owner_had_changed() -> None:
    changed, unchanged = Training((1, 3), max_grad_norm=1e9), Training((1, 3), max_grad_norm=1e9)
    for training in (changed, unchanged):
        training.step(gradient=0.3)
    changed.assign((0, 3))
    for training in (changed, unchanged):
        training.step(gradient=-0.1)
    left, right = changed.values(), unchanged.values()
    for name in left.keys() & right.keys():
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_a_new_experts_first_updates_follow_the_ramp() -> None:
    training = Training((3,), weight_decay=0.0)
    training.optimizer.skip_ramps()
    training.step()
    training.assign((0, 3))
    sizes = []
    for _ in range(6):
        before = training.values()
        training.step(gradient=1.0)
        after = training.values()
        name = "model.layers.0.mlp.experts.0.gate_up_proj"
        sizes.append(float(np.abs(after[name] - before[name]).mean()))
    assert sizes == pytest.approx([1e-2 * share for share in (0.2, 0.4, 0.6, 0.8, 1, 1)], rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    training = Training((1,))
    training.step()
    values, state = training.values(), state_of(training.optimizer)
    assert not training.step(gradient=bad)
    next(training.model.parameters()).grad = torch.ones_like(next(training.model.parameters()))
    assert not training.optimizer.step(1e-2, torch.tensor([1.0, bad]))
    for name, value in training.values().items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)
    for key, value in state_of(training.optimizer).items():
        np.testing.assert_array_equal(value, state[key], err_msg=key)


def test_gradients_are_clipped_to_the_global_norm() -> None:
    small, large = (Training((1,), eps=1e3, max_grad_norm=1.0) for _ in range(2))
    small.step(gradient=10.0)
    large.step(gradient=1000.0)
    for name, value in small.values().items():
        np.testing.assert_allclose(value, large.values()[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_state_round_trip_continues_bit_for_bit_and_ignores_what_does_not_fit() -> None:
    original, restored = Training((0, 3)), Training((0, 3))
    original.step()
    state = state_of(original.optimizer)
    for a, b in zip(restored.model.parameters(), original.model.parameters(), strict=True):
        a.detach().copy_(b.detach())
    restored.optimizer.load_state({**state, "exp_avg/unknown": np.ones(3), "age/expert.9": np.array(5)})
    for training in (original, restored):
        training.step()
    for name, value in original.values().items():
        np.testing.assert_array_equal(value, restored.values()[name], err_msg=name)
    misfit = Training((0, 3))
    misfit.optimizer.load_state({key: value.reshape(-1)[:1] if value.ndim else value for key, value in state.items()})
    assert not any(key.startswith("exp_avg/") and key.endswith("gate_up_proj") for key in state_of(misfit.optimizer))


# Muon --------------------------------------------------------------------------------------------------------------------

GATE_UP = "model.layers.0.mlp.experts.1.gate_up_proj"


def test_muon_steps_matrices_by_orthogonal_ones_of_adamws_size_and_nothing_else() -> None:
    muon, adamw = (Training((1,), optimizer=kind, weight_decay=0.0, new_owner_ramp_steps=0) for kind in ("muon", "adamw"))
    before = muon.values()
    for training in (muon, adamw):
        training.step(rate=1e-2)
    after, other = muon.values(), adamw.values()
    for name, spec in ((placed.spec.name, placed.spec) for placed in LAYOUT.tensors if placed.spec.name in after):
        matrix = spec.layer is not None and spec.kind != "router" and len(spec.shape) == 2
        assert np.array_equal(after[name], other[name]) != matrix, name
        if matrix:
            step = after[name] - before[name]
            values = np.linalg.svd(step, compute_uv=False) / (1e-2 * 0.2 * max(step.shape) ** 0.5)
            assert 0.3 < values.min() <= values.max() < 1.5, name


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=["wide", "tall"])
def test_on_a_cpu_muon_steps_as_torchs_does_in_bfloat16_but_for_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
    ours, torchs = (Muon([{"params": [each], "weight_decay": 0.1}]) for each in weights)
    for _ in range(3):
        gradient = torch.randn(shape) * torch.logspace(0, -2, shape[1])
        for each in weights:
            each.grad = gradient.clone()
        before = weights[0].detach().clone()
        ours.step([0.1])
        torchs.torch_optimizer.param_groups[0]["lr"] = 0.1
        torchs.torch_optimizer.step()
        difference = weights[0] - weights[1]
        assert 0 < difference.norm() < 0.03 * (weights[0] - before).norm()
        with torch.no_grad():
            weights[1].copy_(weights[0])
    state, other = (each.state_of(weight)[MOMENTUM] for each, weight in zip((ours, torchs), weights, strict=True))
    assert torch.equal(state, other)


def test_muon_keeps_one_moment_a_matrix_as_the_planner_says() -> None:
    training = Training((1, 3), optimizer="muon")
    training.step()
    setup = Setup(owned=2, stored="fp32", optimizer="adamw", micro_batch=1, muon=True)
    assert training.optimizer.state_bytes() == pytest.approx(device_bytes(MODEL, 16, setup).moments, rel=0.01)
    plain = Training((1, 3))
    plain.step()
    assert training.optimizer.state_bytes() < 0.7 * plain.optimizer.state_bytes()


def test_muons_momentum_survives_a_change_of_owners() -> None:
    changed, unchanged = (Training((1, 3), optimizer="muon", max_grad_norm=1e9) for _ in range(2))
    for training in (changed, unchanged):
        training.step()
    changed.assign((0, 3))
    assert f"momentum_buffer/{GATE_UP}" not in state_of(changed.optimizer)
    assert state_of(changed.optimizer)["age/expert.0"] == 0
    for training in (changed, unchanged):
        training.step(gradient=-0.1)
    left, right = changed.values(), unchanged.values()
    for name in left.keys() & right.keys():
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_muons_state_round_trip_continues_bit_for_bit_and_another_optimizers_is_not_taken() -> None:
    original, restored = (Training((0, 1), optimizer="muon") for _ in range(2))
    original.step()
    for a, b in zip(restored.model.parameters(), original.model.parameters(), strict=True):
        a.detach().copy_(b.detach())
    restored.optimizer.load_state(state_of(original.optimizer))
    adamw = Training((0, 1))
    adamw.optimizer.load_state(state_of(original.optimizer))
    assert not any(GATE_UP in key for key in state_of(adamw.optimizer))
    assert state_of(adamw.optimizer)["age/expert.1"] == 0
    for training in (original, restored):
        training.step()
    for name, value in original.values().items():
        np.testing.assert_array_equal(value, restored.values()[name], err_msg=name)


needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao)"
)


@needs_torchao
@on_each_device
def test_8bit_moments_are_small_and_step_almost_alike(device: str) -> None:
    exact, small = Training((1, 3), device=device), Training((1, 3), kind="adamw8bit", device=device)
    for training in (exact, small):
        for _ in range(3):
            training.step(gradient=None)
    setup = Setup(owned=2, stored="fp32", optimizer="adamw8bit", micro_batch=1)
    predicted = device_bytes(MODEL, 16, setup).moments
    assert small.optimizer.state_bytes() == pytest.approx(predicted, rel=0.01)
    assert small.optimizer.state_bytes() < 0.5 * exact.optimizer.state_bytes()
    name = "model.layers.0.mlp.experts.1.gate_up_proj"
    state = state_of(small.optimizer)
    assert state[f"exp_avg.codes/{name}"].dtype == np.uint8
    placed = LAYOUT.by_name[name]
    moved = exact.values()[name].reshape(-1) - BASE[placed.start : placed.stop]
    error = small.values()[name].reshape(-1) - exact.values()[name].reshape(-1)
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(moved)


@needs_torchao
@on_each_device
def test_8bit_moments_survive_a_change_of_owners(device: str) -> None:
    changed, unchanged = (Training((1, 3), kind="adamw8bit", device=device, max_grad_norm=1e9) for _ in range(2))
    for training in (changed, unchanged):
        training.step(gradient=0.3)
    before = state_of(changed.optimizer)
    changed.assign((0, 3))
    after = state_of(changed.optimizer)
    assert {key for key in before if ".experts.3." in key} == {key for key in after if ".experts.3." in key} != set()
    for key in before.keys() & after.keys():
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    for training in (changed, unchanged):
        training.step(gradient=-0.1)
    left, right = changed.values(), unchanged.values()
    for name in left.keys() & right.keys():
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    assert "age/expert.1" not in after
    assert after["age/expert.0"] == 0


@needs_torchao
@on_each_device
def test_8bit_state_round_trip_continues_bit_for_bit(device: str) -> None:
    original, restored = (Training((0, 3), kind="adamw8bit", device=device) for _ in range(2))
    original.step()
    for a, b in zip(restored.model.parameters(), original.model.parameters(), strict=True):
        a.detach().copy_(b.detach())
    restored.optimizer.load_state(state_of(original.optimizer))
    for training in (original, restored):
        training.step()
    for name, value in original.values().items():
        np.testing.assert_array_equal(value, restored.values()[name], err_msg=name)


@needs_torchao
@on_each_device
def test_a_step_that_is_not_finite_leaves_8bit_moments_alone(device: str) -> None:
    training = Training((1,), kind="adamw8bit", device=device)
    training.step()
    state = state_of(training.optimizer)
    assert not training.step(gradient=float("nan"))
    for key, value in state_of(training.optimizer).items():
        np.testing.assert_array_equal(value, state[key], err_msg=key)


@needs_torchao
def test_8_bit_moments_of_what_is_not_stepped_are_not_touched() -> None:
    """Rank 0 of several has those of other ranks' layers in main memory, and would read all of them in each step."""
    parameters = [torch.nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    optimizer = make_adamw("adamw8bit", [{"params": parameters, "weight_decay": 0.0, "batches": 1.0}], (0.9, 0.999), 1e-8)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    optimizer.step([1.0])
    untouched = optimizer.torch_optimizer.state[parameters[1]]["exp_avg_sq"].codes.zero_()
    parameters[1].grad = None
    optimizer.step([1.0])
    assert not untouched.any()


@needs_torchao
@on_each_device
@pytest.mark.parametrize("loads", [False, True], ids=["", "from a checkpoint that has zeros"])
def test_no_weight_leaps_whose_second_moment_is_too_small_for_8_bits(loads: bool, device: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4096, device=device))
    group = {"params": [parameter], "weight_decay": 0.0, "batches": 1.0}
    optimizer = make_adamw("adamw8bit", [group], (0.9, 0.999), 1e-8)
    parameter.grad = torch.tensor([1.0, 1e-4], device=device).repeat(2048)
    optimizer.step([1.0])
    if loads:
        arrays = {name: np.array(tensor.cpu()) for name, tensor in optimizer.state_of(parameter).items()}
        arrays["exp_avg_sq.codes"][1::2] = 0
        assert optimizer.load_state_of(parameter, arrays, parameter.device)
    before = parameter.detach().clone()
    parameter.grad.zero_()
    optimizer.step([1.0])
    moved = (parameter.detach() - before).abs()
    assert moved.min() > 0
    assert moved.max() < 1


@needs_torchao
def test_moments_of_the_other_kind_are_not_taken_and_the_expert_ramps_up_again() -> None:
    exact, small = Training((3,)), Training((3,), kind="adamw8bit")
    for training in (exact, small):
        training.step()
    exact.optimizer.load_state(state_of(small.optimizer))
    fresh = Training((3,))
    fresh.optimizer.load_state(state_of(small.optimizer))
    assert state_of(fresh.optimizer)["age/expert.3"] == 0
    assert "exp_avg/model.layers.0.mlp.experts.3.down_proj" not in state_of(fresh.optimizer)


@needs_torchao
def test_moments_in_float32_take_no_more_memory_than_8_bits_where_these_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CONVERTED_ELEMENTS", 1024)
    exact, small, restarted = Training((3,)), Training((3,), kind="adamw8bit"), Training((3,), kind="adamw8bit")
    for training in (exact, small):
        training.step()
    restarted.optimizer.load_state(state_of(exact.optimizer))
    assert restarted.optimizer.shapes() == small.optimizer.shapes() != exact.optimizer.shapes()
    expected = exact.optimizer.moments()
    for name, moment in restarted.optimizer.moments(in_full=True).items():
        values = moment.dequantize() if hasattr(moment, "codes") else moment
        torch.testing.assert_close(values, expected[name], rtol=0.1, atol=0.01 * expected[name].abs().max().item())


def test_an_optimizer_that_is_not_installed_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"optimizer adamw8bit: torchao is not installed; pip install .*; possible here: adamw"):
        Training((1,), kind="adamw8bit")


# The second moment of several peers' batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [2, 4, 100])
def test_the_second_moment_mixes_squares_of_gradient_and_first_moment(batches: int) -> None:
    beta1, beta2, share = 0.9, 0.95, own_share(batches, 0.9)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = make_adamw("adamw", [{"params": [parameter], "batches": batches}], (beta1, beta2), 1e-8)
    first, second = np.zeros(3), np.zeros(3)
    for step in range(1, 30):
        gradient = np.random.default_rng(step).normal(size=3) * np.array([1, 1e-3, step % 7 == 0])
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step([1e-3])
        first = beta1 * first + (1 - beta1) * gradient
        unbiased = first / (1 - beta1**step)
        second = beta2 * second + (1 - beta2) * (share * gradient**2 + (1 - share) * unbiased**2)
        found = optimizer.torch_optimizer.state[parameter]["exp_avg_sq"].numpy()
        np.testing.assert_allclose(found, second, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_of_noise_the_second_moment_is_that_of_the_larger_batch_and_of_a_constant_its_square(batches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(2, 20_000))
    optimizer = make_adamw("adamw", [{"params": [parameter], "batches": batches}], (0.9, 0.99), 1e-8)
    for _ in range(400):
        parameter.grad = torch.stack([torch.randn(20_000, generator=generator), torch.full((20_000,), 0.5)])
        optimizer.step([1e-3])
    noise, constant = optimizer.torch_optimizer.state[parameter]["exp_avg_sq"].mean(dim=1) / (1 - 0.99**400)
    assert noise.item() == pytest.approx(1 / batches, rel=0.1)
    assert constant.item() == pytest.approx(0.25, rel=1e-3)


def test_owned_experts_keep_the_second_moment_of_their_own_batch() -> None:
    one, four = (Training((1,), second_moment_peers=peers) for peers in (1, 4))
    for training in (one, four):
        for gradient in (1.0, -1.0, None):
            training.step(gradient=gradient)
    ones, fours = state_of(one.optimizer), state_of(four.optimizer)
    for name, value in ones.items():
        assert np.array_equal(value, fours[name]) == (".experts." in name or not name.startswith("exp_avg_sq/")), name


def test_on_auto_the_second_moment_is_that_of_as_many_peers_as_train() -> None:
    auto, four = (Training((1,), second_moment_peers=peers) for peers in ("auto", 4))
    for peers in (4.0, 4.0, 1.0, 2.5):
        auto.optimizer.average_over(peers)
        for _, group in auto.optimizer._groups():
            assert group["batches"] == (1.0 if group["name"].startswith("expert.") else peers)
    auto.optimizer.average_over(4.0)
    for training in (auto, four):
        four.optimizer.average_over(9.0)  # a number that is set stays
        for gradient in (1.0, -1.0, None):
            training.step(gradient=gradient)
    ones, fours = state_of(auto.optimizer), state_of(four.optimizer)
    assert all(np.array_equal(value, fours[name]) for name, value in ones.items())


@pytest.mark.parametrize(("steps", "peers"), [([], 1), ([0, 7], 1), ([5, 5, 5, 0], 3), ([10, 10], 2), ([30, 10], 1.6)])
def test_peers_count_by_how_much_noise_they_average_away(steps: list[int], peers: float) -> None:
    assert averaged_peers(steps) == pytest.approx(peers)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_moments_in_8_bits_stay_those_of_one_peer_on_auto() -> None:
    auto, one = (Training((1,), "adamw8bit", second_moment_peers=peers) for peers in ("auto", 1))
    auto.optimizer.average_over(4.0)
    for training in (auto, one):
        for gradient in (1.0, -1.0, None):
            training.step(gradient=gradient)
    ones = state_of(one.optimizer)
    assert all(np.array_equal(value, ones[name]) for name, value in state_of(auto.optimizer).items())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_moments_in_8_bits_are_refused_where_they_cannot_be_those_of_several_peers() -> None:
    with pytest.raises(UserError, match="adamw8bit: does not support the campaign's"):
        Training((1,), "adamw8bit", second_moment_peers=4)


def test_a_wrong_number_of_peers_is_refused_naming_both_right_answers() -> None:
    message = r"training\.second_moment_peers = 'many': must be auto or a whole number greater than 0$"
    with pytest.raises(UserError, match=message):
        parse_campaign_config(
            {
                "name": "x", "data": {"manifest": "m", "tokenizer": "t"},
                "model": {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8,
                          "moe_num_experts": 2, "moe_top_k": 1},
                "training": {"sequence_length": 8, "batch_size": 1, "total_steps": 2, "sync_steps": 1, "learning_rate": 1e-3,
                             "second_moment_peers": "many"},
            },
            "test",
        )
