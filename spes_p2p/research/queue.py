"""Does an experiment's runs one after the other, resumably; several processes can work on one experiment.

Results are JSON lines, one a run, appended when the run is complete. A run in progress is claimed by a locked file, which the
operating system releases when its process ends, however it ends; such a run is done again from its start.
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
from spes_p2p.research.spec import Experiment, Run

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Train = Callable[[Run], Record]


def read_results(path: Path) -> list[Record]:
    """All complete runs; a last line that was cut off is no run. Raises UserError for any other damage."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line)) if line else None
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number}: not JSON; remove this line, its run is then done again") from None
    return records


def append_result(path: Path, record: Record) -> None:
    """Add one run, durably; a cut-off last line is ended first, so that it spoils nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size and _last_byte(file, size) != b"\n":
            file.truncate(_end_of_whole_lines(path))
        file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def losses_of(experiment: Experiment, records: Sequence[Record], text_digest: str) -> dict[tuple[str, float, int], float]:
    """Final losses by (arm, rate, seed) of the runs that are this experiment's as its file is now."""
    done = {record["key"]: record["loss"] for record in records}
    losses = {}
    for arm in experiment.arms:
        for rate in arm.learning_rates:
            for seed in range(arm.seeds):
                loss = done.get(Run(experiment, arm, rate, seed).key(text_digest))
                if loss is not None:
                    losses[arm.name, rate, seed] = loss
    return losses


def work(find: Callable[[], Iterator[tuple[Run, str]]], results: Path, claims: Path, train: Train, until: float) -> int:
    """Do runs until none is open or the time (`time.time()`) has come; a run that began is finished. Returns how many.

    `find` is asked before each run for the runs that are open, with their keys: an experiment file may change meanwhile.
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
    """Whether this process alone holds the name for as long as the block lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _last_byte(file: Any, size: int) -> bytes:
    file.seek(size - 1)
    last: bytes = file.read(1)
    return last


def _end_of_whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1
