"""A peer whose numbers are no longer finite: its steps are skipped and counted, it stops, and nothing of it reaches a base."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from counting_text import CountingText

from spes_p2p.errors import UserError
from spes_p2p.model.build import layout_of
from spes_p2p.observe.events import PhaseTrained
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

BREAKS_IN_ROUND, LAST_ROUND = 2, 4


class Breaking(TorchTrainer):
    """The real trainer; after `breaks_after` steps of a phase a weight of the router becomes infinite."""

    samples_by_round: Any
    breaks_after: int | None = None

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        steps = 0

        def stop_or_break() -> bool:
            nonlocal steps
            if phase.round == BREAKS_IN_ROUND and steps == self.breaks_after:
                router = self.layout.group("router")
                self.add(router, np.full(router.size, np.inf, np.float32))
            steps += 1
            return should_stop()

        report = super().train(phase, stop_or_break, on_step)
        return replace(report, seconds=float(report.steps))  # virtual, as the rest of the swarm's time


def swarm_of(sync_steps: int) -> VirtualSwarm:
    """Peers with the real trainer; B breaks."""
    training = {"sync_steps": sync_steps, "warmup_steps": 0}
    merge = {"merge_interval": 2 * sync_steps}
    the_campaign = campaign(LAST_ROUND * sync_steps, training=training, merge=merge, experts={"redundancy": 2})
    config = the_campaign.config
    return VirtualSwarm(
        the_campaign, layout=layout_of(config.model),
        make_trainer=lambda base, owned: Breaking(config, base, owned, CountingText(), CountingText()),
    )


async def break_b(swarm: VirtualSwarm, after_steps: int) -> None:
    swarm.start_all()
    await swarm.until(lambda: len(swarm.trainers) == 3)
    swarm.trainers["B"].breaks_after = after_steps  # type: ignore[attr-defined]


async def reason_b_stopped(swarm: VirtualSwarm) -> str:
    while not swarm.tasks["B"].done():
        await asyncio.sleep(1)
    error = swarm.tasks["B"].exception()
    swarm.kill("B")  # its process ends with exit code 2
    assert isinstance(error, UserError)
    return str(error)


def assert_others_go_on_with_finite_bases(swarm: VirtualSwarm) -> None:
    swarm.assert_replicas_agree()
    for name in "AC":
        commits = swarm.recorders[name].commits()
        assert max(commits) == LAST_ROUND
        assert all("B" not in commit.members for number, commit in commits.items() if number > BREAKS_IN_ROUND + 1)
        assert np.isfinite(swarm.peers[name].replica.base.values).all()
        assert all(event.skipped_steps == 0 for event in swarm.recorders[name].of(PhaseTrained))


@pytest.mark.long
async def test_a_peer_that_breaks_stops_with_a_reason_before_it_sends_anything() -> None:
    swarm = swarm_of(sync_steps=12)
    await break_b(swarm, after_steps=0)
    reason = await reason_b_stopped(swarm)
    assert "not finite in 10 consecutive steps" in reason
    assert "\n" not in reason
    assert max(event.round for event in swarm.recorders["B"].of(PhaseTrained)) == BREAKS_IN_ROUND - 1
    await swarm.until_finished()
    assert_others_go_on_with_finite_bases(swarm)
    assert "B" not in swarm.recorders["A"].commits()[BREAKS_IN_ROUND].members


@pytest.mark.parametrize("after_steps", [0, 3])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_infinite_weights_of_a_peer_that_has_not_stopped_yet_reach_no_base(
    after_steps: int
) -> None:
    swarm = swarm_of(sync_steps=6)
    await break_b(swarm, after_steps)
    assert "not finite" in await reason_b_stopped(swarm)
    phases = {event.round: event for event in swarm.recorders["B"].of(PhaseTrained)}
    assert phases[BREAKS_IN_ROUND].steps == phases[BREAKS_IN_ROUND].skipped_steps + after_steps
    await swarm.until_finished()
    assert_others_go_on_with_finite_bases(swarm)
