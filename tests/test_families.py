"""Each family of mixtures of experts comes in and goes out without a difference, or is refused by name in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_classes import classes_of
from moe_families import MOE_TYPES, small_config
from round_trip import IDS, difference, export, keys_of, started
from sample_text import CONFIGS

from spes_p2p.campaign.planner import plan_peer
from spes_p2p.campaign.room import Device
from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.config.model import TransformersModel
from spes_p2p.config.problems import validated
from spes_p2p.errors import UserError
from spes_p2p.model.build import build_model, layout_of, transformers_config
from spes_p2p.model.families import check_family
from spes_p2p.testing.plain_model import plain_model

UPCYCLING = CONFIGS.parent / "docs/upcycling.md"


def documented() -> list[str]:
    """The families that docs/upcycling.md lists."""
    _, _, after = UPCYCLING.read_text().partition("<!-- families -->")
    return [name.strip(" `\n") for name in after.partition("<!-- end of families -->")[0].split(",")]


ACCEPTED = documented()


def test_the_documented_families_are_those_of_the_installed_transformers() -> None:
    assert len(ACCEPTED) > 15
    assert sorted(set(ACCEPTED)) == ACCEPTED
    assert set(ACCEPTED) < set(MOE_TYPES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ACCEPTED)
def test_a_family_comes_in_trains_the_same_function_and_goes_out_without_a_difference(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = classes_of(family)[1](small_config(family)).float().eval()
    original.save_pretrained(tmp_path / "original")
    shutil.copy(CONFIGS / "demo_text/tokenizer_512.json", tmp_path / "original/tokenizer.json")
    start, state = started(tmp_path / "original")
    assert difference(original, plain_model(start.model, state).eval()) == 0.0
    with torch.no_grad():
        partitioned = build_model(start.model, state, (0, 3), stored="fp32").eval()
        torch.testing.assert_close(partitioned(input_ids=IDS).logits, original(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert difference(original, export(start, state, tmp_path / "exported")) == 0.0
    assert keys_of(tmp_path / "exported") == keys_of(tmp_path / "original")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", sorted(set(MOE_TYPES) - set(ACCEPTED)))
def test_any_other_family_is_refused_in_one_line(family: str) -> None:
    try:
        config = small_config(family)
    except (AttributeError, TypeError, ValueError):
        config = classes_of(family)[0]()
    with pytest.raises(UserError) as refusal:
        check_family(validated(TransformersModel, {"config": json.loads(config.to_json_string())}, lambda location: "config"))
    assert "\n" not in str(refusal.value)


@pytest.mark.long
def test_qwen3_30b_a3b_can_be_said_and_planned_without_its_memory() -> None:
    campaign = load_campaign_config(CONFIGS / "30b.yaml")
    assert isinstance(campaign.model, TransformersModel)
    check_family(campaign.model)
    config, layout = transformers_config(campaign.model), layout_of(campaign.model)
    assert (config.head_dim, config.rope_parameters["rope_theta"], config.norm_topk_prob) == (128, 1e6, True)
    expert = 48 * 3 * 768 * 2048
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 2 * 2048
    assert layout.num_experts == 128
    assert {layout.expert(number).size for number in range(128)} == {expert}
    assert layout.group("router").size == 48 * 128 * 2048
    assert layout.group("shared").size == 2 * 151936 * 2048 + 48 * attention + 2048
    assert layout.size == 30_532_122_624
    made = plan_peer(campaign, Device("cuda", 80 * 2**30), 1e9, None, "--memory")
    assert 0 < made.choice.setup.owned < 128
    assert made.choice.device.total <= 80 * 2**30
