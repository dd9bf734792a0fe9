"""`spes-p2p init`: create a folder with a commented campaign file, token files and a tokenizer from a few answers."""

from __future__ import annotations

import filecmp
import itertools
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p.campaign.answers import ROUNDS_AT_LEAST, SIZES, Answers, TextSource
from spes_p2p.campaign.campaign_yaml import HELD_OUT, TOKENIZER_JSON, TOKENS_FOLDER, TRAIN, campaign_yaml, source_prefix
from spes_p2p.campaign.files import CampaignFiles, read_campaign
from spes_p2p.campaign.overlap import HeldOutText
from spes_p2p.campaign.start_files import START_FILES
from spes_p2p.config.campaign import CampaignConfig, TrainingConfig, parse_campaign_config
from spes_p2p.config.model import CONFIG_JSON
from spes_p2p.data.documents import check_text_files, read_documents
from spes_p2p.data.manifest import check_url
from spes_p2p.data.mix import whole_weights
from spes_p2p.data.tokenizers import END_OF_TEXT, check_tokenizer, train_tokenizer
from spes_p2p.data.tokenizing import Progress, tokenize
from spes_p2p.errors import UserError
from spes_p2p.messages.fields import MAX_EXPERTS, MAX_MEMBERS
from spes_p2p.storage.files import alone_in, require_writable, write_whole

if TYPE_CHECKING:
    from spes_p2p.campaign.lines import Pace
    from spes_p2p.campaign.start import Start

logger = logging.getLogger(__name__)

CAMPAIGN_YAML = "campaign.yaml"
MADE_FILES = (CAMPAIGN_YAML, TOKENIZER_JSON, CONFIG_JSON, *START_FILES)
MANY_PASSES = 3.0
"""Warn if the schedule has this many times the passes that were asked for."""
CARD_BYTES = 24 * 2**30
"""Memory of the trainers' cards that is assumed for `--line`."""
TOKENIZER_TEXT_CHARACTERS = 20_000_000
"""Maximum amount of text that a tokenizer is trained on."""


QUESTIONS: dict[str, tuple[str, str | None]] = {
    "size": (f"Model size ({'; '.join(f'{name}: {size.about}' for name, size in SIZES.items())})", "tiny"),
    "text": ("Files with the training text", None),
    "held-out": ("Files with evaluation text (empty: no held-out loss)", ""),
    "tokenizer": ("Path of a tokenizer.json, or the vocabulary size of a tokenizer to train", "8192"),
    "peers": ("Expected number of trainers", "4"),
    "epochs": ("Passes over the training text", "1"),
}
"""Question and default answer by option."""


def make_campaign(answers: Answers, on_progress: Callable[[Progress], None] = lambda progress: None) -> CampaignFiles:
    """Write the campaign folder. Raises UserError; then, and at Ctrl-C, the folder is left as it was."""
    check_answers(answers)
    folder, new = answers.folder, not answers.folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder, "wait for it, or choose another folder"):
            return _make(answers, on_progress, new)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None


def _make(answers: Answers, on_progress: Callable[[Progress], None], new: bool) -> CampaignFiles:
    folder = answers.folder
    try:
        tokenizer = folder / TOKENIZER_JSON
        if isinstance(answers.tokenizer, int):
            write_whole(tokenizer, train_tokenizer(_text_of_all(answers), answers.tokenizer).to_str().encode())
        else:
            write_whole(tokenizer, answers.tokenizer.read_bytes())
        if answers.start is not None:
            write_whole(folder / CONFIG_JSON, answers.start.config)
            for path in answers.start.files:
                write_whole(folder / path.name, path.read_bytes())
        eos_token = _eos_token(answers)
        vocab_size = check_tokenizer(tokenizer, eos_token).vocab_size
        to_tokens = partial(tokenize, eos_token=eos_token, url=answers.url, on_progress=on_progress)
        held_out = HeldOutText(answers.held_out)
        parts = [(source.texts, source_prefix(source.name)) for source in answers.sources] or [(answers.texts, TRAIN)]
        tokens = sum(
            to_tokens(texts, tokenizer, folder / TOKENS_FOLDER, prefix=prefix, on_document=held_out.look_at).tokens
            for texts, prefix in parts
        )
        held_out.check()
        if answers.held_out:
            to_tokens(answers.held_out, tokenizer, folder / TOKENS_FOLDER, prefix=HELD_OUT)
        write_whole(folder / CAMPAIGN_YAML, campaign_yaml(answers, vocab_size, tokens).encode())
        made = read_campaign(folder / CAMPAIGN_YAML)
        if answers.line is not None:
            paced = replace(answers, pace=_pace(answers, made.campaign.config, tokens))
            write_whole(folder / CAMPAIGN_YAML, campaign_yaml(paced, vocab_size, tokens).encode())
            made = read_campaign(folder / CAMPAIGN_YAML)
        _warn_of_passes(answers, made.campaign.config.training, tokens)
        return made
    except BaseException:
        _remove(folder, new)
        raise


def _warn_of_passes(answers: Answers, training: TrainingConfig, tokens: int) -> None:
    """Warn of many more passes over the text than were asked for, as the least number of rounds makes of a short one."""
    passes = training.total_steps * answers.peers * training.batch_size * training.sequence_length / tokens
    if passes > MANY_PASSES * max(1.0, answers.epochs):
        logger.warning("--text: the schedule of %d rounds passes over it %.3g times, --epochs asks for %.3g; add text, or "
                       "lower batch_size or sync_steps, and total_steps with it, in %s",
                       training.total_steps // training.sync_steps, passes, answers.epochs, answers.folder / CAMPAIGN_YAML)


def _pace(answers: Answers, config: CampaignConfig, tokens: int) -> Pace:
    """Return the phase length and codecs for the trainers' lines, on cards of CARD_BYTES, with ROUNDS_AT_LEAST rounds."""
    from spes_p2p.campaign.lines import paces, seconds_of_a_step  # needs torch, which takes seconds
    from spes_p2p.campaign.room import Device, find_room

    room = find_room(config, Device("cuda", CARD_BYTES), "a trainer's card")
    step_tokens = answers.peers * config.training.batch_size * config.training.sequence_length
    longest = max(1, int(answers.epochs * tokens / step_tokens / ROUNDS_AT_LEAST))
    step_s = seconds_of_a_step(config, room, None)
    assert answers.line is not None
    return paces(config, room.setup.owned, answers.peers, step_s, [answers.line], longest)[0]


def parse_texts(texts: Sequence[str]) -> tuple[tuple[Path, ...], tuple[TextSource, ...]]:
    """Return the files of --text, and the sources if they are given as NAME:WEIGHT=FILE. Raises UserError."""
    found: dict[str, TextSource] = {}
    for text in texts:
        match = None if Path(text).exists() else _WEIGHTED_TEXT.fullmatch(text)
        if match is None:
            continue
        name, weight, path = match[1], float(match[2]), Path(match[3])
        known = found.get(name, TextSource(name, weight, ()))
        if known.weight != weight:
            raise UserError(f"--text {text}: {name} has weight {known.weight:g} before; give all its files the same")
        found[name] = replace(known, texts=(*known.texts, path))
    if not found:
        return tuple(map(Path, texts)), ()
    paths = tuple(path for source in found.values() for path in source.texts)
    if len(paths) < len(texts):
        raise UserError("--text: either all files have a name and a weight (NAME:WEIGHT=FILE), or none has")
    return paths, tuple(found.values())


def make_start(
    checkpoint: str | None, folder: Path, size: str | None, tokenizer: Path | int | None,
    experts: int | None, top_k: int | None, upcycle: str | None,
) -> Start | None:
    """Return the existing weights that options name, if they do. Raises UserError for options that contradict each other."""
    for option, value in (("--experts", experts), ("--top-k", top_k), ("--upcycle", upcycle)):
        if checkpoint is None and value is not None:
            raise UserError(f"{option} {value}: for a dense checkpoint; name one with --from")
    if checkpoint is None:
        return None
    if size is not None:
        raise UserError(f"--size {size}: the model is the checkpoint's; leave out --size")
    if isinstance(tokenizer, int):
        raise UserError(f"--tokenizer {tokenizer}: a checkpoint needs the tokenizer that it was trained with; name its file")
    if experts is not None and not 2 <= experts <= MAX_EXPERTS:
        raise UserError(f"--experts {experts}: must be 2 to {MAX_EXPERTS}")
    if top_k is not None and not 1 <= top_k <= (experts or 1):
        raise UserError(f"--top-k {top_k}: must be 1 to the number of --experts")
    if upcycle not in (None, "copy", "drop", "spes"):
        raise UserError(f"--upcycle {upcycle}: must be copy, drop or spes")
    from spes_p2p.campaign.start import find_start

    return find_start(checkpoint, folder, tokenizer, experts, top_k, upcycle)  # type: ignore[arg-type]


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
    check_choices(answers.folder, answers.name, answers.admission, answers.peers, answers.epochs, answers.url)
    if answers.sources:
        train = [{"name": source.name, "weight": source.weight, "manifest": "m"} for source in answers.sources]
        parse_campaign_config({**_PLACEHOLDER, "data": {"train": train, "tokenizer": "t"}}, "--text")
        whole_weights([source.weight for source in answers.sources])
    if answers.start is None:
        _check_size(answers.size)
    check_text_files((*answers.texts, *answers.held_out))
    _check_held_out(answers.texts, answers.held_out)
    _check_tokenizer(answers.tokenizer, answers.start)


def check_choices(folder: Path, name: str, admission: str, peers: int | None, epochs: float | None, url: str | None) -> None:
    """Raise UserError for choices that are invalid whatever the text and the weights. None: not made yet."""
    _check_place(folder, name)
    parse_campaign_config({**_PLACEHOLDER, "name": name, "admission": admission}, "--admission")
    if peers is not None:
        _check_peers(peers)
    if epochs is not None:
        _check_epochs(epochs)
    if url is not None:
        check_url(url)


def _check_place(folder: Path, name: str) -> None:
    """Raise UserError if the name is invalid or the folder already holds a campaign."""
    try:
        parse_campaign_config({**_PLACEHOLDER, "name": name}, "--name")
    except UserError as error:
        source = "; without --name it is the folder's" if name == folder.resolve().name else ""
        raise UserError(f"{error}{source}") from None
    require_writable(folder)
    for made in (*MADE_FILES, TOKENS_FOLDER):
        if (folder / made).exists():
            raise UserError(f"{folder / made}: exists already; choose another folder or remove it")


def _check_size(size: str) -> None:
    if size not in SIZES:
        raise UserError(f"--size {size}: choose one of {', '.join(SIZES)}")


def _check_peers(peers: int) -> None:
    if peers < 1:
        raise UserError(f"--peers {peers}: a campaign needs at least one trainer")
    if peers > MAX_MEMBERS:
        raise UserError(f"--peers {peers}: the first round would wait for them, and a round has at most {MAX_MEMBERS} members")


def _check_epochs(epochs: float) -> None:
    if not 0 < epochs < 1e6:
        raise UserError(f"--epochs {epochs:g}: must be greater than 0")


def _check_held_out(texts: Sequence[Path], held_out: Sequence[Path]) -> None:
    for path, text in itertools.product(held_out, texts):
        if filecmp.cmp(path, text, shallow=False):
            raise UserError(f"--held-out {path}: is training text too; name text that is not trained on")


def _check_tokenizer(tokenizer: Path | int, start: Start | None = None) -> None:
    if start is not None and isinstance(tokenizer, Path):
        check_tokenizer(tokenizer, start.eos_token, start.model.vocab_size)
    elif isinstance(tokenizer, Path):
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
    "size": _check_size, "text": check_text_files, "held-out": check_text_files, "tokenizer": _check_tokenizer,
    "peers": _check_peers, "epochs": _check_epochs,
}


_WEIGHTED_TEXT = re.compile(r"([^:=/]+):([0-9]+(?:\.[0-9]+)?)=(.+)")

_PLACEHOLDER: dict[str, object] = {
    "name": "placeholder",
    "model": {"vocab_size": 2, "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
              "num_key_value_heads": 1, "max_position_embeddings": 2, "moe_num_experts": 1, "moe_top_k": 1},
    "training": {"sequence_length": 2, "batch_size": 1, "total_steps": 1, "sync_steps": 1, "learning_rate": 1.0},
    "data": {"manifest": "m", "tokenizer": "t"},
}
"""A minimal valid campaign, except for its name."""


def _eos_token(answers: Answers) -> str:
    return END_OF_TEXT if answers.start is None else answers.start.eos_token


def _text_of_all(answers: Answers) -> Iterator[str]:
    """Yield text to train a tokenizer on; of several sources, each one's share of it."""
    if not answers.sources:
        yield from _some_text(answers.texts, TOKENIZER_TEXT_CHARACTERS)
    total = sum(source.weight for source in answers.sources)
    for source in answers.sources:
        yield from _some_text(source.texts, TOKENIZER_TEXT_CHARACTERS * source.weight / total)


def _some_text(paths: Sequence[Path], most_characters: float) -> Iterator[str]:
    characters = 0
    for path in paths:
        for text, _ in read_documents(path):
            yield text
            characters += len(text)
            if characters > most_characters:
                return


def _remove(folder: Path, new: bool) -> None:
    for name in MADE_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / TOKENS_FOLDER, ignore_errors=True)
    if new and folder.is_dir():
        folder.rmdir()
