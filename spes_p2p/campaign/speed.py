"""Estimated time of a training step in one setup, to compare the setups of one peer.

**The assumed card was never measured.** docs/memory.md compares the estimate with steps on an H100, which waits for the host in
small passes; that is left out. For a step of n passes over t tokens each:

    n (flops(t) / FLOPS + weight traffic / MEMORY_BYTES + copies that show) + optimizer traffic / MEMORY_BYTES + sum

flops: those of training (`model/flops.py`), with checkpointing one more forward pass of the layers. Weight traffic per use of a
matrix, in bytes per value: 2 for one stored in bf16; 9 for int8, which is decoded, scaled and read again; 8 for a trained one,
which is cast, and 12 for adding its gradient. A matrix is used twice per pass, with checkpointing three times. Copies: 2 L - 4
layers per pass (`model/prefetch.py`) over the link, of which computation hides a part. The optimizer moves 28 bytes per trained
value, in 8 bits an assumed 56. N devices divide the passes; summing their gradients moves 8 (N - 1) / N bytes per trained value
over each device's link. Where they divide the layers, each pass moves what these have twice over each link, and their gradients
once, while nothing is computed.

On a CPU, the formats of stored experts take the same time (docs/performance.md), so only the operations count there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.model.flops import layers_forward_flops_per_token, training_flops_per_token
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.memory import Setup, shared_elements, stored_bytes
from spes_p2p.model.shape import shape_of
from spes_p2p.model.sizes import sizes_of

FLOPS = 4e13
"""Operations per second that a consumer card reaches in bf16: a quarter to a half of its peak."""
MEMORY_BYTES = 8e11
"""Bandwidth of such a card's memory."""
LINK_BYTES = 1.2e10
"""Host memory to card: PCIe 3.0 with 16 lanes, or 4.0 with 8."""
HIDDEN_SHARE = 0.75
"""Share of the copies that is assumed to overlap with computation, where that takes long enough."""

NEGLIGIBLE = 0.005
"""Costs below this are not mentioned."""
STORED_TRAFFIC = {"fp32": 8, "bf16": 2, "int8": 9}
TRAINED_TRAFFIC, GRADIENT_TRAFFIC = 8, 12
STEP_TRAFFIC = {"adamw": 28, "adamw8bit": 56}


@dataclass(frozen=True)
class Costs:
    """Estimated extra time of a step, as a fraction of the time with the same experts and unlimited memory."""

    total: float
    parts: dict[str, float]
    """By what saves memory, in the order in which it is added: how much longer the step becomes with it."""

    def __str__(self) -> str:
        """'a step takes an estimated 33 % longer than with enough memory (checkpointing 31 %)'."""
        if self.total < NEGLIGIBLE:
            return "nothing in it costs noticeable speed"
        parts = ", ".join(f"{name} {_percent(cost)}" for name, cost in self.parts.items() if cost >= NEGLIGIBLE)
        return f"a step takes an estimated {_percent(self.total)} longer than with enough memory ({parts})"


def costs_of(config: CampaignConfig, setup: Setup) -> Costs:
    """Return what the setup's ways to save memory cost in speed."""
    largest = max(setup.micro_batch, config.training.micro_batch_size or config.training.batch_size // setup.ranks)
    exact: StoredFormat = "bf16" if setup.bf16 else "fp32"
    best = replace(
        setup, micro_batch=largest, optimizer="adamw", stored=exact, checkpointing=False, stored_on="device", sharded=False
    )
    added: dict[str, dict[str, Any]] = {
        f"micro-batch {setup.micro_batch}": {"micro_batch": setup.micro_batch},
        "8-bit AdamW": {"optimizer": setup.optimizer},
        f"foreign experts in {setup.stored}": {"stored": setup.stored},
        "checkpointing": {"checkpointing": setup.checkpointing},
        "foreign experts in host memory": {"stored_on": setup.stored_on},
        "sharding": {"sharded": setup.sharded},
    }
    now, parts = best, {}
    for name, change in added.items():
        before, now = now, replace(now, **change)
        if now != before:
            parts[name] = step_seconds(config, now) / step_seconds(config, before) - 1
    return Costs(step_seconds(config, setup) / step_seconds(config, best) - 1, parts)


def step_seconds(config: CampaignConfig, setup: Setup) -> float:
    """Return the estimated seconds of a step (module docstring); only ratios mean anything."""
    model, training = config.model, config.training
    passes = training.batch_size / setup.micro_batch / setup.ranks
    flops = training_flops_per_token(model, training.sequence_length, range(setup.owned))
    if setup.checkpointing:
        flops += layers_forward_flops_per_token(model, training.sequence_length)
    computing = setup.micro_batch * training.sequence_length * flops / FLOPS
    if setup.device == "cpu":
        return passes * computing
    layout, layers = sizes_of(model), shape_of(model).num_hidden_layers
    trained = shared_elements(layout) + setup.owned * layout.expert(0).size
    foreign, uses = layout.size - trained, 3 if setup.checkpointing else 2
    traffic = uses * (STORED_TRAFFIC[setup.stored] * foreign + TRAINED_TRAFFIC * trained) + GRADIENT_TRAFFIC * trained
    copying = 0.0
    if setup.stored_on == "host":
        copying = max(0, 2 * layers - 4) * stored_bytes(model, setup) / layers / LINK_BYTES
    shown = copying - HIDDEN_SHARE * min(copying, computing)
    if setup.sharded:
        stored = stored_bytes(model, setup) if setup.stored_on == "device" else 0
        shown += (2 * (4 * trained + stored) + 4 * trained) / LINK_BYTES
    after = STEP_TRAFFIC[setup.optimizer] * trained / MEMORY_BYTES + 8 * (1 - 1 / setup.ranks) * trained / LINK_BYTES
    return passes * (computing + traffic / MEMORY_BYTES + shown) + after


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
