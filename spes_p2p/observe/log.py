"""The logging format of all commands: plain lines, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from spes_p2p.errors import UserError, printable
from spes_p2p.observe.json_values import to_json

EVENT = "spes_event"
"""Attribute of a log record that holds an event (`events.py`)."""
LEVELS = ("debug", "info", "warning", "error")


def _level(record: logging.LogRecord) -> str:
    """Return the level's name; libraries rename the levels of `logging` (hivemind: WARN)."""
    return next((name for name in LEVELS if getattr(logging, name.upper()) == record.levelno), record.levelname.lower())


class LineFormatter(logging.Formatter):
    """`12:03:44 round 3/60 ...`; levels other than info precede the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback, and without control characters from elsewhere."""
        record.message = printable(record.message)
        if record.levelno != logging.INFO:
            record.message = f"{_level(record)}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-01-31T12:03:44.123+00:00", "level": "info", "logger": "...", "message": "..."}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a JSON object; `exception` holds the traceback, `event` the fields of an event, if any."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": _level(record),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = getattr(record, EVENT, None)
        if event is not None:
            line["event"] = {"name": type(event).__name__, **to_json(event)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False)


def json_line(message: str, level: int = logging.INFO) -> str:
    """Return a line of `--log-json` for what a command says to people."""
    return JsonFormatter().format(logging.LogRecord("spes_p2p", level, "", 0, message, None, None))


class StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, which a live table replaces to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; errors are handled as `logging` does."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def setup_logging(level: str, as_json: bool = False) -> None:
    """Log to stderr: this project's messages from `level` up, libraries' warnings and errors. Idempotent.

    Raises UserError for an unknown level.
    """
    if level not in LEVELS:
        raise UserError(f"log level '{level}': choose one of {', '.join(LEVELS)}")
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    root.handlers = [other for other in root.handlers if not isinstance(other, StderrHandler)] + [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("spes_p2p").setLevel(level.upper())
