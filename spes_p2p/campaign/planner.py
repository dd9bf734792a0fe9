"""Plan what one peer trains and needs: experts that fit on a device, host memory, disk, and a round's traffic.

The setup is the one that `join` would choose (`campaign/room.py`). Disk follows from what a round keeps, traffic from its
parts. Nothing is allocated.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from spes_p2p.campaign.host_memory import (
    PROGRAM_BYTES,
    HostBytes,
    all_sums_bytes,
    host_bytes,
    inputs_bytes,
    set_aside_bytes,
    sums_bytes,
    trained_bytes,
    update_bytes,
)
from spes_p2p.campaign.room import Choice, Device, find_room
from spes_p2p.campaign.speed import Costs, costs_of, step_seconds
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.content.bases import KEPT_SNAPSHOTS
from spes_p2p.errors import UserError
from spes_p2p.model.layout import Layout
from spes_p2p.model.memory import shared_elements
from spes_p2p.model.sizes import sizes_of
from spes_p2p.rounds.audits import are_audited
from spes_p2p.rounds.codecs import GroupCodecs, group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.ownership import assign_experts
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import PART_BYTES
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.results import KEPT_ROUNDS, MAX_KEPT_ROUNDS, replayable_rounds
from spes_p2p.rounds.traffic import traffic

COARSE_PARTS = 2048
"""Maximum number of parts in the traffic computation: enough for the balance, and fast."""

CHECKPOINT_FILES = 3
"""Two in turn (training/checkpoint.py), and the next one while it is written."""

MAX_PEERS = 1024
"""Beyond this, computing the traffic of a round takes too long."""


@dataclass(frozen=True)
class Alternative:
    """What fits with some ways to save memory; each alternative adds one to those before."""

    means: str
    choice: Choice
    step_s: float
    """Estimated time of a step; only ratios mean anything."""


@dataclass(frozen=True)
class DiskBytes:
    """Maximum size of the run-dir, while checkpoint and base of a round are written, without fetched text."""

    base: int
    """The two that are served, of which the older one is a spare file, and the next one."""
    download: int
    """An older base while a peer downloads it, with the results since; or a base that this peer downloads."""
    scratch: int
    """The announced update, sums with their residuals and inputs, and the work set aside while other weights are measured."""
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
class WrittenBytes:
    """Bytes that a trainer writes in a round with one checkpoint. Rounds shorter than `checkpoint_minutes` have fewer."""

    base: int
    """The whole base; one in memory is written every KEPT_ROUNDS rounds."""
    checkpoint: int
    """Moments and pending work, with overlap also the announced update."""
    results: int
    """Encoded results of the round."""
    scratch: int
    """The announced update and sums with their residuals, in files: the kernel writes them when it needs their memory."""
    rounds: int
    """Rounds of the campaign."""

    @property
    def total(self) -> int:
        """Sum of one round."""
        return self.base + self.checkpoint + self.results + self.scratch

    @property
    def campaign(self) -> int:
        """Sum of the campaign's rounds."""
        return self.rounds * self.total


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
    costs: Costs
    alternatives: tuple[Alternative, ...]
    step_s: float
    """Estimated time of a step, as that of the alternatives."""
    host: HostBytes
    host_with_base: HostBytes
    """Host memory with `join --base ram`."""
    disk: DiskBytes
    bootstrap_disk: DiskBytes
    """Disk of a bootstrap peer with the default archive."""
    written: WrittenBytes
    written_with_arrays: WrittenBytes
    """With a round's arrays in memory and bases in files, which `join --base auto` chooses where memory suffices for that."""
    written_with_base: WrittenBytes
    """With `join --base ram`."""
    traffic: Traffic


def plan_peer(config: CampaignConfig, target: Device, bits_per_second: float, peers: int | None, memory_name: str) -> PeerPlan:
    """Return the plan of a peer on this device. `memory_name`: name of its memory in error messages.

    `peers`: size of the swarm; default: as many as own all experts. Raises UserError for more than MAX_PEERS, or if the shared
    weights do not fit.
    """
    if peers is not None and not 1 <= peers <= MAX_PEERS:
        raise UserError(f"--peers {peers}: must be 1 to {MAX_PEERS}")
    layout = sizes_of(config.model)
    choice = find_room(config, target, memory_name)
    program = choice.setup.ranks * PROGRAM_BYTES
    return PeerPlan(
        campaign=config.name,
        parameters=layout.size,
        shared_parameters=shared_elements(layout),
        expert_parameters=layout.expert(0).size,
        num_experts=config.model.moe_num_experts,
        target=target,
        choice=choice,
        costs=costs_of(config, choice.setup),
        alternatives=alternatives(config, target),
        step_s=step_seconds(config, choice.setup),
        host=replace(host_bytes(config, choice.setup), program=program),
        host_with_base=replace(host_bytes(config, choice.setup, base_in_memory=True), program=program),
        disk=disk_bytes(config, choice),
        bootstrap_disk=bootstrap_disk_bytes(config, PeerConfig.model_fields["archive_keep"].default),
        written=written_bytes(config, choice),
        written_with_arrays=written_bytes(config, choice, arrays_in_memory=True),
        written_with_base=written_bytes(config, choice, base_in_memory=True),
        traffic=round_traffic(config, choice.setup.owned, peers or _enough_peers(config, choice.setup.owned), bits_per_second),
    )


def disk_bytes(config: CampaignConfig, choice: Choice, arrays_in_memory: bool = False) -> DiskBytes:
    """Return the size of a trainer's run-dir. `arrays_in_memory`: those of a round."""
    owned = choice.setup.owned
    scratch = update_bytes(config, owned) + set_aside_bytes(config, owned) + 2 * sums_bytes(config) + inputs_bytes(config)
    # Moments and pending work before two phases, in bfloat16, for audits.
    moments = 3 * trained_bytes(config, owned) if are_audited(config) else 0
    return replace(
        _disk_bytes(config, KEPT_ROUNDS, 0),
        scratch=moments if arrays_in_memory else scratch + moments,
        checkpoint=CHECKPOINT_FILES * _checkpoint_bytes(config, choice),
    )


def _checkpoint_bytes(config: CampaignConfig, choice: Choice) -> int:
    announced = update_bytes(config, choice.setup.owned) if config.sync.overlap else 0
    return choice.device.moments + choice.device.weights + announced


def written_bytes(
    config: CampaignConfig, choice: Choice, base_in_memory: bool = False, arrays_in_memory: bool = False
) -> WrittenBytes:
    """Return what a trainer writes to its disk. A round's arrays are in memory also where bases are."""
    layout = sizes_of(config.model)
    base = 4 * base_size(layout, config.outer)
    scratch = update_bytes(config, choice.setup.owned) + 2 * sums_bytes(config)
    return WrittenBytes(
        base=base // KEPT_ROUNDS if base_in_memory else base,
        checkpoint=_checkpoint_bytes(config, choice),
        results=group_codecs(config.sync.codec).encoded_bytes(layout),
        scratch=0 if base_in_memory or arrays_in_memory else scratch,
        rounds=config.total_rounds,
    )


def bootstrap_disk_bytes(config: CampaignConfig, archived: int) -> DiskBytes:
    """Return the size of a bootstrap peer's run-dir with this many archived bases."""
    kept_rounds = replayable_rounds(sizes_of(config.model), group_codecs(config.sync.codec), config.outer)
    return _disk_bytes(config, kept_rounds, archived)


def _disk_bytes(config: CampaignConfig, kept_rounds: int, archived: int) -> DiskBytes:
    """Return the size of a run-dir without checkpoints."""
    layout = sizes_of(config.model)
    base, codecs = 4 * base_size(layout, config.outer), group_codecs(config.sync.codec)
    results = codecs.encoded_bytes(layout)
    return DiskBytes(
        base=(KEPT_SNAPSHOTS + 1) * base,
        download=base + max(base, (MAX_KEPT_ROUNDS - kept_rounds) * results),
        scratch=2 * all_sums_bytes(config) + max(2, config.sync.min_peers) * inputs_bytes(config),
        archive=archived * base,
        results=kept_rounds * results + codecs.encoded_bytes(layout, is_last=True),
        checkpoint=0,
    )


def round_traffic(
    config: CampaignConfig, capacity: int, peers: int, bits_per_second: float, layout: Layout | None = None
) -> Traffic:
    """Return the traffic in a round of the peer that trains most experts, among `peers` identical ones.

    `layout`: another one than that of the campaign's model.

    Shared weights of S encoded bytes are pushed to and pulled from the reducers: 2 S (N - 1) / N up and down. An expert with
    one owner is sent once to each other peer. Headers, plans and digests (about 0.1 %) are not counted, nor checks of reducers
    (1/64 at most, but in small models).
    """
    experts, codecs = config.model.moe_num_experts, group_codecs(config.sync.codec)
    names = [f"{index:05d}" for index in range(peers)]
    owners = assign_experts(experts, dict.fromkeys(names, capacity), (), config.experts.redundancy, config.name)
    members = tuple(Member(name, 1, tuple(int(name in expert) for expert in owners), 1.0) for name in names)
    owned = [sum(member.routed) for member in members]
    up, down = _busiest(layout or sizes_of(config.model), members, owned.index(max(owned)), codecs)
    return Traffic(peers, max(owned), sum(map(bool, owners)), up, down, bits_per_second)


def _busiest(layout: Layout, members: tuple[Member, ...], me: int, codecs: GroupCodecs) -> tuple[int, int]:
    """Return the bytes (up, down) of one member, from the round's parts."""
    coarse = max(PART_BYTES, codecs.encoded_bytes(layout) // COARSE_PARTS)
    up, down = traffic(part_table(layout, members, codecs, coarse), len(members))
    return up[me], down[me]


def alternatives(config: CampaignConfig, target: Device) -> tuple[Alternative, ...]:
    """Return what fits with one more way to save memory after another, without those that change nothing."""
    means: list[tuple[str, dict[str, object]]] = [
        ("small micro-batches", {"optimizer": "adamw", "checkpointing": False, "stored_on": "device", "sharded": False}),
        ("+ 8-bit AdamW", {"checkpointing": False, "stored_on": "device", "sharded": False}),
        ("+ checkpointing", {"stored_on": "device", "sharded": False}),
        ("+ host storage", {"sharded": False}),
    ]
    if target.ranks > 1:
        means.append(("+ sharding", {"sharded": True}))
    found: list[Alternative] = []
    for name, asked in means:
        with contextlib.suppress(UserError):
            choice = find_room(config, target, "", asked)
            if not found or choice != found[-1].choice:
                found.append(Alternative(name, choice, step_seconds(config, choice.setup)))
    return tuple(found)


def _enough_peers(config: CampaignConfig, owned: int) -> int:
    places = config.model.moe_num_experts * config.experts.redundancy
    return max(2, config.sync.min_peers, math.ceil(places / owned) if owned else 0)
