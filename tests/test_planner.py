"""What the planner says is what training takes, counted; and it never promises what does not fit."""

from __future__ import annotations

import io
import json
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_shapes import tiny_campaign, tiny_model, tiny_training
from network_swarm import Ended, call
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from spes_p2p.campaign import free_memory
from spes_p2p.campaign.host_memory import PROGRAM_BYTES, host_bytes
from spes_p2p.campaign.plan_table import join_flags, plan_json, render_plan
from spes_p2p.campaign.planner import alternatives, bootstrap_disk_bytes, disk_bytes, plan_peer, round_traffic, written_bytes
from spes_p2p.campaign.room import Device, find_room, needed_bytes
from spes_p2p.client import local_swarm
from spes_p2p.config.campaign import (
    CampaignConfig,
    CodecConfig,
    ExpertsConfig,
    OuterConfig,
    SyncConfig,
    load_campaign_config,
    make_peer_config,
)
from spes_p2p.config.model import ModelConfig
from spes_p2p.config.quantities import parse_bits_per_second, parse_bytes
from spes_p2p.errors import UserError
from spes_p2p.model.build import build_model, empty_model, initial_state, layout_of
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.memory import DeviceBytes, ForwardBackwardPass, Setup, device_bytes, shared_elements, tensor_moment_bytes
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.observe.units import human_bytes
from spes_p2p.rounds.codecs import CODECS, group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.session.resources import resources_on
from spes_p2p.training.documents import Documents
from spes_p2p.training.losses import forward_losses
from spes_p2p.training.optimizer import OwnedOptimizer
from spes_p2p.training.trainer import checkpoint_activations

ROOT = Path(__file__).parents[1]
MILLION, GIB = 10**6, 2**30

SHAPES: dict[str, dict[str, Any]] = {
    "many experts": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "moe_num_experts": 8,
                     "num_hidden_layers": 3},
    "large vocabulary": {"architecture": "qwen3_moe", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 96,
                         "num_key_value_heads": 4},
    "tied": {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
    "wide experts": {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "moe_num_experts": 16},
    "low rank": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "moe_num_experts": 8, "moe_low_rank": 16},
}
SEQUENCE, SAMPLES, OWNED, EOS = 128, 8, (0, 2), 0


def shape(name: str) -> ModelConfig:
    return tiny_model(max_position_embeddings=SEQUENCE, **SHAPES[name])


class Peer:
    """A model with its optimizer, as a trainer has them."""

    def __init__(
        self, model: ModelConfig, stored: StoredFormat = "fp32", z_loss: float = 0.0, bf16: bool = False,
        samples: int = SAMPLES, sequence: int = SEQUENCE,
    ):
        self.config, self.bf16, self.batch = model, bf16, (samples, sequence)
        self.training = tiny_training(sequence_length=SEQUENCE, lm_head_zloss_weight=z_loss)
        self.model = build_model(model, initial_state(model), OWNED, stored)
        self.optimizer = OwnedOptimizer(self.model, layout_of(model), self.training)
        self.blocks = [m for m in self.model.modules() if isinstance(m, PartitionedExperts)]

    def forward(self, documents: Documents | None = None) -> torch.Tensor:
        ids = torch.randint(self.config.vocab_size, self.batch)
        ids[:, self.batch[1] // 2] = EOS
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            return forward_losses(self.model, self.blocks, ids, self.training, documents=documents).total

    def step(self) -> None:
        """Two micro-batches, so that gradients are there while the second one is computed."""
        for _ in range(2):
            self.forward().backward()
        self.optimizer.step(1e-3, torch.zeros(()))


def storages(tensors: Any) -> dict[int, int]:
    """Bytes by address, so that views count once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def predicted(model: ModelConfig, stored: StoredFormat, bf16: bool = False) -> tuple[DeviceBytes, Setup]:
    setup = Setup(len(OWNED), stored, "adamw", SAMPLES, "cpu", bf16)
    return device_bytes(model, SEQUENCE, setup), setup


def highest_moment(peer: Peer) -> int:
    """Most bytes that the second of two steps has at once beside what was there before it."""
    peer.model.train()
    peer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        peer.step()
    assert profiled.profiler is not None
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    highest = now = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        highest = max(highest, now)
    return highest


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.long
def test_counted_tensors_are_as_predicted(name: str, stored: StoredFormat) -> None:
    peer = Peer(shape(name), stored)
    peer.forward().backward()
    parameters = list(peer.model.parameters())
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    peer.optimizer.step(1e-3, torch.zeros(()))
    moments = peer.optimizer.state_bytes()
    weights = storages(parameters)
    stores = sum(storages(b for b in peer.model.buffers() if b.data_ptr() not in weights).values())

    expected, _ = predicted(shape(name), stored)
    assert expected.weights == pytest.approx(sum(weights.values()), rel=0.02)
    assert expected.gradients == pytest.approx(gradients, rel=0.02)
    assert expected.moments == pytest.approx(moments, rel=0.02)
    assert expected.stored == pytest.approx(stores, rel=0.02)


@pytest.mark.parametrize("elements", [2048, 4096, 5000, 768 * 2048])
def test_8_bit_moments_are_torchaos(elements: int) -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    optimizer = torchao.AdamW8bit([torch.nn.Parameter(torch.zeros(elements))])
    state = optimizer._new_buffer(optimizer.param_groups[0]["params"][0], True)
    tensors = [getattr(state, name) for name in state.tensor_attrs] if hasattr(state, "tensor_attrs") else [state]
    assert tensor_moment_bytes(elements, "adamw8bit") == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("z_loss", [0.0, 1e-5], ids=["", "z-loss"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.sampled(7)
def test_activations_are_what_autograd_saves(name: str, bf16: bool, z_loss: float) -> None:
    peer = Peer(shape(name), "int8", z_loss, bf16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = peer.forward()
    own = storages([*peer.model.parameters(), *peer.model.buffers()])
    saved = sum(size for address, size in storages(kept).items() if address not in own)
    assert loss.requires_grad
    _, setup = predicted(shape(name), "int8", bf16)
    assert ForwardBackwardPass(shape(name), SEQUENCE, setup).saved() == pytest.approx(saved, rel=0.1)


def test_of_few_tokens_the_cast_copies_of_the_layers_matrices_are_most_of_what_is_saved() -> None:
    peer = Peer(shape("large vocabulary"), "int8", bf16=True, samples=1, sequence=16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        peer.forward()
    own = storages([*peer.model.parameters(), *peer.model.buffers()])
    saved = sum(size for address, size in storages(kept).items() if address not in own)
    setup = Setup(len(OWNED), "int8", "adamw", 1, "cpu", True)
    assert ForwardBackwardPass(shape("large vocabulary"), 16, setup).saved() == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["large vocabulary", "many experts"])
def test_masks_between_documents_are_saved_in_every_layer(name: str, bf16: bool) -> None:
    saved = []
    for documents in (None, Documents(EOS, 1000)):
        peer = Peer(shape(name), "int8", bf16=bf16)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=kept: into.append(t) or t, lambda t: t):  # type: ignore[misc]
            peer.forward(documents)
        own = storages([*peer.model.parameters(), *peer.model.buffers()])
        saved.append(sum(size for address, size in storages(kept).items() if address not in own))
    _, setup = predicted(shape(name), "int8", bf16)
    formula = [ForwardBackwardPass(shape(name), SEQUENCE, replace(setup, masked=masked)).saved() for masked in (False, True)]
    assert formula[1] - formula[0] == pytest.approx(saved[1] - saved[0], rel=0.35)  # less positions' embeddings
    assert formula[1] == pytest.approx(saved[1], rel=0.1)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.sampled(3)
@pytest.mark.long
def test_the_highest_moment_of_a_step_is_as_predicted(name: str, bf16: bool, checkpointing: bool) -> None:
    peer = Peer(shape(name), "int8", 1e-5, bf16)
    if checkpointing:
        checkpoint_activations(peer.model)
    highest = highest_moment(peer)
    setup = replace(predicted(shape(name), "int8", bf16)[1], checkpointing=checkpointing)
    expected = device_bytes(shape(name), SEQUENCE, setup)
    assert expected.gradients + expected.activations + expected.working == pytest.approx(highest, rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_where_a_step_has_few_tokens_the_gradients_of_embedding_and_head_are_its_highest_moment(tied: bool, bf16: bool) -> None:
    model = tiny_model(vocab_size=40960, hidden_size=64, num_hidden_layers=1, tie_word_embeddings=tied)
    peer = Peer(model, "int8", 1e-5, bf16, samples=1, sequence=16)
    expected = device_bytes(model, 16, Setup(len(OWNED), "int8", "adamw", 1, "cpu", bf16))
    assert expected.gradients + expected.activations + expected.working == pytest.approx(highest_moment(peer), rel=0.1)


@pytest.mark.parametrize(("recipe", "total", "shared", "expert"), [
    ("1b", 1167, 261, 56.6), ("7b", 7333, 891, 201), ("9b", 9431, 975, 1057),
])
def test_the_recipes_have_the_sizes_of_the_paper(recipe: str, total: float, shared: float, expert: float) -> None:
    started = time.process_time()
    model = load_campaign_config(ROOT / "configs" / f"{recipe}.yaml").model
    layout = layout_of(model)
    assert layout.size == pytest.approx(total * MILLION, rel=0.01)
    assert shared_elements(layout) == pytest.approx(shared * MILLION, rel=0.01)
    assert layout.expert(0).size == pytest.approx(expert * MILLION, rel=0.01)
    assert all(parameter.is_meta for parameter in empty_model(model).parameters())
    assert time.process_time() - started < 20


def recipe_1b(**experts: Any) -> CampaignConfig:
    return load_campaign_config(ROOT / "configs" / "1b.yaml").model_copy(update={"experts": ExpertsConfig(**experts)})


def test_more_memory_never_fits_fewer_experts_and_what_is_promised_fits() -> None:
    config, owned = recipe_1b(), []
    for gib in (6, 8, 10, 12, 18, 24):
        device = Device("cuda", gib * GIB)
        choice = find_room(config, device, "x")
        assert needed_bytes(config, device, choice) <= device.memory
        owned.append(choice.setup.owned)
    assert owned == sorted(owned)
    assert owned[0] < owned[1] < owned[-1] == 16


def test_one_expert_more_would_not_fit() -> None:
    config, device = recipe_1b(), Device("cuda", 10 * GIB)
    fits = find_room(config, device, "x").setup.owned
    assert 0 < fits < 16
    one_more = Setup(fits + 1, "int8", "adamw8bit", 1, stored_on="host", checkpointing=True)
    assert device_bytes(config.model, 2048, one_more).total + device.reserved > device.memory


def test_the_campaigns_number_of_experts_stays_the_limit() -> None:
    assert find_room(recipe_1b(experts_per_peer=3), Device("cuda", 80 * GIB), "x").setup.owned == 3


def test_a_plan_counts_the_process_itself_in_host_memory() -> None:
    made = plan_peer(tiny_campaign(), Device("cuda", GIB), 1e8, None, "--memory")
    assert made.host.total == PROGRAM_BYTES + made.host.pieces
    assert made.host_with_base.program == PROGRAM_BYTES


def test_on_a_cpu_the_host_data_take_from_the_same_memory() -> None:
    config = tiny_campaign()
    choice = find_room(config, Device("cpu", 100 * MILLION), "x")
    assert (choice.setup.owned, choice.setup.stored) == (4, "fp32")
    on_cpu, on_gpu = (needed_bytes(config, Device(kind, 0), choice) for kind in ("cpu", "cuda"))
    assert on_cpu - choice.device.total == host_bytes(config, choice.setup).total
    assert on_gpu - choice.device.total == Device("cuda", 0).reserved


def test_too_little_memory_costs_one_line_with_the_numbers() -> None:
    config = recipe_1b()
    with pytest.raises(UserError) as caught:
        plan_peer(config, Device("cuda", 2 * GIB), 1e8, None, "--memory")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("--memory = 2 GiB: too small for even the shared weights of spes-1b, which take ")
    assert "261M parameters with gradients and moments 2.62 GB" in message


def test_the_options_of_join_are_those_of_the_plan() -> None:
    assert join_flags(Setup(2, "int8", "adamw8bit", 1, stored_on="host", checkpointing=True)) == (
        "--experts 2 --stored int8 --micro-batch-size 1 --stored-on host --optimizer adamw8bit --activation-checkpointing"
    )
    assert join_flags(Setup(0, "bf16", "adamw", 8)) == "--stored bf16 --micro-batch-size 8"


def test_each_means_fits_as_many_experts_as_the_one_before() -> None:
    config = load_campaign_config(ROOT / "configs" / "7b.yaml")
    for ranks in (1, 2):
        device = Device("cuda", 48 * GIB, ranks)
        chosen = find_room(config, device, "x")
        ladder = alternatives(config, device)
        owned = [alternative.choice.setup.owned for alternative in ladder]
        assert owned == sorted(owned)
        assert len(owned) >= 4
        assert plan_peer(config, device, 1e8, None, "x").step_s in [each.step_s for each in ladder if each.choice == chosen]
        assert [each.means for each in ladder if each.choice.setup.sharded] == ["+ sharding"] * (ranks - 1)


@pytest.mark.parametrize("peers", [1, 2, 5])
def test_traffic_of_shared_weights_is_that_of_an_all_reduce(peers: int) -> None:
    config = recipe_1b()
    codecs, groups = group_codecs(config.sync.codec), layout_of(config.model).groups
    encoded = sum(codecs.of(group).encoded_bytes(group.size) for group in groups if group.expert is None)
    traffic = round_traffic(config, 0, peers, 1e8)
    for moved in (traffic.up_bytes, traffic.down_bytes):
        assert moved == pytest.approx(2 * encoded * (peers - 1) / peers, rel=0.02)


@pytest.mark.parametrize(("codec", "gigabytes"), [("sparse16", 1.0), ("sparse", 0.57), ("sparse64", 0.33)])
def test_a_sparse_round_of_four_peers_in_the_9b_shape(codec: str, gigabytes: float) -> None:
    """SPES moves 50.1 GB a peer: `sparse64` is below a hundredth of it."""
    config = load_campaign_config(ROOT / "configs" / "9b.yaml")
    sync = config.sync.model_copy(update={"codec": CodecConfig(shared=codec, experts=codec)})
    traffic = round_traffic(config.model_copy(update={"sync": sync}), config.model.moe_num_experts // 4, 4, 1e8)
    assert (traffic.up_bytes + traffic.down_bytes) / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_an_owned_expert_goes_up_once_to_each_other_peer() -> None:
    config, peers = recipe_1b(), 4
    codec, expert = CODECS[config.sync.codec.experts], layout_of(config.model).expert(0).size
    without, traffic = round_traffic(config, 0, peers, 1e8), round_traffic(config, 16, peers, 1e8)
    assert (traffic.owned, traffic.owned_by_anyone) == (4, 16)
    assert traffic.up_bytes - without.up_bytes == pytest.approx(4 * 3 * codec.encoded_bytes(expert), rel=0.02)
    assert traffic.down_bytes - without.down_bytes == pytest.approx(12 * codec.encoded_bytes(expert), rel=0.02)
    assert traffic.seconds == 8 * max(traffic.up_bytes, traffic.down_bytes) / 1e8


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("1.5 gib", 3 * 2**29), ("2MiB", 2**21)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize(("text", "speed"), [("100mbit", 1e8), ("1Gbit", 1e9), ("2.5 gbit/s", 2.5e9), ("10Mbps", None)])
def test_speeds(text: str, speed: float | None) -> None:
    if speed is not None:
        assert parse_bits_per_second(text, "--bandwidth") == speed
        return
    with pytest.raises(UserError, match=r"--bandwidth '10Mbps': must be a rate such as 100mbit or 1gbit"):
        parse_bits_per_second(text, "--bandwidth")


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0GB", "24 gallons", "1e9b", "nan gb"])
def test_what_is_no_size_names_the_option(text: str) -> None:
    with pytest.raises(UserError, match=r"^--memory '.*': must be a size such as 24GiB or 24GB$"):
        parse_bytes(text, "--memory")


def run_plan(*options: str) -> Ended:
    return call("plan", "--config", str(ROOT / "configs" / "1b.yaml"), *options)


def test_the_command_prints_a_table_or_json() -> None:
    plan = json.loads(run_plan("--memory", "24GiB", "--peers", "4", "--json").stdout)
    assert plan["choice"]["setup"]["owned"] == 16
    assert plan["join_with"] == join_flags(Setup(**plan["choice"]["setup"]))
    assert plan["choice"]["device"]["total"] + plan["target"]["reserved"] <= 24 * GIB
    busiest_way = max(plan["traffic"]["up_bytes"], plan["traffic"]["down_bytes"])
    assert plan["traffic"]["minutes"] == pytest.approx(8 * busiest_way / 1e8 / 60)
    table = " ".join(run_plan("--memory", "24GiB", "--peers", "4", "--bandwidth", "1gbit").stdout.split())
    assert "16 of 16 experts" in table
    assert "1.00Gbit/s" in table


@pytest.mark.parametrize("width", [60, 80])
def test_on_a_narrow_terminal_the_table_of_lines_lacks_columns_and_cuts_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run_plan("--memory", "24GiB", "--peers", "4").stdout
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert ["tokens/day" in shown, "20.0Mbit/s" in shown, "of the" in shown] == [True, True, width == 80]


def test_a_wrong_number_of_peers_costs_one_line() -> None:
    ended = run_plan("--memory", "24GiB", "--peers", "0")
    assert (ended.code, ended.stderr) == (2, "error: --peers 0: must be 1 to 1024\n")


@pytest.mark.long
def test_the_tables_in_the_docs_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "argv", ["memory_table", "--check"])
    assert runpy.run_path(str(ROOT / "tools/memory_table"))["main"]() == 0


def test_a_swarm_on_one_machine_shares_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(free_memory, "measured", lambda device: Device("cpu", 9000))
    monkeypatch.setattr(local_swarm, "start_peer", lambda folder, name, arguments: started.append(arguments))
    local_swarm.start_trainers("address", tmp_path, (Path("a"), Path("b")), [()] * 3)
    folders = ["--data-dir", "a", "--data-dir", "b"]
    assert started == [["join", "address", "--devices", "cpu", "--memory", "3000B", *folders]] * 3


def test_a_swarm_spreads_its_peers_over_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(free_memory, "measured", lambda devices: Device("cuda", 9000 + devices[0].index))
    monkeypatch.setattr(local_swarm, "start_peer", lambda folder, name, arguments: started.append(arguments))
    local_swarm.start_trainers("address", tmp_path, (), [()] * 3)
    shared, own = ["--devices", "0", "--memory", "4500B"], ["--devices", "1", "--memory", "9001B"]
    assert [options[2:] for options in started] == [shared, own, shared]


def test_outer_momentum_counts_wherever_a_base_is() -> None:
    plain = tiny_campaign()
    with_momentum = plain.model_copy(update={"outer": OuterConfig(shared_momentum=0.9)})
    choice = find_room(plain, Device("cpu", GIB), "x")
    shared = 4 * layout_of(plain.model).group("shared").size
    assert host_bytes(with_momentum, choice.setup, True).base - host_bytes(plain, choice.setup, True).base == 3 * shared
    assert disk_bytes(with_momentum, choice).base - disk_bytes(plain, choice).base == 3 * shared
    assert bootstrap_disk_bytes(with_momentum, 5).archive - bootstrap_disk_bytes(plain, 5).archive == 5 * shared


@pytest.mark.parametrize("sync", [{"overlap": True}, {"audited_share": 0.0}, {"codec": "sparse"}, {}])
def test_whoever_judges_a_round_of_an_open_campaign_sets_its_work_aside(sync: dict[str, Any]) -> None:
    friends = tiny_campaign()
    friends = friends.model_copy(update={"sync": SyncConfig.model_validate({**friends.sync.model_dump(), **sync})})
    setup = find_room(friends, Device("cpu", GIB), "x").setup
    layout = layout_of(friends.model)
    trained = 4 * (shared_elements(layout) + setup.owned * layout.expert(0).size)
    of_strangers = friends.model_copy(update={"admission": "open"})
    assert host_bytes(of_strangers, setup, True).update - host_bytes(friends, setup, True).update == trained


def test_a_base_in_memory_is_written_every_fourth_round_and_a_rounds_arrays_never() -> None:
    config = recipe_1b()
    choice = find_room(config, Device("cuda", 24 * GIB), "")
    files, memory = written_bytes(config, choice), written_bytes(config, choice, base_in_memory=True)
    assert files.base == 4 * base_size(layout_of(config.model), config.outer) == KEPT_ROUNDS * memory.base
    assert (files.checkpoint, files.results) == (memory.checkpoint, memory.results)
    assert files.scratch > 0 == memory.scratch
    assert memory.campaign == 500 * memory.total < files.campaign
    arrays = written_bytes(config, choice, arrays_in_memory=True)
    assert arrays == replace(files, scratch=0)
    plan = plan_peer(config, Device("cuda", 24 * GIB), 1e8, None, "")
    assert plan_json(plan)["written_with_arrays"]["campaign"] == arrays.campaign
    shown = io.StringIO()
    Console(width=500, file=shown).print(render_plan(plan))
    told = shown.getvalue()
    assert f"with a round's arrays in memory {human_bytes(arrays.total)} a round, {human_bytes(arrays.campaign)} in 500" in told


@pytest.mark.parametrize(("asked", "free_gib", "bases", "arrays"), [
    ("auto", 1024, True, True), ("auto", 24, False, True), ("auto", 2, False, False), ("disk", 1024, False, False),
    ("ram", 1, True, True),
])
def test_bases_or_only_a_rounds_arrays_are_in_memory_where_half_of_what_is_free_suffices(
    asked: str, free_gib: int, bases: bool, arrays: bool, tmp_path: Path
) -> None:
    settings = make_peer_config(run_dir=tmp_path, experts=1, base=asked, micro_batch_size=1)
    with_training = int((free_gib + 10.7) * GIB)
    for device in (Device("cpu", with_training), Device("cuda", 24 * GIB, host_memory=free_gib * GIB)):
        found = resources_on(device, settings, recipe_1b())
        assert (found.base_in_memory, found.arrays_in_memory) == (bases, arrays)
