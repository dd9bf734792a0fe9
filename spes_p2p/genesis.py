"""Before round 0: base 0 is made once, by the bootstrap peer, and so is the head that everything follows."""

from __future__ import annotations

import numpy as np

from spes_p2p.config import Campaign
from spes_p2p.messages.consensus import Head
from spes_p2p.messages.samples import Cursor
from spes_p2p.swarm.interfaces import Store
from spes_p2p.sync.base import Base, save_base
from spes_p2p.sync.digest import state_digest


def make_genesis(campaign: Campaign, bootstrap: str, base0: np.ndarray, disk: str) -> Head:
    """The head before round 0: base 0, made once, and the bootstrap peer as the only elector, with the disk it votes with."""
    return Head(
        campaign=campaign.hash,
        epoch=0,
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
        disks=(disk,),
    )


def save_base_0(store: Store, genesis: Head, base0: np.ndarray) -> None:
    """What a bootstrap peer starts from."""
    save_base(store, Base(genesis.id, -1, base0, genesis.base_digest, None))
