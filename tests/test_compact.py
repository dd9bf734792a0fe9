"""Records in compact form are restored exactly, and cost what is new in them."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import Compact, compressed, expanded
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.methods import ROUND
from spes_p2p.testing.memory_network import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

MEMBERS = "ABCDEFGHIJKL"


@given(st.binary(max_size=500), st.binary(max_size=500))
def test_a_record_is_restored_exactly(record: bytes, known: bytes) -> None:
    assert expanded(compressed(record, known), known) == record


@pytest.mark.parametrize("body", [
    b"", b"garbage", zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100),
    zstandard.ZstdCompressor().compress(bytes(MAX_FRAME_BYTES + 1)), compressed(b"x" * 100, b"") + b"more",
    compressed(b"abc" * 100, b"abc" * 100),
], ids=["empty", "garbage", "without its size", "longer than a frame", "with more behind it", "another dictionary"])
def test_what_is_no_compressed_record_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        expanded(body, b"")


@pytest.mark.long
def test_a_proposal_after_another_costs_little_more_than_its_signatures() -> None:
    async def main() -> list[Compact]:
        swarm, sent = VirtualSwarm(campaign(total_steps=60, sync={"min_peers": len(MEMBERS)})), dict[str, Compact]()

        def tap(frame: Frame) -> Frame:
            if frame.method == ROUND and frame.kind == Kind.COMPACT:
                compact = unpack(Compact, frame.body)
                if compact.kind == Kind.PROPOSAL:
                    sent[compact.known] = compact
            return frame

        swarm.network.tap = tap
        swarm.start_all(MEMBERS)
        await swarm.until_round(3)
        return list(sent.values())

    first, *later = simulate(main)
    assert not first.known
    assert len(later) >= 2
    assert all(each.known and len(each.body) < 250 * (len(MEMBERS) + 1) < len(first.body) / 2 for each in later)


@pytest.mark.long
def test_a_joiner_fetches_the_proposal_that_it_lacks_from_a_member() -> None:
    async def main() -> tuple[VirtualSwarm, list[str]]:
        swarm, asked = VirtualSwarm(campaign(total_steps=80, sync={"min_peers": len(MEMBERS)})), list[str]()
        swarm.network.hook = lambda sender, method, index: asked.append(sender) if method == "plan" else None
        swarm.start_all(MEMBERS)
        await swarm.until_round(2)
        swarm.start("Z")
        await swarm.until(lambda: "Z" in swarm.peers["A"].node.log.last.members)
        await swarm.until_round(swarm.round_of("A") + 2)
        return swarm, asked

    swarm, asked = simulate(main)
    swarm.assert_replicas_agree()
    assert "Z" in asked


def test_a_proposal_that_nobody_has_is_an_error() -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=60))
        swarm.start_all("ABC")
        await swarm.until_round(1)
        unknown = Compact(Kind.PROPOSAL, "ab" * 32, compressed(b"abc", b""))
        with pytest.raises(PeerUnreachable):
            await swarm.nodes["A"].relay.received(Message(pack(unknown), Kind.COMPACT), "B")

    simulate(main)
