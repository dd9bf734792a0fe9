"""Which connections of peers behind routers become direct: as real ones find out, and as the in-memory network predicts.

Each peer is a p2pd on a machine of its own (a network namespace); no campaign is needed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from network_swarm import ENVIRONMENT
from test_memory_nat import network_of, opened

from spes_p2p.testing.memory_nat import CIRCUIT_BYTES, Nat
from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable
from spes_p2p.testing.virtual_loop import run_virtual

BLOCKED = why_unavailable(routers=True)
pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(BLOCKED is not None, reason=f"no networks with routers here: {BLOCKED}"),
]

KINDS: dict[str, Nat] = {
    "relay": "open", "seer-0": "open", "seer-1": "open", "seer-2": "open", "o": "open",
    "c": "cone", "c2": "cone", "s": "symmetric", "s2": "symmetric",
}
DAEMON = Path(__file__).parent / "nat_daemon.py"
KNOWS_ITS_ADDRESS_S = 8.0
"""libp2p looks every five seconds whether others have seen the same address often enough."""
UPGRADE_TIMEOUT_S = 10.0
UNUSED_WITHIN_S = 15.0
"""A peer looks every five seconds for connections that are relayed only, and waits until no stream uses them."""
PAIRS = [("o", "c"), ("o", "s"), ("c", "c2"), ("c", "s"), ("s", "c2"), ("s", "s2")]


class Daemons:
    """Daemons on machines, and orders to them."""

    def __init__(self, machines: Namespaces, folder: Path):
        self._machines, self._folder = machines, folder
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.ids: dict[str, str] = {}

    def start(self, name: str, initial_peers: tuple[str, ...] = ()) -> None:
        place = self._folder / name
        place.mkdir()
        reachability = "public" if KINDS[name] == "open" else "private"
        command = [*self._machines.command(name), sys.executable, str(DAEMON), str(place), reachability, *initial_peers]
        self._processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        self.ids[name] = self._answer(name)["peer_id"]

    def order(self, name: str, **order: Any) -> dict[str, Any]:
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return self._answer(name)

    def _answer(self, name: str) -> dict[str, Any]:
        stdout = self._processes[name].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"{name} ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def addresses(self, name: str) -> list[str]:
        """Where others dial a peer: one behind a router at its relay."""
        for _ in range(100):
            found: list[str] = [each for each in self.order(name)["addresses"] if "127.0.0.1" not in each]
            if KINDS[name] == "open" or any("p2p-circuit" in each for each in found):
                return found
            time.sleep(0.2)
        raise AssertionError(f"{name} has no relay: {found}")

    def open(self, source: str, target: str, afresh: bool = False) -> list[str]:
        """Have a stream opened, `afresh` without earlier connections; return the addresses of the connections."""
        found = self.order(source, peer=self.ids[target], addresses=self.addresses(target), afresh=afresh)
        assert found["error"] == "", (source, target, found)
        seen_at: list[str] = found["seen_at"]
        return seen_at

    def becomes_direct(self, source: str, target: str) -> bool:
        """Return whether there is a direct connection within UPGRADE_TIMEOUT_S."""
        deadline = time.monotonic() + UPGRADE_TIMEOUT_S
        while time.monotonic() < deadline:
            if any("p2p-circuit" not in each for each in self.order(source, peer=self.ids[target], addresses=[])["seen_at"]):
                return True
            time.sleep(0.2)
        return False

    def close(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            process.wait(30)


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    machines = Namespaces()
    running = Daemons(machines, tmp_path_factory.mktemp("daemons"))
    try:
        for name, nat in KINDS.items():
            machines.add(name, 12.5e6, nat)
        running.start("relay")
        (relay,) = [each for each in running.addresses("relay") if "/ip4/11." in each]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: running.start(name, (relay,)), [name for name in KINDS if name != "relay"]))
        for name in KINDS:
            if KINDS[name] != "open":
                for seer in ("relay", "seer-0", "seer-1", "seer-2"):
                    running.open(name, seer)
        time.sleep(KNOWS_ITS_ADDRESS_S)
        yield running
    finally:
        running.close()
        machines.close()


def predicted(source: str, target: str) -> bool:
    """What becomes of it in memory."""

    async def main() -> bool:
        network = await network_of(KINDS[source][0] + KINDS[target][0])
        assert (await opened(network, "a", "b")).circuit is not None
        await asyncio.sleep(UPGRADE_TIMEOUT_S)
        return (await opened(network, "a", "b")).circuit is None

    return run_virtual(main())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_connections_become_direct_that_do_so_in_memory(daemons: Daemons, source: str, target: str) -> None:
    assert any("p2p-circuit" in each for each in daemons.open(source, target, afresh=True))
    assert daemons.becomes_direct(source, target) == predicted(source, target)


def test_a_relayed_connection_carries_as_much_as_in_memory(daemons: Daemons) -> None:
    order = {"peer": daemons.ids["s2"], "addresses": daemons.addresses("s2"), "afresh": True}
    assert daemons.order("s", **order, bytes=CIRCUIT_BYTES // 2)["error"] == ""
    assert "broke the channel" in daemons.order("s", **order, bytes=CIRCUIT_BYTES)["error"]


@pytest.mark.parametrize("hidden", ["c", "s"])
def test_who_was_reached_through_the_relay_dials_directly_nevertheless(daemons: Daemons, hidden: str) -> None:
    daemons.open("o", hidden, afresh=True)
    deadline = time.monotonic() + UNUSED_WITHIN_S
    while all("p2p-circuit" in each for each in daemons.open(hidden, "o")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
