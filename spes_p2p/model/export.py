"""Exporting a base as a plain transformers checkpoint, which loads without this package."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from spes_p2p.config.campaign import ModelConfig
from spes_p2p.errors import UserError
from spes_p2p.model.build import State, layout_of, plain_model


def export_checkpoint(
    config: ModelConfig,
    base: State,
    tokenizer_json: Path,
    eos_token: str,
    pad_token: str | None,
    output: Path,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write model, config and tokenizer to the directory `output`, atomically. `beside`: further text files by name.

    Weights are float32 with the base's exact bits, except that low-rank terms are added to the experts' matrices. Raises
    UserError if `output` exists, the base's size is not the model's, or the tokenizer does not fit the model.
    """
    if output.exists():
        raise UserError(f"{output}: already exists; name another output directory or remove it")
    size = layout_of(config).size
    if base.shape != (size,):
        raise UserError(f"{output}: the base has {base.size} values and the model {size}; export with the base's own config")
    tokenizer = _load_tokenizer(tokenizer_json, eos_token, pad_token or eos_token, config)
    model = plain_model(config, base)
    model.config.dtype = "float32"
    for ids in (model.config, model.generation_config):
        ids.eos_token_id, ids.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for name, text in (beside or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        for written in partial.iterdir():
            written.chmod(0o666 & ~umask)  # save_pretrained makes weights readable by their owner only
        partial.chmod(0o777 & ~umask)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _load_tokenizer(path: Path, eos_token: str, pad_token: str, config: ModelConfig) -> PreTrainedTokenizerFast:
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
