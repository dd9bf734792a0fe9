"""Errors that users cause or must act on, and refusals between peers."""

from __future__ import annotations

import errno
import shlex

from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.refusals import LONGEST_DETAIL, LONGEST_REFUSAL, Code, Refusal


def printable(text: str) -> str:
    """Return text without the control characters that others may have put into it, which a terminal would obey."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


UPGRADE = "type in your clone: git pull && pip install -c constraints.txt ."


class UserError(Exception):
    """Invalid input. The message is one line: what is wrong, where, what to do. The command line exits with code 2."""


class Broken(UserError):
    """A failure that is not the user's fault and may not recur. The exit code is 1, so that a supervisor restarts the peer."""


class RunDirInUse(UserError):
    """Another process holds the run-dir, and all that is in it."""


class Damaged(UserError):
    """A file does not hold what was written. A running peer fetches what others have."""


class Diverged(UserError):
    """Training made no finite step for a while."""


class NobodyAnswers(UserError):
    """No given address leads to a peer."""

    def __init__(self, problem: str, advice: str = ""):
        """`problem` alone is what a program says that retries by itself."""
        super().__init__(f"{problem}; {advice}" if advice else problem)
        self.problem = problem


def version_advice(ours: int, theirs: int, program: str = "") -> str:
    """Return what a person types to speak protocol `theirs`. `program`: a version of spes_p2p that speaks it, if known."""
    if theirs > ours or not program:
        return UPGRADE
    return f"type in your clone: git fetch && git checkout {shlex.quote(f'v{program}')} && pip install -c constraints.txt ."


def cannot_listen(host: str, port: int, error: OSError, option: str = "") -> UserError:
    """Return the error for a server that cannot listen at --{option}host and --{option}port."""
    if (error.errno or 0) < 0:  # a socket.gaierror, whose codes are negative; no import of sockets for it
        return UserError(f"--{option}host {host}: not an address ({error.strerror}); give one of this machine, or 0.0.0.0")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--{option}host {host}: not an address of this machine; give one of its own, or 0.0.0.0 for all")
    why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return UserError(f"--{option}port {port}: cannot listen on {host}:{port} ({why}); choose another --{option}port")


class UnusableUrl(Exception):
    """A URL answers with something that only its owner can fix."""


class PeerUnreachable(Exception):
    """A peer refused or reset the connection, or was silent for too long."""


class Refused(Exception):
    """The other peer refused. Programs use `code` and the data; the text is for people."""

    def __init__(
        self,
        code: Code,
        detail: str,
        *,
        round: int | None = None,
        peer: str | None = None,
        campaign: str | None = None,
        protocol: int | None = None,
        retry_s: float | None = None,
    ):
        super().__init__(detail)
        self.code = code
        text = printable(detail[:LONGEST_DETAIL].replace("\n", " "))
        self.refusal = Refusal(code.value, text, round, peer, campaign, protocol, retry_s)

    @property
    def detail(self) -> str:
        """Return the reason, for people."""
        return self.refusal.detail

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview) -> Refused:
        """Read another peer's refusal. Raises WireError."""
        if len(data) > LONGEST_REFUSAL:
            raise WireError(f"a refusal of {len(data)} bytes")
        told = unpack(Refusal, data)
        refused = cls(Code.of(told.code), told.detail)
        refused.refusal = told
        return refused


def first_line(error: Exception) -> str:
    """Return the first line of a library's error; its type's name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def refusal_line(peer: str, refused: Refused, protocol: int) -> str:
    """Say in one line who refused this program, why, and what to type. `protocol`: the version that this program speaks."""
    needed, line = refused.refusal.protocol, f"refused by {peer}: {refused.detail}"
    if needed is not None:
        return f"{line}; {version_advice(protocol, needed)}"
    return f"{line}; ask the campaign's owner" if refused.code is Code.NOT_ADMITTED else line
