"""Samples that a phase leaves over go back to the others with its work."""

from __future__ import annotations

from spes_p2p.messages.samples import Interval
from spes_p2p.peer.samples import UntrainedSamples

REST = (Interval(0, 8, 10),)


def test_what_a_phase_leaves_over_is_announced_with_its_work() -> None:
    samples = UntrainedSamples()
    samples.trained(REST)
    assert samples.untrained == ()
    samples.announce()
    assert samples.untrained == REST
    samples.decided()
    assert samples.untrained == ()
