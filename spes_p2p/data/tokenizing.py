"""Converting text to token files and their manifest, in the layout that SPES and OLMo read.

Documents are concatenated, each followed by one end token. When a corpus is replaced, the old manifest is removed first and
the new one written last, so that a manifest never names files of another corpus.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from spes_p2p.data.documents import Documents, check_text_files, read_documents
from spes_p2p.data.manifest import (
    HASHES,
    MANIFEST_NAME,
    Manifest,
    TokenFile,
    check_url,
    publish_at,
    read_manifest,
    write_manifest,
)
from spes_p2p.data.pieces import root_of
from spes_p2p.data.shards import ShardWriter
from spes_p2p.data.token_files import Dtype, detect_dtype, scan, smallest_dtype
from spes_p2p.data.tokenizers import END_OF_TEXT, TokenizerIdentity, check_tokenizer, load_tokenizer
from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole

BATCH_CHARACTERS = 2**20
"""Batch size of the multithreaded encoder. Bounds memory; does not change the tokens."""
DEFAULT_SHARD_TOKENS = 2**28


@dataclass(frozen=True)
class Progress:
    """Progress of `tokenize`."""

    documents: int
    tokens: int
    bytes_done: int
    """Input bytes read, as stored (compressed)."""
    bytes_total: int


def tokenize(inputs: Sequence[Path], tokenizer_json: Path, output_dir: Path, *, eos_token: str = END_OF_TEXT,
             text_field: str = "text", prefix: str = "", shard_tokens: int = DEFAULT_SHARD_TOKENS, dtype: Dtype | None = None,
             overwrite: bool = False, url: str | None = None,
             on_progress: Callable[[Progress], None] = lambda progress: None,
             on_document: Callable[[str], None] = lambda text: None) -> Manifest:
    """Tokenize text files into `output_dir`: `{prefix}000_{shard:06d}.npy`, each with its list of piece hashes (`.npy.hashes`),
    and `{prefix}manifest.json`.

    A shard ends before the document that would make it longer than `shard_tokens`. `dtype` None: the narrowest that fits.
    `url`: where the folder will be published, for the manifest. `on_document` gets the text of each document.
    Raises UserError (bad input, no documents, existing output without `overwrite`) and leaves no partial output.
    """
    identity = check_tokenizer(tokenizer_json, eos_token)
    chosen = dtype or smallest_dtype(identity.vocab_size)
    if identity.vocab_size - 1 > np.iinfo(chosen).max:
        raise UserError(f"{tokenizer_json}: has {identity.vocab_size} ids, too many for {chosen}; use uint32")
    _check_inputs(inputs)
    if url is not None:
        check_url(url)
    old = _old_files(output_dir, prefix, overwrite)
    try:
        with ShardWriter(output_dir, prefix, shard_tokens, chosen) as writer:
            texts = partial(_read, text_field=text_field, on_document=on_document)
            _write_tokens(inputs, texts, load_tokenizer(tokenizer_json), identity.eos_token_id, writer, on_progress)
            for path in old:
                path.unlink(missing_ok=True)
            writer.publish()
            manifest = _manifest(identity, writer.files, url)
            write_manifest(manifest, output_dir / f"{prefix}{MANIFEST_NAME}")
            return manifest
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{output_dir}: cannot write token files ({reason}); free space or name another folder") from None


def describe_token_files(paths: Sequence[Path], tokenizer_json: Path, manifest_path: Path, *, eos_token: str = END_OF_TEXT,
                         dtype: Dtype | None = None, url: str | None = None,
                         on_progress: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Write a manifest for existing token files (SPES, OLMo) without changing them. `dtype` None: detected.

    The files must be below the manifest's folder. `url`: where that folder is published; each file then gets its list of piece
    hashes beside it. `on_progress(bytes_done, bytes_total)`. Raises UserError as `detect_dtype` and `scan` do, and for files
    without tokens or outside the folder.
    """
    identity = check_tokenizer(tokenizer_json, eos_token)
    if not paths:
        raise UserError("no token files were given; name at least one .npy file")
    if url is not None:
        check_url(url)
    names = [_below(path, manifest_path.parent) for path in paths]
    files, done = [], 0
    dtypes = [dtype or detect_dtype(path, identity.vocab_size) for path in paths]
    total = sum(path.stat().st_size for path in paths)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    for path, name, found in zip(paths, names, dtypes, strict=True):
        scanned = scan(path, found, identity.vocab_size, advance)
        files.append(TokenFile(name, scanned.sha256, scanned.tokens, found, root_of(scanned.piece_hashes)))
        if url is not None:
            write_whole(path.with_name(path.name + HASHES), scanned.piece_hashes)
    manifest = _manifest(identity, files, url)
    write_manifest(manifest, manifest_path)
    return manifest


def _encode(
    tokenizer: Tokenizer, eos_token_id: int, documents: Documents
) -> Iterator[tuple[list[npt.NDArray[np.uint32]], int]]:
    """Yield batches: (ids of each document, including its end token; bytes of the text file read so far)."""
    for texts, done in _batches(documents):
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        yield [np.asarray([*encoding.ids, eos_token_id], np.uint32) for encoding in encodings], done


def _batches(documents: Documents) -> Iterator[tuple[list[str], int]]:
    texts: list[str] = []
    characters = done = 0
    for text, done in documents:
        texts.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield texts, done
            texts, characters = [], 0
    if texts:
        yield texts, done


def _read(path: Path, text_field: str, on_document: Callable[[str], None]) -> Documents:
    for text, done in read_documents(path, text_field):
        on_document(text)
        yield text, done


def _write_tokens(inputs: Sequence[Path], texts: Callable[[Path], Documents], tokenizer: Tokenizer, eos_token_id: int,
                  writer: ShardWriter, on_progress: Callable[[Progress], None]) -> None:
    sizes = [path.stat().st_size for path in inputs]
    for number, path in enumerate(inputs):
        before = sum(sizes[:number])
        for documents, done in _encode(tokenizer, eos_token_id, texts(path)):
            for ids in documents:
                writer.add(ids)
            on_progress(Progress(writer.documents, writer.tokens, before + min(done, sizes[number]), sum(sizes)))
    if writer.documents == 0:
        raise UserError(f"{', '.join(map(str, inputs))}: no documents with text; give files that contain text")
    on_progress(Progress(writer.documents, writer.tokens, sum(sizes), sum(sizes)))


def _manifest(identity: TokenizerIdentity, files: Sequence[TokenFile], url: str | None) -> Manifest:
    tokens = sum(file.tokens for file in files)
    listed = tuple(files) if url is None else publish_at(files, url)
    return Manifest(identity.sha256, identity.vocab_size, identity.eos_token_id, tokens, listed)


def _check_inputs(inputs: Sequence[Path]) -> None:
    if not inputs:
        raise UserError("no input files were given; name at least one text file")
    check_text_files(inputs)


def _old_files(output_dir: Path, prefix: str, overwrite: bool) -> list[Path]:
    """Return the files that a new corpus replaces: the present manifest, then its token files inside the folder."""
    manifest_path = output_dir / f"{prefix}{MANIFEST_NAME}"
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir}: is a file; name a folder for the token files")
    if not overwrite and (manifest_path.exists() or any(output_dir.glob(f"{glob.escape(prefix)}000_*.npy"))):
        raise UserError(f"{output_dir}: already contains token files; name another folder or --prefix, or pass --overwrite")
    if not manifest_path.exists():
        return []
    names = [Path(file.path) for file in read_manifest(manifest_path).files]
    inside = [output_dir / name for name in names if len(name.parts) == 1]
    return [manifest_path, *inside, *(path.with_name(path.name + HASHES) for path in inside)]


def _below(path: Path, folder: Path) -> str:
    """Return the path relative to the folder. Links are not resolved: files may be linked into the folder."""
    if not path.exists():
        raise UserError(f"{path}: no such file; correct the path")
    name = os.path.relpath(path, folder)
    if name.startswith(".."):
        raise UserError(f"{path}: outside the manifest's folder, and a manifest does not name paths of this machine; "
                        f"write the manifest at or above the token files, or link them there")
    return Path(name).as_posix()
