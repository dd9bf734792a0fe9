"""A peer's place in the swarm, trainer or helper: its contact in the registry, what is decided, and the campaign it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from spes_p2p import __version__
from spes_p2p.config.campaign import Campaign, TrainingConfig
from spes_p2p.consensus.admission import check_admission, standing_of
from spes_p2p.consensus.control import is_banned, required_protocol, takes_part
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.files import serve_files
from spes_p2p.content.relay import Relay
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.messages.content import CampaignRecord, CampaignRequest
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.methods import CAMPAIGN, COMMITS, CONTROL
from spes_p2p.messages.presence import Contact
from spes_p2p.messages.refusals import Code
from spes_p2p.net.contacts import find_contacts, keepers_of, registry_key
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.observe.events import Observer, PeersSeen
from spes_p2p.peer.courtesy import Lateness
from spes_p2p.peer.decisions import Decisions
from spes_p2p.peer.departures import Departures
from spes_p2p.rounds.plan import Rules, needs_vouched
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.stragglers import KEPT_ARRIVALS

logger = logging.getLogger(__name__)

CONTACT_EVERY_S = 5.0
"""Refresh this peer's contact in the DHT this often."""
CONTACTS_READ_PER_S, READ_AGAIN_S = 8.0, 30.0
"""Bound how often the contacts of all N peers are read: every N divided by the first, in seconds, and every N seconds or the
second, whichever is shorter, where that is longer."""
FEW, READ_S = 30, 5.0
"""A member that has met all others reads every N times the second, if N is more than the first: some five nodes answer with a
kilobyte for each contact, so that is 60 kB a minute."""
MAX_MET = 2**12
"""Bounds the peers that are remembered as met."""
CONTACT_TTL_S = 20.0
"""A contact that is not refreshed for this long expires."""
MAX_CONCURRENT_CLAIMS = 4
"""Ask at most this many peers concurrently to prove rounds that they claim to know, and as many for whom the owner vouches."""
DOUBT_S = 30.0
"""After a peer failed to prove a claim, ignore its claims this long."""
MAX_INVITED = 1024
"""Bounds the peers that are remembered for the invitation that they showed."""
MAX_CONTACT_ADDRESSES = 4
"""Keeps a contact below the DHT's limit for a value."""


class Node:
    """What every service of a peer shares."""

    def __init__(
        self,
        world: World,
        campaign: Campaign,
        genesis: Commit,
        rules: Rules,
        role: str,
        blobs: Mapping[str, bytes],
        observer: Observer,
        invitation: Invitation | None = None,
        named: tuple[str, str] = ("", ""),
    ):
        """`blobs`: the campaign's files by sha256. `invitation`: this peer's. `named`: its name and team in lists, or ""."""
        self.world = world
        self.campaign = campaign
        self.campaign_hash = campaign.hash
        self.rules = rules
        self.role = role
        self.invitation = invitation
        self.named = named
        self.endpoint = RpcEndpoint(world.transport, campaign.config.sync.silence_s, world.line)
        self.lateness = Lateness(campaign.config.sync.silence_s)
        self.decisions = Decisions(world, self.endpoint, genesis)
        self.log, self.controls = self.decisions.log, self.decisions.controls
        world.registry.keepers = keepers_of(genesis, world.registry.keepers)
        self.endpoint.admit = self._check_method
        self.departures = Departures(self.endpoint, world.identity, self.decisions, rules)
        self.contacts: dict[str, Contact] = {}
        """In random order, so that peers do not all ask the same ones."""
        self._met: set[str] = set()
        """Peers whose contacts were found here at some time: where they are is known, or they come by themselves."""
        self._looked_up_at = -math.inf
        self._seen = PeersSeen(0, 0)
        self.content, self.fetcher = ContentServer(self.endpoint), Fetcher(self.endpoint)
        self.relay = self.decisions.relay = Relay(self.endpoint, self.fetcher)
        self.relay.is_stranger = lambda peer: campaign.config.admission == "open" and not self._is_trusted(peer)
        self.relay.donors = self._members_first
        self.straggler_delay: deque[float] = deque(maxlen=KEPT_ARRIVALS)
        """Delays of members in the last rounds, as shares of the time that the first half took; see Proposal."""
        self.evaluated: tuple[str, float] | None = None
        """The commit whose base this peer evaluated last, and that base's held-out loss, in nats per token."""
        self._blobs = blobs
        self._observer = observer
        self._vouched: tuple[str, frozenset[str]] = "", frozenset()
        """See `vouched`, with the id of the last commit then."""
        self._invited: dict[str, int] = {}
        """When the invitations expire that peers have shown here, in Unix time."""
        self._planned_members: frozenset[str] = frozenset()
        """Members of the newest plan here, which may become participants."""
        self.endpoint.shares.is_known, self.endpoint.shares.is_trusted = self._is_known, self._is_trusted
        world.registry.is_known = lambda peer: self._is_known(peer) or self._is_trusted(peer)
        self._tasks: set[asyncio.Task[None]] = set()
        self._proving: set[str] = set()
        """Peers that are being asked to prove a claim."""
        self._doubted_until: dict[str, float] = {}
        """Loop time until which each peer's claims are ignored, since it did not prove the last one."""

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self.endpoint.peer_id

    @property
    def vouched(self) -> frozenset[str]:
        """The peers that the last commits name and for whom the owner vouches, among friends all."""
        last = self.log.last
        if self._vouched[0] != last.id:
            named = (commit.trusted for commit in self.log.recent(last.round))
            self._vouched = last.id, frozenset[str]().union(*named)
        return self._vouched[1]

    def meet_members(self, plan: Plan) -> None:
        """Take the members of a new plan for participants, with their share of this peer's resources."""
        self._planned_members = plan.peers

    def _is_known(self, peer: str) -> bool:
        """Return whether a peer takes part in the rounds; all others are outsiders."""
        return peer in self.log.last.participants or peer in self._planned_members or peer == self.peer_id

    def _is_trusted(self, peer: str) -> bool:
        """Return whether the owner vouches for a peer; in a campaign that is not open, for all that take part."""
        if self.campaign.config.admission != "open":
            return self._is_known(peer)
        return peer in self.vouched or peer == self.peer_id or self._invited.get(peer, 0) > self.world.wall_time()

    @property
    def base_loss(self) -> float | None:
        """Held-out loss of the last commit's base; None unless this peer has evaluated it."""
        return self.evaluated[1] if self.evaluated is not None and self.evaluated[0] == self.log.last.id else None

    async def start(self) -> None:
        """Serve, and appear in the registry."""
        await self.decisions.serve()
        await self.departures.serve()
        await self.endpoint.serve(CAMPAIGN, self._on_campaign)
        await serve_files(self.content, self._blobs)
        await self.relay.serve(self.content)
        await self.refresh_contacts()
        self.spawn(self._keep_refreshing())

    async def close(self) -> None:
        """Stop serving. The caller that made the transport closes it."""
        await end_tasks(self._tasks)
        await self.endpoint.close()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background until it ends or the node closes."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log what a task in the background raised: a full disk in one line, a bug with its traceback."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s", error, exc_info=None if isinstance(error, UserError) else error)

    def others(self, role: str | None = None) -> list[str]:
        """Return the other peers in the registry, those of the last commit first.

        Of these the ones for whom the owner vouches come first, then by the commits that they claim to know. The rest is in
        random order, since anybody may claim any round; those with an unproven claim come last.
        """
        me = self.peer_id
        return self._best_first([p for p, contact in self.contacts.items() if p != me and role in (None, contact.role)])

    def sources(self) -> list[str]:
        """Return whom to ask for commits and bases: in turn `others`, and peers that only the log or the user names.

        Who hides contacts in the registry hides none of these: the registry's keepers, and the peers that the owner vouches
        for. An old log names dead ones, of which those that were silent a moment ago are left out.
        """
        found, now = self.others(), asyncio.get_running_loop().time()
        vouched = sorted(self.vouched)
        self.world.rng.shuffle(vouched)
        named = dict.fromkeys((*self.world.registry.keepers, *vouched))
        hidden = [
            peer for peer in named
            if peer not in self.contacts and peer != self.peer_id and takes_part(self.log.last, peer)
            and not self.endpoint.detector.is_lost(peer, now)
        ]
        return [peer for peer in chain.from_iterable(zip_longest(found, hidden)) if peer is not None]

    def _members_first(self) -> list[str]:
        """Return the other peers in the registry in random order, those of the last commit first.

        Each of these has the last proposal. The newest claim is that of the coordinator, which decided first.
        """
        known, me = self.log.last.participants, self.peer_id
        return sorted((peer for peer in self.contacts if peer != me), key=lambda peer: peer not in known)

    def _best_first(self, found: list[str]) -> list[str]:
        known, now = self.log.last.participants, asyncio.get_running_loop().time()
        doubted = {peer for peer, until in self._doubted_until.items() if until > now}
        known_round = {peer: self.contacts[peer].round for peer in found if peer in known}

        def place(peer: str) -> tuple[bool, bool, bool, int]:
            return peer not in known, not self._is_trusted(peer), peer in doubted, -known_round.get(peer, 0)

        return sorted(found, key=place)

    def coordinators(self) -> tuple[str, ...]:
        """Return the next round's coordinators, in the order of their turns."""
        return coordinator_order(self.log.last)

    def training_after(self, commit: Commit) -> TrainingConfig:
        """Return the schedule of the phase that follows this commit."""
        return self.rules.training(commit.control, commit.round + 1)

    def check_protocol(self, theirs: int, round_number: int) -> None:
        """Raise Refused for a protocol version that is not spoken here, or that the owner does not admit to this round."""
        oldest = max(self.world.oldest_protocol, required_protocol(self.log.last.control, round_number))
        if theirs < oldest:
            detail = f"protocol {theirs} is too old for this swarm, which needs {oldest} or newer"
            raise Refused(Code.VERSION, detail, protocol=oldest)

    def why_not_admitted(self, control: Control | None) -> str:
        """Say why this control record, or the lack of an invitation, excludes this peer; "" when nothing does."""
        try:
            self.check_admission(self.peer_id, self.role == "trainer", self.invitation, control)
        except Refused as refused:
            return f"this peer ({self.peer_id}) cannot take part: {refused.detail}; ask the campaign's owner"
        return ""

    def require_admitted(self, control: Control | None) -> None:
        """Raise UserError when this control record, or the lack of an invitation, excludes this peer."""
        if problem := self.why_not_admitted(control):
            raise UserError(problem)

    def check_admission(self, peer: str, trains: bool, invitation: Invitation | None, control: Control | None) -> None:
        """Raise Refused unless the peer may take part now. `control`: the record in force."""
        rule, identity, now_s = self.campaign.config.admission, self.world.identity, self.world.wall_time()
        check_admission(rule, peer, trains, invitation, self.log.last, control, identity, now_s)

    def is_invited(self, invitation: Invitation | None) -> bool:
        """Return whether this invitation, of an admitted peer, is one of an elector or a helper to an open campaign."""
        return self.campaign.config.admission == "open" and standing_of("open", "", invitation, ()) == "vouched"

    def see_invitation(self, peer: str, invitation: Invitation) -> None:
        """Trust a peer that shows an invitation as elector or helper, before a commit names it."""
        if not self.is_invited(invitation) or self._invited.get(peer, 0) >= invitation.expires:
            return
        with contextlib.suppress(Refused):
            self.check_admission(peer, "trainer" in invitation.roles, invitation, self.controls.newest)
            self._invited[peer] = invitation.expires
            if len(self._invited) > MAX_INVITED:
                del self._invited[next(iter(self._invited))]

    async def refresh_contacts(self, only_if_due: bool = False) -> None:
        """Renew this peer's contact, look up the others, and learn the commits and control records that they are ahead by.

        `only_if_due`: look up the others only if the last time is long ago for this number of peers.
        """
        contact = Contact(
            self.campaign_hash, self.world.protocol, self.role, self.log.round, self.log.last.id,
            self.world.transport.addresses[:MAX_CONTACT_ADDRESSES], self.controls.number, self.base_loss,
            self.is_invited(self.invitation),
        )
        key, now = registry_key(self.campaign_hash), asyncio.get_running_loop().time()
        is_first = self._looked_up_at == -math.inf
        looks_up = not only_if_due or now - self._looked_up_at >= self._read_every_s()
        if looks_up:
            self._looked_up_at = now
        if is_first:  # how many others there are decides where the contact is stored
            with contextlib.suppress(PeerUnreachable):
                await self._look_up(contact, is_first)
        with contextlib.suppress(PeerUnreachable):
            await self.world.registry.put(key, pack(contact), CONTACT_TTL_S)
            if looks_up and (not is_first or len(self.contacts) <= FEW):  # few that start at once see each other
                await self._look_up(contact, is_first)
        self._observer(replace(self._seen, electorate=self.log.last.electorate))

    def _read_every_s(self) -> float:
        """Return how often to read the contacts: rarely once this peer is a member and has met all others."""
        known, taking_part = len(self.contacts), self.log.last.participants | self._planned_members
        if known > FEW and self.peer_id in self.log.last.participants and taking_part <= self._met:
            return min(known, MAX_MEMBERS) * READ_S
        return max(known / CONTACTS_READ_PER_S, min(known, READ_AGAIN_S))

    async def _look_up(self, mine: Contact, is_first: bool) -> None:
        found = await find_contacts(self.world.registry, self.world.transport, self.campaign_hash)
        found[self.peer_id] = mine
        self._met = {*found, *(self._met if len(self._met) < MAX_MET else ())}
        taking_part = sorted(peer for peer in found if takes_part(self.log.last, peer))
        left = self.departures.left_within(CONTACT_TTL_S)  # their contacts have not expired
        here = [peer for peer in taking_part if peer not in left]
        trainers = [found[peer] for peer in here if found[peer].role == "trainer"]
        vouched = sum(each.is_vouched for each in trainers) if needs_vouched(self.rules.config) else None
        self._seen = PeersSeen(len(trainers), len(here) - len(trainers), tuple(here), vouched=vouched)
        self.world.rng.shuffle(taking_part)
        reads_log = self.log.round < 0 or (is_first and self.role == "trainer")  # it starts, and asks a few others
        self.contacts = {peer: found[peer] for peer in taking_part}
        last, control = self.log.last, self.controls.number
        says_more = [
            peer for peer, contact in self.contacts.items()
            if ((contact.round, contact.commit) != (last.round, last.id) or contact.control > control) and peer != self.peer_id
        ]
        for peer in self._best_first(says_more):
            contact = self.contacts[peer]
            self.check_claim(peer, -1 if reads_log else contact.round, contact.commit, contact.control)

    def check_claim(self, peer: str, round_number: int, commit: str = "", control: int = 0) -> None:
        """Ask a peer that claims a later round, another commit for a known one, or a newer control record, for its proof.

        This happens in the background, so nothing waits for a claim. A peer that proves nothing is not believed again for a
        while. Of two proven branches the higher term wins.
        """
        is_held = max(0, self.log.begins) <= round_number <= self.log.round
        forks = is_held and commit not in ("", self.log.commit_at(round_number).id)
        has_commits, has_control = forks or round_number > self.log.round, control > self.controls.number
        is_doubted = self._doubted_until.get(peer, 0.0) > asyncio.get_running_loop().time()
        asked = sum(self._is_trusted(each) == self._is_trusted(peer) for each in self._proving)
        may_ask = not is_doubted and peer not in self._proving and asked < MAX_CONCURRENT_CLAIMS
        if (has_commits or has_control) and may_ask:
            self._proving.add(peer)
            self.spawn(self._prove(peer, self.log.begins if forks else None, has_commits, has_control))

    async def _prove(self, peer: str, after: int | None, has_commits: bool, has_control: bool) -> None:
        before, clock = (self.log.last.id, self.controls.number), asyncio.get_running_loop().time
        try:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                if has_control:
                    await self.decisions.take_control_from(peer)
                if has_commits:
                    await self.decisions.learn_from(peer, after, is_patient=False)
            self._doubted_until = {each: until for each, until in self._doubted_until.items() if until > clock()}
            if (self.log.last.id, self.controls.number) == before:
                self._doubted_until[peer] = clock() + DOUBT_S
        finally:
            self._proving.discard(peer)

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(CONTACT_EVERY_S)
            try:
                await self.refresh_contacts(only_if_due=True)
            except Exception:  # a contact that is not renewed makes this peer disappear
                logger.exception("refreshing the contacts failed")

    def _check_method(self, peer: str, method: str) -> None:
        """Raise Refused for an excluded peer, which can only fetch what says so: the owner's record, or the commits."""
        if method != CONTROL and is_banned(self.log.last.control, peer):
            raise Refused(Code.NOT_ADMITTED, "the owner of this campaign banned this peer")
        if method not in (CONTROL, COMMITS) and peer in self.log.last.excluded:
            raise Refused(Code.NOT_ADMITTED, "a proof excludes this peer: it made a wrong result, or voted twice in a ballot")

    async def _on_campaign(self, stream: Stream) -> None:
        try:
            self.check_protocol(unpack(CampaignRequest, await stream.message()).protocol, self.log.round + 1)
        except Refused as refused:
            logger.warning("refused %s: %s", stream.remote[-6:], refused)
            raise
        blobs = tuple((sha, len(body)) for sha, body in self._blobs.items())
        campaign = self.campaign.canonical_json()
        await stream.send(pack(CampaignRecord(self.world.protocol, __version__, campaign, self.log.genesis, blobs)))
