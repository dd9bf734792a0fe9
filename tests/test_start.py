"""A campaign that starts from an existing checkpoint has its exact weights, and exports them in its family's format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from checkpoints import DENSE, MOE, make_checkpoint
from network_swarm import call
from round_trip import IDS, difference, export, keys_of, started
from safetensors.torch import load_file, save_file
from sample_text import CONFIGS, TEXT
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from spes_p2p.campaign.files import read_campaign
from spes_p2p.campaign.room import Device, find_room
from spes_p2p.campaign.start import base_0, find_start
from spes_p2p.config.model import TransformersModel
from spes_p2p.errors import UserError
from spes_p2p.model import checkpoint as reading
from spes_p2p.model import export as exporting
from spes_p2p.model.build import layout_of
from spes_p2p.model.checkpoint import Checkpoint
from spes_p2p.model.upcycle import UpcycleRule
from spes_p2p.testing.plain_model import plain_model


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("save", [{}, {"max_shard_size": "30KB"}], ids=["whole", "shards"])
def test_each_family_comes_in_and_goes_out_without_a_difference(
    family: str, save: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make_checkpoint(family, tmp_path / "original", **save)
    start, state = started(tmp_path / "original")
    assert difference(original, plain_model(start.model, state).eval()) == 0.0
    monkeypatch.setattr(exporting, "SHARD_BYTES", 40_000 if save else exporting.SHARD_BYTES)
    loaded = export(start, state, tmp_path / "exported")
    assert difference(original, loaded) == 0.0
    assert keys_of(tmp_path / "exported") == keys_of(tmp_path / "original")
    assert (len(list((tmp_path / "exported").glob("*.safetensors"))) > 1) == bool(save)
    kept, given = (json.loads((tmp_path / name / "config.json").read_bytes()) for name in ("exported", "original"))
    assert {name: kept[name] for name in given if given[name] is not None} == {n: v for n, v in given.items() if v is not None}


@pytest.mark.parametrize("family", MOE)
def test_half_precision_is_read_exactly_and_written_rounded(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / "original", torch.bfloat16)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float32).eval()
    start, state = started(tmp_path / "original")
    assert difference(original, plain_model(start.model, state).eval()) == 0.0
    state += np.float32(1e-4)
    loaded = export(start, state, tmp_path / "exported", dtype="bf16")
    assert loaded.dtype == torch.bfloat16
    for name, values in plain_model(start.model, state).named_parameters():
        expected = values.to(torch.bfloat16) if values.requires_grad else values
        torch.testing.assert_close(loaded.state_dict()[name], expected.detach(), rtol=0, atol=0)


def test_large_tensors_are_read_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make_checkpoint("mixtral", tmp_path / "original")
    monkeypatch.setattr(reading, "READ_ELEMENTS", 100)
    monkeypatch.setattr(exporting, "CONVERTED_ELEMENTS", 77)
    start, state = started(tmp_path / "original")
    assert difference(original, export(start, state, tmp_path / "exported")) == 0.0


def test_the_models_config_is_the_checkpoints_own_and_counts_for_the_hash(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    model = find_start(str(tmp_path), tmp_path, None, None, None, None).model
    given = json.loads((tmp_path / "config.json").read_bytes())
    assert isinstance(model, TransformersModel)
    assert model.config == given
    assert model.model_dump(exclude_unset=True) == {"config": given}
    assert hash(model) != hash(TransformersModel(config={**given, "rms_norm_eps": 1e-5}))


@pytest.mark.parametrize("family", DENSE)
def test_identical_experts_compute_what_the_dense_model_does(family: str, tmp_path: Path) -> None:
    dense = make_checkpoint(family, tmp_path / "dense")
    start, state = started(tmp_path / "dense", 4)
    layout = layout_of(start.model)
    assert (start.upcycle, layout.num_experts) == ("copy", 4)
    router = layout.group("router")
    assert state[router.start : router.stop].std() == pytest.approx(0.2, rel=0.2)
    with torch.no_grad():
        expected = dense(input_ids=IDS).logits
        torch.testing.assert_close(plain_model(start.model, state).eval()(input_ids=IDS).logits, expected)
    torch.testing.assert_close(export(start, state, tmp_path / "moe")(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("rule", ["drop", "spes"])
def test_experts_are_told_apart_by_the_rule(rule: UpcycleRule, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "dense")
    start, copies = started(tmp_path / "dense", 4)
    _, state = started(tmp_path / "dense", 4, rule)
    layout = layout_of(start.model)
    shared = layout.group("shared")
    np.testing.assert_array_equal(state[: shared.stop], copies[: shared.stop])
    np.testing.assert_array_equal(state, started(tmp_path / "dense", 4, rule)[1])
    experts = [state[group.start : group.stop] for group in layout.groups if group.expert is not None]
    assert len({expert.tobytes() for expert in experts}) == 4
    for placed in layout.tensors:
        if placed.spec.expert is None:
            continue
        old, new = (values[placed.start : placed.stop].reshape(placed.spec.shape) for values in (copies, state))
        changed = old != new
        if rule == "spes":
            assert changed.mean() == pytest.approx(0.5, abs=0.05)
            assert (new - old)[changed].std() == pytest.approx(0.02, rel=0.1)
        elif placed.spec.name.endswith("down_proj"):
            assert changed.all(axis=0).sum() == 12
            assert changed.any(axis=0).sum() == 12
            assert new[changed].std() == pytest.approx(0.2, rel=0.2)
        else:
            halves = changed.reshape(2, 24, -1)
            assert (halves.all(axis=2).sum(axis=1) == 12).all()
            np.testing.assert_array_equal(halves[0], halves[1])
    router = layout.group("router")
    down = layout.by_name["model.layers.0.mlp.experts.0.down_proj"]
    deviation = copies[down.start : down.stop].std() if rule == "spes" else 0.2
    assert state[router.start : router.stop].std() == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize("name", ["norm", "layers.1.mlp.up_proj", "layers.0.mlp.down_proj"])
def test_a_dense_checkpoint_with_a_weight_that_is_not_finite_is_refused(name: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"model.{name}.weight"].view(-1)[3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has weights that are not finite; download it again"):
        started(tmp_path, 4)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def ends_with(folder: Path, ids: int | list[int], token: str | dict[str, str] | None) -> None:
    edit_config(folder, eos_token_id=ids)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))


def drop_a_tensor(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if key != name}, path)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(("family", "harm", "message"), [
    ("olmoe", lambda f: edit_config(f, model_type="novel"), "model_type = 'novel': no family of language models"),
    ("olmoe", lambda f: edit_config(f, hidden_size="wide"), "model_type = 'olmoe': transformers refuses its config.json"),
    ("olmoe", lambda f: edit_config(f, num_experts=0), r"config.num_experts = 0: must be a whole number greater than 0"),
    ("olmoe", lambda f: edit_config(f, quantization_config={"bits": 4}), "quantised weights cannot be trained"),
    ("olmoe", lambda f: edit_config(f, _attn_implementation="hub/code"), "is each peer's own choice; remove it"),
    ("olmoe", lambda f: edit_config(f, intermediate_size=48), r"is \[32, 24\], the model asks for \[32, 48\]"),
    ("olmoe", lambda f: edit_config(f, num_hidden_layers=3), "has no tensor model.layers.2"),
    ("olmoe", lambda f: edit_config(f, eos_token_id=600), "no token for the model's eos_token_id = 600; it is another model's"),
    ("olmoe", lambda f: edit_config(f, eos_token_id=-1), "no token for the model's eos_token_id = -1; it is another model's"),
    ("olmoe", lambda f: edit_config(f, eos_token_id=2**40), "no token for the model's eos_token_id = 1099511627776"),
    ("olmoe", lambda f: edit_config(f, num_experts={"a": 4}), r"config.num_experts = {'a': 4}: must be a whole number"),
    ("olmoe", lambda f: ends_with(f, 2, "<|endoftext|>"), r"""eos_token_id = 2, .* is the token '"', but .* id 0; edit"""),
    ("olmoe", lambda f: ends_with(f, 2, None), r"""eos_token_id = 2, .* is '"' in .*, an ordinary token; set it"""),
    ("olmoe", lambda f: ends_with(f, [2, 3], {"content": "<|endoftext|>"}), "edit the one that is wrong"),
    ("olmoe", lambda f: drop_a_tensor(f, "model.norm.weight"), "has no tensor model.norm.weight, which the model asks for"),
    ("olmoe", lambda f: cut_short(f / "model.safetensors"), "model.safetensors: missing or cut short"),
    ("olmoe", lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor model.safetensors.index.json"),
    ("olmoe", lambda f: (f / "config.json").unlink(), "has no config.json; name a folder with config.json and safetensors"),
    ("olmoe", lambda f: (f / "config.json").write_text("no"), "config.json: not a transformers config.json"),
    ("olmoe", lambda f: (f / "config.json").write_text('{"a":' * 10**6), "config.json: not a transformers config.json"),
    ("olmoe", lambda f: edit_config(f, note="\ud800"), "half characters"),
    ("olmoe", lambda f: write_index(f, {"weight_map": {"model.norm.weight": ""}}), "index.json: damaged; download it again"),
    ("olmoe", lambda f: write_index(f, {"weight_map": {"model.norm.weight": None}}), "index.json: damaged; download it again"),
    ("olmoe", lambda f: write_index(f, {"weight_map": {"a": "\ud800"}}), "index.json: damaged; download it again"),
    ("olmoe", lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json; name the tokenizer of its text"),
    ("olmoe", lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer.json"),
    ("olmoe", lambda f: (f / "generation_config.json").write_text("[]"), "generation_config.json: not a JSON object"),
    ("llama", lambda f: None, r"a dense model \(llama\); give --experts to upcycle it"),
])
def test_what_cannot_be_a_beginning_is_refused_in_one_line(family: str, harm: Any, message: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    harm(tmp_path)
    with pytest.raises(UserError, match=message) as refusal:
        find_start(str(tmp_path), tmp_path, None, None, None, None)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("ids", "token", "expected"), [
    (0, "<|endoftext|>", "<|endoftext|>"), ([2, 0], "<|endoftext|>", '"'), (0, None, "<|endoftext|>"),
    (None, '"', "<|endoftext|>"),
])
def test_the_models_end_token_ends_documents_if_the_tokenizer_agrees(
    ids: Any, token: Any, expected: str, tmp_path: Path
) -> None:
    make_checkpoint("olmoe", tmp_path)
    ends_with(tmp_path, ids, token)
    assert find_start(str(tmp_path), tmp_path, None, None, None, None).eos_token == expected


def test_random_weights_of_a_family_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    ended = call("init", str(tmp_path / "made"), "--from", str(tmp_path), "--text", str(TEXT / "train/wordnet.jsonl"))
    assert ended.code == 0, ended.stderr
    edit_config(tmp_path / "made", model_type="granitemoe", logits_scaling=2.0, head_dim=8, num_local_experts=4)
    path = tmp_path / "made/campaign.yaml"
    fields = yaml.safe_load(path.read_text())
    del fields["start"]
    path.write_text(yaml.safe_dump(fields))
    files = read_campaign(path)
    with pytest.raises(UserError, match="logits_scaling: its logits are changed after the output head"):
        base_0(files, np.empty(1, np.float32))


@pytest.mark.parametrize(("admission", "audited_share", "is_refused"), [
    ("open", 0.02, True), ("open", 0.0, False), ("friends", 0.02, False),
])
def test_a_model_that_draws_random_numbers_in_training_is_refused_where_phases_are_audited(
    admission: str, audited_share: float, is_refused: bool, tmp_path: Path
) -> None:
    make_checkpoint("olmoe", tmp_path)
    edit_config(tmp_path, attention_dropout=0.1)
    ended = call("init", str(tmp_path / "made"), "--from", str(tmp_path), "--text", str(TEXT / "train/wordnet.jsonl"))
    assert ended.code == 0, ended.stderr
    path = tmp_path / "made/campaign.yaml"
    fields = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**fields, "admission": admission, "sync": {"audited_share": audited_share}}))
    files = read_campaign(path)
    state = np.empty(layout_of(files.campaign.config.model).size, np.float32)
    if is_refused:
        with pytest.raises(UserError, match=r"'olmoe' with attention_dropout = 0\.1: training draws random numbers"):
            base_0(files, state)
    else:
        base_0(files, state)


def test_a_peers_memory_chooses_the_micro_batch_of_a_campaign_from_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path)
    edit_config(tmp_path, max_position_embeddings=2048)
    ended = call("init", str(tmp_path / "made"), "--from", str(tmp_path), "--text", str(TEXT / "train/wordnet.jsonl"))
    assert ended.code == 0, ended.stderr
    edit_config(tmp_path / "made", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
                num_key_value_heads=16, num_experts=8, vocab_size=50304)
    config = read_campaign(tmp_path / "made/campaign.yaml").campaign.config
    assert (config.training.sequence_length, config.training.micro_batch_size) == (2048, None)
    large, small = (find_room(config, Device("cuda", gib * 2**30), "memory").setup for gib in (80, 16))
    assert large.owned == 8
    assert large.micro_batch > small.micro_batch
    assert large.micro_batch > 1


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint("olmoe", tmp_path, max_shard_size="30KB")
    (tmp_path / "model-00002-of-00009.safetensors").unlink(missing_ok=True)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink(missing_ok=True)
    with pytest.raises(UserError, match=f"{shard.name}: missing or cut short"):
        Checkpoint(tmp_path)


def test_a_name_on_the_hub_is_downloaded_and_recorded_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, asked = "0123456789abcdef0123456789abcdef01234567", []
    snapshot = tmp_path / "hub/snapshots" / commit
    original = make_checkpoint("mixtral", snapshot)

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(next(iter(tqdm([snapshot], desc="Fetching"))))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    ended = call("init", str(tmp_path / "made"), "--from", "owner/model@main", "--text", str(TEXT / "train/wordnet.jsonl"))
    assert (ended.code, "Fetching" in ended.stderr) == (0, False), "no terminal shows a bar"
    files = read_campaign(tmp_path / "made/campaign.yaml")
    assert files.campaign.config.start is not None
    assert files.campaign.config.start.checkpoint == f"owner/model@{commit}"
    state = np.empty(layout_of(files.campaign.config.model).size, np.float32)
    base_0(files, state)
    assert difference(original, plain_model(files.campaign.config.model, state).eval()) == 0.0
    assert asked == [("owner/model", "main"), ("owner/model", commit)]


@pytest.mark.parametrize(("family", "changes", "message"), [
    ("olmoe", {}, "has experts already; leave out --experts"),
    ("llama", {"attention_bias": True}, "mixtral has no such layers"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "qwen3_moe has no such layers"),
    ("llama", {"model_type": "gpt2"}, "model_type = 'gpt2': cannot be upcycled; use a dense checkpoint of llama"),
    ("llama", {"hidden_size": "wide"}, "model_type = 'llama': transformers refuses its config.json: StrictDataclass"),
    ("qwen3", {"dtype": "floaty"}, "model_type = 'qwen3': transformers refuses its config.json: AttributeError"),
])
def test_what_cannot_be_upcycled_is_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as refusal:
        find_start(str(tmp_path), tmp_path, None, 4, None, None)
    assert "\n" not in str(refusal.value)


EXPORT = """
import sys
from pathlib import Path
import numpy as np
from spes_p2p.config.model import ModelConfig
from spes_p2p.model.build import layout_of
from spes_p2p.model.export import export_checkpoint
from spes_p2p.rounds.base import load_base, write_base
from spes_p2p.rounds.digest import PIECE_ELEMENTS
from spes_p2p.storage.store import DirectoryStore

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

folder, dtype = Path(sys.argv[1]), sys.argv[2]
model = ModelConfig(vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=64, moe_num_experts=32, moe_top_k=2)
store, size = DirectoryStore(folder / "run"), layout_of(model).size
whole, rest = divmod(size, PIECE_ELEMENTS)
piece = np.ones(PIECE_ELEMENTS, np.float32)
write_base(store, "c" * 64, 1, None, [*[piece] * whole, piece[:rest]]).draft.publish()
before = peak()
values = load_base(store, size, "run").values
export_checkpoint(model, values, Path(sys.argv[3]), "<|endoftext|>", None, folder / "out", dtype=dtype)
print((peak() - before) * 1024 / (4 * size))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_needs_a_fraction_of_the_models_memory(dtype: str, tmp_path: Path) -> None:
    tokenizer = str(CONFIGS / "demo_text/tokenizer_512.json")
    ended = subprocess.run([sys.executable, "-c", EXPORT, str(tmp_path), dtype, tokenizer], capture_output=True, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 0.3


BASE_0 = """
import sys
import threading
from pathlib import Path
from spes_p2p.campaign.start import find_start
from spes_p2p.model.build import layout_of
from spes_p2p.model.checkpoint import Checkpoint, checkpoint_state
from spes_p2p.model.upcycle import upcycled_state
from spes_p2p.storage.store import DirectoryStore

def anonymous():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

folder, rule = Path(sys.argv[1]), sys.argv[2]
start = find_start(str(folder), folder, None, *((None, None, None) if rule == "none" else (8, 2, rule)))
size = layout_of(start.model).size
out = DirectoryStore(folder / "run").scratch("temporary", size)
before, peak, ended = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous())

watching = threading.Thread(target=watch)
watching.start()
if rule == "none":
    checkpoint_state(start.model, Checkpoint(folder), out)
else:
    upcycled_state(start.model, Checkpoint(folder), rule, out)
ended.set()
watching.join()
print((peak - before) * 1024 / (4 * size))
"""
LARGE: dict[str, Any] = {"hidden_size": 512, "num_key_value_heads": 4}


@pytest.mark.long
@pytest.mark.parametrize(("family", "rule", "shape"), [
    ("olmoe", "none", {"num_experts": 16, "intermediate_size": 1024}),
    ("llama", "spes", {"num_hidden_layers": 1, "intermediate_size": 4096}),
])
def test_making_base_0_needs_a_fraction_of_its_memory(
    family: str, rule: str, shape: dict[str, int], tmp_path: Path
) -> None:
    """Of 200 MB, in a mapped file, from a checkpoint in bf16: anonymous memory, which no file backs."""
    make_checkpoint(family, tmp_path, torch.bfloat16, {**LARGE, **shape}, max_shard_size="50MB")
    ended = subprocess.run([sys.executable, "-c", BASE_0, str(tmp_path), rule], capture_output=True, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == 0, ended.stderr
    assert 0 < float(ended.stdout) < 0.2
