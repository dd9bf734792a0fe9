"""A short final fit of the routers: does what a swarm has trained gain when they alone are trained on, on whole batches?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spes_p2p.data.samples import SampleReader, Samples
from spes_p2p.data.slices import Interval
from spes_p2p.experiments.probe import loss_of

ROUTER = "gate.weight"
"""How the name of a router's weights ends in the classes that campaigns can choose."""
WARMUP = 0.1
"""Share of the steps."""
DEFAULT_RATES = (3e-4, 1e-3, 3e-3)


def refit_routers(
    checkpoint: Path, unseen: Samples, held_out: Samples, steps: int, learning_rate: float
) -> tuple[float, float]:
    """Held-out cross-entropy a token, before and after a checkpoint's routers were trained on `unseen`, `[n, sequence]`.

    AdamW without weight decay, the same number of samples each step, the rate warmed up and then falling to 0 linearly; all
    other weights stay. Without the balance loss: what routing alone can gain, whatever the load.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    before = loss_of(model, held_out)
    _train(model, routers_of(model), unseen.reshape(steps, -1, unseen.shape[-1]), learning_rate)
    return before, loss_of(model, held_out)


def routers_of(model: nn.Module) -> list[nn.Parameter]:
    """The routers' weights; all others are frozen from now on."""
    model.requires_grad_(False)
    routers = [weights for name, weights in model.named_parameters() if name.endswith(ROUTER)]
    for weights in routers:
        weights.requires_grad_(True)
    return routers


def unseen_samples(reader: SampleReader, count: int) -> Samples:
    """The last samples of an epoch: runs take theirs from its beginning."""
    return reader.read(Interval(0, reader.num_samples - count, reader.num_samples))


def refit_table(losses: Mapping[str, Mapping[float, tuple[float, float]]], rates: Sequence[float]) -> str:
    """`losses[arm][rate]`: before and after."""
    lines = ["| arm | held-out loss | " + " | ".join(f"routers fitted, rate {rate:g}" for rate in rates) + " |"]
    lines.append("|" + "---|" * (2 + len(rates)))
    for arm, by_rate in losses.items():
        before = next(iter(by_rate.values()))[0]
        after = (f"{by_rate[rate][1]:.4f} ({by_rate[rate][1] - before:+.4f})" for rate in rates)
        lines.append(f"| {arm} | {before:.4f} | " + " | ".join(after) + " |")
    return "\n".join(lines)


def _train(model: PreTrainedModel, routers: list[nn.Parameter], batches: Samples, learning_rate: float) -> None:
    optimizer = torch.optim.AdamW(routers, lr=learning_rate, weight_decay=0.0)
    warmup = max(1, round(WARMUP * len(batches)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (len(batches) - step) / max(1, len(batches) - warmup))
    )
    model.train()
    for batch in batches:
        ids = torch.from_numpy(batch)
        torch.autograd.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
