"""What a checkpoint has beside weights and tokenizer.json travels with the campaign, and is in what export writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from network_swarm import call
from sample_text import TEXT
from transformers import AutoTokenizer, GenerationConfig

from spes_p2p.campaign.files import CampaignFiles, fetch_campaign, keep_campaign, read_campaign, read_run_dir
from spes_p2p.campaign.genesis import make_genesis
from spes_p2p.campaign.start import base_0
from spes_p2p.campaign.start_files import exported_files, parse_start_files
from spes_p2p.client.export import Exportable
from spes_p2p.client.model_card import origin_of
from spes_p2p.content.files import serve_files
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import UserError
from spes_p2p.messages.codec import pack
from spes_p2p.messages.content import CampaignRecord
from spes_p2p.messages.methods import CAMPAIGN, PROTOCOL_VERSION
from spes_p2p.model.build import layout_of
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import simulate

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so it is"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "!", "unk_token": None,
             "model_max_length": 64, "additional_special_tokens": ["#"], "auto_map": {"AutoTokenizer": ["their.Code", None]},
             "name_or_path": "/home/owner/model"}
GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [0, 2], "pad_token_id": 0}


def released(family: str, folder: Path, template: str) -> Path:
    """A checkpoint with its tokenizer's settings, its chat template in one of two places, and sampling."""
    make_checkpoint(family, folder)
    settings = {**TOKENIZER, "chat_template": TEMPLATE} if template == "inside" else TOKENIZER
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template == "beside":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "!", "eos_token": "<|endoftext|>"}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, 2]}))
    return folder


def started_from(checkpoint: Path, folder: Path, *options: str) -> CampaignFiles:
    ended = call("init", str(folder), "--from", str(checkpoint), "--text", str(TEXT / "train/wordnet.jsonl"), *options)
    assert ended.code == 0, ended.stderr
    return read_campaign(folder / "campaign.yaml")


def exportable(files: CampaignFiles) -> Exportable:
    weights = np.empty(layout_of(files.campaign.config.model).size, np.float32)
    base_0(files, weights)
    return Exportable(files, weights, origin_of(files.campaign, 1, "d" * 64, ()))


async def fetched(files: CampaignFiles) -> CampaignFiles:
    """The campaign as a volunteer downloads it."""
    network = MemoryNetwork()
    owner, volunteer = (RpcEndpoint(network.transport(name), 2.0) for name in ("owner", "volunteer"))
    genesis = make_genesis(files.campaign, "owner", np.zeros(4, np.float32), "0" * 32)
    sizes = tuple((sha, len(body)) for sha, body in files.blobs.items())
    record = CampaignRecord(PROTOCOL_VERSION, "0", files.campaign.canonical_json(), genesis, sizes)

    async def answer(stream: Stream) -> None:
        await stream.message()
        await stream.send(pack(record))

    await owner.serve(CAMPAIGN, answer)
    await serve_files(ContentServer(owner), files.blobs)
    return (await fetch_campaign(volunteer, ["owner"]))[0]


def in_run_dir(files: CampaignFiles, folder: Path) -> CampaignFiles:
    folder.mkdir()
    keep_campaign(files, make_genesis(files.campaign, "owner", np.zeros(4, np.float32), "0" * 32), folder)
    read = read_run_dir(folder)
    assert read is not None
    return read[0]


@pytest.mark.parametrize(("family", "template", "options"), [
    ("qwen3_moe", "inside", ()), ("olmoe", "beside", ()), ("llama", "beside", ("--experts", "4")),
])
def test_a_checkpoint_that_went_through_a_campaign_talks_and_ends_as_the_original(
    family: str, template: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    original = released(family, tmp_path / "original", template)
    files = in_run_dir(simulate(lambda: fetched(started_from(original, tmp_path / "made", *options))), tmp_path / "run")
    made = exportable(read_campaign(tmp_path / "made/campaign.yaml"))
    Exportable(files, made.values, made.origin).write(tmp_path / "out", start_files=True)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (original, tmp_path / "out"))
    text = after.apply_chat_template(TALK, tokenize=False)
    assert text == before.apply_chat_template(TALK, tokenize=False)
    assert text.startswith("!USER: hi<|endoftext|>")
    assert after("hi # there").input_ids == before("hi # there").input_ids
    assert after.special_tokens_map == {**before.special_tokens_map, "pad_token": "<|endoftext|>"}
    ends, given = (GenerationConfig.from_pretrained(folder) for folder in (tmp_path / "out", original))
    assert ends.eos_token_id == [0, 2]
    assert ends.to_diff_dict() == given.to_diff_dict()
    assert json.loads((tmp_path / "out/config.json").read_bytes())["eos_token_id"] == [0, 2]
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()


def test_no_setting_that_names_code_or_a_place_comes_out(tmp_path: Path) -> None:
    files = started_from(released("olmoe", tmp_path / "original", "inside"), tmp_path / "made")
    exportable(files).write(tmp_path / "out", start_files=True)
    kept = json.loads((tmp_path / "out/tokenizer_config.json").read_bytes())
    assert set(TOKENIZER) - set(kept) == {"auto_map", "name_or_path"}
    harmful = json.dumps({"vocab_file": "/etc/passwd", "fast_tokenizer_files": ["x"], "legacy": True})
    bundle = json.dumps({"tokenizer_config.json": harmful}).encode()
    out = json.loads(exported_files(bundle, "</s>", None)["tokenizer_config.json"])
    assert out == {"legacy": True, "eos_token": "</s>", "pad_token": "</s>"}


def test_what_peers_evaluate_while_they_train_has_nothing_of_them(tmp_path: Path) -> None:
    files = started_from(released("olmoe", tmp_path / "original", "beside"), tmp_path / "made")
    exportable(files).write(tmp_path / "out")
    assert not (tmp_path / "out/chat_template.jinja").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None
    assert "do_sample" not in json.loads((tmp_path / "out/generation_config.json").read_bytes())


def test_they_are_part_of_the_campaigns_identity_and_older_campaigns_keep_theirs(tmp_path: Path) -> None:
    files = started_from(released("olmoe", tmp_path / "original", "beside"), tmp_path / "made")
    (tmp_path / "made/chat_template.jinja").write_text("other")
    assert read_campaign(tmp_path / "made/campaign.yaml").campaign.hash != files.campaign.hash
    path = tmp_path / "made/campaign.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("  files: [")))
    old = read_campaign(path)
    assert old.start_files is None
    assert b"files" not in old.campaign.canonical_json()
    exportable(old).write(tmp_path / "out", start_files=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("generation_config.json", b"[1]", "generation_config.json: not a JSON object"),
    ("tokenizer_config.json", b'{"a":' * 30000, "tokenizer_config.json: not a JSON object"),
    ("chat_template.jinja", b"\xff", "chat_template.jinja: not UTF-8"),
    ("chat_template.jinja", b"x" * 2**23, "bytes, more than 8388608; leave one out of start.files"),
])
def test_a_file_that_cannot_be_one_leaves_one_line_and_no_folder(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    released("olmoe", tmp_path / "original", "beside")
    (tmp_path / "original" / name).write_bytes(content)
    text = str(TEXT / "train/wordnet.jsonl")
    ended = call("init", str(tmp_path / "made"), "--from", str(tmp_path / "original"), "--text", text)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [
    b"\xff", b"[]", b"[" * 100000, b'{"../../evil": "x"}', b'{"chat_template.jinja": 3}', b'{"chat_template.jinja": "\\ud800"}',
    b'{"generation_config.json": "no"}',
])
def test_what_a_hostile_owner_publishes_in_their_place_is_refused_by_export_in_one_line(content: Any) -> None:
    with pytest.raises(UserError) as refused:
        parse_start_files(content, "start.files")
    assert "\n" not in str(refused.value)


def test_a_volunteer_downloads_no_more_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = started_from(released("olmoe", tmp_path / "original", "beside"), tmp_path / "made")
    monkeypatch.setattr("spes_p2p.campaign.files.MAX_START_FILES_BYTES", 100)
    with pytest.raises(UserError, match=r"bytes \(limit: 100\); ask the campaign's owner"):
        asyncio.run(fetched(files))
