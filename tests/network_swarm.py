"""Real peers, started as a user starts them, for the tests that kill them. Each process is ended, by pid, after its test."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from spes_p2p.cli import main
from spes_p2p.net.die_with_parent import under_guard
from spes_p2p.observe.events import Evaluated, RoundCommitted
from spes_p2p.observe.history import read_history

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_TIMEOUT_S = 90.0
CHILDREN_END_WITHIN_S = 30.0
COMMAND_TIMEOUT_S = 300.0
"""Bounds a command or an HTTP request that should end at once: what hangs is found, what is slow passes."""
BUSY_FACTOR = 4.0
"""A machine that does something else too takes this many times as long."""
ADDRESS = re.compile(r'(?:(?:^|")spes-p2p join| as) (/ip4/[\d.]+/tcp/\d+/p2p/\w+)(?:"|$)', re.MULTILINE)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}


def write_variant(campaign: Path, file_name: str, **sections: dict[str, Any]) -> Path:
    """Another campaign file beside `campaign`, with these fields changed."""
    raw = yaml.safe_load(campaign.read_text())
    for section, fields in sections.items():
        raw[section] = {**raw.get(section, {}), **fields}
    variant = campaign.with_name(file_name)
    variant.write_text(yaml.safe_dump(raw, sort_keys=False))
    return variant


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    stdout: str
    stderr: str


def call(*arguments: str) -> Ended:
    """Run a command in this process: the same entry point, without seconds of imports."""
    importlib.import_module("spes_p2p.session.run")  # what libraries print while they load is not the command's
    root, ours = logging.getLogger(), logging.getLogger("spes_p2p")
    handlers, levels, argv = root.handlers[:], (root.level, ours.level), sys.argv
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["spes-p2p", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code: int | str | None = 0
    except SystemExit as done:
        code = done.code
    finally:
        root.handlers[:], sys.argv = handlers, argv
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
    assert code is None or isinstance(code, int)
    return Ended(code or 0, out.getvalue(), err.getvalue())


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, look_at: Iterable[LocalPeer] = ()) -> None:
    """Look again until the condition holds; an AssertionError that shows the peers' logs when it does not in time.

    `timeout_s` is what two cores need at most that do nothing else.
    """
    timeout_s *= BUSY_FACTOR
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            logs = "".join(f"\n--- {peer.name}: {peer.process.poll()}\n{peer.log[-3000:]}" for peer in look_at)
            raise AssertionError(f"not within {timeout_s:g} s: {what}{logs}")
        time.sleep(0.05)


def free_port() -> int:
    """A port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class LocalPeer:
    """One process with its run-dir."""

    name: str
    run_dir: Path
    process: subprocess.Popen[bytes]
    log_start: int

    @property
    def log(self) -> str:
        """What this process printed, without earlier lives of the run-dir."""
        return self._log_file.read_bytes()[self.log_start :].decode(errors="replace")

    @property
    def _log_file(self) -> Path:
        return self.run_dir.with_suffix(".log")

    @property
    def address(self) -> str:
        """As it printed it; empty before that."""
        found = ADDRESS.search(self.log)
        return found[1] if found else ""

    @property
    def peer_id(self) -> str:
        return self.address.rsplit("/", 1)[-1]

    @property
    def metrics_url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", self.log)
        return found.group() if found else ""

    @property
    def commits(self) -> dict[int, RoundCommitted]:
        """Rounds that it committed, in all of its lives."""
        return {event.round: event for event in self.events(RoundCommitted)}

    @property
    def round(self) -> int:
        return max(self.commits, default=-1)

    def events(self, kind: type[Any]) -> list[Any]:
        path = self.run_dir / "history.jsonl"
        return [entry.event for entry in read_history(path) if isinstance(entry.event, kind)] if path.exists() else []

    def children(self) -> list[psutil.Process]:
        """Its p2pd and whatever else it started."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


@dataclass
class LocalPeers:
    """Peers of one campaign on loopback. Leaving the block ends them all and checks that nothing of theirs is left."""

    folder: Path
    niceness: int = 0
    """Above 0: these peers let others have the cores first."""
    data_dir: Path | None = None
    """Where trainers find token files: the campaign's folder, as soon as its bootstrap peer was started."""
    peers: dict[str, LocalPeer] = field(default_factory=dict)

    def __enter__(self) -> LocalPeers:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(*(name for name, peer in self.peers.items() if peer.is_running))

    def __getitem__(self, name: str) -> LocalPeer:
        return self.peers[name]

    @property
    def trainers(self) -> list[LocalPeer]:
        """Those that run."""
        return [peer for name, peer in self.peers.items() if name != "bootstrap" and peer.is_running]

    def bootstrap(self, config: Path, listen: str = LOOPBACK, *options: str) -> LocalPeer:
        """Start the bootstrap peer and wait until it says its address."""
        self.data_dir = self.data_dir or config.parent
        peer = self.run("bootstrap", ["bootstrap", "--config", str(config), "--listen", listen, *options])
        self.wait(lambda: peer.address or not peer.is_running, START_TIMEOUT_S, "the bootstrap says its address")
        assert peer.address, peer.log
        return peer

    def join(self, name: str, address: str, *options: str, cwd: Path = ROOT) -> LocalPeer:
        """Start a trainer; does not wait for it."""
        if self.data_dir is not None and "--data-dir" not in options:
            options = ("--data-dir", str(self.data_dir), *options)
        return self.run(name, ["join", address, "--listen", LOOPBACK, *options], cwd)

    def run(
        self,
        name: str,
        arguments: list[str],
        cwd: Path = ROOT,
        program: tuple[str, str] = ("-m", "spes_p2p"),
        run_dir_option: bool = True,
        before: tuple[str, ...] = (),
    ) -> LocalPeer:
        """Start a command on the run-dir of this name; one without `run_dir_option` has none.

        `program` is what Python runs. `before` stands before the whole command: what runs it elsewhere.
        """
        run_dir, log = self.folder / name, self.folder / f"{name}.log"
        log_start = log.stat().st_size if log.exists() else 0
        guard = under_guard()
        python = ["nice", "-n", str(self.niceness), *guard, sys.executable]
        command = [*before, *python, *program, *arguments, *(("--run-dir", str(run_dir)) if run_dir_option else ())]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=ENVIRONMENT, cwd=cwd
            )
        self.peers[name] = LocalPeer(name, run_dir, process, log_start)
        return self.peers[name]

    def kill(self, *names: str) -> None:
        """SIGKILL, all at once; their children must be gone soon after."""
        children = [child for name in names for child in self[name].children()]
        for name in names:
            self[name].process.send_signal(signal.SIGKILL)
        for name in names:
            self[name].process.wait()
        _expect_gone(children)

    def terminate(self, name: str, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        children = self[name].children()
        self[name].process.send_signal(signal.SIGTERM)
        self.wait(lambda: not self[name].is_running, timeout_s, f"{name} leaves")
        _expect_gone(children)
        return self[name].process.wait()

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """As `wait_until`, with the logs of all."""
        wait_until(condition, timeout_s, what, self.peers.values())

    def wait_for_round(self, number: int, timeout_s: float = 60.0, among: Iterable[LocalPeer] | None = None) -> None:
        """Until all running trainers (or those given) have committed it."""
        peers = self.trainers if among is None else list(among)
        assert peers, "no trainer runs"
        names = [peer.name for peer in peers]
        self.wait(lambda: all(peer.round >= number for peer in peers), timeout_s, f"round {number} at {names}")

    def newest_round(self) -> int:
        return max(peer.round for peer in self.peers.values())

    def commit(self, number: int) -> RoundCommitted:
        """The record of a round, from whoever has it."""
        return next(peer.commits[number] for peer in self.peers.values() if number in peer.commits)

    def digests(self) -> dict[int, set[str]]:
        """For each round the digests that anybody ever wrote down."""
        found: dict[int, set[str]] = {}
        for peer in self.peers.values():
            for event in peer.events(RoundCommitted):
                found.setdefault(event.round, set()).add(event.base_digest)
        return found

    def held_out_losses(self) -> list[float]:
        """By round."""
        losses = {event.round: event.validation_loss for peer in self.peers.values() for event in peer.events(Evaluated)}
        return [losses[number] for number in sorted(losses)]


def _expect_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=CHILDREN_END_WITHIN_S)
    for process in alive:
        process.kill()
    assert not alive, f"left behind: {alive}"
