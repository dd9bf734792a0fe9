"""What a simulation cannot do to a process from outside: meet it at a named point of a round, and make it send wrong bytes.

The simulation and its peers share a folder. An order to stop at a point is a file there; the peer that comes to the point takes
the order (a rename: only one can) and stops itself, as SIGSTOP would. `trial_peer.py` is the program of such a peer.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from spes_p2p.messages.framing import Kind, Message
from spes_p2p.net.interfaces import Channel, Handler, Transport, World
from spes_p2p.observe.events import Event
from spes_p2p.storage.interfaces import Draft, Store
from spes_p2p.testing.memory import Frame
from spes_p2p.testing.simulate.corruption import corrupted
from spes_p2p.testing.simulate.points import point_of_event, point_of_frame, point_of_write
from spes_p2p.testing.wrapped import WrappedTransport

ANYBODY, TAKEN, CORRUPT = "anybody", "taken", "corrupt"


class Orders:
    """The simulation's side."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir()

    def stop_at(self, point: str, peer: str | None, skip: int) -> int:
        """This peer, or whoever comes first (None), stops at the point once it was reached `skip` times. The order's number."""
        number = next(self._numbers)
        (self._folder / f"{number}.{skip}.{point}.{peer or ANYBODY}").touch()
        return number

    def taken(self) -> list[tuple[int, str]]:
        """Orders that were followed since the last call, with the peer that has stopped itself (or is about to)."""
        found = []
        for path in sorted(self._folder.glob(f"{TAKEN}.*")):
            _, number, peer = path.name.split(".")
            path.unlink()
            found.append((int(number), peer))
        return found

    def withdraw(self, numbers: Iterable[int]) -> None:
        """These orders hold no longer; one that was taken a moment ago still comes back from `taken`."""
        for number in numbers:
            for path in self._folder.glob(f"{number}.*"):
                path.unlink(missing_ok=True)

    def corrupt(self, peer: str, what: str) -> None:
        """From now on this peer's frames are wrong in this way, until `cure`."""
        (self._folder / f"{CORRUPT}.{peer}").write_text(what)

    def cure(self, peer: str) -> None:
        """It sends what it means again."""
        (self._folder / f"{CORRUPT}.{peer}").unlink(missing_ok=True)


class Trial:
    """A peer's side. It is an observer too."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._rng = random.Random(name)

    def around(self, world: World) -> World:
        """The same world, watched for points, with frames changed as ordered."""
        return replace(world, transport=_WatchedTransport(world.transport, self), store=_WatchedStore(world.store, self))

    def tell(self, event: Event) -> None:
        """Something happens to the peer."""
        self.reached(point_of_event(event))

    def reached(self, point: str | None) -> None:
        """Stand still when there is an order for this point."""
        for order in os.listdir(self._folder) if point is not None else ():
            words = order.split(".")
            if len(words) == 4 and words[2] == point and words[3] in (self._name, ANYBODY):
                self._take(order, *words)

    def sent(self, frame: Frame, pieces: tuple[bytes | memoryview, ...]) -> tuple[int, tuple[bytes | memoryview, ...]]:
        """Kind and pieces of what leaves instead of this frame with these pieces."""
        with suppress(FileNotFoundError):
            if what := (self._folder / f"{CORRUPT}.{self._name}").read_text():
                frame = corrupted(replace(frame, body=b"".join(pieces)), what, self._rng)
                return frame.kind, (frame.body,)
        return frame.kind, pieces

    def _take(self, order: str, number: str, skip: str, point: str, peer: str) -> None:
        after = f"{number}.{int(skip) - 1}.{point}.{peer}" if int(skip) else f"{TAKEN}.{number}.{self._name}"
        with suppress(FileNotFoundError):
            os.rename(self._folder / order, self._folder / after)
            if not int(skip):
                os.kill(os.getpid(), signal.SIGSTOP)


class _WatchedTransport(WrappedTransport):
    def __init__(self, inner: Transport, trial: Trial):
        super().__init__(inner)
        self._trial = trial

    async def serve(self, method: str, handler: Handler) -> None:
        await self._inner.serve(
            method, lambda channel: handler(_WatchedChannel(channel, self._trial, self.peer_id, method, is_answer=True))
        )

    async def open(self, peer: str, method: str) -> Channel:
        channel = await self._inner.open(peer, method)
        return _WatchedChannel(channel, self._trial, self.peer_id, method, is_answer=False)


class _WatchedChannel:
    def __init__(self, inner: Channel, trial: Trial, me: str, method: str, is_answer: bool):
        self.remote = inner.remote
        self._inner, self._trial = inner, trial
        self._frame = Frame(me, inner.remote, method, is_answer, 0, b"")

    def watch(self, heard: Callable[[], None]) -> None:
        self._inner.watch(heard)

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        frame = replace(self._frame, kind=kind)
        self._trial.reached(point_of_frame(frame))
        kind, pieces = self._trial.sent(frame, pieces)
        self._frame = replace(self._frame, index=self._frame.index + 1)
        await self._inner.send(*pieces, kind=kind)

    async def receive(self) -> Message | None:
        return await self._inner.receive()

    async def finish(self) -> None:
        await self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()


class _WatchedStore:
    def __init__(self, inner: Store, trial: Trial):
        self._inner, self._trial = inner, trial

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._trial.reached(point_of_write(name))
        self._inner.write(name, chunks)

    def draft(self, name: str) -> Draft:
        return _WatchedDraft(self._inner.draft(name), self._trial, name)

    def read(self, name: str) -> memoryview | None:
        return self._inner.read(name)

    def append(self, name: str, record: bytes) -> None:
        self._trial.reached(point_of_write(name))
        self._inner.append(name, record)

    def records(self, name: str) -> list[bytes]:
        return self._inner.records(name)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def names(self, prefix: str) -> list[str]:
        return self._inner.names(prefix)

    def scratch(self, name: str, elements: int) -> np.ndarray:
        return self._inner.scratch(name, elements)


class _WatchedDraft:
    def __init__(self, inner: Draft, trial: Trial, name: str):
        self._inner, self._trial, self._name = inner, trial, name

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self._inner.write(offset, data)

    def read(self, offset: int, length: int) -> bytes:
        return self._inner.read(offset, length)

    def view(self) -> memoryview:
        return self._inner.view()

    def publish(self) -> None:
        self._trial.reached(point_of_write(self._name))
        self._inner.publish()
