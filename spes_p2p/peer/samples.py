"""Samples that plans assigned to this peer and that no decided round includes yet."""

from __future__ import annotations

from spes_p2p.messages.samples import Interval

Slices = tuple[Interval, ...]


class AssignedSamples:
    """Follows samples from the assignment of a phase to the round that includes them."""

    def __init__(self) -> None:
        self.untrained: Slices = ()
        """Left by the phase before the last update; announced with it, so that others train them."""
        self._left_over: Slices = ()
        """Left by the last phase; announced with the next update."""
        self._begun_on = ""
        """Commit of the last assignment that was begun."""
        self._in_phase: Slices = ()
        """Samples of that assignment, until its work is announced."""
        self._announced: Slices = ()

    def begin(self, commit: str, slices: Slices) -> None:
        """Begin a phase on the assignment that this commit gave."""
        self._begun_on, self._in_phase = commit, slices

    def trained(self, left_over: Slices) -> None:
        """End the phase, without these samples."""
        self._left_over = left_over

    def announce(self) -> None:
        """Announce all work done until now with the next round."""
        self.untrained, self._left_over = self._left_over, ()
        self._announced, self._in_phase = self._in_phase, ()

    def decided(self) -> None:
        """Settle the announced work: its round is decided."""
        self.untrained = self._announced = ()

    def unfinished(self, commit: str, assigned: Slices) -> Slices:
        """Return what others must train when this peer leaves; `assigned` is what `commit` gives for the next phase."""
        return (*self._announced, *self._in_phase, *(assigned if commit != self._begun_on else ()))
