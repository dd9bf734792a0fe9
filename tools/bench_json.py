"""The reports of benchmarks, as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --json. `about`: for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def tell(report: dict[str, Any], file: Path | None) -> None:
    """Print a report, and write it to the file."""
    print(json.dumps(report, indent=2))
    write(report, file)


def write(report: Any, file: Path | None) -> None:
    """Write a report to the file, if there is one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
