"""Checks of reducers and hubs after a round: each member has another one that makes some of its means again, in the background.

The checker asks the reducer for the signed inputs and the encoded updates of a mean that it has drawn, and compares. Of a hub's
mean the part's reducer has what the hub signed, and the hub its inputs. One that does not answer, after a restart for instance,
is named in the next announcement. That proves nothing, but neither of the two reduces for a while. One that has not learned of
the round yet is asked again until the next round is decided, and named only if it is a member of that one, which it cannot be
without the commit. A checker that comes too late names nobody: inputs are kept until the round after.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from spes_p2p.consensus.signed import sign
from spes_p2p.content.pieces import Body, Content, Piece
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.fields import MAX_UNANSWERED
from spes_p2p.messages.methods import INPUTS
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import CellInputs, Inputs, InputsRequest, Pushed, Unanswered, WrongSum
from spes_p2p.net.rpc import Stream
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.observe.events import Observer, ResultsChecked
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.kept_results import MAX_CONCURRENT_UPLOADS
from spes_p2p.peer.node import Node
from spes_p2p.peer.proofs import Proofs, read_piece, update_piece
from spes_p2p.rounds.audits import AUDITED_IN_CELLS, are_audited, auditor_of, auditors
from spes_p2p.rounds.checks import (
    IN_REGION,
    checkers,
    drawn,
    expected_checks,
    means_by_hub,
    means_by_reducer,
    weight_of_checks,
)
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.sums import behind_means, read_cell_inputs, read_inputs

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 2.0
"""A reducer that has not learned the commit yet is asked again after this long."""


class Checking:
    """Checks others, and answers those that check this peer."""

    def __init__(self, node: Node, exchanges: Exchanges, proofs: Proofs, observer: Observer):
        self._node, self._exchanges, self._proofs, self._observer = node, exchanges, proofs, observer
        self._asked: dict[str, dict[str, set[tuple[int, bool]]]] = {}
        """By plan and peer: the means whose inputs it asked for, by part, and whether of this hub's cell."""
        self._unanswered: tuple[Unanswered, ...] = ()

    async def serve(self) -> None:
        """Answer from now on."""
        await self._node.endpoint.serve(INPUTS, self._on_inputs)
        await self._node.content.serve("updates", self._update, MAX_CONCURRENT_UPLOADS)
        await self._proofs.serve(self._node.content)

    def begin(self, commit: Commit, results: Results) -> None:
        """Check, in the background, the reducers and hubs of a round that was just applied which are this peer's to check."""
        mine = [peer for peer, by in checkers(commit, self._rule).items() if by == self._node.peer_id]
        of_reducers, of_hubs = means_by_reducer(commit, results), means_by_hub(commit, results)
        for means, proof_of in ((of_reducers, self._proof), (of_hubs, self._proof_of_hub)):
            for peer in (peer for peer in mine if peer in means):
                more = weight_of_checks(results.plan, self._node.peer_id, peer)
                if chosen := drawn(means[peer], len(means), more, self._node.world.rng):
                    self._node.spawn(self._check(commit, results, peer, chosen, proof_of))

    def unanswered(self) -> tuple[Unanswered, ...]:
        """Return which reducers and hubs of the last two rounds did not show their inputs, for the announcement."""
        return tuple(each for each in self._unanswered if each.round >= self._node.log.round - 1)[-MAX_UNANSWERED:]

    @property
    def _rule(self) -> str:
        return self._node.campaign.config.admission

    async def _check(
        self, commit: Commit, results: Results, checked: str, parts: list[Part],
        proof_of: Callable[[Commit, Results, str, Part], Awaitable[WrongSum | None]],
    ) -> None:
        """Check some means of a reducer or hub."""
        is_wrong, is_silent, clock = False, False, asyncio.get_running_loop().time
        for part in parts:
            began = clock()
            try:
                proof = await proof_of(commit, results, checked, part)
                donors = [checked, results.plan.members[part.reducer].peer]
                own = self._exchanges.inputs_of(commit.plan, part.index) or {}
                known = {update_piece(part.index, i): bytes(each.body) for i, each in own.items()}
                if proof is not None and await self._proofs.holds(proof, list(dict.fromkeys(donors)), known):
                    is_wrong = True
                    everybody = sorted(commit.participants - {self._node.peer_id, checked})
                    await self._proofs.tell(proof, everybody)
            except (PeerUnreachable, Refused, WireError) as error:
                is_behind = isinstance(error, Refused) and error.code is Code.BEHIND
                is_silent |= not is_behind or self._knew(commit, checked, clock() - began)
                logger.info("round %d: part %d of %s is not checked: %s", commit.round, part.index, checked[-6:], error)
        named = (checked,) if is_silent else ()
        self._unanswered = (*self.unanswered(), *(Unanswered(commit.round, peer) for peer in named))
        silent = tuple(peer for peer in named if not self._node.departures.has_left(peer))
        self._observer(ResultsChecked(commit.round, len(parts), (checked,) * is_wrong, silent))

    async def _proof(self, commit: Commit, results: Results, reducer: str, part: Part) -> WrongSum:
        """Return what proves that a reducer made a wrong mean, if it did. Raises PeerUnreachable, Refused, WireError."""
        return WrongSum(commit.round, commit.id, part.index, await self._inputs(results, part, reducer))

    async def _proof_of_hub(self, commit: Commit, results: Results, hub: str, part: Part) -> WrongSum | None:
        """Return what proves that a hub made a wrong mean, if it did. Raises PeerUnreachable, Refused, WireError.

        None if the reducer does not say what the hub sent: that is not the hub's fault.
        """
        try:
            proof = await self._proof(commit, results, results.plan.members[part.reducer].peer, part)
            index, sent = results.plan.index(hub), read_inputs(proof.inputs, part, results, self._node.world.identity)
        except (PeerUnreachable, Refused, WireError) as error:
            logger.info("round %d: part %d of hub %s is not checked: %s", commit.round, part.index, hub[-6:], error)
            return None
        assert index is not None
        inputs = await self._inputs(results, part, hub, of_cell=True)
        read_cell_inputs(inputs, part, index, sent[index], results.plan, self._node.world.identity)
        return replace(proof, cell=CellInputs(index, inputs))

    def _knew(self, commit: Commit, reducer: str, asked_s: float) -> bool:
        """Return whether a reducer knew this commit when it said that it was behind: the next round has it as a member.

        If it was asked for less than `silence_s`, it may have kept the inputs no longer.
        """
        log, following = self._node.log, commit.round + 1
        is_member = log.begins < following <= log.round and reducer in log.commit_at(following).members
        return is_member and asked_s > self._node.endpoint.silence_s

    async def _inputs(
        self, results: Results, part: Part, peer: str, of_cell: bool = False, patience_s: float = math.inf
    ) -> Inputs:
        """Ask a reducer, or a hub (`of_cell`), for the inputs of a mean. Raises PeerUnreachable, Refused, WireError.

        One that is behind is asked again for `patience_s`, or until the next round is decided: it keeps them no longer.
        """
        endpoint, plan, clock = self._node.endpoint, results.plan, asyncio.get_running_loop().time
        if peer == self._node.peer_id:
            return self._own_inputs(plan.id, self._exchanges.inputs_of(plan.id, part.index, of_cell) or {})
        give_up_at, request = clock() + patience_s, pack(InputsRequest(plan.id, part.index, of_cell))
        while True:
            try:
                return await unpack_beside(Inputs, await endpoint.ask(peer, INPUTS, request, 2 * endpoint.silence_s))
            except Refused as refused:
                if refused.code is not Code.BEHIND or self._node.log.round > plan.round or clock() > give_up_at:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def update_of(self, results: Results, part: Part, member: int) -> Body:
        """Return a member's encoded update of a mean of the last round, for an audit of this member.

        From the part's reducer or, where hubs sum first, from the hub of the member's cell, by what that hub signed. Raises
        PeerUnreachable, Refused, WireError.
        """
        plan, fetcher, found = results.plan, self._node.fetcher, list[Body]()
        identity, patience_s = self._node.world.identity, 2 * self._node.endpoint.silence_s
        holder, hub = plan.members[part.reducer].peer, part.hub_of(member)
        updates = read_inputs(await self._inputs(results, part, holder, False, patience_s), part, results, identity)
        of_cell = hub in part.summing
        if hub is not None and of_cell:
            holder = plan.members[hub].peer
            inputs = await self._inputs(results, part, holder, True, patience_s)
            updates = read_cell_inputs(inputs, part, hub, updates[hub], plan, identity)
        update = updates[member]

        async def keep(index: int, body: Body) -> None:
            found.append(body)

        content = Content("updates", plan.id, lambda index: Piece(update.digest, part.encoded_bytes))
        if await fetcher.fetch(content, [update_piece(part.index, member, of_cell)], [fetcher.peers([holder])], keep):
            raise PeerUnreachable(f"{holder[-6:]} does not give an update of part {part.index}")
        return found[0]

    def _may_ask(self, commit: Commit, inputs: Mapping[int, Input], peer: str) -> bool:
        """Return whether a peer may have the inputs of a mean: to check this peer or a hub, or to audit a contributor."""
        behind = behind_means({i: each.update for i, each in inputs.items()})
        checker_of, rule = checkers(commit, self._rule), self._node.campaign.config
        checked = (self._node.peer_id, *(commit.members[hub] for hub in behind))
        audited = (commit.members[j] for i in inputs for j in behind.get(i, (i,)))
        return any(checker_of.get(each) == peer for each in checked) or (
            are_audited(rule) and any(auditor_of(commit, each) == peer for each in audited)
        )

    async def _on_inputs(self, stream: Stream) -> None:
        request, log = unpack(InputsRequest, await stream.message()), self._node.log
        commit = next((each.commit for each in log.since(log.round - 2) if each.commit.plan == request.plan), None)
        if commit is None:
            raise Refused(Code.BEHIND, "that round is not known here yet, or no longer")
        inputs = self._exchanges.inputs_of(request.plan, request.part, request.of_cell)
        if not self._may_ask(commit, inputs or {}, stream.remote):
            raise Refused(Code.NOT_ALLOWED, "another member checks this peer")
        if inputs is None and commit.round < log.round:
            raise Refused(Code.BEHIND, "the inputs of that round are kept no longer")
        if inputs is None:
            raise Refused(Code.NOT_HERE, "this peer has no inputs of that part")
        of_plan = self._asked.get(request.plan, {})
        asked = of_plan.get(stream.remote, set()) | {(request.part, request.of_cell)}
        most = 1 + math.ceil(expected_checks(self._exchanges.count_of_inputs(request.plan), 1, IN_REGION))
        checked = [peer for peer, by in checkers(commit, self._rule).items() if by == stream.remote]
        if len(asked) > most * max(1, len(checked)) + 2 * AUDITED_IN_CELLS * len(auditors(commit)):
            raise Refused(Code.NOT_ALLOWED, "that is more than a check needs")
        self._asked = {plan: by for plan, by in self._asked.items() if self._exchanges.count_of_inputs(plan)}
        self._asked[request.plan] = of_plan | {stream.remote: asked}
        await stream.send(pack(self._own_inputs(request.plan, inputs)))

    def _own_inputs(self, plan: str, inputs: Mapping[int, Input]) -> Inputs:
        """Return the signed inputs of one of this peer's means, with its own update signed now."""
        own = self._node.world.identity
        ordered = [inputs[i] for i in sorted(inputs)]
        return Inputs(tuple(
            sign(Pushed(plan, (each.update,)), own) if each.signed is None else each.signed for each in ordered
        ))

    async def _update(self, plan: str, piece: int) -> Body | None:
        """Return an encoded update: one that a checker asked this peer for, or one of a proof."""
        part, member, of_cell = read_piece(piece)
        if any((part, of_cell) in asked for asked in self._asked.get(plan, {}).values()):
            found = (self._exchanges.inputs_of(plan, part, of_cell) or {}).get(member)
            return None if found is None else found.body
        return self._proofs.body(plan, piece)
