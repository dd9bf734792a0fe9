"""What somebody who takes no part can ask of a swarm: its status, its history, its base."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.addresses import listen_beside, peer_of
from spes_p2p.campaign import CampaignFiles, fetch_campaign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.observe.status import PeerStatus
from spes_p2p.swarm.control import CONTROL, ControlRequest, Known, is_signed, number_of
from spes_p2p.swarm.interfaces import World
from spes_p2p.swarm.libp2p import start_libp2p
from spes_p2p.swarm.node import STATUS, find_contacts
from spes_p2p.swarm.records import Contact, Control, Head
from spes_p2p.swarm.remember import HistoryPage, ask_history
from spes_p2p.swarm.rpc import Switchboard
from spes_p2p.swarm.store import DirectoryStore
from spes_p2p.swarm.wire import WireError, pack, unpack

VISIT_SILENCE_S = 5.0
"""A peer that does not answer a visitor for so long is left out."""


@dataclass(frozen=True)
class Visit:
    """A way into a swarm, open as long as `visiting` is."""

    files: CampaignFiles
    genesis: Head
    world: World
    board: Switchboard

    async def contacts(self) -> dict[str, Contact]:
        """Who is in the DHT, by peer id; nobody when it does not answer."""
        try:
            return await find_contacts(self.world, self.files.campaign.hash)
        except PeerUnreachable:
            return {}

    async def ask_all(self) -> list[PeerStatus]:
        """The status of every peer that answers."""
        answers = await asyncio.gather(*(self._ask_status(peer) for peer in await self.contacts()))
        return [answer for answer in answers if answer is not None]

    async def history(self, peer: str, after: int) -> HistoryPage | None:
        """One page of what a peer remembers of the rounds after this one; None when it does not answer."""
        try:
            return await ask_history(self.board, peer, after)
        except (PeerUnreachable, Refused, WireError):
            return None

    async def newest_order(self, known: Control | None) -> Control | None:
        """The owner's newest control record; asked for when the registry shows a newer one than `known`."""
        contacts = await self.contacts()
        for peer in sorted(contacts, key=lambda peer: -contacts[peer].control):
            if contacts[peer].control <= number_of(known):
                break
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                reply = await self.board.ask(peer, CONTROL, pack(ControlRequest(None)), VISIT_SILENCE_S)
                told = unpack(Known, reply).newest
                if number_of(told) > number_of(known) and told and is_signed(told, self.genesis, self.world.identity):
                    known = told
        return known

    async def _ask_status(self, peer: str) -> PeerStatus | None:
        try:
            answer = PeerStatus.from_bytes(await self.board.ask(peer, STATUS, b"", VISIT_SILENCE_S))
        except (PeerUnreachable, Refused, ValueError):
            return None
        return answer if answer.peer_id == peer else None


@contextlib.asynccontextmanager
async def visiting(addresses: Sequence[str], identity: Path) -> AsyncIterator[Visit]:
    """Look at a swarm without taking part. Raises UserError when the addresses lead nowhere."""
    net = await start_libp2p(identity, listen_beside(addresses), (), addresses)
    try:
        board = Switchboard(net.transport, VISIT_SILENCE_S)
        files, genesis = await fetch_campaign(board, [peer_of(address) for address in addresses], None)
        yield Visit(files, genesis, net.world(DirectoryStore(identity.parent)), board)
    finally:
        await net.close()
