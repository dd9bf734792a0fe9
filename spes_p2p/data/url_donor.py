"""Token pieces by URL: byte ranges of published token files.

Pieces are verified by their hashes, as if a peer had sent them. A URL that fails is retried with exponential backoff, and after
the longest delay when only the campaign's owner can fix it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES
from spes_p2p.data.token_files import NPY_MAGIC
from spes_p2p.errors import UnusableUrl

FIRST_BACKOFF_S, MAX_BACKOFF_S = 4.0, 600.0
SILENCE_S, RANGE_S = 30.0, 600.0
"""Timeouts for a web server's next byte, and for a byte range."""
TRANSIENT_STATUS = (408, 425, 429)
"""4xx statuses worth retrying soon."""


class UrlFailed(Exception):
    """A token file cannot be read from its URL. The message is one line: file, URL, reason, next step."""


@dataclass
class _State:
    """State of one file's URL. The lock is held for the length of a request, so a URL gets one at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: _Published | None = None
    failures: int = 0
    """Consecutive failures."""
    retry_at: float = 0.0
    problem: str = ""


class UrlDonor:
    """Reads pieces of the token files that have a URL. Thread-safe."""

    fetched_bytes: ClassVar[int] = 0
    """What this process has read from URLs."""
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, clock: Callable[[], float] = time.monotonic, allows_private: bool = False):
        """`allows_private`: read from addresses of this machine and its local network, too."""
        self._clock, self._allows_private = clock, allows_private
        self._states: dict[TokenFile, _State] = {}

    def fetch(self, file: TokenFile, pieces: Sequence[int], keep: Callable[[int, bytes], bool]) -> None:
        """Read these pieces (ascending) and pass each to `keep`, which returns whether it matches its hash. Blocks.

        Sends one request per run of adjacent pieces. Does nothing for a file without a URL or during a backoff.
        Raises UrlFailed, and what `keep` raises; pieces already kept stay.
        """
        if file.url is None:
            return
        state = self._states.setdefault(file, _State())
        with state.lock:
            if self._clock() < state.retry_at:
                return
            for run in _runs(pieces):
                content = self._read(file, file.url, state, run)
                with self._counting:
                    UrlDonor.fetched_bytes += len(content)
                for index in run:
                    start = (index - run.start) * PIECE_BYTES
                    if not keep(index, content[start : start + PIECE_BYTES]):
                        raise self._failed(file, state, UnusableUrl(f"piece {index} differs from the campaign's"))
            state.failures, state.problem = 0, ""

    def problem(self, file: TokenFile) -> str:
        """Return the URL and reason of the last failure; empty if the last fetch succeeded or there was none."""
        return self._states[file].problem if file in self._states else ""

    def _read(self, file: TokenFile, url: str, state: _State, run: range) -> bytes:
        try:
            if state.opened is None:
                state.opened = _Published(url, file.num_bytes, self._allows_private)
            return state.opened.read(run.start * PIECE_BYTES, min(run.stop * PIECE_BYTES, file.num_bytes))
        except Exception as error:  # fsspec's file systems raise errors of many kinds
            raise self._failed(file, state, error) from None

    def _failed(self, file: TokenFile, state: _State, error: Exception) -> UrlFailed:
        """Start a backoff for the URL and return the error to raise."""
        is_final = _is_final(error)
        backoff_s = MAX_BACKOFF_S if is_final else min(FIRST_BACKOFF_S * 2.0 ** min(state.failures, 10), MAX_BACKOFF_S)
        state.opened, state.failures = None, state.failures + 1
        state.retry_at = self._clock() + backoff_s
        state.problem = f"{file.url}: {_reason(error)}"
        advice = "tell the campaign's owner; " if is_final else ""
        return UrlFailed(f"{file.path}: {state.problem}; {advice}trying peers, and the URL again in {backoff_s:.0f} s")


class _Published:
    """A token file opened at its URL. The constructor checks its length and that the server sends byte ranges."""

    def __init__(self, url: str, num_bytes: int, allows_private: bool):
        from spes_p2p.data.web_files import open_url  # imports aiohttp and fsspec, which few peers need

        self._file = open_url(url, allows_private, RANGE_S, SILENCE_S)
        size = self._file.size
        if size is None:
            raise UnusableUrl("the server does not send byte ranges")
        self._ids_start = size - num_bytes
        """Length of the numpy header, 0 without one."""
        if self._ids_start < 0 or (self._ids_start > 0 and self._range(0, len(NPY_MAGIC)) != NPY_MAGIC):
            raise UnusableUrl(f"has {size} bytes, the manifest says {num_bytes} of ids")
        self._range(size - 1, size)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `[start, stop)` of the ids. Raises what fsspec raises, and EOFError for a short answer."""
        return self._range(self._ids_start + start, self._ids_start + stop)

    def _range(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        try:
            content: bytes = self._file.read(stop - start)
        except ValueError:  # fsspec received the whole file
            raise UnusableUrl("the server does not send byte ranges") from None
        if len(content) < stop - start:
            raise EOFError(f"the answer ended after {len(content)} of {stop - start} bytes")
        return content


def _runs(pieces: Sequence[int]) -> Iterator[range]:
    """Yield the runs of adjacent pieces."""
    first = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end] != pieces[end - 1] + 1:
            yield range(pieces[first], pieces[end - 1] + 1)
            first = end


def _is_final(error: Exception) -> bool:
    """Return whether a retry would soon fail the same way."""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in TRANSIENT_STATUS
    is_answer = isinstance(error, (FileNotFoundError, PermissionError)) and error.__cause__ is None
    return is_answer or isinstance(error, (UnusableUrl, ImportError, ValueError))


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error, if any."""
    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _reason(error: Exception) -> str:
    status, cause = _status(error), error.__cause__ or error
    if status is not None:
        meaning = {401: "not there or not public", 403: "not public", 404: "not there"}.get(status, "refused")
        return f"{meaning} (status {status})"
    if isinstance(error, ImportError):
        return f"needs a package that is not installed ({error})"
    if isinstance(error, UnusableUrl):
        return str(error)
    text = str(cause).strip().splitlines()
    return f"cannot be read ({text[0] if text else type(cause).__name__})"
