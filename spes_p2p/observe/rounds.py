"""What is told of a committed round long after it: one record a round, so that a curve can begin at round 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spes_p2p.observe.status import Count, Word


@dataclass(frozen=True)
class Contribution:
    """Work of one peer that is in the base."""

    peer: Word
    tokens: Count
    """Trained and included."""
    expert_steps: Count
    """Local steps times experts trained in them."""

    def __add__(self, other: Contribution) -> Contribution:
        """Both together; of the same peer."""
        return Contribution(self.peer, self.tokens + other.tokens, self.expert_steps + other.expert_steps)


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Everything but what is marked as the teller's own is the same on every peer."""

    round: Count
    campaign_step: Count
    tokens: Count
    """Of this round, all members."""
    total_tokens: Count
    loss: float
    """Training loss of all members, nats a token; NaN when nobody trained or nobody remembers."""
    validation_loss: float
    """Held-out loss of the base after this round, nats a token; NaN when it was not evaluated."""
    learning_rate: float
    merge_alpha: float
    members: Count
    base_digest: Word
    dropped_parts: Count
    teller: Word
    """The peer that wrote this record; what follows is its own."""
    time: float
    """Unix time at which it had the new base."""
    seconds: tuple[tuple[Word, float], ...]
    """By phase, in the order of the round: train, announce, exchange, commit, apply."""
    sent_bytes: Count
    received_bytes: Count
    failed_attempts: Count
    """Attempts of this peer at this round that did not commit."""
    control: Word = ""
    """What the campaign's owner had ordered by then, in words; empty for nothing. The same on every peer."""


@dataclass(frozen=True)
class Totals:
    """Everybody's contributions up to a round."""

    round: int
    """-1: of no round yet."""
    contributions: tuple[Contribution, ...]
    """By peer id."""

    @property
    def tokens(self) -> int:
        """Of all peers."""
        return sum(each.tokens for each in self.contributions)

    def plus(self, round_number: int, contributions: tuple[Contribution, ...]) -> Totals:
        """With one more round."""
        by_peer = {each.peer: each for each in self.contributions}
        for each in contributions:
            known = by_peer.get(each.peer)
            by_peer[each.peer] = each if known is None else known + each
        return Totals(round_number, tuple(by_peer[peer] for peer in sorted(by_peer)))


NOTHING = Totals(-1, ())


def merged(known: RoundRecord | None, heard: RoundRecord) -> RoundRecord:
    """What is known of a round, completed by what another peer says of it."""
    if known is None:
        return heard
    if math.isnan(known.loss) and not math.isnan(heard.loss):
        known, heard = heard, known
    if math.isnan(known.validation_loss):
        return replace(known, validation_loss=heard.validation_loss)
    return known
