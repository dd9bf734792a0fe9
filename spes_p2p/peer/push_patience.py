"""For how long a reducer or hub waits for updates that still come: of members it knows, of strangers, and of cells."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Set

from spes_p2p.peer.courtesy import EARLY_S, KNOWN_PATIENCE, LEAST_S, LEAST_SHARE, Wait
from spes_p2p.peer.exchange_context import ExchangeContext
from spes_p2p.rounds.planned import trusted

PUSH_SHARE, HUBS_SHARE = 0.5, 0.6
"""Shares of the exchange's time limit after which missing updates and missing means of cells are left out, so that the results
can still be pulled."""

STRANGERS_SHARE = 0.1
"""Strangers' lines may be slower than all others' by this share of a round, as far as this reducer's `Courtesy` goes; beyond
it, their work stays pending."""
STRANGERS_SILENCES = 3.0
"""After this many times `silence_s` in which only strangers are awaited and no sum is complete, none is waited for: after four,
members' complaints take this reducer's parts (`StagedReports`)."""

HUBS_PATIENCE, HUBS_PATIENT_ROUNDS = 3.0, 8
"""A hub of strangers waits for this many times what half of its cell took. In one round of so many, the same at all, it waits
for at least half of what a reducer may wait for strangers, in others for half of its least, or LEAST_S: reducers save for the
long wait, and members with slow lines are complete in some rounds."""


class PushPatience:
    """One reducer's limits in one exchange, from the moment that this is made. Members are indices of the plan's."""

    def __init__(self, context: ExchangeContext, hubs: Set[int], sums_cell: bool, awaited: Set[int]):
        """`hubs`: those whose means are awaited. `sums_cell`: whether this peer is a hub. `awaited`: all, at the beginning."""
        self._context, self._hubs = context, hubs
        self._silence_s = context.endpoint.silence_s
        known = trusted(context.plan.members)
        self._strangers = set(range(len(context.names))) - known
        self._known = known - hubs  # a hub waits for its cell
        self._started = self._looked_at = asyncio.get_running_loop().time()
        self._half_of_known = len(self._known & awaited | {context.me}) / 2
        self._half_at = self._due = math.inf
        """Loop times at which half of the known members were complete, and from which the others are late."""
        self._sums_cell = sums_cell
        self._is_strangers_hub = sums_cell and context.me in self._strangers
        self._half_of_cell, self._half_of_cell_s = len(awaited) / 2, math.inf
        """Of a hub of strangers: half of those it waits for, and how long they took."""
        self._alone_at: float | None = None
        """Loop time since when only strangers are awaited."""
        self._wait: Wait | None = None
        """For strangers alone."""

    def next_look_s(self) -> float:
        """Return for how long nothing can change but by news."""
        now = asyncio.get_running_loop().time()
        if self._wait is not None:
            limits_s = [self._wait.left_s()]
        else:
            limits_s = [self._started + self._context.trusted_s - now, self._due - now]
        look_s = min([self._silence_s / 4, *(limit_s for limit_s in limits_s if limit_s > EARLY_S)])
        return min(look_s, max(EARLY_S, self._started + self._hub_s() - now)) if self._is_strangers_hub else look_s

    def given_up(self, awaited: Set[int], counted_at: float, closed_at: float) -> set[int]:
        """Return the members for whom this reducer waits no longer.

        `counted_at`, `closed_at`: loop times at which the last updates were signed, and the last sum was closed.
        """
        now = asyncio.get_running_loop().time()
        waited_s = now - self._started
        lost = self._late(awaited & self._known, now)
        if self._is_strangers_hub and self._is_cell_late(len(awaited), waited_s):
            lost |= self._strangers
        if self._are_strangers_late(awaited, counted_at, closed_at, now):
            lost |= self._strangers
        if waited_s >= PUSH_SHARE * self._context.timeout_s:
            lost |= set(self._context.others) - self._hubs
        if waited_s >= HUBS_SHARE * self._context.timeout_s:
            lost |= self._hubs - {self._context.me}
        return lost

    def end(self) -> None:
        """Take what was waited for strangers off the account, unless all came."""
        if self._wait is not None:
            self._wait.end(is_in_vain=True)

    def _late(self, known: Set[int], now: float) -> set[int]:
        """Return those of these members that hold this reducer up, and have done so too often."""
        context = self._context
        if len(known) <= self._half_of_known:
            self._half_at = min(self._half_at, now)
        self._due = self._started + KNOWN_PATIENCE * max(self._half_at - self._started, context.trusted_s)
        context.lateness.add((context.names[i] for i in known), now - max(self._due, self._looked_at))
        self._looked_at, late = now, context.lateness.late()
        return {i for i in known if context.names[i] in late} if now >= self._due else set()

    def _is_cell_late(self, awaited: int, waited_s: float) -> bool:
        if awaited <= self._half_of_cell:
            self._half_of_cell_s = min(self._half_of_cell_s, waited_s)
        return waited_s >= self._hub_s()

    def _hub_s(self) -> float:
        """Return for how long a hub of strangers waits for its cell."""
        context = self._context
        if context.plan.round % HUBS_PATIENT_ROUNDS:
            more_s = max(LEAST_S, LEAST_SHARE * context.round_s / 2)
        else:
            more_s = max(context.trusted_s + self._silence_s, STRANGERS_SHARE * context.round_s) / 2
        as_half_s = min(HUBS_PATIENCE * self._half_of_cell_s - context.trusted_s, self._silence_s / 4)
        return context.trusted_s + max(more_s, as_half_s)

    def _are_strangers_late(self, awaited: Set[int], counted_at: float, closed_at: float, now: float) -> bool:
        """Return whether strangers alone are awaited, for as long again as all others took, or a share of the round.

        Or for so long without a closed sum that members' complaints are about to count.
        """
        context = self._context
        if not awaited and self._wait is not None:
            self._wait.end(is_in_vain=False, at=counted_at)
            self._wait = None
        if not awaited or not awaited <= self._strangers or self._sums_cell:
            return False
        self._alone_at = self._alone_at or now
        if self._wait is None and now - self._started >= context.trusted_s - EARLY_S:
            most_s = max(now - self._started + self._silence_s, STRANGERS_SHARE * context.round_s)
            self._wait = context.strangers.begin(most_s, LEAST_SHARE * context.round_s)
        is_wait_over = self._wait is not None and not self._wait.left_s()
        return is_wait_over or now - max(self._alone_at, closed_at) >= STRANGERS_SILENCES * self._silence_s
