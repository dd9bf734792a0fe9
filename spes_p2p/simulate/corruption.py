"""What a corrupt peer sends instead of what it would have sent."""

from __future__ import annotations

import random

from spes_p2p.swarm.memory import Frame
from spes_p2p.swarm.rpc import MESSAGE

_CORRUPTIBLE = {"parts": "pull", "pieces": "pieces", "push": "push"}
"""Method whose frames a corruption changes."""


def corrupted(frame: Frame, what: str, rng: random.Random) -> bytes:
    """The frame's bytes as a peer with this corruption (`faults.CORRUPTIONS`, not its base) sends them."""
    body = frame.body
    if what == "garbage":
        return rng.randbytes(len(body))
    if body[:1] != MESSAGE or frame.method != _CORRUPTIBLE[what] or len(body) < 8:
        return body
    if what == "push":
        return body[: rng.randrange(1, len(body))]
    place, bit = rng.randrange(1, len(body)), 1 << rng.randrange(8)
    return body[:place] + bytes([body[place] ^ bit]) + body[place + 1 :]
