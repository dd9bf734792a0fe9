"""A peer's key pair: RSA as libp2p uses it.

The identity file is hivemind's (a protobuf `PrivateKey` of type RSA), so the peer daemon, the DHT and our signatures use one
key: a peer id is the base58 multihash of the public key.

Each process signs with an Ed25519 key of its own, which the RSA key endorses. A signature carries the RSA key, the endorsement
and the Ed25519 key, so it proves itself. All of that is the same in each of a process's signatures, so in records in compact
form (`messages/compact.py`) each of them takes 64 bytes, and whoever checks many verifies the endorsement once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from spes_p2p.errors import UserError

MIN_KEY_BITS = 2048
MAX_KEY_BITS = 4096
PUBLIC_EXPONENT = 65537
SESSION_KEY_BYTES, SESSION_SIGNATURE_BYTES = 32, 64
_SHA256_MULTIHASH = b"\x12\x20"
_ENDORSEMENT = b"spes session key\0"
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


class RSAIdentity:
    """The key in an identity file, made on first use (mode 0400). Raises UserError when the file cannot be used."""

    def __init__(self, path: Path):
        self.path = path
        self._key = _load_or_create(path)
        self._public_der = _public_der(self._key.public_key())
        self._peer_id = _peer_id_of_der(self._public_der)
        self._session = Ed25519PrivateKey.generate()
        self._proof = self._endorsed(self._session.public_key().public_bytes_raw())

    @property
    def peer_id(self) -> str:
        """Base58 libp2p peer id of the public key."""
        return self._peer_id

    @property
    def private_key(self) -> rsa.RSAPrivateKey:
        """The key itself, for the DHT's record signatures."""
        return self._key

    def sign(self, message: bytes) -> bytes:
        """Return what proves this process's key, then an Ed25519 signature by it.

        The proof is two bytes of length, the public key (DER), an RSA-PSS/SHA-256 signature of the process's key, and that key.
        """
        return self._proof + self._session.sign(message)

    @staticmethod
    def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
        """True when the key inside `signature` hashes to `peer_id` and endorsed the one that signed exactly this message."""
        session = _session_key(peer_id, signature[:-SESSION_SIGNATURE_BYTES])
        if session is None:
            return False
        try:
            session.verify(signature[-SESSION_SIGNATURE_BYTES:], message)
        except InvalidSignature:
            return False
        return True

    def _endorsed(self, session: bytes) -> bytes:
        endorsement = self._key.sign(_ENDORSEMENT + session, _PADDING, hashes.SHA256())
        return len(self._public_der).to_bytes(2, "big") + self._public_der + endorsement + session


@dataclass(frozen=True)
class Visitor:
    """The identity of a client that only asks: the key is the peer daemon's, and nothing is signed with it."""

    peer_id: str
    verify = staticmethod(RSAIdentity.verify)

    def sign(self, message: bytes) -> bytes:
        """Raises RuntimeError."""
        raise RuntimeError("a visitor signs nothing")


def is_usual(key: object) -> TypeGuard[rsa.RSAPublicKey]:
    """Return whether this is an RSA key as peer daemons have it: one with a long exponent takes 50 times as long to check."""
    return (
        isinstance(key, rsa.RSAPublicKey)
        and MIN_KEY_BITS <= key.key_size <= MAX_KEY_BITS
        and key.public_numbers().e == PUBLIC_EXPONENT
    )


def peer_id_of_public_key(key: rsa.RSAPublicKey) -> str:
    """Base58 sha2-256 multihash of the protobuf-encoded key (libp2p specification, "Peer IDs and keys")."""
    return _peer_id_of_der(_public_der(key))


def _public_der(key: rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _peer_id_of_der(der: bytes) -> str:
    encoded = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return str(PeerID(_SHA256_MULTIHASH + hashlib.sha256(encoded).digest()).to_base58())


@lru_cache(maxsize=4096)
def _session_key(peer_id: str, proof: bytes) -> Ed25519PublicKey | None:
    """Return the key of this peer's process; None when the proof proves none."""
    key_end = 2 + int.from_bytes(proof[:2], "big")
    key, session = _public_key(proof[2:key_end]), proof[-SESSION_KEY_BYTES:]
    if key is None or key[0] != peer_id or len(proof) != key_end + (key[1].key_size + 7) // 8 + SESSION_KEY_BYTES:
        return None
    try:
        key[1].verify(proof[key_end:-SESSION_KEY_BYTES], _ENDORSEMENT + session, _PADDING, hashes.SHA256())
        return Ed25519PublicKey.from_public_bytes(session)
    except (InvalidSignature, ValueError):
        return None


@lru_cache(maxsize=1024)
def _public_key(der: bytes) -> tuple[str, rsa.RSAPublicKey] | None:
    try:
        key = serialization.load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return (peer_id_of_public_key(key), key) if is_usual(key) else None


class DamagedIdentity(UserError):
    """A file that holds no key."""

    def __init__(self, path: Path, advice: str):
        super().__init__(f"{path}: not an identity file (an RSA key as hivemind writes it); {advice}")


def _load_or_create(path: Path) -> rsa.RSAPrivateKey:
    try:
        created = None if path.exists() else _create(path)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot use the identity file ({error.strerror}); choose a path that you can write") from None
    if created is not None:
        return created  # checking the numbers of a key takes longer than making one
    try:
        envelope = crypto_pb2.PrivateKey.FromString(content)
        key = serialization.load_der_private_key(envelope.data, password=None)
    except Exception:
        key = None
    if not isinstance(key, rsa.RSAPrivateKey) or not is_usual(key.public_key()):
        raise DamagedIdentity(path, "restore your copy, or delete it to get a new identity")
    return key


def _create(path: Path) -> rsa.RSAPrivateKey | None:
    """Write a new key aside and link it, so that a crash leaves no half of one. Returns None if another process was first."""
    key = rsa.generate_private_key(public_exponent=PUBLIC_EXPONENT, key_size=MIN_KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o400)
        try:
            os.link(aside, path)
        except FileExistsError:
            return None
    finally:
        os.unlink(aside)
    return key
