"""lm-eval on an exported checkpoint, in this process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from spes_p2p.client.loading import DTYPES, load_model, load_tokenizer
from spes_p2p.client.task_names import unknown_task
from spes_p2p.errors import UserError, first_line
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.library_bars import library_bars
from spes_p2p.storage.files import write_whole

LOCAL_BUILDERS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text"})
"""Values of a task's `dataset_path` that read files of this machine."""


def evaluate(
    model_dir: Path,
    tasks: Mapping[str, int | None],
    include_path: Path | None = None,
    limit: int | None = None,
    device: str = "cpu",
    batch_size: int | str = 8,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Run lm-eval tasks on a Hugging Face checkpoint.

    Returns `{"model", "tasks": {task: {metric: value}}, "samples", "num_fewshot", "versions", "groups": {group: [subtask]},
    "cut": {task: examples whose prompt is longer than the context}, "context", "lm_eval", "dtype", "device"}`. Values are JSON
    values (NaN is null).

    `tasks`: few-shot examples in the prompt by task; None is the task's own number. `limit` is the number of examples of each
    task. `batch_size` may be "auto": the largest that fits the GPU. Tasks are looked up in `include_path` first; only if one is
    missing there, lm-eval's own are scanned (about 30 s). When all tasks read local data, nothing asks the network.
    Raises UserError for a missing or damaged checkpoint, an unknown task, shots that a task does not allow, or a task whose
    data cannot be loaded.
    """
    check_checkpoint(model_dir)
    manager = find_tasks(tasks, include_path)
    local = all(_reads_local_data(manager, task) for task in tasks)
    with _offline() if local else contextlib.nullcontext(), _quiet(), library_bars():
        loaded = _load_tasks(manager, tasks)
        model = _load_model(model_dir, device, batch_size, dtype)
        import lm_eval.evaluator

        # git writes to the terminal where this folder is in no repository; and the user's commit says nothing of a model.
        lm_eval.evaluator.get_git_commit_hash = lambda: None
        try:
            outcome = lm_eval.simple_evaluate(model=model, tasks=loaded, limit=limit, task_manager=manager, log_samples=False)
        except (AssertionError, ValueError) as error:
            if "fewshot samples" in str(error) or "larger than population" in str(error):
                raise UserError("--tasks: a task has fewer examples to show than its shots; give fewer shots") from None
            if isinstance(error, ValueError):
                raise
            longest = model.max_length  # lm-eval asserts that a continuation fits into the model's context
            raise UserError(f"{model_dir}: the context is {longest} tokens, but an answer of {', '.join(tasks)} is longer; "
                            "choose tasks with shorter answers") from None
    weights = str(model.model.dtype).removeprefix("torch.")
    cut = dict(sorted(Counter(task for task, _ in model.cut).items()))
    conditions = {"model": str(model_dir), "lm_eval": lm_eval.__version__, "dtype": weights, "device": device}
    return _summary(outcome, {**conditions, "cut": cut, "context": model.max_length})


def check_checkpoint(model_dir: Path) -> None:
    """Check that a Hugging Face checkpoint is complete, reading only headers and sizes.

    Raises UserError naming the file that is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not model_dir.is_dir():
        raise UserError(f"{model_dir}: no such checkpoint folder; `spes-p2p export` writes one")
    for name in ("config.json", "tokenizer.json"):
        _read_json(model_dir / name)
    index, single = model_dir / "model.safetensors.index.json", "model.safetensors"
    tensor_files = _read_json(index).get("weight_map", {}) if index.exists() else {}
    if not isinstance(tensor_files, dict) or not all(isinstance(f, str) and f.isprintable() for f in tensor_files.values()):
        raise UserError(f"{index}: damaged; export the checkpoint again")
    for shard in sorted(set(tensor_files.values()) or {single}):
        expected = {name for name, file in tensor_files.items() if file == shard}
        try:
            with safe_open(model_dir / shard, "numpy") as weights:
                missing = sorted(expected - set(weights.keys()))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{model_dir / shard}: missing or damaged ({error}); export the checkpoint again") from None
        if missing:
            raise UserError(f"{model_dir / shard}: tensor {missing[0]} is missing, which {index.name} places there; "
                            "export the checkpoint again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: missing or unreadable ({error.strerror}); export the checkpoint again") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path}: damaged; export the checkpoint again")
    return content


def check_options(limit: int | None, device: str, batch_size: str, dtype: str | None) -> None:
    """Raise UserError for an invalid number or dtype, or a device that is not available."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1; omit it to evaluate all examples")
    check_dtype(dtype)
    check_device(device)
    if batch_size != "auto" and not (batch_size.isdecimal() and int(batch_size) > 0):
        raise UserError(f"--batch-size {batch_size}: must be a number of at least 1, or auto")
    if device == "cpu" and batch_size == "auto":  # lm-eval exhausts the memory on purpose, which ends the process here
        raise UserError("--batch-size auto: needs --device cuda; give a number")


def check_dtype(dtype: str | None) -> None:
    """Raise UserError for an invalid dtype."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: must be bf16 or fp32; omit it for the checkpoint's own")


def check_device(device: str) -> None:
    """Raise UserError for a device that is not available."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: must be cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu")


def find_tasks(tasks: Iterable[str], include_path: Path | None) -> Any:
    """Return an lm-eval TaskManager that knows the tasks; lm-eval's own tasks are loaded only if needed.

    Raises UserError for an unknown task, suggesting the closest known one.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    for task in tasks:
        if task not in manager.task_index:
            raise unknown_task(task, manager.all_tasks)
    return manager


def write_into_card(
    model_dir: Path, results: dict[str, Any], tasks: str, include_path: Path | None, limit: int | None, batch_size: str
) -> None:
    """Add the results of `evaluate` to the model card if `export` wrote it. It names no folder's parents."""
    from spes_p2p.client.model_card import CARD_FILE, FACTS_FILE, with_evaluation

    if not (model_dir / FACTS_FILE).exists():
        return
    own_tasks = None if include_path is None else include_path.resolve().name
    dtype = next((name for name, value in DTYPES.items() if value == results["dtype"]), None)
    options = {"--tasks": tasks, "--dtype": dtype, "--device": results["device"], "--batch-size": batch_size, "--limit": limit,
               "--include-path": own_tasks}
    given = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
    command = shlex.join(["spes-p2p", "evaluate", "PATH", *given])
    card = model_dir / CARD_FILE
    write_whole(card, with_evaluation(card.read_text(encoding="utf-8"), results, command, own_tasks).encode())


def _reads_local_data(manager: Any, task: str) -> bool:
    entry = manager.task_index.get(task)
    source = (entry.cfg or {}).get("dataset_path") if entry else None
    return source in LOCAL_BUILDERS or (isinstance(source, str) and Path(source).is_dir())


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep Hugging Face libraries, imported already or later, from using the network."""
    import datasets.config
    import huggingface_hub.constants

    switches = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in switches]
    environment = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    try:
        for module, name in switches:
            setattr(module, name, True)
        os.environ.update(dict.fromkeys(environment, "1"))
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)
        for name, text in environment.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def render(results: Mapping[str, Any]) -> str:
    """Return the results of `evaluate` as a table for people, without the subtasks of groups."""
    from spes_p2p.client.model_card import EVALUATION_COLUMNS, conditions, evaluation_rows

    of_round = f", base of round {results['round']}" if "round" in results else ""
    rows = [EVALUATION_COLUMNS, *evaluation_rows(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    cut = [f"{count} of {results['samples'][task]} in {task}" for task, count in results["cut"].items()]
    advice = "; give fewer shots" if any(results["num_fewshot"].get(task) for task in results["cut"]) else ""
    warning = (f"warning: prompts longer than the model's context of {results['context']} tokens have lost their beginning, "
               f"shots first: {', '.join(cut)}{advice}")
    return "\n".join([f"{results['model']}{of_round}; {conditions(results)}", *table, *([warning] if cut else [])])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' warnings about their own API use and about each truncated example."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.get_verbosity()  # it sets its own level when it is used first
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers", "accelerate")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _load_tasks(manager: Any, tasks: Mapping[str, int | None]) -> list[Any]:
    """Load task and group objects with their data. lm-eval and datasets raise arbitrary exceptions for missing data."""
    loaded: list[Any] = []
    seen: dict[str, str] = {}
    for task, shots in tasks.items():
        try:
            found = manager.load([task])
        except Exception as error:
            reason = first_line(error)
            raise UserError(f"task '{task}' cannot be loaded: {reason}; check its YAML file, data and network") from None
        for leaf in found["tasks"].values():
            if seen.setdefault(leaf.task_name, task) != task:
                both = f"both '{seen[leaf.task_name]}' and '{task}'"
                raise UserError(f"--tasks: '{leaf.task_name}' is in {both}; give one of them")
            if shots is None:
                continue
            if leaf.get_config("num_fewshot") == 0 != shots:  # its prompt has no place for examples, or contains its own
                raise UserError(f"--tasks {task}:{shots}: the task '{leaf.task_name}' fixes its shots to 0; omit the number")
            leaf.set_config(key="num_fewshot", value=shots)
            if shots > (shown := _examples_to_show(leaf)):
                raise UserError(f"--tasks {task}:{shots}: the task '{leaf.task_name}' has {shown} examples to show; give at "
                                f"most {shown} shots")
        loaded.extend([found["groups"][task]] if task in found["groups"] else found["tasks"].values())
    return loaded


def _examples_to_show(leaf: Any) -> int:
    """Return how many examples a task has for a prompt: without its question, if examples and questions are the same split."""
    asks_the_same = hasattr(leaf, "fewshot_cfg") and leaf.fewshot_cfg.split == leaf.config.test_split  # lm-eval's own rule
    return len(list(leaf.fewshot_docs())) - asks_the_same


def _load_model(model_dir: Path, device: str, batch_size: int | str, dtype: str | None) -> Any:
    from lm_eval.models.huggingface import HFLM

    class NotingCuts(HFLM):  # type: ignore[misc]
        """Keeps (task, document) of the prompts that lm-eval cuts to the context."""

        cut: ClassVar[set[tuple[str, int]]] = set()

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            self._asked = requests
            return super().loglikelihood(requests, disable_tqdm)

        def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **options: Any) -> Any:
            asked, self._asked = self._asked, []
            for request, (_, context, continuation) in zip(asked, requests, strict=False):
                if len(context) + len(continuation) > self.max_length + 1:
                    self.cut.add((request.task_name, request.doc_id))
            return super()._loglikelihood_tokens(requests, *arguments, **options)

    model = load_model(model_dir, device, dtype)
    return NotingCuts(pretrained=model, tokenizer=load_tokenizer(model_dir, model), batch_size=batch_size)


def _summary(outcome: Any, conditions: dict[str, Any]) -> dict[str, Any]:
    scores = {
        task: {name.removesuffix(",none"): value for name, value in row.items() if isinstance(value, (int, float))}
        for task, row in outcome["results"].items()
    }
    samples = {task: counts["effective"] for task, counts in outcome["n-samples"].items()}
    groups = {group: children for group, children in outcome["group_subtasks"].items() if children}
    summary: dict[str, Any] = to_json(
        {**conditions, "tasks": scores, "samples": samples, "num_fewshot": dict(outcome["n-shot"]),
         "versions": dict(outcome["versions"]), "groups": groups}
    )
    return summary
