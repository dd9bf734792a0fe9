"""Learning experiments: modes that must be equal are, runs resume where they stopped, the yardstick measures what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from spes_p2p.config.model import ModelConfig
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.tokenizers import END_OF_TEXT
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import initial_state, layout_of
from spes_p2p.observe.events import Drift, RoundMeasured
from spes_p2p.research import probe
from spes_p2p.research.command import results_of
from spes_p2p.research.plots import SERIES, draw_front, draw_series, front_of
from spes_p2p.research.queue import append_result, claim, losses_of, read_results, work
from spes_p2p.research.report import evaluation_table, outcomes, pictured, report, share_closed, shares
from spes_p2p.research.series import RoundSeries
from spes_p2p.research.spec import Experiment, Run, load_experiment, open_runs
from spes_p2p.research.swarm import readers_of, spread, train
from spes_p2p.research.text import TOKENIZER, Text, endpoint_of, keep_endpoint
from spes_p2p.research.upcycle import split_experts
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

ROOT = Path(__file__).parents[1]
CAMPAIGN = {
    "model": {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 16, "moe_num_experts": 4, "moe_top_k": 2,
    },
    "training": {"sequence_length": 16, "total_steps": 6, "warmup_steps": 1},
    "sync": {"codec": "none"},
}


def page_of(file: Path) -> Path:
    """The report of an experiment in the docs."""
    return ROOT / "docs/learning" / f"{file.stem}.md"


def experiment(*arms: dict[str, Any]) -> Experiment:
    return Experiment.model_validate({
        "name": "test", "text": ".", "campaign": CAMPAIGN, "arms": arms, "evaluations": 2, "samples": 2, "final_samples": 4,
        "measured_rounds": 2, "yardstick": {"alone": "alone", "centralised": "centralised"},
    })


def arm(name: str, mode: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "mode": mode, "batch": 2, "sync_steps": 3, "learning_rates": [1e-2], **settings}


def text() -> Text:
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return (np.cumsum(rng.integers(0, 3, count)) % 64).astype(np.uint16)

    return Text({"a": [tokens(4000)], "b": [tokens(3000)]}, {"a": [tokens(400)], "b": [tokens(400)]}, "digest")


def only_run(**settings: Any) -> Run:
    made = experiment(arm("arm", **settings))
    return Run(made, made.arms[0], 1e-2, 0)


@pytest.mark.long
def test_donors_of_the_aggregate_are_other_donors_and_without_a_merge_none() -> None:
    merging = {"merge": {"merge_interval": 3, "merge_alpha_start": 0.5, "merge_decay_steps": 100, "merge_top_k": 1}}
    found = [
        train(only_run(mode="spes", peers=2, donors=donors, campaign=campaign), text())["loss"]
        for donors in ("base", "aggregate") for campaign in (merging, {})
    ]
    assert found[0] != found[2]
    assert found[1] == found[3]


def test_a_centralised_run_is_the_trainer_alone_on_the_same_samples() -> None:
    run, the_text = only_run(mode="centralised", peers=3), text()
    config = run.config
    reader: SampleReader = the_text.reader(16, 0)
    trainer = TorchTrainer(config, initial_state(config.model), (0, 1, 2, 3), reader)
    trainer.train(Phase(1, 0, 6, 6, (Interval(0, 0, 36),)), lambda: False, lambda steps, speed: None)
    bare = [probe.loss_of(trainer.model, r.read_spread(4)) for r in the_text.held_out_readers(16).values()]
    found = train(run, the_text)
    assert found["tokens"] == 6 * 6 * 16
    assert found["loss"] == pytest.approx(float(np.mean(bare)), abs=1e-4)


def test_diloco_with_one_peer_and_a_round_every_step_is_centralised() -> None:
    diloco, centralised = (only_run(mode=mode, peers=1, sync_steps=1) for mode in ("diloco", "centralised"))
    assert diloco.key("") == centralised.key("")


def test_spes_with_as_many_owners_as_peers_is_diloco() -> None:
    assert only_run(mode="spes", owners=4).key("") == only_run(mode="diloco").key("")
    assert only_run(mode="spes", owners=2).key("") != only_run(mode="diloco").key("")


@pytest.mark.parametrize(
    ("mode", "owners", "experts"), [("spes", 1, 1), ("spes", 2, 2), ("diloco", 1, 4), ("centralised", 1, 4)]
)
def test_how_many_experts_a_peer_trains(mode: str, owners: int, experts: int) -> None:
    assert only_run(mode=mode, owners=owners).experts_per_peer == experts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["spes", "diloco"])
@pytest.mark.long
def test_a_run_gives_the_same_result_again(mode: str) -> None:
    run = only_run(mode=mode, peers=2)
    first, second = train(run, text()), train(run, text())
    for record in (first, second):
        del record["seconds"], record["cpu_seconds"]
    assert json.dumps(first) == json.dumps(second)
    assert first["failed_rounds"] == 0
    assert [point["step"] for point in first["curve"]] == [3, 6]
    assert first["sent_bytes"] > 0
    series = first["series"]
    assert series["round"] == [1, 2]
    assert series["trained share"] == ([1, 1] if mode == "diloco" else pytest.approx([0.5, 0.5], abs=0.1))
    assert all(0 < cosine <= 1 for cosine in series["cosine shared"])
    drifts = first["rounds"][-1]["drift"]
    assert ("expert" in drifts) == (mode == "diloco")
    assert -1 <= drifts["shared"]["cosine"] <= 1


@pytest.mark.long
def test_the_end_of_a_run_is_kept_as_a_checkpoint_that_has_its_loss(tmp_path: Path) -> None:
    run, the_text = only_run(mode="spes", peers=2), text()
    Tokenizer(models.WordLevel({END_OF_TEXT: 0})).save(str(tmp_path / TOKENIZER))
    for _ in range(2):
        found = train(run, the_text, lambda weights: keep_endpoint(tmp_path, "key", run.config.model, weights))
    model = AutoModelForCausalLM.from_pretrained(endpoint_of(tmp_path, "key"))
    losses = [probe.loss_of(model, r.read_spread(4)) for r in the_text.held_out_readers(16).values()]
    assert found["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-5)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_model_whose_experts_are_split_computes_what_it_did(rank: int) -> None:
    model = only_run(mode="spes").config.model
    assert isinstance(model, ModelConfig)
    large = model.model_copy(update={"num_hidden_layers": 5, "moe_low_rank": rank})
    small = large.model_copy(update={"moe_num_experts": 2, "moe_top_k": 1})
    assert (large.moe_num_experts, large.moe_top_k) == (4, 2)
    few, ids = initial_state(small), torch.arange(48).reshape(3, 16) % small.vocab_size
    for placed in layout_of(small).tensors:
        if placed.spec.is_low_rank:
            few[placed.start : placed.stop] = 0.02 * np.random.default_rng(0).standard_normal(placed.spec.size, np.float32)
    with torch.no_grad():
        before = plain_model(small, few)(ids).logits
        after = plain_model(large, split_experts(few, layout_of(small), layout_of(large), 0, noise=0.0))(ids).logits
        noisy = plain_model(large, split_experts(few, layout_of(small), layout_of(large), 0))(ids).logits
    torch.testing.assert_close(after, before)
    assert not torch.allclose(noisy, before, atol=1e-7)
    torch.testing.assert_close(noisy, before, atol=0.05, rtol=0)
    with pytest.raises(UserError, match="not a multiple"):
        split_experts(initial_state(large), layout_of(large), layout_of(small), 0)
    wider = large.model_copy(update={"hidden_size": 2 * large.hidden_size})
    with pytest.raises(UserError, match=r"embed_tokens.*has shape"):
        split_experts(few, layout_of(small), layout_of(wider), 0)


@pytest.mark.long
def test_an_arm_that_begins_with_fewer_experts_goes_on_where_they_ended() -> None:
    first = {"steps": 3, "model": {"moe_num_experts": 2, "moe_top_k": 1}}
    run, plain = only_run(mode="spes", peers=2, first=first), only_run(mode="spes", peers=2)
    few, rest = run.stages
    assert (few[0].config.model.moe_num_experts, few[0].config.training.total_steps, few[1]) == (2, 3, 0)
    assert (rest[0].config.model.moe_num_experts, rest[0].config.training.total_steps, rest[1]) == (4, 3, 3)
    assert plain.stages == ((plain, 0),)
    found = train(run, text())
    assert found["tokens"] == 6 * 2 * 2 * 16
    assert [point["step"] for point in found["curve"]] == sorted(point["step"] for point in found["curve"])
    assert found["curve"][-1]["step"] == 6
    assert len({record["key"] for record in (found, train(plain, text()))}) == 2
    early, late = (readers_of(run, text(), first)[0].read(Interval(0, 0, 4)) for first in (0, 12))
    assert not np.array_equal(early, late)
    assert np.array_equal(late, readers_of(run, text())[0].read(Interval(0, 12, 16)))


@pytest.mark.long
def test_all_modes_train_on_the_same_samples() -> None:
    tokens = {train(only_run(mode=mode, peers=2), text())["tokens"] for mode in ("centralised", "diloco", "spes")}
    assert tokens == {6 * 2 * 2 * 16}


def test_a_peer_with_a_domain_of_its_own_reads_nothing_else() -> None:
    the_text, several = text(), only_run(mode="spes", peers=3, domains="one a peer")
    domains = [np.concatenate([r.read(Interval(0, n, n + 1)) for n in range(r.num_samples)]) for r in (
        the_text.reader(16, 5, ["a"]), the_text.reader(16, 5, ["b"]))]
    for number, reader in enumerate(readers_of(several, the_text)):
        own = {sample.tobytes() for sample in domains[number % 2]}
        assert {reader.read(Interval(0, n, n + 1))[0].tobytes() for n in range(20)} <= own
    assert train(several, the_text)["tokens"] == 6 * 3 * 2 * 16
    assert several.key("") != only_run(mode="spes", peers=3).key("")


def test_the_measured_rounds_end_with_the_last() -> None:
    assert spread(12, 3) == {4, 8, 12}
    assert spread(2, 6) == {1, 2}
    assert spread(7, 0) == frozenset()


# The queue ---------------------------------------------------------------------------------------------------------------

TWO_ARMS = experiment(
    arm("alone", "centralised", peers=1, learning_rates=[1.0, 2.0], seeds=2), arm("centralised", "centralised", seeds=2)
)


class Trained:
    """Stands for training: the loss is the rate plus the seed; fails at a given run."""

    def __init__(self, fail_at: int = -1):
        self.runs: list[tuple[str, float, int]] = []
        self._fail_at = fail_at

    def __call__(self, run: Run) -> dict[str, Any]:
        if len(self.runs) == self._fail_at:
            raise KeyboardInterrupt
        self.runs.append((run.arm.name, run.rate, run.seed))
        return {"key": run.key(""), "loss": run.rate + run.seed, "seconds": 0.0, "cpu_seconds": 0.0}


def do(results: Path, trained: Trained) -> int:
    def find() -> Iterator[tuple[Run, str]]:
        return ((run, run.key("")) for run in open_runs(TWO_ARMS, losses_of(TWO_ARMS, read_results(results), "")))

    return work(find, results, results.parent / "claims", trained, float("inf"))


ALL_RUNS = [("alone", 1.0, 0), ("centralised", 0.01, 0), ("alone", 2.0, 0), ("alone", 1.0, 1), ("centralised", 0.01, 1)]


def test_first_all_rates_with_one_seed_then_the_best_rate_with_the_others(tmp_path: Path) -> None:
    trained = Trained()
    assert do(tmp_path / "results.jsonl", trained) == 5
    assert trained.runs == ALL_RUNS


@pytest.mark.parametrize("stopped_after", range(5))
def test_a_queue_that_was_stopped_goes_on_where_it_was(tmp_path: Path, stopped_after: int) -> None:
    first, second = Trained(fail_at=stopped_after), Trained()
    with pytest.raises(KeyboardInterrupt):
        do(tmp_path / "results.jsonl", first)
    do(tmp_path / "results.jsonl", second)
    assert first.runs + second.runs == ALL_RUNS
    assert do(tmp_path / "results.jsonl", Trained()) == 0


def test_a_run_that_another_process_does_is_left_to_it(tmp_path: Path) -> None:
    taken = Run(TWO_ARMS, TWO_ARMS.arms[0], 1.0, 0)
    trained = Trained()
    with claim(tmp_path / "claims" / taken.key("")) as mine:
        assert mine
        do(tmp_path / "results.jsonl", trained)
    assert ("alone", 1.0, 0) not in trained.runs
    assert ("centralised", 0.01, 1) in trained.runs


def test_a_result_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_result(results, {"key": "a"})
    with results.open("a") as file:
        file.write('{"key": "b", "lo')
    assert read_results(results) == [{"key": "a"}]
    append_result(results, {"key": "c"})
    assert read_results(results) == [{"key": "a"}, {"key": "c"}]


def test_a_damaged_result_is_named_by_its_line(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"key": "a"}\nnonsense\n{"key": "b"}\n')
    with pytest.raises(UserError, match="line 2: not JSON"):
        read_results(results)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("name: spes", "nam: spes", "line 5: unknown field 'arms.0.nam'"),
    ("text: t", "text: t\npictured: [spes, x]", "line 3: pictured = 'x': must be the name of an arm"),
    ("batch: 2", "batch: 0", "batch = 0: must be greater than 0"),
    ("batch: 2", "batch: 2, first: {steps: 2, model: {moe_num_experts: 2}}", "must be a multiple of sync_steps = 3"),
    ("sync_steps: 3", "sync_steps: 4", "arm spes: training.total_steps = 6: must be a multiple of sync_steps = 4"),
])
def test_a_mistake_in_an_experiment_file_costs_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "experiment.yaml"
    arms = "arms:\n- {name: spes, batch: 2, sync_steps: 3, learning_rates: [0.1]}"
    good = f"name: e\ntext: t\ncampaign: {json.dumps(CAMPAIGN)}\n{arms}\n"
    file.write_text(good)
    assert load_experiment(file).arms[0].name == "spes"
    file.write_text(good.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_experiment(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# The yardstick and the probes ---------------------------------------------------------------------------------------------


def test_the_share_of_the_gap() -> None:
    assert share_closed(5.0, 5.0, 4.0) == 0
    assert share_closed(5.0, 4.0, 4.0) == 1
    assert share_closed(5.0, 4.25, 4.0) == 0.75
    assert share_closed(5.0, 5.5, 4.0) == -0.5


def record(run: Run, loss: float) -> dict[str, Any]:
    return {"key": run.key(""), "arm": run.arm.name, "loss": loss, "tokens": 1000, "sent_bytes": 0, "peers": 1, "rounds": [],
            "memory_bytes": 10}


def test_the_report_compares_seed_by_seed_at_each_arms_best_rate() -> None:
    made = experiment(
        arm("alone", "centralised", peers=1, seeds=2), arm("centralised", "centralised", seeds=2),
        arm("spes", "spes", seeds=2, learning_rates=[1e-2, 1.0]),
    )
    losses = {("alone", 1e-2): (5.0, 6.0), ("centralised", 1e-2): (4.0, 4.5), ("spes", 1.0): (4.5, 4.8), ("spes", 1e-2): (4.9,)}
    records = [record(Run(made, a, rate, s), loss)
               for a in made.arms for rate in a.learning_rates for s, loss in enumerate(losses[a.name, rate])]
    found = {outcome.arm: outcome for outcome in outcomes(made, records, "")}
    assert made.yardstick is not None
    assert found["spes"].rate == 1.0
    assert shares(found["spes"], made.yardstick, found) == pytest.approx([0.5, 0.8])
    assert "| spes | 1 | 2 | 0.00 | 4.650 ± 0.212 | +9.4 % | 65 ± 21 % |" in report(made, list(found.values()))
    assert report(made.model_copy(update={"note": "Also tried."}), list(found.values())).endswith("|\n\nAlso tried.\n")
    first_seeds = outcomes(made, [made_of for made_of in records if made_of["loss"] != 4.8], "")
    assert "| spes | 1 | 1 | 0.00 | 4.500 | +12.5 % | 50 % |" in report(made, first_seeds)


RUN = [file for file in sorted((ROOT / "experiments").glob("*.yaml")) if "text_sha256" in file.read_text()]
REPORTED = [file for file in sorted((ROOT / "experiments").glob("*.yaml")) if page_of(file).exists()]


@pytest.mark.parametrize("file", REPORTED, ids=lambda file: file.stem)
def test_the_reports_in_the_docs_are_what_the_results_say(file: Path) -> None:
    made = load_experiment(file)
    assert made.text_sha256
    found = outcomes(made, read_results(results_of(file)), made.text_sha256)
    assert page_of(file).read_text() == report(made, found), f"run: tools/experiments report {file.relative_to(ROOT)}"


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_every_run_that_a_file_declares_has_a_result(file: Path) -> None:
    """A rate or a seed that was never run would read as if it had been compared."""
    made = load_experiment(file)
    losses = losses_of(made, read_results(results_of(file)), made.text_sha256 or "")
    still_open = [(run.arm.name, run.rate, run.seed) for run in open_runs(made, losses)]
    assert not still_open, f"run: tools/experiments run {file.relative_to(ROOT)}, or declare no more than was run"


def test_every_report_in_the_docs_has_its_experiment() -> None:
    assert {page_of(file) for file in REPORTED} == set((ROOT / "docs/learning").glob("*.md"))


def test_pictures_show_the_arms_that_the_file_names() -> None:
    made = experiment(arm("a", "spes"), arm("b", "spes", sync_steps=2), arm("c", "spes", sync_steps=1))
    found = outcomes(made, [record(Run(made, each, 1e-2, 0), 5.0) for each in made.arms], "")
    for named, shown in (((), "abc"), (("c", "a"), "ac")):
        chosen = made.model_copy(update={"pictured": named})
        assert [outcome.arm for outcome in pictured(chosen, found)] == list(shown)


def test_losses_by_domain_and_accuracies_are_tables() -> None:
    made = experiment(arm("alone", "centralised", peers=1, seeds=2))
    records = [{**record(Run(made, made.arms[0], 1e-2, seed), 5.0), "domains": {"a": 5.0 + seed, "b": 4.0}} for seed in (0, 1)]
    assert "| alone | 5.500 | 4.000 |" in report(made, outcomes(made, records, ""))
    accuracies: dict[str, dict[str, float | None]] = {"copa": {"acc": 0.5, "acc_stderr": 0.05}, "piqa": {"acc": None}}
    assert "| alone | 0.500 ± 0.050 |  |" in evaluation_table(["copa", "piqa"], {"alone": accuracies})


def test_a_run_on_another_device_is_another_run() -> None:
    made = experiment(arm("arm", "spes"))
    there = made.model_copy(update={"device": "cuda"})
    assert Run(made, made.arms[0], 1e-2, 0).key("") != Run(there, made.arms[0], 1e-2, 0).key("")


def test_an_arm_may_bring_its_own_yardstick() -> None:
    ends = {"yardstick": {"alone": "worse", "centralised": "better"}}
    made = experiment(
        arm("alone", "centralised", peers=1), arm("centralised", "centralised"), arm("spes", "spes", **ends),
        arm("worse", "centralised", peers=2), arm("better", "centralised", peers=3),
    )
    losses = (6.0, 4.0, 4.0, 5.0, 3.0)
    records = [record(Run(made, a, 1e-2, 0), loss) for a, loss in zip(made.arms, losses, strict=True)]
    assert "| spes | 0.01 | 1 | 0.00 | 4.000 | +33.3 % | 50 % |" in report(made, outcomes(made, records, ""))


def test_drift_of_equal_opposite_and_orthogonal_updates() -> None:
    a, b = np.array([3.0, 0.0], np.float32), np.array([0.0, 3.0], np.float32)
    assert probe.drift([a]) is None
    assert probe.drift([a, a]) == pytest.approx({"cosine": 1.0, "shrink": 1.0})
    assert probe.drift([a, -a]) == pytest.approx({"cosine": -1.0, "shrink": 0.0})
    assert probe.drift([a, b]) == pytest.approx({"cosine": 0.0, "shrink": 0.5**0.5})


def test_agreement_and_balance_of_routing() -> None:
    routing = np.array([[[0, 1], [2, 3]], [[0, 1], [0, 1]]])
    assert probe.agreement(routing, routing[..., ::-1]) == 1.0
    assert probe.agreement(routing, np.array([[[0, 2], [2, 3]], [[2, 3], [2, 3]]])) == 3 / 8
    assert probe.load_violation(routing, 4) == [0.0, 1.0]
    assert probe.share_of(routing, (0, 2)) == 0.5


def test_a_series_averages_peers_and_stretches_of_rounds() -> None:
    series = RoundSeries()
    for number in range(1, 81):
        for assignments, owned in (((6, 2), (0,)), ((2, 6), (1,))):
            report = PhaseReport(1, 4, (0, 0), 0.0, 0.0, 1.0, (), 0, assignments=(assignments,))
            series.trained(number, report, owned)
        for sent in (1.0, 3.0):
            series.measured(RoundMeasured(number, {"shared": Drift(sent, 2.0, number / 100)}, (6, 6)))
    columns = series.columns()
    assert columns["round"] == list(range(2, 81, 2))
    assert columns["update shared"] == [2.0] * 40
    assert columns["cosine shared"][0] == 0.015
    assert columns["load violation"] == [0.0] * 40
    assert (columns["owned share"][0], columns["owned share global"][0]) == (0.75, 0.5)
    assert (columns["expert tokens"][0], columns["trained share"][0]) == (6, 0.75)


def test_the_rounds_of_arms_with_several_peers_are_drawn(tmp_path: Path) -> None:
    made = experiment(arm("alone", "centralised", peers=1), arm("spes", "spes", peers=2))
    numbers = {name: [0.5, 0.25] for name, _ in SERIES}
    alone, spes = (record(Run(made, each, 1e-2, 0), 5.0) for each in made.arms)
    draw_series("test", outcomes(made, [alone], ""), tmp_path / "alone.png")
    assert not (tmp_path / "alone.png").exists()
    spes |= {"peers": 2, "sync_steps": 3, "series": {"round": [1, 2], **numbers}}
    draw_series("test", outcomes(made, [alone, spes], ""), tmp_path / "spes.png")
    assert (tmp_path / "spes.png").read_bytes().startswith(b"\x89PNG")


def test_the_front_is_what_gains_over_all_with_fewer_bytes() -> None:
    points = [(1.0, 6.0, "worse than alone"), (2.0, 4.8, "a"), (3.0, 4.9, "worse"), (4.0, 4.795, "no gain"), (5.0, 4.0, "b")]
    assert front_of(points, 5.0) == [(2.0, 4.8, "a"), (5.0, 4.0, "b")]


def test_losses_against_bytes_are_drawn_where_there_are_ends(tmp_path: Path) -> None:
    made = experiment(
        arm("alone", "centralised", peers=1), arm("spes", "spes", peers=2), arm("centralised", "centralised", peers=2),
    )
    alone, spes, centralised = (record(Run(made, each, 1e-2, 0), loss) for each, loss in zip(made.arms, (5, 4, 3), strict=True))
    draw_front(made, outcomes(made, [alone, spes], ""), tmp_path / "no_ends.png")
    assert not (tmp_path / "no_ends.png").exists()
    spes |= {"peers": 2, "sent_bytes": 100}
    draw_front(made, outcomes(made, [alone, spes, centralised], ""), tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_experts_that_are_the_same_have_similarity_one() -> None:
    layout = layout_of(only_run(mode="spes").config.model)
    state = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
    assert abs(probe.similarity(state, layout)) < 0.1
    for expert in range(layout.num_experts):
        group, first = layout.expert(expert), layout.expert(0)
        state[group.start : group.stop] = state[first.start : first.stop]
    assert probe.similarity(state, layout) == pytest.approx(1.0)
