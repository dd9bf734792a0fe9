"""Control records: the orders of the campaign's owner, which one is in force, and which ones a commit may carry.

The owner is the bootstrap peer that made base 0; its key signs. The newest record goes into the next plan and commit, and is in
force from that commit on. No commit is appended whose record the owner did not sign, or that is older than its
parent's.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from spes_p2p.consensus.output import CONTROL, Identity, Output, Write
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Change, Commit, Control
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)


def owner_of(commit: Commit) -> str:
    """Return the campaign's owner, which alone signs control records and opens terms: the first helper."""
    return commit.helpers[0]


def without_orders(commit: Commit, me: str) -> str:
    """Say what follows when this peer has lost its control record. `commit`: any of the campaign."""
    if me != owner_of(commit):
        return "other peers have the owner's orders"
    return ("an order that no round has applied yet is lost unless other peers have it; repeat what spes-p2p status does not "
            "show, bans too")


def number_of(control: Control | None) -> int:
    """Return the record's number; 0 before the first record."""
    return 0 if control is None else control.number


def is_paused(control: Control | None) -> bool:
    """Return whether the campaign is paused."""
    return control is not None and control.state == "paused"


def is_stopped(control: Control | None) -> bool:
    """Return whether the owner stopped the campaign."""
    return control is not None and control.state == "stopped"


def runs(control: Control | None) -> bool:
    """Return whether another phase is to be trained."""
    return control is None or control.state == "running"


def rolls_back(control: Control | None, parent: Commit) -> bool:
    """Return whether only a rollback can apply this record after `parent`."""
    return control is not None and control != parent.control and control.rollback >= 0


def is_banned(control: Control | None, peer: str) -> bool:
    """Return whether the owner excludes this peer."""
    return control is not None and peer in control.banned


def takes_part(commit: Commit, peer: str) -> bool:
    """Return whether neither the owner's order nor a proof excludes this peer after the commit."""
    return peer not in commit.excluded and not is_banned(commit.control, peer)


def still_excluded(parent: Commit, control: Control | None) -> tuple[str, ...]:
    """Return the peers that proofs before this commit exclude after it. `control`: the record of the next commit."""
    known = () if parent.control is None else parent.control.pardons
    pardoned = {each.peer for each in (() if control is None else control.pardons) if each not in known}
    return tuple(peer for peer in parent.excluded if peer not in pardoned)


def pardoned_until(control: Control | None, peer: str) -> int:
    """Return the last round about which no proof counts against this peer; -1 for none."""
    return max((each.round for each in (() if control is None else control.pardons) if each.peer == peer), default=-1)


def required_protocol(control: Control | None, round_number: int) -> int:
    """The oldest protocol version that the owner admits to this round; 0 for any."""
    requires = None if control is None else control.requires
    return requires.protocol if requires is not None and round_number >= requires.from_round else 0


def is_news(control: Control, known: Control | None) -> bool:
    """Return whether this record replaces the known one. Nothing follows a stop."""
    return control.number > number_of(known) and not is_stopped(known)


def is_signed(control: Control, commit: Commit, identity: Identity) -> bool:
    """Return whether the campaign's owner signed this record. `commit`: any of the campaign."""
    return control.campaign == commit.campaign and identity.verify(owner_of(commit), _message(control), control.signature)


def may_follow(control: Control | None, parent: Commit, identity: Identity) -> bool:
    """Return whether the commit after `parent` may carry this record: the same one, or a newer one that the owner signed."""
    if control is None or control == parent.control:
        return control == parent.control
    return is_news(control, parent.control) and is_signed(control, parent, identity)


def signed(control: Control, identity: Identity) -> Control:
    """Return the record, signed by this identity."""
    return replace(control, signature=identity.sign(_message(control)))


def without_plan(parent: Commit) -> Commit:
    """Return the commit after `parent` of a round in which no work is exchanged; all else is as in `parent`."""
    return replace(
        parent,
        round=parent.round + 1,
        parent=parent.id,
        plan="",
        roots=(),
        dropped=(),
        lost=(),
        heard=(),
        workloads=(),
        rejected=(),
        verdicts=(),
        convicted=(),
        disputed=(),
        drawn=(),
        suspected=(),
        withholding=(),
    )


def rollback_commit(parent: Commit, control: Control, digest: str, step: int) -> Commit:
    """Return the commit that goes back to an earlier base: no work is exchanged, and all electors stay but the banned ones.

    `digest`, `step`: of that base. Tokens and data cursor are not reset, so no sample is trained twice. When every elector is
    banned, all stay: nobody else could decide the next round.
    """
    seats = tuple(zip(parent.electorate, parent.incarnations, strict=True))
    seats = tuple(seat for seat in seats if not is_banned(control, seat[0])) or seats
    return replace(
        without_plan(parent),
        base_digest=digest,
        step=step,
        electorate=tuple(elector for elector, _ in seats),
        incarnations=tuple(incarnation for _, incarnation in seats),
        control=control,
        excluded=still_excluded(parent, control),
    )


def is_rollback(commit: Commit) -> bool:
    """Return whether this commit goes back to an earlier base. A reform has no plan either, but no digest."""
    return commit.round >= 0 and not commit.plan and commit.base_digest != ""


class _Log(Protocol):
    @property
    def last(self) -> Commit:
        """The last certified commit."""


class ControlRecords:
    """The newest control record that this peer holds, applied by a commit or not."""

    def __init__(self, log: _Log, identity: Identity, record: bytes | None):
        """`record`: of the durable file. A damaged one is dropped."""
        self._log = log
        self._identity = identity
        self._held: Control | None = None
        if record is not None:
            try:
                held = unpack(Control, record)
                self._held = held if is_signed(held, log.last, identity) else None
            except WireError:
                self._held = None
            if self._held is None:
                follows = without_orders(log.last, identity.peer_id)
                logger.warning("the control record of this peer is damaged, or another campaign's; %s", follows)

    @property
    def newest(self) -> Control | None:
        """The newest record, applied by a commit or not."""
        applied = self._log.last.control
        return self._held if self._held is not None and is_news(self._held, applied) else applied

    @property
    def number(self) -> int:
        """Number of the newest record; 0 when there is none."""
        return number_of(self.newest)

    def take(self, control: Control | None) -> Output[bool]:
        """Keep a record; False when it is not newer. Raises Refused when the campaign's owner did not sign it."""
        if control is None or control.number <= self.number or not is_news(control, self._log.last.control):
            return Output(False)
        if not is_signed(control, self._log.last, self._identity):
            raise Refused(Code.NOT_PROVEN, "a control record that the owner of this campaign did not sign")
        return Output(True, (Write(CONTROL, control),))

    def before_new_term(self) -> tuple[Write, ...]:
        """Return the write that keeps the newest record, in case a reform gives up the commit that applied it."""
        return (Write(CONTROL, self.newest),) if self.newest is not None and self.newest != self._held else ()

    def apply(self, control: Control) -> None:
        """Hold a record that is durable now."""
        self._held = control


def _message(control: Control) -> bytes:
    return b"spes control\0" + pack(replace(control, signature=b""))


TAKEN_BACK = "taken back:"
NAMED_PEERS = 3
"""At most so many peers are named where an order is described as a whole."""


def describe(control: Control | None, round_number: int) -> str:
    """Describe what a record orders after this round: "paused, rolled back to round 40, from round 60 on learning_rate 0.0001".

    "" without orders. A change of the schedule is left out once a later one of the same field holds.
    """
    if control is None:
        return ""
    words: list[str] = [] if control.state == "running" else [control.state]
    if control.rollback >= 0:
        words.append(f"rolled back to round {control.rollback}")
    if control.by_guard and words:
        words[0] += " (by the owner's bootstrap peer: the held-out loss ran away)"
    if control.requires is not None:
        words.append(f"protocol {control.requires.protocol} required from round {control.requires.from_round} on")
    if control.banned:
        words.append(f"{_named(control.banned)} banned")
    if control.audited:
        words.append(f"audits of {_named(control.audited)}")
    next_change: dict[str, int] = {}  # of each field: the round of the next later change
    in_force: list[str] = []
    for change in reversed(control.changes):
        fields, until = _fields(change), max(change.round, round_number + 1)
        left = {name: value for name, value in fields.items() if next_change.get(name, until + 1) > until}
        if left or not fields:
            training = change.training if left == fields else json.dumps(left, separators=(",", ":"))
            in_force.insert(0, f"from round {change.round} on {_words(training)}")
        next_change.update(dict.fromkeys(fields, change.round))
    return ", ".join([*words, *in_force])


def describe_news(control: Control, before: Control | None, round_number: int) -> str:
    """Describe what a record orders that the one before did not, and what it takes back, in the words of `describe`.

    "" for nothing. `round_number`: of the commit that applies it.
    """
    known = Control(control.campaign, 0, "running", (), -1, b"") if before is None else before
    fresh = tuple((Counter(control.changes) - Counter(known.changes)).elements())
    taken_back = (Counter(known.changes) - Counter(control.changes)).elements()
    requires = None if control.requires == known.requires else control.requires
    state = "running" if control.state == known.state else control.state
    by_guard = control.by_guard and control.state == state
    ordered = replace(control, state=state, changes=fresh, banned=(), audited=(), requires=requires, by_guard=by_guard)
    words = ["resumed"] if control.state == "running" != known.state else []
    words += [text] if (text := describe(ordered, round_number)) else []
    words += [f"{TAKEN_BACK} from round {change.round} on {_words(change.training)}" for change in taken_back]
    words += [f"protocol {known.requires.protocol} no longer required"] if known.requires and not control.requires else []
    words += [f"{peer[-6:]} banned" for peer in control.banned if peer not in known.banned]
    words += [f"{peer[-6:]} no longer banned" for peer in known.banned if peer not in control.banned]
    words += [f"audits of {peer[-6:]}" for peer in control.audited if peer not in known.audited]
    words += [f"no more audits of {peer[-6:]}" for peer in known.audited if peer not in control.audited]
    words += [f"{each.peer[-6:]} pardoned" for each in control.pardons if each not in known.pardons]
    return ", ".join(words)


def _named(peers: Collection[str]) -> str:
    return " and ".join(peer[-6:] for peer in peers) if len(peers) <= NAMED_PEERS else f"{len(peers)} peers"


def _fields(change: Change) -> dict[str, object]:
    """Return the fields that a change sets; none if it is invalid."""
    try:
        return dict(json.loads(change.training))
    except (ValueError, TypeError, RecursionError):
        return {}


def _words(training: str) -> str:
    """Return a change without JSON punctuation, and always printable."""
    return re.sub(r"[^\w.:,+-]", "", training).replace(":", " ").replace(",", ", ")
