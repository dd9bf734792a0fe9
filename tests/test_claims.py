"""What a stranger claims about rounds is believed once a certificate proves it, and costs the rounds next to nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.consensus.signed import sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import compressed
from spes_p2p.messages.consensus import CommitsRequest, Decide
from spes_p2p.messages.methods import COMMITS, CONTROL, HISTORY, MILESTONE, PAGE, PING, PROTOCOL_VERSION, ROUND
from spes_p2p.messages.presence import Contact, HistoryPage, HistoryRequest, RoundRecord
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Pong
from spes_p2p.net.contacts import registry_key
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.gathering import MAX_LATE
from spes_p2p.peer.history_sync import LEAST_RECORDS, MAX_PAGES, pages
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.testing.virtual_loop import run_virtual

FAR = 2**40
Attack = Callable[["Stranger"], Coroutine[Any, Any, None]]


class Stranger:
    """A peer of no campaign beside a swarm, and what it serves."""

    def __init__(self, swarm: VirtualSwarm, name: str = "X"):
        self.swarm, self.network = swarm, swarm.network
        self.endpoint = RpcEndpoint(self.network.transport(name), 5.0)
        self.registry = self.network.registry(name)

    async def put(self, round_number: int, commit: str = "f" * 64, control: int = 0) -> None:
        """Claim this in the registry."""
        contact = Contact(self.swarm.campaign.hash, PROTOCOL_VERSION, "trainer", round_number, commit, ("/x",), control)
        await self.registry.put(registry_key(self.swarm.campaign.hash), pack(contact), 10**6)

    async def pong(self, stream: Stream) -> None:
        """Answer every ping from a far round."""
        await stream.message()
        await stream.send(pack(Pong(FAR, -1, True)))


async def claims_a_far_round(stranger: Stranger) -> None:
    """In the registry, and keeps those waiting that ask for the proof."""
    for method in (COMMITS, CONTROL):
        await stranger.endpoint.serve(method, lambda stream: asyncio.sleep(10**6))
    await stranger.put(FAR, control=10**6)


async def claims_another_branch(stranger: Stranger) -> None:
    """In the registry: another commit for a round that everybody knows."""
    await stranger.endpoint.serve(COMMITS, lambda stream: asyncio.sleep(10**6))
    await stranger.put(1)


async def answers_pings_from_a_far_round(stranger: Stranger) -> None:
    """Comes too late for every round, so that coordinators ask whether it is there."""
    await stranger.endpoint.serve(PING, stranger.pong)
    await comes_too_late(stranger)


async def answers_pings_and_never_comes(stranger: Stranger) -> None:
    """Comes too late for every round, and answers that it is on its way."""

    async def pong(stream: Stream) -> None:
        await stream.message()
        await stream.send(pack(Pong(0, -1, True)))

    await stranger.endpoint.serve(PING, pong)
    await comes_too_late(stranger)


async def comes_too_late(stranger: Stranger) -> None:
    """Announce for a decided round at every elector, again and again."""
    announced = unpack(Announcement, stranger.swarm.peers["A"].announcer.announcement(0).record)
    signed = sign(replace(announced, round=0), SimulatedIdentity("X"))
    while True:
        for elector in stranger.swarm.nodes["W"].log.last.electorate:
            with pytest.raises(Refused):
                await stranger.endpoint.ask(elector, ROUND, pack(signed), 5.0)
        await asyncio.sleep(0.5)


async def nothing(stranger: Stranger) -> None:
    """The clean run."""


@functools.cache
def seconds_of(attack: Attack, rounds: int = 15) -> float:
    """Seconds that the swarm needs for these rounds while the stranger does this."""

    async def main() -> float:
        swarm = VirtualSwarm(campaign(total_steps=10**6))
        swarm.start_all()
        await swarm.until_round(2)
        began = asyncio.get_running_loop().time()
        hostile = swarm.network.run_peer("X", attack(Stranger(swarm)))
        first = swarm.round_of("A")
        await swarm.until(lambda: swarm.round_of("A") >= first + rounds, 10**5)
        hostile.cancel()
        return asyncio.get_running_loop().time() - began

    return run_virtual(main())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "attack",
    [claims_a_far_round, claims_another_branch, answers_pings_from_a_far_round, answers_pings_and_never_comes],
)
@pytest.mark.long
def test_a_claim_slows_rounds_by_at_most_a_tenth(attack: Attack) -> None:
    """And once, by a silence for each of the four coordinators."""
    assert seconds_of(attack) <= 1.1 * seconds_of(nothing) + 4 * 5.0


@pytest.mark.long
async def test_claims_of_far_rounds_keep_nobody_out_who_knows_no_member_yet() -> None:
    """While the bootstrap peer is away, a joiner knows nobody; some dozens of strangers claim far rounds, and prove none."""

    async def busy(stream: Stream) -> None:
        await stream.message()
        await asyncio.sleep(4.0)
        raise Refused(Code.BUSY, "wait", retry_s=1.0)

    async def claims(stranger: Stranger) -> None:
        for method in (COMMITS, CONTROL, MILESTONE):
            await stranger.endpoint.serve(method, busy)
        await stranger.put(FAR)
        await asyncio.sleep(10**6)

    swarm = VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all()
    await swarm.until_round(2)
    names = [f"X{number}" for number in range(48)]
    hostile = [swarm.network.run_peer(name, claims(Stranger(swarm, name))) for name in names]
    swarm.kill("W")
    swarm.start("D")
    await swarm.until(lambda: "D" in swarm.nodes["A"].log.last.members, 300.0)
    await end_tasks(hostile)


async def test_known_commits_given_again_and_again_end_the_paging() -> None:
    swarm = VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all()
    await swarm.until_round(4)
    asked = []

    async def again(stream: Stream) -> None:
        asked.append(unpack(CommitsRequest, await stream.message()).after)
        await stream.send(compressed(pack(Decide(swarm.nodes["W"].log.since(0)[:2]))))

    endpoint = RpcEndpoint(swarm.network.transport("X"), 5.0)
    await endpoint.serve(COMMITS, again)
    with pytest.raises(WireError, match="other commits"):
        await asyncio.wait_for(swarm.nodes["A"].decisions.learn_from("X", 0), 60.0)
    assert asked == [0, 2]


@pytest.mark.parametrize("missed", [1, 2, 6])
async def test_a_page_of_commits_counts_for_at_least_its_bytes(monkeypatch: pytest.MonkeyPatch, missed: int) -> None:
    costs, swarm = list[int](), VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all()
    await swarm.until_round(8)
    endpoint, log = swarm.nodes["A"].endpoint, swarm.nodes["A"].log

    async def answer(peer: str, size: int) -> None:
        costs.append(size)

    endpoint.shares.is_trusted = lambda peer: False
    monkeypatch.setattr(endpoint.shares, "answer", answer)
    visitor = RpcEndpoint(swarm.network.transport("X"), 5.0)
    page = await visitor.ask("A", COMMITS, pack(CommitsRequest(log.round - missed)), 5.0)
    assert 0.99 * len(page) <= costs[-1] <= 1.5 * len(page)


@pytest.mark.parametrize("page", [compressed(bytes(PAGE + 1)), b"no zstd frame", compressed(b"\x91\xa2no")])
async def test_a_page_that_is_too_long_or_none_is_an_error_of_who_gives_it(page: bytes) -> None:
    swarm = VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all()
    await swarm.until_round(1)

    async def answer(stream: Stream) -> None:
        await stream.message()
        await stream.send(page)

    await RpcEndpoint(swarm.network.transport("X"), 5.0).serve(COMMITS, answer)
    with pytest.raises(WireError):
        await swarm.nodes["A"].decisions.learn_from("X")


@pytest.mark.long
async def test_who_gives_records_one_by_one_is_left_and_far_rounds_are_not_taken() -> None:
    network = MemoryNetwork()
    asked = []

    async def one(stream: Stream) -> None:
        after = unpack(HistoryRequest, await stream.message()).after
        asked.append(after)
        records = tuple(record(after + more) for more in (1, FAR))
        await stream.send(compressed(pack(HistoryPage(0.0, records))))

    await RpcEndpoint(network.transport("X"), 5.0).serve(HISTORY, one)
    endpoint = RpcEndpoint(network.transport("A"), 5.0)
    heard = [each.round async for page in pages(endpoint, "X", -1, 100) for each in page.records]
    assert heard == list(range(len(heard)))
    assert len(heard) <= 101 // LEAST_RECORDS + 2
    asked.clear()
    claimed = [page async for page in pages(endpoint, "X", -1, 2**30)]
    assert len(claimed) == len(asked) == MAX_PAGES


def record(number: int) -> RoundRecord:
    return RoundRecord(number, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 1, "", 0, "X", 0.0, (), 0, 0, 0)


async def test_strangers_that_come_too_late_under_ever_new_names_are_forgotten_while_a_round_waits() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all("A")  # round 0 waits for two more
    service, commit = swarm.helper.coordinators, swarm.genesis
    await swarm.until(lambda: service._attempt is not None)
    assert service._attempt is not None
    members, asked = service._attempt._members, set[str]()
    for turn in range(8):
        names = [f"{turn}-{i}" for i in range(MAX_LATE)]
        for name in names:
            service.too_late.add(name, commit)
        await asyncio.sleep(8)
        asked.update(set(names) & members._pinged.keys())
        assert not service.too_late.peers, "nobody answers"
    assert len(asked) == 8 * MAX_LATE
    assert max(len(members._pinged), len(members._pings), len(members._dead)) <= 2 * MAX_LATE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("liar", ["A", "W"])
@pytest.mark.long
async def test_who_withholds_the_last_commits_from_a_joiner_keeps_it_out_of_no_more_than_two_rounds(liar: str) -> None:
    swarm = VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all()
    await swarm.until_round(5)
    node, shown = swarm.nodes[liar], swarm.nodes[liar].log.round - 2

    async def cut(stream: Stream) -> None:
        after = unpack(CommitsRequest, await stream.message()).after
        found = tuple(each for each in node.log.since(after) if each.commit.round <= shown)
        await stream.send(compressed(pack(Decide(found))))

    await node.endpoint.serve(COMMITS, cut)
    swarm.start("D")
    joined = node.log.round
    await swarm.until(lambda: "D" in swarm.nodes["B"].log.last.members, 100.0)
    assert swarm.nodes["B"].log.round <= joined + 2
