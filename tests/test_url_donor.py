"""A published token file: only the bytes needed are read, nothing wrong is kept, and a URL that fails rests for a while."""

from __future__ import annotations

import hashlib
import json
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_server import FileServer, file_server

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.tokens import TokenLibrary
from spes_p2p.content.transfer import ContentServer
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES, PieceHasher, root_of
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.data.url_donor import FIRST_BACKOFF_S, MAX_BACKOFF_S, UrlDonor, UrlFailed
from spes_p2p.errors import UserError
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.testing.memory_network import MemoryNetwork

PATH = "/tokens/train.npy"
PIECES = 9
IDS = np.random.default_rng(0).integers(0, 60_000, PIECES * PIECE_BYTES // 2 - 100).astype("<u2")
RIGHT = IDS.tobytes()


def hashes_of(content: bytes) -> bytes:
    hasher = PieceHasher()
    hasher.update(content)
    return hasher.hashes()


@dataclass
class Place:
    """A server with a token file, and a volunteer's cache, which has nothing but the list of hashes."""

    server: FileServer
    file: TokenFile
    shelf: TokenShelf
    now: float = 0.0
    donor: UrlDonor = field(init=False)

    def __post_init__(self) -> None:
        self.donor = UrlDonor(lambda: self.now, allows_private=True)

    @property
    def root(self) -> str:
        return self.file.pieces_sha256

    def fetch(self, *pieces: int, file: TokenFile | None = None) -> None:
        self.donor.fetch(file or self.file, pieces, lambda index, content: self.shelf.put(self.root, index, content))

    def is_right(self, *pieces: int) -> bool:
        return all(self.shelf.piece(self.root, i) == RIGHT[i * PIECE_BYTES : (i + 1) * PIECE_BYTES] for i in pieces)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    hashes = hashes_of(RIGHT)
    with file_server({PATH: RIGHT}) as server:
        url = f"{server.url}{PATH}"
        file = TokenFile("train.npy", hashlib.sha256(RIGHT).hexdigest(), len(IDS), "uint16", root_of(hashes), url)
        shelf = TokenShelf([file], tmp_path / "cache", {})
        assert shelf.learn_hashes(file.pieces_sha256, hashes)
        yield Place(server, file, shelf)


# What is read -----------------------------------------------------------------------------------------------------------


def test_only_the_byte_ranges_of_the_pieces_are_read_adjacent_ones_at_once(place: Place) -> None:
    place.fetch(1, 4, 5, PIECES - 1)
    assert place.is_right(1, 4, 5, PIECES - 1)
    assert place.shelf.missing(place.root, range(PIECES)) == [0, 2, 3, 6, 7]
    probe, *ranges = [(start, stop) for _, start, stop in place.server.asked]
    assert probe == (len(RIGHT) - 1, len(RIGHT))
    assert ranges == [(1 * PIECE_BYTES, 2 * PIECE_BYTES), (4 * PIECE_BYTES, 6 * PIECE_BYTES), (8 * PIECE_BYTES, len(RIGHT))]
    place.fetch(0)
    assert len(place.server.asked) == 5, "the file is examined once"


def test_a_numpy_header_is_passed_over(place: Place, tmp_path: Path) -> None:
    np.save(tmp_path / "with_header.npy", IDS)
    place.server.files[PATH] = (tmp_path / "with_header.npy").read_bytes()
    place.fetch(*range(PIECES))
    assert place.is_right(*range(PIECES))


def test_a_dataset_of_the_hub_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{place.server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in {
        "ENDPOINT": place.server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    listed = [{"type": "file", "path": "tokens/train.npy", "size": len(RIGHT), "oid": "0" * 40}]
    place.server.files = {
        "/api/datasets/owner/name/revision/v1": json.dumps({"id": "owner/name", "sha": "0" * 40}).encode(),
        "/api/datasets/owner/name/tree/v1/tokens": json.dumps(listed).encode(),
        "/datasets/owner/name/resolve/v1/tokens/train.npy": RIGHT,
    }
    place.fetch(3, file=replace(place.file, url="hf://datasets/owner/name@v1/tokens/train.npy"))
    assert place.is_right(3)


def test_a_file_without_a_url_is_nobodys_failure(place: Place) -> None:
    place.fetch(0, file=replace(place.file, url=None))
    assert place.shelf.missing(place.root, [0]) == [0]


# URLs that fail ---------------------------------------------------------------------------------------------------------


def no_ranges(place: Place) -> None:
    place.server.without_ranges.add(PATH)


def gone(place: Place) -> None:
    place.server.files.clear()


def other_length(place: Place) -> None:
    place.server.files[PATH] = RIGHT[:-2]


def longer(place: Place) -> None:
    place.server.files[PATH] = RIGHT + b"\0\0"


def other_bytes(place: Place) -> None:
    place.server.files[PATH] = RIGHT[: 5 * PIECE_BYTES] + b"\0" * (len(RIGHT) - 5 * PIECE_BYTES)


def no_package(place: Place) -> None:
    place.file = replace(place.file, url="s3://bucket/train.npy")


LASTING: dict[Callable[[Place], None], str] = {
    no_ranges: "the server does not send byte ranges",
    gone: r"not there \(status 404\)",
    other_length: f"has {len(RIGHT) - 2} bytes, the manifest says {len(RIGHT)} of ids",
    longer: f"has {len(RIGHT) + 2} bytes, the manifest says {len(RIGHT)} of ids",
    other_bytes: "piece 5 differs from the campaign's",
    no_package: r"needs a package that is not installed \(.*s3fs.*\)",
}


@pytest.mark.parametrize("spoil", LASTING)
def test_what_only_the_owner_can_put_right_is_one_line_and_rests_long(place: Place, spoil: Callable[[Place], None]) -> None:
    spoil(place)
    expected = rf"^train\.npy: {place.file.url}: {LASTING[spoil]}; tell the campaign's owner"
    with pytest.raises(UrlFailed, match=expected) as caught:
        place.fetch(4, 5)
    assert "\n" not in str(caught.value)
    assert place.shelf.piece(place.root, 5) is None
    place.server.asked.clear()
    place.now = MAX_BACKOFF_S - 1
    place.fetch(5)
    assert place.server.asked == []
    assert str(place.file.url) in place.donor.problem(place.file)
    place.now = MAX_BACKOFF_S
    with pytest.raises(UrlFailed):
        place.fetch(5)


def test_the_pieces_before_a_wrong_one_stay(place: Place) -> None:
    other_bytes(place)
    with pytest.raises(UrlFailed):
        place.fetch(3, 4, 5)
    assert place.is_right(3, 4)


def test_after_each_broken_connection_in_a_row_a_url_rests_twice_as_long(place: Place) -> None:
    place.fetch(0)
    place.server.breaks = 3
    for rest_s in (FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S):
        with pytest.raises(UrlFailed, match=rf"cannot be read \(.*\); trying peers, and the URL again in {rest_s:.0f} s"):
            place.fetch(1)
        asked = len(place.server.asked)
        place.now += rest_s - 0.1
        place.fetch(1)
        assert len(place.server.asked) == asked
        place.now += 0.1
    place.fetch(1)
    assert place.is_right(0, 1)
    assert place.donor.problem(place.file) == ""
    place.server.breaks = 1
    with pytest.raises(UrlFailed, match=f"again in {FIRST_BACKOFF_S:.0f} s"):
        place.fetch(2)


def test_an_unreachable_server_is_one_line(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/train.npy"
        expected = rf"^train\.npy: {url}: cannot be read \(Cannot connect .*\); trying peers"
        with pytest.raises(UrlFailed, match=expected) as caught:
            place.fetch(0, file=replace(place.file, url=url))
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_not_the_urls_fault(place: Place) -> None:
    def keep(index: int, content: bytes) -> bool:
        raise UserError("no room")

    with pytest.raises(UserError, match="no room"):
        place.donor.fetch(place.file, [0], keep)
    assert place.donor.problem(place.file) == ""
    place.fetch(0)
    assert place.is_right(0)


# With peers -------------------------------------------------------------------------------------------------------------


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


async def library(network: MemoryNetwork, name: str, shelf: TokenShelf, donor: UrlDonor) -> TokenLibrary:
    endpoint = RpcEndpoint(network.transport(name), 2.0)
    made = TokenLibrary(shelf, Fetcher(endpoint), lambda: ((), ("W",)), inline, random.Random(0), donor)
    await made.serve(ContentServer(endpoint))
    return made


async def test_what_a_peer_has_is_not_read_from_the_url_and_the_rest_is(place: Place, tmp_path: Path) -> None:
    network = MemoryNetwork(latency_s=0.01)
    place.shelf.put(place.root, 1, RIGHT[PIECE_BYTES : 2 * PIECE_BYTES])
    await library(network, "W", place.shelf, UrlDonor(allows_private=True))
    mine = TokenShelf([place.file], tmp_path / "mine", {})
    fetching = await library(network, "me", mine, place.donor)
    await fetching.ensure(place.file, [1])
    assert place.server.asked == []
    await fetching.ensure(place.file, [1, 3])
    assert mine.missing(place.root, range(PIECES)) == [i for i in range(PIECES) if i not in (1, 3)]
    assert (PIECE_BYTES, 2 * PIECE_BYTES) not in {(start, stop) for _, start, stop in place.server.asked}


async def test_when_the_url_fails_for_good_peers_are_asked_until_patience_ends_with_one_line(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone(place)
    network = MemoryNetwork(latency_s=0.01)
    await library(network, "W", place.shelf, UrlDonor(allows_private=True))
    fetching = await library(network, "me", TokenShelf([place.file], tmp_path / "mine", {}), place.donor)
    expected = rf"no peer gives 2 pieces of this token file, and {place.file.url}: not there \(status 404\); ask the"
    with pytest.raises(UserError, match=expected):
        await fetching.ensure(place.file, [0, 7])
    assert caplog.text.count("not there") == 1
