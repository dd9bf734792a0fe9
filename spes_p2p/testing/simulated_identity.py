"""Identities without keys, for simulations and tests. Their signatures are as long as real ones, keys included."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

PROOF_BYTES, SIGNATURE_BYTES = 584, 64
"""Of a real identity with an RSA key of 2048 bits: what is in each of its signatures, and what is not."""


class SimulatedIdentity:
    """An identity whose peer id is its name. Signatures detect mistakes, not malice."""

    def __init__(self, name: str):
        self._name = name

    @property
    def peer_id(self) -> str:
        """Name of the peer."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """Return a proof and a keyed hash of the message, both of which anyone could compute."""
        return _mark(self._name, message)

    @staticmethod
    def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
        """Return whether the signature is `peer_id`'s of exactly this message."""
        return hmac.compare_digest(_mark(peer_id, message), signature)


def _mark(name: str, message: bytes) -> bytes:
    proof = _proof(name)
    return proof + hashlib.blake2b(message, key=proof[:SIGNATURE_BYTES], digest_size=SIGNATURE_BYTES).digest()


@lru_cache(4096)
def _proof(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(PROOF_BYTES)
