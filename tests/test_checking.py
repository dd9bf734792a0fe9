"""Reducers are checked: one that serves another result than its inputs give is excluded by proof, an honest one never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from spes_p2p.errors import UserError
from spes_p2p.observe.events import ResultsChecked
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.sums import make_mean
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

Lie = Callable[[Exchange, Part, dict[int, Input], bytes], bytes]
"""(The exchange, the part, its inputs, the honest result) -> what the liar serves."""


def scale(exchange: Exchange, part: Part, inputs: dict[int, Input], honest: bytes) -> bytes:
    return part.codec.encode(part.codec.decode(honest, part.size) * np.float32(1.5))


def swap(exchange: Exchange, part: Part, inputs: dict[int, Input], honest: bytes) -> bytes:
    return part.codec.encode(part.codec.decode(honest, part.size)[::-1].copy())


def drop(exchange: Exchange, part: Part, inputs: dict[int, Input], honest: bytes) -> bytes:
    """Leave a contributor out, and name it."""
    left_out = min(set(inputs) - {exchange.me})
    rest = {i: (each.update.tokens, lambda body=each.body: part.codec.decode(body, part.size))
            for i, each in inputs.items() if i != left_out}
    mean = np.empty(part.size, np.float32)
    make_mean(part, exchange.plan.members, rest, mean, False)
    return part.codec.encode(mean)


def lying(liar: str, lie: Lie, monkeypatch: pytest.MonkeyPatch, from_round: int = 2) -> list[int]:
    """Let one peer lie in all its means from a round on; returns the rounds of its lies."""
    honest, lied = Exchange._encode_mean, list[int]()

    def encode_mean(self: Exchange, part: Part, arrived: dict[int, Input]) -> bytes:
        codes = honest(self, part, arrived)
        if self._names[self.me] != liar or self.plan.round < from_round or len(arrived) < 2:
            return codes
        lied.append(self.plan.round)
        return lie(self, part, arrived, codes)

    monkeypatch.setattr(Exchange, "_encode_mean", encode_mean)
    return lied


def checked(swarm: VirtualSwarm) -> list[ResultsChecked]:
    return [event for recorder in swarm.recorders.values() for event in recorder.of(ResultsChecked)]


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4"])
@pytest.mark.parametrize("overlap", [False, True])
def test_honest_reducers_are_checked_and_nothing_is_proven(codec: str, overlap: bool) -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=80, codec=codec, sync={"overlap": overlap}))
        swarm.start_all("ABCD")
        await swarm.until_finished()
        swarm.assert_same_commits()
        found = checked(swarm)
        assert sum(each.results for each in found) > 8
        last = max(each.round for each in found)  # after it, peers leave
        assert not [each for each in found if each.wrong or (each.unanswered and each.round < last)]
        assert not swarm.nodes["W"].log.last.excluded

    simulate(main)


@pytest.mark.parametrize("lie", [scale, swap, drop])
def test_a_reducer_that_lies_is_excluded_by_proof_within_three_rounds(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=150, codec="int8"))
        lied = lying("B", lie, monkeypatch)
        swarm.start_all("ACD")
        swarm.start("B", bandwidth=4.0)  # it reduces
        life, node = swarm.tasks["B"], swarm.nodes["W"]
        await swarm.until(lambda: "B" in node.log.last.excluded)
        commit = node.log.last
        assert lied
        assert commit.round - min(lied) <= 3
        assert commit.excluded == ("B",)
        assert "B" not in {*commit.members, *commit.electorate}
        assert all(commit.owners)
        await asyncio.wait({life}, timeout=200)
        with pytest.raises(UserError, match="proven wrong"):
            life.result()
        for held in (swarm.tasks, swarm.peers, swarm.nodes):
            held.pop("B")
        await swarm.until_finished()
        swarm.assert_same_commits()
        swarm.assert_replicas_agree()
        assert {peer for each in checked(swarm) for peer in each.wrong} == {"B"}

    simulate(main)
