"""What others send is read beside the event loop where it is large, also within a signature."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.messages import codec
from spes_p2p.messages.codec import pack
from spes_p2p.messages.compact import Compact
from spes_p2p.messages.consensus import Ballot, Commit, Leave, Promise, Signed
from spes_p2p.messages.fields import MAX_EXPERTS, MAX_INTERVALS
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import LEAVE, PREPARE, ROUND
from spes_p2p.messages.rounds import Report, Staged
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.unpacking import LARGE_BYTES
from spes_p2p.peer import announcing
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

BESIDE = {"run_in_executor", "run_blocking"}
"""What runs in a worker thread passes through one of these functions."""


@pytest.fixture
def read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of large records that were read on the event loop, without those that are mostly one field of bytes."""
    found, read = [], codec._read

    def noting(kind: Any, data: codec.Buffer) -> Any:
        if len(data) >= LARGE_BYTES and kind not in (Signed, Compact) and not is_beside(sys._getframe()):
            found.append(kind.__name__)
        return read(kind, data)

    monkeypatch.setattr(codec, "_read", noting)
    return found


def is_beside(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in BESIDE:
        frame = frame.f_back
    return frame is not None


async def test_long_announcements_are_read_beside_the_loop(
    read_on_the_loop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the coordinator, and by everybody who gets its plan."""
    monkeypatch.setattr(announcing, "archived_rounds", lambda store: range(LARGE_BYTES))
    swarm = VirtualSwarm(campaign(total_steps=6000, evaluation={"every_rounds": 0}))
    swarm.start_all("ABC")
    await swarm.until_round(2)
    assert read_on_the_loop == []


class LongWinded(Tamper):
    """Promises name a long commit, and reports many groups."""

    def __init__(self, world: World):
        self._identity = world.identity

    async def send(self, frame: Frame) -> Frame:
        if frame.method == PREPARE and frame.is_answer:
            return changed(frame, Promise, self._promise)
        return changed(frame, Report, self._report) if frame.kind == Kind.REPORT else frame

    def _promise(self, promise: Promise) -> Promise:
        commit = Commit(
            "", 0, promise.round + 1, "", "", (), tuple(range(LARGE_BYTES)), "", 0, 0, (), (), Cursor(), (), (), ()
        )
        return replace(promise, accepted_ballot=Ballot(1, "A"), accepted=commit)

    def _report(self, report: Report) -> Report:
        staged = read_signed(Staged, report.staged, self._identity)
        harmful = tuple(f"expert {i:04}" for i in range(MAX_EXPERTS))
        return replace(report, staged=sign(replace(staged, harmful=harmful), self._identity))


async def test_long_promises_and_reports_are_read_beside_the_loop(read_on_the_loop: list[str]) -> None:
    told: list[str] = []
    swarm = VirtualSwarm(campaign(total_steps=6000, evaluation={"every_rounds": 0}))
    swarm.around["A"] = lambda world: tampered(Liar(world, swarm.campaign.config, told.append), LongWinded(world))
    swarm.start_all("ABC")
    await swarm.until(lambda: min(map(swarm.round_of, "BC")) >= 2)
    assert {lie.split()[0] for lie in told} == {PREPARE, ROUND}
    assert read_on_the_loop == []


async def test_a_long_statement_of_a_peer_that_leaves_is_read_beside_the_loop(read_on_the_loop: list[str]) -> None:
    """It took almost a second with as many intervals as a frame holds."""
    swarm = VirtualSwarm(campaign(total_steps=6000))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    swarm.kill("C")
    intervals = tuple(Interval(0, 10**6 + 2 * i, 10**6 + 2 * i + 1) for i in range(MAX_INTERVALS))
    statement = sign(Leave(swarm.nodes["W"].log.last.id, intervals), SimulatedIdentity("C"))
    endpoint = RpcEndpoint(swarm.network.transport("C"), 5.0)
    await endpoint.ask("W", LEAVE, pack(statement), 5.0)
    assert swarm.nodes["W"].departures.has_left("C")
    assert read_on_the_loop == []
