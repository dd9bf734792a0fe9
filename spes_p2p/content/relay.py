"""Fan-out of a round's records (plan, decided commit, request for votes) over a tree of its receivers, in compact form.

The coordinator sends a record to the first FANOUT receivers, in a small round to all, and a large one to the first receiver
only. Every other one gets its hash and the name of its parent in the tree, fetches the record there, and falls back to the
coordinator. A receiver has at most FANOUT children, or FANOUT_LARGE; more of a large record, up to FANOUT, where few receivers
can be dialled.

A record is handed on piece by piece while it arrives. Each piece begins with the hash of the next one, and the hash of a record
is that of its first piece: so who hands on something else is found out by its children, not by theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import Body, Content, Piece, from_hex, single
from spes_p2p.content.transfer import ContentServer, PeerDonor
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import COMPACT_BYTES, Compact, compressed, expanded
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Passed
from spes_p2p.net.rpc import RpcEndpoint

FANOUT, FANOUT_LARGE = 8, 2
LARGE_BYTES = 2**14
"""Records above this size are large: FANOUT copies of them, one after the other, take longer than another tier. Two copies
instead of one would save some 0.1 s (docs/scaling.md), and double what the coordinator sends."""
COPIES_BYTES = 2**16
"""All receivers get a short record from the coordinator if their copies take at most so many bytes, as in rounds of some twenty
members: who asks a parent has it two or three round trips later, and holds up the round. Twice as many bytes took an upload of
1 Mbit/s so long that the next coordinator had the commit too late."""
TIER_SILENCES = 0.2
"""Wait for a parent for `silence_s`, and this share of it longer for each tier above: a member whose parent keeps the record to
itself gets it from the coordinator, and its own children should not ask there, too."""
STRANGERS_SILENCES = 0.25
"""Wait for a stranger in an open campaign for this share of `silence_s` instead: reducers wait hardly longer."""
LEAF_S = 600.0
"""A stranger whose child had to ask the coordinator for a record gets no children from it for so long."""
WAIT_SILENCES = 3.2
"""Keep a child waiting for this many times `silence_s`: the last of MAX_MEMBERS wait for 2.8."""
PIECE_BYTES, DIGEST_BYTES = 2**12, 32
"""Bytes of a record that are handed on together, and of the hash before them: a record that passes eight tiers is delayed by
eight pieces twice, not by itself."""
KEPT_RECORDS = 4
"""Bounds the records held for others: plan, request for votes and commit of the round, and one of another attempt."""
KINDS = (Kind.PROPOSAL, Kind.DECIDED, Kind.MESSAGE)
"""Kinds of the frames in whose place others may stand."""
MAX_ASKED = 4
"""Ask at most this many peers for a proposal before the coordinator, which has it."""


class Relay:
    """The last records of this peer, served to its children in the tree."""

    def __init__(self, endpoint: RpcEndpoint, fetcher: Fetcher):
        self._endpoint, self._fetcher = endpoint, fetcher
        self.proposal: Callable[[str], bytes | None] = lambda plan: None
        """Returns the bytes of a proposal that is kept here; set by the keeper, as the next one."""
        self.donors: Callable[[], Sequence[str]] = tuple
        """Returns peers that may have the last proposal."""
        self.is_stranger: Callable[[str], bool] = lambda peer: not endpoint.shares.is_trusted(peer)
        """Returns whether a peer may be one that keeps a record to itself on purpose; set by the node."""
        self._records: OrderedDict[str, list[bytes | None]] = OrderedDict()
        """By hash: the record's pieces; None: it has not arrived yet."""
        self._given: dict[str, set[tuple[str, int]]] = {}
        """By record that is held: peers that have asked for it, and for which piece."""
        self._parents: dict[str, dict[str, str]] = {}
        """By record that this peer sent as coordinator: the parent of each peer that was told one."""
        self._kept_to_themselves: dict[str, float] = {}
        """Loop time until which a parent counts as one whose children had to come here."""
        self._changed = asyncio.Event()

    def hands_on(self, peer: str) -> bool:
        """Return whether no child of this peer lately had to ask here for a record that the peer should have handed on."""
        return self._kept_to_themselves.get(peer, 0.0) <= asyncio.get_running_loop().time()

    async def serve(self, server: ContentServer) -> None:
        """Start to serve records, without a bound on peers: records are small and a member has few children."""
        server.is_due["record"] = self._is_due
        await server.serve("record", self._record)

    def keep(self, record: bytes) -> str:
        """Hold a record for other members; return its hex hash."""
        pieces = pieces_of(record)
        sha256 = hashlib.sha256(pieces[0]).hexdigest()
        self._hold(sha256, [*pieces])
        return sha256

    def _hold(self, sha256: str, pieces: list[bytes | None]) -> None:
        self._records[sha256] = pieces
        self._given.setdefault(sha256, set())
        while len(self._records) > KEPT_RECORDS:
            oldest, _ = self._records.popitem(last=False)
            del self._given[oldest]
            self._parents.pop(oldest, None)
        self._changed.set()

    def addressed(
        self, kind: Kind, record: bytes, receivers: Sequence[str], plan: str, hidden: Collection[str] = (),
        donors: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> Callable[[str], Message]:
        """Keep a coordinator's record; return what it sends to each peer: the record, or its hash and holders.

        `plan`: id of the proposal of which most receivers have the bytes. `hidden`: receivers that nobody can dial, or that
        hand on nothing; as few of them are parents as can be without more than FANOUT children of another. `donors`: whom a
        receiver that lacks this proposal asks first.
        """
        me, whole = self._endpoint.peer_id, self._compact(kind, record, plan)
        others = [peer for peer in receivers if peer != me]
        sha256, places = from_hex(self.keep(bytes(whole.body))), {peer: i for i, peer in enumerate(others)}
        count = len(self._records[sha256.hex()])
        copies, children = _fan_out(len(whole.body), len(others))

        def hidden_parents(children: int) -> int:
            return sum(peer in hidden for peer in others[: math.ceil(max(0, len(others) - copies) / children)])

        children = min(range(children, FANOUT + 1), key=hidden_parents)
        parents = self._parents.setdefault(sha256.hex(), {})

        def message_to(peer: str) -> Message:
            index = places.get(peer, 0)
            if index < copies:
                return whole
            parent = (index - copies) // children
            parents[peer] = others[parent]
            tier = _tier(parent, copies, children)
            passed = Passed(whole.kind, sha256, count, others[parent], tier, donors.get(peer, ()))
            return Message(pack(passed), Kind.PASSED)

        return message_to

    async def received(self, message: Message, coordinator: str) -> Message:
        """Return the record that the coordinator's message contains or names. Raises PeerUnreachable, Refused, WireError."""
        named: tuple[str, ...] = ()
        if message.kind == Kind.PASSED:
            passed = unpack(Passed, message.body)
            named = passed.donors
            message = Message(await self._fetch(passed, coordinator), passed.kind)
        else:
            self.keep(bytes(message.body))
        if message.kind == Kind.COMPACT:
            compact = unpack(Compact, message.body)
            known = await self._known(compact.known, named, coordinator) if compact.known else b""
            message = Message(expanded(compact.body, known), compact.kind)
        if message.kind not in KINDS:
            raise WireError(f"a frame of kind {message.kind} where a plan or a commit belongs")
        return message

    def _compact(self, kind: Kind, record: bytes, plan: str) -> Message:
        if len(record) < COMPACT_BYTES:
            return Message(record, kind)
        known = self.proposal(plan) if plan else None
        return Message(pack(Compact(kind, plan if known else "", compressed(record, known or b""))), Kind.COMPACT)

    async def _known(self, plan: str, named: Sequence[str], coordinator: str) -> bytes:
        """Return the bytes of a proposal, fetched unless they are here. `named`: asked first, but strangers after others."""
        known = self.proposal(plan)
        if known is None:
            content, is_trusted = single("plan", plan, from_hex(plan), MAX_FRAME_BYTES), self._endpoint.shares.is_trusted
            found = dict.fromkeys((*named, *self.donors()))
            donors = sorted(found, key=lambda peer: not is_trusted(peer))[:MAX_ASKED]
            tiers = [self._fetcher.peers(each) for each in (donors, [coordinator]) if each]
            known = bytes(await self._fetcher.fetch_single(content, tiers))
        return known

    async def _fetch(self, passed: Passed, coordinator: str) -> bytes:
        """Fetch from the parent, which hands on what it has so far, or else from the coordinator. Raises PeerUnreachable."""
        name = passed.sha256.hex()
        pieces = self._records.get(name)  # of an attempt that failed: children may have asked for the rest
        if pieces is None:
            pieces = []
            self._hold(name, pieces)
        pieces += [None] * (passed.pieces - len(pieces))
        found = [piece for piece in pieces if piece is not None]

        async def keep(index: int, body: Body) -> None:
            if index == len(found):
                found.append(bytes(body))
                pieces[index : index + 1] = found[index:]
                self._changed.set()

        def piece(index: int) -> Piece:
            known = index <= len(found)  # only a liar gives a later one before
            digest = (found[index - 1][:DIGEST_BYTES] if index else passed.sha256) if known else b""
            return Piece(digest, DIGEST_BYTES + PIECE_BYTES)

        silences = STRANGERS_SILENCES if self.is_stranger(passed.parent) else 1.0
        patience_s = silences * (1 + TIER_SILENCES * passed.tier) * self._endpoint.silence_s
        tiers = [PeerDonor(self._endpoint, passed.parent, patience_s)], [PeerDonor(self._endpoint, coordinator)]
        content = Content("record", name, piece, is_chained=True)
        try:
            if await self._fetcher.fetch(content, range(len(found), passed.pieces), tiers, keep):
                raise PeerUnreachable(f"no donor has record {name[:12]}")
        finally:
            if None in pieces:  # children that wait for the rest are told that this peer lacks it
                del pieces[pieces.index(None) :]
                self._changed.set()
        return b"".join([*(each[DIGEST_BYTES:] for each in found[:-1]), found[-1]])

    def _is_due(self, peer: str, sha256: str, index: int) -> bool:
        """Return whether a peer gets a piece at once: whom the owner vouches for always, and once each member.

        Also once FANOUT others, as many as this peer may have children: it may not have read the plan that names them, and
        only the round's members were told the hash.
        """
        shares, given = self._endpoint.shares, self._given.get(sha256, set())
        if (parent := self._parents.get(sha256, {}).get(peer)) is not None:
            self._note_kept(parent)
        if shares.is_trusted(peer):
            return True
        if not shares.is_known(peer) and len({peer, *(each for each, _ in given if not shares.is_known(each))}) > FANOUT:
            return False
        is_new = (peer, index) not in given
        given.add((peer, index))
        return is_new

    def _note_kept(self, parent: str) -> None:
        now = asyncio.get_running_loop().time()
        self._kept_to_themselves = {peer: until for peer, until in self._kept_to_themselves.items() if until > now}
        self._kept_to_themselves[parent] = now + LEAF_S

    async def _record(self, sha256: str, index: int) -> Body | None:
        """Return a piece of a record to serve; wait a while for one that has not arrived yet."""
        deadline = asyncio.get_running_loop().time() + WAIT_SILENCES * self._endpoint.silence_s
        while (pieces := self._records.get(sha256)) is None or (index < len(pieces) and pieces[index] is None):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused(Code.NOT_HERE, "this peer lacks the record") from None
        return pieces[index] if index < len(pieces) else None


def pieces_of(record: bytes) -> list[bytes]:
    """Return a record in pieces, each but the last with the hash of the next one before its bytes."""
    pieces, following = list[bytes](), b""
    for start in reversed(range(0, max(1, len(record)), PIECE_BYTES)):
        pieces.append(following + record[start : start + PIECE_BYTES])
        following = hashlib.sha256(pieces[-1]).digest()
    return pieces[::-1]


def _fan_out(size: int, receivers: int) -> tuple[int, int]:
    """Return how many receivers get a record of this size from the coordinator, and from each receiver."""
    if size > LARGE_BYTES:
        return 1, FANOUT_LARGE
    return max(FANOUT, receivers) if size * receivers <= COPIES_BYTES else FANOUT, FANOUT


def _tier(index: int, copies: int, children: int) -> int:
    """Return how many receivers stand between the coordinator and this one."""
    return 0 if index < copies else 1 + _tier((index - copies) // children, copies, children)
