"""The slow form of the simulator: a bootstrap peer and trainers as processes on this machine, with kill -9, SIGSTOP and so on.

Faults strike at a random moment of a round, or when a peer reaches a named point: there it stops itself (`trial.py`) until the
simulation has acted. The peers' histories are the only source of events; the rules are those of the virtual form (`audit.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from spes_p2p.campaign.files import read_campaign
from spes_p2p.client.local_swarm import BOOTSTRAP, START_TIMEOUT_S, invited_by, last_line, start_peer
from spes_p2p.errors import UserError
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.observe.events import Evaluated, RoundCommitted
from spes_p2p.observe.history import HISTORY_FILE, Entry, read_history
from spes_p2p.session.run_dir import ADDRESS_FILE
from spes_p2p.testing.attacks.kinds import KINDS as ATTACK_KINDS
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.decisions import Held, commits_of, compare
from spes_p2p.testing.simulate.faults import CORRUPTIONS, KINDS, Fault, SwarmView, random_fault
from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable
from spes_p2p.testing.simulate.points import IMMEDIATELY
from spes_p2p.testing.simulate.report import Attacked, RunReport, banned_in
from spes_p2p.testing.simulate.scenario import WARM_ROUNDS, Scenario
from spes_p2p.testing.simulate.slowing import Slowing
from spes_p2p.testing.simulate.trial import Orders
from spes_p2p.testing.simulate.trial_peer import LIES_FILE, trial_program

VIRTUAL_ONLY, NOT_CORRUPTIBLE = "disconnect", "base"
"""The connections and the memory of a process cannot be changed from outside."""
SYBILS = "sybils"
"""The kind of attackers with several identities: a process for each is too much for one machine."""
STUCK_S = 180.0
QUIET_ROUNDS = 2
"""Rounds that every trainer must commit after the last fault."""
POLL_S, SETTLED_S = 0.2, 0.5
LEAVE_TIMEOUT_S, CHILDREN_END_WITHIN_S, STOPS_WITHIN_S = 60.0, 5.0, 2.0
DURATIONS_S = (1.0, 4.0, 8.0, 15.0)
"""Durations of random faults, or seconds until a new start."""
LATE_ROUNDS = 3
"""A round may have passed a fault's point when the order arrives; the fault may strike this many rounds later."""
BOOTSTRAP_PORT = 31337
ORDERS_FOLDER, FAULTS_FILE = "orders", "faults.txt"


def possible(scenario: Scenario) -> Scenario:
    """Return the scenario with the kinds of random faults and attacks that are possible here.

    Raises UserError for an impossible fault, or attack that was named.
    """
    if SYBILS in scenario.attacks and scenario.attacks != ATTACK_KINDS:
        raise UserError(f"--attacks {SYBILS}: takes too many processes; use --virtual")
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
    return replace(scenario, kinds=kinds, attacks=tuple(kind for kind in scenario.attacks if kind != SYBILS))


def run_processes(
    scenario: Scenario, config: Path, run_dir: Path, seed: int, on_round: Callable[[int, int], None]
) -> tuple[RunReport, list[dict[str, float]]]:
    """Run until the rounds are committed by all, or a peer makes no progress; return results and held-out losses by round.

    Raises UserError.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"--run-dir {run_dir}: not empty; name a new folder")
    run_dir.mkdir(parents=True, exist_ok=True)
    uses_partitions = "partition" in scenario.kinds or any(fault.kind == "partition" for fault in scenario.faults)
    with contextlib.closing(Namespaces()) if uses_partitions else contextlib.nullcontext() as machines:
        run = _Run(scenario, config, run_dir, seed, machines, on_round)
        try:
            run.main()
        finally:
            run.end()
    return run.result()


@dataclass
class _Process:
    """A peer: its latest process, and how much of its history was read."""

    name: str
    folder: Path
    peer_id: str
    process: subprocess.Popen[bytes]
    round: int = -2
    read: int = 0
    entries: list[Entry] = field(default_factory=list)
    is_wanted: bool = True
    """Whether it must run: it is no attacker, and neither killed nor asked to leave."""
    memory_before: int = 0
    """Resident bytes of its process and its children after the first rounds, and the most since."""
    memory_most: int = 0


class _Run:
    """One swarm of processes and its faults."""

    def __init__(
        self,
        scenario: Scenario,
        config: Path,
        run_dir: Path,
        seed: int,
        machines: Namespaces | None,
        on_round: Callable[[int, int], None],
    ):
        self._scenario, self._config, self._run_dir = scenario, config, run_dir
        self._seed, self._machines, self._on_round = seed, machines, on_round
        self._folders = read_campaign(config).folders
        self._rng = random.Random(f"processes/{seed}")
        self._audit = Audit(0, overlap=scenario.overlap)
        self._peers: dict[str, _Process] = {}
        self._children: set[psutil.Process] = set()
        self._struck: Counter[str] = Counter()
        self._struck_at: Counter[str] = Counter()
        self._losses: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._bases: list[Held] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._orders = Orders(run_dir / ORDERS_FOLDER)
        self._armed: dict[int, Fault] = {}
        """By number of the order that stops a peer at the fault's point."""
        self._held: set[str] = set()
        self._stopped: set[str] = set()
        self._slowed: dict[str, Slowing] = {}
        self._script = sorted(scenario.faults, key=lambda fault: fault.round)
        self._planned_for = 0
        self._joined = 0
        self._over = False
        self._orphans = 0
        self._cut: tuple[str, ...] = ()
        self._address = ""
        self._began = time.time()
        self._last_fault_s = 0.0

    def main(self) -> None:
        """Start all peers, let the faults strike, and wait until all peers have continued."""
        self._port = BOOTSTRAP_PORT if self._machines is not None else _free_port()
        self._start(BOOTSTRAP)
        self._address = self._read_address(self._peers[BOOTSTRAP])
        for name in self._scenario.peer_names:
            self._start(name)
        if self._until(lambda: self._audit.newest_round >= self._scenario.rounds):
            self._lift()
            goal = self._audit.newest_round + QUIET_ROUNDS
            self._until(lambda: all(peer.round >= goal for peer in self._trainers()))

    def end(self) -> None:
        """Ask all peers to leave, trainers first; compare what they decided, and count processes that survive."""
        self._over = True
        self._let_go()
        for bootstrap in (False, True):
            running = [p for name, p in self._peers.items() if (name == BOOTSTRAP) is bootstrap and p.process.poll() is None]
            for peer in running:
                self._note_children(peer)
                peer.process.send_signal(signal.SIGCONT)
                peer.process.send_signal(signal.SIGTERM)
            for peer in running:
                if not self._has_left(peer):
                    peer.process.kill()
                    peer.process.wait()
        logs = {peer.name: commits_of(peer.folder) for peer in self._honest()}
        compare(self._audit, self._now(), logs, self._bases)
        _, alive = psutil.wait_procs(self._children, timeout=CHILDREN_END_WITHIN_S)
        self._orphans = len(alive)
        for child in alive:
            child.kill()

    def result(self) -> tuple[RunReport, list[dict[str, float]]]:
        """Return the results and the held-out losses; what was pending when the peers left counts as lost."""
        violations = tuple(self._audit.violations)
        figures = self._audit.figures(pending_tokens=0)
        report = RunReport(
            self._seed, figures, violations, dict(self._struck), dict(self._struck_at), self._orphans,
            attacked=self._attacked() if self._scenario.attackers else None,
        )
        losses = [
            {"round": number, "total_tokens": self._tokens[number], "loss": loss}
            for number, loss in sorted(self._losses.items())
            if number in self._tokens
        ]
        return report, losses

    def _attacked(self) -> Attacked:
        honest, liars = self._honest(), self._audit.liars
        banned = banned_in(commit for peer in honest for commit in commits_of(peer.folder)[-1:])
        told = [self._peers[name].folder / LIES_FILE for name in self._scenario.liars if name in self._peers]
        return Attacked(
            self._scenario.attack, self._losses.get(self._scenario.rounds),
            max(peer.memory_most - peer.memory_before for peer in honest),
            sum(len(path.read_text().splitlines()) for path in told if path.exists()),
            attackers_banned=len(banned & liars), honest_banned=len(banned - liars),
        )

    # Processes

    def _read_address(self, bootstrap: _Process) -> str:
        """Wait for the bootstrap peer's address."""
        address, deadline = bootstrap.folder / ADDRESS_FILE, time.monotonic() + START_TIMEOUT_S
        while not address.exists() or not address.read_text().endswith("\n"):
            if bootstrap.process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the bootstrap peer does not start: {last_line(bootstrap.folder / 'log.txt')}")
            time.sleep(POLL_S)
        return address.read_text().strip()

    def _start(self, name: str) -> None:
        if name == BOOTSTRAP:
            self._spawn(BOOTSTRAP, ["bootstrap", "--config", str(self._config)], self._port)
            return
        experts = self._scenario.machine(name).experts
        options = ["--experts", str(experts)] if experts is not None else []
        if name in self._scenario.vouched:
            options += asyncio.run(invited_by(self._peers[BOOTSTRAP].folder, self._identity(name)))
        options += [part for folder in self._folders for part in ("--data-dir", str(folder))]
        self._spawn(name, ["join", self._address, *options], 0)

    def _spawn(self, name: str, arguments: list[str], port: int) -> None:
        known = self._peers.get(name)
        host, before = "127.0.0.1", list[str]()
        if self._machines is not None:
            if known is None:
                link = self._scenario.machine(name).bandwidth_bytes_per_s or self._scenario.bandwidth_bytes_per_s
                self._machines.add(name, link)
            host, before = self._machines.address(name), self._machines.command(name)
        folder, peer_id = self._run_dir / name, self._identity(name)
        machine = self._scenario.machine(name)
        latency_s = self._scenario.latency_s if machine.latency_s is None else machine.latency_s
        attack = self._scenario.attack if name in self._scenario.liars else None
        if attack is not None:
            self._audit.liars |= {peer_id}
        program = trial_program(self._run_dir.resolve() / ORDERS_FOLDER, latency_s, attack, self._config)
        process = start_peer(self._run_dir, name, arguments, f"/ip4/{host}/tcp/{port}", before, program)
        if known is not None:
            known.process, known.is_wanted = process, attack is None
        else:
            self._peers[name] = _Process(name, folder, peer_id, process, is_wanted=attack is None)

    def _identity(self, name: str) -> str:
        """Return a peer's id; make its run-dir and key before its first start."""
        folder = self._run_dir / name
        folder.mkdir(exist_ok=True)
        return RSAIdentity(folder / "identity.key").peer_id

    def _trainers(self) -> list[_Process]:
        return [peer for name, peer in self._peers.items() if name != BOOTSTRAP and peer.is_wanted]

    def _honest(self) -> list[_Process]:
        return [peer for peer in self._peers.values() if peer.peer_id not in self._audit.liars]

    def _note_children(self, peer: _Process) -> None:
        """Remember the peer's children, and how much memory they and it have."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(peer.process.pid)
            children = process.children(recursive=True)
            self._children |= set(children)
            if peer.round >= WARM_ROUNDS:
                resident = sum(each.memory_info().rss for each in (process, *children))
                peer.memory_before = peer.memory_before or resident
                peer.memory_most = max(peer.memory_most, resident)

    def _has_left(self, peer: _Process) -> bool:
        """Wait for a peer that was asked to leave."""
        try:
            peer.process.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if peer.peer_id not in self._audit.liars:
                self._audit.violated(self._now(), "stuck", f"{peer.name} does not leave within {LEAVE_TIMEOUT_S:g} s")
            return False
        return True

    # Watching

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if a peer ends, or makes no progress."""
        moved: dict[str, tuple[int, float]] = {}
        while not condition():
            time.sleep(POLL_S)
            self._read_histories()
            self._strike_reached()
            self._strike_due()
            for peer in self._trainers():
                if peer.name not in moved or moved[peer.name][0] != peer.round:
                    moved[peer.name] = peer.round, self._now()
                if self._now() - max(moved[peer.name][1], self._last_fault_s) > STUCK_S:
                    rounds = {each.name: each.round for each in self._trainers()}
                    text = f"{peer.name} makes no progress for {STUCK_S:g} s; rounds: {rounds}"
                    self._audit.violated(self._now(), "stuck", text)
                    return False
            for peer in self._peers.values():
                if peer.is_wanted and peer.process.poll() is not None:
                    text = f"{peer.name} ended with code {peer.process.returncode}: {last_line(peer.folder / 'log.txt')}"
                    self._audit.violated(self._now(), "error", text)
                    return False
                if peer.is_wanted:
                    self._note_children(peer)
        return True

    def _read_histories(self) -> None:
        """Pass the events up to a moment ago to the audit, in order of time."""
        until, found = time.time() - SETTLED_S, list[tuple[float, _Process, Entry]]()
        for peer in self._peers.values():
            path = peer.folder / HISTORY_FILE
            if not path.exists():
                continue
            entries = read_history(path)
            fresh = [entry for entry in entries[peer.read :] if entry.time <= until]
            peer.read += len(fresh)
            found += [(entry.time, peer, entry) for entry in fresh]
        for at, peer, entry in sorted(found, key=lambda item: item[0]):
            self._observed(at - self._began, peer, entry)

    def _observed(self, at_s: float, peer: _Process, entry: Entry) -> None:
        event, before = entry.event, self._audit.newest_round
        if peer.peer_id in self._audit.liars:
            return
        self._audit.observed(at_s, peer.peer_id, event)
        if isinstance(event, RoundCommitted):
            self._audit.num_experts = len(event.owners)
            self._bases.append(Held(at_s, peer.name, event.round, event.base_digest))
            peer.round = event.round
            self._tokens[event.round] = event.total_tokens
        if isinstance(event, Evaluated):
            self._losses[event.round] = event.validation_loss
        if self._audit.newest_round > before:
            self._on_round(min(self._audit.newest_round, self._scenario.rounds), self._scenario.rounds)
            self._plan_faults(self._audit.newest_round + 1)

    def _now(self) -> float:
        return time.time() - self._began

    # Faults

    def _plan_faults(self, number: int) -> None:
        """Schedule the faults of the next round, each at its point or at a random moment of the round."""
        if self._over or number < 1:
            return
        self._disarm(order for order, fault in self._armed.items() if fault.round + LATE_ROUNDS < number)
        due = [fault for fault in self._script if fault.round <= number]
        del self._script[: len(due)]
        if self._scenario.kinds and self._rng.random() < self._scenario.fault_rate:
            fault = random_fault(self._rng, self._scenario.kinds, self._scenario.points or (IMMEDIATELY,), self._view(number))
            if fault is not None:
                due.append(self._as_of_processes(fault))
        for fault in due:
            if fault.at == IMMEDIATELY:
                self._later(fault.delay_s, partial(self._strike, fault))
            else:
                self._armed[self._orders.stop_at(fault.at, fault.reached_by, fault.skip)] = fault

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
        known = self._audit.measured.round_s[-5:]
        return sorted(known)[len(known) // 2] if known else 5.0

    def _view(self, number: int) -> SwarmView:
        free = tuple(peer.name for peer in self._trainers() if peer.name not in self._held)
        return SwarmView(number, free, len(self._scenario.peer_names), None, f"joiner-{self._joined}")

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((time.time() + seconds, what))

    def _strike_due(self) -> None:
        now = time.time()
        due = [what for at, what in self._due if at <= now]
        self._due = [(at, what) for at, what in self._due if at > now]
        for what in due:
            what()

    def _strike_reached(self) -> None:
        """Let faults strike whose points were reached; continue the peers that stopped there, unless the fault stops them."""
        for order, name in self._orders.taken():
            fault, peer = self._armed.pop(order, None), self._peers[name]
            _wait_until_stopped(peer.process)
            if fault is not None and fault.delay_s:
                self._later(fault.delay_s, partial(self._strike, fault, name))
            elif fault is not None:
                self._strike(fault, name)
            if name not in self._stopped:
                peer.process.send_signal(signal.SIGCONT)

    def _strike(self, fault: Fault, reached_by: str | None = None) -> None:
        free = self._view(0).trainers
        victims = fault.peers or ((reached_by,) if reached_by else (self._rng.choice(free),) if free else ())
        if fault.kind == "partition" and not fault.is_scripted:
            victims = tuple(name for name in victims if self._peers[name].round >= 0)  # a joiner would find no peer
            victims = victims[: max(1, (len(free) - 1) // 2)]
        if self._over or not victims or (fault.kind != "join" and not set(victims) <= {*free, BOOTSTRAP} - self._held):
            return
        if fault.kind == "join" and not self._peers.keys().isdisjoint(victims):  # drawn before an earlier joiner had joined
            return
        if fault.kind == "partition" and self._cut:
            return
        self._struck[fault.kind] += 1
        self._struck_at[fault.at] += 1
        with (self._run_dir / FAULTS_FILE).open("a") as log:
            log.write(f"{self._now():.1f} {replace(fault, peers=victims)}, {fault.seconds:g} s\n")
        self._last_fault_s = self._now()
        handlers: dict[str, Callable[[tuple[str, ...], Fault], None]] = {
            "kill": self._kill, "restart": self._restart, "stop": self._stop, "slow": self._slow, "corrupt": self._corrupt,
            "partition": self._partition, "join": self._join, "leave": self._leave,
        }
        handlers[fault.kind](victims, fault)

    def _kill(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            peer = self._hold(name, is_gone=True)
            self._note_children(peer)
            peer.is_wanted = False
            peer.process.kill()
            peer.process.wait()

    def _restart(self, victims: tuple[str, ...], fault: Fault) -> None:
        self._kill(victims, fault)
        for name in victims:
            self._later(fault.seconds, partial(self._start_again, name))

    def _start_again(self, name: str) -> None:
        if not self._peers[name].is_wanted:
            self._release(name)
            self._start(name)

    def _stop(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            self._stopped.add(name)
            self._hold(name, is_gone=True).process.send_signal(signal.SIGSTOP)
            self._later(fault.seconds, partial(self._continue, name))

    def _continue(self, name: str) -> None:
        self._release(name)
        self._stopped.discard(name)
        self._peers[name].process.send_signal(signal.SIGCONT)

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
            self._start(name)
            self._audit.joined(self._now(), self._peers[name].peer_id)

    def _leave(self, victims: tuple[str, ...], fault: Fault) -> None:
        for name in victims:
            peer = self._hold(name)
            self._note_children(peer)
            peer.is_wanted = False
            peer.process.send_signal(signal.SIGTERM)
            if fault.seconds:
                self._later(fault.seconds, partial(self._return, name))

    def _return(self, name: str) -> None:
        """Start a peer that left again, once its process has ended."""
        if self._has_left(self._peers[name]):
            self._start_again(name)

    def _hold(self, name: str, is_gone: bool = False) -> _Process:
        """Exempt a peer from other faults. `is_gone`: the others lose it."""
        peer = self._peers[name]
        self._held.add(name)
        if is_gone:
            self._audit.gone(self._now(), peer.peer_id)
        return peer

    def _release(self, name: str) -> None:
        self._held.discard(name)
        self._audit.back(self._peers[name].peer_id)
        self._last_fault_s = self._now()

    def _lift(self) -> None:
        """End all faults and let no other strike; killed peers that restart do so now."""
        self._over = True
        self._let_go()
        due, self._due = self._due, []
        for _, what in due:
            what()

    def _let_go(self) -> None:
        """Withdraw all orders, and continue the peers that are stopped at a point."""
        self._disarm(self._armed)
        self._strike_reached()


def _wait_until_stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait until a peer that announced its stop has stopped: an earlier SIGCONT would be lost."""
    deadline = time.monotonic() + STOPS_WITHIN_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
