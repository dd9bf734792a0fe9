"""The first base of a peer's life, from its run-dir or from other peers, and the trainer on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import numpy as np

from spes_p2p.errors import PeerUnreachable
from spes_p2p.peer.newest_base import RETRY_S
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.base import Base
from spes_p2p.training.checkpoint import load_checkpoint, newest_checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)

MakeTrainer = Callable[[np.ndarray, tuple[int, ...]], Trainer]
"""Builds the trainer on a base (flat float32) with these owned experts."""


async def restore(replica: Replica, where: str) -> bool:
    """Load base and staged results from this run-dir; False when there is no whole base."""
    if not await replica.store.load(where, replica.validity.derive):
        return False
    await replica.node.world.run_blocking(replica.results.load)
    replica.work.sent_update_lost = True
    return True


async def learn_missed_commits(replica: Replica) -> None:
    """Learn what was decided while this peer was away, before the next look-up asks more peers for it.

    Waits until the log reaches the base, in case the log's file was damaged: other peers have the rest. Also returns when the
    base's branch was given up, or no peer has the rest for `sync.reform_after_s`: a log that begins at a milestone of another
    branch does not say so. `advance` takes another base then.
    """
    log, waited, clock = replica.node.log, 0, asyncio.get_running_loop().time
    until = clock() + replica.node.rules.config.sync.reform_after_s
    await replica.newest.learn_commits()
    while replica.base.round > log.round and not log.gave_up(replica.base.commit) and clock() < until:
        if waited % 30 == 0:
            logger.warning(
                "the log of commits ends at round %d, the base is of round %d: waiting for a peer that has the rest",
                log.round, replica.base.round,
            )
        waited += 1
        await asyncio.sleep(RETRY_S)
        await replica.node.refresh_contacts()
        await replica.newest.learn_commits()


async def download_base(replica: Replica, on_progress: Callable[[int, int], None]) -> None:
    """Download and verify the newest base; wait until a peer has it."""
    while True:
        offers = await replica.newest.offers_of_newest()
        if offers:
            with contextlib.suppress(PeerUnreachable):
                await replica.store.install(await replica.newest.download(offers, None, on_progress))
                await replica.save(at_once=True)
                await replica.store.durable()
                replica.newest.clear()
                return
        await replica.newest.wait_for_donors()


async def begin_training(replica: Replica, make_trainer: MakeTrainer, restored: bool) -> None:
    """Make the trainer on the base; `restored`: continue from the checkpoint in this run-dir."""
    run = replica.node.world.run_blocking
    if restored:
        await replica.replay_until(await run(newest_checkpoint, replica.node.world.store))
    base = replica.base
    assignment = base.assignment(replica.node.peer_id)
    owned = assignment.owned if assignment is not None else ()
    replica.work.trainer = await run(make_trainer, base.values, owned)
    if restored:
        await run(_load_checkpoint, replica, base)


def _load_checkpoint(replica: Replica, base: Base) -> None:
    """Continue from the checkpoint of this base, if there is one."""
    trainer = replica.work.trainer
    assert trainer is not None
    store, is_last = replica.node.world.store, replica.node.log.last.id == base.commit
    found = load_checkpoint(store, trainer, replica.ledger, replica.layout, base.commit, base.round, is_last)
    if found is not None:
        replica.store.checkpoint, replica.store.has_left = found.name, found.has_left
    if found is not None and found.is_whole:
        replica.progress = replica.saved = base.commit, found.steps
        replica.announce()
        if replica.overlaps:  # the checkpoint is not older than the update of its round
            replica.ledger.continue_round()
