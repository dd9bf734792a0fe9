"""Volunteers' churn: sessions and breaks, nights, and bursts of arrivals, as the faults of each peer.

Sessions have a median of two hours, breaks of one, both memoryless. Every third peer is off for eight hours each night, which
begins within two hours of the others' nights. Who comes back does so on the next half hour, as after news or a class: together
with others. Most end without a word, as machines that are switched off.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence

from spes_p2p.testing.simulate.faults import Fault

SESSION, BREAK, NIGHT, BURST = 2 / 24, 1 / 24, 8 / 24, 0.5 / 24
"""Medians of sessions and breaks, length of a night, and time between bursts of arrivals, in days."""
BED_TIMES = 16 / 24, 18 / 24
SLEEPERS = 3
"""Every such peer sleeps."""
POLITE = 0.3
"""Share of the sessions that end with a farewell."""


def absences(peer: str, sleeps: bool, day_s: float, rng: random.Random) -> Iterator[tuple[float, Fault]]:
    """Yield when this peer goes, and the fault by which it does and comes back."""
    now_s, bed_s = 0.0, rng.uniform(*BED_TIMES) * day_s
    while True:
        now_s += _memoryless(SESSION * day_s, rng)
        back_s = now_s + _memoryless(BREAK * day_s, rng)
        if sleeps and back_s >= bed_s:
            now_s = min(now_s, bed_s)
            back_s, bed_s = bed_s + NIGHT * day_s, bed_s + day_s
        burst_s = BURST * day_s
        back_s = math.ceil(back_s / burst_s) * burst_s
        yield now_s, Fault("leave" if rng.random() < POLITE else "restart", 0, peers=(peer,), seconds=back_s - now_s)
        now_s = back_s


async def keep_churning(peers: Sequence[str], day_s: float, rng: random.Random, strike: Callable[[Fault], None]) -> None:
    """Let all absences of these peers strike, from now on."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    each = [absences(peer, number % SLEEPERS == 0, day_s, random.Random(rng.random())) for number, peer in enumerate(peers)]
    for at_s, fault in heapq.merge(*each, key=lambda absence: absence[0]):
        await asyncio.sleep(max(0.0, began_s + at_s - clock()))
        strike(fault)


def _memoryless(median_s: float, rng: random.Random) -> float:
    return rng.expovariate(math.log(2) / median_s)
