"""What a trainer needs beside the base to go on after a restart: moments, and pending work."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.interfaces import Store
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)

PENDING, OPTIMIZER = "pending.", "optimizer."


def checkpoint_name(round_number: int) -> str:
    """Two files in turn: the checkpoint of the base on disk stays while the next one is written, before the next base is."""
    return f"checkpoint-{round_number % 2}.safetensors"


def save_checkpoint(
    store: Store, trainer: Trainer, layout: Layout, base: np.ndarray, head: str, round_number: int
) -> None:
    """Save moments and `local - base` of everything that is trained here, as of the base of this head."""
    arrays = {OPTIMIZER + name: array for name, array in trainer.optimizer_state().items()}
    for group in layout.groups:
        if group.expert is None or group.expert in trainer.owned:
            pending = trainer.read(group) - base[group.start : group.stop]
            if pending.any():
                arrays[PENDING + group.name] = pending
    metadata = {"head": head, "owned": _owned(trainer), "crc32": _crc(arrays)}
    store.write(checkpoint_name(round_number), [safetensors.numpy.save(arrays, metadata=metadata)])


def load_checkpoint(store: Store, trainer: Trainer, layout: Layout, head: str, round_number: int) -> bool:
    """Restore what `save_checkpoint` saved, when it was for this head and these experts, whole or not at all.

    False, with a warning, when there is none that fits: training goes on from the base with fresh moments.
    """
    blob = store.read(checkpoint_name(round_number))
    if blob is None:
        logger.warning("no checkpoint of round %d: going on from its base with fresh moments", round_number)
        return False
    data = bytes(blob)
    try:
        arrays = safetensors.numpy.load(data)
        metadata = _metadata(data)
        intact = metadata["crc32"] == _crc(arrays)
        saved_for = metadata["head"], metadata["owned"]
    except (safetensors.SafetensorError, ValueError, KeyError):
        intact, saved_for, arrays = False, ("", ""), {}
    if not intact or saved_for != (head, _owned(trainer)):
        what = "is of another round" if intact else "is cut short or damaged"
        logger.warning("%s %s: going on from the base with fresh moments", checkpoint_name(round_number), what)
        return False
    trainer.load_optimizer_state({n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)})
    for name, pending in arrays.items():
        if name.startswith(PENDING):
            trainer.add(layout.group(name.removeprefix(PENDING)), pending)
    return True


def _crc(arrays: Mapping[str, np.ndarray]) -> str:
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc)
    return f"{crc:08x}"


def _owned(trainer: Trainer) -> str:
    return ",".join(map(str, trainer.owned))


def _metadata(data: bytes) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return metadata
