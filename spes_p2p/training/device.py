"""One compute device: its name, its context, and samples on their way to it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def device_name(device: torch.device) -> str:
    """Return the driver's name of a GPU, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def selected(device: torch.device) -> torch.cuda.device:
    """Make a GPU this thread's current one, which pinned memory and kernels of other libraries use."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def bound_memory(device: torch.device, memory_bytes: int | None) -> None:
    """Keep torch in this process from taking more of a GPU's memory; None: no bound."""
    if memory_bytes is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)


def autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on a GPU."""
    # Each matrix is used once in a pass, so a cache would only keep the copies that checkpointing drops.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def sent_to(device: torch.device, samples: npt.NDArray[np.int64]) -> Tensor:
    """Copy samples to the device, which goes on beside this thread where that is possible."""
    chunk = torch.from_numpy(samples)
    if device.type == "cuda":
        chunk = chunk.pin_memory()
    return chunk.to(device, non_blocking=True)
