"""The text of learning experiments: several domains, tokenized separately with a small common tokenizer."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from spes_p2p.config.model import ModelSection
from spes_p2p.data.documents import read_documents
from spes_p2p.data.local_files import open_corpus
from spes_p2p.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.token_files import TokenArray
from spes_p2p.data.tokenizers import END_OF_TEXT, train_tokenizer
from spes_p2p.data.tokenizing import tokenize
from spes_p2p.errors import UserError
from spes_p2p.model.build import State
from spes_p2p.model.export import export_checkpoint

TRAIN, HELD_OUT = "train", "val"
SUFFIX = ".jsonl.zst"
TOKENIZER = "tokenizer.json"
EVERY, CHARACTERS = 8, 20_000
"""Train the tokenizer on the first characters of every eighth document."""


@dataclass(frozen=True)
class Text:
    """A prepared folder: the token files of each domain."""

    train: Mapping[str, Sequence[TokenArray]]
    held_out: Mapping[str, Sequence[TokenArray]]
    digest: str
    """`text_digest` of the folder."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, sorted."""
        return tuple(sorted(self.train))

    def reader(self, sequence_length: int, seed: int, domains: Sequence[str] = ()) -> SampleReader:
        """Return a reader of training samples of these domains (default: all), shuffled one by one."""
        files = [file for domain in domains or self.domains for file in self.train[domain]]
        return SampleReader(files, sequence_length, seed, piece_samples=1)

    def held_out_readers(self, sequence_length: int) -> dict[str, SampleReader]:
        """Return readers of held-out samples by domain."""
        return {domain: SampleReader(self.held_out[domain], sequence_length, 0) for domain in self.domains}


def prepare(source: Path, output: Path, vocab_size: int) -> None:
    """Tokenize `{domain}.train.jsonl.zst` and `{domain}.val.jsonl.zst` of a folder into `output`. Raises UserError."""
    domains = sorted(path.name.partition(".")[0] for path in source.glob(f"*.{TRAIN}{SUFFIX}"))
    if not domains:
        raise UserError(f"{source}: has no *.{TRAIN}{SUFFIX}; give a folder with one such file per domain")
    output.mkdir(parents=True, exist_ok=True)
    beginnings = (text for domain in domains for text in _beginnings(source / f"{domain}.{TRAIN}{SUFFIX}"))
    train_tokenizer(beginnings, vocab_size).save(str(output / TOKENIZER), pretty=False)
    for domain in domains:
        for part in (TRAIN, HELD_OUT):
            path = source / f"{domain}.{part}{SUFFIX}"
            tokenize([path], output / TOKENIZER, output, prefix=f"{domain}_{part}_", overwrite=True)


def open_text(folder: Path) -> Text:
    """Open a folder written by `prepare`. Raises UserError if it has no text."""
    manifests = _manifests(folder)
    train, held_out = (
        {name.removesuffix(f"_{part}_{MANIFEST_NAME}"): open_corpus(manifest, [folder])
         for name, manifest in manifests.items() if name.endswith(f"_{part}_{MANIFEST_NAME}")}
        for part in (TRAIN, HELD_OUT)
    )
    return Text(train, held_out, text_digest(folder))


def text_digest(folder: Path) -> str:
    """Return the digest of a prepared folder's token files, on which results depend. Raises UserError if it has no text."""
    files = (file.sha256 for manifest in _manifests(folder).values() for file in manifest.files)
    return hashlib.sha256("".join(files).encode()).hexdigest()


def endpoint_of(folder: Path, key: str) -> Path:
    """Return the path of a run's final checkpoint in a prepared folder."""
    return folder / "endpoints" / key


def keep_endpoint(folder: Path, key: str, model: ModelSection, weights: State) -> None:
    """Export a run's final weights for `tools/experiments evaluate`, replacing those of an earlier attempt."""
    output = endpoint_of(folder, key)
    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(model, weights, folder / TOKENIZER, END_OF_TEXT, None, output)


def _manifests(folder: Path) -> dict[str, Manifest]:
    manifests = {path.name: read_manifest(path) for path in sorted(folder.glob(f"*{MANIFEST_NAME}"))}
    if not manifests:
        raise UserError(f"{folder}: has no prepared text; run tools/experiments prepare --text FOLDER --output {folder}")
    return manifests


def _beginnings(path: Path) -> Iterator[str]:
    return (text[:CHARACTERS] for text, _ in islice(read_documents(path, "text"), 0, None, EVERY))
