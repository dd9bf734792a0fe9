"""From the members' announcements to the plan, and from their staged results to the commit. Pure functions."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.config.campaign import CampaignConfig, TrainingConfig
from spes_p2p.consensus.acceptor import INCARNATION_BYTES
from spes_p2p.consensus.control import runs
from spes_p2p.consensus.electorate import choose_electorate, incarnations_of
from spes_p2p.data.slices import give_back, take
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.consensus import Ballot, Commit, Control
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Assignment, Member, Merge, Plan, Staged
from spes_p2p.messages.samples import Cursor, Interval
from spes_p2p.rounds.merge import Donors, merge_alpha
from spes_p2p.rounds.ownership import assign_experts
from spes_p2p.rounds.parts import Part, mask_bytes
from spes_p2p.rounds.results import ABSENT, Results
from spes_p2p.rounds.schedule import scheduled

MAX_TOKENS, MAX_RATE = 2**48, 1e15
"""More tokens, or a higher speed or loss, cannot be true."""
MAX_SPEED_RATIO = 4.0
"""A peer does at most so many times the campaign's steps in a phase, and at least the inverse."""


@dataclass(frozen=True)
class Rules:
    """What planning needs of the campaign."""

    config: CampaignConfig
    campaign_hash: str
    num_samples: int

    def training(self, control: Control | None, round_number: int) -> TrainingConfig:
        """What holds in the phase that leads to this round; `control`: of the commit before it."""
        return scheduled(self.config, control, round_number).training


def campaign_step(commit: Commit, tokens: int, rules: Rules) -> int:
    """Campaign step after a round: it advances when somebody trained, and ends with the schedule."""
    training = rules.training(commit.control, commit.round + 1)
    return min(commit.step + (training.sync_steps if tokens else 0), training.total_steps)


def alpha_due(commit: Commit, tokens: int, rules: Rules) -> float:
    """Merge strength of the next round; 0 when no merge is due."""
    merge = rules.config.merge
    step = campaign_step(commit, tokens, rules)
    if merge.merge_interval is None or not tokens or step % merge.merge_interval:
        return 0.0
    return merge_alpha(step, merge.merge_alpha_start, merge.merge_decay_steps)


def check_announcement(announcement: Announcement, commit: Commit, rules: Rules) -> None:
    """Raises Refused when an announcement cannot belong to an honest member of this campaign."""
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
        raise Refused(Code.MALFORMED, "malformed announcement: work of a peer that does not train")
    check_handed_out(announcement.untrained, commit, rules)


def check_handed_out(intervals: tuple[Interval, ...], commit: Commit, rules: Rules) -> None:
    """Raises Refused when somebody gives back samples that no plan up to this commit has handed out."""
    for interval in intervals:
        inside = 0 <= interval.start < interval.stop <= rules.num_samples
        before_cursor = (interval.epoch, interval.stop) <= (commit.cursor.epoch, commit.cursor.position)
        handed_out = interval.epoch >= 0 and before_cursor
        if not inside or not handed_out:
            raise Refused(Code.MALFORMED, "malformed: untrained samples that were not handed out")


def make_plan(
    commit: Commit,
    ballot: Ballot,
    announcements: Mapping[str, Announcement],
    returned: tuple[Interval, ...],
    base_digest: str,
    donors: Donors | None,
    rules: Rules,
    straggler_delay: tuple[float, ...] = (),
    control: Control | None = None,
) -> Plan:
    """The plan of the round after `commit`.

    `returned`: samples that members who left gave back. `donors`: if a merge is due. `straggler_delay`, `control`: see Plan.
    """
    config = rules.config
    peers = sorted(announcements)
    members = tuple(
        Member(peer, a.tokens, a.routed, a.bandwidth, a.trains) for peer, a in sorted(announcements.items())
    )
    tokens = sum(member.tokens for member in members)
    step = campaign_step(commit, tokens, rules)
    alpha = alpha_due(commit, tokens, rules)
    under_way = rules.training(commit.control, commit.round + 1)
    ahead = under_way.sync_steps if any(a.in_flight for a in announcements.values()) else 0
    phase_step = min(step + ahead, under_way.total_steps)
    owners = assign_experts(
        config.model.moe_num_experts,
        {peer: a.capacity for peer, a in announcements.items() if a.trains},
        [[commit.members[i] for i in owners] for owners in commit.owners],
        config.experts.redundancy,
        rules.campaign_hash,
    )
    back = [interval for peer in peers for interval in announcements[peer].untrained]
    cursor = give_back(commit.cursor, (*returned, *back))
    steps = _next_steps(announcements, phase_step, rules.training(control, commit.round + 2)) if runs(control) else {}
    assignments, cursor = _assignments(peers, owners, steps, cursor, rules)
    return Plan(
        campaign=commit.campaign,
        term=commit.term,
        round=commit.round + 1,
        parent=commit.id,
        ballot=ballot,
        base_digest=base_digest,
        members=members,
        tokens=tokens,
        loss=_mean_loss(announcements),
        validation_loss=next((a.validation_loss for a in announcements.values() if a.validation_loss is not None), None),
        step=step,
        merge=Merge(alpha, donors) if donors is not None and alpha > 0 else None,
        assignments=assignments,
        cursor=cursor,
        straggler_delay=straggler_delay,
        phase_step=phase_step,
        control=control,
    )


def local_steps(sync_steps: int, tokens_per_second: Mapping[str, float]) -> dict[str, int]:
    """Steps of the next phase: proportional to each peer's speed, `sync_steps` for one of median (or yet unknown) speed."""
    known = [speed for speed in tokens_per_second.values() if speed > 0]
    median = statistics.median(known) if known else 0.0
    steps = {}
    for peer, speed in tokens_per_second.items():
        ratio = speed / median if speed > 0 else 1.0
        steps[peer] = max(1, round(sync_steps * min(max(ratio, 1 / MAX_SPEED_RATIO), MAX_SPEED_RATIO)))
    return steps


def contributions(commit: Commit, results: Results, tokens_a_step: int) -> tuple[tuple[str, int, int], ...]:
    """What each trainer brought into a committed round: peer id, tokens, and local steps times experts trained in them."""
    heard, trained = set(), set()
    for part in results.committed(commit):
        for member in results.contributors(part):
            if part.group.expert is None:
                heard.add(member)
            else:
                trained.add((member, part.group.expert))
    experts = Counter(member for member, _ in trained)
    members = results.plan.members
    return tuple(
        (member.peer, member.tokens if i in heard else 0, round(member.tokens / tokens_a_step) * experts[i])
        for i, member in enumerate(members)
        if member.trains
    )


def make_commit(commit: Commit, plan: Plan, results: Results, staged: Mapping[int, Staged], helpers: tuple[str, ...]) -> Commit:
    """The commit to propose: a part is in when enough members hold it durably, two of them where there are two.

    `staged`: reports by member index. Raises Refused when there were parts and none of them is in.
    """
    results = _with_manifests(results, staged)
    needed = min(2, len(plan.members))
    roots = results.roots()
    reduced = [part for part in results.parts if results.digest_of(part) not in (None, ABSENT)]
    counts = holder_counts(staged, results)
    dropped = tuple(part.index for part in reduced if counts[part.index] < needed)
    included = [part for part in reduced if part.index not in set(dropped)]
    if results.parts and not included:
        raise Refused(Code.FAILED, "no part is held by enough members")
    if len(staged) < needed:
        raise Refused(Code.FAILED, "the plan is held by too few members")
    peers = tuple(member.peer for member in plan.members)
    incarnations = {**incarnations_of(commit), **{peers[i]: report.incarnation for i, report in staged.items()}}
    voting_helpers = tuple(helper for helper in helpers if helper in incarnations and helper in peers)
    voting_members = [peer for peer in _voters(plan) if peer in incarnations]
    electorate = choose_electorate(voting_helpers, voting_members, commit.electorate) or commit.electorate
    heard = {i for part in included if part.group.kind == "shared" for i in results.contributors(part)}
    experts = len(commit.owners)
    owners = tuple(tuple(each.member for each in plan.assignments if expert in each.owned) for expert in range(experts))
    return Commit(
        campaign=plan.campaign,
        term=plan.term,
        round=plan.round,
        parent=plan.parent,
        plan=plan.id,
        roots=roots,
        dropped=dropped,
        base_digest=plan.base_digest,
        step=plan.step,
        tokens=commit.tokens + sum(plan.members[i].tokens for i in heard),
        members=peers,
        owners=owners,
        cursor=plan.cursor,
        helpers=helpers,
        electorate=electorate,
        incarnations=tuple(incarnations[peer] for peer in electorate),
        lost=results.lost,
        control=plan.control,
    )


def check_staged(staged: Staged, member: int, results: Results) -> None:
    """Raises WireError when a member's report cannot be about these results' plan and revisions."""
    places = len(results.plan.members) * (staged.revision + 1)
    if staged.plan != results.plan.id or not 0 <= staged.revision <= results.revision:
        raise WireError("a report about another plan")
    if len(staged.roots) not in (0, places) or not set(staged.missing) <= set(range(places)):
        raise WireError("a report about other manifests")
    if len(staged.incarnation) != 2 * INCARNATION_BYTES:
        raise WireError("no id of a incarnation")
    if len(staged.parts) != mask_bytes(len(results.parts)):
        raise WireError("a report about other parts")
    for manifest in staged.manifests:
        if manifest.reducer != member:
            raise WireError("a manifest of another reducer")
        results.check_manifest(manifest)


def lost_reducers(results: Results, staged: Mapping[int, Staged], living: set[int], all_reported: bool) -> tuple[int, ...]:
    """Members that are gone and whose parts must go to others; with them, all that are gone and had not reported.

    A reducer that had reported may have served everything: its parts count as lost when all who live have reported, and too few
    of them hold one.
    """
    gone = set(range(len(results.plan.members))) - living - {i for lost in results.lost for i in lost}
    if not gone or not living:
        return ()
    collected = _with_manifests(results, staged)
    needed = min(2, len(living))
    counts = holder_counts({index: report for index, report in staged.items() if index in living}, collected)

    def is_lost(part: Part) -> bool:
        if part.reducer not in gone or not set(part.contributors) - gone:
            return False
        if part.reducer not in staged:
            return True
        return all_reported and collected.digest_of(part) != ABSENT and counts[part.index] < needed

    lost = {part.reducer for part in results.parts if is_lost(part)}
    return tuple(sorted(lost | (gone - staged.keys()))) if lost else ()


def holder_counts(staged: Mapping[int, Staged], results: Results) -> dict[int, int]:
    """By part index: how many members say that they hold its result, as its reducer's manifest describes it."""
    counts = dict.fromkeys((part.index for part in results.parts), 0)
    roots = results.roots()
    for report in staged.values():
        agrees = bool(report.roots) or _agrees(report, results)
        missing = set(report.missing)
        for part in results.parts:
            place = results.root_place(part)
            byte, bit = divmod(part.index, 8)
            if not agrees or not roots[place] or place in missing or not report.parts[byte] >> bit & 1:
                continue
            if part.revision <= report.revision and (not report.roots or report.roots[place] == roots[place]):
                counts[part.index] += 1
    return counts


def disagreeing(results: Results, staged: Mapping[int, Staged]) -> list[int]:
    """Members that have other manifests than their reducers reported, and that have not said which."""
    collected = _with_manifests(results, staged)
    return [i for i, report in staged.items() if not report.roots and not _agrees(report, collected)]


def staged_report(results: Results, member: int, incarnation: str, in_full: bool = False) -> Staged:
    """What a member reports when it holds these results durably. `incarnation`: the one that it votes with."""
    own = tuple(manifest for (_, reducer), manifest in results.manifests.items() if reducer == member)
    roots = results.roots()
    missing = tuple(place for place, root in enumerate(roots) if not root)
    return Staged(
        results.plan.id, own, results.revision, missing, _roots_digest(roots, missing), roots if in_full else (),
        _held_bits(results), incarnation,
    )


def _voters(plan: Plan) -> list[str]:
    """Members that can be dialled. One such trainer among several has no vote: the helpers outlast a volunteer."""
    trainers = sum(member.trains for member in plan.members)
    dialable = [member for member in plan.members if member.bandwidth > 0]
    if trainers > 1 and sum(member.trains for member in dialable) == 1:
        dialable = [member for member in dialable if not member.trains] or dialable
    return [member.peer for member in dialable]


def _held_bits(results: Results) -> bytes:
    """One bit a part: is its verified result here?"""
    bits = sum(1 << part.index for part in results.parts if results.verified(part))
    return bits.to_bytes(mask_bytes(len(results.parts)), "little")


def _next_steps(announcements: Mapping[str, Announcement], step: int, training: TrainingConfig) -> dict[str, int]:
    """Steps of each trainer in the next phase; none after the last."""
    if step >= training.total_steps:
        return {}
    return local_steps(training.sync_steps, {peer: a.tokens_per_second for peer, a in announcements.items() if a.trains})


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


def _mean_loss(announcements: Mapping[str, Announcement]) -> float:
    tokens = sum(a.tokens for a in announcements.values())
    return sum(a.loss * a.tokens for a in announcements.values()) / tokens if tokens else 0.0


def _with_manifests(results: Results, staged: Mapping[int, Staged]) -> Results:
    """These results, empty, with the manifests that their reducers reported, and no others."""
    collected = results.emptied()
    for index, report in staged.items():
        for manifest in report.manifests:
            if manifest.reducer == index:
                collected.add_manifest(manifest)
    return collected


def _agrees(report: Staged, results: Results) -> bool:
    """Has the member, of those that it has, the same manifests as these results?"""
    places = len(results.plan.members) * (report.revision + 1)
    return report.roots_digest == _roots_digest(results.roots()[:places], report.missing)


def _roots_digest(roots: Sequence[bytes], missing: Sequence[int]) -> bytes:
    left_out = set(missing)
    return hashlib.sha256(b"".join(root for place, root in enumerate(roots) if place not in left_out)).digest()
