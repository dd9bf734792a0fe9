"""A network in memory: transports and a registry with delays, bandwidths, NATs and faults. Jitter comes from the seed.

Lines are in `memory_lines.py`, NATs and relays in `memory_nat.py`, channels in `memory_channels.py`, the registry in
`memory_registry.py`, and what these share in `memory_state.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.refusals import Code
from spes_p2p.net.interfaces import Handler
from spes_p2p.testing.memory_channels import MemoryChannel, Pipe, RelayedPipe, serve
from spes_p2p.testing.memory_lines import Lines
from spes_p2p.testing.memory_nat import Circuit, Nats
from spes_p2p.testing.memory_registry import EPOCH_S, MemoryRegistry, Records
from spes_p2p.testing.memory_state import NetworkState
from spes_p2p.testing.virtual_loop import CURRENT_UNIT, Unit, VirtualLoop, create_task_of_unit

T = TypeVar("T")


class MemoryNetwork(NetworkState):
    """Peers by name, the links between them, and their registry.

    A frame occupies the sender's uplink for size / bandwidth, then the lines of its and the receiver's site, if they differ,
    travels for the link's latency, then occupies the receiver's downlink. A heartbeat only travels, and a frame under way is
    heard every second: on a real line, which streams share by packets, some bytes of each arrive all the time.
    `registry_delay_s`: time until others see a new record.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        bandwidth_bytes_per_s: float = float("inf"),
        registry_delay_s: float = 0.0,
        open_timeout_s: float = 10.0,
    ):
        super().__init__(seed, Lines(seed, latency_s, jitter, bandwidth_bytes_per_s), registry_delay_s, open_timeout_s)
        self.nats = Nats(self)
        self._records = Records()

    def transport(self, peer: str) -> MemoryTransport:
        """Return the peer's transport; after it was killed or closed, one of a new life under the same id."""
        unit = self.units.get(peer)
        if unit is None or not unit.alive:
            unit = self.units[peer] = Unit(peer, 0 if unit is None else unit.lives_before + 1)
        return MemoryTransport(self, unit)

    def registry(self, peer: str) -> MemoryRegistry:
        """Return the registry as this peer sees it."""
        return MemoryRegistry(self, self.nats, self._records, self.transport(peer).unit)

    def run_peer(self, peer: str, main: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a peer's coroutine as a unit: `kill(peer)` ends it with all tasks that it started."""
        unit = self.transport(peer).unit
        loop = asyncio.get_running_loop()
        loop.set_task_factory(create_task_of_unit)
        context = contextvars.copy_context()
        context.run(CURRENT_UNIT.set, unit)
        return context.run(loop.create_task, main)

    def wall_time(self) -> float:
        """Return the virtual Unix time."""
        return EPOCH_S + asyncio.get_running_loop().time()

    def is_alive(self, peer: str) -> bool:
        """Return whether the peer has a transport that is neither killed nor closed."""
        unit = self.units.get(peer)
        return unit is not None and unit.alive

    def set_latency(self, a: str, b: str, latency_s: float) -> None:
        """Set the one-way latency between two peers, in both directions."""
        self.lines.set_latency(a, b, latency_s)

    def set_bandwidth(self, peer: str, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Set the bandwidth of a peer's line, greater than 0."""
        line = self.lines.of(peer)
        line.up, line.down = up_bytes_per_s, down_bytes_per_s

    def share_line(self, peers: Iterable[str], up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Put peers at one site: what they exchange with others passes a line that they share, too."""
        self.lines.share(peers, up_bytes_per_s, down_bytes_per_s)

    def kill(self, peer: str) -> None:
        """End a peer as SIGKILL does: its tasks stop where they are, its channels break, and opens to it are refused."""
        unit = self.units.get(peer)
        if unit is None or not unit.alive:
            return
        self._end(unit)
        self.resume(peer)
        for store in unit.stores:
            store.crash()
        for task in list(unit.tasks):
            task.cancel()

    def pause(self, peer: str) -> None:
        """Hold back all that goes to and from the peer until `resume`. Nothing is lost."""
        self.paused.add(peer)

    def stop(self, peer: str) -> None:
        """Pause and suspend the peer as SIGSTOP does, until `resume`. Its timers expire meanwhile."""
        unit, loop = self.units.get(peer), asyncio.get_running_loop()
        self.pause(peer)
        if unit is not None and unit.alive and isinstance(loop, VirtualLoop):
            loop.stopped_units.setdefault(unit, [])

    def resume(self, peer: str) -> None:
        """End a pause or stop. What was held back arrives now."""
        self.paused.discard(peer)
        unit, loop = self.units.get(peer), asyncio.get_running_loop()
        if unit is not None and isinstance(loop, VirtualLoop):
            loop.continue_unit(unit)
        self._release()

    def partition(self, *groups: Iterable[str]) -> None:
        """Let frames pass only within each group, until `heal`. Peers that are in none form another group."""
        self.groups = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        self.cut_since_s = asyncio.get_running_loop().time()

    def heal(self) -> None:
        """End the partition. What was held back arrives now."""
        self.groups = {}
        self._release()

    def disconnect(self, a: str, b: str) -> None:
        """Break all channels between two peers, losing what is in flight. They can open new ones at once."""
        for one, other in ((a, b), (b, a)):
            unit = self.units.get(one)
            for channel in [] if unit is None else [each for each in unit.channels if each.remote == other]:
                channel.sever()

    def _end(self, unit: Unit) -> None:
        unit.alive = False
        self.nats.forget(unit)
        for channel in list(unit.channels):
            channel.sever()

    def _release(self) -> None:
        self.reachable_again.set()
        self.reachable_again = asyncio.Event()
        held, self.held = self.held, {}
        for flush in held:
            flush()

    def pipe(self, source: str, target: str, circuit: Circuit | None) -> Pipe:
        """Return one direction of a channel, over a relayed connection or a direct one."""
        return Pipe(self, source, target) if circuit is None else RelayedPipe(self, source, target, circuit)


class MemoryTransport:
    """One peer's `Transport` on a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, unit: Unit):
        self._network = network
        self.unit = unit

    @property
    def peer_id(self) -> str:
        """Name of the peer."""
        return self.unit.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """Placeholders to publish; dialling needs only the name."""
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Do nothing: dialling needs only the name."""

    async def serve(self, method: str, handler: Handler) -> None:
        """See Transport."""
        self.unit.check_alive()
        self.unit.handlers[method] = (handler, contextvars.copy_context())

    async def open(self, peer: str, method: str) -> MemoryChannel:
        """See Transport. Takes one round trip, or `open_timeout_s` if the peer is silent."""
        network, me = self._network, self.peer_id
        self.unit.check_alive()
        if peer == me:
            raise ValueError("a peer cannot dial itself")
        circuit = await network.nats.reach(self.unit, peer) if network.nats.are_any else None
        there, back = network.pipe(me, peer, circuit), network.pipe(peer, me, circuit)
        await network.until(lambda: not there.is_cut(), peer)
        await asyncio.sleep(there.delay_s() + back.delay_s())
        self.unit.check_alive()
        unit = network.units.get(peer)
        if unit is None or not unit.alive:
            raise PeerUnreachable(f"{peer} refused the connection")
        if circuit is None:
            network.nats.dialled(self.unit, unit)
        if method not in unit.handlers:
            raise Refused(Code.UNKNOWN_METHOD, f"{peer} does not serve {method}")
        handler, context = unit.handlers[method]
        answering = MemoryChannel(network, unit, method, back, there, is_answer=True, circuit=circuit)
        context.copy().run(unit.start, serve(handler, answering))
        return MemoryChannel(network, self.unit, method, there, back, is_answer=False, circuit=circuit)

    async def close(self) -> None:
        """End all channels, and refuse new ones."""
        if self.unit.alive:
            self._network._end(self.unit)
