"""Downloading a base: which donors are believed, what is kept, what is served. Donors that die or lie: test_content.py."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from spes_p2p.content.bases import (
    MAX_SNAPSHOTS,
    PINNED_S,
    SLOT_PIECES,
    PartialDownload,
    Snapshots,
    base_content,
    collect_offers,
    download,
    newest_bases,
)
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.floats import pack_floats
from spes_p2p.content.pieces import Body
from spes_p2p.content.transfer import SIZE_BYTES, ContentServer
from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.methods import SNAPSHOT
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream
from spes_p2p.observe.events import DigestMismatch
from spes_p2p.rounds.base import save_base
from spes_p2p.rounds.digest import PIECE_ELEMENTS, piece_digests, root_digest, state_digest
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

SILENCE_S = 2.0
SIZE = int(PIECE_ELEMENTS * (2 * SLOT_PIECES + 0.5))
BASE = np.random.default_rng(1).standard_normal(SIZE, np.float32)


def ignore(done: int, total: int) -> None:
    pass


async def donor(network: MemoryNetwork, name: str, base: np.ndarray | None = None, commit: str = "h") -> Snapshots:
    """A peer that offers a base."""
    board, snapshots = RpcEndpoint(network.transport(name), SILENCE_S), Snapshots()
    if base is not None:
        snapshots.publish(commit, 3, base)
    await snapshots.serve(board, ContentServer(board))
    return snapshots


async def donors(network: MemoryNetwork, bases: Mapping[str, np.ndarray | None]) -> RpcEndpoint:
    """Let each peer offer its base; returns the downloader's board."""
    for name, base in bases.items():
        await donor(network, name, base)
    return RpcEndpoint(network.transport("me"), SILENCE_S)


async def missing_piece(board: RpcEndpoint, commit: str, base: np.ndarray) -> list[int]:
    """Fetch the first piece of A's base; returns what A did not give."""

    async def keep(index: int, body: Body) -> None:
        assert body == base[:PIECE_ELEMENTS].tobytes()

    fetcher = Fetcher(board)
    content = base_content(commit, piece_digests(base))
    return await fetcher.fetch(content, [0], [fetcher.peers(["A"])], keep)


async def test_the_download_has_the_offered_bits() -> None:
    board = await donors(MemoryNetwork(latency_s=0.01), {"A": BASE, "B": BASE})
    offers = await collect_offers(board, ["A", "B"], "h", SIZE)
    assert [offer.donor for offer in offers] == ["A", "B"]
    assert offers[0].info.digest == state_digest(BASE)
    progress: list[tuple[int, int]] = []
    state, _ = await download(Fetcher(board), offers, None, lambda done, total: progress.append((done, total)))
    assert state.tobytes() == BASE.tobytes()
    assert progress == [(1, 3), (2, 3), (3, 3)]


async def test_only_pieces_that_differ_are_downloaded() -> None:
    board = await donors(MemoryNetwork(), {"A": BASE})
    mine = BASE.copy()
    mine[PIECE_ELEMENTS * 3 + 5] += 1
    offers = await collect_offers(board, ["A"], "h", SIZE)
    before = board.received["base"]
    state, _ = await download(Fetcher(board), offers, mine, ignore)
    assert state.tobytes() == BASE.tobytes()
    piece = BASE[PIECE_ELEMENTS * 3 : PIECE_ELEMENTS * 4]
    assert board.received["base"] - before == len(pack_floats(piece)) + SIZE_BYTES


async def test_what_most_donors_agree_on_is_offered() -> None:
    other = BASE.copy()
    other[0] += 1
    board = await donors(MemoryNetwork(), {"A": other, "B": BASE, "C": BASE})
    offers = await collect_offers(board, ["A", "B", "C", "nobody"], "h", SIZE)
    assert [offer.donor for offer in offers] == ["B", "C"]
    assert await collect_offers(board, ["A", "B"], "another commit", SIZE) == []
    assert await collect_offers(board, ["A", "B"], "h", SIZE + 1) == []


async def test_a_joiner_that_was_restarted_fetches_only_what_it_has_not() -> None:
    network = MemoryNetwork(latency_s=0.01)
    board = await donors(network, {"A": BASE})
    offers = await collect_offers(board, ["A"], "h", SIZE)
    store = MemoryStore()

    def die_after_two(done: int, total: int) -> None:
        if done == 2:
            raise KeyError

    with pytest.raises(KeyError):
        await download(Fetcher(board), offers, None, die_after_two, PartialDownload(store), store.scratch)
    store, before = store.reopen(), board.received["base"]
    assert len(store.names("download-")) == 2
    state, _ = await download(Fetcher(board), offers, None, ignore, PartialDownload(store), store.scratch)
    assert state.tobytes() == BASE.tobytes()
    left = range(2 * SLOT_PIECES * PIECE_ELEMENTS, SIZE, PIECE_ELEMENTS)
    pieces = [len(pack_floats(BASE[begin : begin + PIECE_ELEMENTS])) + SIZE_BYTES for begin in left]
    assert board.received["base"] - before == sum(pieces)
    PartialDownload(store).clear()
    assert store.names("") == []


@pytest.mark.parametrize("harm", ["damaged", "cut", "of a smaller model"])
async def test_pieces_that_were_harmed_on_disk_are_fetched_again(harm: str) -> None:
    board = await donors(MemoryNetwork(latency_s=0.01), {"A": BASE})
    offers = await collect_offers(board, ["A"], "h", SIZE)
    store = MemoryStore()
    PartialDownload(store).save(0, BASE)
    kept = bytearray(store.read("download-000000") or b"")
    kept[5] ^= 1
    store.write("download-000000", [bytes(kept) if harm == "damaged" else bytes(kept[:-4])])
    if harm == "of a smaller model":
        store.write("download-000099", [bytes(4)])
    state, _ = await download(Fetcher(board), offers, None, ignore, PartialDownload(store))
    assert state.tobytes() == BASE.tobytes()


async def test_a_base_that_somebody_downloads_stays_until_he_is_done_for_a_while() -> None:
    network = MemoryNetwork()
    snapshots = await donor(network, "A")
    me = RpcEndpoint(network.transport("me"), SILENCE_S)
    snapshots.publish("h0", 0, BASE)
    assert snapshots.oldest_pinned_round is None
    for number in range(1, 6):
        assert await missing_piece(me, "h0", BASE) == []
        snapshots.publish(f"h{number}", number, BASE)
        assert snapshots.oldest_pinned_round == 0
        await asyncio.sleep(PINNED_S / 2)
    assert len(snapshots._bases) == MAX_SNAPSHOTS
    await asyncio.sleep(PINNED_S)
    snapshots.publish("h6", 6, BASE)
    assert snapshots.oldest_pinned_round is None
    assert await missing_piece(me, "h0", BASE) == [0]


async def test_what_strangers_say_does_not_count_while_a_member_answers() -> None:
    other = BASE.copy()
    other[0] += 1
    board = await donors(MemoryNetwork(), {"member": BASE, "X": other, "Y": other, "Z": BASE})
    offers = await collect_offers(board, ["member", "X", "Y", "Z"], "h", SIZE, {"member", "gone"})
    assert [offer.donor for offer in offers] == ["member", "Z"]
    offers = await collect_offers(board, ["X", "Y"], "h", SIZE, {"gone"})
    assert [offer.donor for offer in offers] == ["X", "Y"]


async def test_strangers_are_not_believed_while_a_member_applies_the_commit() -> None:
    board = await donors(MemoryNetwork(), {"X": BASE, "member": None})
    assert await collect_offers(board, ["member", "X"], "h", SIZE, {"member"}) == []
    certified = root_digest(piece_digests(BASE))
    offers = await collect_offers(board, ["member", "X"], "h", SIZE, {"member"}, certified)
    assert [offer.donor for offer in offers] == ["X"]


@pytest.mark.long
async def test_results_are_kept_for_who_downloads_longer_than_they_would_be() -> None:
    swarm = VirtualSwarm(campaign(total_steps=400, sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    replica = swarm.peers["A"].replica
    began = replica.base
    joiner = RpcEndpoint(swarm.network.transport("J"), SILENCE_S)
    while replica.base.round < began.round + 2 * KEPT_ROUNDS:
        assert await missing_piece(joiner, began.commit, began.values) == []
        await asyncio.sleep(5.0)
    rounds = {results.plan.round for results in replica.results.by_plan.values()}
    assert set(range(began.round + 1, replica.base.round + 1)) <= rounds
    await asyncio.sleep(2 * PINNED_S)
    assert min(results.plan.round for results in replica.results.by_plan.values()) > replica.base.round - KEPT_ROUNDS


@pytest.mark.long
async def test_wrong_bits_that_were_believed_are_replaced_when_the_next_certificate_tells() -> None:
    swarm = VirtualSwarm(campaign(total_steps=100, sync={"min_peers": 2}))
    swarm.start_all("ABC")
    await swarm.until_round(2)
    base = swarm.peers["C"].replica.base
    swarm.kill("C")
    await swarm.until(lambda: swarm.round_of("A") > base.round)
    wrong = base.values.copy()
    wrong[7] += 1
    swarm.stores["C"] = swarm.stores["C"].reopen()
    save_base(swarm.stores["C"], dataclasses.replace(base, values=wrong, digest=state_digest(wrong)))
    swarm.start_again("C")
    await swarm.until_finished()
    assert swarm.recorders["C"].of(DigestMismatch)[0].round == base.round
    swarm.assert_replicas_agree()


async def test_without_a_donor_left_the_download_fails() -> None:
    network = MemoryNetwork(latency_s=0.01)
    board = await donors(network, {"A": BASE, "B": BASE})
    offers = await collect_offers(board, ["A", "B"], "h", SIZE)
    network.kill("A")
    network.kill("B")
    with pytest.raises(PeerUnreachable, match="no donor"):
        await download(Fetcher(board), offers, None, ignore)


async def test_a_donor_serves_the_last_two_bases() -> None:
    network = MemoryNetwork()
    snapshots = await donor(network, "A")
    for number in range(3):
        snapshots.publish(f"h{number}", number, BASE)
    me = RpcEndpoint(network.transport("me"), SILENCE_S)
    for commit in ("h1", "h2"):
        offers = await collect_offers(me, ["A"], commit, SIZE)
        assert (await download(Fetcher(me), offers, None, ignore))[0].tobytes() == BASE.tobytes()
    assert await missing_piece(me, "h0", BASE) == [0]


async def test_a_donor_that_lives_and_never_answers_holds_nobody_up() -> None:
    """As one that took a garbled request for a heartbeat, and waits for it."""
    network = MemoryNetwork(latency_s=0.01)
    board = await donors(network, {"A": BASE})
    mute = RpcEndpoint(network.transport("mute"), SILENCE_S)

    async def never(stream: Stream) -> None:
        await asyncio.Event().wait()

    await mute.serve(SNAPSHOT, never)
    began = asyncio.get_running_loop().time()
    assert [offer.donor for offer in await collect_offers(board, ["mute", "A"], "h", SIZE)] == ["A"]
    assert [info.commit for info in await newest_bases(board, ["mute", "A"])] == ["h"]
    assert asyncio.get_running_loop().time() - began == pytest.approx(2 * STALLED_SILENCES * SILENCE_S, abs=1)
