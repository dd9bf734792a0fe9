"""What this peer knows to be decided: commit log, votes and control records on its disk, and the requests about them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from spes_p2p.consensus.control import number_of, owner_of
from spes_p2p.consensus.fork import OtherBranches
from spes_p2p.consensus.output import Output
from spes_p2p.content.relay import Relay
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import compressed
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
    MilestoneRequest,
    Prepare,
    ReformRequest,
)
from spes_p2p.messages.methods import ACCEPT, COMMITS, CONTROL, DECIDE, MILESTONE, PREPARE, REFORM
from spes_p2p.messages.refusals import Code
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.unpacking import unpack_beside, unpack_page
from spes_p2p.peer.durable import open_participant, perform
from spes_p2p.peer.milestones import fetch_milestone
from spes_p2p.peer.validity import Validity
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.rounds.remembered import remembered

T = TypeVar("T")

logger = logging.getLogger(__name__)

COMMITS_PER_MESSAGE = 200
PAGE_SAVING = 3
"""Compression makes the commits of a page after the first this much smaller: they name the same peers and keys."""
MAX_ASKED, FIRST_ASKED = 16, 2
"""Ask at most this many peers for certificates; one honest answer is enough. The first ones bring what there is, in most
cases, so that the others need not send the same. The owner's peer is none of them: it is the only one that all joiners know."""

_packed_once = remembered(1)(pack)
"""For a milestone, which may have megabytes."""


class Decisions:
    """The consensus core of one peer, on its store and its endpoint."""

    def __init__(self, world: World, endpoint: RpcEndpoint, genesis: Commit):
        self._world, self._endpoint = world, endpoint
        self._participant = open_participant(world.store, world.identity, genesis, world.rng, self._is_valid)
        self._acceptor = self._participant.acceptor
        self.validity: Validity
        """Set by `check_with`, before requests are served."""
        self.relay: Relay
        """Set by the node, before requests are served."""
        self.log = self._participant.log
        self.other_branches = OtherBranches(self.log, world.identity)
        self.controls = self._participant.controls
        self.learned_at = 0.0
        """Loop time at which the last commit became known here; of the start when none did since."""

    @property
    def incarnation(self) -> str:
        """Id of the vote file."""
        return self._acceptor.incarnation

    @property
    def may_vote(self) -> bool:
        """Whether this peer can vote on the next round."""
        return self._acceptor.may_vote

    def check_with(self, validity: Validity) -> None:
        """Check plans and commits with this from now on."""
        self.validity = validity
        validity.recall(self._acceptor.votes)

    async def serve(self) -> None:
        """Answer requests from now on."""
        self.learned_at = asyncio.get_running_loop().time()
        handlers = {
            COMMITS: self._on_commits, PREPARE: self._on_prepare, ACCEPT: self._on_accept, DECIDE: self._on_decide,
            CONTROL: self._on_control, MILESTONE: self._on_milestone,
        }
        for method, handler in handlers.items():
            await self._endpoint.serve(method, handler)

    def learn(self, decided: CertifiedCommit) -> None:
        """Append a certified commit unless it is known. Raises Refused when it does not follow the log, is not proven, or
        contradicts its plan.
        """
        try:
            learned = self._participant.learn(decided)
        except Refused:
            if not (branch := self.other_branches.offered(decided)):
                raise
            learned = self._participant.learn_branch(branch)
        if learned.reply:
            self.validity.require_fit(decided)
            self._perform(learned)
            self.learned_at = asyncio.get_running_loop().time()

    def _learn_or_hold(self, decided: CertifiedCommit) -> None:
        try:
            self.learn(decided)
        except Refused:
            if not self.other_branches.holds(decided.commit):
                raise

    async def learn_from(self, peer: str, after: int | None = None, is_patient: bool = True) -> None:
        """Fetch the peer's certificates after this round (default: the last one here), or all of them where the logs fork.

        Where the peer's log begins later, this one begins at its milestone from then on. A peer that lies gives little: each
        page continues the last one with commits that are known or proven, the log is read from its beginning once, and after
        the first page something new must come every `silence_s`. `is_patient`: ask a busy peer again. Raises PeerUnreachable,
        Refused, WireError.
        """
        after = self.log.round if after is None else after
        clock, may_go_back = asyncio.get_running_loop().time, True
        known, until = self._known(), math.inf
        while True:
            try:
                reply = await self._endpoint.ask_in_turn(peer, COMMITS, pack(CommitsRequest(after)), is_patient)
            except Refused as refused:
                if refused.code is not Code.NOT_HERE or not await self.take_milestone_from(peer, is_patient):
                    raise
                after = self.log.begins
                continue
            found = (await unpack_page(Decide, reply, self._endpoint.shares.is_known(peer))).decided
            if not found:
                return
            if any(decided.commit.round != after + 1 + place for place, decided in enumerate(found)):
                raise WireError("a page of other commits than were asked for")
            try:
                for decided in found:
                    self._learn_or_hold(decided)
            except Refused:
                if not may_go_back or after == self.log.begins:
                    raise
                may_go_back, after = False, self.log.begins
                continue
            after = found[-1].commit.round
            if until == math.inf or self._known() != known:
                known, until = self._known(), clock() + self._endpoint.silence_s
            elif clock() >= until:
                raise PeerUnreachable(f"{peer[-6:]} gives nothing but known commits")

    def _known(self) -> tuple[str, int]:
        """Return what changes with each commit that is learned, or held as one of another branch."""
        return self.log.last.id, self.other_branches.held

    async def take_milestone_from(self, peer: str, is_patient: bool = True) -> bool:
        """Begin the log at the peer's milestone; False when it is no later. Raises PeerUnreachable, Refused, WireError."""
        found = await fetch_milestone(self._endpoint, peer, self.log.begins, is_patient)
        return self._perform(self._participant.take_milestone(found))

    async def shorten_log(self, others: Sequence[str]) -> None:
        """Begin the log at a newer milestone if one is due: the owner signs it, other peers ask one of `others`."""
        if not self.log.is_long:
            return
        try:
            if self._world.identity.peer_id == owner_of(self.log.genesis):
                self._perform(self._participant.sign_milestone())
            elif others:
                await self.take_milestone_from(self._world.rng.choice(others))
        except (PeerUnreachable, Refused, WireError) as error:
            logger.debug("no milestone: %s", error)
        except UserError as error:
            logger.warning("the log is not shortened: %s", error)

    async def learn_from_all(self, peers: Iterable[str]) -> None:
        """Fetch missing certificates from the first MAX_ASKED of these peers.

        Those that do not answer are skipped. Ends when nothing new was learned for `silence_s`: a peer that gives commits one
        by one holds up nobody. Once those have answered for whom the owner vouches, the others have a heartbeat's time.
        """

        async def learn_from(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self.learn_from(peer)

        owner = owner_of(self.log.genesis)
        some = sorted(islice(peers, MAX_ASKED), key=lambda peer: peer == owner)
        asked = {asyncio.ensure_future(learn_from(peer)): peer for peer in some[:FIRST_ASKED]}
        clock = asyncio.get_running_loop().time
        heartbeat_s, silence_s = self._endpoint.detector.heartbeat_s, self._endpoint.silence_s
        try:
            if asked:
                await asyncio.wait(asked, timeout=heartbeat_s)
            asked |= {asyncio.ensure_future(learn_from(peer)): peer for peer in some[FIRST_ASKED:]}
            known, until = self.log.last.id, clock() + silence_s
            while (left := [each for each in asked if not each.done()]) and clock() < until:
                await asyncio.wait(left, timeout=until - clock(), return_when=asyncio.FIRST_COMPLETED)
                if self.log.last.id != known:
                    known, until = self.log.last.id, clock() + silence_s
                vouched = [each for each, peer in asked.items() if self._endpoint.shares.is_trusted(peer)]
                if vouched and all(each.done() for each in vouched):
                    until = min(until, clock() + heartbeat_s)
        finally:
            await end_tasks(asked)

    async def ask_for_reform(self) -> None:
        """Ask the campaign's owner for a new term, where rounds find no majority or no base, or one was decided twice.

        The owner may decline.
        """
        request, fork = pack(ReformRequest(self.log.last.id)), self.other_branches.fork
        for known in () if fork is None else (fork.mine, fork.other):
            with contextlib.suppress(PeerUnreachable, Refused):
                await self._endpoint.ask(owner_of(self.log.last), DECIDE, pack(Decide((known,))), self._endpoint.silence_s)
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            reply = await self._endpoint.ask(owner_of(self.log.last), REFORM, request, 2 * self._endpoint.silence_s)
            for decided in (await unpack_beside(Decide, reply)).decided:
                self.learn(decided)

    def open_term(self, round_number: int) -> CertifiedCommit:
        """Open a term after this round of the log. Raises Refused when this peer is not the campaign's owner."""
        fork = self.other_branches.fork
        decided = self._perform(self._participant.open_term(round_number, fork.liars if fork is not None else ()))
        self.learned_at = asyncio.get_running_loop().time()
        return decided

    def take_control(self, control: Control | None) -> bool:
        """Keep a control record; False when it is not newer. Raises Refused when the owner did not sign it."""
        return self._perform(self.controls.take(control))

    async def take_control_from(self, peer: str) -> bool:
        """Fetch the peer's newest control record; False when it is not newer. Raises PeerUnreachable, Refused, WireError."""
        reply = await self._endpoint.ask(peer, CONTROL, pack(ControlRequest(None)), self._endpoint.silence_s)
        return self.take_control((await unpack_beside(Known, reply, self._endpoint.shares.is_known(peer))).newest)

    async def take_control_from_all(self, peers: Iterable[str]) -> None:
        """Fetch the newest control record from the first MAX_ASKED of these peers; those that do not answer are skipped."""

        async def take_from(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self.take_control_from(peer)

        await asyncio.gather(*(take_from(peer) for peer in islice(peers, MAX_ASKED)))

    def leave(self) -> Farewell | None:
        """Give up this peer's seat in the next round; None when it keeps it."""
        return self._perform(self._acceptor.leave())

    def farewell(self) -> Farewell | None:
        """Return the farewell with which this peer gave up its seat in the next round; None when it has not."""
        return self._acceptor.farewell()

    async def _on_commits(self, stream: Stream) -> None:
        after = unpack(CommitsRequest, await stream.message()).after
        if after < self.log.begins - 1:
            raise Refused(Code.NOT_HERE, f"the log begins with round {self.log.begins}")
        page, first = self.log.packed_page(after, COMMITS_PER_MESSAGE), len(self.log.packed_page(after, 1))
        await stream.answer(lambda: compressed(page), first + (len(page) - first) // PAGE_SAVING)

    async def _on_milestone(self, stream: Stream) -> None:
        after, milestone = unpack(MilestoneRequest, await stream.message()).after, self.log.milestone
        if milestone is None or milestone.decided.commit.round <= after:
            raise Refused(Code.NOT_HERE, f"no milestone after round {after}")
        packed = _packed_once(milestone)
        await stream.answer(lambda: packed, len(packed))

    async def _on_prepare(self, stream: Stream) -> None:
        request = unpack(Prepare, await stream.message())
        await stream.send(pack(self._perform(self._acceptor.prepare(stream.remote, request))))

    async def _on_accept(self, stream: Stream) -> None:
        if stream.remote not in self.log.last.electorate:
            raise Refused(Code.NOT_ALLOWED, "the ballot's coordinator is not an elector of this round")
        message = await self.relay.received(await stream.any_message(), stream.remote)
        request = await unpack_beside(Accept, message.body)
        try:
            await self.validity.require(request.commit, request.evidence, stream.remote)
        except Refused as refused:
            if request.commit.round > self.log.round:  # otherwise it was decided meanwhile
                logger.warning("round %d: no vote for what %s proposes: %s", self.log.round + 1, stream.remote, refused)
            raise
        request = replace(request, evidence=self.validity.evidence_of(request.commit))
        attachments = self.validity.attachments(request.commit)
        await stream.send(pack(self._perform(self._acceptor.accept(stream.remote, request, attachments))))

    async def _on_decide(self, stream: Stream) -> None:
        is_known = self._endpoint.shares.is_known(stream.remote)
        for decided in (await unpack_beside(Decide, await stream.message(), is_known)).decided:
            self.learn(decided)
        await stream.send(b"")

    async def _on_control(self, stream: Stream) -> None:
        """Take the record that the request brings, if any, and answer with the newest one."""
        is_known = self._endpoint.shares.is_known(stream.remote)
        self.take_control((await unpack_beside(ControlRequest, await stream.message(), is_known)).brought)
        commit, archived = self.log.last, tuple(archived_rounds(self._world.store))
        known = Known(
            self.controls.newest, number_of(commit.control), commit.round, commit.step, archived, commit.excluded
        )
        await stream.send(pack(known))

    def _is_valid(self, commit: Commit) -> bool:
        return self.validity.is_valid(commit)

    def _perform(self, output: Output[T]) -> T:
        return perform(self._world.store, self._participant, output)
