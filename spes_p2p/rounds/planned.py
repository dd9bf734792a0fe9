"""The plan of a round: what every peer derives from the coordinator's proposal (`plan.py`). It is never sent or stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from spes_p2p.consensus.control import is_banned
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.consensus import Verdict
from spes_p2p.messages.rounds import Proposal
from spes_p2p.messages.samples import Cursor, Interval

BANDWIDTH_RATIO = 4.0
"""Bounds a member's bandwidth in a plan, as a multiple of the median member's. Only the member itself measures it, and an
exaggeration makes it reduce more than its share."""
Demotion = Literal["", "lost", "disputed"]
"""Why a member reduces nothing while others can (`claims.demoted`); empty: it may reduce."""


@dataclass(frozen=True)
class Place:
    """Where a member belongs (`regions.py`)."""

    region: int = 0
    """All have the same where there are not several."""
    is_guest: bool = False
    """Whether it is in the region only for this round."""


@dataclass(frozen=True)
class Member:
    """A peer in the plan, with the weights of its contributions."""

    peer: str
    tokens: int
    routed: tuple[int, ...]
    """By expert."""
    bandwidth: float
    """Upload, in bytes per second; 0: reduces nothing."""
    trains: bool = True
    standing: Standing = "vouched"
    """What it may do beyond training; among friends everything."""
    name: str = ""
    team: str = ""
    place: Place = Place()
    demoted: Demotion = ""
    lot: bytes = b""
    """Draws its place among strangers, anew for each proposal (`cells.py`)."""

    @property
    def is_stranger(self) -> bool:
        """Whether the owner neither invited nor vouched for it: it may be one of many identities of one attacker."""
        return self.standing in ("newcomer", "proven")


def pacemakers(members: Sequence[Member]) -> frozenset[str]:
    """Return the trainers whose speed and progress set everybody's pace: no strangers, unless they are alone."""
    trainers = [member for member in members if member.trains]
    return frozenset(member.peer for member in [each for each in trainers if not each.is_stranger] or trainers)


def holders(members: Sequence[Member]) -> frozenset[int]:
    """Return the members whose word counts for what they hold durably, as indices: no strangers."""
    return frozenset(i for i, member in enumerate(members) if not member.is_stranger)


def trusted(members: Sequence[Member]) -> frozenset[int]:
    """Return the members that decide how long a round waits, as indices: no strangers, unless they are alone."""
    return holders(members) or frozenset(range(len(members)))


@dataclass(frozen=True)
class Assignment:
    """What one member does in the next phase."""

    member: int
    """Index into the plan's members."""
    owned: tuple[int, ...]
    steps: int
    slices: tuple[Interval, ...]


@dataclass(frozen=True)
class Merge:
    """An expert merge after the round: w <- w + alpha (mean(donors) - w)."""

    alpha: float
    donors: tuple[tuple[tuple[int, ...], ...], ...]
    """Donors of each expert in each layer, `[layers][experts][k]`, chosen from the parent's base."""


@dataclass(frozen=True)
class Plan:
    """Members with their weights, the merge, and the next phase's assignments: the same for all peers."""

    proposal: Proposal
    campaign: str
    term: int
    base_digest: str
    """Digest of the parent's base, from which all members start."""
    members: tuple[Member, ...]
    """Sorted by peer id."""
    tokens: int
    """Tokens of this round, over all members."""
    loss: float
    step: int
    """Campaign step after this round."""
    merge: Merge | None
    assignments: tuple[Assignment, ...]
    """One per member, in the members' order."""
    cursor: Cursor
    excluded: tuple[str, ...] = ()
    """Peers that proofs exclude, by the last commit or the proposal, sorted."""
    disputed: tuple[int, ...] = ()
    """Members that reduce nothing for a while (`checks.disputed`), as indices, ascending."""
    phase_step: int = 0
    """Campaign step at which the assignments start: `step`, plus the phase that runs during this round (`sync.overlap`)."""
    verdicts: tuple[Verdict, ...] = ()
    """Audits of training that the members announce and no commit has yet (`audits.verdicts_of`)."""
    convicted: tuple[int, ...] = ()
    """Members that these and earlier verdicts convict, as indices, ascending."""
    drawn: tuple[str, ...] = ()
    """Peers that the last commit draws for an audit (`audits.drawn_work`), members or not, sorted."""
    is_last: bool = False
    """Whether the round is the schedule's last, as far as the last commit tells (`schedule.is_last`)."""

    @property
    def id(self) -> str:
        """The proposal's id, by which commits, manifests and reports name the plan."""
        return self.proposal.id

    @property
    def round(self) -> int:
        """The round that it plans."""
        return self.proposal.round

    def takes_part(self, peer: str) -> bool:
        """Return whether the peer keeps its seat: neither the owner's order nor a proof excludes it."""
        return peer not in self.excluded and not is_banned(self.proposal.control, peer)

    def index(self, peer: str) -> int | None:
        """Return the peer's index among the members, or None."""
        return self._indices.get(peer)

    @cached_property
    def peers(self) -> frozenset[str]:
        """The ids of the members."""
        return frozenset(self._indices)

    @cached_property
    def _indices(self) -> Mapping[str, int]:
        return {member.peer: i for i, member in enumerate(self.members)}


DerivePlan = Callable[[Proposal], Plan]
"""Derives the plan of a proposal after one of the log's commits. Raises Refused when none follows from it."""
