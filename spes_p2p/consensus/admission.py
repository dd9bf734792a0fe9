"""Who may take part, as what: the campaign's rule of admission, the owner's invitations and bans.

The rule is `admission` of the campaign file. friends: everybody who can reach a peer may do everything. invite: only with the
owner's invitation, in its roles. open: everybody may train; votes, coordination and the reduction of parts belong to peers that
the owner vouches for. The campaign's helpers of the genesis commit need no invitation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from hashlib import sha256
from time import gmtime, strftime
from typing import NamedTuple

from spes_p2p.consensus.control import is_banned, owner_of
from spes_p2p.consensus.output import Identity
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Invitation, Standing
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.messages.fields import MAX_SERVED
from spes_p2p.messages.refusals import Code

EXPIRED = "the invitation expired"
LAST_S = 253402300799
"""The end of the year 9999, in Unix time."""
PROBATION_ROUNDS, PROBATION_AUDITS = 10, 1
"""Committed rounds with a newcomer's work, and where phases are audited (`rounds/audits.py`) passed audits, until it may own an
expert alone and reduce. They keep a burst of new identities out of the roles that could harm others unseen."""


class Service(NamedTuple):
    """What the commit log says of a peer since it came, or since its probation began again."""

    rounds: int = 0
    """With its work."""
    audits: int = 0
    """Of its training, passed since it last failed one or was away when it was drawn."""


NO_SERVICE = Service()


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
        return f"{EXPIRED} at {utc(invitation.expires)}, by a clock that says {utc(now_s)}"
    role = "trainer" if trains else "helper"
    if role not in invitation.roles:
        return f"the invitation is not for a {role}, but for: {', '.join(invitation.roles) or 'nothing'}"
    if not invitation.peer and set(invitation.roles) != {"trainer"}:
        return "an invitation of an elector or a helper must name its peer"
    return ""


def standing_of(
    rule: str, peer: str, invitation: Invitation | None, helpers: tuple[str, ...], service: Service = NO_SERVICE,
    needs_audit: bool = False,
) -> Standing:
    """Return what an admitted peer may do.

    `helpers`: those of the genesis commit. `service`: by the commit log. `needs_audit`: see `is_past_probation`.
    """
    roles = () if invitation is None else invitation.roles
    if rule == "friends" or peer in helpers or "elector" in roles or "helper" in roles:
        return "vouched"
    if rule == "invite":
        return "invited"
    return "proven" if is_past_probation(service, needs_audit) else "newcomer"


def is_past_probation(service: Service, needs_audit: bool) -> bool:
    """Return whether this service ends a probation. Every peer counts it alike. `needs_audit`: whether somebody audits."""
    return service.rounds >= PROBATION_ROUNDS and (service.audits >= PROBATION_AUDITS or not needs_audit)


def add_service(services: dict[str, Service], commit: Commit) -> None:
    """Add what this commit says to the services of all peers.

    Where a milestone could not hold them all, its hash draws whom to forget, of those without work in it: anybody can serve a
    round under ever new names. A 64th goes at once, since drawing takes tens of milliseconds.
    """
    heard = {commit.members[index] for index in commit.heard if index < len(commit.members)}
    for peer in heard:
        before = services.get(peer, NO_SERVICE)
        services[peer] = Service(before.rounds + 1, before.audits)
    for verdict in commit.verdicts:
        if verdict.passed:
            before = services.get(verdict.peer, NO_SERVICE)
            services[verdict.peer] = Service(before.rounds, before.audits + 1)
    for peer in owes_an_audit(commit).keys() & services.keys():
        services[peer] = Service(services[peer].rounds)
    for peer in begins_anew(commit):
        services.pop(peer, None)
    if len(services) > MAX_SERVED:
        absent = sorted(services.keys() - heard, key=lambda peer: sha256(f"{commit.id}/{peer}".encode()).digest())
        for peer in absent[: len(services) - MAX_SERVED + MAX_SERVED // 64]:
            del services[peer]


def owes_an_audit(commit: Commit) -> dict[str, int]:
    """Return the peers whose probation waits for an audit from this commit on: they failed one, were drawn and are away, or
    gave nothing that can be audited.

    By peer: the first round of which a passed audit counts. Without this a trainer that is past probation could claim phases
    that it did not train, and leave whenever it is drawn, or send updates of its experts only, which nobody trains again.
    """
    failed = {verdict.peer: verdict.round + 1 for verdict in commit.verdicts if not verdict.passed}
    withheld = {commit.members[i]: commit.round for i in commit.withholding if i < len(commit.members)}
    return failed | dict.fromkeys(set(commit.drawn).difference(commit.members), commit.round - 1) | withheld


def begins_anew(commit: Commit) -> Collection[str]:
    """Return the peers whose probation begins again with this commit: they did harm, or audits convict them."""
    return {commit.members[index] for index in (*commit.rejected, *commit.convicted) if index < len(commit.members)}


def utc(unix_s: float) -> str:
    """Return a time for people; the end of the year 9999 for later ones, which anybody may write into an invitation."""
    return strftime("%Y-%m-%d %H:%M UTC", gmtime(min(unix_s, LAST_S)))


def _message(invitation: Invitation) -> bytes:
    return b"spes invitation\0" + pack(replace(invitation, signature=b""))
