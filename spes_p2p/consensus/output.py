"""What a state machine asks of its caller: records to make durable, then a reply to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from spes_p2p.messages.codec import pack

T = TypeVar("T")

LOG, VOTES, CONTROL = "commits.log", "votes", "control"
"""The durable files. A write to LOG appends a record, except that a milestone replaces all records up to its round. A write to
the others replaces the only record."""


@dataclass(frozen=True)
class Write:
    """A record that must be durable, and applied, before the reply is sent."""

    file: str
    value: object

    @property
    def record(self) -> bytes:
        """The bytes to store."""
        return pack(self.value)


@dataclass(frozen=True)
class Output(Generic[T]):
    """The result of handling one request. Nothing has changed before the writes are applied."""

    reply: T
    writes: tuple[Write, ...] = ()


class Identity(Protocol):
    """A peer's key pair. Its id is derived from the public key, so a signature proves who signed."""

    @property
    def peer_id(self) -> str:
        """The id of this peer, which the transport uses too."""

    def sign(self, message: bytes) -> bytes:
        """Return a signature that carries whatever `verify` needs."""

    def verify(self, peer_id: str, message: bytes, signature: bytes) -> bool:
        """Return whether `peer_id` signed exactly this message."""
