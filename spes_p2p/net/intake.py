"""What one end of a stream takes from the other: the kinds and sizes of frames, and the bytes that may wait here."""

from __future__ import annotations

from spes_p2p.errors import Refused
from spes_p2p.messages.framing import IGNORABLE, Kind
from spes_p2p.messages.methods import Method
from spes_p2p.messages.refusals import Code
from spes_p2p.net.shares import FRAME_COST, OUTSIDER_FRAME_BYTES, Shares

TAKEN_KINDS = frozenset(int(kind) for kind in Kind) - {Kind.FINISHED}


class Intake:
    """Bounds the frames of one stream by its method, and by the peer's share of this end's memory and time."""

    def __init__(self, remote: str, method: Method, shares: Shares, is_answer: bool):
        """`is_answer`: this end opened the stream, so what arrives answers it."""
        self._remote, self._method, self._shares, self._is_answer = remote, method, shares, is_answer
        self._held = 0
        """Bytes that arrive or wait to be read."""

    def objection(self, kind: int, size: int) -> Refused | None:
        """Why a frame cannot be taken, whatever it is about."""
        if kind < IGNORABLE and kind not in TAKEN_KINDS:
            return Refused(Code.UNKNOWN_KIND, f"a frame of kind {kind}")
        longest = self._method.longest(kind, self._is_answer)
        if not self._shares.is_known(self._remote):
            if self._is_answer or self._is_paced:
                longest = min(longest, self._method.outsider_bytes if self._is_answer else OUTSIDER_FRAME_BYTES)
        elif not self._is_answer and not self._shares.is_trusted(self._remote):
            longest = min(longest, self._method.stranger_bytes)
        if size > longest:
            return Refused(Code.TOO_LARGE, f"{size} bytes where at most {longest} are taken")
        return None

    async def hold(self, size: int) -> None:
        """Account for a frame that arrives; wait while the other end takes too much of this one's memory."""
        await self._shares.hold(self._remote, size)
        self._held += size

    async def take_turn(self, size: int) -> None:
        """Account for a frame that has arrived; wait while the other end, or all outsiders, take too much of this one's time.

        Raises Refused where too many wait.
        """
        if self._is_paced:
            await self._shares.pace(self._remote, size + FRAME_COST)

    def release(self, size: int) -> None:
        """Account for a frame that was read."""
        self._held -= size
        self._shares.release(self._remote, size)

    def close(self) -> None:
        """Release everything."""
        self.release(self._held)

    @property
    def _is_paced(self) -> bool:
        return not self._is_answer and self._method.is_paced
