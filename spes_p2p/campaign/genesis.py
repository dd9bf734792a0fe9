"""Base 0 and the genesis commit, which the bootstrap peer creates once, before round 0."""

from __future__ import annotations

import numpy as np

from spes_p2p.config.campaign import Campaign
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.samples import Cursor
from spes_p2p.rounds.base import Base, save_base
from spes_p2p.rounds.digest import state_digest
from spes_p2p.storage.interfaces import Store


def make_genesis(campaign: Campaign, bootstrap: str, base0: np.ndarray, incarnation: str) -> Commit:
    """Return the commit of base 0, whose only elector is the bootstrap peer with its incarnation."""
    return Commit(
        campaign=campaign.hash,
        term=0,
        round=-1,
        parent="",
        plan="",
        roots=(),
        dropped=(),
        base_digest=state_digest(base0),
        step=0,
        tokens=0,
        members=(),
        owners=((),) * campaign.config.model.moe_num_experts,
        cursor=Cursor(),
        helpers=(bootstrap,),
        electorate=(bootstrap,),
        incarnations=(incarnation,),
    )


def save_base_0(store: Store, genesis: Commit, base0: np.ndarray) -> None:
    """Store base 0 as the base of the genesis commit."""
    save_base(store, Base(genesis.id, -1, base0, genesis.base_digest, None))
