"""./tools/bench hostile: what a stranger costs a bootstrap peer, over real libp2p on loopback.

The victim is a bootstrap peer with a tiny campaign, in a process of its own. The attacker, another process with another
identity, does one thing for some seconds; an honest peer pings the victim meanwhile. For each attack: the longest pause of the
victim's event loop, the growth of its memory and of its p2pd's, and the pings' 99th percentile.

`messages`: announcements, votes and commits of 8 MiB (or as much as is taken). `promises`: streams whose first frame claims
8 MiB and never comes. `frames`: empty frames without end. `streams`: a thousand streams at a time without a request.
`records`: registry records of other keys, of other peers, and with a life of a century. `connections`: 3,000 TCP connections at
a time that never say who they are. `scene`: a million empty frames, a thousand streams at a time and 10,000 registry records,
all at once, as much of it as the victim takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import uvloop
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.p2p import PeerID

from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.addresses import host_and_port
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.framing import HEADER, MAX_FRAME_BYTES, Kind
from spes_p2p.messages.methods import ACCEPT, DECIDE, PING, ROUND
from spes_p2p.messages.rounds import Ping
from spes_p2p.net.contacts import registry_key
from spes_p2p.net.libp2p import Libp2p, start_libp2p
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.transport import PROTOCOL_PREFIX
from spes_p2p.peer.announcing import NOTHING_TO_TRAIN
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.peer.life import Peer
from spes_p2p.peer.node import Node
from spes_p2p.rounds.outer import first_base
from spes_p2p.rounds.plan import Rules
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.simulate.swarm import LAYOUT, NUM_SAMPLES, Recorder, campaign

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
LOOK_EVERY_S = 0.02
CONNECTIONS = 3000
SCENE_FRAMES, SCENE_STREAMS, SCENE_RECORDS = 1_000_000, 1000, 10_000
FAILURES = (PeerUnreachable, Refused, OSError, EOFError, asyncio.TimeoutError)
Figures = dict[str, float]


# The victim -------------------------------------------------------------------------------------------------------------


async def victim(folder: Path) -> None:
    """Serve until stdin closes; print the address, then figures for each line of stdin: since the line before."""
    store, the_campaign = DirectoryStore(folder), campaign()
    net = await start_libp2p(folder / "identity.key", LOOPBACK)
    base0 = first_base(np.zeros(LAYOUT.size, np.float32), LAYOUT, the_campaign.config.outer)
    disk = voter_incarnation(store, random.Random(0))
    genesis = make_genesis(the_campaign, net.identity.peer_id, base0, disk)
    save_base_0(store, genesis, base0)
    rules, recorder = Rules(the_campaign.config, the_campaign.hash, NUM_SAMPLES), Recorder()
    node = Node(net.world(store), the_campaign, genesis, rules, "helper", {}, recorder.record)
    living = asyncio.ensure_future(Peer(node, LAYOUT, None, NOTHING_TO_TRAIN, recorder.record, lambda: b"", "here").run())
    meter = Meter(net.daemon_pid)
    measuring = asyncio.ensure_future(meter.run())
    print(net.transport.addresses[0], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(meter.figures()), flush=True)
    measuring.cancel()
    living.cancel()
    await net.close()


class Meter:
    """Pauses of the event loop and growth of memory, between two calls of `figures`."""

    def __init__(self, daemon: int):
        self._daemon = daemon
        self._pause_s = 0.0
        self._before = self._peak = self._memory()
        threading.Thread(target=self._watch, daemon=True).start()

    async def run(self) -> None:
        """Look how late timers are."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)
            self._pause_s = max(self._pause_s, time.monotonic() - began - LOOK_EVERY_S)

    def figures(self) -> Figures:
        """Return pause and growth, and begin anew."""
        grown = [peak - before for peak, before in zip(self._peak, self._before, strict=True)]
        figures = {"pause_s": self._pause_s, "python_mb": grown[0] / 2**20, "p2pd_mb": grown[1] / 2**20}
        self._pause_s, self._before = 0.0, self._memory()
        self._peak = self._before
        return figures

    def _watch(self) -> None:
        while True:
            self._peak = tuple(map(max, self._peak, self._memory()))
            time.sleep(LOOK_EVERY_S)

    def _memory(self) -> tuple[int, ...]:
        return tuple(_resident(pid) for pid in ("self", self._daemon))


def _resident(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


# The attacker -----------------------------------------------------------------------------------------------------------


class Attacker:
    """A stranger with a daemon of its own."""

    def __init__(self, net: Libp2p, address: str):
        self.net, self.address, self.peer = net, address, address.rsplit("/", 1)[1]
        self.counts = {"frames": 0, "streams": 0, "streams_open": 0, "records": 0, "records_stored": 0}

    async def stream(self, method: str) -> Any:
        """Open a raw stream."""
        return await self.net.transport.daemon.open_stream(self.peer, PROTOCOL_PREFIX + method, 5)

    async def messages(self) -> None:
        """Well-formed announcements, votes and commits, as long as a frame may be."""
        intervals = [[0, 1, 2]] * (MAX_FRAME_BYTES // 4 - 100)
        announcement = ["c" * 64, 10, 0, 0, 0.0, "d" * 64, "e" * 64, 0, [0] * 4, 0, 0.0, 0.0, 0.0, None, intervals]
        commit = ["c" * 64, 0, 0, "p" * 64, "", [], [], "d" * 64, 0, 0, ["a"], [], [0, 0, intervals], ["h"], ["h"], ["i" * 16]]
        bodies = {ROUND: announcement, ACCEPT: [[0, "x"], commit], DECIDE: [[[commit, [0, "x"], []]]]}
        while True:
            for method, body in bodies.items():
                with contextlib.suppress(*FAILURES):
                    stream = await self.stream(method)
                    packed = msgpack.packb(body)
                    stream.write(HEADER.pack(Kind.MESSAGE, len(packed)), packed)
                    await asyncio.wait_for(stream.drain(), 5)
                    await asyncio.wait_for(stream.read_exactly(HEADER.size), 30)
                    stream.abort()

    async def promises(self) -> None:
        """Headers of 8 MiB, each with one byte."""
        await self._many(lambda stream: stream.write(HEADER.pack(Kind.MESSAGE, MAX_FRAME_BYTES), b"x"))

    async def streams(self) -> None:
        """Nothing at all in each."""
        await self._many(lambda stream: None)

    async def frames(self) -> None:
        """Frames that say nothing, as fast as they are taken."""
        heartbeats = HEADER.pack(Kind.HEARTBEAT, 0) * 10_000
        while True:
            with contextlib.suppress(*FAILURES):
                stream = await self.stream(ROUND)
                while True:
                    stream.write(heartbeats)
                    await stream.drain()

    async def records(self) -> None:
        """Records that nobody should keep."""
        node, century, owned = self.net.registry.node, get_dht_time() + 1e10, self.net.registry.subkey
        peer, number = PeerID.from_base58(self.peer), 0
        while True:
            keys = [DHTID.generate(source=f"{number}/{i}") for i in range(100)]
            foreign = [b"[owner:ssh-rsa %d]" % (100 * number + i) for i in range(100)]
            for subkeys in ([owned] * 100, foreign):
                await node.protocol.call_store(peer, keys, [bytes(1000)] * 100, century, subkeys)
            number += 1

    async def scene(self) -> None:
        """All at once; print every second what was sent, and what became of it."""
        counts = self.counts
        attacks = [asyncio.ensure_future(each) for each in (self._scene_frames(), self.streams(), self._scene_records())]
        while True:
            await asyncio.sleep(1)
            failed = [str(each.exception()) for each in attacks if each.done() and each.exception() is not None]
            print(json.dumps({**counts, "failed": failed}), flush=True)

    async def _scene_frames(self) -> None:
        some = HEADER.pack(Kind.HEARTBEAT, 0) * 1000
        while self.counts["frames"] < SCENE_FRAMES:
            with contextlib.suppress(*FAILURES):
                stream = await self.stream(ROUND)
                while self.counts["frames"] < SCENE_FRAMES:
                    stream.write(some)
                    await asyncio.wait_for(stream.drain(), 5)
                    self.counts["frames"] += 1000

    async def _scene_records(self) -> None:
        node, owned = self.net.registry.node, self.net.registry.subkey
        peer = PeerID.from_base58(self.peer)
        for number in range(SCENE_RECORDS):
            key, until = DHTID.generate(source=f"scene/{number}"), get_dht_time() + 30
            stored = await node.protocol.call_store(peer, [key], [bytes(1000)], until, [owned])
            self.counts["records"] += 1
            self.counts["records_stored"] += sum(bool(each) for each in stored or ())

    async def connections(self) -> None:
        """Connections, each opened again when the victim closes it."""
        await asyncio.gather(*(self._connect_for_ever() for _ in range(CONNECTIONS)))

    async def _connect_for_ever(self) -> None:
        while True:
            with contextlib.suppress(*FAILURES):
                reader, writer = await asyncio.open_connection(*host_and_port(self.address))
                try:
                    while await reader.read(2**10):
                        pass
                finally:
                    writer.close()
            await asyncio.sleep(0.1)

    async def _many(self, then: Callable[[Any], None]) -> None:
        held = list[Any]()
        while True:
            with contextlib.suppress(*FAILURES):
                stream = await self.stream(PING)
                then(stream)
                held.append(stream)
                self.counts["streams"] += 1
            if len(held) >= SCENE_STREAMS:
                await asyncio.sleep(0.1)
                held.pop(0).abort()
            self.counts["streams_open"] = len(held)


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    name: getattr(Attacker, name) for name in ("messages", "promises", "streams", "frames", "records", "connections", "scene")
}


async def attack(folder: Path, address: str, name: str) -> None:
    """Attack until killed."""
    net = await start_libp2p(folder / f"{name}.key", LOOPBACK, initial_peers=[address])
    await net.registry.get(registry_key(campaign().hash))
    print("attacking", flush=True)
    await ATTACKS[name](Attacker(net, address))


# Measuring --------------------------------------------------------------------------------------------------------------


async def pings(net: Libp2p, peer: str, seconds: float) -> list[float]:
    """Ping as an honest peer does; return how long each took, in seconds, 10 for one that failed."""
    board, took, until = RpcEndpoint(net.transport, 10.0), list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            await board.ask(peer, PING, pack(Ping(-1)), 10.0)
            took.append(time.monotonic() - began)
        except FAILURES:
            took.append(10.0)
        await asyncio.sleep(0.05)
    return took


async def measure(names: list[str], seconds: float) -> dict[str, Figures]:
    """Return the figures of each attack, and of none."""
    report = dict[str, Figures]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "victim").mkdir()
        with _program("victim", str(folder / "victim")) as hit:
            address = _line(hit)
            net = await start_libp2p(folder / "honest.key", LOOPBACK, initial_peers=[address])
            try:
                await pings(net, address.rsplit("/", 1)[1], 2)
                for name in ("none", *names):
                    report[name] = await _measure_one(hit, net, folder, address, name, seconds)
                    await asyncio.sleep(3)
            finally:
                await net.close()
    return report


async def _measure_one(
    hit: subprocess.Popen[str], net: Libp2p, folder: Path, address: str, name: str, seconds: float
) -> Figures:
    with contextlib.ExitStack() as stack:
        if name != "none":
            attacker = stack.enter_context(_program("attack", str(folder), address, name))
            _line(attacker)
        _ask(hit)
        took = await pings(net, address.rsplit("/", 1)[1], seconds)
        figures = await asyncio.to_thread(_ask, hit)
        if name == "scene":
            attacker.kill()
            figures |= json.loads(attacker.stdout.read().splitlines()[-1])
    ninety_nine = statistics.quantiles(took, n=100, method="inclusive")[98] if len(took) > 1 else took[0]
    return {**figures, "ping_p99_s": ninety_nine}


@contextlib.contextmanager
def _program(*arguments: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ask(process: subprocess.Popen[str]) -> Figures:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    figures: Figures = json.loads(_line(process))
    return figures


def main() -> None:
    if sys.argv[1:2] == ["victim"]:
        uvloop.run(victim(Path(sys.argv[2])))
        return
    if sys.argv[1:2] == ["attack"]:
        uvloop.run(attack(Path(sys.argv[2]), *sys.argv[3:5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    report = uvloop.run(measure(arguments.only, arguments.seconds))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print("attack      longest pause   Python grows   p2pd grows   ping p99")
    for name, row in report.items():
        memory = f"{row['python_mb']:>12.0f} MB{row['p2pd_mb']:>10.0f} MB"
        print(f"{name:<12}{row['pause_s']:>11.2f} s{memory}{row['ping_p99_s']:>9.2f} s")
        if name == "scene":
            print(f"  of it: {({key: row[key] for key in ('frames', 'streams', 'streams_open', 'records', 'records_stored')})}")


if __name__ == "__main__":
    main()
