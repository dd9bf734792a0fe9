"""The invitation with which a peer starts: given on the command line, or kept in its run-dir."""

from __future__ import annotations

import logging
import shlex
import time

from spes_p2p.campaign.files import CampaignFiles
from spes_p2p.campaign.invitations import kept, read_option
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.consensus.admission import (
    NO_SERVICE,
    PROBATION_AUDITS,
    PROBATION_ROUNDS,
    check_admission,
    standing_of,
    utc,
)
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.output import Identity
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.admission import Invitation, Standing
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.presence import Probation
from spes_p2p.rounds.audits import can_be_audited

logger = logging.getLogger(__name__)


def admitted(
    settings: PeerConfig, files: CampaignFiles, genesis: Commit, identity: Identity, trains: bool
) -> Invitation | None:
    """Return this peer's invitation, if any: that of `--invite`, or the one in the run-dir.

    Raises UserError unless the campaign's rule of admission is met.
    """
    config, me = files.campaign.config, identity.peer_id
    invitation = kept(settings.run_dir) if settings.invite is None else read_option(settings.invite)
    try:
        check_admission(config.admission, me, trains, invitation, genesis, None, identity, time.time())
    except Refused as refused:
        advice = (
            f"spes-p2p identity --run-dir {shlex.quote(str(settings.run_dir))} prints the id that the owner of the campaign "
            "needs for an invitation; give it with --invite"
        )
        raise UserError(f"campaign {config.name}: {refused.detail}; {advice}") from None
    if invitation is not None:
        logger.info("invited as %s until %s", ", ".join(invitation.roles), utc(invitation.expires))
    return invitation


def standing_in(
    log: CommitLog, peer: str, config: CampaignConfig, invitation: Invitation | None
) -> tuple[Standing | None, Probation | None]:
    """Return what a trainer with this invitation is by these commits of an open campaign, and its probation if it is on one."""
    if config.admission != "open":
        return None, None
    served, needs_audit = log.services(log.round).get(peer, NO_SERVICE), can_be_audited(config, log.recent(log.round))
    standing = standing_of(config.admission, peer, invitation, log.genesis.helpers, served, needs_audit)
    probation = Probation(served.rounds, PROBATION_ROUNDS, served.audits, PROBATION_AUDITS if needs_audit else 0)
    return standing, probation if standing == "newcomer" else None
