"""A bootstrap peer stays who it is: with another key, mistyped perhaps, it gives no orders, and its address leads to nobody."""

from __future__ import annotations

import logging

from spes_p2p.campaign.files import read_genesis
from spes_p2p.config.addresses import peer_of
from spes_p2p.config.campaign import PeerConfig
from spes_p2p.errors import UserError
from spes_p2p.net.identity import DamagedIdentity, RSAIdentity
from spes_p2p.session.run_dir import shown_address

logger = logging.getLogger(__name__)


def require_same_identity(settings: PeerConfig, begins: bool) -> None:
    """Raise UserError if another identity served this run-dir, or the key that --identity names is not there.

    `begins`: it helps no other bootstrap peer, so a campaign may begin here, with a new key.
    """
    path, run_dir = settings.identity_path, settings.run_dir
    before = peer_of(shown_address(run_dir) or "")  # a damaged file is written anew
    if read_genesis(run_dir) is not None:
        try:
            own = RSAIdentity(path).peer_id if path.exists() else None
        except DamagedIdentity:
            raise DamagedIdentity(
                path, f"restore your copy: {run_dir} serves with the key of {before or 'its peer'} only; without one, give a "
                "new --run-dir, and --peer with the address of any other peer (if it was the owner's key, orders end with it)"
            ) from None
        if own is None or before not in ("", own):
            given = "no such file" if own is None else f"the key of {own}"
            raise UserError(f"{path}: {given}, but {run_dir} was served by {before or 'another peer'} before; give that peer's "
                            "key with --identity, or another --run-dir")
    elif settings.identity is not None and not path.exists():
        if not begins:
            raise UserError(f"--identity {str(path)!r}: no such file; give this peer's key, or make one with spes-p2p identity "
                            "and the same option")
        logger.info("%s: no such file; making a new key, that of the campaign's owner", path)
