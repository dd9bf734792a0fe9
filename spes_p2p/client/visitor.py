"""What somebody who takes no part can ask of a swarm: its status, its history, its base."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spes_p2p.campaign.files import CampaignFiles, fetch_campaign
from spes_p2p.config.addresses import listen_beside, peer_of
from spes_p2p.consensus.control import is_signed, number_of
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit, Control, ControlRequest, Known
from spes_p2p.messages.methods import CONTROL, STATUS
from spes_p2p.messages.presence import Contact, HistoryPage, PeerStatus
from spes_p2p.net.contacts import find_contacts
from spes_p2p.net.interfaces import World
from spes_p2p.net.libp2p import start_libp2p
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.history_sync import pages
from spes_p2p.storage.store import DirectoryStore

Answer = TypeVar("Answer")

VISIT_SILENCE_S = 5.0
"""A peer that does not answer a visitor for so long is left out."""


@dataclass(frozen=True)
class Visit:
    """A way into a swarm, open as long as `visiting` is."""

    files: CampaignFiles
    genesis: Commit
    world: World
    board: RpcEndpoint

    async def contacts(self) -> dict[str, Contact]:
        """Who is in the DHT, by peer id; nobody when it does not answer."""
        try:
            return await find_contacts(self.world.registry, self.world.transport, self.files.campaign.hash)
        except PeerUnreachable:
            return {}

    async def ask_everybody(self, method: str, request: bytes, read: Callable[[bytes], Answer]) -> dict[str, Answer]:
        """What each peer answers; left out is who does not, or for whose answer `read` raises ValueError."""
        contacts, answers = await self.contacts(), dict[str, Answer]()

        async def ask(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, ValueError):
                answers[peer] = read(await self.board.ask(peer, method, request, VISIT_SILENCE_S))

        await asyncio.gather(*map(ask, contacts))
        return answers

    async def ask_all(self) -> list[PeerStatus]:
        """The status of every peer that answers."""
        answers = await self.ask_everybody(STATUS, b"", PeerStatus.from_bytes)
        return [status for peer, status in answers.items() if status.peer_id == peer]

    def history(self, peer: str, after: int) -> AsyncIterator[HistoryPage]:
        """What a peer remembers of the rounds after this one; ends early when it does not answer."""
        return pages(self.board, peer, after)

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


@contextlib.asynccontextmanager
async def visiting(addresses: Sequence[str]) -> AsyncIterator[Visit]:
    """Look at a swarm without taking part, under a new identity. Raises UserError when the addresses lead nowhere."""
    with tempfile.TemporaryDirectory(prefix="spes-visit-") as folder:
        net = await start_libp2p(Path(folder) / "identity.key", listen_beside(addresses), (), addresses)
        try:
            board = RpcEndpoint(net.transport, VISIT_SILENCE_S)
            files, genesis = await fetch_campaign(board, [peer_of(address) for address in addresses], net.registry)
            yield Visit(files, genesis, net.world(DirectoryStore(Path(folder))), board)
        finally:
            await net.close()
