"""Answers of a swarm of any size, as its peers would give them: for what must hold 64 peers and 128 experts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from spes_p2p.messages.presence import Contribution, PeerStatus, RoundRecord
from spes_p2p.observe.rounds import Totals, totals_of

STAGES = ("train", "announce", "exchange", "commit", "apply")


@dataclass(frozen=True)
class Synthetic:
    """What a client of the swarm receives."""

    statuses: list[PeerStatus]
    records: list[RoundRecord]
    by_peer: dict[str, tuple[RoundRecord, ...]]
    totals: Totals
    now: float


def synthetic_swarm(peers: int, experts: int, rounds: int, total_rounds: int = 400, seed: int = 0) -> Synthetic:
    """A swarm in the middle of a phase after `rounds` rounds; the last trainer is a little slower than the others."""
    rng, now = random.Random(seed), 1_700_000_000.0
    ids = [f"Qm{''.join(rng.choices('abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ123456789', k=44))}" for _ in range(peers)]
    helper = "Qm" + "h" * 44
    owners = tuple((ids[expert * peers // experts] if peers <= experts else ids[expert],) for expert in range(experts))
    speeds = {peer: rng.uniform(9_000, 15_000) * (0.6 if peer == ids[-1] else 1.0) for peer in ids}
    records = [
        replace(_record(number, ids[0], now, rounds, peers, rng), contributions=tuple(
            Contribution(peer, 163_840 if number else 0, 20 * max(1, experts // peers)) for peer in ids
        ))
        for number in range(rounds + 1)
    ]
    by_peer = {peer: tuple(_as_told_by(peer, record, speeds[peer], rng) for record in records[-9:]) for peer in ids}
    statuses = [_status(peer, by_peer[peer][-1], owners, speeds[peer], total_rounds, rng, (helper, *ids[:6])) for peer in ids]
    server = replace(statuses[0], peer_id=helper, role="helper", stage="waiting", members=(), owned=(),
                     round_seconds={}, round_sent_bytes=0, round_received_bytes=0, tokens_per_second=0.0,
                     local_loss=math.nan, uptime_s=80_000.0)
    return Synthetic([*statuses, server], records, by_peer, totals_of(records), now)


def _record(number: int, teller: str, now: float, rounds: int, peers: int, rng: random.Random) -> RoundRecord:
    loss = 2.3 + 7.8 / (1 + number / 9) ** 0.7 + rng.gauss(0, 0.02)
    return RoundRecord(
        round=number, campaign_step=20 * number, tokens=163_840 * peers if number else 0, total_tokens=163_840 * peers * number,
        loss=loss if number else math.nan, validation_loss=loss + 0.06 if number % 5 == 0 else math.nan,
        learning_rate=3e-4, merge_alpha=max(0.0, 0.1 * (1 - number / 100)), members=peers, base_digest=f"{number:064x}",
        dropped_parts=0, teller=teller, time=now - 9.0 - 21.0 * (rounds - number) + rng.uniform(-0.5, 0.5),
        seconds=(), sent_bytes=rng.randint(70, 90) * 10**6, received_bytes=rng.randint(190, 220) * 10**6,
        failed_attempts=int(number % 37 == 36),
    )


def _as_told_by(peer: str, record: RoundRecord, speed: float, rng: random.Random) -> RoundRecord:
    train = 163_840 / speed
    spent = (train, max(0.1, 16.5 - train), rng.uniform(2, 4), 0.25, 0.4)
    return replace(record, teller=peer, time=record.time + rng.uniform(0, 0.2), seconds=tuple(zip(STAGES, spent, strict=True)))


def _status(
    peer: str, last: RoundRecord, owners: tuple[tuple[str, ...], ...], speed: float, total_rounds: int, rng: random.Random,
    electorate: tuple[str, ...],
) -> PeerStatus:
    done = min(20, int(20 * 9.0 * speed / 163_840))
    return PeerStatus(
        peer_id=peer, role="trainer", campaign="fable-1b", campaign_hash="9f2c" * 16, total_rounds=total_rounds,
        stage="training", stage_seconds=8.6, round=last.round, campaign_step=last.campaign_step, total_steps=20 * total_rounds,
        total_tokens=last.total_tokens, steps_done=done, steps_planned=20, tokens_per_second=speed, loss=last.loss,
        validation_loss=last.loss + 0.06, validation_round=last.round // 5 * 5, local_loss=last.loss + rng.gauss(0, 0.05),
        learning_rate=last.learning_rate, merge_alpha=last.merge_alpha,
        owned=tuple(expert for expert, its in enumerate(owners) if peer in its), owners=owners, members=electorate[1:],
        base_digest=last.base_digest, round_tokens=last.tokens, round_sent_bytes=last.sent_bytes,
        round_received_bytes=last.received_bytes, round_seconds=dict(last.seconds), electorate=electorate,
        seconds_left=21.0 * (total_rounds - last.round), uptime_s=rng.uniform(600, 80_000),
    )
