"""The contacts of a campaign's peers in the registry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from hashlib import sha256

from spes_p2p.config.addresses import is_peer_address, is_relayed
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.presence import Contact
from spes_p2p.net.interfaces import Registry, Transport

MAX_KEEPERS = 2
"""Bounds what a peer sends for each record beyond what the DHT's own nodes get."""

MANY_CONTACTS, SHOWN_CONTACTS, SHOWN_S = 32, 8, 60.0
"""Among more peers than the first, nodes of the DHT have the contacts of about as many as the second, drawn anew every SHOWN_S:
who renews its contact there every few seconds stays connected, and nodes are often behind routers at home."""

MAX_MET_ADDRESSES = 16
"""Bounds the connections that a command, or a trainer's next start, tries."""


def is_shown(peer: str, found: int, now_s: float) -> bool:
    """Return whether a peer that found so many contacts keeps its own at nodes of the DHT, too, not only at keepers.

    One that found none, not even its own, has just started, and many others may have at the same moment.
    """
    if not found:
        return False
    drawn = int.from_bytes(sha256(f"{peer} {now_s // SHOWN_S:.0f}".encode()).digest()[:8], "big") / 2**64
    return found <= MANY_CONTACTS or drawn * found < SHOWN_CONTACTS


def keepers_of(genesis: Commit, joined_by: Iterable[str]) -> tuple[str, ...]:
    """Return the peers that keep all contacts of a campaign: its helpers, and those that this peer joined by."""
    return tuple(dict.fromkeys((*genesis.helpers, *joined_by)))[:MAX_KEEPERS]


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


def met_addresses(last: Commit, contacts: Mapping[str, Contact], admission: str, me: str = "") -> tuple[str, ...]:
    """Return where the swarm is found if nobody answers at the addresses given: at electors, and others of the last round.

    In an open campaign the owner vouches for all of them: others could lead to another campaign.
    """
    known = last.trusted if admission == "open" else frozenset(last.participants)
    peers = [peer for peer in dict.fromkeys((*last.electorate, *sorted(known))) if peer != me and peer in contacts]
    return direct(address for peer in peers for address in contacts[peer].addresses)[:MAX_MET_ADDRESSES]


def direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return those that a peer can be dialled at without a relay."""
    return tuple(address for address in dict.fromkeys(addresses) if is_peer_address(address) and not is_relayed(address))
