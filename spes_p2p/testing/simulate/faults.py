"""Faults: what can happen to a peer and when, and the seeded choice of one for a round. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spes_p2p.testing.simulate.points import AT_ONCE, POINTS

Kind = Literal["kill", "restart", "stop", "partition", "slow", "corrupt", "join", "leave", "disconnect"]
Corruption = Literal["parts", "pieces", "push", "garbage", "base"]
KINDS: tuple[str, ...] = get_args(Kind)
CORRUPTIONS: tuple[str, ...] = get_args(Corruption)
"""Which bytes are wrong: results it serves, pieces of a base, updates it pushes, all that it sends, its own base in memory."""

DURATIONS_S = (0.5, 3.0, 7.0, 20.0, 60.0)
"""Of a random fault: below and above the silence that counts as death, and longer than rounds."""
HARMLESS = ("slow", "corrupt", "disconnect")
"""Kinds after which a peer is still there for the others."""
POINTS_WITHOUT_RANDOM_FAULTS = ("leave",)


@dataclass(frozen=True)
class Fault:
    """One fault. It is armed when round `round` - 1 has been committed, and strikes at the next time the point is reached."""

    kind: str
    """One of KINDS. `restart` is a kill and a new start on the same disk after `seconds`; `kill` is for good; `disconnect`
    ends all that it streams about with one other peer, and both can stream again at once."""
    round: int
    at: str = AT_ONCE
    """One of POINTS."""
    reached_by: str | None = None
    """Whose reaching the point counts; None: anybody's."""
    peers: tuple[str, ...] = ()
    """Whom it hits; none: who reached the point. Of a partition: one side of it; of a disconnect: the two, or one of them."""
    skip: int = 0
    """So many times the point is reached before the fault strikes."""
    delay_s: float = 0.0
    """Seconds from the point to the fault."""
    seconds: float = 10.0
    """How long a stop, partition, slowness or corruption lasts, and until a restarted peer or one that left starts again on its
    disk. Of `leave`, 0: it does not come back."""
    factor: float = 4.0
    """Of `slow`: how many times slower it trains and sends."""
    what: str = "parts"
    """Of `corrupt`: one of CORRUPTIONS."""
    is_scripted: bool = True
    """Written in a scenario; a random fault is left out where it would leave fewer than two trainers alone."""

    def __str__(self) -> str:
        details = {
            "slow": f" x{self.factor:g}", "corrupt": f" {self.what}",
            "leave": f" for {self.seconds:g} s" if self.seconds else "",
        }.get(self.kind, "")
        return f"{self.kind}{details} {'+'.join(self.peers) or 'who gets there'} at {self.at}, round {self.round}"


@dataclass(frozen=True)
class Standing:
    """Who is there when a random fault is chosen."""

    round: int
    """The next round to be committed."""
    trainers: tuple[str, ...]
    """Those that run and that no fault has hold of."""
    wanted: int
    """Trainers that the run began with."""
    bootstrap: str | None
    """None while a fault has hold of it."""
    next_name: str
    """For one that joins."""


def random_fault(rng: random.Random, kinds: Sequence[str], points: Sequence[str], standing: Standing) -> Fault | None:
    """A fault for the next round; None when too few are there for one. Two trainers are always left alone."""
    trainers = standing.trainers
    possible = list(kinds)
    if len(trainers) < 3:
        possible = [kind for kind in kinds if kind == "join" or (kind in HARMLESS and trainers)]
    if len(trainers) >= standing.wanted + 2:
        possible = [kind for kind in possible if kind != "join"]
    if len(trainers) < standing.wanted:
        possible = [kind for kind in possible if kind not in ("kill", "leave")] or possible
    if not possible:
        return None
    kind = rng.choice(possible)
    if kind == "join":
        return Fault(
            kind, standing.round, rng.choice(points), peers=(standing.next_name,), skip=rng.randrange(4), is_scripted=False
        )
    helper_too = standing.bootstrap is not None and kind in ("restart", "stop", "slow") and rng.random() < 0.1
    victim = standing.bootstrap if helper_too and standing.bootstrap is not None else rng.choice(trainers)
    return Fault(
        kind,
        standing.round,
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
    """Where random faults strike."""
    return tuple(point for point in POINTS if point not in POINTS_WITHOUT_RANDOM_FAULTS)


def _side(rng: random.Random, trainers: Sequence[str], victim: str) -> tuple[str, ...]:
    """One side of a partition: the victim alone in half of the cases, else some more."""
    if rng.random() < 0.5:
        return (victim,)
    others = [peer for peer in trainers if peer != victim]
    return (victim, *rng.sample(others, rng.randint(0, max(0, len(others) - 1))))
