"""A peer's run-dir: creation, cleanup after a failed start, and loading of its base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from spes_p2p.campaign.files import CAMPAIGN_FILE, CampaignFiles, read_run_dir
from spes_p2p.config.addresses import is_peer_address
from spes_p2p.errors import Damaged, RunDirInUse, UserError
from spes_p2p.rounds.archive import archived_rounds, load_archived
from spes_p2p.rounds.base import Base, load_base
from spes_p2p.rounds.outer import base_size
from spes_p2p.storage.files import require_writable
from spes_p2p.storage.store import DirectoryStore

ADDRESS_FILE = "address"
"""The address that a bootstrap peer shows, in its run-dir."""


def shown_address(run_dir: Path) -> str | None:
    """Return the address that a bootstrap peer showed in its run-dir: None without the file, empty if it is damaged."""
    file = run_dir / ADDRESS_FILE
    said = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else None
    return "" if said and not is_peer_address(said) else said


@contextlib.contextmanager
def made_run_dir(run_dir: Path, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Create the run-dir. If the block raises UserError before a campaign is stored, remove new files.

    If another peer has the run-dir, call `give_up` instead, and remove nothing but an empty folder.
    Raises UserError if it cannot be created or written to.
    """
    before = set(run_dir.iterdir()) if run_dir.is_dir() else None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be a run-dir ({error.strerror}); choose another --run-dir") from None
    require_writable(run_dir)
    try:
        yield
    except RunDirInUse:
        give_up()
        if before is None:
            with contextlib.suppress(OSError):  # it is empty where the other peer uses only the identity
                run_dir.rmdir()
        raise
    except UserError:
        if not (run_dir / CAMPAIGN_FILE).exists():
            for path in set(run_dir.iterdir()) - (before or set()):
                path.unlink()
            if before is None:
                run_dir.rmdir()
        raise


def load_run_dir_base(run_dir: Path, round_number: int | None = None) -> tuple[CampaignFiles, Base]:
    """Return the campaign and the last committed base of a run-dir, or the base archived of a given round.

    Raises UserError if it is missing or damaged.
    """
    known = read_run_dir(run_dir)
    if known is None:
        raise UserError(f"{run_dir}: not a peer's run-dir (it contains no campaign); give the --run-dir of a peer")
    from spes_p2p.model.build import layout_of

    config = known[0].campaign.config
    store, size = DirectoryStore(run_dir), base_size(layout_of(config.model), config.outer)
    try:
        base = load_base(store, size, str(run_dir))
    except Damaged:
        if round_number is None:
            raise
        base = None  # the archived one may be whole
    if round_number is not None and (base is None or base.round != round_number):
        base = load_archived(store, round_number, size, str(run_dir))
        if base is None:
            kept = ", ".join(map(str, archived_rounds(store))) or "none"
            raise UserError(f"--round {round_number}: not kept in {run_dir}; rounds archived there: {kept}")
    if base is None:
        raise UserError(f"{run_dir}: contains no base yet; wait until the peer has downloaded one")
    return known[0], base
