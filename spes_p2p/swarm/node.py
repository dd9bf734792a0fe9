"""What every peer is to the swarm, trainer or helper: a contact in the registry, an elector, a coordinator when it is its turn,
and somebody to ask for the campaign, its files and the log of heads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.config import PROTOCOL_VERSION, Campaign, TrainingConfig
from spes_p2p.data.slices import Interval
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.observe.events import Observer, PeersSeen
from spes_p2p.swarm.control import CONTROL, ControlRequest, Controls, Known
from spes_p2p.swarm.coordinator import (
    ACCEPT,
    DECIDE,
    PING,
    PREPARE,
    ROUND,
    Coordination,
    Decide,
    Ping,
    coordinator_order,
)
from spes_p2p.swarm.deadline import KEPT_ARRIVALS
from spes_p2p.swarm.electors import Accept, Elector, HeadLog, Prepare
from spes_p2p.swarm.interfaces import World
from spes_p2p.swarm.records import (
    Announcement,
    Ballot,
    CampaignRecord,
    CampaignRequest,
    Contact,
    Decided,
    Farewell,
    Head,
    Plan,
    Pong,
)
from spes_p2p.swarm.reform import REFORM, Reformer
from spes_p2p.swarm.relay import Relay
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.tasks import end_tasks
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.merge import Donors
from spes_p2p.sync.plan import Rules, check_handed_out
from spes_p2p.sync.results import Results

logger = logging.getLogger(__name__)

CAMPAIGN, BLOB, HEADS, LEAVE, STATUS = "campaign", "blob", "heads", "leave", "status"
MAX_BALLOT_NUMBER = 2**62
CONTACT_EVERY_S, CONTACT_TTL_S = 5.0, 20.0
HEADS_A_MESSAGE = 200
BLOB_CHUNK_BYTES = 2**18
MAX_CONTACT_ADDRESSES = 4


@dataclass(frozen=True)
class HeadsRequest:
    """All certificates after this round."""

    after: int


@dataclass(frozen=True)
class BlobRequest:
    """A file by its sha256."""

    sha256: str


@dataclass(frozen=True)
class Leave:
    """I leave. What the plan gave me and I did not train comes back."""

    round: int
    untrained: tuple[Interval, ...]
    farewell: Farewell | None = None
    """When I was an elector, and nobody had my vote yet."""
    back: bool = False
    """I am here again, and train what the plan gave me; my seat stays given up."""


async def nowhere(peers: Sequence[str]) -> int | None:
    """Nobody has a base."""
    return None


@dataclass
class Hooks:
    """What the node needs of the peer it belongs to; a helper's defaults do nothing."""

    results_of: Callable[[Plan], Results]
    donors: Callable[[], Awaitable[Donors]]
    decided: Callable[[Decided], None] = lambda decided: None
    duties: Callable[[], Mapping[str, int] | None] = lambda: None
    """Steps that the plan of the last head gives to each peer; None when that plan is not here."""
    stop_phase: Callable[[int], None] = lambda after_round: None
    phase: Callable[[], str] = lambda: "idle"
    status: Callable[[], bytes] = lambda: b""
    base_lost_since: Callable[[], float | None] = lambda: None
    """Loop time since when nobody who is there has the base of the last head, nor I; None when somebody has."""
    newest_base: Callable[[Sequence[str]], Awaitable[int | None]] = nowhere
    """Last round of my log whose base I have, or one of these peers; None when there is none."""


def registry_key(campaign_hash: str) -> str:
    """Where the contacts of a campaign are."""
    return f"spes.{campaign_hash[:32]}.peers"


class Node:
    """A peer's standing in the swarm."""

    def __init__(
        self,
        world: World,
        campaign: Campaign,
        genesis: Head,
        rules: Rules,
        role: str,
        blobs: Mapping[str, bytes],
        observer: Observer,
        folders: tuple[str, ...] = (),
    ):
        """`blobs`: the campaign's files by sha256. `folders`: where its token files lie on this machine."""
        self.world = world
        self.campaign = campaign
        self.campaign_hash = campaign.hash
        self.rules = rules
        self.role = role
        self.board = Switchboard(world.transport, campaign.config.sync.silence_s, world.line)
        self.log = HeadLog(world.store, world.identity, genesis)
        self.controls = Controls(self.log, world.store, world.identity)
        self.contacts: dict[str, Contact] = {}
        self.relay = Relay(self.board)
        self.lateness: deque[float] = deque(maxlen=KEPT_ARRIVALS)
        """Of members in the last rounds; see Plan."""
        self.hooks: Hooks
        self._blobs = blobs
        self._folders = folders
        self._observer = observer
        self._elector = Elector(self.log, world.store, world.identity, world.rng)
        self._coordination: Coordination | None = None
        self._coordinating: asyncio.Task[None]
        """What runs it."""
        self._began = asyncio.Event()
        """Set when an attempt opens here, then replaced."""
        self._phase_began = 0.0
        self._phase_during = -1, 0.0
        self._failed_to_coordinate = -1
        self._leaves = False
        """Have I told the others that I go?"""
        self._returned: dict[str, Leave] = {}
        self._came_back: set[str] = set()
        """Of those, who is here again."""
        self._too_late: set[str] = set()
        """Who came too late for a round that I coordinated, and was in none since."""
        self._reformer = Reformer(self)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> str:
        """My own id."""
        return self.board.peer_id

    @property
    def disk(self) -> str:
        """Id of the disk that I vote with."""
        return self._elector.disk

    async def start(self, hooks: Hooks) -> None:
        """Serve, and appear in the registry."""
        self.hooks = hooks
        self._phase_began = asyncio.get_running_loop().time()
        handlers = {
            PING: self._on_ping, STATUS: self._on_status, CAMPAIGN: self._on_campaign, BLOB: self._on_blob,
            HEADS: self._on_heads, PREPARE: self._on_prepare, ACCEPT: self._on_accept, DECIDE: self._on_decide,
            LEAVE: self._on_leave, REFORM: self._reformer.on_reform, ROUND: self._on_round,
            CONTROL: self._on_control,
        }
        for method, handler in handlers.items():
            await self.board.serve(method, handler)
        await self.relay.start()
        await self.meet()
        self.spawn(self._keep_meeting())

    async def close(self) -> None:
        """Stop serving; the transport is closed by who made it."""
        if self._coordination is not None:
            self._coordination.give_up()
        await end_tasks(self._tasks)
        await self.board.close()

    async def meet(self) -> None:
        """Tell the registry where I am, and learn who else is there."""
        contact = Contact(
            self.campaign_hash, PROTOCOL_VERSION, self.role, self.log.round, self.log.head.id,
            self.world.transport.addresses[:MAX_CONTACT_ADDRESSES], self.controls.number,
        )
        key = registry_key(self.campaign_hash)
        with contextlib.suppress(PeerUnreachable):
            await self.world.registry.put(key, pack(contact), CONTACT_TTL_S)
            self.contacts = await find_contacts(self.world, self.campaign_hash)
        trainers = sum(contact.role == "trainer" for contact in self.contacts.values())
        helpers, living = len(self.contacts) - trainers, tuple(sorted(self.contacts))
        self._observer.tell(PeersSeen(trainers, helpers, living, self.log.head.electorate))
        await self._look_for_heads()
        await self._look_for_control()

    async def _look_for_heads(self) -> None:
        """Somebody is ahead of me: learn what was decided. Or has another head for a round that I know: learn its branch.

        Of two branches the higher epoch wins. Who is ahead may take me for dead, and I it: neither would ever ask the other.
        """
        contacts = self.contacts  # another meeting may replace them meanwhile
        for peer in self.others():
            if contacts[peer].round > self.log.round:
                await self._catch_up_from(peer)
        for peer, contact in contacts.items():
            known = 0 <= contact.round <= self.log.round
            if known and peer != self.peer_id and contact.head != self.log.head_at(contact.round).id:
                with contextlib.suppress(PeerUnreachable, Refused, WireError):
                    await self.learn_heads(peer, after=-1)
                return

    async def _look_for_control(self) -> None:
        """Somebody holds a newer control record than I: ask for it, so that whoever coordinates next has it."""
        newer = [peer for peer, contact in self.contacts.items() if contact.control > self.controls.number]
        for peer in sorted(newer, key=lambda peer: -self.contacts[peer].control):
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                reply = await self.board.ask(peer, CONTROL, pack(ControlRequest(None)), self.board.silence_s)
                if self.controls.take(unpack(Known, reply).newest):
                    return

    def others(self, role: str | None = None) -> list[str]:
        """Peers of the campaign that the registry shows, without me; those with the newest head first."""
        found = [p for p, contact in self.contacts.items() if p != self.peer_id and role in (None, contact.role)]
        return sorted(found, key=lambda peer: (-self.contacts[peer].round, peer))

    def coordinators(self) -> tuple[str, ...]:
        """Who coordinates the next round, in order of rank."""
        return coordinator_order(self.log.head)

    def training_after(self, head: Head) -> TrainingConfig:
        """The schedule of the phase that follows this head."""
        return self.rules.training(head.control, head.round + 1)

    async def learn_heads(self, peer: str, after: int | None = None) -> None:
        """Fetch a peer's certificates after a round: from my last head on by default, from the first one where ours forked.

        Raises PeerUnreachable, Refused, WireError.
        """
        after = self.log.round if after is None else after
        while True:
            reply = await self.board.ask(peer, HEADS, pack(HeadsRequest(after)), self.board.silence_s)
            found = unpack(Decide, reply).decided
            if not found:
                return
            try:
                for decided in found:
                    self.learn(decided)
            except Refused:
                if after < 0:
                    raise
                after = -1
                continue
            after = found[-1].head.round

    async def learn_from_all(self, peers: Sequence[str] | None = None) -> None:
        """Fetch what was decided from everybody who is there, or from these peers."""

        async def learn_from(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self.learn_heads(peer)

        await asyncio.gather(*map(learn_from, self.others() if peers is None else peers))

    async def ask_for_reform(self) -> None:
        """Rounds find no majority, or no base: ask the helpers to open a new epoch. They do when that has lasted for long."""
        for helper in self.log.head.helpers:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                reply = await self.board.ask(helper, REFORM, self.log.head.id.encode(), 2 * self.board.silence_s)
                for decided in unpack(Decide, reply).decided:
                    self.learn(decided)

    async def leave(self, untrained: tuple[Interval, ...]) -> None:
        """Tell the electors that I go, so that my experts and samples find others at once. I coordinate no new round."""
        self._leaves = True
        if self._coordination is not None and not self._coordination.is_planned:
            self._coordination.give_up()
            await end_tasks([self._coordinating])
        await self._tell_electors(Leave(self.log.round + 1, untrained, self._elector.leave()))

    async def tell_back(self) -> None:
        """I am here again: who was told that I left expects my work once more. If I gave up my seat, that holds until the next
        round; who was restarted meanwhile has forgotten it."""
        await self._tell_electors(Leave(self.log.round + 1, (), self._elector.farewell(), back=True))

    async def _tell_electors(self, leave: Leave) -> None:
        request, others = pack(leave), sorted(set(self.log.head.electorate) - {self.peer_id})
        await asyncio.gather(*(self.board.ask(peer, LEAVE, request, 2.0) for peer in others), return_exceptions=True)

    # Handlers ----------------------------------------------------------------------------------------------------------

    async def _on_ping(self, talk: Talk) -> None:
        ping = unpack(Ping, await talk.message())
        if ping.stop_after == self.log.round and talk.remote in self.log.head.electorate:
            self.hooks.stop_phase(ping.stop_after)
        cannot = self.log.round + 1 if self._leaves and not self._is_coordinating() else self._failed_to_coordinate
        await talk.send(pack(Pong(self.log.round, self.hooks.phase(), cannot, self._elector.may_vote)))

    async def _on_status(self, talk: Talk) -> None:
        await talk.send(self.hooks.status())

    async def _on_campaign(self, talk: Talk) -> None:
        theirs = unpack(CampaignRequest, await talk.message()).protocol
        if theirs != PROTOCOL_VERSION:
            logger.warning("%s speaks protocol %d, this peer %d: refused", talk.remote[-6:], theirs, PROTOCOL_VERSION)
            raise Refused(f"version: you speak protocol {theirs}, this swarm {PROTOCOL_VERSION}")
        blobs = tuple((sha, len(body)) for sha, body in self._blobs.items())
        await talk.send(pack(CampaignRecord(self.campaign.canonical_json(), self.log.genesis, blobs, self._folders)))

    async def _on_blob(self, talk: Talk) -> None:
        wanted = unpack(BlobRequest, await talk.message()).sha256
        if wanted not in self._blobs:
            raise Refused("no such file here")
        body = memoryview(self._blobs[wanted])
        for a in range(0, len(body), BLOB_CHUNK_BYTES):
            await talk.send(bytes(body[a : a + BLOB_CHUNK_BYTES]))

    async def _on_heads(self, talk: Talk) -> None:
        after = unpack(HeadsRequest, await talk.message()).after
        await talk.send(pack(Decide(self.log.since(after)[:HEADS_A_MESSAGE])))

    async def _on_prepare(self, talk: Talk) -> None:
        request = unpack(Prepare, await talk.message())
        self._require_coordinator(talk.remote, request.ballot)
        await talk.send(pack(self._elector.prepare(request)))

    async def _on_accept(self, talk: Talk) -> None:
        request = unpack(Accept, await talk.message())
        self._require_coordinator(talk.remote, request.ballot)
        await talk.send(pack(self._elector.accept(request)))

    def _require_coordinator(self, sender: str, ballot: Ballot) -> None:
        """Ballots are taken from their own coordinator only, within a range that can always be exceeded."""
        if sender != ballot.coordinator:
            raise Refused("a ballot of somebody else")
        if not 0 < ballot.number < MAX_BALLOT_NUMBER:
            raise Refused("a ballot number out of range")

    async def _on_decide(self, talk: Talk) -> None:
        for decided in unpack(Decide, await talk.message()).decided:
            self.learn(decided)
        await talk.send(b"")

    async def _on_leave(self, talk: Talk) -> None:
        leave = unpack(Leave, await talk.message())
        head = self.log.head
        if talk.remote in {*head.members, *head.electorate} and leave.round == head.round + 1:
            check_handed_out(leave.untrained, head, self.rules)
            if leave.back:
                self._returned.setdefault(talk.remote, leave)
                self._came_back.add(talk.remote)
            else:
                self._returned[talk.remote] = leave
                self._came_back.discard(talk.remote)
        await talk.send(b"")

    async def _on_control(self, talk: Talk) -> None:
        """Somebody asks for the newest record, or brings one."""
        self.controls.take(unpack(ControlRequest, await talk.message()).brought)
        await talk.send(pack(self.controls.known()))

    async def _on_round(self, talk: Talk) -> None:
        announcement = unpack(Announcement, await talk.message())
        self._check_same_campaign(announcement)
        if announcement.round <= self.log.round:
            self._too_late.add(talk.remote)
            raise Refused(f"behind: round {announcement.round} is decided")
        if announcement.round > self.log.round + 1:
            self.spawn(self._catch_up_from(talk.remote))
            raise Refused("the coordinator is behind; try again")
        order = self.coordinators()
        rank = announcement.attempt % len(order)
        if order[rank] != self.peer_id:
            raise Refused("not the coordinator of this attempt")
        if self._leaves and not self._is_coordinating():
            raise Refused("I leave")
        if talk.remote in self._returned:
            self._came_back.add(talk.remote)
        await self._only_if_others_cannot(order[:rank])
        if announcement.head != self.log.head.id:
            raise Refused(f"behind: round {announcement.round} is decided")
        await self._current_coordination().serve(talk, announcement)

    # Rounds ------------------------------------------------------------------------------------------------------------

    def _check_same_campaign(self, announcement: Announcement) -> None:
        if announcement.protocol != PROTOCOL_VERSION:
            theirs = announcement.protocol
            raise Refused(f"version: you speak protocol {theirs}, this swarm {PROTOCOL_VERSION}; update spes-p2p")
        if announcement.campaign != self.campaign_hash:
            raise Refused(f"campaign: you train {announcement.campaign[:12]}, this swarm {self.campaign_hash[:12]}")

    async def _only_if_others_cannot(self, ranked_before: tuple[str, ...]) -> None:
        """Take over only from coordinators that are gone or have failed, else one bad link could abort everybody's round.

        Whoever asks while I find that out is in the attempt that another one begins here.
        """
        if self._is_coordinating():
            return
        asked = asyncio.gather(*(self.board.is_there(peer, PING, pack(Ping(-1))) for peer in ranked_before))
        began = asyncio.ensure_future(self._began.wait())
        try:
            either: set[asyncio.Future[Any]] = {asked, began}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._is_coordinating():
                return
            answers = await asked
        finally:
            await end_tasks([asked, began])
        for peer, answer in zip(ranked_before, answers, strict=True):
            if answer is not None and not _has_failed(answer, self.log.round + 1):
                raise Refused(f"alive: {peer[-6:]} is there to coordinate this round")

    def _is_coordinating(self) -> bool:
        """Is an attempt at the next round open here?"""
        known = self._coordination
        return known is not None and known.head.id == self.log.head.id and not known.failed

    async def first_living(self, peers: Sequence[str]) -> int:
        """Index of the first of these peers that answers, their number when none does; however many are dead, this takes no
        longer than one silence."""
        pings = [asyncio.ensure_future(self.board.is_there(peer, PING, pack(Ping(-1)))) for peer in peers]
        try:
            for index, ping in enumerate(pings):
                if await ping is not None:
                    return index
            return len(peers)
        finally:
            await end_tasks(pings)

    def _current_coordination(self) -> Coordination:
        """The attempt that is open here, one at a time; a new one when the last has failed or its round is over."""
        head = self.log.head
        if self._coordination is not None and self._is_coordinating():
            return self._coordination

        def returned() -> dict[str, tuple[Interval, ...]]:
            gone = {peer: leave for peer, leave in self._returned.items() if peer not in self._came_back}
            return {peer: leave.untrained for peer, leave in gone.items() if leave.round == head.round + 1}

        made = Coordination(
            self.board, self.log, self.rules, self.hooks.results_of, self.hooks.donors,
            self._duties(), self.lateness, returned, self.learn, self._phase_began, self.world.identity, self.farewells,
            self.relay, lambda: self.controls.newest, self._too_late,
        )
        self._coordination = made
        self._began.set()
        self._began = asyncio.Event()
        self._coordinating = self.spawn(self._coordinate(made))
        return made

    def farewells(self) -> tuple[Farewell, ...]:
        """Of electors that left the next round, come back or not."""
        told = (leave.farewell for leave in self._returned.values())
        return tuple(farewell for farewell in (self._elector.farewell(), *told) if farewell is not None)

    def _duties(self) -> Mapping[str, int]:
        """Steps by peer in this phase. A coordinator that does not hold the last plan expects the same of every trainer."""
        duties = self.hooks.duties()
        if duties is not None:
            return {peer: steps for peer, steps in duties.items() if steps}
        return dict.fromkeys(set(self.log.head.members) - set(self.log.head.helpers), 1)

    async def _coordinate(self, coordination: Coordination) -> None:
        await coordination.run()
        if coordination.failed:
            self._failed_to_coordinate = coordination.head.round + 1
            await self.learn_from_all()

    def phase_goes_on_during(self, round_number: int) -> None:
        """A phase begins now, with this round in flight: by that the stragglers of the next round are judged."""
        self._phase_during = round_number, asyncio.get_running_loop().time()

    def learn(self, decided: Decided) -> None:
        """Take up a decided head, if it is news. Raises Refused when it does not follow mine or is not proven."""
        if decided.head.epoch > self.log.head.epoch:
            self.controls.hold()
        if self.log.append(decided):
            during, began = self._phase_during
            self._phase_began = began if during == decided.head.round else asyncio.get_running_loop().time()
            self._returned = {p: leave for p, leave in self._returned.items() if leave.round > decided.head.round}
            self._came_back &= self._returned.keys()
            self.hooks.decided(decided)

    async def _catch_up_from(self, peer: str) -> None:
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            await self.learn_heads(peer)

    async def _keep_meeting(self) -> None:
        while True:
            await asyncio.sleep(CONTACT_EVERY_S)
            try:
                await self.meet()
            except Exception:  # a contact that is not renewed makes this peer disappear
                logger.exception("meeting the others failed")

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this beside everything else, until it ends or I do."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _has_failed(pong: bytes, round_number: int) -> bool:
    """Does this answer to a ping say that its sender could not coordinate the round? A malformed one counts as yes."""
    try:
        return unpack(Pong, pong).failed_to_coordinate == round_number
    except WireError:
        return True


async def find_contacts(world: World, campaign_hash: str) -> dict[str, Contact]:
    """The living peers of a campaign; what is malformed or of another campaign is left out.

    Their addresses are taught to the transport.
    """
    found = {}
    for peer, value in (await world.registry.get(registry_key(campaign_hash))).items():
        with contextlib.suppress(WireError):
            contact = unpack(Contact, value)
            if contact.campaign == campaign_hash and contact.role in ("trainer", "helper"):
                found[peer] = contact
                if peer != world.transport.peer_id:
                    world.transport.learn_addresses(peer, contact.addresses)
    return found
