"""Serves the campaign and its files to peers that join."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spes_p2p.config.campaign import Campaign
from spes_p2p.content.files import serve_files
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.content import CampaignRecord, CampaignRequest
from spes_p2p.messages.methods import CAMPAIGN, PROTOCOL_VERSION
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint, Stream

logger = logging.getLogger(__name__)


class CampaignService:
    """The campaign as a joiner asks for it."""

    def __init__(self, campaign: Campaign, genesis: Commit, blobs: Mapping[str, bytes]):
        """`blobs`: the campaign's files by sha256."""
        self._campaign = campaign
        self._genesis = genesis
        self._blobs = blobs

    async def start(self, board: RpcEndpoint, server: ContentServer) -> None:
        """Answer requests."""
        await board.serve(CAMPAIGN, self._on_campaign)
        await serve_files(server, self._blobs)

    async def _on_campaign(self, stream: Stream) -> None:
        theirs = unpack(CampaignRequest, await stream.message()).protocol
        if theirs != PROTOCOL_VERSION:
            logger.warning("%s speaks protocol %d, this peer %d: refused", stream.remote[-6:], theirs, PROTOCOL_VERSION)
            detail = f"you speak protocol {theirs}, this swarm {PROTOCOL_VERSION}"
            raise Refused(Code.VERSION, detail, protocol=PROTOCOL_VERSION)
        blobs = tuple((sha, len(body)) for sha, body in self._blobs.items())
        await stream.send(pack(CampaignRecord(self._campaign.canonical_json(), self._genesis, blobs)))
