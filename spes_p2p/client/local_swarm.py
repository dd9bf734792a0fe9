"""`spes-p2p swarm`: a bootstrap peer and trainers as processes on this machine.

Slow imports are inside functions, so that the peers start before them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.data.local_files import check_local
from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Role
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.net.die_with_parent import under_guard
from spes_p2p.observe.events import Evaluated, RoundCommitted
from spes_p2p.observe.history import Entry, read_history
from spes_p2p.observe.plot import plot_loss
from spes_p2p.observe.table import SwarmView
from spes_p2p.observe.units import counted, human_bytes, human_loss
from spes_p2p.session.run_dir import ADDRESS_FILE
from spes_p2p.storage.files import alone_in

BOOTSTRAP = "bootstrap"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TRAINER_BYTES, BOOTSTRAP_BYTES = 700_000_000, 300_000_000
"""Main memory of one peer with the demo's model: a trainer takes 0.6 to 0.9 GB, mostly for torch, a bootstrap peer 0.25 GB."""
START_TIMEOUT_S = 90.0
LEAVE_TIMEOUT_S = 30.0
POLL_S = 1.0


@dataclass(frozen=True)
class Summary:
    """Result of a swarm run; written to summary.json."""

    peers: int
    rounds: int
    """Rounds that moved weights; round 0 is not counted."""
    tokens: int
    val_loss_first: float | None
    val_loss_last: float | None
    val_round_last: int | None
    """The last round in the base of that loss."""
    digests_equal: bool
    bytes_sent: int
    bytes_received: int
    seconds: float
    failed_peers: tuple[str, ...]


async def run_swarm(
    config_path: Path, peers: int, run_dir: Path, rounds: int | None, on_started: Callable[[], None]
) -> Summary:
    """Run until the campaign is complete, `rounds` are committed, or every trainer has ended. Raises UserError.

    `on_started` is called before anything is shown.
    """
    if peers < 1:
        raise UserError(f"--peers {peers}: a swarm needs at least one trainer")
    if rounds is not None and rounds < 1:
        raise UserError(f"--rounds {rounds}: give at least 1, or leave it out for the whole campaign")
    files = read_campaign(config_path)
    needed = files.campaign.config.sync.min_peers
    if peers < needed:
        raise UserError(f"--peers {peers}: the campaign starts with sync.min_peers = {needed} trainers; give at least {needed}")
    check_memory(peers, psutil.virtual_memory().available)
    for manifest in files.manifests:
        check_local(manifest, files.folders)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be a run-dir ({error.strerror}); choose another --run-dir") from None
    with alone_in(run_dir, "stop the swarm that runs there, or choose another --run-dir"):
        return await _run(config_path, files, peers, run_dir, rounds, on_started)


async def _run(
    config_path: Path, files: CampaignFiles, peers: int, run_dir: Path, rounds: int | None, on_started: Callable[[], None]
) -> Summary:
    needed = files.campaign.config.sync.min_peers
    started = time.monotonic()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    stopped = asyncio.Event()
    try:
        processes[BOOTSTRAP] = start_peer(run_dir, BOOTSTRAP, ["bootstrap", "--config", str(config_path)])
        address = await _address(run_dir / BOOTSTRAP, processes[BOOTSTRAP])
        invited = [await _invited(files.campaign.config.admission, run_dir, number) for number in range(peers)]
        processes.update(start_trainers(address, run_dir, files.folders, invited))
        for number in (signal.SIGINT, signal.SIGTERM):  # before, they end the command at once: there is nothing to summarise
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await _watch(processes, address, run_dir, rounds, needed, stopped, on_started)
    finally:
        failed = await _end(processes)
    summary = summarise(run_dir, [f"peer-{i}" for i in range(peers)], time.monotonic() - started, failed)
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def check_memory(peers: int, available: int) -> None:
    """Raise UserError if this machine's free memory, in bytes, does not hold the processes of this many trainers."""
    fit = max(0, (available - BOOTSTRAP_BYTES) // TRAINER_BYTES)
    if peers > fit:
        advice = f"give at most {fit}" if fit else "free some"
        raise UserError(
            f"--peers {peers}: {human_bytes(available)} of memory are free, a trainer takes {human_bytes(TRAINER_BYTES)} or "
            f"more, a bootstrap peer {human_bytes(BOOTSTRAP_BYTES)}; {advice}"
        )


def start_trainers(
    address: str, run_dir: Path, folders: Sequence[Path], invited: Sequence[Sequence[str]]
) -> dict[str, subprocess.Popen[bytes]]:
    """Start trainers, spread over this machine's GPUs; return the processes by name.

    `folders` hold their token files. `invited`: the further options of each. Each gets an equal share of its device's free
    memory, all of which it would otherwise claim before the others start.
    """
    from spes_p2p.campaign.free_memory import choose_devices, measured

    devices = choose_devices("auto")
    devices = choose_devices("all") if devices[0].type == "cuda" else devices
    free = [measured([device]).memory for device in devices]
    common = [part for folder in folders for part in ("--data-dir", str(folder))]
    processes = {}
    for number, its_options in enumerate(invited):
        place = number % len(devices)
        on_it = len(range(place, len(invited), len(devices)))
        device = "cpu" if devices[place].type == "cpu" else str(place)
        options = ["--devices", device, "--memory", f"{free[place] // on_it}B", *its_options, *common]
        processes[f"peer-{number}"] = start_peer(run_dir, f"peer-{number}", ["join", address, *options])
    return processes


async def _invited(admission: str, run_dir: Path, number: int) -> Sequence[str]:
    """Return the options by which a trainer joins: in an open campaign as one that the owner vouches for."""
    if admission == "friends":
        return ()
    return await invited_by(run_dir / BOOTSTRAP, own_peer_id(run_dir / f"peer-{number}") if admission == "open" else "")


def own_peer_id(folder: Path) -> str:
    """Return the id of the peer with this run-dir; make run-dir and key before its first start."""
    from spes_p2p.net.identity import RSAIdentity

    folder.mkdir(exist_ok=True)
    return RSAIdentity(folder / "identity.key").peer_id


async def invited_by(bootstrap: Path, elector: str) -> tuple[str, str]:
    """Return the option that joins with an invitation by the owner, whose bootstrap peer has this run-dir.

    `elector`: the peer that may also vote; empty: whoever has the invitation may train.
    """
    from spes_p2p.campaign.invitations import LONGEST_S, Guest, to_text
    from spes_p2p.client.invite import make_invitation

    roles: tuple[Role, ...] = ("trainer", "elector") if elector else ("trainer",)
    made, _ = await make_invitation(str(bootstrap), bootstrap / "identity.key", Guest(elector, roles, LONGEST_S))
    return "--invite", to_text(made)


def summarise(run_dir: Path, names: list[str], seconds: float, failed: tuple[str, ...]) -> Summary:
    """Merge the peers' histories and plot the loss."""
    paths = {name: run_dir / name / "history.jsonl" for name in names}
    histories = {name: read_history(path) for name, path in paths.items() if path.exists()}
    events = {name: [entry.event for entry in history] for name, history in histories.items()}
    commits = {name: [e for e in found if isinstance(e, RoundCommitted)] for name, found in events.items()}
    everything = [event for found in commits.values() for event in found]
    held_out = {e.round: e.validation_loss for found in events.values() for e in found if isinstance(e, Evaluated)}
    newest = max((event.round for event in everything), default=-1)
    digests: dict[int, set[str]] = {}
    for event in everything:
        digests.setdefault(event.round, set()).add(event.base_digest)
    _plot(histories, run_dir)
    return Summary(
        peers=len(names),
        rounds=max(0, newest),
        tokens=max((event.total_tokens for event in everything), default=0),
        val_loss_first=held_out[min(held_out)] if held_out else None,
        val_loss_last=held_out[max(held_out)] if held_out else None,
        val_round_last=max(held_out, default=None),
        digests_equal=bool(digests) and all(len(found) == 1 for found in digests.values()),
        bytes_sent=sum(event.sent_bytes for event in everything),
        bytes_received=sum(event.received_bytes for event in everything),
        seconds=round(seconds, 1),
        failed_peers=failed,
    )


def start_peer(
    run_dir: Path, name: str, arguments: list[str], listen: str = LOOPBACK, before: Sequence[str] = (),
    program: Sequence[str] = ("spes_p2p",),
) -> subprocess.Popen[bytes]:
    """Start one peer with one compute thread and its log in its run-dir; it dies with this process.

    `before`: a command prefix such as `ip netns exec NAME`. `program`: the Python module to run, with its first arguments.
    """
    folder = run_dir / name
    folder.mkdir(exist_ok=True)
    (folder / ADDRESS_FILE).unlink(missing_ok=True)
    command = [sys.executable, "-m", *program, *arguments, "--run-dir", str(folder), "--listen", listen]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    guard = under_guard()
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen([*before, *guard, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)


async def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait for the bootstrap peer's address."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (folder / ADDRESS_FILE).exists():
            return (folder / ADDRESS_FILE).read_text().strip()
        if process.poll() is not None:
            raise UserError(f"the bootstrap peer ended at once: {last_line(folder / 'log.txt')}")
        await asyncio.sleep(0.1)
    raise UserError(f"the bootstrap peer gave no address within {START_TIMEOUT_S:.0f} s; see {folder / 'log.txt'}")


async def _watch(
    processes: dict[str, subprocess.Popen[bytes]], address: str, run_dir: Path, rounds: int | None, needed: int,
    stopped: asyncio.Event, on_started: Callable[[], None],
) -> None:
    """Show the swarm until the run ends. Raises UserError if fewer trainers are left than the first round needs."""
    from spes_p2p.client.connection import connect

    async with connect([address]) as swarm:
        last_seen: list[PeerStatus] = []
        on_started()
        with SwarmView() as view:
            while not stopped.is_set():
                statuses: list[PeerStatus] = await swarm.statuses()
                notes = [
                    f"{name} ended with code {process.returncode}: {last_line(run_dir / name / 'log.txt')}"
                    for name, process in processes.items()
                    if process.poll() not in (None, 0)
                ]
                last_seen = _with_the_finished(last_seen, statuses)
                if last_seen:
                    view.update([in_these_rounds(status, rounds) for status in last_seen], notes)
                trainers = [process for name, process in processes.items() if name != BOOTSTRAP]
                left = sum(process.poll() is None for process in trainers)
                if not left or processes[BOOTSTRAP].poll() is not None:
                    return
                if left < needed and statuses and not any(status.round > 0 for status in statuses):
                    raise UserError("; ".join([f"{counted(left, 'trainer')} left, the first round needs {needed}", *notes]))
                committed = [status.round for status in statuses if status.role == "trainer"]
                if rounds is not None and committed and min(committed) >= rounds:
                    return
                await asyncio.sleep(POLL_S)


def in_these_rounds(status: PeerStatus, rounds: int | None) -> PeerStatus:
    """Return the status with progress and time left of these rounds, where they are fewer than the campaign's."""
    if rounds is None or rounds >= status.total_rounds:
        return status
    rounds = max(rounds, status.round)
    share = (rounds - status.round) / max(1, status.total_rounds - status.round)
    return replace(status, total_rounds=rounds, seconds_left=share * status.seconds_left)


def _with_the_finished(before: list[PeerStatus], now: list[PeerStatus]) -> list[PeerStatus]:
    """Return the latest answers, with the last status of trainers that left because the campaign is complete."""
    answering = {status.peer_id for status in now}
    finished = [s for s in before if s.role == "trainer" and s.peer_id not in answering and s.round >= s.total_rounds]
    complete = any(s.role == "trainer" and s.round >= s.total_rounds for s in (*before, *now))
    gone = [s for s in before if s.peer_id not in answering and s not in finished] if complete else []
    return [*now, *finished, *gone]


async def _end(processes: dict[str, subprocess.Popen[bytes]]) -> tuple[str, ...]:
    """Ask all peers to leave, trainers first; return the names of those that failed."""
    failed = [name for name, process in processes.items() if process.poll() not in (None, 0)]
    for names in ([name for name in processes if name != BOOTSTRAP], [BOOTSTRAP]):
        running = [processes[name] for name in names if name in processes and processes[name].poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return tuple(failed)


def _plot(histories: dict[str, list[Entry]], run_dir: Path) -> None:
    events = [entry.event for history in histories.values() for entry in history]
    if any(isinstance(event, RoundCommitted) and math.isfinite(event.loss) for event in events):
        plot_loss(histories, run_dir / "loss.png", f"{run_dir.name}: loss against tokens")


def last_line(path: Path) -> str:
    """Return the last line of a log, which tells why its process ended."""
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][-300:] if lines else "no message"


def closing_line(summary: Summary) -> str:
    """Return the result for a person. The held-out loss of the last base is known only after its round."""
    done = f"{counted(summary.rounds, 'round')}, {summary.tokens} tokens in {summary.seconds:.0f} s"
    loss = summary.val_loss_last
    held_out = "" if loss is None else f"; held-out loss {human_loss(loss)} (round {summary.val_round_last})"
    return f"{done}{held_out}; digests {'equal on all peers' if summary.digests_equal else 'NOT EQUAL'}"


def is_good(summary: Summary) -> bool:
    """Return whether no peer failed, all digests agree and all losses are finite."""
    return summary.digests_equal and not summary.failed_peers and all(
        loss is None or math.isfinite(loss) for loss in (summary.val_loss_first, summary.val_loss_last)
    )

