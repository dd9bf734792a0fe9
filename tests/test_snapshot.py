"""Downloading a base: every piece is verified, and donors that die, lie or differ cost time, not bits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.observe.events import DigestMismatch
from spes_p2p.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.swarm.memory import MemoryNetwork
from spes_p2p.swarm.rpc import STALLED_SILENCES, Switchboard, Talk
from spes_p2p.swarm.store import MemoryStore
from spes_p2p.swarm.wire import pack, unpack
from spes_p2p.sync.base import save_base
from spes_p2p.sync.digest import PIECE_ELEMENTS, state_digest
from spes_p2p.sync.replica import KEPT_ROUNDS
from spes_p2p.sync.snapshot import (
    MAX_SNAPSHOTS,
    PIECES,
    PIECES_A_REQUEST,
    PINNED_S,
    SNAPSHOT,
    UPLOADS_AT_ONCE,
    KeptPieces,
    PiecesRequest,
    Snapshots,
    collect_offers,
    download,
    newest_bases,
)

SILENCE_S = 2.0
SIZE = int(PIECE_ELEMENTS * (2 * PIECES_A_REQUEST + 0.5))
BASE = np.random.default_rng(1).standard_normal(SIZE, np.float32)


def ignore(done: int, total: int) -> None:
    pass


async def donors(network: MemoryNetwork, bases: dict[str, np.ndarray], head: str = "h") -> Switchboard:
    """Let each peer offer its base; returns the downloader's board."""
    for name, base in bases.items():
        board = Switchboard(network.transport(name), SILENCE_S)
        snapshots = Snapshots(SILENCE_S)
        snapshots.publish(head, 3, base)
        await board.serve(SNAPSHOT, snapshots.on_snapshot)
        await board.serve(PIECES, snapshots.on_pieces)
    return Switchboard(network.transport("me"), SILENCE_S)


def test_the_download_has_the_offered_bits() -> None:
    async def main() -> None:
        board = await donors(MemoryNetwork(latency_s=0.01), {"A": BASE, "B": BASE})
        offers = await collect_offers(board, ["A", "B"], "h", SIZE)
        assert [offer.donor for offer in offers] == ["A", "B"]
        assert offers[0].info.digest == state_digest(BASE)
        progress: list[tuple[int, int]] = []
        state = await download(board, offers, None, lambda done, total: progress.append((done, total)))
        assert state.tobytes() == BASE.tobytes()
        assert progress == [(1, 3), (2, 3), (3, 3)]

    simulate(main)


def test_only_pieces_that_differ_are_downloaded() -> None:
    async def main() -> None:
        board = await donors(MemoryNetwork(), {"A": BASE})
        mine = BASE.copy()
        mine[PIECE_ELEMENTS * 3 + 5] += 1
        offers = await collect_offers(board, ["A"], "h", SIZE)
        before = board.received[PIECES]
        state = await download(board, offers, mine, ignore)
        assert state.tobytes() == BASE.tobytes()
        assert board.received[PIECES] - before == 4 * PIECE_ELEMENTS

    simulate(main)


def test_what_most_donors_agree_on_is_offered() -> None:
    async def main() -> None:
        other = BASE.copy()
        other[0] += 1
        board = await donors(MemoryNetwork(), {"A": other, "B": BASE, "C": BASE})
        offers = await collect_offers(board, ["A", "B", "C", "nobody"], "h", SIZE)
        assert [offer.donor for offer in offers] == ["B", "C"]
        assert await collect_offers(board, ["A", "B"], "another head", SIZE) == []
        assert await collect_offers(board, ["A", "B"], "h", SIZE + 1) == []

    simulate(main)


@pytest.mark.parametrize("fault", ["dies", "falls silent", "sends other values", "sends too little"])
def test_a_donor_that_fails_at_its_last_request_is_replaced(fault: str) -> None:
    """The other donor had nothing left to do by then: it must be asked again."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE, "B": BASE})
        bad = Switchboard(network.transport("A"), SILENCE_S)

        async def fail(talk: Talk) -> None:
            pieces = unpack(PiecesRequest, await talk.message()).pieces
            await asyncio.sleep(20)
            if fault == "dies":
                network.kill("A")
            elif fault == "falls silent":
                network.pause("A")
            else:
                for piece in pieces:
                    size = min(PIECE_ELEMENTS, SIZE - piece * PIECE_ELEMENTS) - (fault == "sends too little")
                    await talk.send(np.zeros(size, "<f4").tobytes())

        await bad.serve(PIECES, fail)
        offers = await collect_offers(board, ["A", "B"], "h", SIZE)
        state = await download(board, offers, None, ignore)
        assert state.tobytes() == BASE.tobytes()

    simulate(main)


def test_a_donor_that_sends_a_wrong_piece_costs_that_piece_only() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE, "B": BASE})
        asked: dict[str, list[int]] = {"A": [], "B": []}

        def server(name: str, is_honest: bool) -> Callable[[Talk], Awaitable[None]]:
            async def serve(talk: Talk) -> None:
                pieces = unpack(PiecesRequest, await talk.message()).pieces
                asked[name] += pieces
                for place, piece in enumerate(pieces):
                    values = BASE[piece * PIECE_ELEMENTS : (piece + 1) * PIECE_ELEMENTS]
                    await talk.send((values + (place == 3 and not is_honest)).astype("<f4").tobytes())

            return serve

        await Switchboard(network.transport("A"), SILENCE_S).serve(PIECES, server("A", False))
        await Switchboard(network.transport("B"), SILENCE_S).serve(PIECES, server("B", True))
        offers = await collect_offers(board, ["A", "B"], "h", SIZE)
        state = await download(board, offers, None, ignore)
        assert state.tobytes() == BASE.tobytes()
        assert asked["A"] == list(range(PIECES_A_REQUEST))
        assert sorted(asked["B"]) == list(range(3, 2 * PIECES_A_REQUEST + 1))

    simulate(main)


def test_a_donor_that_lives_but_sends_nothing_is_given_up() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE, "B": BASE})

        async def stall(talk: Talk) -> None:
            await talk.message()
            await asyncio.sleep(1e6)

        await Switchboard(network.transport("A"), SILENCE_S).serve(PIECES, stall)
        offers = await collect_offers(board, ["A", "B"], "h", SIZE)
        began = asyncio.get_running_loop().time()
        state = await download(board, offers, None, ignore)
        assert state.tobytes() == BASE.tobytes()
        assert asyncio.get_running_loop().time() - began < 2 * STALLED_SILENCES * SILENCE_S

    simulate(main)


def test_shared_weights_come_first() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        board = Switchboard(network.transport("A"), SILENCE_S)
        snapshots, asked = Snapshots(SILENCE_S), list[int]()
        snapshots.publish("h", 3, BASE)

        async def note(talk: Talk) -> None:
            pieces = unpack(PiecesRequest, await talk.message()).pieces
            asked.extend(pieces)
            for piece in pieces:
                await talk.send(BASE[piece * PIECE_ELEMENTS : (piece + 1) * PIECE_ELEMENTS].tobytes())

        await board.serve(SNAPSHOT, snapshots.on_snapshot)
        await board.serve(PIECES, note)
        me = Switchboard(network.transport("me"), SILENCE_S)
        await download(me, await collect_offers(me, ["A"], "h", SIZE), None, ignore)
        assert asked == sorted(asked)
        assert len(asked) == 2 * PIECES_A_REQUEST + 1

    simulate(main)


def test_a_joiner_that_was_restarted_fetches_only_what_it_has_not() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE})
        offers = await collect_offers(board, ["A"], "h", SIZE)
        store = MemoryStore()

        def die_after_two(done: int, total: int) -> None:
            if done == 2:
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await download(board, offers, None, die_after_two, KeptPieces(store), store.scratch)
        store, before = store.reopen(), board.received[PIECES]
        assert len(store.names("download-")) == 2
        state = await download(board, offers, None, ignore, KeptPieces(store), store.scratch)
        assert state.tobytes() == BASE.tobytes()
        assert board.received[PIECES] - before == BASE.nbytes - 2 * PIECES_A_REQUEST * 4 * PIECE_ELEMENTS
        KeptPieces(store).clear()
        assert store.names("") == []

    simulate(main)


@pytest.mark.parametrize("harm", ["damaged", "cut", "of a smaller model"])
def test_pieces_that_were_harmed_on_disk_are_fetched_again(harm: str) -> None:
    async def main() -> None:
        board = await donors(MemoryNetwork(latency_s=0.01), {"A": BASE})
        offers = await collect_offers(board, ["A"], "h", SIZE)
        store = MemoryStore()
        KeptPieces(store).save(0, BASE)
        kept = bytearray(store.read("download-000000") or b"")
        kept[5] ^= 1
        store.write("download-000000", [bytes(kept) if harm == "damaged" else bytes(kept[:-4])])
        if harm == "of a smaller model":
            store.write("download-000099", [bytes(4)])
        state = await download(board, offers, None, ignore, KeptPieces(store))
        assert state.tobytes() == BASE.tobytes()

    simulate(main)


def test_a_donor_serves_a_few_at_a_time_and_everybody_gets_the_base() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = Switchboard(network.transport("A"), SILENCE_S)
        snapshots = Snapshots(SILENCE_S)
        snapshots.publish("h", 3, BASE)
        most = 0

        async def count(talk: Talk) -> None:
            nonlocal most
            await snapshots.on_pieces(talk)
            most = max(most, snapshots._uploads + 1)

        await board.serve(SNAPSHOT, snapshots.on_snapshot)
        await board.serve(PIECES, count)

        async def join(name: str) -> bytes:
            me = Switchboard(network.transport(name), SILENCE_S)
            return (await download(me, await collect_offers(me, ["A"], "h", SIZE), None, ignore)).tobytes()

        states = await asyncio.gather(*(join(f"J{i}") for i in range(3 * UPLOADS_AT_ONCE)))
        assert set(states) == {BASE.tobytes()}
        assert 1 < most <= UPLOADS_AT_ONCE

    simulate(main)


def test_a_base_that_somebody_downloads_stays_until_he_is_done_for_a_while() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        board = Switchboard(network.transport("A"), SILENCE_S)
        snapshots = Snapshots(SILENCE_S)
        await board.serve(PIECES, snapshots.on_pieces)
        me = Switchboard(network.transport("me"), SILENCE_S)
        snapshots.publish("h0", 0, BASE)
        assert snapshots.oldest_pinned_round is None
        for number in range(1, 6):
            await me.ask("A", PIECES, pack(PiecesRequest("h0", (0,))))
            snapshots.publish(f"h{number}", number, BASE)
            assert snapshots.oldest_pinned_round == 0
            await asyncio.sleep(PINNED_S / 2)
        assert len(snapshots._bases) == MAX_SNAPSHOTS
        await asyncio.sleep(PINNED_S)
        snapshots.publish("h6", 6, BASE)
        assert snapshots.oldest_pinned_round is None
        with pytest.raises(Refused, match="not here"):
            await me.ask("A", PIECES, pack(PiecesRequest("h0", (0,))))

    simulate(main)


def test_what_strangers_say_does_not_count_while_a_member_answers() -> None:
    async def main() -> None:
        other = BASE.copy()
        other[0] += 1
        board = await donors(MemoryNetwork(), {"member": BASE, "X": other, "Y": other, "Z": BASE})
        offers = await collect_offers(board, ["member", "X", "Y", "Z"], "h", SIZE, {"member", "gone"})
        assert [offer.donor for offer in offers] == ["member", "Z"]
        offers = await collect_offers(board, ["X", "Y"], "h", SIZE, {"gone"})
        assert [offer.donor for offer in offers] == ["X", "Y"]

    simulate(main)


def test_results_are_kept_for_who_downloads_longer_than_they_would_be() -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=400, sync={"min_peers": 2}))
        swarm.start_all("AB")
        await swarm.until_round(2)
        donor = swarm.peers["A"].replica
        began = donor.base
        joiner = Switchboard(swarm.network.transport("J"), SILENCE_S)
        while donor.base.round < began.round + 2 * KEPT_ROUNDS:
            await joiner.ask("A", PIECES, pack(PiecesRequest(began.head, (0,))))
            await asyncio.sleep(5.0)
        rounds = {results.plan.round for results in donor._kept.values()}
        assert set(range(began.round + 1, donor.base.round + 1)) <= rounds
        await asyncio.sleep(2 * PINNED_S)
        assert min(results.plan.round for results in donor._kept.values()) > donor.base.round - KEPT_ROUNDS

    simulate(main)


def test_wrong_bits_that_were_believed_are_replaced_when_the_next_certificate_tells() -> None:
    async def main() -> None:
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
        assert swarm.recorders["C"].told(DigestMismatch)[0].round == base.round
        swarm.assert_replicas_agree()

    simulate(main)


def test_without_a_donor_left_the_download_fails() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE, "B": BASE})
        offers = await collect_offers(board, ["A", "B"], "h", SIZE)
        network.kill("A")
        network.kill("B")
        with pytest.raises(PeerUnreachable, match="all donors"):
            await download(board, offers, None, ignore)

    simulate(main)


def test_a_donor_serves_existing_pieces_of_the_last_two_bases() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        board = Switchboard(network.transport("A"), SILENCE_S)
        snapshots = Snapshots(SILENCE_S)
        for number in range(3):
            snapshots.publish(f"h{number}", number, BASE)
        await board.serve(PIECES, snapshots.on_pieces)
        me = Switchboard(network.transport("me"), SILENCE_S)
        for head, piece, refusal in (("h0", 0, "not here"), ("h2", 33, "does not exist"), ("h2", -1, "does not exist")):
            with pytest.raises(Refused, match=refusal):
                await me.ask("A", PIECES, pack(PiecesRequest(head, (piece,))))
        assert len(await me.ask("A", PIECES, pack(PiecesRequest("h1", (32,))))) == 4 * PIECE_ELEMENTS // 2

    simulate(main)


def test_a_donor_that_lives_and_never_answers_holds_nobody_up() -> None:
    """As one that took a garbled request for a heartbeat, and waits for it."""

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)
        board = await donors(network, {"A": BASE})
        mute = Switchboard(network.transport("mute"), SILENCE_S)

        async def never(talk: Talk) -> None:
            await asyncio.Event().wait()

        await mute.serve(SNAPSHOT, never)
        began = asyncio.get_running_loop().time()
        assert [offer.donor for offer in await collect_offers(board, ["mute", "A"], "h", SIZE)] == ["A"]
        assert [info.head for info in await newest_bases(board, ["mute", "A"])] == ["h"]
        assert asyncio.get_running_loop().time() - began == pytest.approx(2 * STALLED_SILENCES * SILENCE_S, abs=1)

    simulate(main)
