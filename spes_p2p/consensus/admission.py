"""Who may take part, as what: the campaign's rule of admission, the owner's invitations and bans.

The rule is `admission` of the campaign file. friends: everybody who can reach a peer may do everything. invite: only with the
owner's invitation, in its roles. open: everybody may train; votes, coordination and the reduction of parts belong to peers that
the owner vouches for. The campaign's helpers of the genesis commit need no invitation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from time import gmtime, strftime

from spes_p2p.consensus.control import is_banned, owner_of
from spes_p2p.consensus.output import Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Invitation, Standing
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.messages.refusals import Code

PROBATION_ROUNDS = 10
"""Committed rounds with a newcomer's work until it may own an expert alone and reduce. They keep a burst of new identities out
of the roles that could harm others unseen, and give auditors time to find those that do not train (`rounds/audits.py`)."""


def signed_invitation(invitation: Invitation, identity: Identity) -> Invitation:
    """Return the invitation, signed by this identity."""
    return replace(invitation, signature=identity.sign(_message(invitation)))


def check_admission(
    rule: str,
    peer: str,
    trains: bool,
    invitation: Invitation | None,
    commit: Commit,
    control: Control | None,
    identity: Identity,
    now_s: float,
) -> None:
    """Raise Refused unless this peer may take part, as a trainer or (not `trains`) as a helper.

    `commit`: the last one. `control`: the record in force. `now_s`: Unix time.
    """
    if peer in commit.excluded:
        raise Refused(Code.NOT_ADMITTED, "a proof excludes this peer: it made a wrong result, or voted twice in a ballot")
    if is_banned(control, peer):
        raise Refused(Code.NOT_ADMITTED, "the owner of this campaign banned this peer")
    if rule == "friends" or peer in commit.helpers:
        return
    if invitation is None:
        if rule == "open" and trains:
            return
        who = "this campaign admits" if rule == "invite" else "an open campaign admits helpers"
        raise Refused(Code.NOT_ADMITTED, f"{who} by invitation only")
    problem = _problem(peer, trains, invitation, commit, identity, now_s)
    if problem:
        raise Refused(Code.NOT_ADMITTED, problem)


def _problem(
    peer: str, trains: bool, invitation: Invitation, commit: Commit, identity: Identity, now_s: float
) -> str:
    """Say why this invitation does not admit the peer; "" when it does."""
    if invitation.campaign != commit.campaign:
        return "the invitation is to another campaign"
    if not identity.verify(owner_of(commit), _message(invitation), invitation.signature):
        return "the owner of this campaign did not sign the invitation"
    if invitation.peer not in ("", peer):
        return f"the invitation is for {invitation.peer}"
    if now_s >= invitation.expires:
        return f"the invitation expired at {utc(invitation.expires)}"
    role = "trainer" if trains else "helper"
    if role not in invitation.roles:
        return f"the invitation is not for a {role}, but for: {', '.join(invitation.roles) or 'nothing'}"
    if not invitation.peer and set(invitation.roles) != {"trainer"}:
        return "an invitation of an elector or a helper must name its peer"
    return ""


def standing_of(
    rule: str, peer: str, invitation: Invitation | None, helpers: tuple[str, ...], rounds_served: int = 0
) -> Standing:
    """Return what an admitted peer may do.

    `helpers`: those of the genesis commit. `rounds_served`: by the commit log.
    """
    roles = () if invitation is None else invitation.roles
    if rule == "friends" or peer in helpers or "elector" in roles or "helper" in roles:
        return "vouched"
    if rule == "invite":
        return "invited"
    return "proven" if is_past_probation(rounds_served) else "newcomer"


def is_past_probation(rounds_served: int) -> bool:
    """Return whether this many committed rounds with a peer's work end its probation. Every peer counts them alike."""
    return rounds_served >= PROBATION_ROUNDS


def served(commit: Commit) -> Counter[str]:
    """Return by peer what this commit adds to its rounds of service.

    1 for its work; a whole probation less if it did harm, or failed audits.
    """
    counts = Counter(commit.members[index] for index in commit.heard if index < len(commit.members))
    for index in (*commit.rejected, *commit.convicted):
        if index < len(commit.members):
            counts[commit.members[index]] -= PROBATION_ROUNDS
    return counts


def utc(unix_s: float) -> str:
    """Return a time for people."""
    return strftime("%Y-%m-%d %H:%M UTC", gmtime(unix_s))


def _message(invitation: Invitation) -> bytes:
    return b"spes invitation\0" + pack(replace(invitation, signature=b""))
