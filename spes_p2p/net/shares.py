"""What each other peer takes of this one: open streams, bytes that wait to be read, and for outsiders also pace.

An outsider is a peer that neither the last commit nor an open plan names. Anybody can be as many outsiders as they like, so
what they take together is bounded too, below what slows a round; and so is what all members of an open campaign take for
which the owner does not vouch. A frame's memory is charged before its body is read, its pace once it is there: nobody takes
the time of others by promising bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from spes_p2p.errors import Refused
from spes_p2p.net.limits import BURST_S, Pacer
from spes_p2p.net.turns import Turns

STREAMS_PER_PEER = 256
"""Streams that one peer may have open here. A member opens some dozens in an exchange."""
STREAMS_PER_OUTSIDER = 16
"""Streams that one outsider may have open here."""
STREAMS_OF_OUTSIDERS = 256
"""Streams that all outsiders together may have open here. Of 64 peers that start together each has up to three at a
time, and to the coordinator all of them are outsiders."""
HELD_PER_PEER = 2**25
"""Bytes of one peer's frames that arrive or wait to be read; beyond this the sender waits."""
HELD_PER_STRANGER = 2**22
"""The same for an outsider, and for a member for which the owner does not vouch."""
HELD_BY_OUTSIDERS = 2**26
"""The same for all outsiders together."""
GREEDY_STRANGERS = 2**6
"""Members for which the owner does not vouch have, together, the streams and bytes of this many at their limits: 2**14 streams,
and 256 MiB beside what each may always have. Honest members use little of that."""
OWN_BYTES = 2**16
"""What each of these members may have held beside that, so that its announcement, its report and its complaints never wait for
others: 64 MiB of 1,024."""
FURTHER_SHARE = 0.5
"""Members that hold some of these 256 MiB wait for more once this share is taken; the rest is for those that hold none.
Otherwise 64 members with 4 MiB each, none of which sends a whole frame, keep the updates of all others out. 300 still do."""
OUTSIDER_FRAME_BYTES = 2**16
"""The longest frame that an outsider may send here, whatever its method allows: the announcement of a joiner fits."""
OUTSIDER_BITS, OUTSIDERS_BITS, OUTSIDERS_BURST_S = 8 * 2**14, 8 * 2**16, 4.0
"""What one outsider, and all of them, may send a second, in bits. Records of 64 KiB take some 100 ms to read, a tenth of a
processor. A joiner sends little: with all that counts for more than its bytes, 8 KiB until it has announced, so that eight a
second can come."""
STRANGE_MEMBER_BITS = 8 * 2**18
"""What a member may ask a second for which the owner does not vouch, in long answers, at STREAM_COST each: 256. What belongs to
a round is not paced: its own announcement would wait, and all others for it."""
ANSWER_BITS, ANSWERS_BITS = 8 * 2**16, 8 * 2**20
"""What one outsider gets of long answers before others go first, and the most that all of them get, in bits a second: pages of
the log, of records, and milestones. A joiner reads some megabytes of them; without a bound a few short requests took the whole
line."""
ANSWERS_SHARE, JOINERS_SHARE = 0.1, 0.5
"""All of them get at most this share of the line, so that a round of which half is exchange takes a twentieth longer; and those
that join a campaign without strangers get this share for downloads. Of lines above 80 Mbit/s the share counts as of 80."""
ANSWER_SILENCES = 0.5
"""An answer waits for its turn for at most this many times the longest silence, and is sent in the rest of it."""
FRAME_COST, STREAM_COST = 2**7, 2**10
"""Bytes that a frame and a stream count for in addition: as much time as handling them takes."""


@dataclass(eq=False)
class Place:
    """What one stream takes of the accounts."""

    peer: str
    end: Callable[[], None] = lambda: None
    """Breaks the stream off."""


class Shares:
    """The accounts of one endpoint."""

    def __init__(self, silence_s: float, line: Callable[[], float]):
        """`silence_s`: the longest silence of a living peer. `line`: returns this peer's upload, in bytes a second."""
        self._line = line
        self.is_known: Callable[[str], bool] = lambda peer: True
        """Whether a peer takes part in the rounds; all others are outsiders."""
        self.is_trusted: Callable[[str], bool] = lambda peer: self.is_known(peer)
        """Whether the owner vouches for a peer: it gets long answers at once."""
        self._places: dict[str, list[Place]] = {}
        """Open streams, by peer."""
        self._held: Counter[str] = Counter()
        self._outsiders: set[str] = set()
        """Peers with open streams or held bytes that were outsiders when they came."""
        self._strange_members: set[str] = set()
        """The same of members for which the owner does not vouch."""
        self._shared = 0
        """Bytes that these hold beyond each one's OWN_BYTES."""
        self._freed = asyncio.Event()
        self._looking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By peer: of its frames that wait for room, one looks at a time, since all of them can be thousands."""
        self._pace: dict[str, Pacer] = {}
        self._member_pace: dict[str, Pacer] = {}
        self._turns = Turns(OUTSIDERS_BITS, OUTSIDERS_BURST_S)
        self._answer_pace: dict[str, Pacer] = {}
        self._answer_turns = Turns(ANSWERS_BITS, OUTSIDERS_BURST_S, ANSWER_SILENCES * silence_s)
        self._upload_pace: dict[str, Pacer] = {}
        self._upload_turns = Turns(ANSWERS_BITS, BURST_S, math.inf)

    def enter(self, peer: str) -> Place | None:
        """Count a stream that this peer opened; None when it has too many.

        Where all outsiders have too many, or all members for which the owner does not vouch, one that has more than this peer
        loses its last.
        """
        is_known, own, crowd = self.is_known(peer), len(self._places.get(peer, ())), self._crowd(peer)
        if own >= (STREAMS_PER_PEER if is_known else STREAMS_PER_OUTSIDER):
            return None
        most = GREEDY_STRANGERS * STREAMS_PER_PEER if is_known else STREAMS_OF_OUTSIDERS
        if sum(len(self._places.get(each, ())) for each in crowd) >= most:
            greediest = max(crowd, key=lambda each: len(self._places.get(each, ())))
            if len(self._places[greediest]) <= own + 1:
                return None
            last = self._places[greediest][-1]
            self.leave(last)
            last.end()
        place = Place(peer)
        self._places.setdefault(peer, []).append(place)
        self._see(peer)
        return place

    def leave(self, place: Place) -> None:
        """Note that a stream has ended."""
        places = self._places.get(place.peer, [])
        if place in places:
            places.remove(place)
            self._forget_if_gone(place.peer)

    async def hold(self, peer: str, size: int) -> None:
        """Wait until this many more bytes may be held for a peer."""
        if size and self._is_full(peer, size):
            async with self._looking.setdefault(peer, asyncio.Lock()):
                while self._is_full(peer, size):
                    self._freed.clear()
                    await self._freed.wait()
        if size:
            self._see(peer)
            self._add(peer, size)

    def release(self, peer: str, size: int) -> None:
        """Note that these bytes were read, or dropped."""
        if size:
            self._add(peer, -size)
            self._freed.set()
            self._forget_if_gone(peer)

    async def pace(self, peer: str, cost: int) -> None:
        """Wait until this much of an outsider may be handled; a member never waits. Raises Refused where too much waits."""
        await self.own_pace(peer, cost)
        await self.turn(peer, cost)

    async def own_pace(self, peer: str, cost: int) -> None:
        """Wait until an outsider by itself may send this much more."""
        if not self.is_known(peer):
            await _pacer(self._pace, peer, OUTSIDER_BITS).let_pass(cost)

    async def turn(self, peer: str, cost: int) -> None:
        """Wait for an outsider's turn among all others. Raises Refused where too much waits."""
        if not self.is_known(peer):
            own = self._pace.get(peer)
            await self._turns.wait(cost, own.taken_s() if own is not None else 0.0)

    async def answer(self, peer: str, size: int) -> None:
        """Wait for a stranger's turn to be sent this much. Raises Refused where too much waits."""
        if self.is_known(peer):
            await _pacer(self._member_pace, peer, STRANGE_MEMBER_BITS).let_pass(STREAM_COST)
        await self._in_turn(self._answer_turns, self._answer_pace, peer, size)

    async def upload(self, peer: str, size: int, share: float) -> None:
        """Wait until a peer may be sent this much of a download during an exchange, of which all such get a share of the line.

        Nobody is refused: part of a piece may be sent, and uploads are few.
        """
        await self._in_turn(self._upload_turns, self._upload_pace, peer, size, share)

    async def _in_turn(
        self, turns: Turns, paces: dict[str, Pacer], peer: str, size: int, share: float = ANSWERS_SHARE
    ) -> None:
        pacer = _pacer(paces, peer, ANSWER_BITS)
        taken_s = min(pacer.taken_s(), OUTSIDERS_BURST_S)
        pacer.take(size)
        most = ANSWERS_BITS / 8
        bytes_per_s = share * min(self._line(), most / ANSWERS_SHARE)
        try:
            await turns.wait(math.ceil(size * most / bytes_per_s), taken_s)
        except Refused:
            pacer.take(-size)  # else those that newcomers keep out fall further behind these with each request
            raise

    def _is_full(self, peer: str, size: int) -> bool:
        """Return whether a frame of this size waits until less is held.

        If nothing is held for its peer it does not wait for that peer's limit, which it may exceed alone. That of a stranger
        among the members still waits for room in their common share, which fits any frame.
        """
        held, is_known = self._held[peer], self.is_known(peer)
        if is_known and not self.is_trusted(peer):
            return self._is_full_of_strange_members(held, size)
        if not held:
            return False
        if is_known:
            return held + size > HELD_PER_PEER
        return held + size > HELD_PER_STRANGER or sum(self._held[each] for each in self._outsiders) + size > HELD_BY_OUTSIDERS

    def _is_full_of_strange_members(self, held: int, size: int) -> bool:
        more = _shared(held + size) - _shared(held)
        most = GREEDY_STRANGERS * HELD_PER_STRANGER
        if _shared(held):
            return held + size > HELD_PER_STRANGER or self._shared + more > FURTHER_SHARE * most
        return more > 0 and self._shared + more > most

    def _add(self, peer: str, size: int) -> None:
        """Add to what is held for a peer."""
        before = _shared(self._held[peer])
        self._held[peer] += size
        if peer in self._strange_members:
            self._shared += _shared(self._held[peer]) - before

    def _crowd(self, peer: str) -> set[str]:
        """Return the peers that share an account with this one: none where the owner vouches for it."""
        if not self.is_known(peer):
            return self._outsiders
        return set() if self.is_trusted(peer) else self._strange_members

    def _see(self, peer: str) -> None:
        crowd = self._crowd(peer)
        if crowd is self._strange_members and peer not in crowd:
            self._shared += _shared(self._held[peer])
        crowd.add(peer)

    def _forget_if_gone(self, peer: str) -> None:
        if not self._places.get(peer) and self._held[peer] <= 0:
            self._places.pop(peer, None)
            del self._held[peer]
            self._outsiders.discard(peer)
            self._strange_members.discard(peer)


def _shared(held: int) -> int:
    """Return how much of what is held for a stranger among the members counts for their common share."""
    return max(0, held - OWN_BYTES)


def _pacer(paces: dict[str, Pacer], peer: str, bits_per_s: float) -> Pacer:
    """Return an outsider's pacer. Those that took nothing lately are forgotten."""
    if len(paces) >= 2 * STREAMS_OF_OUTSIDERS:
        for each in [each for each, pacer in paces.items() if not pacer.taken_s()]:
            del paces[each]
    return paces.setdefault(peer, Pacer(bits_per_s, OUTSIDERS_BURST_S))
