"""The genesis commit of a bootstrap peer, created with base 0 or fetched from other bootstrap peers; a joiner's own base 0.

`make_layout`, `load_or_make_genesis` and `make_base_0` import torch: the peer runs them in a process of their own (`apart.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spes_p2p.campaign.files import CampaignFiles, check_run_dir, fetch_campaign, read_genesis
from spes_p2p.campaign.genesis import make_genesis, save_base_0
from spes_p2p.config.addresses import peer_of
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.config.model import ModelSection
from spes_p2p.content.bases import newest_bases
from spes_p2p.errors import UserError, printable
from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Layout
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.units import short_peer
from spes_p2p.peer.durable import voter_incarnation
from spes_p2p.peer.node import Node
from spes_p2p.rounds.base import BASE
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.digest import state_digest
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.results import replayable_rounds
from spes_p2p.session.apart import run_apart
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import DirectoryStore

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
WORTH_MAKING_BYTES = 2**28
"""A smaller base is downloaded before another process has imported torch and made it, unless the user names a checkpoint."""


def make_layout(model: ModelSection) -> Layout:
    """Return the layout of the model's flat state."""
    from spes_p2p.model.build import layout_of

    return layout_of(model)


def load_or_make_genesis(files: CampaignFiles, run_dir: Path, bootstrap: str) -> tuple[Layout, Commit]:
    """Return the layout, and the genesis commit in the run-dir, or create it together with base 0. Raises UserError."""
    layout, known, store = make_layout(files.campaign.config.model), read_genesis(run_dir), DirectoryStore(run_dir)
    if known is not None:
        check_run_dir(files, known, run_dir)
        if store.read(BASE) is None and state_digest(values := _base_0(files, layout, store)) == known.base_digest:
            save_base_0(store, known, values)
        return layout, known
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


def require_checkpoint(settings: PeerConfig, config: CampaignConfig) -> None:
    """Raise UserError where `settings.checkpoint` is no checkpoint, or the campaign starts from none."""
    from spes_p2p.model.checkpoint import Checkpoint

    if settings.checkpoint is not None and config.start is None:
        start = f"campaign {config.name} starts from random weights"
        raise UserError(f"--from {settings.checkpoint}: {start}; leave out --from")
    if settings.checkpoint is not None:
        Checkpoint(settings.checkpoint)


async def join_with_base_0(
    endpoint: RpcEndpoint, peers: Sequence[str], files: CampaignFiles, genesis: Commit, settings: PeerConfig, store: Store
) -> None:
    """Make base 0 in a new run-dir where this machine has all that is needed, and the rounds since can be replayed.

    This saves the download of a base. Raises UserError where `settings.checkpoint` is not what the campaign started from.
    """
    from spes_p2p.campaign.start import cached
    from spes_p2p.model.build import layout_of

    config, name = files.campaign.config, files.campaign.config.name
    if store.read(BASE) is not None:
        return
    layout = layout_of(config.model)
    if settings.checkpoint is None and 4 * layout.size < WORTH_MAKING_BYTES:
        return
    checkpoint = settings.checkpoint or (cached(config.start.checkpoint) if config.start else None)
    if config.start is not None and checkpoint is None:
        return
    rounds = max((info.round + 1 for info in await newest_bases(endpoint, peers)), default=None)
    replayable = replayable_rounds(layout, group_codecs(config.sync.codec), config.outer)
    if rounds is None or rounds > replayable:
        if settings.checkpoint is not None:
            logger.info("base 0 is too old: peers have the results of the last %d rounds; downloading a base", replayable)
        return
    logger.info("making base 0 from %s", checkpoint or "random weights")
    made = await asyncio.to_thread(run_apart, make_base_0, files, genesis, settings.run_dir, checkpoint)
    if not made and settings.checkpoint is not None:
        start = config.start.checkpoint if config.start else ""
        raise UserError(f"--from {checkpoint}: does not give base 0 of campaign {name}, which started from {start}; leave out "
                        "--from to download a base")
    if not made:
        logger.info("base 0 as made here is not the campaign's; downloading a base")


def make_base_0(files: CampaignFiles, genesis: Commit, run_dir: Path, checkpoint: Path | None) -> bool:
    """Make base 0 in a new run-dir, from this checkpoint or random weights; return whether it is the genesis commit's.

    If it is not, nothing is kept. Raises UserError.
    """
    store = DirectoryStore(run_dir)
    values = _base_0(files, make_layout(files.campaign.config.model), store, checkpoint)
    if state_digest(values) != genesis.base_digest:
        return False
    save_base_0(store, genesis, values)
    return True


def _base_0(files: CampaignFiles, layout: Layout, store: Store, checkpoint: Path | None = None) -> np.ndarray:
    """Return the initial weights with zero momentum, in a scratch file."""
    from spes_p2p.campaign.start import base_0

    values = store.scratch("temporary", base_size(layout, files.campaign.config.outer))
    base_0(files, values[: layout.size], checkpoint)
    values[layout.size :] = 0
    return values


async def warn_of_earlier_start(node: Node) -> None:
    """Warn once if peers are in later rounds of the campaign that this peer has just begun: a restored key begins it anew."""
    while node.log.round < 0:
        ahead = {peer: contact for peer, contact in node.contacts.items() if contact.round >= 0 and contact.addresses}
        if ahead:
            peer, contact = max(ahead.items(), key=lambda each: each[1].round)
            logger.warning(
                "%s says that it is in round %d of this campaign, which begins anew here; if the old run-dir is lost, stop "
                "this peer, and start it with the same identity.key in an empty run-dir and --peer %s",
                short_peer(peer), contact.round + 1, printable(contact.addresses[0]),
            )
            return
        await asyncio.sleep(LOOK_EVERY_S)
