"""Leaving: on request, what the others are told then, and how long a peer serves on after the campaign's last round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from spes_p2p.peer.evaluation import Evaluation
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.samples import AssignedSamples

T = TypeVar("T")

LINGER_S = 20.0
"""After the last round, serve for at most this long those that still need its results."""
LOOK_AGAIN_S = 1.0


class LeaveRequest:
    """Whether this peer was asked to leave. Waits that nobody depends on end early then."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def is_made(self) -> bool:
        """Whether the peer leaves at the next step."""
        return self._asked.is_set()

    def make(self) -> None:
        """Ask the peer to leave."""
        self._asked.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when the request is made, or after the timeout."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._asked.wait(), timeout_s)

    async def unless_made(self, awaited: Awaitable[T]) -> T | None:
        """Await something; cancel it and return None when the request is made first."""
        task = asyncio.ensure_future(awaited)
        asked = asyncio.ensure_future(self._asked.wait())
        either: set[asyncio.Future[Any]] = {task, asked}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            asked.cancel()


async def hand_back(node: Node, replica: Replica, samples: AssignedSamples) -> None:
    """Tell the electors that this peer leaves, with the samples of all its work that is in no round: none of it will be."""
    assignment, commit = None, ""
    if replica.has_base:
        assignment, commit = replica.base.assignment(node.peer_id), replica.base.commit
    await node.leave(samples.to_hand_back(commit, assignment.slices if assignment is not None else ()))


async def linger(node: Node, evaluation: Evaluation, request: LeaveRequest) -> None:
    """Serve until every other trainer has the last base, within LINGER_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LINGER_S
    while loop.time() < deadline and not request.is_made:
        await node.meet()
        evaluation.learn_last_loss()
        if all(node.contacts[peer].round >= node.log.round for peer in node.others("trainer")):
            return
        await request.wait(LOOK_AGAIN_S)


async def serve_on(node: Node, evaluation: Evaluation, request: LeaveRequest) -> None:
    """Serve after the last round until asked to leave. The last loss comes late: look once more for it before leaving."""
    while not request.is_made:
        evaluation.learn_last_loss()
        await request.wait(LOOK_AGAIN_S)
    if not evaluation.learn_last_loss():
        await node.meet()
        evaluation.learn_last_loss()
