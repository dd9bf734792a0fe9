"""What a peer keeps of a round lies in files: its memory does not grow with the model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_round import codecs
from model_shapes import tiny_model

from spes_p2p.model.build import layout_of
from spes_p2p.swarm.records import Member
from spes_p2p.swarm.store import DirectoryStore
from spes_p2p.sync.accounting import Ledger
from spes_p2p.sync.parts import part_ranges, part_table
from spes_p2p.training.checkpoint import load_checkpoint, take_checkpoint, write_checkpoint
from spes_p2p.training.interface import Phase
from spes_p2p.training.synthetic import SyntheticTrainer

PART_BYTES = 2**14
ALLOWED = 2**20
LAYOUT = layout_of(tiny_model(vocab_size=2**15, hidden_size=64))
CODECS = codecs("int8")
PHASE = Phase(1, 0, 1, 1, ())


def memory_of(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What it returns, and the most memory that arrays took meanwhile."""
    tracemalloc.start()
    result = function(*arguments)
    _, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, highest


def test_a_round_takes_no_memory_for_what_was_trained(tmp_path: Path) -> None:
    assert 4 * LAYOUT.size > 15 * ALLOWED
    base = np.zeros(LAYOUT.size, np.float32)
    store = DirectoryStore(tmp_path)
    ledger = Ledger(LAYOUT, part_ranges(LAYOUT, CODECS, PART_BYTES), store.scratch)
    trainer = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    ledger.trained(trainer.train(PHASE, lambda: False, lambda done, speed: None))
    took: dict[str, int] = {}

    _, took["announce"] = memory_of(ledger.announce, trainer, base)
    _, took["another attempt"] = memory_of(ledger.copy_of_update)
    announced, experts = ledger.announced, LAYOUT.num_experts
    members = (Member("me", announced.tokens, announced.routed, 1.0), Member("other", 1, (1,) * experts, 1.0))
    accepted = [
        (part, ledger.update[part.group.name][part.start - part.group.start :][: part.size])
        for part in part_table(LAYOUT, members, CODECS, PART_BYTES) if 0 in part.contributors
    ]
    _, took["settle"] = memory_of(ledger.settle, trainer, base, base + np.float32(1), accepted)
    set_aside, took["set aside"] = memory_of(ledger.set_aside, trainer, base)
    _, took["put back"] = memory_of(ledger.put_back, trainer, set_aside)
    checkpoint, took["checkpoint"] = memory_of(take_checkpoint, store, trainer, ledger, LAYOUT, base, "head", 1, None)
    _, took["write it"] = memory_of(write_checkpoint, checkpoint)
    again = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    _, took["restore it"] = memory_of(load_checkpoint, store, again, ledger, LAYOUT, "head", 1)
    _, took["hand over"] = memory_of(ledger.change_owned, trainer, (1,), base)
    assert max(took.values()) < ALLOWED, took


@pytest.mark.parametrize("room", ["memory", "disk"])
def test_where_it_lies_changes_nothing(room: str, tmp_path: Path) -> None:
    """In the store's rooms nothing may be expected: what a former update left there must not show."""
    base = np.random.default_rng(1).standard_normal(LAYOUT.size, np.float32)
    rooms = {"room": DirectoryStore(tmp_path).scratch} if room == "disk" else {}
    ledger = Ledger(LAYOUT, part_ranges(LAYOUT, CODECS, PART_BYTES), **rooms)
    trainer = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    for _ in range(3):
        ledger.trained(trainer.train(PHASE, lambda: False, lambda done, speed: None))
        ledger.announce(trainer, base)
        for name, update in ledger.update.items():
            group = LAYOUT.group(name)
            np.testing.assert_array_equal(update, trainer.read(group) - base[group.start : group.stop])
            update[:] = np.nan
