"""What a trainer needs besides the base to resume after a restart: moments, pending, and the ledger of pending."""

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


class LedgerState(Protocol):
    """The ledger of pending (`rounds/accounting.py`)."""

    def state(self) -> dict[str, np.ndarray]:
        """Return the ledger as arrays by name."""

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore `state`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is written but not yet durable. The trainer may continue meanwhile."""

    name: str
    draft: Draft
    sources: dict[str, Source]
    """Names, dtypes and shapes of the arrays; their values are in the draft."""
    metadata: dict[str, str]


def checkpoint_names(round_number: int) -> tuple[str, str]:
    """Return the preferred and the alternative file name; the latter is used while the base on disk needs the former."""
    here, there = round_number % 2, (round_number + 1) % 2
    return f"checkpoint-{here}.safetensors", f"checkpoint-{there}.safetensors"


def take_checkpoint(
    store: Store, trainer: Trainer, ledger: LedgerState, layout: Layout, base: np.ndarray, commit: str, round_number: int,
    kept: str | None,
) -> Checkpoint:
    """Write a draft of moments, ledger and `local - base` of every trained group, relative to the base of this commit.

    `kept`: checkpoint of the base on disk, which must not be replaced before the next base is durable.
    Raises UserError (disk full).
    """
    sources = {OPTIMIZER + name: source for name, source in trainer.optimizer_state().items()}
    sources.update({LEDGER + name: whole(array) for name, array in ledger.state().items()})
    for group in trained_groups(trainer):
        pieces = partial(pending_pieces, trainer, base, group)
        if any(piece.any() for piece in pieces()):
            sources[PENDING + group.name] = Source(np.dtype(np.float32), (group.size,), pieces)
    first, second = checkpoint_names(round_number)
    name, metadata = second if first == kept else first, {"commit": commit, "owned": _owned(trainer), CRC: NO_CRC}
    draft, size = store.draft(name), 0
    for chunk in tensor_chunks(sources, metadata):
        draft.write(size, chunk)
        size += memoryview(chunk).nbytes
    return Checkpoint(name, draft, sources, metadata)


def write_checkpoint(checkpoint: Checkpoint) -> None:
    """Make the checkpoint durable, replacing the one of its name."""
    arrays, _ = read_tensors(checkpoint.draft.view())
    checkpoint.draft.write(0, tensor_header(checkpoint.sources, {**checkpoint.metadata, CRC: _crc(arrays)}))
    checkpoint.draft.publish()


def load_checkpoint(
    store: Store, trainer: Trainer, ledger: LedgerState, layout: Layout, commit: str, round_number: int
) -> str | None:
    """Restore the checkpoint of this commit and the owned experts, completely or not at all, and return its name.

    Returns None with a warning if none matches: training then continues from the base with fresh moments.
    """
    problems = []
    for name in checkpoint_names(round_number):
        arrays, problem = _read(store, name, (commit, _owned(trainer)))
        if arrays is not None:
            _restore(arrays, trainer, ledger, layout)
            return name
        if problem:
            problems.append(f"{name} {problem}")
    problem = problems[0] if problems else f"no checkpoint of round {round_number}"
    logger.warning("%s: continuing from the base with fresh moments", problem)
    return None


def _read(store: Store, name: str, wanted_for: tuple[str, str]) -> tuple[dict[str, np.ndarray] | None, str]:
    """Return the arrays of a valid checkpoint for (commit, owned experts), or None and the problem."""
    blob = store.read(name)
    if blob is None:
        return None, ""
    try:
        arrays, metadata = read_tensors(blob)
        intact, saved_for = metadata[CRC] == _crc(arrays), (metadata["commit"], metadata["owned"])
    except (ValueError, KeyError):
        intact = False
    if not intact:
        return None, "is truncated or damaged"
    return (arrays, "") if saved_for == wanted_for else (None, "belongs to another round")


def _restore(arrays: Mapping[str, np.ndarray], trainer: Trainer, ledger: LedgerState, layout: Layout) -> None:
    trainer.load_optimizer_state({n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)})
    ledger.load_state({n.removeprefix(LEDGER): a for n, a in arrays.items() if n.startswith(LEDGER)})
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
