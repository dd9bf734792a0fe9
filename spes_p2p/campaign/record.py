"""The record by which peers publish their campaign: its configuration, its genesis commit and the sizes of its files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.errors import NobodyAnswers, PeerUnreachable, Refused, UserError, refusal_line, version_advice
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import CampaignRecord, CampaignRequest
from spes_p2p.messages.methods import CAMPAIGN, OLDEST_PROTOCOL, PROTOCOL_VERSION
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 3.0


class _StillStarting(NobodyAnswers):
    """A peer runs, but serves nothing yet: it may still make base 0."""


async def agreed_record(
    endpoint: RpcEndpoint, peers: Sequence[str], patience_s: float = 0.0
) -> tuple[CampaignRecord, list[str]]:
    """Like `_agreed_record`, but wait up to `patience_s` for a peer that still starts."""
    loop, is_told = asyncio.get_running_loop(), False
    until = loop.time() + patience_s
    while True:
        try:
            return await _agreed_record(endpoint, peers)
        except _StillStarting as error:
            if loop.time() >= until:
                raise
            if not is_told:
                logger.info("%s; waiting until it does", error.problem)
            is_told = True
            await asyncio.sleep(ASK_AGAIN_S)


async def _agreed_record(endpoint: RpcEndpoint, peers: Sequence[str]) -> tuple[CampaignRecord, list[str]]:
    """Return the record that all answering peers serve, and these peers. Of differing file sizes, the largest counts.

    Raises UserError if no peer answers, peers serve different campaigns, or one speaks another protocol.
    """
    found: dict[bytes, tuple[CampaignRecord, list[str]]] = {}
    sizes: dict[str, int] = {}
    problems, kind = [], NobodyAnswers
    for peer in peers:
        try:
            reply = await endpoint.ask(peer, CAMPAIGN, pack(CampaignRequest(PROTOCOL_VERSION)), 2 * endpoint.silence_s)
            record = unpack(CampaignRecord, reply)
            if record.protocol < OLDEST_PROTOCOL:
                advice = version_advice(PROTOCOL_VERSION, record.protocol, record.program)
                raise UserError(
                    f"{peer} speaks protocol {record.protocol}, this program {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}; {advice}"
                )
            found.setdefault(record.campaign_json + record.genesis.id.encode(), (record, []))[1].append(peer)
            sizes.update((sha, max(size, sizes.get(sha, 0))) for sha, size in record.blobs)
        except Refused as error:
            if error.code in (Code.VERSION, Code.NOT_ADMITTED):
                raise UserError(refusal_line(peer, error, PROTOCOL_VERSION)) from None
            starts = error.code == Code.UNKNOWN_METHOD
            kind = _StillStarting if starts else kind
            problems.append(f"{peer}: it runs, but serves no campaign yet" if starts else _named(peer, error))
        except (PeerUnreachable, WireError) as error:
            problems.append(_named(peer, error))
    if len(found) > 1:
        named = ", ".join(serving[0] for _, serving in found.values())
        raise UserError(f"the addresses lead to different campaigns ({named}); give addresses of one campaign")
    if not found:
        advice = "if that peer has just started, try again in a minute; otherwise ask the campaign's owner for the address"
        raise kind(f"no campaign at the address ({'; '.join(problems)})", advice)
    record, serving = next(iter(found.values()))
    return replace(record, blobs=tuple(sizes.items())), serving


def _named(peer: str, error: Exception) -> str:
    """Return the error, with the peer's id once."""
    return str(error) if peer in str(error) else f"{peer}: {error}"
