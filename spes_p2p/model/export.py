"""A committed base as a plain transformers checkpoint, which loads without this package."""

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
    """Write model, config and tokenizer to the directory `output`: float32, the base's exact bits. `beside`: more text files.

    Only terms of low rank are no tensors there: they are added to the experts' matrices.

    Written aside and renamed, so that `output` is whole or not there. Raises UserError when `output` exists, when the base
    is of another size than the model, or when the tokenizer does not fit.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; give another output directory or remove it")
    size = layout_of(config).size
    if base.shape != (size,):
        raise UserError(f"{output}: the base has {base.size} values and the model {size}; export with the base's own config")
    tokenizer = _load_tokenizer(tokenizer_json, eos_token, pad_token or eos_token, config)
    model = plain_model(config, base)
    model.config.dtype = "float32"
    for ids in (model.config, model.generation_config):
        ids.eos_token_id, ids.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for name, text in (beside or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        for written in aside.iterdir():
            written.chmod(0o666 & ~umask)  # weights come as their owner's only
        aside.chmod(0o777 & ~umask)
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
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
