"""Samples that plans assigned to this peer and that it did not train."""

from __future__ import annotations

from spes_p2p.messages.samples import Interval

Slices = tuple[Interval, ...]


class UntrainedSamples:
    """Follows samples that a phase leaves over to the round that returns them."""

    def __init__(self) -> None:
        self.untrained: Slices = ()
        """Left by the phases before the last update; announced with it, so that others train them."""
        self._left_over: Slices = ()
        """Left by the last phase; announced with the next update."""

    def trained(self, left_over: Slices) -> None:
        """End a phase, without these samples."""
        self._left_over = left_over

    def announce(self) -> None:
        """Announce all work done until now with the next round."""
        self.untrained, self._left_over = (*self.untrained, *self._left_over), ()

    def decided(self) -> None:
        """Settle the announced samples: a round with them is decided."""
        self.untrained = ()
