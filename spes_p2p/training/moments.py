"""What an auditor needs to train a phase again: the optimizer's state and pending work before it, as named arrays in bfloat16.

That is half of what a checkpoint has of them. Rounding to 8 bits of mantissa moves the update of a phase less than the codec
does, in which the auditor knows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from spes_p2p.storage.tensor_file import DTYPES, LENGTH_BYTES, Source, read_tensors, tensor_chunks
from spes_p2p.training.interface import Trainer
from spes_p2p.training.pending import PENDING, add_pending, pending_sources, trained_groups

BF16 = np.dtype(DTYPES["BF16"])
TINY = np.finfo(np.float32).tiny
MOST_DRIFT, MOST_SECOND = 8.0, 100.0
"""Bound moments before a phase by those of the phase itself: the mean of m^2 / v, and of v. Honest ones reach 4.7 and 1.4."""
MOMENTUM = "momentum_buffer"
"""Name of Muon's moment, which begins anew with each phase of an open campaign (`trainer.py`)."""
KINDS = ("age/", "step/", "exp_avg/", "exp_avg_sq/", f"{MOMENTUM}/")
"""What names begin with, before a parameter's or a group's. An optimizer with 8-bit moments would also load codes and scales,
which nothing compares with the phase's own."""
NAMES_BYTES = 2**22
"""Bounds what names, shapes and step counts take beside the values."""


def moments_chunks(
    trainer: Trainer, base: np.ndarray, round_number: int, is_begun: bool = False
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with what a trainer has before the phase of this round, or (`is_begun`) within it.

    `base`: flat float32.
    """
    state = trainer.optimizer_state(in_full=True)
    kept = {name: each for name, each in state.items() if is_begun or not name.startswith(f"{MOMENTUM}/")}
    sources = kept | pending_sources(trainer, base)
    return tensor_chunks({name: _in_bf16(source) for name, source in sources.items()}, {"round": str(round_number)})


def read_moments(content: bytes | memoryview) -> dict[str, np.ndarray]:
    """Return the arrays, the moments in float32. Raises ValueError for another format, or values that no training has."""
    if int.from_bytes(content[:LENGTH_BYTES], "little") > NAMES_BYTES:
        raise ValueError("a header too long for names, shapes and step counts")
    arrays = {name: from_bf16(values) if values.dtype == BF16 else values for name, values in read_tensors(content)[0].items()}
    for name, values in arrays.items():
        is_count = name.startswith(("age/", "step/"))
        fits = values.dtype == np.float32 or (is_count and values.dtype == np.int64)
        is_known = name.startswith((*KINDS, PENDING))
        is_positive = not (is_count or name.startswith("exp_avg_sq/")) or bool((values >= 0).all())
        if not (is_known and fits and is_positive and bool(values.shape) is not is_count and np.isfinite(values).all()):
            raise ValueError(f"{name}: values that no training has")
    return arrays


def are_plausible(before: Mapping[str, np.ndarray], after: Mapping[str, Source], decay: float) -> bool:
    """Return whether AdamW's moments before a phase could come from gradients such as those that the phase had.

    Invented moments could move the weights without any gradient: first moments that are large for the second ones, or second
    moments so large that gradients no longer matter. `decay`: what is left of a second moment after the phase, beta2^steps.
    """
    drift, second = plausibility(before, after, decay)
    return drift <= MOST_DRIFT and second <= MOST_SECOND


def plausibility(before: Mapping[str, np.ndarray], after: Mapping[str, Source], decay: float) -> tuple[float, float]:
    """Return the mean of m^2 / v before the phase over that after it, and the mean of v before over that of the phase itself.

    Both are 0 without moments before, and infinite for those of other shapes. `decay`: see `are_plausible`.
    """
    sums = np.zeros(4)
    for name, second in before.items():
        kind, _, of = name.partition("/")
        if kind != "exp_avg_sq" or f"exp_avg/{of}" not in before or name not in after or f"exp_avg/{of}" not in after:
            continue
        if {before[f"exp_avg/{of}"].shape, second.shape} != {after[name].shape}:
            return math.inf, math.inf
        ends = _whole(after[f"exp_avg/{of}"]), _whole(after[name])
        sums += [_drift(before[f"exp_avg/{of}"], second), _drift(*ends), second.sum(dtype=float), ends[1].sum(dtype=float)]
    drift, usual, had, has = sums.tolist()
    fresh = (has - decay * had) / (1 - decay)
    return _ratio(drift, usual), _ratio(had, fresh)


def _ratio(part: float, whole: float) -> float:
    return part / whole if part and whole > 0 else math.inf if part else 0.0


def _drift(first: np.ndarray, second: np.ndarray) -> float:
    """Return the sum of m^2 / v: by how much the weights move on without gradients."""
    return float((np.square(first, dtype=np.float64) / np.maximum(second, TINY)).sum())


def _whole(source: Source) -> np.ndarray:
    return np.concatenate([np.asarray(piece).reshape(-1) for piece in source.pieces()])


def load_moments(trainer: Trainer, base: np.ndarray, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make a trainer that owns the same experts what another was before the phase; return the pending work by group name."""
    trainer.load_base(base)
    trainer.load_optimizer_state({name: values for name, values in arrays.items() if not name.startswith(PENDING)})
    pending = {}
    for group in trained_groups(trainer):
        values = arrays.get(PENDING + group.name)
        if values is not None and values.shape == (group.size,):
            add_pending(trainer, group, values)
            pending[group.name] = values
    return pending


def most_bytes(elements: int) -> int:
    """Return a bound on the size of such a file. `elements`: trained weights."""
    return 3 * BF16.itemsize * elements + NAMES_BYTES


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16, ties to even; return their bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    shift, half = np.uint32(16), np.uint32(0x7FFF)
    rounded: np.ndarray = ((bits + half + ((bits >> shift) & np.uint32(1))) >> shift).astype(BF16)
    return rounded


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _in_bf16(source: Source) -> Source:
    """Return moments in bfloat16, and step counts and 8-bit codes as they are."""
    if source.dtype != np.float32 or not source.shape:
        return source
    return Source(BF16, source.shape, lambda: map(to_bf16, source.pieces()))
