"""Reform: the bootstrap peer opens a new term when a swarm cannot go on. The only way to fork, so it waits until it is sure.

Two things stop a swarm. A majority of the electors is gone, and nothing can be decided after the last commit. Or nobody has the
base of the last commit, and nothing can be trained on top of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spes_p2p.consensus.electorate import quorum
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Pong


def reform_commit(parent: Commit, term: int, helper: str, incarnation: str) -> Commit:
    """The commit that opens a new term: nothing moves, and the helper alone decides the next round.

    `parent`: the helper's last commit, or an earlier one when the bases after it are lost. `term`: above all that the helper
    has seen. `incarnation`: the one that the helper votes with.
    """
    return replace(
        parent,
        term=term,
        round=parent.round + 1,
        parent=parent.id,
        plan="",
        roots=(),
        dropped=(),
        base_digest="",
        members=(),
        owners=((),) * len(parent.owners),
        electorate=(helper,),
        incarnations=(incarnation,),
    )


def is_reform(commit: Commit) -> bool:
    """Does this commit open a new term?"""
    return commit.round >= 0 and not commit.plan and commit.base_digest == ""


def sees_majority(pongs: Iterable[Pong | None], electorate: tuple[str, ...], round_number: int) -> bool:
    """Do enough electors answer that can vote on the round after `round_number`?

    One that is at another round may be able to vote once it has caught up.
    """
    able = [pong for pong in pongs if pong is not None and (pong.votes or pong.round != round_number)]
    return len(able) >= quorum(electorate)


@dataclass(frozen=True)
class Outage:
    """No majority of the electors, in every look since."""

    commit: str
    """The last commit: nothing was decided after it."""
    since: float
    """Seconds, of the caller's clock."""


class OutageWatch:
    """How long a helper has seen no majority."""

    def __init__(self) -> None:
        self.outage: Outage | None = None

    def saw(self, commit: str, majority: bool, now: float) -> Outage | None:
        """Take up one look at the electors of the round after `commit`. Returns the outage that lasts, if any."""
        if majority:
            self.outage = None
        elif self.outage is None or self.outage.commit != commit:
            self.outage = Outage(commit, now)
        return self.outage


def has_lasted(since: float, now: float, patience_s: float) -> bool:
    """May a helper open a term over something that has been wrong since then?"""
    return now - since >= patience_s
