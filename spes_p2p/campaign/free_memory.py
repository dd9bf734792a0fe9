"""The devices to train on and their free memory."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence

import psutil
import torch

from spes_p2p.campaign.room import Device
from spes_p2p.errors import UserError
from spes_p2p.model.backends import FIRST_WITH_BF16

DRIVER_TIMEOUT_S = 10.0
"""A driver that hangs longer is not asked; the display's margin is then missing."""


def choose_devices(wanted: str) -> tuple[torch.device, ...]:
    """Return the devices that `--devices` names (`PeerConfig.devices`). Raises UserError for one that does not exist."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        wanted = "0" if gpus else "cpu"
    if wanted.startswith("cpu"):
        return (torch.device("cpu"),) * len(wanted.split(","))
    numbers = list(range(gpus)) if wanted == "all" else [int(number) for number in wanted.split(",")]
    if gpus == 0:
        raise UserError(f"--devices {wanted}: this machine has no GPU that torch can use; give --devices cpu or auto")
    if max(numbers) >= gpus or len(set(numbers)) < len(numbers):
        found = ",".join(map(str, range(gpus)))
        raise UserError(f"--devices {wanted}: this machine's GPUs are {found}; give each at most once")
    return tuple(torch.device("cuda", number) for number in numbers)


def measured(devices: Sequence[torch.device]) -> Device:
    """Return these devices, all of one kind, as one with the least of their free memory; on a CPU they share the machine's.

    Measuring makes this process's CUDA context. Each of several devices is trained on by a process that makes one of its own.
    """
    main = psutil.virtual_memory()
    has_adamw8bit = importlib.util.find_spec("torchao") is not None
    if devices[0].type == "cpu":
        share, total = main.available // len(devices), main.total // len(devices)
        return Device("cpu", share, ranks=len(devices), has_adamw8bit=has_adamw8bit, total=total)
    free, total = min(torch.cuda.mem_get_info(device) for device in devices)
    listing = _driver_listing()
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return Device(
        "cuda", free, ranks=len(devices), host_memory=main.available, has_adamw8bit=has_adamw8bit,
        drives_display=any(has_active_display(listing, uuid) for uuid in uuids), total=total,
        has_context=len(devices) == 1, without_bf16=next(filter(None, map(_without_bf16, devices)), ""),
    )


def _without_bf16(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability >= FIRST_WITH_BF16:
        return ""
    return f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"


def has_active_display(listing: str, uuid: str) -> bool:
    """Return whether the driver's listing (a line `uuid, display_active` for each card) says that this card has a display."""
    cards = (line.split(",") for line in listing.splitlines() if "," in line)
    return any(name.strip().removeprefix("GPU-") == uuid.removeprefix("GPU-") and state.strip() == "Enabled"
               for name, state, *_ in cards)


def _driver_listing() -> str:
    """Return the cards with the state of their display; nothing where the driver's tool is missing or fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid,display_active", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
