"""The processes of a peer with several devices: started by the peer, one for each device but the first, and dead with it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.errors import Broken, first_line
from spes_p2p.net.die_with_parent import die_with
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.ranks import ALONE, Command, RankLost, Ranks, meet
from spes_p2p.training.trainer import TorchTrainer, no_base

DYING_S = 5.0
"""How long to wait for the process whose end broke a connection."""
READY = "ready"


@dataclass(frozen=True)
class _Follower:
    """Another rank, as rank 0 sees it."""

    name: str
    process: SpawnProcess
    pipe: Connection

    def error(self, why: str) -> Broken:
        """Return the error that ends the peer."""
        return Broken(f"--devices: {self.name} ended: {why}; this peer stops; start it again on its run-dir, without this "
                         "device if it repeats")

    def ending(self) -> str | None:
        """Return why the process ended or is about to; None if it runs, or ended because another one did."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                message: str = self.pipe.recv()
                if message != READY:
                    return message
        code = self.process.exitcode or 0  # None while it runs
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}" if code else None


class Leader(Ranks):
    """Rank 0 of several, in the peer's own process.

    When a follower ends, or a step fails here, the call under way or the next one raises Broken, which ends the peer.
    """

    def __init__(
        self, devices: Sequence[torch.device], config: CampaignConfig, options: TrainingOptions, folder: Path,
        niceness: int = 0,
    ):
        """Start the followers. They die with this thread, which must be the main one. `folder`: on this machine, empty."""
        super().__init__(0, len(devices))
        self._device, self._meeting, self._is_closing = devices[0], folder / "meeting", False
        self._niceness = niceness
        self._failure: Broken | None = None
        """The first error after which the ranks are no longer at the same step."""
        self._followers = [
            self._start(rank, device, config, options) for rank, device in enumerate(devices) if rank > 0
        ]

    def meet(self) -> None:
        """Wait until all ranks are connected; takes seconds."""
        with self.explained():
            for follower in self._followers:
                message = follower.pipe.recv()
                if message != READY:
                    raise follower.error(message)
            _share_threads(self._device, self.count)
            meet(0, self.count, self._device, self._meeting)
        threading.Thread(target=self._abort_when_one_ends, daemon=True).start()

    def tell(self, command: Command) -> None:
        """See Ranks."""
        self.check()
        with self.explained():
            for follower in self._followers:
                follower.pipe.send(command)

    @property
    def processes(self) -> list[SpawnProcess]:
        """The followers' processes."""
        return [follower.process for follower in self._followers]

    @property
    def is_whole(self) -> bool:
        """Whether all followers run."""
        return all(process.is_alive() for process in self.processes)

    def check(self) -> None:
        """See Ranks."""
        if self._failure is None and not self.is_whole:
            self.lost(EOFError("a rank ended"))
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See Ranks."""
        try:
            yield
        except Exception as error:
            if self._failure is None:
                reason = first_line(error)
                self._failure = Broken(f"--devices: rank 0 ({self._device}) failed: {reason}; this peer stops; start it again "
                                       "on its run-dir, without this device if it repeats")
            raise self._failure from error

    def lost(self, error: Exception) -> Exception:
        """Return the error that names the rank that ended first."""
        self._failure = self._failure or self._why_lost(error)
        return self._failure

    def _why_lost(self, error: Exception) -> Broken:
        ended = wait([process.sentinel for process in self.processes], DYING_S)
        for process in self.processes:
            if process.sentinel in ended:
                process.join(DYING_S)  # the sentinel comes a moment before the exit code
        for follower in self._followers:
            why = follower.ending()
            if why is not None:
                return follower.error(why)
        why = str(error).partition("\n")[0]
        return Broken(f"--devices: the ranks lost their connection ({why}); start this peer again on its run-dir")

    def close(self) -> None:
        """End the followers."""
        self._is_closing = True
        for follower in self._followers:
            follower.process.kill()
            follower.process.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, rank: int, device: torch.device, config: CampaignConfig, options: TrainingOptions) -> _Follower:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        job = _Job(rank, self.count, device, self._meeting, os.getpid(), config, options, self._niceness)
        process = context.Process(target=_follow, args=(job, there), daemon=True)
        process.start()
        there.close()
        return _Follower(f"rank {rank} ({device})", process, here)

    def _abort_when_one_ends(self) -> None:
        """A collective between GPUs would otherwise wait for the rank that ended."""
        wait([process.sentinel for process in self.processes])
        if not self._is_closing and dist.group.WORLD is not None:
            dist.group.WORLD.abort()


@contextlib.asynccontextmanager
async def started(
    devices: Sequence[torch.device], config: CampaignConfig, options: TrainingOptions, niceness: int = 0
) -> AsyncIterator[Ranks]:
    """Run the other ranks of a peer with these devices during the block, with this niceness. Raises Broken if one ends."""
    if len(devices) == 1:
        yield ALONE
        return
    with tempfile.TemporaryDirectory(prefix="spes-ranks-") as folder:
        leader = Leader(devices, config, options, Path(folder), niceness)
        try:
            await asyncio.to_thread(leader.meet)
            yield leader
        finally:
            leader.close()


@dataclass(frozen=True)
class _Job:
    """What a follower is."""

    rank: int
    count: int
    device: torch.device
    meeting: Path
    parent: int
    config: CampaignConfig
    options: TrainingOptions
    niceness: int = 0


def _follow(job: _Job, pipe: Connection) -> None:
    """Be a follower until rank 0 ends or kills this process."""
    die_with(job.parent)
    os.nice(job.niceness)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's, which leaves after its step
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(job, pipe)
    except (EOFError, ConnectionError, RankLost):
        return
    except Exception as error:
        reason = first_line(error)
        with contextlib.suppress(OSError):
            pipe.send(reason)
        os._exit(1)  # the teardown of libraries may wait for the other ranks


def _serve(job: _Job, pipe: Connection) -> None:
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    _share_threads(job.device, job.count)
    ranks = Ranks(job.rank, job.count)
    pipe.send(READY)
    with ranks.explained():
        meet(job.rank, job.count, job.device, job.meeting)
    base = no_base(job.config.model)
    trainer = TorchTrainer(job.config, base, (), None, None, job.device, job.options, ranks)
    while True:
        trainer.follow(pipe.recv())


def _share_threads(device: torch.device, count: int) -> None:
    """Divide this machine's cores among ranks that compute on it."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
