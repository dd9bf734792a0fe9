"""The record by which peers publish their campaign: its configuration, its genesis commit and the sizes of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.errors import NobodyAnswers, PeerUnreachable, Refused, UserError, refusal_line, version_advice
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import CampaignRecord, CampaignRequest
from spes_p2p.messages.methods import CAMPAIGN, OLDEST_PROTOCOL, PROTOCOL_VERSION
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint


async def agreed_record(endpoint: RpcEndpoint, peers: Sequence[str]) -> tuple[CampaignRecord, list[str]]:
    """Return the record that all answering peers serve, and these peers. Of differing file sizes, the largest counts.

    Raises UserError if no peer answers, peers serve different campaigns, or one speaks another protocol.
    """
    found: dict[bytes, tuple[CampaignRecord, list[str]]] = {}
    sizes: dict[str, int] = {}
    problems = []
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
            problems.append(f"{peer}: it runs, but serves no campaign yet" if starts else _named(peer, error))
        except (PeerUnreachable, WireError) as error:
            problems.append(_named(peer, error))
    if len(found) > 1:
        named = ", ".join(serving[0] for _, serving in found.values())
        raise UserError(f"the addresses lead to different campaigns ({named}); give addresses of one campaign")
    if not found:
        advice = "if that peer has just started, try again in a minute; otherwise ask the campaign's owner for the address"
        raise NobodyAnswers(f"no campaign at the address ({'; '.join(problems)})", advice)
    record, serving = next(iter(found.values()))
    return replace(record, blobs=tuple(sizes.items())), serving


def _named(peer: str, error: Exception) -> str:
    """Return the error, with the peer's id once."""
    return str(error) if peer in str(error) else f"{peer}: {error}"
