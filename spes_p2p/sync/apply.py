"""From one base to the next: decode what was committed, outer step, merge. The same bits on every machine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.records import Merge
from spes_p2p.sync.merge import merge_experts
from spes_p2p.sync.parts import Part


def next_base(base: np.ndarray, layout: Layout, committed: Iterable[tuple[Part, bytes]], merge: Merge | None) -> np.ndarray:
    """The new base (float32 `[layout.size]`, a new array). `committed`: each committed part with its encoded mean update.

    The outer step is plain averaging: new = base + mean update. Parts that are not there keep the old value.
    """
    new = base.copy()
    for part, encoded in committed:
        update = part.codec.decode(encoded, part.size)
        np.add(new[part.start : part.stop], update, out=new[part.start : part.stop])
    if merge is not None:
        merge_experts(new, layout, merge.donors, merge.alpha)
    return new
