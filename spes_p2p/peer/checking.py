"""Checks of reducers after a round: each member has another one that makes some of its means again, in the background.

The checker asks the reducer for the signed inputs and the encoded updates of a mean that it has drawn, and compares. A reducer
that does not answer, after a restart for instance, is named in the next announcement. That proves nothing, but neither of the
two reduces for a while. One that has not learned of the round yet is asked again until the next round is decided, and named
only if it is a member of that one, which it cannot be without the commit. A checker that comes too late names nobody: reducers
keep inputs until the round after.
"""

from __future__ import annotations

import asyncio
import logging
import math

from spes_p2p.consensus.signed import sign
from spes_p2p.content.pieces import Body, Content, Piece
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.fields import MAX_MEMBERS, MAX_UNANSWERED
from spes_p2p.messages.methods import INPUTS
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Inputs, InputsRequest, Pushed, Unanswered, WrongSum
from spes_p2p.net.rpc import Stream
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.observe.events import Observer, ResultsChecked
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.kept_results import MAX_CONCURRENT_UPLOADS
from spes_p2p.peer.node import Node
from spes_p2p.peer.proofs import Proofs
from spes_p2p.rounds.audits import AUDITED_PARTS, are_audited, auditor_of, auditors
from spes_p2p.rounds.checks import IN_REGION, checkers, drawn, expected_checks, means_by_reducer, weight_of_checks
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.sums import read_inputs

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""A reducer that has not learned the commit yet is asked again after this long."""


class Checking:
    """Checks others, and answers those that check this peer."""

    def __init__(self, node: Node, exchanges: Exchanges, proofs: Proofs, observer: Observer):
        self._node, self._exchanges, self._proofs, self._observer = node, exchanges, proofs, observer
        self._asked: dict[str, set[int]] = {}
        """By plan: the parts of this peer's whose inputs were asked for."""
        self._unanswered: tuple[Unanswered, ...] = ()

    async def serve(self) -> None:
        """Answer from now on."""
        await self._node.endpoint.serve(INPUTS, self._on_inputs)
        await self._node.content.serve("updates", self._update, MAX_CONCURRENT_UPLOADS)
        await self._proofs.serve(self._node.content)

    def begin(self, commit: Commit, results: Results) -> None:
        """Check, in the background, the reducers of a round that was just applied which are this peer's to check."""
        means = means_by_reducer(commit, results)
        mine = [peer for peer, by in checkers(commit, self._rule).items() if by == self._node.peer_id and peer in means]
        weights = [weight_of_checks(results.plan, self._node.peer_id, peer) for peer in mine]
        for peer, more in zip(mine, weights, strict=True):
            if chosen := drawn(means[peer], len(means), more, self._node.world.rng):
                self._node.spawn(self._check(commit, results, peer, chosen))

    def unanswered(self) -> tuple[Unanswered, ...]:
        """Return which reducers of the last two rounds did not show their inputs, for the announcement."""
        return tuple(each for each in self._unanswered if each.round >= self._node.log.round - 1)[-MAX_UNANSWERED:]

    @property
    def _rule(self) -> str:
        return self._node.campaign.config.admission

    async def _check(self, commit: Commit, results: Results, reducer: str, parts: list[Part]) -> None:
        is_wrong, is_silent, clock = False, False, asyncio.get_running_loop().time
        for part in parts:
            began = clock()
            try:
                proof = WrongSum(commit.round, commit.id, part.index, await self._inputs(results, part))
                if await self._proofs.holds(proof, [reducer]):
                    is_wrong = True
                    everybody = sorted(commit.participants - {self._node.peer_id, reducer})
                    await self._proofs.tell(proof, everybody)
            except (PeerUnreachable, Refused, WireError) as error:
                is_behind = isinstance(error, Refused) and error.code is Code.BEHIND
                is_silent |= not is_behind or self._knew(commit, reducer, clock() - began)
                logger.info("round %d: part %d of %s is not checked: %s", commit.round, part.index, reducer[-6:], error)
        named = (reducer,) if is_silent else ()
        self._unanswered = (*self.unanswered(), *(Unanswered(commit.round, peer) for peer in named))
        silent = tuple(peer for peer in named if not self._node.departures.has_left(peer))
        self._observer(ResultsChecked(commit.round, len(parts), (reducer,) * is_wrong, silent))

    def _knew(self, commit: Commit, reducer: str, asked_s: float) -> bool:
        """Return whether a reducer knew this commit when it said that it was behind: the next round has it as a member.

        If it was asked for less than `silence_s`, it may have kept the inputs no longer.
        """
        log, following = self._node.log, commit.round + 1
        is_member = log.begins < following <= log.round and reducer in log.commit_at(following).members
        return is_member and asked_s > self._node.endpoint.silence_s

    async def _inputs(self, results: Results, part: Part, patience_s: float = math.inf) -> Inputs:
        """Ask a reducer for the inputs of a mean. Raises PeerUnreachable, Refused, WireError.

        One that is behind is asked again for `patience_s`, or until the next round is decided: it keeps them no longer.
        """
        endpoint, plan, clock = self._node.endpoint, results.plan, asyncio.get_running_loop().time
        give_up_at = clock() + patience_s
        reducer, request = plan.members[part.reducer].peer, pack(InputsRequest(plan.id, part.index))
        while True:
            try:
                return await unpack_beside(Inputs, await endpoint.ask(reducer, INPUTS, request, 2 * endpoint.silence_s))
            except Refused as refused:
                if refused.code is not Code.BEHIND or self._node.log.round > plan.round or clock() > give_up_at:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def update_of(self, results: Results, part: Part, member: int) -> Body:
        """Return a member's encoded update of a mean of the last round, from its reducer, for an audit of this member.

        Raises PeerUnreachable, Refused, WireError.
        """
        plan, fetcher, found = results.plan, self._node.fetcher, list[Body]()
        reducer = plan.members[part.reducer].peer
        inputs = await self._inputs(results, part, 2 * self._node.endpoint.silence_s)
        update = read_inputs(inputs, part, results, self._node.world.identity)[member]

        async def keep(index: int, body: Body) -> None:
            found.append(body)

        content = Content("updates", plan.id, lambda index: Piece(update.digest, part.encoded_bytes))
        if await fetcher.fetch(content, [part.index * MAX_MEMBERS + member], [fetcher.peers([reducer])], keep):
            raise PeerUnreachable(f"{reducer[-6:]} does not give an update of part {part.index}")
        return found[0]

    def _audits(self, commit: Commit, part: int, peer: str) -> bool:
        """Return whether a peer may have the inputs of a part to audit one of its contributors."""
        inputs = self._exchanges.inputs_of(commit.plan, part) or {}
        members = (commit.members[i] for i in inputs)
        return are_audited(self._node.campaign.config) and any(auditor_of(commit, each) == peer for each in members)

    async def _on_inputs(self, stream: Stream) -> None:
        request, log = unpack(InputsRequest, await stream.message()), self._node.log
        commit = next((each.commit for each in log.since(log.round - 2) if each.commit.plan == request.plan), None)
        if commit is None:
            raise Refused(Code.BEHIND, "that round is not known here yet, or no longer")
        audits = self._audits(commit, request.part, stream.remote)
        if not audits and checkers(commit, self._rule).get(self._node.peer_id) != stream.remote:
            raise Refused(Code.NOT_ALLOWED, "another member checks this peer")
        inputs = self._exchanges.inputs_of(request.plan, request.part)
        if inputs is None and commit.round < log.round:
            raise Refused(Code.BEHIND, "the inputs of that round are kept no longer")
        if inputs is None:
            raise Refused(Code.NOT_HERE, "this peer has no inputs of that part")
        asked = self._asked.get(request.plan, set()) | {request.part}
        most = 1 + math.ceil(expected_checks(self._exchanges.count_of_inputs(request.plan), 1, IN_REGION))
        if len(asked) > most + AUDITED_PARTS * len(auditors(commit)):
            raise Refused(Code.NOT_ALLOWED, "that is more than a check needs")
        self._asked = {plan: parts for plan, parts in self._asked.items() if self._exchanges.count_of_inputs(plan)}
        self._asked[request.plan] = asked
        await stream.send(pack(Inputs(tuple(self._signed(request.plan, each) for _, each in sorted(inputs.items())))))

    def _signed(self, plan: str, each: Input) -> Signed:
        return each.signed if each.signed is not None else sign(Pushed(plan, (each.update,)), self._node.world.identity)

    async def _update(self, plan: str, index: int) -> Body | None:
        """Return an encoded update: one that a checker of this peer asked for, or one of a proof."""
        part, member = divmod(index, MAX_MEMBERS)
        if part in self._asked.get(plan, ()):
            found = (self._exchanges.inputs_of(plan, part) or {}).get(member)
            return None if found is None else found.body
        return self._proofs.body(plan, part, member)
