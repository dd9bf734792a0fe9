"""Is a Hugging Face checkpoint whole? Answered from headers and file sizes, before minutes go into loading it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER_BYTES = 100 * 2**20


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
        if not 0 < header_bytes <= min(size - 8, LONGEST_HEADER_BYTES):
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
