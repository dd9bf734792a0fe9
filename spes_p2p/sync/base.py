"""The base on disk: the values, the head that they belong to, and the plan that led there (it holds this phase's duties)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spes_p2p.errors import UserError
from spes_p2p.swarm.interfaces import Store
from spes_p2p.swarm.records import Duty, Plan
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.digest import state_digest

BASE = "base"
ALIGNMENT = 64


@dataclass(frozen=True)
class Base:
    """What all members agreed on at one head, bit for bit."""

    head: str
    round: int
    values: np.ndarray
    """float32 `[layout.size]`, never written to."""
    digest: str
    plan: Plan | None
    """The plan of that round; None for base 0 and for a base that was downloaded."""

    def duty(self, peer: str) -> Duty | None:
        """What the peer has to do in the phase after this base."""
        index = self.plan.index(peer) if self.plan is not None else None
        return None if self.plan is None or index is None else self.plan.duties[index]


@dataclass(frozen=True)
class _Header:
    head: str
    round: int
    elements: int
    digest: str
    plan: Plan | None


def save_base(store: Store, base: Base) -> None:
    """Replace the stored base, durably and whole."""
    header = pack(_Header(base.head, base.round, base.values.size, base.digest, base.plan))
    prefix = len(header).to_bytes(8, "little") + header
    padding = bytes(-len(prefix) % ALIGNMENT)
    store.write(BASE, [prefix + padding, np.ascontiguousarray(base.values, "<f4").data.cast("B")])


def load_base(store: Store, elements: int, where: str) -> Base | None:
    """The stored base, checked against its digest; None when there is none. Raises UserError when it is damaged.

    `where` names the run-dir in that message.
    """
    blob = store.read(BASE)
    if blob is None:
        return None
    damaged = UserError(f"{where}/{BASE}: cut short or damaged; delete this file to download the base again")
    try:
        size = int.from_bytes(blob[:8], "little")
        header = unpack(_Header, blob[8 : 8 + size])
        start = 8 + size + (-(8 + size) % ALIGNMENT)
        values = np.frombuffer(blob[start:], "<f4").astype(np.float32)
    except (WireError, ValueError):
        raise damaged from None
    if header.elements != elements:
        raise UserError(
            f"{where}/{BASE}: holds {header.elements} values, this campaign's model has {elements}; use another run-dir"
        )
    if values.size != elements or state_digest(values) != header.digest:
        raise damaged
    values.flags.writeable = False
    return Base(header.head, header.round, values, header.digest, header.plan)
