"""lm-eval tasks during a campaign: when they run, what is told of them, and a real swarm in which a trainer offers them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
from network_swarm import LocalPeers, call, write_variant
from observed_events import ROUNDS, assembly, commit, shown, status_after

from spes_p2p.campaign.room import Device
from spes_p2p.client.doctor import tasks_check
from spes_p2p.config.campaign import CampaignConfig, EvaluationConfig, PeerConfig, load_campaign_config, make_peer_config
from spes_p2p.errors import UserError
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.presence import PeerStatus, RoundRecord
from spes_p2p.net.tasks import beside
from spes_p2p.observe.events import Event, PromptsContinued, RoundCommitted, TasksEvaluated
from spes_p2p.observe.history import History, read_rounds
from spes_p2p.observe.rounds import Rounds
from spes_p2p.observe.swarm_status import swarm_status
from spes_p2p.session.downstream import Evaluations, evaluate_tasks, evaluations_of, read_continuations, read_results
from spes_p2p.session.evaluation_room import EvaluationRoom, evaluation_room
from spes_p2p.session.resources import resources_on

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = PromptsContinued(4, (" was old.", " and then"))
ROOM = EvaluationRoom("bf16", 1, 2 * 10**9, 10**9)
GB = 10**9
FOUND = TasksEvaluated(4, (("piqa", "acc", 0.5, 0.025), ("piqa", "acc_norm", 0.25, math.nan)))


@asynccontextmanager
async def evaluating(every_rounds: int, fails: str = "") -> AsyncIterator[tuple[Evaluations, asyncio.Event, list[Event]]]:
    """A peer's evaluations, which end when the test says so, and what they told."""
    events: list[Event] = []
    may_end = asyncio.Event()

    async def evaluate() -> TasksEvaluated:
        await may_end.wait()
        if fails:
            raise UserError(fails)
        return FOUND

    evaluations = Evaluations(every_rounds, {"evaluating tasks": evaluate})
    async with beside(evaluations.run(events.append)):
        yield evaluations, may_end, events


async def until_idle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("every_rounds", "evaluations"), [(0, 0), (1, ROUNDS), (3, ROUNDS // 3)])
async def test_tasks_run_every_so_many_rounds(every_rounds: int, evaluations: int) -> None:
    async with evaluating(every_rounds) as (tasks, may_end, events):
        may_end.set()
        for event in (assembly(), *(commit(number) for number in range(1, ROUNDS + 1))):
            tasks.observe(event)
            await until_idle()
    assert events == [FOUND] * evaluations


async def test_a_round_is_skipped_while_the_last_evaluation_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spes_p2p")
    async with evaluating(1) as (tasks, may_end, events):
        for number in (2, 3, 4, 5):
            tasks.observe(commit(number))
            await until_idle()
        may_end.set()
        await until_idle()
        tasks.observe(commit(6))
        await until_idle()
    assert events == [FOUND] * 2
    assert caplog.messages == ["evaluating tasks: not after round 3, since that of an earlier round still goes on, with "
                               "CPU time that nothing else on this machine wants"]


async def test_a_failure_is_one_line_however_often_it_recurs(caplog: pytest.LogCaptureFixture) -> None:
    async with evaluating(1, fails="no such data") as (tasks, may_end, events):
        may_end.set()
        for number in (1, 2, 3):
            tasks.observe(commit(number))
            await until_idle()
    assert events == []
    assert caplog.messages == ["evaluating tasks failed: no such data"]


async def test_prompts_are_continued_where_tasks_fail(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []

    async def fail() -> Event:
        raise UserError("no such data")

    async def write() -> Event:
        return WRITTEN

    evaluations = Evaluations(1, {"evaluating tasks": fail, "continuing prompts": write})
    async with beside(evaluations.run(events.append)):
        evaluations.observe(commit(4))
        await until_idle()
    assert (events, caplog.messages) == ([WRITTEN], ["evaluating tasks failed: no such data"])


def recipe(**evaluation: Any) -> CampaignConfig:
    config = load_campaign_config(ROOT / "configs" / "9b.yaml")
    return config.model_copy(update={"evaluation": EvaluationConfig(**evaluation)})


@pytest.mark.parametrize(("memory_gb", "disk_gb", "dtype"), [(200, 200, "fp32"), (200, 40, "bf16"), (64, 200, "bf16")])
def test_a_large_model_is_evaluated_in_bf16_where_float32_would_take_over_half_of_what_is_free(
    memory_gb: int, disk_gb: int, dtype: str
) -> None:
    config, parameters = recipe(tasks=("piqa",)), 9 * GB
    room = evaluation_room(config, parameters, memory_gb * GB, disk_gb * GB)
    assert (room.dtype, room.disk) == (dtype, parameters * (4 if dtype == "fp32" else 2))
    assert room.disk < room.memory <= memory_gb * GB
    assert room.batch_size == 1, "the logits of 4096 tokens take gigabytes"
    (check,) = tasks_check(config, memory_gb * GB, disk_gb * GB)
    assert (check.result, check.values["dtype"]) == ("pass", dtype)


@pytest.mark.parametrize(("memory_gb", "disk_gb"), [(20, 200), (200, 17), (-5, -5)])
def test_tasks_are_not_offered_in_one_line_where_memory_or_disk_lack(
    memory_gb: int, disk_gb: int, caplog: pytest.LogCaptureFixture
) -> None:
    config, settings = recipe(tasks=("piqa",)), PeerConfig(run_dir=ROOT, evaluate_tasks=True)
    evaluations = evaluations_of(config, settings, 9 * GB, memory_gb * GB, disk_gb * GB)
    evaluations.observe(commit(config.evaluation.every_rounds))
    assert not evaluations._due.is_set()
    (message,) = caplog.messages
    assert message.startswith("--evaluate-tasks: not offered, since evaluating tasks and prompts takes ")
    assert "18.0 GB of disk, in bf16, and this peer leaves " in message
    (check,) = tasks_check(config, memory_gb * GB, disk_gb * GB)
    assert (check.result, check.found.startswith("--evaluate-tasks is not for this machine: ")) == ("pass", True)


def test_what_an_evaluation_takes_is_said_before_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spes_p2p")
    config, settings = recipe(prompts=("The",)), PeerConfig(run_dir=ROOT, evaluate_tasks=True)
    evaluations = evaluations_of(config, settings, 9 * GB, 64 * GB, 64 * GB)
    evaluations.observe(commit(config.evaluation.every_rounds))
    assert evaluations._due.is_set()
    assert caplog.messages == [f"evaluating tasks and prompts takes up to {evaluation_room(config, 9 * GB, 64 * GB, 64 * GB)}"]
    assert tasks_check(recipe(), 64 * GB, 64 * GB) == []


def test_training_itself_comes_before_evaluations() -> None:
    config = load_campaign_config(ROOT / "configs" / "1b.yaml")
    on_gpu = resources_on(Device("cuda", 24 * GB, host_memory=64 * GB), make_peer_config(run_dir=ROOT, base="disk"), config)
    on_cpu = resources_on(Device("cpu", 64 * GB), make_peer_config(run_dir=ROOT, base="disk", experts=1), config)
    assert 0 < 64 * GB - on_gpu.left_memory(config) < GB
    assert 64 * GB - on_cpu.left_memory(config) > on_cpu.choice.device.total
    with_bases = resources_on(Device("cuda", 24 * GB, host_memory=64 * GB), make_peer_config(run_dir=ROOT, base="ram"), config)
    assert on_gpu.left_memory(config) - with_bases.left_memory(config) > 10 * GB


@pytest.mark.long
@pytest.mark.real_time
async def test_the_process_that_fails_gives_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    config = EvaluationConfig(tasks=("arc_easyy",))
    with pytest.raises(UserError, match=r"^unknown task 'arc_easyy'; did you mean"):
        await evaluate_tasks(config, PeerConfig(run_dir=tmp_path), ROOM)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real_time
async def test_an_evaluation_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    config, settings = EvaluationConfig(tasks=("piqa",)), PeerConfig(run_dir=tmp_path)
    evaluation = asyncio.ensure_future(evaluate_tasks(config, settings, ROOM))
    while not evaluators(psutil.Process().children()):
        assert not evaluation.done()
        await asyncio.sleep(0.01)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    assert list(tmp_path.iterdir()) == []
    assert evaluators(psutil.Process().children()) == []


def test_results_are_the_groups_metrics_and_bounded() -> None:
    row = {"acc": 0.5, "acc_stderr": 0.1, "exact_match,strict": 0.0, "exact_match_stderr,strict": None,
           "perplexity": 1e20, "sample_len": 3}
    results = {"round": 7, "tasks": {"group": row, "leaf": row}, "groups": {"group": ["leaf"]}}
    found = read_results(results)
    assert found.round == 7
    assert found.scores[0] == ("group", "acc", 0.5, 0.1)
    assert (found.scores[1][:3], math.isnan(found.scores[1][3]), len(found.scores)) == (
        ("group", "exact_match,strict", 0.0), True, 2,
    )
    many = {**results, "tasks": {f"task{i}": row for i in range(100)}, "groups": {}}
    status = status_after(read_results(many))
    assert PeerStatus.from_bytes(status.to_bytes()).task_scores[0] == ("task0", "acc", 0.5, 0.1)


@pytest.mark.parametrize("claim", [
    [["piqa", "acc", 0.5, 0.1]] * 65, [["\x1b[2J", "acc", 0.5, 0.1]], [["piqa", "acc", 1e300, 0.1]], [["piqa", "acc", 0.5]], 3,
])
def test_a_peers_claim_is_bounded(claim: object) -> None:
    valid = {"peer_id": "p", "role": "trainer", "campaign": "c", "campaign_hash": "h", "total_rounds": 1}
    with pytest.raises(ValueError, match=r"^not a peer's status: task_scores"):
        PeerStatus.from_bytes(msgpack.packb({**valid, "task_scores": claim}))


def test_status_shows_who_measured_what() -> None:
    status = status_after(commit(5), FOUND)
    assert "aaaaaa measured on base 4: piqa acc 0.500 ± 0.025, piqa acc_norm 0.250" in shown([status])
    assert swarm_status([status])["peers"][0]["task_scores"] == [["piqa", "acc", 0.5, 0.025], ["piqa", "acc_norm", 0.25, None]]


def test_continuations_are_bounded_lines_without_control_characters() -> None:
    texts = [{"text": " a\n\x1b[2Jb\u202ec"}, {"text": 500 * "x"}]
    assert read_continuations({"round": 4, "continuations": texts}) == PromptsContinued(4, (" a  [2Jb c", 400 * "x"))


@pytest.mark.parametrize("claim", [5 * ["x"], ["a\nb"], [401 * "x"], [3]])
def test_a_peers_continuations_are_bounded(claim: Any) -> None:
    valid = {"peer_id": "p", "role": "trainer", "campaign": "c", "campaign_hash": "h", "total_rounds": 1}
    with pytest.raises(ValueError, match=r"^not a peer's status: continuations"):
        PeerStatus.from_bytes(msgpack.packb({**valid, "continuations": claim}))
    record = Rounds("p")
    record.record(commit(4), 0.0)
    with pytest.raises(WireError):
        unpack(RoundRecord, pack(replace(record.records[0], continuations=claim)))


def test_continuations_are_in_the_journal_the_status_and_the_record_of_their_round(tmp_path: Path) -> None:
    history = History("p", tmp_path)
    for event in (commit(3), commit(4), commit(5), WRITTEN):
        history.record(event)
    history.close()
    rounds = read_rounds(tmp_path, "p")
    assert [record.continuations for record in rounds.records] == [(), WRITTEN.continuations, ()]
    assert rounds.last_round()["continuations"] == WRITTEN.continuations
    status = PeerStatus.from_bytes(status_after(commit(5), WRITTEN).to_bytes())
    assert (status.continued_round, status.continuations) == (4, WRITTEN.continuations)


def test_a_record_takes_over_continuations_that_come_later() -> None:
    rounds = Rounds("p")
    rounds.record(commit(4), 0.0)
    (record,) = rounds.records
    assert rounds.add(replace(record, teller="q", continuations=("one",)))
    assert not rounds.add(replace(record, teller="r", continuations=("two",)))
    assert rounds.records == (replace(record, continuations=("one",)),)
    rounds.record(commit(4), 0.0)
    assert rounds.records[0].continuations == ("one",)


@pytest.mark.parametrize(("fields", "expected"), [
    ({"prompts": 5 * ["a"]}, "evaluation.prompts"),
    ({"prompts": ["a\nb"]}, r"evaluation.prompts.* must be 1 to 200 characters in one line"),
    ({"prompts": [""]}, r"evaluation.prompts.* must be 1 to 200 characters in one line"),
    ({"prompts": [201 * "a"]}, r"evaluation.prompts.* must be 1 to 200 characters in one line"),
    ({"prompts": ["a"], "every_rounds": 0}, "evaluation.every_rounds.* must be greater than 0 if there are tasks or"),
    ({"tasks": ["../x.yaml"]}, "evaluation.tasks.* must be the name of an lm-eval task"),
    ({"tasks": ["piqa:many"]}, "evaluation.tasks.* must be the name of an lm-eval task"),
    ({"tasks": ["piqa:5"], "every_rounds": 0}, "evaluation.every_rounds.* must be greater than 0 if there are tasks or"),
])
def test_a_campaign_with_wrong_tasks_is_refused(campaign: Path, fields: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load_campaign_config(write_variant(campaign, "wrong.yaml", evaluation=fields))


@pytest.mark.network
def test_a_trainer_measures_tasks_and_everybody_sees_it(campaign: Path, tmp_path: Path) -> None:
    tasks = {"tasks": ["demo_continuation"], "every_rounds": 1, "max_examples": 2, "prompts": ["The house", "-x"]}
    long = {"total_steps": 400_000, "sync_steps": 10}
    config = write_variant(campaign, "tasks.yaml", training=long, merge={"merge_interval": 10}, evaluation=tasks)
    with LocalPeers(tmp_path, niceness=18) as swarm:
        address = swarm.bootstrap(config).address
        swarm.join("peer-0", address)
        offering = swarm.join("peer-1", address, "--evaluate-tasks", "--include-path", str(ROOT / "configs/demo_eval"))
        swarm.wait(lambda: evaluators(offering.children()), 120, "an evaluation runs")
        swarm.wait(lambda: offering.events(TasksEvaluated), 120, "the tasks are evaluated")
        found = offering.events(TasksEvaluated)[0]
        assert {score[:2] for score in found.scores} == {("demo_continuation", "acc"), ("demo_continuation", "acc_norm")}
        assert all(value in (0, 0.5, 1) for _, _, value, _ in found.scores)
        assert found.round in {event.round for event in offering.events(RoundCommitted)}
        peers = json.loads(call("status", address, "--json").stdout)["peers"]
        assert {peer["peer_id"] for peer in peers if peer["task_scores"]} == {offering.peer_id}
        assert "tasks: demo_continuation acc" in offering.log
        swarm.wait(lambda: offering.events(PromptsContinued), 120, "the prompts are continued")
        written = offering.events(PromptsContinued)[0]
        assert len(written.continuations) == 2
        assert all(written.continuations)
        assert "the first prompt goes on: " in offering.log
        peers = json.loads(call("status", address, "--json").stdout)["peers"]
        assert {peer["peer_id"] for peer in peers if peer["continuations"]} == {offering.peer_id}
        records = read_rounds(offering.run_dir).records
        assert [each.continuations for each in records if each.round == written.round] == [written.continuations]
        assert swarm.terminate("peer-1") == 0
        assert not (offering.run_dir / "evaluation").exists()
        assert swarm["peer-0"].is_running


def evaluators(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that evaluate, at the lowest priority."""
    found = []
    for process in processes:
        try:
            if {"evaluate", "generate"} & set(process.cmdline()) and process.nice() == 19:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
