"""Real daemons on loopback: channels, the registry, what a user can get wrong, and that nothing outlives a peer."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop
from echo import echo
from hivemind.dht.routing import get_dht_time
from network_swarm import COMMAND_TIMEOUT_S

from spes_p2p.errors import PeerUnreachable, Refused, RunDirInUse, UserError
from spes_p2p.messages.framing import HEADER, MAX_FRAME_BYTES, Kind, Message
from spes_p2p.net import die_with_parent
from spes_p2p.net.byte_stream import ByteStream
from spes_p2p.net.daemon_process import StartedDaemon, is_any_listening, start_visitor
from spes_p2p.net.interfaces import MAX_RECORD_BYTES, Channel
from spes_p2p.net.libp2p import Libp2p, start_libp2p, visit
from spes_p2p.net.p2pd import control_daemon
from spes_p2p.net.transport import PROTOCOL_PREFIX, Libp2pTransport

pytestmark = pytest.mark.network
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PEER_PROGRAM = Path(__file__).with_name("libp2p_peer.py")
MEGABYTE = 2**20
TIMEOUT_S = 240.0
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(asyncio.wait_for(main, TIMEOUT_S))


class Swarm:
    """Peers of one test; all are closed at its end."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Swarm:
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str, initial_peers: Sequence[str] = (), listen: Sequence[str] = LOOPBACK) -> Libp2p:
        peer = await start_libp2p(self._directory / name, listen, initial_peers=initial_peers)
        self._stack.push_async_callback(peer.close)
        return peer


async def ask(guest: Libp2p, peer: str, question: bytes) -> bytes | bytearray | None:
    return await ask_over(guest.transport, peer, question)


async def ask_over(transport: Libp2pTransport, peer: str, question: bytes) -> bytes | bytearray | None:
    channel = await transport.open(peer, "echo")
    await channel.send(question)
    received = await channel.receive()
    answer = None if received is None else received.body
    channel.abort()
    return answer


async def read_all(channel: Channel) -> list[bytes]:
    frames = []
    while (message := await channel.receive()) is not None:
        frames.append(bytes(message.body))
    return frames


def introduce(guest: Libp2p, host: Libp2p) -> str:
    guest.transport.learn_addresses(host.transport.peer_id, host.transport.addresses)
    return host.transport.peer_id


async def raw_stream(guest: Libp2p, host: Libp2p, method: str) -> ByteStream:
    peer = host.transport.peer_id
    await guest.transport.daemon.connect(peer, host.transport.addresses, 5)
    return await guest.transport.daemon.open_stream(peer, PROTOCOL_PREFIX + method, 5)


def test_channels_between_peers_that_know_only_each_others_addresses(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            remotes = []

            async def serve(channel: Channel) -> None:
                remotes.append(channel.remote)
                await echo(channel)

            await b.transport.serve("echo", serve)
            with pytest.raises(PeerUnreachable):
                await a.transport.open(b.transport.peer_id, "echo")
            channel = await a.transport.open(introduce(a, b), "echo")
            frames: list[bytes | memoryview] = [b"", b"small", os.urandom(300_000), memoryview(bytes(MAX_FRAME_BYTES))]
            for frame in frames:
                await channel.send(frame)
                assert await channel.receive() == Message(bytes(frame))
            await channel.finish()
            assert await channel.receive() is None
            assert await channel.receive() is None
            assert remotes == [a.identity.peer_id]
            with pytest.raises(ValueError, match="at most"):
                await channel.send(bytes(MAX_FRAME_BYTES + 1))
            channel.abort()
            channel.abort()
            with pytest.raises(PeerUnreachable):
                await channel.send(b"after abort")
            with pytest.raises(ValueError, match="itself"):
                await a.transport.open(a.transport.peer_id, "echo")

    run(main())


def test_handlers_fail_and_answer_early_without_harm_to_others(tmp_path: Path):
    async def fail(channel: Channel) -> None:
        raise RuntimeError("a bug")

    async def answer_early(channel: Channel) -> None:
        await channel.send(bytes(100_000))
        await channel.finish()

    async def break_off(channel: Channel) -> None:
        await channel.send(b"half")

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            peer = introduce(a, b)
            for handler in (fail, answer_early, break_off):
                await b.transport.serve(handler.__name__, handler)
            with pytest.raises(Refused):
                await a.transport.open(peer, "unknown")
            with pytest.raises(PeerUnreachable):
                await (await a.transport.open(peer, "fail")).receive()
            half = await a.transport.open(peer, "break_off")
            with pytest.raises(PeerUnreachable):
                await read_all(half)
            early = await a.transport.open(peer, "answer_early")
            for _ in range(16):
                await early.send(bytes(100_000))
            assert await early.receive() == Message(bytes(100_000))
            assert await early.receive() is None
            early.abort()

    run(main())


def test_a_frame_longer_than_allowed_is_refused_before_it_is_read(tmp_path: Path):
    outcome: list[BaseException] = []

    async def read(channel: Channel) -> None:
        try:
            await channel.receive()
        except PeerUnreachable as error:
            outcome.append(error)
            raise

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            await b.transport.serve("read", read)
            stream = await raw_stream(a, b, "read")
            stream.write(HEADER.pack(Kind.MESSAGE, MAX_FRAME_BYTES + 1))
            with pytest.raises((EOFError, OSError)):
                await asyncio.wait_for(stream.read_exactly(1), 5)
            stream.close()
        assert "does not keep to the protocol" in str(outcome[-1])

    run(main())


def test_a_sender_waits_for_a_reader_that_does_not_read(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            release = asyncio.Event()

            async def read_late(channel: Channel) -> None:
                await release.wait()
                await echo(channel)

            await b.transport.serve("late", read_late)
            channel = await a.transport.open(introduce(a, b), "late")

            async def flood() -> None:
                for _ in range(64):
                    await channel.send(bytes(MEGABYTE))

            flooding = asyncio.create_task(flood())
            await asyncio.wait([flooding], timeout=1.0)
            assert not flooding.done()
            release.set()
            for _ in range(64):
                message = await channel.receive()
                assert message is not None
                assert len(message.body) == MEGABYTE
            await flooding
            channel.abort()

    run(main())


def test_an_abort_is_seen_at_the_other_end(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            broken = asyncio.Event()

            async def watch(channel: Channel) -> None:
                assert await channel.receive() == Message(b"x")
                with pytest.raises(PeerUnreachable):
                    await channel.receive()
                broken.set()

            await b.transport.serve("watch", watch)
            channel = await a.transport.open(introduce(a, b), "watch")
            await channel.send(b"x")
            channel.abort()
            await asyncio.wait_for(broken.wait(), 5)
            assert channel.remote == b.identity.peer_id

    run(main())


def test_a_receive_that_timed_out_loses_nothing(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a, b = await swarm.start("a"), await swarm.start("b")
            received: list[Message | None] = []
            timed_out, done = asyncio.Event(), asyncio.Event()

            async def read(channel: Channel) -> None:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(channel.receive(), 0.3)
                timed_out.set()
                received.append(await channel.receive())
                done.set()

            await b.transport.serve("read", read)
            stream = await raw_stream(a, b, "read")
            stream.write(HEADER.pack(Kind.MESSAGE, 4) + b"ab")
            await asyncio.wait_for(timed_out.wait(), 5)
            stream.write(b"cd")
            await asyncio.wait_for(done.wait(), 5)
            assert received == [Message(b"abcd")]
            stream.close()

    run(main())


def test_the_registry_keeps_the_last_put_of_each_peer_until_it_expires(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a")
            b = await swarm.start("b", a.transport.addresses)
            me, other = a.identity.peer_id, b.identity.peer_id
            assert await b.registry.get("peers") == {}
            await a.registry.put("peers", b"first", ttl_s=60)
            await b.registry.put("peers", bytes(MAX_RECORD_BYTES), ttl_s=60)
            assert await a.registry.get("peers") == {me: b"first", other: bytes(MAX_RECORD_BYTES)}
            await a.registry.put("peers", b"a shorter life", ttl_s=30)
            assert (await b.registry.get("peers"))[me] == b"a shorter life"
            await a.registry.put("peers", b"gone at once", ttl_s=0)
            assert await b.registry.get("peers") == {other: bytes(MAX_RECORD_BYTES)}
            with pytest.raises(ValueError, match="at most"):
                await a.registry.put("peers", bytes(MAX_RECORD_BYTES + 1), ttl_s=30)

    run(main())


def test_a_write_reads_no_records_and_seldom_searches(tmp_path: Path) -> None:
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a")
            b = await swarm.start("b", a.transport.addresses)
            await a.registry.put("peers", b"of a", ttl_s=60)
            protocol, answers = b.registry.node.protocol, list[Any]()
            find = protocol.call_find

            async def noted(*request: Any) -> Any:
                answers.append(await find(*request))
                return answers[-1]

            protocol.call_find = noted
            await b.registry.put("peers", b"first", ttl_s=60)
            assert not answers, "it has found nobody yet, and stores at the keeper alone"
            assert len(await b.registry.get("peers")) == 2
            assert len(answers) == 2, "one of them of the keeper"
            await b.registry.put("peers", b"second", ttl_s=60)
            assert [value for answer in answers[2:] for value, _ in answer.values()] == [None]
            b.registry.node.num_replicas = 1
            await b.registry.put("peers", b"another", ttl_s=60)
            await b.registry.put("peers", b"third", ttl_s=60)
            assert len(answers) == 3
            assert (await a.registry.get("peers"))[b.identity.peer_id] == b"third"

    run(main())


def test_a_restarted_peer_can_replace_the_longer_lived_record_of_its_former_life(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a")
            former = await swarm.start("b", a.transport.addresses)
            await former.registry.put("peers", b"former", ttl_s=60)
            await former.close()
            latter = await swarm.start("b", a.transport.addresses)
            await latter.registry.put("peers", b"latter", ttl_s=30)
            assert await a.registry.get("peers") == {latter.identity.peer_id: b"latter"}

    run(main())


def test_nobody_can_write_under_the_id_of_another_peer(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a")
            b = await swarm.start("b", a.transport.addresses)
            await a.registry.put("peers", b"mine", ttl_s=30)
            forged = {"value": b"\x7f\xe0" + bytes(6) + b"forged", "expiration_time": get_dht_time() + 50}
            assert not await b.registry.node.store("peers", subkey=a.registry.subkey, **forged)
            assert not await b.registry.node.store("peers", subkey=b"nobody", **forged)
            assert not await b.registry.node.store("peers", **forged)
            assert await a.registry.get("peers") == {a.identity.peer_id: b"mine"}

    run(main())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"initial_peers": ["somewhere"]}, "'somewhere' is not the address of a peer"),
        ({"initial_peers": ["/ip4/127.0.0.1/tcp/1"]}, "it does not end in /p2p/<peer id>"),
        ({"initial_peers": ["/ip4/1.2.3/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]}, "'1.2.3' is not an IPv4"),
        ({"listen": ["/ip4/127.0.0.1"]}, "is not an address to listen on"),
        ({"listen": ["/ip4/127.0.0.1/tcp/99999"]}, "is not an address to listen on"),
        ({"listen": ["/ip4/203.0.113.1/tcp/4001"]}, "cannot listen on port 4001 of 203.0.113.1"),
        ({"announce": ["/ip4/1.2.3.4/udp/1"]}, "is not an address to listen on"),
    ],
)
def test_a_wrong_address_is_named_with_a_right_one(tmp_path: Path, options: dict[str, list[str]], says: str):
    settings: dict[str, Any] = {"listen": LOOPBACK, **options}
    with pytest.raises(UserError, match=says) as error:
        run(start_libp2p(tmp_path / "identity", **settings))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "identity").exists()


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} "):
            run(start_libp2p(tmp_path / "identity", [f"/ip4/127.0.0.1/tcp/{port}"]))


def test_unreachable_initial_peers_and_identities_in_use_are_said(tmp_path: Path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a")
            b = await swarm.start("b", a.transport.addresses)
            shutil.copy(tmp_path / "b", tmp_path / "copy of b")
            for name, says in (("b", "uses this identity"), ("copy of b", "a living peer has this identity")):
                with pytest.raises(UserError, match=says) as refused:
                    await swarm.start(name, a.transport.addresses)
                assert isinstance(refused.value, RunDirInUse) == (name == "b"), "who has the key has what lies beside it"
            await b.close()
            with pytest.raises(UserError, match="no peer answers at"):
                await swarm.start("c", b.transport.addresses)
            await swarm.start("c", [*b.transport.addresses, *a.transport.addresses])

    run(main())
    assert not sockets_of(os.getpid())


def test_a_visitor_asks_and_is_found_by_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            host = await swarm.start("host")
            addresses = host.transport.addresses
            await host.transport.serve("echo", echo)
            await host.registry.put("peers", b"here", 60)
            peer = host.transport.peer_id
            started = await start_visitor(addresses)
            visitor, found = await visit(started, addresses, lambda transport: ask_over(transport, peer, b"at once"))
            try:
                assert found == b"at once"
                assert await visitor.registry.get("peers") == {peer: b"here"}
                assert await ask(visitor, peer, b"question") == b"question"
                assert not visitor.identity.verify(visitor.identity.peer_id, b"", b"")
                assert visitor.transport.peer_id == visitor.identity.peer_id
                with pytest.raises(ValueError, match="No multiaddrs found"):
                    await visitor.transport.daemon.get_visible_maddrs(latest=True)
                assert not host.registry.node.protocol.routing_table.peer_id_to_uid
            finally:
                await visitor.close()

    run(main())
    assert not sockets_of(os.getpid())


def test_a_visitors_daemon_that_does_not_start_is_ended(tmp_path: Path) -> None:
    async def main() -> int:
        silent = await asyncio.create_subprocess_exec("sleep", "600", stdout=asyncio.subprocess.PIPE)
        with pytest.raises(UserError, match="no peer answers at /ip4/"):
            await control_daemon(StartedDaemon(silent, tmp_path / "control.sock"), ["/ip4/127.0.0.1/tcp/9/p2p/Qm"], 0.2)
        return await silent.wait()

    assert run(main()) == -signal.SIGTERM


def test_an_address_that_drops_packets_counts_as_dead_and_does_not_delay_one_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spes_p2p.net.daemon_process.ANSWER_TIMEOUT_S", 0.2)
    with socket.socket() as silent, socket.socket() as first, socket.socket() as second, socket.socket() as living:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for waiting in (first, second):  # they fill its queue, after which the kernel drops what arrives
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        living.bind(("127.0.0.1", 0))
        living.listen()
        dead, alive = (f"/ip4/127.0.0.1/tcp/{each.getsockname()[1]}/p2p/Qm" for each in (silent, living))
        assert not run(is_any_listening([dead]))
        monkeypatch.setattr("spes_p2p.net.daemon_process.ANSWER_TIMEOUT_S", COMMAND_TIMEOUT_S)
        assert run(is_any_listening([dead, alive]))


@pytest.fixture
def peer_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A peer in a process group of its own, as a shell would start it."""
    process = subprocess.Popen(
        [sys.executable, str(PEER_PROGRAM), str(tmp_path / "peer")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(PEER_PROGRAM.parents[1])},
    )
    yield process
    process.kill()
    process.communicate()


def test_a_program_that_shall_die_with_its_parent_does():
    """p2pd itself often ends when its standard output breaks; this program does not care about anything."""
    stubborn = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    start = "import os, subprocess, sys; subprocess.run([sys.executable, sys.argv[1], str(os.getpid()), *sys.argv[2:]])"
    command = [sys.executable, "-c", start, str(die_with_parent.__file__), sys.executable, "-c", stubborn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        with open_pid(child) as ended:
            parent.kill()
            assert select.select([ended], [], [], TIMEOUT_S)[0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_daemon_outlives_its_peer(peer_process: subprocess.Popen[str], tmp_path: Path, how: signal.Signals):
    if signal.getsignal(how) is signal.SIG_IGN:
        pytest.skip("these tests were told to ignore that signal (nohup)")
    daemon, _ = started(peer_process)
    with open_pid(daemon) as ended:
        peer_process.send_signal(how)
        assert select.select([ended], [], [], TIMEOUT_S)[0]
    peer_process.wait()
    run(start_and_close(tmp_path / "next"))
    assert not sockets_of(peer_process.pid)


def test_a_peer_interrupted_at_its_terminal_can_still_say_goodbye(peer_process: subprocess.Popen[str]):
    daemon, _ = started(peer_process)
    assert os.getsid(daemon) == daemon
    with open_pid(daemon) as ended:
        os.killpg(peer_process.pid, signal.SIGINT)
        assert peer_process.stdout is not None
        assert peer_process.stdout.readline().strip() == "goodbye"
        assert peer_process.wait(TIMEOUT_S) == 0
        assert select.select([ended], [], [], TIMEOUT_S)[0]
    assert not sockets_of(peer_process.pid)


def test_a_killed_peer_is_noticed_at_once_and_found_again_when_it_is_back(
    peer_process: subprocess.Popen[str], tmp_path: Path
):
    _, address = started(peer_process)
    peer = address.rpartition("/")[2]

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            a = await swarm.start("a", [address])
            channel = await a.transport.open(peer, "echo")
            await channel.send(b"hello")
            assert await channel.receive() == Message(b"hello")
            peer_process.kill()
            with pytest.raises(PeerUnreachable):
                await channel.receive()
            with pytest.raises(PeerUnreachable) as refused:
                await ask(a, peer, b"anybody there?")
            assert "no answer for" not in str(refused.value), "refused, not waited for"
            peer_process.wait()
            back = await swarm.start("peer", a.transport.addresses)
            await back.transport.serve("echo", echo)
            assert await ask(a, introduce(a, back), b"hello again") == b"hello again"

    run(main())


async def start_and_close(identity_file: Path) -> None:
    await (await start_libp2p(identity_file, LOOPBACK)).close()


def started(process: subprocess.Popen[str]) -> tuple[int, str]:
    assert process.stdout is not None
    daemon, address = process.stdout.readline().split()
    return int(daemon), address


def open_pid(pid: int):
    """A file that becomes readable when the process ends."""
    return os.fdopen(os.pidfd_open(pid), "rb")


def sockets_of(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"spes-p2p-{pid}-*"))


def test_a_peer_that_started_alone_finds_those_it_was_told_of_when_they_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the first node of a DHT of its own, until one dials the other."""
    monkeypatch.setattr("spes_p2p.net.libp2p.FIND_EVERY_S", 0.2)

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            away = await swarm.start("away")
            address = away.transport.addresses[0]
            await away.close()
            alone = await swarm.start("alone")
            finding = asyncio.ensure_future(alone.keep_finding([address]))
            try:
                back = await swarm.start("away", listen=[address.partition("/p2p/")[0]])
                found: set[str] = set()
                while found != {alone.identity.peer_id, back.identity.peer_id}:
                    for peer in (alone, back):
                        await peer.registry.put("campaign", b"here", 60)
                    found = set(await alone.registry.get("campaign")) & set(await back.registry.get("campaign"))
            finally:
                finding.cancel()

    run(main())
