"""What peers say about the campaign, corrected by its certified commits: no peer can fake a round, the end, or an order."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spes_p2p.config.campaign import Campaign
from spes_p2p.consensus.admission import NO_SERVICE, PROBATION_AUDITS, PROBATION_ROUNDS, is_past_probation
from spes_p2p.consensus.commit_log import KEPT_READ, CommitLog
from spes_p2p.consensus.control import describe, describe_news, number_of
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.consensus import Commit, CommitsRequest, Control, Decide, Verdict
from spes_p2p.messages.fields import LONGEST_WORD
from spes_p2p.messages.methods import COMMITS
from spes_p2p.messages.presence import PeerStatus, Probation
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.unpacking import unpack_page
from spes_p2p.peer.milestones import fetch_milestone
from spes_p2p.rounds.ownership import owners_of
from spes_p2p.rounds.schedule import last_round


async def learn_commits(endpoint: RpcEndpoint, log: CommitLog, peer: str, wait_s: float | None = None) -> None:
    """Add a peer's newer certified commits to the log, without those that fail verification.

    `wait_s`: for how long to wait for each page of them; default: `silence_s`.
    """
    with contextlib.suppress(PeerUnreachable, Refused, WireError):
        with contextlib.suppress(Refused):
            milestone = await fetch_milestone(endpoint, peer, log.round, wait_s=wait_s)
            if log.admits_milestone(milestone):
                log.begin_at(milestone)
        while True:
            reply = await endpoint.ask_in_turn(peer, COMMITS, pack(CommitsRequest(log.round)), wait_s=wait_s)
            found = (await unpack_page(Decide, reply, endpoint.shares.is_known(peer))).decided
            if not found or found[0].commit.round > log.round + 1 or found[-1].commit.round <= log.round:
                return
            before = log.round
            for decided in filter(log.admits, found):
                log.put(decided)
            if log.round == before:
                return


def corrected(
    statuses: Sequence[PeerStatus], log: CommitLog, campaign: Campaign, newest: Control | None = None
) -> list[PeerStatus]:
    """Return the statuses as far as they count. `newest`: the owner's newest order, which a commit may not carry yet.

    What a peer of the last commits says of round, end, tokens, owners, electors and orders is replaced by what the commit of
    its round says. Peers that no recent commit names, and those that claim a round which no commit proves, keep what concerns
    only themselves. In an open campaign only electors judge others, since all of them are vouched for; an audit counts where a
    commit has its verdict; a peer's standing is that of the commits; and no stranger is faster than the work allows that
    commits gave it.
    """
    verdicts, applied = _verdicts(log), log.last.control
    train_s = _train_seconds(statuses, standings := _standings(log, campaign))
    is_pending = newest is not None and newest.number > number_of(applied)
    pending = describe_news(newest, applied, log.round)[:LONGEST_WORD] if newest is not None and is_pending else ""
    known = frozenset[str]().union(*(commit.participants for commit in log.recent(log.round)))
    found = []
    for status in statuses:
        if status.campaign_hash != campaign.hash:
            continue
        standing, probation = standings.get(status.peer_id, ("", None))
        status = replace(status, standing=standing, probation=probation)
        if status.peer_id not in known or status.round > max(0, log.round):
            found.append(_bare(status, campaign))
            continue
        if train_s > 0 and standing != "vouched":
            most = _assigned_tokens(status.peer_id, log, campaign) / train_s
            status = replace(status, tokens_per_second=min(status.tokens_per_second, most))
        judges = campaign.config.admission == "open" and status.peer_id in log.last.electorate
        status = replace(status, campaign=campaign.config.name, min_peers=campaign.config.sync.min_peers, pending=pending,
                         scores=status.scores if judges else {},
                         audits=tuple(each for each in status.audits if _verdict(status.peer_id, each) in verdicts))
        if status.validation_round > log.round:
            status = replace(status, validation_round=0, validation_loss=float("nan"))
        is_proven = status.base_digest and max(0, log.begins) <= status.round <= log.round
        found.append(_as_committed(status, log.commit_at(status.round), campaign) if is_proven else status)
    return found


def kept_rounds(log: CommitLog) -> range:
    """Return the rounds whose commits a log has at hand."""
    return range(max(log.begins, log.round - KEPT_READ + 1), log.round + 1)


def _standings(log: CommitLog, campaign: Campaign) -> dict[str, tuple[str, Probation | None]]:
    """Return the standing of the peers that the commits at hand name, in an open campaign."""
    if campaign.config.admission != "open":
        return {}
    from spes_p2p.rounds.audits import can_be_audited  # imports numpy

    commits = [log.commit_at(number) for number in kept_rounds(log)]
    is_vouched = {peer: peer in commit.trusted for commit in commits for peer in commit.participants}
    services, needs_audit = log.services(log.round), can_be_audited(campaign.config, log.recent(log.round))
    found: dict[str, tuple[str, Probation | None]] = {}
    for peer, is_trusted in is_vouched.items():
        served = services.get(peer, NO_SERVICE)
        standing = "proven" if is_past_probation(served, needs_audit) else "newcomer"
        needed = PROBATION_AUDITS if needs_audit else 0
        probation = Probation(served.rounds, PROBATION_ROUNDS, served.audits, needed)
        found[peer] = ("vouched", None) if is_trusted else (standing, probation)
    return found


def _train_seconds(statuses: Sequence[PeerStatus], standings: Mapping[str, tuple[str, Probation | None]]) -> float:
    """Return how long the last phase took, by the peers of an open campaign for whom the owner vouches; 0: unknown."""
    vouched = (each for each in statuses if standings.get(each.peer_id, ("", None))[0] == "vouched")
    return max((each.round_seconds.get("train", 0.0) for each in vouched), default=0.0)


def _assigned_tokens(peer: str, log: CommitLog, campaign: Campaign) -> int:
    """Return the tokens of a phase that the last commits assigned to a peer; 0: none."""
    for commit in log.recent(log.round):
        for member, workload in zip(commit.members, commit.workloads, strict=False):
            if member == peer:
                training, _ = last_round(commit, campaign.config)
                return workload.steps * training.batch_size * training.sequence_length
    return 0


def _verdicts(log: CommitLog) -> set[Verdict]:
    """Return the verdicts of the commits that a log has at hand."""
    return {verdict for number in kept_rounds(log) for verdict in log.commit_at(number).verdicts}


def _verdict(auditor: str, audited: Audited) -> Verdict:
    return Verdict(auditor, audited.peer, audited.round, audited.passed)


def _as_committed(status: PeerStatus, commit: Commit, campaign: Campaign) -> PeerStatus:
    (training, total_rounds), owners = last_round(commit, campaign.config), owners_of(commit)
    return replace(
        status,
        total_rounds=total_rounds,
        campaign_step=commit.step,
        total_steps=training.total_steps,
        total_tokens=commit.tokens,
        owners=owners,
        owned=tuple(expert for expert, peers in enumerate(owners) if status.peer_id in peers),
        electorate=commit.electorate,
        state=commit.control.state if commit.control is not None else "running",
        control=describe(commit.control, commit.round)[:LONGEST_WORD],
    )


def _bare(status: PeerStatus, campaign: Campaign) -> PeerStatus:
    """Return what a status says about its peer alone."""
    return PeerStatus(
        peer_id=status.peer_id,
        role=status.role,
        campaign=campaign.config.name,
        campaign_hash=campaign.hash,
        total_rounds=campaign.config.total_rounds,
        min_peers=campaign.config.sync.min_peers,
        protocol=status.protocol,
        stage=status.stage,
        stage_seconds=status.stage_seconds,
        stages=status.stages,
        uptime_s=status.uptime_s,
        name=status.name,
        team=status.team,
        standing=status.standing,
        probation=status.probation,
    )
