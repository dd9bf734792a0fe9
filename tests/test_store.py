"""What a store accepted is there after a crash, whole; what it refused left no trace."""

import asyncio
import contextlib
import errno
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.memory_store import MemoryStore

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
    draft.publish()
    assert bytes(store.read("blob") or b"") == b"headtail"
    del draft, other
    store.delete("blob")
    assert bytes(view) == b"headtail"


def test_what_is_written_behind_a_view_is_published_with_it(disk: Reopen) -> None:
    """A base's values are mapped before its header follows, which is longer in a large swarm."""
    store = disk()
    draft = store.draft("blob")
    draft.write(0, b"values")
    view = draft.view()
    draft.write(6, b"header")
    draft.write(0, b"VALUES")
    assert (bytes(view), draft.read(4, 4)) == (b"VALUES", b"EShe")
    draft.publish()
    assert bytes(store.read("blob") or b"") == b"VALUESheader"


def test_files_that_drafts_replaced_are_used_again_but_never_while_somebody_maps_them(tmp_path: Path) -> None:
    store, size = DirectoryStore(tmp_path / "store"), 2**20

    def write(content: bytes) -> tuple[int, memoryview]:
        draft = store.draft("blob")
        draft.write(0, content * size)
        draft.publish()
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


def test_a_rounds_files_are_those_of_earlier_rounds(tmp_path: Path) -> None:
    """As a peer writes them: two bases are served, four rounds' bodies are kept, checkpoints take turns."""
    store, megabyte = DirectoryStore(tmp_path / "store"), bytes(2**20)
    served: list[memoryview] = []
    files: list[set[int]] = []
    for number in range(12):
        bodies, base = store.draft(f"bodies-of-results-{number}"), store.draft("base")
        for draft in (bodies, base):
            draft.write(0, megabyte)
            draft.publish()
        store.write(f"checkpoint-{number % 2}", [megabyte])
        served = [*served, base.view()][-2:]
        if number >= 4:
            store.delete(f"bodies-of-results-{number - 4}")
        del bodies, base, draft
        files.append({file.stat().st_ino for file in store.path.iterdir()})
    assert files[-1] == files[-2] == files[-3]
    assert len(files[-1]) <= 3 + 5 + 3


def test_a_file_that_could_not_be_replaced_is_no_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, old = DirectoryStore(tmp_path / "store"), b"a" * 2**20
    store.write("blob", [old])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *args: no_space())
        with pytest.raises(UserError):
            store.write("blob", [b"b" * 2**20])
    store.draft("blob").write(0, b"c" * 2**20)
    assert bytes(store.read("blob") or b"") == old
    assert [file.name for file in store.path.iterdir()] == ["blob"]


def test_who_looks_at_a_running_peers_files_takes_nothing_away(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    draft = store.draft("blob")
    draft.write(0, b"in the middle")
    DirectoryStore(tmp_path / "store")
    draft.publish()
    assert bytes(store.read("blob") or b"") == b"in the middle"


def test_a_shorter_draft_leaves_nothing_of_the_file_that_it_uses_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for content in (b"x" * 2**21, b"y" * 2**21, b"short"):
        draft = store.draft("blob")
        draft.write(0, content)
        draft.publish()
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
        disk().append("commits", record)
    assert disk().records("commits") == records
    disk().delete("commits")
    disk().delete("commits")
    assert disk().records("commits") == []


@pytest.mark.parametrize("name", ["../outside", "/absolute", "", "a/../b", ".hidden", "a//b", "x.tmp"])
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


STEPS = ("open", "write", "fsync", "replace")


def fail_at(patch: pytest.MonkeyPatch, step: int, fail: Callable[[], None]) -> list[str]:
    """From step `step` on (counted over all calls in STEPS) every call fails; returns the list of calls, as they come."""
    calls: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) > step:
                fail()
            return real(*args, **options)

        return call

    for name in STEPS:
        patch.setattr(os, name, failing(name, getattr(os, name)))
    return calls


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(store: Store) -> tuple[bytes, list[bytes]]:
    return bytes(store.read("blob") or b""), store.records("log")


@pytest.mark.parametrize("step", range(6))
def test_a_disk_that_is_full_from_some_step_on_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    store = DirectoryStore(tmp_path)
    store.write("blob", [b"old"])
    store.append("log", b"one")
    for change in (lambda: store.write("blob", [b"new"]), lambda: store.append("log", b"two")):
        with monkeypatch.context() as patch:
            calls = fail_at(patch, step, no_space)
            with contextlib.suppress(UserError):
                change()
                assert len(calls) <= step
        blob, log = contents(DirectoryStore(tmp_path))
        assert blob in (b"old", b"new")
        assert log in ([b"one"], [b"one", b"two"])
    store.append("log", b"three")
    store.write("blob", [b"newest"])
    assert contents(DirectoryStore(tmp_path))[0] == b"newest"
    assert contents(DirectoryStore(tmp_path))[1][-1] == b"three"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blob", "log"]


@pytest.mark.parametrize("room", [0, 1, 7, 8, 9, 100, 4096, 9999])
def test_a_write_that_is_cut_at_any_byte_changes_nothing_and_says_so_in_one_line(tmp_path: Path, room: int) -> None:
    store = DirectoryStore(tmp_path)
    store.write("blob", [b"old"])
    with file_size_limit(room), pytest.raises(UserError, match=r"blob: cannot be written .*; make room and restart"):
        store.write("blob", [bytes(5000), bytes(5000)])
    with file_size_limit(room), pytest.raises(UserError, match="log: cannot be written"):
        store.append("log", bytes(10_000))
    assert contents(DirectoryStore(tmp_path)) == (b"old", [])
    store.append("log", b"one")
    store.write("blob", [b"new"])
    assert contents(DirectoryStore(tmp_path)) == (b"new", [b"one"])


@contextlib.contextmanager
def file_size_limit(most_bytes: int) -> Iterator[None]:
    """The kernel cuts every write of this process at this file size, as a full disk would, and fails the next."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("step", range(7))
def test_a_process_that_dies_at_any_step_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    store = DirectoryStore(tmp_path)
    store.write("blob", [b"old"])
    store.append("log", b"one")
    for change in (lambda: store.write("blob", [b"new"]), lambda: store.append("log", b"two")):
        child = os.fork()
        if child == 0:
            fail_at(monkeypatch, step, lambda: os._exit(9))
            change()
            os._exit(0)
        os.waitpid(child, 0)
    blob, log = contents(DirectoryStore(tmp_path))
    assert blob in (b"old", b"new")
    assert log in ([b"one"], [b"one", b"two"])
    assert step < 6 or (blob, log) == (b"new", [b"one", b"two"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blob", "log"]


WRITER = """
import sys
from pathlib import Path
from spes_p2p.storage.store import DirectoryStore

store = DirectoryStore(Path(sys.argv[1]))
number = len(store.records("log"))
while True:
    store.write("blob", [number.to_bytes(8, "little") * 20_000])
    store.append("log", number.to_bytes(8, "little"))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.long
def test_a_process_killed_at_random_instants_loses_nothing_that_it_had_finished(tmp_path: Path) -> None:
    """Each time the next process goes on from what the last one left."""
    rng = random.Random(0)
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        done = int(writer.stdout.readline())
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        rest = writer.stdout.read().split("\n")[:-1]
        writer.wait()
        done = int(rest[-1]) if rest else done
        blob, log = contents(DirectoryStore(tmp_path))
        assert log == [number.to_bytes(8, "little") for number in range(len(log))]
        assert len(log) in (done, done + 1)
        assert blob == blob[:8] * 20_000
        assert int.from_bytes(blob[:8], "little") in (len(log) - 1, len(log))


def test_a_crash_before_the_rename_leaves_no_file_behind(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).write("a/blob", [b"old"])
    (tmp_path / "a" / "blob.tmp").write_bytes(b"half of the new")
    assert bytes(DirectoryStore(tmp_path).read("a/blob") or b"") == b"old"
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["blob"]


@pytest.mark.parametrize(("point", "survives"), [("write:draft", b"old"), ("write:rename", b"old"), ("write:done", b"new")])
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


def test_a_room_is_used_again_when_nobody_refers_to_it_any_more(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)

    def files() -> set[str]:
        return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}

    first = store.scratch("sums", 1000)
    first[:] = 1
    view, used = first[10:20], files()
    del first
    second = store.scratch("sums", 1000)
    second[:] = 2
    assert len(files()) == 2
    assert (view == 1).all()
    del view
    third = store.scratch("sums", 10)
    third[:] = 3
    assert used < files()
    assert (third.size, len(files())) == (10, 2)
    assert (second == 2).all()
    del third
    larger = store.scratch("sums", 5000)
    larger[:] = 4
    assert len(files()) == 2, "a room that is too small is given up"
    store.scratch("temporary", 1000)[:] = 5
    assert len(files()) == 2
    rooms = [store.scratch("sums", 1000) for _ in range(3)]
    assert len(files()) == 5
    del rooms, second, larger
    assert len(files()) == 2
    assert list(tmp_path.iterdir()) == [], "nothing is left if the process dies"


def test_of_updates_one_room_is_kept_after_an_attempt_that_failed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    first, second = (store.scratch("update", 1000) for _ in range(2))
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    del first, second
    assert str(Path("/proc/self/maps").read_text()).count(str(tmp_path)) == 1


def test_a_room_for_which_the_disk_has_no_space_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=f"^{tmp_path}/update: ") as caught:
        DirectoryStore(tmp_path).scratch("update", 1000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_file_replaces_no_device_and_leaves_nothing_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, page = tmp_path / "pipe", tmp_path / "page"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe: is no regular file"):
        write_whole(pipe, b"new")
    assert pipe.is_fifo()
    page.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as failed:
        write_whole(page, b"new")
    assert failed.value.filename == str(page)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(page, b"new")
    assert sorted(tmp_path.iterdir()) == [page, pipe]
    assert page.read_bytes() == b"old"


def test_two_processes_write_one_file_at_a_time_and_a_store_clears_what_a_dead_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, really_sync = tmp_path / "page", os.fsync

    def other_process_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", really_sync)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        DirectoryStore(tmp_path)
        write_whole(page, b"other")
        assert page.read_bytes() == b"other"

    monkeypatch.setattr(os, "fsync", other_process_writes)
    write_whole(page, b"own")
    assert page.read_bytes() == b"own"
    (tmp_path / "page.2.tmp").write_bytes(b"half")
    DirectoryStore(tmp_path)
    assert list(tmp_path.iterdir()) == [page]
