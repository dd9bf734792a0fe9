"""A bootstrap peer keeps a base every few rounds, the newest of them, and each is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_run import CONFIG, run_dir

from spes_p2p.errors import UserError
from spes_p2p.model.build import layout_of
from spes_p2p.rounds.archive import NO_ARCHIVE, Archive, archived_rounds, load_archived
from spes_p2p.rounds.base import Base, load_base
from spes_p2p.rounds.digest import state_digest
from spes_p2p.rounds.outer import base_size
from spes_p2p.session.run_dir import load_run_dir_base
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


def base_of(number: int) -> Base:
    values = np.full(10, number, np.float32)
    return Base(f"head-{number}", number, values, state_digest(values), None)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_bases_of_every_so_many_rounds_are_kept(keep: int) -> None:
    store = MemoryStore()
    for number in range(21):
        assert Archive(5, keep).file(store, base_of(number)) == (number in (5, 10, 15, 20))
    assert archived_rounds(store) == [5, 10, 15, 20][-keep:]
    for number in archived_rounds(store):
        kept = load_archived(store, number, 10, "run-dir")
        assert kept is not None
        assert (kept.round, kept.digest) == (number, base_of(number).digest)
    assert load_base(store, 10, "run-dir") is None, "the current base is another file"


def test_nothing_is_kept_where_no_archive_is_wanted() -> None:
    store = MemoryStore()
    assert not any(NO_ARCHIVE.file(store, base_of(number)) for number in range(10))
    assert archived_rounds(store) == []


def test_a_damaged_archive_costs_one_line() -> None:
    store = MemoryStore()
    Archive(5, 1).file(store, base_of(5))
    blob = bytearray(store.read("archived-5") or b"")
    blob[8] ^= 1
    store.write("archived-5", [bytes(blob)])
    with pytest.raises(UserError, match="archived-5: cut short or damaged; delete this file"):
        load_archived(store, 5, 10, "run-dir")


def test_an_archived_base_is_found_beside_a_damaged_newest_one(tmp_path: Path) -> None:
    store, size = DirectoryStore(run_dir(tmp_path, [])), base_size(layout_of(CONFIG.model), CONFIG.outer)
    values = np.zeros(size, np.float32)
    Archive(5, 1).file(store, Base("head-5", 5, values, state_digest(values), None))
    store.write("base", [b"damaged"])
    assert load_run_dir_base(tmp_path, 5)[1].round == 5
    with pytest.raises(UserError, match="base: cut short or damaged"):
        load_run_dir_base(tmp_path)


def test_a_copy_that_the_owner_makes_beside_an_archived_base_is_left_alone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for number in (5, 10):
        Archive(5, 2).file(store, base_of(number))
    shutil.copy(tmp_path / "archived-5", tmp_path / "archived-5.bak")
    Archive(5, 2).file(store, base_of(15))
    assert archived_rounds(store) == [10, 15]
    assert (tmp_path / "archived-5.bak").is_file()


async def test_the_bootstrap_peer_archives_what_all_members_committed() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60), archive=Archive(2, 2))
    swarm.start_all()
    await swarm.until_finished()
    await swarm.until(lambda: archived_rounds(swarm.stores["W"]) == [4, 6])
    for number in (4, 6):
        kept = load_archived(swarm.stores["W"], number, swarm.base0.size, "W")
        assert kept is not None
        assert {kept.digest} == swarm.digests()[number]
