"""Model and tokenizer of a checkpoint, loaded by transformers; what it finds wrong is one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError

DTYPES = {"bf16": "bfloat16", "fp32": "float32", None: "auto"}
"""Names of `--dtype` in transformers; None is the checkpoint's own."""


def load_model(model_dir: Path, device: str, dtype: str | None) -> Any:
    """Return the model of a checkpoint, to be evaluated. Raises UserError unless it has all weights, and finite ones."""
    from transformers import AutoModelForCausalLM

    with _one_line(model_dir):
        model, loading = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=DTYPES[dtype], device_map=device, output_loading_info=True, ignore_mismatched_sizes=True
        )
    missing = sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])})
    if missing:
        raise UserError(f"{model_dir}: no weights for {missing[0]}; config.json and weights do not belong together")
    for name, weights in model.named_parameters():
        if not weights.sum().isfinite():
            raise UserError(f"{model_dir}: {name} has weights that are not finite; export or download it again")
    return model.eval()


def load_tokenizer(model_dir: Path, model: Any) -> Any:
    """Return the tokenizer of a checkpoint. Raises UserError if it is another model's, with more ids."""
    from transformers import AutoTokenizer

    with _one_line(model_dir):
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids, rows = tokenizer.vocab_size, model.get_input_embeddings().num_embeddings
    if ids > rows:
        raise UserError(f"{model_dir}: its tokenizer has {ids} ids, the model only {rows}; they do not belong together")
    return tokenizer


@contextlib.contextmanager
def _one_line(model_dir: Path) -> Iterator[None]:
    """Raise UserError for whatever transformers raises, without its tables and progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # of many types for damaged files
        reason = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {reason}"
        raise UserError(f"{model_dir}: transformers cannot load it ({problem}); export or download it again") from None
    finally:
        logging.set_verbosity(verbosity)
