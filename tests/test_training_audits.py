"""The measurement of how an auditor could tell trained updates from others: one short run."""

from __future__ import annotations

import pytest

from spes_p2p.research import audits
from spes_p2p.training.moments import MOST_MOMENTUM


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
def test_with_muon_honest_updates_pass_and_an_invented_momentum_is_larger_than_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audits.ROUNDS, 4, 2)
    monkeypatch.setattr(audits, "ARITHMETICS", audits.ARITHMETICS[:2])
    monkeypatch.setattr(audits, "MOMENTA", 20.0)
    records = audits.run(4, 0, "muon", replays=True)
    honest = [record for record in records if record["honest"]]
    assert all(record["passed"] for record in honest), "in every arithmetic"
    (invented,) = (record for record in records if record["sender"] == "invented moments")
    assert float(invented["momentum"]) > MOST_MOMENTUM > 2 * max(float(record["momentum"]) for record in honest)
    assert not invented["passed"]


def test_the_area_under_the_curve() -> None:
    assert audits.auc([2, 3], [0, 1]) == 1
    assert audits.auc([0, 1], [0, 1]) == 0.5
    assert audits.auc([0], [1]) == 0
