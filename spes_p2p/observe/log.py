"""One logging format for every command: a line for people, or a JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.observe.plain import plain

EVENT = "spes_event"
"""Attribute of a log record that holds an event (`events.py`)."""
LEVELS = ("debug", "info", "warning", "error")


def _level(record: logging.LogRecord) -> str:
    """The level's word; libraries rename the levels of `logging` (hivemind says WARN)."""
    return next((name for name in LEVELS if getattr(logging, name.upper()) == record.levelno), record.levelname.lower())


class LineFormatter(logging.Formatter):
    """`12:03:44 round 3/60 ...`; when it is more or less than information, the level stands before the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        if record.levelno != logging.INFO:
            record.message = f"{_level(record)}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-01-31T12:03:44.123+00:00", "level": "info", "logger": "...", "message": "..."}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object; a traceback, if any, is its `exception`, what happened to a peer with all numbers its `event`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": _level(record),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = getattr(record, EVENT, None)
        if event is not None:
            line["event"] = {"name": type(event).__name__, **plain(event)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False)


class StderrHandler(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: a live table replaces it, to print the lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; what goes wrong with it is reported the way `logging` does."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def setup_logging(level: str = "info", as_json: bool = False) -> None:
    """Log to stderr: this project's messages from `level` on, those of libraries from warnings on. May be called again.

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
