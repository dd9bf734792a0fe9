"""Reading a Hugging Face checkpoint into the flat state, by range: no tensor has to fit into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from spes_p2p.config.model import CONFIG_JSON, ModelSection, read_config_json
from spes_p2p.errors import UserError
from spes_p2p.model.build import State, layout_of
from spes_p2p.model.file_format import FileTensor, file_tensors

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
READ_ELEMENTS = 2**24
"""Elements that are read at a time: 64 MiB in float32."""
FLOATS = ("F32", "BF16", "F16", "F64")


class Checkpoint:
    """A folder with `config.json` and safetensors files. Keeps one file open at a time."""

    def __init__(self, folder: Path):
        """Raises UserError if the folder is not such a checkpoint, or one of its files is missing or cut short."""
        self.folder = folder
        if not (folder / CONFIG_JSON).is_file():
            lacks = f"has no {CONFIG_JSON}" if folder.is_dir() else "no such checkpoint folder"
            raise UserError(f"{folder}: {lacks}; name a folder with {CONFIG_JSON} and safetensors files")
        self.config = read_config_json(folder / CONFIG_JSON)
        self._open_name, self._open_file = "", cast(Any, None)
        self._file_of = self._read_index()
        for name in sorted(set(self._file_of.values())):
            present = set(self._file(name).keys())
            lost = sorted(tensor for tensor, file in self._file_of.items() if file == name and tensor not in present)
            if lost:
                raise UserError(f"{folder / name}: has no tensor {lost[0]}, which {INDEX_FILE} places there; download it again")

    def __contains__(self, tensor: str) -> bool:
        """Return whether a file has this tensor."""
        return tensor in self._file_of

    def check(self, tensor: FileTensor) -> None:
        """Raise UserError unless the checkpoint has this tensor, of this shape, in floating point."""
        if tensor.name not in self._file_of:
            raise UserError(f"{self.folder}: has no tensor {tensor.name}, which the model asks for; it is "
                            f"another model's checkpoint, its {CONFIG_JSON} is another one's, or a file is missing")
        stored = self._slice(tensor.name)
        if tuple(stored.get_shape()) != tensor.shape:
            raise UserError(f"{self.folder}: {tensor.name} is {list(stored.get_shape())}, the model asks for "
                            f"{list(tensor.shape)}; it is another model's checkpoint, or its {CONFIG_JSON} is another one's")
        if stored.get_dtype() not in FLOATS:
            raise UserError(f"{self.folder}: {tensor.name} is stored as {stored.get_dtype()}; quantised weights cannot be "
                            "trained, start from the unquantised checkpoint")

    def copy(self, tensor: FileTensor, state: State) -> None:
        """Copy a tensor into its ranges of the flat state."""
        stored, at = self._slice(tensor.name), 0
        if not tensor.shape:
            state[tensor.pieces[0].start] = self._file(self._file_of[tensor.name]).get_tensor(tensor.name).float()
            return
        row = tensor.size // tensor.shape[0]
        for piece in tensor.pieces:
            end = at + (piece.stop - piece.start) // row
            for first in range(at, end, max(1, READ_ELEMENTS // row)):
                last = min(end, first + max(1, READ_ELEMENTS // row))
                start = piece.start + (first - at) * row
                state[start : start + (last - first) * row] = stored[first:last].to(torch.float32).numpy().reshape(-1)
            at = end

    def _read_index(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            if not (self.folder / SINGLE_FILE).exists():
                raise UserError(f"{self.folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}; give a safetensors checkpoint")
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        try:
            places: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            places = {}
        if not places or not all(isinstance(file, str) and file and file.isprintable() for file in places.values()):
            raise UserError(f"{index}: damaged; download it again")
        return places

    def _file(self, name: str) -> Any:
        if name != self._open_name:
            try:
                self._open_file = safe_open(self.folder / name, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.folder / name}: missing or cut short ({error}); download it again") from None
            self._open_name = name
        return self._open_file

    def _slice(self, tensor: str) -> Any:
        return self._file(self._file_of[tensor]).get_slice(tensor)


def check_complete(model: ModelSection, checkpoint: Checkpoint) -> None:
    """Raise UserError unless the checkpoint has all weights of this model. Reads no weights."""
    for tensor in file_tensors(model):
        checkpoint.check(tensor)


def checkpoint_state(model: ModelSection, checkpoint: Checkpoint, out: State) -> None:
    """Write the checkpoint's weights to `out`, flat float32 `[layout.size]`; low-rank terms are zero. Raises UserError."""
    check_complete(model, checkpoint)
    for placed in layout_of(model).tensors:
        if placed.spec.is_low_rank:
            out[placed.start : placed.stop] = 0
    for tensor in file_tensors(model):
        checkpoint.copy(tensor, out)
    if not np.isfinite(out.min() + out.max()):
        raise UserError(f"{checkpoint.folder}: has weights that are not finite; download it again")
