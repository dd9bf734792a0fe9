"""Events as a peer tells them to its observers, and what is shown of a peer after them."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console

from spes_p2p.messages.audits import Audited
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe.events import (
    BytesMoved,
    DigestMismatch,
    Drift,
    Evaluated,
    Event,
    PeersSeen,
    PhaseAudited,
    PhaseTrained,
    PromptsContinued,
    QuotaForecast,
    RoundCommitted,
    RoundFailed,
    RoundMeasured,
    StepsJudged,
    TasksEvaluated,
    TrainingProgress,
    WorkDropped,
)
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.table import render_status

OWNERS = (("peer-aaaaaa",), ("peer-bbbbbb",), ("peer-aaaaaa", "peer-bbbbbb"))
ROUNDS = 10


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


FIRST_COMMIT = RoundCommitted(
    round=1,
    campaign_step=10,
    total_steps=10 * ROUNDS,
    tokens=1000,
    total_tokens=1000,
    loss=4.5,
    members=("peer-aaaaaa", "peer-bbbbbb"),
    owners=OWNERS,
    base_digest="digest0",
    parts=10,
    dropped_parts=0,
    sent_bytes=1_500_000,
    received_bytes=2_000_000,
    seconds={"announce": 0.5, "exchange": 1.5},
)


def commit(number: int, loss: float = 4.5, **changes: Any) -> RoundCommitted:
    steps, tokens = 10 * number, 1000 * number
    nth = replace(FIRST_COMMIT, round=number, campaign_step=steps, total_tokens=tokens, base_digest=f"digest{number}")
    return replace(nth, loss=loss, **changes)


def assembly(**changes: Any) -> RoundCommitted:
    """Round 0."""
    return commit(0, math.nan, **{"tokens": 0, "parts": 0, **changes})


def new_board(clock: Clock, peer_id: str = "peer-aaaaaa", role: str = "trainer") -> StatusBoard:
    return StatusBoard(PeerStatus(peer_id, role, "demo", "c" * 64, ROUNDS), clock)


def status_after(*events: Event, peer_id: str = "peer-aaaaaa", role: str = "trainer") -> PeerStatus:
    board = new_board(Clock(), peer_id, role)
    for event in events:
        board.update(event)
    return board.status


def shown(statuses: list[PeerStatus], *notes: str, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(render_status(statuses, notes))
    return output.getvalue()


COMMIT = RoundCommitted(
    round=7,
    campaign_step=70,
    total_steps=600,
    tokens=1000,
    total_tokens=8000,
    loss=4.5,
    members=("me", "you"),
    owners=(("me",), ("you", "me"), ()),
    base_digest="d",
    parts=10,
    dropped_parts=2,
    sent_bytes=100,
    received_bytes=200,
    seconds={"train": 12.0, "announce": 0.5, "exchange": 2.0},
    merge_alpha=0.05,
    learning_rate=3e-4,
)
EVENTS: tuple[Event, ...] = (
    TrainingProgress(7, 1, 10, 1234.5),
    PhaseTrained(7, 10, 500, 4.6, 0.1, 12.0, 3, 2e12, 0.25, (0.5, 1.5), 0.75),
    COMMIT,
    RoundMeasured(7, {"shared": Drift(4.0, 3.0, 0.6)}, (40, 0)),
    BytesMoved("push", 30, 40),
    BytesMoved("push", 5, 6),
    RoundFailed(8, 1, "timeout", "no plan"),
    RoundFailed(8, 2, "timeout", "no plan"),
    WorkDropped(8, 77, "old"),
    StepsJudged(8, (("X", -0.25),), ("expert.1",)),
    PhaseAudited(Audited(7, "X", True, 10, 0.75, 1.5)),
    TasksEvaluated(7, (("piqa", "acc", 0.5, 0.025),)),
    DigestMismatch(7, "a", "b"),
    Evaluated(7, 4.25),
    PeersSeen(5, 2),
    PromptsContinued(7, ("and then",)),
    QuotaForecast(100, 40, 1e9, "40 B of 100 B used today"),
)
