"""Serves the campaign and its files to peers that join."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spes_p2p.config import Campaign
from spes_p2p.content.files import serve_files
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Head
from spes_p2p.messages.content import CampaignRecord, CampaignRequest
from spes_p2p.messages.methods import CAMPAIGN, PROTOCOL_VERSION
from spes_p2p.messages.refusals import Code
from spes_p2p.swarm.rpc import Switchboard, Talk

logger = logging.getLogger(__name__)


class CampaignService:
    """The campaign as a joiner asks for it."""

    def __init__(self, campaign: Campaign, genesis: Head, blobs: Mapping[str, bytes]):
        """`blobs`: the campaign's files by sha256."""
        self._campaign = campaign
        self._genesis = genesis
        self._blobs = blobs

    async def start(self, board: Switchboard, server: ContentServer) -> None:
        """Answer requests."""
        await board.serve(CAMPAIGN, self._on_campaign)
        await serve_files(server, self._blobs)

    async def _on_campaign(self, talk: Talk) -> None:
        theirs = unpack(CampaignRequest, await talk.message()).protocol
        if theirs != PROTOCOL_VERSION:
            logger.warning("%s speaks protocol %d, this peer %d: refused", talk.remote[-6:], theirs, PROTOCOL_VERSION)
            detail = f"you speak protocol {theirs}, this swarm {PROTOCOL_VERSION}"
            raise Refused(Code.VERSION, detail, protocol=PROTOCOL_VERSION)
        blobs = tuple((sha, len(body)) for sha, body in self._blobs.items())
        await talk.send(pack(CampaignRecord(self._campaign.canonical_json(), self._genesis, blobs)))
