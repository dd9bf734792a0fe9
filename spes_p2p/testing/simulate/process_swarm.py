"""The peers of a simulation as processes on this machine: what starts them, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from spes_p2p.campaign.files import read_campaign
from spes_p2p.client.local_swarm import BOOTSTRAP, START_TIMEOUT_S, invited_by, last_line, own_peer_id, start_peer
from spes_p2p.errors import UserError
from spes_p2p.session.run_dir import ADDRESS_FILE
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.namespaces import Namespaces
from spes_p2p.testing.simulate.scenario import WARM_ROUNDS, Scenario
from spes_p2p.testing.simulate.trial_peer import trial_program

POLL_S = 0.2
LEAVE_TIMEOUT_S, CHILDREN_END_WITHIN_S = 60.0, 5.0
BOOTSTRAP_PORT = 31337
ORDERS_FOLDER = "orders"


@dataclass
class Process:
    """A peer: its latest process, and how much of its history was read."""

    name: str
    folder: Path
    peer_id: str
    process: subprocess.Popen[bytes]
    round: int = -2
    read: int = 0
    is_wanted: bool = True
    """Whether it must run: it is no attacker, and neither killed nor asked to leave."""
    memory_before: int = 0
    """Resident bytes of its process and its children after the first rounds, and the most since."""
    memory_most: int = 0


class ProcessSwarm:
    """A bootstrap peer and trainers, each with a run-dir of its own."""

    def __init__(self, scenario: Scenario, config: Path, run_dir: Path, machines: Namespaces | None, audit: Audit):
        """`machines`: a network namespace for each peer; without, all have the loopback interface."""
        self.peers: dict[str, Process] = {}
        self.audit = audit
        self.orders_folder = run_dir.resolve() / ORDERS_FOLDER
        self._scenario, self._config, self._run_dir, self._machines = scenario, config, run_dir, machines
        self._folders = read_campaign(config).folders
        self._children: set[psutil.Process] = set()
        self._port = BOOTSTRAP_PORT if machines is not None else _free_port()
        self._address = ""
        self._began = time.time()

    def now_s(self, at: float | None = None) -> float:
        """Return the seconds since the start, of now or of this Unix time."""
        return (time.time() if at is None else at) - self._began

    def start_all(self) -> None:
        """Start the bootstrap peer and the scenario's trainers. Raises UserError."""
        self.start(BOOTSTRAP)
        self._address = self._read_address(self.peers[BOOTSTRAP])
        for name in self._scenario.peer_names:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a peer, or start it again on its run-dir."""
        if name == BOOTSTRAP:
            self._spawn(BOOTSTRAP, ["bootstrap", "--config", str(self._config)], self._port)
            return
        experts = self._scenario.machine(name).experts
        options = ["--experts", str(experts)] if experts is not None else []
        if name in self._scenario.vouched:
            options += asyncio.run(invited_by(self.peers[BOOTSTRAP].folder, self._identity(name)))
        options += [part for folder in self._folders for part in ("--data-dir", str(folder))]
        self._spawn(name, ["join", self._address, *options], 0)

    def _spawn(self, name: str, arguments: list[str], port: int) -> None:
        known = self.peers.get(name)
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
            self.audit.liars |= {peer_id}
        program = trial_program(self.orders_folder, latency_s, attack, self._config)
        process = start_peer(self._run_dir, name, arguments, f"/ip4/{host}/tcp/{port}", before, program)
        if known is not None:
            known.process, known.is_wanted = process, attack is None
        else:
            self.peers[name] = Process(name, folder, peer_id, process, is_wanted=attack is None)

    def _identity(self, name: str) -> str:
        """Return a peer's id; make its run-dir and key before its first start."""
        return own_peer_id(self._run_dir / name)

    def _read_address(self, bootstrap: Process) -> str:
        """Wait for the bootstrap peer's address."""
        address, deadline = bootstrap.folder / ADDRESS_FILE, time.monotonic() + START_TIMEOUT_S
        while not address.exists() or not address.read_text().endswith("\n"):
            if bootstrap.process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the bootstrap peer does not start: {last_line(bootstrap.folder / 'log.txt')}")
            time.sleep(POLL_S)
        return address.read_text().strip()

    def trainers(self) -> list[Process]:
        """Return the trainers that must run."""
        return [peer for name, peer in self.peers.items() if name != BOOTSTRAP and peer.is_wanted]

    def honest(self) -> list[Process]:
        """Return the peers that are no attackers."""
        return [peer for peer in self.peers.values() if peer.peer_id not in self.audit.liars]

    def note_children(self, peer: Process) -> None:
        """Remember the peer's children, and how much memory they and it have."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(peer.process.pid)
            children = process.children(recursive=True)
            self._children |= set(children)
            if peer.round >= WARM_ROUNDS:
                resident = sum(each.memory_info().rss for each in (process, *children))
                peer.memory_before = peer.memory_before or resident
                peer.memory_most = max(peer.memory_most, resident)

    def has_left(self, peer: Process) -> bool:
        """Wait for a peer that was asked to leave."""
        try:
            peer.process.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if peer.peer_id not in self.audit.liars:
                self.audit.violated(self.now_s(), "stuck", f"{peer.name} does not leave within {LEAVE_TIMEOUT_S:g} s")
            return False
        return True

    def end(self) -> int:
        """Ask all peers to leave, trainers first; return how many of their processes survive, and kill those."""
        for bootstrap in (False, True):
            running = [p for name, p in self.peers.items() if (name == BOOTSTRAP) is bootstrap and p.process.poll() is None]
            for peer in running:
                self.note_children(peer)
                peer.process.send_signal(signal.SIGCONT)
                peer.process.send_signal(signal.SIGTERM)
            for peer in running:
                if not self.has_left(peer):
                    peer.process.kill()
                    peer.process.wait()
        _, alive = psutil.wait_procs(self._children, timeout=CHILDREN_END_WITHIN_S)
        for child in alive:
            child.kill()
        return len(alive)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
