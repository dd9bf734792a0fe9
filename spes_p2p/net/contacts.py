"""The contacts of a campaign's peers in the registry."""

from __future__ import annotations

import contextlib

from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.presence import Contact
from spes_p2p.net.interfaces import Registry, Transport


def registry_key(campaign_hash: str) -> str:
    """Where the contacts of a campaign are."""
    return f"spes.{campaign_hash[:32]}.peers"


async def find_contacts(registry: Registry, transport: Transport, campaign_hash: str) -> dict[str, Contact]:
    """The living peers of a campaign; what is malformed or of another campaign is left out.

    Their addresses are taught to the transport.
    """
    found = {}
    for peer, value in (await registry.get(registry_key(campaign_hash))).items():
        with contextlib.suppress(WireError):
            contact = unpack(Contact, value)
            if contact.campaign == campaign_hash and contact.role in ("trainer", "helper"):
                found[peer] = contact
                if peer != transport.peer_id:
                    transport.learn_addresses(peer, contact.addresses)
    return found
