"""What a trainer needs beside the base to go on after a restart: moments, and pending work."""

from __future__ import annotations

import numpy as np
import safetensors.numpy

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.interfaces import Store
from spes_p2p.training.interface import Trainer

CHECKPOINT = "checkpoint.safetensors"
PENDING, OPTIMIZER = "pending.", "optimizer."


def save_checkpoint(store: Store, trainer: Trainer, layout: Layout, base: np.ndarray, head: str) -> None:
    """Save moments and `local - base` of everything that is trained here, as of the base of this head."""
    arrays = {OPTIMIZER + name: array for name, array in trainer.optimizer_state().items()}
    for group in layout.groups:
        if group.expert is None or group.expert in trainer.owned:
            pending = trainer.read(group) - base[group.start : group.stop]
            if pending.any():
                arrays[PENDING + group.name] = pending
    store.write(CHECKPOINT, [safetensors.numpy.save(arrays, metadata={"head": head, "owned": _owned(trainer)})])


def load_checkpoint(store: Store, trainer: Trainer, layout: Layout, head: str) -> bool:
    """Restore what `save_checkpoint` saved, when it was for this head and these experts. False when it does not fit."""
    blob = store.read(CHECKPOINT)
    if blob is None:
        return False
    data = bytes(blob)
    try:
        arrays = safetensors.numpy.load(data)
        metadata = _metadata(data)
    except (safetensors.SafetensorError, ValueError, KeyError):
        return False
    if metadata.get("head") != head or metadata.get("owned") != _owned(trainer):
        return False
    trainer.load_optimizer_state({n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)})
    for name, pending in arrays.items():
        if name.startswith(PENDING):
            trainer.add(layout.group(name.removeprefix(PENDING)), pending)
    return True


def _owned(trainer: Trainer) -> str:
    return ",".join(map(str, trainer.owned))


def _metadata(data: bytes) -> dict[str, str]:
    import json

    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return metadata
