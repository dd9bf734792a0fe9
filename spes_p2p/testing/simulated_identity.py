"""Identities without keys, for simulations and tests."""

from __future__ import annotations

import hashlib
import hmac


class SimulatedIdentity:
    """An identity whose peer id is its name. Signatures detect mistakes, not malice."""

    def __init__(self, name: str):
        self._name = name

    @property
    def peer_id(self) -> str:
        """Name of the peer."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """Return a keyed hash of the message, which anyone could compute."""
        return _mark(self._name, message)

    @staticmethod
    def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
        """Return whether the signature is `peer_id`'s of exactly this message."""
        return hmac.compare_digest(_mark(peer_id, message), signature)


def _mark(name: str, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=hashlib.sha256(name.encode()).digest(), digest_size=16).digest()
