"""The command line of `tools/experiments`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError

DESCRIPTION = """\
Learning experiments: arms x learning rates x seeds from one YAML file, in one process, resumable.

./tools/experiments prepare --text FOLDER --output FOLDER
                                      tokenize {domain}.train.jsonl.zst and {domain}.val.jsonl.zst
./tools/experiments run FILE...       do the open runs, in this order; start it twice to use two cores
./tools/experiments report FILE       write tables and plots of the finished runs
./tools/experiments evaluate FILE --tasks A,B [--include-path FOLDER] [--arm NAME]...
                                      run lm-eval on the final checkpoint of each arm that was run on this machine

Results are in results.jsonl beside the files. `run` reads the files again before each run.
"""


def main() -> int:
    """Run the command; return the exit code: 0, or 2 after one error line."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare")
    prepare.add_argument("--text", type=Path, required=True)
    prepare.add_argument("--output", type=Path, required=True)
    prepare.add_argument("--vocab-size", type=int, default=2048)
    run = commands.add_parser("run")
    run.add_argument("files", type=Path, nargs="+")
    run.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after this many minutes")
    report = commands.add_parser("report")
    report.add_argument("file", type=Path)
    report.add_argument("--output", type=Path, default=Path("docs/learning"), help="folder for NAME.md and its plots")
    evaluation = commands.add_parser("evaluate")
    evaluation.add_argument("file", type=Path)
    evaluation.add_argument("--tasks", required=True, help="comma-separated TASK or TASK:SHOTS")
    evaluation.add_argument("--include-path", type=Path, help="folder of task files")
    evaluation.add_argument("--limit", type=int, help="maximum number of examples per task")
    evaluation.add_argument("--arm", action="append", help="only this arm; repeatable")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("spes_p2p").setLevel(logging.WARNING)
    logging.getLogger("spes_p2p.research").setLevel(logging.INFO)
    try:
        _COMMANDS[arguments.command](arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def results_of(file: Path) -> Path:
    """Return the results file of all experiment files in a folder: arms that two files share are run once."""
    return file.parent / "results.jsonl"


def _prepare(arguments: argparse.Namespace) -> None:
    from spes_p2p.research.text import prepare

    prepare(arguments.text, arguments.output, arguments.vocab_size)


def _run(arguments: argparse.Namespace) -> None:
    from spes_p2p.research.queue import losses_of, read_results, work
    from spes_p2p.research.spec import Run, load_experiment, open_runs
    from spes_p2p.research.swarm import train
    from spes_p2p.research.text import keep_endpoint, open_text

    files: list[Path] = arguments.files
    results = results_of(files[0])
    folder = (files[0].parent / load_experiment(files[0]).text).resolve()
    text = open_text(folder)

    def find() -> Iterator[tuple[Run, str]]:
        for file in files:
            experiment = load_experiment(file)
            for run in open_runs(experiment, losses_of(experiment, read_results(results), text.digest)):
                yield run, run.key(text.digest)

    def do(run: Run) -> dict[str, Any]:
        return train(run, text, lambda weights: keep_endpoint(folder, run.key(text.digest), run.config.model, weights))

    work(find, results, folder / "claims", do, time.time() + 60 * arguments.minutes)


def _report(arguments: argparse.Namespace) -> None:
    from spes_p2p.research.plots import draw, draw_front, draw_series
    from spes_p2p.research.queue import read_results
    from spes_p2p.research.report import outcomes, pictured, report
    from spes_p2p.research.spec import load_experiment
    from spes_p2p.research.text import text_digest

    file: Path = arguments.file
    experiment = load_experiment(file)
    folder = (file.parent / experiment.text).resolve()
    digest = experiment.text_sha256 if experiment.text_sha256 and not folder.exists() else text_digest(folder)
    found = outcomes(experiment, read_results(results_of(file)), digest)
    if not found:
        raise UserError(f"{results_of(file)}: has no run of {file}; run tools/experiments run {file}")
    text = report(experiment, found)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"{experiment.name}.md").write_text(text, encoding="utf-8")
    shown = pictured(experiment, found)
    draw(experiment.name, shown, arguments.output / f"{experiment.name}.png")
    draw_front(experiment, found, arguments.output / f"{experiment.name}_front.png")
    draw_series(experiment.name, shown, arguments.output / f"{experiment.name}_rounds.png")
    print(text)


def _evaluate(arguments: argparse.Namespace) -> None:
    from spes_p2p.client.evaluate import evaluate
    from spes_p2p.client.task_names import check_names, parse_tasks
    from spes_p2p.research.report import evaluation_table

    kept = _final_checkpoints(arguments.file, arguments.arm)
    tasks = parse_tasks(arguments.tasks)
    check_names(tasks, arguments.include_path)
    scores = {
        arm: evaluate(path, tasks, include_path=arguments.include_path, limit=arguments.limit)["tasks"]
        for arm, path in kept.items()
    }
    print(evaluation_table(list(tasks), scores))


def _final_checkpoints(file: Path, arms: list[str] | None) -> dict[str, Path]:
    """Return the arms' final checkpoints, first seed at the best rate. Raises UserError if this machine has none."""
    from spes_p2p.research.queue import read_results
    from spes_p2p.research.report import outcomes
    from spes_p2p.research.spec import arm_named, load_experiment
    from spes_p2p.research.text import endpoint_of, text_digest

    experiment = load_experiment(file)
    wanted = {arm_named(experiment, name).name for name in arms or [arm.name for arm in experiment.arms]}
    folder = (file.parent / experiment.text).resolve()
    found = [o for o in outcomes(experiment, read_results(results_of(file)), text_digest(folder)) if o.arm in wanted]
    kept = {o.arm: endpoint_of(folder, o.first["key"]) for o in found if endpoint_of(folder, o.first["key"]).is_dir()}
    if not kept:
        raise UserError(f"{folder / 'endpoints'}: has no arm of {file}; run tools/experiments run {file} on this machine")
    return kept


_COMMANDS = {"prepare": _prepare, "run": _run, "report": _report, "evaluate": _evaluate}
