"""A virtual swarm whose peers keep histories and fetch from each other what they lack, as in a session."""

from __future__ import annotations

import asyncio
from pathlib import Path

from spes_p2p.messages.methods import HISTORY
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.events import Event
from spes_p2p.observe.history import HISTORY_FILE, History
from spes_p2p.observe.rounds import totals_of
from spes_p2p.peer.history_sync import fill_history, serving
from spes_p2p.testing.simulate.swarm import Recorder, VirtualSwarm, campaign


def damage(folder: Path, marked: bytes) -> None:
    """Overwrite the first byte of the journal's lines that contain this."""
    path = folder / HISTORY_FILE
    path.write_bytes(b"".join(b"?" + line[1:] if marked in line else line for line in path.read_bytes().splitlines(True)))


class Remembering(Recorder):
    """A recorder that keeps a history too."""

    def __init__(self, history: History):
        super().__init__()
        self.history = history

    def record(self, event: Event) -> None:
        super().record(event)
        self.history.record(event)


class RememberingSwarm(VirtualSwarm):
    """Peers that keep histories, as in a session."""

    def __init__(self, folder: Path, total_steps: int = 60):
        super().__init__(campaign(total_steps))
        self.folder = folder
        self.histories: dict[str, History] = {}

    def prepare(self, name: str) -> None:
        self.histories[name] = History(name, self.folder / name, lambda: asyncio.get_running_loop().time())
        self.recorders[name] = Remembering(self.histories[name])

    async def attach(self, name: str) -> None:
        node, history = self.nodes[name], self.histories[name]
        await node.endpoint.serve(HISTORY, serving(history.rounds, lambda: asyncio.get_running_loop().time()))
        self.network.run_peer(name, fill_history(node, history))

    async def begin(self, names: str = "ABC") -> None:
        for name in ("W", *names):
            self.prepare(name)
        self.start_all(names)
        for name in ("W", *names):
            await self.attach(name)

    async def join(self, name: str) -> None:
        self.prepare(name)
        self.start(name)
        await self.attach(name)

    async def join_as_helper(self, name: str) -> None:
        """Start another bootstrap peer, which the genesis commit does not name."""
        first, self.bootstrap = self.bootstrap, name
        self.prepare(name)
        self.start_bootstrap()
        self.bootstrap = first
        await self.attach(name)

    async def restart_damaged(self, name: str, marked: bytes) -> None:
        """Restart it on a journal in which the lines that contain this are damaged."""
        self.kill(name)
        damage(self.folder / name, marked)
        self.prepare(name)
        self.start_again(name)
        await self.attach(name)

    def records(self, name: str) -> dict[int, RoundRecord]:
        return {record.round: record for record in self.histories[name].rounds.records}

    def credits_all(self, name: str, rounds: int) -> bool:
        """Does this peer know rounds 0 to `rounds`, and credit all tokens of the base?"""
        records = self.records(name)
        totals = totals_of(records.values())
        return records.keys() >= set(range(rounds + 1)) and totals.tokens == records[totals.round].total_tokens
