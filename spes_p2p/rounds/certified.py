"""What certificates say about a record of a round: others' records count only as far as these vouch for them.

A commit has the tokens since the campaign began and the members whose work they are, so a record's contributions must be of
those members and add up. What one member may have contributed is bounded by what earlier commits gave it to train. Orders and
learning rate follow from the commit. Losses and merges are not in it, nor are rounds before the log's beginning: these count
from the owner's helpers and the user's own peer, or when two electors say the same. What the teller measured, and what the
model wrote, is its word.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.commit_log import RECENT, CommitLog
from spes_p2p.consensus.control import describe
from spes_p2p.messages.fields import LONGEST_WORD
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.rounds.claims import outstanding
from spes_p2p.rounds.schedule import last_round
from spes_p2p.training.rates import learning_rate

UNPROVEN: dict[str, Any] = {"loss": math.nan, "validation_loss": math.nan, "merge_alpha": 0.0}
"""Fields that are the same on every peer and in no commit, with what they are when unknown."""


def certified(record: RoundRecord, log: CommitLog, config: CampaignConfig) -> RoundRecord | None:
    """Return the record with what the log says in place of what it says; None if it contradicts the log, is of a later round,
    or does not say when the round was.

    Of rounds before the log's beginning nothing is known but that sums fit.
    """
    tokens = {each.peer: each.tokens for each in record.contributions}
    if len(tokens) != len(record.contributions) or sum(tokens.values()) != record.tokens or record.round > log.round:
        return None
    if not math.isfinite(record.time):
        return None
    if record.round <= max(log.begins, -1):
        return record if record.round >= 0 and record.tokens <= record.total_tokens else None
    commit, parent = log.commit_at(record.round), log.commit_at(record.round - 1)
    decided = (commit.step, commit.tokens, commit.tokens - parent.tokens)
    if not commit.plan or (record.campaign_step, record.total_tokens, record.tokens) != decided:
        return None
    heard = {commit.members[i] for i in commit.heard}
    if any(count and peer not in heard for peer, count in tokens.items()) or not tokens.keys() <= set(commit.members):
        return None
    if not _has_digest(record, log) or not _was_assigned(record, log, config):
        return None
    training, _ = last_round(commit, config)
    return replace(
        record,
        control=describe(commit.control, commit.round)[:LONGEST_WORD],
        learning_rate=learning_rate(commit.step, training),
        members=min(record.members, len(commit.members)),
        names=tuple(named for named in record.names if named.peer in commit.members),
    )


class Hearsay:
    """What peers tell of past rounds, as far as it is to be believed."""

    def __init__(self, log: CommitLog, config: CampaignConfig, own: str = ""):
        """`own`: the user's own peer, whose word counts."""
        self._log, self._config, self._own = log, config, own
        self._told: dict[tuple[int, str], dict[str, object]] = {}
        """By round and field that no certificate vouches for: what each elector says."""

    def believed(self, peer: str, record: RoundRecord) -> RoundRecord | None:
        """Return what counts of this peer's record; None for nothing. The second elector to tell a value makes it count."""
        found = certified(record, self._log, self._config)
        if found is None or peer in (*self._log.genesis.helpers, self._own):
            return found
        if found.round <= max(self._log.begins, -1):
            told = found.campaign_step, found.total_tokens, found.base_digest, found.contributions
            if not self._is_confirmed(peer, found.round, "", told):
                return None
        unknown = {
            name: nothing for name, nothing in UNPROVEN.items()
            if not self._is_confirmed(peer, found.round, name, getattr(found, name))
        }
        return replace(found, **unknown)

    def _is_confirmed(self, peer: str, round_number: int, name: str, value: object) -> bool:
        electorate = self._log.last.electorate
        told = self._told.setdefault((round_number, name), {})
        if peer in electorate:
            told[peer] = value
        return sum(each == value for each in told.values()) >= min(2, len(electorate))


def _has_digest(record: RoundRecord, log: CommitLog) -> bool:
    """Return whether the next round's certificate does not name another digest of this round's base."""
    if record.round == log.round:
        return True
    after = log.commit_at(record.round + 1)
    return not after.plan or after.base_digest == record.base_digest


def _was_assigned(record: RoundRecord, log: CommitLog, config: CampaignConfig) -> bool:
    """Return whether each member had that much to train."""
    if not config.sync.bound_influence or 0 <= log.begins > record.round - RECENT:
        return True
    recent, step = log.recent(record.round - 1), config.training.batch_size * config.training.sequence_length
    for each in record.contributions:
        work = outstanding(recent, each.peer, config.sync.overlap)
        if each.tokens > step * work.steps or each.expert_steps > work.steps * len(work.experts):
            return False
    return True
