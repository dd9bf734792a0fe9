"""The search of `join`, `doctor` and `plan`: what fits on which card, what is refused, and that what is chosen trains."""

from __future__ import annotations

import math
import re
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counting_text import CountingText
from model_shapes import tiny_campaign, tiny_model, tiny_training
from sample_text import write_test_campaign

from spes_p2p.campaign.files import read_campaign
from spes_p2p.campaign.free_memory import choose_devices, has_active_display, measured
from spes_p2p.campaign.host_memory import host_bytes
from spes_p2p.campaign.plan_table import describe_setup, join_flags
from spes_p2p.campaign.planner import plan_peer
from spes_p2p.campaign.room import DISPLAY_BYTES, HOST_RESERVED_BYTES, Device, choices, find_room, fits, needed_bytes
from spes_p2p.campaign.speed import costs_of, step_seconds
from spes_p2p.client.doctor import device_check
from spes_p2p.config.campaign import Campaign, CampaignConfig, PeerConfig, load_campaign_config, make_peer_config
from spes_p2p.config.quantities import parse_bytes, parse_spare
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.backends import choose_backend
from spes_p2p.model.build import initial_state, layout_of
from spes_p2p.model.memory import Setup, device_bytes
from spes_p2p.session.resources import choose_resources, disk_space, require_disk, resources_on
from spes_p2p.session.run import tell_room
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.training.device import bound_memory
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

ROOT = Path(__file__).parents[1]
GIB = 2**30
CARDS = [("1b", 8), ("7b", 16), ("9b", 24)]
FREE_ON_CARDS = [("1b", 7.6), ("7b", 15.5), ("9b", 23.2)]
"""What is free on such a card after driver and CUDA context."""


def recipe(name: str) -> CampaignConfig:
    return load_campaign_config(ROOT / "configs" / f"{name}.yaml")


def card(gib: float, **properties: Any) -> Device:
    return Device("cuda", round(gib * GIB), **properties)


def settings(**options: Any) -> PeerConfig:
    return make_peer_config(run_dir=Path("none"), **options)


@pytest.mark.parametrize(("name", "gib"), CARDS)
def test_every_recipe_owns_an_expert_on_the_card_it_is_meant_for(name: str, gib: int) -> None:
    config, device = recipe(name), card(gib, host_memory=32 * GIB)
    choice = find_room(config, device, "x")
    assert choice.setup.owned >= 1
    assert needed_bytes(config, device, choice) <= device.memory


@pytest.mark.parametrize("drives_display", [False, True])
@pytest.mark.parametrize(("name", "free_gib"), FREE_ON_CARDS)
def test_so_it_does_on_what_such_a_card_really_has_free(name: str, free_gib: float, drives_display: bool) -> None:
    config = recipe(name)
    device = card(free_gib, host_memory=32 * GIB, has_context=True, drives_display=drives_display)
    choice = resources_on(device, settings(), config).choice
    assert choice.setup.owned >= 1
    left = device.memory - choice.device.total
    worst_measured = 0.014 * choice.device.total
    assert left >= 0.5 * GIB + worst_measured + DISPLAY_BYTES * drives_display


def test_driver_and_context_are_not_counted_twice_where_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    free = {0: (22 * GIB, 24 * GIB), 1: (23 * GIB, 24 * GIB)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    alone, both = (measured([torch.device("cuda", index) for index in indices]) for indices in ((1,), (0, 1)))
    assert (alone.memory, alone.has_context, both.memory, both.has_context) == (23 * GIB, True, 22 * GIB, False)
    nominal = card(23).reserved
    assert alone.reserved < nominal
    assert alone.at_most(80 * GIB) == alone
    assert alone.at_most(12 * GIB).reserved == card(12).reserved, "others take the rest, and the context is a part of it"


@pytest.mark.parametrize(("capability", "warning"), [
    ((8, 0), ""),
    ((7, 5), "no native bf16 on Old Card (compute capability 7.5): experts are computed one after the other (eager), in "
             "emulated bf16; expect slow steps"),
])
def test_join_and_doctor_warn_of_a_gpu_without_bf16(
    capability: tuple[int, int], warning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")
    config = recipe("1b")
    resources = choose_resources(choose_devices("0"), settings(), config)
    backend = choose_backend("auto", torch.device("cuda", 0), 768, 2048)
    assert (backend.name == "eager") == bool(warning)
    tell_room(resources)
    assert [message for message in caplog.messages if "room for" not in message] == [warning] * bool(warning)
    check = device_check(resources, settings(), config)
    assert (check.result, check.advice) == (("warning", warning) if warning else ("pass", ""))


def test_join_and_plan_choose_the_same() -> None:
    config, device = recipe("1b"), card(8)
    assert resources_on(device, settings(), config).choice == plan_peer(config, device, 1e8, 4, "x").choice


@pytest.mark.parametrize("gib", [10, 16])
def test_of_the_setups_with_most_experts_that_round_alike_it_is_the_fastest(gib: int) -> None:
    config, device = recipe("1b"), card(gib)
    chosen = find_room(config, device, "x").setup
    fitting = [c.setup for c in choices(config, device, chosen.owned, {}) if needed_bytes(config, device, c) <= device.memory]
    alike = [setup for setup in fitting if (setup.optimizer, setup.stored) == (chosen.optimizer, chosen.stored)]
    assert len(alike) > 1
    assert step_seconds(config, chosen) <= 1.01 * min(step_seconds(config, setup) for setup in alike)


def test_with_enough_memory_nothing_is_rounded_recomputed_or_moved() -> None:
    config = recipe("1b")
    chosen = find_room(config, card(80), "x").setup
    assert chosen == Setup(16, "bf16", "adamw", 8)
    assert str(costs_of(config, chosen)) == "nothing in it costs noticeable speed"
    resources = resources_on(card(80), settings(), config)
    assert resources.description == "16 of 16 experts, AdamW float32, micro-batch 8; nothing in it costs noticeable speed"


def test_a_peer_is_told_what_each_means_costs() -> None:
    costs = costs_of(recipe("7b"), Setup(5, "int8", "adamw8bit", 1, stored_on="host", checkpointing=True))
    assert math.prod(1 + part for part in costs.parts.values()) == pytest.approx(1 + costs.total)
    told = str(costs)
    assert told.startswith("a step takes an estimated ")
    for means in ("micro-batch 1", "checkpointing", "foreign experts in host memory"):
        assert f"{means} " in told


def test_without_torchao_no_setup_has_8_bit_moments_and_a_refusal_names_the_package() -> None:
    config = recipe("1b")
    assert find_room(config, card(8), "x").setup.optimizer == "adamw8bit"
    assert find_room(config, card(10, has_adamw8bit=False), "x").setup.optimizer == "adamw"
    with pytest.raises(UserError, match=r"nearest that fits: the same device with torchao \(pip install torchao\) \(. expert"):
        find_room(config, card(5, has_adamw8bit=False), "free memory (cuda)")


@pytest.mark.parametrize(("second_moment_peers", "optimizers"), [(1, 2), ("auto", 2), (4, 1)])
def test_corrected_second_moments_have_no_8_bit_form(second_moment_peers: int | str, optimizers: int) -> None:
    config = tiny_campaign(training=tiny_training(second_moment_peers=second_moment_peers))
    assert len({choice.setup.optimizer for choice in choices(config, card(8), 1, {})}) == optimizers


def test_a_display_keeps_its_margin() -> None:
    config, plain, display = recipe("1b"), card(8), card(8, drives_display=True)
    assert display.reserved - plain.reserved == DISPLAY_BYTES
    assert 0 < find_room(config, display, "x").setup.owned < find_room(config, plain, "x").setup.owned


def test_the_driver_says_which_card_has_a_display() -> None:
    listing = "GPU-11aa, Enabled\nGPU-22bb, Disabled\n"
    assert has_active_display(listing, "11aa")
    assert not has_active_display(listing, "22bb")
    assert not has_active_display("", "11aa")
    assert not has_active_display("NVIDIA-SMI has failed, because of the driver\n", "11aa")


def test_experts_are_stored_in_main_memory_only_if_that_is_free() -> None:
    config = recipe("7b")
    setup = find_room(config, card(16), "x").setup
    assert setup.stored_on == "host"
    enough = host_bytes(config, setup).total + HOST_RESERVED_BYTES
    assert find_room(config, card(16, host_memory=enough), "x").setup == setup
    assert find_room(config, card(24, host_memory=enough // 4), "x").setup.stored_on == "device"
    with pytest.raises(UserError, match="nearest that fits: the same device with more free main memory \\(1 expert\\)"):
        find_room(config, card(16, host_memory=enough // 4), "x")


def test_what_the_user_chose_stays_chosen_and_a_refusal_names_it() -> None:
    config = recipe("1b")
    chosen = resources_on(card(12), settings(optimizer="adamw", stored="int8", micro_batch_size=2), config).choice.setup
    assert (chosen.optimizer, chosen.stored, chosen.micro_batch) == ("adamw", "int8", 2)
    assert not resources_on(card(24), settings(activation_checkpointing=False), config).choice.setup.checkpointing
    with pytest.raises(UserError) as caught:
        resources_on(card(8), settings(micro_batch_size=8, activation_checkpointing=False), config)
    message = str(caught.value)
    assert "\n" not in message
    assert "nearest that fits: the same device without --[no-]activation-checkpointing (" in message


@pytest.mark.parametrize("name", ["7b", "9b"])
def test_a_card_that_is_too_small_is_told_which_would_do(name: str) -> None:
    with pytest.raises(UserError, match=r"nearest that fits: a cuda device with .* GB free; with .* GB it trains") as caught:
        find_room(recipe(name), card(8), "free memory (cuda)")
    for number, enough in enumerate(advised(caught.value)):
        assert find_room(recipe(name), Device("cuda", enough), "x").setup.owned == number


@pytest.mark.parametrize("asked", [{}, {"stored": "fp32"}])
@pytest.mark.parametrize("length", range(22, 27))
def test_the_memory_that_a_refusal_names_suffices(length: int, asked: dict[str, Any]) -> None:
    config = tiny_campaign(training=tiny_training(sequence_length=length))
    with pytest.raises(UserError) as caught:
        find_room(config, Device("cpu", 2**18), "x", asked)
    enough, for_an_expert = advised(caught.value)
    assert find_room(config, Device("cpu", enough), "x", asked).setup.owned >= 0
    assert find_room(config, Device("cpu", for_an_expert), "x", asked).setup.owned >= 1


def advised(refusal: UserError) -> list[int]:
    """Return the bytes with which a model fits and trains an expert, as a user would type them."""
    return [parse_bytes(words.replace(" ", ""), "--memory") for words in re.findall(r"with ([0-9.]+ [kMG]B)", str(refusal))]


def test_a_requested_number_of_experts_gets_the_setup_in_which_it_fits_and_a_doubt_is_told() -> None:
    config = recipe("1b")
    few, many = (resources_on(card(12), settings(experts=number), config) for number in (2, 16))
    assert (few.experts, many.experts) == (2, 16)
    assert few.choice == find_room(config, card(12), "x", owned=2)
    assert "this may not fit: it takes " in many.description
    assert "may not fit" not in few.description


def test_memory_bounds_what_is_counted_on() -> None:
    config = recipe("1b")

    def owned(memory_gib: int | None) -> int:
        memory = None if memory_gib is None else memory_gib * GIB
        return resources_on(card(24), settings(memory_bytes=memory), config).experts

    assert 0 < owned(8) < owned(None) == owned(24) == owned(80)
    with pytest.raises(UserError, match=r"^--memory = 2 GiB: too small"):
        owned(2)


def update(options: TrainingOptions) -> np.ndarray:
    """What one step changes; with an epsilon this large, AdamW's update is proportional to the gradient."""
    model = tiny_model()
    config = tiny_campaign(model, tiny_training(eps=10.0, learning_rate=10.0, weight_decay=0.0, max_grad_norm=1e9,
                                                moe_loss_weight=0.0))
    base = initial_state(model)
    trainer = TorchTrainer(config, base, (0, 3), CountingText(), options=options)
    trainer.train(Phase(0, 0, 10, 1, (Interval(0, 0, 4),)), lambda: False, lambda steps, speed: None)
    groups = [g for g in layout_of(model).groups if g.expert in (None, 0, 3)]
    return np.concatenate([trainer.read(group) - base[group.start : group.stop] for group in groups])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("stored", "error"), [("fp32", 1e-5), ("bf16", 2e-2), ("int8", 5e-2)])
@pytest.mark.long
def test_every_setup_of_the_search_takes_the_same_step(stored: Any, error: float, checkpointing: bool) -> None:
    exact = update(TrainingOptions())
    assert np.linalg.norm(exact) > 0
    for stored_on in ("device", "host"):
        for micro_batch in (4, 2, 1):
            options = TrainingOptions(stored, stored_on, "auto", "adamw", checkpointing, micro_batch)
            assert np.linalg.norm(update(options) - exact) / np.linalg.norm(exact) < error


@pytest.mark.long
async def test_peers_with_different_setups_have_one_campaign_and_compute_the_same_bases() -> None:
    the_campaign = campaign(10, training={"sync_steps": 5, "warmup_steps": 0})
    config = the_campaign.config
    setups = deque([
        TrainingOptions(), TrainingOptions(stored="int8", stored_on="host", activation_checkpointing=True, micro_batch_size=1),
        TrainingOptions(stored="bf16", micro_batch_size=2),
    ])
    used: list[TrainingOptions] = []

    class Virtual(TorchTrainer):
        def train(self, phase: Phase, *callbacks: Any) -> PhaseReport:
            return replace(report := super().train(phase, *callbacks), seconds=float(report.steps))

    def make_trainer(base: np.ndarray, owned: tuple[int, ...]) -> TorchTrainer:
        used.append(setups[0])
        setups.rotate()
        return Virtual(config, base, owned, CountingText(), CountingText(), options=used[-1])

    swarm = VirtualSwarm(the_campaign, layout=layout_of(config.model), make_trainer=make_trainer)
    swarm.start_all()
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert max(swarm.recorders["A"].commits()) == config.total_rounds
    assert len(set(used)) == 3


def test_several_devices_divide_a_batch_and_each_holds_everything_else() -> None:
    config = recipe("1b")
    one, many = (find_room(config, card(80, ranks=ranks), "x").setup for ranks in (1, 64))
    assert (config.training.batch_size, many.ranks) == (256, 64)
    assert many.micro_batch <= 256 // 64 < one.micro_batch
    same = replace(one, micro_batch=many.micro_batch)
    sizes, of_four = (device_bytes(config.model, 2048, replace(same, ranks=ranks)) for ranks in (1, 4))
    assert (of_four.weights, of_four.gradients, of_four.moments) == (sizes.weights, sizes.gradients, sizes.moments)
    assert step_seconds(config, replace(same, ranks=4)) > step_seconds(config, same) / 4, "gradients are summed"
    on_host = replace(one, stored_on="host")
    assert host_bytes(config, replace(on_host, ranks=4)).stored == 4 * host_bytes(config, on_host).stored


def test_several_devices_of_which_none_holds_the_weights_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"GB free in place of each of the 4;") as one:
        find_room(recipe("9b"), card(8, ranks=4), "free memory (cuda)")
    assert "\n" not in str(one.value)


@pytest.mark.parametrize(("name", "gib", "ranks", "divide"), [
    ("30b", 24, 8, True), ("30b", 24, 4, True), ("30b", 32, 2, True), ("7b", 16, 2, True), ("9b", 16, 4, True),
    ("7b", 24, 2, False), ("7b", 24, 4, False), ("1b", 24, 4, False),
])
def test_several_devices_divide_the_layers_where_that_trains_more_experts_per_second(
    name: str, gib: float, ranks: int, divide: bool
) -> None:
    config, device = recipe(name), card(gib, ranks=ranks)
    setups = [find_room(config, device, "x", asked).setup for asked in ({"sharded": False}, {"sharded": True}, {})]
    rates = [setup.owned / step_seconds(config, setup) for setup in setups]
    assert (rates[1] > rates[0], setups[2] == setups[1], setups[2] == setups[0]) == (divide, divide, not divide)


def test_one_expert_more_is_not_worth_twice_the_passes_over_divided_layers() -> None:
    config, device = recipe("30b"), card(32, ranks=2)
    chosen = find_room(config, device, "x", {"sharded": True}).setup
    roomiest = find_room(config, device, "x", {"sharded": True, "micro_batch": 1}).setup
    assert roomiest.owned == chosen.owned + 1
    assert 1.9 * step_seconds(config, chosen) < step_seconds(config, roomiest)


def test_devices_do_not_divide_the_layers_without_checkpointing() -> None:
    config, devices = recipe("7b"), card(24, ranks=2)
    setup = resources_on(devices, settings(devices="all", activation_checkpointing=False), config).choice.setup
    assert (setup.sharded, setup.checkpointing) == (False, False)
    assert setup.owned > 0
    with pytest.raises(UserError, match="nearest that fits"):
        find_room(config, card(4, ranks=2), "x", {"checkpointing": False})


@pytest.mark.parametrize(("ranks", "host_gib"), [(1, 6), (2, 16), (4, 32), (1, None)])
def test_the_search_misses_no_setup_with_more_experts(ranks: int, host_gib: float | None) -> None:
    """Where main memory is short, more experts may fit than fewer, of which more are foreign."""
    host = None if host_gib is None else round(host_gib * GIB)
    for gib in (10, 16, 24, 40):
        config, device = recipe("7b"), card(gib, ranks=ranks, host_memory=host)
        for sharded in (False, True)[:ranks]:
            fitting = (
                number for number in range(32, -1, -1)
                if any(fits(config, device, choice) for choice in choices(config, device, number, {"sharded": sharded}))
            )
            most = next(fitting, None)
            found = find_room(config, device, "x", {"sharded": sharded}).setup.owned if most is not None else None
            assert found == most, f"{gib} GiB"


def test_several_devices_divide_the_layers_where_no_expert_fits_otherwise() -> None:
    config = recipe("7b")
    with pytest.raises(UserError):
        find_room(config, card(12), "x")
    divided = find_room(config, card(12, ranks=2), "x")
    assert (divided.setup.owned, divided.setup.sharded, divided.setup.checkpointing) == (1, True, True)
    assert "layers divided" in describe_setup(divided.setup, 32)
    assert join_flags(divided.setup).endswith("--sharding")
    whole = find_room(config, card(24, ranks=2), "x").setup
    assert not whole.sharded
    assert find_room(config, card(24, ranks=2), "x", {"sharded": True}).setup.owned > whole.owned
    with pytest.raises(UserError, match="without --\\[no-\\]sharding"):
        find_room(config, card(12, ranks=2), "x", {"sharded": False})


def test_divided_layers_take_a_share_of_the_memory_and_the_rest_is_on_the_host_between_phases() -> None:
    config = recipe("7b")
    whole = Setup(1, "bf16", "adamw", 1, checkpointing=True, ranks=4)
    divided = replace(whole, sharded=True)
    of_whole, of_divided = (device_bytes(config.model, 2048, setup) for setup in (whole, divided))
    assert of_divided.activations == of_whole.activations
    assert of_whole.moments / 4 < of_divided.moments < of_whole.moments / 2.5, "embedding and head are whole tensors"
    assert of_whole.stored / 4 < of_divided.stored < of_whole.stored / 3
    assert of_whole.weights / 4 < of_divided.weights == of_divided.gradients < of_whole.weights / 1.4
    on_host = host_bytes(config, divided).shards
    assert 0.6 < on_host / (of_whole.weights + of_whole.moments + of_whole.stored) < 0.75
    assert host_bytes(config, whole).shards == 0
    assert step_seconds(config, divided) > step_seconds(config, whole)
    assert "sharding" in str(costs_of(config, divided))


def test_sharding_needs_several_devices_and_recomputes_activations() -> None:
    config = tiny_campaign()
    with pytest.raises(UserError, match=r"^--sharding: divides the layers among several devices; name them with --devices"):
        resources_on(card(8), settings(sharding=True), config)
    with pytest.raises(UserError, match=r"^--sharding: recomputes activations; leave out --no-activation-checkpointing"):
        resources_on(card(8, ranks=2), settings(devices="all", sharding=True, activation_checkpointing=False), config)
    assert resources_on(card(8, ranks=2), settings(devices="all", sharding=True), config).options.sharded
    assert not resources_on(card(8, ranks=2), settings(devices="all"), config).options.sharded


@pytest.mark.parametrize(("batch", "ranks", "advice"), [
    (4, 3, "1, 2"), (16, 5, "1, 2, 4"), (1, 2, "1"), (4, 10**12, "1, 2, 4"),
])
def test_devices_that_cannot_divide_a_batch_are_refused_in_one_line(batch: int, ranks: int, advice: str) -> None:
    config = tiny_campaign(training=tiny_training(batch_size=batch))
    with pytest.raises(UserError) as caught:
        resources_on(card(8, ranks=ranks), settings(devices="all"), config)
    assert str(caught.value) == (
        f"--devices all: {ranks} devices cannot divide a batch of {batch} samples (training.batch_size) equally; "
        f"give this many: {advice}"
    )


@pytest.mark.parametrize(("wanted", "gpus", "found"), [
    ("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("all", 2, "cuda:0 cuda:1"), ("1,0", 2, "cuda:1 cuda:0"),
    ("cpu,cpu", 2, "cpu cpu"),
])
def test_devices_are_what_the_option_names(wanted: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, gpus)
    assert " ".join(map(str, choose_devices(wanted))) == found


@pytest.mark.parametrize(("wanted", "gpus", "reason"), [
    ("all", 0, "this machine has no GPU that torch can use"), ("0", 0, "this machine has no GPU that torch can use"),
    ("0,2", 2, "this machine's GPUs are 0,1; give each at most once"), ("1,1", 2, "this machine's GPUs are 0,1; give each at"),
])
def test_devices_that_do_not_exist_are_refused(wanted: str, gpus: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, gpus)
    with pytest.raises(UserError, match=f"--devices {wanted}: {reason}"):
        choose_devices(wanted)


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_setup_is_no_part_of_the_campaign() -> None:
    assert not set(PeerConfig.model_fields) & set(Campaign.model_fields)
    config = recipe("1b")
    before = config.model_dump_json()
    resources_on(card(24), settings(), config)
    assert config.model_dump_json() == before


def test_a_trainer_is_refused_where_its_disk_would_be_full_in_a_round_but_not_for_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    at = make_peer_config(run_dir=tmp_path / "run" / "peer", base="disk")
    resources = resources_on(Device("cpu", 8 * GIB), at, files.campaign.config)
    needed, free = disk_space(files, at, resources)
    require_disk(files, at, resources)
    in_memory = replace(resources, base_in_memory=True, arrays_in_memory=True)
    assert disk_space(files, at, in_memory)[0] < needed < free
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r"run/peer: .* of disk are free, a trainer of this campaign needs up to .*; free disk"):
        require_disk(files, at, resources)
    at.run_dir.mkdir(parents=True)
    (at.run_dir / "base").write_bytes(b"\1" * 8192)
    really_found = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [folder / "gone.tmp", *really_found(folder, pattern)])
    require_disk(files, at, resources)


# What is left to others --------------------------------------------------------------------------------------------------


def test_torch_may_take_no_more_than_what_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = recipe("1b"), Device("cuda", 20 * GIB, total=24 * GIB)
    allowed: dict[int | None, dict[str, Any]] = {
        None: {}, 14 * GIB: {"leave_free": parse_spare("25%", "--leave-free")}, 8 * GIB: {"memory_bytes": 8 * GIB},
    }
    for memory_bytes, options in allowed.items():
        assert resources_on(device, settings(**options), config).options.memory_bytes == memory_bytes

    with pytest.raises(UserError, match=r"--leave-free: .* are to be left, and .* are free"):
        resources_on(device, settings(leave_free=parse_spare("22GiB", "--leave-free"), experts=1), config)

    bounds = list[tuple[float, torch.device]]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: bounds.append((share, device)))
    second = torch.device("cuda", 1)
    for at, memory_bytes in ((second, 6 * GIB), (second, 30 * GIB), (second, None), (torch.device("cpu"), 6 * GIB)):
        bound_memory(at, memory_bytes)
    assert bounds == [(0.25, second), (1.0, second)]


def test_memory_that_is_left_free_is_left_by_join_and_by_plan_alike() -> None:
    config, spare = recipe("1b"), parse_spare("25%", "--leave-free")
    whole = card(24, host_memory=64 * GIB, total=32 * GIB)
    trained = resources_on(whole, settings(leave_free=spare), config)
    assert trained.device.reserved == whole.reserved + 8 * GIB
    assert needed_bytes(config, trained.device, trained.choice) <= whole.memory
    assert trained.choice.device.total <= 16 * GIB
    planned = plan_peer(config, whole.leaving(spare), 1e8, None, "--memory")
    assert planned.choice == trained.choice
    unbounded = resources_on(whole, settings(), config).choice.device.total
    assert trained.choice.device.total < unbounded
    with pytest.raises(UserError, match=r"kept free 2[0-9.]* GB"):
        find_room(config, whole.leaving(parse_spare("23GiB", "--leave-free")), "x")


@pytest.mark.parametrize(("text", "num_bytes"), [("20%", 2 * GIB), (" 2.5 %", GIB // 4), ("2GiB", 2 * GIB), ("1GB", 10**9)])
def test_a_share_or_a_size_is_left_free(text: str, num_bytes: int) -> None:
    assert parse_spare(text, "--leave-free").of(10 * GIB) == num_bytes


@pytest.mark.parametrize("text", ["0%", "100%", "-5%", "20", "%", "2 gallons", "1e1%"])
def test_what_is_no_share_names_the_option(text: str) -> None:
    with pytest.raises(UserError, match=r"^--leave-free '.*': must be a share"):
        parse_spare(text, "--leave-free")
