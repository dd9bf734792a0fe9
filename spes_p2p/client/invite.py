"""`spes-p2p invite`: sign an invitation with the owner's key."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from spes_p2p.campaign.files import CampaignFiles, read_run_dir
from spes_p2p.campaign.invitations import to_text
from spes_p2p.client.connection import connect
from spes_p2p.client.owner import owner_key, require_owner
from spes_p2p.config.addresses import check_peer_addresses, is_peer_id
from spes_p2p.consensus.admission import signed_invitation
from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Invitation, Role
from spes_p2p.messages.consensus import Commit

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


async def make_invitation(target: str, key: Path, guest: Guest) -> str:
    """Return the signed invitation as text. `target`: address of a peer, or a run-dir of the campaign. Raises UserError."""
    owner = owner_key(key)
    files, genesis = await _campaign(target)
    config = files.campaign.config
    require_owner(config.name, genesis, owner, key)
    if config.admission == "friends":
        raise UserError(f"campaign {config.name} admits friends, who need no invitation; see docs/admission.md")
    if config.admission == "open" and guest.roles == ("trainer",):
        raise UserError(f"campaign {config.name} is open: trainers need no invitation; give --roles trainer,elector or helper")
    expires = int(time.time()) + guest.seconds
    return to_text(signed_invitation(Invitation(genesis.campaign, guest.peer, guest.roles, expires, b""), owner))


async def _campaign(target: str) -> tuple[CampaignFiles, Commit]:
    if target.startswith(("/ip", "/dns")):
        check_peer_addresses([target])
        async with connect([target]) as swarm:
            return swarm.files, swarm.genesis
    known = read_run_dir(Path(target))
    if known is None:
        raise UserError(f"{target}: neither the address of a peer (/ip4/.../p2p/...) nor a run-dir with a campaign")
    return known
