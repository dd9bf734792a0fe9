"""What one vouched peer that lies can do to rounds: reducers that serve nobody, and logs without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from open_campaign import unaudited_swarm

from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.compact import compressed
from spes_p2p.messages.consensus import CommitsRequest, Decide
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import COMMITS, PING, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Pong
from spes_p2p.net.interfaces import Channel, Handler
from spes_p2p.peer.reducer import Reducer
from spes_p2p.rounds.parts import Part
from spes_p2p.testing.attacks.kinds import ATTACKS
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm

HONEST = "AB"


def reducing_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have X call all parts that it reduces absent."""
    make_sum = Reducer._make_sum

    async def make_none(self: Reducer, part: Part, own: Any) -> None:
        if self.context.names[self.context.me] != "X":
            await make_sum(self, part, own)
        else:
            self._arrived.pop(part.index, None)
            self._made.add(part.index)

    monkeypatch.setattr(Reducer, "_make_sum", make_none)


@pytest.mark.parametrize("way", ["silent", "absent"])
async def test_a_vouched_reducer_that_serves_nobody_keeps_no_part_from_the_base(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes updates and reports. Before, all that it reduced was left out of each round, and nobody was named for it."""
    swarm = unaudited_swarm(HONEST + "X", "Y", seconds_per_step=2.0)
    if way == "silent":
        swarm.around["X"] = lambda world: ATTACKS["silent"].around(Liar(world, swarm.campaign.config))
    else:
        reducing_nothing(monkeypatch)
    swarm.start_all(HONEST + "XY")
    await swarm.until(lambda: min(map(swarm.round_of, HONEST)) >= 8)
    commits = [each.commit for each in swarm.nodes["A"].log.since(0)]
    assert [commit.dropped for commit in commits] == [()] * len(commits)
    lost = [{commit.members[i] for named in commit.lost for i in named} for commit in commits]
    assert [names for names in lost if names] == [{"X"}] * 2, "it reduces nothing for three rounds"


class Endless(Tamper):
    """Refuses all members as too late, and shows them a commit that nobody signed, all known ones, and so on without end."""

    def __init__(self, swarm: VirtualSwarm):
        self._swarm = swarm
        self.has_begun = False

    def handler(self, method: str, honest: Handler) -> Handler:
        if method not in (ROUND, COMMITS):
            return honest

        async def serve(channel: Channel) -> None:
            if not self.has_begun:
                await honest(channel)
                return
            message = await channel.receive()
            if method == ROUND:
                await channel.send(pack(Refused(Code.BEHIND, "decided", round=10**6).refusal), kind=Kind.REFUSAL)
            else:
                assert message is not None
                await asyncio.sleep(1.0)
                page = pack(Decide(tuple(self._page(unpack(CommitsRequest, message.body).after))))
                await channel.send(compressed(page))
            await channel.finish()
            while await channel.receive() is not None:
                pass

        return serve

    def _page(self, after: int) -> Iterator[Any]:
        log = self._swarm.nodes["X"].log
        if after < log.round:
            yield log.since(after)[0]
        else:
            last = log.since(log.round - 1)[0]
            yield replace(last, commit=replace(last.commit, round=after + 1, parent=log.last.id))

    async def send(self, frame: Frame) -> Frame:
        """Claim a far round."""
        if self.has_begun and frame.method == PING and frame.is_answer:
            return changed(frame, Pong, lambda pong: replace(pong, round=10**6))
        return frame


@pytest.mark.long
async def test_a_vouched_peer_whose_log_has_no_end_stops_no_rounds() -> None:
    """Before, there was no round for as long as it went on."""
    swarm = unaudited_swarm("ABCX", "Y", seconds_per_step=2.0)
    endless = Endless(swarm)
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), endless)
    swarm.start_all("ABCXY")
    await swarm.until_round(3)
    endless.has_begun = True
    clock, began, longest = asyncio.get_running_loop().time, 0.0, 0.0
    for number in range(4, 14):
        began = clock()
        await swarm.until(lambda number=number: swarm.round_of("A") >= number)  # type: ignore[misc]
        longest = max(longest, clock() - began)
    assert longest < 120.0
