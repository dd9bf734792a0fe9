"""The trainer between the flat state and torch: what goes in comes out, and what trains is what should."""

import math
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import needs_cuda
from model_shapes import tiny_campaign, tiny_model, tiny_training
from one_trainer import CountingText, bits, phase_of, train
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import build_model, initial_state, layout_of
from spes_p2p.model.flops import training_flops_per_token
from spes_p2p.model.formats import StoredFormat
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.storage.tensor_file import Source
from spes_p2p.storage.threads import ahead
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.batches import split_samples
from spes_p2p.training.interface import Phase
from spes_p2p.training.losses import forward_losses
from spes_p2p.training.options import TrainingOptions, check_options
from spes_p2p.training.trainer import TorchTrainer

MODEL = tiny_model()
LAYOUT = layout_of(MODEL)
BASE = initial_state(MODEL)
UNSCALED: dict[str, Any] = {
    "moe_loss_weight": 0.0, "eps": 10.0, "learning_rate": 10.0, "weight_decay": 0.0, "max_grad_norm": 1e9,
}
"""With an epsilon this large, AdamW's update is proportional to the gradient."""


def trainer_of(
    owned: tuple[int, ...] = (0, 3),
    text: CountingText | None = None,
    options: TrainingOptions | None = None,
    **settings: Any,
) -> TorchTrainer:
    config = tiny_campaign(MODEL, tiny_training(**settings))
    return TorchTrainer(config, BASE, owned, text or CountingText(), CountingText(), options=options)


def test_what_is_trained_reads_back_the_base_bit_for_bit() -> None:
    trainer = trainer_of()
    for name in ("shared", "router", "expert.0", "expert.3"):
        group = LAYOUT.group(name)
        assert bits(trainer.read(group)) == bits(BASE[group.start : group.stop])


def test_load_base_replaces_every_weight_foreign_ones_too() -> None:
    other = initial_state(tiny_model(seed=1))
    loaded, built = trainer_of(), TorchTrainer(tiny_campaign(), other, (0, 3), CountingText(), CountingText())
    assert loaded.validation_loss() != built.validation_loss()
    loaded.load_base(other)
    assert loaded.validation_loss() == built.validation_loss()
    assert bits(loaded.read(LAYOUT.group("shared"))) == bits(built.read(LAYOUT.group("shared")))


def test_add_is_one_float32_addition_and_other_groups_stay() -> None:
    trainer = trainer_of()
    random = np.random.default_rng(0)
    for name in ("shared", "router", "expert.3"):
        group = LAYOUT.group(name)
        delta = random.standard_normal(group.size).astype(np.float32)
        before = trainer.read(group)
        trainer.add(group, delta)
        assert bits(trainer.read(group)) == bits(before + delta)
    unchanged = LAYOUT.group("expert.0")
    assert bits(trainer.read(unchanged)) == bits(BASE[unchanged.start : unchanged.stop])


def test_refresh_of_a_foreign_expert_is_what_the_model_computes_with() -> None:
    changed = BASE.copy()
    group = LAYOUT.expert(1)
    changed[group.start : group.stop] *= 3
    changed.setflags(write=False)
    trainer = trainer_of()
    trainer.refresh(group, changed[group.start : group.stop])
    expected = TorchTrainer(tiny_campaign(), changed, (0, 3), CountingText(), CountingText())
    assert trainer.validation_loss() == expected.validation_loss() != trainer_of().validation_loss()


def test_groups_that_are_not_trained_here_cannot_be_read_and_trained_ones_not_refreshed() -> None:
    trainer = trainer_of()
    foreign, own = LAYOUT.expert(1), LAYOUT.expert(0)
    with pytest.raises(ValueError, match=r"expert\.1 is not trained here"):
        trainer.read(foreign)
    with pytest.raises(ValueError, match=r"expert\.1 is not trained here"):
        trainer.add(foreign, np.zeros(foreign.size, np.float32))
    with pytest.raises(ValueError, match=r"expert\.0 is trained here"):
        trainer.refresh(own, np.zeros(own.size, np.float32))


def test_validation_loss_is_the_plain_models() -> None:
    samples = torch.from_numpy(CountingText().read_spread(8))
    with torch.no_grad():
        logits = plain_model(MODEL, BASE).eval()(input_ids=samples).logits[:, :-1]
    expected = float(F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()))
    assert trainer_of(micro_batch_size=2).validation_loss() == pytest.approx(expected, rel=1e-6)
    without = TorchTrainer(tiny_campaign(), BASE, (0,), CountingText())
    assert math.isnan(without.validation_loss())


def test_training_lowers_the_loss_and_changes_no_foreign_expert() -> None:
    trainer = trainer_of(learning_rate=1e-2)
    before = trainer.validation_loss()
    first, second = (train(trainer, phase_of(20, 10 * number)) for number in range(2))
    assert second.loss < first.loss < math.log(MODEL.vocab_size) + 1
    assert trainer.validation_loss() < before - 1
    changed = {name for name in ("shared", "router", "expert.0", "expert.3")
               if bits(trainer.read(LAYOUT.group(name))) != bits(BASE[LAYOUT.group(name).start : LAYOUT.group(name).stop])}
    assert changed == {"shared", "router", "expert.0", "expert.3"}
    trainer.assign((0, 1, 3), BASE)
    group = LAYOUT.expert(1)
    assert bits(trainer.read(group)) == bits(BASE[group.start : group.stop])


def test_report_counts_tokens_and_the_assignments_of_owned_experts() -> None:
    everything, part = train(trainer_of((0, 1, 2, 3)), phase_of(3)), train(trainer_of((0, 3)), phase_of(3))
    assert everything.tokens == part.tokens == 3 * 4 * 16
    assert np.sum(everything.assignments, axis=1).tolist() == [everything.tokens * MODEL.moe_top_k] * MODEL.num_hidden_layers
    assert np.sum(everything.assignments, axis=0).tolist() == list(everything.routed)
    assert np.sum(part.assignments) == np.sum(everything.assignments)
    assert sum(everything.routed) == everything.tokens * MODEL.moe_top_k * MODEL.num_hidden_layers
    assert part.routed[1] == part.routed[2] == 0
    assert part.routed[0] > 0
    assert part.steps == 3
    assert part.untrained == ()
    assert part.skipped_steps == 0
    assert part.aux_loss > 0


def test_stopping_reports_the_samples_that_were_not_trained() -> None:
    slices = (Interval(0, 100, 106), Interval(0, 200, 206), Interval(1, 0, 6))
    trainer = trainer_of()
    report = train(trainer, phase_of(4, slices=slices), stop_after=2)
    assert report.steps == 2
    assert report.untrained == (Interval(0, 202, 206), Interval(1, 0, 6))
    nothing = train(trainer, phase_of(4, slices=slices), stop_after=0)
    assert nothing.untrained == slices
    assert math.isnan(nothing.loss)
    assert nothing.tokens == 0
    short = train(trainer, phase_of(9, slices=slices))
    assert (short.steps, short.untrained) == (4, (Interval(1, 4, 6),))


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    whole, parts = trainer_of(**UNSCALED), trainer_of(micro_batch_size=1, **UNSCALED)
    reports = [train(trainer, phase_of(2)) for trainer in (whole, parts)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)
    assert reports[0].routed == reports[1].routed
    group = LAYOUT.group("shared")
    moved = np.abs(whole.read(group) - BASE[group.start : group.stop]).max()
    np.testing.assert_allclose(whole.read(group), parts.read(group), atol=1e-3 * moved)


def test_steps_that_are_not_finite_are_skipped_and_counted() -> None:
    trainer = trainer_of()
    group = LAYOUT.group("router")
    poison = np.zeros(group.size, np.float32)
    poison[0] = np.inf
    trainer.add(group, poison)
    before = trainer.read(LAYOUT.group("shared"))
    report = train(trainer, phase_of(3))
    assert (report.steps, report.skipped_steps, report.tokens, sum(report.routed)) == (3, 3, 0, 0)
    assert math.isnan(report.loss)
    assert bits(trainer.read(LAYOUT.group("shared"))) == bits(before)


def test_many_steps_in_a_row_that_are_not_finite_stop_the_peer_over_phases_too() -> None:
    trainer = trainer_of()
    group = LAYOUT.group("router")
    poison = np.zeros(group.size, np.float32)
    poison[0] = np.inf
    trainer.add(group, poison)
    assert train(trainer, phase_of(9)).skipped_steps == 9
    with pytest.raises(UserError, match=r"training on cpu: .* not finite in 10 consecutive steps; .* sends nothing") as stop:
        train(trainer, phase_of(9))
    assert "\n" not in str(stop.value)


def test_steps_of_an_audit_do_not_count() -> None:
    trainer = trainer_of()
    trainer.load_base(np.where(np.arange(LAYOUT.size) == LAYOUT.group("router").start, np.float32(np.inf), BASE))
    for _ in range(2):
        assert train(trainer, phase_of(6)).skipped_steps == 6
        trainer.load_optimizer_state({})


def test_a_finite_step_ends_the_row() -> None:
    trainer = trainer_of()
    group = LAYOUT.group("router")
    for _ in range(3):
        trainer.load_base(np.where(np.arange(LAYOUT.size) == group.start, np.float32(np.inf), BASE))
        assert train(trainer, phase_of(6)).skipped_steps == 6
        trainer.load_base(BASE)
        assert train(trainer, phase_of(1)).skipped_steps == 0


def router_updates(**options: Any) -> dict[str, np.ndarray]:
    """What two steps without cross-entropy's share change: weights of the auxiliary losses are so large that they rule."""
    trainer = trainer_of(
        options=TrainingOptions(**options), moe_loss_weight=1e3, moe_zloss_weight=1e3, eps=10.0, max_grad_norm=1e9
    )
    report = train(trainer, phase_of(2))
    assert report.routed[0] > 0
    return {g.name: trainer.read(g) - BASE[g.start : g.stop] for g in LAYOUT.groups if g.expert in (None, 0, 3)}


def test_checkpointing_changes_no_update_and_keeps_the_auxiliary_losses_gradient() -> None:
    plain, checkpointed = router_updates(), router_updates(activation_checkpointing=True)
    assert np.abs(plain["router"]).max() > 1e-3
    for name, update in plain.items():
        np.testing.assert_allclose(checkpointed[name], update, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_peers_own_micro_batch_is_what_passes_through_the_model_and_gives_the_campaigns_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from spes_p2p.training import trainer as module

    sizes: list[int] = []

    def counted(model: Any, blocks: Any, ids: Tensor, *others: Any) -> Any:
        sizes.append(len(ids))
        return forward_losses(model, blocks, ids, *others)

    monkeypatch.setattr(module, "forward_losses", counted)
    updates = []
    for options in (TrainingOptions(), TrainingOptions(micro_batch_size=3)):
        trainer = trainer_of(options=options, **UNSCALED)
        train(trainer, phase_of(1))
        group = LAYOUT.group("shared")
        updates.append(trainer.read(group) - BASE[group.start : group.stop])
    np.testing.assert_allclose(updates[1], updates[0], atol=1e-3 * np.abs(updates[0]).max())
    assert sizes == [4, 3, 1]


def test_the_report_says_how_many_operations_the_steps_needed() -> None:
    report = train(trainer_of(), phase_of(2))
    expected = report.tokens * training_flops_per_token(MODEL, 16, (0, 3))
    assert report.flops_per_second * report.seconds == pytest.approx(expected)
    assert math.isnan(report.mfu)


def test_utilisation_is_told_on_a_device_whose_peak_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from spes_p2p.training import trainer as module

    monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA GeForce RTX 4090")
    with caplog.at_level("DEBUG", logger="spes_p2p"):
        report = train(trainer_of(), phase_of(2))
    assert report.mfu == pytest.approx(report.flops_per_second / 165e12)
    assert caplog.messages[-1].endswith(" % MFU")


@pytest.mark.parametrize("owned", [(), (0, 1, 2, 3)], ids=str)
def test_the_formula_of_operations_counts_what_torch_counts(owned: tuple[int, ...]) -> None:
    model = build_model(MODEL, BASE, owned, backend="eager")
    model.set_attn_implementation("eager")
    blocks = [module for module in model.modules() if isinstance(module, PartitionedExperts)]
    ids = torch.from_numpy(CountingText().read_spread(8))
    with FlopCounterMode(display=False) as counter:
        forward_losses(model, blocks, ids, tiny_training()).total.backward()
    # Without the causal mask's zeros left out, attention counts twice; the last position of a sample has no loss.
    attention, commit = 6 * 2 * 16 * 32, 6 * 64 * 32 / 16
    expected = training_flops_per_token(MODEL, 16, owned) + attention - commit
    assert counter.get_total_flops() / ids.numel() == pytest.approx(expected, rel=1e-3)


def test_options_that_this_machine_cannot_do_are_refused_before_anything_is_built() -> None:
    with pytest.raises(UserError, match=r"backend megablocks: needs .*; possible here: grouped_mm, eager"):
        check_options(MODEL, TrainingOptions(backend="megablocks"), "cpu")
    check_options(MODEL, TrainingOptions(), "cpu")


def test_repetitive_samples_are_left_out_of_the_step() -> None:
    quarter = CountingText(lambda position: position % 4 == 0, length=32)
    report = train(trainer_of(text=quarter, instance_filter=True), phase_of(3))
    assert report.tokens == 3 * 3 * 32
    assert report.untrained == ()
    none_left = train(trainer_of(text=CountingText(lambda position: True, length=32), instance_filter=True), phase_of(2))
    assert (none_left.steps, none_left.tokens, none_left.skipped_steps) == (2, 0, 0)


def test_local_steps_spread_over_the_phases_campaign_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from spes_p2p.training import trainer as module

    asked: list[float] = []

    def rate(step: float, config: object) -> float:
        asked.append(step)
        return 1e-3

    monkeypatch.setattr(module, "learning_rate", rate)
    train(trainer_of(), Phase(3, 30, 10, 4, (Interval(0, 0, 16),)))
    assert asked == [30, 32.5, 35, 37.5]


def test_fresh_moments_ramp_up_but_not_at_the_campaigns_start() -> None:
    group = LAYOUT.expert(3)
    moved = []
    for first_step in (0, 10):
        trainer = trainer_of(new_owner_ramp_steps=9, min_lr_ratio=1.0, weight_decay=0.0)
        train(trainer, phase_of(1, first_step))
        moved.append(np.abs(trainer.read(group) - BASE[group.start : group.stop]).mean())
    assert moved[1] == pytest.approx(0.1 * moved[0], rel=1e-3)


def array(source: Source) -> np.ndarray:
    return np.concatenate([np.zeros(0, source.dtype), *source.pieces()]).reshape(source.shape)


def test_a_restarted_trainer_continues_bit_for_bit() -> None:
    straight = trainer_of()
    train(straight, phase_of(3))
    resumed = trainer_of()
    for name in ("shared", "router", "expert.0", "expert.3"):
        group = LAYOUT.group(name)
        resumed.add(group, straight.read(group) - resumed.read(group))
        resumed.add(group, straight.read(group) - resumed.read(group))
        assert bits(resumed.read(group)) == bits(straight.read(group))
    resumed.load_optimizer_state({name: array(source) for name, source in straight.optimizer_state().items()})
    for trainer in (straight, resumed):
        train(trainer, phase_of(3, first_step=10, slices=(Interval(0, 12, 24),)))
    assert bits(resumed.read(LAYOUT.group("shared"))) == bits(straight.read(LAYOUT.group("shared")))


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_training_goes_on_through_changes_of_owners(stored: StoredFormat) -> None:
    trainer = trainer_of(options=TrainingOptions(stored=stored))
    for number, owned in enumerate([(0, 3), (1, 3), (), (0, 1, 2, 3), (2,)]):
        trainer.assign(owned, BASE)
        before = [trainer.read(LAYOUT.expert(e)) for e in owned]
        report = train(trainer, phase_of(2, first_step=10 * number))
        assert all(bits(trainer.read(LAYOUT.expert(e))) != bits(values) for e, values in zip(owned, before, strict=True))
        assert trainer.owned == owned
        assert math.isfinite(report.loss)
        assert {e for e, count in enumerate(report.routed) if count} <= set(owned)


def test_batches_are_read_in_another_thread_and_its_errors_surface() -> None:
    text = CountingText()
    train(trainer_of(text=text), phase_of(2))
    assert threading.get_ident() not in text.threads

    def fail(item: int) -> int:
        raise OSError("token file is gone")

    with pytest.raises(OSError, match="token file is gone"):
        list(ahead(fail, [1, 2, 3], 1, 2))
    assert list(ahead(lambda x: x * x, range(10), 1, 2)) == [x * x for x in range(10)]


def test_two_batches_are_read_ahead_while_one_is_trained_on() -> None:
    third_is_read = threading.Event()
    batches = ahead(lambda number: third_is_read.set() if number == 2 else None, range(5), 1, 2)
    next(batches)
    assert third_is_read.wait(10)  # nobody has asked for the second one yet
    batches.close()


def test_a_step_reads_one_number_a_layer_and_one_more_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading makes the host wait for the device."""
    read: list[str] = []

    def counted(name: str) -> None:
        outer = getattr(torch.Tensor, name)

        def reading(tensor: torch.Tensor) -> Any:
            caller = sys._getframe(1).f_code
            if "spes_p2p" in caller.co_filename:
                read.append(caller.co_name)
            return outer(tensor)

        monkeypatch.setattr(torch.Tensor, name, reading)

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        counted(name)
    trainer = trainer_of(options=TrainingOptions(micro_batch_size=2))
    read.clear()
    train(trainer, phase_of(3))
    steps, micro_batches, layers = 3, 2, MODEL.num_hidden_layers
    assert Counter(read) == {"_experts": steps * micro_batches * layers, "step": steps, "report": 2}


@needs_cuda
def test_on_cuda_the_host_waits_for_nothing_else(recwarn: pytest.WarningsRecorder) -> None:
    config = tiny_campaign(MODEL, tiny_training())
    trainer = TorchTrainer(config, BASE, (0, 3), CountingText(), None, "cuda")
    train(trainer, phase_of(2))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        recwarn.clear()
        train(trainer, phase_of(5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in recwarn if "synchroniz" in str(warning.message)]
    assert len(waits) <= 5 * (MODEL.num_hidden_layers + 1) + 4


def test_split_samples_keeps_order_and_loses_nothing() -> None:
    slices = (Interval(0, 5, 8), Interval(0, 8, 8), Interval(1, 0, 4))
    assert split_samples(slices, 0) == ((), (Interval(0, 5, 8), Interval(1, 0, 4)))
    assert split_samples(slices, 5) == ((Interval(0, 5, 8), Interval(1, 0, 2)), (Interval(1, 2, 4),))
    assert split_samples(slices, 99) == ((Interval(0, 5, 8), Interval(1, 0, 4)), ())
