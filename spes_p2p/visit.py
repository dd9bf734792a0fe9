"""What somebody who takes no part can ask of a swarm: its status, its history, its base."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from spes_p2p.campaign import CampaignFiles
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.observe.status import PeerStatus
from spes_p2p.swarm.interfaces import World
from spes_p2p.swarm.node import STATUS, find_contacts
from spes_p2p.swarm.records import Contact, Head
from spes_p2p.swarm.remember import HistoryPage, ask_history
from spes_p2p.swarm.rpc import Switchboard
from spes_p2p.swarm.wire import WireError

VISIT_SILENCE_S = 5.0
"""A peer that does not answer a visitor for so long is left out."""


@dataclass(frozen=True)
class Visit:
    """A way into a swarm, open as long as `session.visiting` is."""

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

    async def _ask_status(self, peer: str) -> PeerStatus | None:
        try:
            answer = PeerStatus.from_bytes(await self.board.ask(peer, STATUS, b"", VISIT_SILENCE_S))
        except (PeerUnreachable, Refused, ValueError):
            return None
        return answer if answer.peer_id == peer else None
