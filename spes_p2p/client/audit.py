"""`spes-p2p audit`: what auditors found when they trained a peer's phases again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from spes_p2p.client.connection import connect
from spes_p2p.consensus.admission import NO_SERVICE
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.errors import UserError
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe.units import counted, short_peer
from spes_p2p.rounds.audits import are_audited, still_convicted


@dataclass(frozen=True)
class FoundAudit:
    """One audit, by its auditor's account."""

    auditor: str
    audit: Audited


@dataclass(frozen=True)
class PeerAudits:
    """What is known of a peer's audits, oldest first."""

    peer: str
    round: int
    """The newest committed round."""
    audits: tuple[FoundAudit, ...]
    """At least one."""
    gets_work: bool
    """False while one of the last commits convicts it."""

    @property
    def passed(self) -> bool:
        """Whether it passed the last audit and gets work."""
        return self.gets_work and self.audits[-1].audit.passed


async def fetch_audits(addresses: Sequence[str], peer: str, spare: Sequence[str]) -> PeerAudits:
    """Ask the swarm. Raises UserError where no audit of the peer is known.

    `spare`: addresses for when nobody listens at the others.
    """
    async with connect(addresses, spare=spare) as swarm:
        config, statuses = swarm.campaign.config, await swarm.statuses()
        if not statuses:
            raise UserError(f"{addresses[0]}: connected, but no peer of the campaign answers; try again in a moment")
        if not are_audited(config):
            raise UserError(f"campaign {config.name} has no audits: they need admission: open, sync.audited_share above 0, no "
                            "sync.overlap, and codecs that send every value")
        return peer_audits(statuses, swarm.log, peer)


def peer_audits(statuses: Sequence[PeerStatus], log: CommitLog, peer: str) -> PeerAudits:
    """Return what the auditors among these peers found of another. Raises UserError where they say nothing.

    `statuses`: with audits whose verdicts are committed (`proven.corrected`).
    """
    found = [FoundAudit(status.peer_id, audit) for status in statuses for audit in status.audits if audit.peer == peer]
    if not found and peer in log.last.trusted:
        raise UserError(f"{peer}: the owner vouches for this peer, and only the phases of others are audited")
    if not found:
        passed = log.services(log.round).get(peer, NO_SERVICE).audits
        before = f", and it passed {counted(passed, 'audit')} before" if passed else ""
        raise UserError(f"{peer}: no vouched trainer that answers has audited this peer lately{before}; to have its phases "
                        f"audited, while a vouched trainer trains: spes-p2p control ADDRESS --key KEY audit {peer}")
    found.sort(key=lambda each: (each.audit.round, each.auditor))
    return PeerAudits(peer, log.round, tuple(found), peer not in still_convicted(log.recent(log.round)))


def render_audits(found: PeerAudits) -> RenderableType:
    """Return the table for a person."""
    table = Table(box=None, header_style="bold")
    for name in ("round", "auditor", "steps trained again", "cosine", "norm ratio", "verdict"):
        table.add_column(name, justify="left" if name in ("auditor", "verdict") else "right")
    for each in found.audits:
        audit = each.audit
        figures = (f"{audit.cosine:.3f}", f"{audit.norm_ratio:.2f}") if audit.steps else ("-", "-")
        verdict = "passed" if audit.passed else "failed" if audit.steps else "failed: shows no moments"
        table.add_row(str(audit.round), short_peer(each.auditor), str(audit.steps), *figures, verdict)
    work = "gets work" if found.gets_work else "gets no work: it failed two audits within the last commits"
    return Group(f"{found.peer} at round {found.round}: {work}", table)
