"""Token files as SPES and OLMo write them: a raw little-endian array of uint16 or uint32 ids, without a header.

The name ends in `.npy` although numpy cannot load it; a file with a numpy header is read as the header says. The raw format
does not record its dtype, and uint32 ids read as uint16 have a 0 in every second place, so dtypes are checked against the ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from spes_p2p.data.pieces import PieceHasher
from spes_p2p.errors import UserError

Dtype = Literal["uint16", "uint32"]
TokenArray = npt.NDArray[np.unsignedinteger[Any]]

NPY_MAGIC = b"\x93NUMPY"
SCAN_BYTES = 2**24
"""Block size of a pass over a file; a multiple of every item size."""
MIN_EVIDENCE_IDS = 64
"""Minimum number of ids for which a 0 in every second place means uint32 (with fewer it may be chance: id 0 may end texts)."""


@dataclass(frozen=True)
class Scan:
    """The result of a pass over a token file."""

    sha256: str
    tokens: int
    piece_hashes: bytes


def smallest_dtype(vocab_size: int) -> Dtype:
    """Return the narrowest dtype that can represent every id below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def open_tokens(path: Path, dtype: Dtype) -> TokenArray:
    """Map a token file read-only: ids `[tokens]` of `dtype`.

    Raises UserError: missing, empty, not a whole number of ids, or a numpy header with another dtype or shape.
    """
    if has_numpy_header(path):
        return _open_numpy(path, dtype)
    itemsize = np.dtype(dtype).itemsize
    if path.stat().st_size % itemsize:
        raise UserError(f"{path}: {path.stat().st_size} bytes are not a whole number of {dtype} ids; it is truncated or "
                        f"of another dtype: copy it again or name its dtype")
    return cast(TokenArray, np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r"))


def detect_dtype(path: Path, vocab_size: int) -> Dtype:
    """Return the dtype of a token file, from its numpy header or, if it is raw, from its first ids.

    Raw ids are uint32 if, read as uint32, all are below `vocab_size`: for uint16 data that would need every second id to be
    nearly 0. Raises UserError if neither dtype gives ids below `vocab_size`.
    """
    if has_numpy_header(path):
        found = str(_load_numpy(path).dtype)
        if found not in ("uint16", "uint32"):
            raise UserError(f"{path}: contains {found}, expected uint16 or uint32; tokenize the text again")
        return cast(Dtype, found)
    with path.open("rb") as file:
        head = file.read(SCAN_BYTES)
    if path.stat().st_size % 2:
        raise UserError(f"{path}: {path.stat().st_size} bytes are no whole number of ids; it is truncated, or not a token "
                        "file: copy it again")
    candidates: tuple[Dtype, ...] = ("uint32", "uint16")
    for dtype in candidates:
        itemsize = np.dtype(dtype).itemsize
        if path.stat().st_size % itemsize == 0 and int(_ids(head, dtype).max()) < vocab_size:
            return dtype
    raise UserError(f"{path}: read as uint16 or as uint32 it has ids beyond the vocabulary of {vocab_size}; "
                    f"it is not a token file, or was made with another tokenizer")


def scan(path: Path, dtype: Dtype, vocab_size: int, on_bytes: Callable[[int], None] = lambda count: None) -> Scan:
    """Read a token file once: sha256 (header included), number of ids, hashes of its pieces. `on_bytes(n)` after each n bytes.

    Raises UserError for an id not below `vocab_size`, for ids that are all 0, for uint32 ids read as uint16, and as
    `open_tokens` does.
    """
    tokens = open_tokens(path, dtype)
    digest, header_bytes = hashlib.sha256(), path.stat().st_size - tokens.nbytes
    pieces = PieceHasher()
    max_id, odd_are_zero = 0, dtype == "uint16" and len(tokens) >= MIN_EVIDENCE_IDS
    with path.open("rb") as file:
        digest.update(file.read(header_bytes))
        on_bytes(header_bytes)
        while block := file.read(SCAN_BYTES):
            digest.update(block)
            pieces.update(block)
            ids = _ids(block, dtype)
            max_id = max(max_id, int(ids.max()))
            odd_are_zero = odd_are_zero and not ids[1::2].any()
            on_bytes(len(block))
    if max_id == 0:
        raise UserError(f"{path}: contains nothing but zeros, so it was never written, or is not a token file: copy it again")
    if odd_are_zero:
        raise UserError(f"{path}: every second uint16 id is 0, so this file contains uint32 ids; set its dtype to uint32")
    if max_id >= vocab_size:
        raise UserError(f"{path}: has id {max_id}, the vocabulary ends at {vocab_size - 1}; "
                        f"it was made with another tokenizer, or is not {dtype}")
    return Scan(digest.hexdigest(), len(tokens), pieces.hashes())


def has_numpy_header(path: Path) -> bool:
    """Return whether the file begins like numpy's `.npy` format. Raises UserError if it is missing, unreadable or empty."""
    try:
        with path.open("rb") as file:
            start = file.read(len(NPY_MAGIC))
    except OSError as error:
        raise UserError(f"{path}: cannot read the token file ({error.strerror}); copy it there or correct the path") from None
    if not start:
        raise UserError(f"{path}: the token file is empty; copy it again")
    return start == NPY_MAGIC


def _load_numpy(path: Path) -> npt.NDArray[Any]:
    try:
        return cast(npt.NDArray[Any], np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: has a numpy header but cannot be read ({reason}); copy it again") from None


def _open_numpy(path: Path, dtype: Dtype) -> TokenArray:
    array = _load_numpy(path)
    if array.ndim != 1 or array.dtype != np.dtype(dtype).newbyteorder("<") or array.size == 0:
        raise UserError(f"{path}: its numpy header says {array.dtype} of shape {array.shape}, expected a list of {dtype} ids; "
                        f"name its dtype or tokenize the text again")
    return cast(TokenArray, array)


def _ids(block: bytes, dtype: Dtype) -> TokenArray:
    """Return the complete ids in a block of raw bytes."""
    item = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(block, item, count=len(block) // item.itemsize)
