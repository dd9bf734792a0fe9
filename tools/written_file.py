"""The command line of a tool that writes a file from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(about: str | None, file: Path, make: Callable[[], str], outdated: str) -> int:
    """Write the file or, with --check, say that it is `outdated` if it is; return the exit code. `about`: for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is out of date")
    is_check, text = parser.parse_args().check, make()
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return 0
    if is_check:
        print(f"error: {outdated}", file=sys.stderr)
        return 1
    file.write_text(text, encoding="utf-8")
    return 0
