"""The command line: what a user can get wrong ends with one line that says so, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import typer.main
from network_swarm import COMMAND_TIMEOUT_S, ENVIRONMENT, LOOPBACK, ROOT, Ended, LocalPeers, call, write_variant
from sample_text import TEXT

from spes_p2p import __version__
from spes_p2p.cli import make_app, terminal
from spes_p2p.errors import Broken
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.storage.files import alone_in

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
SOMEBODY = NOBODY.rpartition("/")[2]
TOKENS = "train_000_000000.npy"


@dataclass(frozen=True)
class Place:
    """Where one wrong command runs."""

    folder: Path
    """Empty but for what the case puts there; must not change."""
    campaign: Path
    """A campaign file that is right."""
    address: str = NOBODY

    @property
    def output(self) -> str:
        return str(self.folder / "output")


@pytest.fixture(scope="module")
def running(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """A bootstrap peer and nobody else."""
    with LocalPeers(tmp_path_factory.mktemp("running")) as peers:
        peers.bootstrap(campaign)
        yield peers


@pytest.fixture(scope="module")
def other_run_dir(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the bootstrap peer of another campaign; it does not run any more."""
    other = write_variant(campaign, "other.yaml", training={"total_steps": 80})
    with LocalPeers(tmp_path_factory.mktemp("other")) as peers:
        return peers.bootstrap(other).run_dir


@pytest.fixture
def place(campaign: Path, tmp_path: Path) -> Place:
    return Place(tmp_path, campaign)


@pytest.fixture
def swarm_place(campaign: Path, tmp_path: Path, running: LocalPeers) -> Place:
    return Place(tmp_path, campaign, running["bootstrap"].address)


def in_a_process(*arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT, input=stdin, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT_S, check=False,
    )


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(folder: Path, arguments: list[str], *expected: str) -> None:
    """One line with all of `expected`, after lines that say what the command tries, exit code 2, no file changed."""
    before = contents(folder)
    ended = call(*arguments)
    assert ended.code == 2, ended
    *told, error = ended.stderr.splitlines()
    assert all(re.match(r"[\d:]{8} (looking for|found|loading) ", line) for line in told), ended.stderr
    assert error.startswith("error: "), ended.stderr
    assert [text for text in expected if text not in error] == [], ended.stderr
    assert ended.stdout == ""
    assert contents(folder) == before


# Campaign files ---------------------------------------------------------------------------------------------------------


BAD_CONFIGS: dict[str, tuple[dict[str, dict[str, object]], tuple[str, ...]]] = {
    "misspelt field": ({"training": {"sync_step": 5}}, ("unknown field 'training.sync_step'", "did you mean 'sync_steps'?")),
    "unknown section": ({"trainning": {"a": 1}}, ("unknown field 'trainning'", "did you mean 'training'?")),
    "too many experts a peer": ({"experts": {"experts_per_peer": 9}}, ("experts.experts_per_peer = 9", "moe_num_experts = 4")),
    "top_k beyond the experts": ({"model": {"moe_top_k": 5}}, ("model.moe_top_k = 5", "at most moe_num_experts = 4")),
    "sequence beyond the model": ({"training": {"sequence_length": 65}}, ("training.sequence_length = 65", "64")),
    "merge between rounds": ({"merge": {"merge_interval": 7}}, ("merge.merge_interval = 7", "multiple of", "sync_steps = 5")),
    "vocabulary too small": ({"model": {"vocab_size": 500}}, ("500", "512")),
    "no such manifest": ({"data": {"manifest": "nowhere.json"}}, ("nowhere.json",)),
    "another tokenizer": ({"data": {"tokenizer": str(TEXT / "tokenizer.json")}}, ("tokenizer",)),
    "no such end token": ({"data": {"eos_token": "</s>"}}, ("</s>",)),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
@pytest.mark.parametrize("command", ["bootstrap", "swarm"])
@pytest.mark.long
def test_a_wrong_campaign_file_is_refused(case: str, command: str, place: Place) -> None:
    sections, expected = BAD_CONFIGS[case]
    config = write_variant(place.campaign, f"{case.replace(' ', '_')}.yaml", **sections)
    peers = ["--peers", "4"] if command == "swarm" else []
    assert_refused(place.folder, [command, "--config", str(config), *peers, "--run-dir", place.output], *expected)


def test_text_shorter_than_one_sample_is_refused(place: Place) -> None:
    text, data = place.folder / "short.txt", place.folder / "data"
    text.write_text("Too short.")
    tokenizer = str(place.campaign.with_name("tokenizer.json"))
    assert call("tokenize", str(text), "--tokenizer", tokenizer, "--output", str(data)).code == 0
    config = write_variant(place.campaign, "short.yaml", data={"manifest": str(data / "manifest.json")})
    arguments = ["bootstrap", "--config", str(config), "--run-dir", place.output]
    assert_refused(place.folder, arguments, "no token file holds a whole sample of 64 tokens")


def test_a_second_swarm_in_a_folder_is_refused(place: Place) -> None:
    folder = place.folder / "swarm"
    folder.mkdir()
    with alone_in(folder, ""):
        arguments = ["swarm", "--config", str(place.campaign), "--peers", "2", "--run-dir", str(folder)]
        assert_refused(place.folder, arguments, "another command works in this folder; stop the swarm")


def test_a_swarm_checks_its_token_files_before_it_starts(place: Place) -> None:
    copy = place.folder / "campaign"
    shutil.copytree(place.campaign.parent, copy)
    tokens = copy / TOKENS
    tokens.write_bytes(tokens.read_bytes()[:-2])
    arguments = ["swarm", "--config", str(copy / "test.yaml"), "--peers", "2", "--run-dir", place.output]
    assert_refused(place.folder, arguments, str(tokens), "truncated")


# Commands that need no swarm --------------------------------------------------------------------------------------------


def bootstrap(place: Place, *options: str) -> list[str]:
    return ["bootstrap", "--config", str(place.campaign), "--run-dir", place.output, *options]


def join(place: Place, *options: str) -> list[str]:
    return ["join", place.address, "--run-dir", place.output, "--listen", LOOPBACK, *options]


def init(place: Place, *options: str) -> list[str]:
    return ["init", place.output, *options]


def init_with_text(place: Place, *options: str) -> list[str]:
    path = place.folder / "text.txt"
    path.write_text("Some words.")
    return init(place, "--text", str(path), *options)


def init_with_copied_held_out(place: Place) -> list[str]:
    path = place.folder / "held_out.txt"
    path.write_text("Some words.")
    return init_with_text(place, "--held-out", str(path))


def init_with_short_held_out(place: Place) -> list[str]:
    path, text = place.folder / "held_out.txt", place.folder / "long.txt"
    path.write_text("Some words.")
    text.write_text("Some words. " * 1000)
    tokenizer = str(place.campaign.with_name("tokenizer.json"))
    return init(place, "--text", str(text), "--held-out", str(path), "--tokenizer", tokenizer)


def second(place: Place) -> list[str]:
    return bootstrap(place, "--peer", place.address, "--listen", LOOPBACK)


def status(place: Place) -> list[str]:
    return ["status", place.address]


def control(place: Place, *order: str) -> list[str]:
    """By whoever has this test's key."""
    key = place.campaign.with_name("somebody.key")
    RSAIdentity(key)
    return ["control", place.address, "--key", str(key), *(order or ("pause",))]


def invite(place: Place, target: str, *options: str) -> list[str]:
    """By whoever has this test's key."""
    key = place.campaign.with_name("somebody.key")
    RSAIdentity(key)
    return ["invite", target, "--key", str(key), *options]


def doctor(place: Place) -> list[str]:
    return ["doctor", place.address]


def tokenize(place: Place, name: str, content: str | None, *options: str) -> list[str]:
    path = place.folder / name
    if content is not None:
        path.write_text(content)
    tokenizer = str(place.campaign.with_name("tokenizer.json"))
    return ["tokenize", str(path), "--tokenizer", tokenizer, "--output", place.output, *options]


def describe(place: Place, content: bytes, *options: str) -> list[str]:
    path = place.folder / "tokens.npy"
    path.write_bytes(content)
    tokenizer = str(place.campaign.with_name("tokenizer.json"))
    return ["describe", str(path), "--tokenizer", tokenizer, "--manifest", place.output, *options]


def plan(place: Place, memory: str, *options: str) -> list[str]:
    return ["plan", "--config", str(place.campaign), "--memory", memory, *options]


def evaluate(place: Place, *options: str) -> list[str]:
    return ["evaluate", str(place.folder), "--tasks", "arc_easy", *options]


def scenario(place: Place, text: str, *options: str) -> list[str]:
    path = place.folder / "scenario.yaml"
    path.write_text(text)
    return ["simulate", str(path), *options]


def a_file(place: Place) -> str:
    path = place.folder / "file"
    path.touch()
    return str(path)


TOO_LARGE = np.array([1, 2, 600], np.uint16).tobytes()

BAD_COMMANDS: dict[str, tuple[Callable[[Place], list[str]], tuple[str, ...]]] = {
    "no such command": (lambda p: ["trian"], ("No such command 'trian'; see spes-p2p --help",)),
    "no such option": (lambda p: bootstrap(p, "--metric-port", "1"), ("--metric-port",)),
    "no campaign file": (lambda p: ["bootstrap", "--config", str(p.folder / "no.yaml"), "--run-dir", p.output], ("no.yaml",)),
    "init no text": (lambda p: init(p), ("--text", "give this option")),
    "init text is not there": (lambda p: init(p, "--text", str(p.folder / "no.txt")), ("no.txt: no such file",)),
    "init text without a kind is not there": (lambda p: init(p, "--text", str(p.folder / "no")), ("no: no such file",)),
    "init text is a folder": (lambda p: init(p, "--text", str(p.folder)), ("is a folder; name the files in it",)),
    "init another kind": (lambda p: init(p, "--text", a_file(p)), ("unknown format",)),
    "init size": (lambda p: init_with_text(p, "--size", "huge"), ("--size huge", "tiny, small")),
    "init peers": (lambda p: init_with_text(p, "--peers", "0"), ("--peers 0",)),
    "init many peers": (lambda p: init_with_text(p, "--peers", "1000000"), ("--peers 1000000", "at most 1024 members")),
    "init in a file": (lambda p: ["init", f"{a_file(p)}/campaign", "--text", a_file(p)], ("is a file; choose another folder",)),
    "init held-out is training text": (
        lambda p: init_with_text(p, "--held-out", str(p.folder / "text.txt")), ("--held-out", "is training text too")),
    "init held-out is a copy": (init_with_copied_held_out, ("held_out.txt", "is training text too")),
    "init short held-out": (init_with_short_held_out, ("held_out_manifest.json", "holds a whole sample of 128 tokens")),
    "init epochs": (lambda p: init_with_text(p, "--epochs", "0"), ("--epochs 0",)),
    "init folder": (
        lambda p: ["init", str(p.folder / "über"), "--text", a_file(p)],
        ("'über'", "(a to z)", "without --name it is the folder's")),
    "init name": (lambda p: init_with_text(p, "--name", "my campaign"), ("--name", "my campaign")),
    "init tokenizer": (lambda p: init_with_text(p, "--tokenizer", "no.json"), ("no.json: cannot read the tokenizer",)),
    "init few ids": (lambda p: init_with_text(p, "--tokenizer", "10"), ("--tokenizer 10", "300")),
    "init tokenizer of nothing": (lambda p: init_with_text(p, "--tokenizer", "0"), ("--tokenizer 0",)),
    "init slow line": (lambda p: init_with_text(p, "--line", "1kbit"), ("--line '1kbit'", "at least 1mbit")),
    "init from no folder": (lambda p: init_with_text(p, "--from", "./no"), ("no: no such checkpoint folder",)),
    "init from a download without text": (
        lambda p: init(p, "--from", "owner/name", "--text", "no.txt"), ("no.txt: no such file",)),
    "init from a download for nobody": (lambda p: init_with_text(p, "--from", "owner/name", "--peers", "0"), ("--peers 0",)),
    "init from a download of unknown admission": (
        lambda p: init_with_text(p, "--from", "owner/name", "--admission", "all"), ("--admission", "friends")),
    "init url of a folder": (lambda p: init_with_text(p, "--url", "/tokens"), ("--url /tokens", "hf://", "--data-dir")),
    "tokenize url of unknown kind": (lambda p: tokenize(p, "a.txt", "text", "--url", "ftp://host/x"), ("--url ftp://host/x", "https://")),
    "describe url of this disk": (lambda p: describe(p, TOO_LARGE, "--url", "file:///x"), ("--url file:///x", "https://")),
    "init short text": (lambda p: init_with_text(p, "--tokenizer", "300"), ("holds a whole sample of 128 tokens",)),
    "malformed listen": (lambda p: bootstrap(p, "--listen", "127.0.0.1:9"), ("--listen '127.0.0.1:9'", "multiaddress")),
    "malformed announce": (lambda p: bootstrap(p, "--announce", "example.org"), ("--announce", "/ip4/203.0.113.7/tcp/31337")),
    "slow line": (lambda p: bootstrap(p, "--max-upload", "1bit"), ("--max-upload '1bit': must be at least 1mbit",)),
    "run-dir is a file": (lambda p: ["bootstrap", "--config", str(p.campaign), "--run-dir", a_file(p)], ("run-dir",)),
    "metrics port beyond": (lambda p: bootstrap(p, "--metrics-port", "70000"), ("--metrics-port", "70000")),
    "metrics host": (lambda p: bootstrap(p, "--metrics-host", "localhost"), ("--metrics-host 'localhost'", "0.0.0.0")),
    "metrics host elsewhere": (
        lambda p: bootstrap(p, "--metrics-host", "203.0.113.7", "--metrics-port", "9"), ("--metrics-host 203.0.113.7",)),
    "log level": (lambda p: bootstrap(p, "--log-level", "loud"), ("--log-level", "loud")),
    "no peers": (lambda p: ["swarm", "--config", str(p.campaign), "--peers", "0", "--run-dir", p.output], ("--peers 0",)),
    "too few peers": (
        lambda p: ["swarm", "--config", str(p.campaign), "--peers", "1", "--run-dir", p.output],
        ("--peers 1", "sync.min_peers = 2"),
    ),
    "no rounds": (
        lambda p: ["swarm", "--config", str(p.campaign), "--peers", "2", "--rounds", "0", "--run-dir", p.output],
        ("--rounds 0",),
    ),
    "join nothing": (lambda p: ["join", "--run-dir", p.output], ("ADDRESS",)),
    "join malformed": (lambda p: ["join", "203.0.113.7:31337", "--run-dir", p.output], ("'203.0.113.7:31337'", "/p2p/")),
    "join no peer id": (lambda p: ["join", "/ip4/127.0.0.1/tcp/9", "--run-dir", p.output], ("does not end in /p2p/<peer id>",)),
    "join nobody": (join, ("no peer answers at", NOBODY)),
    "join run-dir is a file": (lambda p: ["join", NOBODY, "--run-dir", a_file(p)], ("cannot be a run-dir (Not a directory)",)),
    "join hours": (lambda p: join(p, "--hours", "22"), ("--hours '22'", "22-8")),
    "join quota": (lambda p: join(p, "--quota", "20GB"), ("--quota '20GB'", "20GB/day")),
    "join device": (lambda p: join(p, "--devices", "tpu"), ("--devices", "tpu")),
    "join tracker": (lambda p: join(p, "--tracker", "tensorboard"), ("--tracker", "wandb", "trackio")),
    "join base": (lambda p: join(p, "--base", "tape"), ("--base", "tape", "'disk' or 'ram'")),
    "join token cache": (lambda p: join(p, "--token-cache", "some"), ("--token-cache 'some'", "24GiB")),
    "join experts word": (lambda p: join(p, "--experts", "many"), ("--experts", "many")),
    "join experts dashes": (lambda p: join(p, "--experts=--5"), ("--experts", "--5")),
    "join no experts": (lambda p: join(p, "--experts", "0"), ("--experts", "0")),
    "bootstrap other nobody": (
        lambda p: bootstrap(p, "--listen", LOOPBACK, "--peer", NOBODY), ("no peer answers at", NOBODY)),
    "bootstrap identity is not there": (
        lambda p: bootstrap(p, "--identity", "no.key", "--peer", NOBODY), ("--identity 'no.key': no such file; give",)),
    "bootstrap other malformed": (lambda p: bootstrap(p, "--peer", "localhost"), ("'localhost'", "/p2p/")),
    "doctor nothing": (lambda p: ["doctor"], ("ADDRESS",)),
    "doctor malformed": (lambda p: ["doctor", "203.0.113.7:31337"], ("'203.0.113.7:31337'", "/p2p/")),
    "doctor nobody": (lambda p: ["doctor", NOBODY, "--json"], ("no peer answers at", NOBODY)),
    "doctor device": (lambda p: ["doctor", NOBODY, "--devices", "tpu"], ("--devices", "tpu")),
    "status malformed": (lambda p: ["status", "localhost"], ("'localhost'",)),
    "status nobody": (lambda p: ["status", NOBODY, "--json"], ("no peer answers at", NOBODY)),
    "control nothing": (lambda p: ["control", NOBODY, "--key", "k"], ("ORDER",)),
    "audit no peer": (lambda p: ["audit", NOBODY, "peer-1"], ("'peer-1' is no peer's id; give the whole id",)),
    "control no key": (lambda p: ["control", NOBODY, "pause"], ("--key",)),
    "control key is not there": (lambda p: ["control", NOBODY, "--key", "no.key", "pause"], ("no.key: no such file; give",)),
    "control key of nothing": (lambda p: ["control", NOBODY, "--key", a_file(p), "pause"], ("not a peer's key; give",)),
    "control malformed": (lambda p: control(replace(p, address="localhost")), ("'localhost'",)),
    "control nobody": (control, ("no peer answers at", NOBODY)),
    "control another order": (lambda p: control(p, "halt"), ("unknown order 'halt'; give one of pause, resume, stop,",)),
    "control too much": (lambda p: control(p, "pause", "now"), ("control pause: takes no arguments, not 'now'",)),
    "control ban of a name": (lambda p: control(p, "ban", "alice"), ("control ban: give the whole id of one peer",)),
    "join invitation of nothing": (lambda p: join(p, "--invite", "spes-invitation-x"), ("--invite: not an invitation; paste",)),
    "join invitation is not there": (lambda p: join(p, "--invite", "no.txt"), ("--invite no.txt: neither an invitation nor",)),
    "bootstrap invitation of nothing": (lambda p: bootstrap(p, "--invite", a_file(p)), ("not an invitation; paste",)),
    "invite to nothing": (lambda p: invite(p, str(p.folder)), ("neither the address of a peer", "nor a run-dir")),
    "invite nobody": (lambda p: invite(p, NOBODY), ("no peer answers at", NOBODY)),
    "invite malformed": (lambda p: invite(p, "/ip4/1.2.3.4"), ("is not the address of a peer",)),
    "invite without a key": (lambda p: ["invite", NOBODY], ("--key",)),
    "invite another role": (lambda p: invite(p, NOBODY, "--roles", "boss"), ("unknown role 'boss'; give some of trainer",)),
    "invite for ever": (lambda p: invite(p, NOBODY, "--expires", "for ever"), ("--expires 'for ever'", "30d")),
    "invite for too long": (lambda p: invite(p, NOBODY, "--expires", "9999d"), ("--expires: at most 3650d",)),
    "invite a nameless helper": (lambda p: invite(p, NOBODY, "--roles", "helper"), ("name the peer with --peer",)),
    "invite a nickname": (lambda p: invite(p, NOBODY, "--peer", "alice"), ("--peer alice: not the whole id of a peer",)),
    "init admission": (lambda p: init_with_text(p, "--admission", "list"), ("--admission 'list': must be 'friends'",)),
    "join from nothing": (lambda p: join(p, "--from", "none"), ("--from none: no such checkpoint folder; give that of",)),
    "join identity is not there": (
        lambda p: join(p, "--identity", "no.key"), ("--identity 'no.key': no such file", "or make one with spes-p2p identity")),
    "identity of nothing": (
        lambda p: ["identity", "--identity", a_file(p)], ("not an identity file", "; restore your copy, or delete it to")),
    "name with markup": (
        lambda p: ["join", p.address, "--name", "<b>me</b>"], ("--name '<b>me</b>'", "letters, digits, spaces", "1 to 24")),
    "team of blanks": (lambda p: ["join", p.address, "--team", "  "], ("--team '  '", "a letter among them")),
    "me of nothing, its worth": (lambda p: ["me", str(p.folder), "--worth"], ("run-dir of your trainer",)),
    "me of nothing": (lambda p: ["me", str(p.folder)], ("no trainer has used this folder; give the run-dir",)),
    "pause nothing": (lambda p: ["pause", p.output], ("output: no such folder; give the run-dir of your trainer",)),
    "resume nothing": (lambda p: ["resume", p.output], ("output: no such folder; give the run-dir of your trainer",)),
    "pause elsewhere": (lambda p: ["pause", str(p.folder)], ("no trainer has used this folder; give the run-dir",)),
    "status of no trainer": (lambda p: ["status", str(p.folder)], ("no trainer has used this folder; give the run-dir",)),
    "status of no folder": (lambda p: ["status", "runs/no"], ("'runs/no': no such folder, and not the address of a peer",)),
    "me of no folder": (lambda p: ["me", "runs/no"], ("runs/no: no such folder; give the run-dir of your trainer",)),
    "service alone": (lambda p: ["service"], ("Missing command",)),
    "service of nothing": (lambda p: ["service", "install"], ("ADDRESS",)),
    "service of a malformed address": (lambda p: ["service", "install", "--", "localhost"], ("'localhost'", "/p2p/")),
    "service of a typo": (lambda p: ["service", "install", "--", NOBODY, "--hour", "22-8"], ("--hour",)),
    "service of hours": (lambda p: ["service", "install", "--", NOBODY, "--hours", "25-3"], ("--hours '25-3'", "22-8")),
    "service name": (lambda p: ["service", "install", "--name", "a b", "--", NOBODY], ("--name 'a b'", "letters")),
    "service not there": (lambda p: ["service", "remove", "--name", "spes-p2p-not-there"], ("no such unit", "--name")),
    "control no round": (lambda p: control(p, "rollback"), ("give the round to return to: rollback 40",)),
    "control round in words": (lambda p: control(p, "rollback", "ten"), ("give the round to return to",)),
    "control schedule of nothing": (lambda p: control(p, "schedule"), ("give a round and the settings",)),
    "control of no trainer": (
        lambda p: control(replace(p, address=str(p.folder))), ("no trainer has used this folder; give the run-dir",)),
    "audit of no trainer": (
        lambda p: ["audit", str(p.folder), SOMEBODY], ("no trainer has used this folder; give the run-dir",)),
    "control schedule value": (lambda p: control(p, "schedule", "9", "learning_rate=low"), ("is not NAME=NUMBER",)),
    "control schedule word": (lambda p: control(p, "schedule", "9", "learning_rate"), ("is not NAME=NUMBER",)),
    "tokenize nothing there": (lambda p: tokenize(p, "no.txt", None), ("no.txt: no such file",)),
    "tokenize nothing there without a kind": (lambda p: tokenize(p, "no", None), ("no: no such file",)),
    "tokenize a folder": (lambda p: tokenize(p, ".", None), ("is a folder; name the files in it",)),
    "tokenize another kind": (lambda p: tokenize(p, "text.pdf", "a"), ("text.pdf",)),
    "tokenize no documents": (lambda p: tokenize(p, "empty.jsonl", ""), ("no documents",)),
    "tokenize no text": (lambda p: tokenize(p, "a.jsonl", '{"txt": "a"}\n'), ("a.jsonl", "text")),
    "tokenize end token": (lambda p: tokenize(p, "a.txt", "a", "--eos-token", "</s>"), ("</s>",)),
    "tokenize shard size": (lambda p: tokenize(p, "a.txt", "a", "--shard-tokens", "0"), ("--shard-tokens 0",)),
    "describe ids beyond": (lambda p: describe(p, TOO_LARGE), ("tokens.npy", "vocabulary of 512")),
    "describe wrong dtype": (lambda p: describe(p, TOO_LARGE[:4], "--dtype", "int8"), ("--dtype int8",)),
    "describe other dtype": (lambda p: describe(p, TOO_LARGE[:2] * 6, "--dtype", "uint32"), ("tokens.npy",)),
    "describe cut short": (lambda p: describe(p, TOO_LARGE[:3]), ("tokens.npy",)),
    "dashboard to no URL": (lambda p: ["dashboard", NOBODY, "--webhook", "a.b"], ("--webhook 'a.b': must be an http:// or https://",)),
    "report of nothing": (lambda p: ["report", p.output], ("no such folder; give the run-dir",)),
    "report of no run-dir": (lambda p: ["report", str(p.folder)], ("not a peer's run-dir",)),
    "report into no folder": (
        lambda p: ["report", str(p.folder), "--output", f"{p.output}/x"], ("output/x: there is no folder", "make it first")),
    "report into a folder": (lambda p: ["report", str(p.folder), "--output", str(p.folder)], ("is a folder; name a file",)),
    "export no run-dir": (lambda p: ["export", "--run-dir", str(p.folder), "--output", p.output], ("not a peer's run-dir",)),
    "export of nothing": (lambda p: ["export", "--output", p.output], ("give either --run-dir of a peer or --from",)),
    "export of two": (
        lambda p: ["export", "--run-dir", str(p.folder), "--from", NOBODY, "--output", p.output], ("give either --run-dir",)
    ),
    "export from nobody": (lambda p: ["export", "--from", NOBODY, "--output", f"{p.output}/x"], ("no peer answers at", NOBODY)),
    "export from nonsense": (lambda p: ["export", "--from", "x", "--output", p.output], ("not the address of a peer",)),
    "export over something": (
        lambda p: ["export", "--from", NOBODY, "--output", str(p.folder)], ("already exists; name another output",)
    ),
    "export into a file": (
        lambda p: ["export", "--from", NOBODY, "--output", f"{a_file(p)}/x"], ("is a file; choose another folder",)),
    "evaluate into a file": (lambda p: evaluate(p, "--output", f"{a_file(p)}/x"), ("is a file; choose another folder",)),
    "evaluate into no folder": (lambda p: evaluate(p, "--output", f"{p.output}/x"), ("output/x: there is no folder",)),
    "generate into no folder": (
        lambda p: ["generate", str(p.folder), "--output", f"{p.output}/x"], ("output/x: there is no folder",)),
    "evaluate into a folder": (lambda p: evaluate(p, "--output", str(p.folder)), ("--output", "is a folder; name a file")),
    "evaluate into a device": (lambda p: evaluate(p, "--output", os.devnull), ("--output", "is no regular file; name a file")),
    "me data-dir": (
        lambda p: ["me", str(p.folder), "--data-dir", str(p.folder / "none")], ("--data-dir", "none: no such folder")),
    "generate nothing": (lambda p: ["generate"], ("a checkpoint folder, --from",)),
    "generate both": (lambda p: ["generate", str(p.folder), "--from", NOBODY], ("a checkpoint folder, --from",)),
    "generate dtype": (lambda p: ["generate", str(p.folder), "--dtype", "fp16"], ("--dtype fp16: must be bf16 or fp32",)),
    "generate no tokens": (lambda p: ["generate", str(p.folder), "--max-new-tokens", "0"], ("--max-new-tokens 0: must be",)),
    "generate too hot": (lambda p: ["generate", str(p.folder), "--temperature", "-1"], ("--temperature -1.0", "from 0 to 10")),
    "generate device": (lambda p: ["generate", str(p.folder), "--device", "tpu"], ("--device tpu", "cpu or cuda")),
    "generate no checkpoint": (lambda p: ["generate", str(p.folder / "none")], ("no such checkpoint folder",)),
    "evaluate nothing": (lambda p: ["evaluate", "--tasks", "arc_easy"], ("a checkpoint folder, --from",)),
    "evaluate from nobody": (lambda p: ["evaluate", "--from", NOBODY, "--tasks", "arc_easy"], ("no peer answers at", NOBODY)),
    "watch nobody": (lambda p: ["status", NOBODY, "--watch"], ("no peer answers at", NOBODY)),
    "evaluate no model": (evaluate, ("config.json",)),
    "evaluate limit": (lambda p: evaluate(p, "--limit", "0"), ("--limit 0", "at least 1")),
    "evaluate shots": (lambda p: evaluate(p, "--tasks", "arc_easy:-1"), ("--tasks arc_easy:-1", "TASK:SHOTS")),
    "evaluate a typo": (lambda p: evaluate(p, "--tasks", "arc_esy:5"), ("unknown task 'arc_esy'", "did you mean 'arc_easy'?")),
    "evaluate dtype": (lambda p: evaluate(p, "--dtype", "fp8"), ("--dtype fp8", "bf16 or fp32")),
    "evaluate batch": (lambda p: evaluate(p, "--batch-size", "0"), ("--batch-size 0", "at least 1")),
    "evaluate batch on CPU": (lambda p: evaluate(p, "--batch-size", "auto"), ("--batch-size auto", "needs --device cuda")),
    "evaluate device": (lambda p: evaluate(p, "--device", "tpu"), ("--device tpu", "cpu or cuda")),
    "version of what": (lambda p: ["version", "1"], ("unexpected extra argument", "(1)")),
    "plan without a file": (lambda p: ["plan", "--memory", "24GiB"], ("--config",)),
    "plan no such file": (lambda p: ["plan", "--config", p.output, "--memory", "24GiB"], ("output", "give a YAML file")),
    "plan memory": (lambda p: plan(p, "lots"), ("--memory 'lots'", "24GiB")),
    "plan too little memory": (lambda p: plan(p, "1kB"), ("too small for even the shared weights", "nearest that fits")),
    "plan bandwidth": (lambda p: plan(p, "24GiB", "--bandwidth", "fast"), ("--bandwidth 'fast'", "100mbit")),
    "plan GPUs": (lambda p: plan(p, "24GiB", "--gpus", "3"), ("--gpus 3: 3 devices cannot divide", "give this many")),
    "plan speed": (lambda p: plan(p, "24GiB", "--tokens-per-second", "1e308"), ("--tokens-per-second", "less than or equal")),
    "plan line": (lambda p: plan(p, "24GiB", "--bandwidth", "56kbit"), ("--bandwidth '56kbit'", "at least 1mbit")),
    "plan peers": (lambda p: plan(p, "24GiB", "--peers", "0"), ("--peers 0",)),
    "simulate neither": (lambda p: ["simulate"], ("either --virtual or --processes",)),
    "simulate both": (lambda p: ["simulate", "--virtual", "--processes"], ("either --virtual or --processes",)),
    "simulate no scenario": (lambda p: ["simulate", p.output], ("cannot read the scenario file",)),
    "simulate misspelt": (lambda p: scenario(p, "peerz: 3\n", "--virtual"), ("line 1", "did you mean 'peers'?")),
    "simulate no YAML": (lambda p: scenario(p, "a: [\n", "--virtual"), ("not valid YAML",)),
    "simulate peers": (lambda p: ["simulate", "--virtual", "--peers", "0"], ("--peers",)),
    "simulate faults": (lambda p: ["simulate", "--virtual", "--faults", "flood"], ("--faults", "'flood'", "'kill'")),
    "simulate points": (lambda p: ["simulate", "--virtual", "--points", "noon"], ("--points", "'noon'", "announce")),
    "simulate rate": (lambda p: ["simulate", "--virtual", "--fault-rate", "2"], ("--fault-rate", "at most 1")),
    "simulate seeds": (lambda p: ["simulate", "--virtual", "--seeds", "0"], ("--seeds 0",)),
    "simulate seed": (lambda p: ["simulate", "--virtual", "--seed", "-3"], ("--seed", "greater than or equal to 0")),
    "simulate half attack": (
        lambda p: ["simulate", "--virtual", "--peers", "6", "--attackers", "3"], ("--attackers", "less than half of the 6")),
    "simulate attacks": (
        lambda p: ["simulate", "--virtual", "--attackers", "1", "--attacks", "magic"], ("--attacks", "'magic'", "'scale'")),
    "simulate no attackers": (lambda p: ["simulate", "--virtual", "--attacks", "all"], ("--attacks", "needs attackers")),
    "simulate into no folder": (
        lambda p: ["simulate", "--virtual", "--event-log", f"{p.output}/x"], ("--event-log", "output/x: there is no folder")),
    "simulate attackers log": (
        lambda p: ["simulate", "--virtual", "--attackers", "1", "--event-log", p.output], ("--event-log", "holds one run")),
    "simulate config for nobody": (
        lambda p: ["simulate", "--virtual", "--config", str(p.campaign)], ("--config", "only with attackers")),
    "simulate no such config": (
        lambda p: ["simulate", "--virtual", "--attackers", "1", "--config", str(p.folder / "no.yaml")], ("no.yaml",)),
    "simulate many logs": (
        lambda p: ["simulate", "--virtual", "--seeds", "2", "--event-log", p.output], ("--event-log", "--seeds 1")),
    "simulate processes no config": (
        lambda p: ["simulate", "--processes", "--config", str(p.folder / "no.yaml"), "--run-dir", p.output], ("no.yaml",)),
    "simulate processes sybils": (
        lambda p: ["simulate", "--processes", "--peers", "3", "--attackers", "1", "--attacks", "scale,sybils"],
        ("--attacks sybils", "--virtual")),
    "simulate processes admission": (
        lambda p: ["simulate", "--processes", "--config", str(p.campaign), "--admission", "open", "--run-dir", p.output],
        ("sets admission", "omit --admission")),
    "simulate processes audited share": (
        lambda p: ["simulate", "--processes", "--config", str(p.campaign), "--audited-share", "0.1", "--run-dir", p.output],
        ("sets sync.audited_share", "omit --audited-share")),
    "simulate processes run-dir": (
        lambda p: ["simulate", "--processes", "--config", str(p.campaign), "--run-dir", str(Path(a_file(p)).parent)],
        ("not empty",)),
    "directory nothing": (lambda p: ["directory"], ("CAMPAIGN",)),
    "directory malformed": (lambda p: ["directory", f"{NOBODY},x"], ("'x'", "/ip4/")),
    "directory of one twice": (lambda p: ["directory", NOBODY, NOBODY.replace("/ip4/", "/dns/")], ("a peer of 2 campaigns",)),
    "directory of too many": (lambda p: ["directory", *[NOBODY] * 65], ("65 campaigns: at most 64",)),
    "dashboard nothing": (lambda p: ["dashboard"], ("ADDRESS",)),
    "dashboard malformed": (lambda p: ["dashboard", "localhost"], ("'localhost'", "/ip4/")),
    "dashboard port": (lambda p: ["dashboard", NOBODY, "--port", "70000"], ("--port 70000",)),
    "dashboard host": (lambda p: ["dashboard", NOBODY, "--port", "0", "--host", "203.0.113.7"], ("203.0.113.7", "--host")),
    "swarm no file": (
        lambda p: ["swarm", "--config", str(p.folder / "no.yaml"), "--peers", "2", "--run-dir", p.output], ("no.yaml",)),
    "swarm too large": (
        lambda p: ["swarm", "--config", str(p.campaign), "--peers", "5000", "--run-dir", p.output],
        ("--peers 5000", "of memory are free", "give at most")),
    "swarm run-dir is a file": (
        lambda p: ["swarm", "--config", str(p.campaign), "--peers", "2", "--run-dir", a_file(p)], ("another --run-dir",)),
    "describe no tokenizer": (
        lambda p: ["describe", a_file(p), "--tokenizer", p.output, "--manifest", p.output], ("output", "tokenizer.json")),
    "describe another tokenizer": (
        lambda p: ["describe", a_file(p), "--tokenizer", str(p.campaign), "--manifest", p.output],
        ("not a tokenizer.json",)),
}


@pytest.mark.long
def test_every_command_is_in_the_table(place: Place) -> None:
    tried = {make(place)[0] for make, _ in BAD_COMMANDS.values()}
    assert tried >= set(typer.main.get_command(make_app()).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.network) if case.endswith("nobody") else case for case in BAD_COMMANDS]
)
def test_a_wrong_command_is_refused(case: str, place: Place) -> None:
    make, expected = BAD_COMMANDS[case]
    assert_refused(place.folder, make(place), *expected)


NEEDS_LIBRARIES = re.compile(
    r"nobody|dashboard (host|port)|metrics host elsewhere|control key|invite (to nothing|malformed)|run-dir|little memory|"
    r"plan (peers|GPUs)|init from no|export (no|over)|simulate |(me|identity) of|bootstrap identity"
)
"""Cases that are found out by asking the network, torch or hivemind."""


@pytest.mark.parametrize("devices", ["all", "1"])
def test_gpus_that_are_not_there_are_refused_before_anything_is_dialled(
    devices: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told = f"error: --devices {devices}: this machine has no GPU that torch can use; give --devices cpu or auto\n"
    assert call(*join(place, "--devices", devices)) == Ended(2, "", told)
    assert call("doctor", NOBODY, "--devices", devices) == Ended(2, "", told)


@pytest.mark.network
def test_without_a_terminal_a_progress_bar_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.ProgressBar("reading") as update:
        update(1, 4)
        monkeypatch.setattr(terminal, "SAY_EVERY_S", 0.0)
        update(2, 4)
    assert capsys.readouterr() == ("", "reading: 50 %\n")
    with terminal.ProgressBar("simulating", unit="rounds") as update:
        update(3, 4)
    assert capsys.readouterr() == ("", "simulating, 3 of 4 rounds: 75 %\n")


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_the_version_is_printed(asked: str) -> None:
    assert call(asked) == Ended(0, f"{__version__}\n", "")


def test_a_typing_error_does_not_wait_for_torch(place: Place) -> None:
    quick = [make(place) for case, (make, _) in BAD_COMMANDS.items() if not NEEDS_LIBRARIES.search(case)]
    assert len(quick) > 20
    program = (
        "import contextlib, json, sys\n"
        "from spes_p2p.cli import main\n"
        "for arguments in json.load(sys.stdin):\n"
        "    sys.argv = ['spes-p2p', *arguments]\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    assert not {'torch', 'hivemind.p2p', 'transformers'} & set(sys.modules), arguments\n"
    )
    ended = in_a_process("-c", program, cwd=place.folder, stdin=json.dumps(quick))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("error: ") == len(quick)


@pytest.mark.network
def test_the_virtual_simulator_does_not_wait_for_torch() -> None:
    program = (
        "import sys, spes_p2p.testing.simulate.command, spes_p2p.testing.simulate.virtual\n"
        "print(*{'torch', 'hivemind.p2p', 'transformers'} & set(sys.modules))"
    )
    ended = in_a_process("-c", program)
    assert (ended.returncode, ended.stdout) == (0, "\n"), ended


@pytest.mark.parametrize(
    ("case", "levels"), [(["join", NOBODY], ["info", "error"]), (["join", NOBODY, "--device", "abacus"], ["error"])]
)
def test_with_log_json_every_line_is_json(case: list[str], levels: list[str], tmp_path: Path) -> None:
    ended = call(*case, "--log-json", "--run-dir", str(tmp_path / "peer"))
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["level"] for line in lines] == levels
    assert (ended.stdout, "stderr" in call("join", "--help").stdout) == ("", True)
    assert all(line["message"] for line in lines)


@pytest.mark.network
def test_with_log_json_what_a_peer_prints_is_json_too(campaign: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path) as peers:
        bootstrap = peers.bootstrap(campaign, LOOPBACK, "--log-json")
        joiner = peers.join("joiner", bootstrap.address, "--log-json")
        peers.wait(lambda: "joined campaign" in joiner.log, 60.0, "it joins")
        for line in (bootstrap.log + joiner.log).splitlines():
            assert {"time", "level", "message"} <= json.loads(line).keys()


def test_what_is_nobodys_mistake_ends_with_a_code_by_which_a_supervisor_starts_again(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    def broken(*arguments: object) -> None:
        raise Broken("the libp2p daemon (p2pd) ended; start this peer again on its run-dir")

    monkeypatch.setattr("spes_p2p.session.run.run_bootstrap", broken)
    assert (call(*bootstrap(place)).code, call(*bootstrap(place, "--listen", "x")).code) == (1, 2)


@pytest.mark.parametrize("option", ["--listen", "--metrics-port"])
@pytest.mark.parametrize("command", [bootstrap, join])
def test_a_port_in_use_is_refused(option: str, command: Callable[..., list[str]], place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = f"/ip4/127.0.0.1/tcp/{port}" if option == "--listen" else str(port)
        assert_refused(place.folder, command(place, option, value), str(port), "choose another")


def test_the_dashboards_port_in_use_is_refused(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(place.folder, ["dashboard", NOBODY, "--port", port], port, "in use", "another --port")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a libp2p peer that is in a DHT, but in no campaign."""
    folder = tmp_path_factory.mktemp("foreign")
    program = [sys.executable, str(ROOT / "tests/libp2p_peer.py"), str(folder / "identity.key")]
    with subprocess.Popen(program, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        yield peer.stdout.readline().split()[1]
        peer.terminate()


@pytest.mark.network
@pytest.mark.parametrize("command", [status, doctor, second, control])
def test_a_foreign_address_is_refused(command: Callable[..., list[str]], foreign: str, place: Place) -> None:
    """By `join` after two minutes, in which a bootstrap peer may begin to serve its campaign (`test_upgrade.py`)."""
    elsewhere = replace(place, address=foreign)
    assert_refused(place.folder, command(elsewhere), "ask the campaign's owner")


# Commands that meet a swarm ---------------------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.parametrize("command", ["bootstrap", "join"])
def test_a_run_dir_of_another_campaign_is_refused(command: str, other_run_dir: Path, swarm_place: Place) -> None:
    run_dir = swarm_place.folder / "output"
    shutil.copytree(other_run_dir, run_dir)
    arguments = bootstrap(swarm_place, "--listen", LOOPBACK) if command == "bootstrap" else join(swarm_place)
    assert_refused(swarm_place.folder, arguments, f"{run_dir}: belongs to campaign test", "not to test", "--run-dir")


def cut_short(data: Path) -> None:
    (data / TOKENS).write_bytes((data / TOKENS).read_bytes()[:-2])


def half_an_id_more(data: Path) -> None:
    (data / TOKENS).write_bytes((data / TOKENS).read_bytes() + b"\0")


def other_dtype(data: Path) -> None:
    np.fromfile(data / TOKENS, np.uint16).astype(np.uint32).tofile(data / TOKENS)


def ids_beyond(data: Path) -> None:
    tokens = np.fromfile(data / TOKENS, np.uint16)
    tokens[7] = 512
    tokens.tofile(data / TOKENS)


def other_text(data: Path) -> None:
    np.fromfile(data / TOKENS, np.uint16)[::-1].copy().tofile(data / TOKENS)


BAD_TOKENS: list[tuple[Callable[[Path], None], str]] = [
    (cut_short, "truncated"),
    (half_an_id_more, "not a whole number of uint16 ids"),
    (other_dtype, "uint16 ids, the manifest says"),
    (ids_beyond, "has id 512, the vocabulary ends at 511"),
    (other_text, "differs from the campaign's token file"),
]


@pytest.mark.network
@pytest.mark.parametrize(("spoil", "expected"), BAD_TOKENS)
def test_wrong_token_files_are_refused(spoil: Callable[[Path], None], expected: str, swarm_place: Place) -> None:
    data = swarm_place.folder / "data"
    shutil.copytree(swarm_place.campaign.parent, data)
    spoil(data)
    assert_refused(swarm_place.folder, join(swarm_place, "--data-dir", str(data)), TOKENS, expected)


@pytest.mark.network
def test_more_experts_than_the_model_has_are_refused(swarm_place: Place) -> None:
    assert_refused(swarm_place.folder, join(swarm_place, "--experts", "5"), "--experts 5", "4 experts")


@pytest.mark.network
def test_an_identity_in_use_is_refused(swarm_place: Place, running: LocalPeers) -> None:
    key = running["bootstrap"].run_dir / "identity.key"
    assert_refused(swarm_place.folder, join(swarm_place, "--identity", str(key)), str(key), "uses this identity")


@pytest.mark.network
def test_only_the_owner_gives_orders_and_only_possible_ones(swarm_place: Place, running: LocalPeers) -> None:
    bootstrap = running["bootstrap"]
    assert_refused(swarm_place.folder, control(swarm_place), "somebody.key", f"is {bootstrap.peer_id}")
    owner = str(bootstrap.run_dir / "identity.key")
    for order, expected in {
        "resume": "the campaign is not paused",
        "rollback 7": "no answering peer archives the base of that round; archived rounds: none",
        "schedule 0 learning_rate=1": "has started; give round 1 or later",
        "schedule 9 sync_step=1": "training.sync_step cannot be changed",
        "schedule 9 learning_rate=0": "schedule 9: training.learning_rate = 0: must be greater than 0",
    }.items():
        for target in (swarm_place.address, str(bootstrap.run_dir)):
            assert_refused(swarm_place.folder, ["control", target, "--key", owner, *order.split()], expected)
    assert_refused(swarm_place.folder, ["audit", str(bootstrap.run_dir), SOMEBODY], "campaign test has no audits")


@pytest.mark.network
def test_a_damaged_run_dir_is_refused(swarm_place: Place, running: LocalPeers) -> None:
    run_dir, output = swarm_place.folder / "run", swarm_place.folder / "exported"
    shutil.copytree(running["bootstrap"].run_dir, run_dir)
    whole = (run_dir / "base").read_bytes()
    damaged = bytes([*whole[:-1], whole[-1] ^ 1])
    for content in (whole[:-100], whole[:50], whole[:5], b"", damaged):
        (run_dir / "base").write_bytes(content)
        arguments = ["export", "--run-dir", str(run_dir), "--output", str(output)]
        assert_refused(swarm_place.folder, arguments, str(run_dir / "base"), "cut short or damaged; start its peer again")
    (run_dir / "base").unlink()
    assert_refused(swarm_place.folder, ["export", "--run-dir", str(run_dir), "--output", str(output)], "contains no base yet")
    (run_dir / "genesis").unlink()
    arguments = ["export", "--run-dir", str(run_dir), "--output", str(output)]
    assert_refused(swarm_place.folder, arguments, "genesis: missing; copy it from another peer's run-dir, or join")


@pytest.mark.network
def test_an_untrained_base_is_not_exported(swarm_place: Place, running: LocalPeers) -> None:
    run_dir = str(running["bootstrap"].run_dir)
    arguments = ["export", "--run-dir", run_dir, "--output", str(swarm_place.folder / "exported")]
    assert_refused(swarm_place.folder, arguments, run_dir, "holds only the untrained base 0", "give another --run-dir")


@pytest.mark.network
def test_a_swarm_without_a_trained_base_exports_nothing(swarm_place: Place, running: LocalPeers) -> None:
    address = running["bootstrap"].address
    arguments = ["export", "--from", address, "--output", str(swarm_place.folder / "exported")]
    assert_refused(swarm_place.folder, arguments, address, "no peer serves a trained base")


@pytest.mark.network
@pytest.mark.parametrize(("version", "told", "advice"), [
    (PROTOCOL_VERSION - 1, f"protocol {PROTOCOL_VERSION - 1} is too old for this swarm", "git pull && pip install"),
    (99, f"speaks protocol {PROTOCOL_VERSION}, this program 99", f"git checkout v{__version__} && pip install"),
])  # fmt: skip
def test_a_volunteer_with_another_version_is_told_what_to_type(
    swarm_place: Place, running: LocalPeers, version: int, told: str, advice: str
) -> None:
    program = (
        f"import spes_p2p.messages.methods as m; m.PROTOCOL_VERSION = m.OLDEST_PROTOCOL = {version}; "
        "from spes_p2p.cli import main; main()"
    )
    ended = in_a_process("-c", program, *join(swarm_place))
    assert ended.returncode == 2, ended
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert "type in your clone: git" in last
    assert advice in last
    if version < PROTOCOL_VERSION:
        assert told in running["bootstrap"].log
    assert contents(swarm_place.folder) == {}


@pytest.mark.network
def test_one_line_says_what_is_wrong(swarm_place: Place) -> None:
    ended = in_a_process("-m", "spes_p2p", *join(swarm_place, "--experts", "5"))
    assert (ended.returncode, ended.stdout) == (2, "")
    shown = [line for line in ended.stderr.splitlines() if "torchao" not in line and "pytree" not in line]
    assert shown[-1] == "error: --experts 5: the campaign's model has 4 experts; give at most that, or auto"
    assert [" ".join(line.split()[1:3]) for line in shown[:-1]] == ["looking for", "found campaign"]


@pytest.mark.network
def test_status_of_a_swarm_without_trainers(running: LocalPeers) -> None:
    ended = call("status", running["bootstrap"].address, "--json")
    assert ended.code == 0, ended.stderr
    status = json.loads(ended.stdout)
    assert [peer["role"] for peer in status["peers"]] == ["helper"]


def test_a_terminal_of_another_encoding_gets_a_question_mark_for_what_it_lacks() -> None:
    script = "import spes_p2p.cli as cli, spes_p2p.__main__ as top; cli.main = lambda: print('round 1 · loss'); top.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "round 1 ? loss\n", ended.stderr
