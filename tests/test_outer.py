"""The outer step is torch's SGD with Nesterov momentum, its state travels with the base, plain averaging is as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.apply import next_base_pieces
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.outer import base_size, first_base, momentum_offsets, outer_settings
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member, Merge
from spes_p2p.testing.simulate.swarm import LAYOUT, VirtualSwarm, campaign

PLAIN = OuterConfig()
DILOCO = OuterConfig(shared_learning_rate=0.7, shared_momentum=0.9, router_learning_rate=0.5, experts_learning_rate=0.4,
                     experts_momentum=0.8)
NONE = CODECS["none"]
MEMBERS = (Member("A", 3, (1, 1, 1, 1), 1.0),)
CODEC = GroupCodecs(NONE, NONE, NONE)
PARTS = part_table(LAYOUT, MEMBERS, CODEC, 256)


def random(seed: int, size: int = LAYOUT.size) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def stepped(base: np.ndarray, parts: tuple[Part, ...], update: np.ndarray, outer: OuterConfig) -> np.ndarray:
    encoded = {part.index: NONE.encode(update[part.start : part.stop]) for part in parts}
    return np.concatenate(list(next_base_pieces(base, LAYOUT, parts, encoded, None, outer)))


def rounds(
    base: np.ndarray, outer: OuterConfig, updates: list[np.ndarray], left_out: frozenset[int] = frozenset()
) -> np.ndarray:
    for update in updates:
        base = stepped(base, tuple(part for part in PARTS if part.index not in left_out), update, outer)
    return base


def torch_sgd(weights: np.ndarray, rates: tuple[float, float], updates: list[np.ndarray]) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.tensor(weights))
    sgd = torch.optim.SGD([parameter], lr=rates[0], momentum=rates[1], nesterov=rates[1] > 0)
    for update in updates:
        parameter.grad = torch.tensor(-update)
        sgd.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize("group", LAYOUT.groups, ids=lambda group: group.name)
def test_several_rounds_are_several_steps_of_torchs_sgd_on_minus_the_update(group: Group) -> None:
    weights, updates = random(0), [random(seed) for seed in range(1, 6)]
    base = rounds(first_base(weights, LAYOUT, DILOCO), DILOCO, updates)
    here = slice(group.start, group.stop)
    expected = torch_sgd(weights[here], outer_settings(group, DILOCO), [update[here] for update in updates])
    np.testing.assert_allclose(base[here], expected, rtol=1e-5, atol=1e-6)


def test_plain_averaging_adds_the_update_and_nothing_else() -> None:
    weights, update = random(0), random(1)
    base = rounds(first_base(weights, LAYOUT, PLAIN), PLAIN, [update])
    assert base[: LAYOUT.size].tobytes() == (weights + update).tobytes()


def test_what_nobody_trains_keeps_its_value_whatever_members_send() -> None:
    gate = LAYOUT.by_name["gate"].spec
    layout = Layout(replace(placed.spec, is_fixed=placed.spec == gate) for placed in LAYOUT.tensors)
    base, update, fixed = first_base(random(0), layout, DILOCO), random(1), layout.fixed[0]
    encoded = {part.index: NONE.encode(update[part.start : part.stop]) for part in PARTS}
    new = np.concatenate(list(next_base_pieces(base, layout, PARTS, encoded, None, DILOCO)))
    changed = new[: layout.size] != base[: layout.size]
    assert not changed[fixed.start : fixed.stop].any()
    assert changed.sum() == layout.size - (fixed.stop - fixed.start)


def test_records_and_groups_with_momentum_make_the_base_larger() -> None:
    with_momentum = [g for g in LAYOUT.groups if g.kind != "router"]
    assert base_size(LAYOUT, PLAIN) == LAYOUT.size + len(LAYOUT.groups)
    assert base_size(LAYOUT, DILOCO) == LAYOUT.size + len(LAYOUT.groups) + sum(g.size for g in with_momentum)
    assert set(momentum_offsets(LAYOUT, DILOCO)) == {g.name for g in with_momentum}
    assert not first_base(random(0), LAYOUT, DILOCO)[LAYOUT.size :].any()


def test_a_part_that_was_dropped_keeps_weights_and_momentum() -> None:
    base = rounds(first_base(random(0), LAYOUT, DILOCO), DILOCO, [random(1)])
    dropped = next(p for p in PARTS if p.group.name == "expert.2")
    after = rounds(base, DILOCO, [random(2)], frozenset({dropped.index}))
    begin = momentum_offsets(LAYOUT, DILOCO)["expert.2"] + dropped.start - dropped.group.start
    assert after[dropped.start : dropped.stop].tobytes() == base[dropped.start : dropped.stop].tobytes()
    assert after[begin : begin + dropped.size].tobytes() == base[begin : begin + dropped.size].tobytes()
    assert (after != base).sum() > base.size // 2


def test_how_the_state_is_cut_into_parts_does_not_change_a_bit() -> None:
    base, update = first_base(random(0), LAYOUT, DILOCO), random(1)
    base = rounds(base, DILOCO, [random(2)])
    answers = set()
    for part_bytes in (64, 1000, 2**20):
        parts = part_table(LAYOUT, MEMBERS, CODEC, part_bytes)
        answers.add(stepped(base, parts, update, DILOCO).tobytes())
    assert len(answers) == 1


def test_the_merge_moves_weights_and_never_momentum() -> None:
    base = rounds(first_base(random(0), LAYOUT, DILOCO), DILOCO, [random(1)])
    merged = np.concatenate(list(next_base_pieces(base, LAYOUT, [], {}, Merge(0.5, (((1, 2), (2, 3), (0,), (0,)),)), DILOCO)))
    assert (merged[: LAYOUT.size] != base[: LAYOUT.size]).any()
    assert merged[LAYOUT.size :].tobytes() == base[LAYOUT.size :].tobytes()


OUTER_SECTION = DILOCO.model_dump()


@pytest.mark.long
async def test_whoever_joins_late_applies_the_next_rounds_to_the_same_bits() -> None:
    swarm = VirtualSwarm(campaign(total_steps=80, outer=OUTER_SECTION))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    swarm.start("D")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    applied = [number for number in swarm.recorders["D"].commits() if number > 4]
    assert len(applied) >= 3
    momentum = swarm.peers["D"].replica.base.values[LAYOUT.size :]
    assert momentum.size == base_size(LAYOUT, DILOCO) - LAYOUT.size
    assert np.abs(momentum).max() > 0


@pytest.mark.long
async def test_a_peer_that_crashed_goes_on_with_the_momentum_on_its_disk() -> None:
    swarm = VirtualSwarm(campaign(total_steps=80, outer=OUTER_SECTION))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    swarm.restart("B")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
