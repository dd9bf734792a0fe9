"""Documents to token ids: in their order, one end token after each and none before, the same however they are batched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from spes_p2p.data.documents import Documents


@dataclass(frozen=True)
class Encoder:
    """A campaign's tokenizer and the token that ends its documents."""

    tokenizer: Tokenizer
    eos_token_id: int
    batch_characters: int
    """So many characters are encoded at once, in several threads; bounds memory, does not change the tokens."""

    def encode(self, documents: Documents) -> Iterator[tuple[list[npt.NDArray[np.uint32]], int]]:
        """(ids of each document of a batch, its end token among them; bytes of the text file read so far)."""
        for texts, done in self._batches(documents):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            yield [np.asarray([*encoding.ids, self.eos_token_id], np.uint32) for encoding in encodings], done

    def _batches(self, documents: Documents) -> Iterator[tuple[list[str], int]]:
        texts: list[str] = []
        characters = done = 0
        for text, done in documents:
            texts.append(text)
            characters += len(text)
            if characters >= self.batch_characters:
                yield texts, done
                texts, characters = [], 0
        if texts:
            yield texts, done
