"""The held-out loss of the last base. That of others comes with the next announcement; after the last round there is none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import WireError, pack, unpack

LAST_LOSS = "last_loss"


@dataclass(frozen=True)
class LastLoss:
    """What the member whose turn it was measured on the campaign's last base."""

    round: int
    loss: float
    """Held out, nats a token."""


def hearing(take: Callable[[str, LastLoss], bool]) -> Callable[[Talk], Awaitable[None]]:
    """The handler of LAST_LOSS talks. `take` is called with the sender; False: too early here, to be told again."""

    async def on_last_loss(talk: Talk) -> None:
        loss = unpack(LastLoss, await talk.message())
        if not math.isfinite(loss.loss):
            raise WireError("a loss that is not finite")
        if not take(talk.remote, loss):
            raise Refused("behind: the last round is not applied here")
        await talk.send(b"")

    return on_last_loss


async def tell_last_loss(board: Switchboard, peers: Iterable[str], loss: LastLoss) -> set[str]:
    """Tell everybody; returns those that are to be told again."""

    async def tell(peer: str) -> str | None:
        try:
            await board.ask(peer, LAST_LOSS, pack(loss), board.silence_s)
        except Refused:
            return peer
        except (PeerUnreachable, WireError):
            pass
        return None

    return {peer for peer in await asyncio.gather(*map(tell, peers)) if peer is not None}
