"""Text from a checkpoint: what transformers generates, within the context, and nothing that a terminal would obey."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from network_swarm import ENVIRONMENT, START_TIMEOUT_S, call, wait_until
from sample_text import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

from spes_p2p.client import generate
from spes_p2p.client.generate import Continuation, _Pieces, following
from spes_p2p.client.model_card import FACTS_FILE
from spes_p2p.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    make_checkpoint("olmoe", folder)
    return folder


def written(continuation: Continuation, prompt: str, count: int, temperature: float = 0.0) -> str:
    pieces: list[str] = []
    continuation.write(prompt, count, temperature, pieces.append)
    return "".join(pieces)


def test_the_likeliest_continuation_is_that_of_transformers(checkpoint: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("The house", return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert text
    assert written(Continuation(checkpoint, "cpu"), "The house", 8) == text


def test_weights_are_rounded_on_request(checkpoint: Path) -> None:
    rounded, own = Continuation(checkpoint, "cpu", "bf16"), Continuation(checkpoint, "cpu")
    assert (rounded._model.dtype, own._model.dtype) == (torch.bfloat16, torch.float32)
    written(rounded, "The house", 3)


def test_the_lowest_temperature_takes_the_likeliest_token(checkpoint: Path) -> None:
    continuation = Continuation(checkpoint, "cpu")
    assert written(continuation, "The house", 8, temperature=1e-45) == written(continuation, "The house", 8)


def test_a_continuation_ends_with_the_context_and_a_prompt_that_fills_it_is_refused(checkpoint: Path) -> None:
    continuation = Continuation(checkpoint, "cpu")
    tokenizer, context = AutoTokenizer.from_pretrained(checkpoint), continuation._context
    prompt = tokenizer.decode([300] * (context - 3))
    used = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert 0 < used < context
    written(continuation, prompt, 10**6, temperature=1.0)
    with pytest.raises(UserError, match=f"the prompt has {2 * used} tokens; give 1 to {context - 1}"):
        written(continuation, 2 * prompt, 5)
    with pytest.raises(UserError, match="the prompt has 0 tokens"):
        written(continuation, "", 5)
    with pytest.raises(UserError, match="the prompt is not UTF-8"):
        written(continuation, b"caf\xe9".decode(errors="surrogateescape"), 5)


def test_the_tokenizer_of_a_model_with_more_ids_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "mixed")
    shutil.copy(TEXT / "tokenizer.json", tmp_path / "mixed")
    with pytest.raises(UserError, match="mixed: its tokenizer has 4096 ids, the model only 512; they do not belong together"):
        Continuation(tmp_path / "mixed", "cpu")


def test_control_characters_do_not_reach_the_terminal(checkpoint: Path) -> None:
    pieces: list[str] = []
    _Pieces(AutoTokenizer.from_pretrained(checkpoint), pieces.append).on_finalized_text("a\x1b[2Jb\nc")
    assert pieces == ["a?[2Jb\nc"]


def test_prompts_and_continuations_are_written_to_a_file(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "written.json"
    options = ("--max-new-tokens", "3", "--temperature", "0", "--output", str(output))
    ended = call("generate", str(checkpoint), "--prompt", "The house", "--prompt", "The", *options)
    model = Continuation(checkpoint, "cpu")
    expected = [{"round": None, "prompt": text, "text": written(model, text, 3)} for text in ("The house", "The")]
    assert ended.code == 0
    found = {"model": str(checkpoint), "round": None, "continuations": expected}
    assert json.loads(output.read_text()) == found
    ended = call("generate", str(checkpoint), "--prompt", "The house", "--prompt", "The", *options, "--json")
    assert (ended.code, json.loads(ended.stdout)) == (0, found)
    exported = Path(shutil.copytree(checkpoint, tmp_path / "exported"))
    (exported / FACTS_FILE).write_text('{"round": 12}')
    ended = call("generate", str(exported), "--prompt", "The", "--max-new-tokens", "1", "--json")
    found = json.loads(ended.stdout)
    assert [found["round"], *(each["round"] for each in found["continuations"])] == [12, 12]


class Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_who_types_a_line_that_is_too_long_types_another(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, lines = ("--max-new-tokens", "3", "--temperature", "0"), "The " * 10_000 + "\n\nThe house\n"
    expected = written(Continuation(checkpoint, "cpu"), "The house", 3)
    monkeypatch.setattr(sys, "stdin", Typed(lines))
    ended = call("generate", str(checkpoint), *options)
    assert (ended.code, ended.stdout) == (0, f"> > > {expected}\n> ")
    assert ended.stderr.startswith("error: the prompt has ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n" + lines))  # a pipe
    ended = call("generate", str(checkpoint), *options)
    assert (ended.code, ended.stdout.count("\n"), ended.stderr.count("\n")) == (2, 1, 1)
    assert ended.stderr.startswith("error: prompt 2: the prompt has ")


@pytest.mark.parametrize(("options", "error"), [
    (["--follow"], "error: generate: --follow needs --from with an address of the swarm"),
    (["--run-dir", "x"], "error: generate: give a checkpoint folder, --from with an address of the swarm, or --run-dir"),
    (["--prompt", "a", "--prompt", ""], "error: --prompt '': is empty; give text to continue"),
    (["--output", "."], "error: --output .: is a folder; name a file"),
])
def test_options_that_do_not_fit_are_one_line(checkpoint: Path, options: list[str], error: str) -> None:
    ended = call("generate", str(checkpoint), *options)
    assert (ended.code, ended.stderr.startswith(error), ended.stderr.count("\n")) == (2, True, 1)


@dataclass(frozen=True)
class Made:
    """A base as a swarm gives it."""

    origin: Any
    checkpoint: Path

    def write(self, output: Path, dtype: str) -> None:
        shutil.copytree(self.checkpoint, output)


def test_the_newest_model_takes_over_between_two_prompts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "LOOK_EVERY_S", 0.01)
    bases, asked = {4: None, 7: None}, list[int]()

    async def fetch(after: int) -> Any:
        asked.append(after)
        newer = [number for number in bases if number > after]
        if not newer:
            raise UserError("no base after this round yet")
        return Made(SimpleNamespace(round=newer[0]), checkpoint)

    seen = []
    with following(fetch, tmp_path, "cpu", 3) as newer:
        while len(asked) < 4:  # two bases, and looks in vain
            time.sleep(0.01)
        if (found := newer()) is not None:
            seen.append(found)
        assert newer() is None
    assert [number for number, _ in seen] == [7]
    assert written(seen[0][1], "The house", 3) == written(Continuation(checkpoint, "cpu"), "The house", 3)
    assert (asked[:3], list(tmp_path.iterdir())) == ([3, 4, 7], [])


def test_the_command_prints_prompt_and_continuation(checkpoint: Path) -> None:
    ended = call("generate", str(checkpoint), "--prompt", "The house", "--max-new-tokens", "3", "--temperature", "0")
    expected = written(Continuation(checkpoint, "cpu"), "The house", 3)
    assert (ended.code, ended.stdout) == (0, f"The house{expected}\n")


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_leaves_no_temporary_folder(checkpoint: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "spes_p2p", "generate", str(checkpoint)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: list(tmp_path.iterdir()), START_TIMEOUT_S, "it makes its temporary folder")
        process.send_signal(number)
        assert process.wait(START_TIMEOUT_S) == 128 + number
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())
