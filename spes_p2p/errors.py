"""Errors that a person can cause or must act on."""

from __future__ import annotations

from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.refusals import LONGEST_DETAIL, LONGEST_REFUSAL, Code, Refusal


class UserError(Exception):
    """Wrong input. The message is one line: what is wrong, where, what to do. The command line prints it and exits with 2."""


class Broken(UserError):
    """No wrong input: the same command can go well when it is given again. The exit code is 1; a supervisor starts it again."""


class NobodyAnswers(UserError):
    """None of the addresses that a person gave leads to a peer."""


class PeerUnreachable(Exception):
    """A peer refused the connection, reset it, or was silent beyond the bound."""


class Refused(Exception):
    """The other peer answered that it will not do this. Programs look at `code` and the data; the text is for people."""

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
        text = "".join(sign if sign.isprintable() else " " for sign in detail[:LONGEST_DETAIL])
        self.refusal = Refusal(code.value, text, round, peer, campaign, protocol, retry_s)

    @property
    def detail(self) -> str:
        """Why, for people."""
        return self.refusal.detail

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview) -> Refused:
        """What another peer's refusal says. Raises WireError."""
        if len(data) > LONGEST_REFUSAL:
            raise WireError(f"a refusal of {len(data)} bytes")
        told = unpack(Refusal, data)
        refused = cls(Code.of(told.code), told.detail)
        refused.refusal = told
        return refused
