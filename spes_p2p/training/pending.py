"""A trainer's weights above the base (`local - base`), piece by piece: a model's size is no matter of memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spes_p2p.model.layout import Group
from spes_p2p.training.interface import Trainer

PIECE_ELEMENTS = 2**16


def trained_groups(trainer: Trainer) -> list[Group]:
    """What this trainer trains: the router, the shared weights and its own experts."""
    return [group for group in trainer.layout.groups if group.expert is None or group.expert in trainer.owned]


def pending_pieces(trainer: Trainer, base: np.ndarray, group: Group) -> Iterator[np.ndarray]:
    """`local - base` of a group that is trained here, float32, one piece after the other.

    `base`: flat float32 `[layout.size]`.
    """
    return (_pending(trainer, base, group, start, stop) for start, stop in _cut(group))


def pending_of(trainer: Trainer, base: np.ndarray, group: Group, out: np.ndarray) -> np.ndarray:
    """All of it, in `out` (float32 `[group.size]`)."""
    for start, stop in _cut(group):
        _pending(trainer, base, group, start, stop, out[start:stop])
    return out


def add_pending(trainer: Trainer, group: Group, values: np.ndarray) -> None:
    """`local += values` (float32 `[group.size]`) on a group that is trained here."""
    for start, stop in _cut(group):
        trainer.add(group, values[start:stop], start)


def _pending(
    trainer: Trainer, base: np.ndarray, group: Group, start: int, stop: int, out: np.ndarray | None = None
) -> np.ndarray:
    local = trainer.read(group, start, stop)
    out = local if out is None else out
    np.subtract(local, base[group.start + start : group.start + stop], out=out)
    return out


def _cut(group: Group) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE_ELEMENTS, group.size)) for start in range(0, group.size, PIECE_ELEMENTS))
