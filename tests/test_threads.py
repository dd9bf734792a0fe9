"""What touches the whole state runs in worker threads, in pieces, and its bits do not depend on the number of threads."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.content import bases
from spes_p2p.net.interfaces import World
from spes_p2p.peer import base_store, first_base, own_work
from spes_p2p.rounds import base as base_file
from spes_p2p.rounds import digest, next_base
from spes_p2p.rounds.base import load_base, pieces_of, write_base
from spes_p2p.rounds.digest import PIECE_ELEMENTS, PIECES_PER_BATCH, piece_digest, piece_digests, root_digest
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.storage.threads import in_threads, keep_loaded_objects, nice_executor, spans, threads_here
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

THREADS = (1, 2, 5)


@pytest.mark.parametrize("threads", THREADS)
def test_results_come_in_order_whatever_thread_is_first(threads: int) -> None:
    first_may_end = threading.Event()

    def work(item: int) -> int:
        if item == 0 and threads > 1:
            assert first_may_end.wait(10)
        first_may_end.set()
        return item * item

    assert list(in_threads(work, iter(range(100)), threads)) == [item * item for item in range(100)]


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_in_a_thread_ends_the_work(threads: int) -> None:
    begun = itertools.count()

    def work(item: int) -> None:
        next(begun)
        if item == 3:
            raise ValueError(item)

    with pytest.raises(ValueError, match="3"):
        list(in_threads(work, iter(range(10**6)), threads))
    assert next(begun) < 100


def test_spans_cover_a_range_once() -> None:
    assert list(itertools.chain(*spans(23, 5))) == list(range(23))
    assert list(spans(0, 5)) == []


def test_the_threads_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_here() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_here() >= 1


def test_digests_and_file_of_a_base_are_the_same_with_any_number_of_threads(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(2 * PIECES_PER_BATCH * PIECE_ELEMENTS + 77, np.float32)
    right = b"".join(map(piece_digest, pieces_of(values)))
    files = set[bytes]()
    for threads in THREADS:
        assert piece_digests(values, threads) == right
        store = DirectoryStore(tmp_path / str(threads))
        staged = write_base(store, "c" * 64, 1, None, pieces_of(values), threads=threads)
        assert (staged.base.pieces, staged.base.digest) == (right, root_digest(right))
        assert staged.draft is not None
        staged.draft.publish()
        files.add(bytes(store.read("base") or b""))
        loaded = load_base(store, values.size, "here", threads=threads)
        assert loaded is not None
        assert loaded.pieces == right
    assert len(files) == 1


class Watched:
    """Lets peers' worker threads, which run inline in virtual time, be told from the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: dict[str, int] = {}
        self._depth = 0
        self._patch = monkeypatch

    def around(self, world: World) -> World:
        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            def inside(*args: Any) -> Any:
                self._depth += 1
                try:
                    return function(*args)
                finally:
                    self._depth -= 1

            return await world.run_blocking(inside, *args)

        return dataclasses.replace(world, run_blocking=run_blocking)

    def watch(self, module: Any, name: str) -> None:
        """Fail when this function of a module is called on the event loop."""
        function = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            assert self._depth, f"{name} on the event loop"
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **options)

        self._patch.setattr(module, name, watched)


async def test_no_peer_touches_the_whole_state_on_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    swarm = VirtualSwarm(campaign(80))
    for name in "WABCD":
        swarm.around[name] = watched.around
    functions = (
        (digest, "piece_digest"), (base_file, "piece_digest"), (next_base, "write_piece"), (bases, "piece_digests"),
        (base_store, "load_base"), (base_store, "write_base"), (base_store, "write_checkpoint"), (bases, "_begin"),
        (own_work, "take_checkpoint"), (first_base, "load_checkpoint"),
    )
    swarm.start_all()
    for module, name in functions:
        watched.watch(module, name)
    await swarm.until_round(2)
    swarm.restart("B")
    swarm.start("D")
    await swarm.until_round(4)
    swarm.lose_disk("C")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert watched.calls.keys() >= {name for _, name in functions} - {"piece_digests"}


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_that_is_kept_is_not_faulted_in_again(keeps: bool) -> None:
    program = f"""
import resource, threading
import numpy as np
from spes_p2p.storage.threads import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        arrays = [np.ones(2**18, np.float32) for _ in range(4)]
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
{"keep_freed_memory()" if keeps else ""}
worker = threading.Thread(target=faults)
worker.start()
worker.join()
print(*found)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    pages_once = 2 * 4 * 2**20 // mmap.PAGESIZE
    assert (int(ran.stdout) > 4 * pages_once) is not keeps


def test_threads_of_the_nice_executor_and_those_that_they_start_give_way() -> None:
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def of_a_child() -> int:
        found: list[int] = []
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()
        return found[0]

    for wanted in (here + 3, here):
        with nice_executor(wanted) as executor:
            assert [executor.submit(work).result() for work in (niceness, of_a_child)] == [wanted] * 2
    with nice_executor(max(0, here - 1)) as executor:
        assert executor.submit(niceness).result() == here, "it never takes more than the process was given"
    assert niceness() == here


def test_what_is_loaded_is_left_out_of_collections_and_new_garbage_is_not() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    try:
        keep_loaded_objects()
        assert gc.get_freeze_count() > 10_000
        garbage = weakref.ref(Cycle())
        gc.collect()
        assert garbage() is None
        assert len(gc.get_objects()) < gc.get_freeze_count()
    finally:
        gc.unfreeze()
