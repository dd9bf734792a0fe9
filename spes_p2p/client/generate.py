"""`spes-p2p generate`: continue text with a checkpoint. transformers generates."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from spes_p2p.client.export import Exportable
from spes_p2p.client.loading import load_model, load_tokenizer
from spes_p2p.errors import UserError, printable

if TYPE_CHECKING:
    from spes_p2p.model.export import ExportDtype

LOOK_EVERY_S = 15.0
"""Pause between two looks for a newer base."""
LOWEST_TEMPERATURE = 1e-6
"""Below it the likeliest token is taken as at 0: logits divided by it could overflow."""
Fetch = Callable[[int], Coroutine[Any, Any, Exportable]]
"""Returns the newest base after a round. Raises UserError if there is none."""
Newer = Callable[[], tuple[int, "Continuation"] | None]
"""Returns the round and the model of a base that has come since it was called last; None: no other."""


class Continuation:
    """Continues text with the model of one checkpoint."""

    def __init__(self, model_dir: Path, device: str, dtype: str | None = None):
        """`dtype` as `--dtype`; None is the checkpoint's own. Raises UserError for a checkpoint that cannot be loaded."""
        self._model = load_model(model_dir, device, dtype)
        self._tokenizer = load_tokenizer(model_dir, self._model)
        self._context: int = self._model.config.max_position_embeddings

    def write(self, prompt: str, max_new_tokens: int, temperature: float, say: Callable[[str], None]) -> str:
        """Pass the continuation to `say`, piece by piece, and return it; without control characters: others trained it.

        It ends with the end-of-text token, after `max_new_tokens`, or where the model's context is full. Temperature 0 takes
        the likeliest token each time. Raises UserError for a prompt that leaves no room, or is no text.
        """
        if any(map(_is_undecoded, prompt)):
            raise UserError("the prompt is not UTF-8; convert it to UTF-8")
        tokens = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False, verbose=False)
        ids = tokens["input_ids"].to(self._model.device)
        room = self._context - ids.shape[1]
        if ids.shape[1] == 0 or room < 1:
            raise UserError(f"the prompt has {ids.shape[1]} tokens; give 1 to {self._context - 1}")
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature >= LOWEST_TEMPERATURE:
            sampling = {"do_sample": True, "temperature": temperature}
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            say(piece)

        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(max_new_tokens, room),
                streamer=_Pieces(self._tokenizer, take), pad_token_id=self._tokenizer.eos_token_id, **sampling,
            )
        return "".join(pieces)


def _is_undecoded(character: str) -> bool:
    """Return whether this stands for a byte of the command line or of standard input that is no text."""
    return 0xD800 <= ord(character) <= 0xDFFF


class _Pieces(TextStreamer):  # type: ignore[misc]
    """Passes on the generated text, without the prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take a piece of the continuation."""
        self._say(printable(text))


@contextlib.contextmanager
def unchanging() -> Iterator[Newer]:
    """Yield what never has a newer model."""
    yield lambda: None


@contextlib.contextmanager
def following(
    fetch: Fetch, folder: Path, device: str, known_round: int, dtype: ExportDtype = "fp32"
) -> Iterator[Newer]:
    """While the block runs, fetch and load each base after this round in a thread, beside the model that is in use.

    `folder`: for checkpoints, which are removed once they are loaded.
    """
    ready: list[tuple[int, Continuation]] = []
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    async def follow() -> None:
        task, newest = asyncio.current_task(), known_round
        assert task is not None
        running.set_result((asyncio.get_running_loop(), task))
        while True:
            with contextlib.suppress(UserError):  # no newer base, or the swarm is silent: look again
                made = await fetch(newest)
                newest, checkpoint = made.origin.round, folder / f"round-{made.origin.round}"
                await asyncio.to_thread(made.write, checkpoint, dtype)
                del made
                ready[:] = [(newest, await asyncio.to_thread(Continuation, checkpoint, device))]
                shutil.rmtree(checkpoint)
            await asyncio.sleep(LOOK_EVERY_S)

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(follow())

    thread = threading.Thread(target=run, name="newer bases")
    thread.start()
    loop, task = running.result()
    try:
        yield lambda: ready.pop() if ready else None
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
