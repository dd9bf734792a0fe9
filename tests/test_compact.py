"""Records in compact form are restored exactly, and cost what is new in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.signed import sign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import BRIEF_BYTES, Brief, Compact, compressed, expanded, restored, shortened
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.methods import ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import RoundFailed
from spes_p2p.testing.memory_state import Frame
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
async def test_a_proposal_after_another_costs_little_more_than_its_signatures() -> None:
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
    first, *later = list(sent.values())
    assert not first.known
    assert len(later) >= 2
    assert all(each.known and len(each.body) < 250 * (len(MEMBERS) + 1) < len(first.body) / 2 for each in later)


@pytest.mark.long
async def test_a_joiner_fetches_the_proposal_that_it_lacks_from_a_member() -> None:
    swarm, asked = VirtualSwarm(campaign(total_steps=80, sync={"min_peers": len(MEMBERS)})), list[str]()
    swarm.network.hook = lambda sender, method, index: asked.append(sender) if method == "plan" else None
    swarm.start_all(MEMBERS)
    await swarm.until_round(2)
    swarm.start("Z")
    await swarm.until(lambda: "Z" in swarm.peers["A"].node.log.last.members)
    await swarm.until_round(swarm.round_of("A") + 2)
    swarm, asked = swarm, asked
    swarm.assert_replicas_agree()
    assert "Z" in asked


async def test_a_proposal_that_nobody_has_is_an_error() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    unknown = Compact(Kind.PROPOSAL, "ab" * 32, compressed(b"abc", b""))
    with pytest.raises(PeerUnreachable):
        await swarm.nodes["A"].relay.received(Message(pack(unknown), Kind.COMPACT), "B")


KNOWN = bytes(range(256))
BRIEF = unpack(Brief, shortened(Kind.REPORT, 4 * KNOWN, KNOWN).body)


def test_a_brief_stands_for_its_record() -> None:
    brief = shortened(Kind.REPORT, 4 * KNOWN, KNOWN)
    assert brief.kind == Kind.BRIEF
    assert restored(brief, KNOWN) == Message(4 * KNOWN, Kind.REPORT)


@pytest.mark.parametrize("known", [b"", KNOWN[1:]], ids=["none", "another"])
def test_a_brief_is_not_restored_without_its_dictionary(known: bytes) -> None:
    assert restored(shortened(Kind.REPORT, 4 * KNOWN, KNOWN), known) is None


@pytest.mark.parametrize(("record", "known"), [
    (bytes(BRIEF_BYTES + 1), KNOWN), (bytes(BRIEF_BYTES), b""), (b"abc", KNOWN),
], ids=["too long to be read on the loop", "nothing known", "no shorter"])
def test_some_records_travel_as_they_are(record: bytes, known: bytes) -> None:
    assert shortened(Kind.REPORT, record, known) == Message(record, Kind.REPORT)


@pytest.mark.parametrize("body", [
    b"", b"garbage", compressed(bytes(BRIEF_BYTES + 1), KNOWN), compressed(b"x" * 100, KNOWN) + b"more",
], ids=["empty", "garbage", "longer than a Brief may be", "with more behind it"])
def test_what_is_no_brief_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        restored(Message(pack(replace(BRIEF, body=body)), Kind.BRIEF), KNOWN)


def test_most_of_a_signature_is_known_also_of_another_process(tmp_path: Path) -> None:
    def announced(identity: RSAIdentity, commit: bytes) -> bytes:
        return pack(sign(Brief(0, b"", commit), identity))

    first, restarted = RSAIdentity(tmp_path / "identity"), RSAIdentity(tmp_path / "identity")
    known = announced(first, b"a commit")
    again, after = (shortened(Kind.MESSAGE, announced(each, b"another"), known) for each in (first, restarted))
    assert len(again.body) < 64 + 64 < len(after.body) < len(known) - 250


Change = Callable[[Brief], Brief]


def briefs(change: Change | None = None) -> tuple[VirtualSwarm, list[Frame]]:
    """Three rounds of a swarm in which C's Briefs are changed on the way; return its frames to coordinators."""

    async def main() -> tuple[VirtualSwarm, list[Frame]]:
        swarm, sent = VirtualSwarm(campaign(total_steps=60)), list[Frame]()

        def tap(frame: Frame) -> Frame:
            if frame.method == ROUND and not frame.is_answer and frame.kind != Kind.HEARTBEAT:
                if change is not None and frame.kind == Kind.BRIEF and frame.sender == "C":
                    frame = replace(frame, body=pack(change(unpack(Brief, frame.body))))
                sent.append(frame)
            return frame

        swarm.network.tap = tap
        swarm.start_all("ABC")
        await swarm.until_round(3)
        return swarm, sent

    return simulate(main)


def test_after_the_first_round_members_announce_and_report_in_brief() -> None:
    _, sent = briefs()
    whole = [frame for frame in sent if frame.kind != Kind.BRIEF]
    assert sorted((frame.sender, frame.kind) for frame in whole) == [(name, Kind.MESSAGE) for name in "ABC"]
    assert min(len(frame.body) for frame in whole) > 900
    assert max(len(frame.body) for frame in sent if frame.kind == Kind.BRIEF) < 350


def test_a_coordinator_without_the_dictionary_asks_and_no_round_fails() -> None:
    swarm, sent = briefs(lambda brief: replace(brief, known=b""))
    kinds = [frame.kind for frame in sent if frame.sender == "C"]
    assert kinds[:8] == [Kind.MESSAGE, Kind.BRIEF, Kind.REPORT, Kind.BRIEF, Kind.MESSAGE, Kind.BRIEF, Kind.REPORT, Kind.BRIEF]
    assert not any(recorder.of(RoundFailed) for recorder in swarm.recorders.values())
    assert all("C" in commit.members for commit in swarm.recorders["A"].commits().values())
    swarm.assert_replicas_agree()


async def test_a_member_that_restarts_before_its_report_is_back_in_a_later_round_with_briefs() -> None:
    swarm, sent = VirtualSwarm(campaign(total_steps=100)), list[int]()

    def tap(frame: Frame) -> Frame:
        if (frame.sender, frame.method, frame.kind) == ("C", ROUND, Kind.BRIEF):
            sent.append(unpack(Brief, frame.body).kind)
        return frame

    swarm.network.tap = tap
    swarm.start_all("ABC")
    await swarm.until(lambda: Kind.MESSAGE in sent)
    swarm.restart("C")
    at_restart = len(sent)
    await swarm.until_round(5)
    assert {*sent[at_restart:]} == {Kind.MESSAGE, Kind.REPORT}
    assert "C" in swarm.recorders["A"].commits()[5].members
    swarm.assert_replicas_agree()


def test_a_member_whose_briefs_are_damaged_holds_up_nobody() -> None:
    swarm, _ = briefs(lambda brief: replace(brief, body=brief.body[:-1]))
    assert not any(swarm.recorders[name].of(RoundFailed) for name in "AB")


async def test_a_strangers_brief_is_not_expanded_and_keeps_no_stream_open() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    endpoint = RpcEndpoint(swarm.network.transport("X"), 5.0)
    bomb = replace(BRIEF, body=compressed(bytes(MAX_FRAME_BYTES), b""))
    async with endpoint.stream("W", ROUND) as stream:
        await stream.send(pack(bomb), kind=Kind.BRIEF)
        assert (await stream.any_message()).kind == Kind.IN_FULL
        with pytest.raises(PeerUnreachable):
            await asyncio.wait_for(stream.any_message(), 10.0)


async def test_a_brief_in_answer_to_the_wish_for_the_whole_is_refused() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    endpoint = RpcEndpoint(swarm.network.transport("X"), 5.0)
    async with endpoint.stream("W", ROUND) as stream:
        for _ in range(2):
            await stream.send(pack(BRIEF), kind=Kind.BRIEF)
        assert (await stream.any_message()).kind == Kind.IN_FULL
        with pytest.raises(Refused) as refused:
            await stream.any_message()
        assert refused.value.code is Code.MALFORMED
