"""lm-eval on an exported checkpoint, in this process."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.observe.json_values import to_json

LOCAL_BUILDERS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text"})
"""Values of a task's `dataset_path` that read files of this machine."""


def evaluate(
    model_dir: Path,
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    limit: int | None = None,
    device: str = "cpu",
    batch_size: int = 8,
) -> dict[str, Any]:
    """Run lm-eval tasks on a Hugging Face checkpoint; `{"model", "tasks": {task: {metric: value}}, "samples", "num_fewshot"}`.

    `num_fewshot` overrides the tasks' own number, except where a task fixes it to 0; `limit` is the number of examples of each
    task. Tasks are looked up in `include_path` first; only if one is missing there, lm-eval's own are scanned (about 20 s).
    When all tasks read local data, nothing asks the network. Values are JSON values (NaN is null).
    Raises UserError for a missing or damaged checkpoint, an unknown task, or a task whose data cannot be loaded.
    """
    check_checkpoint(model_dir)
    manager = find_tasks(tasks, include_path)
    local = all(_reads_local_data(manager, task) for task in tasks)
    with _offline() if local else contextlib.nullcontext(), _quiet():
        loaded = _load_tasks(manager, tasks)
        model = _load_model(model_dir, device, batch_size)
        import lm_eval

        try:
            outcome = lm_eval.simple_evaluate(
                model=model, tasks=loaded, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
            )
        except AssertionError:  # lm-eval asserts that a continuation fits into the model's context
            longest = model.max_length
            raise UserError(f"{model_dir}: the context is {longest} tokens, but an answer of {', '.join(tasks)} is longer; "
                            "choose tasks with shorter answers") from None
    return _summary(model_dir, outcome)


def check_checkpoint(model_dir: Path) -> None:
    """Check that a Hugging Face checkpoint is complete, reading only headers and sizes.

    Raises UserError naming the file that is missing or truncated.
    """
    from safetensors import SafetensorError, safe_open

    if not model_dir.is_dir():
        raise UserError(f"{model_dir}: no such checkpoint folder; `spes-p2p export` writes one")
    for name in ("config.json", "tokenizer.json"):
        _read_json(model_dir / name)
    index, single = model_dir / "model.safetensors.index.json", "model.safetensors"
    tensor_files = _read_json(index).get("weight_map", {}) if index.exists() else {}
    for shard in sorted(set(tensor_files.values()) or {single}):
        expected = {name for name, file in tensor_files.items() if file == shard}
        try:
            with safe_open(model_dir / shard, "numpy") as weights:
                missing = sorted(expected - set(weights.keys()))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{model_dir / shard}: missing or truncated ({error}); export the checkpoint again") from None
        if missing:
            raise UserError(f"{model_dir / shard}: tensor {missing[0]} is missing, which {index.name} places there; "
                            "export the checkpoint again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        return content
    except (OSError, ValueError):
        raise UserError(f"{path}: missing or truncated; export the checkpoint again") from None


def check_options(num_fewshot: int | None, limit: int | None, device: str) -> None:
    """Raise UserError for an invalid number or a device that is not available."""
    if num_fewshot is not None and num_fewshot < 0:
        raise UserError(f"--num-fewshot {num_fewshot}: must be 0 or more; omit it for the task's own number")
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1; omit it to evaluate all examples")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: must be cpu or cuda")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; give --device cpu")


def find_tasks(tasks: Sequence[str], include_path: Path | None) -> Any:
    """Return an lm-eval TaskManager that knows the tasks; lm-eval's own tasks are loaded only if needed.

    Raises UserError for an unknown task, suggesting the closest known one.
    """
    if not tasks:
        raise UserError("--tasks is empty; give at least one lm-eval task")
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path}: no such folder; give the folder of the tasks' YAML files")
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        close = difflib.get_close_matches(unknown[0], manager.all_tasks, n=1)
        advice = f"did you mean '{close[0]}'?" if close else "`lm-eval ls tasks` lists the known ones"
        raise UserError(f"--tasks: unknown task '{unknown[0]}'; {advice}")
    return manager


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


def _load_tasks(manager: Any, tasks: Sequence[str]) -> list[Any]:
    """Load task and group objects with their data. lm-eval and datasets raise arbitrary exceptions for missing data."""
    loaded: list[Any] = []
    for task in tasks:
        try:
            found = manager.load([task])
            loaded.extend([found["groups"][task]] if task in found["groups"] else found["tasks"].values())
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"task '{task}' cannot be loaded: {reason}; check its YAML file and its data") from None
    return loaded


def _load_model(model_dir: Path, device: str, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto", output_loading_info=True)
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(f"{model_dir}: no weights for {missing[0]}; config.json and weights do not belong together")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return HFLM(pretrained=model.to(device).eval(), tokenizer=tokenizer, batch_size=batch_size)


def _summary(model_dir: Path, outcome: Any) -> dict[str, Any]:
    scores = {
        task: {name.removesuffix(",none"): value for name, value in row.items() if isinstance(value, (int, float))}
        for task, row in outcome["results"].items()
    }
    samples = {task: counts["effective"] for task, counts in outcome["n-samples"].items()}
    summary: dict[str, Any] = to_json(
        {"model": str(model_dir), "tasks": scores, "samples": samples, "num_fewshot": dict(outcome["n-shot"])}
    )
    return summary
