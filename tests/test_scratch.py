"""What a peer keeps of a round lies in files: its memory does not grow with the model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_text import CountingText
from exchange_round import Round, codecs, make_plan_of, member, random_updates
from model_shapes import tiny_campaign, tiny_model

from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import layout_of
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import part_ranges
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducer_residual import ReducerResiduals
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.checkpoint import load_checkpoint, take_checkpoint, write_checkpoint
from spes_p2p.training.flat_model import COPY_ELEMENTS
from spes_p2p.training.interface import Phase
from spes_p2p.training.trainer import TorchTrainer

PART_BYTES = 2**14
ALLOWED = 2**20
MODEL = tiny_model(vocab_size=2**15, hidden_size=64)
LAYOUT = layout_of(MODEL)
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
    ledger = Ledger(LAYOUT, part_ranges(LAYOUT, CODECS, PART_BYTES), CODECS, store.scratch)
    trainer = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    ledger.add_phase(trainer.train(PHASE, lambda: False, lambda done, speed: None))
    took: dict[str, int] = {}

    _, took["announce"] = memory_of(ledger.announce, trainer, base)
    announced, experts = ledger.announced, LAYOUT.num_experts
    members = (Member("me", announced.tokens, announced.routed, 1.0), Member("other", 1, (1,) * experts, 1.0))
    accepted = [
        (part, partial(part.codec.decode, ledger.update[part.start], part.size))
        for part in part_table(LAYOUT, members, CODECS, PART_BYTES) if 0 in part.contributors
    ]
    _, took["settle"] = memory_of(ledger.settle, trainer, base, base + np.float32(1), accepted)
    set_aside, took["set aside"] = memory_of(ledger.stash_pending, trainer, base)
    _, took["put back"] = memory_of(ledger.restore_pending, trainer, set_aside)
    checkpoint, took["checkpoint"] = memory_of(take_checkpoint, store, trainer, ledger, base, "commit", 1, None)
    _, took["write it"] = memory_of(write_checkpoint, checkpoint)
    again = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    _, took["restore it"] = memory_of(load_checkpoint, store, again, ledger, LAYOUT, "commit", 1)
    _, took["hand over"] = memory_of(ledger.change_owned, trainer, (1,), base)
    assert max(took.values()) < ALLOWED, took


def test_the_real_trainer_takes_and_gives_weights_and_moments_piece_by_piece(tmp_path: Path) -> None:
    """Its own tensors are not counted here."""
    base, store = np.zeros(LAYOUT.size, np.float32), DirectoryStore(tmp_path)
    base.flags.writeable = False
    ledger = Ledger(LAYOUT, part_ranges(LAYOUT, CODECS, PART_BYTES), CODECS, store.scratch)
    trainers = [TorchTrainer(tiny_campaign(MODEL), base, (0, 1), CountingText()) for _ in range(2)]
    trainers[0].train(replace(PHASE, slices=(Interval(0, 0, 4),)), lambda: False, lambda done, speed: None)
    took: dict[str, int] = {}
    checkpoint, took["checkpoint"] = memory_of(take_checkpoint, store, trainers[0], ledger, base, "commit", 1, None)
    write_checkpoint(checkpoint)
    _, took["set all weights"] = memory_of(trainers[0].load_base, base)
    assert 4 * LAYOUT.by_name["model.embed_tokens.weight"].spec.size > 1.5 * 4 * COPY_ELEMENTS
    assert max(took.values()) < 1.2 * 4 * COPY_ELEMENTS, took
    assert load_checkpoint(store, trainers[1], ledger, LAYOUT, "commit", 1) is not None


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_where_it_lies_changes_nothing(where: str, tmp_path: Path) -> None:
    """Of a scratch array nothing may be expected: what a former update left there must not show."""
    base = np.random.default_rng(1).standard_normal(LAYOUT.size, np.float32)
    scratch = DirectoryStore(tmp_path).scratch if where == "disk" else memory_scratch
    ledger = Ledger(LAYOUT, part_ranges(LAYOUT, CODECS, PART_BYTES), CODECS, scratch)
    trainer = SyntheticTrainer(LAYOUT, base, (0, 1), 32, 1.0, seed=0)
    for _ in range(3):
        ledger.add_phase(trainer.train(PHASE, lambda: False, lambda done, speed: None))
        ledger.announce(trainer, base)
        for group, start, stop in part_ranges(LAYOUT, CODECS, PART_BYTES):
            if start in ledger.update:
                values = trainer.read(group, start - group.start, stop - group.start) - base[start:stop]
                assert bytes(ledger.update[start]) == CODECS.of(group).encode(values)
                ledger.update[start][:] = bytes(len(ledger.update[start]))


async def test_what_was_dropped_long_ago_does_not_keep_the_files_of_its_rounds() -> None:
    """Each round sums another expert, of which the encoding drops something."""
    mine = ReducerResiduals(memory_scratch)
    for number in range(4):
        routed = tuple(5 if expert == number else 0 for expert in range(4))
        plan = make_plan_of([member("A", 10, routed, 50.0), member("B", 10, routed, 0.001)])
        played = await Round.open(plan, random_updates(plan, number), "int8", residuals={"A": mine.by_key})
        await played.run()
        exchange, commit = played.exchanges["A"], played.commit()
        before = {start: dropped.copy() for start, dropped in mine.by_key.items()}
        mine.settle([exchange], exchange.results, {part.index for part in exchange.results.committed(commit)})
        assert before.keys() <= mine.by_key.keys()
        for start, dropped in mine.by_key.items():
            np.testing.assert_array_equal(dropped, exchange.new_residuals.get(start, before.get(start)))
    assert len(mine.by_key) > len(exchange.new_residuals) > 0
    assert len({id(_owner(dropped)) for dropped in mine.by_key.values()}) == 2


def _owner(view: np.ndarray) -> np.ndarray:
    return view if view.base is None else _owner(view.base)
