"""The command line of `tools/experiments`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from spes_p2p.errors import UserError

DESCRIPTION = """\
Learning experiments: arms x learning rates x seeds from one YAML file, in one process, resumable.

./tools/experiments prepare --text FOLDER --output FOLDER    tokenize {domain}.train.jsonl.zst, {domain}.val.jsonl.zst
./tools/experiments run FILE                                 what is not done yet; start it twice to use two cores
./tools/experiments report FILE                              tables and plots of what is done
"""


def main() -> int:
    """Exit code: 0, or 2 with one line about what is wrong."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare")
    prepare.add_argument("--text", type=Path, required=True)
    prepare.add_argument("--output", type=Path, required=True)
    prepare.add_argument("--vocab-size", type=int, default=2048)
    run = commands.add_parser("run")
    run.add_argument("file", type=Path)
    run.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so many minutes")
    report = commands.add_parser("report")
    report.add_argument("file", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("spes_p2p").setLevel(logging.WARNING)
    logging.getLogger("spes_p2p.experiments").setLevel(logging.INFO)
    try:
        _COMMANDS[arguments.command](arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def results_of(file: Path) -> Path:
    """The JSON lines of an experiment file's runs: beside it."""
    return file.with_suffix(".jsonl")


def _prepare(arguments: argparse.Namespace) -> None:
    from spes_p2p.experiments.text import prepare

    prepare(arguments.text, arguments.output, arguments.vocab_size)


def _run(arguments: argparse.Namespace) -> None:
    from spes_p2p.experiments.queue import work
    from spes_p2p.experiments.spec import load_experiment
    from spes_p2p.experiments.swarm import train
    from spes_p2p.experiments.text import open_text

    file: Path = arguments.file
    experiment = load_experiment(file)
    folder = (file.parent / experiment.text).resolve()
    text = open_text(folder)
    until = time.time() + 60 * arguments.minutes
    work(experiment, results_of(file), folder / "claims", text.digest, lambda run: train(run, text), until)


def _report(arguments: argparse.Namespace) -> None:
    raise UserError("not there yet")


_COMMANDS = {"prepare": _prepare, "run": _run, "report": _report}
