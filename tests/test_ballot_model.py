"""No interleaving of crash, loss and restart decides two heads; and the search would find one if a rule were missing.

Within its bounds a search is exhaustive: it ends only when every reachable state was visited, or at the first wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from ballot_model import Bounds, Rules, search

from spes_p2p.swarm.electors import Accept, Elector, HeadLog, Prepare, Promise, VoteState, Weighed, vote_message, weigh
from spes_p2p.swarm.records import Decided, Vote
from spes_p2p.swarm.wire import pack


@pytest.mark.parametrize(
    ("bounds", "states"),
    [
        (Bounds(ballots=(1, 1), numbers=2, losses=1), 11954),
        (Bounds(ballots=(2, 0), numbers=2), 1401),
        (Bounds(ballots=(1, 1), numbers=1, rounds=2), 2260),
        pytest.param(Bounds(ballots=(1, 1), numbers=1, rounds=2, losses=1), 36927, marks=pytest.mark.slow),
        pytest.param(Bounds(ballots=(2, 1), numbers=2), 77398, marks=pytest.mark.slow),
        pytest.param(Bounds(ballots=(2, 2), numbers=2), 1136550, marks=pytest.mark.slow),
    ],
)
def test_every_interleaving_decides_one_head_at_most(bounds: Bounds, states: int) -> None:
    found = search(Rules(), bounds)
    assert found.violation is None, found.trace
    assert found.states == states
    assert found.decided == {name for name, ballots in zip("AB", bounds.ballots, strict=True) if ballots}


# Each rule is needed -------------------------------------------------------------------------------------------------------


class Forgetful(Elector):
    """Keeps its promises in memory."""

    def _state(self) -> VoteState:
        known: VoteState | None = getattr(self, "kept", None)
        return known if known is not None and known.parent == self._log.head.id else super()._state()

    def _remember(self, state: VoteState) -> None:
        self.kept = state


class AcceptsBelowItsPromise(Elector):
    """Votes for whoever asks."""

    def accept(self, request: Accept) -> Vote:
        state = self._state()
        self._remember(dataclasses.replace(state, accepted_ballot=request.ballot, accepted=request.head))
        return Vote(self._identity.peer_id, self._identity.sign(vote_message(request.ballot, request.head.id)))


class PromisesABallotTwice(Elector):
    """Refuses lower ballots only."""

    def prepare(self, request: Prepare) -> Promise:
        state = self._state()
        if self._log.head.id == request.parent and state.promised == request.ballot:
            return Promise(self._log.round, True, state.promised, state.accepted_ballot, state.accepted)
        return super().prepare(request)


class VotesOnAnyDisk(Elector):
    """Does not look whether its disk is the one that the head lists."""

    def _require_elector(self) -> None:
        pass


class Credulous(HeadLog):
    """Takes any votes for a certificate."""

    def append(self, decided: Decided) -> bool:
        if decided.head.parent != self.head.id:
            return False
        self._store.append("heads.log", pack(decided))
        self._put(decided)
        return True


def unbound(answers: Iterable[Promise], electorate: tuple[str, ...]) -> Weighed:
    """Proposes its own head whatever was accepted before."""
    return dataclasses.replace(weigh(answers, electorate), bound=None)


def lowest(answers: Iterable[Promise], electorate: tuple[str, ...]) -> Weighed:
    """Is bound by the head that was accepted in the lowest ballot."""
    answers = tuple(answers)
    accepted = [(answer.accepted_ballot, answer.accepted) for answer in answers if answer.accepted_ballot is not None]
    bound = min(accepted, key=lambda pair: pair[0])[1] if accepted else None
    return dataclasses.replace(weigh(answers, electorate), bound=bound)


def content_with_one(answers: Iterable[Promise], electorate: tuple[str, ...]) -> Weighed:
    """Goes on without a majority."""
    return dataclasses.replace(weigh(answers, electorate), won=True)


BROKEN = {
    "promises and votes are forgotten by a restart": (Rules(elector=Forgetful), Bounds((1, 1), numbers=1)),
    "a vote is given below the promise": (Rules(elector=AcceptsBelowItsPromise), Bounds((1, 1), numbers=1)),
    "one ballot is promised twice": (Rules(elector=PromisesABallotTwice), Bounds((2, 0), numbers=1)),
    "an elector votes on a new disk": (Rules(elector=VotesOnAnyDisk), Bounds((1, 1), numbers=1, losses=1)),
    "the bound head is ignored": (Rules(weigh=unbound), Bounds((1, 1), numbers=1)),
    "a minority of promises is enough": (Rules(weigh=content_with_one), Bounds((1, 1), numbers=1)),
    "a head is learned without its certificate": (Rules(log=Credulous), Bounds((1, 1), numbers=1)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_search_finds_what_goes_wrong_without_a_rule(broken: str) -> None:
    assert search(*BROKEN[broken]).violation is not None


@pytest.mark.slow
def test_the_search_finds_what_goes_wrong_when_the_lowest_ballot_binds() -> None:
    assert search(Rules(weigh=lowest), Bounds((2, 1))).violation is not None
