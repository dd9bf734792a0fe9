"""Token pieces by URL: byte ranges of the token files that a manifest says are published.

What is read is verified by the piece hashes, as from a peer. After a failure a URL rests, twice as long after each further one,
and for the longest time when only its owner can put it right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import fsspec

from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES
from spes_p2p.data.token_files import NPY_MAGIC

FIRST_REST_S, LONGEST_REST_S = 4.0, 600.0
SILENCE_S, RANGE_S = 30.0, 600.0
"""Longest wait for a web server's next byte, and for a whole range."""
RETRIED_STATUS = (408, 425, 429)
"""HTTP errors of the 4xx range that pass."""
ANONYMOUS: dict[str, dict[str, Any]] = {"s3": {"anon": True}, "gs": {"token": "anon"}}
"""Options that keep a volunteer's own credentials from being used for the owner's files."""


class UrlFailed(Exception):
    """A token file cannot be read from its URL. The message is one line: file, URL, reason, what follows."""


class _Unusable(Exception):
    """The URL answers, and only its owner can put right what."""


@dataclass
class _State:
    """What is known of one file's URL. The lock is held for a request: threads take turns at a URL."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: _Published | None = None
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0
    problem: str = ""


class UrlDonor:
    """Gives pieces of the token files that have a URL. Its methods may be called from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._states: dict[TokenFile, _State] = {}

    def fetch(self, file: TokenFile, pieces: Sequence[int], keep: Callable[[int, bytes], bool]) -> None:
        """Read these pieces, given in ascending order; hand each to `keep`, which says whether it is the campaign's. Blocks.

        One request for each run of adjacent pieces. Does nothing for a file without a URL, or while that rests.
        Raises UrlFailed, and what `keep` raises; the pieces kept before stay.
        """
        if file.url is None:
            return
        state = self._states.setdefault(file, _State())
        with state.lock:
            if self._clock() < state.rests_until:
                return
            for run in _runs(pieces):
                content = self._read(file, file.url, state, run)
                for index in run:
                    start = (index - run.start) * PIECE_BYTES
                    if not keep(index, content[start : start + PIECE_BYTES]):
                        raise self._failed(file, state, _Unusable(f"piece {index} differs from the campaign's"))
            state.failures, state.problem = 0, ""

    def problem(self, file: TokenFile) -> str:
        """URL and reason of the newest failure; empty when the last fetch went well, or there was none."""
        return self._states[file].problem if file in self._states else ""

    def _read(self, file: TokenFile, url: str, state: _State, run: range) -> bytes:
        try:
            if state.opened is None:
                state.opened = _Published(url, file.num_bytes)
            return state.opened.read(run.start * PIECE_BYTES, min(run.stop * PIECE_BYTES, file.num_bytes))
        except Exception as error:  # the libraries below raise errors of many kinds
            raise self._failed(file, state, error) from None

    def _failed(self, file: TokenFile, state: _State, error: Exception) -> UrlFailed:
        """Let the URL rest."""
        is_final = _is_final(error)
        rest_s = LONGEST_REST_S if is_final else min(FIRST_REST_S * 2.0 ** min(state.failures, 10), LONGEST_REST_S)
        state.opened, state.failures = None, state.failures + 1
        state.rests_until = self._clock() + rest_s
        state.problem = f"{file.url}: {_reason(error)}"
        advice = "tell who runs the campaign; " if is_final else ""
        return UrlFailed(f"{file.path}: {state.problem}; {advice}trying peers, and the URL again in {rest_s:.0f} s")


class _Published:
    """A token file opened at its URL; its length and that it is sent in ranges have been seen."""

    def __init__(self, url: str, num_bytes: int):
        self._file = _open(url)
        size = self._file.size
        if size is None:
            raise _Unusable("the server does not send byte ranges")
        self._ids_start = size - num_bytes
        """Length of a numpy header."""
        if self._ids_start < 0 or (self._ids_start > 0 and self._range(0, len(NPY_MAGIC)) != NPY_MAGIC):
            raise _Unusable(f"has {size} bytes, the manifest says {num_bytes} of ids")
        self._range(size - 1, size)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the ids. Raises whatever the libraries below raise, EOFError when fewer come."""
        return self._range(self._ids_start + start, self._ids_start + stop)

    def _range(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        try:
            content: bytes = self._file.read(stop - start)
        except ValueError:  # fsspec: the whole file was sent
            raise _Unusable("the server does not send byte ranges") from None
        if len(content) < stop - start:
            raise EOFError(f"the answer ended after {len(content)} of {stop - start} bytes")
        return content


def _open(url: str) -> Any:
    """Opened by the one file system that its scheme names: fsspec's own parsing would follow chained URLs onto this disk."""
    scheme = url.partition("://")[0]
    options = ANONYMOUS.get(scheme, {})
    if scheme in ("http", "https"):
        timeout = aiohttp.ClientTimeout(total=RANGE_S, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options = {"client_kwargs": {"timeout": timeout}, "headers": {"Accept-Encoding": "identity"}}
    system = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    return system.open(url, "rb", block_size=PIECE_BYTES, cache_type="none")


def _runs(pieces: Sequence[int]) -> Iterator[range]:
    """Adjacent pieces together."""
    first = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or pieces[end] != pieces[end - 1] + 1:
            yield range(pieces[first], pieces[end - 1] + 1)
            first = end


def _is_final(error: Exception) -> bool:
    """Would another try soon end in the same way?"""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in RETRIED_STATUS
    is_answer = isinstance(error, (FileNotFoundError, PermissionError)) and error.__cause__ is None
    return is_answer or isinstance(error, (_Unusable, ImportError, ValueError))


def _status(error: BaseException | None) -> int | None:
    """Of the HTTP answer behind an error."""
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
    if isinstance(error, _Unusable):
        return str(error)
    text = str(cause).strip().splitlines()
    return f"cannot be read ({text[0] if text else type(cause).__name__})"
