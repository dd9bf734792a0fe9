"""The consensus core on a store: what recovers from its files, and writes that are durable before their reply goes out."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import TypeVar

from spes_p2p.consensus.acceptor import IsValid, fresh_votes, read_votes
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import without_orders
from spes_p2p.consensus.output import CONTROL, LOG, VOTES, Identity, Output, Write
from spes_p2p.consensus.participant import Files, Participant
from spes_p2p.messages.consensus import Commit, Milestone
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.store import frame_record, parse_records

MADE_ANEW = "it is made anew"

T = TypeVar("T")
logger = logging.getLogger(__name__)


def open_participant(
    store: Store, identity: Identity, genesis: Commit, rng: random.Random, is_valid: IsValid
) -> Participant:
    """Open the consensus core from its files. Damaged ones are replaced; raises UserError when that fails."""
    records = store.records(LOG)
    votes, had_votes = read_record(store, VOTES, None), store.read(VOTES) is not None
    files = Files(votes, records, read_record(store, CONTROL, without_orders(genesis, identity.peer_id)))
    participant = Participant(identity, genesis, files, rng, is_valid)
    if had_votes and votes is None:
        _say_damaged(VOTES, _without_votes(participant.log.last.electorate, identity.peer_id))
    if participant.log.intact < len(records):
        store.replace_log(LOG, records[: participant.log.intact])
    for write in participant.recovery:
        _write(store, write)
    return participant


def perform(store: Store, participant: Participant, output: Output[T]) -> T:
    """Make the writes durable, apply them, and return the reply. Raises UserError where a write fails: it did not happen.

    The caller's thread waits for the disk: no other request may come between a write and its effect on the participant.
    """
    for write in output.writes:
        if isinstance(write.value, Milestone):
            store.replace_log(LOG, participant.log.records_from(write.value))
        else:
            _write(store, write)
        participant.apply(write)
    return output.reply


def _without_votes(electorate: Sequence[str], me: str) -> str:
    """Say what follows when a peer has lost its votes: those of the others may suffice, or nobody else votes."""
    if me not in electorate:
        return MADE_ANEW
    if 2 * (len(electorate) - 1) > len(electorate):
        return "this peer casts no vote until a commit lists its new ones, as a rule in two rounds"
    return ("no round is decided without the votes of this peer, so rounds wait until the owner's bootstrap peer reforms the "
            "swarm (after sync.reform_after_s)")


def read_log(store: Store, genesis: Commit, identity: Identity) -> CommitLog:
    """Return the commits of a run-dir to one who only reads them. What is damaged, its peer says and mends when it starts."""
    return CommitLog(identity, genesis, parse_records(bytes(store.read(LOG) or b"")))


def read_record(store: Store, name: str, follows: str | None = MADE_ANEW) -> bytes | None:
    """Return the only record of a file; None when it is missing, or damaged, which is logged with what `follows`, if given."""
    blob = store.read(name)
    if blob is None:
        return None
    records = parse_records(bytes(blob))
    if len(records) == 1:
        return records[0]
    if follows is not None:
        _say_damaged(name, follows)
    return None


def _say_damaged(name: str, follows: str) -> None:
    logger.warning("the file %r in this run-dir is damaged; %s", name, follows)


def voter_incarnation(store: Store, rng: random.Random) -> str:
    """Return the incarnation that the peer of this store votes with; make it durable if it is new."""
    votes = read_votes(read_record(store, VOTES))
    if votes is not None:
        return votes.incarnation
    votes = fresh_votes(rng)
    _write(store, Write(VOTES, votes))
    return votes.incarnation


def _write(store: Store, write: Write) -> None:
    if write.file == LOG:
        store.append(LOG, write.record)
    else:
        store.write(write.file, [frame_record(write.record)])
