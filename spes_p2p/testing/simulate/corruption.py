"""Corruption of the frames that a peer sends."""

from __future__ import annotations

import random
from dataclasses import replace

from spes_p2p.messages.framing import Kind
from spes_p2p.testing.memory_state import Frame

_CORRUPTIBLE = {
    "parts": (("pull", Kind.PART), ("parts", Kind.CONTENT)), "pieces": (("base", Kind.CONTENT),), "push": (("push", Kind.PART),)
}
"""Methods and kinds of the frames that each corruption changes."""


def corrupted(frame: Frame, what: str, rng: random.Random) -> Frame:
    """Return the frame as a peer with this corruption (`faults.CORRUPTIONS`, except `base`) sends it."""
    body = frame.body
    if what == "garbage":
        return replace(frame, kind=rng.randrange(256), body=rng.randbytes(len(body)))
    if (frame.method, frame.kind) not in _CORRUPTIBLE[what] or len(body) < 8:
        return frame
    if what == "push":
        return replace(frame, body=body[: rng.randrange(len(body))])
    place, bit = rng.randrange(len(body)), 1 << rng.randrange(8)
    return replace(frame, body=body[:place] + bytes([body[place] ^ bit]) + body[place + 1 :])
