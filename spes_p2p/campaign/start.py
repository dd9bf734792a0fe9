"""Base 0: random weights, or those of an existing checkpoint, in a folder or on the Hub."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spes_p2p.campaign.files import TOKENIZER_FILE, CampaignFiles
from spes_p2p.campaign.start_files import GENERATION_CONFIG, START_FILES, TOKENIZER_CONFIG, read_start_files
from spes_p2p.config.model import CONFIG_JSON, NUM_EXPERTS, ModelSection, TransformersModel
from spes_p2p.config.problems import validated
from spes_p2p.data.tokenizers import END_OF_TEXT, load_tokenizer
from spes_p2p.errors import UserError, first_line
from spes_p2p.model.build import initial_state
from spes_p2p.model.checkpoint import Checkpoint, check_complete, checkpoint_state
from spes_p2p.model.families import check_family, check_repeatable
from spes_p2p.model.upcycle import FAMILIES, UpcycleRule, check_dense, upcycled_config, upcycled_state
from spes_p2p.observe.library_bars import library_bars
from spes_p2p.rounds.audits import are_audited

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


@dataclass(frozen=True)
class Start:
    """A checkpoint that a campaign can begin with, and the model section that follows from it."""

    checkpoint: str
    """What the campaign file says: a path relative to it, or a Hub name with its commit."""
    model: ModelSection
    config: bytes
    """The model's `config.json`: the checkpoint's own bytes, or those of an upcycled model."""
    tokenizer: Path
    eos_token: str
    upcycle: UpcycleRule | None
    files: tuple[Path, ...] = ()
    """What else export shall write back: the tokenizer's settings, and the checkpoint's for generation."""


def find_start(
    checkpoint: str, folder: Path, tokenizer: Path | None, experts: int | None, top_k: int | None, upcycle: UpcycleRule | None
) -> Start:
    """Examine the checkpoint for a campaign in `folder`; reads no weights. Raises UserError if it cannot be its beginning.

    `experts`, `top_k` and `upcycle` are for a dense checkpoint.
    """
    found = locate(checkpoint, Path())
    source = Checkpoint(found)
    has_experts = any(name in source.config for name in NUM_EXPERTS)
    if has_experts and (experts or top_k or upcycle):
        raise UserError(f"{checkpoint}: has experts already; leave out --experts, --top-k and --upcycle")
    if not has_experts and experts is None:
        advice = "give --experts to upcycle it" if source.config.get("model_type") in FAMILIES else "use a mixture of experts"
        raise UserError(f"{checkpoint}: a dense model ({source.config.get('model_type')}); {advice}")
    if has_experts:
        config, content = source.config, (found / CONFIG_JSON).read_bytes()
    else:
        config = upcycled_config(source.config, experts or 1, top_k or min(2, experts or 1))
        content = as_json(config)
    model = validated(TransformersModel, {"config": config}, lambda location: str(found / CONFIG_JSON))
    check_family(model)
    if has_experts:
        check_complete(model, source)
    else:
        check_dense(model, source)
    if tokenizer is None and not (found / TOKENIZER_FILE).is_file():
        raise UserError(f"{checkpoint}: has no {TOKENIZER_FILE}; name the tokenizer of its text with --tokenizer")
    tokenizer = tokenizer or found / TOKENIZER_FILE
    folders = {name: found if name == GENERATION_CONFIG else tokenizer.parent for name in START_FILES}
    beside = {name: place / name for name, place in folders.items() if (place / name).is_file()}
    for name, path in beside.items():
        read_start_files(path.parent, (name,))
    return Start(
        _recorded(checkpoint, found, folder), model, content, tokenizer,
        _eos_token(config, found / CONFIG_JSON, tokenizer),
        None if has_experts else upcycle or "copy",
        tuple(beside.values()),
    )


def locate(checkpoint: str, home: Path) -> Path:
    """Return the folder of a checkpoint, downloading it if it is a Hub name. Raises UserError."""
    folder = home / checkpoint
    hub = HUB_NAME.fullmatch(checkpoint)
    if folder.is_dir() or hub is None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        with library_bars():
            return Path(snapshot_download(hub["name"], revision=hub["revision"], allow_patterns=HUB_FILES))
    except Exception as error:  # errors of the Hub's client, of HTTP, and of the disk
        raise UserError(f"{checkpoint}: no such folder, and not available from the Hub ({first_line(error)})") from None


def cached(checkpoint: str) -> Path | None:
    """Return the folder of a Hub checkpoint in this machine's cache, without asking the network; None if it is not there."""
    hub = HUB_NAME.fullmatch(checkpoint)
    if hub is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(
            hub["name"], revision=hub["revision"], allow_patterns=HUB_FILES, local_files_only=True
        ))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def base_0(files: CampaignFiles, out: np.ndarray, checkpoint: Path | None = None) -> None:
    """Write a campaign's first weights to `out`, float32 `[layout.size]`.

    Raises UserError if the checkpoint does not fit, or audits do not fit the model.

    `checkpoint`: folder of the checkpoint on this machine. Default: what the campaign file names.
    """
    config = files.campaign.config
    check_family(config.model)
    if are_audited(config):
        check_repeatable(config.model)
    if config.start is None:
        initial_state(config.model, out)
        return
    source = Checkpoint(checkpoint or locate(config.start.checkpoint, files.home))
    if config.start.upcycle is None:
        checkpoint_state(config.model, source, out)
    else:
        upcycled_state(config.model, source, config.start.upcycle, out)


def as_json(config: dict[str, Any]) -> bytes:
    """Return the content of a `config.json`."""
    return (json.dumps(config, indent=2) + "\n").encode()


def _recorded(checkpoint: str, found: Path, folder: Path) -> str:
    if Path(checkpoint).is_dir():
        return os.path.relpath(found.resolve(), folder.resolve())
    return f"{checkpoint.partition('@')[0]}@{found.name}"  # the cache names a snapshot after its commit


def _eos_token(config: dict[str, Any], config_json: Path, tokenizer: Path) -> str:
    """Return the token that ends documents: the model's own, which must be the tokenizer's too, or the usual one."""
    known = load_tokenizer(tokenizer)
    found = config.get("eos_token_id")
    ids = found if isinstance(found, list) and found else [found]
    token: str | None = END_OF_TEXT
    if isinstance(ids[0], int):
        token = known.id_to_token(ids[0]) if 0 <= ids[0] < 2**32 else None  # the library takes no others
    if token is None or known.token_to_id(token) is None:
        raise UserError(f"{tokenizer}: has no token for the model's eos_token_id = {ids[0]}; it is another model's tokenizer")
    settings = tokenizer.with_name(TOKENIZER_CONFIG)
    named = _named_eos_token(settings)
    if named is None and isinstance(ids[0], int) and ids[0] not in known.get_added_tokens_decoder():
        raise UserError(f"{config_json}: eos_token_id = {ids[0]}, which would end each document, is {token!r} in {tokenizer}, "
                        f"an ordinary token; set it to the end token's id, or name that as eos_token in {settings.name}")
    if named is not None and isinstance(ids[0], int) and known.token_to_id(named) not in ids:
        raise UserError(f"{config_json}: eos_token_id = {ids[0]}, which would end each document, is the token {token!r}, but "
                        f"{settings} has eos_token = {named!r}, id {known.token_to_id(named)}; edit "
                        "the one that is wrong, of a Hub checkpoint in a copy")
    return token


def _named_eos_token(tokenizer_config: Path) -> str | None:
    """Return the end token that a `tokenizer_config.json` names; None without one."""
    try:
        named = json.loads(tokenizer_config.read_bytes())["eos_token"]
        return str(named["content"] if isinstance(named, dict) else named) if named else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
