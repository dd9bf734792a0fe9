"""Handing out samples: disjoint, complete, in order, whatever comes back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spes_p2p.data.slices import MAX_RETURNED, end_of, give_back, take, union
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Leave, Workload
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.rounds.accounting import MAX_PENDING_ROUNDS
from spes_p2p.training.batches import split_samples


def positions(intervals: tuple[Interval, ...]) -> list[tuple[int, int]]:
    return [(i.epoch, p) for i in intervals for p in range(i.start, i.stop)]


class HandingOut(RuleBasedStateMachine):
    """Plans take samples, peers give some back; who holds or has trained what is tracked position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.num_samples = 7
        self.cursor = Cursor()
        self.out: set[tuple[int, int]] = set()

    @rule(count=st.integers(0, 20))
    def take_some(self, count: int) -> None:
        intervals, self.cursor = take(self.cursor, count, self.num_samples)
        taken = positions(intervals)
        assert len(taken) == len(set(taken)) == count
        assert self.out.isdisjoint(taken)
        self.out |= set(taken)

    @rule(data=st.data(), twice=st.booleans())
    def give_some_back(self, data: st.DataObject, twice: bool) -> None:
        if self.out:
            lost = data.draw(st.lists(st.sampled_from(sorted(self.out)), max_size=9))
            intervals = tuple(Interval(epoch, position, position + 1) for epoch, position in lost)
            self.cursor = give_back(self.cursor, intervals)
            if twice:
                self.cursor = give_back(self.cursor, intervals)
            self.out -= set(lost)

    @invariant()
    def out_and_returned_are_all_before_the_cursor(self) -> None:
        before = [(epoch, p) for epoch in range(self.cursor.epoch) for p in range(self.num_samples)]
        before += [(self.cursor.epoch, p) for p in range(self.cursor.position)]
        returned = positions(self.cursor.returned)
        assert sorted([*self.out, *returned]) == before

    @invariant()
    def returned_intervals_are_sorted_and_do_not_touch(self) -> None:
        returned = self.cursor.returned
        assert all(len(interval) > 0 for interval in returned)
        assert all(a.epoch < b.epoch or a.stop < b.start for a, b in itertools.pairwise(returned))


TestHandingOut = HandingOut.TestCase


INTERVALS = st.lists(st.builds(Interval, st.integers(0, 1), st.integers(0, 30), st.integers(1, 30)).filter(len), max_size=4)


@given(assigned=INTERVALS, count=st.integers(0, 40), said=INTERVALS)
def test_of_an_assignment_only_its_end_comes_back(assigned: list[Interval], count: int, said: list[Interval]) -> None:
    slices = union(assigned)
    _, untrained = split_samples(slices, count)
    assert end_of(slices, union(untrained)) == untrained
    ends = [split_samples(slices, trained)[1] for trained in range(sum(map(len, slices)) + 1)]
    assert end_of(slices, union(said)) == next(end for end in ends if set(positions(end)) <= set(positions(tuple(said))))


def test_whatever_comes_back_a_cursor_can_be_read() -> None:
    """The longest intervals stay. Others are not trained in this pass."""
    cursor, lonely = Cursor(0, 10**6), tuple(Interval(0, place, place + 1) for place in range(0, 20_000, 2))
    long = (Interval(0, 500_000, 500_100), Interval(0, 600_000, 600_003))
    found = give_back(give_back(cursor, long), lonely)
    assert len(found.returned) == MAX_RETURNED
    assert set(long) < set(found.returned) < {*long, *lonely}
    assert list(found.returned) == sorted(found.returned)
    assert unpack(Cursor, pack(found)) == found
    slices, _ = take(found, 10**5, 10**6)
    assert unpack(Workload, pack(Workload(1, slices))).slices == slices
    leaving = Leave("", (MAX_PENDING_ROUNDS + 2) * slices)  # phases in no round, with overlap
    assert unpack(Leave, pack(leaving)) == leaving


@given(num_samples=st.integers(1, 40), counts=st.lists(st.integers(0, 15), max_size=20))
def test_while_nobody_dies_each_epoch_is_handed_out_once_and_in_order(num_samples: int, counts: list[int]) -> None:
    cursor, taken = Cursor(), []
    for count in counts:
        intervals, cursor = take(cursor, count, num_samples)
        taken += positions(intervals)
    assert taken == [(i // num_samples, i % num_samples) for i in range(sum(counts))]


def test_what_came_back_is_handed_out_first() -> None:
    _, cursor = take(Cursor(), 15, 10)
    cursor = give_back(cursor, (Interval(0, 3, 5), Interval(1, 0, 2)))
    intervals, _ = take(cursor, 6, 10)
    assert intervals == (Interval(0, 3, 5), Interval(1, 0, 2), Interval(1, 5, 7))


def test_positions_that_were_not_handed_out_cannot_come_back() -> None:
    cursor = Cursor(epoch=1, position=4)
    assert give_back(cursor, (Interval(1, 4, 9), Interval(2, 0, 3), Interval(-1, 0, 3), Interval(1, 3, 2))) == cursor
    assert give_back(cursor, (Interval(1, -2, 9),)).returned == (Interval(1, 0, 4),)


@pytest.mark.parametrize(("cursor", "count", "num_samples"), [(Cursor(), -1, 5), (Cursor(), 1, 0), (Cursor(0, 6), 1, 5)])
def test_a_cursor_of_another_corpus_is_refused(cursor: Cursor, count: int, num_samples: int) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        take(cursor, count, num_samples)
