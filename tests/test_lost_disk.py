"""An elector that lost its votes does not vote until a commit lists its new disk; the swarm goes on meanwhile."""

from __future__ import annotations

import pytest

from spes_p2p.consensus.electorate import incarnations_of
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["B", "W"])
@pytest.mark.long
async def test_the_next_commit_lists_the_new_disk_and_its_elector_votes_again(lost: str) -> None:
    swarm = VirtualSwarm(campaign(total_steps=200, sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(3)
    commit = swarm.peers["A"].node.log.last
    assert set(commit.electorate) == set("ABW")
    swarm.lose_disk(lost)
    log = swarm.peers["A"].node.log
    await swarm.until(lambda: incarnations_of(log.last)[lost] != incarnations_of(commit)[lost])
    listed = log.round
    await swarm.until(lambda: log.round > listed)
    for number in range(commit.round + 1, listed + 1):
        decided = log.at(number)
        assert lost not in {vote.elector for vote in decided.votes} or incarnations_of(log.commit_at(number - 1))[lost] == (
            incarnations_of(commit)[lost]
        )
    # Now its vote is needed, and given.
    swarm.kill("A")
    await swarm.until(lambda: swarm.peers["B"].finished)
    swarm.assert_replicas_agree()


async def test_a_lone_elector_that_lost_its_disk_is_helped_by_a_reform() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60, sync={"min_peers": 1, "reform_after_s": 30.0}))
    swarm.start_all("A")
    await swarm.until_round(2)
    assert swarm.peers["A"].node.log.last.electorate == ("A",)
    swarm.lose_disk("A")
    await swarm.until(lambda: "A" in swarm.peers and swarm.round_of("A") > 0 and swarm.peers["A"].finished)
    assert swarm.peers["A"].node.log.last.term == 1
