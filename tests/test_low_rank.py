"""Terms of low rank: what is computed is what is exported, and every peer's tokens train them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_shapes import tiny_campaign, tiny_model, tiny_training

from spes_p2p.config.campaign import parse_campaign_config
from spes_p2p.config.model import ModelConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, build_model, initial_state, layout_of
from spes_p2p.model.flops import training_flops_per_token
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.low_rank import LowRank, directions
from spes_p2p.model.partitioned import MATRICES
from spes_p2p.rounds.merge import merge_range, merged_rows, nearest_experts
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.interface import Phase
from spes_p2p.training.losses import next_token_loss
from spes_p2p.training.trainer import TorchTrainer

MODEL = tiny_model(moe_low_rank=8)
LAYOUT = layout_of(MODEL)
OWNED = [(), (2,), (0, 3), (0, 1, 2, 3)]
IDS = torch.randint(MODEL.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))


def some_base(model: ModelConfig = MODEL) -> State:
    """Terms that are not 0, as after some training."""
    state, random = initial_state(model), np.random.default_rng(0)
    for placed in layout_of(model).tensors:
        if placed.spec.is_low_rank:
            state[placed.start : placed.stop] = 0.05 * random.standard_normal(placed.spec.size, np.float32)
    return state


def test_a_base_begins_without_them_and_its_other_values_are_those_of_the_plain_model() -> None:
    plain, plain_layout = initial_state(tiny_model()), layout_of(tiny_model())
    state = initial_state(MODEL)
    terms = [placed for placed in LAYOUT.tensors if placed.spec.is_low_rank]
    assert [placed.spec.shape for placed in terms] == [(4, 96, 8), (4, 32, 8)] * 2
    assert all(placed.spec.kind == "shared" and not state[placed.start : placed.stop].any() for placed in terms)
    for placed in plain_layout.tensors:
        mine = LAYOUT.by_name[placed.spec.name]
        np.testing.assert_array_equal(state[mine.start : mine.stop], plain[placed.start : placed.stop])


@pytest.mark.parametrize("owned", OWNED, ids=str)
@pytest.mark.parametrize("backend", ["grouped_mm", "eager"])
def test_what_a_peer_computes_is_what_is_exported_and_so_are_all_gradients(owned: tuple[int, ...], backend: str) -> None:
    base = some_base()
    reference, model = plain_model(MODEL, base), build_model(MODEL, base, owned, backend=backend)  # type: ignore[arg-type]
    reference.set_experts_implementation("eager")
    names = [each._backends[matrix].name for each in model.modules() if isinstance(each, LowRank) for matrix in MATRICES]
    assert names == [backend] * 4
    losses = [each(input_ids=IDS, labels=IDS) for each in (reference, model)]
    torch.testing.assert_close(losses[1].logits, losses[0].logits, rtol=1e-4, atol=1e-5)
    for each in losses:
        each.loss.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if ".low_rank." in name:
            block, _, matrix = name.partition(".low_rank.")
            whole = gradients[f"{block}.{matrix}"]
            assert whole is not None
            expected = whole @ directions(name, 8, whole.shape[2]).T
        elif ".experts." in name:
            expert, _, matrix = name.rpartition(".")
            block, _, number = expert.rpartition(".")
            whole = gradients[f"{block}.{matrix}"]
            assert whole is not None
            expected = whole[int(number)]
        else:
            found = gradients[name]
            assert found is not None
            expected = found
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_stored_formats_and_bf16_come_near_it(stored: StoredFormat) -> None:
    base = some_base()
    expected = plain_model(MODEL, base)(IDS).logits
    model = build_model(MODEL, base, (1,), stored)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS).logits
    logits.float().sum().backward()
    assert (logits - expected).norm() / expected.norm() < 0.1
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_directions_are_signs_of_one_size_that_depend_on_the_name_only() -> None:
    first, again, other = directions("a", 8, 64), directions("a", 8, 64), directions("b", 8, 64)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().unique().tolist() == [64**0.5 / 8]
    assert abs(float((first @ first.T / 64 - torch.eye(8)).fill_diagonal_(0).abs().mean())) < 0.2
    signs = directions("model.layers.0.mlp.experts.low_rank.down_proj", 8, 16)[0].sign().tolist()
    assert signs == [1, -1, 1, 1, -1, 1, -1, 1, 1, -1, 1, 1, -1, -1, -1, 1], "bases would mean other models than before"


class Text:
    """Random samples."""

    num_samples = 1000

    def read(self, interval: Interval) -> np.ndarray:
        return np.random.default_rng(interval.start).integers(MODEL.vocab_size, size=(len(interval), 16))

    def read_spread(self, count: int) -> np.ndarray:
        return self.read(Interval(0, 999, 999 + count))


def test_a_peer_trains_foreign_experts_by_them_and_its_weights_are_what_a_judge_sees() -> None:
    campaign = tiny_campaign(MODEL, tiny_training(learning_rate=1e-2))
    base = initial_state(MODEL)
    trainer = TorchTrainer(campaign, base.copy(), (0,), Text())
    trainer.train(Phase(1, 0, 5, 5, (Interval(0, 0, 20),)), lambda: False, lambda done, speed: None)
    local = base.copy()
    for group in (LAYOUT.group("shared"), LAYOUT.group("router"), LAYOUT.expert(0)):
        local[group.start : group.stop] = trainer.read(group)
    moved = LAYOUT.by_name["model.layers.1.mlp.experts.low_rank.down_proj"]
    term = local[moved.start : moved.stop].reshape(moved.spec.shape)
    assert all(term[expert].any() for expert in range(4)), "an expert got no gradient"
    judge = TorchTrainer(campaign, local, (), Text())
    with torch.no_grad():
        mine, theirs, plain = (
            float(next_token_loss(model, model.base_model(input_ids=IDS).last_hidden_state, IDS).cross_entropy)
            for model in (trainer.model.eval(), judge.model.eval(), plain_model(MODEL, local).eval())
        )
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert mine == pytest.approx(plain, rel=1e-5)
    trainer.assign((1, 2), local)
    judge.load_base(local)
    with torch.no_grad():
        again = trainer.model(IDS).logits
        torch.testing.assert_close(again, judge.model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_merging_draws_the_terms_together_as_it_does_the_matrices() -> None:
    base = some_base()
    donors = nearest_experts(base, LAYOUT, 2)
    rows = merged_rows(LAYOUT, donors)
    merged = merge_range(lambda a, b: base[a:b].copy(), rows, 0.25, 0, base.size)
    before, after = plain_model(MODEL, base), plain_model(MODEL, merged)
    for layer, its_donors in enumerate(donors):
        for matrix in ("gate_up_proj", "down_proj"):
            was, now = (model.model.layers[layer].mlp.experts.get_parameter(matrix) for model in (before, after))
            for expert, chosen in enumerate(its_donors):
                expected = was[expert] + 0.25 * (was[list(chosen)].mean(dim=0) - was[expert])
                torch.testing.assert_close(now[expert], expected, rtol=1e-5, atol=1e-6)


def test_operations_are_those_of_the_products() -> None:
    plain, more = (training_flops_per_token(tiny_model(moe_low_rank=rank), 16, (0,)) for rank in (0, 8))
    narrow, wide = 8 * (32 + 48), 8 * (2 * 48 + 32)
    assert more - plain == 2 * 2 * (2 * 2 * narrow + 3 * 2 * wide)


@pytest.mark.parametrize(("rank", "rule"), [(4, "multiple of 8"), (40, "at most hidden_size and intermediate_size")])
def test_a_rank_that_cannot_be_costs_one_line(rank: int, rule: str) -> None:
    campaign = tiny_campaign().model_dump(mode="json")
    campaign["model"]["moe_low_rank"] = rank
    with pytest.raises(UserError, match=rf"moe_low_rank.*{rule}"):
        parse_campaign_config(campaign, "x.yaml")
