"""Several ranks train what one does: two processes on gloo with half of each batch, against one with the whole."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from model_shapes import tiny_campaign
from moe_families import small_config

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.config.model import TransformersModel
from spes_p2p.errors import Broken, UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import initial_state, layer_number, layout_of
from spes_p2p.model.formats import StoredPlace
from spes_p2p.model.memory import Setup, device_bytes, host_shards_bytes, stored_bytes
from spes_p2p.model.sharding import rank_that_steps, ranks_of_layers, ranks_outside_layers
from spes_p2p.model.shared_memory import SharedMemory
from spes_p2p.session.ranks import Leader
from spes_p2p.testing.simulate.language import SETTINGS, LanguageTrainer, Sentences
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.ranks import ALONE, Ranks, Step, buckets
from spes_p2p.training.trainer import TorchTrainer, no_base

CAMPAIGN = campaign(
    60, "none", model=SETTINGS["model"] | {"num_hidden_layers": 2},
    training=SETTINGS["training"] | {
        "moe_loss_weight": 0.1, "moe_zloss_weight": 0.01, "instance_filter": True, "second_moment_peers": "auto",
    },
)
CONFIG = CAMPAIGN.config
LAYOUT = layout_of(CONFIG.model)
BASE = initial_state(CONFIG.model)
HALF = TrainingOptions(micro_batch_size=CONFIG.training.batch_size // 2)
SHARDS = replace(HALF, sharded=True)
SHARDS_INT8 = replace(SHARDS, stored="int8")
CPU = torch.device("cpu")
SHAPES = [((2, 3), torch.int8), ((2, 1), torch.float32)]
BF16_ROUNDING = 0.1
"""Bound of the relative difference by norm; on a CPU in bf16 autocast it is 0.025. Of experts with few tokens it is 0.4."""

ROUNDING = 2e-5
"""Bound of the difference of weights. Of most it is below 1e-7; AdamW, which divides gradients by their size, makes more of the
rounding of small ones: here 1/500 of the learning rate."""


class Text(Sentences):
    """Every seventh sample is one that the instance filter drops, so that some batches do not divide into equal halves."""

    def read(self, interval: Interval) -> np.ndarray:
        samples = super().read(interval)
        samples[np.arange(interval.start, interval.stop) % 7 == 0] = 5
        return samples


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Leader]]:
    """The leader of two ranks; another one if a test ended the last or needs another campaign."""
    running: list[tuple[tuple[CampaignConfig, TrainingOptions, str], Leader]] = []

    def leader(config: CampaignConfig = CONFIG, options: TrainingOptions = HALF, kind: str = "cpu") -> Leader:
        wanted = config, options, kind
        if not running or running[0][0] != wanted or not running[0][1].is_whole:
            close()
            devices = (CPU, CPU) if kind == "cpu" else (torch.device("cuda:0"), torch.device("cuda:1"))
            running.append((wanted, Leader(devices, config, options, tmp_path_factory.mktemp("ranks"))))
            running[0][1].meet()
        return running[0][1]

    def close() -> None:
        while running:
            running.pop()[1].close()

    yield leader
    close()


def trainer_of(
    ranks: Ranks, owned: tuple[int, ...] = (0, 3), device: str = "cpu", options: TrainingOptions = HALF
) -> TorchTrainer:
    options = replace(options if ranks.count > 1 else TrainingOptions(), compiles=False)
    return TorchTrainer(CONFIG, BASE, owned, Text(0), Text(1), device, options, ranks)


def train(trainer: TorchTrainer, number: int, steps: int = 5) -> PhaseReport:
    samples = Interval(0, 100 * number, 100 * number + CONFIG.training.batch_size * steps)
    phase = Phase(number, 10 * number, 10, steps, (samples,), averaged_peers=2.0)
    return trainer.train(phase, lambda: False, lambda done, speed: None)


def other_campaign(optimizer: str) -> tuple[CampaignConfig, TrainingOptions]:
    """Low-rank terms, tied weights, documents apart, samples left out; foreign experts in int8, activations recomputed."""
    model = SETTINGS["model"] | {"num_hidden_layers": 3, "moe_low_rank": 8, "tie_word_embeddings": True}
    training = SETTINGS["training"] | {"intra_document_masking": True, "instance_filter": True, "optimizer": optimizer}
    changed = campaign(60, "none", model=model, training=training)
    return changed.config, replace(HALF, stored="int8", activation_checkpointing=True)


def shared_by(pid: int) -> set[str]:
    """The inodes of the shared memory that a process maps."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {line[4] for line in lines if line[5:6] == ["/memfd:spes-shared"]}


def local_weights(trainer: TorchTrainer) -> dict[str, np.ndarray]:
    groups = [group for group in LAYOUT.groups if group.expert is None or group.expert in trainer.owned]
    return {group.name: trainer.read(group) for group in groups}


def life(
    ranks: Ranks, device: str = "cpu", options: TrainingOptions = HALF
) -> Iterator[tuple[dict[str, np.ndarray], PhaseReport]]:
    """Train phases, with what happens between them: corrections of a round, other experts, a restart from a checkpoint."""
    trainer = trainer_of(ranks, device=device, options=options)
    report = train(trainer, 0)
    yield local_weights(trainer), report

    random = np.random.default_rng(0)
    for name in ("shared", "expert.3"):
        group = LAYOUT.group(name)
        trainer.add(group, random.normal(0, 0.01, group.size).astype(np.float32))
    foreign = LAYOUT.expert(1)
    trainer.refresh(foreign, 2 * BASE[foreign.start : foreign.stop])
    report = train(trainer, 1)
    yield local_weights(trainer), report

    trainer.assign((2,), BASE)
    trainer.assign((1, 3), BASE)
    report = train(trainer, 2)
    yield local_weights(trainer), report

    state = {
        name: np.concatenate(list(source.pieces())).reshape(source.shape) for name, source in trainer.optimizer_state().items()
    }
    weights = local_weights(trainer)
    trainer = trainer_of(ranks, trainer.owned, device, options)
    trainer.load_optimizer_state(state)
    for name, values in weights.items():
        group = LAYOUT.group(name)
        trainer.add(group, values - BASE[group.start : group.stop])
    report = train(trainer, 3)
    yield local_weights(trainer), report


@pytest.mark.network
@pytest.mark.parametrize("options", [HALF, SHARDS, replace(HALF, stored_on="host")], ids=["replicas", "shards", "host"])
def test_two_ranks_train_what_one_does_on_a_cpu(two_ranks: Callable[..., Leader], options: TrainingOptions) -> None:
    lives = life(ALONE), life(two_ranks(options=options), options=options)
    for (weights, report), (of_two, report_of_two) in zip(*lives, strict=True):
        assert report_of_two.tokens == report.tokens < 5 * 4 * 32, "some samples are filtered"
        assert report_of_two.assignments == report.assignments
        assert report_of_two.loss == pytest.approx(report.loss, rel=1e-6)
        assert report_of_two.aux_loss == pytest.approx(report.aux_loss, rel=1e-6)
        for name, values in weights.items():
            group = LAYOUT.group(name)
            assert np.abs(values - BASE[group.start : group.stop]).max() > 250 * ROUNDING
            np.testing.assert_allclose(of_two[name], values, rtol=0, atol=ROUNDING)


@pytest.mark.network
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [HALF, SHARDS, replace(SHARDS, stored_on="host")], ids=["replicas", "shards", "host"])
def test_two_ranks_train_what_one_does_on_cuda(two_ranks: Callable[..., Leader], options: TrainingOptions) -> None:
    """In bf16, which rounds each share of a batch by itself: the changes of the shared weights agree by norm."""
    of_one, of_two = life(ALONE, "cuda:0"), life(two_ranks(options=options, kind="cuda"), "cuda:0", options)
    for (weights, report), (of_both, report_of_both) in zip(of_one, of_two, strict=True):
        assert report_of_both.tokens == report.tokens
        assert report_of_both.loss == pytest.approx(report.loss, rel=BF16_ROUNDING)
        shared = LAYOUT.group("shared")
        change = weights["shared"] - BASE[shared.start : shared.stop]
        assert np.linalg.norm(of_both["shared"] - weights["shared"]) < BF16_ROUNDING * np.linalg.norm(change)


@pytest.mark.slow
def test_a_swarm_of_peers_with_two_devices_decides_the_same_bases(two_ranks: Callable[..., Leader]) -> None:
    def bases_of(ranks: Ranks) -> np.ndarray:
        async def main() -> np.ndarray:
            options = HALF if ranks.count > 1 else TrainingOptions()
            swarm = VirtualSwarm(
                CAMPAIGN, layout=LAYOUT, weights=BASE,
                make_trainer=lambda base, owned: LanguageTrainer(
                    CONFIG, base, owned, Text(0), Text(1), options=options, ranks=ranks
                ),
            )
            swarm.start_all("AB")
            swarm.start("C", experts=1)
            await swarm.until_round(2)
            swarm.restart("A")
            await swarm.until(lambda: swarm.round_of("A") >= 3)
            swarm.kill("B")  # the others get its experts
            await swarm.until_finished()
            swarm.assert_replicas_agree()
            return swarm.peers["A"].replica.base.values[: LAYOUT.size].copy()

        return simulate(main)

    with torch.random.fork_rng():
        alone, of_two = bases_of(ALONE), bases_of(two_ranks())
    assert np.abs(alone - BASE).max() > 250 * ROUNDING
    np.testing.assert_allclose(of_two, alone, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("stored_on", ["device", "host"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_share_as_the_formula_says(rank: int, stored_on: StoredPlace) -> None:
    """Between phases, when no layer is open; rank 0 has the others' in main memory, and all of what is stored there."""
    options = replace(SHARDS, stored="int8", stored_on=stored_on)
    trainer = TorchTrainer(CONFIG, BASE, (0, 3), None, None, "cpu", options, Ranks(rank, 2))
    here = [layer for layer in range(2) if layer % 2 == rank]
    at_home = [0, 1] if rank == 0 else here  # on a CPU main memory is the device's
    trained = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in trainer.weights.values()}
    setup = Setup(2, "int8", "adamw", 1, "cpu", False, stored_on, True, ranks=2, sharded=True)
    outside = sum(t.spec.size for t in LAYOUT.tensors if t.spec.layer is None)
    of_a_layer = (device_bytes(CONFIG.model, 32, setup).weights - 4 * outside) // 2
    assert sum(trained.values()) == pytest.approx(4 * outside + of_a_layer * len(at_home), abs=200)
    stored = [each.untyped_storage().nbytes() for block in trainer.blocks.values() for each in block.stored_tensors()]
    layers = 2 * (rank == 0) if stored_on == "host" else len(at_home)
    assert sum(stored) == pytest.approx(stored_bytes(CONFIG.model, setup) * layers // 2, abs=50)


@pytest.mark.parametrize(("family", "ranks"), [("deepseek_v2", 2), ("deepseek_v2", 3), ("qwen2_moe", 2), ("qwen2_moe", 3)])
def test_layers_that_are_not_alike_take_what_the_formula_says(family: str, ranks: int) -> None:
    """The first layer is dense, or every other one. The formula is of the rank with most."""
    given = {"num_hidden_layers": 5, "decoder_sparse_step": 2}
    config_json = json.loads(small_config(family).to_json_string(use_diff=False)) | given | {"layer_types": None}
    config = tiny_campaign(TransformersModel(config=config_json))
    layout, base = layout_of(config.model), no_base(config.model)
    setup = Setup(1, "int8", "adamw", 1, "cpu", False, checkpointing=True, ranks=ranks, sharded=True)
    found = []
    for rank in range(ranks):
        trainer = TorchTrainer(config, base, (0,), None, None, "cpu", SHARDS_INT8, Ranks(rank, ranks))
        sizes: dict[int | None, list[int]] = {}
        for name, weights in trainer.weights.items():
            sizes.setdefault(layout.by_name[name].spec.layer, [0, 0])[0] += weights.nbytes
        for name, block in trainer.blocks.items():
            sizes[layer_number(f"{name}.")][1] += sum(each.nbytes for each in block.stored_tensors())
        here = [layer for layer in sizes if layer is None or ranks_of_layers(layout, ranks)[layer] == rank]
        largest = max((layer for layer in sizes if layer not in here), key=lambda layer: 2 * sizes[layer][0] + sizes[layer][1])
        outside = sum(t.spec.size for t in layout.tensors if ranks_outside_layers(layout, ranks).get(t.spec.name) == rank)
        weights, stored = (sum(sizes[layer][i] for layer in (*here, largest)) for i in range(2))
        moments = 2 * (4 * outside + sum(sizes[layer][0] for layer in here if layer is not None))
        found.append((2 * weights + stored + moments, weights, stored, moments))
    _, weights, stored, moments = max(found)
    expected = device_bytes(config.model, 16, setup)
    assert (expected.weights, expected.stored, expected.moments) == (weights, stored, moments)


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_of_each_kind_are_divided_equally(ranks: int) -> None:
    """Taking turns would give all dense layers to one of two ranks, where every other layer is dense."""
    given = {"num_hidden_layers": 12, "decoder_sparse_step": 2, "layer_types": None}
    config_json = json.loads(small_config("qwen3_moe").to_json_string(use_diff=False)) | given
    layout = layout_of(tiny_campaign(TransformersModel(config=config_json)).model)
    with_experts = {t.spec.layer for t in layout.tensors if t.spec.expert is not None}
    assert len(with_experts) == 6
    held = [{layer for layer, holder in ranks_of_layers(layout, ranks).items() if holder == rank} for rank in range(ranks)]
    assert {(len(layers), len(layers & with_experts)) for layers in held} == {(12 // ranks, 6 // ranks)}


def test_moments_of_what_other_ranks_step_wait_in_main_memory() -> None:
    """As `host_shards_bytes` counts them, also of weights outside the layers, which rank 0 has on its device."""
    trainer = TorchTrainer(CONFIG, BASE, (0, 3), None, None, "cpu", SHARDS, Ranks(0, 2))
    optimizer, on_gpu = trainer._optimizer, cast(torch.nn.Parameter, SimpleNamespace(device=torch.device("cuda")))
    waiting = {name for name in trainer.weights if optimizer._home_of(name, on_gpu).type == "cpu"}
    outside = {t.spec.name for t in LAYOUT.tensors if t.spec.layer is None}
    assert {name for name in outside if rank_that_steps(LAYOUT, 2, name) == 1} == waiting & outside != set()
    setup = Setup(2, "fp32", "adamw", 1, "cpu", False, "host", True, ranks=2, sharded=True)
    weights = 4 * sum(weights.numel() for name, weights in trainer.weights.items() if name in waiting - outside)
    moments = 8 * sum(trainer.weights[name].numel() for name in waiting)
    assert host_shards_bytes(CONFIG.model, setup) == weights + moments


def test_buckets_hold_every_gradient_once_in_order() -> None:
    found = []
    for elements in (1, 2000, 10_000):
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (10, 3000, 1, 1500)]
        for number, parameter in enumerate(parameters[:-1]):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        fixed = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        made = list(buckets([fixed, *parameters], elements))
        assert fixed.grad is None
        assert all(len(bucket) == 1 or sum(map(len, bucket)) <= elements for bucket in made)
        found.append(([len(bucket) for bucket in made], torch.cat([each for bucket in made for each in bucket]).tolist()))
    assert [sizes for sizes, _ in found] == [[1, 1, 1, 1], [1, 1, 2], [4]]
    assert found[0][1] == found[1][1] == found[2][1] == [1.0] * 10 + [2.0] * 3000 + [3.0] + [0.0] * 1500


@pytest.mark.network
def test_a_rank_that_dies_ends_the_peer_with_one_line(two_ranks: Callable[..., Leader]) -> None:
    leader = two_ranks()
    trainer = trainer_of(leader)
    (process,) = leader.processes

    def kill_it(done: int, speed: float) -> None:
        process.kill()

    phase = Phase(0, 0, 10, 5, (Interval(0, 0, 20),))
    with pytest.raises(Broken) as caught:
        trainer.train(phase, lambda: False, kill_it)
    assert str(caught.value) == (
        f"--devices: rank 1 (cpu) ended: killed by signal {signal.SIGKILL:d}; this peer stops; start it again on its run-dir, "
        "without this device if it repeats"
    )
    with pytest.raises(Broken, match="rank 1"):
        trainer.train(phase, lambda: False, kill_it)


@pytest.mark.network
@pytest.mark.parametrize("options", [HALF, SHARDS_INT8], ids=["replicas", "shards"])
def test_ranks_have_one_copy_of_foreign_experts_in_main_memory(
    two_ranks: Callable[..., Leader], options: TrainingOptions
) -> None:
    """The other rank maps those of rank 0 during a phase, and lets go of what an ownership change replaces."""
    options = replace(options, stored_on="host")
    leader, before = two_ranks(options=options), shared_by(os.getpid())
    trainer = trainer_of(leader, options=options)
    in_memory = 2 * CONFIG.model.num_hidden_layers  # two matrices of each layer
    follower = leader.processes[0].pid or 0

    def look(done: int, speed: float) -> None:
        found.append((shared_by(os.getpid()), shared_by(follower)))
        if done == 2:  # the follower is slow to end the phase
            os.kill(follower, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (follower, signal.SIGCONT)).start()

    for number, owned in enumerate(((0, 3), (1, 2))):
        trainer.assign(owned, BASE)
        found: list[tuple[set[str], set[str]]] = []
        phase = Phase(number, 0, 10, 2, (Interval(0, 0, 2 * CONFIG.training.batch_size),))
        trainer.train(phase, lambda: False, look)
        assert all(here - before == there and len(there) == in_memory for here, there in found)
        assert len(found) == 2
        assert not shared_by(follower)


@pytest.mark.network
def test_a_phase_without_steps_ends_before_its_foreign_experts_are_replaced(two_ranks: Callable[..., Leader]) -> None:
    """The other rank, which may be about to map them, is slow."""
    options = replace(HALF, stored_on="host")
    leader = two_ranks(options=options)
    trainer, follower = trainer_of(leader, options=options), leader.processes[0].pid or 0

    def stop() -> bool:
        os.kill(follower, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (follower, signal.SIGCONT)).start()
        return True

    for owned in ((1, 2), (0, 3), (1, 2), (0, 3)):
        trainer.train(Phase(0, 0, 10, 2, (Interval(0, 0, 2 * CONFIG.training.batch_size),)), stop, lambda done, speed: None)
        trainer.assign(owned, BASE)
    assert leader.is_whole


def test_shared_memory_is_locked_for_cuda_until_its_last_tensor_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}

    class Cuda:
        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
            locked[start] = size
            return int(size == 1)

        def cudaHostUnregister(self, start: int) -> None:
            del locked[start]

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    memory = SharedMemory(SHAPES)
    memory.pin()
    codes, scales = memory.tensors(SHAPES)
    codes.fill_(1)
    scales.fill_(2)
    assert locked == {codes.data_ptr(): len(memory)}
    again = SharedMemory(SHAPES, memory.path).tensors(SHAPES)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    row = codes[1]
    del memory, codes, scales
    assert len(locked) == 1
    del row
    assert not locked


def test_memory_that_cuda_does_not_lock_is_used_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that CUDA still remembers is raised where the next kernel starts. The warning comes once for all matrices."""
    remembered: list[int] = []

    class Cuda:
        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
            remembered[:] = [801]
            return 801

    def first_kernel(*shape: int, **options: object) -> None:
        if remembered:
            raise RuntimeError(f"CUDA error {remembered.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch, "ones", first_kernel)
    for _ in range(2):
        SharedMemory(SHAPES).pin()
        assert not remembered
    assert caplog.messages == ["cannot page-lock foreign experts in main memory (CUDA error 801): slower copies to the GPU"]


def test_shared_memory_is_all_there_from_the_start() -> None:
    """Otherwise a lack of memory would end the process where it first writes a page."""
    memory = SharedMemory([((100, 1000), torch.float32)])
    assert 512 * os.stat(memory.path).st_blocks >= 400_000


@pytest.mark.parametrize(("code", "why"), [(errno.ENOSPC, "No space left on device"), (errno.EMFILE, "Too many open files")])
def test_memory_that_cannot_be_shared_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, code: int, why: str) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    there = set(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError) as caught:
        SharedMemory([((5, 10**6), torch.int8)])
    assert str(caught.value) == (
        f"--stored-on host: cannot share 5 MB of foreign experts among the devices ({why}); give --stored-on device"
    )
    assert set(os.listdir("/proc/self/fd")) == there
    with pytest.raises(UserError, match=r"\(No such file or directory\)"):
        SharedMemory(SHAPES, f"/proc/{os.getpid()}/fd/99999")


@pytest.mark.network
@pytest.mark.parametrize(("optimizer", "stored_on"), [("adamw", "device"), ("adamw", "host"), ("muon", "device")])
def test_ranks_with_a_share_each_train_what_one_does_with_other_options(
    two_ranks: Callable[..., Leader], optimizer: str, stored_on: StoredPlace
) -> None:
    """Steps have two passes, in the second of which a rank may have no sample, and phases begin with moments of others. Muon,
    which orthogonalises in bf16, rounds more.

    Held-out losses are of what the weights are now.
    """
    config, options = other_campaign(optimizer)
    options = replace(options, sharded=True, stored_on=stored_on, micro_batch_size=1)
    found, losses = [], []
    for ranks in (ALONE, two_ranks(config, options)):
        base, text = initial_state(config.model), Text(0)
        own_options = replace(options, micro_batch_size=2 // ranks.count)
        trainer = TorchTrainer(config, base, (0, 3), text, text, options=own_options, ranks=ranks, eos_token_id=0)
        for number, owned in enumerate(((0, 3), (1, 2))):
            trainer.assign(owned, base)
            train(trainer, number)
            train(trainer, number + 10)
        groups = [group for group in trainer.layout.groups if group.expert is None or group.expert in owned]
        change = [trainer.read(group) - base[group.start : group.stop] for group in groups]
        state = sorted(trainer.optimizer_state().items())
        moments = [np.ravel(piece) for name, each in state if not name.startswith("age/") for piece in each.pieces()]
        found.append(np.concatenate([*change, *moments]))
        trainer.load_base(1.5 * base)
        losses.append(trainer.validation_loss())
    bound = BF16_ROUNDING * np.linalg.norm(found[0]) if optimizer == "muon" else ROUNDING * math.sqrt(found[0].size)
    assert np.linalg.norm(found[1] - found[0]) < bound
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.network
@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa"])
@pytest.mark.parametrize("options", [HALF, SHARDS], ids=["replicas", "shards"])
def test_ranks_train_a_router_with_biases_that_stay(
    two_ranks: Callable[..., Leader], options: TrainingOptions, family: str
) -> None:
    """The layers of `glm_moe_dsa` return more than hidden states."""
    model = TransformersModel(config=json.loads(small_config(family).to_json_string(use_diff=False)))
    config = CONFIG.model_copy(update={"model": model})
    layout, base = layout_of(model), initial_state(model)
    biases = [placed for placed in layout.tensors if placed.spec.name.endswith("e_score_correction_bias")]
    for placed in biases:
        base[placed.start : placed.stop] = np.linspace(-0.2, 0.2, placed.spec.size)
    found = []
    for ranks in (ALONE, two_ranks(config, options)):
        own_options = options if ranks.count > 1 else TrainingOptions()
        trainer = TorchTrainer(config, base, (0, 3), Text(0), None, "cpu", own_options, ranks)
        train(trainer, 0)
        found.append(trainer.read(layout.group("router")))
        start = layout.group("router").start
        for placed in biases:
            assert np.array_equal(found[-1][placed.start - start : placed.stop - start], base[placed.start : placed.stop])
    assert np.abs(found[0] - base[start : start + found[0].size]).max() > 250 * ROUNDING
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=ROUNDING)


class Unreadable(Text):
    """The third batch cannot be read."""

    def read(self, interval: Interval) -> np.ndarray:
        if interval.start >= 2 * CONFIG.training.batch_size:
            raise UserError("text: cannot be read")
        return super().read(interval)


@pytest.mark.network
def test_a_phase_that_ends_with_an_error_leaves_weights_and_moments_with_rank_0(two_ranks: Callable[..., Leader]) -> None:
    """As an audit that fails: the peer goes on, with layers that were at other ranks."""
    found = []
    for ranks in (ALONE, two_ranks(options=SHARDS)):
        options = SHARDS if ranks.count > 1 else TrainingOptions()
        trainer = TorchTrainer(CONFIG, BASE, (0, 3), Unreadable(0), Text(1), "cpu", options, ranks)
        with pytest.raises(UserError, match=r"^text: cannot be read$"):
            train(trainer, 0)
        weights = np.concatenate([*local_weights(trainer).values()])
        found.append((weights, trainer.validation_loss(), sorted(trainer.optimizer_state())))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0, atol=ROUNDING)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)
    assert found[1][2] == found[0][2]


@pytest.mark.network
@pytest.mark.parametrize("options", [HALF, SHARDS], ids=["replicas", "shards"])
def test_a_step_that_fails_at_rank_0_ends_the_peer_with_one_line(
    two_ranks: Callable[..., Leader], options: TrainingOptions
) -> None:
    """The other rank waits for it within the step, so no later step can begin."""
    leader = two_ranks(options=options)
    trainer = trainer_of(leader, options=options)

    def fail(*given: object) -> None:
        raise RuntimeError("CUDA out of memory\nTried to allocate")

    try:
        trainer.model.base_model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(Broken, match=r"^--devices: rank 0 \(cpu\) failed: CUDA out of memory; this peer stops"):
            train(trainer, 0)
        with pytest.raises(Broken, match=r"^--devices: rank 0 \(cpu\) failed: CUDA out of memory"):
            train(trainer, 1)
    finally:
        leader.close()


@pytest.mark.slow
def test_a_rank_that_fails_says_why(two_ranks: Callable[..., Leader]) -> None:
    leader = two_ranks()
    trainer = trainer_of(leader)
    train(trainer, 0)
    leader.tell(Step(np.full((4, 32), 10**6), 0.0))
    with pytest.raises(Broken, match=r"rank 1 \(cpu\) ended: index out of range in self; this peer stops"):
        train(trainer, 1)
