"""The gate of an open campaign: which steps a round leaves out because they make the model worse. Pure functions.

Each vouched trainer measures, on held-out samples that it draws itself, what the step of a group alone does to the base, and
names the harmful groups in its signed report. What more than half of these judges name is not in the commit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.rounds import Staged
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results

JUDGED_SAMPLES = 16
"""Held-out samples of one measurement. Differences are paired, so their error is some thousandths of a nat."""
JUDGED_EXPERTS = 8
"""Bounds the experts that a round judges, and with that the time that it waits."""
HARM_NATS, COMMON_HARM_NATS = 0.02, 0.5
"""An expert's step, and that of shared weights and router together, is harmful from this loss on. Honest steps of experts stay
below 0.005 nats. The common step is every member's work, its reducers clip it, and a spike of the loss is no attack."""
SLOW_HARM_NATS, SLOW_ROUNDS = 0.005, 4
"""The same for the mean over a member's last rounds, at least this many: smaller harm that adds up."""
ERRORS = 3.0
"""Standard errors by which a loss must exceed these bounds."""
KEPT_ROUNDS = 8
"""Judged rounds in a member's mean."""
STRIKES = 2
"""A member gets no work, and what it has done does not count, while the last commits (`commit_log.RECENT`) rejected its experts
this many times: once may be chance."""


@dataclass(frozen=True)
class Effect:
    """What a step does to the held-out loss, in nats per token; positive: harm. With its standard error."""

    nats: float
    error: float

    def exceeds(self, bound: float) -> bool:
        """Return whether the loss grows by more than this bound, beyond chance."""
        return self.nats > bound and self.nats > ERRORS * self.error


def mean_effect(effects: Sequence[Effect]) -> Effect:
    """Return the mean of independent effects, at least one."""
    error = math.sqrt(math.fsum(each.error**2 for each in effects)) / len(effects)
    return Effect(math.fsum(each.nats for each in effects) / len(effects), error)


def effect_of(before: np.ndarray, after: np.ndarray) -> Effect:
    """Return the effect of a step on the same samples' losses, `[samples]` each. One that is not finite is infinite harm."""
    differences = after - before
    if not np.isfinite(differences).all():
        return Effect(math.inf, 0.0)
    return Effect(float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(differences.size))


def judged_groups(layout: Layout, results: Results) -> list[tuple[Group, ...]]:
    """Return what to measure in a round, in this order: shared weights and router together, then experts that moved.

    All judges draw the same experts, from the hash of the results, which nobody knows when it sends its update.
    """
    moved = {part.group for part in results.parts if results.verified(part)}
    seed = sha256(b"".join(results.roots())).digest()
    experts = [group for group in layout.groups if group in moved and group.expert is not None]
    experts.sort(key=lambda group: sha256(seed + group.name.encode()).digest())
    common = tuple(group for group in layout.groups if group in moved and group.expert is None)
    return [*([common] if common else []), *((group,) for group in experts[:JUDGED_EXPERTS])]


class Scores:
    """One judge's measurements of the members' experts in the last rounds."""

    def __init__(self) -> None:
        self._effects: dict[str, deque[Effect]] = {}

    def add(self, effects: Mapping[str, Effect]) -> None:
        """Add a round's measurements by member. Those of members that were measured longest ago make room."""
        for peer, effect in effects.items():
            known = self._effects.pop(peer, None)
            self._effects[peer] = deque(maxlen=KEPT_ROUNDS) if known is None else known
            self._effects[peer].append(effect)
        for peer in list(self._effects)[:-MAX_MEMBERS]:
            del self._effects[peer]

    def mean(self, peer: str) -> Effect:
        """Return the mean effect of a member's experts; (0, inf) below SLOW_ROUNDS measurements."""
        effects = self._effects.get(peer, ())
        return mean_effect(effects) if len(effects) >= SLOW_ROUNDS else Effect(0.0, math.inf)


def suspects(plan: Plan, contributors: Iterable[int]) -> tuple[int, ...]:
    """Return those of an expert's contributors who may have harmed it: the owner of the campaign vouches for the others."""
    return tuple(sorted(i for i in set(contributors) if plan.members[i].standing != "vouched"))


def owners_to_blame(plan: Plan, contributors: Iterable[int]) -> tuple[int, ...]:
    """Return the suspects that a commit names: only the newcomers, where there are any.

    Identities cost nothing: otherwise two of one attacker could bar every honest stranger that owns an expert with them.
    """
    found = suspects(plan, contributors)
    return tuple(i for i in found if plan.members[i].standing == "newcomer") or found


def judges(plan: Plan) -> tuple[int, ...]:
    """Return the members that judge a round."""
    return tuple(i for i, member in enumerate(plan.members) if member.trains and member.standing == "vouched")


def harmful_groups(plan: Plan, staged: Mapping[int, Staged]) -> frozenset[str]:
    """Return the groups that more than half of the judges which reported a judgement call harmful. `staged`: by member."""
    judged = [staged[i] for i in judges(plan) if i in staged and staged[i].judged]
    named = Counter(name for report in judged for name in set(report.harmful))
    return frozenset(name for name, count in named.items() if 2 * count > len(judged))


def rejected_members(results: Results, parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the members to blame for these parts, which are left out as harmful: nobody for what all members train."""
    trained: dict[str, set[int]] = {}
    for part in parts:
        if part.group.expert is not None:
            trained.setdefault(part.group.name, set()).update(results.contributors(part))
    return tuple(sorted({i for owners in trained.values() for i in owners_to_blame(results.plan, owners)}))


def suspected_members(results: Results, parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the strangers past probation that trained the shared weights among these parts, which are left out as harmful.

    Nobody can tell who of them did it, so they are audited. Newcomers are often audited anyway, and too light to do it.
    """
    trained = {i for part in parts if part.group.kind == "shared" for i in results.contributors(part)}
    return tuple(i for i in sorted(trained) if results.plan.members[i].standing == "proven")


def barred(recent: Sequence[Commit]) -> frozenset[str]:
    """Return the peers that get no work next, and whose pending work does not count. `recent`: the last commits."""
    strikes = Counter(commit.members[i] for commit in recent for i in commit.rejected)
    return frozenset(peer for peer, count in strikes.items() if count >= STRIKES)
