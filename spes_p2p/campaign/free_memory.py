"""The device to compute on, and how much memory is free there now."""

from __future__ import annotations

from pathlib import Path

import torch

from spes_p2p.campaign.planner import Device
from spes_p2p.errors import UserError

MEMINFO = Path("/proc/meminfo")


def choose_device(wanted: str) -> str:
    """The device to compute on. Raises UserError when CUDA is asked for and not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu or auto")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def measured(device: str) -> Device:
    """The free memory of a CUDA device, or what Linux could give a new process without swapping."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return Device("cuda", free)
    return Device("cpu", available_bytes(MEMINFO.read_text()))


def available_bytes(meminfo: str) -> int:
    """MemAvailable of the text of /proc/meminfo, which counts in KiB."""
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])
