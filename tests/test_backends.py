"""Backends compute the same products; stored experts on the host are the ones that are computed with."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from devices import needs_cuda
from model_shapes import tiny_model, tiny_training
from torch import Tensor

from spes_p2p.errors import UserError
from spes_p2p.model.backends import BackendName, Eager, GroupedMM, choose_backend
from spes_p2p.model.build import build_model, empty_model, exact_expert, initial_state, layout_of
from spes_p2p.model.formats import Home, StoredFormat, StoredPlace
from spes_p2p.model.partitioned import PartitionedExperts, expert_blocks
from spes_p2p.model.prefetch import BACKWARD, FORWARD, LayerPrefetcher
from spes_p2p.model.stored import Matrices, StoredMatrices
from spes_p2p.training.losses import forward_losses

CPU = torch.device("cpu")
PARITY = Path(__file__).with_name("megablocks_parity.py")


def matrices_of(stored: StoredFormat, count: int = 4, shape: tuple[int, int] = (24, 16)) -> Matrices:
    store = StoredMatrices(count, shape, stored, CPU)
    for index in range(count):
        store.write(index, torch.randn(shape))
    return store.matrices


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("ends", [[3, 3, 8, 11], [0, 0, 0, 0], [0, 0, 0, 7], [5, 5, 5, 5]], ids=str)
def test_grouped_mm_and_the_loop_agree_with_decoded_products(stored: StoredFormat, ends: list[int]) -> None:
    torch.manual_seed(0)
    weights = matrices_of(stored)
    exact = weights.codes.float() * (1 if weights.scales is None else weights.scales)
    x, g = torch.randn(ends[-1], 16), torch.randn(ends[-1], 24)
    rows = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    expected = {
        "outputs": torch.cat([x[r] @ w.t() for r, w in zip(rows, exact, strict=True)]),
        "input_gradient": torch.cat([g[r] @ w for r, w in zip(rows, exact, strict=True)]),
        "weight_gradients": torch.stack([g[r].t() @ x[r] for r in rows]),
    }
    where = torch.tensor(ends, dtype=torch.int32)
    for backend in (Eager(), GroupedMM()):
        actual = {
            "outputs": backend.outputs(x, weights, where),
            "input_gradient": backend.input_gradient(g, weights, where),
            "weight_gradients": backend.weight_gradients(g, x, where),
        }
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=f"{backend.name} {name}")


def test_experts_without_rows_have_no_gradient_where_the_product_leaves_it_undefined(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped_mm = torch.nn.functional.grouped_mm

    def undefined_where_empty(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        result = grouped_mm(a, b, offs=offs)
        result[[1, 3]] = float("nan")
        return result

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", undefined_where_empty)
    x, grad = torch.randn(11, 16), torch.randn(11, 24)
    ends = torch.tensor([3, 3, 11, 11], dtype=torch.int32)
    torch.testing.assert_close(GroupedMM().weight_gradients(grad, x, ends), Eager().weight_gradients(grad, x, ends))


def test_auto_takes_grouped_mm_where_the_sizes_allow_it() -> None:
    assert choose_backend("auto", CPU, 512, 1024).name == "grouped_mm"
    assert choose_backend("auto", CPU, 12, 1024).name == "eager"


@pytest.mark.parametrize(("wanted", "hidden_size", "expected"), [
    ("grouped_mm", 12, r"backend grouped_mm: needs hidden_size = 12 .*multiples of 8; possible here: eager"),
    ("megablocks", 512, r"backend megablocks: needs .*; possible here: grouped_mm, eager"),
    ("cutlass", 512, r"backend 'cutlass': must be one of auto, grouped_mm, eager, megablocks"),
])
def test_an_impossible_backend_is_refused_with_the_possible_ones(wanted: str, hidden_size: int, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as refusal:
        choose_backend(wanted, CPU, hidden_size, 1024)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_a_model_computes_the_same_with_either_backend() -> None:
    config = tiny_model()
    base = initial_state(config)
    tokens = torch.randint(config.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for backend in ("grouped_mm", "eager"):
        model = build_model(config, base, (0, 3), backend=backend)
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-7, msg=name)


def test_megablocks_computes_what_grouped_mm_computes() -> None:
    missing = [module for module in ("megablocks", "stk", "triton") if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (pip install --no-deps megablocks stanford-stk triton)")
    # Triton reads the variable when it is imported, which may have happened in this process.
    path = os.pathsep.join([str(PARITY.parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, str(PARITY)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@needs_cuda
@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("stored_on", ["device", "host"])
@pytest.mark.parametrize("backend", ["grouped_mm", "eager", "megablocks"])
@pytest.mark.parametrize(("top_k", "bound"), [(4, 0.05), (2, 0.3)])
def test_a_pass_on_cuda_agrees_with_the_cpu(
    top_k: int, bound: float, backend: BackendName, stored: StoredFormat, stored_on: StoredPlace
) -> None:
    """With two of four experts, rounding sends some tokens elsewhere."""
    config = tiny_model(hidden_size=128, intermediate_size=128, num_hidden_layers=4, moe_top_k=top_k)
    try:
        choose_backend(backend, torch.device("cuda"), 128, 128)
    except UserError as problem:
        pytest.skip(str(problem))
    base = initial_state(config)
    tokens = torch.randint(config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    passes = []
    for device in ("cpu", "cuda"):
        on_cuda = device == "cuda"
        model = build_model(config, base, (0, 3), stored, device, stored_on, backend if on_cuda else "eager")
        blocks = [module for module in model.modules() if isinstance(module, PartitionedExperts)]
        for _ in range(2):  # the second pass finds host-stored experts where the first one left them
            model.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=on_cuda):
                losses = forward_losses(model, blocks, tokens.to(device), tiny_training(sequence_length=32))
            losses.total.backward()
        passes.append((float(losses.total), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}))
    (expected_loss, expected), (loss, gradients) = passes
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < bound * gradient.norm(), name


# Stored on the host ---------------------------------------------------------------------------------------------------

MODEL = tiny_model(num_hidden_layers=5)
BASE = initial_state(MODEL)
LAYOUT = layout_of(MODEL)


def blocks_of(
    prefetcher: LayerPrefetcher | None, stored: StoredFormat = "int8", stored_home: Home | None = None
) -> list[PartitionedExperts]:
    """The experts of each layer, all with the same prefetcher; expert 1 is owned."""
    return [
        PartitionedExperts(block, (1,), stored, CPU, partial(exact_expert, BASE, LAYOUT, name), prefetcher=prefetcher,
                           stored_home=stored_home or ("device" if prefetcher is None else "host"))
        for name, block in expert_blocks(empty_model(MODEL))
    ]


def forward_backward(blocks: list[PartitionedExperts], checkpointing: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, MODEL.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    index, weights = torch.arange(16).remainder(4).view(8, 2), torch.full((8, 2), 0.5)
    y: Tensor = x
    for block in blocks:
        if checkpointing:
            y = y + torch.utils.checkpoint.checkpoint(block, y, index, weights, use_reentrant=False)
        else:
            y = y + block(y, index, weights)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_on_the_host_compute_the_same_bits(stored: StoredFormat, checkpointing: bool) -> None:
    expected = forward_backward(blocks_of(None, stored))
    actual = forward_backward(blocks_of(LayerPrefetcher(CPU), stored), checkpointing)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_copies_each_layer_twice_less_what_is_at_hand_at_the_turns(checkpointing: bool) -> None:
    prefetcher = LayerPrefetcher(CPU)
    blocks = blocks_of(prefetcher)
    forward_backward(blocks, checkpointing)
    before = prefetcher.copies
    forward_backward(blocks, checkpointing)
    assert prefetcher.copies - before == 2 * len(blocks) - 4


def test_the_next_layer_of_the_pass_is_copied_while_this_one_is_used() -> None:
    prefetcher = LayerPrefetcher(CPU)
    for value in range(4):
        prefetcher.replace(prefetcher.add(), {"m": Matrices(torch.full((1, 2, 2), float(value)))})
    copies = []
    forward, backward = [(layer, FORWARD) for layer in range(4)], [(layer, BACKWARD) for layer in (3, 2, 1)]
    for layer, direction in forward + backward:
        found = prefetcher.use(layer, direction)["m"].codes
        assert bool((found == layer).all())
        copies.append(prefetcher.copies)
    assert copies == [2, 3, 4, 4, 4, 5, 6]


def test_new_values_and_owners_reach_experts_on_the_host() -> None:
    prefetcher = LayerPrefetcher(CPU)
    staged, plain = blocks_of(prefetcher), blocks_of(None)
    forward_backward(staged)
    for blocks in (staged, plain):
        blocks[0].write_foreign(2, "down_proj", torch.full((32, 48), 0.1))
        for layer, block in enumerate(blocks):
            block.assign((0, 3), partial(exact_expert, BASE, LAYOUT, f"model.layers.{layer}.mlp.experts"))
        blocks[1].write_foreign(1, "gate_up_proj", torch.full((96, 32), 0.2))
    assert torch.equal(forward_backward(staged)[0], forward_backward(plain)[0])


def test_experts_that_another_rank_shares_are_copied_anew_in_each_phase() -> None:
    makers, mappers = blocks_of(None, stored_home="shared"), blocks_of(LayerPrefetcher(CPU), stored_home="absent")
    for owned in ((1,), (0, 3), (0, 3)):
        for layer, (maker, mapper) in enumerate(zip(makers, mappers, strict=True)):
            maker.write_foreign(2, "down_proj", torch.full((32, 48), 0.1 * layer + len(owned)))
            for block in (maker, mapper):
                block.assign(owned, partial(exact_expert, BASE, LAYOUT, f"model.layers.{layer}.mlp.experts"))
            mapper.map_stored(maker.shared_paths())
        assert times_mapped(makers) == 2
        found, expected = forward_backward(mappers), forward_backward(makers)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        for mapper in mappers:
            mapper.unmap_stored()
        assert times_mapped(makers) == 1


def times_mapped(makers: list[PartitionedExperts]) -> float:
    """How often this process maps each memory that they share, on average."""
    inodes = {os.stat(path).st_ino for maker in makers for path in maker.shared_paths()}
    return sum(int(line.split()[4]) in inodes for line in Path("/proc/self/maps").read_text().splitlines()) / len(inodes)


def test_experts_on_the_host_do_not_move_with_the_model() -> None:
    block = blocks_of(LayerPrefetcher(CPU))[0]
    assert not [name for name, _ in block.named_buffers() if "codes" in name or "scales" in name]
    assert sum(t.nbytes for t in block.stored_tensors()) == 3 * (3 * 32 * 48 + 4 * (96 + 32))
