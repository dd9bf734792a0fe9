"""`spes-p2p init`: create a folder with a commented campaign file, token files and a tokenizer from a few answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.config.campaign import SCHEMA_VERSION, parse_campaign_config
from spes_p2p.data.documents import read_documents, reader_of
from spes_p2p.data.manifest import MANIFEST_NAME, check_url
from spes_p2p.data.tokenizers import END_OF_TEXT, check_tokenizer, train_tokenizer
from spes_p2p.data.tokenizing import Progress, tokenize
from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole

CAMPAIGN_YAML, TOKENIZER_JSON, TOKENS_FOLDER = "campaign.yaml", "tokenizer.json", "tokens"
TRAIN, HELD_OUT = "train_", "held_out_"
ROUNDS_AT_LEAST = 10
WARMUP_SHARE, MERGE_SHARE = 0.05, 0.5
"""Fractions of the steps, as in SPES: a short learning rate warm-up, and merging in the first part of training."""
TOKENIZER_TEXT_CHARACTERS = 20_000_000
"""Maximum amount of text that a tokenizer is trained on."""


@dataclass(frozen=True)
class Size:
    """A model size and its training settings, with SPES's ratios at every scale.

    Measurements support the settings of the first size (docs/learning.md). Larger sizes approach SPES's settings; the last two
    use them, but with twice the rounds at half the bits.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    moe_num_experts: int
    moe_top_k: int
    sequence_length: int
    batch_size: int
    micro_batch_size: int
    sync_steps: int
    learning_rate: str
    embedding_lr_ratio: float
    beta2: float
    about: str
    """Description for the user; parameters exclude embeddings."""


SIZES = {
    "tiny": Size(128, 256, 4, 4, 8, 2, 128, 8, 8, 10, "2.0e-3", 16.0, 0.999, "3.4M, a laptop suffices"),
    "small": Size(512, 512, 8, 8, 8, 2, 1024, 32, 8, 25, "1.0e-3", 4.0, 0.999, "59M, any GPU"),
    "medium": Size(768, 1024, 12, 12, 16, 2, 2048, 64, 4, 50, "6.0e-4", 4.0, 0.999, "481M, GPUs from 8 GB"),
    "1b": Size(768, 2048, 12, 12, 16, 2, 2048, 256, 8, 50, "5.0e-4", 1.0, 0.95, "0.93B, GPUs from 8 GB; SPES's smallest"),
    "7b": Size(2048, 2048, 16, 16, 32, 4, 2048, 1024, 2, 50, "4.0e-4", 1.0, 0.95, "6.7B, GPUs from 24 GB; SPES's"),
}


QUESTIONS: dict[str, tuple[str, str | None]] = {
    "size": (f"Model size ({'; '.join(f'{name}: {size.about}' for name, size in SIZES.items())})", "tiny"),
    "text": ("Files with the training text", None),
    "held-out": ("Files with evaluation text (empty: no held-out loss)", ""),
    "tokenizer": ("Path of a tokenizer.json, or the vocabulary size of a tokenizer to train", "8192"),
    "peers": ("Expected number of trainers", "4"),
    "epochs": ("Passes over the training text", "1"),
}
"""Question and default answer by option."""


@dataclass(frozen=True)
class Answers:
    """Choices of the campaign's owner."""

    folder: Path
    name: str
    size: str
    texts: tuple[Path, ...]
    held_out: tuple[Path, ...]
    tokenizer: Path | int
    """Path of a tokenizer.json, or the vocabulary size of a tokenizer to train."""
    peers: int
    """Expected trainers; the first round waits for them."""
    epochs: float
    """Passes over the training text."""
    admission: str = "friends"
    """Who may take part: see `CampaignConfig`."""
    url: str | None = None
    """URL where the token files will be published; None: only peers serve them."""


@dataclass(frozen=True)
class Schedule:
    """Settings derived from text, peers and size."""

    total_steps: int
    warmup_steps: int
    merge_interval: int
    merge_decay_steps: int


def make_campaign(answers: Answers, on_progress: Callable[[Progress], None] = lambda progress: None) -> CampaignFiles:
    """Write the campaign folder. On UserError the folder is left as it was."""
    check_answers(answers)
    folder, new = answers.folder, not answers.folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = folder / TOKENIZER_JSON
        if isinstance(answers.tokenizer, int):
            train_tokenizer(_some_text(answers.texts), answers.tokenizer).save(str(tokenizer), pretty=False)
        else:
            write_whole(tokenizer, answers.tokenizer.read_bytes())
        vocab_size = check_tokenizer(tokenizer, END_OF_TEXT).vocab_size
        tokens = tokenize(
            answers.texts, tokenizer, folder / TOKENS_FOLDER, prefix=TRAIN, url=answers.url, on_progress=on_progress
        ).tokens
        if answers.held_out:
            tokenize(
                answers.held_out, tokenizer, folder / TOKENS_FOLDER, prefix=HELD_OUT, url=answers.url, on_progress=on_progress
            )
        write_whole(folder / CAMPAIGN_YAML, campaign_yaml(answers, vocab_size, tokens).encode())
        return read_campaign(folder / CAMPAIGN_YAML)
    except (UserError, OSError) as error:
        _remove(folder, new)
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None


def ask(option: str, asks: bool) -> Any:
    """Return the answer for an omitted option: prompt until it is valid, or, if not `asks`, use the default.

    Raises UserError if there is no default.
    """
    question, default = QUESTIONS[option]
    if not asks:
        if default is None:
            raise UserError(f"--{option} is missing ({question.lower()}); give this option")
        return parse_answer(option, default)
    while True:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
        if answer is not None:
            try:
                return parse_answer(option, answer)
            except UserError as error:
                print(error)


def parse_answer(option: str, answer: str) -> Any:
    """Parse and check an answer for `Answers`. Raises UserError if it is invalid."""
    try:
        value = _PARSERS[option](answer)
    except ValueError:
        raise UserError(f"--{option} {answer}: not a number") from None
    _CHECKS[option](value)
    return value


def check_answers(answers: Answers) -> None:
    """Raise UserError for invalid answers, before anything is written."""
    check_place(answers.folder, answers.name)
    parse_campaign_config({**_PLACEHOLDER, "name": answers.name, "admission": answers.admission}, "--admission")
    _check_size(answers.size)
    _check_peers(answers.peers)
    _check_epochs(answers.epochs)
    _check_texts((*answers.texts, *answers.held_out))
    _check_tokenizer(answers.tokenizer)
    if answers.url is not None:
        check_url(answers.url)


def check_place(folder: Path, name: str) -> None:
    """Raise UserError if the name is invalid or the folder already holds a campaign."""
    parse_campaign_config({**_PLACEHOLDER, "name": name}, "--name")
    for made in (CAMPAIGN_YAML, TOKENIZER_JSON, TOKENS_FOLDER):
        if (folder / made).exists():
            raise UserError(f"{folder / made}: exists already; choose another folder or remove it")


def _check_size(size: str) -> None:
    if size not in SIZES:
        raise UserError(f"--size {size}: choose one of {', '.join(SIZES)}")


def _check_peers(peers: int) -> None:
    if peers < 1:
        raise UserError(f"--peers {peers}: a campaign needs at least one trainer")


def _check_epochs(epochs: float) -> None:
    if not 0 < epochs < 1e6:
        raise UserError(f"--epochs {epochs:g}: must be greater than 0")


def _check_texts(paths: Sequence[Path]) -> None:
    for path in paths:
        reader_of(str(path))
        if not path.is_file():
            raise UserError(f"{path}: no such file; give text as .jsonl (also .gz, .zst), .parquet or .txt")


def _check_tokenizer(tokenizer: Path | int) -> None:
    if isinstance(tokenizer, Path):
        check_tokenizer(tokenizer, END_OF_TEXT)
    elif not 300 <= tokenizer <= 2**18:
        raise UserError(f"--tokenizer {tokenizer}: a vocabulary size must be 300 to {2**18}")


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(map(Path, text.split()))


def _number_or_path(text: str) -> int | Path:
    return int(text) if text.isdecimal() else Path(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "size": str, "text": _paths, "held-out": _paths, "tokenizer": _number_or_path, "peers": int, "epochs": float,
}
_CHECKS: dict[str, Callable[[Any], None]] = {
    "size": _check_size, "text": _check_texts, "held-out": _check_texts, "tokenizer": _check_tokenizer, "peers": _check_peers,
    "epochs": _check_epochs,
}


def make_schedule(size: Size, tokens: int, peers: int, epochs: float) -> Schedule:
    """Return the schedule for `epochs` passes over `tokens`: whole rounds, at least ROUNDS_AT_LEAST of them."""
    step_tokens = size.batch_size * size.sequence_length * peers
    rounds = max(ROUNDS_AT_LEAST, round(tokens * epochs / (step_tokens * size.sync_steps)))
    steps = rounds * size.sync_steps
    return Schedule(
        total_steps=steps,
        warmup_steps=round(WARMUP_SHARE * steps),
        merge_interval=4 * size.sync_steps,
        merge_decay_steps=round(MERGE_SHARE * steps),
    )


def campaign_yaml(answers: Answers, vocab_size: int, tokens: int) -> str:
    """Return the campaign file, with comments on the settings that an owner may want to change."""
    size = SIZES[answers.size]
    schedule = make_schedule(size, tokens, answers.peers, answers.epochs)
    held_out = f"{TOKENS_FOLDER}/{HELD_OUT}{MANIFEST_NAME}"
    return _TEMPLATE.format(
        schema_version=SCHEMA_VERSION,
        name=answers.name,
        admission=answers.admission,
        vocab_size=vocab_size,
        rows=-(-vocab_size // 64) * 64,
        tokens=tokens,
        peers=answers.peers,
        size=size,
        schedule=schedule,
        manifest=f"{TOKENS_FOLDER}/{TRAIN}{MANIFEST_NAME}",
        served="served by peers" if answers.url is None else f"publish this folder at {answers.url}",
        validation=f"validation_manifest: {held_out}" if answers.held_out else f"# validation_manifest: {held_out}",
        tokenizer=TOKENIZER_JSON,
        epochs=answers.epochs,
        rounds=ROUNDS_AT_LEAST,
        sync_tokens=size.sync_steps * size.batch_size * size.sequence_length,
    )


_TEMPLATE = """\
# Campaign file of spes-p2p. Volunteers get it from the swarm, so it is identical on every peer. docs/configuration.md lists
# all fields and their defaults. After a bootstrap peer has started with this file, any change makes it another campaign.
schema_version: {schema_version}  # fixes the defaults of omitted fields
name: {name}
admission: {admission}  # who may take part: docs/admission.md

model:
  architecture: olmoe
  vocab_size: {rows}  # the tokenizer's {vocab_size} ids, rounded up to a multiple of 64
  hidden_size: {size.hidden_size}
  intermediate_size: {size.intermediate_size}  # width of one expert
  num_hidden_layers: {size.num_hidden_layers}
  num_attention_heads: {size.num_attention_heads}
  num_key_value_heads: {size.num_attention_heads}
  max_position_embeddings: {size.sequence_length}
  moe_num_experts: {size.moe_num_experts}  # divided among the peers; each trains as many as fit in its memory
  moe_top_k: {size.moe_top_k}  # experts that each token is routed to
  # moe_low_rank: 16  # adds to each expert a low-rank term that every peer trains: docs/learning.md

training:
  sequence_length: {size.sequence_length}
  batch_size: {size.batch_size}  # samples per local step of one peer
  micro_batch_size: {size.micro_batch_size}  # samples per forward pass; a volunteer can choose a smaller one
  total_steps: {schedule.total_steps}  # {epochs:g} passes over {tokens} tokens with {peers} peers, at least {rounds} rounds
  sync_steps: {size.sync_steps}  # steps between two rounds: {sync_tokens} tokens per peer; increase it for slow links
  learning_rate: {size.learning_rate}
  embedding_lr_ratio: {size.embedding_lr_ratio}  # learning rate of embedding and output head, as a multiple of learning_rate
  beta2: {size.beta2}  # with slow decay, the mean of the peers' steps is close to a step along their mean gradient
  # second_moment_peers: auto  # a slightly lower loss, closer to training on one large machine
  warmup_steps: {schedule.warmup_steps}

merge:  # merge similar experts slightly in the first part of training (SPES)
  merge_interval: {schedule.merge_interval}
  merge_alpha_start: 0.1
  merge_decay_steps: {schedule.merge_decay_steps}

sync:
  min_peers: {peers}  # trainers that the first round waits for; later rounds take the trainers that are present
  codec: {{router: none, shared: int4, experts: int4}}  # rounding errors are added to the next round's update

evaluation:
  every_rounds: 10  # evaluate on the held-out text every 10 rounds

data:  # paths are relative to this file
  manifest: {manifest}  # the training text: {served}
  {validation}
  tokenizer: {tokenizer}
"""

_PLACEHOLDER: dict[str, object] = {
    "model": {"vocab_size": 2, "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
              "num_key_value_heads": 1, "max_position_embeddings": 2, "moe_num_experts": 1, "moe_top_k": 1},
    "training": {"sequence_length": 2, "batch_size": 1, "total_steps": 1, "sync_steps": 1, "learning_rate": 1.0},
    "data": {"manifest": "m", "tokenizer": "t"},
}
"""A minimal valid campaign, except for its name."""


def _some_text(paths: Sequence[Path]) -> Iterator[str]:
    characters = 0
    for path in paths:
        for text, _ in read_documents(path):
            yield text
            characters += len(text)
            if characters > TOKENIZER_TEXT_CHARACTERS:
                return


def _remove(folder: Path, new: bool) -> None:
    for name in (CAMPAIGN_YAML, TOKENIZER_JSON):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / TOKENS_FOLDER, ignore_errors=True)
    if new and folder.is_dir():
        folder.rmdir()
