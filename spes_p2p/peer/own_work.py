"""This peer's pending work: what it has trained and no round includes yet, and how a new base changes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.peer.exchange import Exchange
from spes_p2p.rounds.accounting import Ledger, Sent
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.parts import Part, part_ranges
from spes_p2p.rounds.reducer_residual import ReducerResiduals
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.scratch import Scratch
from spes_p2p.training.checkpoint import Checkpoint, take_checkpoint, take_moments
from spes_p2p.training.interface import Trainer
from spes_p2p.training.pending import trained_groups


class OwnWork:
    """The trainer with its ledger, and the residuals of this peer's encodings as a reducer. A helper has no trainer.

    Methods that compute are called in a worker thread.
    """

    def __init__(self, peer_id: str, layout: Layout, codecs: GroupCodecs, scratch: Scratch, threads: int):
        self.trainer: Trainer | None = None
        self.ledger = Ledger(layout, part_ranges(layout, codecs), codecs, scratch, threads)
        self.residuals = ReducerResiduals(scratch)
        self.sent_update_lost = False
        """Set by a restart: a round may include an encoded update that this peer no longer has."""
        self._peer_id = peer_id

    def announce(self, base: np.ndarray, is_last: bool = False) -> None:
        """Take all pending work as the update of the next round, which may be the campaign's last."""
        if self.trainer is not None:
            self.ledger.announce(self.trainer, base, is_last)

    def validation_loss(self, base: np.ndarray) -> float:
        """Return the held-out loss of the base, without pending work and what codecs left of it. Called between two steps."""
        trainer = self.trainer
        assert trainer is not None
        stashed = self.ledger.stash_pending(trainer, base)
        for group in trained_groups(trainer):  # the others are the base's
            trainer.write(group, base[group.start : group.stop])
        loss = trainer.validation_loss()
        self.ledger.restore_pending(trainer, stashed)
        return loss

    def checkpoint(self, store: Store, base: Base, before: str | None, steps: int, is_announced: bool) -> Checkpoint:
        """Take a checkpoint of the work on top of this base.

        `before`: name of the checkpoint on disk. `steps`: of the phase after the base that are done. `is_announced`: a round
        with the announced update is under way.
        """
        assert self.trainer is not None
        return take_checkpoint(
            store, self.trainer, self.ledger, base.values, base.commit, base.round, before, steps, is_announced
        )

    def moments(self, store: Store, base: Base, before: str | None) -> Checkpoint:
        """Take a checkpoint of the moments alone; arguments as `checkpoint`."""
        assert self.trainer is not None
        return take_moments(store, self.trainer, base.round, before)

    def settle(self, old: Base, new: Base, results: Results, committed: set[int], exchanges: Sequence[Exchange]) -> int:
        """Subtract the work that the applied round includes from what is pending.

        Returns the tokens of work that is dropped because more than two rounds left it out.
        """
        assert self.trainer is not None
        me = results.plan.index(self._peer_id)

        def included(index: int) -> bool:
            return index in committed and me in results.contributors(results.parts[index])

        sent = [each for exchange in exchanges for each in exchange.sent.values()]
        if not exchanges:
            sent = self._sent_before_restart(old, results)
        accepted = [(part, partial(taken, results, part, values)) for part, values in sent if included(part.index)]
        dropped = self.ledger.settle(self.trainer, old.values, new.values, accepted)
        self.take_assignment(new)
        return dropped

    def rebase(self, old: Base, new: Base, keep_pending: bool, rolled_back: bool) -> int:
        """Move pending work onto a base that is not the next round's; return the tokens of work that is dropped.

        A rollback drops all pending work.
        """
        is_repair, sent_is_lost = old.commit == new.commit, self.sent_update_lost
        self.sent_update_lost &= is_repair
        if rolled_back:
            self.residuals.clear()
        if self.trainer is None:
            return 0
        if rolled_back:
            dropped = self.ledger.discard_pending(self.trainer, new.values)
        else:
            dropped = self.ledger.rebase(self.trainer, old.values, new.values, keep_pending, is_repair, sent_is_lost)
        self.take_assignment(new)
        return dropped

    def take_assignment(self, base: Base) -> None:
        """Train the experts that the plan of this base gives to this peer."""
        if self.trainer is None:
            return
        assignment = base.assignment(self._peer_id)
        owned = assignment.owned if assignment is not None else ()
        if owned != self.trainer.owned:
            self.ledger.change_owned(self.trainer, owned, base.values)

    def _sent_before_restart(self, base: Base, results: Results) -> list[tuple[Part, Sent]]:
        """Return what updates from before a crash may have contributed.

        Their codes are lost, so all that is pending there counts as sent: otherwise it would be included twice.
        """
        assert self.trainer is not None
        found = ((part, self.ledger.possibly_sent(self.trainer, base.values, part)) for part in results.parts)
        return [(part, sent) for part, sent in found if sent is not None]


def taken(results: Results, part: Part, sent: Sent) -> np.ndarray:
    """Return what a committed result contains of this peer's update: all but what the codec left out of the mean."""
    values = sent()
    if part.codec.leaves_out:
        values = values * (part.codec.decode(results.encoded[part.index], part.size) != 0)
    return values
