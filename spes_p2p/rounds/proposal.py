"""From a coordinator's proposal to the plan: every peer derives it from what the members signed, so no other plan exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from spes_p2p.consensus.admission import Service, check_admission
from spes_p2p.consensus.control import may_follow, owner_of, rolls_back
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.consensus import Commit, Leave, Signed
from spes_p2p.messages.fields import MAX_BANNED
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Proposal
from spes_p2p.rounds.claims import outstanding, returned
from spes_p2p.rounds.plan import Rules, check_announcement, make_plan
from spes_p2p.rounds.planned import Plan

KEPT_PLANS = 8
"""The last plans that were derived: of one round, since a member derives its plan several times, with some attempts."""


@dataclass(frozen=True)
class _Inputs:
    """What a plan is derived from; equal for equal plans."""

    proposal: Proposal = field(compare=False)
    recent: Sequence[Commit] = field(compare=False)
    rules: Rules
    identity: Identity = field(compare=False)
    proposal_id: str
    commits: tuple[str, ...]
    verify: Callable[[str, bytes, bytes], bool]
    services: frozenset[tuple[str, Service]]


def derive_plan(
    proposal: Proposal,
    recent: Sequence[Commit],
    rules: Rules,
    identity: Identity,
    services: Mapping[str, Service],
) -> Plan:
    """Return the plan to which this proposal leads.

    `recent`: the last commits before its round, newest first (`CommitLog.recent`). `services`: of the log up to there.
    `identity`: checks signatures.

    Raises Refused for a proposal that no honest coordinator makes. Not checked here: the base's digest and the merge's donors,
    which need the base (`merge.are_nearest`); the proofs against accused peers, which need the updates (`peer/proofs.py`);
    whether an invitation has expired, which coordinators see to; and whether a peer that is left out is absent, which nobody
    can prove.
    """
    commits, served = tuple(commit.id for commit in recent), frozenset(services.items())
    return _derive(_Inputs(proposal, recent, rules, identity, proposal.id, commits, identity.verify, served))


@lru_cache(KEPT_PLANS)
def _derive(inputs: _Inputs) -> Plan:
    proposal, recent, rules, identity = inputs.proposal, inputs.recent, inputs.rules, inputs.identity
    commit, control = recent[0], proposal.control
    if (proposal.round, proposal.parent) != (commit.round + 1, commit.id):
        raise Refused(Code.NOT_PROVEN, f"a proposal for another round than {commit.round + 1}")
    _require(may_follow(control, commit, identity) and not rolls_back(control, commit), "its control record")
    announcements = {}
    for signed in proposal.announcements:
        announcements[signed.peer] = read_announcement(signed, commit, proposal.ballot.coordinator, rules, identity)
    _require(_ascends(each.peer for each in proposal.announcements), "the order of its announcements")
    _require(any(each.trains for each in announcements.values()), "a round without a trainer")
    _require(len({each.base_digest for each in announcements.values()}) == 1, "members that start from different bases")
    for peer, each in announcements.items():
        check_admission(rules.config.admission, peer, each.trains, each.invitation, commit, control, identity, now_s=0.0)
    leaves = [read_leave(signed, recent, rules, identity) for signed in proposal.returned]
    left = [signed.peer for signed in proposal.returned]
    _require(_ascends(left) and announcements.keys().isdisjoint(left), "its list of leaving peers")
    others = set(commit.electorate) - announcements.keys()
    _require(_ascends(proposal.absent) and others.issuperset(proposal.absent), "its list of absent electors")
    _require(len(proposal.straggler_delay) <= len(announcements), "its straggler delays")
    accused = [each.peer for each in proposal.accused]
    _require(_ascends(accused) and announcements.keys().isdisjoint(accused), "its list of accused peers")
    _require(may_exclude(commit, accused), "peers that a proof cannot exclude")
    _require(not any(leave.back for leave in leaves), "a peer that is back")
    untrained = tuple(interval for leave in leaves for interval in leave.untrained)
    _require(proposal.donors is None or _fits_the_model(proposal, rules), "its merge")
    return make_plan(recent, proposal, announcements, untrained, rules, dict(inputs.services))


def may_exclude(commit: Commit, accused: Sequence[str]) -> bool:
    """Return whether proofs may exclude these peers after a commit: neither the owner, nor excluded ones, nor too many."""
    known = {*commit.excluded, owner_of(commit)}
    return known.isdisjoint(accused) and len(commit.excluded) + len(accused) <= MAX_BANNED


def read_announcement(signed: Signed, commit: Commit, coordinator: str, rules: Rules, identity: Identity) -> Announcement:
    """Return a member's announcement to this coordinator. Raises Refused when it is another's, or of another round."""
    announcement = read_signed(Announcement, signed, identity)
    check_announced(signed.peer, announcement, commit, coordinator, rules)
    return announcement


def check_announced(peer: str, announcement: Announcement, commit: Commit, coordinator: str, rules: Rules) -> None:
    """Raise Refused for an announcement that is not to this coordinator, or of another round than the one after the commit."""
    order = coordinator_order(commit)
    if (announcement.campaign, announcement.round, announcement.commit) != (commit.campaign, commit.round + 1, commit.id):
        raise Refused(Code.NOT_PROVEN, f"the announcement of {peer[-6:]} is for another round")
    if order[announcement.attempt % len(order)] != coordinator:
        raise Refused(Code.NOT_PROVEN, f"{peer[-6:]} announced to another coordinator")
    check_announcement(announcement, rules)


def read_leave(signed: Signed, recent: Sequence[Commit], rules: Rules, identity: Identity) -> Leave:
    """Return the statement of a peer that leaves the next round, or is back, with those of its samples that are its own.

    `recent`: see `derive_plan`. Raises Refused for the statement of another round.
    """
    leave, commit = read_signed(Leave, signed, identity), recent[0]
    if leave.parent != commit.id or signed.peer not in {*commit.members, *commit.electorate}:
        raise Refused(Code.NOT_PROVEN, f"{signed.peer[-6:]} does not leave this round")
    work = outstanding(recent, signed.peer, rules.config.sync.overlap)
    return replace(leave, untrained=returned(work, leave.untrained))


def _fits_the_model(proposal: Proposal, rules: Rules) -> bool:
    """Return whether the donors are, for each expert in each layer, the right number of other experts."""
    model, donors = rules.config.model, proposal.donors or ()
    count = min(rules.config.merge.merge_top_k, model.moe_num_experts - 1)
    return len(donors) == model.num_hidden_layers and all(
        len(layer) == model.moe_num_experts
        and all(len({*chosen, e}) - 1 == len(chosen) == count for e, chosen in enumerate(layer))
        and all(donor < len(layer) for chosen in layer for donor in chosen)
        for layer in donors
    )


def _ascends(names: Iterable[str]) -> bool:
    return all(before < after for before, after in pairwise(names))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(Code.NOT_PROVEN, f"a proposal from which no plan follows: {what}")
