"""Peers behind NATs in the in-memory network: who can dial whom, relayed connections, and hole punching.

Modelled on hivemind's p2pd 0.5.0 (go-libp2p 0.32): a peer that others cannot dial keeps a reservation at a relay, a peer by
which it joined. Dialling it makes a relayed connection (circuit relay v2); the two then try to add a direct one (DCUtR).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from spes_p2p.errors import PeerUnreachable
from spes_p2p.testing.memory_state import NetworkState
from spes_p2p.testing.virtual_loop import Unit

Nat = Literal["open", "cone", "symmetric"]
"""open: everybody can dial the peer. cone: one outside port for all destinations (endpoint-independent mapping), so two such
peers that dial each other at once connect. symmetric: another port for each destination, which nobody can guess."""

MAX_RESERVATIONS, MAX_CIRCUITS = 128, 16
"""Peers that a relay serves, and its relayed connections of one peer: go-libp2p's `MaxReservations` and `MaxCircuits`. Of one
address it serves only eight (`MaxReservationsPerIP`); here each peer has its own."""
CIRCUIT_S, CIRCUIT_BYTES = 120.0, 2**17
"""A relay ends a relayed connection after this time, or bytes in one direction: `DefaultLimit`."""
OBSERVERS = 4
"""A peer knows its outside address, and tries to get direct connections, once so many others saw the same one
(`ActivationThresh` of go-libp2p's identify)."""
HANDSHAKE_ROUND_TRIPS = 3
"""Of a new connection: choice of the security protocol, TLS, identify."""
PUNCH_ROUND_TRIPS = 1.5
"""Over the relay, before both dial: addresses there and back, and the signal to dial."""


@dataclass(eq=False)
class Circuit:
    """A relayed connection between two peers' lives."""

    relay: Unit
    ends: tuple[Unit, Unit]
    """Who dialled, and who was dialled."""
    ready_at_s: float
    network: NetworkState
    is_open: bool = True
    _carried: dict[str, int] = field(default_factory=dict)
    """By sender."""

    def carried(self, sender: str, size: int) -> None:
        """Count bytes that passed the relay."""
        self.network.relayed_bytes[self.relay.peer] += size
        self._carried[sender] = self._carried.get(sender, 0) + size
        if self._carried[sender] >= CIRCUIT_BYTES:
            self.close()

    def is_used(self) -> bool:
        """Return whether a channel is open over it."""
        return any(channel.circuit is self for unit in self.ends for channel in unit.channels)

    def close(self) -> None:
        """Break its channels."""
        if self.is_open:
            self.is_open = False
            for unit in self.ends:
                for channel in [each for each in unit.channels if each.circuit is self]:
                    channel.sever()


class Nats:
    """NATs of the peers, their connections, and the relays."""

    def __init__(self, network: NetworkState):
        self.relays: tuple[str, ...] = ()
        """Peers by which the others join: their relays."""
        self._network = network
        self._kinds: dict[str, Nat] = {}
        """Peers that others cannot dial."""
        self._direct: dict[Unit, set[Unit]] = {}
        """Direct connections of peers behind NATs, at both ends."""
        self._reserved: dict[Unit, dict[Unit, None]] = {}
        """By relay: whom it serves."""
        self._circuits: dict[frozenset[Unit], Circuit] = {}

    def put_behind(self, peer: str, kind: Nat) -> None:
        """Put a peer behind a NAT of this kind."""
        if kind == "open":
            self._kinds.pop(peer, None)
        else:
            self._kinds[peer] = kind

    @property
    def are_any(self) -> bool:
        """Return whether some peer is behind a NAT."""
        return bool(self._kinds)

    def is_open(self, peer: str) -> bool:
        """Return whether everybody can dial the peer."""
        return peer not in self._kinds

    def is_direct(self, a: Unit, b: Unit) -> bool:
        """Return whether two peers, of which one is behind a NAT, have a direct connection."""
        return b in self._direct.get(a, ())

    def knows_its_address(self, unit: Unit) -> bool:
        """Return whether a peer behind a NAT has found out at which address others may reach it."""
        return self._kinds.get(unit.peer) == "cone" and len({each.peer for each in self._direct.get(unit, ())}) >= OBSERVERS

    def dialled(self, unit: Unit, other: Unit) -> None:
        """Record a direct connection, unless nobody is behind a NAT. To a peer that cannot be dialled there is none."""
        if unit.peer in self._kinds and other.peer not in self._kinds:
            self._connect(unit, other)
            self._reserve(unit)

    async def reach(self, unit: Unit, peer: str) -> Circuit | None:
        """Return the relayed connection to a peer, dialled if need be; None where a direct one exists or can be dialled.

        To dial a peer directly, a relayed connection with it is closed, unless it is in use (`net/transport.py`). Raises
        PeerUnreachable.
        """
        other = self._network.units.get(peer)
        if other is None or not other.alive or self.is_direct(unit, other):
            return None
        circuit = self._circuits.get(frozenset((unit, other)))
        if self.is_open(peer) and (circuit is None or not circuit.is_used()):
            if circuit is not None:
                self._end(circuit)
            return None
        circuit = circuit or await self._dial(unit, other)
        await asyncio.sleep(max(0.0, circuit.ready_at_s - asyncio.get_running_loop().time()))
        unit.check_alive()
        if not circuit.is_open:
            raise PeerUnreachable(f"{peer}: the relayed connection broke")
        return circuit

    def forget(self, unit: Unit) -> None:
        """End what a life that ended leaves behind."""
        for other in self._direct.pop(unit, ()):
            self._direct[other].discard(unit)
        self._reserved.pop(unit, None)
        for served in self._reserved.values():
            served.pop(unit, None)
        for circuit in [each for each in self._circuits.values() if unit is each.relay or unit in each.ends]:
            self._end(circuit)

    def disconnect(self, unit: Unit, other: Unit) -> None:
        """Close a direct connection that nothing uses."""
        for one, end in ((unit, other), (other, unit)):
            self._direct.get(one, set()).discard(end)

    def _connect(self, unit: Unit, other: Unit) -> None:
        if unit.alive and other.alive:
            self._direct.setdefault(unit, set()).add(other)
            self._direct.setdefault(other, set()).add(unit)

    def _reserve(self, unit: Unit) -> Unit | None:
        """Return the relay that serves a peer, perhaps from now on."""
        for name in self.relays:
            relay = self._network.units.get(name)
            if relay is not None and relay.alive:
                served = self._reserved.setdefault(relay, {})
                if unit in served or (len(served) < MAX_RESERVATIONS and not self._network.is_cut(unit.peer, name)):
                    served[unit] = None
                    self._connect(unit, relay)
                    return relay
        return None

    async def _dial(self, unit: Unit, other: Unit) -> Circuit:
        """Return a new relayed connection. Raises PeerUnreachable."""
        network, loop, pair = self._network, asyncio.get_running_loop(), frozenset((unit, other))
        relay = self._reserve(other)
        if relay is not None:
            legs = ((unit.peer, relay.peer), (relay.peer, other.peer))
            await network.until(lambda: not any(network.is_cut(*leg) for leg in legs), other.peer)
            if pair in self._circuits:
                return self._circuits[pair]
        if relay is None or any(self._count(end, relay) >= MAX_CIRCUITS for end in (unit, other)):
            at = other.peer if relay is None else relay.peer
            await asyncio.sleep(network.lines.delay(unit.peer, at) + network.lines.delay(at, unit.peer))
            why = "it has no relay" if relay is None else f"{relay.peer} relays no more connections"
            raise PeerUnreachable(f"{other.peer} cannot be dialled: {why}")
        round_trip_s = sum(network.lines.delay(a, b) + network.lines.delay(b, a) for a, b in legs)
        circuit = Circuit(relay, (unit, other), loop.time() + (1 + HANDSHAKE_ROUND_TRIPS) * round_trip_s, network)
        self._circuits[pair] = circuit
        loop.call_at(circuit.ready_at_s, self._upgrade, circuit, round_trip_s)
        loop.call_later(CIRCUIT_S, self._end, circuit)
        return circuit

    def _count(self, unit: Unit, relay: Unit) -> int:
        return sum(unit in each.ends and each.relay is relay for each in self._circuits.values())

    def _end(self, circuit: Circuit) -> None:
        if self._circuits.get(frozenset(circuit.ends)) is circuit:
            del self._circuits[frozenset(circuit.ends)]
        circuit.close()

    def _upgrade(self, circuit: Circuit, relayed_round_trip_s: float) -> None:
        """Let the peer that was dialled try to make the connection direct: it dials back, or both dial at once."""
        unit, other = circuit.ends
        if not circuit.is_open or not self.knows_its_address(other):
            return
        if not self.is_open(unit.peer) and not self.knows_its_address(unit):
            return
        lines = self._network.lines
        direct_round_trip_s = lines.delay(unit.peer, other.peer) + lines.delay(other.peer, unit.peer)
        takes_s = (1 + HANDSHAKE_ROUND_TRIPS) * direct_round_trip_s
        if not self.is_open(unit.peer):
            takes_s += PUNCH_ROUND_TRIPS * relayed_round_trip_s
        asyncio.get_running_loop().call_later(takes_s, self._upgraded, circuit)

    def _upgraded(self, circuit: Circuit) -> None:
        if circuit.is_open and not self._network.is_cut(circuit.ends[0].peer, circuit.ends[1].peer):
            self._connect(*circuit.ends)
