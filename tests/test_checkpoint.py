"""Two checkpoints in turn: that of the base on disk stays until the next base is there too, also after a jump over rounds."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_round import codecs

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.messages.samples import Interval
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.parts import part_ranges
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import LAYOUT
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.checkpoint import load_checkpoint, take_checkpoint, write_checkpoint
from spes_p2p.training.interface import Phase

BASE = np.zeros(LAYOUT.size, np.float32)
RANGES = part_ranges(LAYOUT, group_codecs(CodecConfig.model_validate("none")), 1024)


def trained(steps: int) -> SyntheticTrainer:
    trainer = SyntheticTrainer(LAYOUT, BASE, (0,), 32, 1.0, seed=0)
    trainer.train(Phase(1, 0, 10, steps, (Interval(0, 0, 2 * steps),)), lambda: False, lambda done, speed: None)
    return trainer


@pytest.mark.parametrize("jump", [1, 2, 3, 8])
def test_a_kill_between_checkpoint_and_base_leaves_those_of_the_base_on_disk(jump: int) -> None:
    store, ledger = MemoryStore(), Ledger(LAYOUT, RANGES, codecs("none"))
    before, after = trained(3), trained(5)
    first = take_checkpoint(store, before, ledger, BASE, "commit 4", 4, None)
    write_checkpoint(first)
    write_checkpoint(take_checkpoint(store, after, ledger, BASE, f"commit {4 + jump}", 4 + jump, first.name))
    for commit, number, trainer in (("commit 4", 4, before), (f"commit {4 + jump}", 4 + jump, after)):
        again = SyntheticTrainer(LAYOUT, BASE, (0,), 32, 1.0, seed=1)
        assert load_checkpoint(store, again, Ledger(LAYOUT, RANGES, codecs("none")), LAYOUT, commit, number) is not None
        np.testing.assert_array_equal(again.local, trainer.local)


@pytest.mark.parametrize(("commit", "owned", "number", "told"), [
    ("commit 4", (1,), 4, "the checkpoint of round 4 is of other experts"),
    ("another", (0,), 4, "the checkpoint of round 4 is of another base"),
    ("commit 5", (0,), 5, "no checkpoint of round 5"),
])
def test_what_another_checkpoint_lacks_is_said_as_it_is(
    commit: str, owned: tuple[int, ...], number: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, ledger = MemoryStore(), Ledger(LAYOUT, RANGES, codecs("none"))
    write_checkpoint(take_checkpoint(store, trained(3), ledger, BASE, "commit 4", 4, None))
    again = SyntheticTrainer(LAYOUT, BASE, owned, 32, 1.0, seed=1)
    load_checkpoint(store, again, Ledger(LAYOUT, RANGES, codecs("none")), LAYOUT, commit, number)
    assert caplog.messages == [f"{told}: continuing from the base with the moments of round 4"]
