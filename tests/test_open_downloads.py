"""Strangers of an open campaign that download much or slowly, serve false bases or keep records to themselves harm nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from open_campaign import ELECTOR, WIDE, unaudited_swarm

from spes_p2p.content import relay
from spes_p2p.content.relay import PIECE_BYTES, Relay
from spes_p2p.content.transfer import CHUNK_BYTES, SIZE_BYTES
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.content import PiecesRequest, SnapshotInfo
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind
from spes_p2p.messages.methods import SNAPSHOT
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.shares import ANSWERS_SHARE, JOINERS_SHARE
from spes_p2p.net.tasks import end_tasks
from spes_p2p.observe.events import DigestMismatch
from spes_p2p.peer import kept_results
from spes_p2p.rounds.digest import PIECE_ELEMENTS, piece_digests, root_digest
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


def serve_false_bases(swarm: VirtualSwarm, name: str) -> None:
    """Let a peer name and serve false bases, the same as all other liars."""
    snapshots, false = swarm.peers[name].replica.store.snapshots, dict[str, tuple[SnapshotInfo, np.ndarray, bytes]]()
    honest = snapshots._find

    def find(commit: str) -> tuple[SnapshotInfo, np.ndarray, bytes]:
        info, base, _ = honest(commit)
        if info.commit not in false:
            base = np.array(base)
            base[0] += 1.0
            digests = piece_digests(base)
            false[info.commit] = replace(info, digest=root_digest(digests)), base, digests
        return false[info.commit]

    snapshots._find = find  # type: ignore[method-assign]


async def busy(stream: Stream) -> None:
    """Refuse."""
    raise Refused(Code.BUSY, "no")


@pytest.mark.long
@pytest.mark.parametrize("do_vouched_answer", [True, False])
async def test_strangers_that_all_name_one_false_base_keep_nobody_out(do_vouched_answer: bool) -> None:
    """Where nobody vouched has a base to offer, it is believed until the next commit certifies another one."""
    liars = "PQRSTU"
    swarm = unaudited_swarm("AB", "")
    swarm.invitations["C"] = swarm.invitation("C", ELECTOR)
    for name in f"ABX{liars}":
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 8 and {*liars, "X"} <= {*log.last.members})
    for name in liars:
        serve_false_bases(swarm, name)
    for name in "" if do_vouched_answer else "WAB":
        await swarm.nodes[name].endpoint.serve(SNAPSHOT, busy)
    for name in "CH":
        swarm.start(name)
    await swarm.until(lambda: {*"CH"} <= {*log.last.members}, 100.0)
    believed = {name: len(swarm.recorders[name].of(DigestMismatch)) for name in "CH"}
    assert (max(believed.values()) == 0) == do_vouched_answer


@pytest.mark.long
async def test_a_false_base_that_strangers_give_slowly_is_given_up_once_a_commit_certifies_another() -> None:
    swarm = unaudited_swarm("AB", "", layout=WIDE)
    for name in "ABPQ":
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 3 and {*"PQ"} <= {*log.last.members})
    asked = list[str]()

    async def trickle(stream: Stream) -> None:
        asked.append(stream.remote)
        await stream.message()
        size = 4 * PIECE_ELEMENTS
        for at in range(0, size, 2600):
            head = () if at else (size.to_bytes(SIZE_BYTES, "big"),)
            await stream.send(*head, bytes(min(2600, size - at)), kind=Kind.CONTENT)
            await asyncio.sleep(2.0)

    for name in "PQ":
        serve_false_bases(swarm, name)
        await swarm.nodes[name].endpoint.serve("base", trickle)
    honest = {name: swarm.nodes[name].endpoint._handlers[SNAPSHOT] for name in "WAB"}
    for name in honest:
        await swarm.nodes[name].endpoint.serve(SNAPSHOT, busy)
    swarm.start("C")
    await swarm.until(lambda: "C" in asked)
    for name, handler in honest.items():
        await swarm.nodes[name].endpoint.serve(SNAPSHOT, handler)
    await swarm.until(lambda: "C" in log.last.members, 100.0)


@pytest.mark.long
async def test_a_base_that_only_strangers_say_they_have_is_given_up() -> None:
    swarm = unaudited_swarm("AB", "X", reform_after_s=30.0)
    for name in "ABX":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("A") >= 3 and swarm.helper.replica.base.round >= 3)
    had = swarm.helper.replica.base.round
    swarm.network.partition(["W"], ["A", "B", "X"])
    await swarm.until(lambda: min(swarm.round_of("X"), swarm.round_of("A")) >= had + 8)
    for method in ("parts", "manifests", "plan", "base", "base_hashes"):
        await swarm.nodes["X"].endpoint.serve(method, busy)
    swarm.network.heal()
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= had + 8)
    swarm.kill("A")
    swarm.kill("B")
    swarm.start("C")
    await swarm.until(lambda: swarm.round_of("C") > had and "C" in log.last.members, 1000)


@pytest.mark.long
@pytest.mark.parametrize("is_back", [False, True], ids=["new", "back"])
async def test_strangers_that_download_at_a_permitted_speed_keep_no_invited_elector_out(is_back: bool) -> None:
    """While it downloads, no recent commit names it."""
    swarm, begun = unaudited_swarm("AB", "", layout=WIDE), set[tuple[str, str]]()
    swarm.invitations["C"] = swarm.invitation("C", ELECTOR)
    for name in "WAB":
        swarm.network.set_bandwidth(name, 4e6, 4e6)
    log, clock = swarm.nodes["W"].log, asyncio.get_running_loop().time
    for name in "ABC" if is_back else "AB":
        swarm.start(name)
    await swarm.until(lambda: log.round >= 3 and ("C" in log.last.members) == is_back)
    if is_back:
        swarm.kill("C")
    await swarm.until(lambda: "C" not in swarm.nodes["A"].vouched)

    async def download(endpoint: RpcEndpoint, donor: str) -> None:
        """One piece every 4 s, which is 0.5 Mbit/s, after two that give the upload its turn."""
        while True:
            began, is_begun = clock(), (endpoint.peer_id, donor) in begun
            begun.add((endpoint.peer_id, donor))
            try:
                async with endpoint.stream(donor, "base") as stream:
                    await stream.send(pack(PiecesRequest("", (0,) if is_begun else (0, 1))))
                    while await stream.receive(Kind.CONTENT) is not None:
                        pass
            except (PeerUnreachable, Refused):
                begun.discard((endpoint.peer_id, donor))
            await asyncio.sleep(max(0.2, began + 4.0 - clock()))

    endpoints = [RpcEndpoint(swarm.network.transport(f"stranger-{number}"), 5.0) for number in range(4)]
    downloads = [asyncio.ensure_future(download(each, donor)) for each in endpoints for donor in "WAB"]
    await asyncio.sleep(12.0)
    swarm.start_again("C") if is_back else swarm.start("C")
    await swarm.until(lambda: "C" in log.last.members, 60.0)
    await end_tasks(downloads)


@pytest.mark.long
async def test_strangers_that_download_for_ever_slow_rounds_by_little_and_keep_no_newcomer_out() -> None:
    swarm, clock = unaudited_swarm("AB", "", 2, layout=WIDE), asyncio.get_running_loop().time
    log = swarm.nodes["W"].log
    for name in "WABC":
        swarm.network.set_bandwidth(name, 4e6, 4e6)
    for name in "AB":
        swarm.start(name)

    async def until_round(number: int) -> float:
        await swarm.until(lambda: log.round >= number)
        return clock()

    async def download(endpoint: RpcEndpoint, donor: str) -> None:
        while True:
            try:
                async with endpoint.stream(donor, "base") as stream:
                    await stream.send(pack(PiecesRequest("", tuple(range(16)))))
                    while await stream.receive_view(Kind.CONTENT) is not None:
                        pass
            except (PeerUnreachable, Refused):
                await asyncio.sleep(0.1)

    quiet_s = -await until_round(2) + await until_round(5)
    endpoints = [RpcEndpoint(swarm.network.transport(f"stranger-{number}"), 5.0) for number in range(4)]
    downloads = [asyncio.ensure_future(download(each, donor)) for each in endpoints for donor in "WAB" * 2]
    took_s = -await until_round(log.round + 1) + await until_round(log.round + 3)
    swarm.start("C")
    began = clock()
    await swarm.until(lambda: "C" in log.last.members, 60.0)
    await end_tasks(downloads)
    assert clock() - began < 40.0
    assert took_s < 1.03 * quiet_s


@pytest.mark.parametrize(("rule", "share"), [("open", ANSWERS_SHARE), ("friends", JOINERS_SHARE)])
async def test_downloads_of_bases_get_a_part_of_the_line_during_an_exchange(rule: str, share: float) -> None:
    swarm = VirtualSwarm(campaign(admission=rule))
    swarm.start_bootstrap()
    content = swarm.nodes["W"].content
    await swarm.until(lambda: bool(content.paced))
    assert content.paced["base"] == share
    assert {content.paced[kind] for kind in kept_results.KINDS} == {ANSWERS_SHARE}


async def test_nobody_known_waits_for_a_stranger_that_hands_on_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, orders = Relay.addressed, list[tuple[Kind, str]]()

    def addressed(self: Relay, kind: Kind, record: bytes, receivers: Sequence[str], *others: Any) -> Any:
        orders.append((kind, "".join(receivers)))
        return honest(self, kind, record, receivers, *others)

    monkeypatch.setattr(Relay, "addressed", addressed)
    swarm = unaudited_swarm("YZ", "ABC")
    for name in "ABCYZ":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("Y") >= 2, 400)
    assert {frozenset(order[3:]) for kind, order in orders if kind == Kind.PROPOSAL and len(order) == 6} == {frozenset("ABC")}
    assert {frozenset(order[3:]) for kind, order in orders if kind == Kind.DECIDED and len(order) == 6} == {frozenset("ABC")}


@pytest.mark.long
async def test_strangers_whose_records_are_said_to_be_long_and_come_slowly_keep_nobody_out() -> None:
    swarm, strangers = unaudited_swarm("ABC", "", 2), "PQRS"
    for name in "AB" + strangers:
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 2 and set(strangers) <= set(log.last.members))

    async def trickle(stream: Stream) -> None:
        """Never slow enough to be late."""
        await stream.message()
        head = (MAX_FRAME_BYTES.to_bytes(SIZE_BYTES, "big"),)
        for at in range(0, MAX_FRAME_BYTES, CHUNK_BYTES):
            await stream.send(*(() if at else head), bytes(CHUNK_BYTES), kind=Kind.CONTENT)
            await asyncio.sleep(0.9)

    for name in strangers:
        for kind in ("plan", "manifests"):
            await swarm.nodes[name].endpoint.serve(kind, trickle)

    async def is_heard_within(name: str, limit_s: float) -> None:
        """Wait for a round with this peer's work."""
        round_now = log.round
        await swarm.until(lambda: any(
            name in {each.commit.members[i] for i in each.commit.heard} for each in log.since(round_now)
        ), limit_s)

    swarm.start("C")
    await is_heard_within("C", 60.0)
    swarm.network.partition("B")
    await asyncio.sleep(20.0)
    swarm.network.heal()
    await is_heard_within("B", 60.0)


@pytest.mark.long
@pytest.mark.parametrize("does_trickle", [False, True])
async def test_strangers_that_keep_records_to_themselves_are_noticed_before_those_behind_them_are_kept_out(
    does_trickle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records count as large, so that nine members have the tree of dozens, in which the liars come first by their names."""
    monkeypatch.setattr(relay, "LARGE_BYTES", 0)
    swarm, honest, liars = unaudited_swarm("AB", "", 2), "HIJ", "CDE"
    for name in "AB" + liars + honest:
        swarm.start(name)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: log.round >= 3 and set(liars + honest) <= set(log.last.members))

    async def keep(stream: Stream) -> None:
        await stream.message()
        head = (PIECE_BYTES.to_bytes(SIZE_BYTES, "big"),)
        for at in range(0, PIECE_BYTES if does_trickle else 0, 512):
            await stream.send(*(() if at else head), bytes(512), kind=Kind.CONTENT)
            await asyncio.sleep(0.4)
        await asyncio.sleep(60.0)

    for name in liars:
        await swarm.nodes[name].endpoint.serve("record", keep)
    began = log.round
    await swarm.until(lambda: log.round >= began + 8)
    first = [{each.commit.members[i] for i in each.commit.heard} for each in log.since(began)][:3]
    assert all(set(honest) <= heard for heard in first)
    kept = {name for name in liars + honest for at in "ABW" if not swarm.nodes[at].relay.hands_on(name)}
    assert kept == set(liars), "they get no children any more"
