"""lm-eval on an exported checkpoint, in this process."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.observe.plain import plain

LOCAL_BUILDERS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text"})
"""Values of a task's `dataset_path` that read files of this machine."""

SAFETENSORS_HEADER_LIMIT = 100 * 2**20
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


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
    manager = _find_tasks(tasks, include_path)
    local = all(_reads_local_data(manager, task) for task in tasks)
    with _offline() if local else contextlib.nullcontext():
        return _run(model_dir, _load_tasks(manager, tasks), manager, num_fewshot, limit, device, batch_size)


def check_checkpoint(model_dir: Path) -> None:
    """Is this a whole Hugging Face checkpoint? Reads only headers and file sizes.

    Raises UserError naming the file that is missing or cut short.
    """
    if not model_dir.is_dir():
        raise UserError(f"{model_dir}: no such checkpoint folder; `spes-p2p export` writes one")
    for name in ("config.json", "tokenizer.json"):
        _read_json(model_dir / name)
    if not (model_dir / INDEX_FILE).exists():
        _check_safetensors(model_dir / SINGLE_FILE, ())
        return
    weight_map = _read_json(model_dir / INDEX_FILE).get("weight_map", {})
    for shard in sorted(set(weight_map.values())):
        _check_safetensors(model_dir / shard, [name for name, file in weight_map.items() if file == shard])


def _check_safetensors(path: Path, expected: Sequence[str]) -> None:
    """The layout: 8 bytes of header length (little-endian), a JSON header with each tensor's byte range, then the tensors."""
    again = "export the checkpoint again"
    if not path.exists():
        raise UserError(f"{path}: the weights are missing; {again}")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < header_bytes <= min(size - 8, SAFETENSORS_HEADER_LIMIT):
            raise UserError(f"{path}: cut short in the header ({size} bytes); {again}")
        try:
            tensors = {name: entry for name, entry in json.loads(file.read(header_bytes)).items() if name != "__metadata__"}
            whole = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: not a safetensors file (its header is damaged); {again}") from None
    if size != whole:
        raise UserError(f"{path}: {size} bytes, but its header promises {whole}; {again}")
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise UserError(f"{path}: tensor {missing[0]} is missing, which {INDEX_FILE} places there; {again}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError:
        raise UserError(f"{path}: missing; {path.parent} is no complete Hugging Face checkpoint") from None
    except ValueError:
        raise UserError(f"{path}: not valid JSON (cut short?); export the checkpoint again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; export the checkpoint again")
    return content


def _find_tasks(tasks: Sequence[str], include_path: Path | None) -> Any:
    """An lm-eval TaskManager that knows all tasks."""
    if not tasks:
        raise UserError("--tasks is empty; name at least one lm-eval task")
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
    """Forbid the Hugging Face libraries to use the network: for what is imported from now on, and for what already is."""
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


def _load_tasks(manager: Any, tasks: Sequence[str]) -> list[Any]:
    """Task objects with their data. lm-eval and datasets raise anything at all for data that is not there."""
    loaded: list[Any] = []
    for task in tasks:
        try:
            loaded.extend(manager.load([task])["tasks"].values())
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"task '{task}' cannot be loaded: {reason[0]}; check its YAML file and that its data is there") from None
    return loaded
