"""From the members' announcements to the plan (`proposal.py` checks them first). Pure functions."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType

from spes_p2p.config.campaign import CampaignConfig, TrainingConfig
from spes_p2p.consensus.admission import NO_SERVICE, Service, standing_of
from spes_p2p.consensus.control import runs, still_excluded
from spes_p2p.data.slices import give_back, take
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Proposal
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.rounds.audits import can_be_audited, convicted_by, drawn_work, still_convicted, verdicts_of
from spes_p2p.rounds.checks import disputed
from spes_p2p.rounds.claims import bounded_strangers, clamped, demoted
from spes_p2p.rounds.gate import barred
from spes_p2p.rounds.merge import merge_alpha
from spes_p2p.rounds.ownership import Owners, assign_experts, guard_experts
from spes_p2p.rounds.planned import Assignment, Member, Merge, Place, Plan, pacemakers
from spes_p2p.rounds.regions import regions_of
from spes_p2p.rounds.schedule import is_last, scheduled

MAX_TOKENS, MAX_RATE = 2**48, 1e15
"""Bounds of what an honest member can announce; `MAX_RATE` also bounds its loss."""
MAX_SPEED_RATIO = 4.0
"""Bounds the ratio of a peer's steps in a phase to `sync_steps`, and its inverse."""
NEWCOMER_WEIGHT = 0.25
"""Bounds the weight of a newcomer's update, as a share of a phase of `sync_steps` steps."""
LEAST_NEWCOMERS = 32
"""A round has room for this many newcomers, or as many as for others if those are more: a swarm doubles with each probation."""
OPEN_REDUNDANCY = 2
"""Owners per expert in an open campaign, at least: one alone could do anything to its expert unnoticed."""
NOBODY_SERVED: Mapping[str, Service] = MappingProxyType({})


@dataclass(frozen=True)
class Rules:
    """The campaign's data for planning."""

    config: CampaignConfig
    campaign_hash: str
    num_samples: int

    def training(self, control: Control | None, round_number: int) -> TrainingConfig:
        """Return the settings in the phase before this round. `control`: the control record of the previous commit."""
        return scheduled(self.config, control, round_number).training


def needs_vouched(config: CampaignConfig) -> bool:
    """Return whether a campaign begins, and its schedule advances, only with work of vouched trainers."""
    return config.admission == "open" and config.sync.min_peers > 0


def campaign_step(commit: Commit, tokens: int, rules: Rules) -> int:
    """Return the campaign step after the round that follows `commit`. `tokens`: of work that advances the schedule.

    It is `sync_steps` later, or as many steps as were trained in all where those are fewer.
    """
    training = rules.training(commit.control, commit.round + 1)
    trained = math.ceil(tokens / (training.batch_size * training.sequence_length))
    return min(commit.step + min(trained, training.sync_steps), training.total_steps)


def alpha_due(commit: Commit, tokens: int, rules: Rules) -> float:
    """Return the merge strength of the next round; 0 if no merge is due. `tokens`: as in `campaign_step`."""
    merge = rules.config.merge
    step = campaign_step(commit, tokens, rules)
    if merge.merge_interval is None or step // merge.merge_interval == commit.step // merge.merge_interval:
        return 0.0
    return merge_alpha(step, merge.merge_alpha_start, merge.merge_decay_steps)


def check_announcement(announcement: Announcement, rules: Rules) -> None:
    """Check an announcement's form. Raises Refused for one that no honest member can send. `claims.py` bounds the numbers."""
    experts = rules.config.model.moe_num_experts
    numbers = (
        announcement.waited_s, announcement.tokens_per_second, announcement.bandwidth, announcement.loss,
        announcement.validation_loss or 0.0,
    )
    if len(announcement.routed) != experts or min(announcement.routed) < 0 or announcement.tokens < 0:
        raise Refused(Code.MALFORMED, "malformed announcement: token counts")
    if not all(math.isfinite(number) and 0 <= number <= MAX_RATE for number in numbers):
        raise Refused(Code.MALFORMED, "malformed announcement: speeds")
    if not 0 <= announcement.capacity <= experts or max(announcement.tokens, *announcement.routed) > MAX_TOKENS:
        raise Refused(Code.MALFORMED, "malformed announcement: capacity or token counts")
    works = announcement.capacity or announcement.tokens or any(announcement.routed) or announcement.in_flight
    if not announcement.trains and works:
        raise Refused(Code.MALFORMED, "malformed announcement: work by a peer that does not train")
    if announcement.in_flight and not rules.config.sync.overlap:
        raise Refused(Code.MALFORMED, "malformed announcement: a phase during the round")


def make_plan(
    recent: Sequence[Commit],
    proposal: Proposal,
    announcements: Mapping[str, Announcement],
    returned: tuple[Interval, ...],
    rules: Rules,
    services: Mapping[str, Service] = NOBODY_SERVED,
) -> Plan:
    """Return the plan of the round after a commit: the first of `recent`, the last commits, newest first.

    `announcements`: the proposal's, by peer; all name the same base. Their claims are clamped. `returned`: samples of the peers
    that left. `services`: of the commit log that ends with the first of `recent`.
    """
    config, control, commit = rules.config, proposal.control, recent[0]
    if config.sync.bound_influence:
        announcements = clamped(announcements, recent, config)
    peers = sorted(announcements)
    idle = barred(recent) | still_convicted(recent)
    announcements = _without_work(announcements, idle)
    standings = standings_of(announcements, recent, services, config)
    places = regions_of(announcements, commit.members, commit.round + 1)
    members = tuple(
        replace(
            _member(peer, announcements[peer], standings[peer], commit, rules, places[peer]),
            lot=sha256(f"{proposal.id}\0{peer}".encode()).digest(),
        )
        for peer in peers
    )
    if config.sync.bound_influence:
        why = demoted(recent, announcements, config.admission)
        members = bounded_strangers([replace(member, demoted=why.get(member.peer, "")) for member in members])
    drawn = tuple(sorted(drawn_work(recent, services, config)))
    verdicts = verdicts_of(announcements, members, recent, drawn)
    tokens = sum(member.tokens for member in members)
    leading = [each for each in members if not (each.is_stranger and needs_vouched(config))]
    led = sum(announcements[member.peer].tokens for member in leading)
    step = campaign_step(commit, led, rules)
    alpha = alpha_due(commit, led, rules)
    under_way = rules.training(commit.control, commit.round + 1)
    ahead = under_way.sync_steps if any(announcements[each.peer].in_flight for each in leading) else 0
    phase_step = min(step + ahead, under_way.total_steps)
    capable = _auditable(members, announcements, commit) if can_be_audited(config, recent) else announcements
    owners = _owners(members, capable, commit, rules)
    back = [interval for peer in peers for interval in announcements[peer].untrained]
    cursor = give_back(commit.cursor, (*returned, *back))
    training = rules.training(control, commit.round + 2)
    steps = _next_steps(announcements, pacemakers(members), phase_step, training) if runs(control) else {}
    new = {member.peer for member in members if member.standing == "newcomer"}
    steps = {
        peer: min(count, training.sync_steps) if peer in new else count for peer, count in steps.items() if peer not in idle
    }
    assignments, cursor = _assignments(peers, owners, steps, cursor, rules)
    return Plan(
        proposal=proposal,
        campaign=commit.campaign,
        term=commit.term,
        base_digest=announcements[peers[0]].base_digest,
        members=members,
        tokens=tokens,
        loss=_mean_loss(members, announcements),
        step=step,
        merge=Merge(alpha, proposal.donors) if proposal.donors is not None and alpha > 0 else None,
        assignments=assignments,
        cursor=cursor,
        excluded=excluded_after(commit, proposal),
        disputed=tuple(peers.index(peer) for peer in sorted(disputed(recent, announcements, config.admission))),
        phase_step=phase_step,
        verdicts=verdicts,
        convicted=convicted_by(verdicts, members, recent),
        drawn=drawn,
        is_last=is_last(commit, config),
    )


def _without_work(announcements: Mapping[str, Announcement], peers: Collection[str]) -> dict[str, Announcement]:
    """Return the announcements with neither pending work nor room for experts from these peers."""
    return {
        peer: replace(each, capacity=0, tokens=0, routed=(0,) * len(each.routed)) if peer in peers else each
        for peer, each in announcements.items()
    }


def _auditable(
    members: Sequence[Member], announcements: Mapping[str, Announcement], commit: Commit
) -> dict[str, Announcement]:
    """Return the announcements with no more experts of a stranger than the roomiest auditor can train again.

    A stranger past probation keeps what it owns, since that one may be away for a round.
    """
    room = max((announcements[each.peer].capacity for each in members if each.standing == "vouched"), default=0)
    owned = Counter(commit.members[i] for owners in commit.owners for i in owners)
    most = {each.peer: max(room, owned[each.peer] * (each.standing == "proven")) for each in members if each.is_stranger}
    return {
        peer: replace(each, capacity=min(each.capacity, most.get(peer, each.capacity))) for peer, each in announcements.items()
    }


def excluded_after(commit: Commit, proposal: Proposal) -> tuple[str, ...]:
    """Return the peers that proofs exclude from this proposal's round on, sorted."""
    return tuple(sorted({*still_excluded(commit, proposal.control), *(each.peer for each in proposal.accused)}))


def _owners(
    members: Sequence[Member], announcements: Mapping[str, Announcement], commit: Commit, rules: Rules
) -> Owners:
    """Return the next owners of each expert."""
    config = rules.config
    capacities = {peer: a.capacity for peer, a in announcements.items() if a.trains}
    last = [[commit.members[i] for i in owners] for owners in commit.owners]
    redundancy = max(config.experts.redundancy, OPEN_REDUNDANCY if config.admission == "open" else 1)
    new = {member.peer for member in members if member.standing == "newcomer"}
    owners = assign_experts(config.model.moe_num_experts, capacities, last, redundancy, rules.campaign_hash, new)
    vouched = {member.peer for member in members if not member.is_stranger}
    proven = {member.peer for member in members if member.standing == "proven"}
    return owners if len(vouched) == len(members) else guard_experts(owners, capacities, last, redundancy, vouched, proven)


def standings_of(
    announcements: Mapping[str, Announcement], recent: Sequence[Commit], services: Mapping[str, Service], config: CampaignConfig
) -> dict[str, Standing]:
    """Return by peer what it may do in the round after a commit: the first of `recent`, the last commits, newest first."""
    rule, helpers, needs_audit = config.admission, recent[0].helpers, can_be_audited(config, recent)
    return {
        peer: standing_of(rule, peer, each.invitation, helpers, services.get(peer, NO_SERVICE), needs_audit)
        for peer, each in announcements.items()
    }


def crowded_out(
    standings: Mapping[str, Standing], services: Mapping[str, Service], parent: Commit, rng: random.Random
) -> frozenset[str]:
    """Return the newcomers for whom a round has no room: identities cost nothing, and the others exchange with each.

    Half of the room is for those whose work the last commit, `parent`, includes, with most rounds of service first. Among the
    others `rng`, the coordinator's own, draws: whoever could tell the draw would make identities that win it.
    """
    newcomers = sorted(peer for peer, standing in standings.items() if standing == "newcomer")
    room = max(LEAST_NEWCOMERS, len(standings) - len(newcomers))
    rng.shuffle(newcomers)
    heard = {parent.members[i] for i in parent.heard}
    served = sorted([peer for peer in newcomers if peer in heard], key=lambda peer: -services.get(peer, NO_SERVICE).rounds)
    stay = served[: room // 2]
    stay += [peer for peer in newcomers if peer not in stay][: room - len(stay)]
    return frozenset(newcomers) - set(stay)


def _member(
    peer: str, announced: Announcement, standing: Standing, commit: Commit, rules: Rules, place: Place
) -> Member:
    """Return the plan's record of an announcement. A newcomer's tokens count up to a bound, and nothing of a stranger that says
    it trained no shared weights: nobody could audit what it sends of experts."""
    training = rules.training(commit.control, commit.round + 1)
    tokens, routed = announced.tokens, announced.routed
    most = int(NEWCOMER_WEIGHT * training.sync_steps * training.batch_size * training.sequence_length)
    if standing == "newcomer" and tokens > most:
        routed = tuple(-(-each * most // tokens) for each in routed)
        tokens = most
    if standing in ("newcomer", "proven") and not tokens:
        routed = (0,) * len(routed)
    return Member(
        peer, tokens, routed, announced.bandwidth, announced.trains, standing, announced.name, announced.team, place
    )


def local_steps(sync_steps: int, tokens_per_second: Mapping[str, float], pace: Collection[str]) -> dict[str, int]:
    """Return each peer's steps in the next phase: `sync_steps` at median or unknown speed, otherwise proportional to speed.

    `pace`: the peers of which the median is taken; of all while their speeds are unknown.
    """
    known = [speed for speed in tokens_per_second.values() if speed > 0]
    known = [speed for peer, speed in tokens_per_second.items() if speed > 0 and peer in pace] or known
    median = statistics.median(known) if known else 0.0
    steps = {}
    for peer, speed in tokens_per_second.items():
        ratio = speed / median if speed > 0 else 1.0
        steps[peer] = max(1, round(sync_steps * min(max(ratio, 1 / MAX_SPEED_RATIO), MAX_SPEED_RATIO)))
    return steps


def _next_steps(
    announcements: Mapping[str, Announcement], pace: Collection[str], step: int, training: TrainingConfig
) -> dict[str, int]:
    """Return each trainer's steps in the next phase; empty at the end of the schedule."""
    if step >= training.total_steps:
        return {}
    speeds = {peer: a.tokens_per_second for peer, a in announcements.items() if a.trains}
    return local_steps(training.sync_steps, speeds, pace)


def _assignments(
    peers: list[str], owners: tuple[tuple[str, ...], ...], steps: Mapping[str, int], cursor: Cursor, rules: Rules
) -> tuple[tuple[Assignment, ...], Cursor]:
    assignments = []
    for index, peer in enumerate(peers):
        count = steps.get(peer, 0)
        slices, cursor = take(cursor, count * rules.config.training.batch_size, rules.num_samples)
        owned = tuple(expert for expert, its_owners in enumerate(owners) if peer in its_owners)
        assignments.append(Assignment(index, owned, count, slices))
    return tuple(assignments), cursor


def _mean_loss(members: Sequence[Member], announcements: Mapping[str, Announcement]) -> float:
    """Return the mean training loss of the pacemakers, by their weights; of all while no pacemaker brings work."""
    pace = pacemakers(members)
    weights = {member.peer: member.tokens for member in members if member.peer in pace}
    weights = weights if any(weights.values()) else {member.peer: member.tokens for member in members}
    tokens = sum(weights.values())
    return sum(announcements[peer].loss * weight for peer, weight in weights.items()) / tokens if tokens else 0.0
