"""The genesis commit of a bootstrap peer, created with base 0 or fetched from other bootstrap peers.

`make_layout` and `load_or_make_genesis` import torch: the peer runs them in a process of their own (`apart.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spes_p2p.campaign.files import CampaignFiles, check_run_dir, fetch_campaign, read_run_dir
from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.addresses import peer_of
from spes_p2p.config.model import ModelSection
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Layout
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.rounds.base import BASE
from spes_p2p.rounds.digest import state_digest
from spes_p2p.rounds.outer import base_size
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import DirectoryStore


def make_layout(model: ModelSection) -> Layout:
    """Return the layout of the model's flat state."""
    from spes_p2p.model.build import layout_of

    return layout_of(model)


def load_or_make_genesis(files: CampaignFiles, run_dir: Path, bootstrap: str) -> tuple[Layout, Commit]:
    """Return the layout, and the genesis commit in the run-dir, or create it together with base 0. Raises UserError."""
    layout, known, store = make_layout(files.campaign.config.model), read_run_dir(run_dir), DirectoryStore(run_dir)
    if known is not None:
        check_run_dir(files, known[1], run_dir)
        if store.read(BASE) is None and state_digest(values := _base_0(files, layout, store)) == known[1].base_digest:
            save_base_0(store, known[1], values)
        return layout, known[1]
    values = _base_0(files, layout, store)
    genesis = make_genesis(files.campaign, bootstrap, values, voter_incarnation(store, random.Random()))
    if store.read(BASE) is None:
        save_base_0(store, genesis, values)
    return layout, genesis


async def fetch_genesis(endpoint: RpcEndpoint, others: Sequence[str], files: CampaignFiles, run_dir: Path) -> Commit:
    """Return the genesis commit that other bootstrap peers serve. Raises UserError if it is of another campaign."""
    theirs, genesis = await fetch_campaign(endpoint, [peer_of(address) for address in others])
    if theirs.campaign.hash != files.campaign.hash:
        raise UserError(
            f"--peer {others[0]}: serves campaign {theirs.campaign.config.name} ({theirs.campaign.hash[:12]}), not "
            f"{files.campaign.config.name} ({files.campaign.hash[:12]}); give all bootstrap peers the same files"
        )
    check_run_dir(files, genesis, run_dir)
    return genesis


def _base_0(files: CampaignFiles, layout: Layout, store: Store) -> np.ndarray:
    """Return the initial weights with zero momentum, in a scratch file."""
    from spes_p2p.campaign.start import base_0

    values = store.scratch("temporary", base_size(layout, files.campaign.config.outer))
    base_0(files, values[: layout.size])
    values[layout.size :] = 0
    return values
