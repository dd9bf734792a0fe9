"""How a donor shares its places and its line among those that download from it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from typing import cast

import numpy as np
import pytest

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.content.bases import Snapshots
from spes_p2p.content.fetcher import VISITORS_PATIENCE_S, Fetcher
from spes_p2p.content.files import serve_files
from spes_p2p.content.pieces import Body, from_hex, listed, single
from spes_p2p.content.transfer import CHUNK_BYTES, SETTLED_S, ContentServer, _Turns, _Upload
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.content import PIECES_PER_REQUEST, ContentKind, PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream
from spes_p2p.net.shares import ANSWERS_SHARE, Shares
from spes_p2p.net.tasks import end_tasks
from spes_p2p.rounds.digest import content_digest, root_digest
from spes_p2p.testing.memory_network import MemoryNetwork

SILENCE_S = 2.0
STALLED_S = STALLED_SILENCES * SILENCE_S


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_peer_that_takes_nothing_frees_its_place() -> None:
    network, body = MemoryNetwork(latency_s=0.01), bytes(200 * CHUNK_BYTES)
    donor, taker = (RpcEndpoint(network.transport(name), SILENCE_S) for name in ("A", "me"))
    server, sha = ContentServer(donor), hashlib.sha256(body).hexdigest()
    await serve_files(server, {sha: body})
    async with taker.stream("A", "file") as stream:
        await stream.send(pack(PiecesRequest(sha, (0,))))
        await asyncio.sleep(STALLED_S / 2)
        assert server.uploads("file") == 1
        await asyncio.sleep(STALLED_S)
        assert server.uploads("file") == 0


@pytest.mark.parametrize("fast", [0, 1], ids=["all slow", "one fast"])
async def test_peers_that_take_a_little_at_a_time_keep_nobody_out(fast: int) -> None:
    network, body = MemoryNetwork(latency_s=0.01), bytes(200 * CHUNK_BYTES)
    server = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S))

    async def source(name: str, index: int) -> Body:
        return body

    await server.serve("file", source, 4)
    names = [f"peer-{number}" for number in range(4)]
    for name in names:
        network.set_bandwidth(name, 1e9, (8 if names.index(name) < fast else 0.2) * SLOWEST_LINE_BITS / 8)

    async def download(name: str) -> None:
        async with RpcEndpoint(network.transport(name), SILENCE_S).stream("A", "file") as stream:
            await stream.send(pack(PiecesRequest("x", tuple(range(16)))))
            while await stream.receive(Kind.CONTENT) is not None:
                pass

    taking = [asyncio.ensure_future(download(name)) for name in names]
    await asyncio.sleep(SETTLED_S / 2)
    with pytest.raises(Refused) as refused:
        await download("me")
    assert refused.value.code is Code.BUSY
    await asyncio.sleep((8 if fast else 80) * SETTLED_S)  # what waits on the way counts as sent
    await download("me")
    assert server.uploads("file") == 3
    assert not any(each.done() for each in taking[:fast])
    await end_tasks(taking)


@pytest.mark.parametrize(
    ("bytes_per_s", "late_s"), [(0.5 * SLOWEST_LINE_BITS / 8, 0.0), (1e9, SETTLED_S)], ids=["slow", "late"]
)
async def test_strangers_that_download_for_ever_keep_out_nobody_whom_the_owner_vouches_for(
    bytes_per_s: float, late_s: float
) -> None:
    network, body = MemoryNetwork(latency_s=0.05), bytes(4 * CHUNK_BYTES)
    donor = RpcEndpoint(network.transport("A"), 5.0)
    donor.shares.is_trusted = lambda peer: peer == "vouched"
    network.set_bandwidth("A", 8 * SLOWEST_LINE_BITS / 8, 1e9)
    network.set_bandwidth("vouched", 1e9, bytes_per_s)
    server = ContentServer(donor)

    async def source(name: str, index: int) -> Body | None:
        return body

    await server.serve("base", source, 4)
    content, got = listed("base", "x", content_digest(body) * 10**4, len(body)), list[int]()

    async def download(name: str, after_s: float, got: list[int]) -> None:
        await asyncio.sleep(after_s)
        fetcher = Fetcher(RpcEndpoint(network.transport(name), 5.0), VISITORS_PATIENCE_S)

        async def keep(index: int, body: Body) -> None:
            got.append(len(body))

        await fetcher.fetch(content, range(10**4), [fetcher.peers(["A"])], keep)

    strangers = [asyncio.ensure_future(download(f"stranger-{number}", 1.0, [])) for number in range(8)]
    vouched = asyncio.ensure_future(download("vouched", late_s, got))
    await asyncio.sleep(300.0)
    await end_tasks([vouched, *strangers])
    assert sum(got) / 300.0 > 0.4 * SLOWEST_LINE_BITS / 8


class Exchanging:
    """A donor A in an endless exchange, whose line carries `bytes_per_s`, and a content of pieces of one size."""

    def __init__(self, bytes_per_s: float, piece_bytes: int, known: str = ""):
        self.network, self.body = MemoryNetwork(latency_s=0.05), bytes(piece_bytes)
        self.network.set_bandwidth("A", bytes_per_s, bytes_per_s)
        self.donor = RpcEndpoint(self.network.transport("A"), 5.0)
        self.donor.shares = Shares(5.0, lambda: bytes_per_s)
        self.donor.shares.is_known = lambda peer: peer in ("vouched", known)
        self.donor.shares.is_trusted = lambda peer: peer == "vouched"
        self.content = listed("base", "x", content_digest(self.body) * 10**4, piece_bytes)

    async def serve(self, enough: float = math.inf) -> None:
        server = ContentServer(self.donor)
        server.is_exchanging = lambda: True
        server.paced = {"base": ANSWERS_SHARE}

        async def source(name: str, index: int) -> Body | None:
            return self.body

        await server.serve("base", source, 4, lambda: enough)

    async def download(self, name: str, pieces: int) -> float:
        """How long it takes."""
        fetcher, clock = Fetcher(RpcEndpoint(self.network.transport(name), 5.0)), asyncio.get_running_loop().time
        began = clock()

        async def keep(index: int, got: Body) -> None:
            pass

        assert not await fetcher.fetch(self.content, range(pieces), [fetcher.peers(["A"])], keep)
        return clock() - began

    def strangers(self, count: int = 4, known: str = "") -> list[asyncio.Task[float]]:
        """Strangers that download for ever."""
        names = [known or f"stranger-{number}" for number in range(count)]
        return [asyncio.create_task(self.download(name, 10**4)) for name in names]


@pytest.mark.parametrize("known", ["", "member"])
@pytest.mark.parametrize("piece_bytes", [4 * CHUNK_BYTES, 2**26], ids=["pieces", "one large piece"])
async def test_downloads_of_strangers_take_a_tenth_of_the_line_during_an_exchange_and_no_places_of_others(
    piece_bytes: int, known: str
) -> None:
    case = Exchanging(4e6, piece_bytes, known)
    await case.serve()
    strangers = case.strangers(2 if known else 8, known)
    await asyncio.sleep(20.0)
    assert 0.3e6 < case.donor.sent["base"] / 20.0 < 0.45e6
    assert await case.download("vouched", 1) < 1.3 * (piece_bytes / 4e6 + 0.2)
    await end_tasks(strangers)


@pytest.mark.parametrize("bytes_per_s", [4e6, SLOWEST_LINE_BITS / 8])
async def test_a_newcomer_gives_up_no_donor_for_whose_turns_it_waits_behind_other_strangers(bytes_per_s: float) -> None:
    case = Exchanging(bytes_per_s, 4 * CHUNK_BYTES)
    await case.serve()
    strangers = case.strangers(3)
    await asyncio.sleep(1.0)
    took_s = await case.download("newcomer", 8)
    await end_tasks(strangers)
    assert took_s * 0.1 * bytes_per_s / (8 * 4 * CHUNK_BYTES) < 5.0


async def test_strangers_that_were_sent_a_base_make_room_for_a_newcomer() -> None:
    case = Exchanging(4e6, 4 * CHUNK_BYTES)
    await case.serve(enough=16 * 4 * CHUNK_BYTES)
    strangers = case.strangers(4)
    await asyncio.sleep(1.0)
    assert await case.download("newcomer", 16) < 1.2 * (4 + 4) * 16 * 4 * CHUNK_BYTES / 0.4e6
    await end_tasks(strangers)


@pytest.mark.parametrize("kind", ["file", "base_hashes"])
async def test_who_reads_the_same_again_and_again_makes_room_for_a_newcomer(kind: ContentKind) -> None:
    body = random.Random(0).randbytes(2**20)
    network, clock = MemoryNetwork(latency_s=0.05), asyncio.get_running_loop().time
    network.set_bandwidth("A", 4e6, 4e6)
    donor, snapshots = RpcEndpoint(network.transport("A"), SILENCE_S), Snapshots()
    donor.shares.is_known = donor.shares.is_trusted = lambda peer: False
    server, sha = ContentServer(donor), hashlib.sha256(body).hexdigest()
    await serve_files(server, {sha: body})
    await snapshots.serve(donor, server)
    snapshots.publish("h", 3, np.zeros(8, np.float32), body)
    name, digest = (sha, bytes.fromhex(sha)) if kind == "file" else ("h", from_hex(root_digest(body)))
    content = single(kind, name, digest, len(body))

    async def read(peer: str) -> float:
        fetcher, began = Fetcher(RpcEndpoint(network.transport(peer), SILENCE_S)), clock()
        await fetcher.fetch_single(content, [fetcher.peers(["A"])])
        return clock() - began

    async def read_for_ever(peer: str) -> None:
        while True:
            with contextlib.suppress(Refused, PeerUnreachable):
                await read(peer)

    readers = [asyncio.create_task(read_for_ever(f"stranger-{number}")) for number in range(12)]
    await asyncio.sleep(5.0)
    assert await asyncio.wait_for(read("newcomer"), 60.0) < 15.0
    await end_tasks(readers)


def test_who_asks_for_what_is_not_here_gets_no_place_before_others() -> None:
    turns, now = _Turns(), 0.0

    def ask(peer: str) -> bool:
        """Of one peer at a time; False: busy."""
        try:
            has_waited = turns.admit(peer, 1, now, lambda peer: False)
        except Refused:
            return False
        turns.uploads[peer] = _Upload(now, streams={cast(Stream, object())}, has_waited=has_waited)
        return True

    for _ in range(3):
        assert ask("liar")
        turns.give_back("liar", now)
    assert ask("served")
    assert not ask("patient")
    assert not ask("next")
    del turns.uploads["served"]
    assert ask("patient")
    turns.give_back("patient", now)
    assert not ask("next"), "whose base was replaced while it waited comes first"
    assert ask("patient")
    turns.give_back("patient", now)
    assert ask("next"), "once"


async def test_a_donor_on_a_thin_line_serves_each_download_to_its_end() -> None:
    network, body = MemoryNetwork(latency_s=0.01), bytes(20 * CHUNK_BYTES)
    server, ended = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S)), list[str]()
    network.set_bandwidth("A", 2 * SLOWEST_LINE_BITS / 8, 1e9)

    async def source(name: str, index: int) -> Body:
        return body

    await server.serve("base", source, 4)
    content = listed("base", "x", content_digest(body), len(body))

    async def keep(index: int, got: Body) -> None:
        pass

    async def download(name: str) -> None:
        await asyncio.sleep(0.1 * int(name))
        fetcher = Fetcher(RpcEndpoint(network.transport(name), SILENCE_S))
        assert not await fetcher.fetch(content, [0], [fetcher.peers(["A"])], keep)
        ended.append(name)

    took = asyncio.get_running_loop().time()
    await asyncio.gather(*(download(str(number)) for number in range(12)))
    took = asyncio.get_running_loop().time() - took
    assert {*ended[:4]} == {"0", "1", "2", "3"}
    assert took < 1.3 * 12 * len(body) / (2 * SLOWEST_LINE_BITS / 8)


async def test_downloads_are_served_in_turn_and_each_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spes_p2p.content.fetcher")
    network, pieces = MemoryNetwork(latency_s=0.05), 8 * PIECES_PER_REQUEST
    body = bytes(CHUNK_BYTES)
    network.set_bandwidth("A", 2 * pieces * len(body) / 30, 1e9)  # four downloads in a minute
    server = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S))

    async def source(name: str, index: int) -> Body | None:
        return body

    await server.serve("base", source, 4)
    content = listed("base", "x", content_digest(body) * pieces, len(body))
    names, ended = [f"joiner-{number:02}" for number in range(12)], dict[str, float]()

    async def download(name: str) -> None:
        await asyncio.sleep(0.1 * names.index(name))
        fetcher = Fetcher(RpcEndpoint(network.transport(name), SILENCE_S), VISITORS_PATIENCE_S)

        async def keep(index: int, body: Body) -> None:
            pass

        assert await fetcher.fetch(content, range(pieces), [fetcher.peers(["A"])], keep) == []
        ended[name] = now()

    await asyncio.gather(*map(download, names))
    groups = [[ended[name] for name in names[first : first + 4]] for first in (0, 4, 8)]
    assert max(groups[0]) < min(groups[1]) < max(groups[1]) < min(groups[2])
    assert max(groups[0]) < 0.4 * max(groups[2])
    assert "waiting for a turn to download base" in caplog.text
    assert " are being served, 7 wait before this one" in caplog.text
