"""Names of lm-eval tasks as users type them, checked without importing lm-eval."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from spes_p2p.errors import UserError

TASK_GROUPS = {
    "spes": "sciq,piqa,winogrande,arc_easy,social_iqa,openbookqa,boolq,arc_challenge:25,hellaswag:10,ceval-valid,cmmlu,mmlu"
}
"""Names that stand for several tasks. `spes`: eval_scripts/eval_full.sh of SPES's repository."""


def parse_tasks(text: str) -> dict[str, int | None]:
    """Return `{task: shots}` of `TASK[:SHOTS],...`; None is the task's own number. A task's last number counts.

    Raises UserError if there is no task, or for shots that are not a whole number.
    """
    tasks: dict[str, int | None] = {}
    for item in filter(None, text.split(",")):
        name, colon, shots = item.partition(":")
        if item in TASK_GROUPS:
            tasks |= parse_tasks(TASK_GROUPS[item])
        elif colon and not shots.isdecimal():
            raise UserError(f"--tasks {item}: must be TASK or TASK:SHOTS, for example arc_challenge:25")
        else:
            tasks[name] = int(shots) if colon else None
    if not tasks:
        raise UserError("--tasks is empty; give at least one lm-eval task")
    return tasks


def check_names(tasks: Iterable[str], include_path: Path | None) -> None:
    """Check that each name occurs in some task definition, of lm-eval or below `include_path`.

    Reads the definitions as text, in about a second; lm-eval takes 3 s to import and 28 s to parse them. A name that occurs
    without being a task's is left to lm-eval. Raises UserError for one that does not, suggesting the closest known one.
    """
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path}: no such folder; give the folder of the tasks' YAML files")
    package = importlib.util.find_spec("lm_eval")
    folders = [Path(place) / "tasks" for place in (package and package.submodule_search_locations) or ()]
    text = "\n".join(definitions([*folders, include_path] if include_path else folders))
    for task in tasks:
        if not re.search(rf"{re.escape(task)}(?<![\w-]{re.escape(task)})(?![\w-])", text):  # literal first: 20 times faster
            raise unknown_task(task, set(re.findall(r"^(?:task|group|tag)\s*:\s*['\"]?([\w.-]+)", text, re.MULTILINE)))


def definitions(folders: Iterable[Path]) -> Iterator[str]:
    """Text of the task files; lm-eval's included templates have no extension, or a name that ends in `_yaml`."""
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                if name.endswith("yaml") or "." not in name:
                    yield Path(parent, name).read_text(encoding="utf-8", errors="replace")


def unknown_task(task: str, known: Iterable[str]) -> UserError:
    """Return the error for a task that is not among the known ones."""
    close = difflib.get_close_matches(task, known, n=1)
    advice = f"did you mean '{close[0]}'?" if close else "`lm-eval ls tasks` lists the known ones"
    return UserError(f"--tasks: unknown task '{task}'; {advice}")
