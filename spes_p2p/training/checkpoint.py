"""What a trainer needs besides the base to resume after a restart: moments, pending, and the ledger of pending."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.storage.interfaces import Draft, Store
from spes_p2p.storage.tensor_file import Source, read_tensors, tensor_chunks, tensor_header, whole
from spes_p2p.training.interface import Trainer
from spes_p2p.training.pending import PENDING, add_pending, pending_sources

logger = logging.getLogger(__name__)

OPTIMIZER, LEDGER = "optimizer.", "ledger."
CRC, NO_CRC = "crc32", "0" * 8
NO_COMMIT = ""
"""Commit of a checkpoint of moments alone, which belongs to no base."""


class LedgerState(Protocol):
    """The ledger of pending (`rounds/accounting.py`)."""

    def state(self, is_announced: bool = False) -> dict[str, np.ndarray]:
        """Return the ledger as arrays by name. `is_announced`: with the announced update apart."""

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore `state`."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back."""

    name: str
    is_whole: bool
    """False for one of another round: only its moments were restored."""
    steps: int
    """Steps of the phase after its base that the pending work includes."""
    has_left: bool = False
    """Whether it is one of moments alone."""


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
    store: Store, trainer: Trainer, ledger: LedgerState, base: np.ndarray, commit: str, round_number: int, kept: str | None,
    steps: int = 0, is_announced: bool = False,
) -> Checkpoint:
    """Write a draft of moments, ledger and `local - base` of every trained group, relative to the base of this commit.

    `kept`: checkpoint of the base on disk, which must not be replaced before the next base is durable. `steps`: of the phase
    after this base that are in it. `is_announced`: a round with the announced update is under way.
    Raises UserError (disk full).
    """
    arrays = {LEDGER + name: whole(array) for name, array in ledger.state(is_announced).items()}
    return _draft(store, trainer, arrays | pending_sources(trainer, base), commit, round_number, kept, steps)


def take_moments(store: Store, trainer: Trainer, round_number: int, kept: str | None) -> Checkpoint:
    """Write a draft of the moments alone, for a peer that gives its work to others. Errors as `take_checkpoint`."""
    return _draft(store, trainer, {}, NO_COMMIT, round_number, kept, 0)


def _draft(
    store: Store, trainer: Trainer, sources: dict[str, Source], commit: str, round_number: int, kept: str | None, steps: int
) -> Checkpoint:
    sources = {OPTIMIZER + name: source for name, source in trainer.optimizer_state().items()} | sources
    first, second = checkpoint_names(round_number)
    name = second if first == kept else first
    metadata = {
        "commit": commit, "owned": _owned(trainer), "round": str(round_number), "steps": str(steps), CRC: NO_CRC,
    }
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
    store: Store, trainer: Trainer, ledger: LedgerState, layout: Layout, commit: str, round_number: int, is_last: bool = True
) -> Restored | None:
    """Restore the checkpoint of this commit and the owned experts, completely; of two, the one with more steps.

    `is_last`: whether no later round is decided. Otherwise a checkpoint of moments alone goes first: the peer left,
    and others have the samples of its work.

    Without one, restore the moments of the newest other checkpoint, and warn unless it is one of moments alone. None if there
    is none at all: training then continues from the base with fresh moments, which is worth a warning unless it is base 0.
    """
    wanted = commit, _owned(trainer)
    found, problems = _kept_checkpoints(store)
    left = [kept for kept in found if kept.belongs_to[0] == NO_COMMIT and kept.round == round_number]
    if left and not is_last:
        found = left
    for kept in sorted(found, key=lambda kept: (kept.belongs_to == wanted, kept.round, kept.steps), reverse=True):
        if kept.crc != _crc(kept.arrays):
            problems.append(f"{kept.name} is truncated or damaged")
            continue
        if kept.belongs_to == wanted:
            _restore(kept.arrays, trainer, ledger, layout)
            for moments in left:  # the peer is back: its work is its own again
                store.delete(moments.name)
            return Restored(kept.name, True, kept.steps)
        _restore_moments(kept.arrays, trainer)
        if kept.belongs_to[0] == NO_COMMIT and not problems:
            left_after = max(0, kept.round)
            logger.info("continuing from the base with the moments of this trainer when it left after round %d", left_after)
            return Restored(kept.name, False, 0, has_left=True)
        if not problems and kept.round == round_number:
            other = "other experts" if kept.belongs_to[0] == commit else "another base"
            problems.append(f"the checkpoint of round {round_number} is of {other}")
        problem = problems[0] if problems else f"no checkpoint of round {round_number}"
        logger.warning("%s: continuing from the base with the moments of round %d", problem, kept.round)
        return Restored(kept.name, False, 0, has_left=kept.belongs_to[0] == NO_COMMIT)
    if problems or round_number >= 0:
        problem = problems[0] if problems else f"no checkpoint of round {round_number}"
        logger.warning("%s: continuing from the base with fresh moments", problem)
    return None


def newest_checkpoint(store: Store) -> int:
    """Return the round of the newest stored checkpoint; -1 without one."""
    return max((kept.round for kept in _kept_checkpoints(store)[0]), default=-1)


@dataclass(frozen=True)
class _Kept:
    """A stored checkpoint whose values are not verified yet."""

    name: str
    belongs_to: tuple[str, str]
    """Commit of the base, and owned experts."""
    round: int
    steps: int
    arrays: dict[str, np.ndarray]
    crc: str


def _kept_checkpoints(store: Store) -> tuple[list[_Kept], list[str]]:
    """Return the stored checkpoints, and what is wrong with others."""
    found, problems = [], []
    for name in checkpoint_names(0):
        try:
            blob = store.read(name)
            if blob is not None:
                arrays, about = read_tensors(blob)
                owner, place = (about["commit"], about["owned"]), (int(about["round"]), int(about["steps"]))
                found.append(_Kept(name, owner, *place, arrays, about[CRC]))
        except (ValueError, KeyError):
            problems.append(f"{name} is truncated or damaged")
    return found, problems


def _restore(arrays: Mapping[str, np.ndarray], trainer: Trainer, ledger: LedgerState, layout: Layout) -> None:
    _restore_moments(arrays, trainer)
    ledger.load_state({n.removeprefix(LEDGER): a for n, a in arrays.items() if n.startswith(LEDGER)})
    for name, pending in arrays.items():
        if name.startswith(PENDING):
            add_pending(trainer, layout.group(name.removeprefix(PENDING)), pending)


def _restore_moments(arrays: Mapping[str, np.ndarray], trainer: Trainer) -> None:
    trainer.load_optimizer_state({n.removeprefix(OPTIMIZER): a for n, a in arrays.items() if n.startswith(OPTIMIZER)})


def _crc(arrays: Mapping[str, np.ndarray]) -> str:
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return f"{crc:08x}"


def _owned(trainer: Trainer) -> str:
    return ",".join(map(str, trainer.owned))
