"""Local token files: found in the folders that the user names, and verified against the manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.data.manifest import HASHES, Manifest, TokenFile
from spes_p2p.data.token_files import TokenArray, open_tokens, scan
from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole

logger = logging.getLogger(__name__)

LONG_TO_READ_BYTES = 2**30
"""Reading a file of this size takes long enough to say so."""


def open_corpus(manifest: Manifest, folders: Sequence[Path]) -> tuple[TokenArray, ...]:
    """Find, verify and map all token files: one read-only array of ids `[tokens]` per file.

    Verification reads each file once, for its sha256 and its largest id. Raises UserError as `locate_file` does, and for a
    wrong hash or an id outside the vocabulary.
    """
    paths = {file: locate_file(file, folders) for file in manifest.files}
    _verify_once(manifest, paths, None)
    return tuple(open_tokens(paths[file], file.dtype) for file in manifest.files)


def find_local(manifest: Manifest, folders: Sequence[Path], verified: Path | None = None) -> dict[TokenFile, Path]:
    """Return the token files that are on this machine, verified as by `open_corpus`. Raises UserError for a wrong one.

    `verified` is a JSON file in the run-dir that records verified files by path, size and modification time, so that a restart
    does not read them again.
    """
    paths = {file: locate_file(file, folders) for file in manifest.files if _exists(file, folders)}
    _verify_once(manifest, paths, verified)
    return paths


def check_local(manifest: Manifest, folders: Sequence[Path]) -> None:
    """Raise UserError, as `open_corpus` does, unless each token file is on this machine or published."""
    paths = {file: locate_file(file, folders) for file in manifest.files if file.url is None or _exists(file, folders)}
    _verify_once(manifest, paths, None)


def find_hashes(file: TokenFile, folders: Sequence[Path]) -> bytes | None:
    """Read the token file's list of piece hashes, unverified, from the same folders. None if there is none."""
    paths = (path.with_name(path.name + HASHES) for path in _candidates(file, folders))
    return next((path.read_bytes() for path in paths if path.is_file()), None)


def locate_file(file: TokenFile, folders: Sequence[Path]) -> Path:
    """Return the path of one token file. Raises UserError if it is missing or its length differs from the manifest."""
    lengths = {path: len(open_tokens(path, file.dtype)) for path in _candidates(file, folders) if path.is_file()}
    for path, tokens in lengths.items():
        if tokens == file.tokens:
            return path
    for path, tokens in lengths.items():
        raise UserError(f"{path}: has {tokens} {file.dtype} ids, the manifest says {file.tokens}; "
                        f"it is truncated or another file: copy it again")
    searched = ", ".join(str(folder) for folder in folders) or "any known folder"
    raise UserError(f"{file.path}: this token file of the campaign is not in {searched}; copy it there")


def _candidates(file: TokenFile, folders: Sequence[Path]) -> list[Path]:
    return [folder / file.path for folder in folders] + [folder / Path(file.path).name for folder in folders]


def _exists(file: TokenFile, folders: Sequence[Path]) -> bool:
    return any(path.is_file() for path in _candidates(file, folders))


def _verify_once(manifest: Manifest, paths: Mapping[TokenFile, Path], verified: Path | None) -> None:
    """Verify each file that is not recorded in `verified`, and record it. Raises UserError."""
    known = _read_verified(verified)
    for file, path in paths.items():
        name, fingerprint = str(path.resolve()), _fingerprint(path, file, manifest.vocab_size)
        if known.get(name) == fingerprint:
            continue
        if path.stat().st_size >= LONG_TO_READ_BYTES:
            logger.info("%s: verifying %d MB of text", path, path.stat().st_size // 10**6)
        _verify(path, file, manifest.vocab_size)
        known[name] = fingerprint
    if verified is not None:
        write_whole(verified, json.dumps(known, indent=1).encode())


def _verify(path: Path, file: TokenFile, vocab_size: int) -> None:
    found = scan(path, file.dtype, vocab_size)
    if found.sha256 != file.sha256:
        raise UserError(f"{path}: differs from the campaign's token file (sha256 {found.sha256[:12]}..., expected "
                        f"{file.sha256[:12]}...); copy it again")


def _fingerprint(path: Path, file: TokenFile, vocab_size: int) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, file.sha256, file.dtype, vocab_size]


def _read_verified(path: Path | None) -> dict[str, Any]:
    """Return the fingerprints of verified files; empty if the record is missing or damaged, so all are verified again."""
    try:
        known = json.loads(path.read_bytes()) if path is not None and path.exists() else {}
    except (OSError, ValueError):
        known = None
    if isinstance(known, dict):
        return known
    logger.warning("%s: damaged; verifying the text on this machine again", path)
    return {}
