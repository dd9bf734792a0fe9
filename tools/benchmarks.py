"""Measure the cost of a peer's training. Each comparison is one run: interleaved rounds, medians, ratios within a round.

On a CPU, seconds are CPU time of this process, so that a busy machine disturbs less; on CUDA they are wall time.

./tools/bench experts   one layer's experts, forward + backward: partitioned, transformers', and SPES's concatenation
./tools/bench memory    counted bytes of tensors against the planner's formula
./tools/bench step      a whole local step: partitioned with its options, and the same model trained whole
./tools/bench step --config configs/7b.yaml --cap 24GiB --device cuda
                        the step that the planner chooses for this much memory, which allocations cannot exceed
./tools/bench cuda      all of these on a CUDA device, and the tests that need one (cuda_benchmark.py)
./tools/bench forms|round|link|fanout|storm|coordinator|codecs|hostile|open|state|startup|simulator
                        others, each with a --help of its own
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_json import parser_of, tell
from torch import Tensor, nn
from torch.nn.utils import parametrize

from spes_p2p.campaign.free_memory import measured
from spes_p2p.campaign.room import Device, find_room
from spes_p2p.config.campaign import CampaignConfig, load_campaign_config, parse_campaign_config
from spes_p2p.config.quantities import parse_bytes
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.backends import BackendName, choose_backend
from spes_p2p.model.build import State, build_model, initial_state, layout_of
from spes_p2p.model.flops import peak_flops, training_flops_per_token
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.memory import DeviceKind, OptimizerKind, Setup, device_bytes
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.model.shape import shape_of
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.device import device_name
from spes_p2p.training.interface import Phase
from spes_p2p.training.losses import forward_losses
from spes_p2p.training.optimizer import OwnedOptimizer
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer, checkpoint_activations

Work = Callable[[], None]
Report = dict[str, Any]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("experts", "memory", "step"))
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, at least 5 (default 9)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu, one thread")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="experts: sizes of the layer (default small)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="step: a campaign's model instead of the built-in one")
    parser.add_argument("--cap", metavar="SIZE", help="step: memory to plan with and, on CUDA, to allocate at most (24GiB)")
    parser.add_argument(
        "--micro-batches", type=int, default=2, metavar="N", help="step with --config: micro-batches of a step (default 2)")
    arguments = parser.parse_args()
    if arguments.micro_batches < 1:
        parser.error(f"--micro-batches {arguments.micro_batches}: a step has at least one")
    if arguments.rounds < 5:
        parser.error(f"--rounds {arguments.rounds}: a median of fewer than 5 says little")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if (arguments.config is None) is not (arguments.cap is None) or (arguments.config and arguments.what != "step"):
        parser.error("--config and --cap go together, with step")
    if arguments.what != "experts" and arguments.shape != "small":
        parser.error("--shape goes with experts")
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    try:
        if arguments.what == "experts":
            report = bench_experts(arguments.rounds, device, SHAPES[arguments.shape])
        elif arguments.config is None:
            report = {"memory": bench_memory, "step": bench_step}[arguments.what](arguments.rounds, device)
        else:
            cap = parse_bytes(arguments.cap, "--cap")
            config = load_campaign_config(arguments.config)
            report = bench_capped_step(config, cap, arguments.rounds, device, arguments.micro_batches)
    except UserError as error:
        parser.error(str(error))
    report["environment"] = environment(arguments.device)
    tell(report, arguments.json)
    return 0


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer's experts and of their input."""

    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    tokens: int


SHAPES = {"small": Shape(512, 1024, 16, 2, 4096), "7b": Shape(2048, 2048, 32, 4, 8192)}
"""7b: a layer of configs/7b.yaml with two of its micro-batches."""


def bench_experts(rounds: int, device: torch.device, shape: Shape) -> Report:
    """Measure forward + backward of one block: transformers', concatenated, and partitioned with a quarter or one owned."""
    config = campaign(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, moe_num_experts=shape.experts,
        moe_top_k=shape.top_k,
    ).model
    base = initial_state(config)
    block = in_computed_width(plain_model(config, base).to(device).model.layers[0].mlp.experts, device)
    inputs = routed_tokens(shape.tokens, shape.hidden_size, shape.experts, shape.top_k, device)
    quarter = shape.experts // 4
    works = {
        "transformers_eager": transformers_block(block, "eager", inputs),
        "grouped": transformers_block(block, "grouped_mm", inputs),
        "concat": concatenated_block(block, range(quarter), inputs),
    }
    for owned in (quarter, 1):
        for stored in ("fp32", "bf16", "int8"):
            works[f"partitioned_own{owned}_{stored}"] = partitioned_block(config, base, range(owned), stored, inputs, device)
    other: tuple[BackendName, ...] = ("eager", "megablocks")
    for backend in (name for name in other if is_possible(name, device, shape)):
        works[f"partitioned_own{quarter}_{backend}"] = partitioned_block(
            config, base, range(quarter), "fp32", inputs, device, backend
        )
    seconds = interleaved(works, rounds, device)
    report: Report = {
        f"partitioned_own{quarter}_vs_grouped": ratio(seconds, f"partitioned_own{quarter}_fp32", "grouped"),
        f"partitioned_own{quarter}_vs_concat": ratio(seconds, f"partitioned_own{quarter}_fp32", "concat"),
        "partitioned_own1_vs_grouped": ratio(seconds, "partitioned_own1_fp32", "grouped"),
    }
    for name in works:
        if name != "grouped":
            report[f"{name}_vs_grouped"] = ratio(seconds, name, "grouped")
    return {**report, "shape": asdict(shape), **timings(seconds)}


def is_possible(backend: BackendName, device: torch.device, shape: Shape) -> bool:
    """Return whether the backend supports these sizes on this device."""
    try:
        choose_backend(backend, device, shape.hidden_size, shape.intermediate_size)
    except UserError:
        return False
    return True


class _Bf16(nn.Module):
    """A parametrization that computes with a bf16 copy of a float32 weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(torch.bfloat16)


def in_computed_width(block: nn.Module, device: torch.device) -> nn.Module:
    """On CUDA, let transformers' experts compute with bf16 copies of their weights, as autocast does for other products.

    Autocast does not support grouped products: without this they would run in float32, which is slow on every GPU.
    """
    if device.type == "cuda":
        for name in ("gate_up_proj", "down_proj"):
            parametrize.register_parametrization(block, name, _Bf16(), unsafe=True)
    return block


def routed_tokens(tokens: int, hidden_size: int, experts: int, top_k: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return hidden states, and the chosen experts and weights of a random router."""
    probabilities = torch.randn(tokens, experts, device=device).softmax(-1)
    weights, index = probabilities.topk(top_k)
    return torch.randn(tokens, hidden_size, device=device).requires_grad_(), index, weights.detach().requires_grad_()


def transformers_block(block: nn.Module, implementation: str, inputs: tuple[Tensor, ...]) -> Work:
    """Return transformers' experts, all trained."""
    settings: Any = block.config

    def work() -> None:
        settings._experts_implementation = implementation
        with parametrize.cached():
            forward_backward(block, inputs, block.parameters())

    return work


def concatenated_block(block: nn.Module, owned: range, inputs: tuple[Tensor, ...]) -> Work:
    """Return SPES's method: owned and frozen experts are concatenated each step; autograd computes the weight gradients of all,
    and discards those of the frozen ones."""
    whole = {name: p.detach() for name, p in block.named_parameters()}
    own = {name: p[: len(owned)].clone().requires_grad_() for name, p in whole.items()}
    frozen = {name: [row.clone() for row in p[len(owned) :]] for name, p in whole.items()}
    settings: Any = block.config

    def forward(*arguments: Tensor) -> Tensor:
        settings._experts_implementation = "grouped_mm"
        concatenated = {n: torch.cat([p, *(row.unsqueeze(0) for row in frozen[n])]) for n, p in own.items()}
        result: Tensor = torch.func.functional_call(block, concatenated, arguments)
        return result

    return lambda: forward_backward(forward, inputs, own.values())


def partitioned_block(
    config: Any, base: Any, owned: range, stored: StoredFormat, inputs: tuple[Tensor, ...], device: torch.device,
    backend: BackendName = "auto",
) -> Work:
    block = next(experts_of(build_model(config, base, tuple(owned), stored, device, backend=backend)))
    return lambda: forward_backward(block, inputs, block.parameters())


def forward_backward(block: Callable[..., Tensor], inputs: tuple[Tensor, ...], parameters: Any) -> None:
    for tensor in (*inputs, *parameters):
        tensor.grad = None
    device = inputs[0].device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        output = block(*inputs)
    output.sum().backward()  # type: ignore[no-untyped-call]


def bench_memory(rounds: int, device: torch.device) -> Report:
    """Compare weights, gradients, moments and stored experts after one step with the formula."""
    shapes = {
        "4M": campaign(hidden_size=128, intermediate_size=256, moe_num_experts=8, num_hidden_layers=4, vocab_size=4096),
        "22M_tied": campaign(hidden_size=256, intermediate_size=512, moe_num_experts=8, num_hidden_layers=6, vocab_size=8192,
                             tie_word_embeddings=True, architecture="qwen3_moe"),
        "109M": campaign(hidden_size=512, intermediate_size=1024, moe_num_experts=16, num_hidden_layers=4, vocab_size=8192),
    }
    optimizers: list[OptimizerKind] = ["adamw"]
    if importlib.util.find_spec("torchao") is not None:
        optimizers.append("adamw8bit")
    cases: Report = {}
    for name, config in shapes.items():
        base = initial_state(config.model)
        for share in (1, 4):
            for stored in ("fp32", "bf16", "int8"):
                for optimizer in optimizers:
                    owned = config.model.moe_num_experts // share
                    setup = Setup(owned, stored, optimizer, 1, "cuda" if device.type == "cuda" else "cpu", False)
                    cases[f"{name}/own_1_of_{share}/{stored}/{optimizer}"] = counted_and_formula(config, base, setup, device)
    worst = max(abs(case["counted"] / case["formula"] - 1) for case in cases.values())
    return {"worst_formula_error": worst, "optimizers": optimizers, "bytes": cases}


def counted_and_formula(config: CampaignConfig, base: Any, setup: Setup, device: torch.device) -> Report:
    """Return the formula's bytes, and those of all distinct storages after the backward pass of a second step."""
    model = build_model(config.model, base, tuple(range(setup.owned)), setup.stored, device)
    optimizer = OwnedOptimizer(model, layout_of(config.model), config.training, setup.optimizer)
    ids = torch.randint(config.model.vocab_size, (1, 8), device=device)
    for step in range(2):
        losses = forward_losses(model, list(experts_of(model)), ids, config.training)
        losses.total.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            optimizer.step(1e-4, losses.total.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    stored = [t for block in experts_of(model) for t in block.stored_tensors()]
    counted = storage_bytes([*model.parameters(), *gradients, *stored]) + optimizer.state_bytes()
    formula = device_bytes(config.model, 8, setup)
    return {"counted": counted, "formula": formula.weights + formula.gradients + formula.moments + formula.stored}


def storage_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of the distinct storages of these tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def bench_step(rounds: int, device: torch.device) -> Report:
    """Measure steps with 109 M parameters and 2048 tokens: data, forward, losses, backward, clipping and AdamW."""
    config = campaign(hidden_size=512, intermediate_size=1024, moe_num_experts=16, num_hidden_layers=4, vocab_size=8192)
    base = initial_state(config.model)
    quarter, one, everything = tuple(range(4)), (0,), tuple(range(16))
    trainers = {
        "own16": TorchTrainer(config, base, everything, RandomText(config), None, device),
        "own4": TorchTrainer(config, base, quarter, RandomText(config), None, device),
        "own4_int8": TorchTrainer(config, base, quarter, RandomText(config), None, device, TrainingOptions(stored="int8")),
        "own4_checkpointing": TorchTrainer(
            config, base, quarter, RandomText(config), None, device, TrainingOptions(activation_checkpointing=True)
        ),
        "own1": TorchTrainer(config, base, one, RandomText(config), None, device),
    }
    works: dict[str, Work] = {"transformers_whole": transformers_step(config, base, device)}
    works.update({name: one_step(trainer) for name, trainer in trainers.items()})
    seconds = interleaved(works, rounds, device)
    report: Report = {f"{name}_vs_transformers_whole": ratio(seconds, name, "transformers_whole") for name in trainers}
    tokens = config.training.batch_size * config.training.sequence_length
    for name, trainer in trainers.items():
        step_s = statistics.median(seconds[name])
        flops = training_flops_per_token(config.model, config.training.sequence_length, trainer.owned)
        report[f"{name}_tokens_per_second"] = tokens / step_s
        report[f"{name}_gflops_per_second"] = tokens * flops / step_s / 1e9
    return {**report, **timings(seconds)}


def one_step(trainer: TorchTrainer) -> Work:
    phase = Phase(1, 100, 10, 1, (Interval(0, 0, RandomText.num_samples),))
    return lambda: check(trainer.train(phase, lambda: False, lambda steps, speed: None).skipped_steps == 0)


def transformers_step(
    config: CampaignConfig, base: Any, device: torch.device, micro_batch: int | None = None, checkpointing: bool = False
) -> Work:
    """Return the usual step: transformers' model with grouped_mm and its losses, and torch's AdamW on all weights."""
    model = plain_model(config.model, base).to(device)
    for layer in model.model.layers:
        in_computed_width(layer.mlp.experts, device)
    model.set_experts_implementation("grouped_mm")
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    # Fused on CUDA: the default step needs temporary memory of the size of the model.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True if device.type == "cuda" else None
    )
    text = RandomText(config)

    def work() -> None:
        ids = torch.from_numpy(text.read(Interval(0, 0, config.training.batch_size))).to(device)
        for part in torch.split(ids, micro_batch or len(ids)):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(input_ids=part, labels=part, output_router_logits=True, use_cache=False).loss
            (loss * (len(part) / len(ids))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


class RandomText:
    """Sixteen samples of random tokens, repeated."""

    num_samples = 2**20

    def __init__(self, config: CampaignConfig):
        shape = (16, config.training.sequence_length)
        self._samples = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int64)

    def read(self, interval: Interval) -> Any:
        return self._samples[np.arange(interval.start, interval.stop) % len(self._samples)]

    def read_spread(self, count: int) -> Any:
        return self._samples[:count]


def bench_capped_step(config: CampaignConfig, cap: int, rounds: int, device: torch.device, micro_batches: int = 2) -> Report:
    """Measure steps in the setup that the planner chooses for `cap` bytes, and of the whole model if it fits.

    On CUDA, the peer cannot allocate more than the cap, and the report compares the allocator's peak with the prediction.
    """
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    choice = find_room(config, Device(kind, cap, has_adamw8bit=importlib.util.find_spec("torchao") is not None), "--cap")
    micro_batch = choice.setup.micro_batch
    training = config.training.model_copy(update={"batch_size": micro_batches * micro_batch, "instance_filter": False})
    config = config.model_copy(update={"training": training})
    base = random_base(config, device)
    with capped(device, cap):
        trainer = planned_trainer(config, base, choice.setup, device)
        work = one_step(trainer)
        work()
        seconds = interleaved({"peer": work}, rounds, device)
        peak = torch.cuda.max_memory_allocated(device) if kind == "cuda" else None
    median, tokens = statistics.median(seconds["peer"]), training.batch_size * training.sequence_length
    flops = training_flops_per_token(config.model, training.sequence_length, trainer.owned)
    card = peak_flops(device_name(device))
    report: Report = {
        "campaign": config.name, "cap_bytes": cap, "micro_batches": micro_batches, "setup": asdict(choice.setup),
        "tokens_per_second": tokens / median, "tflops_per_second": tokens * flops / median / 1e12,
        "mfu": tokens * flops / median / card if card else None,
        "predicted_bytes": choice.device.total, "peak_allocated_bytes": peak,
        "peak_vs_predicted": None if peak is None else peak / choice.device.total,
    }
    del trainer, work
    release(device)
    return {**report, **beside_the_whole(config, base, choice.setup, seconds["peer"], rounds, device)}


def random_base(config: CampaignConfig, device: torch.device) -> State:
    """Return a state with norms of 1 and other weights of deviation 0.02. `initial_state` takes a minute for a billion."""
    layout = layout_of(config.model)
    base = np.empty(layout.size, np.float32)
    for placed in layout.tensors:
        part = torch.from_numpy(base[placed.start : placed.stop])
        if len(placed.spec.shape) == 1:
            part.fill_(1.0)
        else:
            part.copy_(torch.empty(part.shape, device=device).normal_(0, 0.02))
    return base


@contextmanager
def capped(device: torch.device, cap: int) -> Iterator[None]:
    """On CUDA, limit allocations to the cap, and reset the peak."""
    if device.type == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    # Without the device argument, which needs an index: the current device.
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def release(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def planned_trainer(config: CampaignConfig, base: Any, setup: Setup, device: torch.device) -> TorchTrainer:
    options = TrainingOptions(
        stored=setup.stored, stored_on=setup.stored_on, optimizer=setup.optimizer, micro_batch_size=setup.micro_batch,
        activation_checkpointing=setup.checkpointing,
    )
    return TorchTrainer(config, base, tuple(range(setup.owned)), RandomText(config), None, device, options)


def beside_the_whole(
    config: CampaignConfig, base: Any, setup: Setup, peer: list[float], rounds: int, device: torch.device
) -> Report:
    """Compare the peer's step with transformers' whole model, if that fits the device without a cap.

    Micro-batches and checkpointing are the same.
    """
    needed, free = bytes_of_the_whole(config, setup), measured([device]).memory
    if needed > free:
        return {"peer_vs_transformers_whole": None, "whole": f"needs about {needed} bytes, {free} are free"}
    work = transformers_step(config, base, device, setup.micro_batch, setup.checkpointing)
    seconds = interleaved({"whole": work}, rounds, device)
    ratio_of_medians = statistics.median(peer) / statistics.median(seconds["whole"])
    return {"peer_vs_transformers_whole": ratio_of_medians, **timings({"peer": peer, **seconds})}


def bytes_of_the_whole(config: CampaignConfig, setup: Setup) -> int:
    """Return the bytes of transformers' model: ours with all experts owned, plus several copies of all logits and, in bf16,
    copies of the experts, which stay for the backward pass unless layers are recomputed."""
    model, tokens = config.model, setup.micro_batch * config.training.sequence_length
    layers = shape_of(model).num_hidden_layers
    whole = replace(setup, owned=model.moe_num_experts, optimizer="adamw", stored_on="device", muon=False)
    experts = sum(group.size for group in layout_of(model).groups if group.expert is not None)
    layers_at_once = 1 if setup.checkpointing else layers
    copies = 2 * experts * layers_at_once // layers if setup.bf16 else 0
    return device_bytes(model, config.training.sequence_length, whole).total + 20 * tokens * model.vocab_size + copies


def interleaved(works: dict[str, Work], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return seconds by work and round. A round does all works once, in rotating order, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = clock(device)
            works[name]()
            if number > 0:
                seconds[name].append(clock(device) - started)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    """Return the median over rounds of the ratio within the round, in which other load mostly cancels."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


def timings(seconds: dict[str, list[float]]) -> Report:
    return {"rounds": len(next(iter(seconds.values()))), "median_s": {n: statistics.median(s) for n, s in seconds.items()}}


def clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def experts_of(model: nn.Module) -> Iterator[PartitionedExperts]:
    return (module for module in model.modules() if isinstance(module, PartitionedExperts))


def campaign(**model: Any) -> CampaignConfig:
    shape = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
             "max_position_embeddings": 256, "moe_top_k": 2, **model}
    training = {"sequence_length": 256, "batch_size": 8, "total_steps": 1000, "sync_steps": 10, "learning_rate": 1e-4}
    sections = {"name": "bench", "model": shape, "training": training, "data": {"manifest": "-", "tokenizer": "-"}}
    return parse_campaign_config(sections, "bench")


def check(condition: bool) -> None:
    if not condition:
        raise UserError("a measured step was skipped: its loss was not finite")


def environment(device: str) -> Report:
    import transformers

    backend = choose_backend("auto", torch.device(device), 512, 1024).name
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
            "device": name, "backend": backend}


if __name__ == "__main__":
    sys.exit(main())
