"""`python die_with_parent.py PARENT_PID PROGRAM ARGS...`: become PROGRAM, in a session of its own, killed when the parent dies.

The kernel does the killing (PR_SET_PDEATHSIG), so it works after SIGKILL too; the own session keeps a terminal's Ctrl-C away.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
MEMORY_LIMIT = "256MiB"
"""Above this the daemon's runtime collects garbage continually: it may otherwise double what floods of streams take."""


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies. Ends at once when the parent is already gone."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot ask for a death signal: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def under_guard() -> list[str]:
    """Return what precedes a command that ends with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main(parent: int, command: list[str]) -> None:
    """Replaces this process."""
    die_with(parent)
    os.setsid()
    os.environ.setdefault("GOMEMLIMIT", MEMORY_LIMIT)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
