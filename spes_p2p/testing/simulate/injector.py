"""Inject faults into a virtual swarm, scripted and random ones, when a peer reaches their point."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from spes_p2p.consensus.electorate import quorum
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.corruption import corrupted
from spes_p2p.testing.simulate.faults import HARMLESS, Fault, SwarmView, random_fault, random_points
from spes_p2p.testing.simulate.points import IMMEDIATELY, point_of_frame
from spes_p2p.testing.simulate.scenario import BOOTSTRAP, Scenario
from spes_p2p.testing.simulate.swarm import VirtualSwarm


class Injector:
    """Arms, starts and ends the faults of one run."""

    def __init__(
        self,
        swarm: VirtualSwarm,
        scenario: Scenario,
        rng: random.Random,
        audit: Audit,
        start: Callable[[str], None],
        note: Callable[[str, str], None],
    ):
        """`start(name)` starts a new trainer; `note(peer, text)` writes a line to the event log."""
        self.struck: Counter[str] = Counter()
        """Number of faults that struck, by kind."""
        self.struck_at: Counter[str] = Counter()
        """The same by point."""
        self.last_s = 0.0
        """Time at which a fault last struck or ended."""
        self._swarm, self._scenario, self._rng, self._audit = swarm, scenario, rng, audit
        self._start, self._tell = start, note
        self._points = scenario.points or random_points()
        self._script = sorted(scenario.faults, key=lambda fault: fault.round)
        self._armed: list[Fault] = []
        self._held: set[str] = set()
        self._dead: dict[str, None] = {}
        self._corrupt: dict[str, str] = {}
        self._cut: tuple[str, ...] = ()
        self._joined = 0
        self._over = False

    def round_committed(self, number: int) -> None:
        """Arm the faults of the next round, when the first peer commits this one."""
        if self._over:
            return
        self._armed = [fault for fault in self._armed if fault.round >= number]
        due = [fault for fault in self._script if fault.round <= number + 1]
        del self._script[: len(due)]
        if number >= 0 and self._rng.random() < self._scenario.fault_rate:
            fault = random_fault(self._rng, self._scenario.kinds, self._points, self._view(number + 1))
            due += [fault] if fault is not None else []
        for fault in due:
            if fault.at == IMMEDIATELY:
                self._soon(fault, self._any_peer())
            else:
                self._armed.append(fault)

    def reached(self, peer: str, point: str) -> None:
        """Let faults strike that wait for this peer to reach this point."""
        for fault in tuple(self._armed):
            if fault.at == point and fault.reached_by in (None, peer):
                self._armed.remove(fault)
                if fault.skip:
                    self._armed.append(replace(fault, skip=fault.skip - 1))
                else:
                    self._soon(fault, peer)

    def strike(self, fault: Fault) -> None:
        """Let a fault strike its peers now."""
        self._strike(fault, fault.peers[0])

    def on_frame(self, frame: Frame) -> Frame:
        """Check whether a frame is at a point; return it, corrupted if its sender is corrupt."""
        if self._armed:
            point = point_of_frame(frame)
            if point is not None:
                self.reached(frame.sender, point)
        what = self._corrupt.get(frame.sender)
        return frame if what is None else corrupted(frame, what, self._rng)

    def leaves_majority(self, electorate: Sequence[str]) -> bool:
        """Return whether a majority of these peers is present on one side of a partition and sends no garbage."""
        cut, garbled = set(self._cut), {peer for peer, what in self._corrupt.items() if what == "garbage"}
        there = set(electorate) - (self._held - cut) - garbled
        return max(len(there & cut), len(there - cut)) >= quorum(tuple(electorate))

    def lift(self) -> None:
        """End all faults, start killed peers again, and let no other fault strike."""
        self._over = True
        self._corrupt.clear()
        self._heal()
        for name in tuple(self._dead):
            self._start_again(name)
        for name in sorted(self._held):
            self._release(name)
        for name in self._swarm.machines:
            self._swarm.slow(name, 1.0)
        self._note("", "all faults are lifted")

    def _soon(self, fault: Fault, peer: str) -> None:
        if fault.delay_s:
            asyncio.get_running_loop().call_later(fault.delay_s, self._strike, fault, peer)
        else:
            self._strike(fault, peer)

    def _later(self, seconds: float, end: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(seconds, lambda: None if self._over else end())

    def _view(self, number: int) -> SwarmView:
        free = tuple(name for name in self._swarm.peers if name not in self._held and not self._swarm.tasks[name].done())
        bootstrap = BOOTSTRAP if BOOTSTRAP not in self._held else None
        return SwarmView(number, free, len(self._scenario.peer_names), bootstrap, f"joiner-{self._joined}")

    def _any_peer(self) -> str:
        return self._rng.choice(self._view(0).trainers or tuple(self._swarm.peers) or (BOOTSTRAP,))

    def _possible(self, fault: Fault, victims: Sequence[str]) -> bool:
        """Return whether all victims are present, and a random fault leaves two trainers and an open campaign's owner."""
        if fault.kind == "join":
            return victims[0] not in self._swarm.machines
        there = all(victim in self._swarm.nodes and victim not in self._held for victim in victims)
        if not there or (fault.kind == "partition" and self._cut) or (fault.kind == "leave" and BOOTSTRAP in victims):
            return False
        if fault.kind == "disconnect" and not self._others_there(victims[0]):
            return False
        if fault.kind == "kill" and not fault.is_scripted and BOOTSTRAP in victims and self._scenario.admission == "open":
            return False  # the only elector, where nobody else that the owner vouches for can be dialled
        left_alone = set(self._view(0).trainers) - set(victims)
        return fault.is_scripted or fault.kind in HARMLESS or len(left_alone) >= 2

    def _strike(self, fault: Fault, peer: str) -> None:
        victims = fault.peers or (peer,)
        if self._over or not self._possible(fault, victims):
            self._note("+".join(victims), f"skipped: {fault}")
            return
        self._note("+".join(victims), f"fault: {fault}")
        self.struck[fault.kind] += 1
        self.struck_at[fault.at] += 1
        if fault.kind == "partition":
            self._partition(victims, fault.seconds)
            return
        if fault.kind == "disconnect":
            self._disconnect(*victims)
            return
        handlers: dict[str, Callable[[str], object]] = {
            "kill": self._kill,
            "restart": lambda victim: self._restart(victim, fault.seconds),
            "stop": lambda victim: self._stop(victim, fault.seconds),
            "slow": lambda victim: self._slow(victim, fault.factor, fault.seconds),
            "corrupt": lambda victim: self._make_corrupt(victim, fault.what, fault.seconds),
            "join": self._join,
            "leave": lambda victim: self._leave(victim, fault.seconds),
        }
        for victim in victims:
            handlers[fault.kind](victim)

    def _kill(self, victim: str) -> None:
        self._hold(victim)
        self._swarm.kill(victim)

    def _restart(self, victim: str, seconds: float) -> None:
        self._kill(victim)
        self._dead[victim] = None
        self._later(seconds, lambda: self._start_again(victim))

    def _stop(self, victim: str, seconds: float) -> None:
        self._hold(victim)
        self._swarm.network.stop(victim)
        self._later(seconds, lambda: self._release(victim))

    def _start_again(self, victim: str) -> None:
        if victim in self._dead:
            del self._dead[victim]
            self._held.discard(victim)
            self._audit.back(victim)
            self._note(victim, "started again")
            self._swarm.start_again(victim)

    def _partition(self, victims: Sequence[str], seconds: float) -> None:
        self._cut = tuple(victims)
        for victim in victims:
            self._hold(victim, figures=len(victims) == 1)
        self._swarm.network.partition(victims)
        self._later(seconds, self._heal)

    def _heal(self) -> None:
        cut, self._cut = self._cut, ()
        if cut:
            self._swarm.network.heal()
            for victim in cut:
                self._release(victim)

    def _slow(self, victim: str, factor: float, seconds: float) -> None:
        if victim in self._swarm.machines:
            self._swarm.slow(victim, factor)
            self._later(seconds, lambda: self._swarm.slow(victim, 1.0))

    def _make_corrupt(self, victim: str, what: str, seconds: float) -> None:
        if what == "base":
            if victim in self._swarm.peers and flip_base_bit(self._swarm, victim, self._rng):
                self._audit.corrupted(victim)
        else:
            self._corrupt[victim] = what
            self._later(seconds, lambda: self._corrupt.pop(victim, None))

    def _disconnect(self, victim: str, other: str | None = None) -> None:
        other = other or self._rng.choice(self._others_there(victim))
        self._note(victim, f"loses its connection to {other}")
        self._swarm.network.disconnect(victim, other)

    def _others_there(self, victim: str) -> list[str]:
        return sorted(name for name in self._swarm.nodes if name != victim and name not in self._held)

    def _join(self, victim: str) -> None:
        self._joined += 1
        self._audit.joined(now(), victim)
        self._start(victim)

    def _leave(self, victim: str, seconds: float) -> None:
        """Ask the peer to leave; start it again `seconds` later (0: never)."""

        def gone(task: asyncio.Task[None]) -> None:
            self._swarm.network.kill(victim)
            if seconds and not self._over:
                self._dead[victim] = None
                self._later(seconds, lambda: self._start_again(victim))

        self._swarm.nodes.pop(victim)
        self._swarm.peers.pop(victim).leave()
        self._swarm.tasks[victim].add_done_callback(gone)

    def _hold(self, victim: str, figures: bool = True) -> None:
        self._held.add(victim)
        if figures and victim in self._swarm.peers:
            self._audit.gone(now(), victim)

    def _release(self, victim: str) -> None:
        if victim in self._held and victim in self._swarm.nodes:
            self._held.discard(victim)
            self._audit.back(victim)
            self._note(victim, "continues")
            self._swarm.network.resume(victim)

    def _note(self, peer: str, text: str) -> None:
        self.last_s = now()
        self._tell(peer, text)


def flip_base_bit(swarm: VirtualSwarm, name: str, rng: random.Random) -> bool:
    """Flip one bit of the peer's base in memory. Return False if it has no base."""
    replica = swarm.peers[name].replica
    if not replica.has_base:
        return False
    values = replica.base.values.copy()
    place = rng.randrange(values.size)
    values[place : place + 1].view(np.uint32)[0] ^= np.uint32(1 << rng.randrange(20))
    values.flags.writeable = False
    replica.store.replace(replace(replica.base, values=values))
    return True


def now() -> float:
    """Return the virtual time in seconds."""
    return asyncio.get_running_loop().time()
