"""`spes-p2p init`: what it writes is a campaign that a bootstrap peer takes, at every size."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from network_swarm import LOOPBACK, LocalPeers, call
from sample_text import CONFIGS, TEXT

from spes_p2p.campaign import init
from spes_p2p.campaign.answers import OUTER_FROM_STEPS, SIZES, Answers, TextSource, make_schedule
from spes_p2p.campaign.campaign_yaml import campaign_yaml
from spes_p2p.campaign.init import ask, make_campaign
from spes_p2p.campaign.lines import Pace
from spes_p2p.campaign.plan_table import describe_size
from spes_p2p.campaign.start import Start
from spes_p2p.config.campaign import CodecConfig, parse_campaign_config
from spes_p2p.config.quantities import parse_bits_per_second
from spes_p2p.data.manifest import read_manifest
from spes_p2p.errors import UserError
from spes_p2p.storage.files import alone_in

WORDNET = str(TEXT / "train/wordnet.jsonl")
HELD_OUT = str(TEXT / "held_out/wordnet.jsonl")
TOKENIZER = str(CONFIGS / "demo_text/tokenizer_512.json")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("tokens", "peers", "epochs"), [(1, 1, 1.0), (10**6, 4, 0.5), (10**12, 64, 3.0)])
def test_every_size_is_a_campaign_with_any_text_and_any_number_of_peers(
    size: str, tokens: int, peers: int, epochs: float
) -> None:
    answers = Answers(Path("c"), "c", size, (), (), 8192, peers, epochs)
    config = parse_campaign_config(yaml.safe_load(campaign_yaml(answers, 8192, tokens)), "c")
    assert config.sync.min_peers == peers
    assert describe_size(config).startswith("olmoe")


def test_one_peer_is_no_plural() -> None:
    answers = Answers(Path("c"), "c", "tiny", (), (), 8192, 1, 1.0)
    assert "# 1 pass over 100000000 tokens with 1 peer; at least" in campaign_yaml(answers, 8192, 10**8)
    answers = Answers(Path("c"), "c", "tiny", (), (), 8192, 2, 2.0)
    assert "# 2 passes over 100000000 tokens with 2 peers; at least" in campaign_yaml(answers, 8192, 10**8)


def test_so_many_steps_are_planned_as_train_the_text_as_often_as_asked_for() -> None:
    size = SIZES["small"]
    steps = make_schedule(size, 10**9, peers=8, epochs=2.0).total_steps
    trained = steps * 8 * size.batch_size * size.sequence_length
    assert trained == pytest.approx(2e9, rel=0.01)
    assert steps % size.sync_steps == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "my-campaign"
    ended = call("init", str(folder), "--text", WORDNET, "--held-out", HELD_OUT, "--tokenizer", "512", "--peers", "2")
    assert ended.code == 0, ended.stderr
    path, bootstrap = ended.stdout.splitlines()
    assert path.startswith(f"{folder / 'campaign.yaml'}: olmoe, 4 layers, 8 experts, ")
    assert bootstrap.startswith(f"spes-p2p bootstrap --config {folder / 'campaign.yaml'} --listen ")
    return folder


@pytest.mark.network
def test_a_bootstrap_peer_takes_the_campaign(made: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path) as peers:
        assert peers.bootstrap(made / "campaign.yaml", LOOPBACK).address


def test_every_line_but_names_and_numbers_is_commented(made: Path) -> None:
    text = (made / "campaign.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "my-campaign"
    assert text.count("#") > 12
    assert max(map(len, text.splitlines())) <= 128


@pytest.mark.parametrize(("tokenizer", "first"), [("512", "training the tokenizer"), (TOKENIZER, "tokenizing")])
def test_the_bar_says_that_a_tokenizer_is_trained_before_there_is_a_percentage(
    tokenizer: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):  # a terminal for rich
        monkeypatch.setenv(name, value)
    ended = call("init", str(tmp_path / "c"), "--text", WORDNET, "--tokenizer", tokenizer, "--size", "tiny")
    assert ended.code == 0, ended.stderr
    frames = [frame for frame in re.split(r"[\r\n]", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", ended.stderr)) if frame.strip()]
    assert frames[0].startswith(first)
    assert "%" not in frames[0]
    assert frames[-1].startswith("tokenizing ")
    assert "100 %" in frames[-1]


def test_an_earlier_campaign_is_not_overwritten(made: Path) -> None:
    before = (made / "campaign.yaml").read_bytes()
    ended = call("init", str(made), "--text", WORDNET)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert "campaign.yaml: exists already; choose another folder" in ended.stderr
    assert (made / "campaign.yaml").read_bytes() == before


def test_a_person_is_asked_until_the_answer_can_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["", "nowhere.txt", WORDNET, "four", "0", "", "6"])
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    assert ask("text", True) == (Path(WORDNET),)
    assert ask("peers", True) == 4
    assert ask("peers", True) == 6
    assert questions[-1] == "Expected number of trainers [4]: "
    why = ["nowhere.txt: no such file", "--peers four: not a number", "--peers 0: a campaign needs at least one"]
    assert [line[: len(start)] for line, start in zip(capsys.readouterr().out.splitlines(), why, strict=True)] == why


def test_who_names_the_text_is_asked_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked: {question}"))
    friends = call("init", str(tmp_path / "c"), "--text", WORDNET, "--tokenizer", TOKENIZER)
    assert friends.code == 0
    assert "elector" not in friends.stdout
    strangers = call("init", str(tmp_path / "d"), "--text", WORDNET, "--tokenizer", TOKENIZER, "--admission", "open")
    assert "invite it as an elector (docs/admission.md)" in strangers.stdout


def test_a_text_that_the_shortest_schedule_repeats_often_is_worth_a_warning(tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(Path(WORDNET).read_text().splitlines(True)[:20]))
    warned = call("init", str(tmp_path / "a"), "--text", str(short), "--tokenizer", TOKENIZER, "--peers", "2")
    assert "warning: --text: the schedule of 10 rounds passes over it " in warned.stderr
    usual = call("init", str(tmp_path / "b"), "--text", WORDNET, "--tokenizer", TOKENIZER, "--peers", "2")
    assert (usual.code, usual.stderr) == (0, "")


def test_held_out_documents_that_are_trained_on_are_counted_and_refused_if_there_are_no_others(tmp_path: Path) -> None:
    trained, others = Path(WORDNET).read_text().splitlines(True)[:3], Path(HELD_OUT).read_text().splitlines(True)
    some, only = tmp_path / "some.jsonl", tmp_path / "only.jsonl"
    some.write_text("".join([*others, *trained[:2]]))
    only.write_text("".join(trained))
    warned = call("init", str(tmp_path / "a"), "--text", WORDNET, "--held-out", str(some), "--tokenizer", TOKENIZER)
    assert warned.code == 0
    assert f"warning: --held-out: 2 of {len(others) + 2} documents are training text too, one in {some}" in warned.stderr
    refused = call("init", str(tmp_path / "b"), "--text", f"w:1={WORDNET}", "--held-out", str(only), "--tokenizer", TOKENIZER)
    assert refused.code == 2
    assert "error: --held-out: every document of it is training text too; name text" in refused.stderr
    assert not (tmp_path / "b").exists()
    clean = call("init", str(tmp_path / "c"), "--text", WORDNET, "--held-out", HELD_OUT, "--tokenizer", TOKENIZER)
    assert (clean.code, clean.stderr) == (0, "")


def test_a_disk_that_is_full_once_the_tokenizer_is_trained_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == "tokenizer.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(content)

    monkeypatch.setattr(init, "write_whole", full)
    with pytest.raises(UserError, match=r"/c: cannot be written \(No space left on device\); choose another folder$"):
        make_campaign(Answers(tmp_path / "c", "c", "tiny", (Path(WORDNET),), (), 300, 2, 1.0))
    assert not (tmp_path / "c").exists()


def test_ctrl_c_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*inputs: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(init, "tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_campaign(Answers(tmp_path / "c", "c", "tiny", (Path(WORDNET),), (), Path(TOKENIZER), 2, 1.0))
    assert not (tmp_path / "c").exists()


def test_a_second_init_in_a_folder_leaves_it_to_the_first(tmp_path: Path) -> None:
    answers = Answers(tmp_path, "c", "tiny", (Path(WORDNET),), (), Path(TOKENIZER), 2, 1.0)
    with alone_in(tmp_path, ""), pytest.raises(UserError, match="another command works in this folder; wait for it, or choose"):
        make_campaign(answers)
    assert not any(tmp_path.iterdir())


def test_a_name_that_looks_like_a_number_or_a_date_is_a_name(tmp_path: Path) -> None:
    for name in ("2024", "2024-01-01", "1e3", "null"):
        made = make_campaign(Answers(
            tmp_path / name, name, "tiny", (Path(WORDNET),), (), Path(TOKENIZER), 2, 1.0,
            sources=(TextSource(name, 1.0, (Path(WORDNET),)),),
        ))
        assert made.campaign.config.name == made.campaign.config.data.train[0].name == name


def test_files_that_a_shell_lists_after_an_option_need_the_option_again(tmp_path: Path) -> None:
    ended = call("init", str(tmp_path / "c"), "--text", WORDNET, HELD_OUT, "--tokenizer", TOKENIZER)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert f"({HELD_OUT}); give an option again for each further value; see spes-p2p init --help" in ended.stderr


def test_the_manifests_say_where_the_token_files_will_be_published(tmp_path: Path) -> None:
    folder, there = tmp_path / "c", "https://example.org/tokens"
    ended = call("init", str(folder), "--text", WORDNET, "--held-out", HELD_OUT, "--tokenizer", TOKENIZER, "--url", there)
    assert ended.code == 0, ended.stderr
    config = yaml.safe_load((folder / "campaign.yaml").read_text())
    manifests = [read_manifest(folder / config["data"][name]) for name in ("manifest", "validation_manifest")]
    files = [file for manifest in manifests for file in manifest.files]
    assert [file.url for file in files] == [f"{there}/train_000_000000.npy", f"{there}/held_out_000_000000.npy"]
    assert f"publish this folder at {there}" in (folder / "campaign.yaml").read_text()
    assert all((folder / "tokens" / f"{file.path}.hashes").is_file() for file in files)


@pytest.mark.parametrize(("size", "steps", "momentum", "offers"), [
    ("small", 29, 0.0, False), ("small", 30, 0.5, True), ("medium", 50, 0.5, True),
    ("1b", 29, 0.0, False), ("1b", 30, 0.0, True),
])
def test_long_phases_from_random_weights_have_outer_momentum_where_it_was_measured(
    size: str, steps: int, momentum: float, offers: bool
) -> None:
    """`1b` has SPES's beta2, beside which it was not: the file offers it as a comment."""
    pace = Pace(1e8, CodecConfig(), steps, 0, 0, 0.0, 0.0, 2, 0, 0.0)
    answers = Answers(Path("c"), "c", size, (), (), 8192, 2, 1.0, pace=pace)
    text = campaign_yaml(answers, 8192, 10**9)
    outer = parse_campaign_config(yaml.safe_load(text), "c").outer
    assert (outer.shared_learning_rate, outer.shared_momentum) == (0.9 if momentum else 1, momentum)
    assert outer.experts_momentum == 0
    assert ("outer: {shared_learning_rate" in text) == offers


@pytest.mark.parametrize(("size", "optimizer"), [("tiny", "muon"), ("small", "muon"), ("medium", "adamw"), ("1b", "adamw")])
def test_small_models_from_random_weights_have_muon_and_large_ones_an_optimizer_that_may_have_8_bits(
    size: str, optimizer: str
) -> None:
    text = campaign_yaml(Answers(Path("c"), "c", size, (), (), 8192, 2, 1.0), 8192, 10**9)
    assert parse_campaign_config(yaml.safe_load(text), "c").training.optimizer == optimizer


def test_existing_weights_have_no_outer_momentum() -> None:
    answers = Answers(Path("c"), "c", "medium", (), (), 8192, 2, 1.0)
    model = parse_campaign_config(yaml.safe_load(campaign_yaml(answers, 8192, 10**9)), "c").model
    text = campaign_yaml(replace(answers, start=Start("checkpoint", model, b"", Path(), "<end>", None)), 8192, 10**9)
    assert yaml.safe_load(text)["training"]["sync_steps"] >= OUTER_FROM_STEPS
    assert "shared_momentum" not in text


@pytest.mark.parametrize(("line", "steps", "experts"), [("10gbit", 5, "int4"), ("1mbit", 20, "sparse")])
def test_a_line_decides_phase_and_codecs(tmp_path: Path, line: str, steps: int, experts: str) -> None:
    bits = parse_bits_per_second(line, "")
    answers = Answers(tmp_path / "c", "c", "small", (Path(WORDNET),), (), Path(TOKENIZER), 2, epochs=2000.0, line=bits)
    config = make_campaign(answers).campaign.config
    assert config.training.sync_steps >= steps
    assert config.sync.codec.experts == experts
    assert config.total_rounds >= 10
