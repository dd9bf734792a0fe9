"""A record reaches every member, whoever of them is gone, and the coordinator sends it a few times only."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable
from spes_p2p.swarm.memory import MemoryNetwork, run_virtual
from spes_p2p.swarm.relay import FANOUT, PASSED, RELAY, Relay
from spes_p2p.swarm.rpc import Switchboard, Talk

RECORD = b"plan" + bytes(range(256))


def members_of(count: int) -> list[str]:
    return [f"{i:03d}" for i in range(count)]


async def spread(count: int, gone: set[int], liars: set[int]) -> tuple[dict[str, bytes], int]:
    """What each living member got of a coordinator "C", and the bytes that C sent."""
    network, members = MemoryNetwork(latency_s=0.05), members_of(count)
    boards = {name: Switchboard(network.transport(name), 5.0) for name in ["C", *members]}
    relays = {name: Relay(board) for name, board in boards.items()}

    async def lie(talk: Talk) -> None:
        await talk.message()
        await talk.send(b"plan" + b"another")

    for name, relay in relays.items():
        if name == "C" or int(name) not in liars:
            await relay.start()
        else:
            await boards[name].serve(RELAY, lie)
    living = [i for i in range(count) if i not in gone]
    for i in gone:
        network.kill(members[i])
    sent = {i: relays["C"].addressed(RECORD, i, members) for i in living}
    got = await asyncio.gather(*(network.run_peer(members[i], relays[members[i]].received(sent[i])) for i in living))
    return dict(zip([members[i] for i in living], got, strict=True)), sum(map(len, sent.values())) + boards["C"].sent[RELAY]


@given(st.integers(1, 150), st.data())
def test_every_living_member_gets_the_record(count: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, count - 1), max_size=5)
    gone, liars = data.draw(some), data.draw(some)
    got, _ = run_virtual(spread(count, gone, liars - gone))
    assert set(got) == {name for name in members_of(count) if int(name) not in gone}
    assert set(got.values()) <= {RECORD}


def test_the_coordinator_sends_the_record_to_a_few_only() -> None:
    _, sent = run_virtual(spread(150, set(), set()))
    assert sent < FANOUT * len(RECORD) + 150 * 160


def test_nobody_passes_on_to_more_than_a_few() -> None:
    members = members_of(300)
    relay = Relay(Switchboard(MemoryNetwork().transport("C"), 5.0))
    parents = [bytes(relay.addressed(RECORD, i, members)).split(b"\xa3")[1][:3] for i in range(FANOUT, 300)]
    assert all(relay.addressed(RECORD, i, members)[:4] == PASSED for i in range(FANOUT, 300))
    assert max(parents.count(parent) for parent in set(parents)) <= FANOUT


def test_a_record_that_nobody_has_is_an_error_after_a_bounded_time() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.05)
        member = Relay(Switchboard(network.transport("009"), 5.0))
        message = Relay(Switchboard(network.transport("C"), 5.0)).addressed(RECORD, 9, members_of(10))
        with pytest.raises(PeerUnreachable):
            await network.run_peer("009", member.received(message))
        assert asyncio.get_running_loop().time() < 30

    run_virtual(main())
