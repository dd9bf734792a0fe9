"""Network namespaces, one per peer, on a bridge, with rate limits and partitions.

A line has one queue, or, if `fair`, one for each address at its other end, which share it, as in routers with fq_codel or cake.

A machine may be behind its own router, which translates addresses and refuses incoming connections. Needs root and the commands
`ip` and `tc`, and `nft` for routers. All names contain this process's id; `close` removes everything. The addresses look
public, since libp2p treats private ones as one local network; they exist only inside the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from spes_p2p.testing.memory_nat import Nat

SUBNET = "11.213"
HOME, HOME_ROUTER = "192.168.1.2", "192.168.1.1"
"""Addresses of each machine behind a router, and of its router on that side."""
BURST_BYTES, QUEUE_S = 256 * 1024, 0.2
FAIR_QUEUES, FAIR_QUEUE_BYTES, FAIR_BURST_BYTES = 32, 24 * 1024, 16 * 1024
"""Queues of a fair line, by the last bits of an address, and the bytes that each holds."""


PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
ROUTER_RULES = """
table ip router {
  chain forward { type filter hook forward priority 0; policy drop;
    iifname "home" accept
    ct state established,related accept
  }
  chain input { type filter hook input priority 0; policy drop;
    iifname "home" accept
    ct state established,related accept
  }
  chain out { type nat hook postrouting priority 100;
    oifname "line" masquerade FLAGS
  }
}
"""
"""Only the home side can open connections."""
MASQUERADE = {"cone": "", "symmetric": "random"}
"""Flags by kind of NAT. cone: a connection keeps its port, whatever its destination. symmetric: each gets a random outside
port, so no port can be guessed."""


def why_unavailable(routers: bool = False) -> str | None:
    """Return why namespaces (with `routers`: and address translation) are not available; None if they are."""
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    missing = [command for command in ("ip", "tc", *(("nft",) if routers else ())) if shutil.which(command) is None]
    if missing:
        return f"the command {missing[0]} is not installed (Debian package {PACKAGES[missing[0]]})"
    probe = f"spes{os.getpid()}-x"
    try:
        _run("ip", "netns", "add", probe)
    except OSError as error:
        return f"this kernel or container does not allow network namespaces ({error})"
    try:
        if routers:
            _run("ip", "netns", "exec", probe, "nft", _router_rules("symmetric"))
    except OSError as error:
        return f"this kernel or container does not translate addresses ({error})"
    finally:
        _run("ip", "netns", "del", probe)
    return None


class Namespaces:
    """The namespaces of one simulation. `fair`: see the module."""

    def __init__(self, fair: bool = False) -> None:
        self._fair = fair
        self._prefix = f"spes{os.getpid()}"
        self._bridges = (f"br{os.getpid()}a", f"br{os.getpid()}b")
        self._numbers: dict[str, int] = {}
        self._routers: set[str] = set()
        for bridge in self._bridges:
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")

    def add(self, name: str, bytes_per_s: float, nat: Nat = "open") -> None:
        """Create a peer's machine. `bytes_per_s`: bandwidth each way. `nat`: of the router that it is behind, if not open."""
        number = self._numbers[name] = len(self._numbers) + 1
        if nat != "open":
            self._routers.add(name)
        on_line, outside, inside = self._on_line(name), f"v{os.getpid()}o{number}", f"v{os.getpid()}i{number}"
        if nat != "open":
            self._add_home(self._space(name), on_line, nat)
        else:
            _run("ip", "netns", "add", on_line)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", outside, "master", self._bridges[0], "up")
        _run("ip", "link", "set", inside, "netns", on_line, "name", "line")
        _run("ip", "-n", on_line, "addr", "add", f"{self.address(name)}/16", "dev", "line")
        _run("ip", "-n", on_line, "link", "set", "line", "up")
        _run("ip", "-n", on_line, "link", "set", "lo", "up")
        self._limit(outside, bytes_per_s, toward="src")
        self._limit("line", bytes_per_s, toward="dst", within=("-n", on_line))

    def _add_home(self, space: str, router: str, nat: Nat) -> None:
        """Create a machine and its router, connected by a cable."""
        for each in (space, router):
            _run("ip", "netns", "add", each)
        _run("ip", "-n", router, "link", "add", "home", "type", "veth", "peer", "name", "eth0", "netns", space)
        for each, device, address in ((router, "home", HOME_ROUTER), (space, "eth0", HOME)):
            _run("ip", "-n", each, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", each, "link", "set", device, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "route", "add", "default", "via", HOME_ROUTER)
        _run("ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _run("ip", "netns", "exec", router, "nft", _router_rules(nat))

    def address(self, name: str) -> str:
        """Return the machine's IPv4 address, or its router's."""
        number = self._numbers[name]
        return f"{SUBNET}.{number // 250}.{number % 250 + 1}"

    def command(self, name: str) -> list[str]:
        """Return the prefix of a command that runs on the machine."""
        return ["ip", "netns", "exec", self._space(name)]

    def partition(self, side: Iterable[str]) -> None:
        """Disconnect these machines from the others."""
        for name in side:
            _run("ip", "link", "set", f"v{os.getpid()}o{self._numbers[name]}", "master", self._bridges[1])

    def join_sides(self, bytes_per_s: float) -> None:
        """Join the two sides of a partition by one line with this bandwidth each way."""
        ends = self._line_between()
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, bridge in zip(ends, self._bridges, strict=True):
            _run("ip", "link", "set", end, "master", bridge, "up")
            self._limit(end, bytes_per_s, toward="dst")

    def crossed_bytes(self) -> tuple[int, int]:
        """Return the bytes on the wire that crossed the line between the sides so far, each way."""
        first, second = (int(Path(f"/sys/class/net/{end}/statistics/tx_bytes").read_text()) for end in self._line_between())
        return first, second

    def _line_between(self) -> tuple[str, str]:
        return f"v{os.getpid()}sa", f"v{os.getpid()}sb"

    def heal(self) -> None:
        """Reconnect all machines."""
        for number in self._numbers.values():
            _run("ip", "link", "set", f"v{os.getpid()}o{number}", "master", self._bridges[0])

    def close(self) -> None:
        """Remove everything. Idempotent."""
        for name in self._numbers:
            for space in {self._space(name), self._on_line(name)}:
                with contextlib.suppress(OSError):
                    _run("ip", "netns", "del", space)
        self._numbers, self._routers = {}, set()
        for device in (*self._bridges, self._line_between()[0]):
            with contextlib.suppress(OSError):
                _run("ip", "link", "del", device)

    def _limit(self, device: str, bytes_per_s: float, toward: str, within: tuple[str, ...] = ()) -> None:
        """Give a device this bandwidth. `toward`: which address of a packet, src or dst, is the other end's."""
        rate = f"{round(8 * bytes_per_s)}bit"
        if not self._fair:
            _run("tc", *within, "qdisc", "add", "dev", device, "root",
                 "tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_S}s")
            return
        _run("ip", *within, "link", "set", device, "gso_max_segs", "1")  # else a packet may be larger than a queue
        burst = f"burst {FAIR_BURST_BYTES} cburst {FAIR_BURST_BYTES}"
        share = f"rate {round(8 * bytes_per_s / FAIR_QUEUES)}bit ceil {rate} quantum 1514 {burst}"
        place = {"src": 12, "dst": 16}[toward]  # of the address in an IPv4 header
        by_address = f"hashkey mask {FAIR_QUEUES - 1:#x} at {place}"
        commands = [
            f"qdisc add dev {device} root handle 1: htb default 10",
            f"class add dev {device} parent 1: classid 1:1 htb rate {rate} {burst}",
            f"filter add dev {device} parent 1: prio 1 handle 2: protocol ip u32 divisor {FAIR_QUEUES}",
            f"filter add dev {device} parent 1: prio 1 protocol ip u32 ht 800:: match u32 0 0 {by_address} link 2:",
        ]
        for number in range(FAIR_QUEUES):
            queue = f"{0x10 + number:x}"
            commands += [
                f"class add dev {device} parent 1:1 classid 1:{queue} htb {share}",
                f"qdisc add dev {device} parent 1:{queue} bfifo limit {FAIR_QUEUE_BYTES}",
                f"filter add dev {device} parent 1: prio 1 protocol ip u32 ht 2:{number:x}: match u32 0 0 flowid 1:{queue}",
            ]
        _run("tc", *within, "-batch", "-", given="\n".join(commands))

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{self._numbers[name]}"

    def _on_line(self, name: str) -> str:
        """Return the namespace with the public address: the machine's or its router's."""
        return self._space(name) + ("-router" if name in self._routers else "")


def _router_rules(nat: Nat) -> str:
    return ROUTER_RULES.replace("FLAGS", MASQUERADE[nat])


def _run(*command: str, given: str | None = None) -> None:
    """Run a command with this standard input. Raises OSError with its error message."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
    if ended.returncode:
        raise OSError(f"{' '.join(command[:3])}: {ended.stderr.strip() or ended.returncode}")
