"""Identities without keys, for simulations and tests. Their signatures are as long as real ones, keys included."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

KEY_BYTES, SIGNATURE_BYTES = 296, 256
"""Of an RSA key of 2048 bits: its DER form after two bytes of length, and a signature."""


class SimulatedIdentity:
    """An identity whose peer id is its name. Signatures detect mistakes, not malice."""

    def __init__(self, name: str):
        self._name = name

    @property
    def peer_id(self) -> str:
        """Name of the peer."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """Return a key and a keyed hash of the message, both of which anyone could compute."""
        return _mark(self._name, message)

    @staticmethod
    def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
        """Return whether the signature is `peer_id`'s of exactly this message."""
        return hmac.compare_digest(_mark(peer_id, message), signature)


def _mark(name: str, message: bytes) -> bytes:
    key = _key(name)
    return key + hashlib.shake_128(key[:64] + message).digest(SIGNATURE_BYTES)


@lru_cache(4096)
def _key(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(KEY_BYTES)
