"""Fetching a milestone. A module of its own, since commands that only ask a swarm need no more of this package."""

from __future__ import annotations

from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Milestone, MilestoneRequest
from spes_p2p.messages.methods import MILESTONE
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.unpacking import unpack_beside


async def fetch_milestone(
    endpoint: RpcEndpoint, peer: str, after: int, is_patient: bool = True, wait_s: float | None = None
) -> Milestone:
    """Fetch the milestone after this round at which the peer's log begins. Raises PeerUnreachable, Refused, WireError."""
    reply = await endpoint.ask_in_turn(peer, MILESTONE, pack(MilestoneRequest(after)), is_patient, wait_s)
    return await unpack_beside(Milestone, reply, endpoint.shares.is_known(peer))
