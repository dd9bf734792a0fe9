"""How a trainer uses its machine: device, number of experts, and the options with which they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spes_p2p.campaign.files import CampaignFiles
from spes_p2p.campaign.free_memory import measured
from spes_p2p.campaign.host_memory import SHARE_FOR_THE_BASE, HostBytes, host_bytes
from spes_p2p.campaign.plan_table import describe_setup
from spes_p2p.campaign.planner import disk_bytes, round_traffic
from spes_p2p.campaign.room import Choice, Device, check_ranks, find_room, needed_bytes, smallest
from spes_p2p.campaign.speed import costs_of
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.data.pieces import PIECE_BYTES
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.errors import UserError
from spes_p2p.model.sizes import sizes_of
from spes_p2p.observe.units import human_bytes
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.session.evaluation_room import free_disk
from spes_p2p.session.traffic import HEADERS
from spes_p2p.training.options import TrainingOptions, check_options

LEAST_ROUNDS, WORTH_ROUNDS = 3, 20
"""Rounds that a day's quota has to suffice for beside joining, and those that the quota named as enough buys."""
MORE_THAN_PLANNED = 1.5
"""Rounds of small models take this many times what is planned."""


@dataclass(frozen=True)
class Resources:
    """Device, number of experts and training options of a trainer."""

    device: Device
    """With its free memory."""
    choice: Choice
    options: TrainingOptions
    description: str
    """What was chosen, and what it costs in speed; shown to the user."""
    base_in_memory: bool
    """Whether bases and the arrays of a round are in memory."""
    arrays_in_memory: bool
    """Whether at least the arrays of a round are."""

    def left_memory(self, config: CampaignConfig) -> int:
        """Return the main memory in bytes that training leaves of what is free."""
        host = host_bytes(config, self.choice.setup, self.base_in_memory, self.arrays_in_memory).total
        return _main_memory(self.device, self.choice) - self.device.spare * (self.device.kind == "cpu") - host

    @property
    def warning(self) -> str:
        """What makes this device slow, in a line; "" where nothing is known."""
        if not self.device.without_bf16:
            return ""
        return (f"no native bf16 on {self.device.without_bf16}: experts are computed one after the other (eager), in emulated "
                "bf16; expect slow steps")

    @property
    def experts(self) -> int:
        """Maximum number of experts to train."""
        return self.choice.setup.owned


def choose_resources(devices: Sequence[torch.device], settings: PeerConfig, config: CampaignConfig) -> Resources:
    """Return `resources_on` these devices of this machine. Raises UserError also for options that it lacks."""
    resources = resources_on(measured(devices), settings, config)
    check_options(config.model, resources.options, resources.device.kind)
    return resources


def resources_on(device: Device, settings: PeerConfig, config: CampaignConfig) -> Resources:
    """Return what a peer with this device trains: as many experts as fit, or as requested, with the options that were given.

    Raises UserError for more experts than the model has, for devices that cannot divide a batch equally, or, with
    `experts: auto`, if the shared weights do not fit. A requested number that does not seem to fit is described as such and
    tried.
    """
    device = device.at_most(settings.memory_bytes).leaving(settings.leave_free)
    if device.spare >= device.memory:
        left, there = human_bytes(device.spare), human_bytes(device.memory)
        raise UserError(f"--leave-free: {left} are to be left, and {there} are free; give less, or close other programs")
    device = replace(device, base_in_memory=settings.base == "ram")
    wanted, experts, asked = settings.experts, config.model.moe_num_experts, _asked(settings)
    check_ranks(config, device.ranks, f"--devices {settings.devices}")
    _check_sharding(settings, device)
    name = "--memory" if device.memory == settings.memory_bytes else f"free memory ({device.kind})"
    doubt = ""
    if wanted == "auto":
        choice = find_room(config, device, name, asked)
    elif wanted > experts:
        raise UserError(f"--experts {wanted}: the campaign's model has {experts} experts; give at most that, or auto")
    else:
        try:
            choice = find_room(config, device, name, asked, wanted)
        except UserError:
            choice = smallest(config, device, wanted, asked)
            needed, free = needed_bytes(config, device, choice), device.memory
            doubt = f"; this may not fit: it takes {human_bytes(needed)} of {human_bytes(free)}"
    setup = choice.setup
    options = TrainingOptions(
        stored=setup.stored,
        stored_on=setup.stored_on,
        backend=settings.backend,
        optimizer=setup.optimizer,
        activation_checkpointing=setup.checkpointing,
        sharded=setup.sharded,
        compiles=settings.compile == "auto",
        micro_batch_size=setup.micro_batch,
        memory_bytes=None if settings.leave_free is None and settings.memory_bytes is None else device.memory - device.spare,
    )
    description = f"{describe_setup(setup, experts)}; {costs_of(config, setup)}{doubt}"
    is_auto, all_of_it = settings.base == "auto", host_bytes(config, setup, base_in_memory=True)
    bases = settings.base == "ram" or (is_auto and _has_room(device, all_of_it, choice))
    arrays = bases or (is_auto and _has_room(device, host_bytes(config, setup, arrays_in_memory=True), choice))
    return Resources(device, choice, options, description, bases, arrays)


def disk_space(files: CampaignFiles, settings: PeerConfig, resources: Resources) -> tuple[int, int]:
    """Return the bytes that a trainer's run-dir needs at most, with its text, and those that it can have."""
    config, run_dir = files.campaign.config, settings.run_dir.resolve()
    text = 2 * sum(file.num_bytes for file in files.training_manifest.files) // max(2, config.sync.min_peers)
    needed = disk_bytes(config, resources.choice, resources.arrays_in_memory).total + min(text, settings.token_cache_bytes)
    return needed, free_disk(run_dir) + _bytes_in(run_dir)


def left_disk(files: CampaignFiles, settings: PeerConfig, resources: Resources) -> int:
    """Return the bytes of disk that a trainer leaves free; negative where it lacks some itself."""
    needed, free = disk_space(files, settings, resources)
    return free - needed


def _bytes_in(folder: Path) -> int:
    """Return what the files take on the disk; other processes may write there meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += 512 * path.lstat().st_blocks
    return found


def require_disk(files: CampaignFiles, settings: PeerConfig, resources: Resources) -> None:
    """Raise UserError where the disk is too small: the peer would end in the middle of a round."""
    needed, free = disk_space(files, settings, resources)
    if free < needed:
        raise UserError(f"{settings.run_dir}: {human_bytes(free)} of disk are free, a trainer of this campaign needs up to "
                        f"{human_bytes(needed)} (spes-p2p plan says what for); free disk space, or choose another --run-dir")


def round_bytes(config: CampaignConfig, experts: int) -> int:
    """Return about what a trainer of so many experts sends and receives in a round of the campaign's first size."""
    traffic = round_traffic(config, experts, max(2, config.sync.min_peers), math.inf)
    return traffic.up_bytes + traffic.down_bytes


def join_bytes(files: CampaignFiles, shelf: TokenShelf, round_bytes: int, missed: int | None = None) -> int:
    """Return about what a trainer fetches before its first round.

    `missed`: the rounds since its base; None: it has none. Then it fetches one, text for its first phase and the first
    evaluation, and the round that the others end meanwhile; one that has missed more rounds than peers keep, a base again.
    """
    base = 4 * base_size(sizes_of(files.campaign.config.model), files.campaign.config.outer)
    if missed is None:
        return round(HEADERS * (base + _text_bytes(files, shelf))) + round_bytes
    return missed * round_bytes if missed <= KEPT_ROUNDS else round(HEADERS * base) + round_bytes


def _text_bytes(files: CampaignFiles, shelf: TokenShelf) -> int:
    """Return at most what the samples of a phase and of an evaluation take of the text that is not on this machine."""
    config = files.campaign.config
    samples = config.training.batch_size * config.training.sync_steps, config.evaluation.max_samples
    return sum(
        min(number * PIECE_BYTES, sum(file.num_bytes for file in manifest.files if not shelf.is_local(file)))
        for number, manifest in zip(samples, files.manifests, strict=False)
    )


def require_quota(settings: PeerConfig, files: CampaignFiles, shelf: TokenShelf, round_bytes: int) -> None:
    """Raise UserError for a quota that a first start uses up: the trainer would never train."""
    joining = join_bytes(files, shelf, round_bytes)
    needed = joining + LEAST_ROUNDS * round_bytes
    worth = joining + WORTH_ROUNDS * MORE_THAN_PLANNED * round_bytes
    enough = human_bytes(1.01 * worth).replace(" ", "")
    if settings.quota is not None and settings.quota < needed:
        raise UserError(f"--quota {human_bytes(settings.quota)}/day: does not suffice to join, which takes about "
                        f"{human_bytes(joining)} for the model, text and the rounds meanwhile, and for rounds of about "
                        f"{human_bytes(round_bytes)}; give {enough}/day or more (for joining and about "
                        f"{WORTH_ROUNDS} rounds on the first day), or no quota")


def _has_room(device: Device, needed: HostBytes, choice: Choice) -> bool:
    """Return whether bases or the arrays of a round may take so much main memory, next to this training."""
    return needed.total <= SHARE_FOR_THE_BASE * _main_memory(device, choice)


def _main_memory(device: Device, choice: Choice) -> int:
    """Return the free main memory without what a CPU's replicas and moments take of it."""
    return device.ranks * (device.memory - choice.device.total) if device.kind == "cpu" else device.host_memory or 0


def _check_sharding(settings: PeerConfig, device: Device) -> None:
    """Raise UserError for --sharding beside what excludes it."""
    if not settings.sharding:
        return
    if device.ranks == 1:
        raise UserError("--sharding: divides the layers among several devices; name them with --devices, or leave it out")
    if settings.activation_checkpointing is False:
        raise UserError("--sharding: recomputes activations; leave out --no-activation-checkpointing")


def _asked(settings: PeerConfig) -> dict[str, Any]:
    """Return the values of `Setup` that the user chose."""
    given = {
        "stored": settings.stored,
        "stored_on": settings.stored_on,
        "optimizer": settings.optimizer,
        "checkpointing": "auto" if settings.activation_checkpointing is None else settings.activation_checkpointing,
        "micro_batch": settings.micro_batch_size or "auto",
        "sharded": "auto" if settings.sharding is None else settings.sharding,
    }
    return {name: value for name, value in given.items() if value != "auto"}
