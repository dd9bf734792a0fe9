"""Electors that give up their seats for one round, and the quorum without them."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.consensus.output import Identity
from spes_p2p.messages.consensus import Commit, Farewell


def farewell_message(parent: str) -> bytes:
    """Return the bytes that a leaving elector signs."""
    return b"spes leave\0" + parent.encode()


def signed_farewell(identity: Identity, parent: str) -> Farewell:
    """Return this identity's farewell for the round after `parent`."""
    return Farewell(identity.peer_id, parent, identity.sign(farewell_message(parent)))


def keeps_seat(elector: str, commit: Commit) -> bool:
    """Return whether this elector must keep its seat: a helper or a lone elector, so that somebody can always vote."""
    return elector in commit.helpers or commit.electorate == (elector,)


def counted(farewells: Iterable[Farewell], commit: Commit, identity: Identity) -> tuple[Farewell, ...]:
    """Return the valid farewells of electors of the round after `commit`."""
    return tuple(
        farewell
        for farewell in farewells
        if farewell.parent == commit.id
        and farewell.elector in commit.electorate
        and identity.verify(farewell.elector, farewell_message(commit.id), farewell.signature)
    )


def remaining(commit: Commit, farewells: Iterable[Farewell], identity: Identity) -> tuple[str, ...]:
    """Return the electors of the round after `commit` whose majority decides: all but those that left.

    An elector that left votes in no ballot of the round, so any two majorities, counted with or without it, share an elector.
    When all left, all count: an empty majority would prove anything.
    """
    left = {farewell.elector for farewell in counted(farewells, commit, identity)}
    return tuple(elector for elector in commit.electorate if elector not in left) or commit.electorate
