"""How a peer stores foreign experts, in words and numbers: for formulas, which import no torch."""

from __future__ import annotations

from typing import Literal

StoredFormat = Literal["fp32", "bf16", "int8"]
StoredPlace = Literal["device", "host"]
"""Where foreign experts are stored: on the device, or in host memory and prefetched layer by layer."""
Home = Literal["device", "host", "shared", "absent"]
"""Where a process has weights between their uses: shared is main memory that the other ranks of its peer read, too
(shared_memory.py); those that are absent belong to another rank (sharding.py), or are its shared ones."""
SLOTS = 2
"""Layers that are on the device at a time if they are stored in host memory (prefetch.py)."""
