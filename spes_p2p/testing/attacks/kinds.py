"""The kinds of attackers: the one table that simulations, experiments and tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from spes_p2p.net.interfaces import World
from spes_p2p.testing.attacks import updates
from spes_p2p.testing.attacks.updates import UpdateLiar, with_false_weight

AttackKind = Literal["scale", "flip", "zero", "noise", "free-ride", "copy", "weight"]
KINDS: tuple[AttackKind, ...] = get_args(AttackKind)


@dataclass(frozen=True)
class Attack:
    """One kind of attacker."""

    summary: str
    """What it does, for a person."""
    around: Callable[[World], World]
    """Wraps the attacker's world. Everything else about it is an honest peer."""


def _updates(**lies: object) -> Callable[[World], World]:
    return lambda world: UpdateLiar(**lies).around(world)  # type: ignore[arg-type]


ATTACKS: dict[AttackKind, Attack] = {
    "scale": Attack("sends 1000 times its update", _updates(instead=updates.scaled)),
    "flip": Attack("sends the opposite of its update, ten times", _updates(instead=updates.flipped)),
    "zero": Attack("sends no update and claims 2^40 tokens", _updates(instead=updates.zero, claims_tokens=True)),
    "noise": Attack("sends normal deviates in its experts", _updates(instead=updates.noise)),
    "free-ride": Attack("trains one step and claims the whole phase", _updates(is_lazy=True)),
    "copy": Attack("sends what the last round moved and claims a phase", _updates(copies=True)),
    "weight": Attack("claims 2^40 tokens and a bandwidth of 2^50 B/s", with_false_weight),
}
