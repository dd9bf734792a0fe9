"""When the held-out loss runs away, the owner's bootstrap peer takes the campaign back, once; then it pauses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.admission import signed_invitation
from spes_p2p.consensus.control import is_paused, is_rollback
from spes_p2p.messages.admission import Invitation
from spes_p2p.observe.events import Evaluated
from spes_p2p.peer.node import Node
from spes_p2p.rounds.archive import Archive, archived_rounds
from spes_p2p.rounds.runaway import CONFIRMATIONS, HeldOut, decisive, last_good_round
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity


@pytest.mark.parametrize(
    ("losses", "good"),
    [
        ([], None),
        ([9, 9, 9], None),
        ([5.0, 4.0, 3.0, 2.9, 2.95, 3.0], None),
        ([5.0, 4.0, 3.0, 4.0, 4.0], None),
        ([5.0, 4.0, 3.0, 4.0, 3.4, 4.0], None),
        ([5.0, 4.0, 3.0, 4.0, 4.0, 4.0], 10),
        ([5.0, 4.0, 3.0, 3.09, 3.2, 4.0, 5.0, 6.0], 15),
        ([3.0, 3.4, 3.45, 3.6, 3.6, 3.6], 0),
    ],
)
def test_a_loss_has_run_away_when_three_evaluations_in_a_row_are_far_above_the_best(losses: list[float], good: int) -> None:
    assert last_good_round([HeldOut(5 * place, loss) for place, loss in enumerate(losses)]) == good


class Judged(VirtualSwarm):
    """A swarm whose held-out losses are given, the last one for all later evaluations; its helper keeps every second base."""

    def __init__(self, losses: Sequence[float], keep: int = 2, **sections: Any):
        made = campaign(total_steps=110, evaluation={"every_rounds": 1}, **sections)
        super().__init__(made, archive=Archive(2, keep))
        self.losses = dict(enumerate(losses))
        self.last = losses[-1]

    def start(self, name: str, *args: object, **kwargs: object) -> None:
        super().start(name)
        replica = self.peers[name].replica
        replica.validation_loss = lambda: self.losses.get(replica.base.round, self.last)  # type: ignore[method-assign]


@pytest.mark.long
def test_a_runaway_loss_is_rolled_back_to_the_last_good_archived_base(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = Judged([5.0, 4.5, 4.0, 3.9, 3.8, 6.0, 6.0, 6.0, 3.7], keep=4)
        swarm.start_all()
        await swarm.until_finished()
        swarm.assert_replicas_agree()
        commits = [each.commit for each in swarm.nodes["W"].log.since(-1)]
        (back,) = [commit for commit in commits if is_rollback(commit)]
        assert back.base_digest == swarm.digests()[4].pop()
        assert commits[-1].step == 110

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert "6 after round 7" in caplog.text
    assert "rolling back to round 4" in caplog.text


@pytest.mark.long
def test_a_loss_that_runs_away_again_pauses_the_campaign(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = Judged([5.0, 4.5, 4.0, 3.9, 3.8, 6.0], keep=4)
        swarm.start_all()
        await swarm.until(lambda: is_paused(swarm.nodes["W"].log.last.control))
        assert sum(is_rollback(each.commit) for each in swarm.nodes["W"].log.since(-1)) == 1
        number = swarm.nodes["W"].log.round
        await asyncio.sleep(100)
        assert swarm.nodes["W"].log.round == number

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert "did not help: pausing" in caplog.text


def test_without_a_good_base_to_return_to_the_campaign_is_paused() -> None:
    async def main() -> None:
        swarm = Judged([3.0, 3.3, 3.4, 3.45, 3.48, 3.49, 3.6], keep=1)
        swarm.start_all()
        await swarm.until(lambda: is_paused(swarm.nodes["W"].log.last.control))
        assert min(archived_rounds(swarm.stores["W"])) > 0

    simulate(main)


@given(st.lists(st.floats(2, 4), max_size=12))
def test_what_the_guard_keeps_decides_like_all_evaluations(losses: list[float]) -> None:
    kept: list[HeldOut] = []
    for place, loss in enumerate(losses):
        kept = decisive([*kept, HeldOut(place, loss)])
        assert last_good_round(kept) == last_good_round([HeldOut(*each) for each in enumerate(losses[: place + 1])])
    assert len(kept) <= CONFIRMATIONS + 2


@pytest.mark.long
def test_a_restarted_guard_knows_what_it_saw_and_what_did_not_help(caplog: pytest.LogCaptureFixture) -> None:
    """Else a restart would let a loss run away unnoticed, and roll back to the same base again and again."""

    async def main() -> None:
        swarm = Judged([5.0, 4.5, 4.0, 3.9, 3.8, 6.0], keep=4)
        swarm.start_all()
        await swarm.until_round(6)
        swarm.restart("W")
        await swarm.until(lambda: any(is_rollback(each.commit) for each in swarm.nodes["A"].log.since(-1)))
        swarm.restart("W")
        await swarm.until(lambda: is_paused(swarm.nodes["A"].log.last.control))
        assert sum(is_rollback(each.commit) for each in swarm.nodes["A"].log.since(-1)) == 1

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert "rolling back to round 4" in caplog.text
    assert "did not help: pausing" in caplog.text


def test_in_an_open_campaign_strangers_cannot_have_it_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Node.base_loss
    assert isinstance(honest, property)
    monkeypatch.setattr(Node, "base_loss", property(lambda node: 99.0 if node.peer_id in "BC" else honest.__get__(node)))

    async def main() -> None:
        swarm = Judged([3.0], admission="open")
        invitation = Invitation(swarm.campaign.hash, "A", ("trainer", "elector"), 2**40, b"")
        swarm.invitations["A"] = signed_invitation(invitation, SimulatedIdentity("W"))
        swarm.start_all()
        await swarm.until_finished()
        assert swarm.nodes["W"].controls.newest is None
        assert {event.validation_loss for event in swarm.recorders["W"].of(Evaluated)} == {3.0}

    simulate(main)
