"""Hooks with which the caller of a session extends a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import Observer


@dataclass(frozen=True)
class Extension:
    """A wrapper for a peer's world, and additional observers."""

    around: Callable[[World], World] = lambda world: world
    """Wraps the peer's world."""
    observers: tuple[Observer, ...] = ()


NO_EXTENSION = Extension()
