"""An owner's invitation as text that people paste, and its file in a run-dir."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import WireError, pack, unpack

PREFIX = "spes-invitation-"
FILE = "invitation"
LONGEST = 2**13
"""Characters; an invitation with a key of 4096 bits has some 1700."""


def to_text(invitation: Invitation) -> str:
    """Return the invitation as one word."""
    return PREFIX + base64.urlsafe_b64encode(pack(invitation)).decode().rstrip("=")


def from_text(text: str, where: str) -> Invitation:
    """Read what `to_text` wrote. Raises UserError naming `where` it came from."""
    word = text.strip()
    try:
        if not word.startswith(PREFIX) or len(word) > LONGEST:
            raise ValueError
        coded = word.removeprefix(PREFIX)
        return unpack(Invitation, base64.b64decode(coded + "=" * (-len(coded) % 4), b"-_", validate=True))
    except (ValueError, binascii.Error, WireError):
        raise UserError(f"{where}: not an invitation; paste the whole line that spes-p2p invite printed") from None


def read_option(given: str) -> Invitation:
    """Return the invitation of `--invite`: the text itself, or a file with it. Raises UserError."""
    if given.strip().startswith(PREFIX):
        return from_text(given, "--invite")
    try:
        content = Path(given).read_text()
    except (OSError, ValueError):
        raise UserError(f"--invite {given[:60]}: neither an invitation nor a file with one; give what spes-p2p invite "
                        "printed") from None
    return from_text(content, given)


def keep(invitation: Invitation, run_dir: Path) -> None:
    """Write the invitation to the run-dir, readable only by its user: whoever holds a bearer invitation may use it."""
    partial = run_dir / f"{FILE}.partial"
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(to_text(invitation) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(run_dir / FILE)


def kept(run_dir: Path) -> Invitation | None:
    """Return the invitation in a run-dir, if any. Raises UserError when it is damaged."""
    path = run_dir / FILE
    return from_text(path.read_text(), str(path)) if path.exists() else None
