"""Records of committed rounds, one per round, from this peer or another one, so that curves begin at round 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from spes_p2p.messages.codec import pack
from spes_p2p.messages.compact import compressed, expanded
from spes_p2p.messages.fields import LONGEST_WORD
from spes_p2p.messages.presence import Contribution, Named, PeerStatus, RoundRecord
from spes_p2p.observe.events import (
    Evaluated,
    Event,
    PhaseTrained,
    PromptsContinued,
    RoundCommitted,
    RoundFailed,
    seconds_by_stage,
)

KEPT_READ = 64
"""Records that are held as objects: status, plots and other peers ask for the last ones."""


@dataclass(frozen=True)
class Totals:
    """Contributions of all peers up to a round."""

    round: int
    """-1: no round yet."""
    contributions: tuple[Contribution, ...]
    """By peer id."""
    names: Mapping[str, Named] = field(default_factory=dict)
    """Newest names by peer id, of peers that gave one."""

    @property
    def tokens(self) -> int:
        """Tokens of all peers."""
        return sum(each.tokens for each in self.contributions)

    def called(self, peer: str) -> Named:
        """Return how a peer calls itself; with empty names if it gave none."""
        return self.names.get(peer, Named(peer, "", ""))

    def named_by(self, statuses: Iterable[PeerStatus]) -> Totals:
        """Return these totals with the names that living peers gave themselves, over their own connections, before others'."""
        own = {each.peer_id: Named(each.peer_id, each.name, each.team) for each in statuses if each.name is not None}
        return replace(self, names={**self.names, **own})

    def ranked(self) -> list[Contribution]:
        """Return the contributions by decreasing tokens."""
        return sorted(self.contributions, key=lambda each: (-each.tokens, each.peer))

    def teams(self) -> list[tuple[str, int, int]]:
        """Return name, peers and tokens of each team that has trained, by decreasing tokens.

        A peer's tokens count for the team that it is in now. Teams are the same if they differ in capitals only.
        """
        found: dict[str, tuple[str, int, int]] = {}
        for each in self.ranked():
            named = self.called(each.peer)
            if named.team and each.tokens:
                team, peers, tokens = found.get(named.team.casefold(), (named.team, 0, 0))
                found[named.team.casefold()] = team, peers + 1, tokens + each.tokens
        return sorted(found.values(), key=lambda team: (-team[2], team[0]))


def totals_of(records: Iterable[RoundRecord]) -> Totals:
    """Sum the contributions to these rounds, given in their order. Who has trained nothing so far contributed nothing."""
    newest, sums, names = -1, dict[str, tuple[int, int]](), dict[str, Named]()
    for record in records:
        newest = max(newest, record.round)
        names.update((each.peer, each) for each in record.names)
        for each in record.contributions:
            tokens, steps = sums.get(each.peer, (0, 0))
            sums[each.peer] = tokens + each.tokens, steps + each.expert_steps
    named = {peer: each for peer, each in names.items() if each.name or each.team}
    return Totals(newest, tuple(Contribution(peer, *sums[peer]) for peer in sorted(sums) if any(sums[peer])), named)


def merged(known: RoundRecord | None, other: RoundRecord) -> RoundRecord:
    """Complete a known record with another peer's record of the round."""
    if known is None:
        return other
    if math.isnan(known.loss) and not math.isnan(other.loss):
        known, other = other, known
    later: dict[str, Any] = {}
    if math.isnan(known.validation_loss) and not math.isnan(other.validation_loss):
        later["validation_loss"] = other.validation_loss
    if other.continuations and not known.continuations:
        later["continuations"] = other.continuations
    return replace(known, **later) if later else known


def _lacks_loss(record: RoundRecord) -> bool:
    return record.tokens > 0 and math.isnan(record.loss)


class _Records(MutableMapping[int, RoundRecord]):
    """Records by round. All but the last KEPT_READ are held compressed, each as what it adds to one of about its time.

    As objects the records of 50,000 rounds of 256 members would take gigabytes.
    """

    def __init__(self) -> None:
        self._read: dict[int, RoundRecord] = {}
        self._old: dict[int, tuple[bytes, bytes]] = {}
        """The packed record that is the dictionary, and the compressed one."""
        self._dictionary = b""

    def __getitem__(self, number: int) -> RoundRecord:
        if number in self._read:
            return self._read[number]
        dictionary, body = self._old[number]
        return _unpacked(expanded(body, dictionary))

    def __setitem__(self, number: int, record: RoundRecord) -> None:
        self._old.pop(number, None)
        self._read[number] = record
        if len(self._read) > KEPT_READ:
            oldest = next(iter(self._read))
            packed = pack(self._read.pop(oldest))
            if len(self._old) % KEPT_READ == 0:
                self._dictionary = packed
            self._old[oldest] = self._dictionary, compressed(packed, self._dictionary)

    def __delitem__(self, number: int) -> None:
        del (self._read if number in self._read else self._old)[number]

    def __contains__(self, number: object) -> bool:
        return number in self._read or number in self._old

    def __iter__(self) -> Iterator[int]:
        yield from self._old
        yield from self._read

    def __len__(self) -> int:
        return len(self._old) + len(self._read)


def _unpacked(packed: bytes) -> RoundRecord:
    """Undo `pack`, without the checks of what comes from others: this peer may have measured what those refuse."""
    record = RoundRecord(*msgpack.unpackb(packed))
    lists: dict[str, Any] = vars(record)
    return replace(
        record,
        seconds=tuple(tuple(each) for each in lists["seconds"]),
        contributions=tuple(Contribution(*each) for each in lists["contributions"]),
        names=tuple(Named(*each) for each in lists["names"]),
        continuations=tuple(lists["continuations"]),
    )


class Rounds:
    """A peer's records: from its own events and from other peers."""

    def __init__(self, peer_id: str):
        self._peer_id = peer_id
        self._records = _Records()
        self._without_loss: set[int] = set()
        """Rounds that were trained and whose record does not say the loss."""
        self._train_seconds = 0.0
        self._failed_attempts = 0

    @property
    def records(self) -> tuple[RoundRecord, ...]:
        """All known records, by round."""
        return tuple(self._records[number] for number in sorted(self._records))

    def last_round(self) -> dict[str, Any]:
        """Return the last round, losses and continuations as fields of a peer's status, which shows them after a restart."""
        found: dict[str, Any] = {"round": self.newest, "loss": self._records[self.newest].loss} if self._records else {}
        for record in self.records:
            if math.isfinite(record.validation_loss):
                found |= {"validation_loss": record.validation_loss, "validation_round": record.round}
            if record.continuations:
                found |= {"continued_round": record.round, "continuations": record.continuations}
        return found

    @property
    def newest(self) -> int:
        """The last known round; -1 before the first."""
        return max(self._records, default=-1)

    def missing(self, rounds: Iterable[int]) -> list[int]:
        """Return those of the given rounds that have no record, or none that says the loss though they were trained."""
        return [number for number in rounds if number not in self._records or number in self._without_loss]

    def after(self, round_number: int, at_most: int) -> list[int]:
        """Return the first rounds after this one that have a record."""
        return sorted(number for number in self._records if number > round_number)[:at_most]

    def at(self, round_number: int) -> RoundRecord:
        """Return the record of a round that has one."""
        return self._records[round_number]

    def record(self, event: Event, time: float) -> None:
        """Record an event of this peer; `time`: Unix time of the event."""
        match event:
            case PhaseTrained():
                self._train_seconds = event.seconds
            case RoundFailed():
                self._failed_attempts += 1
            case RoundCommitted():
                self._committed(event, time)
            case Evaluated() if event.round in self._records:
                self._keep(replace(self._records[event.round], validation_loss=event.validation_loss))
            case PromptsContinued() if event.round in self._records:
                self._keep(replace(self._records[event.round], continuations=event.continuations))

    def add(self, record: RoundRecord) -> bool:
        """Merge another peer's record; return whether it adds information."""
        known = self._records.get(record.round)
        complete = merged(known, record)
        if complete is known:
            return False
        self._keep(complete)
        return True

    def _keep(self, record: RoundRecord) -> None:
        self._records[record.round] = record
        (self._without_loss.add if _lacks_loss(record) else self._without_loss.discard)(record.round)

    def _committed(self, event: RoundCommitted, time: float) -> None:
        known = self._records.get(event.round)
        trained = (("train", self._train_seconds),) if self._train_seconds else ()
        self._keep(RoundRecord(
            round=event.round,
            campaign_step=event.campaign_step,
            tokens=event.tokens,
            total_tokens=event.total_tokens,
            loss=event.loss,
            validation_loss=known.validation_loss if known is not None else math.nan,
            continuations=known.continuations if known is not None else (),
            learning_rate=event.learning_rate,
            merge_alpha=event.merge_alpha,
            members=len(event.members),
            base_digest=event.base_digest,
            dropped_parts=event.dropped_parts,
            teller=self._peer_id,
            time=time,
            seconds=trained + tuple(seconds_by_stage(event.seconds).items()),
            sent_bytes=event.sent_bytes,
            received_bytes=event.received_bytes,
            failed_attempts=self._failed_attempts,
            control=event.control[:LONGEST_WORD],
            contributions=tuple(Contribution(*each) for each in event.contributions),
            names=tuple(Named(*each) for each in event.names),
        ))
        self._train_seconds, self._failed_attempts = 0.0, 0
