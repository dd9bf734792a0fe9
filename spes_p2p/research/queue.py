"""Run an experiment's runs one after the other, resumably; several processes can work on one experiment.

Results are JSON lines, appended when a run is complete. A run in progress is claimed by a file lock, which the operating system
releases when the process ends in any way; the run then starts again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.research.spec import Experiment, Run, runs_of

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Train = Callable[[Run], Record]


def read_results(path: Path) -> list[Record]:
    """Return all complete runs, without an unfinished last line. Raises UserError for any other damage."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line)) if line else None
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number}: not JSON; remove this line, and its run is repeated") from None
    return records


def append_result(path: Path, record: Record) -> None:
    """Add one run durably, after removing an unfinished last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def losses_of(experiment: Experiment, records: Sequence[Record], text_digest: str) -> dict[tuple[str, float, int], float]:
    """Return final losses by (arm, rate, seed) of the runs that belong to this version of the experiment."""
    done = {record["key"]: record["loss"] for record in records}
    runs = [run for arm in experiment.arms for run in runs_of(experiment, arm)]
    keys = {(run.arm.name, run.rate, run.seed): run.key(text_digest) for run in runs}
    return {name: done[key] for name, key in keys.items() if key in done}


def work(find: Callable[[], Iterator[tuple[Run, str]]], results: Path, claims: Path, train: Train, until: float) -> int:
    """Do runs until none is open or `until` (Unix time); finish a run that has started. Return the number of runs done.

    `find` returns the open runs with their keys. It is called before each run, since an experiment file may change.
    """
    count = 0
    while time.time() < until and any(_did(run, key, results, claims, train) for run, key in find()):
        count += 1
    return count


def _did(run: Run, key: str, results: Path, claims: Path, train: Train) -> bool:
    with claim(claims / key) as mine:
        if not mine or key in {record["key"] for record in read_results(results)}:
            return False
        name = f"{run.experiment.name}: {run.arm.name}, rate {run.rate:g}, seed {run.seed}"
        logger.info("%s", name)
        record = train(run)
        append_result(results, record)
        logger.info("%s: loss %.4f, %.0f s, %.0f CPU-s", name, record["loss"], record["seconds"], record["cpu_seconds"])
        return True


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Lock the file for the duration of the block; yield whether no other process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
