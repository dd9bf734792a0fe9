"""What a trainer needs beside the base to go on after a restart: moments, pending work, and how much work that is."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.storage.interfaces import Draft, Store
from spes_p2p.storage.tensor_file import Source, read_tensors, tensor_chunks, tensor_header, whole
from spes_p2p.training.interface import Trainer
from spes_p2p.training.pending import add_pending, pending_pieces, trained_groups

logger = logging.getLogger(__name__)

PENDING, OPTIMIZER, LEDGER = "pending.", "optimizer.", "ledger."
CRC, NO_CRC = "crc32", "0" * 8


class Account(Protocol):
    """What stands behind pending work (`rounds/accounting.py`)."""

    def state(self) -> dict[str, np.ndarray]:
        """By name."""

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Undo of `state`."""


@dataclass(frozen=True)
class Checkpoint:
    """All that a restart needs beside the base, written and not yet durable; the trainer may train on."""

    name: str
    draft: Draft
    sources: dict[str, Source]
    """What they are; their values are in the draft."""
    metadata: dict[str, str]


def checkpoint_names(round_number: int) -> tuple[str, str]:
    """Two files in turn; the second one where the base on disk has the first, after a jump over rounds."""
    here, there = round_number % 2, (round_number + 1) % 2
    return f"checkpoint-{here}.safetensors", f"checkpoint-{there}.safetensors"


def take_checkpoint(
    store: Store, trainer: Trainer, account: Account, layout: Layout, base: np.ndarray, head: str, round_number: int,
    kept: str | None,
) -> Checkpoint:
    """Write moments and `local - base` of everything that is trained here, as of the base of this head, beside its file.

    `kept`: name of the checkpoint of the base on disk. It stays, since the next base is written after its checkpoint.
    Raises UserError (disk full).
    """
    sources = {OPTIMIZER + name: source for name, source in trainer.optimizer_state().items()}
    sources.update({LEDGER + name: whole(array) for name, array in account.state().items()})
    for group in trained_groups(trainer):
        pieces = partial(pending_pieces, trainer, base, group)
        if any(piece.any() for piece in pieces()):
            sources[PENDING + group.name] = Source(np.dtype(np.float32), (group.size,), pieces)
    first, second = checkpoint_names(round_number)
    name, metadata = second if first == kept else first, {"head": head, "owned": _owned(trainer), CRC: NO_CRC}
    draft, size = store.draft(name), 0
    for chunk in tensor_chunks(sources, metadata):
        draft.write(size, chunk)
        size += memoryview(chunk).nbytes
    return Checkpoint(name, draft, sources, metadata)


def write_checkpoint(checkpoint: Checkpoint) -> None:
    """Make it durable in place of the one of its name."""
    arrays, _ = read_tensors(checkpoint.draft.view())
    checkpoint.draft.write(0, tensor_header(checkpoint.sources, {**checkpoint.metadata, CRC: _crc(arrays)}))
    checkpoint.draft.publish()


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
        intact, saved_for = metadata[CRC] == _crc(arrays), (metadata["head"], metadata["owned"])
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
            add_pending(trainer, layout.group(name.removeprefix(PENDING)), pending)


def _crc(arrays: Mapping[str, np.ndarray]) -> str:
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return f"{crc:08x}"


def _owned(trainer: Trainer) -> str:
    return ",".join(map(str, trainer.owned))
