"""The measurement of how an auditor could tell trained updates from others: one short run."""

from __future__ import annotations

import pytest

from spes_p2p.research import audits


@pytest.mark.long
def test_honest_updates_favour_their_samples_and_look_like_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audits.ROUNDS, 4, 2)
    records = audits.run(4, 0, replays=True)
    honest = [record for record in records if record["honest"]]
    assert {record["sender"] for record in honest} == set(audits.HONEST)
    assert all(float(record["cosine, own moments"]) > 0.9 for record in honest), "only the codec lies between"
    for name in ("z 64", "margin"):
        copied = [float(r[name]) for r in records if r["sender"] in ("zero", "noise", "last round's move", "another's update")]
        assert min(float(record[name]) for record in honest) > max(copied)
    assert "| 4 |" in audits.report(records)


def test_the_area_under_the_curve() -> None:
    assert audits.auc([2, 3], [0, 1]) == 1
    assert audits.auc([0, 1], [0, 1]) == 0.5
    assert audits.auc([0], [1]) == 0
