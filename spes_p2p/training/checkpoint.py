"""What a trainer needs beside the base to go on after a restart: moments, pending work, and how much work that is."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.interfaces import Store
from spes_p2p.training.interface import Trainer
from spes_p2p.training.tensor_file import read_tensors, tensor_chunks

logger = logging.getLogger(__name__)

PENDING, OPTIMIZER, LEDGER = "pending.", "optimizer.", "ledger."


class Account(Protocol):
    """What stands behind pending work (`sync/accounting.py`)."""

    def state(self) -> dict[str, np.ndarray]:
        """By name."""

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Undo of `state`."""


@dataclass(frozen=True)
class Checkpoint:
    """Copies of all that a restart needs beside the base; the trainer may train on while it is written."""

    name: str
    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]


def checkpoint_names(round_number: int) -> tuple[str, str]:
    """Two files in turn; the second one where the base on disk has the first, after a jump over rounds."""
    here, there = round_number % 2, (round_number + 1) % 2
    return f"checkpoint-{here}.safetensors", f"checkpoint-{there}.safetensors"


def take_checkpoint(
    trainer: Trainer, account: Account, layout: Layout, base: np.ndarray, head: str, round_number: int, kept: str | None
) -> Checkpoint:
    """Copy moments and `local - base` of everything that is trained here, as of the base of this head.

    `kept`: name of the checkpoint of the base on disk. It stays, since the next base is written after its checkpoint.
    """
    arrays = {OPTIMIZER + name: array for name, array in trainer.optimizer_state().items()}
    arrays.update({LEDGER + name: array.copy() for name, array in account.state().items()})
    for group in layout.groups:
        if group.expert is None or group.expert in trainer.owned:
            pending = trainer.read(group)
            np.subtract(pending, base[group.start : group.stop], out=pending)
            if pending.any():
                arrays[PENDING + group.name] = pending
    first, second = checkpoint_names(round_number)
    return Checkpoint(second if first == kept else first, arrays, {"head": head, "owned": _owned(trainer)})


def write_checkpoint(store: Store, checkpoint: Checkpoint) -> None:
    """Make it durable in place of the one of its name."""
    metadata = {**checkpoint.metadata, "crc32": _crc(checkpoint.arrays)}
    store.write(checkpoint.name, tensor_chunks(checkpoint.arrays, metadata))


def load_checkpoint(
    store: Store, trainer: Trainer, account: Account, layout: Layout, head: str, round_number: int
) -> str | None:
    """Restore what `take_checkpoint` took, when it was for this head and these experts, whole or not at all; returns its name.

    None, with a warning, when there is none that fits: training goes on from the base with fresh moments.
    """
    problems = []
    for name in checkpoint_names(round_number):
        arrays, problem = _read(store, name, (head, _owned(trainer)))
        if arrays is not None:
            _restore(arrays, trainer, account, layout)
            return name
        if problem:
            problems.append(f"{name} {problem}")
    what = problems[0] if problems else f"no checkpoint of round {round_number}"
    logger.warning("%s: going on from the base with fresh moments", what)
    return None


def _read(store: Store, name: str, wanted_for: tuple[str, str]) -> tuple[dict[str, np.ndarray] | None, str]:
    """The arrays of a checkpoint that is whole and for this head and these experts, or what is wrong with it."""
    blob = store.read(name)
    if blob is None:
        return None, ""
    try:
        arrays, metadata = read_tensors(blob)
        intact, saved_for = metadata["crc32"] == _crc(arrays), (metadata["head"], metadata["owned"])
    except (ValueError, KeyError):
        return None, "is cut short or damaged"
    if not intact:
        return None, "is cut short or damaged"
    return (arrays, "") if saved_for == wanted_for else (None, "is of another round")


def _restore(arrays: Mapping[str, np.ndarray], trainer: Trainer, account: Account, layout: Layout) -> None:
    trainer.load_optimizer_state({n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)})
    account.load_state({n.removeprefix(LEDGER): a for n, a in arrays.items() if n.startswith(LEDGER)})
    for name, pending in arrays.items():
        if name.startswith(PENDING):
            trainer.add(layout.group(name.removeprefix(PENDING)), pending)


def _crc(arrays: Mapping[str, np.ndarray]) -> str:
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return f"{crc:08x}"


def _owned(trainer: Trainer) -> str:
    return ",".join(map(str, trainer.owned))
