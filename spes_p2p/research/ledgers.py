"""Other rules than the product's (`rounds/accounting.py`) for what a peer sends and what stays pending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from spes_p2p.model.layout import Group
from spes_p2p.peer import own_work
from spes_p2p.rounds.accounting import Ledger, Sent
from spes_p2p.rounds.parts import Part
from spes_p2p.training.interface import Trainer
from spes_p2p.training.pending import add_pending, pending_of

DECAY = np.float32(0.95)
"""SparseLoCo's beta, by which the buffer shrinks in each round."""


class BufferedLedger(Ledger):
    """SparseLoCo's error feedback (arXiv 2508.15706): a decaying buffer holds what was not sent, each phase starts at the base.

    For the shared weights only: of an expert, its owner's replica has all work in either case.
    """

    _buffer: np.ndarray | None = None

    def settle(self, trainer: Trainer, old: np.ndarray, new: np.ndarray, accepted: Sequence[tuple[Part, Sent]]) -> int:
        """Move what is still pending from the local weights to the buffer."""
        dropped = super().settle(trainer, old, new, accepted)
        group = self._layout.group("shared")
        pending = pending_of(trainer, new, group, np.empty(group.size, np.float32))
        add_pending(trainer, group, -pending)
        self._buffer = DECAY * (pending if self._buffer is None else pending + self._buffer)
        return dropped

    def _to_announce(self, trainer: Trainer, base: np.ndarray, group: Group, start: int, stop: int) -> np.ndarray:
        """Add the buffer to what was trained."""
        trained = super()._to_announce(trainer, base, group, start, stop)
        return trained if self._buffer is None or group.name != "shared" else trained + self._buffer[start:stop]


@contextmanager
def decaying_error_buffers() -> Iterator[None]:
    """Let all peers of this process keep such buffers during the block."""
    with patch.object(own_work, "Ledger", BufferedLedger):
        yield
