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

    around: Around
    """Returns the attacker's world as its peer gets it. Everything else about it is an honest peer."""
    identities: int = 1
    needs_seat: bool = False
    """Whether it can do nothing unless it may be an elector."""


def _updates(**lies: object) -> Around:
    return lambda liar: UpdateLiar(**lies).around(liar)  # type: ignore[arg-type]


ATTACKS: dict[AttackKind, Attack] = {
    "scale": Attack(_updates(instead=updates.scaled)),  # sends 1000 times its update
    "flip": Attack(_updates(instead=updates.flipped)),  # sends the opposite of its update, ten times
    "zero": Attack(_updates(instead=updates.zero, claims_tokens=True)),  # sends no update and claims 2^40 tokens
    "noise": Attack(_updates(instead=updates.noise)),  # sends normal deviates in its experts
    "free-ride": Attack(_updates(is_lazy=True)),  # trains one step and claims the whole phase
    "copy": Attack(_updates(copies=True)),  # sends what the last round moved and claims a phase
    "weight": Attack(with_false_weight),  # claims 2^40 tokens and a bandwidth of 10^15 B/s
    "reducer": Attack(serving.lying_reducer),  # reverses the means of its parts
    "forger": Attack(serving.forger),  # makes the means of its parts from invented updates
    "silent": Attack(serving.silent_reducer, needs_seat=True),  # is vouched for, lives, and serves no results as a reducer
    "donor": Attack(serving.lying_donor),  # serves wrong bytes of bases, plans and results
    "tarpit": Attack(serving.tarpit),  # is two seconds late with every message
    "coordinator": Attack(deciding.lying_coordinator, needs_seat=True),  # forges proposals, commits and certificates
    "elector": Attack(deciding.lying_elector, needs_seat=True),  # answers with false promises and unsigned votes, or not
    "outbid": Attack(deciding.outbidding, needs_seat=True),  # outbids every coordinator
    "equivocation": Attack(deciding.equivocating, needs_seat=True),  # has peers exchange by two plans and decide two commits
    "unproposing": Attack(deciding.unproposing, needs_seat=True),  # coordinates, lives, and never proposes a plan
    "undeciding": Attack(deciding.undeciding, needs_seat=True),  # coordinates, proposes, and never has it decided
    "turncoat": Attack(serving.lying_reducer, needs_seat=True),  # is vouched for, and reverses the means of its parts
    "contacts": Attack(network.false_contacts),  # claims far rounds and other branches in its contact
    "flood": Attack(network.flood),  # holds streams open and sends the longest frames
    "hostile": Attack(network.hostile),  # sends bytes that are no messages
    "sybils": Attack(_updates(is_lazy=True), SYBILS),  # takes part as eight peers that train one step each
    "slander": Attack(serving.slandering, SYBILS),  # as eight peers, says that all reducers stall, and reports nothing
}
