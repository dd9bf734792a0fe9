"""One attempt at one round, at its coordinator: gather, prepare, plan, collect what is staged, decide.

Each member holds one stream with the coordinator for the whole attempt: it sends its announcement, gets the plan, sends what it
staged, gets the decided commit. A stream that breaks tells both ends at once. An attempt that fails changes nothing anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from spes_p2p.consensus.admission import standing_of
from spes_p2p.consensus.control import is_banned, is_paused, rolls_back
from spes_p2p.consensus.proposer import Proposer, ProposerState, Reply, Send
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import restored
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Control, Decide, Prepare, Promise, Signed, Vote
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.methods import ACCEPT, DECIDE, PREPARE
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Proposal, Report, Stalled
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.peer.collecting import StagedReports
from spes_p2p.peer.gathering import PING_EVERY_S, AttemptFailed, Gathering, RoundContext
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.validity import absent_of
from spes_p2p.rounds.claims import STRANGERS_BYTES, longest_of_stranger, outstanding
from spes_p2p.rounds.commit import make_commit
from spes_p2p.rounds.merge import Donors, nearest_experts
from spes_p2p.rounds.plan import alpha_due, crowded_out, standings_of
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import Results

logger = logging.getLogger(__name__)

ANNOUNCED_BYTES, RETURNED_BYTES = MAX_FRAME_BYTES * 3 // 4, MAX_FRAME_BYTES // 8
"""Bound what a proposal holds of announcements and of leaving peers' statements; the rest of its frame is for the donors."""
VOTE_SILENCES = 3
"""Multiples of `silence_s` in which an elector votes: it may fetch evidence, and look for electors that are called absent."""


class Coordination:
    """One attempt at the round after `parent`."""

    def __init__(self, context: RoundContext, replica: Replica):
        self.parent = context.parent
        self.failed = False
        self._context, self._node, self._replica = context, context.node, replica
        self._members = Gathering(context)
        self._reports: StagedReports | None = None
        """None until the round is planned."""
        loop = asyncio.get_running_loop()
        self._proposal_to: Callable[[str], Message]
        self._decided_to: Callable[[str], Message]
        """What each member gets as the proposal, and as the decided commit; once there is one."""
        self._order: list[str] = []
        """The plan's members in the order in which records are handed on."""
        self._hidden: Collection[str] = ()
        """Those that nobody can dial, and strangers that kept a record to themselves."""
        self._plan: asyncio.Future[Plan | CertifiedCommit] = loop.create_future()
        self._decided: asyncio.Future[CertifiedCommit] = loop.create_future()

    async def run(self) -> None:
        """Bring the round to a decision, or fail the attempt for all its members."""
        try:
            await self._sit_out_pause()
            await self._members.wait()
            decided = await self._decide()
            self._node.decisions.learn(decided)
            commit = decided.commit
            order, hands_on = {peer: place for place, peer in enumerate(self._order)}, self._node.relay.hands_on
            receivers = sorted(commit.members, key=lambda peer: (
                peer not in commit.electorate, peer not in commit.trusted, peer not in commit.trusted and not hands_on(peer),
                order.get(peer, 0),
            ))
            self._decided_to = self._node.relay.addressed(Kind.DECIDED, pack(decided), receivers, commit.plan, self._hidden)
            self._decided.set_result(decided)
            await self._notify_electors(decided)
        except (AttemptFailed, Refused, WireError, UserError) as error:
            self._fail(str(error))
        except Exception:
            logger.exception("coordinating round %d failed", self.parent.round + 1)
            self._fail("an error at the coordinator")

    @property
    def is_planned(self) -> bool:
        """Whether the plan is made: members may be exchanging by it."""
        return self._plan.done()

    def give_up(self) -> None:
        """Fail the attempt, because this peer leaves."""
        self._fail("the coordinator leaves", Code.LEAVING)

    def _fail(self, reason: str, code: Code = Code.FAILED) -> None:
        self.failed = True
        for future in (self._plan, self._decided):
            if not future.done():
                future.set_exception(Refused(code, reason if code is Code.LEAVING else f"attempt failed: {reason}"))
                future.exception()

    async def serve(self, stream: Stream, announcement: Announcement, signed: Signed) -> None:
        """Serve one member's stream, from its announcement, which is checked and `signed`, to the decided commit."""
        if self._plan.done():
            self._context.too_late.add(stream.remote, self.parent, self._node.is_invited(announcement.invitation))
            raise Refused(Code.CLOSED, "it has begun without this peer, which takes part in the next one")
        self._check_length(announcement, signed)
        self._members.join(stream, announcement, signed)
        try:
            plan = await stream.alive(asyncio.shield(self._plan))
            if isinstance(plan, Plan):
                await self._serve_proposal(stream, plan, announcement, pack(signed) + plan.id.encode())
            await stream.alive(asyncio.shield(self._decided))
            await self._send_record(stream, self._decided_to)
        finally:
            self._members.leave(stream)

    def _check_length(self, announcement: Announcement, signed: Signed) -> None:
        """Raise Refused for a stranger's announcement that is longer than its work explains."""
        log, config = self._node.log, self._node.rules.config
        is_short = len(signed.record) <= STRANGERS_BYTES
        if is_short or standing_of(config.admission, signed.peer, announcement.invitation, self.parent.helpers) != "newcomer":
            return
        work = outstanding(log.recent(self.parent.round), signed.peer, config.sync.overlap)
        if len(signed.record) > longest_of_stranger(work, config.model.moe_num_experts):
            raise Refused(Code.MALFORMED, "malformed announcement: too long for your outstanding work")

    async def _serve_proposal(self, stream: Stream, plan: Plan, announcement: Announcement, known: bytes) -> None:
        """Send the plan and its revisions and take the member's reports, until there is a decision.

        `known`: the dictionary of reports (`messages/compact.py`).
        """
        index, reports = plan.index(stream.remote), self._reports
        assert reports is not None
        if announcement.base_digest != plan.base_digest:
            raise Refused(Code.DIGEST, "your base differs from most members' bases")
        if index is None:
            raise Refused(Code.CLOSED, "it has begun without this peer, which takes part in the next one")
        await self._send_record(stream, self._proposal_to)
        report: asyncio.Future[Message] | None = None
        try:
            await reports.begin(stream)
            while not self._decided.done():
                report = report or asyncio.ensure_future(stream.any_message())
                either: set[asyncio.Future[Any]] = {report, self._decided}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if report.done():
                    message = restored(report.result(), known)
                    if message is None:
                        await stream.send(kind=Kind.IN_FULL)
                    elif message.kind == Kind.STALLED:
                        reports.complain(index, unpack(Stalled, message.body))
                    elif message.kind == Kind.REPORT:
                        await reports.take(index, await unpack_beside(Report, message.body))
                    else:
                        raise WireError(f"a frame of kind {message.kind} where a report belongs")
                    report = None
        finally:
            reports.end(stream)
            if report is not None:
                await end_tasks([report])

    async def _send_record(self, stream: Stream, record_to: Callable[[str], Message]) -> None:
        message = record_to(stream.remote)
        await stream.send(bytes(message.body), kind=message.kind)

    async def _sit_out_pause(self) -> None:
        """Wait while the last commit pauses the campaign and there is no newer control record."""
        while is_paused(self.parent.control) and self._next_control() == self.parent.control:
            self._context.require_open()
            await asyncio.sleep(PING_EVERY_S)

    def _next_control(self) -> Control | None:
        """Return the record for the next commit: the newest one, but a rollback only while a member keeps the base for it."""
        control = self._node.controls.newest
        if control is None or not rolls_back(control, self.parent):
            return control
        kept = self._members.keeps_base_of(control.rollback)
        return control if kept and self._node.log.rolled_back(self.parent, control) is not None else self.parent.control

    async def _decide(self) -> CertifiedCommit:
        """Collect promises; plan and exchange, unless a promise or a control record names the commit; collect votes."""
        node = self._node
        validity = node.decisions.validity
        proposer = Proposer(node.log, node.world.identity, validity.is_valid)
        await _drive(node, proposer, proposer.prepare(node.departures.farewells()))
        control = self._next_control()
        # Paxos: a commit that some elector accepted in an earlier ballot may be decided already and must be proposed again.
        proposal = proposer.bound or node.log.rolled_back(self.parent, control)
        if proposal is None:
            plan = await self._make_plan(proposer.ballot, control)
            self._reports = StagedReports(
                self._context, self._members, Results.empty(plan, self._replica.layout, self._replica.codecs)
            )
            self._node.meet_members(plan)
            self._order = self._in_order_of_trust(plan.members)
            self._hidden = frozenset(member.peer for member in plan.members if not self._hands_on(member))
            self._proposal_to = self._node.relay.addressed(
                Kind.PROPOSAL, pack(plan.proposal), self._order, self.parent.plan, self._hidden, self._donors(plan)
            )
            self._plan.set_result(plan)
            await self._reports.wait()
            results = self._reports.results
            proposal = make_commit(self.parent, plan, results, self._reports.staged)
            validity.hold(proposal, results, self._reports.signed())
        evidence = validity.evidence_of(proposal)
        await _drive(node, proposer, proposer.propose(proposal, evidence, node.departures.farewells()))
        decided = proposer.decided
        assert decided is not None
        if not self._plan.done():
            self._plan.set_result(decided)
        return decided

    def _in_order_of_trust(self, members: Sequence[Member]) -> list[str]:
        """Return the members as the tree has them in which records are handed on; those near its root hand on most.

        Strangers hand on to strangers only, since one may keep a record to itself; so may who cannot be dialled. Nobody can
        make an identity that comes first among them, and those whose children had to ask here come last.
        """
        node = self._node

        def place(member: Member) -> tuple[bool | float, ...]:
            drawn = (member.standing == "newcomer", node.world.rng.random()) if member.is_stranger else ()
            return member.is_stranger, not self._hands_on(member), *drawn

        return [member.peer for member in sorted(members, key=place)]

    def _donors(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        """Return whom each member that was none of the last round asks for that round's proposal, and whom if this one is busy.

        As few as can be ask the same one. The last in the tree come first, since they hand on least.
        """
        had = set(self.parent.members)
        cannot = {self._node.peer_id, *self._hidden, *(member.peer for member in plan.members if member.is_stranger)}
        giving = [peer for peer in reversed(self._order) if peer in had and peer not in cannot]
        lack = [peer for peer in self._order if peer not in had]
        spare = giving[len(lack) :] or giving
        pairs = zip(itertools.cycle(giving), itertools.cycle(spare), strict=True)
        return dict(zip(lack, pairs, strict=False))

    def _hands_on(self, member: Member) -> bool:
        return member.bandwidth > 0 and (not member.is_stranger or self._node.relay.hands_on(member.peer))

    async def _make_plan(self, ballot: Ballot, control: Control | None) -> Plan:
        node, announced, left = self._node, self._members.announced, self._context.gone()
        proofs = node.decisions.validity.proofs
        accused, excluded = proofs.accused(self.parent), {*self.parent.excluded, *proofs.proven()}  # even if no commit has room
        there = {
            peer: announced[peer] for peer in self._members.alive
            if peer not in left and peer not in excluded and not is_banned(control, peer)
        }
        services = node.log.services(self.parent.round)
        standings = standings_of(there, node.log.recent(self.parent.round), services, node.rules.config)
        for peer in crowded_out(standings, services, self.parent, node.world.rng):
            del there[peer]
        if not any(announcement.trains for announcement in there.values()):
            raise AttemptFailed("no trainer is left")
        voters = [peer for peer in there if peer in self.parent.electorate] or there  # anybody can announce as many strangers
        digest = Counter(announced[peer].base_digest for peer in voters).most_common(1)[0][0]
        agreeing = [self._members.signed[peer] for peer, each in there.items() if each.base_digest == digest]
        known = {peer for peer, standing in standings.items() if standing in ("vouched", "invited")}
        last = {*self.parent.electorate, *self.parent.members}
        announcements = fitting(agreeing, ANNOUNCED_BYTES, known, last)
        returned = fitting(left.values(), RETURNED_BYTES, node.vouched)
        members = [each.peer for each in announcements]
        tokens = sum(announced[peer].tokens for peer in members)
        donors = await self._choose_donors() if alpha_due(self.parent, tokens, node.rules) > 0 else None
        absent = await absent_of(node.endpoint, sorted(set(self.parent.electorate) - {*members, *left}))
        proposal = Proposal(
            self.parent.round + 1, self.parent.id, ballot, announcements, returned, absent, donors,
            self._members.arrivals(members), control, accused,
        )
        return await node.decisions.validity.derive_in_worker(proposal)

    async def _choose_donors(self) -> Donors | None:
        """Return the merge donors; None, which leaves this merge out, when this peer does not hold the last base."""
        replica, top_k = self._replica, self._node.campaign.config.merge.merge_top_k
        if not replica.has_base or replica.base.round != self.parent.round:
            logger.warning("round %d goes without its merge: the coordinator is still catching up", self.parent.round + 1)
            return None
        run = self._node.world.run_blocking
        donors: Donors = await run(nearest_experts, replica.base.values, replica.layout, top_k)
        return donors

    async def _notify_electors(self, decided: CertifiedCommit) -> None:
        endpoint, request = self._node.endpoint, pack(Decide((decided,)))
        outside = sorted(set(self.parent.electorate) - set(decided.commit.members))
        asked = (endpoint.ask(elector, DECIDE, request, endpoint.silence_s) for elector in outside)
        await asyncio.gather(*asked, return_exceptions=True)


def fitting(signed: Iterable[Signed], budget_bytes: int, *first: Collection[str]) -> tuple[Signed, ...]:
    """Return these records by peer, without the longest where all do not fit: no member makes a plan too long for all.

    At most MAX_MEMBERS of them, since nobody reads a proposal with more. Each of `first` stays before others, in this order.
    """
    kept: list[Signed] = []
    for each in sorted(signed, key=lambda each: (*(each.peer not in peers for peers in first), len(each.record))):
        size = len(pack(each))
        if size <= budget_bytes and len(kept) < MAX_MEMBERS:
            kept.append(each)
            budget_bytes -= size
    return tuple(sorted(kept, key=lambda each: each.peer))


async def _drive(node: Node, proposer: Proposer, sends: Sequence[Send]) -> None:
    """Send these requests and pass the replies to the proposer until it waits for none. Raises AttemptFailed."""
    asked: dict[asyncio.Task[Reply | None], Send] = {}
    accept_to = _accept_to(node, sends)
    try:
        while proposer.waits:
            asked.update((asyncio.ensure_future(_reply(node, send, accept_to)), send) for send in sends)
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            answered = [(asked.pop(task), task.result()) for task in list(asked) if task.done()]
            sends = [more for send, reply in answered for more in proposer.receive(send.to, send.request, reply)]
    finally:
        await end_tasks(asked)
    if proposer.state is ProposerState.FAILED:
        raise AttemptFailed(proposer.failure)


def _accept_to(node: Node, sends: Sequence[Send]) -> Callable[[str], Message]:
    """Return what to send each elector in place of the first of these requests: its commit and evidence grow with members."""
    request, electors = sends[0].request, [send.to for send in sends]
    if not isinstance(request, Accept):
        return lambda elector: Message(pack(request))
    members = set(request.commit.members)  # who is none may be away, and passes nothing on
    there_first = sorted(electors, key=lambda elector: (elector not in members, elector))
    return node.relay.addressed(Kind.MESSAGE, pack(request), there_first, request.commit.plan)


async def _reply(node: Node, send: Send, accept_to: Callable[[str], Message]) -> Reply | None:
    """Return an elector's reply; None when it refuses, is unreachable, sends something else, or names an invalid commit."""
    endpoint = node.endpoint
    try:
        if isinstance(send.request, Prepare):
            reply = await endpoint.ask(send.to, PREPARE, pack(send.request), endpoint.silence_s)
            promise = await unpack_beside(Promise, reply)
            if promise.accepted is not None:
                await node.decisions.validity.require(promise.accepted, promise.evidence, send.to)
            return promise
        if isinstance(send.request, Decide):
            return await endpoint.ask(send.to, DECIDE, pack(send.request), endpoint.silence_s)
        body, kind = accept_to(send.to)
        return unpack(Vote, await endpoint.ask(send.to, ACCEPT, bytes(body), VOTE_SILENCES * endpoint.silence_s, kind))
    except Refused as error:
        if error.code is Code.NOT_PROVEN:
            logger.warning("round %d: elector %s: %s", node.log.round + 1, send.to[-6:], error)
        return None
    except (PeerUnreachable, WireError) as error:
        logger.debug("elector %s: %s", send.to[-6:], error)
        return None
