"""From the members' reports of staged results to the commit. Pure functions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache

from spes_p2p.consensus.acceptor import INCARNATION_BYTES
from spes_p2p.consensus.electorate import choose_electorate, incarnations_of
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.consensus import Commit, Signed, Workload
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest, Staged
from spes_p2p.rounds.gate import harmful_groups, rejected_members, suspected_members
from spes_p2p.rounds.parts import Part, mask_bytes, to_mask
from spes_p2p.rounds.planned import Plan, holders
from spes_p2p.rounds.remembered import remembered
from spes_p2p.rounds.results import ABSENT, Results

HOLDERS = 2
"""A part is in the base if this many members that are no strangers, or the only one, hold it durably."""
WITNESSES = 2
"""A stranger withheld what so many hubs of its cell lack: one hub may leave out whom it likes."""


def contributions(commit: Commit, results: Results, tokens_per_step: int) -> tuple[tuple[str, int, int], ...]:
    """Return each trainer's part in a committed round: peer id, tokens, and steps times experts trained."""
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
        (member.peer, member.tokens if i in heard else 0, round(member.tokens / tokens_per_step) * experts[i])
        for i, member in enumerate(members)
        if member.trains
    )


def clipped_parts(commit: Commit, results: Results) -> tuple[tuple[str, int], ...]:
    """Return the members whose updates reducers clipped in a committed round, with the number of parts."""
    counts = Counter(member for part in results.committed(commit) for member in results.clipped(part))
    return tuple((results.plan.members[i].peer, count) for i, count in sorted(counts.items()))


def make_commit(parent: Commit, plan: Plan, results: Results, staged: Mapping[int, Staged]) -> Commit:
    """Return the commit to propose after `parent`.

    It includes each part that two members (of two or more) hold durably, but for groups that judges call harmful. Strangers do
    not count.

    `staged`: reports by member index. `results`: the reducers' manifests. Raises Refused if the plan has parts and none is
    included, or too few members report.
    """
    results = _with_manifests(results, staged)
    known = holders(plan.members)
    needed = min(HOLDERS, max(1, len(known)))
    roots = results.roots()
    reduced = [part for part in results.parts if results.digest_of(part) not in (None, ABSENT)]
    counts = holder_counts(staged, results)
    harmful = harmful_groups(plan, staged)
    held = [part for part in reduced if counts[part.index] >= needed]
    included = [part for part in held if part.group.name not in harmful]
    kept, harming = {part.index for part in included}, [part for part in held if part.group.name in harmful]
    if results.parts and not held:
        raise Refused(Code.FAILED, "too few members hold any part")
    if len(staged.keys() & known) < needed:
        raise Refused(Code.FAILED, "too few members hold the plan")
    peers = tuple(member.peer for member in plan.members)
    incarnations = {**incarnations_of(parent), **{peers[i]: report.incarnation for i, report in staged.items()}}
    electorate = _next_electorate(parent, plan, incarnations)
    heard = tuple(sorted({i for part in included if part.group.kind == "shared" for i in results.contributors(part)}))
    experts = len(parent.owners)
    owners = tuple(tuple(each.member for each in plan.assignments if expert in each.owned) for expert in range(experts))
    return Commit(
        campaign=plan.campaign,
        term=plan.term,
        round=plan.round,
        parent=parent.id,
        plan=plan.id,
        roots=roots,
        dropped=tuple(part.index for part in reduced if part.index not in kept),
        base_digest=plan.base_digest,
        step=plan.step,
        tokens=parent.tokens + sum(plan.members[i].tokens for i in heard),
        members=peers,
        owners=owners,
        cursor=plan.cursor,
        helpers=parent.helpers,
        electorate=electorate,
        incarnations=tuple(incarnations[peer] for peer in electorate),
        lost=results.lost,
        control=plan.proposal.control,
        heard=heard,
        workloads=workloads_of(plan),
        excluded=plan.excluded,
        disputed=plan.disputed,
        rejected=rejected_members(results, harming),
        verdicts=plan.verdicts,
        convicted=plan.convicted,
        vouched=_vouched(plan),
        drawn=plan.drawn,
        suspected=suspected_members(results, harming),
        withholding=_withholding(results, reduced),
    )


def _withholding(results: Results, reduced: Sequence[Part]) -> tuple[int, ...]:
    """Return the strangers whose updates nobody can audit: they trained, but hardly anybody has their shared weights.

    Where no vouched member gave to these either, their reducers are to blame. So is a hub that is lost, or that alone leaves
    out a member of its cell. A member's word as its own hub does not count.
    """
    members, shared = results.plan.members, [part for part in reduced if part.group.kind == "shared"]
    givers = {part.index: set(results.contributors(part)) for part in reduced}
    if not any(members[i].standing == "vouched" for part in shared for i in givers[part.index]):
        return ()
    gave = set[int]().union(*givers.values())
    return tuple(i for i in sorted(gave) if members[i].is_stranger and members[i].tokens and _lacks(shared, givers, i))


def _lacks(shared: Sequence[Part], givers: Mapping[int, set[int]], member: int) -> bool:
    """Return whether reducers, or most hubs of a member's cell, lack all its updates. `givers`: by part index, who is in."""
    having, lacking, directly = set[int](), set[int](), set[bool]()
    for part in shared:
        hub = part.hub_of(member)
        if hub is None or hub not in part.summing:
            directly.add(member in givers[part.index])
        elif member in givers[part.index]:
            having |= {hub} - {member}
        elif not givers[part.index].isdisjoint(part.in_cell(hub)):
            lacking |= {hub} - {member}
    lacking -= having
    if directly:
        return True not in directly and not having
    return len(lacking) >= WITNESSES and len(lacking) > len(having)


def _next_electorate(parent: Commit, plan: Plan, incarnations: Mapping[str, str]) -> tuple[str, ...]:
    """Return the electors of the next round. `incarnations`: of the peers that may become electors."""
    kept = kept_electors(plan, parent)
    present = {*(member.peer for member in plan.members), *kept}
    helpers = tuple(helper for helper in parent.helpers if helper in incarnations and helper in present)
    members = [peer for peer in (*_voters(plan), *kept) if peer in incarnations]
    staying = tuple(elector for elector in parent.electorate if plan.takes_part(elector))
    chosen = choose_electorate(helpers, members, parent.electorate, alone=_all_vouched(plan))
    return chosen or staying or parent.electorate


def derive_commit(parent: Commit, results: Results, reports: Sequence[Signed], identity: Identity) -> Commit:
    """Return the commit to propose after `parent` by these signed reports.

    `results`: of the plan and the revisions, with the reducers' manifests. Raises Refused, WireError for reports of another
    plan, or that are not signed.
    """
    staged = {}
    for signed in reports:
        index = results.plan.index(signed.peer)
        if index is None:
            raise Refused(Code.NOT_PROVEN, f"a report of {signed.peer[-6:]}, which is no member")
        staged[index] = read_signed(Staged, signed, identity)
        check_staged(staged[index], results)
    if not {root for report in staged.values() for root in report.manifests} <= set(results.roots()):
        raise Refused(Code.NOT_PROVEN, "a manifest that its reducer reported is left out")
    return make_commit(parent, results.plan, results, staged)


@remembered(4)
def misfit(commit: Commit, plan: Plan) -> str:
    """Return the fields of a commit that contradict its plan; "" for none. Needs no reports."""
    experts = range(len(plan.members[0].routed))
    implied = {
        "campaign": plan.campaign, "term": plan.term, "round": plan.round, "parent": plan.proposal.parent, "plan": plan.id,
        "base_digest": plan.base_digest, "step": plan.step, "members": tuple(member.peer for member in plan.members),
        "owners": tuple(tuple(each.member for each in plan.assignments if e in each.owned) for e in experts),
        "cursor": plan.cursor, "control": plan.proposal.control, "workloads": workloads_of(plan),
        "excluded": plan.excluded, "disputed": plan.disputed,
        "verdicts": plan.verdicts, "convicted": plan.convicted, "vouched": _vouched(plan),
        "drawn": plan.drawn,
    }
    wrong = [name for name, value in implied.items() if getattr(commit, name) != value]
    wrong += ["roots"] * (len(commit.roots) != len(plan.members) * (len(commit.lost) + 1))
    return ", ".join(wrong)


def workloads_of(plan: Plan) -> tuple[Workload, ...]:
    """Return each member's steps and samples of the next phase."""
    return tuple(Workload(each.steps, each.slices) for each in plan.assignments)


def kept_electors(plan: Plan, parent: Commit) -> list[str]:
    """Return the electors that are no members of the plan and keep their seats: neither absent, left nor excluded.

    A coordinator can leave a peer out of a plan, and nobody can prove that the peer announced; but it cannot vote for it.
    """
    gone = {*(member.peer for member in plan.members), *plan.proposal.absent, *(each.peer for each in plan.proposal.returned)}
    return [peer for peer in parent.electorate if peer not in gone and plan.takes_part(peer)]


def check_staged(staged: Staged, results: Results) -> None:
    """Check a report. Raises WireError if it does not fit these results' plan and revisions."""
    places = len(results.plan.members) * (staged.revision + 1)
    if staged.plan != results.plan.id or not 0 <= staged.revision <= results.revision:
        raise WireError("a report about another plan")
    if len(staged.roots) not in (0, places) or not set(staged.missing) <= set(range(places)):
        raise WireError("a report about other manifests")
    if len(staged.incarnation) != 2 * INCARNATION_BYTES:
        raise WireError("malformed incarnation")
    if len(staged.parts) not in (0, mask_bytes(len(results.parts))):
        raise WireError("a report about other parts")


def lost_reducers(results: Results, staged: Mapping[int, Staged], living: set[int], all_reported: bool) -> tuple[int, ...]:
    """Return the members whose parts must move to other reducers: empty, or all lost reducers and unreported lost members.

    A reducer that reported may have served all its results. It counts as lost only when all living members have reported and
    too few of them, strangers apart, hold one of its parts.
    """
    gone = set(range(len(results.plan.members))) - living - {i for lost in results.lost for i in lost}
    if not gone or not living:
        return ()
    needed = min(HOLDERS, len(living & holders(results.plan.members)))
    if all_reported:
        collected = _with_manifests(results, staged)
        counts = holder_counts({index: report for index, report in staged.items() if index in living}, collected)

    def is_lost(part: Part) -> bool:
        if part.reducer not in gone or not set(part.contributors) - gone:
            return False
        if part.reducer not in staged:
            return True
        return all_reported and collected.digest_of(part) != ABSENT and counts[part.index] < needed

    lost = {part.reducer for part in results.parts if is_lost(part)}
    return tuple(sorted(lost | (gone - staged.keys()))) if lost else ()


def unserved_reducers(results: Results, staged: Mapping[int, Staged], living: Set[int]) -> frozenset[int]:
    """Return the living reducers of a part that too few living members hold, strangers apart, once all of these have reported.

    Such a reducer serves nobody. Nor does it work if it calls a part absent that it trained itself, or to which two others for
    whom the owner vouches contribute. A part to which nobody else contributes does not count: no other member could reduce it.
    Nor does one that a single other member could miss, and nobody is named if no member would be left that may reduce.
    """
    members, known = results.plan.members, holders(results.plan.members)
    collected = _with_manifests(results, staged)
    counts = holder_counts({index: report for index, report in staged.items() if index in living}, collected)

    def is_unserved(part: Part) -> bool:
        if part.reducer not in living or not living & set(part.contributors) - {part.reducer}:
            return False
        if len(living & known - {part.reducer}) < HOLDERS:
            return False
        if collected.digest_of(part) == ABSENT:
            return part.reducer in part.contributors or len(living & known & set(part.contributors)) >= HOLDERS
        return counts[part.index] < HOLDERS

    found = frozenset(part.reducer for part in results.parts if is_unserved(part))
    left = {i for i in living & known - found if members[i].bandwidth > 0}
    return found if left else frozenset()


def holder_counts(staged: Mapping[int, Staged], results: Results) -> dict[int, int]:
    """Return by part index the number of members, strangers apart, that hold its result.

    A report counts for a part if it was made with the part's present reducer, has the part's bit, and agrees with `results` on
    that reducer's manifest: by the digest of all its manifests, or by the roots if it lists them.
    """
    counts = dict.fromkeys((part.index for part in results.parts), 0)
    roots, members, known = results.roots(), len(results.plan.members), holders(results.plan.members)
    for report in [report for index, report in staged.items() if index in known]:
        agrees = bool(report.roots) or _agrees(report, roots, members)
        missing = set(report.missing)
        for part in results.parts:
            place = results.root_place(part)
            byte, bit = divmod(part.index, 8)
            is_held = not report.parts or report.parts[byte] >> bit & 1
            if not agrees or not roots[place] or place in missing or not is_held:
                continue
            if part.revision <= report.revision and (not report.roots or report.roots[place] == roots[place]):
                counts[part.index] += 1
    return counts


def disagreeing(results: Results, staged: Mapping[int, Staged]) -> list[int]:
    """Return the members whose manifests differ from those that the reducers reported, and that sent no list of roots."""
    roots, members = _with_manifests(results, staged).roots(), len(results.plan.members)
    return [i for i, report in staged.items() if not report.roots and not _agrees(report, roots, members)]


def staged_report(
    results: Results, member: int, incarnation: str, in_full: bool = False, harmful: Sequence[str] | None = None
) -> Staged:
    """Return the report of a member that holds these results durably.

    `incarnation`: of its vote file. `harmful`: the groups that it found harmful; None: it has not judged.
    """
    own = tuple(manifest.root for manifest in own_manifests(results, member))
    roots = results.roots()
    missing = tuple(place for place, root in enumerate(roots) if not root and results.reduced_at(place))
    return Staged(
        results.plan.id, own, results.revision, missing, _roots_digest(roots, missing), roots if in_full else (),
        _held_bits(results), incarnation, harmful is not None, tuple(sorted(harmful or ())),
    )


def own_manifests(results: Results, member: int) -> tuple[Manifest, ...]:
    """Return the manifests of this reducer."""
    return tuple(manifest for (_, reducer), manifest in sorted(results.manifests.items()) if reducer == member)


def _voters(plan: Plan) -> list[str]:
    """Return the members that may vote: vouched ones that can be dialled.

    If, in a round of vouched members, only one of several trainers can be dialled, it does not vote: helpers outlast a
    volunteer.
    """
    trainers = sum(member.trains for member in plan.members)
    dialable = [member for member in plan.members if member.bandwidth > 0 and member.standing == "vouched"]
    if _all_vouched(plan) and trainers > 1 and sum(member.trains for member in dialable) == 1:
        dialable = [member for member in dialable if not member.trains] or dialable
    return [member.peer for member in dialable]


def _all_vouched(plan: Plan) -> bool:
    """Return whether every member may vote, as always among friends."""
    return all(member.standing == "vouched" for member in plan.members)


def _vouched(plan: Plan) -> tuple[int, ...]:
    """Return the trainers for whom the owner vouches, as indices."""
    return tuple(i for i, member in enumerate(plan.members) if member.standing == "vouched" and member.trains)


def _held_bits(results: Results) -> bytes:
    """Encode which verified results are present: one bit a part; empty when all are."""
    held = {part.index for part in results.parts if results.verified(part)}
    return to_mask(held, len(results.parts)) if len(held) < len(results.parts) else b""


def _with_manifests(results: Results, staged: Mapping[int, Staged]) -> Results:
    """Return empty results of the same plan with those manifests that reducers reported themselves."""
    collected = results.emptied(results.lost)
    for (_, reducer), manifest in results.manifests.items():
        if reducer in staged and manifest.root in staged[reducer].manifests:
            collected.add_manifest(manifest)
    return collected


def _agrees(report: Staged, roots: tuple[bytes, ...], members: int) -> bool:
    """Return whether the member's manifests agree with those of these roots."""
    return report.roots_digest == _roots_digest(roots[: members * (report.revision + 1)], report.missing)


@lru_cache(8)
def _roots_digest(roots: tuple[bytes, ...], missing: tuple[int, ...]) -> bytes:
    left_out = set(missing)
    return hashlib.sha256(b"".join(root for place, root in enumerate(roots) if place not in left_out)).digest()
