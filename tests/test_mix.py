"""A mix of sources: exact shares, every sample once per epoch of its source, and campaigns of one source as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from network_swarm import LOOPBACK, LocalPeers, call
from sample_text import CONFIGS, TEXT, write_test_campaign

from spes_p2p.campaign.files import read_campaign, sha256
from spes_p2p.data.manifest import Manifest, read_manifest
from spes_p2p.data.mix import Interleave, MixedReader, whole_weights
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.slices import give_back, take
from spes_p2p.data.tokenizing import tokenize
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Cursor, Interval

LENGTH = 4
TOKENIZER = str(CONFIGS / "demo_text/tokenizer_512.json")


def source(number: int, samples: int) -> SampleReader:
    """Samples that begin with 1000 * number + their index."""
    ids = np.repeat(1000 * number + np.arange(samples, dtype=np.uint32), LENGTH)
    return SampleReader([ids], LENGTH, seed=number, piece_samples=2)


def mix(weights: list[int], samples: list[int]) -> MixedReader:
    return MixedReader([source(number, count) for number, count in enumerate(samples)], weights)


def first_ids(reader: MixedReader, *intervals: Interval) -> list[int]:
    return [int(sample[0]) for interval in intervals for sample in reader.read(interval)]


weights_of_sources = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(weights=weights_of_sources, start=st.integers(0, 10**12), length=st.integers(0, 300))
def test_every_prefix_has_each_share_within_one_sample_and_every_window_within_two(
    weights: list[int], start: int, length: int
) -> None:
    total, schedule = sum(weights), Interleave(weights)
    sources, numbers = schedule.places(start + np.arange(length + 1))
    for number, weight in enumerate(weights):
        mine = np.flatnonzero(sources == number)
        # The first sample's number is how many came before it.
        assert all(abs(numbers[place] - (start + place) * weight / total) < 1 for place in mine)
        bound = 1 if len(weights) <= 2 else 2
        assert abs(np.count_nonzero(sources[:length] == number) - length * weight / total) < bound
        assert np.array_equal(np.diff(numbers[mine]), np.ones(max(0, len(mine) - 1)))


@given(weights=weights_of_sources)
def test_a_period_has_each_source_as_often_as_its_weight_says(weights: list[int]) -> None:
    sources, _ = Interleave(weights).places(np.arange(sum(weights)))
    assert np.bincount(sources, minlength=len(weights)).tolist() == weights


@pytest.mark.parametrize(("written", "whole"), [
    ([0.5, 0.5], (1, 1)), ([0.7, 0.2, 0.1], (7, 2, 1)), ([67.45, 32.55], (1349, 651)), ([3, 1.5], (2, 1)),
    ([1e-3, 1], (1, 1000)),
])
def test_weights_become_the_smallest_whole_numbers_in_their_ratio(written: list[float], whole: tuple[int, ...]) -> None:
    assert whole_weights(written) == whole


def test_weights_with_too_many_digits_are_refused() -> None:
    with pytest.raises(UserError, match="write them with fewer digits"):
        whole_weights([0.123456789, 0.876543211])


@given(weights=st.tuples(st.integers(1, 9), st.integers(1, 9)), samples=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_a_source_is_read_once_before_it_starts_over_in_another_order(
    weights: tuple[int, int], samples: tuple[int, int]
) -> None:
    reader = mix(list(weights), list(samples))
    read = first_ids(reader, *(Interval(epoch, 0, reader.num_samples) for epoch in range(3)))
    for number, count in enumerate(samples):
        mine = [value - 1000 * number for value in read if value // 1000 == number]
        for start in range(0, len(mine) - count + 1, count):
            assert sorted(mine[start : start + count]) == list(range(count))


def test_a_source_that_starts_over_has_another_order_and_the_other_sources_go_on() -> None:
    reader = mix([1, 1], [20, 60])
    read = first_ids(reader, Interval(0, 0, 80))
    small, large = ([value for value in read if value // 1000 == number] for number in (0, 1))
    assert sorted(small[:20]) == sorted(small[20:])
    assert small[:20] != small[20:]
    assert len(set(large)) == 40


@given(counts=st.lists(st.integers(0, 15), max_size=12))
def test_peers_get_disjoint_samples_and_a_resumed_cursor_the_ones_that_are_left(counts: list[int]) -> None:
    reader, cursor = mix([3, 1], [30, 20]), Cursor()
    straight, _ = take(cursor, sum(counts), reader.num_samples)
    expected, read = first_ids(reader, *straight), list[int]()
    for count in counts:
        slices, cursor = take(cursor, count, reader.num_samples)
        half = slices[: len(slices) // 2]
        cursor = give_back(cursor, half)
        again, cursor = take(cursor, sum(map(len, half)), reader.num_samples)
        read += first_ids(reader, *again, *slices[len(half) :])
    assert sorted(read) == sorted(expected)


def test_positions_outside_an_epoch_are_refused() -> None:
    reader = mix([1, 1], [3, 2])
    with pytest.raises(IndexError, match=r"samples \[4, 6\) of 5"):
        reader.read(Interval(0, 4, 6))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign with two sources that `init` made."""
    folder = tmp_path_factory.mktemp("mix") / "mixed"
    wordnet, python = (TEXT / f"train/{name}.jsonl" for name in ("wordnet", "python_docs"))
    ended = call("init", str(folder), "--text", f"words:0.75={wordnet}", "--text", f"code:0.25={python}",
                 "--tokenizer", TOKENIZER, "--peers", "2")
    assert ended.code == 0, ended.stderr
    return folder


def test_init_writes_the_sources_and_the_published_manifest_has_them(made: Path) -> None:
    train = yaml.safe_load((made / "campaign.yaml").read_text())["data"]["train"]
    assert [(source["name"], source["weight"]) for source in train] == [("words", 0.75), ("code", 0.25)]
    files = read_campaign(made / "campaign.yaml")
    published = files.training_manifest
    assert [(source.name, source.weight) for source in published.sources] == [("words", 3), ("code", 1)]
    parts = [read_manifest(made / source["manifest"]) for source in train]
    assert published.files == (*parts[0].files, *parts[1].files)
    assert published.tokens == sum(part.tokens for part in parts)
    assert files.campaign.manifest_sha256 == sha256(published.to_json().encode())
    assert read_campaign(made / "campaign.yaml").training_manifest == published


def test_other_weights_are_another_campaign(made: Path) -> None:
    path = made / "other.yaml"
    path.write_text((made / "campaign.yaml").read_text().replace("weight: 0.75", "weight: 0.5"))
    assert read_campaign(path).campaign.hash != read_campaign(made / "campaign.yaml").campaign.hash


def test_a_manifest_of_one_source_has_the_bytes_it_had(tmp_path: Path) -> None:
    files = read_campaign(write_test_campaign(tmp_path))
    assert "sources" not in json.loads(files.manifest)
    assert files.training_manifest.to_json().encode() == files.manifest
    assert b'"train"' not in files.campaign.canonical_json()


@pytest.mark.parametrize(("data", "message"), [
    ({}, "must name the training manifest, unless train lists sources"),
    ({"manifest": "m", "train": [{"name": "a", "weight": 1, "manifest": "m"}]}, "stands beside train; keep one of them"),
    ({"train": [{"name": "a", "weight": 0, "manifest": "m"}]}, "must be greater than 0"),
    ({"train": [{"name": "a", "weight": 1, "manifest": "m"}] * 2}, "must name each source differently"),
    ({"train": [{"name": "a b", "weight": 1, "manifest": "m"}]}, "must be 1 to 32 letters"),
])
def test_a_mix_that_cannot_be_meant_costs_one_line(data: dict[str, Any], message: str, made: Path) -> None:
    raw = yaml.safe_load((made / "campaign.yaml").read_text())
    path = made / "wrong.yaml"
    path.write_text(yaml.safe_dump({**raw, "data": {"tokenizer": "tokenizer.json", **data}}))
    with pytest.raises(UserError) as caught:
        read_campaign(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_source_twice_is_refused(made: Path) -> None:
    raw = yaml.safe_load((made / "campaign.yaml").read_text())
    raw["data"]["train"][1]["manifest"] = raw["data"]["train"][0]["manifest"]
    path = made / "twice.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match="name them apart with `spes-p2p tokenize --prefix`"):
        read_campaign(path)


@pytest.mark.parametrize(("texts", "message"), [
    (("a:0.5=X", "Y"), "either all files have a name and a weight"),
    (("a:0.5=X", "a:0.6=Y"), "a has weight 0.5 before; give all its files the same"),
    (("a:0=Y",), "must be greater than 0"),
    (("a:1=X",), "X: no such file"),
])
def test_texts_that_make_no_mix_leave_no_folder(texts: tuple[str, ...], message: str, tmp_path: Path) -> None:
    places = {"X": str(tmp_path / "X.txt"), "Y": str(TEXT / "train/wordnet.jsonl")}
    options = [part for text in texts for part in ("--text", text.replace("X", places["X"]).replace("Y", places["Y"]))]
    ended = call("init", str(tmp_path / "new"), *options, "--tokenizer", TOKENIZER, "--peers", "2", "--size", "tiny",
                 "--epochs", "1", "--held-out", places["Y"])
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert message.replace("X", places["X"]) in ended.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("change", "message"), [
    ({"files": 5}, "do not have as many files"), ({"weight": 10**6}, "exceed 20000 together"),
])
def test_a_published_mix_that_contradicts_itself_is_refused(change: dict[str, Any], message: str, made: Path) -> None:
    content = json.loads(read_campaign(made / "campaign.yaml").manifest)
    content["sources"][0] |= change
    with pytest.raises(UserError, match=message):
        Manifest.from_json(json.dumps(content), "manifest.json")


@pytest.mark.network
def test_peers_without_the_text_train_on_a_mix_and_agree(tmp_path: Path) -> None:
    config = write_test_campaign(tmp_path)
    raw = yaml.safe_load(config.read_text())
    tokenize([TEXT / "train/python_docs.jsonl"], tmp_path / "tokenizer.json", tmp_path, prefix="code_")
    del raw["data"]["manifest"]
    raw["data"]["train"] = [
        {"name": "words", "weight": 0.7, "manifest": "train_manifest.json"},
        {"name": "code", "weight": 0.3, "manifest": "code_manifest.json"},
    ]
    config.write_text(yaml.safe_dump(raw))
    (tmp_path / "peers").mkdir()
    with LocalPeers(tmp_path / "peers") as swarm:
        address = swarm.bootstrap(config, LOOPBACK).address
        swarm.data_dir = None
        names = ("peer-0", "peer-1")
        for name in names:
            swarm.join(name, address)
        swarm.wait(lambda: not swarm.trainers, 180, "the campaign completes")
        assert [swarm[name].process.returncode for name in names] == [0, 0]
        assert {number: found for number, found in swarm.digests().items() if len(found) > 1} == {}
        losses = swarm.held_out_losses()
        assert losses[-1] < losses[0] - 1.0
        sources = {file.pieces_sha256 for file in read_campaign(config).training_manifest.files}
        cached = {path.stem for path in (swarm["peer-0"].run_dir / "tokens").glob("*.tokens")}
        assert sources <= cached
