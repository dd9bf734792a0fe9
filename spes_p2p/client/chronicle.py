"""A swarm's history for clients: certified commits, and the records of rounds that these vouch for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection

from spes_p2p.client.connection import SwarmConnection
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CommitsRequest, Decide
from spes_p2p.messages.methods import COMMITS
from spes_p2p.messages.presence import HistoryPage
from spes_p2p.peer.decisions import fetch_milestone
from spes_p2p.rounds.certified import certified


class Chronicle:
    """What certificates prove of one campaign."""

    def __init__(self, swarm: SwarmConnection, config: CampaignConfig):
        self.log = CommitLog(swarm.net.identity, swarm.genesis)
        self._config = config

    @property
    def rounds(self) -> list[int]:
        """The rounds that the log has and of which there are records: reforms and rollbacks have none."""
        return [number for number in range(max(0, self.log.begins), self.log.round + 1) if self.log.commit_at(number).plan]

    async def learn(self, swarm: SwarmConnection, peer: str) -> None:
        """Add a peer's newer certified commits to the log, without those that fail verification."""
        log = self.log
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            with contextlib.suppress(Refused):
                milestone = await fetch_milestone(swarm.endpoint, peer, log.round)
                if log.admits_milestone(milestone):
                    log.begin_at(milestone)
            while True:
                request = pack(CommitsRequest(log.round))
                found = unpack(Decide, await swarm.endpoint.ask(peer, COMMITS, request, swarm.endpoint.silence_s)).decided
                if not found or found[0].commit.round > log.round + 1 or found[-1].commit.round <= log.round:
                    return
                for decided in filter(log.admits, found):
                    log.put(decided)

    async def pages(self, swarm: SwarmConnection, peer: str, after: int = -1) -> AsyncIterator[HistoryPage]:
        """Yield a peer's records of the rounds after this one, without those that the certificates contradict."""
        async for page in swarm.history(peer, after, self.log.round):
            records = (certified(record, self.log, self._config) for record in page.records)
            yield HistoryPage(page.now, tuple(record for record in records if record is not None))


def owners_first(swarm: SwarmConnection, peers: Collection[str]) -> list[str]:
    """Return the peers, the owner's helpers first: genesis names them, and what no certificate covers is theirs to say."""
    return sorted(peers, key=lambda peer: peer not in swarm.genesis.helpers)
