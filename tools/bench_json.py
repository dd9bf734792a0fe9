"""What benchmarks share: their options, how they end early, and their reports, as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.storage.files import require_writable


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --json, of a benchmark that signals end. `about`: for --help."""
    end_on_signals()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the numbers there too")
    return parser


def report_file(name: str) -> Path:
    """Return the path. Raises ArgumentTypeError, before the work, if a report cannot be written there."""
    file = Path(name)
    try:
        if file.is_dir():
            raise UserError(f"{file}: is a folder; name a file")
        require_writable(file.parent)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file


def end_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and a closed terminal end the benchmark as an error does, but without a traceback.

    So its processes and folders are removed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    logging.disable()  # asyncio's account of the tasks that end with it
    sys.exit(128 + number)


def tell(report: dict[str, Any], file: Path | None) -> None:
    """Print a report, and write it to the file."""
    print(json.dumps(report, indent=2))
    write(report, file)


def write(report: Any, file: Path | None) -> None:
    """Write a report to the file, if there is one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
