"""A vouched trainer's judgement of a round in an open campaign: which groups' steps make the base worse on held-out text.

It is made between the exchange and the report, by forward passes only, in the trainer's own buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from spes_p2p.model.layout import Group
from spes_p2p.observe.events import Observer, StepsJudged
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.gate import (
    COMMON_HARM_NATS,
    HARM_NATS,
    JUDGED_SAMPLES,
    SLOW_HARM_NATS,
    Effect,
    Scores,
    effect_of,
    judged_groups,
    judges,
    mean_effect,
    suspects,
)
from spes_p2p.rounds.results import Results

JUDGING_SILENCES = 0.5
"""Bounds the time of a judgement, in multiples of `silence_s`: the coordinator waits longer than that for slow members."""

Effects = Mapping[tuple[Group, ...], Effect]


class Judge:
    """This peer's judgements, one for each plan that it takes part in."""

    def __init__(self, node: Node, replica: Replica, phases: PhaseRunner, observer: Observer):
        self._node, self._replica, self._phases, self._observer = node, replica, phases, observer
        self._scores = Scores()
        self._verdict: tuple[str, tuple[str, ...] | None] = "", None
        """Id of the last plan, and this judge's verdict on it."""

    async def judge(self, results: Results) -> None:
        """Judge a plan's results, if this is a vouched trainer of an open campaign and has not done so before."""
        plan = results.plan
        is_open = self._node.campaign.config.admission == "open"
        judges_it = is_open and self._replica.trainer is not None and plan.index(self._node.peer_id) in judges(plan)
        if not judges_it or self._verdict[0] == plan.id:
            return
        effects = await self._phases.between_steps(partial(self._measured, results))
        self._verdict = plan.id, self._harmful(results, effects) if effects else None

    def harmful(self, plan: str) -> tuple[str, ...] | None:
        """Return the groups whose step is harmful; None where this peer has not judged the plan."""
        return self._verdict[1] if self._verdict[0] == plan else None

    async def _measured(self, results: Results) -> Effects:
        """Measure in a worker thread, also when this task is cancelled: the trainer must get its weights back."""
        loop, cancelled = asyncio.get_running_loop(), asyncio.Event()
        until = loop.time() + JUDGING_SILENCES * self._node.endpoint.silence_s

        def is_late() -> bool:
            return cancelled.is_set() or loop.time() >= until

        seed = self._node.world.rng.getrandbits(32)
        measuring: asyncio.Future[Effects] = asyncio.ensure_future(
            self._node.world.run_blocking(self._measure, results, seed, is_late)
        )
        try:
            return await asyncio.shield(measuring)
        except asyncio.CancelledError:
            cancelled.set()
            while not measuring.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({measuring})
            raise

    def _measure(self, results: Results, seed: int, is_late: Callable[[], bool]) -> Effects:
        """Return what each group's step alone does to the base; fewer groups when it gets late."""
        trainer, ledger, base = self._replica.trainer, self._replica.ledger, self._replica.base.values
        candidate = self._replica.exchanges.candidate(results.plan)
        effects: dict[tuple[Group, ...], Effect] = {}
        if candidate is None or trainer is None:
            return effects
        pending = ledger.stash_pending(trainer, base)
        try:
            trainer.load_base(base)
            before = trainer.held_out_losses(seed, JUDGED_SAMPLES)
            for groups in judged_groups(self._replica.layout, results) if before.size > 1 else ():
                if is_late():
                    break
                try:
                    for group in groups:
                        trainer.write(group, candidate.values(group.start, group.stop))
                    effects[groups] = effect_of(before, trainer.held_out_losses(seed, JUDGED_SAMPLES))
                finally:
                    for group in groups:
                        trainer.write(group, base[group.start : group.stop])
        finally:
            ledger.restore_pending(trainer, pending)
        return effects

    def _harmful(self, results: Results, effects: Effects) -> tuple[str, ...]:
        """Return the harmful groups' names, and report the members' scores."""
        contributors: dict[str, set[int]] = {}
        for part in results.parts:
            contributors.setdefault(part.group.name, set()).update(results.contributors(part))
        experts = {groups[0].name: effect for groups, effect in effects.items() if groups[0].expert is not None}
        by_member: dict[int, list[Effect]] = {}
        for name, effect in experts.items():
            for i in contributors[name]:
                by_member.setdefault(i, []).append(effect)
        peers = [member.peer for member in results.plan.members]
        self._scores.add({peers[i]: mean_effect(found) for i, found in by_member.items()})
        harmful = []
        for groups, effect in effects.items():
            name = groups[0].name
            if name not in experts:
                harmful += [group.name for group in groups if effect.exceeds(COMMON_HARM_NATS)]
                continue
            slow = [self._scores.mean(peers[i]) for i in suspects(results.plan, contributors[name])]
            if effect.exceeds(HARM_NATS) or (effect.nats > 0 and any(each.exceeds(SLOW_HARM_NATS) for each in slow)):
                harmful.append(name)
        scores = tuple((peers[i], -mean_effect(found).nats) for i, found in sorted(by_member.items()))
        self._observer(StepsJudged(results.plan.round, scores, tuple(sorted(harmful))))
        return tuple(harmful)
