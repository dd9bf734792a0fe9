"""lm-eval tasks and continued prompts while a campaign runs, in a process of its own that gives way to everything else.

The process is `spes-p2p evaluate --run-dir` or `generate --run-dir`: it reads the newest base on the disk, which stays valid
while rounds go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spes_p2p.config.campaign import CampaignConfig, EvaluationConfig, PeerConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.fields import LONGEST_CONTINUATION, MAX_TASK_SCORES, is_real
from spes_p2p.net.die_with_parent import die_with
from spes_p2p.observe.events import Event, Observer, PromptsContinued, RoundCommitted, TasksEvaluated
from spes_p2p.session.evaluation_room import EvaluationRoom, evaluation_room

logger = logging.getLogger(__name__)

WORK_FOLDER = "evaluation"
"""Folder in the run-dir for the exported copy."""
CONTINUATION_TOKENS = 40
"""Two or three sentences: enough to see what the model has learned, and seconds of work."""
LOWEST_PRIORITY = 19
ONLY_IDLE = "with CPU time that nothing else on this machine wants"
FIRST_TO_KILL = "1000"
"""The kernel's score, of which the largest dies first when memory runs out: not the trainer."""


class Evaluations:
    """Evaluates a base in the rounds that are due, unless the last evaluation still runs."""

    def __init__(self, every_rounds: int, kinds: Mapping[str, Callable[[], Awaitable[Event]]]):
        """`every_rounds`: 0 is never. `kinds`: by what they do; each raises UserError for what this machine lacks."""
        self._every_rounds = every_rounds
        self._kinds = kinds
        self._due = asyncio.Event()
        """Set until the evaluation is over."""
        self._has_skipped = False

    def observe(self, event: Event) -> None:
        """Observer: begins an evaluation when it is due."""
        every = self._every_rounds
        if not isinstance(event, RoundCommitted) or not every or event.round <= 0 or event.round % every:
            return
        if self._due.is_set() and not self._has_skipped:
            self._has_skipped = True
            why = f"since that of an earlier round still goes on, {ONLY_IDLE}"
            logger.info("%s: not after round %d, %s", " and ".join(self._kinds), event.round, why)
        self._due.set()

    async def run(self, observer: Observer) -> None:
        """Evaluate whenever it is due, and tell the results. Never returns."""
        failures = dict.fromkeys(self._kinds, "")
        while await self._due.wait():
            for kind, evaluate in self._kinds.items():
                try:
                    observer(await evaluate())
                    failures[kind] = ""
                except (UserError, OSError) as error:
                    if str(error) != failures[kind]:
                        failures[kind] = str(error)
                        logger.warning("%s failed: %s", kind, error)
            self._has_skipped = False
            self._due.clear()


def evaluations_of(config: CampaignConfig, settings: PeerConfig, parameters: int, memory: int, disk: int) -> Evaluations:
    """Return what runs the campaign's tasks and prompts here; nothing is ever due on a peer that does not offer it, or cannot.

    `memory`, `disk`: bytes that this machine has for it beside the peer.
    """
    evaluation = config.evaluation
    if not settings.evaluate_tasks:
        return Evaluations(0, {})
    if not (evaluation.tasks or evaluation.prompts):
        logger.warning("--evaluate-tasks: this campaign names no tasks and no prompts")
        return Evaluations(0, {})
    try:
        room = evaluation_room(config, parameters, memory, disk)
    except UserError as error:
        logger.warning("--evaluate-tasks: not offered, since %s", error)
        return Evaluations(0, {})
    logger.info("evaluating tasks and prompts takes up to %s", room)
    kinds: dict[str, Callable[[], Awaitable[Event]]] = {}
    if evaluation.tasks:
        kinds["evaluating tasks"] = partial(evaluate_tasks, evaluation, settings, room)
    if evaluation.prompts:
        kinds["continuing prompts"] = partial(continue_prompts, evaluation, settings, room)
    return Evaluations(evaluation.every_rounds, kinds)


async def evaluate_tasks(config: EvaluationConfig, settings: PeerConfig, room: EvaluationRoom) -> TasksEvaluated:
    """Run the campaign's tasks on the newest base on this peer's disk. Raises UserError with the reason without a result."""
    options = ["--run-dir", str(settings.run_dir), "--tasks", ",".join(config.tasks), "--limit", str(config.max_examples),
               "--dtype", room.dtype, "--batch-size", str(room.batch_size)]
    own = [] if settings.include_path is None else ["--include-path", str(settings.include_path)]
    return read_results(await _document_of(["evaluate", *options, *own], settings.run_dir / WORK_FOLDER))


async def continue_prompts(config: EvaluationConfig, settings: PeerConfig, room: EvaluationRoom) -> PromptsContinued:
    """Have the newest base on this peer's disk continue the campaign's prompts. Raises UserError as `evaluate_tasks`."""
    options = ["--run-dir", str(settings.run_dir), "--max-new-tokens", str(CONTINUATION_TOKENS), "--temperature", "0",
               "--dtype", room.dtype]
    prompts = [f"--prompt={prompt}" for prompt in config.prompts]
    return read_continuations(await _document_of(["generate", *options, *prompts], settings.run_dir / WORK_FOLDER))


async def _document_of(command: Sequence[str], folder: Path) -> Any:
    """Return what a command writes to its `--output`, from a process that ends when this coroutine is cancelled.

    Its temporary files are in `folder`. Raises UserError with the command's own error.
    """
    output, process = folder / "results.json", None
    try:
        await asyncio.to_thread(_make_empty, folder)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, str(os.getpid()), *command, "--output", str(output),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        )
        _, errors = await process.communicate()
        code = await process.wait()
        if code == 0:
            return json.loads(output.read_bytes())
    finally:
        if process is not None and process.returncode is None:
            _kill(process)
        shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        raise UserError(f"the process was killed by signal {-code}; it needs memory for the model")
    last_line = (errors.decode(errors="replace").strip().splitlines() or [f"the process ended with code {code}"])[-1]
    raise UserError(last_line.removeprefix("error: ").removeprefix("--tasks: "))


def read_results(results: dict[str, Any]) -> TasksEvaluated:
    """Return what `evaluate` printed, without the subtasks of groups."""
    within = {subtask for subtasks in results["groups"].values() for subtask in subtasks}
    scores = []
    for task, row in results["tasks"].items():
        for name, value in row.items():
            metric, comma, variant = name.partition(",")
            error = row.get(f"{metric}_stderr{comma}{variant}")
            if value is None or not is_real(value):  # the perplexity of a model that has learned little
                continue
            if task not in within and name != "sample_len" and not metric.endswith("_stderr"):
                scores.append((task, name, float(value), float(error) if error is not None and is_real(error) else math.nan))
    return TasksEvaluated(results["round"], tuple(scores[:MAX_TASK_SCORES]))


def read_continuations(results: dict[str, Any]) -> PromptsContinued:
    """Return what `generate` wrote, each text in one line of bounded length without control characters."""
    texts = (each["text"][:LONGEST_CONTINUATION] for each in results["continuations"])
    lines = tuple("".join(sign if sign.isprintable() else " " for sign in text) for text in texts)
    return PromptsContinued(max(0, results["round"]), lines)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill it and wait for its end without the loop: a peer that leaves cancels whatever awaits, again and again."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _make_empty(folder: Path) -> None:
    """An evaluation that was killed leaves its copy."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def main(parent: int, command: list[str]) -> None:
    """Become `spes-p2p COMMAND` with the lowest priority, which the kernel kills when the parent dies.

    It stays in the parent's session, since Linux may divide the cores among sessions before priorities count.
    """
    die_with(parent)
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the peer, which ends this process
    os.nice(LOWEST_PRIORITY)
    Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
    os.execv(sys.executable, [sys.executable, "-m", "spes_p2p", *command])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
