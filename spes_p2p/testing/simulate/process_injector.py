"""Inject faults into a swarm of processes: at a random moment of a round, or when a peer reaches a named point."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from spes_p2p.client.local_swarm import BOOTSTRAP
from spes_p2p.errors import UserError
from spes_p2p.testing.attacks.kinds import ATTACKS
from spes_p2p.testing.attacks.kinds import KINDS as ATTACK_KINDS
from spes_p2p.testing.simulate.faults import CORRUPTIONS, KINDS, Fault, SwarmView, random_fault
from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable
from spes_p2p.testing.simulate.points import IMMEDIATELY
from spes_p2p.testing.simulate.process_swarm import Process, ProcessSwarm
from spes_p2p.testing.simulate.scenario import Scenario
from spes_p2p.testing.simulate.slowing import Slowing
from spes_p2p.testing.simulate.trial import Orders

VIRTUAL_ONLY, NOT_CORRUPTIBLE = "disconnect", "base"
"""The connections and the memory of a process cannot be changed from outside."""
STOPS_WITHIN_S = 2.0
DURATIONS_S = (1.0, 4.0, 8.0, 15.0)
"""Durations of random faults, or seconds until a new start."""
LATE_ROUNDS = 3
"""A round may have passed a fault's point when the order arrives; the fault may strike this many rounds later."""


def possible(scenario: Scenario) -> Scenario:
    """Return the scenario with the kinds of random faults and attacks that are possible here.

    Raises UserError for an impossible fault, or attack that was named.
    """
    many = [kind for kind in scenario.attacks if ATTACKS[kind].identities > 1]
    if many and scenario.attacks != ATTACK_KINDS:
        raise UserError(f"--attacks {many[0]}: takes too many processes; use --virtual")
    if scenario.churn:
        raise UserError("--churn: takes hours in real time; use --virtual")
    blocked = why_unavailable()
    for fault in scenario.faults:
        if fault.kind == "corrupt" and fault.what == NOT_CORRUPTIBLE:
            raise UserError(f"{fault}: the memory of a process cannot be changed from outside; use --virtual")
        if fault.kind == VIRTUAL_ONLY:
            raise UserError(f"{fault}: a process's connections cannot be broken from outside; use --virtual")
        if fault.kind == "partition" and blocked is not None:
            raise UserError(f"{fault}: a partition of processes is not possible here: {blocked}; use --virtual")
    if scenario.are_kinds_chosen and "partition" in scenario.kinds and blocked is not None:
        raise UserError(f"--faults partition: not possible with processes here: {blocked}")
    if scenario.are_kinds_chosen and VIRTUAL_ONLY in scenario.kinds:
        raise UserError(f"--faults {VIRTUAL_ONLY}: a process's connections cannot be broken from outside; use --virtual")
    impossible = {VIRTUAL_ONLY, *(("partition",) if blocked is not None else ())}
    kinds = tuple(kind for kind in KINDS if kind in scenario.kinds and kind not in impossible)
    return replace(scenario, kinds=kinds, attacks=tuple(kind for kind in scenario.attacks if kind not in many))


class ProcessInjector:
    """Orders, starts and ends the faults of one run."""

    def __init__(self, swarm: ProcessSwarm, scenario: Scenario, seed: int, machines: Namespaces | None, log: Path):
        """`log`: the file that gets a line for each fault."""
        self.struck: Counter[str] = Counter()
        """Number of faults that struck, by kind."""
        self.struck_at: Counter[str] = Counter()
        """The same by point."""
        self.last_s = 0.0
        """Time at which a fault last struck or ended."""
        self._swarm, self._scenario, self._machines, self._log = swarm, scenario, machines, log
        self._rng = random.Random(f"processes/{seed}")
        self._script = sorted(scenario.faults, key=lambda fault: fault.round)
        self._orders = Orders(swarm.orders_folder)
        self._armed: dict[int, Fault] = {}
        """By number of the order that stops a peer at the fault's point."""
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._held: set[str] = set()
        self._stopped: set[str] = set()
        self._slowed: dict[str, Slowing] = {}
        self._cut: tuple[str, ...] = ()
        self._joined = 0
        self._over = False

    def plan(self, number: int) -> None:
        """Schedule the faults of the next round, each at its point or at a random moment of the round."""
        if self._over or number < 1:
            return
        self._disarm(order for order, fault in self._armed.items() if fault.round + LATE_ROUNDS < number)
        due = [fault for fault in self._script if fault.round <= number]
        del self._script[: len(due)]
        if self._scenario.kinds and self._rng.random() < self._scenario.fault_rate:
            points = self._scenario.points or (IMMEDIATELY,)
            fault = random_fault(self._rng, self._scenario.kinds, points, self._view(number))
            if fault is not None:
                due.append(self._as_of_processes(fault))
        for fault in due:
            if fault.at == IMMEDIATELY:
                self._later(fault.delay_s, partial(self._strike, fault))
            else:
                self._armed[self._orders.stop_at(fault.at, fault.reached_by, fault.skip)] = fault

    def strike_due(self) -> None:
        """Do what is due by now: faults that strike, and what ends them."""
        now = time.time()
        due = [what for at, what in self._due if at <= now]
        self._due = [(at, what) for at, what in self._due if at > now]
        for what in due:
            what()

    def strike_reached(self) -> None:
        """Let faults strike whose points were reached; continue the peers that stopped there, unless the fault stops them."""
        for order, name in self._orders.taken():
            fault, peer = self._armed.pop(order, None), self._swarm.peers[name]
            _wait_until_stopped(peer.process)
            if fault is not None and fault.delay_s:
                self._later(fault.delay_s, partial(self._strike, fault, name))
            elif fault is not None:
                self._strike(fault, name)
            if name not in self._stopped:
                peer.process.send_signal(signal.SIGCONT)

    def lift(self) -> None:
        """End all faults and let no other strike; killed peers that restart do so now."""
        self.let_go()
        due, self._due = self._due, []
        for _, what in due:
            what()

    def let_go(self) -> None:
        """Let no other fault strike, withdraw all orders, and continue the peers that are stopped at a point."""
        self._over = True
        self._disarm(self._armed)
        self.strike_reached()

    def _as_of_processes(self, fault: Fault) -> Fault:
        """Adapt a random fault to the duration of rounds and the corruptions that are possible here."""
        moment_s = self._rng.random() * self._round_s() if fault.at == IMMEDIATELY else 0.0
        seconds = fault.seconds and self._rng.choice(DURATIONS_S)
        what = self._rng.choice([each for each in CORRUPTIONS if each != NOT_CORRUPTIBLE])
        return replace(fault, delay_s=moment_s, seconds=seconds, what=what)

    def _disarm(self, orders: Iterable[int]) -> None:
        for order in tuple(orders):
            self._armed.pop(order, None)
            self._orders.withdraw([order])

    def _round_s(self) -> float:
        known = self._swarm.audit.measured.round_s[-5:]
        return sorted(known)[len(known) // 2] if known else 5.0

    def _view(self, number: int) -> SwarmView:
        free = tuple(peer.name for peer in self._swarm.trainers() if peer.name not in self._held)
        return SwarmView(number, free, len(self._scenario.peer_names), None, f"joiner-{self._joined}")

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((time.time() + seconds, what))

    def _strike(self, fault: Fault, reached_by: str | None = None) -> None:
        free = self._view(0).trainers
        victims = fault.peers or ((reached_by,) if reached_by else (self._rng.choice(free),) if free else ())
        if fault.kind == "partition" and not fault.is_scripted:
            victims = tuple(name for name in victims if self._swarm.peers[name].round >= 0)  # a joiner would find no peer
            victims = victims[: max(1, (len(free) - 1) // 2)]
        if self._over or not victims or (fault.kind != "join" and not set(victims) <= {*free, BOOTSTRAP} - self._held):
            return
        if fault.kind == "join" and not self._swarm.peers.keys().isdisjoint(victims):
            return  # drawn before an earlier joiner had joined
        if fault.kind == "partition" and self._cut:
            return
        self.struck[fault.kind] += 1
        self.struck_at[fault.at] += 1
        with self._log.open("a") as log:
            log.write(f"{self._swarm.now_s():.1f} {replace(fault, peers=victims)}, {fault.seconds:g} s\n")
        self.last_s = self._swarm.now_s()
        handlers: dict[str, Callable[[tuple[str, ...], Fault], None]] = {
            "kill": self._kill, "restart": self._restart, "stop": self._stop, "slow": self._slow, "corrupt": self._corrupt,
            "partition": self._partition, "join": self._join, "leave": self._leave,
        }
        handlers[fault.kind](victims, fault)

    def _kill(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            peer = self._hold(name, is_gone=True)
            self._swarm.note_children(peer)
            peer.is_wanted = False
            peer.process.kill()
            peer.process.wait()

    def _restart(self, victims: tuple[str, ...], fault: Fault) -> None:
        self._kill(victims, fault)
        for name in victims:
            self._later(fault.seconds, partial(self._start_again, name))

    def _start_again(self, name: str) -> None:
        if not self._swarm.peers[name].is_wanted:
            self._release(name)
            self._swarm.start(name)

    def _stop(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            self._stopped.add(name)
            self._hold(name, is_gone=True).process.send_signal(signal.SIGSTOP)
            self._later(fault.seconds, partial(self._continue, name))

    def _continue(self, name: str) -> None:
        self._release(name)
        self._stopped.discard(name)
        self._swarm.peers[name].process.send_signal(signal.SIGCONT)

    def _slow(self, victims: tuple[str, ...], fault: Fault) -> None:
        """Slow the peers down; since this stops and continues them, no other fault strikes them meanwhile."""
        for name in victims:
            self._slowed[name] = Slowing(self._hold(name).process, fault.factor)
            self._slowed[name].start()
            self._later(fault.seconds, partial(self._speed_up, name))

    def _speed_up(self, name: str) -> None:
        self._slowed.pop(name).end()
        self._release(name)

    def _corrupt(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            self._hold(name)
            self._orders.corrupt(name, fault.what)
            self._later(fault.seconds, partial(self._cure, name))

    def _cure(self, name: str) -> None:
        self._orders.cure(name)
        self._release(name)

    def _partition(self, victims: tuple[str, ...], fault: Fault) -> None:
        assert self._machines is not None
        self._cut = victims
        for name in victims:
            self._hold(name, is_gone=len(victims) == 1)
        self._machines.partition(victims)
        self._later(fault.seconds, self._heal)

    def _heal(self) -> None:
        if self._machines is not None and self._cut:
            self._machines.heal()
            for name in self._cut:
                self._release(name)
            self._cut = ()

    def _join(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            self._joined += 1
            self._swarm.start(name)
            self._swarm.audit.joined(self._swarm.now_s(), self._swarm.peers[name].peer_id)

    def _leave(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            peer = self._hold(name)
            self._swarm.note_children(peer)
            peer.is_wanted = False
            peer.process.send_signal(signal.SIGTERM)
            if fault.seconds:
                self._later(fault.seconds, partial(self._return, name))

    def _return(self, name: str) -> None:
        """Start a peer that left again, once its process has ended."""
        if self._swarm.has_left(self._swarm.peers[name]):
            self._start_again(name)

    def _hold(self, name: str, is_gone: bool = False) -> Process:
        """Exempt a peer from other faults. `is_gone`: the others lose it."""
        peer = self._swarm.peers[name]
        self._held.add(name)
        if is_gone:
            self._swarm.audit.gone(self._swarm.now_s(), peer.peer_id)
        return peer

    def _release(self, name: str) -> None:
        self._held.discard(name)
        self._swarm.audit.back(self._swarm.peers[name].peer_id)
        self.last_s = self._swarm.now_s()


def _wait_until_stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until a peer that announced its stop has stopped: an earlier SIGCONT would be lost."""
    deadline = time.monotonic() + STOPS_WITHIN_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.005)
