"""The samples that plans assigned to this peer and that no decided round includes yet."""

from __future__ import annotations

from spes_p2p.messages.samples import Interval

Slices = tuple[Interval, ...]


class AssignedSamples:
    """Follows samples from the assignment of a phase to the round that includes them."""

    def __init__(self) -> None:
        self.untrained: Slices = ()
        """Left over by the phase before the last update; announced with it, so that others train them."""
        self._left_over: Slices = ()
        """Left over by the last phase; announced with the next update."""
        self._begun_on = ""
        """Commit whose assignment was begun last."""
        self._in_phase: Slices = ()
        """Of that assignment, until its work is announced."""
        self._announced: Slices = ()

    def begin(self, commit: str, slices: Slices) -> None:
        """A phase begins on the assignment that this commit gave."""
        self._begun_on, self._in_phase = commit, slices

    def trained(self, left_over: Slices) -> None:
        """The phase ended without these samples."""
        self._left_over = left_over

    def announce(self) -> None:
        """All work done until now goes with the next round."""
        self.untrained, self._left_over = self._left_over, ()
        self._announced, self._in_phase = self._in_phase, ()

    def decided(self) -> None:
        """The round with the announced work was decided."""
        self.untrained = self._announced = ()

    def to_hand_back(self, commit: str, assigned: Slices) -> Slices:
        """What others have to train when this peer leaves; `assigned` is what `commit` gives for the next phase."""
        return (*self._announced, *self._in_phase, *(assigned if commit != self._begun_on else ()))
