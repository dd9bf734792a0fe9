"""The device to train on and its free memory."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import torch

from spes_p2p.campaign.room import Device
from spes_p2p.errors import UserError

MEMINFO = Path("/proc/meminfo")
DRIVER_TIMEOUT_S = 10.0
"""A driver that hangs longer is not asked; the display's margin is then missing."""


def choose_device(wanted: str) -> str:
    """Return cpu or cuda. Raises UserError if CUDA is requested but not available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu or auto")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def measured(device: str) -> Device:
    """Return the device with its free memory; for a CPU, what Linux can give a new process without swapping."""
    available = available_bytes(MEMINFO.read_text())
    has_adamw8bit = importlib.util.find_spec("torchao") is not None
    if device == "cpu":
        return Device("cpu", available, has_adamw8bit=has_adamw8bit)
    free, _ = torch.cuda.mem_get_info()
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    drives_display = has_active_display(_driver_listing(), uuid)
    return Device("cuda", free, host_memory=available, drives_display=drives_display, has_adamw8bit=has_adamw8bit)


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


def available_bytes(meminfo: str) -> int:
    """Return MemAvailable from the text of /proc/meminfo, which counts in KiB."""
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])
