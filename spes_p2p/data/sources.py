"""Raw text where a manifest says that it lies: on a web server, in a dataset of the Hub, or at a path of this machine.

A remote file is read block by block, in order. A block that does not come is asked for again, so a connection that breaks costs
that block and one line in the log. What is read is verified by others (`streaming.py`): a source may lie.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote, urlsplit

import aiohttp
import fsspec

from spes_p2p.data.documents import reader_of
from spes_p2p.data.manifest import Source
from spes_p2p.errors import UserError
from spes_p2p.observe.units import human_bytes

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**22
"""Of one request."""
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Before each new try at a block; after the last of them the source is given up."""
ONE_TRY: tuple[float, ...] = ()
SILENCE_S, BLOCK_S = 30.0, 600.0
"""Longest wait for a server's next byte, and for a block."""
HTTP, HUB = ("https://", "http://"), "hf://datasets/"
SCHEMES = "https://HOST/PATH, hf://datasets/OWNER/NAME/PATH or an absolute path"
RETRIED_STATUS = (408, 425, 429)


class SourceError(Exception):
    """A source that cannot be read; the message is one line without advice."""


def check_sources(inputs: Sequence[Path], prefix: str, text_field: str) -> tuple[Source, ...]:
    """The source of each input, `prefix`/its name, after a look that it is there and as long as the input is.

    Raises UserError: not a place that text is streamed from, nothing there, another length, or two inputs of one name.
    """
    sources = tuple(Source(_join(prefix, path.name), text_field) for path in inputs)
    if len({source.url for source in sources}) < len(sources):
        raise UserError(f"--source {prefix}: two inputs have the same name; give each its own name there and here")
    for path, source in zip(inputs, sources, strict=True):
        try:
            size = _size(source.url)
        except SourceError as error:
            raise UserError(f"--source {error}; put the text there first, or correct the address") from None
        ours = path.stat().st_size
        if size not in (None, ours):
            raise UserError(f"--source {source.url}: has {size} bytes, {path} has {ours}; put the same file there")
    return sources


def open_source(url: str, waits_s: Sequence[float] = WAITS_S) -> BinaryIO:
    """A source, opened for reading from its start. Reading raises SourceError when nothing comes in spite of all tries.

    `waits_s`: before each new try. Raises SourceError.
    """
    if _is_remote(url):
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(url, waits_s), BLOCK_BYTES))
    try:
        return Path(url).open("rb")
    except OSError as error:
        raise SourceError(f"{url}: cannot be read ({error.strerror})") from None


def text_name(url: str) -> str:
    """The part of a source's address that names its format."""
    return urlsplit(url).path if url.startswith(HTTP) else url


class _RemoteFile(io.RawIOBase):
    """A remote file that survives broken connections."""

    def __init__(self, url: str, waits_s: Sequence[float]):
        """Raises SourceError as reading does. `waits_s`: before each new try."""
        self._url, self._waits_s = url, waits_s
        self._position = 0
        self._file: Any = None
        self._size: int | None = self._persist(self._open)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size or 0}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = self._persist(lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()

    def _open(self) -> int | None:
        self._file = _open_remote(self._url)
        return cast("int | None", self._file.size)

    def _read(self, count: int) -> bytes:
        if self._file is None:
            self._open()
        if self._file.tell() != self._position:
            self._file.seek(self._position)
        content: bytes = self._file.read(count)
        if not content and count and self._size is not None and self._position < self._size:
            raise EOFError(f"ended after {self._position} of {self._size} bytes")
        return content

    def _persist(self, attempt: Callable[[], Any]) -> Any:
        """The attempt's result, however often it takes. The libraries below raise errors of many kinds."""
        for number, wait_s in enumerate((*self._waits_s, None)):
            try:
                return attempt()
            except Exception as error:
                reason = _reason(error)
                if _is_final(error) or wait_s is None:
                    tries = f" after {number + 1} tries" if number else ""
                    raise SourceError(f"{self._url}: cannot be read{tries} ({reason})") from None
                if number == 0:
                    place = f"at {human_bytes(self._position)}, going on from there" if self._position else "trying again"
                    logger.warning("%s: connection broken (%s), %s", self._url, reason, place)
                self._file = None
                time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")


def _join(prefix: str, name: str) -> str:
    reader_of(name)
    if not _is_remote(prefix) and not prefix.startswith("/"):
        raise UserError(f"--source {prefix}: text is streamed from {SCHEMES}; give the folder of the text in that form")
    return f"{prefix.rstrip('/')}/{quote(name) if prefix.startswith(HTTP) else name}"


def _is_remote(url: str) -> bool:
    return url.startswith((*HTTP, HUB))


def _size(url: str) -> int | None:
    """Bytes of a source, where its server says so, after its last byte was read alone. Raises SourceError."""
    with _RemoteFile(url, ONE_TRY) if _is_remote(url) else open_source(url) as file:
        size = file.seek(0, io.SEEK_END) if file.seekable() else None
        if size:
            file.seek(size - 1)
            file.read(1)
        return size


def _open_remote(url: str) -> Any:
    options: dict[str, Any] = {}
    if url.startswith(HTTP):
        timeout = aiohttp.ClientTimeout(total=BLOCK_S, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options = {"client_kwargs": {"timeout": timeout}, "headers": {"Accept-Encoding": "identity"}}
    system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    return system.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none")


def _is_final(error: BaseException) -> bool:
    """Would another try end in the same way?"""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in RETRIED_STATUS
    return isinstance(error, (FileNotFoundError, PermissionError, ValueError)) and error.__cause__ is None


def _status(error: BaseException | None) -> int | None:
    """Of the HTTP answer behind an error."""
    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _reason(error: BaseException) -> str:
    status, cause = _status(error), error.__cause__ or error
    if status is not None:
        meaning = {401: "not there or not public", 403: "not public", 404: "not there"}.get(status, "refused")
        return f"{meaning}, status {status}"
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__
