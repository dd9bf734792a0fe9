"""Faults: what can happen to a peer and when, and the seeded random choice of one for a round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spes_p2p.testing.simulate.points import IMMEDIATELY, POINTS

Kind = Literal["kill", "restart", "stop", "partition", "slow", "corrupt", "join", "leave", "disconnect"]
Corruption = Literal["parts", "pieces", "push", "garbage", "base"]
KINDS: tuple[str, ...] = get_args(Kind)
CORRUPTIONS: tuple[str, ...] = get_args(Corruption)
"""What is corrupt: results it serves, pieces of a base, updates it pushes, all that it sends, its own base in memory."""

DURATIONS_S = (0.5, 3.0, 7.0, 20.0, 60.0)
"""Durations of random faults: below and above the silence timeout, and longer than rounds."""
HARMLESS = ("slow", "corrupt", "disconnect")
"""Kinds after which the others can still reach the peer."""
POINTS_WITHOUT_RANDOM_FAULTS = ("leave",)


@dataclass(frozen=True)
class Fault:
    """One fault. It is armed when round `round` - 1 is committed, and strikes when the point is reached."""

    kind: str
    """One of KINDS. `restart` kills and starts the peer on the same disk after `seconds`; `kill` is permanent; `disconnect`
    ends all streams with one other peer, and both can open new ones at once."""
    round: int
    at: str = IMMEDIATELY
    """One of POINTS."""
    reached_by: str | None = None
    """The peer that must reach the point; None: any peer."""
    peers: tuple[str, ...] = ()
    """The victims; empty: the peer that reaches the point. For a partition, one side; for a disconnect, one or both peers."""
    skip: int = 0
    """Times that the point is passed before the fault strikes."""
    delay_s: float = 0.0
    """Seconds from the point to the fault."""
    seconds: float = 10.0
    """Duration of a stop, partition, slowness or corruption, or time until a killed or leaving peer starts again on its disk.
    For `leave`, 0: never."""
    factor: float = 4.0
    """For `slow`: the factor by which training slows down."""
    what: str = "parts"
    """For `corrupt`: one of CORRUPTIONS."""
    is_scripted: bool = True
    """Whether a scenario names it. A random fault is skipped if it would leave fewer than two unaffected trainers."""

    def __str__(self) -> str:
        details = {
            "slow": f" x{self.factor:g}", "corrupt": f" {self.what}",
            "leave": f" for {self.seconds:g} s" if self.seconds else "",
        }.get(self.kind, "")
        return f"{self.kind}{details} {'+'.join(self.peers) or 'the peer that gets there'} at {self.at}, round {self.round}"


@dataclass(frozen=True)
class SwarmView:
    """State of the swarm when a random fault is chosen."""

    round: int
    """The next round to be committed."""
    trainers: tuple[str, ...]
    """Running trainers without a fault."""
    wanted: int
    """Number of trainers at the start of the run."""
    bootstrap: str | None
    """None while it has a fault."""
    next_name: str
    """Name of the next joiner."""


def random_fault(rng: random.Random, kinds: Sequence[str], points: Sequence[str], view: SwarmView) -> Fault | None:
    """Return a fault for the next round, or None if there are too few trainers: two are always unaffected."""
    trainers = view.trainers
    possible = list(kinds)
    if len(trainers) < 3:
        possible = [kind for kind in kinds if kind == "join" or (kind in HARMLESS and trainers)]
    if len(trainers) >= view.wanted + 2:
        possible = [kind for kind in possible if kind != "join"]
    if len(trainers) < view.wanted:
        possible = [kind for kind in possible if kind not in ("kill", "leave")] or possible
    if not possible:
        return None
    kind = rng.choice(possible)
    if kind == "join":
        return Fault(
            kind, view.round, rng.choice(points), peers=(view.next_name,), skip=rng.randrange(4), is_scripted=False
        )
    helper_too = view.bootstrap is not None and kind in ("restart", "stop", "slow") and rng.random() < 0.1
    victim = view.bootstrap if helper_too and view.bootstrap is not None else rng.choice(trainers)
    return Fault(
        kind,
        view.round,
        at=rng.choice(points),
        reached_by=victim if rng.random() < 0.5 else None,
        peers=_side(rng, trainers, victim) if kind == "partition" else (victim,) if rng.random() < 0.3 or helper_too else (),
        skip=rng.choice((0, 0, 0, 1, 2, 5)),
        delay_s=rng.choice((0.0, 0.0, 0.0, 0.03, 0.3, 3.0)),
        seconds=0.0 if kind == "leave" and rng.random() < 0.5 else rng.choice(DURATIONS_S),
        factor=rng.choice((2.0, 4.0, 10.0)),
        what=rng.choice(CORRUPTIONS),
        is_scripted=False,
    )


def random_points() -> tuple[str, ...]:
    """Return the points at which random faults strike."""
    return tuple(point for point in POINTS if point not in POINTS_WITHOUT_RANDOM_FAULTS)


def _side(rng: random.Random, trainers: Sequence[str], victim: str) -> tuple[str, ...]:
    """Return one side of a partition: in half of the cases the victim alone, otherwise with others."""
    if rng.random() < 0.5:
        return (victim,)
    others = [peer for peer in trainers if peer != victim]
    return (victim, *rng.sample(others, rng.randint(0, max(0, len(others) - 1))))
