"""The kinds of attackers: the one table that simulations, experiments and tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from spes_p2p.net.interfaces import World
from spes_p2p.testing.attacks import deciding, network, serving, updates
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.attacks.updates import UpdateLiar, with_false_weight

AttackKind = Literal[
    "scale", "flip", "zero", "noise", "free-ride", "copy", "weight", "reducer", "forger", "silent", "donor", "tarpit",
    "coordinator", "elector", "outbid", "equivocation", "unproposing", "undeciding", "turncoat", "contacts", "flood", "hostile",
    "sybils", "slander",
]
KINDS: tuple[AttackKind, ...] = get_args(AttackKind)
SYBILS = 8
"""Identities of one attacker of this kind."""

Around = Callable[[Liar], World]


@dataclass(frozen=True)
class Attack:
    """One kind of attacker."""

    summary: str
    """What it does, for a person."""
    around: Around
    """Returns the attacker's world as its peer gets it. Everything else about it is an honest peer."""
    identities: int = 1
    needs_seat: bool = False
    """Whether it can do nothing unless it may be an elector."""


def _updates(**lies: object) -> Around:
    return lambda liar: UpdateLiar(**lies).around(liar)  # type: ignore[arg-type]


ATTACKS: dict[AttackKind, Attack] = {
    "scale": Attack("sends 1000 times its update", _updates(instead=updates.scaled)),
    "flip": Attack("sends the opposite of its update, ten times", _updates(instead=updates.flipped)),
    "zero": Attack("sends no update and claims 2^40 tokens", _updates(instead=updates.zero, claims_tokens=True)),
    "noise": Attack("sends normal deviates in its experts", _updates(instead=updates.noise)),
    "free-ride": Attack("trains one step and claims the whole phase", _updates(is_lazy=True)),
    "copy": Attack("sends what the last round moved and claims a phase", _updates(copies=True)),
    "weight": Attack("claims 2^40 tokens and a bandwidth of 10^15 B/s", with_false_weight),
    "reducer": Attack("reverses the means of its parts", serving.lying_reducer),
    "forger": Attack("makes the means of its parts from invented updates", serving.forger),
    "silent": Attack("lives, and serves no results as a reducer", serving.silent_reducer),
    "donor": Attack("serves wrong bytes of bases, plans and results", serving.lying_donor),
    "tarpit": Attack("is two seconds late with every message", serving.tarpit),
    "coordinator": Attack(
        "coordinates with forged proposals, commits and certificates", deciding.lying_coordinator, needs_seat=True
    ),
    "elector": Attack("answers with false promises and unsigned votes, or not", deciding.lying_elector, needs_seat=True),
    "outbid": Attack("outbids every coordinator", deciding.outbidding, needs_seat=True),
    "equivocation": Attack(
        "has different peers exchange by two plans, and decide two commits", deciding.equivocating, needs_seat=True
    ),
    "unproposing": Attack("coordinates, lives, and never proposes a plan", deciding.unproposing, needs_seat=True),
    "undeciding": Attack("coordinates, proposes, and never has it decided", deciding.undeciding, needs_seat=True),
    "turncoat": Attack("is vouched for, and reverses the means of its parts", serving.lying_reducer, needs_seat=True),
    "contacts": Attack("claims far rounds and other branches in its contact", network.false_contacts),
    "flood": Attack("holds streams open and sends the longest frames", network.flood),
    "hostile": Attack("sends bytes that are no messages", network.hostile),
    "sybils": Attack(f"takes part as {SYBILS} peers that train one step each", _updates(is_lazy=True), SYBILS),
    "slander": Attack(f"as {SYBILS} peers, says that all reducers stall, and reports nothing", serving.slandering, SYBILS),
}
