"""A proposer's requests on the network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from spes_p2p.consensus.proposer import Phase, Proposer, Reply, Send
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Decide, Prepare, Promise, Vote
from spes_p2p.messages.methods import ACCEPT, DECIDE, PREPARE
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.round_context import AttemptFailed

logger = logging.getLogger(__name__)


async def drive(board: RpcEndpoint, proposer: Proposer, sends: Sequence[Send]) -> None:
    """Send these requests and hand the proposer the replies until it waits for none: a silent elector delays nobody.

    Raises AttemptFailed.
    """
    asked: dict[asyncio.Task[Reply | None], Send] = {}
    try:
        while proposer.waits:
            asked.update((asyncio.ensure_future(_reply(board, send)), send) for send in sends)
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            answered = [(asked.pop(task), task.result()) for task in list(asked) if task.done()]
            sends = [more for send, reply in answered for more in proposer.receive(send.to, send.request, reply)]
    finally:
        await end_tasks(asked)
    if proposer.phase is Phase.FAILED:
        raise AttemptFailed(proposer.failure)


async def _reply(board: RpcEndpoint, send: Send) -> Reply | None:
    """An elector's reply; None when it refuses, is gone, or says something else."""
    request = pack(send.request)
    try:
        if isinstance(send.request, Prepare):
            return unpack(Promise, await board.ask(send.to, PREPARE, request, board.silence_s))
        if isinstance(send.request, Decide):
            return await board.ask(send.to, DECIDE, request, board.silence_s)
        return unpack(Vote, await board.ask(send.to, ACCEPT, request, board.silence_s))
    except (PeerUnreachable, Refused, WireError) as error:
        logger.debug("elector %s: %s", send.to[-6:], error)
        return None
