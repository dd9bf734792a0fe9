"""Tokenizers: loading and identifying a campaign's `tokenizer.json`, and training a small one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spes_p2p.errors import UserError

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerIdentity:
    """What a campaign records about its tokenizer."""

    sha256: str
    """Hex digest of tokenizer.json."""
    vocab_size: int
    """Largest id + 1, added tokens included."""
    eos_token_id: int


def load_tokenizer(path: Path) -> Tokenizer:
    """Load tokenizer.json without truncation and padding; text that spells a special token is plain text. Raises UserError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the tokenizer ({error.strerror}); name a tokenizer.json") from None
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{path}: not a tokenizer.json of the `tokenizers` library ({str(error).splitlines()[0]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def check_tokenizer(path: Path, eos_token: str, vocab_size: int | None = None) -> TokenizerIdentity:
    """Return the identity of a tokenizer.json. `vocab_size` is the model's number of embedding rows.

    Raises UserError: unreadable, no such end token, or more ids than rows.
    """
    tokenizer = load_tokenizer(path)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if eos_token not in ids:
        raise UserError(f"{path}: has no token '{eos_token}' to end documents; name one it has (data.eos_token, --eos-token)")
    size = max(ids.values()) + 1
    if vocab_size is not None and size > vocab_size:
        raise UserError(f"{path}: has {size} ids, the model only {vocab_size}; use the tokenizer that the model "
                        f"was trained with, or, for random weights, raise model.vocab_size to at least {size}")
    return TokenizerIdentity(hashlib.sha256(path.read_bytes()).hexdigest(), size, ids[eos_token])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of up to `vocab_size` ids (fewer if the text has fewer merges); id 0 is `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
