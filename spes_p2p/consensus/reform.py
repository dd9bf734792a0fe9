"""Reform: the campaign's owner opens a new term when the swarm is stuck. Honest electors fork the log by this only, so the
owner waits first.

A swarm is stuck when a majority of the electors is gone, so that no round can be decided, when no peer has the last commit's
base, so that nothing can be trained on it, or when electors lied and a round was decided twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spes_p2p.consensus.control import without_plan
from spes_p2p.consensus.electorate import quorum
from spes_p2p.messages.consensus import Commit

if TYPE_CHECKING:  # clients read reforms without the records of rounds
    from spes_p2p.messages.rounds import Pong


def reform_commit(parent: Commit, term: int, helper: str, incarnation: str, excluded: tuple[str, ...]) -> Commit:
    """Return the commit that opens a new term: no weights move, and the owner (`helper`) alone decides the next round.

    `parent`: the owner's last commit, or an earlier one when later bases are lost. `term`: above all that the owner has seen.
    `incarnation`: the owner's. `excluded`: those of the parent, and electors that decided a round twice.
    """
    return replace(
        without_plan(parent),
        term=term,
        base_digest="",
        members=(),
        vouched=(),
        owners=((),) * len(parent.owners),
        electorate=(helper,),
        incarnations=(incarnation,),
        excluded=excluded,
    )


def is_reform(commit: Commit) -> bool:
    """Return whether this commit opens a new term."""
    return commit.round >= 0 and not commit.plan and commit.base_digest == ""


def sees_majority(pongs: Iterable[Pong | None], electorate: tuple[str, ...], round_number: int) -> bool:
    """Return whether a majority of electors answers that can vote on the round after `round_number`.

    An elector at another round counts: it may be able to vote once it has caught up.
    """
    able = [pong for pong in pongs if pong is not None and (pong.votes or pong.round != round_number)]
    return len(able) >= quorum(electorate)


@dataclass(frozen=True)
class Outage:
    """A time during which no look found a majority of the electors."""

    commit: str
    """The last commit: nothing was decided after it."""
    since: float
    """Seconds on the caller's clock."""


class OutageWatch:
    """How long the owner has seen no majority."""

    def __init__(self) -> None:
        self.outage: Outage | None = None

    def saw(self, commit: str, majority: bool, now: float) -> Outage | None:
        """Record one look at the electors of the round after `commit`; return the ongoing outage, if any."""
        if majority:
            self.outage = None
        elif self.outage is None or self.outage.commit != commit:
            self.outage = Outage(commit, now)
        return self.outage


def has_lasted(since: float, now: float, patience_s: float) -> bool:
    """Return whether an outage since then has lasted long enough to open a term."""
    return now - since >= patience_s
