"""Results of pure functions of a round's records, kept for the next call with the same objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def remembered(count: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keep the results of the last `count` calls, by the identity of the arguments, which must be immutable.

    To hash or compare a plan of hundreds of members takes as long as to derive something from it. A peer asks for the same
    several times in a round, and peers that share a process share plans and commits, too.
    """

    def keep(function: Callable[..., T]) -> Callable[..., T]:
        kept: OrderedDict[tuple[int, ...], tuple[Any, T]] = OrderedDict()

        @wraps(function)
        def recall(*arguments: Any) -> T:
            key = tuple(map(id, arguments))
            found = kept.get(key)
            if found is None:
                found = kept[key] = arguments, function(*arguments)  # with the arguments, their ids stay taken
                while len(kept) > count:
                    kept.popitem(last=False)
            return found[1]

        return recall

    return keep
