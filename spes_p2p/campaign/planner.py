"""Plan what one peer trains and needs: experts that fit on a device, host memory, disk, and a round's traffic.

The plan has as many experts as fit, up to the campaign's limit, and for that number the first fitting options in the order of
`Options`. Device bytes are computed by `model/memory.py`; host memory and disk follow from what a round keeps, traffic from its
parts. Nothing is allocated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.content.bases import KEPT_SNAPSHOTS
from spes_p2p.errors import UserError
from spes_p2p.model.build import layout_of
from spes_p2p.model.layout import Layout
from spes_p2p.model.memory import DeviceBytes, DeviceKind, OptimizerKind, Setup, device_bytes, shared_elements, stored_bytes
from spes_p2p.model.stored import StoredFormat, StoredPlace
from spes_p2p.observe.units import human_bytes, human_count
from spes_p2p.rounds.codecs import GroupCodecs, group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.ownership import assign_experts
from spes_p2p.rounds.parts import PART_BYTES, extra_copies, part_table, pulls
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.results import KEPT_ROUNDS, MAX_KEPT_ROUNDS

RESERVED_BYTES = 2**29
RESERVED_SHARE = 0.05
"""Device memory left free: for the driver, the libraries' workspaces, and fragmentation."""
COARSE_PARTS = 2048
"""Maximum number of parts in the traffic computation: enough for the balance, and fast."""

CHECKPOINT_FILES = 3
"""Two in turn (training/checkpoint.py), and the next one while it is written."""

PIECES_BYTES = 2**28
"""Upper bound of a round's buffers in memory, for any model size; 40 MB were measured (docs/communication.md)."""

MAX_PEERS = 1024
"""Beyond this, computing the traffic of a round takes too long."""


@dataclass(frozen=True)
class Device:
    """A device, and its free memory."""

    kind: DeviceKind
    memory: int
    base_in_memory: bool = False
    """Whether the peer holds the base in main memory (`join --base ram`)."""

    def at_most(self, memory: int | None) -> Device:
        """Return the device with at most this much memory."""
        return self if memory is None else replace(self, memory=min(self.memory, memory))

    @property
    def reserved(self) -> int:
        """Bytes to leave free."""
        return RESERVED_BYTES + round(RESERVED_SHARE * self.memory) if self.kind == "cuda" else round(0.1 * self.memory)


@dataclass(frozen=True)
class Options:
    """Possible values of each option, best first; options that cost more time come first and are changed last."""

    stored_on: tuple[StoredPlace, ...]
    checkpointing: tuple[bool, ...]
    optimizer: tuple[OptimizerKind, ...]
    stored: tuple[StoredFormat, ...]
    micro_batch: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """A setup and its device memory."""

    setup: Setup
    device: DeviceBytes


@dataclass(frozen=True)
class Alternative:
    """What fits with some ways to save memory; each alternative adds one to those before."""

    means: str
    choice: Choice


@dataclass(frozen=True)
class HostBytes:
    """Main memory, without memory-mapped files.

    Bases, results and the arrays of a round (`storage/scratch.py`) are mapped files, which free memory caches but which need
    none. With `join --base ram`, the base and the arrays of a round are in memory.
    """

    base: int
    """The base, if in memory."""
    update: int
    """The announced update, decoded, if in memory; with `sync.overlap` also the work set aside during an evaluation."""
    sums: int
    """Sums that this peer reduces, and their residuals, if in memory."""
    pieces: int
    """Buffers for parts and pieces in a round."""
    stored: int
    """Foreign experts stored on the host."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.base + self.update + self.sums + self.pieces + self.stored


@dataclass(frozen=True)
class DiskBytes:
    """Maximum size of the run-dir, while checkpoint and base of a round are written, without fetched text.

    Each further attempt at a round takes one more update until the round is decided.
    """

    base: int
    """The two that are served, of which the older one is a spare file, and the next one."""
    download: int
    """An older base while a peer downloads it, with the results since; or a base that this peer downloads."""
    scratch: int
    """The announced update, sums with their residuals, and, with `sync.overlap`, the work set aside during an evaluation."""
    archive: int
    """Bases that a bootstrap peer archives."""
    results: int
    """Results of the kept rounds and of the current one."""
    checkpoint: int
    """Two in turn, and the next one while it is written."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.base + self.download + self.scratch + self.archive + self.results + self.checkpoint


@dataclass(frozen=True)
class Traffic:
    """Traffic of one round in a swarm of identical peers."""

    peers: int
    owned: int
    """Experts that each peer trains."""
    owned_by_anyone: int
    up_bytes: int
    down_bytes: int
    bits_per_second: float

    @property
    def seconds(self) -> float:
        """Seconds of the transfers, up and down at once, without latency."""
        return 8 * max(self.up_bytes, self.down_bytes) / self.bits_per_second


@dataclass(frozen=True)
class PeerPlan:
    """What one peer trains and needs."""

    campaign: str
    parameters: int
    shared_parameters: int
    expert_parameters: int
    num_experts: int
    target: Device
    choice: Choice
    alternatives: tuple[Alternative, ...]
    host: HostBytes
    host_with_base: HostBytes
    """Host memory with `join --base ram`."""
    disk: DiskBytes
    bootstrap_disk: DiskBytes
    """Disk of a bootstrap peer with the default archive."""
    traffic: Traffic


def plan_peer(config: CampaignConfig, target: Device, bits_per_second: float, peers: int | None, memory_name: str) -> PeerPlan:
    """Return the plan of a peer on this device. `memory_name`: name of its memory in error messages.

    `peers`: size of the swarm; default: as many as own all experts. Raises UserError for more than MAX_PEERS, or if the shared
    weights do not fit.
    """
    if peers is not None and not 1 <= peers <= MAX_PEERS:
        raise UserError(f"--peers {peers}: must be 1 to {MAX_PEERS}")
    layout = layout_of(config.model)
    choice = most_experts(config, target, plan_options(config, target.kind), memory_name)
    return PeerPlan(
        campaign=config.name,
        parameters=layout.size,
        shared_parameters=shared_elements(layout),
        expert_parameters=layout.expert(0).size,
        num_experts=config.model.moe_num_experts,
        target=target,
        choice=choice,
        alternatives=alternatives(config, target),
        host=host_bytes(config, choice),
        host_with_base=host_bytes(config, choice, base_in_memory=True),
        disk=disk_bytes(config, choice),
        bootstrap_disk=bootstrap_disk_bytes(config, PeerConfig.model_fields["archive_keep"].default),
        traffic=round_traffic(config, choice.setup.owned, peers or _enough_peers(config, choice.setup.owned), bits_per_second),
    )


def most_experts(config: CampaignConfig, target: Device, options: Options, memory_name: str) -> Choice:
    """Return the best setup that fits, in the order of the module docstring. Raises UserError if none does."""
    limit = config.experts.experts_per_peer or config.model.moe_num_experts
    for owned in range(limit, -1, -1):
        for choice in _choices(config, target.kind, owned, options):
            if needed_bytes(config, target, choice) <= target.memory:
                return choice
    least = min(_choices(config, target.kind, 0, options), key=lambda choice: needed_bytes(config, target, choice))
    raise UserError(_too_small(config, target, least, memory_name))


def needed_bytes(config: CampaignConfig, target: Device, choice: Choice) -> int:
    """Return the free memory that the device needs; a CPU also needs the host bytes."""
    host = host_bytes(config, choice, target.base_in_memory).total if target.kind == "cpu" else 0
    return choice.device.total + host + target.reserved


def plan_options(config: CampaignConfig, kind: DeviceKind) -> Options:
    """Return all options of a trainer, with the campaign's micro-batch or a smaller one."""
    batch, largest = config.training.batch_size, config.training.micro_batch_size or config.training.batch_size
    return Options(
        stored_on=("device", "host") if kind == "cuda" else ("device",),
        checkpointing=(False, True),
        optimizer=("adamw", "adamw8bit"),
        stored=_stored_formats(config, kind),
        micro_batch=tuple(size for size in range(largest, 0, -1) if batch % size == 0),
    )


def join_options(config: CampaignConfig, kind: DeviceKind) -> Options:
    """Return the options of a joining peer without settings: only the stored format is open."""
    micro_batch = config.training.micro_batch_size or config.training.batch_size
    return replace(
        plan_options(config, kind),
        optimizer=("adamw",), stored_on=("device",), checkpointing=(False,), micro_batch=(micro_batch,),
    )


def host_bytes(config: CampaignConfig, choice: Choice, base_in_memory: bool = False) -> HostBytes:
    """Return the main memory, without the program itself (about 1 GB with torch)."""
    base = 4 * base_size(layout_of(config.model), config.outer)
    return HostBytes(
        base=base * base_in_memory,
        update=_pending_bytes(config, choice) * base_in_memory,
        sums=2 * _sums_bytes(config) * base_in_memory,
        pieces=min(PIECES_BYTES, base),
        stored=stored_bytes(config.model, choice.setup) if choice.setup.stored_on == "host" else 0,
    )


def disk_bytes(config: CampaignConfig, choice: Choice) -> DiskBytes:
    """Return the size of a trainer's run-dir."""
    return replace(
        bootstrap_disk_bytes(config, 0),
        scratch=_pending_bytes(config, choice) + 2 * _sums_bytes(config),
        checkpoint=CHECKPOINT_FILES * (choice.device.moments + choice.device.weights),
    )


def bootstrap_disk_bytes(config: CampaignConfig, archived: int) -> DiskBytes:
    """Return the size of a bootstrap peer's run-dir with this many archived bases."""
    layout = layout_of(config.model)
    base, results = 4 * base_size(layout, config.outer), group_codecs(config.sync.codec).encoded_bytes(layout)
    return DiskBytes(
        base=(KEPT_SNAPSHOTS + 1) * base,
        download=base + max(base, (MAX_KEPT_ROUNDS - KEPT_ROUNDS) * results),
        scratch=2 * _all_sums_bytes(config),
        archive=archived * base,
        results=(KEPT_ROUNDS + 1) * results,
        checkpoint=0,
    )


def _pending_bytes(config: CampaignConfig, choice: Choice) -> int:
    """Return the bytes of the announced update, and of later work if an evaluation can set it aside."""
    evaluates = config.sync.overlap and config.evaluation.every_rounds > 0 and config.data.validation_manifest is not None
    return choice.device.weights * (2 if evaluates else 1)


def _sums_bytes(config: CampaignConfig) -> int:
    """Return the bytes of the sums that one of several identical trainers reduces."""
    return _all_sums_bytes(config) // max(2, config.sync.min_peers)


def _all_sums_bytes(config: CampaignConfig) -> int:
    """Return the bytes of the sums of all groups that several peers train; a bootstrap peer may reduce nearly all of them."""
    layout = layout_of(config.model)
    several = layout.size if config.experts.redundancy > 1 else shared_elements(layout)
    return 4 * several


def round_traffic(config: CampaignConfig, capacity: int, peers: int, bits_per_second: float) -> Traffic:
    """Return the traffic in a round of the peer that trains most experts, among `peers` identical ones.

    Shared weights of S encoded bytes are pushed to and pulled from the reducers: 2 S (N - 1) / N up and down. An expert with
    one owner is sent once to each other peer. Headers, plans and digests (about 0.1 %) are not counted.
    """
    experts, codecs = config.model.moe_num_experts, group_codecs(config.sync.codec)
    names = [f"{index:05d}" for index in range(peers)]
    owners = assign_experts(experts, dict.fromkeys(names, capacity), (), config.experts.redundancy, config.name)
    members = tuple(Member(name, 1, tuple(int(name in expert) for expert in owners), 1.0) for name in names)
    owned = [sum(member.routed) for member in members]
    up, down = _busiest(layout_of(config.model), members, owned.index(max(owned)), codecs)
    return Traffic(peers, max(owned), sum(map(bool, owners)), up, down, bits_per_second)


def _busiest(layout: Layout, members: tuple[Member, ...], me: int, codecs: GroupCodecs) -> tuple[int, int]:
    """Return the bytes (up, down) of one member, from the round's parts."""
    coarse = max(PART_BYTES, codecs.encoded_bytes(layout) // COARSE_PARTS)
    up = down = 0
    for part in part_table(layout, members, codecs, coarse):
        encoded = part.encoded_bytes
        up += (me in part.contributors) * encoded
        if part.reducer == me:
            up += extra_copies(part, me, len(members)) * encoded
            down += (len(part.contributors) - (me in part.contributors)) * encoded
        down += pulls(part, me) * encoded
    return up, down


def _choices(config: CampaignConfig, kind: DeviceKind, owned: int, options: Options) -> Iterator[Choice]:
    training = config.training
    bf16, muon = kind == "cuda", training.optimizer == "muon"
    names = [field.name for field in fields(options)]
    for values in product(*(getattr(options, name) for name in names)):
        setup = Setup(owned=owned, device=kind, bf16=bf16, muon=muon, **dict(zip(names, values, strict=True)))
        yield Choice(setup, device_bytes(config.model, training.sequence_length, setup))


def alternatives(config: CampaignConfig, target: Device) -> tuple[Alternative, ...]:
    """Return what fits with one more way to save memory after another, without those that change nothing."""
    every = plan_options(config, target.kind)
    options = replace(every, optimizer=("adamw",), stored_on=("device",), checkpointing=(False,))
    found: list[Alternative] = []
    means: list[tuple[str, dict[str, Any]]] = [
        ("small micro-batches", {}),
        ("+ 8-bit AdamW", {"optimizer": every.optimizer}),
        ("+ checkpointing", {"checkpointing": every.checkpointing}),
        ("+ host storage", {"stored_on": every.stored_on}),
    ]
    for name, added in means:
        options = replace(options, **added)
        with contextlib.suppress(UserError):
            choice = most_experts(config, target, options, "")
            if not found or choice != found[-1].choice:
                found.append(Alternative(name, choice))
    return tuple(found)


def _stored_formats(config: CampaignConfig, kind: DeviceKind) -> tuple[StoredFormat, ...]:
    """Return the stored formats. Computation in bf16 would round float32 copies of foreign experts at each use."""
    return ("bf16", "int8") if kind == "cuda" else ("fp32", "bf16", "int8")


def _enough_peers(config: CampaignConfig, owned: int) -> int:
    places = config.model.moe_num_experts * config.experts.redundancy
    return max(2, config.sync.min_peers, math.ceil(places / owned) if owned else 0)


def _too_small(config: CampaignConfig, target: Device, least: Choice, memory_name: str) -> str:
    layout, device = layout_of(config.model), least.device
    parts = {
        f"{human_count(shared_elements(layout))} parameters with gradients and moments":
            device.weights + device.gradients + device.moments,
        f"foreign experts in {least.setup.stored}": device.stored,
        f"a pass of micro-batch {least.setup.micro_batch}": device.activations + device.working,
        "host data": host_bytes(config, least, target.base_in_memory).total if target.kind == "cpu" else 0,
        "kept free": target.reserved,
    }
    listed = ", ".join(f"{what} {human_bytes(size)}" for what, size in parts.items() if size)
    needed = needed_bytes(config, target, least)
    return (f"{memory_name} = {human_bytes(target.memory)}: too small for even the shared weights of {config.name}, which take "
            f"{human_bytes(needed)} ({listed}); use a device with more memory")
