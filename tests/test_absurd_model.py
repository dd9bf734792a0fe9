"""A campaign whose model no machine could hold is refused in one line, before anything of it is built."""

from __future__ import annotations

import json
import logging
import tracemalloc
from typing import Any

import pytest
from moe_families import small_config

from spes_p2p.config.campaign import parse_campaign
from spes_p2p.config.model import ModelConfig, TransformersModel
from spes_p2p.errors import UserError
from spes_p2p.model.build import initial_state, layout_of, transformers_config
from spes_p2p.model.families import check_family
from spes_p2p.testing.simulate.swarm import campaign

PUBLISHED = json.loads(campaign().canonical_json())
FIELDS = PUBLISHED["config"]["model"]
WHOLE = ModelConfig.model_validate(FIELDS).config_json


@pytest.mark.parametrize(
    ("model", "problem"), [
        ({**FIELDS, "num_hidden_layers": 10**9}, "model.num_hidden_layers = 1000000000: must be at most 512"),
        ({**FIELDS, "moe_num_experts": 10**9}, "model.moe_num_experts = 1000000000: must be at most 4096"),
        ({**FIELDS, "moe_num_experts": 4096, "num_hidden_layers": 512}, "model.moe_num_experts = 4096: must be at most 128 in "
         "each of 512 layers"),
        ({**FIELDS, "hidden_size": 2**60}, "model.hidden_size = 1152921504606846976: must be at most 1048576"),
        ({**FIELDS, "vocab_size": 2**40}, "model.vocab_size = 1099511627776: must be at most 33554432"),
        ({**FIELDS, "max_position_embeddings": 2**40}, "max_position_embeddings = 1099511627776: must be at most 16777216"),
        ({"config": {**WHOLE, "num_hidden_layers": 10**9}}, "model.config.num_hidden_layers = 1000000000: must be at most 512"),
        ({"config": {**WHOLE, "num_experts": 10**9}}, "model.config.num_experts = 1000000000: must be at most 4096"),
        ({"config": {**WHOLE, "intermediate_size": 2**60}}, "must be at most 1048576"),
        ({"config": {**WHOLE, "more": [{"num_mtp_layers": 10**9}]}}, "num_mtp_layers = 1000000000: must be at most 512"),
        ({"config": {**WHOLE, "more": json.loads("[" * 100 + "]" * 100)}}, "must be nested at most 16 deep"),
        ({"config": {**WHOLE, "num_experts": 4096, "num_hidden_layers": 512}}, "must be at most 128 in each of 512 layers"),
    ],
)  # fmt: skip
def test_sizes_have_maxima(model: dict[str, Any], problem: str) -> None:
    published = json.dumps({**PUBLISHED, "config": {**PUBLISHED["config"], "model": model}}).encode()
    tracemalloc.start()
    with pytest.raises(UserError) as raised:
        parse_campaign(published, "peer 7")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "problem"), [
        ({"vocab_size": 2**22, "hidden_size": 2**20, "num_attention_heads": 1}, "parameters: must be at most"),
        ({"hidden_act": "none"}, "transformers refuses"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5: must be 1 to its number of experts, 4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0: must be 1 to its number of experts, 4"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_built_is_refused_in_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        layout_of(TransformersModel(config={**WHOLE, **changes}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("changes", "problem"), [
        ({"num_attention_heads": 1}, "makes no forward pass; check its sizes and heads: RuntimeError"),
        ({"num_attention_heads": 3}, "makes no forward pass"),
        ({"num_key_value_heads": 3}, "makes no forward pass"),
        ({"head_dim": 3}, "makes no forward pass"),
        ({"num_attention_heads": 0}, "has no elements; correct the sizes|transformers refuses"),
        ({"intermediate_size": 0, "moe_intermediate_size": 0}, "has no elements; correct the sizes in its config.json"),
        ({"hidden_size": 0}, "has no elements|transformers refuses"),
        ({"attention_dropout": 2.0}, "with attention_dropout = 2.0: no loss can be computed; correct it in config.json"),
        ({"attention_dropout": -0.5}, "with attention_dropout = -0.5: no loss can be computed"),
        ({"rms_norm_eps": -0.5}, "with rms_norm_eps = -0.5: no loss can be computed"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "with rope_theta = 0.0: no loss can be computed"),
    ],
)  # fmt: skip
def test_sizes_with_which_no_step_can_be_computed_are_refused_in_one_line(
    family: str, changes: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = TransformersModel(config={**json.loads(small_config(family).to_json_string(use_diff=False)), **changes})
    with pytest.raises(UserError, match=problem) as raised:
        check_family(model)
    assert "\n" not in str(raised.value)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("deviation", "problem"), [(-0.5, "std >= 0.0, but found std -0.5"), (1e300, "infinite initial values; lower init")]
)
@pytest.mark.parametrize("cutoff", [None, 3.0])
def test_initial_weights_that_cannot_be_drawn_are_refused_in_one_line(
    deviation: float, problem: str, cutoff: float | None
) -> None:
    model = TransformersModel(config={**WHOLE, "initializer_range": deviation}, init_cutoff_factor=cutoff)
    with pytest.raises(UserError, match=problem) as raised:
        initial_state(model)
    assert "\n" not in str(raised.value)


def test_what_transformers_warns_of_adds_no_line(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        transformers_config(TransformersModel(config={**WHOLE, "eos_token_id": 10**5}))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []
