"""A campaign outlives a release: peers of two protocol versions train together until the owner requires the newer one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any, cast

import msgpack
import pytest

from spes_p2p.campaign.files import fetch_campaign
from spes_p2p.campaign.record import agreed_record
from spes_p2p.consensus.control import signed
from spes_p2p.consensus.signed import signed_message
from spes_p2p.errors import UPGRADE, NobodyAnswers, UserError, version_advice
from spes_p2p.messages.codec import _plain, pack, unpack
from spes_p2p.messages.consensus import Control, ControlRequest, Requirement, Signed
from spes_p2p.messages.framing import IGNORABLE, Kind
from spes_p2p.messages.methods import CAMPAIGN, CONTROL, PING, PROTOCOL_VERSION, ROUND
from spes_p2p.messages.rounds import Announcement, Ping
from spes_p2p.net.interfaces import Channel, Handler, Transport, World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.events import RoundCommitted, RoundFailed
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.testing.wrapped import Wrapped

NEXT = PROTOCOL_VERSION + 1
HINT = IGNORABLE + 1
"""A kind of frame that this version does not know."""
EXTENDED: dict[str, type[Any]] = {ROUND: Announcement, PING: Ping, CONTROL: ControlRequest}
"""Requests that the next version extends."""


class NewerChannel(Wrapped):
    """A channel of a newer version: a hint goes before each frame, and the first request has one more field."""

    def __init__(self, inner: Channel, extended: type[Any] | None = None):
        super().__init__(inner)
        self._extended = extended

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        await self._inner.send(b"a hint", kind=HINT)
        if self._extended is not None and kind == Kind.MESSAGE:
            pieces, self._extended = (extended(self._extended, b"".join(pieces)),), None
        await self._inner.send(*pieces, kind=kind)


def extended(kind: type[Any], packed: bytes) -> bytes:
    """The record with one more field; one that is signed is signed with it."""
    envelope = unpack(Signed, packed) if kind is Announcement else None
    request = unpack(kind, packed if envelope is None else envelope.record)
    newer = msgpack.packb([*(_plain(getattr(request, field.name)) for field in dataclasses.fields(request)), {"newer": 1}])
    if envelope is None:
        return newer
    signature = SimulatedIdentity(envelope.peer).sign(signed_message(kind, newer))
    return pack(Signed(envelope.peer, newer, signature))


class NewerTransport(Wrapped):
    """Opens and serves streams as a newer version does."""

    async def serve(self, method: str, handler: Handler) -> None:
        await self._inner.serve(method, lambda channel: handler(cast(Channel, NewerChannel(channel))))

    async def open(self, peer: str, method: str) -> Channel:
        return cast(Channel, NewerChannel(await self._inner.open(peer, method), EXTENDED.get(method)))


def newer(world: World) -> World:
    """The world of a peer of the next version, which still speaks this one."""
    transport = cast(Transport, NewerTransport(world.transport))
    return dataclasses.replace(world, transport=transport, protocol=NEXT, oldest_protocol=PROTOCOL_VERSION)


async def upgrade(swarm: VirtualSwarm, name: str) -> None:
    """Stop the peer as a signal does, and start it again on its run-dir as the next version."""
    swarm.around[name] = newer
    peer = swarm.helper if name == swarm.bootstrap else swarm.peers[name]
    peer.leave()
    await swarm.tasks[name]
    swarm.start_again(name)


def order(swarm: VirtualSwarm, from_round: int) -> None:
    """The owner requires the next version."""
    control = Control(swarm.campaign.hash, 1, "running", (), -1, b"", Requirement(NEXT, from_round))
    swarm.nodes["W"].decisions.take_control(signed(control, SimulatedIdentity("W")))


@pytest.mark.long
async def test_a_swarm_is_upgraded_peer_by_peer_and_loses_no_round() -> None:
    swarm = VirtualSwarm(campaign(total_steps=120, sync={"min_peers": 2}))
    swarm.start_all("ABCD")
    for number, name in enumerate("BWDAC", 2):
        await swarm.until_round(number)
        await upgrade(swarm, name)
    await swarm.until_finished()
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()
    assert {contact.protocol for contact in swarm.nodes["W"].contacts.values()} == {NEXT}
    commits = swarm.peers["A"].node.log.since(-1)
    assert [each.commit.round for each in commits] == list(range(13))
    assert all(each.commit.term == 0 for each in commits)
    for name in "ABCD":
        missed = [each.commit.round for each in commits if name not in each.commit.members]
        assert len(missed) <= 1, f"{name} is out for the round of its own restart at most: {missed}"
        assert swarm.peers[name].finished
    refused = [e for recorder in swarm.recorders.values() for e in recorder.of(RoundFailed) if e.reason == "malformed"]
    assert refused == []


@pytest.mark.long
async def test_peers_below_the_required_version_warn_then_end_before_its_first_round(caplog: pytest.LogCaptureFixture) -> None:
    swarm = VirtualSwarm(campaign(total_steps=120, sync={"min_peers": 2}))
    for name in "WAB":
        swarm.around[name] = newer
    swarm.start_all("ABCD")
    await swarm.until_round(1)
    order(swarm, from_round=6)
    old = {name: swarm.tasks[name] for name in "CD"}
    while not all(task.done() for task in old.values()):
        await asyncio.sleep(0.5)
    expected = f"{NEXT} from round 6 on, this program speaks {PROTOCOL_VERSION}; {UPGRADE}"
    for name, task in old.items():
        with pytest.raises(UserError, match=expected):
            task.result()
        assert max(swarm.recorders[name].commits()) == 5
        swarm.kill(name)
    warned = [record.getMessage() for record in caplog.records if expected in record.getMessage()]
    assert [f"rounds left: {left};" in " ".join(warned) for left in (3, 2, 1)] == [True] * 3
    swarm.start("C")
    while not swarm.tasks["C"].done():
        await asyncio.sleep(0.5)
    assert isinstance(swarm.tasks["C"].exception(), UserError), "it is not let in again"
    swarm.kill("C")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders["A"].of(RoundCommitted)
    assert [commit.round for commit in commits] == list(range(13)), "no round is lost"
    assert {len(commit.members) for commit in commits if commit.round >= 6} == {2}


async def test_a_joiner_of_an_older_version_is_told_what_to_type() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(0)
    swarm.nodes["W"].world = dataclasses.replace(swarm.nodes["W"].world, oldest_protocol=NEXT)
    endpoint = RpcEndpoint(in_memory_world(swarm.network, "visitor").transport, 5.0)
    with pytest.raises(UserError, match=f"{PROTOCOL_VERSION} is too old .* {NEXT} or newer; {UPGRADE}"):
        await fetch_campaign(endpoint, ["W"])


async def test_a_joiner_of_a_newer_version_notices_that_the_swarm_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(0)
    monkeypatch.setattr("spes_p2p.campaign.record.OLDEST_PROTOCOL", NEXT)
    endpoint = RpcEndpoint(in_memory_world(swarm.network, "visitor").transport, 5.0)
    with pytest.raises(UserError, match=f"W speaks protocol {PROTOCOL_VERSION}, .*: git fetch && git checkout v"):
        await fetch_campaign(endpoint, ["W"])


def test_who_asks_a_peer_that_still_starts_is_told_so_with_its_id_once() -> None:
    async def main() -> None:
        network, starting = VirtualSwarm(campaign()).network, "Qm" + "s" * 44
        await RpcEndpoint(in_memory_world(network, starting).transport, 5.0).serve(PING, answer_nothing)
        endpoint = RpcEndpoint(in_memory_world(network, "visitor").transport, 5.0)
        with pytest.raises(NobodyAnswers) as told:
            await agreed_record(endpoint, [starting])
        assert told.value.problem == f"no campaign at the address ({starting}: it runs, but serves no campaign yet)"
        assert str(told.value).startswith(f"{told.value.problem}; if that peer has just started, try again")
        with pytest.raises(NobodyAnswers) as told:
            await agreed_record(endpoint, gone := ["Qm" + "g" * 44])
        assert told.value.problem.count(gone[0]) == 1

    async def answer_nothing(stream: Stream) -> None: ...

    simulate(main)


def test_a_joiner_waits_for_a_peer_that_still_starts_and_gives_up_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign())
        swarm.start_all()
        await swarm.until_round(0)
        starting = RpcEndpoint(in_memory_world(swarm.network, "starting").transport, 5.0)
        await starting.serve(PING, swarm.nodes["W"]._on_campaign)
        endpoint = RpcEndpoint(in_memory_world(swarm.network, "visitor").transport, 5.0)
        with pytest.raises(NobodyAnswers, match="serves no campaign yet"):
            await agreed_record(endpoint, ["starting"], patience_s=20.0)
        waiting = asyncio.create_task(agreed_record(endpoint, ["starting"], patience_s=60.0))
        await asyncio.sleep(30)
        assert not waiting.done()
        await starting.serve(CAMPAIGN, swarm.nodes["W"]._on_campaign)
        assert (await waiting)[1] == ["starting"]

    with caplog.at_level(logging.INFO):
        simulate(main)
    assert caplog.text.count("it runs, but serves no campaign yet); waiting until it does") == 2


def test_a_version_that_another_peer_names_cannot_become_a_second_command() -> None:
    assert version_advice(3, 2, "1; rm x") .split(" && ")[1] == "git checkout 'v1; rm x'"
