"""A bootstrap and trainers as processes on loopback: they learn, and go on through kills, joins, leaves and restarts."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_swarm import COMMAND_TIMEOUT_S, ENVIRONMENT, LocalPeer, LocalPeers, call, free_port, wait_until, write_variant

from spes_p2p.observe.events import BaseRestored, RoundCommitted
from spes_p2p.session.run_dir import ADDRESS_FILE

pytestmark = pytest.mark.network

START_S = 90.0
"""Longest time from starting peers to their first common round, on two busy cores."""
TRAINERS = ("peer-0", "peer-1", "peer-2", "peer-3")


@pytest.fixture(scope="module")
def completed(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """A swarm of four whose campaign is complete."""
    with LocalPeers(tmp_path_factory.mktemp("completed")) as swarm:
        start(swarm, campaign)
        swarm.wait(lambda: not swarm.trainers, START_S + 60, "the campaign completes")
        yield swarm


@pytest.fixture(scope="module")
def endless(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """A swarm whose campaign lasts longer than these tests; each test leaves four trainers or more."""
    config = write_variant(
        campaign, "endless.yaml", training={"total_steps": 400_000, "sync_steps": 20}, merge={"merge_interval": 40}
    )
    with LocalPeers(tmp_path_factory.mktemp("endless")) as swarm:
        swarm.niceness = 10
        start(swarm, config, "--metrics-port", "0")
        swarm.wait_for_round(1, START_S)
        swarm.niceness = 0
        yield swarm


def test_a_local_swarm_ends_with_one_line_when_its_first_round_lacks_a_dead_trainer(campaign: Path, tmp_path: Path) -> None:
    config = write_variant(campaign, "pair.yaml", sync={"min_peers": 2})
    (tmp_path / "peer-1").mkdir()
    (tmp_path / "peer-1" / "identity.key").write_text("no key")
    command = [sys.executable, "-m", "spes_p2p", "swarm", "--config", str(config), "--peers", "2", "--run-dir", str(tmp_path)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert (ended.returncode, len(errors), "Traceback" in ended.stderr) == (2, 1, False)
    assert errors[0].startswith("error: 1 trainer left, the first round needs 2; peer-1 ended with code 2: ")
    assert "identity.key" in errors[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_local_swarm_that_is_ended_while_it_starts_waits_for_no_peer(
    campaign: Path, tmp_path: Path, number: int, code: int
) -> None:
    command = [sys.executable, "-m", "spes_p2p", "swarm", "--config", str(campaign), "--peers", "2", "--run-dir", str(tmp_path)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "bootstrap" / "log.txt").exists, START_S, "the bootstrap peer is started")
        process.send_signal(number)
        assert process.wait(COMMAND_TIMEOUT_S) == code
    finally:
        process.kill()
    assert not (tmp_path / "bootstrap" / ADDRESS_FILE).exists()


def start(swarm: LocalPeers, config: Path, *options: str) -> None:
    address = swarm.bootstrap(config, "/ip4/127.0.0.1/tcp/0", *options).address
    for name in TRAINERS:
        swarm.join(name, address, *options)


def assert_owned(commit: RoundCommitted) -> None:
    """Every expert has one owner, a member."""
    assert [len(owners) for owners in commit.owners] == [1] * 4
    assert {owner for owners in commit.owners for owner in owners} <= set(commit.members)


def assert_equal_digests(swarm: LocalPeers) -> None:
    digests = swarm.digests()
    assert sorted(digests) == list(range(max(digests) + 1))
    assert {number: found for number, found in digests.items() if len(found) > 1} == {}


def owned_experts(commit: RoundCommitted, peer: LocalPeer) -> list[int]:
    return [expert for expert, owners in enumerate(commit.owners) if peer.peer_id in owners]


# A campaign from its first round to its checkpoint ----------------------------------------------------------------------


def test_four_trainers_complete_a_campaign_with_equal_bits(completed: LocalPeers) -> None:
    peers = [completed[name] for name in TRAINERS]
    assert [peer.process.returncode for peer in peers] == [0] * 4
    assert completed["bootstrap"].is_running
    ids = {peer.peer_id for peer in peers}
    for peer in peers:
        assert sorted(peer.commits) == list(range(9)), peer.log
        assert_owned(peer.commits[8])
        assert all(set(commit.members) <= ids for commit in peer.commits.values())
        # On a busy machine a straggler is left out of a round, and its work goes with the next one.
        assert sum(peer.peer_id in commit.members for commit in peer.commits.values()) > len(peer.commits) / 2
    assert_equal_digests(completed)
    assert len(set(peers[0].commits[8].owners)) == 4
    assert peers[0].commits[8].campaign_step == 40


def test_the_swarm_learns(completed: LocalPeers) -> None:
    losses = completed.held_out_losses()
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1.0


def test_its_checkpoint_gives_the_same_logits_in_plain_transformers(completed: LocalPeers, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from spes_p2p.session.run_dir import load_run_dir_base
    from spes_p2p.testing.plain_model import plain_model

    output = tmp_path / "checkpoint"
    result = call("export", "--run-dir", str(completed["peer-1"].run_dir), "--output", str(output))
    assert result.code == 0, result.stderr
    files, base = load_run_dir_base(completed["peer-2"].run_dir)
    assert base.digest == completed["peer-0"].commits[8].base_digest
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    ids = torch.arange(512).view(8, 64)
    with torch.no_grad():
        difference = loaded(input_ids=ids).logits - plain_model(files.campaign.config.model, base.values).eval()(ids).logits
    assert float(difference.abs().max()) == 0.0


# A whole swarm ends -----------------------------------------------------------------------------------------------------


def test_a_swarm_killed_as_a_whole_continues_from_its_last_round(campaign: Path, tmp_path: Path) -> None:
    training = {"total_steps": 120, "sync_steps": 10}
    config = write_variant(campaign, "restarted.yaml", training=training, merge={"merge_interval": 10})
    listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config, listen).address
        for name in TRAINERS:
            swarm.join(name, address)
        swarm.wait_for_round(3, START_S)
        swarm.kill("bootstrap", *TRAINERS)
        last = swarm.newest_round()
        assert last < 12, "the campaign was over before the kill"
        before = {name: swarm[name].round for name in TRAINERS}

        assert swarm.bootstrap(config, listen).address == address
        for name in TRAINERS:
            swarm.join(name, address)
        swarm.wait(lambda: not swarm.trainers, START_S + 60, "the campaign completes")
        peers = [swarm[name] for name in TRAINERS]
        assert [peer.process.returncode for peer in peers] == [0] * 4
        assert all(peer.round == 12 for peer in peers)
        assert peers[0].commits[12].campaign_step == 120
        assert_equal_digests(swarm)
        for peer in peers:
            last_told = before[peer.name]
            restored = [event.round for event in peer.events(BaseRestored) if event.source == "disk"][-1]
            # A base is written while the next phase trains: a round that was told may have to be applied again.
            assert last_told - 1 <= restored <= last_told + 1
            rounds = [event.round for event in peer.events(RoundCommitted)]
            assert rounds == sorted(rounds)
            assert {number for number in rounds if rounds.count(number) > 1} <= set(range(restored + 1, last_told + 1))


# Looking at a running swarm ---------------------------------------------------------------------------------------------


def test_status_shows_the_swarm_as_it_is(endless: LocalPeers) -> None:
    endless.wait_for_round(2)
    before = endless.newest_round()
    result = call("status", endless["peer-1"].address, "--json")
    assert result.code == 0, result.stderr
    after = endless.newest_round()
    status = json.loads(result.stdout)
    assert before <= status["round"] <= after + 1
    assert status["digests_equal"]
    assert status["base_digest"] == endless.commit(status["round"]).base_digest
    assert status["owners"] == [list(owners) for owners in endless.commit(status["round"]).owners]
    assert status["ownerless"] == []
    trainers = {peer["peer_id"] for peer in status["peers"] if peer["role"] == "trainer"}
    assert trainers == {peer.peer_id for peer in endless.trainers}
    assert [peer["peer_id"] for peer in status["peers"] if peer["role"] == "helper"] == [endless["bootstrap"].peer_id]
    assert status["tokens_per_second"] > 0


def test_a_watched_swarm_is_a_line_a_round(endless: LocalPeers) -> None:
    watcher = endless.run("watcher", ["status", "--watch", endless["bootstrap"].address], run_dir_option=False)
    endless.wait(lambda: len(watcher.log.splitlines()) >= 3, START_S, "three rounds are shown")
    endless.kill("watcher")
    numbers = [int(line.split("/")[0].removeprefix("round ")) for line in watcher.log.splitlines()]
    assert numbers == sorted(set(numbers))
    assert all(" · loss " in line and " tokens/s · 4 trainers · " in line for line in watcher.log.splitlines())


def test_the_bootstrap_tells_of_rounds_and_of_who_came(endless: LocalPeers) -> None:
    bootstrap = endless["bootstrap"]
    endless.wait(lambda: f"round {endless.newest_round()}/" in bootstrap.log, START_S, "it tells of the newest round")
    came = [line for line in bootstrap.log.splitlines() if "swarm assembled" in line or " joined" in line]
    for peer in endless.trainers:
        assert any(peer.peer_id[-6:] in line for line in came)
    told = [line for line in bootstrap.log.splitlines() if " · loss " in line]
    number, loss = told[0].split("round ")[1].split("/")[0], told[0].split("loss ")[1].split(" ")[0]
    assert loss == f"{endless.commit(int(number)).loss:.3f}"


def test_anybody_exports_the_newest_base_with_its_card(endless: LocalPeers, tmp_path: Path) -> None:
    before = endless.newest_round()
    result = call("export", "--from", endless["bootstrap"].address, "--output", str(tmp_path / "checkpoint"))
    assert result.code == 0, result.stderr
    facts = json.loads((tmp_path / "checkpoint/spes_p2p.json").read_text())
    number = facts["round"]
    assert before - 1 <= number <= endless.newest_round()
    commit = endless.commit(number)
    assert (facts["digest"], facts["tokens"], facts["training_loss"]) == (commit.base_digest, commit.total_tokens, commit.loss)
    assert {each["peer"] for each in facts["contributions"]} == {endless[name].peer_id for name in TRAINERS}
    upto = endless.commit(facts["contributions_up_to_round"])
    assert sum(each["tokens"] for each in facts["contributions"]) == upto.total_tokens
    assert all(each["expert_steps"] > 0 for each in facts["contributions"])
    card = (tmp_path / "checkpoint/README.md").read_text()
    for text in (commit.base_digest, facts["config_hash"], f"round {number}"):
        assert text in card
    for each in facts["contributions"]:
        share = 100 * each["tokens"] / upto.total_tokens
        assert f"| `{each['peer']}` |  |  | {each['tokens']} | {share:.1f} % | {each['expert_steps']} |" in card
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert all(bool(parameter.isfinite().all()) for parameter in exported.parameters())


class Typing:
    """Two lines that somebody pipes in, the second once a newer base than the first line's is loaded."""

    def __init__(self) -> None:
        self._lines = 0
        self.loaded: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        self._lines += 1
        if self._lines == 2:
            while not self.loaded.get(timeout=60).name.startswith("round-"):
                pass  # the base of the first line
            time.sleep(1)  # to be offered
        return "the\n" if self._lines <= 2 else ""


def test_anybody_talks_to_the_newest_base_and_to_those_that_follow(
    endless: LocalPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spes_p2p.client import generate

    address, options = endless["bootstrap"].address, ("--max-new-tokens", "4", "--json")
    asked = call("generate", "--from", address, "--prompt", "the", *options)
    assert asked.code == 0, asked.stderr
    first = json.loads(asked.stdout)
    assert first["round"] <= endless.newest_round()
    assert [(each["round"], each["prompt"]) for each in first["continuations"]] == [(first["round"], "the")]
    assert f"base of round {first['round']}" in asked.stderr

    monkeypatch.setattr(generate, "LOOK_EVERY_S", 0.5)
    typing = Typing()

    class Watched(generate.Continuation):
        def __init__(self, model_dir: Path, device: str, dtype: str | None = None):
            super().__init__(model_dir, device, dtype)
            typing.loaded.put(model_dir)

    monkeypatch.setattr(generate, "Continuation", Watched)
    monkeypatch.setattr(sys, "stdin", typing)
    followed = call("generate", "--from", address, "--follow", *options)
    assert followed.code == 0, followed.stderr
    before, after = (each["round"] for each in json.loads(followed.stdout)["continuations"])
    assert first["round"] <= before < after <= endless.newest_round()
    assert f"base of round {after}" in followed.stderr


@pytest.mark.slow
def test_anybody_evaluates_the_newest_base(endless: LocalPeers, tmp_path: Path) -> None:
    question = {"question": "the", "choices": [" a", " b"], "answer": 0}
    (tmp_path / "letters.jsonl").write_text(json.dumps(question) + "\n")
    task = {
        "task": "letters", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "letters.jsonl")}},
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "question", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "letters.yaml").write_text(json.dumps(task))
    address = endless["bootstrap"].address
    result = call("evaluate", "--from", address, "--tasks", "letters", "--include-path", str(tmp_path), "--json")
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["samples"] == {"letters": 1}
    assert found["digest"] == endless.commit(found["round"]).base_digest


@pytest.mark.parametrize("name", ["bootstrap", "peer-0"])
def test_metrics_are_served_and_promtool_takes_them(endless: LocalPeers, name: str) -> None:
    with urllib.request.urlopen(endless[name].metrics_url, timeout=COMMAND_TIMEOUT_S) as response:
        body = response.read()
    assert b"spes_" in body
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    check = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, b"")


# Churn ------------------------------------------------------------------------------------------------------------------


def test_the_others_go_on_when_a_trainer_is_killed_and_it_continues_on_its_run_dir(endless: LocalPeers) -> None:
    victim = endless["peer-2"]
    victim_id = victim.peer_id
    others = [endless[name] for name in TRAINERS if name != "peer-2"]
    endless.wait_for_round(endless.newest_round() + 1)
    assert [child.name() for child in victim.children()] == ["p2pd"]
    endless.kill("peer-2")
    last = endless.newest_round()
    endless.wait_for_round(last + 3, 45, others)
    after = others[0].commits[last + 3]
    assert victim_id not in after.members
    assert_owned(after)
    # On a busy machine a straggler is left out of a round.
    everybody = {peer.peer_id for peer in others}
    endless.wait(lambda: set(endless.commit(endless.newest_round()).members) == everybody, START_S, "the others are all in")
    assert_equal_digests(endless)

    restored_before = len(victim.events(BaseRestored))
    again = endless.join("peer-2", endless["bootstrap"].address)
    endless.wait(lambda: victim_id in endless.commit(endless.newest_round()).members, START_S, "the killed trainer is back")
    assert again.peer_id == victim_id
    assert again.events(BaseRestored)[restored_before].source == "disk"
    endless.wait(lambda: owned_experts(endless.commit(endless.newest_round()), again), START_S, "it has experts again")
    assert_equal_digests(endless)


def test_a_peer_joins_by_a_trainers_address_from_another_folder(endless: LocalPeers, tmp_path: Path) -> None:
    fifth = endless.join("peer-4", endless["peer-0"].address, "--experts", "2", cwd=tmp_path)
    endless.wait(lambda: fifth.round >= 0 and fifth.peer_id in endless.commit(fifth.round).members, START_S, "it is a member")
    first = min(fifth.commits)
    endless.wait_for_round(first + 3)
    assert first > 0
    assert fifth.events(BaseRestored)[0].source == "download"
    assert list(tmp_path.iterdir()) == []
    assert_owned(fifth.commits[first + 3])
    assert_equal_digests(endless)


def test_sigterm_leaves_politely(endless: LocalPeers) -> None:
    leaver = max(endless.trainers, key=lambda peer: len(owned_experts(endless.commit(endless.newest_round()), peer)))
    leaver_id = leaver.peer_id
    assert endless.terminate(leaver.name) == 0, leaver.log
    last = endless.newest_round()
    endless.wait_for_round(last + 2)
    commit = endless.commit(last + 2)
    assert leaver_id not in commit.members
    assert_owned(commit)
    assert_equal_digests(endless)
