"""The manifest names a campaign's token files by path and hash, so that every peer trains on the same tokens.

It travels through the swarm. A machine that has the files lets `open_corpus` find and check them; another one gets the pieces
that it trains on from its peers (`shelf.py`, `sync/tokens.py`), or makes them from the text's source (`streaming.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from spes_p2p.data.token_files import Dtype, TokenArray, open_tokens, scan
from spes_p2p.errors import UserError

MANIFEST_NAME = "manifest.json"
HASHES = ".hashes"
"""Ending of the list of piece hashes that lies beside a token file with a source, and may lie there without it."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Source:
    """The raw text that a token file was made of: one file of text, all of its documents in their order."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(pattern=r"^(https?://|hf://datasets/|/)[^\x00-\x1f]*[^/\x00-\x1f]$")]
    """https://, http://, hf://datasets/OWNER/NAME/PATH, or an absolute path on every machine (`sources.py`)."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """Field of the text in JSON and Parquet."""


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(min_length=1)]
    """Relative to the manifest's folder, with forward slashes; or absolute."""
    sha256: Sha256
    tokens: Positive
    dtype: Dtype
    pieces_sha256: Sha256 | None = None
    """Root of its pieces (`pieces.py`), by which peers serve it; None in manifests of earlier versions."""
    source: Source | None = None
    """Where a machine may make it from, when no peer gives its pieces; None: nowhere."""


@dataclass(frozen=True)
class Manifest:
    """A tokenized corpus. Its hash, over `to_json`, is part of the campaign's identity."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    tokenizer_sha256: Sha256
    vocab_size: Positive
    """Ids are below this."""
    eos_token_id: Annotated[int, Field(ge=0)]
    """Ends each document."""
    tokens: Positive
    """In all files."""
    files: Annotated[tuple[TokenFile, ...], Field(min_length=1, strict=False)]

    def to_json(self) -> str:
        """The text of the manifest file: the same manifest gives the same bytes."""
        content = asdict(self)
        for file in content["files"]:
            if file["source"] is None:
                del file["source"]
        return json.dumps(content, indent=1) + "\n"

    @property
    def sha256(self) -> str:
        """Hex digest of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Manifest:
        """Parse a manifest. Raises UserError naming `where`, the field and what is wrong."""
        try:
            manifest = _ADAPTER.validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(str(part) for part in problem["loc"])
            raise UserError(f"{where}: not a manifest of token files ({field or 'file'}: {problem['msg']}); "
                            f"make one with `spes-p2p tokenize`") from None
        total = sum(file.tokens for file in manifest.files)
        if total != manifest.tokens:
            raise UserError(f"{where}: says {manifest.tokens} tokens, its files have {total}; make it again")
        return manifest


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file. Raises UserError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the manifest ({error.strerror}); make it with `spes-p2p tokenize`") from None
    return Manifest.from_json(text, str(path))


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest whole or not at all."""
    write_whole(path, manifest.to_json().encode())


def locate(manifest: Manifest, folders: Sequence[Path]) -> tuple[Path, ...]:
    """Where each token file is on this machine: at its path below one of `folders`, else there by its bare name.

    Raises UserError when a file is in none of them, or nowhere as long as the manifest says.
    """
    return tuple(locate_file(file, folders) for file in manifest.files)


def open_corpus(manifest: Manifest, folders: Sequence[Path], verified: Path | None = None,
                on_progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[TokenArray, ...]:
    """Find, verify and map the token files: one read-only array of ids `[tokens]` a file.

    Verifying reads a file once: its sha256 and its largest id. `verified` is a small JSON file in the run-dir that remembers
    files by path, size and modification time, so that the next start does not read them again.
    `on_progress(bytes_done, bytes_total)`. Raises UserError as `locate` does, on another hash or an id beyond the vocabulary.
    """
    paths = dict(zip(manifest.files, locate(manifest, folders), strict=True))
    _verify_once(manifest, paths, verified, on_progress)
    return tuple(open_tokens(paths[file], file.dtype) for file in manifest.files)


def find_local(manifest: Manifest, folders: Sequence[Path], verified: Path | None = None) -> dict[TokenFile, Path]:
    """The token files that are on this machine, verified as `open_corpus` does; those that peers can serve may be absent.

    Raises UserError as `open_corpus` does.
    """
    paths = {file: locate_file(file, folders) for file in manifest.files
             if file.pieces_sha256 is None or any(path.is_file() for path in _candidates(file, folders))}
    _verify_once(manifest, paths, verified, lambda done, total: None)
    return paths


def check_local(manifest: Manifest, folders: Sequence[Path]) -> None:
    """Raise UserError, as `open_corpus` does, unless each token file is on this machine or can be made from its source."""
    paths = {file: locate_file(file, folders) for file in manifest.files
             if file.source is None or any(path.is_file() for path in _candidates(file, folders))}
    _verify_once(manifest, paths, None, lambda done, total: None)


def find_hashes(file: TokenFile, folders: Sequence[Path]) -> bytes | None:
    """The list of piece hashes that lies where the token file is looked for; not verified. None when there is none."""
    for path in _candidates(file, folders):
        listed = path.with_name(path.name + HASHES)
        if listed.is_file():
            return listed.read_bytes()
    return None


def _verify_once(manifest: Manifest, paths: Mapping[TokenFile, Path], verified: Path | None,
                 on_progress: Callable[[int, int], None]) -> None:
    """Read each file that is not remembered in `verified`, and remember it. Raises UserError."""
    known = _read_verified(verified)
    total, done = sum(path.stat().st_size for path in paths.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    for file, path in paths.items():
        name, fingerprint = str(path.resolve()), _fingerprint(path, file, manifest.vocab_size)
        if known.get(name) == fingerprint:
            advance(path.stat().st_size)
        else:
            _verify(path, file, manifest.vocab_size, advance)
            known[name] = fingerprint
    if verified is not None:
        write_whole(verified, json.dumps(known, indent=1).encode())


def check_vocabulary(manifest: Manifest, tokenizer_sha256: str, model_vocab_size: int, where: str) -> None:
    """Raise UserError unless the manifest was made with this tokenizer and the model has a row for each of its ids."""
    if manifest.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(f"{where}: made with another tokenizer (sha256 {manifest.tokenizer_sha256[:12]}..., the campaign's "
                        f"is {tokenizer_sha256[:12]}...); tokenize the text again, or name that tokenizer in data.tokenizer")
    if manifest.vocab_size > model_vocab_size:
        raise UserError(f"{where}: its tokenizer has {manifest.vocab_size} ids, the model only {model_vocab_size}; "
                        f"raise model.vocab_size to at least {manifest.vocab_size}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside, flush it to disk, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def locate_file(file: TokenFile, folders: Sequence[Path]) -> Path:
    """Where one token file is on this machine. Raises UserError as `locate` does."""
    lengths = {path: len(open_tokens(path, file.dtype)) for path in _candidates(file, folders) if path.is_file()}
    for path, tokens in lengths.items():
        if tokens == file.tokens:
            return path
    for path, tokens in lengths.items():
        raise UserError(f"{path}: has {tokens} {file.dtype} ids, the manifest says {file.tokens}; "
                        f"it is cut short or another file: copy it again")
    searched = ", ".join(str(folder) for folder in folders) or "any folder that is known here"
    raise UserError(f"{file.path}: this token file of the campaign is not in {searched}; copy it there or give --data-dir")


def _candidates(file: TokenFile, folders: Sequence[Path]) -> list[Path]:
    return [folder / file.path for folder in folders] + [folder / Path(file.path).name for folder in folders]


def _verify(path: Path, file: TokenFile, vocab_size: int, on_bytes: Callable[[int], None]) -> None:
    found = scan(path, file.dtype, vocab_size, on_bytes)
    if found.sha256 != file.sha256:
        raise UserError(f"{path}: differs from the campaign's token file (sha256 {found.sha256[:12]}..., expected "
                        f"{file.sha256[:12]}...); copy it again")


def _fingerprint(path: Path, file: TokenFile, vocab_size: int) -> list[Any]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, file.sha256, file.dtype, vocab_size]


def _read_verified(path: Path | None) -> dict[str, Any]:
    """What earlier starts verified; nothing when the file is not there or unreadable, for then all is verified again."""
    if path is None:
        return {}
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
