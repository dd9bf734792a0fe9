"""The manifest names a campaign's token files by path and hash, so that every peer trains on the same tokens.

Peers download it from each other. `local_files.py` finds and verifies files that are on this machine; pieces of the others come
from peers (`content/tokens.py`) or from the URL where a file is published (`url_donor.py`), and are cached (`shelf.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Annotated, ClassVar
from urllib.parse import quote

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from spes_p2p.data.token_files import Dtype
from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole

MANIFEST_NAME = "manifest.json"
HASHES = ".hashes"
"""Suffix of a token file's list of piece hashes, which may be present without the token file."""
MAX_TOTAL_WEIGHT = 20_000
"""Maximum period of a mix in samples: a peer keeps its schedule in memory, and computes it at its start."""
SCHEMES = ("https://", "http://", "s3://", "gs://", "hf://")
"""URL schemes allowed in a manifest. None can name a local file, so a campaign owner cannot choose what is read from a peer's
disk."""


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
        raise ValueError("must be a path below the manifest's folder")
    return path


def _url(url: str) -> str:
    if not url.startswith(SCHEMES) or url.endswith("://") or not url.isprintable():
        raise ValueError(f"must begin with {', '.join(SCHEMES)}")
    return url


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Tokens = Annotated[int, Field(gt=0, le=2**36)]
"""Tokens of one file: its list of piece hashes, which a peer keeps in memory, stays below 40 MB."""


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, AfterValidator(_inside)]
    """Path relative to the manifest's folder, with forward slashes."""
    sha256: Sha256
    tokens: Tokens
    dtype: Dtype
    pieces_sha256: Sha256
    """Root of its piece hashes (`pieces.py`); peers request the file by it."""
    url: Annotated[str, AfterValidator(_url)] | None = None
    """Source of pieces that no peer serves (`url_donor.py`); None: not published."""

    @property
    def num_bytes(self) -> int:
        """Size of the ids, without a numpy header."""
        return self.tokens * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Source:
    """One source of a mix: the next `files` files of the manifest."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    weight: Positive
    """Its samples in each period of the mix; a period has as many samples as all weights together."""
    files: Positive


@dataclass(frozen=True)
class Manifest:
    """A tokenized corpus. Its hash, over `to_json`, is part of the campaign's identity."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    tokenizer_sha256: Sha256
    vocab_size: Positive
    """Exclusive upper bound of the ids."""
    eos_token_id: Annotated[int, Field(ge=0)]
    """Id that ends each document."""
    tokens: Positive
    """Number of tokens in all files."""
    files: Annotated[tuple[TokenFile, ...], Field(min_length=1, strict=False)]
    sources: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    """Sources of a mix (`mix.py`), in the order of the files; empty: the files are one source."""

    def files_of_sources(self) -> tuple[range, ...]:
        """Return the indices of each source's files."""
        stops = list(accumulate(source.files for source in self.sources))
        return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))

    def to_json(self) -> str:
        """Serialize deterministically: equal manifests give equal bytes."""
        content = asdict(self)
        for file in content["files"]:
            if file["url"] is None:
                del file["url"]
        if not self.sources:
            del content["sources"]
        return json.dumps(content, indent=1) + "\n"

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
            raise UserError(f"{where}: says {manifest.tokens} tokens, its files have {total}; recreate it")
        if manifest.sources and sum(source.files for source in manifest.sources) != len(manifest.files):
            raise UserError(f"{where}: its sources do not have as many files as the manifest; recreate it")
        if sum(source.weight for source in manifest.sources) > MAX_TOTAL_WEIGHT:
            raise UserError(f"{where}: the weights of its sources exceed {MAX_TOTAL_WEIGHT} together; recreate it")
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
    """Write a manifest atomically."""
    write_whole(path, manifest.to_json().encode())


def check_url(prefix: str) -> None:
    """Raise UserError unless token files can be published below this URL."""
    try:
        _url(prefix)
    except ValueError as error:
        raise UserError(f"--url {prefix}: {error}; volunteers name a shared folder with --data-dir instead") from None


def publish_at(files: Sequence[TokenFile], prefix: str) -> tuple[TokenFile, ...]:
    """Return the files with their URLs, `prefix`/path. Raises UserError as `check_url` does."""
    check_url(prefix)
    is_web = prefix.startswith(("https://", "http://"))
    return tuple(replace(file, url=f"{prefix.rstrip('/')}/{quote(file.path) if is_web else file.path}") for file in files)


def check_vocabulary(manifest: Manifest, tokenizer_sha256: str, model_vocab_size: int, where: str) -> None:
    """Raise UserError unless the manifest uses this tokenizer and the model has an embedding row for each id."""
    if manifest.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(f"{where}: made with another tokenizer (sha256 {manifest.tokenizer_sha256[:12]}..., the campaign's "
                        f"is {tokenizer_sha256[:12]}...); tokenize the text again, or set data.tokenizer to that tokenizer")
    if manifest.vocab_size > model_vocab_size:
        raise UserError(f"{where}: its tokenizer has {manifest.vocab_size} ids, the model only {model_vocab_size}; "
                        "tokenize the text for this model, or, for random weights, raise model.vocab_size to at least "
                        f"{manifest.vocab_size}")
