"""A web server on loopback that serves bytes, whole or in ranges, and fails as it is told. It ends with its test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """What it serves, and how it misbehaves."""

    files: dict[str, bytes]
    """By path."""
    url: str = ""
    breaks: int = 0
    """Answers that will still end in their middle,"""
    intact: int = 0
    """after this many whole ones."""
    without_ranges: set[str] = field(default_factory=set)
    """Paths that are only sent whole."""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    """(path, start, stop) of the ranges sent, or begun."""


@contextlib.contextmanager
def file_server(files: dict[str, bytes]) -> Iterator[FileServer]:
    """Serve these files until the block ends."""
    served = FileServer(files)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            content = served.files.get(path)
            if content is None:
                self.send_error(404)
                return
            part = "Range" in self.headers and path not in served.without_ranges
            start, stop = self._range(len(content)) if part else (0, len(content))
            self.send_response(206 if part else 200)
            self.send_header("Content-Length", str(stop - start))
            if part:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.end_headers()
            if with_body:
                self._send(path, content[start:stop], start, stop)

        def _send(self, path: str, body: bytes, start: int, stop: int) -> None:
            served.asked.append((path, start, stop))
            if served.breaks and len(served.asked) > served.intact:
                served.breaks -= 1
                body = body[: len(body) // 2]
            self.wfile.write(body)

        def _range(self, size: int) -> tuple[int, int]:
            start, last = str(self.headers["Range"]).removeprefix("bytes=").split("-")
            return int(start), min(int(last) + 1, size)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
