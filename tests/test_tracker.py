"""The adapter for experiment trackers: what is logged at which round, and that a tracker's trouble is not the peer's."""

from __future__ import annotations

import logging
import math
import sys
import types
from typing import Any

import pytest
from observed_events import COMMIT, EVENTS

from spes_p2p.errors import UserError
from spes_p2p.observe.events import Evaluated, RoundFailed
from spes_p2p.observe.tracker import Tracker


class FakeLibrary(types.ModuleType):
    """The calls that wandb and trackio share."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> FakeLibrary:
        self.started = options
        return self

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_round_is_logged_at_its_number_with_known_numbers_only(library: FakeLibrary) -> None:
    tracker = Tracker("wandb", "demo", "trainer abc", {"seed": 1})
    for event in (*EVENTS, Evaluated(7, math.nan)):
        tracker.log(event)
    tracker.close()
    assert library.started == {"project": "demo", "name": "trainer abc", "config": {"seed": 1}}
    at_7 = {name: value for step, numbers in library.logged for name, value in numbers.items() if step == 7}
    assert (at_7["loss"], at_7["tokens"], at_7["members"], at_7["experts_without_owner"]) == (4.5, 8000, 2, 1)
    assert at_7["peer/seconds/exchange"] == 2.0
    assert at_7["peer/loss"] == 4.6
    assert all(math.isfinite(value) for _, numbers in library.logged for value in numbers.values())
    assert [numbers for _, numbers in library.logged if "peer/failed_attempts" in numbers] == [
        {"peer/failed_attempts": 1.0}, {"peer/failed_attempts": 2.0}
    ]
    assert library.finished == 1


def test_steps_never_go_back(library: FakeLibrary) -> None:
    tracker = Tracker("wandb", "demo", "me", {})
    for event in (COMMIT, RoundFailed(9, 0, "timeout", ""), Evaluated(7, 4.0)):
        tracker.log(event)
    assert [step for step, _ in library.logged] == [7, 9, 9]


def test_a_tracker_that_fails_is_left_alone_and_said_once(library: FakeLibrary, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker("wandb", "demo", "me", {})
    library.log = None  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.WARNING):
        tracker.log(COMMIT)
        tracker.log(COMMIT)
    tracker.close()
    assert len(caplog.records) == 1
    assert library.finished == 0


def test_a_library_that_is_not_there_or_cannot_begin_is_named(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("no API key\nmore")

    monkeypatch.setattr(library, "init", refuse)
    with pytest.raises(UserError, match=r"--tracker wandb: cannot start a run \(no API key\)"):
        Tracker("wandb", "demo", "me", {})
    with pytest.raises(UserError, match="--tracker no_such_library: not installed on this machine; pip install"):
        Tracker("no_such_library", "demo", "me", {})
