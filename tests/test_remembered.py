"""Results of pure functions are kept for the same objects, not for equal ones."""

from __future__ import annotations

from spes_p2p.rounds.remembered import remembered


def test_the_last_calls_with_the_same_objects_are_not_made_again() -> None:
    made = []

    @remembered(2)
    def total(numbers: tuple[int, ...]) -> int:
        made.append(numbers)
        return sum(numbers)

    first, equal, third = (1, *[2]), (1, *[2]), (3,)
    assert [total(first), total(first), total(equal), total(third), total(third)] == [3, 3, 3, 3, 3]
    assert list(map(id, made)) == [id(first), id(equal), id(third)]
    assert total(first) == 3
    assert len(made) == 4
