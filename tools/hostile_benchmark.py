"""./tools/bench hostile: what a stranger costs a bootstrap peer, and rounds, over real libp2p on loopback.

The victim is a bootstrap peer with a tiny campaign, in a process of its own. The attacker, another process with another
identity, does one thing for some seconds; an honest peer pings the victim meanwhile. For each attack: the longest pause of the
victim's event loop, the growth of its memory and of its p2pd's, the pings' 99th percentile, and what was sent.

`messages`: announcements, votes and commits of 8 MiB, and signed announcements just below their limit of 256 KiB, as many as
are taken. `promises`: streams whose first frame claims 8 MiB and never comes. `frames`: empty frames without end. `streams`: a
thousand streams at a time without a request. `records`: registry records of other keys, of other peers, and with a life of a
century. `connections`: 3,000 TCP connections at a time that never say who they are. `scene`: a million empty frames, a thousand
streams at a time and 10,000 registry records, all at once, as much of it as the victim takes.

With `--rounds N`: three trainers and a bootstrap peer, whose phases take `--phase-s` and leave the cores idle, do N rounds
without an attack and N while one outsider makes the `scene` at the bootstrap peer and at one of the trainers, in turns of
five. A round lasts from the last trainer's commit to the next one's; the first round of each turn does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import uvloop
from bench_json import parser_of, write
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.p2p import PeerID
from round_benchmark import Process, started
from round_contenders import EXPERTS

from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.addresses import host_and_port
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import sign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.fields import MAX_EXPERTS, MAX_INTERVALS
from spes_p2p.messages.framing import HEADER, MAX_FRAME_BYTES, Kind
from spes_p2p.messages.methods import ACCEPT, DECIDE, PING, PROTOCOL_VERSION, ROUND, WORK
from spes_p2p.messages.rounds import Announcement, Ping
from spes_p2p.messages.samples import Interval
from spes_p2p.net.contacts import find_contacts
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
FAILURES = (PeerUnreachable, Refused, OSError, EOFError, asyncio.TimeoutError, RuntimeError)
"""What a stream raises that the other side ends; RuntimeError: uvloop, when it is written to."""
TRAINERS, ELEMENTS, TURN = 3, 10**6, 5
"""Trainers and fp32 values of their model, and rounds with or without attack in a row, for `--rounds`."""
MEMBER = Path(__file__).with_name("link_member.py")
Figures = dict[str, float]
Report = dict[str, Any]


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


def longest_announcement(identity: Identity, campaign_hash: str, limit: int = WORK) -> Signed:
    """Return a signed announcement, valid in all its fields, whose frame has at most `limit` bytes and almost as many."""
    intervals = tuple(Interval(1, 3 * number, 3 * number + 2) for number in range(MAX_INTERVALS))

    def of(archived: int) -> Signed:
        return sign(Announcement(
            campaign_hash, PROTOCOL_VERSION, 0, 0, 0.0, "d" * 64, "e" * 64, 2**47, (2**47,) * MAX_EXPERTS, MAX_EXPERTS, 1.0,
            1.0, 1.0, None, intervals, archived=tuple(range(2**39, 2**39 + archived)),
        ), identity)

    return of((limit - len(pack(of(0))) - 16) // 9)  # a round takes 9 bytes


class Attacker:
    """A stranger with a daemon of its own."""

    def __init__(self, net: Libp2p, address: str, campaign_hash: str):
        self.net, self.address, self.peer = net, address, address.rsplit("/", 1)[1]
        self.campaign_hash = campaign_hash
        self.counts = Counter[str]()
        """What was sent, by kind, and what became of it."""

    async def stream(self, method: str) -> Any:
        """Open a raw stream."""
        return await self.net.transport.daemon.open_stream(self.peer, PROTOCOL_PREFIX + method, 5)

    async def messages(self) -> None:
        """Announcements, votes and commits, as long as a frame may be, and announcements that are not too long."""
        signed = longest_announcement(self.net.identity, self.campaign_hash)
        intervals = [[0, 1, 2]] * (MAX_FRAME_BYTES // 4 - 100)
        commit = ["c" * 64, 0, 0, "p" * 64, "", [], [], "d" * 64, 0, 0, ["a"], [], [0, 0, intervals], ["h"], ["h"], ["i" * 16]]
        oversize = Signed(signed.peer, bytes(MAX_FRAME_BYTES - 1000), signed.signature)
        await asyncio.gather(
            self._repeat("announcements", ROUND, pack(signed)),
            self._repeat("long_announcements", ROUND, pack(oversize)),
            self._repeat("votes", ACCEPT, msgpack.packb([[0, "x"], commit])),
            self._repeat("commits", DECIDE, msgpack.packb([[[commit, [0, "x"], []]]])),
        )

    async def _repeat(self, kind: str, method: str, packed: bytes) -> None:
        """Send this message again and again, each time on a new stream, when it was answered or the stream has ended."""
        while True:
            with contextlib.suppress(*FAILURES):
                stream = await self.stream(method)
                try:
                    stream.write(HEADER.pack(Kind.MESSAGE, len(packed)), packed)
                    self.counts[kind] += 1
                    await asyncio.wait_for(stream.drain(), 30)
                    await asyncio.wait_for(stream.read_exactly(HEADER.size), 30)
                    self.counts["answered"] += 1
                finally:
                    stream.abort()

    async def promises(self) -> None:
        """Headers of 8 MiB, each with one byte."""
        await self._many(lambda stream: stream.write(HEADER.pack(Kind.MESSAGE, MAX_FRAME_BYTES), b"x"))

    async def streams(self) -> None:
        """Nothing at all in each."""
        await self._many(lambda stream: None)

    async def frames(self, most: float = math.inf) -> None:
        """Frames that say nothing, as fast as they are taken."""
        some = HEADER.pack(Kind.HEARTBEAT, 0) * 1000
        while self.counts["frames"] < most:
            with contextlib.suppress(*FAILURES):
                stream = await self.stream(ROUND)
                while self.counts["frames"] < most:
                    stream.write(some)
                    await asyncio.wait_for(stream.drain(), 5)
                    self.counts["frames"] += 1000

    async def records(self) -> None:
        """Records that nobody should keep."""
        century, owned = get_dht_time() + 1e10, self.net.registry.subkey
        for number in itertools.count():
            keys = [DHTID.generate(source=f"{number}/{i}") for i in range(100)]
            foreign = [b"[owner:ssh-rsa %d]" % (100 * number + i) for i in range(100)]
            for subkeys in ([owned] * 100, foreign):
                await self._store(keys, century, subkeys)

    async def _store(self, keys: list[DHTID], until: float, subkeys: Sequence[Any]) -> None:
        peer, values = PeerID.from_base58(self.peer), [bytes(1000)] * len(keys)
        stored = await self.net.registry.node.protocol.call_store(peer, keys, values, until, subkeys)
        self.counts["records"] += len(keys)
        self.counts["records_stored"] += sum(bool(each) for each in stored or ())

    async def scene(self) -> None:
        """All at once."""
        await asyncio.gather(self.frames(SCENE_FRAMES), self.streams(), self._scene_records())

    async def _scene_records(self) -> None:
        owned = self.net.registry.subkey
        for number in range(SCENE_RECORDS):
            await self._store([DHTID.generate(source=f"scene/{number}")], get_dht_time() + 30, [owned])

    async def connections(self) -> None:
        """Connections, each opened again when the victim closes it."""
        await asyncio.gather(*(self._connect_for_ever() for _ in range(CONNECTIONS)))

    async def _connect_for_ever(self) -> None:
        while True:
            with contextlib.suppress(*FAILURES):
                reader, writer = await asyncio.open_connection(*host_and_port(self.address))
                self.counts["connections"] += 1
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


async def attack(folder: Path, name: str, campaign_hash: str, address: str, *trainers: str) -> None:
    """Attack the bootstrap peer at `address` and these trainers; for each line of stdin print what was sent until then."""
    net = await start_libp2p(folder / f"{name}.key", LOOPBACK, initial_peers=[address])
    contacts = await find_contacts(net.registry, net.transport, campaign_hash)
    places = [address, *(f"{contacts[peer].addresses[0]}" for peer in trainers)]
    for place in places[1:]:
        await net.transport.daemon.connect(place.rsplit("/", 1)[1], [place], 5)
    attackers = [Attacker(net, place, campaign_hash) for place in places]
    attacks = asyncio.gather(*(ATTACKS[name](attacker) for attacker in attackers))
    print("attacking", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        if attacks.done():
            attacks.result()
        sent = Counter[str]()
        for attacker in attackers:
            sent.update(attacker.counts)
        print(json.dumps(sent), flush=True)


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


async def measure(names: list[str], seconds: float) -> dict[str, Report]:
    """Return the figures of each attack, and of none."""
    report = dict[str, Report]()
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
) -> Report:
    with contextlib.ExitStack() as stack:
        if name != "none":
            attacker = stack.enter_context(attacking(folder, name, campaign().hash, address))
        _ask(hit)
        took = await pings(net, address.rsplit("/", 1)[1], seconds)
        figures = await asyncio.to_thread(_ask, hit)
        if name != "none":
            figures["sent"] = _ask(attacker)
    ninety_nine = statistics.quantiles(took, n=100, method="inclusive")[98] if len(took) > 1 else took[0]
    return {**figures, "ping_p99_s": ninety_nine}


# Rounds -----------------------------------------------------------------------------------------------------------------


def measure_rounds(rounds: int, phase_s: float) -> Report:
    """Return how long rounds take without the attack and with it, in seconds. Raises RuntimeError when a peer ends."""
    took, sent, left_out = {"without": list[float](), "with": list[float]()}, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as made, swarm(Path(made), phase_s) as (helper, address, genesis, members):
        reports = reports_of(members)
        target = next(reports)[0]["peer"]
        while len(took["with"]) < rounds:
            for kind, seconds in took.items():
                with contextlib.ExitStack() as stack:
                    if kind == "with":
                        attacker = stack.enter_context(attacking(Path(made), "scene", genesis.campaign, address, target))
                    began, wanted = time.monotonic(), min(TURN, rounds - len(seconds))
                    ends = next(end for each in reports if (end := _end(each)) > began)
                    for each in itertools.islice(reports, wanted):
                        seconds.append(_end(each) - ends)
                        ends = _end(each)
                        left_out[kind] += sum("exchange" not in report["phases"] for report in each)
                    if kind == "with":
                        sent.update(_ask(attacker))
        if helper.child.poll() is not None:
            raise RuntimeError("the bootstrap peer has ended")
    medians = {kind: statistics.median(seconds) for kind, seconds in took.items()}
    return {
        "median_s": medians, "ratio": medians["with"] / medians["without"], "sent": sent, "took_s": took,
        "longest_s": {kind: max(seconds) for kind, seconds in took.items()},
        "left_out": {kind: left_out[kind] for kind in took},
    }


def _end(reports: list[Report]) -> float:
    return max(float(report["at"]) for report in reports)


def reports_of(members: list[Process]) -> Iterator[list[Report]]:
    """Yield what each trainer reports of a round, as soon as all have committed it, round after round."""
    newest: list[Report] = [{"round": 0}] * len(members)
    for number in itertools.count(1):
        for place, member in enumerate(members):
            while newest[place]["round"] < number:
                newest[place] = member.next_report()
        yield list(newest)


@contextlib.contextmanager
def swarm(folder: Path, phase_s: float) -> Iterator[tuple[Process, str, Commit, list[Process]]]:
    """Yield a bootstrap peer, its address, its campaign's first commit, and three trainers."""
    spec = {
        "address": "127.0.0.1", "elements": ELEMENTS, "owned": EXPERTS, "codec": "int4", "sync": {"min_peers": TRAINERS},
        "phase_s": phase_s, "latency_s": 0.0,
    }
    with started(MEMBER, folder) as start:
        helper = start("bootstrap", 0, **spec)
        found = helper.next_report()
        address, genesis = found["address"], found["genesis"]
        members = [start("ours", number, addresses=[address], genesis=genesis, **spec) for number in range(TRAINERS)]
        yield helper, address, unpack(Commit, bytes.fromhex(genesis)), members


# Processes --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attacking(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yield an attacker that has begun."""
    with _program("attack", str(folder), *arguments) as attacker:
        if _line(attacker) != "attacking":
            raise RuntimeError("the attacker has ended")
        yield attacker


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


def _ask(process: subprocess.Popen[str]) -> Report:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    figures: Report = json.loads(_line(process))
    return figures


def main() -> None:
    if sys.argv[1:2] == ["victim"]:
        uvloop.run(victim(Path(sys.argv[2])))
        return
    if sys.argv[1:2] == ["attack"]:
        uvloop.run(attack(Path(sys.argv[2]), *sys.argv[3:]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default 20)")
    parser.add_argument("--rounds", type=int, metavar="N", help="measure N rounds without attack and N with the scene instead")
    parser.add_argument("--phase-s", type=float, default=2.0, help="seconds that a phase of these rounds takes (default 2)")
    arguments = parser.parse_args()
    if arguments.rounds:
        report = measure_rounds(arguments.rounds, arguments.phase_s)
    else:
        report = uvloop.run(measure(arguments.only, arguments.seconds))
    write(report, arguments.json)
    (show_rounds if arguments.rounds else show)(report)


def show_rounds(report: Report) -> None:
    """Print the figures of rounds."""
    for kind in ("without", "with"):
        print(f"rounds {kind} attack: median {report['median_s'][kind]:.2f} s, longest {report['longest_s'][kind]:.2f} s, "
              f"{len(report['took_s'][kind])} in all; {report['left_out'][kind]} times a trainer was left out")
    print(f"with over without: {report['ratio']:.3f}; sent: {dict(report['sent'])}")


def show(report: dict[str, Report]) -> None:
    """Print the figures of each attack."""
    print("attack      longest pause   Python grows   p2pd grows   ping p99")
    for name, row in report.items():
        memory = f"{row['python_mb']:>12.0f} MB{row['p2pd_mb']:>10.0f} MB"
        print(f"{name:<12}{row['pause_s']:>11.2f} s{memory}{row['ping_p99_s']:>9.2f} s")
        if "sent" in row:
            print(f"  sent: {row['sent']}")


if __name__ == "__main__":
    main()
