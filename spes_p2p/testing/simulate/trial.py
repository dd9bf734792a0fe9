"""Stop a process at a named point of a round, and make it send corrupt bytes.

The simulation and its peers share a folder. An order to stop at a point is a file there; a peer that reaches the point takes
the order by renaming the file, which only one peer can do, and stops itself with SIGSTOP. `trial_peer.py` is the program of
such a peer.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from spes_p2p.messages.framing import Kind
from spes_p2p.net.interfaces import Channel, Handler, Transport, World
from spes_p2p.observe.events import Event
from spes_p2p.storage.interfaces import Draft, Store
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.corruption import corrupted
from spes_p2p.testing.simulate.points import point_of_event, point_of_frame, point_of_write
from spes_p2p.testing.wrapped import Wrapped

ANYBODY, TAKEN, CORRUPT = "anybody", "taken", "corrupt"


class Orders:
    """The simulation's side: gives orders."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir()

    def stop_at(self, point: str, peer: str | None, skip: int) -> int:
        """Order this peer, or the first there (None), to stop at the point after `skip` passes; return the order's number."""
        number = next(self._numbers)
        (self._folder / f"{number}.{skip}.{point}.{peer or ANYBODY}").touch()
        return number

    def taken(self) -> list[tuple[int, str]]:
        """Return the orders taken since the last call, each with the peer that has stopped or is about to."""
        found = []
        for path in sorted(self._folder.glob(f"{TAKEN}.*")):
            _, number, peer = path.name.split(".")
            path.unlink()
            found.append((int(number), peer))
        return found

    def withdraw(self, numbers: Iterable[int]) -> None:
        """Cancel these orders; `taken` still returns one that was taken before."""
        for number in numbers:
            for path in self._folder.glob(f"{number}.*"):
                path.unlink(missing_ok=True)

    def corrupt(self, peer: str, what: str) -> None:
        """Make this peer send frames with this corruption until `cure`."""
        (self._folder / f"{CORRUPT}.{peer}").write_text(what)

    def cure(self, peer: str) -> None:
        """End the corruption of the peer's frames."""
        (self._folder / f"{CORRUPT}.{peer}").unlink(missing_ok=True)


class Trial:
    """A peer's side: follows orders."""

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._rng = random.Random(name)

    def around(self, world: World) -> World:
        """Wrap the world to stop at points and to corrupt frames as ordered."""
        transport, store = _WatchedTransport(world.transport, self), _WatchedStore(world.store, self)
        return replace(world, transport=cast(Transport, transport), store=cast(Store, store))

    def observe(self, event: Event) -> None:
        """Stop if there is an order for the event's point."""
        self.reached(point_of_event(event))

    def reached(self, point: str | None) -> None:
        """Stop if there is an order for this point."""
        for order in os.listdir(self._folder) if point is not None else ():
            words = order.split(".")
            if len(words) == 4 and words[2] == point and words[3] in (self._name, ANYBODY):
                self._take(order, *words)

    def sent(self, frame: Frame, pieces: tuple[bytes | memoryview, ...]) -> tuple[int, tuple[bytes | memoryview, ...]]:
        """Return kind and pieces to send in place of the frame."""
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


class _WatchedTransport(Wrapped):
    def __init__(self, inner: Transport, trial: Trial):
        super().__init__(inner)
        self._trial = trial

    async def serve(self, method: str, handler: Handler) -> None:
        def serve_watched(channel: Channel) -> Awaitable[None]:
            return handler(cast(Channel, _WatchedChannel(channel, self._trial, self.peer_id, method, is_answer=True)))

        await self._inner.serve(method, serve_watched)

    async def open(self, peer: str, method: str) -> Channel:
        channel = await self._inner.open(peer, method)
        return cast(Channel, _WatchedChannel(channel, self._trial, self.peer_id, method, is_answer=False))


class _WatchedChannel(Wrapped):
    def __init__(self, inner: Channel, trial: Trial, me: str, method: str, is_answer: bool):
        super().__init__(inner)
        self._trial = trial
        self._frame = Frame(me, inner.remote, method, is_answer, 0, b"")

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        frame = replace(self._frame, body=b"".join(pieces), kind=kind)
        self._trial.reached(point_of_frame(frame))
        kind, pieces = self._trial.sent(frame, pieces)
        self._frame = replace(self._frame, index=self._frame.index + 1)
        await self._inner.send(*pieces, kind=kind)


class _WatchedStore(Wrapped):
    def __init__(self, inner: Store, trial: Trial):
        super().__init__(inner)
        self._trial = trial

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._trial.reached(point_of_write(name))
        self._inner.write(name, chunks)

    def draft(self, name: str) -> Draft:
        return cast(Draft, _WatchedDraft(self._inner.draft(name), self._trial, name))

    def append(self, name: str, record: bytes) -> None:
        self._trial.reached(point_of_write(name))
        self._inner.append(name, record)

    def replace_log(self, name: str, records: Iterable[bytes]) -> None:
        self._trial.reached(point_of_write(name))
        self._inner.replace_log(name, records)


class _WatchedDraft(Wrapped):
    def __init__(self, inner: Draft, trial: Trial, name: str):
        super().__init__(inner)
        self._trial, self._name = trial, name

    def publish(self) -> None:
        self._trial.reached(point_of_write(self._name))
        self._inner.publish()
