"""Pieces made from raw text are those of the owner's token files, whatever the server does, or a line says what is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from network_swarm import call
from text_server import TextServer, text_server

from spes_p2p.data import documents, sources
from spes_p2p.data.encoding import Encoder
from spes_p2p.data.manifest import HASHES, Manifest, TokenFile, check_local, find_hashes, read_manifest
from spes_p2p.data.pieces import piece_count
from spes_p2p.data.shelf import TokenShelf, num_bytes
from spes_p2p.data.sources import open_source
from spes_p2p.data.streaming import TextStreamer
from spes_p2p.data.tokenizers import load_tokenizer, train_tokenizer
from spes_p2p.data.tokenizing import tokenize
from spes_p2p.errors import UserError
from spes_p2p.simulate.swarm import simulate
from spes_p2p.swarm.memory import MemoryNetwork
from spes_p2p.swarm.rpc import Switchboard
from spes_p2p.sync.tokens import TokenLibrary

WORDS = ["state", "of", "the", "union", "łódź", "日本語", "🙂", "<|endoftext|>", "is", "strong\n", "42"]
QUICK = (0.0, 0.0, 0.0)
PIECE_BYTES, BLOCK_BYTES = 2**14, 2**13
"""Small ones, so that little text has many."""


def make_documents(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 200))) for _ in range(count)]


DOCUMENTS = make_documents(0, 250)


def json_lines(documents: Sequence[str]) -> bytes:
    return "".join(json.dumps({"body": text}) + "\n" for text in documents).encode()


def parquet(documents: Sequence[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"body": list(documents)}), sink, row_group_size=50)
    return bytes(sink.getvalue().to_pybytes())


FORMATS: dict[str, Callable[[Sequence[str]], bytes]] = {
    "a.jsonl": json_lines,
    "a.jsonl.gz": lambda documents: gzip.compress(json_lines(documents)),
    "a.jsonl.zst": lambda documents: zstandard.compress(json_lines(documents), 1),
    "a.parquet": parquet,
}


@dataclass
class Place:
    """An owner's folder, and the server from which volunteers stream the same text."""

    folder: Path
    tokenizer: Path
    server: TextServer

    def own(self, name: str = "a.jsonl", documents: Sequence[str] = DOCUMENTS) -> TokenFile:
        """The owner's token file of a text that the server has."""
        content = FORMATS[name](documents)
        (self.folder / name).write_bytes(content)
        self.server.files[f"/text/{name}"] = content
        return self.tokenize(name).files[0]

    def tokenize(self, *names: str) -> Manifest:
        manifest = tokenize([self.folder / name for name in names], self.tokenizer, self.owned, text_field="body",
                            overwrite=True, source_prefix=f"{self.server.url}/text/")
        self.server.asked.clear()
        return manifest

    @property
    def owned(self) -> Path:
        return self.folder / "owned"

    def shelf(self, *files: TokenFile, limit_bytes: int | None = None) -> TokenShelf:
        """A volunteer's, which has nothing but the lists of hashes."""
        shelf = TokenShelf(files, self.folder / "cache", {}, limit_bytes)
        for file in files:
            assert shelf.learn_hashes(str(file.pieces_sha256), find_hashes(file, [self.owned]) or b"")
        return shelf

    def streamer(self, shelf: TokenShelf, *files: TokenFile, batch_characters: int = 5000) -> TextStreamer:
        encoder = Encoder(load_tokenizer(self.tokenizer), 0, batch_characters)
        return TextStreamer(shelf, dict.fromkeys(files, encoder), partial(open_source, waits_s=QUICK))

    def make(self, file: TokenFile, *wanted: int, batch_characters: int = 5000) -> TokenShelf:
        shelf = self.shelf(file)
        self.streamer(shelf, file, batch_characters=batch_characters).make(file, wanted or range(count(file)))
        return shelf

    def right(self, file: TokenFile, index: int) -> bytes:
        return (self.owned / file.path).read_bytes()[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]


def count(file: TokenFile) -> int:
    return piece_count(num_bytes(file))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(WORDS * 3, 300).save(str(path))
    return path


@pytest.fixture
def place(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(sources, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(documents, "CHUNK_BYTES", BLOCK_BYTES)
    for module in ("pieces", "shelf", "streaming"):
        monkeypatch.setattr(f"spes_p2p.data.{module}.PIECE_BYTES", PIECE_BYTES)
    with text_server({}) as server:
        yield Place(tmp_path, tokenizer_json, server)


def use_as_hub(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in {"ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


# The same tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_characters", [1, 777, 2**22])
def test_streamed_pieces_are_the_owners_byte_for_byte_however_the_text_is_batched(place: Place, batch_characters: int) -> None:
    file = place.own()
    shelf = place.make(file, batch_characters=batch_characters)
    assert count(file) > 4
    assert shelf.array(file).tobytes() == (place.owned / file.path).read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_streamed(place: Place, name: str) -> None:
    file = place.own(name)
    assert place.make(file).array(file).tobytes() == (place.owned / file.path).read_bytes()


def test_a_path_of_this_machine_is_a_source(place: Place) -> None:
    place.own()
    tokenize([place.folder / "a.jsonl"], place.tokenizer, place.owned, text_field="body", overwrite=True,
             source_prefix=str(place.folder))
    (file,) = read_manifest(place.owned / "manifest.json").files
    assert place.make(file).array(file).tobytes() == (place.owned / file.path).read_bytes()
    assert place.server.asked == []


def test_a_dataset_of_the_hub_is_a_source(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_hub(place.server, monkeypatch)
    place.own()
    content = place.server.files.pop("/text/a.jsonl")
    listed = [{"type": "file", "path": "text/a.jsonl", "size": len(content), "oid": "0" * 40}]
    place.server.files |= {
        "/api/datasets/owner/name/revision/v1": json.dumps({"id": "owner/name", "sha": "0" * 40}).encode(),
        "/api/datasets/owner/name/tree/v1/text": json.dumps(listed).encode(),
        "/datasets/owner/name/resolve/v1/text/a.jsonl": content,
    }
    tokenize([place.folder / "a.jsonl"], place.tokenizer, place.owned, text_field="body", overwrite=True,
             source_prefix="hf://datasets/owner/name@v1/text")
    (file,) = read_manifest(place.owned / "manifest.json").files
    place.server.asked.clear()
    assert place.make(file).array(file).tobytes() == (place.owned / file.path).read_bytes()
    assert place.server.bytes_read("/datasets/owner/name/resolve/v1/text/a.jsonl") == len(content)


# No more than needed ----------------------------------------------------------------------------------------------------


def test_no_more_of_the_text_is_read_than_up_to_the_last_piece_needed(place: Place) -> None:
    file = place.own()
    size = len(place.server.files["/text/a.jsonl"])
    shelf = place.make(file, 0, 1)
    assert shelf.piece(str(file.pieces_sha256), 1) == place.right(file, 1)
    assert shelf.missing(str(file.pieces_sha256), range(count(file))) == list(range(2, count(file)))
    assert place.server.bytes_read("/text/a.jsonl") <= size * 2 / count(file) + 3 * sources.BLOCK_BYTES < size


def test_pieces_asked_for_one_after_the_other_cost_one_pass(place: Place) -> None:
    file = place.own()
    shelf = place.shelf(file)
    streamer = place.streamer(shelf, file)
    for wanted in ([1], [3], [0, 2], [count(file) - 1]):
        streamer.make(file, wanted)
    starts = [start for _, start, _ in place.server.asked]
    assert starts == sorted(set(starts))
    assert shelf.missing(str(file.pieces_sha256), range(count(file))) == []


def test_a_full_cache_takes_only_the_pieces_needed(place: Place) -> None:
    file = place.own()
    shelf, root = place.shelf(file, limit_bytes=2 * PIECE_BYTES), str(file.pieces_sha256)
    streamer = place.streamer(shelf, file)
    shelf.put(root, 4, place.right(file, 4))
    streamer.make(file, [2])
    assert shelf.missing(root, range(count(file))) == [index for index in range(count(file)) if index not in (2, 4)]
    assert shelf.piece(root, 2) == place.right(file, 2)


def test_no_more_sources_are_open_at_once_than_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.data.streaming.PASSES_OPEN", 1)
    for name in ("a.jsonl", "a.jsonl.gz"):
        place.own(name)
    files = place.tokenize("a.jsonl", "a.jsonl.gz").files
    shelf, opened = place.shelf(*files), []
    encoder = Encoder(load_tokenizer(place.tokenizer), 0, 5000)

    def open_text(url: str) -> Any:
        assert [file for file in opened if not file.closed] == []
        opened.append(open_source(url, QUICK))
        return opened[-1]

    streamer = TextStreamer(shelf, dict.fromkeys(files, encoder), open_text)
    for number, file in enumerate((*files, *files)):
        streamer.make(file, [2 * number])
    assert len(opened) == 4
    streamer.close()
    assert [file for file in opened if not file.closed] == []


# Sources that fail or lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_connection_goes_on_where_it_broke_and_costs_one_line(
    place: Place, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = place.own(name)
    place.server.breaks, place.server.intact = len(QUICK), 1
    assert place.make(file).array(file).tobytes() == (place.owned / file.path).read_bytes()
    assert caplog.text.count("connection broken") == 1


def test_a_source_that_stays_broken_is_one_line(place: Place) -> None:
    file = place.own()
    place.server.breaks = 100
    with pytest.raises(UserError, match=r"000_000000\.npy: no peer has it, and its source http.* after 4 tries .*"):
        place.make(file)


def test_a_source_that_is_gone_is_not_asked_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    file = place.own()
    place.server.files.clear()
    with pytest.raises(UserError, match=r"its source http.*/text/a\.jsonl: cannot be read \(not there, status 404\); ask who"):
        place.make(file)
    assert "broken" not in caplog.text


OTHER_TEXTS: dict[str, tuple[bytes, str]] = {
    "another document": (json_lines([*DOCUMENTS[:150], "another", *DOCUMENTS[151:]]), r"differs in piece [1-9]"),
    "a document less": (json_lines(DOCUMENTS[:-1]), "ends .* bytes of tokens too soon"),
    "another order": (json_lines(DOCUMENTS[::-1]), "differs in piece 0"),
    "another format": (b"<html>", "cannot be read: .*line 1: not valid JSON"),
    "another field": (b'{"text": "a"}\n', "cannot be read: .*line 1: has no field 'body'"),
}


@pytest.mark.parametrize("case", OTHER_TEXTS)
def test_a_text_that_was_changed_is_found_out_and_said_in_one_line(place: Place, case: str) -> None:
    content, how = OTHER_TEXTS[case]
    file = place.own()
    place.server.files["/text/a.jsonl"] = content
    with pytest.raises(UserError, match=rf"not the campaign's token file \({how}.*: the text was changed, or .*") as caught:
        place.make(file)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_found_out(place: Place, tmp_path: Path) -> None:
    file = place.own()
    train_tokenizer(WORDS * 3, 290).save(str(tmp_path / "other.json"))
    with pytest.raises(UserError, match=r"differs in piece 0\): the text was changed, or tokenizers [\d.]+ cuts it in another"):
        replace(place, tokenizer=tmp_path / "other.json").make(file)


def test_after_a_failure_the_next_try_begins_anew(place: Place) -> None:
    file = place.own()
    shelf = place.shelf(file)
    streamer, right = place.streamer(shelf, file), place.server.files.pop("/text/a.jsonl")
    with pytest.raises(UserError, match="404"):
        streamer.make(file, [1])
    place.server.files["/text/a.jsonl"] = right
    streamer.make(file, [1])
    assert shelf.piece(str(file.pieces_sha256), 1) == place.right(file, 1)


# With peers -------------------------------------------------------------------------------------------------------------


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def test_what_a_peer_has_is_not_streamed_and_the_rest_is(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = place.own()
    root = str(file.pieces_sha256)

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.01)

        async def library(name: str, shelf: TokenShelf, streamer: TextStreamer | None = None) -> TokenLibrary:
            board = Switchboard(network.transport(name), 2.0)
            made = TokenLibrary(shelf, board, lambda: ((), ("W",)), inline, random.Random(0), streamer)
            await made.serve()
            return made

        there = place.shelf(file)
        there.put(root, 1, place.right(file, 1))
        await library("W", there)
        here = TokenShelf([file], place.folder / "mine", {})
        mine = await library("me", here, place.streamer(here, file))
        await mine.ensure(file, [1])
        assert place.server.asked == []
        began = asyncio.get_running_loop().time()
        await mine.ensure(file, [1, 3])
        assert asyncio.get_running_loop().time() - began < 2.0, "it does not wait for peers that have nothing"
        assert [here.piece(root, index) for index in (1, 3)] == [place.right(file, index) for index in (1, 3)]

    simulate(main)
    assert f"streaming it from {place.server.url}/text/a.jsonl" in caplog.text


# Bad input --------------------------------------------------------------------------------------------------------------


BAD_SOURCES: dict[str, tuple[str, str]] = {
    "unknown scheme": ("ftp://example.org/text", "is streamed from https://HOST/PATH, hf://datasets/OWNER/NAME/PATH or an"),
    "relative path": ("text", "is streamed from https://HOST/PATH"),
    "not on the server": ("{url}/elsewhere", "/elsewhere/a.jsonl: cannot be read (not there, status 404); put the text there"),
    "no ranges": ("{url}/whole", "/whole/a.jsonl: cannot be read (The HTTP server doesn't appear to support range requests"),
    "another text": ("{url}/other", "/other/a.jsonl: has 7 bytes, "),
    "no server": ("http://127.0.0.1:1/text", "http://127.0.0.1:1/text/a.jsonl: cannot be read"),
    "no such folder": ("/nowhere", "/nowhere/a.jsonl: cannot be read (No such file or directory)"),
    "no such dataset": ("hf://datasets/nobody/nothing", "hf://datasets/nobody/nothing/a.jsonl: cannot be read (not there"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_wrong_source_is_one_line_and_leaves_nothing(place: Place, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_hub(place.server, monkeypatch)
    place.server.files |= {"/other/a.jsonl": b"another", "/whole/a.jsonl": json_lines(DOCUMENTS[:3])}
    place.server.without_ranges.add("/whole/a.jsonl")
    (place.folder / "a.jsonl").write_bytes(json_lines(DOCUMENTS[:3]))
    source, expected = BAD_SOURCES[case]
    source = source.format(url=place.server.url)
    ended = call("tokenize", str(place.folder / "a.jsonl"), "--tokenizer", str(place.tokenizer), "--output", str(place.owned),
                 "--text-field", "body", "--source", source)
    assert ended.code == 2
    assert ended.stderr.startswith(f"error: --source {source}")
    assert expected in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not place.owned.exists()


def test_a_manifest_with_a_source_of_unknown_kind_is_refused(place: Place) -> None:
    place.own()
    text = (place.owned / "manifest.json").read_text().replace("http://", "gopher://")
    with pytest.raises(UserError, match=r"files\.0\.source\.url"):
        Manifest.from_json(text, "manifest.json")


# The owner --------------------------------------------------------------------------------------------------------------


def test_with_a_source_each_text_is_one_token_file_with_its_list_of_hashes(place: Place) -> None:
    for name in ("a.jsonl", "a.parquet"):
        place.own(name)
    manifest = place.tokenize("a.jsonl", "a.parquet")
    assert [file.source.url for file in manifest.files if file.source] == [
        f"{place.server.url}/text/{name}" for name in ("a.jsonl", "a.parquet")
    ]
    assert sorted(path.name for path in place.owned.iterdir()) == sorted(
        ["manifest.json", *(name for file in manifest.files for name in (file.path, file.path + HASHES))]
    )
    assert read_manifest(place.owned / "manifest.json") == manifest
    assert np.array_equal(*(np.fromfile(place.owned / file.path, np.uint16) for file in manifest.files))


def test_token_files_with_a_source_may_be_absent_but_not_wrong(place: Place) -> None:
    file = place.own()
    manifest, path = read_manifest(place.owned / "manifest.json"), place.owned / file.path
    check_local(manifest, [place.owned])
    np.fromfile(path, np.uint16)[::-1].tofile(path)
    with pytest.raises(UserError, match="differs from the campaign's token file"):
        check_local(manifest, [place.owned])
    path.unlink()
    check_local(manifest, [place.owned])
    without = replace(manifest, files=(replace(file, source=None),))
    with pytest.raises(UserError, match="is not in"):
        check_local(without, [place.owned])


def test_a_manifest_without_sources_is_what_it_was(place: Place) -> None:
    place.own()
    manifest = tokenize([place.folder / "a.jsonl"], place.tokenizer, place.folder / "plain", text_field="body")
    assert "source" not in manifest.to_json()
