"""The text that the project carries: small, licensed, of several domains, with nothing held out that is trained on."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from sample_text import CONFIGS, TEXT, write_test_campaign

from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.data.local_files import open_corpus
from spes_p2p.data.manifest import check_vocabulary, read_manifest
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.tokenizers import check_tokenizer, train_tokenizer
from spes_p2p.errors import UserError

DOMAINS = {"speeches.jsonl", "wordnet.jsonl", "python_docs.jsonl"}


def documents(part: str) -> list[str]:
    paths = sorted((TEXT / part).glob("*.jsonl"))
    assert {path.name for path in paths} == DOMAINS
    return [json.loads(line)["text"] for path in paths for line in path.read_text("utf-8").split("\n") if line]


def test_it_is_small_and_nothing_held_out_is_trained_on() -> None:
    train, held_out = documents("train"), documents("held_out")
    assert 1e6 < sum(map(len, train + held_out)) < 3e6
    assert set(train).isdisjoint(held_out)
    licences = (TEXT / "LICENSES" / "README.md").read_text("utf-8")
    assert all(f"`*/{name}`" in licences for name in DOMAINS)


@pytest.mark.parametrize("config", ["demo.yaml", "test.yaml"])
def test_its_tokenizers_fit_the_campaigns(config: str) -> None:
    campaign = load_campaign_config(CONFIGS / config)
    identity = check_tokenizer(CONFIGS / campaign.data.tokenizer, campaign.data.eos_token, campaign.model.vocab_size)
    assert identity.vocab_size == campaign.model.vocab_size


def test_a_test_campaign_can_start(tmp_path: Path) -> None:
    path = write_test_campaign(tmp_path)
    config = load_campaign_config(path)
    tokenizer = check_tokenizer(tmp_path / config.data.tokenizer, config.data.eos_token, config.model.vocab_size)
    for name in (config.data.manifest, config.data.validation_manifest):
        manifest = read_manifest(tmp_path / str(name))
        check_vocabulary(manifest, tokenizer.sha256, config.model.vocab_size, str(name))
        corpus = open_corpus(manifest, [tmp_path])
        reader = SampleReader(corpus, config.training.sequence_length, config.training.seed)
        assert reader.num_samples >= config.evaluation.max_samples


def test_the_tokenizer_is_trained_the_same_every_time() -> None:
    train = documents("train")[:20]
    assert train_tokenizer(train, 400).to_str() == train_tokenizer(train, 400).to_str()


@pytest.fixture(scope="module")
def corpus_tool() -> dict[str, Any]:
    return runpy.run_path(str(CONFIGS.parent / "tools" / "corpus"))


@pytest.mark.parametrize(("synset", "line"), [
    ("00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | what exists; \"a | b\"  ", 'entity (noun): what exists; "a | b"'),
    ("00002137 31 v 02 master 0 get_the_hang(p) 0 001 * 00606093 v 0000 | do well", "master, get the hang (noun): do well"),
])
def test_a_synset_becomes_a_line_of_words_and_gloss(corpus_tool: dict[str, Any], synset: str, line: str) -> None:
    assert corpus_tool["gloss_line"](synset, "noun") == line


def test_a_wrong_folder_is_named(corpus_tool: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: holds no"):
        list(corpus_tool["speeches"](tmp_path))
