"""Which trainers the others wait for, and whose lines are thin."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_swarm import Synthetic, synthetic_swarm

from spes_p2p.client.dashboard.lines import lines
from spes_p2p.messages.presence import RoundRecord


def waiting(swarm: Synthetic, waits: dict[int, tuple[float, ...]]) -> dict[str, tuple[RoundRecord, ...]]:
    """Records of rounds in which each trainer waited these seconds for the others."""
    record = swarm.records[1]
    return {
        peer.peer_id: tuple(replace(record, round=number, seconds=(("train", 10.0), ("announce", waited[place])))
                            for number, waited in waits.items() if place < len(waited))
        for place, peer in enumerate(swarm.statuses[:-1])
    }


def test_who_announces_last_delays_the_round_until_the_others_were_ready() -> None:
    swarm = synthetic_swarm(3, 6, 5)
    found = lines(swarm.statuses, waiting(swarm, {1: (0.5, 2.5, 9.0), 2: (1.0, 0.0, 3.0)}))
    a, b, c = (found[peer.peer_id] for peer in swarm.statuses[:3])
    assert [each["waits_s"] for each in (a, b, c)] == [0.75, 1.25, 6.0]
    assert [each["delays_s"] for each in (a, b, c)] == [1.0, 0.5, 0.0]


def test_a_round_that_one_trainer_recorded_and_the_first_say_nothing() -> None:
    swarm = synthetic_swarm(2, 4, 5)
    found = lines(swarm.statuses, waiting(swarm, {0: (5.0, 0.0), 1: (5.0,)}))
    assert [each["delays_s"] for each in found.values()] == [None, None]


@pytest.mark.parametrize(("upload", "thin"), [(4.9e6, True), (5.1e6, False), (0.0, False)])
def test_a_line_is_thin_by_the_rule_of_the_alert(upload: float, thin: bool) -> None:
    swarm = synthetic_swarm(3, 6, 5)
    seconds = {"train": 10.0, "exchange": 3.0}
    peers = [replace(each, upload=up, round_seconds=seconds)
             for each, up in zip(swarm.statuses, (upload, 20e6, 20e6, 0.0), strict=True)]
    found = lines(peers, {})
    assert [found[each.peer_id]["thin"] for each in peers[:3]] == [thin, False, False]
    assert swarm.statuses[-1].peer_id not in found, "a helper trains nothing and delays nobody"


def test_the_rate_of_the_last_exchange_is_unknown_without_one() -> None:
    swarm = synthetic_swarm(2, 4, 5)
    peers = [replace(swarm.statuses[0], round_received_bytes=600, round_seconds={"exchange": 2.0}),
             replace(swarm.statuses[1], round_seconds={})]
    assert [each["download"] for each in lines(peers, {}).values()] == [300, None]
