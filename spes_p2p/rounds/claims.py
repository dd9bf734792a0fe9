"""Bounds on what members claim in their announcements, from records that every peer has: the last commits.

A commit names each member's experts, steps and samples of the next phase, and the members whose work it includes. So it is
public what a member may have pending: the phases that it was assigned and that no round includes yet. Claims beyond that are
clamped, not refused: an honest peer exceeds a bound after a reform that gave up rounds, and its work still goes in. Pure
functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.admission import standing_of
from spes_p2p.consensus.control import is_rollback
from spes_p2p.data.slices import end_of, union
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Announcement
from spes_p2p.messages.samples import Interval
from spes_p2p.rounds.accounting import MAX_PENDING_ROUNDS
from spes_p2p.rounds.checks import disputed
from spes_p2p.rounds.planned import BANDWIDTH_RATIO, Demotion, Member

LOST_ROUNDS = 3
"""A member that was lost as a reducer, stalled, or is disputed reduces nothing for this many rounds unless nobody else can, and
keeps its vote."""
NEWCOMERS_WEIGHT = 0.25
"""Bounds the weight of all newcomers together in a mean, as a share of the others'."""
LOSS_RATIO = 2.0
"""Bounds a member's loss in the plan's mean, as a multiple of the median member's."""
STRANGERS_BYTES, COUNT_BYTES, INTERVAL_BYTES = 2**14, 9, 28
"""Bound a stranger's announcement or farewell, beside token counts of experts and the samples of its outstanding work: all
members get it with the proposal, which 24 strangers with 256 KiB each would fill."""


@dataclass(frozen=True)
class Outstanding:
    """What one peer was assigned and no round includes yet."""

    steps: int
    """Steps of the phases whose work it can announce now."""
    experts: frozenset[int]
    """Experts that it owned in any phase whose work may be pending. A lost expert's update is announced once more."""
    samples: tuple[tuple[Interval, ...], ...]
    """Samples of each of these phases, and with `sync.overlap` of the phase that runs now."""


def outstanding(recent: Iterable[Commit], peer: str, overlap: bool) -> Outstanding:
    """Return a peer's outstanding work before the next round. `recent`: the last commits, newest first.

    The phase that a commit assigns is announced for the next round, with `overlap` for the one after it. Whatever a peer
    announced is included as a whole, or ages: work that more than MAX_PENDING_ROUNDS rounds left out is discarded by its peer.

    Of somebody for whom the owner does not vouch, a phase that a round left out whole, though its peer took part, can no longer
    be claimed: an audit trains the last phase only.
    """
    lag = int(overlap)
    steps, experts, samples = 0, set[int](), list[tuple[Interval, ...]]()
    settles: list[bool] = []
    """By planned round, newest first: whether nothing from before it can be claimed after it."""
    rolled_back = False
    for commit in recent:
        if not commit.plan:
            rolled_back |= is_rollback(commit)
            continue
        age = len(settles)
        if age > MAX_PENDING_ROUNDS + lag:
            break
        is_settled = any(settles[: max(0, age - lag)])
        place = commit.members.index(peer) if peer in commit.members else None
        is_left_out = place is not None and peer not in commit.trusted and not commit.dropped and not commit.lost
        settles.append(place in commit.heard or is_left_out)
        if place is None:
            continue
        experts.update(expert for expert, owners in enumerate(commit.owners) if place in owners)
        if not is_settled:
            for workload in commit.workloads[place : place + 1]:
                samples.append(workload.slices)
                steps += workload.steps if age >= lag and not rolled_back else 0
    return Outstanding(steps, frozenset(experts), tuple(samples))


def clamped(
    announcements: Mapping[str, Announcement], recent: Sequence[Commit], config: CampaignConfig
) -> dict[str, Announcement]:
    """Return the announcements with tokens, samples, bandwidths and losses within their bounds. `recent`: see `outstanding`.

    Medians are those of all but the strangers, unless these are alone. Who was no member of the last round has measured no
    line, and counts for no more than the median of those that were, if any are there.
    """
    found = {peer: _with_outstanding(each, outstanding(recent, peer, config.sync.overlap), config)
             for peer, each in announcements.items()}
    helpers, rule = recent[0].helpers, config.admission
    known = {peer: each for peer, each in found.items() if standing_of(rule, peer, each.invitation, helpers) != "newcomer"}
    settled = {peer: each for peer, each in known.items() if peer in recent[0].members and each.bandwidth > 0}
    usual = min(_median(each.bandwidth for each in some.values()) for some in (settled or known or found, known or found))
    losses = [each.loss for each in known.values() if each.tokens] or [each.loss for each in found.values() if each.tokens]
    highest = LOSS_RATIO * statistics.median_low(losses) if losses else 0.0
    return {
        peer: replace(
            each,
            bandwidth=each.bandwidth if peer in helpers else min(
                each.bandwidth, usual * (BANDWIDTH_RATIO if peer in settled or not settled else 1)
            ),
            loss=min(each.loss, highest),
        )
        for peer, each in found.items()
    }


def _median(rates: Iterable[float]) -> float:
    able = [rate for rate in rates if rate > 0]
    return statistics.median_low(able) if able else 0.0


def bounded_strangers(members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the members with weights such that in every mean all strangers together weigh at most as much as the others, and
    newcomers `NEWCOMERS_WEIGHT` times as much.

    Identities cost nothing, so only a bound on all of them holds against many of one attacker. Where they would weigh more,
    the largest weights are cut to one size: the slow among them lose least. Where no others contribute, strangers keep their
    weights, and newcomers are bounded by the strangers past probation, if there are any.
    """
    weights = [(member.tokens, *member.routed) for member in members]
    bounded = zip(*(_bounded_mean(members, mean) for mean in zip(*weights, strict=True)), strict=True)
    return tuple(replace(member, tokens=own[0], routed=own[1:]) for member, own in zip(members, bounded, strict=True))


def _bounded_mean(members: Sequence[Member], weights: Sequence[int]) -> list[int]:
    """Return the members' weights in one mean."""
    new = [i for i, member in enumerate(members) if member.standing == "newcomer"]
    proven = [i for i, member in enumerate(members) if member.standing == "proven"]
    known = sum(weights) - sum(weights[i] for i in (*new, *proven))
    bounded = list(weights)
    if others := known or sum(weights[i] for i in proven):
        _cut(bounded, new, int(NEWCOMERS_WEIGHT * others))
    if known:
        _cut(bounded, proven, known - sum(bounded[i] for i in new))
    return bounded


def _cut(weights: list[int], whom: Collection[int], most: int) -> None:
    """Cut the largest weights of these members to one size, so that they have `most` together, or 1 each."""
    left = sorted(weights[i] for i in whom if weights[i])
    while left and left[0] * len(left) <= most:
        most -= left.pop(0)
    size = max(1, most // len(left)) if left else 0
    for i in whom if left else ():
        weights[i] = min(weights[i], size)


def demoted(recent: Sequence[Commit], announcements: Mapping[str, Announcement], rule: str) -> dict[str, Demotion]:
    """Return the members that reduce nothing in the next round while others can, and why.

    One of the last LOST_ROUNDS commits names them, or the announcements dispute them. `recent`: the last commits, newest first.
    `rule`: `admission` of the campaign.
    """
    found: dict[str, Demotion] = dict.fromkeys(disputed(recent, announcements, rule), "disputed")
    for commit in recent[:LOST_ROUNDS]:
        found.update((commit.members[i], "disputed") for i in commit.disputed)
        found.update((commit.members[i], "lost") for lost in commit.lost for i in lost)
    return found


def longest_of_stranger(work: Outstanding, experts: int = 0) -> int:
    """Return the bytes of the longest announcement, or statement without counts, that a stranger with this work needs."""
    return STRANGERS_BYTES + COUNT_BYTES * experts + INTERVAL_BYTES * sum(map(len, work.samples))


def returned(work: Outstanding, untrained: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the samples that a peer returns, of those that it says it did not train: an end of each of its assignments."""
    covered = union(untrained)
    return tuple(interval for assigned in work.samples for interval in end_of(assigned, covered))


def _with_outstanding(announcement: Announcement, work: Outstanding, config: CampaignConfig) -> Announcement:
    """Clamp tokens and samples. A layer routes a token to an expert at most once, and counts are summed over layers."""
    training, model = config.training, config.model
    tokens = work.steps * training.batch_size * training.sequence_length
    routed = model.num_hidden_layers * tokens
    return replace(
        announcement,
        tokens=min(announcement.tokens, tokens),
        routed=tuple(min(count, routed) if expert in work.experts else 0 for expert, count in enumerate(announcement.routed)),
        untrained=returned(work, announcement.untrained),
    )
