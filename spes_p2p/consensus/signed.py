"""Records that their senders sign, so that others can pass them on as evidence."""

from __future__ import annotations

from typing import Any, TypeVar

from spes_p2p.consensus.output import Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.refusals import Code

Record = TypeVar("Record")


def sign(record: Any, identity: Identity) -> Signed:
    """Return the record with this identity's signature."""
    packed = pack(record)
    return Signed(identity.peer_id, packed, identity.sign(signed_message(type(record), packed)))


def read_signed(kind: type[Record], signed: Signed, identity: Identity) -> Record:
    """Return the record of this kind. Raises Refused when it is none, or when the named peer did not sign it as such."""
    name = kind.__name__.lower()
    if not identity.verify(signed.peer, signed_message(kind, signed.record), signed.signature):
        raise Refused(Code.NOT_PROVEN, f"the {name} of {signed.peer[-6:]} is not signed by it")
    try:
        return unpack(kind, signed.record)
    except WireError as error:
        raise Refused(Code.MALFORMED, f"the {name} of {signed.peer[-6:]}: {error}") from None


def signed_message(kind: type[Any], packed: bytes) -> bytes:
    """Return what is signed: a record of one kind is none of another."""
    return b"spes record\0" + kind.__name__.encode() + b"\0" + packed
