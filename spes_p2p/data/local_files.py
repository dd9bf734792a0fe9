"""Token files that lie on this machine: found in the folders that its user names, and verified against the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.data.manifest import HASHES, Manifest, TokenFile, write_whole
from spes_p2p.data.token_files import TokenArray, open_tokens, scan
from spes_p2p.errors import UserError


def open_corpus(manifest: Manifest, folders: Sequence[Path], verified: Path | None = None,
                on_progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[TokenArray, ...]:
    """Find, verify and map all token files: one read-only array of ids `[tokens]` a file.

    Verifying reads a file once: its sha256 and its largest id. `verified` is a small JSON file in the run-dir that remembers
    files by path, size and modification time, so that the next start does not read them again.
    `on_progress(bytes_done, bytes_total)`. Raises UserError as `locate_file` does, and for another hash or an id beyond the
    vocabulary.
    """
    paths = {file: locate_file(file, folders) for file in manifest.files}
    _verify_once(manifest, paths, verified, on_progress)
    return tuple(open_tokens(paths[file], file.dtype) for file in manifest.files)


def find_local(manifest: Manifest, folders: Sequence[Path], verified: Path | None = None) -> dict[TokenFile, Path]:
    """The token files that lie on this machine, verified as `open_corpus` does.

    Raises UserError for a file that is there and wrong, as `open_corpus` does.
    """
    paths = {file: locate_file(file, folders) for file in manifest.files if _is_there(file, folders)}
    _verify_once(manifest, paths, verified, lambda done, total: None)
    return paths


def check_local(manifest: Manifest, folders: Sequence[Path]) -> None:
    """Raise UserError, as `open_corpus` does, unless each token file lies on this machine or is published."""
    paths = {file: locate_file(file, folders) for file in manifest.files if file.url is None or _is_there(file, folders)}
    _verify_once(manifest, paths, None, lambda done, total: None)


def find_hashes(file: TokenFile, folders: Sequence[Path]) -> bytes | None:
    """The list of piece hashes that lies where the token file is looked for; not verified. None when there is none."""
    for path in _candidates(file, folders):
        listed = path.with_name(path.name + HASHES)
        if listed.is_file():
            return listed.read_bytes()
    return None


def locate_file(file: TokenFile, folders: Sequence[Path]) -> Path:
    """Where one token file is on this machine. Raises UserError: nowhere, or not as long as the manifest says."""
    lengths = {path: len(open_tokens(path, file.dtype)) for path in _candidates(file, folders) if path.is_file()}
    for path, tokens in lengths.items():
        if tokens == file.tokens:
            return path
    for path, tokens in lengths.items():
        raise UserError(f"{path}: has {tokens} {file.dtype} ids, the manifest says {file.tokens}; "
                        f"it is cut short or another file: copy it again")
    searched = ", ".join(str(folder) for folder in folders) or "any folder that is known here"
    raise UserError(f"{file.path}: this token file of the campaign is not in {searched}; copy it there")


def _candidates(file: TokenFile, folders: Sequence[Path]) -> list[Path]:
    return [folder / file.path for folder in folders] + [folder / Path(file.path).name for folder in folders]


def _is_there(file: TokenFile, folders: Sequence[Path]) -> bool:
    return any(path.is_file() for path in _candidates(file, folders))


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
