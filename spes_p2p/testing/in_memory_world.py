"""A peer's world in memory: its transport and registry on a MemoryNetwork, its store, identity and randomness."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spes_p2p.net.interfaces import World
from spes_p2p.storage.interfaces import Store
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulated_identity import SimulatedIdentity

T = TypeVar("T")


async def inline(function: Callable[..., T], *args: Any) -> T:
    """Stand in for `World.run_blocking` where no time is modelled."""
    return function(*args)


def in_memory_world(
    network: MemoryNetwork,
    name: str,
    *,
    store: Store | None = None,
    seconds: Callable[[Callable[..., Any], Sequence[Any]], float] | None = None,
) -> World:
    """Return a peer's world on the network; its randomness depends on the network's seed, its name and its life.

    `seconds(f, args)` models the duration of `run_blocking(f, *args)`; default: no time.
    """
    store = MemoryStore() if store is None else store
    transport = network.transport(name)
    if isinstance(store, MemoryStore):
        transport.unit.stores.append(store)

    async def run_blocking(function: Callable[..., T], *args: Any) -> T:
        transport.unit.check_alive()
        result = function(*args)
        await asyncio.sleep(0.0 if seconds is None else seconds(function, args))
        return result

    return World(
        transport=transport,
        registry=network.registry(name),
        identity=SimulatedIdentity(name),
        store=store,
        wall_time=network.wall_time,
        rng=random.Random(f"peer/{network.seed}/{name}/{transport.unit.lives_before}"),
        run_blocking=run_blocking,
    )
