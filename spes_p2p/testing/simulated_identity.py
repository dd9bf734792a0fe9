"""Identities without keys. For simulations and tests."""

from __future__ import annotations

import hashlib
import hmac


class SimulatedIdentity:
    """Named peers of a swarm inside one process: the id is the name. Signatures detect mistakes, not malice."""

    def __init__(self, name: str):
        self._name = name

    @property
    def peer_id(self) -> str:
        """The name."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """A keyed hash of the message; anybody could compute it."""
        return _mark(self._name, message)

    def verify(self, peer_id: str, message: bytes, signature: bytes) -> bool:
        """Did `peer_id` (or somebody who lies) sign exactly this message?"""
        return hmac.compare_digest(_mark(peer_id, message), signature)


def _mark(name: str, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=hashlib.sha256(name.encode()).digest(), digest_size=16).digest()
