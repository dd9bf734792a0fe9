"""The benchmark compares equals: the same work, counted in the same way."""

import argparse
import cProfile
import importlib.util
import json
import pstats
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest
import torch
from devices import needs_cuda
from model_shapes import tiny_campaign
from network_swarm import CHILDREN_END_WITHIN_S, COMMAND_TIMEOUT_S, START_TIMEOUT_S, wait_until

from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.errors import UserError
from spes_p2p.model.build import initial_state
from spes_p2p.model.memory import Setup
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.testing.plain_model import plain_model
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.virtual import run_seed

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CHECKS = ("test-4GiB", "tests", "parity")


def tool(name: str) -> ModuleType:
    """Import a module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    # Known by name, because its dataclasses ask for their module.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "tools")  # they import each other
        spec.loader.exec_module(module)
    return module


def test_where_one_process_of_a_benchmark_fails_it_does_not_wait_for_the_others(tmp_path: Path) -> None:
    program = tmp_path / "member.py"
    program.write_text("import sys, time\nif '\"member\": 1' in sys.stdin.readline(): sys.exit(3)\ntime.sleep(60)\n")
    began = time.monotonic()
    with tool("round_benchmark").started(program, tmp_path) as start:
        waits, _ = start("waits", 0), start("fails", 1)
        with pytest.raises(RuntimeError, match="waits ended early"):
            waits.next_report()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("peers", "reducers"), [(16, "by line"), (64, "in cells")])
@pytest.mark.long
def test_no_peer_of_an_exchange_sends_or_receives_over_a_twentieth_more_than_it_must(
    peers: int, reducers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fanout = tool("fanout_benchmark")
    monkeypatch.setattr(fanout.cells, "FLAT_MEMBERS", fanout.EITHER[reducers])
    fanout.table_of.cache_clear()
    measured = fanout.measure("equal lines and experts", peers, reducers, megabytes=2)
    assert 1.0 < measured.sent_over < 1.05
    assert 1.0 < measured.received_over < 1.05


@pytest.mark.long
def test_the_records_of_a_round_of_64_take_little_of_the_coordinators_memory() -> None:
    megabytes_of_round = tool("coordinator_benchmark").megabytes_of_round
    megabytes_of_round(4)  # fills caches that live as long as the process
    found = megabytes_of_round(64)
    assert 0.1 < found["held"] < 1.2
    assert found["peak"] < 1.8


@pytest.mark.long
def test_a_fifth_at_most_of_what_is_hashed_and_signed_of_a_member_travels() -> None:
    for whole, sent in tool("coordinator_benchmark").bytes_per_member(64).values():
        assert 64 < sent < whole / 5, "64 bytes of each signature are new"


@pytest.mark.long
def test_the_cpu_time_of_a_simulation_is_divided_among_the_areas_of_the_code() -> None:
    bench, profile = tool("simulator_benchmark"), cProfile.Profile()
    profile.runcall(run_seed, Scenario(peer_names(4), 1), 0)
    stats = pstats.Stats(profile)
    seconds = bench.seconds_by_area(stats)
    assert {"asyncio", "net/", "messages/", "peer/", "testing/"} < seconds.keys()
    assert sum(seconds.values()) == pytest.approx(vars(stats)["total_tt"], rel=0.01)


@pytest.mark.long
def test_the_gate_takes_a_share_of_a_phase_and_an_audited_peer_keeps_its_moments() -> None:
    bench = tool("open_benchmark")
    few, many = (bench.costs(bench.campaign(1), phase, 1) for phase in (20, 100))
    assert 0.1 < few["gate_share"] < 1
    assert many["gate_share"] < few["gate_share"] / 2
    assert 4 * few["trained"] < few["kept_bytes"] < 4.1 * few["trained"], "two moments in bfloat16"


@pytest.mark.slow
def test_a_peer_writes_about_what_a_round_changed_and_restarts_with_the_same_base(tmp_path: Path) -> None:
    command = [str(ROOT / "tools/bench"), "state", "--billions", "0.02", "--rounds", "2", "--json", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["digest"] == report["digest_after_restart"]
    assert report["parameters"] == pytest.approx(0.02e9, rel=0.2)
    assert report["state_bytes"] >= 4 * report["parameters"]
    assert report["changed_bytes"] > 2 * report["state_bytes"], "base, moments and pending work in each of two rounds"
    if report["written_bytes"]:  # none in a folder in memory
        assert report["written_over_changed"] == pytest.approx(report["written_bytes"] / report["changed_bytes"], abs=1e-3)
        assert 0.5 < report["written_over_changed"] < 2
    operations = report["operations"]
    assert set(operations) == {
        "announce", "receive", "stage", "apply", "merge", "save", "restart", "reduce 4", "reduce 16", "reduce 64",
    }
    assert all(each["seconds"] and min(each["seconds"]) > 0 for each in operations.values())
    assert report["longest_stall_s"] == max(each["longest_stall_s"] for each in operations.values()) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return tool("benchmarks")


def test_all_ways_to_compute_the_experts_give_the_same_gradient_of_their_input(bench: ModuleType) -> None:
    config = bench.campaign(hidden_size=32, intermediate_size=48, moe_num_experts=4).model
    base = initial_state(config)
    block = plain_model(config, base).model.layers[0].mlp.experts
    inputs = bench.routed_tokens(64, 32, 4, 2, CPU)
    works = [
        bench.transformers_block(block, "grouped_mm", inputs),
        bench.transformers_block(block, "eager", inputs),
        bench.concatenated_block(block, range(1), inputs),
        bench.partitioned_block(config, base, range(1), "fp32", inputs, CPU),
    ]
    gradients = []
    for work in works:
        work()
        gradients.append((inputs[0].grad, inputs[2].grad))
    for hidden, weights in gradients[1:]:
        torch.testing.assert_close(hidden, gradients[0][0])
        torch.testing.assert_close(weights, gradients[0][1])


def test_on_cuda_transformers_experts_are_given_bf16_copies_and_train_float32_weights(bench: ModuleType) -> None:
    config = bench.campaign(hidden_size=32, intermediate_size=48, moe_num_experts=4).model
    inputs = bench.routed_tokens(64, 32, 4, 2, CPU)
    gradients = []
    for device in ("cpu", "cuda"):
        block = plain_model(config, initial_state(config)).model.layers[0].mlp.experts
        bench.in_computed_width(block, torch.device(device))
        for work in (bench.transformers_block(block, "grouped_mm", inputs), bench.concatenated_block(block, range(1), inputs)):
            work()
            gradients.append(inputs[0].grad)
    assert {p.dtype for p in block.parameters()} == {torch.float32}
    assert all(p.grad is not None for p in block.parameters())
    in_float32, _, in_bf16, concatenated = gradients
    assert (in_bf16 - in_float32).norm() < 1e-2 * in_float32.norm()
    assert not torch.equal(in_bf16, in_float32)
    torch.testing.assert_close(in_bf16, concatenated)


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_counted_bytes_are_the_formulas(bench: ModuleType, stored: str) -> None:
    config = bench.campaign(hidden_size=64, intermediate_size=128, moe_num_experts=8, vocab_size=512)
    setup = Setup(2, stored, "adamw", 1, "cpu", False)  # type: ignore[arg-type]
    found = bench.counted_and_formula(config, initial_state(config.model), setup, CPU)
    assert found["counted"] == pytest.approx(found["formula"], rel=0.01)


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(bench: ModuleType) -> None:
    order: list[str] = []
    works = {name: lambda n=name: order.append(n) for name in "abc"}
    seconds = bench.interleaved(works, 5, CPU)
    assert [sorted(order[i : i + 3]) for i in range(0, 18, 3)] == [["a", "b", "c"]] * 6
    assert {name: len(found) for name, found in seconds.items()} == {"a": 5, "b": 5, "c": 5}
    assert bench.ratio({"a": [1, 2, 30], "b": [2, 4, 10]}, "a", "b") == 0.5


def test_too_few_rounds_are_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "experts", "--rounds", "3"])
    with pytest.raises(SystemExit) as refused:
        bench.main()
    assert refused.value.code == 2
    assert "--rounds 3: a median of fewer than 5 says little" in capsys.readouterr().err


def test_a_campaigns_step_runs_under_a_cap_in_the_planned_setup(bench: ModuleType) -> None:
    config = tiny_campaign()
    report = bench.bench_capped_step(config, 100 * 10**6, 5, CPU)
    assert report["setup"]["owned"] == config.model.moe_num_experts
    assert report["tokens_per_second"] > 0
    assert report["peer_vs_transformers_whole"] > 0
    assert report["peak_allocated_bytes"] is None
    with pytest.raises(UserError, match=r"^--cap = 100 kB: too small"):
        bench.bench_capped_step(config, 100_000, 5, CPU)


@pytest.mark.long
def test_forms_of_a_step_are_compared_on_a_cpu(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "forms.json"
    forms = ("plain", "masked", "masked_flex", "eager_attention")
    monkeypatch.setattr(sys, "argv", ["forms", "--json", str(file), "--cap", "64MiB", "--only", *forms])
    assert tool("forms_benchmark").main() == 0
    found = json.loads(file.read_text())
    assert found["empty_group_gradient_torch"] == found["empty_group_gradient_ours"] == 0
    assert found["documents_masked_leak"] < 1e-5 < 0.1 < found["documents_unmasked_leak"]
    assert min(found[form]["tokens_per_second"] for form in ("plain", "masked", "eager_attention")) > 0
    assert 0 < found["worst_difference"] < 1e-5
    assert found["forms_failed"] == 1
    assert found["masked_flex"]["failed"].startswith("OlmoeForCausalLM does not support")


@pytest.mark.long
def test_joiners_that_come_at_once_are_timed_beside_the_rounds_that_go_on(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/bench"), "storm", "--json", str(tmp_path / "storm.json"), "--trainers", "3"]
    small = ("--joiners", "4", "--megabytes", "0.4", "--phase", "5")
    subprocess.run([*command, *small], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((tmp_path / "storm.json").read_text())
    assert 0 < found["base_s_median"] <= found["base_s_last"] < 20
    assert len(found["round_s_meanwhile"]) >= 2
    assert 5 < found["round_s_before"] <= max(found["round_s_meanwhile"]) < 1.2 * found["round_s_before"]
    assert found["attempts_lost_by_members"] == 0


@pytest.mark.slow
def test_all_that_cuda_is_asked_runs_without_it_on_small_models(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench"), "cuda", "--device", "cpu", "--small", "--rounds", "5",
               "--out", str(tmp_path)]
    for check in CHECKS:
        run = subprocess.run([*command, "--only", check], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "cuda.json").read_text())
    assert {name: check["outcome"] for name, check in found["checks"].items()} == dict.fromkeys(CHECKS, "ok")
    assert found["checks"]["parity"]["report"]["compiled"]["difference"] < 1e-3
    assert found["checks"]["test-4GiB"]["report"]["tokens_per_second"] > 0
    assert found["environment"]["torch"] == version("torch")
    assert "## test-4GiB" in (tmp_path / "cuda.md").read_text()


@pytest.mark.parametrize(("name", "why"), [("", "is a folder"), ("file/report.json", "file: is a file; choose another folder")])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        tool("bench_json").report_file(str(tmp_path / name))
    assert tool("bench_json").report_file(str(tmp_path / "new" / "report.json")) == tmp_path / "new" / "report.json"


@pytest.mark.network
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_process_and_no_folder_behind(how: signal.Signals, tmp_path: Path) -> None:
    if signal.getsignal(how) is signal.SIG_IGN:
        pytest.skip("these tests were told to ignore that signal (nohup)")
    command = [sys.executable, str(ROOT / "tools/bench"), "round", "--megabytes", "5", "--rounds", "1", "--only", "int4"]
    command += ["--folder", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def children() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    wait_until(lambda: sum(child.name() == "p2pd" for child in children()) > 1, START_TIMEOUT_S, "members start")
    started = children()
    process.send_signal(how)
    _, told = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in told
    assert not psutil.wait_procs(started, timeout=CHILDREN_END_WITHIN_S)[1]
    assert how == signal.SIGKILL or not list(tmp_path.iterdir())


def test_codecs_of_few_bytes_encode_a_part_in_no_more_memory_than_int4() -> None:
    """To decode one, `ternary` and `sparse16` take more, if less than twice as much."""
    codecs = tool("codecs_benchmark")
    values = np.random.default_rng(0).standard_normal(2**20, np.float32)
    of = {name: codecs.part_costs(CODECS[name], values) for name in ("int4", "ternary", "sparse16", "sparse", "sparse64")}
    for name, found in of.items():
        assert found["encode_bytes"] <= of["int4"]["encode_bytes"], name
        assert found["decode_bytes"] < 1.5 * of["int4"]["decode_bytes"], name
        assert 0.8 < found["huffman"] < 1, name


@pytest.mark.parametrize("megabytes", [4, 400])
def test_a_round_in_ternary_and_sparse64_is_planned_at_what_its_codecs_take_of_the_floor(
    megabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    bench = tool("round_benchmark")
    elements = megabytes * 250_000
    planned, checks = bench.planned_bytes(bench.MIXED, elements)
    ternary, sparse = (CODECS[name].encoded_bytes(elements) / (4 * elements) for name in ("ternary", "sparse64"))
    assert 0.99 < planned / (bench.floor_bytes(elements) * (ternary + 2 * sparse) / 3) < 1.2  # a third is of shared weights
    assert 0 < checks < planned


@pytest.mark.network
def test_a_small_round_sends_what_is_planned_and_the_checks_of_reducers(tmp_path: Path) -> None:
    file, command = tmp_path / "round.json", [sys.executable, str(ROOT / "tools/bench"), "round", "--rounds", "1"]
    small = ("--megabytes", "64", "--only", "ternary+sparse64", "--folder", str(tmp_path), "--json", str(file))
    subprocess.run([*command, *small], check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S)
    found = json.loads(file.read_text())
    assert found["replicas_identical"]
    assert 0.02 < found["bytes_vs_floor_ternary+sparse64"] < 0.03
    assert 1 < found["bytes_vs_plan_ternary+sparse64"] < 1.2
    assert 0.9 < found["bytes_vs_plan_and_checks_ternary+sparse64"] < 1.1


@pytest.mark.network
def test_a_round_without_defences_is_measured_beside_one_with_them(tmp_path: Path) -> None:
    file, command = tmp_path / "round.json", [sys.executable, str(ROOT / "tools/bench"), "round", "--rounds", "1"]
    small = ("--megabytes", "64", "--only", "int4", "undefended", "--folder", str(tmp_path), "--json", str(file))
    subprocess.run([*command, *small], check=True, stdout=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S)
    found = json.loads(file.read_text())
    assert found["replicas_identical"]
    assert 1 < found["defended_vs_undefended_sent_bytes"] < 1.2, "checks of reducers"


def test_cuda_is_asked_first_for_what_matters_most() -> None:
    names = [*tool("cuda_benchmark").checks_for("cuda", small=False, rounds=9)]
    assert names[:6] == ["tests", "parity", "1b-24GiB", "7b-48GiB", "1b-8GiB", "7b-24GiB"]
    assert set(names[6:]) == {"memory", "experts", "step", "experts-7b-layer", "forms-1b", "forms-7b"}


@pytest.mark.long
def test_cuda_runs_tests_of_each_file_whose_code_runs_there() -> None:
    asked = tool("cuda_benchmark")
    collect = [sys.executable, *asked.checks_for("cuda", small=False, rounds=9)["tests"].command, "--collect-only"]
    listed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.partition("::")[0] for line in listed.splitlines() if "::" in line} == {
        f"tests/test_{name}.py" for name in asked.TESTED
    }
    assert "test_8bit_state_round_trip_continues_bit_for_bit[cuda]" in listed


def test_a_number_that_is_out_of_bounds_or_missing_is_named() -> None:
    report = {"peak_vs_predicted": 1.2, "setup": {"owned": 3}}
    bounds = {"peak_vs_predicted": (0.9, 1.1), "owned": (2, 32), "mfu": (0.1, 1)}
    assert tool("cuda_benchmark").missed(report, bounds) == [
        "peak_vs_predicted = 1.2, not within 0.9 to 1.1", "mfu = None, not within 0.1 to 1",
    ]


@needs_cuda
def test_on_cuda_the_planned_setup_stays_under_the_cap_and_near_the_prediction(bench: ModuleType) -> None:
    config = load_campaign_config(ROOT / "configs" / "1b.yaml")
    report = bench.bench_capped_step(config, 12 * 2**30, 5, torch.device("cuda"))
    assert report["peak_allocated_bytes"] <= 12 * 2**30
    assert report["peak_vs_predicted"] == pytest.approx(1, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attacks", "corpus", "pictures", "reliability"])
def test_tools_go_on_in_the_environment_when_the_systems_python_runs_them(name: str) -> None:
    python = Path(sys.base_prefix) / "bin" / "python3"
    command = [str(python), str(ROOT / "tools" / name), "--help"]
    told = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert told.stdout or told.stderr.startswith("error: ")
    assert "ModuleNotFoundError" not in told.stderr
