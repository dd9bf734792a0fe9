"""A wrong configuration costs one line: what is wrong, where, what to do. A right one means the same on every peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from spes_p2p import __version__
from spes_p2p.config.campaign import (
    SCHEMA_VERSION,
    Campaign,
    CampaignConfig,
    CodecConfig,
    TrainingConfig,
    load_campaign_config,
    make_peer_config,
    parse_campaign,
    parse_campaign_config,
)
from spes_p2p.errors import UPGRADE, UserError

ROOT = Path(__file__).parents[1]

GOOD = """\
name: tiny
model:
  vocab_size: 512
  hidden_size: 64
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 128
  moe_num_experts: 8
  moe_top_k: 2
training:
  sequence_length: 64
  batch_size: 8
  total_steps: 40
  sync_steps: 5
  learning_rate: 3e-3
experts:
  experts_per_peer: 2
merge:
  merge_interval: 10
data:
  manifest: tokens/manifest.json
  tokenizer: tokenizer.json
"""


def message_for(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_campaign_config(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "FILE")


# (what is replaced in GOOD, by what, the exact message)
BAD_FILES = [
    ("batch_size: 8", "batch_sise: 8", "FILE, line 14: unknown field 'training.batch_sise'; did you mean 'batch_size'?"),
    ("training:", "trainning:", "FILE, line 12: unknown field 'trainning'; did you mean 'training'?"),
    ("name: tiny", "name: tiny\nlearning_rate: 1.0",
     "FILE, line 2: unknown field 'learning_rate'; it belongs in section 'training'"),
    ("  manifest:", "  sync_steps: 5\n  manifest:",
     "FILE, line 23: unknown field 'data.sync_steps'; it belongs in section 'training'"),
    ("  manifest:", "  name: tiny\n  manifest:",
     "FILE, line 23: unknown field 'data.name'; it belongs at the top level"),
    ("  experts_per_peer: 2", "  zebra: 2",
     "FILE, line 19: unknown field 'experts.zebra'; remove it; valid here: experts_per_peer, redundancy"),
    ("name: tiny", "name: tiny\n7: x",
     "FILE, line 2: unknown field '7'; remove it; valid here: "
     "admission, data, evaluation, experts, merge, model, name, outer, schema_version, start, sync, training"),
    ("  experts_per_peer: 2", "  rotate_rounds: 3",
     "FILE, line 19: unknown field 'experts.rotate_rounds'; remove it; valid here: experts_per_peer, redundancy"),
    ("  sync_steps: 5\n", "", "FILE, line 12: training.sync_steps is missing; add it"),
    ("data:\n  manifest: tokens/manifest.json\n  tokenizer: tokenizer.json\n", "", "FILE: data is missing; add it"),
    ("experts:\n  experts_per_peer: 2", "experts:",
     "FILE, line 18: experts = (nothing): must be a section; indent its fields below it"),
    ("experts:\n  experts_per_peer: 2", "experts: 2",
     "FILE, line 18: experts = 2: must be a section; indent its fields below it"),
    ("experts_per_peer: 2", "experts_per_peer: 9",
     "FILE, line 19: experts.experts_per_peer = 9: must be at most model.moe_num_experts = 8"),
    ("moe_top_k: 2", "moe_top_k: 9",
     "FILE, line 11: model.moe_top_k = 9: must be at most moe_num_experts = 8"),
    ("sequence_length: 64", "sequence_length: 256",
     "FILE, line 13: training.sequence_length = 256: must be at most model.max_position_embeddings = 128"),
    ("merge_interval: 10", "merge_interval: 12",
     "FILE, line 21: merge.merge_interval = 12: must be a multiple of training.sync_steps = 5"),
    ("total_steps: 40", "total_steps: 42", "FILE, line 15: training.total_steps = 42: must be a multiple of sync_steps = 5"),
    ("total_steps: 40", "total_steps: 40\n  warmup_steps: 40",
     "FILE, line 16: training.warmup_steps = 40: must be less than total_steps = 40"),
    ("batch_size: 8", "batch_size: 8\n  micro_batch_size: 3",
     "FILE, line 15: training.micro_batch_size = 3: must divide batch_size = 8"),
    ("hidden_size: 64", "hidden_size: 60",
     "FILE, line 4: model.hidden_size = 60: must be a multiple of twice num_attention_heads = 4"),
    ("num_key_value_heads: 2", "num_key_value_heads: 3",
     "FILE, line 8: model.num_key_value_heads = 3: must divide num_attention_heads = 4"),
    ("moe_num_experts: 8", "moe_num_experts: eight", "FILE, line 10: model.moe_num_experts = 'eight': must be a whole number"),
    ("moe_num_experts: 8", "moe_num_experts: 8.5", "FILE, line 10: model.moe_num_experts = 8.5: must be a whole number"),
    ("moe_num_experts: 8", "moe_num_experts: true", "FILE, line 10: model.moe_num_experts = true: must be a whole number"),
    ("moe_num_experts: 8", "moe_num_experts: 0", "FILE, line 10: model.moe_num_experts = 0: must be greater than 0"),
    ("moe_num_experts: 8", "moe_num_experts:", "FILE, line 10: model.moe_num_experts = (nothing): must be a whole number"),
    ("sequence_length: 64", "sequence_length: 1",
     "FILE, line 13: training.sequence_length = 1: must be at least 2"),
    ("learning_rate: 3e-3", "learning_rate: fast", "FILE, line 17: training.learning_rate = 'fast': must be a number"),
    ("learning_rate: 3e-3", "learning_rate: true", "FILE, line 17: training.learning_rate = true: must be a number"),
    ("learning_rate: 3e-3", "learning_rate: .nan", "FILE, line 17: training.learning_rate = nan: must be a finite number"),
    ("learning_rate: 3e-3", "learning_rate: 1.0\n  beta2: 1", "FILE, line 18: training.beta2 = 1: must be less than 1"),
    ("moe_top_k: 2", "moe_top_k: 2\n  norm_topk_prob: perhaps",
     "FILE, line 12: model.norm_topk_prob = 'perhaps': must be true or false"),
    ("moe_top_k: 2", "moe_top_k: 2\n  architecture: olmo",
     "FILE, line 12: model.architecture = 'olmo': must be 'olmoe' or 'qwen3_moe'"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  min_peers: 0",
     "FILE, line 23: sync.min_peers = 0: must be greater than 0 with admission: friends"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  min_peers: 5000",  # round 0 would wait for ever
     "FILE, line 23: sync.min_peers = 5000: must be at most 1024"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  silence_s: 0.01",
     "FILE, line 23: sync.silence_s = 0.01: must be at least 1"),
    ("experts_per_peer: 2", "redundancy: 1000000", "FILE, line 19: experts.redundancy = 1000000: must be at most 1024"),
    ("learning_rate: 3e-3", "learning_rate: 1e300", "FILE, line 17: training.learning_rate = 1e+300: must be at most 1000000"),
    ("batch_size: 8", f"batch_size: {2**31}", "FILE, line 14: training.batch_size = 2147483648: must be at most 1048576"),
    ("total_steps: 40", f"total_steps: 40\n  decay_steps: {10**20}",
     "FILE, line 16: training.decay_steps = 100000000000000000000: must be at most 1e+12"),
    ("moe_top_k: 2", f"moe_top_k: 2\n  seed: {10**20}",
     "FILE, line 12: model.seed = 100000000000000000000: must be at most 1e+18"),
    ("moe_top_k: 2", "moe_top_k: 2\n  init_cutoff_factor: 1e-9",  # making base 0 would never end
     "FILE, line 12: model.init_cutoff_factor = 1e-09: must be at least 0.1"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  codec: gzip",
     "FILE, line 23: sync.codec = 'gzip': must be one of none, fp16, int8, int4, ternary, sparse16, sparse, sparse64, or a "
     "section with router, shared and experts"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  codec:\n    router: fp32",
     "FILE, line 24: sync.codec.router = 'fp32': must be 'none', 'fp16', 'int8', 'int4', 'ternary', "
     "'sparse16', 'sparse' or 'sparse64'"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  codec:\n    expert: int8",
     "FILE, line 24: unknown field 'sync.codec.expert'; did you mean 'experts'?"),
    ("merge_interval: 10", "merge_interval: 10\nsync:\n  codec: 8",
     "FILE, line 23: sync.codec = 8: must be a section; indent its fields below it"),
    ("name: tiny", "name: two words",
     "FILE, line 1: name = 'two words': must be 1 to 63 letters (a to z), digits, '.', '_' or '-', and begin with a letter or "
     "digit"),
    ("tokenizer: tokenizer.json", "tokenizer: [a, b]", "FILE, line 24: data.tokenizer = ['a', 'b']: must be text"),
    ("tokenizer: tokenizer.json", "tokenizer: ''", "FILE, line 24: data.tokenizer = '': must not be empty"),
    ("batch_size: 8", "batch_size: 8\n  batch_size: 16", "FILE, line 15: field 'batch_size' is given twice; keep one"),
    ("batch_size: 8", "batch_size: 8: 9",
     "FILE, line 14: not valid YAML (mapping values are not allowed here); check indentation and colons"),
    (GOOD, "", "FILE: a campaign file is a mapping of fields to values, but this file is empty"),
    (GOOD, "- a\n- b\n", "FILE: a campaign file is a mapping of fields to values, but this file is a list"),
    (GOOD, "hello", "FILE: a campaign file is a mapping of fields to values, but this file is a single value"),
    (GOOD, "a: \x07", "FILE: not valid YAML (special characters are not allowed); check indentation and colons"),
    ("learning_rate: 3e-3", "learning_rate: 2024-13-45",
     "FILE, line 17: training.learning_rate = '2024-13-45': must be a number"),
    ("learning_rate: 3e-3", "learning_rate: !!int x",
     "FILE: has a value that cannot be read (invalid literal for int() with base 10: 'x'); correct it"),
    (GOOD, "[" * 5000, "FILE: has a value that cannot be read (maximum recursion depth exceeded); correct it"),
]


@pytest.mark.parametrize(("old", "new", "expected"), BAD_FILES, ids=[case[2][6:60] for case in BAD_FILES])
def test_a_bad_campaign_file_costs_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert message_for(tmp_path / "campaign.yaml", GOOD.replace(old, new, 1)) == expected


def test_a_misspelt_field_is_named_before_what_follows_from_it(tmp_path: Path) -> None:
    """`sync_step` leaves `sync_steps` missing, and other fields may be wrong too; the misspelling is what to fix."""
    text = GOOD.replace("sync_steps", "sync_step").replace("vocab_size: 512", "vocab_size: -1")
    message = message_for(tmp_path / "campaign.yaml", text)
    assert message == "FILE, line 16: unknown field 'training.sync_step'; did you mean 'sync_steps'?"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent: cannot read the campaign file \(No such file or directory\); give"):
        load_campaign_config(tmp_path / "absent")
    with pytest.raises(UserError, match=r"cannot read the campaign file \(Is a directory\)"):
        load_campaign_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(UserError, match=r"binary: not a text file; give a campaign file in YAML"):
        load_campaign_config(tmp_path / "binary")


@pytest.mark.parametrize("content", ['{"version": "1", "model": {"type": "BPE"}, "padding": []}', '{"config": {"name": "x"}}'])
def test_a_file_of_another_kind_is_no_campaign_file(tmp_path: Path, content: str) -> None:
    assert message_for(tmp_path / "file", content).startswith("FILE: no campaign file: ")


def test_a_good_file_means_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(GOOD)
    config = load_campaign_config(path)
    assert config.training.learning_rate == 0.003
    assert config.total_rounds == 8
    assert config.sync.codec == CodecConfig(router="none", shared="int4", experts="int4")
    with pytest.raises(ValueError, match="frozen"):
        config.training.batch_size = 9  # type: ignore[misc]


def test_one_codec_name_stands_for_all_three(tmp_path: Path) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(GOOD + "sync:\n  codec: int4\n")
    assert load_campaign_config(path).sync.codec == CodecConfig(router="int4", shared="int4", experts="int4")
    path.write_text(GOOD + "sync:\n  codec:\n    shared: fp16\n")
    assert load_campaign_config(path).sync.codec == CodecConfig(router="none", shared="fp16", experts="int4")


def test_messages_of_a_parsed_config_name_their_origin() -> None:
    with pytest.raises(UserError, match=r"^peer 7: model is missing; add it$"):
        parse_campaign_config({"name": "x"}, "peer 7")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_the_project_is_valid(path: Path) -> None:
    load_campaign_config(path)


def campaign(**changes: Any) -> Campaign:
    raw = yaml.safe_load(GOOD)
    raw["training"]["learning_rate"] = 0.003
    values = {"config": CampaignConfig.model_validate(raw), "manifest_sha256": "1" * 64, "validation_manifest_sha256": None,
              "tokenizer_sha256": "2" * 64}
    return Campaign.model_validate({**values, **changes})


def test_a_campaign_is_the_same_after_publishing() -> None:
    published = campaign().canonical_json()
    assert parse_campaign(published, "a").hash == campaign().hash
    assert parse_campaign(published, "a").canonical_json() == published


def test_the_hash_tells_campaigns_apart() -> None:
    config = campaign().config
    other_seed = config.model_copy(update={"training": config.training.model_copy(update={"seed": 1})})
    campaigns = [
        campaign(),
        campaign(config=other_seed),
        campaign(config=config.model_copy(update={"name": "other"})),
        campaign(manifest_sha256="3" * 64),
        campaign(validation_manifest_sha256="1" * 64),
        campaign(tokenizer_sha256="1" * 64),
    ]
    assert len({campaign.hash for campaign in campaigns}) == len(campaigns)


def test_a_release_with_a_new_field_keeps_the_hash_of_a_campaign() -> None:
    class NextTraining(TrainingConfig):
        new_in_the_next_release: int = 0

    class NextConfig(CampaignConfig):
        training: NextTraining

    class NextCampaign(Campaign):
        config: NextConfig

    published = campaign().canonical_json()
    upgraded = NextCampaign.model_validate_json(published)
    assert upgraded.config.training.new_in_the_next_release == 0
    assert upgraded.canonical_json() == published


def test_a_field_that_the_owner_wrote_counts_even_where_it_is_the_default() -> None:
    default = campaign().config.training.beta1
    written = campaign().config.training.model_copy(update={"beta1": default})
    config = campaign().config.model_copy(update={"training": written})
    assert campaign(config=config).hash != campaign().hash


def sections_in(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from sections_in(inner)


def defaults(section: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        sections = list(sections_in(field.annotation))
        if sections:
            found[name] = {key: value for each in sections for key, value in defaults(each).items()}
        elif not field.is_required():
            found[name] = field.default
    return found


def test_defaults_of_a_schema_version_stay() -> None:
    """Campaigns are hashed without the fields that their owners left out: another default would train something else."""
    known = json.loads((ROOT / "tests/schema_defaults.json").read_text())[str(SCHEMA_VERSION)]
    assert _changed(known, json.loads(json.dumps(defaults(CampaignConfig)))) == [], "give SCHEMA_VERSION a new number"


def _changed(known: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for name, value in known.items():
        if isinstance(value, dict):
            found += _changed(value, now.get(name, {}), f"{path}{name}.")
        elif name not in now or now[name] != value:
            found.append(f"{path}{name}")
    return found


@pytest.mark.parametrize(("published", "expected"), [
    (b"\x00", "ADDRESS: does not publish a campaign; check the address"),
    (b"[]", "ADDRESS: does not publish a campaign; check the address"),
    (b'{"config": []}', "ADDRESS: does not publish a campaign; check the address"),
    (campaign().canonical_json().replace(b'"name":', b'"schema_version":2,"name":'),
     f"ADDRESS: has schema version 2, but this version of spes_p2p ({__version__}) supports up to 1; "
     f"to upgrade, {UPGRADE}"),
    (campaign().canonical_json().replace(b'"sync_steps"', b'"sync_step"'),
     f"ADDRESS: the campaign cannot be used by this version of spes_p2p ({__version__}): unknown field "
     f"'config.training.sync_step'; did you mean 'sync_steps'?; to upgrade, {UPGRADE}"),
])
def test_a_published_campaign_that_cannot_be_used(published: bytes, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_campaign(published, "ADDRESS")
    assert str(caught.value) == expected


@pytest.mark.parametrize(("options", "expected"), [
    ({"devices": "gpu"}, "--devices 'gpu': must be auto, all, cpu, or numbers of GPUs such as 0,1,2,3"),
    ({"devices": "0,"}, "--devices '0,': must be auto, all, cpu, or numbers of GPUs such as 0,1,2,3"),
    ({"devices": "cpu,0"}, "--devices 'cpu,0': must be auto, all, cpu, or numbers of GPUs such as 0,1,2,3"),
    ({"experts": "0"}, "--experts '0': must be auto or a whole number greater than 0"),
    ({"experts": "many"}, "--experts 'many': must be auto or a whole number greater than 0"),
    ({"metrics_port": 70000}, "--metrics-port 70000: must be at most 65535"),
    ({"listen": ["localhost:4000"]}, "--listen 'localhost:4000': must be a multiaddress such as /ip4/0.0.0.0/tcp/31337"),
    ({"listen": ["/ip4/0.0.0.0/tcp/70000"]},
     "--listen '/ip4/0.0.0.0/tcp/70000': must be a multiaddress such as /ip4/0.0.0.0/tcp/31337"),
    *(({"announce": [wrong]}, f"--announce '{wrong}': must be a multiaddress at which others reach this machine, such as "
                              "/ip4/203.0.113.7/tcp/31337")
      for wrong in ("/ip4/1.2.3.400/tcp/1", "/ip4/0.0.0.0/tcp/1", "/ip4/203.0.113.7/tcp/0")),
    ({"listen": ["/ip4/::1/tcp/1"]}, "--listen '/ip4/::1/tcp/1': must be a multiaddress such as /ip4/0.0.0.0/tcp/31337"),
    ({"log_level": "loud"}, "--log-level 'loud': must be 'debug', 'info', 'warning' or 'error'"),
    ({"devise": "cpu"}, "unknown field '--devise'; did you mean 'devices'?"),
])
def test_a_bad_option_costs_one_line(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        make_peer_config(run_dir="runs/x", **options)
    assert str(caught.value) == expected


def test_options_that_were_not_given_take_their_defaults(tmp_path: Path) -> None:
    listen = ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/0")
    config = make_peer_config(run_dir=tmp_path, devices=None, experts="3", listen=list(listen), identity=None)
    assert (config.devices, config.experts, config.metrics_port) == ("auto", 3, None)
    assert config.listen == listen
    assert config.identity_path == tmp_path / "identity.key"


def test_the_configuration_reference_is_current() -> None:
    command = [sys.executable, "tools/config_reference", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
