"""What a store accepted is there after a crash, whole; what it refused left no trace."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_p2p.swarm.interfaces import Store
from spes_p2p.swarm.store import DirectoryStore, MemoryStore

Reopen = Callable[[], Store]


@pytest.fixture(params=["directory", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """A function that opens the same disk again, as a restarted process would."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "store")
    stores = [MemoryStore()]

    def reopen() -> Store:
        stores.append(stores[-1].reopen())
        return stores[-1]

    return reopen


def test_a_blob_is_replaced_and_outlives_the_process(disk: Reopen) -> None:
    store = disk()
    assert store.read("base/3") is None
    store.write("base/3", [b"old"])
    store.write("base/3", [b"ne", memoryview(b"w"), b""])
    assert bytes(disk().read("base/3") or b"") == b"new"


def test_an_empty_blob_is_a_blob(disk: Reopen) -> None:
    disk().write("empty", [])
    content = disk().read("empty")
    assert content is not None
    assert len(content) == 0


def test_what_was_read_stays_valid_when_the_blob_is_replaced(disk: Reopen) -> None:
    store = disk()
    store.write("blob", [b"old"])
    content = store.read("blob")
    store.write("blob", [b"new"])
    store.delete("blob")
    assert content is not None
    assert bytes(content) == b"old"
    assert content.readonly


def test_a_writer_that_fails_midway_changes_nothing(disk: Reopen) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the source broke")

    store = disk()
    store.write("blob", [b"old"])
    for name in ("blob", "other"):
        with pytest.raises(RuntimeError):
            store.write(name, chunks())
    assert bytes(store.read("blob") or b"") == b"old"
    assert store.read("other") is None


def test_a_draft_replaces_the_blob_when_it_is_committed(disk: Reopen) -> None:
    store = disk()
    store.write("blob", [b"old"])
    draft, other = store.draft("blob"), store.draft("blob")
    draft.write(4, memoryview(b"tail"))
    draft.write(0, b"head")
    other.write(0, b"another attempt")
    assert (draft.read(2, 4), bytes(draft.view())) == (b"adta", b"headtail")
    assert bytes(store.read("blob") or b"") == b"old"
    view = draft.view()
    draft.commit()
    assert bytes(store.read("blob") or b"") == b"headtail"
    del draft, other
    store.delete("blob")
    assert bytes(view) == b"headtail"


def test_files_that_drafts_replaced_are_used_again_but_never_while_somebody_maps_them(tmp_path: Path) -> None:
    store, size = DirectoryStore(tmp_path / "store"), 2**20

    def write(content: bytes) -> tuple[int, memoryview]:
        draft = store.draft("blob")
        draft.write(0, content * size)
        draft.commit()
        return os.stat(store.path / "blob").st_ino, draft.view()

    kept_file, kept_view = write(b"a")
    elsewhere = DirectoryStore(tmp_path / "store").read("blob")
    files = [write(content)[0] for content in (b"b", b"c", b"d", b"e")]
    assert len(set(files)) < len(files)
    assert kept_file not in files
    assert elsewhere is not None
    assert bytes(kept_view) == bytes(elsewhere) == b"a" * size
    assert bytes(store.read("blob") or b"") == b"e" * size
    assert len(list(store.path.iterdir())) <= 3


def test_who_looks_at_a_running_peers_files_takes_nothing_away(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    draft = store.draft("blob")
    draft.write(0, b"in the middle")
    DirectoryStore(tmp_path / "store")
    draft.commit()
    assert bytes(store.read("blob") or b"") == b"in the middle"


def test_a_shorter_draft_leaves_nothing_of_the_file_that_it_uses_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for content in (b"x" * 2**21, b"y" * 2**21, b"short"):
        draft = store.draft("blob")
        draft.write(0, content)
        draft.commit()
    assert bytes(store.read("blob") or b"") == b"short"


def test_a_draft_that_was_not_committed_leaves_no_trace(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    draft = store.draft("blob")
    draft.write(0, b"half")
    del draft
    assert list(store.path.iterdir()) == []


def test_a_log_keeps_its_records_in_order(disk: Reopen) -> None:
    records = [b"first", b"", b"\0" * 40, bytes(range(256))]
    for record in records:
        disk().append("heads", record)
    assert disk().records("heads") == records
    disk().delete("heads")
    disk().delete("heads")
    assert disk().records("heads") == []


@pytest.mark.parametrize("name", ["../outside", "/absolute", "", "a/../b", ".hidden", "a//b", "x.aside"])
def test_names_stay_inside_the_store(disk: Reopen, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        disk().write(name, [b""])


def test_a_log_cut_at_any_byte_keeps_the_whole_records_and_goes_on(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.append("log", b"one")
    first = (tmp_path / "log").stat().st_size
    store.append("log", b"second")
    content = (tmp_path / "log").read_bytes()
    for length in range(len(content)):
        (tmp_path / "log").write_bytes(content[:length])
        restarted = DirectoryStore(tmp_path)
        whole = [b"one"] if length >= first else []
        assert restarted.records("log") == whole
        restarted.append("log", b"third")
        assert restarted.records("log") == [*whole, b"third"]


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 100])
def test_garbage_after_the_last_record_is_no_record(tmp_path: Path, tail: bytes) -> None:
    DirectoryStore(tmp_path).append("log", b"one")
    with (tmp_path / "log").open("ab") as file:
        file.write(tail)
    assert DirectoryStore(tmp_path).records("log") == [b"one"]


def test_a_full_disk_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.write("blob", [b"old"])
    store.append("log", b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.write("blob", [b"new"])
        with pytest.raises(OSError, match="No space"):
            store.append("log", b"two")
        with pytest.raises(OSError, match="No space"):
            store.append("other", b"two")
    assert bytes(store.read("blob") or b"") == b"old"
    store.append("log", b"three")
    store.append("other", b"three")
    assert store.records("log") == [b"one", b"three"]
    assert store.records("other") == [b"three"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blob", "log", "other"]


def test_a_crash_before_the_rename_leaves_no_file_behind(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).write("a/blob", [b"old"])
    (tmp_path / "a" / "blob.aside").write_bytes(b"half of the new")
    assert bytes(DirectoryStore(tmp_path).read("a/blob") or b"") == b"old"
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["blob"]


@pytest.mark.parametrize(("point", "survives"), [("write:aside", b"old"), ("write:rename", b"old"), ("write:done", b"new")])
def test_a_simulated_crash_leaves_the_old_blob_or_the_new_one(point: str, survives: bytes) -> None:
    store = MemoryStore()
    store.write("blob", [b"old"])

    def crash(at: str, name: str) -> None:
        if at == point:
            store.crash()

    store.fault = crash
    with pytest.raises(asyncio.CancelledError):
        store.write("blob", [b"new"])
    with pytest.raises(asyncio.CancelledError):
        store.read("blob")
    assert bytes(store.reopen().read("blob") or b"") == survives
