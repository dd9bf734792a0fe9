"""What the campaign's owner orders: who that is, which records hold, and how they reach whoever writes the next head.

The owner is the bootstrap peer that made base 0: its key signs. A record reaches some peers by talk, the others learn from the
registry that there is a newer one, and the next coordinator puts the newest into plan and head. It holds from that head on, for
everybody alike. Nobody appends a head with a record that the owner did not sign, or that is older than the one before
(docs/safety.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass, replace
from typing import Protocol

from spes_p2p.config import CampaignConfig, parse_campaign_config
from spes_p2p.errors import Refused, UserError
from spes_p2p.swarm.interfaces import Identity, Store
from spes_p2p.swarm.records import Control, Head
from spes_p2p.swarm.store import frame_record, parse_records
from spes_p2p.swarm.wire import pack, unpack
from spes_p2p.sync.archive import archived_rounds

logger = logging.getLogger(__name__)

CONTROL = "control"
"""The talk, and the file that keeps the newest record."""
SCHEDULE_FIELDS = ("learning_rate", "min_lr_ratio", "sync_steps", "total_steps", "warmup_steps")
"""Of `training`: what the owner can change while the campaign runs."""


@dataclass(frozen=True)
class ControlRequest:
    """What do you know of the owner's orders?"""

    brought: Control | None
    """A record to take up, if it is news."""


@dataclass(frozen=True)
class Known:
    """What a peer knows."""

    newest: Control | None
    """Applied or not."""
    applied: int
    """Number of the record that its head carries; 0: none."""
    round: int
    """Of its head."""
    step: int
    """Campaign step of its head."""
    archived: tuple[int, ...]
    """Rounds whose bases it keeps."""


class Log(Protocol):
    """The heads that this peer knows."""

    @property
    def head(self) -> Head:
        """The last decided one."""


class Controls:
    """The newest record that this peer holds. Durable."""

    def __init__(self, log: Log, store: Store, identity: Identity):
        self._log = log
        self._store = store
        self._identity = identity
        self._held = self._read()

    @property
    def newest(self) -> Control | None:
        """The newest record, whether a head has applied it or not."""
        applied = self._log.head.control
        return self._held if self._held is not None and is_news(self._held, applied) else applied

    @property
    def number(self) -> int:
        """Of the newest record; 0 when there is none."""
        return number_of(self.newest)

    def known(self) -> Known:
        """What I answer who asks."""
        head = self._log.head
        return Known(self.newest, number_of(head.control), head.round, head.step, tuple(archived_rounds(self._store)))

    def take(self, control: Control | None) -> bool:
        """Keep a record, if it is news. Raises Refused when it is not one of this campaign's owner."""
        if control is None or control.number <= self.number or not is_news(control, self._log.head.control):
            return False
        if not is_signed(control, self._log.head, self._identity):
            raise Refused("a control record that the owner of this campaign did not sign")
        self._hold(control)
        return True

    def hold(self) -> None:
        """Keep the newest record also if a reform gives up the head that applied it: it is news again then."""
        if self.newest is not None and self.newest != self._held:
            self._hold(self.newest)

    def _hold(self, control: Control) -> None:
        self._store.write(CONTROL, [frame_record(pack(control))])
        self._held = control

    def _read(self) -> Control | None:
        blob = self._store.read(CONTROL)
        if blob is None:
            return None
        try:
            (record,) = parse_records(bytes(blob))
            control = unpack(Control, record)
        except ValueError:
            logger.warning("the control record of this peer is damaged; others have it")
            return None
        return control if is_signed(control, self._log.head, self._identity) else None


def owner_of(head: Head) -> str:
    """Whose records count: the bootstrap peer that signed nothing but made everything, base 0."""
    return head.helpers[0]


def number_of(control: Control | None) -> int:
    """0 before the first record."""
    return 0 if control is None else control.number


def is_paused(control: Control | None) -> bool:
    """Does the campaign wait for its owner?"""
    return control is not None and control.state == "paused"


def is_stopped(control: Control | None) -> bool:
    """Is the campaign over before its last step?"""
    return control is not None and control.state == "stopped"


def runs(control: Control | None) -> bool:
    """Is there a next phase to train?"""
    return control is None or control.state == "running"


def describe(control: Control | None) -> str:
    """What a record says, for people: paused, rolled back to round 40, from round 60 on learning_rate 0.0001; or ""."""
    if control is None:
        return ""
    words: list[str] = [] if control.state == "running" else [control.state]
    if control.rollback >= 0:
        words.append(f"rolled back to round {control.rollback}")
    for change in control.changes:
        words.append(f"from round {change.round} on {_words(change.training)}")
    return ", ".join(words)


def _words(training: str) -> str:
    """A change without the signs of JSON; printable, whatever was signed."""
    return re.sub(r"[^\w.:,+-]", "", training).replace(":", " ").replace(",", ", ")


def scheduled(config: CampaignConfig, control: Control | None, round_number: int) -> CampaignConfig:
    """The campaign's rules in the phase that leads to this round, where this record holds.

    A change that would break a rule is left out, by everybody alike; the owner's command signs none.
    """
    for change in control.changes if control is not None else ():
        if change.round <= round_number:
            with contextlib.suppress(UserError):
                config = changed(config, change.training, "control record")
    return config


def changed(config: CampaignConfig, training: str, where: str) -> CampaignConfig:
    """The rules with these fields of `training` (JSON). Raises UserError naming `where`, the field and what would be right."""
    try:
        fields = dict(json.loads(training))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{where}: a change is a JSON object of fields of training") from None
    unknown = sorted(set(fields) - set(SCHEDULE_FIELDS))
    if unknown:
        raise UserError(f"{where}: training.{unknown[0]} cannot be changed; give one of {', '.join(SCHEDULE_FIELDS)}")
    raw = config.model_dump()
    return parse_campaign_config({**raw, "training": {**raw["training"], **fields}}, where)


def rolls_back(control: Control | None, parent: Head) -> bool:
    """Can only a rollback apply this record after `parent`?"""
    return control is not None and control != parent.control and control.rollback >= 0


def is_news(control: Control, known: Control | None) -> bool:
    """Does this record replace the known one? Nothing follows a stop."""
    return control.number > number_of(known) and not is_stopped(known)


def is_signed(control: Control, head: Head, identity: Identity) -> bool:
    """Is this a record of the campaign's owner? `head`: any of the campaign."""
    return control.campaign == head.campaign and identity.verify(owner_of(head), _message(control), control.signature)


def may_follow(control: Control | None, parent: Head, identity: Identity) -> bool:
    """May the head after `parent` carry this record: the same one again, or a newer one that the owner signed?"""
    if control is None or control == parent.control:
        return control == parent.control
    return is_news(control, parent.control) and is_signed(control, parent, identity)


def signed(control: Control, identity: Identity) -> Control:
    """The record with the signature of this identity."""
    return replace(control, signature=identity.sign(_message(control)))


def _message(control: Control) -> bytes:
    return b"spes control\0" + pack(replace(control, signature=b""))
