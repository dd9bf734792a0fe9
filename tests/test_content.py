"""Fetching pieces of any kind of content from several donors: what is right arrives, whatever some of the donors do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from exchange_round import LAYOUT, PART_BYTES, make_plan_of, member

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.content.bases import Snapshots
from spes_p2p.content.fetcher import (
    BUSY_PATIENCE_S,
    EMPTY_REQUESTS,
    LATE_BYTES_PER_S,
    LATE_SILENCES,
    VISITORS_PATIENCE_S,
    Fetcher,
)
from spes_p2p.content.files import serve_files
from spes_p2p.content.pieces import Body, Content, Delivery, Piece, Source, from_hex, listed, single
from spes_p2p.content.relay import Relay
from spes_p2p.content.tokens import TokenLibrary
from spes_p2p.content.transfer import (
    BUSY_RETRY_S,
    CHUNK_BYTES,
    REQUESTS_PER_PEER,
    SETTLED_S,
    STRANGERS_BYTES,
    ContentServer,
    _Turns,
    _Upload,
)
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES, PieceHasher, root_of
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.content import PIECES_PER_REQUEST, ContentKind, PiecesRequest
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest
from spes_p2p.net.limits import limited_line
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream
from spes_p2p.net.shares import ANSWERS_SHARE, Shares
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.digest import PIECE_ELEMENTS, content_digest, piece_digests, root_digest
from spes_p2p.rounds.parts import to_mask
from spes_p2p.rounds.results import Results
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import Frame, MemoryNetwork
from spes_p2p.testing.simulate.swarm import simulate

SILENCE_S = 2.0
STALLED_S = STALLED_SILENCES * SILENCE_S
PIECES = 2 * PIECES_PER_REQUEST + 1
CODEC = GroupCodecs(CODECS["none"], CODECS["none"], CODECS["none"])
PLAN = make_plan_of([member("A", 10, (4, 4, 0, 2)), member("B", 10, (0, 0, 4, 0))])


@dataclass
class Case:
    """One kind of content: the right pieces, and a peer that serves them."""

    content: Content
    pieces: dict[int, bytes]
    serve: Callable[[RpcEndpoint, ContentServer], Any]


def file_case(folder: Path) -> Case:
    body = random.Random(0).randbytes(5 * CHUNK_BYTES // 2)
    sha = hashlib.sha256(body).hexdigest()
    content = single("file", sha, bytes.fromhex(sha), len(body))
    return Case(content, {0: body}, lambda endpoint, server: serve_files(server, {sha: body}))


def base_case(folder: Path) -> Case:
    base = np.random.default_rng(1).standard_normal(int(PIECE_ELEMENTS * (PIECES - 0.5)), np.float32)
    pieces = {a: base[a * PIECE_ELEMENTS : (a + 1) * PIECE_ELEMENTS].tobytes() for a in range(PIECES)}

    def serve(endpoint: RpcEndpoint, server: ContentServer) -> Any:
        snapshots = Snapshots()
        snapshots.publish("h", 3, base)
        return snapshots.serve(endpoint, server)

    return Case(listed("base", "h", piece_digests(base), 4 * PIECE_ELEMENTS), pieces, serve)


def tokens_case(folder: Path) -> Case:
    ids = np.random.default_rng(0).integers(0, 60_000, PIECES * PIECE_BYTES // 2 - 100).astype("<u2")
    path, content = folder / "train.npy", ids.tobytes()
    ids.tofile(path)
    hasher = PieceHasher()
    hasher.update(content)
    root = root_of(hasher.hashes())
    file = TokenFile(path.name, hashlib.sha256(content).hexdigest(), len(ids), "uint16", root)

    async def inline(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def serve(endpoint: RpcEndpoint, server: ContentServer) -> Any:
        shelf = TokenShelf([file], folder / "cache", {file: path})
        return TokenLibrary(shelf, Fetcher(endpoint), lambda: ((), ()), inline, random.Random(0)).serve(server)

    pieces = {a: content[a * PIECE_BYTES : (a + 1) * PIECE_BYTES] for a in range(PIECES)}
    return Case(listed("tokens", root, hasher.hashes(), PIECE_BYTES), pieces, serve)


def parts_case(folder: Path) -> Case:
    results = Results.empty(PLAN, LAYOUT, CODEC, PART_BYTES)
    for part in results.parts:
        results.put(part.index, random.Random(part.index).randbytes(part.encoded_bytes))
    for reducer in {part.reducer for part in results.parts}:
        own = results.reduced_by(reducer)
        masks = b"".join(to_mask(part.contributors, len(PLAN.members)) for part in own)
        digests = b"".join(results.digests[part.index] for part in own)
        results.add_manifest(Manifest(PLAN.id, reducer, 0, digests, masks, bytes(len(masks)), bytes(len(digests))))

    def serve(endpoint: RpcEndpoint, server: ContentServer) -> Any:
        kept = KeptResults(in_memory_world(MemoryNetwork(), "any"), lambda proposal: PLAN, LAYOUT, CODEC)
        kept.by_plan[PLAN.id] = results
        return kept.serve(server)

    content = Content("parts", PLAN.id, lambda index: Piece(results.digests[index], results.parts[index].encoded_bytes))
    return Case(content, {index: bytes(body) for index, body in results.encoded.items()}, serve)


def record_case(folder: Path) -> Case:
    record = b"plan" + bytes(range(256))
    sha = hashlib.sha256(record).hexdigest()

    def serve(endpoint: RpcEndpoint, server: ContentServer) -> Any:
        relay = Relay(endpoint, Fetcher(endpoint))
        relay.keep(record)
        return relay.serve(server)

    return Case(single("record", sha, bytes.fromhex(sha), 2**20), {0: record}, serve)


def updates_case(folder: Path) -> Case:
    """The inputs of means that are in proofs, by which other peers check them again."""
    plan, members = "9" * 64, 3
    places = [divmod(place, members) for place in range(PIECES)]
    updates = {place: random.Random(str(place)).randbytes(2000) for place in places}
    pieces = {part * MAX_MEMBERS + m: body for (part, m), body in updates.items()}

    class ProofsOf:
        async def serve(self, server: ContentServer) -> None:
            pass

        def body(self, name: str, part: int, m: int) -> Body | None:
            return updates.get((part, m)) if name == plan else None

    def serve(endpoint: RpcEndpoint, server: ContentServer) -> Any:
        node: Any = SimpleNamespace(endpoint=endpoint, content=server)
        proofs: Any = ProofsOf()
        exchanges: Any = None
        return Checking(node, exchanges, proofs, lambda event: None).serve()

    return Case(Content("updates", plan, lambda index: Piece(content_digest(pieces[index]), 2000)), pieces, serve)


CASES = {
    "file": file_case, "base": base_case, "tokens": tokens_case, "parts": parts_case, "record": record_case,
    "updates": updates_case,
}  # fmt: skip
SEVERAL = ["base", "tokens", "parts", "updates"]
"""Kinds with several pieces."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return CASES[request.param](tmp_path)


@pytest.fixture(params=SEVERAL)
def long_case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return CASES[request.param](tmp_path)


# Donors and their faults -------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Peers of one test."""

    case: Case
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(latency_s=0.01))
    asked: dict[str, list[int]] = field(default_factory=dict)
    """Pieces that each donor was asked for, in order."""
    arrived: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def note(frame: Frame) -> Frame:
            if frame.method == self.case.content.kind and not frame.is_answer and frame.kind == Kind.MESSAGE:
                self.asked.setdefault(frame.receiver, []).extend(unpack(PiecesRequest, frame.body).pieces)
            return frame

        self.network.tap = note

    async def donor(self, name: str, server: type[ContentServer] = ContentServer, bytes_per_s: float | None = None) -> None:
        line = limited_line(None if bytes_per_s is None else 8 * bytes_per_s, None)
        endpoint = RpcEndpoint(self.network.transport(name), SILENCE_S, line)
        made = server(endpoint)
        if isinstance(made, Faulty):
            made.network, made.name = self.network, name
        self.asked[name] = []
        await self.case.serve(endpoint, made)

    async def fetch(
        self, *tiers: str, wanted: list[int] | None = None, name: str = "me", vouched: str | None = None
    ) -> list[int]:
        """Each tier is a string of one-letter names; returns what did not arrive. `vouched`: for whom the owner vouches."""
        endpoint = RpcEndpoint(self.network.transport(name), SILENCE_S)
        if vouched is not None:
            endpoint.shares.is_trusted = lambda peer: peer in vouched
        fetcher = Fetcher(endpoint)

        async def keep(index: int, body: Body) -> None:
            self.arrived[index] = bytes(body)

        donors = [fetcher.peers(tier) for tier in tiers]
        return await fetcher.fetch(self.case.content, self.case.pieces if wanted is None else wanted, donors, keep)


class Faulty(ContentServer):
    """A donor that does something wrong from its second piece on; with the first one where a content has no more."""

    network: MemoryNetwork
    name: str

    async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
        served = 0

        async def faulty(name: str, index: int) -> Body | None:
            nonlocal served
            served += 1
            body = await source(name, index)
            return body if served == 1 and kind not in ("file", "record") else await self.spoil(body)

        await super().serve(kind, faulty, *options)

    async def spoil(self, body: Body | None) -> Body | None:
        raise NotImplementedError


class Dying(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        await asyncio.sleep(0.1)  # what it gave before arrives
        self.network.kill(self.name)
        return body


class Silent(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        self.network.pause(self.name)
        return body


class Tarpit(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        await asyncio.sleep(1e6)
        return body


class Lying(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        assert body is not None
        return bytes(body)[:-1] + bytes([bytes(body)[-1] ^ 1])


class CuttingShort(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        assert body is not None
        return bytes(body)[:-1]


class Flooding(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        return bytes(2**21)


class Refusing(Faulty):
    async def spoil(self, body: Body | None) -> Body | None:
        raise Refused(Code.OTHER, "it changed its mind")


class Empty(ContentServer):
    async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
        async def nothing(name: str, index: int) -> None:
            return None

        await super().serve(kind, nothing, *options)


class Busy(ContentServer):
    async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
        await super().serve(kind, source, 0)


FAULTS = [Dying, Silent, Tarpit, Lying, CuttingShort, Flooding, Refusing, Empty, Busy]


def now() -> float:
    return asyncio.get_running_loop().time()


# What arrives ------------------------------------------------------------------------------------------------------------


def test_every_piece_arrives_from_several_donors_each_asked_for_its_own(case: Case) -> None:
    async def main() -> None:
        place = Place(case)
        for name in "AB":
            await place.donor(name)
        assert await place.fetch("AB") == []
        assert place.arrived == case.pieces
        assert sorted(place.asked["A"] + place.asked["B"]) == sorted(case.pieces)
        if len(case.pieces) > PIECES_PER_REQUEST:
            assert all(place.asked.values()), "both of them give"

    simulate(main)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(23)
def test_a_bad_donor_costs_time_and_never_a_piece(case: Case, fault: type[ContentServer]) -> None:
    async def main() -> None:
        place = Place(case)
        await place.donor("A", fault)
        await place.donor("B")
        began = now()
        assert await place.fetch("AB") == []
        assert place.arrived == case.pieces
        assert now() - began < 2 * STALLED_S

    simulate(main)


@pytest.mark.parametrize("fault", [Dying, Tarpit, Lying, CuttingShort, Flooding, Refusing])
def test_what_a_bad_donor_gave_before_is_kept_and_it_is_asked_no_more(long_case: Case, fault: type[ContentServer]) -> None:
    async def main() -> None:
        place = Place(long_case)
        await place.donor("A", fault)
        await place.donor("B")
        assert await place.fetch("AB") == []
        assert place.asked["A"][0] not in place.asked["B"]
        assert len(place.asked["A"]) <= PIECES_PER_REQUEST

    simulate(main)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(23)
def test_when_all_donors_are_bad_the_download_ends_in_bounded_time(case: Case, fault: type[ContentServer]) -> None:
    async def main() -> None:
        place = Place(case)
        for name in "AB":
            await place.donor(name, fault)
        began = now()
        missing = await place.fetch("ABC")
        assert missing
        assert sorted([*missing, *place.arrived]) == sorted(case.pieces)
        assert all(case.pieces[index] == body for index, body in place.arrived.items())
        assert now() - began < (BUSY_PATIENCE_S + 10 if fault is Busy else 3 * STALLED_S)

    simulate(main)


def test_a_crowd_of_tarpits_hides_no_good_donor(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(record_case(tmp_path))
        for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            await place.donor(name, Tarpit if name != "Z" else ContentServer)
        began = now()
        assert await place.fetch("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == []
        assert now() - began < 26 * LATE_SILENCES * SILENCE_S

    simulate(main)


def test_without_donors_nothing_arrives_at_once(case: Case) -> None:
    async def main() -> None:
        assert await Place(case).fetch("", "") == list(case.pieces)

    simulate(main)


def test_a_download_that_was_ended_goes_on_with_what_is_missing(long_case: Case) -> None:
    async def main() -> None:
        place = Place(long_case)
        await place.donor("A")
        first = asyncio.ensure_future(place.fetch("A", wanted=[0, 1]))
        await first
        place.asked["A"].clear()
        rest = [index for index in long_case.pieces if index not in place.arrived]
        assert await place.fetch("A", wanted=rest) == []
        assert place.asked["A"] == rest
        assert place.arrived == long_case.pieces

    simulate(main)


def test_pieces_are_asked_for_in_the_order_in_which_they_are_wanted(long_case: Case) -> None:
    async def main() -> None:
        place, wanted = Place(long_case), list(long_case.pieces)[::-1]
        await place.donor("A")
        await place.fetch("A", wanted=wanted)
        assert place.asked["A"] == wanted

    simulate(main)


def test_what_cannot_be_kept_ends_the_download(case: Case) -> None:
    async def main() -> None:
        place = Place(case)
        await place.donor("A")
        fetcher = Fetcher(RpcEndpoint(place.network.transport("me"), SILENCE_S))

        async def keep(index: int, body: Body) -> None:
            raise UserError("the disk is full")

        with pytest.raises(UserError, match="disk is full"):
            await fetcher.fetch(case.content, case.pieces, [fetcher.peers("A")], keep)

    simulate(main)


# Slow, busy and partial donors -------------------------------------------------------------------------------------------


def test_a_slow_donor_holds_up_nobody_in_the_end(tmp_path: Path) -> None:
    """It makes progress, so it is not dropped; its last pieces come from the other one, which is idle."""

    async def main() -> None:
        place = Place(base_case(tmp_path))
        await place.donor("A", bytes_per_s=30_000)
        await place.donor("B")
        began = now()
        assert await place.fetch("AB") == []
        assert place.arrived == place.case.pieces
        assert now() - began < STALLED_S, "A alone needs two minutes for its first request"

    simulate(main)


def test_a_slow_donor_of_an_earlier_tier_holds_up_no_later_one(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(base_case(tmp_path))
        await place.donor("A", bytes_per_s=30_000)
        await place.donor("B")
        began = now()
        assert await place.fetch("A", "B") == []
        assert now() - began < STALLED_S

    simulate(main)


def test_strangers_that_are_never_late_neither_take_the_places_of_others_nor_hold_up_the_end(tmp_path: Path) -> None:
    """All eight places, at a rate that is just not late, and then all that is left."""

    async def main() -> None:
        place, strangers = Place(base_case(tmp_path)), "abcdefgh"
        for name in strangers:
            await place.donor(name, bytes_per_s=1.1 * LATE_BYTES_PER_S)
        await place.donor("B")
        began = now()
        assert await place.fetch(strangers + "B", vouched="B") == []
        assert now() - began < SILENCE_S

    simulate(main)


@dataclass
class Steady:
    """A donor that gives its first batch at one rate, and all others at another one."""

    name: str
    bytes_per_s: float
    then_bytes_per_s: float
    body: bytes
    given: int = 0
    patience_s: float | None = None

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        for index in indices:
            rate = self.bytes_per_s if self.given < PIECES_PER_REQUEST else self.then_bytes_per_s
            for start in range(0, len(self.body), STRANGERS_BYTES):
                chunk = self.body[start : start + STRANGERS_BYTES]
                await asyncio.sleep(len(chunk) / rate)
                delivery.count(len(chunk))
            self.given += 1
            await delivery.put(index, self.body)


def fetch_from(rates: Sequence[tuple[float, float]], pieces: int = 384) -> tuple[float, float]:
    """Download from donors of these rates at first, and then; return the seconds taken, and how often a piece was given."""

    async def main() -> tuple[float, float]:
        body = bytes(4 * CHUNK_BYTES)
        donors = [Steady(f"D{number}", *both, body) for number, both in enumerate(rates)]
        fetcher = Fetcher(RpcEndpoint(MemoryNetwork().transport("me"), SILENCE_S))

        async def keep(index: int, got: Body) -> None:
            pass

        content = listed("base", "x", content_digest(body) * pieces, len(body))
        assert not await fetcher.fetch(content, range(pieces), [donors], keep)
        return now(), sum(donor.given for donor in donors) / pieces

    return simulate(main)


SLOW = [(rate, rate) for rate in (2e5, 3e5, 3e5, 4e5, 5e5, 5e5, 6e5)]


@pytest.mark.parametrize("then", [1e4, 1.1 * LATE_BYTES_PER_S])
def test_a_donor_that_was_fast_once_makes_others_repeat_nothing_for_each_other(then: float) -> None:
    quiet_s, _ = fetch_from(SLOW)
    took_s, repeated = fetch_from([*SLOW, (12e6, then)])
    assert took_s < 1.05 * quiet_s
    assert repeated < 1.05


def test_donors_that_are_just_not_late_do_not_hold_up_the_end() -> None:
    fast, slow = (4e6, 4e6), (1.1 * LATE_BYTES_PER_S, 1.1 * LATE_BYTES_PER_S)
    quiet_s, _ = fetch_from([fast] * 3)
    took_s, repeated = fetch_from([*[fast] * 3, *[slow] * 8])
    assert took_s < 1.1 * quiet_s
    assert repeated < 1.1


def test_a_fast_donor_repeats_little_for_slow_ones_and_only_at_the_end() -> None:
    took_s, repeated = fetch_from([(12e6, 12e6), *SLOW])
    assert took_s < 1.1 * 384 * 4 * CHUNK_BYTES / (12e6 + sum(rate for rate, _ in SLOW))
    assert repeated < 1.1


def test_a_slow_donor_that_is_the_only_one_is_used(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(base_case(tmp_path))
        await place.donor("A", bytes_per_s=30_000)
        assert await place.fetch("A") == []

    simulate(main)


def test_a_donor_that_trickles_is_dropped(tmp_path: Path) -> None:
    """Something comes within every silence, but too little ever to end."""

    async def main() -> None:
        place = Place(base_case(tmp_path))
        await place.donor("A", bytes_per_s=500)
        began = now()
        assert await place.fetch("A") == list(place.case.pieces)
        assert now() - began < 2 * STALLED_S

    simulate(main)


def test_a_busy_donor_is_asked_again_until_it_has_room(case: Case) -> None:
    class FreeLater(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            await super().serve(kind, source, 0)
            self._later = asyncio.ensure_future(self._serve_later(kind, source))

        async def _serve_later(self, kind: ContentKind, source: Source) -> None:
            await asyncio.sleep(10.0)
            await super().serve(kind, source)

    async def main() -> None:
        place = Place(case)
        await place.donor("A", FreeLater)
        assert await place.fetch("A") == []
        assert place.arrived == case.pieces
        assert 10 < now() < 10 + 2 * BUSY_RETRY_S

    simulate(main)


def test_a_donor_with_some_of_the_pieces_gives_those(long_case: Case) -> None:
    class Some(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            async def some(name: str, index: int) -> Body | None:
                return await source(name, index) if index % 3 == 0 else None

            await super().serve(kind, some, *options)

    async def main() -> None:
        place, third = Place(long_case), [index for index in long_case.pieces if index % 3 == 0]
        await place.donor("A", Some)
        await place.donor("B")
        assert await place.fetch("A", "B") == []
        assert place.arrived == long_case.pieces
        assert set(third).isdisjoint(place.asked["B"]), "the second tier is asked for what the first one lacks"
        assert sorted(place.asked["A"]) == sorted(long_case.pieces), "once for each piece"

    simulate(main)


def test_a_donor_that_has_nothing_is_asked_a_few_times_only(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(base_case(tmp_path))
        place.case.content = listed("base", "h", bytes(32 * 10_000), 4 * PIECE_ELEMENTS)
        await place.donor("A", Empty)
        assert len(await place.fetch("A", wanted=list(range(10_000)))) == 10_000
        assert len(place.asked["A"]) == EMPTY_REQUESTS * PIECES_PER_REQUEST

    simulate(main)


def test_a_tier_waits_until_the_one_before_is_dead_or_busy(case: Case) -> None:
    async def main() -> None:
        for first, is_used in ((ContentServer, False), (Dying, True), (Busy, True)):
            place = Place(case)
            await place.donor("A", first)
            await place.donor("B")
            assert await place.fetch("A", "B") == []
            assert bool(place.asked["B"]) == is_used

    simulate(main)


# Limits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "base", "tokens", "parts"])
@pytest.mark.long
def test_a_donor_serves_a_few_peers_at_a_time_and_everybody_gets_everything(kind: str, tmp_path: Path) -> None:
    most = 0
    limits: list[int] = []

    class Counting(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            async def counted(name: str, index: int) -> Body | None:
                nonlocal most
                most = max(most, self.uploads(kind))
                await asyncio.sleep(0.1)
                return await source(name, index)

            limits.append(options[0])
            await super().serve(kind, counted, *options)

    async def main() -> None:
        place = Place(CASES[kind](tmp_path))
        await place.donor("A", Counting)
        joiners = [f"joiner {number}" for number in range(3 * max(limits))]
        missing = await asyncio.gather(*(place.fetch("A", name=joiner) for joiner in joiners))
        assert not any(missing)
        assert most == limits[0]

    simulate(main)


def test_one_peer_opens_few_requests_at_a_donor_whatever_it_downloads(tmp_path: Path) -> None:
    at_once = most = 0

    class Counting(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            async def counted(name: str, index: int) -> Body | None:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await asyncio.sleep(0.1)
                at_once -= 1
                return await source(name, index)

            await super().serve(kind, counted)

    async def main() -> None:
        place = Place(base_case(tmp_path))
        await place.donor("A", Counting)
        fetcher = Fetcher(RpcEndpoint(place.network.transport("me"), SILENCE_S))

        async def keep(index: int, body: Body) -> None:
            pass

        downloads = (fetcher.fetch(place.case.content, range(PIECES), [fetcher.peers("A")], keep) for _ in range(5))
        assert await asyncio.gather(*downloads) == [[]] * 5
        assert most == REQUESTS_PER_PEER

    simulate(main)


def test_a_donor_that_is_asked_no_more_is_forgotten() -> None:
    async def main() -> int:
        fetcher = Fetcher(RpcEndpoint(MemoryNetwork().transport("A"), SILENCE_S))
        content = listed("base", "x", bytes(32), 1)

        async def keep(index: int, got: Body) -> None:
            pass

        for number in range(100):
            assert await fetcher.fetch(content, [0], [fetcher.peers([f"gone-{number}"])], keep) == [0]
        gc.collect()
        return len(fetcher._slots)

    assert simulate(main) == 0


def test_a_peer_that_takes_nothing_frees_its_place() -> None:
    async def main() -> None:
        network, body = MemoryNetwork(latency_s=0.01), bytes(200 * CHUNK_BYTES)
        donor, taker = (RpcEndpoint(network.transport(name), SILENCE_S) for name in ("A", "me"))
        server, sha = ContentServer(donor), hashlib.sha256(body).hexdigest()
        await serve_files(server, {sha: body})
        async with taker.stream("A", "file") as stream:
            await stream.send(pack(PiecesRequest(sha, (0,))))
            await asyncio.sleep(STALLED_S / 2)
            assert server.uploads("file") == 1
            await asyncio.sleep(STALLED_S)
            assert server.uploads("file") == 0

    simulate(main)


def test_of_many_donors_only_those_that_are_asked_take_time() -> None:
    async def main() -> int:
        tasks, body, donors = list[int](), b"piece", 200

        class Counted:
            patience_s = None

            def __init__(self, name: str):
                self.name = name

            async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
                for index in indices:
                    await asyncio.sleep(0.1)
                    tasks.append(len(asyncio.all_tasks()))
                    await delivery.put(index, body)

        async def keep(index: int, got: Body) -> None:
            pass

        fetcher = Fetcher(RpcEndpoint(MemoryNetwork().transport("A"), SILENCE_S))
        content = listed("base", "x", content_digest(body) * PIECES, len(body))
        assert not await fetcher.fetch(content, range(PIECES), [[Counted(f"D{number}") for number in range(donors)]], keep)
        return max(tasks)

    assert simulate(main) < 20


@pytest.mark.parametrize("fast", [0, 1], ids=["all slow", "one fast"])
def test_peers_that_take_a_little_at_a_time_keep_nobody_out(fast: int) -> None:
    async def main() -> None:
        network, body = MemoryNetwork(latency_s=0.01), bytes(200 * CHUNK_BYTES)
        server = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S))

        async def source(name: str, index: int) -> Body:
            return body

        await server.serve("file", source, 4)
        names = [f"peer-{number}" for number in range(4)]
        for name in names:
            network.set_bandwidth(name, 1e9, (8 if names.index(name) < fast else 0.2) * SLOWEST_LINE_BITS / 8)

        async def download(name: str) -> None:
            async with RpcEndpoint(network.transport(name), SILENCE_S).stream("A", "file") as stream:
                await stream.send(pack(PiecesRequest("x", tuple(range(16)))))
                while await stream.receive(Kind.CONTENT) is not None:
                    pass

        taking = [asyncio.ensure_future(download(name)) for name in names]
        await asyncio.sleep(SETTLED_S / 2)
        with pytest.raises(Refused) as refused:
            await download("me")
        assert refused.value.code is Code.BUSY
        await asyncio.sleep((8 if fast else 80) * SETTLED_S)  # what waits on the way counts as sent
        await download("me")
        assert server.uploads("file") == 3
        assert not any(each.done() for each in taking[:fast])
        await end_tasks(taking)

    simulate(main)


@pytest.mark.parametrize(
    ("bytes_per_s", "late_s"), [(0.5 * SLOWEST_LINE_BITS / 8, 0.0), (1e9, SETTLED_S)], ids=["slow", "late"]
)
def test_strangers_that_download_for_ever_keep_out_nobody_whom_the_owner_vouches_for(bytes_per_s: float, late_s: float) -> None:
    async def main() -> float:
        network, body = MemoryNetwork(latency_s=0.05), bytes(4 * CHUNK_BYTES)
        donor = RpcEndpoint(network.transport("A"), 5.0)
        donor.shares.is_trusted = lambda peer: peer == "vouched"
        network.set_bandwidth("A", 8 * SLOWEST_LINE_BITS / 8, 1e9)
        network.set_bandwidth("vouched", 1e9, bytes_per_s)
        server = ContentServer(donor)

        async def source(name: str, index: int) -> Body | None:
            return body

        await server.serve("base", source, 4)
        content, got = listed("base", "x", content_digest(body) * 10**4, len(body)), list[int]()

        async def download(name: str, after_s: float, got: list[int]) -> None:
            await asyncio.sleep(after_s)
            fetcher = Fetcher(RpcEndpoint(network.transport(name), 5.0), VISITORS_PATIENCE_S)

            async def keep(index: int, body: Body) -> None:
                got.append(len(body))

            await fetcher.fetch(content, range(10**4), [fetcher.peers(["A"])], keep)

        strangers = [asyncio.ensure_future(download(f"stranger-{number}", 1.0, [])) for number in range(8)]
        vouched = asyncio.ensure_future(download("vouched", late_s, got))
        await asyncio.sleep(300.0)
        await end_tasks([vouched, *strangers])
        return sum(got) / 300.0

    assert simulate(main) > 0.4 * SLOWEST_LINE_BITS / 8


class Exchanging:
    """A donor A in an endless exchange, whose line carries `bytes_per_s`, and a content of pieces of one size."""

    def __init__(self, bytes_per_s: float, piece_bytes: int, known: str = ""):
        self.network, self.body = MemoryNetwork(latency_s=0.05), bytes(piece_bytes)
        self.network.set_bandwidth("A", bytes_per_s, bytes_per_s)
        self.donor = RpcEndpoint(self.network.transport("A"), 5.0)
        self.donor.shares = Shares(5.0, lambda: bytes_per_s)
        self.donor.shares.is_known = lambda peer: peer in ("vouched", known)
        self.donor.shares.is_trusted = lambda peer: peer == "vouched"
        self.content = listed("base", "x", content_digest(self.body) * 10**4, piece_bytes)

    async def serve(self, enough: float = math.inf) -> None:
        server = ContentServer(self.donor)
        server.is_exchanging = lambda: True
        server.paced = {"base": ANSWERS_SHARE}

        async def source(name: str, index: int) -> Body | None:
            return self.body

        await server.serve("base", source, 4, lambda: enough)

    async def download(self, name: str, pieces: int) -> float:
        """How long it takes."""
        fetcher, clock = Fetcher(RpcEndpoint(self.network.transport(name), 5.0)), asyncio.get_running_loop().time
        began = clock()

        async def keep(index: int, got: Body) -> None:
            pass

        assert not await fetcher.fetch(self.content, range(pieces), [fetcher.peers(["A"])], keep)
        return clock() - began

    def strangers(self, count: int = 4, known: str = "") -> list[asyncio.Task[float]]:
        """Strangers that download for ever."""
        names = [known or f"stranger-{number}" for number in range(count)]
        return [asyncio.create_task(self.download(name, 10**4)) for name in names]


@pytest.mark.parametrize("known", ["", "member"])
@pytest.mark.parametrize("piece_bytes", [4 * CHUNK_BYTES, 2**26], ids=["pieces", "one large piece"])
def test_downloads_of_strangers_take_a_tenth_of_the_line_during_an_exchange_and_no_places_of_others(
    piece_bytes: int, known: str
) -> None:
    async def main() -> None:
        case = Exchanging(4e6, piece_bytes, known)
        await case.serve()
        strangers = case.strangers(2 if known else 8, known)
        await asyncio.sleep(20.0)
        assert 0.3e6 < case.donor.sent["base"] / 20.0 < 0.45e6
        assert await case.download("vouched", 1) < 1.3 * (piece_bytes / 4e6 + 0.2)
        await end_tasks(strangers)

    simulate(main)


@pytest.mark.parametrize("bytes_per_s", [4e6, SLOWEST_LINE_BITS / 8])
def test_a_newcomer_gives_up_no_donor_for_whose_turns_it_waits_behind_other_strangers(bytes_per_s: float) -> None:
    async def main() -> float:
        case = Exchanging(bytes_per_s, 4 * CHUNK_BYTES)
        await case.serve()
        strangers = case.strangers(3)
        await asyncio.sleep(1.0)
        took_s = await case.download("newcomer", 8)
        await end_tasks(strangers)
        return took_s * 0.1 * bytes_per_s / (8 * 4 * CHUNK_BYTES)

    assert simulate(main) < 5.0


def test_strangers_that_were_sent_a_base_make_room_for_a_newcomer() -> None:
    async def main() -> None:
        case = Exchanging(4e6, 4 * CHUNK_BYTES)
        await case.serve(enough=16 * 4 * CHUNK_BYTES)
        strangers = case.strangers(4)
        await asyncio.sleep(1.0)
        assert await case.download("newcomer", 16) < 1.2 * (4 + 4) * 16 * 4 * CHUNK_BYTES / 0.4e6
        await end_tasks(strangers)

    simulate(main)


@pytest.mark.parametrize("kind", ["file", "base_hashes"])
def test_who_reads_the_same_again_and_again_makes_room_for_a_newcomer(kind: ContentKind) -> None:
    body = random.Random(0).randbytes(2**20)

    async def main() -> None:
        network, clock = MemoryNetwork(latency_s=0.05), asyncio.get_running_loop().time
        network.set_bandwidth("A", 4e6, 4e6)
        donor, snapshots = RpcEndpoint(network.transport("A"), SILENCE_S), Snapshots()
        donor.shares.is_known = donor.shares.is_trusted = lambda peer: False
        server, sha = ContentServer(donor), hashlib.sha256(body).hexdigest()
        await serve_files(server, {sha: body})
        await snapshots.serve(donor, server)
        snapshots.publish("h", 3, np.zeros(8, np.float32), body)
        name, digest = (sha, bytes.fromhex(sha)) if kind == "file" else ("h", from_hex(root_digest(body)))
        content = single(kind, name, digest, len(body))

        async def read(peer: str) -> float:
            fetcher, began = Fetcher(RpcEndpoint(network.transport(peer), SILENCE_S)), clock()
            await fetcher.fetch_single(content, [fetcher.peers(["A"])])
            return clock() - began

        async def read_for_ever(peer: str) -> None:
            while True:
                with contextlib.suppress(Refused, PeerUnreachable):
                    await read(peer)

        readers = [asyncio.create_task(read_for_ever(f"stranger-{number}")) for number in range(12)]
        await asyncio.sleep(5.0)
        assert await asyncio.wait_for(read("newcomer"), 60.0) < 15.0
        await end_tasks(readers)

    simulate(main)


def test_a_request_that_names_a_piece_twice_is_refused(case: Case) -> None:
    async def main() -> Code:
        network = MemoryNetwork()
        endpoint, asker = (RpcEndpoint(network.transport(name), SILENCE_S) for name in "AB")
        await case.serve(endpoint, ContentServer(endpoint))
        with pytest.raises(Refused) as refused:
            await asker.ask("A", case.content.kind, pack(PiecesRequest(case.content.name, (0, 0))))
        return refused.value.code

    assert simulate(main) is Code.MALFORMED


def test_who_asks_for_what_is_not_here_gets_no_place_before_others() -> None:
    turns, now = _Turns(), 0.0

    def ask(peer: str) -> bool:
        """Of one peer at a time; False: busy."""
        try:
            has_waited = turns.admit(peer, 1, now, lambda peer: False)
        except Refused:
            return False
        turns.uploads[peer] = _Upload(now, streams={cast(Stream, object())}, has_waited=has_waited)
        return True

    for _ in range(3):
        assert ask("liar")
        turns.give_back("liar", now)
    assert ask("served")
    assert not ask("patient")
    assert not ask("next")
    del turns.uploads["served"]
    assert ask("patient")
    turns.give_back("patient", now)
    assert not ask("next"), "whose base was replaced while it waited comes first"
    assert ask("patient")
    turns.give_back("patient", now)
    assert ask("next"), "once"


def test_a_donor_on_a_thin_line_serves_each_download_to_its_end() -> None:
    async def main() -> None:
        network, body = MemoryNetwork(latency_s=0.01), bytes(20 * CHUNK_BYTES)
        server, ended = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S)), list[str]()
        network.set_bandwidth("A", 2 * SLOWEST_LINE_BITS / 8, 1e9)

        async def source(name: str, index: int) -> Body:
            return body

        await server.serve("base", source, 4)
        content = listed("base", "x", content_digest(body), len(body))

        async def keep(index: int, got: Body) -> None:
            pass

        async def download(name: str) -> None:
            await asyncio.sleep(0.1 * int(name))
            fetcher = Fetcher(RpcEndpoint(network.transport(name), SILENCE_S))
            assert not await fetcher.fetch(content, [0], [fetcher.peers(["A"])], keep)
            ended.append(name)

        took = asyncio.get_running_loop().time()
        await asyncio.gather(*(download(str(number)) for number in range(12)))
        took = asyncio.get_running_loop().time() - took
        assert {*ended[:4]} == {"0", "1", "2", "3"}
        assert took < 1.3 * 12 * len(body) / (2 * SLOWEST_LINE_BITS / 8)

    simulate(main)


def test_downloads_are_served_in_turn_and_each_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spes_p2p.content.fetcher")

    async def main() -> None:
        network, pieces = MemoryNetwork(latency_s=0.05), 8 * PIECES_PER_REQUEST
        body = bytes(CHUNK_BYTES)
        network.set_bandwidth("A", 2 * pieces * len(body) / 30, 1e9)  # four downloads in a minute
        server = ContentServer(RpcEndpoint(network.transport("A"), SILENCE_S))

        async def source(name: str, index: int) -> Body | None:
            return body

        await server.serve("base", source, 4)
        content = listed("base", "x", content_digest(body) * pieces, len(body))
        names, ended = [f"joiner-{number:02}" for number in range(12)], dict[str, float]()

        async def download(name: str) -> None:
            await asyncio.sleep(0.1 * names.index(name))
            fetcher = Fetcher(RpcEndpoint(network.transport(name), SILENCE_S), VISITORS_PATIENCE_S)

            async def keep(index: int, body: Body) -> None:
                pass

            assert await fetcher.fetch(content, range(pieces), [fetcher.peers(["A"])], keep) == []
            ended[name] = now()

        await asyncio.gather(*map(download, names))
        groups = [[ended[name] for name in names[first : first + 4]] for first in (0, 4, 8)]
        assert max(groups[0]) < min(groups[1]) < max(groups[1]) < min(groups[2])
        assert max(groups[0]) < 0.4 * max(groups[2])

    simulate(main)
    assert "waiting for a turn to download base" in caplog.text
    assert " are being served, 7 wait before this one" in caplog.text


@pytest.mark.parametrize("index", [10**3, 10**12])
def test_a_piece_that_does_not_exist_is_not_there(case: Case, index: int) -> None:
    async def main() -> None:
        place, kind = Place(case), case.content.kind
        await place.donor("A")
        endpoint = RpcEndpoint(place.network.transport("me"), SILENCE_S)
        assert index not in case.pieces
        async with endpoint.stream("A", kind) as stream:
            await stream.send(pack(PiecesRequest(case.content.name, (index,))))
            assert await stream.message(Kind.CONTENT) == b""
        if kind == "updates":  # any plan may have updates that nobody asked for
            async with endpoint.stream("A", kind) as stream:
                await stream.send(pack(PiecesRequest("0" * 64, (0,))))
                assert await stream.message(Kind.CONTENT) == b""
            return
        with pytest.raises(Refused) as refused:
            await endpoint.ask("A", kind, pack(PiecesRequest("0" * 64, (0,))))
        assert refused.value.code is Code.NOT_HERE

    simulate(main)
