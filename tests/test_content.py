"""Fetching pieces of any kind of content from several donors: what is right arrives, whatever some of the donors do."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exchange_round import LAYOUT, PART_BYTES, make_plan_of, member

from spes_p2p.content.bases import Snapshots, base_content
from spes_p2p.content.fetcher import (
    BUSY_PATIENCE_S,
    EMPTY_REQUESTS,
    LATE_BYTES_PER_S,
    LATE_SILENCES,
    Fetcher,
)
from spes_p2p.content.files import serve_files
from spes_p2p.content.pieces import Body, Content, Delivery, Piece, Source, listed, single
from spes_p2p.content.relay import Relay
from spes_p2p.content.tokens import TokenLibrary
from spes_p2p.content.transfer import (
    BUSY_RETRY_S,
    CHUNK_BYTES,
    REQUESTS_PER_PEER,
    STRANGERS_BYTES,
    ContentServer,
)
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import PIECE_BYTES, PieceHasher, root_of
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.content import PIECES_PER_REQUEST, ContentKind, PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Manifest
from spes_p2p.net.limits import limited_line
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.proofs import update_piece
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.digest import PIECE_ELEMENTS, content_digest, piece_digests
from spes_p2p.rounds.parts import to_mask
from spes_p2p.rounds.results import Results
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_state import Frame
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

    return Case(base_content("h", piece_digests(base)), pieces, serve)


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
    pieces = {update_piece(part, m): random.Random(f"{part} {m}").randbytes(2000) for part, m in places}

    class ProofsOf:
        async def serve(self, server: ContentServer) -> None:
            pass

        def body(self, name: str, piece: int) -> Body | None:
            return pieces.get(piece) if name == plan else None

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


async def test_every_piece_arrives_from_several_donors_each_asked_for_its_own(case: Case) -> None:
    place = Place(case)
    for name in "AB":
        await place.donor(name)
    assert await place.fetch("AB") == []
    assert place.arrived == case.pieces
    assert sorted(place.asked["A"] + place.asked["B"]) == sorted(case.pieces)
    if len(case.pieces) > PIECES_PER_REQUEST:
        assert all(place.asked.values()), "both of them give"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(23)
async def test_a_bad_donor_costs_time_and_never_a_piece(case: Case, fault: type[ContentServer]) -> None:
    place = Place(case)
    await place.donor("A", fault)
    await place.donor("B")
    began = now()
    assert await place.fetch("AB") == []
    assert place.arrived == case.pieces
    assert now() - began < 2 * STALLED_S


@pytest.mark.parametrize("fault", [Dying, Tarpit, Lying, CuttingShort, Flooding, Refusing])
async def test_what_a_bad_donor_gave_before_is_kept_and_it_is_asked_no_more(
    long_case: Case, fault: type[ContentServer]
) -> None:
    place = Place(long_case)
    await place.donor("A", fault)
    await place.donor("B")
    assert await place.fetch("AB") == []
    assert place.asked["A"][0] not in place.asked["B"]
    assert len(place.asked["A"]) <= PIECES_PER_REQUEST


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(23)
async def test_when_all_donors_are_bad_the_download_ends_in_bounded_time(case: Case, fault: type[ContentServer]) -> None:
    place = Place(case)
    for name in "AB":
        await place.donor(name, fault)
    began = now()
    missing = await place.fetch("ABC")
    assert missing
    assert sorted([*missing, *place.arrived]) == sorted(case.pieces)
    assert all(case.pieces[index] == body for index, body in place.arrived.items())
    assert now() - began < (BUSY_PATIENCE_S + 10 if fault is Busy else 3 * STALLED_S)


async def test_a_crowd_of_tarpits_hides_no_good_donor(tmp_path: Path) -> None:
    place = Place(record_case(tmp_path))
    for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        await place.donor(name, Tarpit if name != "Z" else ContentServer)
    began = now()
    assert await place.fetch("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == []
    assert now() - began < 26 * LATE_SILENCES * SILENCE_S


async def test_without_donors_nothing_arrives_at_once(case: Case) -> None:
    assert await Place(case).fetch("", "") == list(case.pieces)


async def test_a_download_that_was_ended_goes_on_with_what_is_missing(long_case: Case) -> None:
    place = Place(long_case)
    await place.donor("A")
    first = asyncio.ensure_future(place.fetch("A", wanted=[0, 1]))
    await first
    place.asked["A"].clear()
    rest = [index for index in long_case.pieces if index not in place.arrived]
    assert await place.fetch("A", wanted=rest) == []
    assert place.asked["A"] == rest
    assert place.arrived == long_case.pieces


async def test_pieces_are_asked_for_in_the_order_in_which_they_are_wanted(long_case: Case) -> None:
    place, wanted = Place(long_case), list(long_case.pieces)[::-1]
    await place.donor("A")
    await place.fetch("A", wanted=wanted)
    assert place.asked["A"] == wanted


async def test_what_cannot_be_kept_ends_the_download(case: Case) -> None:
    place = Place(case)
    await place.donor("A")
    fetcher = Fetcher(RpcEndpoint(place.network.transport("me"), SILENCE_S))

    async def keep(index: int, body: Body) -> None:
        raise UserError("the disk is full")

    with pytest.raises(UserError, match="disk is full"):
        await fetcher.fetch(case.content, case.pieces, [fetcher.peers("A")], keep)


# Slow, busy and partial donors -------------------------------------------------------------------------------------------


async def test_a_slow_donor_holds_up_nobody_in_the_end(tmp_path: Path) -> None:
    """It makes progress, so it is not dropped; its last pieces come from the other one, which is idle."""
    place = Place(base_case(tmp_path))
    await place.donor("A", bytes_per_s=30_000)
    await place.donor("B")
    began = now()
    assert await place.fetch("AB") == []
    assert place.arrived == place.case.pieces
    assert now() - began < STALLED_S, "A alone needs two minutes for its first request"


async def test_a_slow_donor_of_an_earlier_tier_holds_up_no_later_one(tmp_path: Path) -> None:
    place = Place(base_case(tmp_path))
    await place.donor("A", bytes_per_s=30_000)
    await place.donor("B")
    began = now()
    assert await place.fetch("A", "B") == []
    assert now() - began < STALLED_S


async def test_strangers_that_are_never_late_neither_take_the_places_of_others_nor_hold_up_the_end(tmp_path: Path) -> None:
    """All eight places, at a rate that is just not late, and then all that is left."""
    place, strangers = Place(base_case(tmp_path)), "abcdefgh"
    for name in strangers:
        await place.donor(name, bytes_per_s=1.1 * LATE_BYTES_PER_S)
    await place.donor("B")
    began = now()
    assert await place.fetch(strangers + "B", vouched="B") == []
    assert now() - began < SILENCE_S


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


async def test_a_slow_donor_that_is_the_only_one_is_used(tmp_path: Path) -> None:
    place = Place(base_case(tmp_path))
    await place.donor("A", bytes_per_s=30_000)
    assert await place.fetch("A") == []


async def test_a_donor_that_trickles_is_dropped(tmp_path: Path) -> None:
    """Something comes within every silence, but too little ever to end."""
    place = Place(base_case(tmp_path))
    await place.donor("A", bytes_per_s=500)
    began = now()
    assert await place.fetch("A") == list(place.case.pieces)
    assert now() - began < 2 * STALLED_S


async def test_a_busy_donor_is_asked_again_until_it_has_room(case: Case) -> None:
    class FreeLater(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            await super().serve(kind, source, 0)
            self._later = asyncio.ensure_future(self._serve_later(kind, source))

        async def _serve_later(self, kind: ContentKind, source: Source) -> None:
            await asyncio.sleep(10.0)
            await super().serve(kind, source)

    place = Place(case)
    await place.donor("A", FreeLater)
    assert await place.fetch("A") == []
    assert place.arrived == case.pieces
    assert 10 < now() < 10 + 2 * BUSY_RETRY_S


async def test_a_donor_with_some_of_the_pieces_gives_those(long_case: Case) -> None:
    class Some(ContentServer):
        async def serve(self, kind: ContentKind, source: Source, *options: Any) -> None:
            async def some(name: str, index: int) -> Body | None:
                return await source(name, index) if index % 3 == 0 else None

            await super().serve(kind, some, *options)

    place, third = Place(long_case), [index for index in long_case.pieces if index % 3 == 0]
    await place.donor("A", Some)
    await place.donor("B")
    assert await place.fetch("A", "B") == []
    assert place.arrived == long_case.pieces
    assert set(third).isdisjoint(place.asked["B"]), "the second tier is asked for what the first one lacks"
    assert sorted(place.asked["A"]) == sorted(long_case.pieces), "once for each piece"


async def test_a_donor_that_has_nothing_is_asked_a_few_times_only(tmp_path: Path) -> None:
    place = Place(base_case(tmp_path))
    place.case.content = listed("base", "h", bytes(32 * 10_000), 4 * PIECE_ELEMENTS)
    await place.donor("A", Empty)
    assert len(await place.fetch("A", wanted=list(range(10_000)))) == 10_000
    assert len(place.asked["A"]) == EMPTY_REQUESTS * PIECES_PER_REQUEST


async def test_a_tier_waits_until_the_one_before_is_dead_or_busy(case: Case) -> None:
    for first, is_used in ((ContentServer, False), (Dying, True), (Busy, True)):
        place = Place(case)
        await place.donor("A", first)
        await place.donor("B")
        assert await place.fetch("A", "B") == []
        assert bool(place.asked["B"]) == is_used


# Limits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "base", "tokens", "parts"])
@pytest.mark.long
async def test_a_donor_serves_a_few_peers_at_a_time_and_everybody_gets_everything(kind: str, tmp_path: Path) -> None:
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

    place = Place(CASES[kind](tmp_path))
    await place.donor("A", Counting)
    joiners = [f"joiner {number}" for number in range(3 * max(limits))]
    missing = await asyncio.gather(*(place.fetch("A", name=joiner) for joiner in joiners))
    assert not any(missing)
    assert most == limits[0]


async def test_one_peer_opens_few_requests_at_a_donor_whatever_it_downloads(tmp_path: Path) -> None:
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

    place = Place(base_case(tmp_path))
    await place.donor("A", Counting)
    fetcher = Fetcher(RpcEndpoint(place.network.transport("me"), SILENCE_S))

    async def keep(index: int, body: Body) -> None:
        pass

    downloads = (fetcher.fetch(place.case.content, range(PIECES), [fetcher.peers("A")], keep) for _ in range(5))
    assert await asyncio.gather(*downloads) == [[]] * 5
    assert most == REQUESTS_PER_PEER


async def test_a_donor_that_is_asked_no_more_is_forgotten() -> None:
    fetcher = Fetcher(RpcEndpoint(MemoryNetwork().transport("A"), SILENCE_S))
    content = listed("base", "x", bytes(32), 1)

    async def keep(index: int, got: Body) -> None:
        pass

    for number in range(100):
        assert await fetcher.fetch(content, [0], [fetcher.peers([f"gone-{number}"])], keep) == [0]
    gc.collect()
    assert not fetcher._slots


async def test_of_many_donors_only_those_that_are_asked_take_time() -> None:
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
    assert max(tasks) < 20


async def test_a_request_that_names_a_piece_twice_is_refused(case: Case) -> None:
    network = MemoryNetwork()
    endpoint, asker = (RpcEndpoint(network.transport(name), SILENCE_S) for name in "AB")
    await case.serve(endpoint, ContentServer(endpoint))
    with pytest.raises(Refused) as refused:
        await asker.ask("A", case.content.kind, pack(PiecesRequest(case.content.name, (0, 0))))
    assert refused.value.code is Code.MALFORMED


@pytest.mark.parametrize("index", [10**3, 10**12])
async def test_a_piece_that_does_not_exist_is_not_there(case: Case, index: int) -> None:
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
