"""From text to token files and their manifest, in the layout that SPES and OLMo read.

Documents are concatenated, one end token after each and none before. Everything is written aside; an old manifest goes first
and the new one comes last, so that no manifest ever names files that are not its own.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spes_p2p.data.documents import read_documents, reader_of
from spes_p2p.data.encoding import Encoder
from spes_p2p.data.manifest import HASHES, MANIFEST_NAME, Manifest, Source, TokenFile, read_manifest, write_manifest
from spes_p2p.data.shards import ShardWriter
from spes_p2p.data.sources import check_sources
from spes_p2p.data.token_files import Dtype, detect_dtype, scan, smallest_dtype
from spes_p2p.data.tokenizers import END_OF_TEXT, TokenizerIdentity, check_tokenizer, load_tokenizer
from spes_p2p.errors import UserError

BATCH_CHARACTERS = 2**20
DEFAULT_SHARD_TOKENS = 2**28


@dataclass(frozen=True)
class Progress:
    """How far the tokenizing is."""

    documents: int
    tokens: int
    bytes_done: int
    """Of the input files, compressed as they are."""
    bytes_total: int


def tokenize(inputs: Sequence[Path], tokenizer_json: Path, output_dir: Path, *, eos_token: str = END_OF_TEXT,
             text_field: str = "text", prefix: str = "", shard_tokens: int = DEFAULT_SHARD_TOKENS, dtype: Dtype | None = None,
             overwrite: bool = False, source_prefix: str | None = None,
             on_progress: Callable[[Progress], None] = lambda progress: None) -> Manifest:
    """Tokenize text files into `output_dir`: `{prefix}000_{shard:06d}.npy` and `{prefix}manifest.json`.

    A shard ends before the document that would make it longer than `shard_tokens`. `dtype` None: the narrowest that fits.
    `source_prefix`: where the inputs lie for everybody, so that volunteers can make the tokens themselves. Then each input is
    one shard, however long, and the list of its piece hashes lies beside it (`.npy.hashes`).
    Raises UserError (bad input, no documents, output already there without `overwrite`); then nothing is left half-written.
    """
    identity = check_tokenizer(tokenizer_json, eos_token)
    chosen = dtype or smallest_dtype(identity.vocab_size)
    if identity.vocab_size - 1 > np.iinfo(chosen).max:
        raise UserError(f"{tokenizer_json}: has {identity.vocab_size} ids, too many for {chosen}; use uint32")
    _check_inputs(inputs)
    sources = () if source_prefix is None else check_sources(inputs, source_prefix, text_field)
    old = _old_files(output_dir, prefix, overwrite)
    try:
        with ShardWriter(output_dir, prefix, sys.maxsize if sources else shard_tokens, chosen) as writer:
            encoder = Encoder(load_tokenizer(tokenizer_json), identity.eos_token_id, BATCH_CHARACTERS)
            _write_tokens(inputs, text_field, encoder, writer, sources, on_progress)
            for path in old:
                path.unlink(missing_ok=True)
            writer.publish()
            manifest = _manifest(identity, writer.files)
            write_manifest(manifest, output_dir / f"{prefix}{MANIFEST_NAME}")
            return manifest
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{output_dir}: cannot write token files ({reason}); free space or name another folder") from None


def describe_token_files(paths: Sequence[Path], tokenizer_json: Path, manifest_path: Path, *, eos_token: str = END_OF_TEXT,
                         dtype: Dtype | None = None,
                         on_progress: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Write a manifest for token files that exist already (SPES, OLMo), which stay as they are. `dtype` None: detected.

    `on_progress(bytes_done, bytes_total)`. Raises UserError as `detect_dtype` and `scan` do, and for files without tokens.
    """
    identity = check_tokenizer(tokenizer_json, eos_token)
    if not paths:
        raise UserError("no token files were given; name at least one .npy file")
    folder, files, done = manifest_path.resolve().parent, [], 0
    dtypes = [dtype or detect_dtype(path, identity.vocab_size) for path in paths]
    total = sum(path.stat().st_size for path in paths)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    for path, found in zip(paths, dtypes, strict=True):
        scanned = scan(path, found, identity.vocab_size, advance)
        files.append(TokenFile(_relative(path.resolve(), folder), scanned.sha256, scanned.tokens, found, scanned.pieces_sha256))
    manifest = _manifest(identity, files)
    write_manifest(manifest, manifest_path)
    return manifest


def _write_tokens(inputs: Sequence[Path], text_field: str, encoder: Encoder, writer: ShardWriter, sources: Sequence[Source],
                  on_progress: Callable[[Progress], None]) -> None:
    sizes = [path.stat().st_size for path in inputs]
    for number, path in enumerate(inputs):
        before = sum(sizes[:number])
        for documents, done in encoder.encode(read_documents(path, text_field)):
            for ids in documents:
                writer.add(ids)
            on_progress(Progress(writer.documents, writer.tokens, before + min(done, sizes[number]), sum(sizes)))
        if sources:
            writer.end_source(sources[number])
    if writer.documents == 0:
        raise UserError(f"{', '.join(map(str, inputs))}: no documents with text; give files that hold some")
    on_progress(Progress(writer.documents, writer.tokens, sum(sizes), sum(sizes)))


def _manifest(identity: TokenizerIdentity, files: Sequence[TokenFile]) -> Manifest:
    tokens = sum(file.tokens for file in files)
    return Manifest(identity.sha256, identity.vocab_size, identity.eos_token_id, tokens, tuple(files))


def _check_inputs(inputs: Sequence[Path]) -> None:
    if not inputs:
        raise UserError("no input files were given; name at least one text file")
    for path in inputs:
        reader_of(str(path))
        if not path.is_file():
            raise UserError(f"{path}: no such file; correct the path")


def _old_files(output_dir: Path, prefix: str, overwrite: bool) -> list[Path]:
    """The manifest that is there, then its token files inside the folder: what a new corpus replaces."""
    manifest_path = output_dir / f"{prefix}{MANIFEST_NAME}"
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir}: is a file; name a folder for the token files")
    if not overwrite and (manifest_path.exists() or any(output_dir.glob(f"{glob.escape(prefix)}000_*.npy"))):
        raise UserError(f"{output_dir}: holds such token files already; name another folder or --prefix, or pass --overwrite")
    if not manifest_path.exists():
        return []
    names = [Path(file.path) for file in read_manifest(manifest_path).files]
    inside = [output_dir / name for name in names if len(name.parts) == 1]
    return [manifest_path, *inside, *(path.with_name(path.name + HASHES) for path in inside)]


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
