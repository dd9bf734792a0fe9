"""Bases that a bootstrap peer keeps beside the current one: every so many rounds, the newest few."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.rounds.base import Base, load_base, save_base
from spes_p2p.storage.interfaces import Store

ARCHIVED = "archived-"


@dataclass(frozen=True)
class Archive:
    """When a base is kept, and how many of them."""

    every: int
    """Rounds between two; 0: none is kept."""
    keep: int
    """The newest so many stay. Each takes as much disk as the base."""

    def file(self, store: Store, base: Base, wanted: int = -1) -> bool:
        """Keep this base if it is due, and let the oldest go; was it kept? Raises UserError when the disk is full.

        `wanted`: a round whose base stays, because the campaign goes back to it.
        """
        if not self.every or base.round <= 0 or base.round % self.every:
            return False
        for old in [kept for kept in archived_rounds(store) if kept != wanted][: -self.keep + 1 or None]:
            store.delete(_name(old))
        save_base(store, base, _name(base.round))
        return True


NO_ARCHIVE = Archive(0, 1)


def archived_rounds(store: Store) -> list[int]:
    """Rounds whose bases are kept, ascending."""
    return sorted(int(name.removeprefix(ARCHIVED)) for name in store.names(ARCHIVED))


def load_archived(store: Store, round_number: int, elements: int, where: str) -> Base | None:
    """The kept base of a round; None when it is not kept. Raises UserError when it is damaged."""
    return load_base(store, elements, where, _name(round_number))


def _name(round_number: int) -> str:
    return f"{ARCHIVED}{round_number}"
