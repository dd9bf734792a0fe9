"""Exporting a base as a plain transformers checkpoint in its family's format, which loads without this package."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from spes_p2p.config.model import CONFIG_JSON, ModelConfig, ModelSection
from spes_p2p.errors import UserError
from spes_p2p.model.build import State, empty_model, layout_of, plain_tensor
from spes_p2p.model.checkpoint import INDEX_FILE, SINGLE_FILE
from spes_p2p.model.file_format import FileTensor, Piece, file_tensors
from spes_p2p.observe.units import human_bytes
from spes_p2p.storage.mapped import released
from spes_p2p.storage.tensor_file import Source, tensor_chunks

ExportDtype = Literal["fp32", "bf16"]
DTYPES: dict[ExportDtype, tuple[str, np.dtype[Any]]] = {
    "fp32": ("float32", np.dtype("<f4")), "bf16": ("bfloat16", np.dtype("<u2"))
}
"""Name in transformers, and the numpy type that holds the bits."""
SHARD_BYTES = 5 * 10**9
"""Maximum size of a file, as transformers has it."""
CONVERTED_ELEMENTS = 2**24
"""Elements that are converted at a time: 64 MiB in float32."""


def export_checkpoint(
    config: ModelSection,
    base: State,
    tokenizer_json: Path,
    eos_token: str,
    pad_token: str | None,
    output: Path,
    beside: Mapping[str, str] | None = None,
    dtype: ExportDtype = "fp32",
) -> None:
    """Write model, config and tokenizer to the directory `output`, atomically. `beside`: further text files by name.

    Weights are float32 with the base's exact bits, or rounded to bfloat16, save those that are never trained (`build.py`);
    low-rank terms are added to the experts' matrices.
    They are streamed: if `base` is a mapped file, memory does not depend on the model's size. Raises UserError if `output`
    exists, the base's size is not the model's, the tokenizer does not fit the model, or the disk has no room.
    """
    if output.exists():
        raise UserError(f"{output}: already exists; name another output directory or remove it")
    size = layout_of(config).size
    if base.shape != (size,):
        raise UserError(f"{output}: the base has {base.size} values and the model {size}; export with the base's own config")
    tokenizer = _load_tokenizer(tokenizer_json, eos_token, pad_token or eos_token, config)
    output.parent.mkdir(parents=True, exist_ok=True)
    needed, free = DTYPES[dtype][1].itemsize * size, shutil.disk_usage(output.parent).free
    if needed > free:
        raise UserError(f"{output}: needs {human_bytes(needed)}, the disk has {human_bytes(free)} free; choose another disk")
    partial_output = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _write_config(config, tokenizer, dtype, partial_output)
        _write_weights(config, base, dtype, partial_output)
        tokenizer.save_pretrained(partial_output)
        for name, text in (beside or {}).items():
            (partial_output / name).write_text(text, encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        partial_output.chmod(0o777 & ~umask)
        partial_output.rename(output)
    except BaseException:
        shutil.rmtree(partial_output, ignore_errors=True)
        raise


def _write_config(model: ModelSection, tokenizer: PreTrainedTokenizerFast, dtype: ExportDtype, folder: Path) -> None:
    """Write config.json, which is the campaign's own where it has one, and generation_config.json."""
    empty = empty_model(model)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if isinstance(model, ModelConfig):
        empty.config.update({**ids, "dtype": DTYPES[dtype][0], "architectures": [type(empty).__name__]})
        empty.config.save_pretrained(folder)
    else:
        kept = {name: value for name, value in model.config_json.items() if name != "torch_dtype"}
        missing = {name: value for name, value in ids.items() if kept.get(name) is None}
        written = {**kept, **missing, "dtype": DTYPES[dtype][0], "architectures": [type(empty).__name__]}
        (folder / CONFIG_JSON).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        ids = {name: written[name] for name in ids}
    generation = GenerationConfig.from_model_config(empty.config)
    generation.update(**ids)
    generation.save_pretrained(folder)


def _write_weights(model: ModelSection, base: State, dtype: ExportDtype, folder: Path) -> None:
    exact = {name for name, parameter in empty_model(model).named_parameters() if not parameter.requires_grad}
    shards = list(_shards({
        each.name: _source(model, base, each, "fp32" if each.pieces[0].tensor in exact else dtype)
        for each in file_tensors(model)
    }))
    names = [SINGLE_FILE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    for name, sources in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            for chunk in tensor_chunks(sources, {"format": "pt"}):
                file.write(chunk)
    if len(shards) > 1:
        places = {tensor: name for name, sources in zip(names, shards, strict=True) for tensor in sources}
        total_size = sum(source.nbytes for sources in shards for source in sources.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(sources: Mapping[str, Source]) -> Iterator[dict[str, Source]]:
    """Yield the tensors of each file, in order."""
    shard: dict[str, Source] = {}
    size = 0
    for name, source in sources.items():
        if shard and size + source.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = source
        size += source.nbytes
    yield shard


def _source(model: ModelSection, base: State, tensor: FileTensor, dtype: ExportDtype) -> Source:
    return Source(DTYPES[dtype][1], tensor.shape, partial(_converted, model, base, tensor.pieces, dtype))


def _converted(model: ModelSection, base: State, pieces: Iterable[Piece], dtype: ExportDtype) -> Iterator[np.ndarray]:
    for piece in pieces:
        for values in _exact(model, base, piece):
            if dtype == "fp32":
                yield values
            else:
                yield torch.from_numpy(np.array(values)).to(torch.bfloat16).view(torch.uint16).numpy()


def _exact(model: ModelSection, base: State, piece: Piece) -> Iterator[np.ndarray]:
    """Yield the float32 values of a piece, low-rank terms included."""
    layout = layout_of(model)
    whole = layout.by_name[piece.tensor]
    if model.moe_low_rank and whole.spec.expert is not None:
        values = plain_tensor(base, layout, piece.tensor).numpy().reshape(-1)
        yield values[piece.start - whole.start : piece.stop - whole.start]
        return
    starts = range(piece.start, piece.stop, CONVERTED_ELEMENTS)
    yield from released(base[at : min(at + CONVERTED_ELEMENTS, piece.stop)] for at in starts)


def _load_tokenizer(path: Path, eos_token: str, pad_token: str, config: ModelSection) -> PreTrainedTokenizerFast:
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file; give the campaign's tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    vocabulary = tokenizer.get_vocab()
    for field, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token not in vocabulary:
            raise UserError(f"{path}: has no token '{token}'; set data.{field} to one that the tokenizer knows")
    highest = max(vocabulary.values())
    if highest >= config.vocab_size:
        raise UserError(f"{path}: has ids up to {highest}; model.vocab_size = {config.vocab_size} is too small")
    tokenizer.eos_token, tokenizer.pad_token = eos_token, pad_token
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer
