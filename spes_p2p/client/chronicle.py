"""A swarm's history for clients: the records of rounds, as far as certified commits vouch for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from spes_p2p.client.connection import SwarmConnection
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.messages.presence import HistoryPage
from spes_p2p.rounds.certified import Hearsay


class Chronicle:
    """What certificates prove of one campaign."""

    def __init__(self, swarm: SwarmConnection, config: CampaignConfig, own: str = ""):
        """`own`: the user's own peer; empty: none."""
        self.log, self.own = swarm.log, own
        self._hearsay = Hearsay(swarm.log, config, own)

    @property
    def rounds(self) -> list[int]:
        """The rounds that the log has and of which there are records: reforms and rollbacks have none."""
        return [number for number in range(max(0, self.log.begins), self.log.round + 1) if self.log.commit_at(number).plan]

    async def pages(self, swarm: SwarmConnection, peer: str, after: int = -1) -> AsyncIterator[HistoryPage]:
        """Yield a peer's records of the rounds after this one, as far as they are to be believed."""
        async for page in swarm.history(peer, after, self.log.round):
            records = (self._hearsay.believed(peer, record) for record in page.records)
            yield HistoryPage(page.now, tuple(record for record in records if record is not None))


def owners_first(swarm: SwarmConnection, peers: Collection[str]) -> list[str]:
    """Return the peers, the owner's helpers first: genesis names them, and what no certificate covers is theirs to say."""
    return sorted(peers, key=lambda peer: peer not in swarm.genesis.helpers)
