"""Audits of training in an open campaign: who trains whose phase again, and what follows from their verdicts. Pure functions.

A trainer commits to its optimizer's state before a phase in the signed announcement that brings the phase's work. The commit of
that round draws who is audited and by whom, so nobody knows before. The auditor trains the phase again from that state, on the
same base and samples, compares its update with the one that reducers got, and announces a verdict. All peers derive from the
verdicts in the last commits who gets no work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.admission import NO_SERVICE, Service, begins_anew, is_past_probation, owes_an_audit
from spes_p2p.messages.consensus import Commit, Verdict, Workload
from spes_p2p.messages.fields import MAX_VERDICTS
from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Kind
from spes_p2p.rounds.accounting import MAX_PENDING_ROUNDS
from spes_p2p.rounds.codecs import group_codecs, is_coarse
from spes_p2p.rounds.planned import Member

REPORT_ROUNDS = 8
"""An audit is reported at most this many rounds after the one that drew it: all know `commit_log.RECENT` commits."""
KEPT_MOMENTS_ROUNDS = 4
"""A member that is drawn keeps its moments for this many rounds."""
AUDITED_PARTS, AUDITED_IN_CELLS = 2, 8
"""Parts that an auditor fetches from other reducers, of an update of shared weights and of the router each; more in a round
with cells, in which hubs have what members push, and the auditor nothing."""
CONVICTING_AUDITORS = 2
"""Auditors that must fail a member, so that no single one can harm it."""
LEAST_SHARED = 0.9, 0.75
"""Of an update of shared weights with that of training again, and of the smaller of the two norms to the larger.
Honest ones have 0.979 and 0.99 or more, also in another arithmetic; half of 16 steps at most 0.89 (docs/attacks.md)."""
LEAST_ROUTER = 0.6, 0.5
"""The same of the router alone, in which arithmetics differ more: honest ones have 0.9 and 0.91."""
ROUNDING_SHARE, LEFT_OUT_SHARE, LEAST_DIRECTION = 0.5, 2.0, 0.4
"""Bound the norm of pending work by that of the phase's update, in each part, and in all experts together: what rounding
leaves, and more for each phase that rounds left out; and the cosine of all that was sent with the phase's update. Honest ones
have 0.16 and 0.97 where nothing was left out. After a longer phase more is pending beside a short one. Pending work is the
member's word."""
AUDITORS_SHARE = 10.0
"""An auditor spends at most this many times `sync.audited_share` of its steps on audits, in the long run."""
NEWCOMERS_SHARE = 4.0
"""Members on probation are drawn this many times as often: an identity costs nothing."""
WAITING_SHARE = 0.125
"""They are drawn at least this often while their probation waits only for an audit. More would keep slow lines busy with
moments that come too late."""


def are_audited(config: CampaignConfig) -> bool:
    """Return whether phases are audited: in an open campaign whose updates are what the last phase trained.

    With `sync.overlap` a phase starts from weights that only its peer has, and a codec of less than 4 bits a value leaves much
    of a phase pending.
    """
    codecs = group_codecs(config.sync.codec)
    leaves_much = any(map(is_coarse, (codecs.router, codecs.shared, codecs.experts)))
    return config.admission == "open" and config.sync.audited_share > 0 and not config.sync.overlap and not leaves_much


def auditors(commit: Commit) -> tuple[str, ...]:
    """Return the members that audit after a commit: those with an assignment for whom the owner vouches. Sorted.

    A reform and a rollback assign nothing.
    """
    if not commit.plan:
        return ()
    return tuple(sorted(commit.members[i] for i in commit.vouched if commit.workloads[i].steps))


def can_be_audited(config: CampaignConfig, recent: Sequence[Commit]) -> bool:
    """Return whether the last commits know an auditor. Where there is none, probation cannot wait for it."""
    return are_audited(config) and any(auditors(commit) for commit in recent)


def audited_work(commit: Commit, parent: Commit) -> dict[str, Workload]:
    """Return the work that can be audited after a commit, by peer: what `parent` assigned to those not vouched for.

    `parent`: the commit before. The work must be in the new base, or left out of it as harmful.
    """
    if not commit.plan or not parent.plan or commit.parent != parent.id:
        return {}
    assigned = dict(zip(parent.members, parent.workloads, strict=False))
    heard = (commit.members[i] for i in (*commit.heard, *commit.suspected))
    return {peer: assigned[peer] for peer in heard if peer not in commit.trusted and peer in assigned and assigned[peer].steps}


def auditor_of(commit: Commit, peer: str) -> str | None:
    """Return the auditor whose turn it is with this peer after a commit; None without auditors."""
    return min(auditors(commit), key=lambda auditor: _hash(commit.id, peer, auditor), default=None)


def is_drawn(commit: Commit, peer: str, share: float, service: Service, recent: Sequence[Commit]) -> bool:
    """Return whether the commit draws this peer: by chance, and for sure where there is a reason.

    It failed an audit, the owner has ordered it, or the commit leaves out its work on shared weights as harmful.

    `service`: by the log. `recent`: the last commits, newest first.
    """
    is_ordered = commit.control is not None and peer in commit.control.audited
    if is_ordered or peer in (commit.members[i] for i in commit.suspected):
        return True
    wanted = share
    if not is_past_probation(service, needs_audit=True):
        waits = is_past_probation(service, needs_audit=False)
        wanted = max(NEWCOMERS_SHARE * share, WAITING_SHARE if waits else 0.0)
    return bool(failures(recent, peer)) or _hash(commit.id, peer, "drawn") < wanted


def drawn_work(recent: Sequence[Commit], services: Mapping[str, Service], config: CampaignConfig) -> dict[str, Workload]:
    """Return the work that a commit draws for audits, by peer: the first of `recent`, the last commits, newest first.

    `services`: of the log that ends with this commit.
    """
    if len(recent) < 2 or not are_audited(config) or not auditors(recent[0]):
        return {}
    share, work = config.sync.audited_share, audited_work(recent[0], recent[1])
    return {
        peer: each for peer, each in work.items()
        if is_drawn(recent[0], peer, share, services.get(peer, NO_SERVICE), recent)
    }


def auditors_share(config: CampaignConfig) -> float:
    """Return the most of its steps that an auditor spends on audits in the long run, as a share."""
    return min(1.0, AUDITORS_SHARE * config.sync.audited_share)


def in_order(commit: Commit, peers: Collection[str]) -> list[str]:
    """Return the order in which an auditor that is drawn for several peers takes them. No peer can tell its place."""
    return sorted(peers, key=lambda peer: _hash(commit.id, peer, "order"))


def is_urgent(recent: Sequence[Commit], peer: str, auditor: str) -> bool:
    """Return whether an audit cannot wait: the owner has ordered it, or failing it would convict. `recent`: newest first."""
    control = recent[0].control
    is_ordered = control is not None and peer in control.audited
    return is_ordered or any(each != auditor or _is_alone(recent) for each, _ in failures(recent, peer))


def _is_alone(recent: Sequence[Commit]) -> bool:
    return len({auditor for commit in recent for auditor in auditors(commit)}) == 1


def failures(recent: Sequence[Commit], peer: str) -> set[tuple[str, int]]:
    """Return auditor and round of the failed audits of what a peer did since it was convicted. `recent`: newest first."""
    return _failed([each for commit in recent for each in commit.verdicts], peer, recent)


def _failed(verdicts: Sequence[Verdict], peer: str, recent: Sequence[Commit]) -> set[tuple[str, int]]:
    """Return auditor and round of these audits that the peer failed, without those of rounds that its conviction covers."""
    convicted = max((commit.round for commit in recent if peer in convicted_in(commit)), default=-1)
    return {(each.auditor, each.round) for each in verdicts if each.peer == peer and not each.passed and each.round > convicted}


def convicted_in(commit: Commit) -> Collection[str]:
    """Return the peers that a commit convicts."""
    return {commit.members[i] for i in commit.convicted}


def verdicts_of(
    announcements: Mapping[str, Announcement], members: Sequence[Member], recent: Sequence[Commit], drawn: Collection[str]
) -> tuple[Verdict, ...]:
    """Return the verdicts that a round takes up: of vouched auditors whose turn it was, about drawn peers, once each.

    `recent`: the last commits before the round, newest first. `drawn`: the peers that the first of them draws. What a peer
    passed of a round before a setback is left out.
    """
    vouched = {member.peer for member in members if member.standing == "vouched" and member.trains}
    known = {(each.auditor, each.peer, each.round) for commit in recent for each in commit.verdicts}
    counts_from = _counts_from(recent)
    drawn_by = (drawn, *(commit.drawn for commit in recent))
    draws = {commit.round: (commit, peers) for commit, peers in zip(recent, drawn_by, strict=False)}
    found = []
    for auditor in sorted(vouched & announcements.keys()):
        for each in announcements[auditor].audited:
            is_stale = each.passed and each.round < counts_from.get(each.peer, 0)
            if each.round not in draws or is_stale or (auditor, each.peer, each.round) in known:
                continue
            commit, peers = draws[each.round]
            if each.peer in peers and auditor_of(commit, each.peer) == auditor:
                known.add((auditor, each.peer, each.round))
                found.append(Verdict(auditor, each.peer, each.round, each.passed))
    return tuple(found[:MAX_VERDICTS])


def _counts_from(recent: Sequence[Commit]) -> dict[str, int]:
    """Return by peer that had a setback the first round of which a passed audit counts."""
    found: dict[str, int] = {}
    for commit in recent:
        anew = dict.fromkeys(begins_anew(commit), commit.round + 1)
        for peer, number in (*owes_an_audit(commit).items(), *anew.items()):
            found[peer] = max(number, found.get(peer, 0))
    return found


def convicted_by(verdicts: Sequence[Verdict], members: Sequence[Member], recent: Sequence[Commit]) -> tuple[int, ...]:
    """Return the members that these verdicts, with those of the last commits, convict: as indices, ascending.

    It takes failed audits by CONVICTING_AUDITORS auditors, so one that lies harms nobody. Where the last commits know only one
    auditor, which decides about harmful steps alone, too, its failed audits of as many rounds suffice.
    """
    alone = _is_alone(recent)
    found = []
    for i, member in enumerate(members):
        failed = failures(recent, member.peer) | _failed(verdicts, member.peer, recent)
        witnesses = {number if alone else auditor for auditor, number in failed}
        if member.standing != "vouched" and len(witnesses) >= CONVICTING_AUDITORS:
            found.append(i)
    return tuple(found)


def still_convicted(recent: Sequence[Commit]) -> frozenset[str]:
    """Return the peers that one of the last commits convicts: they get no work, and what they have done does not count."""
    return frozenset(peer for commit in recent for peer in convicted_in(commit))


@dataclass(frozen=True)
class Score:
    """How an update compares with that of training the phase again."""

    steps: int
    """Trained again; 0: the member did not show its moments."""
    cosine: float = math.nan
    norm_ratio: float = math.nan
    """Norm of the member's update over that of the auditor's."""
    pending: float = 0.0
    """Largest `pending_share` of the parts."""
    direction: float = 1.0
    """Cosine of what the member sent, pending work included, with the auditor's update, times how much longer an earlier phase
    was."""
    router: tuple[float, float] = (1.0, 1.0)
    """Cosine and ratio of norms of the router's update."""


@dataclass(frozen=True)
class Replayed:
    """One part of a member's update beside that of training again."""

    sent: np.ndarray
    """As decoded, pending work included."""
    made: np.ndarray
    """By the auditor, without pending work."""
    pending: np.ndarray
    """Before the phase."""
    left_out: int = 0
    """Earlier phases that rounds did not take, which may be pending."""
    kind: Kind = "shared"
    """Of the part's group."""


def compared(
    steps: int, parts: Iterable[Replayed], longer: float = 1.0, experts: Collection[tuple[float, float]] = ()
) -> Score:
    """Compare a member's update with that of training again. The router apart: beside shared weights any would pass.

    `longer`: how many times as many steps an earlier phase had, of which rounding left something: at least 1. `experts`: norms
    of each one's pending work before the phase, and of its update by the auditor. No update of shared weights that follows from
    other experts than its base has is honest.
    """
    sums, most_pending = {"shared": np.zeros(5), "router": np.zeros(5)}, _pending_in_experts(experts, longer)
    for part in parts:
        sent, made = part.sent, part.made
        most_pending = max(most_pending, pending_share(part.pending, made * np.float32(longer), part.left_out))
        trained = sent - part.pending
        pairs = (trained, made), (trained, trained), (made, made), (sent, made), (sent, sent)
        sums[part.kind] += [float(np.vdot(*pair)) for pair in pairs]
    shared, router = (_alike(*each.tolist()) if each.any() else None for each in sums.values())
    if shared is None:
        return Score(steps, 0.0, 0.0)
    cosine, ratio, direction = shared
    return Score(steps, cosine, ratio, most_pending, longer * direction, router[:2] if router else (1.0, 1.0))


def _alike(both: float, own: float, again: float, along: float, whole: float) -> tuple[float, float, float]:
    """Return cosine and ratio of norms of an update and one made again, and the cosine of all that was sent with that.

    Of the products of update and made, update and update, made and made, sent and made, sent and sent.
    """
    if not own or not again:
        return 0.0, 0.0, 0.0
    direction = along / math.sqrt(whole * again) if whole else 0.0
    return both / math.sqrt(own * again), math.sqrt(own / again), direction


def pending_share(pending: np.ndarray, made: np.ndarray, left_out: int) -> float:
    """Return the norm of a part's pending work before a phase over that of the phase's update, beyond what may be pending.

    `left_out`: earlier phases that rounds did not take, which may be.
    """
    norms = float(np.linalg.norm(pending)), float(np.linalg.norm(made))
    return norms[0] / norms[1] - LEFT_OUT_SHARE * left_out if norms[1] else math.inf if norms[0] else 0.0


def _pending_in_experts(experts: Collection[tuple[float, float]], longer: float) -> float:
    """Return `pending_share` of all experts together, where rounds may have left out as much as stays pending.

    0 where none of them was trained: then they moved no other weights either.
    """
    before, made = np.array([*experts, (0.0, 0.0)], np.float64).T
    return pending_share(before, longer * made, MAX_PENDING_ROUNDS) if made.any() else 0.0


def worse_of(score: Score) -> tuple[float, float]:
    """Return cosine and ratio of norms to show: of shared weights, or of the router where that fails alone."""
    shared = score.cosine, score.norm_ratio
    return score.router if _is_trained(shared, *LEAST_SHARED) and not _is_trained(score.router, *LEAST_ROUTER) else shared


def _is_trained(found: tuple[float, float], least_cosine: float, least_ratio: float) -> bool:
    return found[0] >= least_cosine and least_ratio <= found[1] <= 1 / least_ratio


def has_passed(score: Score) -> bool:
    """Return whether an update is what training gives, as far as its codec and the auditor's arithmetic let one tell."""
    is_trained = _is_trained((score.cosine, score.norm_ratio), *LEAST_SHARED) and _is_trained(score.router, *LEAST_ROUTER)
    is_usual = score.pending <= ROUNDING_SHARE and score.direction >= LEAST_DIRECTION
    return score.steps > 0 and is_trained and is_usual


def _hash(*words: str) -> float:
    """Return a number in [0, 1) that these words determine."""
    return int.from_bytes(sha256("\0".join(words).encode()).digest()[:8], "big") / 2**64
