"""An exported base is a plain transformers checkpoint of the same bits."""

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_shapes import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from spes_p2p.client.export import _newest_base
from spes_p2p.consensus.reform import reform_commit
from spes_p2p.content.bases import Snapshots
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, UserError
from spes_p2p.messages.consensus import Change, Commit, Control
from spes_p2p.messages.presence import Contact
from spes_p2p.messages.samples import Cursor
from spes_p2p.model.build import initial_state, layout_of
from spes_p2p.model.export import export_checkpoint
from spes_p2p.model.file_format import file_tensors
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.rounds.digest import state_digest
from spes_p2p.rounds.outer import base_size
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.testing.simulate.swarm import campaign, simulate

WHOLE, SMALLER = tiny_model(), tiny_model(vocab_size=5)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    words = ["<|endoftext|>", "<pad>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_the_files_are_the_same_with_versions_of_transformers_that_drop_dimensions_of_1(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = file_tensors(WHOLE)
    monkeypatch.setattr("spes_p2p.model.file_format.revert_weight_conversion", lambda *given: {
        name: tensor if tensor.is_meta else tensor.squeeze() for name, tensor in revert_weight_conversion(*given).items()
    })
    assert file_tensors.__wrapped__(WHOLE) == expected


@pytest.mark.parametrize("architecture", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_reloads_in_plain_transformers_with_difference_zero(
    architecture: str, tied: bool, tmp_path: Path, tokenizer_json: Path
) -> None:
    config = tiny_model(architecture=architecture, tie_word_embeddings=tied, norm_topk_prob=True, rope_theta=5000.0)
    base = initial_state(config)
    output = tmp_path / "runs" / "checkpoint"
    export_checkpoint(config, base, tokenizer_json, "<|endoftext|>", None, output)
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    assert loaded.dtype == torch.float32
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0
    assert loaded.config.norm_topk_prob
    ids = torch.arange(48).view(3, 16)
    with torch.no_grad():
        difference = loaded(input_ids=ids).logits - plain_model(config, base).eval()(input_ids=ids).logits
    assert float(difference.abs().max()) == 0.0
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == loaded.config.eos_token_id == 0
    prompt = tokenizer("b c d", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[3, 4, 5]]
    assert loaded.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] <= 6
    assert [path.name for path in output.parent.iterdir()] == ["checkpoint"]
    (tmp_path / "mine").touch()
    usual = (tmp_path / "mine").stat().st_mode
    assert {path.stat().st_mode for path in output.iterdir()} == {usual}, "others may read it as any file made here"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": "</s>"}, "no token '</s>'; set data.eos_token"),
        ({"pad_token": "[PAD]"}, r"no token '\[PAD\]'; set data.pad_token"),
        ({"config": SMALLER, "base": initial_state(SMALLER)}, "ids up to 9; model.vocab_size = 5"),
        ({"tokenizer_json": Path("nowhere.json")}, "nowhere.json: no such tokenizer file"),
        ({"base": np.zeros(3, np.float32)}, "the base has 3 values"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path, tokenizer_json: Path
) -> None:
    fitting = {"config": WHOLE, "base": initial_state(WHOLE), "tokenizer_json": tokenizer_json, "eos_token": "<|endoftext|>",
               "pad_token": "<pad>", "output": tmp_path / "out"}
    with pytest.raises(UserError, match=message):
        export_checkpoint(**{**fitting, **changes})
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_an_existing_output_is_not_touched(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="already exists"):
        export_checkpoint(SMALLER, initial_state(SMALLER), tokenizer_json, "<|endoftext|>", None, tmp_path / "out")


def test_a_failed_export_leaves_nothing(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(WHOLE, initial_state(WHOLE), tokenizer_json, "<|endoftext|>", None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_disk_that_is_full_by_now_leaves_no_half_a_checkpoint(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk had room when it was asked, and others filled it."""
    write = Path.write_text

    def fill(path: Path, *text: Any, **options: Any) -> int:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *text, **options)

    monkeypatch.setattr(Path, "write_text", fill)
    output = tmp_path / "runs" / "checkpoint"
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(WHOLE, initial_state(WHOLE), tokenizer_json, "<|endoftext|>", None, output, {"README.md": "card"})
    assert list(output.parent.iterdir()) == []


def test_a_checkpoint_for_which_the_disk_has_no_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    output = tmp_path / "runs" / "checkpoint"
    with pytest.raises(UserError, match=r"checkpoint: needs [1-9][\d.]+ [kM]B, the disk has 10 B free; choose another disk"):
        export_checkpoint(WHOLE, initial_state(WHOLE), tokenizer_json, "<|endoftext|>", None, output)
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("why", ["reform", "stopped", "paused", "shortened", "complete"])
def test_a_last_base_that_no_later_round_certifies_is_taken_from_the_owners_helpers(tmp_path: Path, why: str) -> None:
    config = campaign().config
    size = base_size(layout_of(config.model), config.outer)
    base, other = np.full(size, 0.5, np.float32), np.zeros(size, np.float32)
    trained = Commit(
        campaign="c", term=0, round=4, parent="p", plan="x", roots=(), dropped=(), base_digest="d", step=40, tokens=1000,
        members=("trainer",), owners=((0,),) * 4, cursor=Cursor(), helpers=("owner",), electorate=("trainer",),
        incarnations=("0" * 16,),
    )  # fmt: skip
    later = replace(trained, round=5)
    shorter = (Change(5, '{"total_steps": 40}'),)
    last = {
        "reform": reform_commit(trained, 1, "owner", "0" * 16, ()),
        "stopped": replace(later, control=Control("c", 1, "stopped", (), -1, b"")),
        "paused": replace(later, control=Control("c", 1, "paused", (), -1, b"")),
        "shortened": replace(later, control=Control("c", 1, "running", shorter, -1, b"")),
        "complete": replace(later, step=60),
    }[why]

    async def newest(bases: dict[str, np.ndarray]) -> tuple[int, str, np.ndarray]:
        network = MemoryNetwork()
        for name, values in bases.items():
            endpoint, offered = RpcEndpoint(network.transport(name), 2.0), Snapshots()
            offered.publish(last.id, last.round, values)
            await offered.serve(endpoint, ContentServer(endpoint))
        contact = Contact("c", 10, "helper", 5, last.id, ())
        swarm = SimpleNamespace(
            contacts=partial(asyncio.sleep, 0, dict.fromkeys(bases, contact)), addresses=("address",),
            endpoint=RpcEndpoint(network.transport("me"), 2.0), genesis=SimpleNamespace(helpers=("owner", "second")),
        )
        chronicle = SimpleNamespace(log=SimpleNamespace(last=last, round=5, commit_at=lambda number: trained))
        return await _newest_base(swarm, config, chronicle, tmp_path, lambda done, total: None, -1)  # type: ignore[arg-type]

    number, digest, values = simulate(partial(newest, {"owner": base, "trainer": other}))
    assert (number, digest) == (5, state_digest(base))
    assert np.array_equal(values, base)
    with pytest.raises(PeerUnreachable, match="no peer offers a trained base"):
        simulate(partial(newest, {"owner": base, "second": other}))
