"""Connections to a swarm for commands that only query it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from spes_p2p.config.addresses import peer_of
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.net.daemon_process import is_any_listening, start_visitor

if TYPE_CHECKING:  # what the daemon's start does not need is imported while it starts (`connect`)
    from spes_p2p.campaign.files import CampaignFiles
    from spes_p2p.config.campaign import Campaign
    from spes_p2p.consensus.commit_log import CommitLog
    from spes_p2p.messages.consensus import Commit, Control
    from spes_p2p.messages.presence import Contact, HistoryPage, PeerStatus
    from spes_p2p.net.libp2p import Libp2p
    from spes_p2p.net.rpc import RpcEndpoint

Answer = TypeVar("Answer")

REPLY_TIMEOUT_S = 5.0
"""A peer that does not answer within this time is left out."""
ASKED_STRANGERS = 8
"""Bounds the peers, beside those of the last known commit, that are asked for newer commits at a time."""
VOUCHED_WAIT_S = 60.0
"""Bounds the time without newer commits: of a line of 0.5 Mbit/s, visitors get a page of 350 kB in 56 s."""


@dataclass(frozen=True)
class SwarmConnection:
    """A connection to the peers of one campaign, open while the block of `connect` runs."""

    addresses: Sequence[str]
    campaign: Campaign
    log: CommitLog
    """Certified commits, as far as `learn_commits` has learned them."""
    net: Libp2p
    endpoint: RpcEndpoint

    @property
    def genesis(self) -> Commit:
        """The commit before round 0, which names the owner."""
        return self.log.genesis

    async def files(self) -> CampaignFiles:
        """Fetch the campaign's files. Raises UserError."""
        from spes_p2p.campaign.files import fetch_campaign  # not every command needs them, nor what reads them

        return (await fetch_campaign(self.endpoint, [peer_of(address) for address in self.addresses], self.net.registry))[0]

    async def contacts(self) -> dict[str, Contact]:
        """Return the contacts in the DHT by peer id; none if it does not answer."""
        from spes_p2p.net.contacts import find_contacts

        try:
            return await find_contacts(self.net.registry, self.net.transport, self.genesis.campaign)
        except PeerUnreachable:
            return {}

    async def ask_peers(self, method: str, request: bytes, read: Callable[[bytes], Answer]) -> dict[str, Answer]:
        """Return each peer's parsed answer, without peers that do not answer or for whose answer `read` raises ValueError."""
        return await self._ask(await self.contacts(), method, request, read)

    async def _ask(
        self, peers: Iterable[str], method: str, request: bytes, read: Callable[[bytes], Answer]
    ) -> dict[str, Answer]:
        answers = dict[str, Answer]()

        async def ask(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, ValueError):
                answers[peer] = read(await self.endpoint.ask(peer, method, request, REPLY_TIMEOUT_S))

        await asyncio.gather(*map(ask, peers))
        return answers

    async def statuses(self) -> list[PeerStatus]:
        """Return the status of every peer that answers, corrected by what certified commits prove (`proven.py`)."""
        from spes_p2p.client.proven import corrected
        from spes_p2p.messages.methods import STATUS
        from spes_p2p.messages.presence import PeerStatus

        contacts = await self.contacts()
        answers = await self._ask(contacts, STATUS, b"", PeerStatus.from_bytes)
        found = [status for peer, status in answers.items() if status.peer_id == peer]
        await self.learn_commits({status.peer_id: status.round for status in found})
        newest = await self._newest_order(self.log.last.control, {peer: contacts[peer].control for peer in answers})
        return corrected(found, self.log, self.campaign, newest)

    async def learn_commits(self, claims: Mapping[str, int]) -> None:
        """Bring the log to the newest round that any of these peers proves. `claims`: the last round by peer.

        Liars can claim any round, so the owner's helpers and peers of the last commit come first, then a few others. Then those
        for whom the owner vouches are asked again, since slow lines, and many visitors, make honest ones late.
        """
        from spes_p2p.client.proven import learn_commits

        known = self.log.last.participants
        others = sorted(claims.keys() - known)
        for peer in [*sorted(claims.keys() & known), *random.sample(others, min(len(others), ASKED_STRANGERS))]:
            if claims[peer] > self.log.round:
                await learn_commits(self.endpoint, self.log, peer)
        clock, news_at = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        for peer in sorted(claims.keys() & self.log.last.trusted):
            left_s, before = news_at + VOUCHED_WAIT_S - clock(), self.log.round
            if claims[peer] > before and left_s > 0:
                await learn_commits(self.endpoint, self.log, peer, left_s)
                if self.log.round > before:
                    news_at = clock()

    def history(self, peer: str, after: int, newest: int) -> AsyncIterator[HistoryPage]:
        """Yield a peer's records of the rounds after this one up to `newest`; ends early if it does not answer."""
        from spes_p2p.peer.history_sync import pages

        return pages(self.endpoint, peer, after, newest)

    async def newest_order(self, known: Control | None) -> Control | None:
        """Return the owner's newest control record, fetched if the registry shows a newer one than `known`."""
        contacts = await self.contacts()
        return await self._newest_order(known, {peer: contact.control for peer, contact in contacts.items()})

    async def _newest_order(self, known: Control | None, claims: Mapping[str, int]) -> Control | None:
        """`claims`: by peer, the number of its newest record. Peers for whom the owner vouches come first, then members."""
        from spes_p2p.consensus.control import is_signed, number_of
        from spes_p2p.messages.codec import WireError, pack, unpack
        from spes_p2p.messages.consensus import ControlRequest, Known
        from spes_p2p.messages.methods import CONTROL

        newer = [peer for peer in claims if claims[peer] > number_of(known)]
        trusted, members = self.log.last.trusted, self.log.last.participants
        places = {peer: (peer not in trusted, peer not in members, -claims[peer]) for peer in newer}
        for peer in sorted(newer, key=places.__getitem__)[:ASKED_STRANGERS]:
            if claims[peer] <= number_of(known):
                continue
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                reply = await self.endpoint.ask(peer, CONTROL, pack(ControlRequest(None)), REPLY_TIMEOUT_S)
                newest = unpack(Known, reply).newest
                if number_of(newest) > number_of(known) and newest and is_signed(newest, self.genesis, self.net.identity):
                    known = newest
        return known


@contextlib.asynccontextmanager
async def connect(
    addresses: Sequence[str], uses: Sequence[str] = (), spare: Sequence[str] = ()
) -> AsyncIterator[SwarmConnection]:
    """Connect to a swarm as a visitor, without joining. Raises UserError if no address leads to a campaign.

    `uses`: modules that the caller needs for the answers. They are imported while peers are asked. `spare`: addresses for when
    nobody listens at the others.
    """
    needed = ("spes_p2p.net.libp2p", "spes_p2p.net.rpc", "spes_p2p.campaign.record", "spes_p2p.client.proven")
    importing = asyncio.create_task(asyncio.to_thread(_import_all, needed))
    if spare and not await is_any_listening(addresses):
        addresses = spare
    started = await start_visitor(addresses)
    await importing
    from spes_p2p.campaign.record import agreed_record
    from spes_p2p.config.campaign import parse_campaign
    from spes_p2p.consensus.commit_log import CommitLog
    from spes_p2p.net.contacts import keepers_of
    from spes_p2p.net.libp2p import visit
    from spes_p2p.net.rpc import RpcEndpoint

    importing = asyncio.create_task(asyncio.to_thread(_import_all, uses))
    peers = [peer_of(address) for address in addresses]
    net, (record, serving) = await visit(
        started, addresses, lambda transport: agreed_record(RpcEndpoint(transport, REPLY_TIMEOUT_S), peers)
    )
    try:
        campaign = parse_campaign(record.campaign_json, f"peer {serving[0]}")
        if record.genesis.campaign != campaign.hash:
            raise UserError(f"peer {serving[0]}: serves the genesis commit of another campaign; ask the campaign's owner")
        endpoint, log = RpcEndpoint(net.transport, REPLY_TIMEOUT_S), CommitLog(net.identity, record.genesis)
        net.registry.keepers = keepers_of(record.genesis, net.registry.keepers)
        endpoint.shares.is_known = lambda peer: peer in peers or peer in log.last.participants
        yield SwarmConnection(addresses, campaign, log, net, endpoint)
    finally:
        await net.close()
        await importing


class Reconnection:
    """Connects repeatedly to the swarm to which the first connection led, also through members that it met there."""

    def __init__(self) -> None:
        self._met: tuple[str, ...] = ()
        self._genesis: Commit | None = None

    @contextlib.asynccontextmanager
    async def connect(self, addresses: Sequence[str], spare: Sequence[str] = ()) -> AsyncIterator[SwarmConnection]:
        """Connect as `connect` does. Raises UserError for another campaign than before, too."""
        async with connect(addresses, spare=(*spare, *self._met)) as swarm:
            self._genesis = self._genesis or swarm.genesis
            if swarm.genesis != self._genesis:
                raise UserError(f"{', '.join(addresses)}: another campaign than before; start this command again to see it")
            yield swarm

    async def meet(self, swarm: SwarmConnection) -> None:
        """Note where the swarm is now."""
        from spes_p2p.net.contacts import met_addresses

        met = met_addresses(swarm.log.last, await swarm.contacts(), swarm.campaign.config.admission)
        self._met = met or self._met


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
