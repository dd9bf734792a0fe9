"""Archived bases: a bootstrap peer keeps every nth base, for rollbacks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from spes_p2p.errors import Damaged
from spes_p2p.rounds.base import Base, load_base, save_base
from spes_p2p.storage.interfaces import Store

ARCHIVED = "archived-"


@dataclass(frozen=True)
class Archive:
    """Which bases are archived."""

    every: int
    """Interval in rounds; 0: archive nothing."""
    keep: int
    """Bounds the archived bases. Each takes as much disk as the base."""

    def file(self, store: Store, base: Base, wanted: int = -1, threads: int = 1) -> bool:
        """Archive this base if it is due, and delete the oldest; return whether it was due. Raises UserError (disk full).

        `wanted`: the round of a base that is not deleted, because a rollback needs it.
        """
        if not self.every or base.round <= 0 or base.round % self.every:
            return False
        for old in [kept for kept in archived_rounds(store) if kept != wanted][: -self.keep + 1 or None]:
            store.delete(_name(old))
        save_base(store, base, _name(base.round), threads)
        return True


NO_ARCHIVE = Archive(0, 1)


def archived_rounds(store: Store) -> list[int]:
    """Return the rounds that are archived, ascending, without the copies that a user made beside them."""
    rounds = (name.removeprefix(ARCHIVED) for name in store.names(ARCHIVED))
    return sorted(int(number) for number in rounds if number.isdecimal())


def load_archived(store: Store, round_number: int, elements: int, where: str, threads: int = 1) -> Base | None:
    """Return the archived base of a round, or None. Raises UserError when it is damaged."""
    return load_base(store, elements, where, _name(round_number), threads=threads)


def load_newest_archived(store: Store, elements: int, where: str, threads: int = 1) -> Base | None:
    """Return the newest archived base that is whole, or None."""
    for number in reversed(archived_rounds(store)):
        with suppress(Damaged):
            return load_archived(store, number, elements, where, threads)
    return None


def _name(round_number: int) -> str:
    return f"{ARCHIVED}{round_number}"
