"""Documents from text files: JSON lines (.jsonl, also .gz and .zst), .parquet, and .txt (one document a file)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from spes_p2p.errors import UserError

CHUNK_BYTES = 2**20
OTHER_FIELD = "rename the one with the text, or name it with `spes-p2p tokenize --text-field`"
"""`init` reads text too, and has no such option."""

Documents = Iterator[tuple[str, int]]
"""(Text, bytes of the file read so far), without empty documents."""


def read_documents(path: Path, text_field: str = "text") -> Documents:
    """Yield the documents of one file in order. The file name determines the format.

    Raises UserError naming the file and the line or row: missing, unknown format, truncated, not UTF-8, not JSON, no text.
    """
    reader = _reader_of(str(path))
    try:
        with path.open("rb") as file:
            yield from ((text, done) for text, done in reader(file, str(path), text_field) if text)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror or error}); check the file and its permissions") from None


def check_text_files(paths: Sequence[Path]) -> None:
    """Raise UserError for a path that is missing, no regular file, or of an unknown format."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file; correct the path")
        if path.is_dir():
            raise UserError(f"{path}: is a folder; name the files in it")
        _reader_of(str(path))
        if not path.is_file():
            raise UserError(f"{path}: not a regular file; write its text to one")


def _reader_of(name: str) -> Callable[[BinaryIO, str, str], Documents]:
    """Return the reader for a file name. Raises UserError for an unknown extension."""
    for ending, reader in READERS.items():
        if name.lower().endswith(ending):
            return reader
    raise UserError(f"{name}: unknown format; text comes as {', '.join(READERS)}")


def _plain_jsonl(raw: BinaryIO, name: str, field: str) -> Documents:
    return _parse_lines(_lines(_chunks(raw)), name, field, raw)


def _gzip_jsonl(raw: BinaryIO, name: str, field: str) -> Documents:
    with gzip.GzipFile(fileobj=raw) as file:
        try:
            yield from _parse_lines(_lines(_chunks(file)), name, field, raw)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{name}: the gzip data is truncated or damaged ({error}); copy it again") from None


def _zstd_jsonl(raw: BinaryIO, name: str, field: str) -> Documents:
    try:
        yield from _parse_lines(_lines(_zstd_chunks(raw, name)), name, field, raw)
    except zstandard.ZstdError as error:
        raise UserError(f"{name}: the zstd data is damaged ({error}); copy it again") from None


def _parquet(raw: BinaryIO, name: str, field: str) -> Documents:
    try:
        table = pq.ParquetFile(raw)
        if field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f"{name}: has no column '{field}', only {columns}; {OTHER_FIELD}")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield _checked(text, f"{name}, row {row}", field), raw.tell()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name}: not a complete parquet file ({str(error).splitlines()[0]}); copy it again") from None


def _text(raw: BinaryIO, name: str, field: str) -> Documents:
    content = raw.read()
    yield _decoded(content, name), len(content)


READERS: dict[str, Callable[[BinaryIO, str, str], Documents]] = {
    ".jsonl": _plain_jsonl,
    ".jsonl.gz": _gzip_jsonl,
    ".json.gz": _gzip_jsonl,
    ".jsonl.zst": _zstd_jsonl,
    ".json.zst": _zstd_jsonl,
    ".parquet": _parquet,
    ".txt": _text,
}


def _parse_lines(lines: Iterator[bytes], name: str, field: str, raw: BinaryIO) -> Documents:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(_decoded(line, where))
        except RecursionError:
            raise UserError(f"{where}: nested too deep; each line is one object like {{\"{field}\": \"...\"}}") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); each line is one object like "
                            f'{{"{field}": "..."}}') from None
        except ValueError as error:  # Python reads no number of thousands of digits
            raise UserError(f"{where}: cannot be read ({error}); correct the line") from None
        if not isinstance(record, dict) or field not in record:
            raise UserError(f"{where}: has no field '{field}'; {OTHER_FIELD}")
        yield _checked(record[field], where, field), raw.tell()


def _checked(text: object, where: str, field: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where}: field '{field}' is {type(text).__name__}, not text; {OTHER_FIELD}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{error.reason} at character {error.start}"
        raise UserError(f"{where}: field '{field}' is not valid Unicode ({problem}); correct the line") from None
    return text


def _decoded(content: bytes, where: str) -> str:
    if b"\0" in content:
        raise UserError(f"{where}: has zero bytes, so it is UTF-16 or no text; convert it to UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); convert it to UTF-8") from None


def _chunks(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _zstd_chunks(raw: BinaryIO, name: str) -> Iterator[bytes]:
    """Decompress frame by frame. zstandard's stream reader would mistake a truncated frame for the end of the file."""
    frame = None
    for chunk in _chunks(raw):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise UserError(f"{name}: the zstd data is truncated; copy it again")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
