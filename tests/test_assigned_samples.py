"""Samples that were assigned to a peer are in a decided round, or go back to the others when the peer leaves."""

from __future__ import annotations

from spes_p2p.messages.samples import Interval
from spes_p2p.peer.samples import AssignedSamples

FIRST, SECOND, REST = (Interval(0, 0, 10),), (Interval(0, 10, 20),), (Interval(0, 8, 10),)


def test_an_assignment_that_was_not_begun_goes_back() -> None:
    assert AssignedSamples().unfinished("commit", FIRST) == FIRST


def test_what_was_trained_goes_back_once_until_its_round_is_decided() -> None:
    samples = AssignedSamples()
    samples.begin("commit", FIRST)
    assert samples.unfinished("commit", FIRST) == FIRST
    samples.trained(())
    samples.announce()
    assert samples.unfinished("commit", FIRST) == FIRST
    samples.decided()
    assert samples.unfinished("next", SECOND) == SECOND


def test_two_phases_in_no_round_go_back_together() -> None:
    samples = AssignedSamples()
    samples.begin("commit", FIRST)
    samples.announce()
    samples.begin("next", SECOND)
    assert samples.unfinished("next", SECOND) == (*FIRST, *SECOND)


def test_what_a_phase_leaves_over_is_announced_with_its_work() -> None:
    samples = AssignedSamples()
    samples.begin("commit", FIRST)
    samples.trained(REST)
    assert samples.untrained == ()
    samples.announce()
    assert samples.untrained == REST
    samples.decided()
    assert samples.untrained == ()
