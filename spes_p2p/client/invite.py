"""`spes-p2p invite`: sign an invitation with the owner's key."""

from __future__ import annotations

import time
from pathlib import Path

from spes_p2p.campaign.files import CampaignFiles, read_run_dir
from spes_p2p.campaign.invitations import Guest
from spes_p2p.client.connection import connect
from spes_p2p.client.owner import owner_key, require_owner
from spes_p2p.config.addresses import check_peer_addresses
from spes_p2p.consensus.admission import signed_invitation
from spes_p2p.consensus.control import ControlRecords, is_banned
from spes_p2p.consensus.output import CONTROL
from spes_p2p.errors import UserError
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.net.identity import Visitor
from spes_p2p.peer.durable import read_log, read_record
from spes_p2p.storage.store import DirectoryStore


async def make_invitation(target: str, key: Path, guest: Guest) -> tuple[Invitation, bool]:
    """Return the signed invitation, and whether its peer is banned. Raises UserError.

    `target`: address of a peer, or a run-dir of the campaign.
    """
    owner = owner_key(key)
    files, genesis, order = await _campaign(target)
    config = files.campaign.config
    require_owner(config.name, genesis, owner, key)
    if config.admission == "friends":
        raise UserError(f"campaign {config.name} admits friends, who need no invitation; see docs/admission.md")
    if config.admission == "open" and guest.roles == ("trainer",):
        raise UserError(f"campaign {config.name} is open: trainers need no invitation; give --roles trainer,elector or helper")
    expires = int(time.time()) + guest.seconds
    made = signed_invitation(Invitation(genesis.campaign, guest.peer, guest.roles, expires, b""), owner)
    return made, is_banned(order, guest.peer)


async def _campaign(target: str) -> tuple[CampaignFiles, Commit, Control | None]:
    if target.startswith(("/ip", "/dns")):
        check_peer_addresses([target])
        async with connect([target]) as swarm:
            return await swarm.files(), swarm.genesis, await swarm.newest_order(None)
    known = read_run_dir(Path(target))
    if known is None:
        raise UserError(f"{target}: neither the address of a peer (/ip4/.../p2p/...) nor a run-dir with a campaign; "
                        "a bootstrap peer's has one once it has started")
    store, reader = DirectoryStore(Path(target)), Visitor("")
    log = read_log(store, known[1], reader)
    return *known, ControlRecords(log, reader, read_record(store, CONTROL, None)).newest
