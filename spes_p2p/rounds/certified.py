"""What certificates say about a record of a round: others' records count only as far as these vouch for them.

A commit has the tokens since the campaign began and the members whose work they are, so a record's contributions must be of
those members and add up. What one member may have contributed is bounded by what earlier commits gave it to train. Loss,
learning rate, expert-steps and everything that the teller measured are not in a commit.
"""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.commit_log import RECENT, CommitLog
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.rounds.claims import outstanding


def certified(record: RoundRecord, log: CommitLog, config: CampaignConfig) -> RoundRecord | None:
    """Return the record without names of others than members; None if it contradicts the log, or is of a later round.

    Of rounds before the log's beginning nothing is known but that sums fit.
    """
    tokens = {each.peer: each.tokens for each in record.contributions}
    if len(tokens) != len(record.contributions) or sum(tokens.values()) != record.tokens or record.round > log.round:
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
    return replace(record, names=tuple(named for named in record.names if named.peer in commit.members))


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
    return all(
        each.tokens <= step * outstanding(recent, each.peer, config.sync.overlap).steps
        for each in record.contributions if each.tokens
    )
