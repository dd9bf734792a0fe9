"""The device to train on and its free memory."""

from __future__ import annotations

from pathlib import Path

import torch

from spes_p2p.campaign.planner import Device
from spes_p2p.errors import UserError

MEMINFO = Path("/proc/meminfo")


def choose_device(wanted: str) -> str:
    """Return cpu or cuda. Raises UserError if CUDA is requested but not available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu or auto")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def measured(device: str) -> Device:
    """Return the device with its free memory; for a CPU, what Linux can give a new process without swapping."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return Device("cuda", free)
    return Device("cpu", available_bytes(MEMINFO.read_text()))


def available_bytes(meminfo: str) -> int:
    """Return MemAvailable from the text of /proc/meminfo, which counts in KiB."""
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])
