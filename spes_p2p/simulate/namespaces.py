"""Each peer in a network namespace of its own, on a bridge, with a rate limit; sides can be cut apart.

Needs root and the commands `ip` and `tc`. Everything is made under names of this process and removed by `close`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable

SUBNET = "10.213"
BURST_BYTES, QUEUE_S = 256 * 1024, 0.2


def why_unavailable() -> str | None:
    """None where namespaces can be made, else the reason."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {missing[0]} is not installed (Debian package iproute2)"
    probe = f"spes{os.getpid()}-x"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except OSError as error:
        return f"this kernel or container makes no network namespaces ({error})"
    return None


class Namespaces:
    """The namespaces of one simulation."""

    def __init__(self) -> None:
        self._prefix = f"spes{os.getpid()}"
        self._bridges = (f"br{os.getpid()}a", f"br{os.getpid()}b")
        self._numbers: dict[str, int] = {}
        for bridge in self._bridges:
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")

    def add(self, name: str, bytes_per_s: float) -> None:
        """Make the machine of a peer. `bytes_per_s`: of its link, each way."""
        number = self._numbers[name] = len(self._numbers) + 1
        space, outside, inside = self._space(name), f"v{os.getpid()}o{number}", f"v{os.getpid()}i{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", outside, "master", self._bridges[0], "up")
        _run("ip", "link", "set", inside, "netns", space)
        _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/16", "dev", inside)
        _run("ip", "-n", space, "link", "set", inside, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        limit = ("root", "tbf", "rate", f"{round(8 * bytes_per_s)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_S}s")
        _run("tc", "qdisc", "add", "dev", outside, *limit)
        _run("tc", "-n", space, "qdisc", "add", "dev", inside, *limit)

    def address(self, name: str) -> str:
        """The machine's IPv4 address."""
        number = self._numbers[name]
        return f"{SUBNET}.{number // 250}.{number % 250 + 1}"

    def command(self, name: str) -> list[str]:
        """What to put before a command that shall run there."""
        return ["ip", "netns", "exec", self._space(name)]

    def partition(self, side: Iterable[str]) -> None:
        """Cut these off from the others."""
        for name in side:
            _run("ip", "link", "set", f"v{os.getpid()}o{self._numbers[name]}", "master", self._bridges[1])

    def heal(self) -> None:
        """All on one bridge again."""
        for number in self._numbers.values():
            _run("ip", "link", "set", f"v{os.getpid()}o{number}", "master", self._bridges[0])

    def close(self) -> None:
        """Remove everything; safe to call twice."""
        for name in self._numbers:
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", self._space(name))
        self._numbers = {}
        for bridge in self._bridges:
            with contextlib.suppress(OSError):
                _run("ip", "link", "del", bridge)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{self._numbers[name]}"


def _run(*command: str) -> None:
    """Raises OSError with what the command said."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(f"{' '.join(command[:3])}: {ended.stderr.strip() or ended.returncode}")
