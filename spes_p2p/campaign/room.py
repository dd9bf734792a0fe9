"""Find the setup in which a peer trains as many experts as its device has room for, at the least cost in speed.

One search for `plan`, `join` and `doctor`. It returns most experts, up to a limit; among setups with that many, the one with
the least estimated time of a step (`campaign/speed.py`), times ROUNDING_PRICE for what rounds. Estimates within 1 % count as
equal: then what moves least comes first. Several devices divide the layers where that trains more experts per second: it
leaves room for more, but moves all weights twice in each pass. So experts per second also decide the micro-batch there: one
expert more is not worth twice the passes. Memory is computed by `model/memory.py`; nothing is allocated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spes_p2p.campaign.host_memory import host_bytes
from spes_p2p.campaign.speed import step_seconds
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.config.quantities import Spare
from spes_p2p.errors import UserError
from spes_p2p.model.memory import DeviceBytes, DeviceKind, Setup, device_bytes, shared_elements
from spes_p2p.model.sizes import sizes_of
from spes_p2p.observe.units import counted, human_bytes, human_bytes_up, human_count, human_memory

RESERVED_BYTES = 2**29
"""Device memory left free for kernels that libraries load after the measurement, and for the allocator's fragmentation."""
EXCESS_SHARE = 0.015
"""Device memory left free for peaks above the formula, which were 1.4 % of it at most (docs/performance.md)."""
CARD_SHARE = 0.05
"""The same where the memory is a card's nominal size, of which driver and CUDA context take about 0.5 to 0.8 GiB of 24."""
DISPLAY_BYTES = 2**29
"""Device memory left free for windows that open later, on a card that also drives a display."""
HOST_RESERVED_BYTES = 2**30
"""Main memory left free beside foreign experts that are stored there."""
EQUAL_SHARE = 0.01
ROUNDING_PRICE = {"adamw8bit": 1.15, "int8": 1.05}
"""How much faster a step must be for 8-bit moments, or for int8 in place of bfloat16. A judgement: their effect on the loss of
a whole campaign is not measured."""

Asked = Mapping[str, Any]
"""Values of `Setup` that the user chose, by field."""

OPTION_FLAGS = {
    "stored_on": "--stored-on", "checkpointing": "--[no-]activation-checkpointing", "optimizer": "--optimizer",
    "stored": "--stored", "micro_batch": "--micro-batch-size", "sharded": "--[no-]sharding",
}
"""Option of `join` for each value of `Setup` that a user can choose."""


@dataclass(frozen=True)
class Device:
    """A device, its free memory, and what of the machine around it decides about setups.

    Several devices of one peer are alike: each takes its share of a batch, and the memory is that of the one with least.
    """

    kind: DeviceKind
    memory: int
    ranks: int = 1
    """Number of devices."""
    base_in_memory: bool = False
    """Whether the peer holds the base in main memory (`join --base ram`)."""
    host_memory: int | None = None
    """Free main memory beside a GPU; None: unknown, and not a limit."""
    drives_display: bool = False
    without_bf16: str = ""
    """Name and compute capability of a GPU that does not compute in bfloat16 natively."""
    has_adamw8bit: bool = True
    """Whether torchao is installed."""
    total: int = 0
    """All memory of the device, used or not; 0: as much as is free."""
    spare: int = 0
    """Bytes that the user leaves to other programs."""
    has_context: bool = False
    """Whether `memory` was measured in the process that trains: driver and CUDA context are no part of it."""

    def leaving(self, spare: Spare | None) -> Device:
        """Return the device with this left to other programs."""
        return self if spare is None else replace(self, spare=spare.of(self.total or self.memory))

    def at_most(self, memory: int | None) -> Device:
        """Return the device with at most this much memory, of which the context is a part."""
        return self if memory is None or memory >= self.memory else replace(self, memory=memory, has_context=False)

    @property
    def reserved(self) -> int:
        """Bytes to leave free.

        On a GPU they cover what is taken outside torch's allocator (kernels, libraries), its fragmentation, and what the
        formula lacks; workspaces of matrix products are in the allocator's measured peaks. Where memory is not measured, they
        also cover driver and CUDA context; on a card with a display, windows that open later.
        """
        share = round(self.reserved_share * self.memory) + self.spare
        return share if self.kind == "cpu" else RESERVED_BYTES + share + DISPLAY_BYTES * self.drives_display

    @property
    def reserved_share(self) -> float:
        """The part of `reserved` that grows with the memory, over it."""
        if self.kind == "cpu":
            return 0.1
        return EXCESS_SHARE if self.has_context else CARD_SHARE


@dataclass(frozen=True)
class Choice:
    """A setup and its device memory."""

    setup: Setup
    device: DeviceBytes


def check_ranks(config: CampaignConfig, ranks: int, option: str) -> None:
    """Raise UserError, which begins with the option that names this many devices, unless they can divide a batch equally."""
    batch = config.training.batch_size
    if batch % ranks:
        possible = ", ".join(str(number) for number in range(1, min(ranks, batch + 1)) if batch % number == 0)
        raise UserError(f"{option}: {ranks} devices cannot divide a batch of {batch} samples (training.batch_size) equally; "
                        f"give this many: {possible}")


def find_room(
    config: CampaignConfig, device: Device, memory_name: str, asked: Asked | None = None, owned: int | None = None
) -> Choice:
    """Return the best setup that fits, of those with the values in `asked`; with `owned`, of those with that many experts.

    `memory_name`: name of the device's memory in errors. Raises UserError, naming what would fit, if none does.
    """
    asked = asked or {}
    if (best := _best(config, device, asked, owned)) is None:
        raise UserError(_refusal(config, device, memory_name, asked, owned or 0))
    return best


def _best(config: CampaignConfig, device: Device, asked: Asked, owned: int | None = None) -> Choice | None:
    """Return what `find_room` returns; None if nothing fits."""
    found = [_roomiest(config, device, each, owned) for each in _compared(config, device, asked)]

    def rank(choice: Choice) -> tuple[float, float]:
        seconds = _seconds(config, choice)
        return choice.setup.owned / seconds, -seconds

    return max((choice for choice in found if choice is not None), key=rank, default=None)


def _compared(config: CampaignConfig, device: Device, asked: Asked) -> Iterator[Asked]:
    """Yield what is compared by experts per second: undivided layers, and divided ones with each micro-batch size."""
    can_divide = device.ranks > 1 and asked.get("checkpointing") is not False  # divided layers are recomputed
    if not asked.get("sharded", False):
        yield {**asked, "sharded": False}
    if asked.get("sharded", can_divide):
        for size in (asked["micro_batch"],) if "micro_batch" in asked else _micro_batches(config, device):
            yield {**asked, "sharded": True, "micro_batch": size}


def _roomiest(config: CampaignConfig, device: Device, asked: Asked, owned: int | None) -> Choice | None:
    """Return the fastest setup of those with most experts, or with `owned`; None if none fits."""
    def lacks_memory(number: int) -> bool:
        least = smallest(config, device, number, asked)
        return needed_bytes(config, device, least) > device.memory

    limit = config.experts.experts_per_peer or config.model.moe_num_experts
    # Each further expert takes more of the device. It may take less main memory, where the foreign ones are stored.
    most = bisect_left(range(limit + 1), True, key=lacks_memory) - 1 if owned is None else owned
    for number in range(most, -1, -1) if owned is None else (owned,):
        fitting = [choice for choice in choices(config, device, number, asked) if fits(config, device, choice)]
        if fitting:
            return _fastest(config, fitting)
    return None


def smallest(config: CampaignConfig, device: Device, owned: int, asked: Asked) -> Choice:
    """Return the setup with `owned` experts that takes the least device memory, whether or not it fits."""
    return min(choices(config, device, owned, asked), key=lambda choice: needed_bytes(config, device, choice))


def choices(config: CampaignConfig, device: Device, owned: int, asked: Asked) -> Iterator[Choice]:
    """Yield all setups with `owned` experts, those that round and move least first.

    Computation in bf16 would round float32 copies of foreign experts at each use, so a GPU does not store them. A CPU does not
    step 8-bit moments: without a compiler that takes several times the largest tensor in temporary memory.
    """
    training, on_gpu = config.training, device.kind == "cuda"
    can_step_8bit = on_gpu and device.has_adamw8bit and training.second_moment_peers in (1, "auto")
    options: dict[str, tuple[Any, ...]] = {
        "optimizer": ("adamw", "adamw8bit") if can_step_8bit else ("adamw",),
        "stored": ("bf16", "int8") if on_gpu else ("fp32", "bf16", "int8"),
        "stored_on": ("device", "host") if on_gpu else ("device",),
        "checkpointing": (False, True),
        "micro_batch": _micro_batches(config, device),
        "sharded": (False, True),
    }
    options.update({name: (value,) for name, value in asked.items()})
    for values in product(*options.values()):
        chosen: dict[str, Any] = dict(zip(options, values, strict=True))
        if chosen["sharded"] and (device.ranks == 1 or not chosen["checkpointing"]):
            continue
        corrected = training.second_moment_peers != 1 and chosen["optimizer"] == "adamw"
        setup = Setup(
            owned=owned, device=device.kind, bf16=on_gpu, muon=training.optimizer == "muon", corrected=corrected,
            masked=training.intra_document_masking, ranks=device.ranks, **chosen,
        )
        yield Choice(setup, device_bytes(config.model, training.sequence_length, setup))


def _micro_batches(config: CampaignConfig, device: Device) -> tuple[int, ...]:
    """Return the possible sizes, the largest first."""
    share = config.training.batch_size // device.ranks
    largest = min(share, config.training.micro_batch_size or share)
    return tuple(size for size in range(largest, 0, -1) if share % size == 0)


def fits(config: CampaignConfig, device: Device, choice: Choice) -> bool:
    """Return whether the device has room, and the main memory for experts that are stored there."""
    if (choice.setup.stored_on == "host" or choice.setup.sharded) and device.kind == "cuda" and device.host_memory is not None:
        host = host_bytes(config, choice.setup, device.base_in_memory).total
        if host + HOST_RESERVED_BYTES > device.host_memory:
            return False
    return needed_bytes(config, device, choice) <= device.memory


def needed_bytes(config: CampaignConfig, device: Device, choice: Choice) -> int:
    """Return the free memory that the device needs; a CPU also needs the host bytes."""
    host = host_bytes(config, choice.setup, device.base_in_memory).total if device.kind == "cpu" else 0
    return choice.device.total + host + device.reserved


def _fastest(config: CampaignConfig, fitting: list[Choice]) -> Choice:
    seconds = [_seconds(config, choice) for choice in fitting]
    fast_enough = (1 + EQUAL_SHARE) * min(seconds)
    return next(choice for choice, time in zip(fitting, seconds, strict=True) if time <= fast_enough)


def _seconds(config: CampaignConfig, choice: Choice) -> float:
    """Return the estimated time of a step, with the price of rounding."""
    setup = choice.setup
    price = ROUNDING_PRICE.get(setup.optimizer, 1.0) * ROUNDING_PRICE.get(setup.stored, 1.0)
    return step_seconds(config, setup) * price


def _refusal(config: CampaignConfig, device: Device, memory_name: str, asked: Asked, owned: int) -> str:
    layout, least = sizes_of(config.model), smallest(config, device, owned, asked)
    sizes, setup = least.device, least.setup
    parts = {
        f"{human_count(shared_elements(layout))} parameters with gradients and moments":
            sizes.weights + sizes.gradients + sizes.moments,
        f"foreign experts in {setup.stored}": sizes.stored,
        f"a pass of micro-batch {setup.micro_batch}": sizes.activations + sizes.working,
        "host data": host_bytes(config, setup, device.base_in_memory).total if device.kind == "cpu" else 0,
        "kept free": device.reserved,
    }
    listed = ", ".join(f"{what} {human_bytes(size)}" for what, size in parts.items() if size)
    needed = human_bytes_up(needed_bytes(config, device, least))
    what = "even the shared weights" if owned == 0 else counted(owned, "expert")
    return (f"{memory_name} = {human_memory(device.memory)}: too small for {what} of {config.name}, which take {needed} "
            f"({listed}); nearest that fits: {nearest(config, device, asked, owned)}")


def nearest(config: CampaignConfig, device: Device, asked: Asked, owned: int) -> str:
    """Return the smallest change after which `owned` experts fit: an option left out, torchao, main memory, a larger device."""
    changes: list[tuple[str, Device, Asked]] = [
        (f"the same device without {OPTION_FLAGS[name]}", device, {key: value for key, value in asked.items() if key != name})
        for name in asked
    ]
    if len(asked) > 1:
        changes.append(("the same device with none of these options", device, {}))
    if not device.has_adamw8bit:
        changes.append(("the same device with torchao (pip install torchao)", replace(device, has_adamw8bit=True), asked))
    if device.host_memory is not None:
        changes.append(("the same device with more free main memory", replace(device, host_memory=None), asked))
    for words, changed, kept in changes:
        best = _best(config, changed, kept)
        if best is not None and best.setup.owned >= owned:
            return f"{words} ({counted(best.setup.owned, 'expert')})"
    larger = f"a {device.kind} device with {human_bytes_up(_least_memory(config, device, asked, owned))} free"
    if device.ranks > 1:
        larger += f" in place of each of the {device.ranks}"
    if owned > 0:
        return larger
    return f"{larger}; with {human_bytes_up(_least_memory(config, device, asked, 1))} it trains an expert"


def _least_memory(config: CampaignConfig, device: Device, asked: Asked, owned: int) -> int:
    """Return the smallest free memory for this many experts; the reserve is a share of the memory that is looked for."""
    empty = replace(device, memory=0)
    fixed = needed_bytes(config, empty, smallest(config, empty, owned, asked))
    return math.ceil(fixed / (1 - device.reserved_share))
