"""A trainer's pending (`local - base`), in pieces, so that memory does not depend on the model's size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from spes_p2p.model.layout import Group
from spes_p2p.storage.tensor_file import Source
from spes_p2p.training.interface import Trainer

PIECE_ELEMENTS = 2**16
PENDING = "pending."
"""Before a group's name: the name of its pending in a file."""


def is_trained(trainer: Trainer, group: Group) -> bool:
    """Return whether this trainer trains the group: the router, the shared weights or one of its own experts."""
    return group.expert is None or group.expert in trainer.owned


def trained_groups(trainer: Trainer) -> list[Group]:
    """Return the groups that this trainer trains."""
    return [group for group in trainer.layout.groups if is_trained(trainer, group)]


def pending_pieces(trainer: Trainer, base: np.ndarray, group: Group) -> Iterator[np.ndarray]:
    """Yield a trained group's pending in float32 pieces. `base`: flat float32 `[layout.size]`."""
    return (pending_between(trainer, base, group, start, stop) for start, stop in _cut(group))


def pending_sources(trainer: Trainer, base: np.ndarray) -> dict[str, Source]:
    """Return what files keep of a trainer's pending: that of each trained group where it is not 0."""
    found = {}
    for group in trained_groups(trainer):
        pieces = partial(pending_pieces, trainer, base, group)
        if any(piece.any() for piece in pieces()):
            found[PENDING + group.name] = Source(np.dtype(np.float32), (group.size,), pieces)
    return found


def pending_of(trainer: Trainer, base: np.ndarray, group: Group, out: np.ndarray) -> np.ndarray:
    """Write a trained group's pending to `out` (float32 `[group.size]`) and return it."""
    for start, stop in _cut(group):
        pending_between(trainer, base, group, start, stop, out[start:stop])
    return out


def add_pending(trainer: Trainer, group: Group, values: np.ndarray) -> None:
    """Add `values` (float32 `[group.size]`) to the local weights of a trained group."""
    for start, stop in _cut(group):
        trainer.add(group, values[start:stop], start)


def pending_between(
    trainer: Trainer, base: np.ndarray, group: Group, start: int, stop: int, out: np.ndarray | None = None
) -> np.ndarray:
    """Return a trained group's pending of the range `[start, stop)`, counted from the group's start; `out` as in numpy."""
    local = trainer.read(group, start, stop)
    out = local if out is None else out
    np.subtract(local, base[group.start + start : group.start + stop], out=out)
    return out


def _cut(group: Group) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE_ELEMENTS, group.size)) for start in range(0, group.size, PIECE_ELEMENTS))
