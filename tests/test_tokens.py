"""Training text from peer to peer: only what is trained on, each piece verified, whoever dies or lies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample_text import write_test_campaign

from spes_p2p.campaign.files import read_campaign
from spes_p2p.content.fetcher import LATE_BYTES_PER_S, Fetcher
from spes_p2p.content.pieces import Body, listed
from spes_p2p.content.tokens import MAX_CONCURRENT_UPLOADS, PATIENCE_S, TURN_BYTES, TokenLibrary
from spes_p2p.content.transfer import ContentServer
from spes_p2p.data.cache_order import CacheOrder
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES, PieceHasher, piece_count, pieces_of_samples, root_of
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.errors import UserError
from spes_p2p.messages.content import PIECES_PER_REQUEST
from spes_p2p.messages.samples import Interval
from spes_p2p.net.limits import limited_line
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.tasks import beside, end_tasks
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.session.text import CHECK_EVERY_S, keep_checking, make_readers, text_to_serve
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import simulate

SILENCE_S = 2.0
PIECES = 3 * PIECES_PER_REQUEST + 1
IDS = np.random.default_rng(0).integers(0, 60_000, PIECES * PIECE_BYTES // 2 - 100).astype("<u2")


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenFile, Path]:
    path = tmp_path_factory.mktemp("whole") / "train.npy"
    IDS.tofile(path)
    hasher = PieceHasher()
    hasher.update(IDS.tobytes())
    sha = hashlib.sha256(IDS.tobytes()).hexdigest()
    return TokenFile(path.name, sha, len(IDS), "uint16", root_of(hasher.hashes())), path


@dataclass
class Place:
    """Peers of one test on an in-memory network."""

    folder: Path
    file: TokenFile
    path: Path
    network: MemoryNetwork

    def shelf(self, name: str, has_file: bool = False, limit_bytes: int | None = None) -> TokenShelf:
        return TokenShelf([self.file], self.folder / name, {self.file: self.path} if has_file else {}, limit_bytes)

    def disk_bytes(self, name: str) -> int:
        """That the token files of this shelf's cache take."""
        return sum(path.stat().st_blocks * 512 for path in (self.folder / name).glob("*.tokens"))

    async def library(
        self,
        name: str,
        shelf: TokenShelf,
        trainers: Sequence[str] = (),
        helpers: Sequence[str] = ("W",),
        vouched: Sequence[str] | None = None,
        bytes_per_s: float | None = None,
    ) -> TokenLibrary:
        """`vouched`: for whom the owner vouches; None: for all. `bytes_per_s`: of its line."""
        line = limited_line(None if bytes_per_s is None else 8 * bytes_per_s, None)
        endpoint = RpcEndpoint(self.network.transport(name), SILENCE_S, line)
        if vouched is not None:
            endpoint.shares.is_trusted = lambda peer: peer in vouched
        library = TokenLibrary(shelf, Fetcher(endpoint), lambda: (trainers, helpers), inline, random.Random(0))
        await library.serve(ContentServer(endpoint))
        return library

    def received(self, sender: str, receiver: str) -> int:
        return self.network.sent_bytes.get((sender, receiver), 0)

    def is_right(self, shelf: TokenShelf, pieces: Sequence[int]) -> bool:
        ids = shelf.array(self.file).view(np.uint8)
        right = IDS.view(np.uint8)
        return all(
            np.array_equal(ids[a * PIECE_BYTES : (a + 1) * PIECE_BYTES], right[a * PIECE_BYTES : (a + 1) * PIECE_BYTES])
            for a in pieces
        )


@pytest.fixture
def place(tmp_path: Path, whole: tuple[TokenFile, Path]) -> Place:
    return Place(tmp_path, *whole, MemoryNetwork(latency_s=0.01))


# Pieces -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=3 * PIECE_BYTES // 2), max_size=5))
def test_hashes_do_not_depend_on_how_a_file_is_read(blocks: list[bytes]) -> None:
    hasher, content = PieceHasher(), b"".join(blocks)
    for block in blocks:
        hasher.update(block)
    pieces = [content[a : a + PIECE_BYTES] for a in range(0, len(content), PIECE_BYTES)]
    assert hasher.hashes() == b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert len(pieces) == piece_count(len(content))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20), st.integers(1, PIECE_BYTES // 100))
def test_every_byte_of_the_samples_lies_in_their_pieces_and_no_piece_is_without_one(samples: list[int], size: int) -> None:
    pieces = pieces_of_samples(np.array(samples), size)
    assert pieces == sorted({byte // PIECE_BYTES for sample in samples for byte in range(sample * size, (sample + 1) * size)})


# The shelf --------------------------------------------------------------------------------------------------------------


def test_a_cache_is_as_large_as_what_was_put_there_and_outlives_the_process(place: Place) -> None:
    whole, cache = place.shelf("W", has_file=True), place.shelf("me")
    root = place.file.pieces_sha256
    hashes = whole.hashes(root)
    assert hashes is not None
    assert cache.learn_hashes(root, hashes)
    cache.keep_hashes(root)
    piece = whole.piece(root, 3)
    assert piece is not None
    assert cache.put(root, 3, piece)
    used = sum(path.stat().st_blocks * 512 for path in (place.folder / "me").iterdir())
    assert used < 3 * PIECE_BYTES
    again = place.shelf("me")
    assert again.missing(root, [2, 3]) == [2]
    assert again.piece(root, 3) == piece


def test_a_full_cache_lets_go_what_was_used_longest_ago_and_nothing_that_is_read(place: Place) -> None:
    whole, cache = place.shelf("W", has_file=True), place.shelf("me", limit_bytes=3 * PIECE_BYTES)
    root = place.file.pieces_sha256
    assert cache.learn_hashes(root, whole.hashes(root) or b"")
    cache.keep_hashes(root)

    def put(*pieces: int) -> None:
        for index in pieces:
            assert cache.put(root, index, whole.piece(root, index) or b"")

    put(0, 1, 2)
    cache.hold("reader", root, [0])
    put(3, 4)
    assert cache.missing(root, range(5)) == [1, 2]
    assert place.disk_bytes("me") <= 3 * PIECE_BYTES
    cache.hold("reader", root, [3, 4, 5, 6, 7])
    put(5, 6, 7)
    assert cache.missing(root, range(8)) == [0, 1, 2], "what is read stays, beyond the limit too"
    assert place.is_right(cache, [3, 4, 5, 6, 7])
    cache.hold("reader", root, [8])
    put(8)
    assert cache.missing(root, range(9)) == [0, 1, 2, 3, 4, 5]

    again = place.shelf("me", limit_bytes=2 * PIECE_BYTES)
    again.array(place.file)
    assert again.missing(root, range(9)) == [0, 1, 2, 3, 4, 5, 6]
    assert place.disk_bytes("me") <= 2 * PIECE_BYTES


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=30))
@example(limit=2, calls=[(False, [2]), (False, [5]), (True, [2, 5]), (True, [0]), (False, [0])])
def test_a_cache_is_within_its_limit_but_for_what_is_held(limit: int, calls: list[tuple[bool, list[int]]]) -> None:
    order, here, held, used = CacheOrder(limit), set[int](), set[int](), list[int]()
    for is_hold, pieces in calls:
        if is_hold:
            order.hold("reader", [("root", piece) for piece in pieces])
            held = set(pieces)
            used += [piece for piece in pieces if piece in here]
            continue
        used.append(pieces[0])
        left = [piece for _, piece in order.add(("root", pieces[0]), 1)]
        here = (here | {pieces[0]}) - set(left)
        last_use = {piece: place for place, piece in enumerate(used)}
        free = here - held - {pieces[0]}
        assert not set(left) & held
        assert len(here) <= limit or not free
        assert max((last_use[piece] for piece in set(left) - held), default=-1) <= min((last_use[p] for p in free), default=99)


def test_a_piece_that_was_damaged_on_the_disk_is_not_there_any_more(place: Place) -> None:
    whole, cache, root = place.shelf("W", has_file=True), place.shelf("me"), place.file.pieces_sha256
    cache.learn_hashes(root, whole.hashes(root) or b"")
    cache.keep_hashes(root)
    cache.put(root, 0, whole.piece(root, 0) or b"")
    with (place.folder / "me" / f"{root}.tokens").open("r+b") as file:
        file.write(b"\0\0\0")
    assert place.shelf("me").piece(root, 0) is None


def test_a_local_file_that_is_not_the_campaigns_is_not_served(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    IDS[::-1].tofile(other)
    shelf = TokenShelf([place.file], tmp_path / "cache", {place.file: other})
    assert shelf.hashes(place.file.pieces_sha256) is None
    assert shelf.piece(place.file.pieces_sha256, 0) is None


@pytest.mark.parametrize("is_moved", [False, True], ids=["overwritten", "moved"])
def test_a_local_file_that_changes_after_it_was_verified_is_named_once_and_not_served(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_moved: bool
) -> None:
    path, root = tmp_path / "owners.npy", place.file.pieces_sha256
    shutil.copy(place.path, path)
    shelf = TokenShelf([place.file], tmp_path / "cache", {place.file: path})
    assert shelf.hashes(root)
    assert shelf.piece(root, 0) is not None
    if is_moved:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.write(b"\0\0\0\0\0\0")
    assert [shelf.piece(root, 0) for _ in range(3)] == [None] * 3
    assert [str(path) in line for line in caplog.messages] == [True]


def test_damage_to_the_local_text_is_found_though_nobody_asks_for_it(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "owners.npy"
    shutil.copy(place.path, path)
    shelf = TokenShelf([place.file], tmp_path / "cache", {place.file: path})

    async def main() -> None:
        async with beside(keep_checking(shelf, inline, random.Random(0))):
            await asyncio.sleep(10 * CHECK_EVERY_S)
            assert caplog.messages == []
            with path.open("r+b") as file:
                file.seek(7 * PIECE_BYTES)
                file.write(b"\0" * 6)
            await asyncio.sleep(10 * PIECES * CHECK_EVERY_S)

    simulate(main, limit_s=20 * PIECES * CHECK_EVERY_S)
    assert caplog.messages == [f"not served to other peers: {path}: differs from the campaign's token file; copy it again"]


def test_a_reader_whose_text_nobody_gives_ends_when_the_peer_leaves(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        files = read_campaign(write_test_campaign(tmp_path))
        shelf, leave = TokenShelf(files.token_files, tmp_path / "cache", {}), LeaveRequest()
        text, _ = make_readers(files, shelf, await place.library("me", shelf, helpers=()), leave)
        reading = asyncio.ensure_future(asyncio.to_thread(text.read, Interval(0, 0, 1)))
        await asyncio.sleep(0)
        leave.make()
        with pytest.raises(UserError, match="asked to leave"):
            await asyncio.wait_for(reading, 30)

    asyncio.run(main())


@pytest.mark.parametrize("is_owner", [True, False])
def test_a_bootstrap_peer_refuses_damaged_text_and_the_owner_also_missing_text(tmp_path: Path, is_owner: bool) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    path = tmp_path / files.training_manifest.files[0].path
    with path.open("r+b") as file:
        file.seek(300)
        file.write(b"\0\1\0\1\0\1")
    with pytest.raises(UserError, match=rf"{path.name}: differs from the campaign's token file"):
        text_to_serve(files, tmp_path, is_owner)
    path.unlink()
    with pytest.raises(UserError, match=path.name) if is_owner else contextlib.nullcontext():
        text_to_serve(files, tmp_path, is_owner)


def test_only_what_the_root_proves_is_taken(place: Place) -> None:
    whole, cache, root = place.shelf("W", has_file=True), place.shelf("me"), place.file.pieces_sha256
    hashes = whole.hashes(root) or b""
    assert not cache.learn_hashes(root, hashes[:-1] + b"\0")
    assert not cache.learn_hashes(root, hashes[:-32])
    assert not cache.learn_hashes("0" * 64, hashes)
    assert cache.learn_hashes(root, hashes)
    piece = whole.piece(root, 0) or b""
    assert not cache.put(root, 1, piece)
    assert not cache.put(root, 0, piece[:-1])
    assert cache.missing(root, [0, 1]) == [0, 1]


# Fetching ---------------------------------------------------------------------------------------------------------------


async def test_only_the_pieces_that_are_asked_for_are_fetched(place: Place) -> None:
    await place.library("W", place.shelf("W", has_file=True))
    shelf = place.shelf("me")
    mine = await place.library("me", shelf)
    await mine.ensure(place.file, [2, 5, PIECES - 1])
    assert place.is_right(shelf, [2, 5, PIECES - 1])
    assert place.received("W", "me") < 3.2 * PIECE_BYTES
    before = place.received("W", "me")
    await mine.ensure(place.file, [2, 5])
    assert place.received("W", "me") == before


async def test_trainers_that_have_pieces_spare_the_bootstrap_peer(place: Place) -> None:
    await place.library("W", place.shelf("W", has_file=True))
    first, second = place.shelf("A"), place.shelf("B")
    await (await place.library("A", first)).ensure(place.file, range(PIECES))
    before = place.received("W", "A")
    await (await place.library("B", second, trainers=["A"])).ensure(place.file, range(PIECES))
    assert place.is_right(second, range(PIECES))
    assert before > (PIECES - 1) * PIECE_BYTES
    assert place.received("A", "B") + place.received("W", "B") < 1.1 * PIECES * PIECE_BYTES
    assert place.received("A", "B") > 0


async def test_a_donor_that_has_some_pieces_gives_those(place: Place) -> None:
    await place.library("W", place.shelf("W", has_file=True))
    some = list(range(0, PIECES, 3))
    await (await place.library("A", place.shelf("A"))).ensure(place.file, some)
    shelf = place.shelf("B")
    await (await place.library("B", shelf, trainers=["A"])).ensure(place.file, range(PIECES))
    assert place.is_right(shelf, range(PIECES))
    assert place.received("A", "B") > (len(some) - 1) * PIECE_BYTES


@pytest.mark.parametrize("vouched", ["A", ""], ids=["beside a vouched one", "alone"])
@pytest.mark.parametrize("bytes_per_s", [2000.0, 1.05 * LATE_BYTES_PER_S], ids=["late", "just not late"])
async def test_strangers_that_give_text_slowly_delay_nobody_for_long(place: Place, vouched: str, bytes_per_s: float) -> None:
    """A, for whom the owner vouches, has none of it yet, as in the first epoch; without A the strangers are asked first."""
    strangers = [f"stranger-{number}" for number in range(12)]
    for name in strangers:
        await place.library(name, place.shelf(name, has_file=True), bytes_per_s=bytes_per_s)
    for name in ("W", *vouched):
        await place.library(name, place.shelf(name, has_file=name == "W"))
    mine = await place.library("me", place.shelf("me"), [*strangers, *vouched], vouched=vouched)
    began = asyncio.get_running_loop().time()
    await mine.ensure(place.file, range(PIECES_PER_REQUEST))
    took_s = asyncio.get_running_loop().time() - began
    assert took_s < (0.3 if vouched else 2 * SILENCE_S)
    assert not vouched or not any(place.received(name, "me") for name in strangers)


async def test_text_that_only_strangers_have_comes_from_them(place: Place) -> None:
    for name in ("A", "W", "X"):
        await place.library(name, place.shelf(name, has_file=name == "X"))
    shelf = place.shelf("me")
    await (await place.library("me", shelf, "AX", vouched="A")).ensure(place.file, [0, 1])
    assert place.is_right(shelf, [0, 1])


async def test_who_reads_text_for_ever_makes_room_for_a_newcomer(place: Place) -> None:
    place.network.set_bandwidth("W", 4e6, 4e6)
    await place.library("W", place.shelf("W", has_file=True))
    hashes = place.shelf("W", has_file=True).hashes(place.file.pieces_sha256)
    assert hashes is not None
    content = listed("tokens", place.file.pieces_sha256, hashes, PIECE_BYTES)

    async def ignore(index: int, body: Body) -> None:
        pass

    async def read_for_ever(name: str) -> None:
        fetcher = Fetcher(RpcEndpoint(place.network.transport(name), SILENCE_S))
        while True:
            await fetcher.fetch(content, range(PIECES), [fetcher.peers(["W"])], ignore)

    readers = [asyncio.create_task(read_for_ever(f"reader-{number}")) for number in range(2 * MAX_CONCURRENT_UPLOADS)]
    await asyncio.sleep(5.0)
    newcomer = await place.library("A", place.shelf("A"))
    await asyncio.wait_for(newcomer.ensure(place.file, [0]), 3 * MAX_CONCURRENT_UPLOADS * TURN_BYTES / 4e6)
    await end_tasks(readers)


async def test_pieces_that_come_back_are_waited_for(place: Place) -> None:
    shelf = place.shelf("me")
    mine = await place.library("me", shelf)
    waiting = asyncio.create_task(mine.ensure(place.file, [0, 1]))
    await asyncio.sleep(PATIENCE_S / 2)
    assert not waiting.done()
    await place.library("W", place.shelf("W", has_file=True))
    await waiting
    assert place.is_right(shelf, [0, 1])


async def test_text_that_nobody_has_ends_with_a_line_that_says_so(place: Place) -> None:
    mine = await place.library("me", place.shelf("me"))
    with pytest.raises(UserError, match=r"train.npy: no peer gives 2 pieces of this token file; ask the campaign's owner"):
        await mine.ensure(place.file, [0, 1])


def test_what_no_one_should_ask_for_is_refused_or_empty(place: Place) -> None:
    shelf = place.shelf("W", has_file=True)
    root = place.file.pieces_sha256
    assert shelf.hashes("0" * 64) is None
    assert [shelf.piece(root, index) for index in (-1, PIECES, 10**12)] == [None] * 3
    assert shelf.piece("../../etc/passwd", 0) is None
