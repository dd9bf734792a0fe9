"""`spes-p2p init`: from a few answers to a folder with a commented campaign file, token files and tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.config.campaign import SCHEMA_VERSION, parse_campaign_config
from spes_p2p.data.documents import read_documents, reader_of
from spes_p2p.data.manifest import MANIFEST_NAME, check_url, write_whole
from spes_p2p.data.tokenizers import END_OF_TEXT, check_tokenizer, train_tokenizer
from spes_p2p.data.tokenizing import Progress, tokenize
from spes_p2p.errors import UserError

CAMPAIGN_YAML, TOKENIZER_JSON, TOKENS_FOLDER = "campaign.yaml", "tokenizer.json", "tokens"
TRAIN, HELD_OUT = "train_", "held_out_"
ROUNDS_AT_LEAST = 10
WARMUP_SHARE, MERGE_SHARE = 0.05, 0.5
"""Of the steps: SPES warms up for a few percent and merges in the first part of training."""
TOKENIZER_TEXT_CHARACTERS = 20_000_000
"""A tokenizer is trained on so much of the text."""


@dataclass(frozen=True)
class Size:
    """A model and how it is trained, with SPES's ratios at every scale.

    Measured on models of about the first size (docs/learning.md). The others are the less far from SPES's settings the larger
    they are; the last two are trained as SPES trains them, but for twice the rounds in half the bits.
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
    """Parameters without the vocabulary's."""


SIZES = {
    "tiny": Size(128, 256, 4, 4, 8, 2, 128, 8, 8, 10, "2.0e-3", 16.0, 0.999, "3.4M, a laptop trains it"),
    "small": Size(512, 512, 8, 8, 8, 2, 1024, 32, 8, 25, "1.0e-3", 4.0, 0.999, "59M, any GPU"),
    "medium": Size(768, 1024, 12, 12, 16, 2, 2048, 64, 4, 50, "6.0e-4", 4.0, 0.999, "481M, GPUs from 8 GB"),
    "1b": Size(768, 2048, 12, 12, 16, 2, 2048, 256, 8, 50, "5.0e-4", 1.0, 0.95, "0.93B, GPUs from 8 GB; SPES's smallest"),
    "7b": Size(2048, 2048, 16, 16, 32, 4, 2048, 1024, 2, 50, "4.0e-4", 1.0, 0.95, "6.7B, GPUs from 24 GB; SPES's"),
}


QUESTIONS: dict[str, tuple[str, str | None]] = {
    "size": (f"Model size ({'; '.join(f'{name}: {size.about}' for name, size in SIZES.items())})", "tiny"),
    "text": ("Files with the text to train on", None),
    "held-out": ("Files with text to evaluate on (none: no held-out loss)", ""),
    "tokenizer": ("tokenizer.json, or a number: train one of so many ids on the text", "8192"),
    "peers": ("Trainers that you expect", "4"),
    "epochs": ("How often to train on the text", "1"),
}
"""By option: the question, and the answer where nobody gives one."""


@dataclass(frozen=True)
class Answers:
    """What the owner of a campaign decides."""

    folder: Path
    name: str
    size: str
    texts: tuple[Path, ...]
    held_out: tuple[Path, ...]
    tokenizer: Path | int
    """tokenizer.json, or the number of ids of one that is trained on the text."""
    peers: int
    """Trainers that are expected, and that the first round waits for."""
    epochs: float
    """How often the text is trained on."""
    url: str | None = None
    """Where the folder of the token files will be published; None: volunteers get them from peers alone."""


@dataclass(frozen=True)
class Schedule:
    """What follows from text, peers and size."""

    total_steps: int
    warmup_steps: int
    merge_interval: int
    merge_decay_steps: int


def make_campaign(answers: Answers, on_progress: Callable[[Progress], None] = lambda progress: None) -> CampaignFiles:
    """Write the folder. Raises UserError; then it is as it was before."""
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
    """The answer to a question that no option answered: a person's, asked until it can be used, or (not `asks`) the default.

    Raises UserError where there is none.
    """
    question, default = QUESTIONS[option]
    if not asks:
        if default is None:
            raise UserError(f"--{option}: {question.lower()}? Give this option")
        return parse_answer(option, default)
    while True:
        answer = input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
        if answer is not None:
            try:
                return parse_answer(option, answer)
            except UserError as error:
                print(error)


def parse_answer(option: str, answer: str) -> Any:
    """What a person wrote, as `Answers` has it. Raises UserError when it cannot be used."""
    try:
        value = _PARSERS[option](answer)
    except ValueError:
        raise UserError(f"--{option} {answer}: not a number") from None
    _CHECKS[option](value)
    return value


def check_answers(answers: Answers) -> None:
    """Raise UserError for what cannot become a campaign, before anything is written."""
    check_place(answers.folder, answers.name)
    _check_size(answers.size)
    _check_peers(answers.peers)
    _check_epochs(answers.epochs)
    _check_texts((*answers.texts, *answers.held_out))
    _check_tokenizer(answers.tokenizer)
    if answers.url is not None:
        check_url(answers.url)


def check_place(folder: Path, name: str) -> None:
    """Raise UserError when no campaign of that name can be written there."""
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
        raise UserError(f"--tokenizer {tokenizer}: a tokenizer that is trained has 300 to {2**18} ids")


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
    """Steps that train `tokens` so often with so many peers: a multiple of the steps of a round, at least a few rounds."""
    a_step = size.batch_size * size.sequence_length * peers
    rounds = max(ROUNDS_AT_LEAST, round(tokens * epochs / (a_step * size.sync_steps)))
    steps = rounds * size.sync_steps
    return Schedule(
        total_steps=steps,
        warmup_steps=round(WARMUP_SHARE * steps),
        merge_interval=4 * size.sync_steps,
        merge_decay_steps=round(MERGE_SHARE * steps),
    )


def campaign_yaml(answers: Answers, vocab_size: int, tokens: int) -> str:
    """The campaign file, with a comment on everything that its owner may want to change."""
    size = SIZES[answers.size]
    schedule = make_schedule(size, tokens, answers.peers, answers.epochs)
    held_out = f"{TOKENS_FOLDER}/{HELD_OUT}{MANIFEST_NAME}"
    return _TEMPLATE.format(
        schema_version=SCHEMA_VERSION,
        name=answers.name,
        vocab_size=vocab_size,
        rows=-(-vocab_size // 64) * 64,
        tokens=tokens,
        peers=answers.peers,
        size=size,
        schedule=schedule,
        manifest=f"{TOKENS_FOLDER}/{TRAIN}{MANIFEST_NAME}",
        served="peers serve its tokens" if answers.url is None else f"publish this folder at {answers.url}",
        validation=f"validation_manifest: {held_out}" if answers.held_out else f"# validation_manifest: {held_out}",
        tokenizer=TOKENIZER_JSON,
        sync_tokens=size.sync_steps * size.batch_size * size.sequence_length,
    )


_TEMPLATE = """\
# A campaign of spes-p2p. The same on every peer: volunteers get it from the swarm. What is not here has its default;
# every field: docs/configuration.md. Once a bootstrap peer has started with this file, changing it makes another campaign.
schema_version: {schema_version}  # what a field that is left out means
name: {name}

model:
  architecture: olmoe
  vocab_size: {rows}  # the tokenizer's {vocab_size} ids, rounded up to a multiple of 64
  hidden_size: {size.hidden_size}
  intermediate_size: {size.intermediate_size}  # width of one expert
  num_hidden_layers: {size.num_hidden_layers}
  num_attention_heads: {size.num_attention_heads}
  num_key_value_heads: {size.num_attention_heads}
  max_position_embeddings: {size.sequence_length}
  moe_num_experts: {size.moe_num_experts}  # divided among the peers; a peer trains as many as fit its memory
  moe_top_k: {size.moe_top_k}  # experts that each token is sent to
  # moe_low_rank: 16  # a term of each expert that every peer trains, for some memory: docs/learning.md

training:
  sequence_length: {size.sequence_length}
  batch_size: {size.batch_size}  # samples in a step of one peer
  micro_batch_size: {size.micro_batch_size}  # samples in one forward pass; a volunteer can choose less
  total_steps: {schedule.total_steps}  # with {peers} peers: {tokens} tokens of text, as often as asked for
  sync_steps: {size.sync_steps}  # steps between two rounds, {sync_tokens} tokens a peer; more of them suit slow links
  learning_rate: {size.learning_rate}
  embedding_lr_ratio: {size.embedding_lr_ratio}  # times the learning rate: that of embedding and output head
  beta2: {size.beta2}  # of AdamW: with a long memory the mean of the peers' steps is nearly a step along their mean gradient
  # second_moment_peers: auto  # closes a little more of the gap to one big machine
  warmup_steps: {schedule.warmup_steps}

merge:  # similar experts are merged a little in the first part of training (SPES)
  merge_interval: {schedule.merge_interval}
  merge_alpha_start: 0.1
  merge_decay_steps: {schedule.merge_decay_steps}

sync:
  min_peers: {peers}  # the first round waits for so many trainers; later ones go on with whoever is there
  codec: {{router: none, shared: int4, experts: int4}}  # what rounding drops goes with the next round's update

evaluation:
  every_rounds: 10  # rounds between two looks at the held-out text

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
"""A campaign that is right but for its name."""


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
