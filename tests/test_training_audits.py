"""The measurement of how an auditor could tell trained updates from others: one short run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State
from spes_p2p.research import audits
from spes_p2p.storage.tensor_file import read_tensors, tensor_chunks
from spes_p2p.testing.simulate.language import SETTINGS, first_weights
from spes_p2p.testing.simulate.swarm import campaign
from spes_p2p.training.interface import Phase, Trainer
from spes_p2p.training.moments import MOMENTUM, moments_chunks, read_moments


@pytest.mark.long
def test_honest_updates_favour_their_samples_and_look_like_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audits.ROUNDS, 4, 2)
    monkeypatch.setattr(audits, "ARITHMETICS", audits.ARITHMETICS[:2])
    records = audits.run(4, 0, "adamw", replays=True)
    honest = [record for record in records if record["honest"]]
    assert {record["sender"] for record in honest} == set(audits.HONEST)
    assert all(record["passed"] for record in honest), "in every arithmetic"
    copied = [r for r in records if r["sender"] in ("zero", "noise", "last round's move", "another's update")]
    assert not any(record["passed"] for record in copied)
    assert not any(record["passed"] for record in records if record["sender"] in ("one step", "half the steps"))
    assert min(float(record["z 64"]) for record in honest) > max(float(record["z 64"]) for record in copied)
    assert "| 4 |" in audits.report(records)


@pytest.mark.long
def test_with_muon_an_update_is_made_again_without_the_momentum_from_before_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only the trainer knows: its steps are as long whatever the gradients are, so an invented one would decide many."""
    monkeypatch.setitem(audits.ROUNDS, 4, 2)
    monkeypatch.setattr(audits, "ARITHMETICS", audits.ARITHMETICS[:2])
    records = audits.run(4, 0, "muon", replays=True)
    assert all(record["passed"] for record in records if record["honest"]), "in every arithmetic"


def muons_world(admission: str) -> tuple[audits.World, State]:
    training = {**SETTINGS["training"], "optimizer": "muon", "sync_steps": 8}
    settings: dict[str, Any] = {**SETTINGS, "training": training, "merge": {"merge_interval": None}}
    config = campaign(8000, admission=admission, **settings).config
    layout, base = first_weights(config)
    return audits.World(config, layout, 0), base.copy()


def exact(trainer: Trainer) -> audits.Arrays:
    return read_tensors(b"".join(map(bytes, tensor_chunks(trainer.optimizer_state(), {}))))[0]


@pytest.mark.parametrize(("admission", "is_forgotten"), [("open", True), ("friends", False)])
def test_where_phases_are_audited_muon_forgets_its_momentum_before_each(admission: str, is_forgotten: bool) -> None:
    world, base = muons_world(admission)
    trained = []
    for invented in (False, True):
        trainer = world.trainer(base, audits.ALL_EXPERTS)
        world.train(trainer, base, 0, 2, 0)
        trainer.load_base(base)
        if invented:
            state = exact(trainer)
            trainer.load_optimizer_state({name: each * (100 if "momentum" in name else 1) for name, each in state.items()})
        world.train(trainer, base, 1, 2, 1)
        trained.append(world.change(trainer, base, audits.ALL_EXPERTS))
    assert np.array_equal(trained[0], trained[1]) is is_forgotten


def test_an_audit_in_two_goes_keeps_the_momentum_between_them() -> None:
    world, base = muons_world("open")
    batch, trained = world.config.training.batch_size, []
    for goes in ((4,), (2, 2)):
        trainer, done = world.trainer(base, audits.ALL_EXPERTS), 0
        for steps in goes:
            slices = (Interval(0, done * batch, (done + steps) * batch),)
            phase = Phase(0, 0, 8, done + steps, slices, done=done).shortened(done + steps)
            trainer.train(replace(phase, campaign_steps=2.0 * phase.steps), lambda: False, lambda done, speed: None)
            done += steps
            trainer.load_optimizer_state(exact(trainer))
        trained.append(world.change(trainer, base, audits.ALL_EXPERTS))
        within = read_moments(b"".join(map(bytes, moments_chunks(trainer, base, 0, is_begun=True))))
        kept = [audits.moments_of(trainer, base), within]
        assert [any(name.startswith(MOMENTUM) for name in state) for state in kept] == [False, True]
    np.testing.assert_array_equal(trained[0], trained[1])


def test_the_area_under_the_curve() -> None:
    assert audits.auc([2, 3], [0, 1]) == 1
    assert audits.auc([0, 1], [0, 1]) == 0.5
    assert audits.auc([0], [1]) == 0
