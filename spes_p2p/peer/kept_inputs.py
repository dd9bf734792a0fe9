"""The updates behind the means that this peer made as reducer or hub, kept until the round after: members may check them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.rounds import Update
from spes_p2p.rounds.parts import Part
from spes_p2p.storage.scratch import Scratch


@dataclass(frozen=True)
class Input:
    """One contributor's update of a part."""

    update: Update
    body: memoryview
    """The encoded update."""
    signed: Signed | None = None
    """The contributor's signature; None: this peer's own update, signed when somebody asks."""


class KeptInputs:
    """The inputs of one exchange."""

    def __init__(self, parts: Mapping[int, Part], scratch: Scratch):
        """`parts`: of which this peer makes means, by index."""
        sizes = [part.encoded_bytes * len(part.inputs) for part in parts.values()]
        *starts, total = accumulate(sizes, initial=0)
        self._starts = dict(zip(parts, starts, strict=True))
        self._space = scratch("inputs", -(-total // 4)).view(np.uint8) if total else np.empty(0, np.uint8)
        self.of_part: dict[int, dict[int, Input]] = {}
        """By part index and member: what is in the mean."""
        self.of_cell: dict[int, dict[int, Input]] = {}
        """The same of its cell's mean."""

    def store(self, part: Part, member: int, body: bytes | memoryview) -> memoryview:
        """Copy an encoded update; return where it is kept."""
        place = self._starts[part.index] + part.inputs.index(member) * part.encoded_bytes
        kept = self._space[place : place + part.encoded_bytes]
        kept[:] = np.frombuffer(body, np.uint8)
        return kept.data
