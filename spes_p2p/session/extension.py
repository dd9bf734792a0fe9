"""What the caller of a session adds to a peer from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import Observer


@dataclass(frozen=True)
class Extension:
    """Additions to the world and to the observers of a peer."""

    around: Callable[[World], World] = lambda world: world
    """Wraps the world that the peer lives in."""
    observers: tuple[Observer, ...] = ()


NO_EXTENSION = Extension()
