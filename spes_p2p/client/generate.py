"""`spes-p2p generate`: continue text with a checkpoint. transformers generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from spes_p2p.client.evaluate import load_model
from spes_p2p.errors import UserError, printable


class Continuation:
    """Continues text with the model of one checkpoint."""

    def __init__(self, model_dir: Path, device: str):
        """Raises UserError where weights are missing."""
        self._model = load_model(model_dir, device, None)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._context: int = self._model.config.max_position_embeddings

    def write(self, prompt: str, max_new_tokens: int, temperature: float, say: Callable[[str], None]) -> None:
        """Pass the continuation to `say`, piece by piece, without control characters: others trained the model.

        It ends with the end-of-text token, after `max_new_tokens`, or where the model's context is full. Temperature 0 takes
        the likeliest token each time. Raises UserError for a prompt that leaves no room.
        """
        ids = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(self._model.device)
        room = self._context - ids.shape[1]
        if ids.shape[1] == 0 or room < 1:
            raise UserError(f"--prompt: has {ids.shape[1]} tokens; give 1 to {self._context - 1}")
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(max_new_tokens, room),
                streamer=_Pieces(self._tokenizer, say), pad_token_id=self._tokenizer.eos_token_id, **sampling,
            )


class _Pieces(TextStreamer):  # type: ignore[misc]
    """Passes on the generated text, without the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take a piece of the continuation."""
        self._say(printable(text))
