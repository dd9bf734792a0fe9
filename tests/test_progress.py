"""A member that lives and does not go on costs a round little, is named in its commit, and reduces nothing for some rounds."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.messages.methods import PULL, PUSH, ROUND
from spes_p2p.net.rpc import Stream
from spes_p2p.rounds.claims import LOST_ROUNDS
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

SILENCE_S = 5.0


async def hang(stream: Stream) -> None:
    """Live, and say nothing."""
    await asyncio.sleep(10**6)


async def swallow(stream: Stream) -> None:
    """Take everything, and say nothing."""
    while await stream.receive_any() is not None:
        pass
    await asyncio.sleep(10**6)


async def swarm_at_round_2(names: str = "ABCD") -> VirtualSwarm:
    swarm = VirtualSwarm(campaign(total_steps=10**6))
    swarm.start_all(names)
    await swarm.until_round(2)
    return swarm


async def leave(stream: Stream) -> None:
    """End the stream at once, with nothing in it."""
    await stream.message()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pull", "push"), [(hang, hang), (hang, swallow), (leave, swallow)])
@pytest.mark.long
def test_a_silent_reducer_costs_some_silences_and_is_named(pull: object, push: object) -> None:
    async def main() -> None:
        swarm = await swarm_at_round_2()
        await swarm.nodes["C"].endpoint.serve(PULL, pull)  # type: ignore[arg-type]
        await swarm.nodes["C"].endpoint.serve(PUSH, push)  # type: ignore[arg-type]
        began, first = asyncio.get_running_loop().time(), swarm.round_of("A")
        await swarm.until(lambda: swarm.round_of("A") >= first + 1 + LOST_ROUNDS, 10**4)
        took_s = asyncio.get_running_loop().time() - began
        log = swarm.nodes["A"].log
        commits = map(log.commit_at, range(first, log.round))
        named = [{commit.members[i] for lost in commit.lost for i in lost} for commit in commits]
        assert {"C"} in named
        assert all(names <= {"C"} for names in named)
        assert took_s < (2 + LOST_ROUNDS) * 12 + 2 * 6 * SILENCE_S, "two rounds with a stall at most"
        swarm.assert_same_commits()

    simulate(main, 10**5)


@pytest.mark.long
def test_a_silent_contributor_is_left_out_by_the_reducers() -> None:
    async def main() -> None:
        swarm = await swarm_at_round_2()
        exchanges = swarm.peers["C"].replica.exchanges
        open_exchange = exchanges.open

        def silent(*arguments: object) -> object:
            exchange = open_exchange(*arguments)  # type: ignore[arg-type]

            async def send_nothing(stream: Stream, reducer: int) -> None:
                await asyncio.sleep(10**6)

            exchange._transfers._send_updates = send_nothing  # type: ignore[method-assign]
            return exchange

        exchanges.open = silent  # type: ignore[assignment, method-assign]
        began, first = asyncio.get_running_loop().time(), swarm.round_of("A")
        await swarm.until(lambda: swarm.round_of("A") >= first + 3, 10**4)
        assert asyncio.get_running_loop().time() - began < 3 * (12 + 6 * SILENCE_S)

    simulate(main, 10**5)


def test_a_member_with_most_of_the_work_that_never_announces_holds_up_one_round_by_as_long_again() -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 2}))
        swarm.start_all("A")
        swarm.start("B", speed=4.0)
        await swarm.until_round(3)
        node = swarm.nodes["B"]
        started = node.endpoint.stream

        def refuse_to_announce(peer: str, method: str) -> object:
            return started("nobody" if method == ROUND else peer, method)

        node.endpoint.stream = refuse_to_announce  # type: ignore[assignment, method-assign]
        began, first = asyncio.get_running_loop().time(), swarm.round_of("A")
        await swarm.until(lambda: swarm.round_of("A") >= first + 3, 10**4)
        assert asyncio.get_running_loop().time() - began < 200

    simulate(main, 10**5)
