"""What every peer is to the swarm, trainer or helper: a contact in the registry, an elector, a coordinator when it is its turn,
and somebody to ask for the campaign, its files and the log of commits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spes_p2p.config.campaign import Campaign, TrainingConfig
from spes_p2p.consensus.control import number_of, owner_of
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import Output
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.relay import Relay
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import (
    Accept,
    CertifiedCommit,
    Commit,
    CommitsRequest,
    Control,
    ControlRequest,
    Decide,
    Farewell,
    Known,
    Leave,
    Prepare,
    ReformRequest,
)
from spes_p2p.messages.methods import (
    ACCEPT,
    COMMITS,
    CONTROL,
    DECIDE,
    LEAVE,
    PING,
    PREPARE,
    PROTOCOL_VERSION,
    REFORM,
    ROUND,
    STATUS,
)
from spes_p2p.messages.presence import Contact
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Ping, Plan, Pong
from spes_p2p.messages.samples import Interval
from spes_p2p.net.contacts import find_contacts, registry_key
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.observe.events import Observer, PeersSeen
from spes_p2p.peer.campaign_service import CampaignService
from spes_p2p.peer.coordinator import Coordination
from spes_p2p.peer.departures import Departures
from spes_p2p.peer.durable import open_participant, perform
from spes_p2p.peer.reforming import ReformService
from spes_p2p.peer.round_context import RoundContext
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.merge import Donors
from spes_p2p.rounds.plan import Rules, check_handed_out
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.stragglers import KEPT_ARRIVALS

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTACT_EVERY_S, CONTACT_TTL_S = 5.0, 20.0
COMMITS_PER_MESSAGE = 200
MAX_CONTACT_ADDRESSES = 4


async def nowhere(peers: Sequence[str]) -> int | None:
    """Nobody has a base."""
    return None


@dataclass
class Hooks:
    """What the node needs of the peer it belongs to; a helper's defaults do nothing."""

    results_of: Callable[[Plan], Results]
    donors: Callable[[], Awaitable[Donors]]
    decided: Callable[[CertifiedCommit], None] = lambda decided: None
    assignments: Callable[[], Mapping[str, int] | None] = lambda: None
    """Steps that the plan of the last commit gives to each peer; None when that plan is not here."""
    stop_phase: Callable[[int], None] = lambda after_round: None
    phase: Callable[[], str] = lambda: "idle"
    status: Callable[[], bytes] = lambda: b""
    validation_loss: Callable[[], float | None] = lambda: None
    """Held-out loss of the base of the last commit, when this peer evaluated it."""
    base_lost_since: Callable[[], float | None] = lambda: None
    """Loop time since when nobody who is there has the base of the last commit, nor I; None when somebody has."""
    newest_base: Callable[[Sequence[str]], Awaitable[int | None]] = nowhere
    """Last round of my log whose base I have, or one of these peers; None when there is none."""


class Node:
    """A peer's standing in the swarm."""

    def __init__(
        self,
        world: World,
        campaign: Campaign,
        genesis: Commit,
        rules: Rules,
        role: str,
        blobs: Mapping[str, bytes],
        observer: Observer,
    ):
        """`blobs`: the campaign's files by sha256."""
        self.world = world
        self.campaign = campaign
        self.campaign_hash = campaign.hash
        self.rules = rules
        self.role = role
        self.board = RpcEndpoint(world.transport, campaign.config.sync.silence_s, world.line)
        self._participant = open_participant(world.store, world.identity, genesis, world.rng)
        self.log = self._participant.log
        self.controls = self._participant.controls
        self.contacts: dict[str, Contact] = {}
        self.content, self.fetcher = ContentServer(self.board), Fetcher(self.board)
        self.relay = Relay(self.board, self.fetcher)
        self.straggler_delay: deque[float] = deque(maxlen=KEPT_ARRIVALS)
        """Of members in the last rounds; see Plan."""
        self.hooks: Hooks
        self._campaign_service = CampaignService(campaign, genesis, blobs)
        self._observer = observer
        self._acceptor = self._participant.acceptor
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
        self._departures = Departures()
        self._too_late: set[str] = set()
        """Who came too late for a round that I coordinated, and was in none since."""
        self._reformer = ReformService(self)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> str:
        """My own id."""
        return self.board.peer_id

    @property
    def incarnation(self) -> str:
        """Id of the disk that I vote with."""
        return self._acceptor.incarnation

    async def start(self, hooks: Hooks) -> None:
        """Serve, and appear in the registry."""
        self.hooks = hooks
        self._phase_began = asyncio.get_running_loop().time()
        handlers = {
            PING: self._on_ping, STATUS: self._on_status,
            COMMITS: self._on_commits, PREPARE: self._on_prepare, ACCEPT: self._on_accept, DECIDE: self._on_decide,
            LEAVE: self._on_leave, REFORM: self._reformer.on_reform, ROUND: self._on_round,
            CONTROL: self._on_control,
        }
        for method, handler in handlers.items():
            await self.board.serve(method, handler)
        await self._campaign_service.start(self.board, self.content)
        await self.relay.serve(self.content)
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
            self.campaign_hash, PROTOCOL_VERSION, self.role, self.log.round, self.log.last.id,
            self.world.transport.addresses[:MAX_CONTACT_ADDRESSES], self.controls.number,
            self.hooks.validation_loss(),
        )
        key = registry_key(self.campaign_hash)
        with contextlib.suppress(PeerUnreachable):
            await self.world.registry.put(key, pack(contact), CONTACT_TTL_S)
            self.contacts = await find_contacts(self.world.registry, self.world.transport, self.campaign_hash)
        trainers = sum(contact.role == "trainer" for contact in self.contacts.values())
        helpers, living = len(self.contacts) - trainers, tuple(sorted(self.contacts))
        self._observer.tell(PeersSeen(trainers, helpers, living, self.log.last.electorate))
        await self._look_for_commits()
        await self._look_for_control()

    async def _look_for_commits(self) -> None:
        """Somebody is ahead of me: learn what was decided. Or has another commit for a round that I know: learn its branch.

        Of two branches the higher term wins. Who is ahead may take me for dead, and I it: neither would ever ask the other.
        """
        contacts = self.contacts  # another meeting may replace them meanwhile
        for peer in self.others():
            if contacts[peer].round > self.log.round:
                await self._catch_up_from(peer)
        for peer, contact in contacts.items():
            known = 0 <= contact.round <= self.log.round
            if known and peer != self.peer_id and contact.commit != self.log.commit_at(contact.round).id:
                with contextlib.suppress(PeerUnreachable, Refused, WireError):
                    await self.learn_commits(peer, after=-1)
                return

    async def _look_for_control(self) -> None:
        """Somebody holds a newer control record than I: ask for it, so that whoever coordinates next has it."""
        newer = [peer for peer, contact in self.contacts.items() if contact.control > self.controls.number]
        for peer in sorted(newer, key=lambda peer: -self.contacts[peer].control):
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                reply = await self.board.ask(peer, CONTROL, pack(ControlRequest(None)), self.board.silence_s)
                if self.take_control(unpack(Known, reply).newest):
                    return

    def others(self, role: str | None = None) -> list[str]:
        """Peers of the campaign that the registry shows, without me; those with the newest commit first."""
        found = [p for p, contact in self.contacts.items() if p != self.peer_id and role in (None, contact.role)]
        return sorted(found, key=lambda peer: (-self.contacts[peer].round, peer))

    def coordinators(self) -> tuple[str, ...]:
        """Who coordinates the next round, in order of rank."""
        return coordinator_order(self.log.last)

    def training_after(self, commit: Commit) -> TrainingConfig:
        """The schedule of the phase that follows this commit."""
        return self.rules.training(commit.control, commit.round + 1)

    async def learn_commits(self, peer: str, after: int | None = None) -> None:
        """Fetch a peer's certificates after a round: from my last commit on by default, from the first one where ours forked.

        Raises PeerUnreachable, Refused, WireError.
        """
        after = self.log.round if after is None else after
        while True:
            reply = await self.board.ask(peer, COMMITS, pack(CommitsRequest(after)), self.board.silence_s)
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
            after = found[-1].commit.round

    async def learn_from_all(self, peers: Sequence[str] | None = None) -> None:
        """Fetch what was decided from everybody who is there, or from these peers."""

        async def learn_from(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self.learn_commits(peer)

        await asyncio.gather(*map(learn_from, self.others() if peers is None else peers))

    async def ask_for_reform(self) -> None:
        """Rounds find no majority, or no base: ask the owner to open a new term, which it does when that has lasted."""
        owner = owner_of(self.log.last)
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            reply = await self.board.ask(owner, REFORM, pack(ReformRequest(self.log.last.id)), 2 * self.board.silence_s)
            for decided in unpack(Decide, reply).decided:
                self.learn(decided)

    async def leave(self, untrained: tuple[Interval, ...]) -> None:
        """Tell the electors that I go, so that my experts and samples find others at once. I coordinate no new round."""
        self._leaves = True
        if self._coordination is not None and not self._coordination.is_planned:
            self._coordination.give_up()
            await end_tasks([self._coordinating])
        await self._tell_electors(Leave(self.log.round + 1, untrained, self._perform(self._acceptor.leave())))

    async def tell_back(self) -> None:
        """I am here again: who was told that I left expects my work once more. If I gave up my seat, that holds until the next
        round; who was restarted meanwhile has forgotten it."""
        await self._tell_electors(Leave(self.log.round + 1, (), self._acceptor.farewell(), back=True))

    async def _tell_electors(self, leave: Leave) -> None:
        request, others = pack(leave), sorted(set(self.log.last.electorate) - {self.peer_id})
        await asyncio.gather(*(self.board.ask(peer, LEAVE, request, 2.0) for peer in others), return_exceptions=True)

    # Handlers ----------------------------------------------------------------------------------------------------------

    async def _on_ping(self, stream: Stream) -> None:
        ping = unpack(Ping, await stream.message())
        if ping.stop_after == self.log.round and stream.remote in self.log.last.electorate:
            self.hooks.stop_phase(ping.stop_after)
        cannot = self.log.round + 1 if self._leaves and not self._is_coordinating() else self._failed_to_coordinate
        await stream.send(pack(Pong(self.log.round, self.hooks.phase(), cannot, self._acceptor.may_vote)))

    async def _on_status(self, stream: Stream) -> None:
        await stream.send(self.hooks.status())

    async def _on_commits(self, stream: Stream) -> None:
        after = unpack(CommitsRequest, await stream.message()).after
        await stream.send(pack(Decide(self.log.since(after)[:COMMITS_PER_MESSAGE])))

    async def _on_prepare(self, stream: Stream) -> None:
        request = unpack(Prepare, await stream.message())
        await stream.send(pack(self._perform(self._acceptor.prepare(stream.remote, request))))

    async def _on_accept(self, stream: Stream) -> None:
        request = unpack(Accept, await stream.message())
        await stream.send(pack(self._perform(self._acceptor.accept(stream.remote, request))))

    async def _on_decide(self, stream: Stream) -> None:
        for decided in unpack(Decide, await stream.message()).decided:
            self.learn(decided)
        await stream.send(b"")

    async def _on_leave(self, stream: Stream) -> None:
        leave = unpack(Leave, await stream.message())
        commit = self.log.last
        if stream.remote in {*commit.members, *commit.electorate} and leave.round == commit.round + 1:
            check_handed_out(leave.untrained, commit, self.rules)
            self._departures.hear(stream.remote, leave)
        await stream.send(b"")

    async def _on_control(self, stream: Stream) -> None:
        """Somebody asks for the newest record, or brings one."""
        self.take_control(unpack(ControlRequest, await stream.message()).brought)
        commit, archived = self.log.last, tuple(archived_rounds(self.world.store))
        await stream.send(pack(Known(self.controls.newest, number_of(commit.control), commit.round, commit.step, archived)))

    async def _on_round(self, stream: Stream) -> None:
        announcement = unpack(Announcement, await stream.message())
        self._check_same_campaign(announcement)
        if announcement.round <= self.log.round:
            self._too_late.add(stream.remote)
            raise Refused(Code.BEHIND, f"round {announcement.round} is decided", round=self.log.round)
        if announcement.round > self.log.round + 1:
            self.spawn(self._catch_up_from(stream.remote))
            raise Refused(Code.COORDINATOR_BEHIND, "the coordinator is behind; try again", round=self.log.round)
        order = self.coordinators()
        rank = announcement.attempt % len(order)
        if order[rank] != self.peer_id:
            raise Refused(Code.NOT_COORDINATOR, "not the coordinator of this attempt")
        if self._leaves and not self._is_coordinating():
            raise Refused(Code.LEAVING, "I leave")
        self._departures.see(stream.remote)
        await self._only_if_others_cannot(order[:rank])
        if announcement.commit != self.log.last.id:
            raise Refused(Code.BEHIND, f"round {announcement.round} is decided", round=self.log.round)
        await self._current_coordination().serve(stream, announcement)

    # Rounds ------------------------------------------------------------------------------------------------------------

    def _check_same_campaign(self, announcement: Announcement) -> None:
        if announcement.protocol != PROTOCOL_VERSION:
            theirs = announcement.protocol
            detail = f"you speak protocol {theirs}, this swarm {PROTOCOL_VERSION}; update spes-p2p"
            raise Refused(Code.VERSION, detail, protocol=PROTOCOL_VERSION)
        if announcement.campaign != self.campaign_hash:
            detail = f"you train {announcement.campaign[:12]}, this swarm {self.campaign_hash[:12]}"
            raise Refused(Code.CAMPAIGN, detail, campaign=self.campaign_hash)

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
                raise Refused(Code.ALIVE, f"{peer[-6:]} is there to coordinate this round", peer=peer)

    def _is_coordinating(self) -> bool:
        """Is an attempt at the next round open here?"""
        known = self._coordination
        return known is not None and known.commit.id == self.log.last.id and not known.failed

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
        commit = self.log.last
        if self._coordination is not None and self._is_coordinating():
            return self._coordination

        context = RoundContext(
            commit=commit,
            board=self.board,
            log=self.log,
            identity=self.world.identity,
            rules=self.rules,
            relay=self.relay,
            phase_began=self._phase_began,
            assignments=self._assignments(),
            straggler_delay=self.straggler_delay,
            too_late=self._too_late,
            returned=lambda: self._departures.returned(commit.round + 1),
            farewells=self.farewells,
            newest_control=lambda: self.controls.newest,
            results_of=self.hooks.results_of,
            donors=self.hooks.donors,
            learn=self.learn,
        )
        made = Coordination(context)
        self._coordination = made
        self._began.set()
        self._began = asyncio.Event()
        self._coordinating = self.spawn(self._coordinate(made))
        return made

    def farewells(self) -> tuple[Farewell, ...]:
        """Of electors that left the next round, come back or not."""
        own = self._acceptor.farewell()
        return (*(() if own is None else (own,)), *self._departures.farewells)

    def _assignments(self) -> Mapping[str, int]:
        """Steps by peer in this phase. A coordinator that does not hold the last plan expects the same of every trainer."""
        assignments = self.hooks.assignments()
        if assignments is not None:
            return {peer: steps for peer, steps in assignments.items() if steps}
        return dict.fromkeys(set(self.log.last.members) - set(self.log.last.helpers), 1)

    async def _coordinate(self, coordination: Coordination) -> None:
        await coordination.run()
        if coordination.failed:
            self._failed_to_coordinate = coordination.commit.round + 1
            await self.learn_from_all()

    def phase_goes_on_during(self, round_number: int) -> None:
        """A phase begins now, with this round in flight: by that the stragglers of the next round are judged."""
        self._phase_during = round_number, asyncio.get_running_loop().time()

    def learn(self, decided: CertifiedCommit) -> None:
        """Take up a certified commit, if it is news. Raises Refused when it does not follow the log's or is not proven."""
        if self._perform(self._participant.learn(decided)):
            self._take_up(decided)

    def open_term(self, round_number: int) -> CertifiedCommit:
        """Open a term after this round of the log. Raises Refused when this peer is not the campaign's owner."""
        decided = self._perform(self._participant.open_term(round_number))
        self._take_up(decided)
        return decided

    def take_control(self, control: Control | None) -> bool:
        """Keep an order of the owner; False when it is no news. Raises Refused when the owner did not sign it."""
        return self._perform(self.controls.take(control))

    def _perform(self, output: Output[T]) -> T:
        return perform(self.world.store, self._participant, output)

    def _take_up(self, decided: CertifiedCommit) -> None:
        during, began = self._phase_during
        self._phase_began = began if during == decided.commit.round else asyncio.get_running_loop().time()
        self._departures.forget(decided.commit.round)
        self.hooks.decided(decided)

    async def _catch_up_from(self, peer: str) -> None:
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            await self.learn_commits(peer)

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
