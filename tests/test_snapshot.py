"""Downloading a base: every piece is verified, and donors that die, lie or differ cost time, not bits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.simulate.swarm import simulate
from spes_p2p.swarm.memory import MemoryNetwork
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import pack, unpack
from spes_p2p.sync.digest import PIECE_ELEMENTS, state_digest
from spes_p2p.sync.snapshot import (
    PIECES,
    PIECES_A_REQUEST,
    SNAPSHOT,
    PiecesRequest,
    Snapshots,
    collect_offers,
    download,
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
        snapshots = Snapshots()
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
        snapshots = Snapshots()
        for number in range(3):
            snapshots.publish(f"h{number}", number, BASE)
        await board.serve(PIECES, snapshots.on_pieces)
        me = Switchboard(network.transport("me"), SILENCE_S)
        for head, piece, refusal in (("h0", 0, "not here"), ("h2", 33, "does not exist"), ("h2", -1, "does not exist")):
            with pytest.raises(Refused, match=refusal):
                await me.ask("A", PIECES, pack(PiecesRequest(head, (piece,))))
        assert len(await me.ask("A", PIECES, pack(PiecesRequest("h1", (32,))))) == 4 * PIECE_ELEMENTS // 2

    simulate(main)
