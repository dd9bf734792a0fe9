"""Self-test of the arithmetic that must give equal bits on all peers. A machine that fails it must not join."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.errors import UserError
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds.apply import next_base_pieces
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.influence import square_sum
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.planned import Member, Merge
from spes_p2p.rounds.step_bounds import StepBounds

KNOWN_ANSWER = "a4fa1ad88d3036098584fb83cb26486ff659d2f012ea832388a5840483543dc1"
"""Digest of the self-test. It covers all of CODECS: a new codec changes it."""


@cache
def check_arithmetic(step: Callable[..., Iterable[np.ndarray]] = next_base_pieces) -> None:
    """Check decoding, square sums, the outer step and the merge against a known answer. Raises UserError when bits differ.

    `step` yields the pieces of the next base.
    """
    found = _answer(step)
    if found != KNOWN_ANSWER:
        raise UserError(
            f"this machine's float32 arithmetic differs from the swarm's (self-test {found}, not {KNOWN_ANSWER[:12]}); "
            "a library may have switched denormals off: this machine cannot train with others"
        )


def _answer(step: Callable[..., Iterable[np.ndarray]]) -> str:
    """Return the digest of a small round in each codec, with and without momentum, with denormals and signed zeros."""
    layout = Layout(
        [TensorSpec("shared", (64,), "shared")]
        + [
            TensorSpec(f"layers.0.experts.{e}.{name}", shape, "expert", 0, e)
            for e in range(3)
            for name, shape in (("gate_up_proj", (8, 4)), ("down_proj", (4, 4)))
        ]
    )
    momentum = OuterConfig(shared_learning_rate=0.7, shared_momentum=0.9, experts_learning_rate=0.3, experts_momentum=0.5)
    base = _values(base_size(layout, momentum), 1)
    digest = hashlib.sha256()
    members = (Member("a", 3, (5, 0, 2), 1.0),)
    merge = Merge(0.1, (((1, 2), (2,), ()),))
    bounds = StepBounds({"expert.0": np.float32(0.3)}, np.full(len(layout.groups), 0.7, np.float32))
    for count in (7, 1000, 3 * 2**17 - 1):
        digest.update(square_sum(_values(count, 3) * np.float32(1e-4)).hex().encode())
    for codec in CODECS.values():
        parts = part_table(layout, members, GroupCodecs(codec, codec, codec), 64)
        update = _values(layout.size, 2)
        encoded = {part.index: codec.encode(update[part.start : part.stop]) for part in parts}
        for outer in (OuterConfig(), momentum):
            for piece in step(base, layout, parts, encoded, merge, outer, bounds):
                digest.update(piece.astype("<f4").tobytes())
    return digest.hexdigest()


def _values(count: int, seed: int) -> np.ndarray:
    """Return float32 values over many exponents, computed with integers only."""
    words = np.frombuffer(hashlib.shake_256(bytes([seed])).digest(4 * count), "<u4").copy()
    exponents = np.uint32(96) + (words >> np.uint32(24)) % np.uint32(40)
    bits = (words & np.uint32(0x807FFFFF)) | (exponents << np.uint32(23))
    bits[:4] = [0x80000000, 0x00000001, 0x80000001, 0x007FFFFF]
    return bits.view(np.float32)
