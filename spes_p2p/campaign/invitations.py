"""An owner's invitation as text that people paste, and its file in a run-dir."""

from __future__ import annotations

import base64
import binascii
import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from spes_p2p.config.addresses import is_peer_id
from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Invitation, Role
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.storage.files import write_whole

PREFIX = "spes-invitation-"
FILE = "invitation"
LONGEST = 2**13
"""Characters; an invitation with a key of 4096 bits has some 1700."""
ROLES: tuple[Role, ...] = get_args(Role)
LONGEST_S = 10 * 365 * 86400


@dataclass(frozen=True)
class Guest:
    """Whom an invitation is for."""

    peer: str
    """Empty: whoever holds the invitation."""
    roles: tuple[Role, ...]
    seconds: int
    """How long the invitation holds."""


def parse_guest(peer: str | None, roles: str, seconds: int) -> Guest:
    """Check what the owner typed. Raises UserError."""
    named = tuple(role.strip() for role in roles.split(","))
    for role in named:
        if role not in ROLES:
            raise UserError(f"--roles {roles}: unknown role {role!r}; give some of {', '.join(ROLES)}")
    known = tuple(role for role in ROLES if role in named)
    if "elector" in known and "trainer" not in known:
        raise UserError(f"--roles {roles}: an elector is a trainer that votes; give --roles trainer,elector")
    if peer is not None and not is_peer_id(peer):
        raise UserError(f"--peer {peer}: not the whole id of a peer; spes-p2p identity prints it on the peer's machine")
    if peer is None and known != ("trainer",):
        raise UserError(f"--roles {roles}: whoever finds this invitation could vote; name the peer with --peer")
    if seconds > LONGEST_S:
        raise UserError(f"--expires: at most {LONGEST_S // 86400}d")
    return Guest(peer or "", known, seconds)


def to_text(invitation: Invitation) -> str:
    """Return the invitation as one word."""
    return PREFIX + base64.urlsafe_b64encode(pack(invitation)).decode().rstrip("=")


def describe(invitation: Invitation) -> str:
    """Say for people whom it is for, what it allows and until when."""
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(invitation.expires))
    return f"for {invitation.peer or 'whoever holds it'}, as {' and '.join(invitation.roles)}, until {until}"


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


def keep_invitation(invitation: Invitation | None, run_dir: Path) -> None:
    """Write the invitation, if any, to the run-dir, readable only by its user: whoever holds a bearer invitation may use it."""
    if invitation is not None:
        write_whole(run_dir / FILE, f"{to_text(invitation)}\n".encode(), 0o600)


def kept(run_dir: Path) -> Invitation | None:
    """Return the invitation in a run-dir, if any. Raises UserError when it is damaged."""
    path = run_dir / FILE
    try:
        return from_text(path.read_text(errors="replace"), str(path)) if path.exists() else None
    except UserError:
        raise UserError(f"{path}: damaged; give the invitation again with --invite, or delete the file") from None
