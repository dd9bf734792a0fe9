"""A base made while results arrived has the bits of one that is made after the commit, whatever happened meanwhile."""

from __future__ import annotations

import asyncio
import mmap
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_round import codecs, commit_before, make_plan_of, member

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Manifest
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds import next_base as staging
from spes_p2p.rounds.apply import next_base_pieces
from spes_p2p.rounds.base import BASE, load_base, write_piece
from spes_p2p.rounds.digest import PIECE_ELEMENTS, content_digest, state_digest
from spes_p2p.rounds.next_base import NextBaseBuilder
from spes_p2p.rounds.outer import base_size, records_of
from spes_p2p.rounds.parts import to_mask
from spes_p2p.rounds.planned import Merge
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.step_bounds import bounds_of
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.memory_store import MemoryStore

LAYOUT = Layout(
    [TensorSpec("embed", (2 * PIECE_ELEMENTS + 999,), "shared"), TensorSpec("gate", (2, 64), "router", 0)]
    + [TensorSpec("gate_bias", (64,), "router", 0, is_fixed=True)]  # members send values for it all the same
    + [TensorSpec(f"experts.{e}.gate_up_proj", (PIECE_ELEMENTS, 2), "expert", 0, e) for e in range(2)]
)
PLAIN = OuterConfig()
MOMENTUM = OuterConfig(shared_learning_rate=0.7, shared_momentum=0.9)
MERGE = Merge(alpha=0.25, donors=(((1,), (0,)),))
MEMBERS = [member("A", 3, (5, 0)), member("B", 1, (0, 5))]


class Case:
    """A plan, what its reducers made, and a staging of the next base."""

    def __init__(self, outer: OuterConfig = PLAIN, merge: Merge | None = None, clips: bool = True):
        rng = np.random.default_rng(0)
        self.outer, self.clips = outer, clips
        self.base = rng.standard_normal(base_size(LAYOUT, outer), np.float32)
        records_of(self.base, LAYOUT)[:] = np.resize([0.0, 0.05, 5.0], len(LAYOUT.groups))  # the second one bounds
        self.plan = replace(make_plan_of(MEMBERS), merge=merge)
        self.results = Results.empty(self.plan, LAYOUT, codecs("int8"), 20_000)
        self.encoded = {p.index: p.codec.encode(rng.standard_normal(p.size, np.float32)) for p in self.results.parts}
        self.store: Store = MemoryStore()
        self.made, self.threads = 0, 1

    async def run_blocking(self, function: Callable[..., object], *arguments: object) -> object:
        await asyncio.sleep(0)
        return function(*arguments)

    def staging(self) -> NextBaseBuilder:
        return NextBaseBuilder(
            self.store, self.base, LAYOUT, self.outer, self.results, self.run_blocking, self.clips, self.threads
        )

    def commit(self, dropped: Iterable[int] = ()) -> Commit:
        for reducer in range(len(MEMBERS)):
            own = self.results.reduced_by(reducer)
            masks = b"".join(to_mask(part.contributors, len(MEMBERS)) for part in own)
            digests = b"".join(content_digest(self.encoded[part.index]) for part in own)
            none, unknown = bytes(len(masks)), bytes(len(digests))
            self.results.add_manifest(Manifest(self.plan.id, reducer, 0, digests, masks, none, unknown))
        return replace(commit_before(self.plan), round=1, plan=self.plan.id, roots=self.results.roots(), dropped=tuple(dropped))

    def expected(self, commit: Commit) -> np.ndarray:
        parts = self.results.committed(commit)
        bounds = bounds_of(self.base, LAYOUT, commit, self.results) if self.clips else None
        assert bounds is None or 0 < len(bounds.factors) < len(LAYOUT.groups)
        pieces = next_base_pieces(self.base, LAYOUT, parts, self.encoded, self.plan.merge, self.outer, bounds)
        return np.concatenate(list(pieces))

    def put(self, *indices: int) -> None:
        for index in indices:
            self.results.put(index, self.encoded[index])


def check(case: Case, script: Callable[[Case], Awaitable[None]], dropped: Iterable[int] = ()) -> None:
    async def main() -> None:
        staging = case.staging()
        await script(case)
        commit = case.commit(dropped)
        staged = await staging.finish(commit, case.results)
        assert staged.base.values.tobytes() == case.expected(commit).tobytes()
        assert staged.base.digest == state_digest(staged.base.values)
        assert staged.draft is not None
        staged.draft.publish()
        kept = load_base(case.store, case.base.size, "here", derive={case.plan.proposal: case.plan}.__getitem__)
        assert kept is not None
        assert (kept.digest, kept.plan) == (staged.base.digest, case.plan)

    asyncio.run(main())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("outer", [PLAIN, MOMENTUM], ids=["plain", "momentum"])
@pytest.mark.parametrize("merge", [None, MERGE], ids=["plain", "merge"])
@pytest.mark.parametrize("seed", range(3))
def test_results_may_come_in_any_order_and_pauses(outer: OuterConfig, merge: Merge | None, seed: int) -> None:
    async def arrive(case: Case) -> None:
        rng = np.random.default_rng(seed)
        for index in rng.permutation(len(case.results.parts)):
            case.put(int(index))
            if rng.random() < 0.2:
                await settle()

    check(Case(outer, merge), arrive)


@pytest.mark.parametrize("merge", [None, MERGE], ids=["plain", "merge"])
def test_a_base_is_the_same_when_many_threads_build_it(
    merge: Merge | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECES_PER_BATCH", 1)

    async def arrive(case: Case) -> None:
        case.put(*case.encoded)

    case = Case(MOMENTUM, merge)
    case.store, case.threads = DirectoryStore(tmp_path), 4
    check(case, arrive)


def test_without_bounds_the_records_stay() -> None:
    async def arrive(case: Case) -> None:
        case.put(*case.encoded)

    check(Case(clips=False), arrive)


def test_a_part_that_is_not_committed_keeps_its_old_value_although_it_was_in_a_piece_already() -> None:
    async def arrive(case: Case) -> None:
        case.put(*case.encoded)
        await settle()

    check(Case(), arrive, dropped=(0, 3, 10))


def test_a_result_that_was_not_the_reducers_is_replaced_in_the_pieces_made_of_it() -> None:
    async def arrive(case: Case) -> None:
        case.put(*case.encoded)
        right, case.encoded[2] = case.encoded[2], bytes(len(case.encoded[2]))
        case.results.drop(2)
        case.put(2)
        await settle()
        case.encoded[2] = right
        case.results.drop(2)
        case.put(2)
        await settle()

    check(Case(), arrive)


def test_a_result_that_changes_while_a_piece_is_made_of_it_is_not_trusted() -> None:
    class Late(Case):
        async def run_blocking(self, function: Callable[..., object], *arguments: object) -> object:
            self.made += 1
            if self.made == 1:
                self.results.drop(1)
                self.results.encoded[1] = bytes(len(self.encoded[1]))
                self.results.digests[1] = content_digest(self.results.encoded[1])
            done = function(*arguments)
            self.put(1)
            return done

    async def arrive(case: Case) -> None:
        case.put(*case.encoded)
        await settle()

    check(Late(), arrive)


def test_most_pieces_are_there_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    case, written = Case(clips=False), list[int]()

    def counted(draft: Any, n: int, piece: Any) -> Any:
        written.append(n)
        return write_piece(draft, n, piece)

    monkeypatch.setattr(staging, "write_piece", counted)

    async def arrive(case: Case) -> None:
        case.put(*case.encoded)
        await settle()
        assert sorted(written) == list(range(case.base.size // PIECE_ELEMENTS)), "all but the last, with the records"

    check(case, arrive)
    assert len(written) == len(set(written))


def test_a_dropped_staging_leaves_nothing_behind() -> None:
    async def main() -> None:
        case = Case()
        staging = case.staging()
        case.put(0)
        staging.drop()
        case.put(*case.encoded)
        await settle()
        assert case.store.read(BASE) is None

    asyncio.run(main())


def test_a_mapped_base_takes_no_memory_once_the_next_one_is_built(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        """Of the file with the base, by the kernel's account of this process."""
        smaps = Path("/proc/self/smaps").read_text()
        return 1024 * sum(map(int, re.findall(rf"{re.escape(str(tmp_path / 'old'))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps)))

    case = Case(clips=False)
    (tmp_path / "old").write_bytes(case.base.tobytes())
    with (tmp_path / "old").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    expected, case.base = case.base, np.frombuffer(mapped, np.float32)
    case.store = DirectoryStore(tmp_path / "store")
    seen = 0

    async def arrive(case: Case) -> None:
        nonlocal seen
        case.put(*case.encoded)
        await settle()
        seen = resident_bytes()

    async def main() -> None:
        staging = case.staging()
        await arrive(case)
        await staging.finish(case.commit(), case.results)

    asyncio.run(main())
    assert seen > case.base.nbytes / 2
    assert resident_bytes() == 0
    assert np.array_equal(case.base, expected)
