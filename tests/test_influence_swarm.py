"""A member that sends a thousand times its update: all replicas stay alike and near the honest ones, and peers name it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from spes_p2p.observe.events import UpdatesClipped
from spes_p2p.testing.simulate.swarm import LAYOUT, VirtualSwarm, campaign
from spes_p2p.training.interface import Phase, PhaseReport


async def corrupt(swarm: VirtualSwarm, name: str, rounds: Callable[[int], bool]) -> None:
    """Make a trainer replace its update by 1000 times the same in these rounds."""
    await swarm.until(lambda: name in swarm.trainers)
    trainer = swarm.trainers[name]
    honest = trainer.train

    def train(phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        before = {group: trainer.read(group) for group in LAYOUT.groups}
        report = honest(phase, should_stop, on_step)
        if rounds(phase.round):
            for group, start in before.items():
                trainer.add(group, (trainer.read(group) - start) * np.float32(999))
        return report

    trainer.train = train  # type: ignore[method-assign]


def base_of(swarm: VirtualSwarm, name: str) -> np.ndarray:
    return (swarm.helper if name == "W" else swarm.peers[name]).replica.base.values


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("codec", "overlap"), [("int4", False), ("fp16", True)])
@pytest.mark.long
async def test_all_replicas_agree_through_restarts_replays_and_joins_under_attack(codec: str, overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=90, codec=codec, sync={"overlap": overlap, "min_peers": 4}))
    swarm.start_all("ABCF")
    await corrupt(swarm, "F", lambda number: True)
    await swarm.until_round(3)
    swarm.kill("B")  # it replays what it missed
    await swarm.until(lambda: swarm.round_of("A") >= 5)
    swarm.start_again("B")
    swarm.start("D")  # it downloads a base
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "ABCDF"))
    await swarm.until(lambda: swarm.helper.replica.base.round == swarm.round_of("A"))
    bases = [base_of(swarm, name) for name in "ABCDFW"]
    assert len({each.tobytes() for each in bases}) == 1
    moved = float(np.sqrt(np.mean((bases[0] - swarm.base0)[: LAYOUT.size].astype(np.float64) ** 2)))
    assert moved < 0.5, "the honest peers move it by about 0.01, the attacker would by 10"
    told = {name: swarm.recorders[name].of(UpdatesClipped) for name in "ABCDFW"}
    assert len(told["A"]) >= 6
    for events in told.values():
        assert set(events) <= set(told["A"])
        assert all(dict(event.parts).keys() <= {"F"} for event in events)
    assert {event.round for event in told["W"]} == {event.round for event in told["A"]}


@pytest.mark.long
async def test_what_was_clipped_neither_returns_nor_stays_pending() -> None:
    """One bad phase of an otherwise honest peer costs one clipped round; afterwards its weights are the base again."""
    swarm = VirtualSwarm(campaign(total_steps=100, codec="none", sync={"min_peers": 4}))
    swarm.start_all("ABCF")
    await corrupt(swarm, "F", lambda number: number == 3)
    await swarm.until_finished()
    clipped = swarm.recorders["A"].of(UpdatesClipped)
    assert [event.round for event in clipped] == [3]
    ledger, trainer = swarm.peers["F"].replica.ledger, swarm.trainers["F"]
    assert ledger.max_pending_tokens == 0
    base = base_of(swarm, "F")
    for group in LAYOUT.groups:
        if group.expert is None or group.expert in trainer.owned:
            np.testing.assert_allclose(trainer.read(group), base[group.start : group.stop], atol=2e-5)


@pytest.mark.long
async def test_without_bounds_one_member_takes_the_model_away() -> None:
    """The attack is one: the other tests would see it."""
    swarm = VirtualSwarm(campaign(codec="none", sync={"min_peers": 4, "bound_influence": False}))
    swarm.start_all("ABCF")
    await corrupt(swarm, "F", lambda number: True)
    await swarm.until_finished()
    moved = float(np.sqrt(np.mean((base_of(swarm, "A") - swarm.base0)[: LAYOUT.size].astype(np.float64) ** 2)))
    assert moved > 1
    assert not swarm.recorders["A"].of(UpdatesClipped)
