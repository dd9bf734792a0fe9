"""What one peer needs, before anything is allocated: what fits on a device, host memory, disk, and a round's traffic.

As many experts as fit, up to the campaign's limit; for that number the first of each option, in the order of `Options`. Device
bytes: `model/memory.py`. Host memory and disk follow from what `sync` holds and writes, traffic from the parts of a round.
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
"""Left free on the device beside the tensors: the driver's own memory, libraries' work space, gaps between tensors."""
COARSE_PARTS = 2048
"""Upper bound on the parts that traffic is computed with: enough for the balance, and fast."""

CHECKPOINT_FILES = 3
"""Two in turn (training/checkpoint.py), and the next one until it has replaced its own."""

PIECES_BYTES = 2**28
"""A bound for what a round has in memory at a time, whatever the model's size; 40 MB were measured (docs/communication.md)."""

MAX_PEERS = 1024
"""Beyond that the traffic of a round is not computed in seconds."""


@dataclass(frozen=True)
class Device:
    """Where a peer trains, and what is free there."""

    kind: DeviceKind
    memory: int
    base_in_memory: bool = False
    """Does this peer hold the base in main memory (`join --base ram`)?"""

    def at_most(self, memory: int | None) -> Device:
        """The same device with no more memory than this."""
        return self if memory is None else replace(self, memory=min(self.memory, memory))

    @property
    def reserved(self) -> int:
        """Bytes that are not planned with."""
        return RESERVED_BYTES + round(RESERVED_SHARE * self.memory) if self.kind == "cuda" else round(0.1 * self.memory)


@dataclass(frozen=True)
class Options:
    """What may be chosen, better ones first; what costs most time comes first and is given up last."""

    stored_on: tuple[StoredPlace, ...]
    checkpointing: tuple[bool, ...]
    optimizer: tuple[OptimizerKind, ...]
    stored: tuple[StoredFormat, ...]
    micro_batch: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """A setup and the device memory that it takes."""

    setup: Setup
    device: DeviceBytes


@dataclass(frozen=True)
class Alternative:
    """What fits with some of the means to save memory, each added to those before it."""

    means: str
    choice: Choice


@dataclass(frozen=True)
class HostBytes:
    """Main memory that belongs to no file.

    Bases, results, and all that a round keeps (`storage/scratch.py`) are memory-mapped: what is free beside this keeps their
    pages at hand, but they need none of it. With `join --base ram` the base and what a round keeps are in memory instead.
    """

    base: int
    """The base, where it is held in memory."""
    update: int
    """What was announced and is not in a base yet, decoded, where that is in memory; with `sync.overlap` also what is set aside
    while the base is evaluated."""
    sums: int
    """Means under way here, and what their encoding dropped in the round before, where those are in memory."""
    pieces: int
    """Parts and pieces under way in a round."""
    stored: int
    """Foreign experts that are kept here."""

    @property
    def total(self) -> int:
        """All together."""
        return self.base + self.update + self.sums + self.pieces + self.stored


@dataclass(frozen=True)
class DiskBytes:
    """The run-dir at the highest moment: checkpoint and base of a round are being written. Fetched text comes on top.

    Each further attempt at a round that failed takes one update more until the round is over.
    """

    base: int
    """Those that are served, of which the older one lies in a spare file, and the next one."""
    download: int
    """An older base while somebody downloads it, with the results of the rounds since; or one that comes, and its pieces."""
    scratch: int
    """What was announced, means under way here with what their encoding dropped in the round before, and, with `sync.overlap`,
    what is set aside while the base is evaluated."""
    archive: int
    """Earlier bases that a bootstrap peer keeps."""
    results: int
    """Of the rounds that are kept and of the one under way, which takes the file of a round that was given up."""
    checkpoint: int
    """Two in turn, and the next one beside the one that it replaces."""

    @property
    def total(self) -> int:
        """All together."""
        return self.base + self.download + self.scratch + self.archive + self.results + self.checkpoint


@dataclass(frozen=True)
class Traffic:
    """One round of a swarm of such peers."""

    peers: int
    owned: int
    """Experts that each trains then."""
    owned_by_anyone: int
    up_bytes: int
    down_bytes: int
    bits_per_second: float

    @property
    def seconds(self) -> float:
        """At this speed up and down at once, without latency."""
        return 8 * max(self.up_bytes, self.down_bytes) / self.bits_per_second


@dataclass(frozen=True)
class PeerPlan:
    """The answer."""

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
    """With `join --base ram`."""
    disk: DiskBytes
    bootstrap_disk: DiskBytes
    """Of a peer that does not train and keeps as many earlier bases as it does without options."""
    traffic: Traffic


def plan_peer(config: CampaignConfig, target: Device, bits_per_second: float, peers: int | None, memory_name: str) -> PeerPlan:
    """What one peer does and needs on this device. `memory_name` is what messages call its memory.

    `peers`: in the swarm; default as many such peers as own all experts. Raises UserError for more than MAX_PEERS, and when not
    even the shared weights fit.
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
    """The best setup that fits, by the order in the module docstring. Raises UserError when none does."""
    limit = config.experts.experts_per_peer or config.model.moe_num_experts
    for owned in range(limit, -1, -1):
        for choice in _choices(config, target.kind, owned, options):
            if needed_bytes(config, target, choice) <= target.memory:
                return choice
    least = min(_choices(config, target.kind, 0, options), key=lambda choice: needed_bytes(config, target, choice))
    raise UserError(_too_small(config, target, least, memory_name))


def needed_bytes(config: CampaignConfig, target: Device, choice: Choice) -> int:
    """Memory that the device must have free: on a CPU what the host needs comes on top."""
    host = host_bytes(config, choice, target.base_in_memory).total if target.kind == "cpu" else 0
    return choice.device.total + host + target.reserved


def plan_options(config: CampaignConfig, kind: DeviceKind) -> Options:
    """All that the trainer can do, with the campaign's micro-batch or a smaller one."""
    batch, largest = config.training.batch_size, config.training.micro_batch_size or config.training.batch_size
    return Options(
        stored_on=("device", "host") if kind == "cuda" else ("device",),
        checkpointing=(False, True),
        optimizer=("adamw", "adamw8bit"),
        stored=_stored_formats(config, kind),
        micro_batch=tuple(size for size in range(largest, 0, -1) if batch % size == 0),
    )


def join_options(config: CampaignConfig, kind: DeviceKind) -> Options:
    """What a joining peer does without settings of its own: only the stored format is open."""
    micro_batch = config.training.micro_batch_size or config.training.batch_size
    return replace(
        plan_options(config, kind),
        optimizer=("adamw",), stored_on=("device",), checkpointing=(False,), micro_batch=(micro_batch,),
    )


def host_bytes(config: CampaignConfig, choice: Choice, base_in_memory: bool = False) -> HostBytes:
    """Main memory, beside the program itself (about 1 GB with torch)."""
    base = 4 * base_size(layout_of(config.model), config.outer)
    return HostBytes(
        base=base * base_in_memory,
        update=_pending_bytes(config, choice) * base_in_memory,
        sums=2 * _sums_bytes(config) * base_in_memory,
        pieces=min(PIECES_BYTES, base),
        stored=stored_bytes(config.model, choice.setup) if choice.setup.stored_on == "host" else 0,
    )


def disk_bytes(config: CampaignConfig, choice: Choice) -> DiskBytes:
    """The run-dir of a peer that trains."""
    return replace(
        bootstrap_disk_bytes(config, 0),
        scratch=_pending_bytes(config, choice) + 2 * _sums_bytes(config),
        checkpoint=CHECKPOINT_FILES * (choice.device.moments + choice.device.weights),
    )


def bootstrap_disk_bytes(config: CampaignConfig, archived: int) -> DiskBytes:
    """Bytes of the run-dir of a bootstrap peer that keeps this many earlier bases."""
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
    """The update that was announced, and what was trained since, where that can be set aside meanwhile."""
    evaluates = config.sync.overlap and config.evaluation.every_rounds > 0 and config.data.validation_manifest is not None
    return choice.device.weights * (2 if evaluates else 1)


def _sums_bytes(config: CampaignConfig) -> int:
    """Of the means that one of some trainers alike makes: its share of them all."""
    return _all_sums_bytes(config) // max(2, config.sync.min_peers)


def _all_sums_bytes(config: CampaignConfig) -> int:
    """Of the means of all groups that several peers train: a bootstrap peer makes nearly all, its line being free."""
    layout = layout_of(config.model)
    several = layout.size if config.experts.redundancy > 1 else shared_elements(layout)
    return 4 * several


def round_traffic(config: CampaignConfig, capacity: int, peers: int, bits_per_second: float) -> Traffic:
    """Bytes of updates that one of `peers` alike sends and receives in a round: the one that trains most experts.

    Shared weights: S encoded bytes, pushed to and pulled from each reducer, 2 S (N - 1) / N up and down. An expert with one
    owner: up once to each other peer. Heads, plans and digests (about 0.1 % of it) are left out.
    """
    experts, codecs = config.model.moe_num_experts, group_codecs(config.sync.codec)
    names = [f"{index:05d}" for index in range(peers)]
    owners = assign_experts(experts, dict.fromkeys(names, capacity), (), config.experts.redundancy, config.name)
    members = tuple(Member(name, 1, tuple(int(name in expert) for expert in owners), 1.0) for name in names)
    owned = [sum(member.routed) for member in members]
    up, down = _busiest(layout_of(config.model), members, owned.index(max(owned)), codecs)
    return Traffic(peers, max(owned), sum(map(bool, owners)), up, down, bits_per_second)


def _busiest(layout: Layout, members: tuple[Member, ...], me: int, codecs: GroupCodecs) -> tuple[int, int]:
    """Bytes (up, down) of one member, from the round's parts."""
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
    """What fits with one means after the other; those that change nothing are left out."""
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
    """Where computation is in bf16, float32 copies of what is not trained would be rounded at each use."""
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
