"""Files of a checkpoint beside weights and `config.json`: what its tokenizer and generation are set to.

A campaign that starts from the checkpoint carries them in one hashed file, and `export` writes them back. Peers keep that file
as bytes: it is parsed by `init` and `bootstrap` on the owner's machine, and by `export`. A chat template is a program (Jinja),
which nothing here runs: transformers does, in its sandbox, where somebody applies the template of an exported checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from spes_p2p.config.campaign import StartFile
from spes_p2p.errors import UserError

START_FILES: tuple[StartFile, ...] = get_args(StartFile)
GENERATION_CONFIG: StartFile = "generation_config.json"
TOKENIZER_CONFIG: StartFile = "tokenizer_config.json"
MAX_START_FILES_BYTES = 2**23
"""Bounds them together, escaped as JSON: several times the largest in use, which list thousands of added tokens."""


def read_start_files(folder: Path, names: Sequence[StartFile]) -> bytes | None:
    """Return the content of these files of a folder as one file, None without any. Raises UserError."""
    texts: dict[str, str] = {}
    for name in names:
        path = folder / name
        try:
            texts[name] = path.read_bytes().decode()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); restore it, or remove it from start.files") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; restore it, or remove it from start.files") from None
    content = json.dumps(texts, sort_keys=True).encode()
    if len(content) > MAX_START_FILES_BYTES:
        raise UserError(f"{folder}: {', '.join(names)} have {len(content)} bytes, more than {MAX_START_FILES_BYTES}; "
                        "leave one out of start.files")
    parse_start_files(content, str(folder))
    return content if texts else None


def parse_start_files(content: bytes, where: str) -> dict[str, str]:
    """Return the files' texts by name. Raises UserError, beginning with `where`, for what cannot be such files."""
    texts = _parsed(content.decode(errors="replace"), where)
    for name, text in texts.items():
        if name not in START_FILES or not isinstance(text, str) or not _is_unicode(text):
            raise UserError(f"{where}: has {name!r}, which is not text of one of {', '.join(START_FILES)}")
        if name.endswith(".json"):
            _parsed(text, f"{where}: {name}")
    return texts


def exported_files(content: bytes, eos_token: str, pad_token: str | None) -> dict[str, str]:
    """Return what an exported checkpoint gets of the files, by name.

    A tokenizer without padding token gets one. Settings that name code or files elsewhere are left out. Raises UserError.
    """
    texts = parse_start_files(content, "the campaign's start.files")
    if TOKENIZER_CONFIG in texts:
        settings = _parsed(texts[TOKENIZER_CONFIG], TOKENIZER_CONFIG)
        kept = {name: value for name, value in settings.items() if not _leads_elsewhere(name)}
        kept["eos_token"] = kept.get("eos_token") or eos_token
        kept["pad_token"] = pad_token or kept.get("pad_token") or eos_token
        texts[TOKENIZER_CONFIG] = json.dumps(kept, indent=2) + "\n"
    return texts


def _is_unicode(text: str) -> bool:
    """Return whether it can be written; JSON's escapes allow half a character."""
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _leads_elsewhere(setting: str) -> bool:
    return setting in ("auto_map", "name_or_path") or "file" in setting


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object")
    return found
