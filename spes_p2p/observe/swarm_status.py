"""The state of a swarm, merged from the statuses of its peers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spes_p2p.messages.audits import Audited
from spes_p2p.messages.presence import PeerStatus, Probation
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.units import counted

SLOW_LINE = 4.0
"""A line is slow if its upload is less than the median by this factor."""
WAITING_SHARE = 0.25
"""Rounds that take less than this share of the training before them are not worth a remark."""
NO_MAJORITY = "rounds wait until a majority is back, or the owner's bootstrap peer reforms the swarm (start it if it is down)"
MAX_SILENT = 64
"""Bounds the slow trainers that are remembered while they do not answer: strangers never come back."""
STILL_SLOW = 0.5
"""A line that was slow stays so down to this share of both bounds: measurements of a line at a bound would flap."""


@dataclass(frozen=True)
class SwarmStatus:
    """State of the swarm as the queried peers know it. Of the believed peers, those with the newest base lead.

    In an open campaign only peers for whom the owner vouches are believed about all, as long as one of them answers: other
    identities cost nothing.
    """

    campaign: str
    campaign_hash: str
    protocol: int
    round: int
    """The last committed round; round 0 only assembles the swarm."""
    total_rounds: int
    """Number of the campaign's last round."""
    campaign_step: int
    total_steps: int
    total_tokens: int
    loss: float
    validation_loss: float
    validation_round: int
    """The last round in the newest evaluated base."""
    learning_rate: float
    merge_alpha: float
    tokens_per_second: float
    """Sum over the trainers, by their own word."""
    seconds_left: float
    """NaN while the campaign waits."""
    base_digest: str
    digests_equal: bool
    """Whether all leading peers report the same digest."""
    round_tokens: int
    round_sent_bytes: int
    """Sum over all peers with the newest base in the last round."""
    round_received_bytes: int
    round_seconds: Mapping[str, float]
    """Seconds of the last round by stage, maximum over the leading peers."""
    owners: tuple[tuple[str, ...], ...]
    ownerless: tuple[int, ...]
    """Experts without a trainer, once the swarm is assembled."""
    electorate: tuple[str, ...]
    """The electors of the next round."""
    electors_missing: tuple[str, ...]
    """Electors that did not answer."""
    failures: Mapping[str, int]
    """Failed attempts by reason, maximum over the believed peers: all members count the same attempt."""
    failing: Mapping[str, int]
    """Failed attempts at the next round by reason, maximum over the leading peers."""
    digest_mismatches: int
    dropped_tokens: int
    """Tokens of discarded work, sum over the peers."""
    peers: tuple[PeerStatus, ...]
    """Trainers first, then by id."""
    state: str
    """State set by the owner: running, paused, stopped."""
    control: str
    """Description of the owner's orders; empty if there are none."""
    min_peers: int
    """Trainers that round 0 waits for."""
    vouched_alive: int | None
    """Trainers that say that the owner vouches for them; null where the schedule needs none."""
    pending: str
    """Description of those that no round has applied yet; empty if there are none."""
    scores: Mapping[str, float]
    """By member, in an open campaign: nats per token by which its experts' last steps lower the held-out loss. The median over
    the vouched trainers that judged; negative: harm."""
    audits: Mapping[str, Audited]
    """By member, in an open campaign: the last audit of its training whose verdict a commit has, with its auditor's figures."""

    @property
    def assembled(self) -> bool:
        """Whether round 0 has assigned the experts. Later all their owners may be away, and strangers train shared weights."""
        return any(self.owners) or self.campaign_step > 0

    @property
    def awaits_trainers(self) -> bool:
        """Whether round 0 waits until more trainers are here."""
        return not self.assembled and (self.lacks_vouched or len(self.trainers) < self.min_peers)

    @property
    def trainers(self) -> tuple[PeerStatus, ...]:
        """Those of the peers that train."""
        return tuple(peer for peer in self.peers if peer.role == "trainer")

    @property
    def lacks_vouched(self) -> bool:
        """Whether trainers are here, but none without whom the schedule does not advance."""
        return self.vouched_alive == 0 and bool(self.trainers) and self.state == "running" and not self.done

    @property
    def majority_missing(self) -> bool:
        """Whether too few electors answer to decide a round."""
        return bool(self.electorate) and 2 * (len(self.electorate) - len(self.electors_missing)) <= len(self.electorate)

    @property
    def rounds_go_on(self) -> bool:
        """Whether rounds are decided, as far as anyone can tell."""
        return not (self.majority_missing or self.failing or self.is_asleep)

    @property
    def waits(self) -> bool:
        """Whether all rounds, or the schedule, wait for peers: nobody knows when the campaign ends."""
        is_under_way = self.assembled and self.state == "running" and not self.done
        return is_under_way and (self.lacks_vouched or self.majority_missing or self.is_asleep)

    @property
    def is_asleep(self) -> bool:
        """Whether all trainers are gone before the end: rounds go on when one joins."""
        return self.assembled and not self.done and all(peer.role != "trainer" for peer in self.peers)

    @property
    def done(self) -> bool:
        """Whether the campaign's last round is committed, which may be round 0 if the owner stops it at once."""
        return self.assembled and (self.round >= self.total_rounds or self.state == "stopped")


_OF_ONE_PEER = ("campaign", "campaign_hash", "protocol", "total_rounds", "campaign_step", "total_steps", "total_tokens", "loss",
                "learning_rate", "merge_alpha", "base_digest", "round_tokens", "owners", "electorate", "state", "control",
                "min_peers", "vouched_alive", "pending")
"""Fields of SwarmStatus that are copied from the best informed leading peer."""


def gather(statuses: Sequence[PeerStatus]) -> SwarmStatus:
    """Merge the peers' answers. Raises ValueError if there is none."""
    if not statuses:
        raise ValueError("no peer answered")
    peers = tuple(sorted(statuses, key=lambda status: (status.role != "trainer", status.peer_id)))
    with_base = [status for status in peers if status.base_digest] or peers
    believed = believed_of(with_base)
    newest = max(status.round for status in believed)
    leading = [status for status in believed if status.round == newest]
    at_newest = [status for status in with_base if status.round == newest]
    agreeing = Counter((status.base_digest, status.loss) for status in leading)

    def standing(status: PeerStatus) -> tuple[bool, bool, int]:
        """A peer that only downloaded the base has no loss or pace: prefer one that took part, and says what most say."""
        return status.peer_id in status.members, math.isfinite(status.loss), agreeing[status.base_digest, status.loss]

    best = max(leading, key=standing)
    trains = any(status.role == "trainer" for status in peers)
    lefts = (status.seconds_left for status in (best, *leading, *believed) if trains)
    validation_round, validation_loss = _held_out(believed)
    swarm = SwarmStatus(
        **{name: getattr(best, name) for name in _OF_ONE_PEER},
        round=newest,
        validation_loss=validation_loss,
        validation_round=validation_round,
        tokens_per_second=sum(max(0.0, status.tokens_per_second) for status in peers if status.role == "trainer"),
        seconds_left=next((left for left in lefts if math.isfinite(left)), math.nan),
        digests_equal=len({status.base_digest for status in leading if status.base_digest}) <= 1,
        round_sent_bytes=sum(status.round_sent_bytes for status in at_newest),
        round_received_bytes=sum(status.round_received_bytes for status in at_newest),
        round_seconds=_largest([status.round_seconds for status in leading]),
        ownerless=tuple(expert for expert, owners in enumerate(best.owners) if not owners) if any(best.owners) else (),
        electors_missing=tuple(sorted(set(best.electorate) - {status.peer_id for status in peers})),
        failures=_most([status.failures for status in believed]),
        failing=_most([status.failing for status in leading]),
        digest_mismatches=sum(status.digest_mismatches for status in peers),
        dropped_tokens=sum(status.dropped_tokens for status in peers),
        peers=peers,
        scores=_scores(peers),
        audits=_audits(peers),
    )
    return replace(swarm, seconds_left=math.nan) if swarm.waits else swarm


def believed_of(peers: Sequence[PeerStatus]) -> Sequence[PeerStatus]:
    """Return those for whom the owner of an open campaign vouches; all where none of them answers."""
    return [status for status in peers if status.standing == "vouched"] or peers


def _held_out(peers: Sequence[PeerStatus]) -> tuple[int, float]:
    """Return the newest evaluated round that at least two peers name, any of two peers at most, and the median of its losses.

    The evaluator is the first to know a loss; the others hear it with the next round.
    """
    by_round: dict[int, list[float]] = {}
    for status in peers:
        if math.isfinite(status.validation_loss):
            by_round.setdefault(status.validation_round, []).append(status.validation_loss)
    needed = 2 if len(peers) > 2 else 1
    found = [number for number, losses in by_round.items() if len(losses) >= needed] or list(by_round)
    return (max(found), statistics.median_low(by_round[max(found)])) if found else (0, math.nan)


def _scores(peers: Sequence[PeerStatus]) -> dict[str, float]:
    members = sorted({member for status in peers for member in status.scores})
    return {each: statistics.median(status.scores[each] for status in peers if each in status.scores) for each in members}


def _audits(peers: Sequence[PeerStatus]) -> dict[str, Audited]:
    made = (audit for status in peers for audit in status.audits)
    return {audit.peer: audit for audit in sorted(made, key=lambda audit: audit.round)}


def swarm_status(statuses: Sequence[PeerStatus]) -> dict[str, Any]:
    """Return the document of `spes-p2p status --json`: SwarmStatus as JSON values (unknown numbers are null)."""
    document: dict[str, Any] = to_json(gather(statuses))
    return document


def lacking_vouched(has_begun: bool, rounds_go_on: bool) -> str:
    """Say that no trainer is here for whom the owner vouches, and what to do about it."""
    what = ("rounds go on, but " if rounds_go_on else "") + "the schedule waits" if has_begun else "round 0 waits"
    anew = "" if has_begun else ", or begins anew with sync.min_peers: 0"
    return f"{what} for a trainer that the owner vouches for; the owner invites one with --roles trainer,elector{anew}"


def progress_of(probation: Probation) -> str:
    """Say how far a peer on probation is."""
    audit = ", needs a passed audit" if probation.audits < probation.audits_needed else ""
    return f"{min(probation.rounds, probation.rounds_needed)} of {counted(probation.rounds_needed, 'round')}{audit}"


def own_standing(standing: str, probation: Probation | None) -> str:
    """Tell a trainer in an open campaign what it is, and what that means for it."""
    if standing == "excluded":
        return "excluded, by the owner's order or by a proof: no round takes its work; ask the owner"
    if standing == "vouched":
        return "the owner vouches for this trainer"
    if standing == "proven":
        return ("probation passed: this trainer's work counts in full, unless all trainers for whom the owner does not vouch "
                "would outweigh those for whom it does")
    progress = f" ({progress_of(probation)})" if probation is not None else ""
    return (f"on probation{progress}: until it ends, all newcomers together count for at most a quarter of the trainers that "
            "the owner vouches for, so less may be credited than was trained")


def slow_lines(peers: Sequence[PeerStatus], before: Collection[str] = ()) -> tuple[str, ...]:
    """Return the trainers whose lines hold rounds up, by what all measured themselves.

    `before`: those of the last look. Of them, those that do not answer now stay: a slow line also delays answers. All have
    the training time of the longest phase: that of an auditor is shorter by its audit.
    """
    trainers = [peer for peer in peers if peer.role == "trainer"]
    measured = [peer for peer in trainers if peer.upload > 0]
    train_s = max((peer.round_seconds.get("train", 0.0) for peer in believed_of(trainers)), default=0.0)
    median = usual_upload(peers)
    silent = set(before) - {peer.peer_id for peer in peers}
    return tuple(sorted(silent)[:MAX_SILENT]) + tuple(
        peer.peer_id for peer in measured
        if holds_rounds_up(peer.upload, median, {**peer.round_seconds, "train": train_s}, peer.peer_id in before)
    )


def usual_upload(peers: Sequence[PeerStatus]) -> float:
    """Return the median upload of the trainers that measured theirs, in bytes per second; 0 if none did."""
    measured = [peer for peer in peers if peer.role == "trainer" and peer.upload > 0]
    return statistics.median(peer.upload for peer in believed_of(measured)) if measured else 0.0


def holds_rounds_up(upload: float, median_upload: float, round_seconds: Mapping[str, float], did_before: bool) -> bool:
    """Whether a line is much slower than the median, in bytes per second (0: unknown), where rounds take time worth saving."""
    eased, train_s = STILL_SLOW if did_before else 1.0, round_seconds.get("train", 0.0)
    return 0 < eased * SLOW_LINE * upload < median_upload and sync_seconds(round_seconds) > eased * WAITING_SHARE * train_s


def sync_seconds(round_seconds: Mapping[str, float]) -> float:
    """Return the seconds of a round without training."""
    return sum(spent for stage, spent in round_seconds.items() if stage != "train")


def _most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {reason: int(count) for reason, count in _largest(counts).items()}


def _largest(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for mapping in counts:
        for name, value in mapping.items():
            largest[name] = max(value, largest.get(name, value))
    return largest
