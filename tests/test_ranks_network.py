"""A peer with two ranks as processes: it takes part like any other, and its processes live and die together.

It starts again with layers divided among them or not, whatever it was before.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from network_swarm import LocalPeer, LocalPeers, write_variant

pytestmark = pytest.mark.network

START_S = 120.0


def followers(peer: LocalPeer) -> list[psutil.Process]:
    return [child for child in peer.children() if any("spawn_main" in part for part in child.cmdline())]


def is_member_since(peer: LocalPeer, number: int) -> bool:
    """Whether this peer's work is in a round from this one on."""
    return any(peer.peer_id in commit.members for committed, commit in peer.commits.items() if committed >= number)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_are_one_peer_from_start_to_end(overlap: bool, campaign: Path, tmp_path: Path) -> None:
    config = write_variant(
        campaign, "ranks.yaml", training={"total_steps": 400_000, "sync_steps": 20}, sync={"min_peers": 2, "overlap": overlap},
        merge={"merge_interval": 40},
    )
    divided = ("--devices", "cpu,cpu", "--sharding", "--checkpoint-minutes", "0.02")
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        two = swarm.join("peer-0", address, *divided)
        swarm.join("peer-1", address)
        swarm.wait(lambda: is_member_since(two, 1), START_S, "the peer with two ranks is a member of a round")
        assert all(len(found) == 1 for found in swarm.digests().values())
        assert "micro-batch" in two.log
        assert "on each of 2 devices" in two.log
        assert "layers divided among them" in two.log

        last = swarm.newest_round() + 1
        (follower,) = followers(two)
        follower.kill()
        swarm.wait(lambda: not two.is_running, 60, "the peer ends")
        assert two.process.returncode == 1
        assert "--devices: rank 1 (cpu) ended: killed by signal 9; this peer stops" in two.log.strip().splitlines()[-1]

        two = swarm.join("peer-0", address, "--devices", "cpu,cpu")
        swarm.wait(lambda: is_member_since(two, last), START_S, "it is a member again")
        swarm.kill("peer-0")  # checks that its processes end with it
        last = swarm.newest_round() + 1
        two = swarm.join("peer-0", address, *divided)
        swarm.wait(lambda: is_member_since(two, last), START_S, "it is a member again")
        assert len(followers(two)) == 1
        assert swarm.terminate("peer-0") == 0
        assert all(len(found) == 1 for found in swarm.digests().values())
