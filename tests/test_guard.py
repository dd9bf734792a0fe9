"""When the held-out loss runs away, the owner's bootstrap peer takes the campaign back, once; then it pauses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.campaign.orders import CampaignView, resume
from spes_p2p.consensus.admission import signed_invitation
from spes_p2p.consensus.control import is_paused, is_rollback, signed
from spes_p2p.messages.admission import Invitation
from spes_p2p.observe.events import Controlled, Evaluated
from spes_p2p.peer.guard import advice
from spes_p2p.peer.node import Node
from spes_p2p.rounds.archive import Archive, archived_rounds
from spes_p2p.rounds.runaway import Course, HeldOut
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity


def course_of(evaluations: Iterable[HeldOut]) -> Course:
    return reduce(Course.after, evaluations, Course())


@pytest.mark.parametrize(
    ("losses", "good"),
    [
        ([], None),
        ([9, 9, 9, 9], None),
        ([5.0, 4.0, 3.0, 2.9, 2.95, 3.0], None),
        ([5.0, 4.0, 3.0, 3.0, 4.0, 4.0], None),
        ([5.0, 4.0, 3.0, 4.0, 3.4, 3.4], None),
        ([5.0, 4.0, 3.0, 3.0, 4.0, 4.0, 4.0], 10),
        ([5.0, 4.0, 3.0, 3.0, 4.0, 3.0, 4.0, 4.0], 10),
        ([5.0, 4.0, 3.0, 3.0, 3.09, 3.2, 4.0, 5.0, 6.0], 15),
        ([3.0, 3.0, 3.4, 3.45, 3.6, 3.6, 3.6], 0),
    ],
)
def test_a_loss_has_run_away_when_three_of_four_evaluations_are_far_above_the_best(losses: list[float], good: int) -> None:
    assert course_of(HeldOut(5 * place, loss) for place, loss in enumerate(losses)).last_good_round == good


@given(st.lists(st.floats(2.9, 3.1), min_size=3, max_size=40), st.integers(0, 4), st.floats(0, 1e15))
def test_one_of_several_that_take_turns_cannot_make_a_loss_run_away(losses: list[float], liar: int, lie: float) -> None:
    told = (HeldOut(n, lie if n % 5 == liar else loss, f"{n % 5}") for n, loss in enumerate(losses))
    assert course_of(told).last_good_round is None


@given(st.integers(0, 2), st.floats(0, 1e15))
def test_one_of_three_that_take_turns_cannot_hide_that_a_loss_runs_away(liar: int, lie: float) -> None:
    told = [HeldOut(n, lie if n % 3 == liar else 3.0 if n < 9 else 6.0, f"{n % 3}") for n in range(14)]
    found = [course_of(told[:end]).last_good_round for end in range(len(told) + 1)]
    good = [each for each in found if each is not None]
    assert good
    assert max(good) <= 8


def test_a_trainer_does_not_confirm_itself_while_others_take_turns() -> None:
    def course(by: str) -> Course:
        return course_of(HeldOut(n, 0.1 if n in (1, 2) else 3.0, by if n in (1, 2) else "A") for n in range(8))

    assert course("B").last_good_round is None
    assert course("").last_good_round == 1


@pytest.mark.parametrize(("training_loss", "passes", "overfits"), [(1.9, 10.2, True), (1.9, 0.9, False), (4.1, 10.2, False)])
def test_a_loss_that_runs_away_from_a_lower_training_loss_on_text_read_again_is_overfitting(
    training_loss: float, passes: float, overfits: bool
) -> None:
    """When training diverges or a member does harm, the training loss rises too."""
    told = advice(3.7, training_loss, passes, 100, audit="")
    assert ("probably overfits" in told) is overfits
    assert ("'clipped' warnings" in told) is not overfits
    assert not overfits or "the training loss is 1.9 and the text was read 10.2 times" in told
    assert ("rollback 100" in told) is overfits
    assert "rollback" not in advice(3.7, training_loss, passes, -1, audit="")


def test_where_there_are_audits_no_stranger_is_banned_for_being_clipped_alone() -> None:
    assert "audited (control audit PEER) and ban those that fail" in advice(3.7, 4.1, 1.0, 100, "control audit PEER")
    assert "ban them" in advice(3.7, 4.1, 1.0, 100, audit="")


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
        assert back.base_digest == swarm.digests()[2].pop()
        assert commits[-1].step == 110

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert "6.000 after round 7" in caplog.text
    assert "rolling back to round 2" in caplog.text


@pytest.mark.long
def test_a_loss_that_runs_away_again_pauses_the_campaign(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = Judged([5.0, 4.5, 4.0, 3.9, 3.8, 6.0], keep=4)
        swarm.start_all()
        await swarm.until(lambda: is_paused(swarm.nodes["W"].log.last.control))
        assert sum(is_rollback(each.commit) for each in swarm.nodes["W"].log.since(-1)) == 1
        told = [event.news for event in swarm.recorders["A"].of(Controlled)]
        by_guard = "(by the owner's bootstrap peer: the held-out loss ran away)"
        assert told == [f"{order} {by_guard}" for order in ("rolled back to round 2", "paused")]
        number = swarm.nodes["W"].log.round
        await asyncio.sleep(100)
        assert swarm.nodes["W"].log.round == number

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert "did not help: pausing" in caplog.text
    assert "; continue with spes-p2p control /memory/W/p2p/W --key KEY resume" in caplog.text


@pytest.mark.long
async def test_without_a_good_base_to_return_to_the_campaign_is_paused() -> None:
    swarm = Judged([3.0, 3.3, 3.4, 3.45, 3.48, 3.49, 4.0], keep=1)
    swarm.start_all()
    await swarm.until(lambda: is_paused(swarm.nodes["W"].log.last.control))
    assert min(archived_rounds(swarm.stores["W"])) > 0


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
    assert "rolling back to round 2" in caplog.text
    assert "did not help: pausing" in caplog.text
    assert "; continue with spes-p2p control /memory/W/p2p/W --key KEY resume" in caplog.text


def says(monkeypatch: pytest.MonkeyPatch, liars: str, loss: float) -> None:
    """Have these peers announce this held-out loss in every round, whoever's turn it is."""
    honest = Node.base_loss
    assert isinstance(honest, property)
    monkeypatch.setattr(Node, "base_loss", property(lambda node: loss if node.peer_id in liars else honest.__get__(node)))


@pytest.mark.parametrize("lie", [0.1, 99.0])
@pytest.mark.long
async def test_among_friends_one_liar_has_nothing_rolled_back(monkeypatch: pytest.MonkeyPatch, lie: float) -> None:
    says(monkeypatch, "C", lie)
    swarm = Judged([3.0])
    swarm.start_all()
    await swarm.until_finished()
    assert swarm.nodes["W"].controls.newest is None
    told = swarm.recorders["W"].of(Evaluated)
    assert {event.validation_loss for event in told} == {3.0, lie}
    assert sum(event.validation_loss == lie for event in told) <= len(told) // 3 + 1  # in its turns only


@pytest.mark.long
async def test_among_friends_one_liar_cannot_hide_a_runaway_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "C", 0.1)
    swarm = Judged([3.0] * 6 + [6.0], keep=8)
    swarm.start_all()
    await swarm.until(lambda: any(is_rollback(each.commit) for each in swarm.nodes["A"].log.since(-1)))


@pytest.mark.long
def test_when_the_owner_resumes_the_guard_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """The first losses were false or the owner accepts what there is: to compare with them would pause the campaign again."""

    async def main() -> None:
        swarm = Judged([5.0, 4.5, 4.0, 3.9, 3.8, 6.0], keep=4)
        swarm.start_all()
        node = swarm.nodes["W"]
        await swarm.until(lambda: is_paused(node.log.last.control))
        view = CampaignView(node.campaign_hash, "W", swarm.campaign.config, node.controls.newest, node.log.round, 0, ())
        node.decisions.take_control(signed(resume(view), node.world.identity))
        await swarm.until_finished()
        assert not is_paused(node.log.last.control)

    with caplog.at_level(logging.ERROR):
        simulate(main)
    assert caplog.text.count("pausing the campaign") == 1


@pytest.mark.long
async def test_in_an_open_campaign_strangers_cannot_have_it_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "BC", 99.0)
    swarm = Judged([3.0], admission="open")
    invitation = Invitation(swarm.campaign.hash, "A", ("trainer", "elector"), 2**40, b"")
    swarm.invitations["A"] = signed_invitation(invitation, SimulatedIdentity("W"))
    swarm.start_all()
    await swarm.until_finished()
    assert swarm.nodes["W"].controls.newest is None
    assert {event.validation_loss for event in swarm.recorders["W"].of(Evaluated)} == {3.0}
