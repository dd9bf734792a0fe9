"""Proofs against reducers and hubs: checked by every peer itself, told to all, and part of the next proposal.

A proof consists of signed records and hashes, so it needs no trust in whoever tells it. From the commit on that takes it up,
the liar is excluded (`Commit.excluded`), and nobody needs the proof any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import owner_of, pardoned_until
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import Body, Content, Piece, from_hex, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.fields import MAX_MEMBERS, MAX_SERVED
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.methods import ACCUSE
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Accused, Proposal, Update, WrongSum
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.peer.kept_results import MAX_CONCURRENT_UPLOADS, KeptResults
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.plan import Rules
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.proposal import may_exclude
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.rounds.sums import behind_means, is_wrong, may_be_summed, read_cell_inputs, read_inputs, tokens_behind

logger = logging.getLogger(__name__)

HELD_PROOFS = 8
"""Bounds the proofs, with their updates, that a peer keeps for others. One that is dropped is found again by a later check."""
MAX_CONCURRENT_SENDS = 8
NONE_KNOWN: Mapping[int, Body] = {}


@dataclass(frozen=True)
class Proven:
    """A proof that holds."""

    peer: str
    """The reducer or hub."""
    plan: str
    proof: WrongSum
    bodies: Mapping[int, Body]
    """The encoded updates, by `update_piece`; with a hub's mean."""


def update_piece(part: int, member: int, of_cell: bool = False) -> int:
    """Return the number of the piece that is an update in a reducer's mean of a part, or in the mean of the member's cell."""
    return (2 * part + of_cell) * MAX_MEMBERS + member


def read_piece(number: int) -> tuple[int, int, bool]:
    """Return part, member and whether it is of a cell."""
    rest, member = divmod(number, MAX_MEMBERS)
    return rest // 2, member, bool(rest % 2)


class Proofs:
    """The proofs that this peer has checked."""

    def __init__(
        self, world: World, endpoint: RpcEndpoint, fetcher: Fetcher, log: CommitLog, rules: Rules, kept: KeptResults,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ):
        """`spawn` runs a coroutine in the background."""
        self._world, self._endpoint, self._fetcher, self._log, self._kept = world, endpoint, fetcher, log, kept
        self._clips, self._spawn = rules.config.sync.bound_influence, spawn
        self._held: dict[str, Proven] = {}
        """By id, oldest first."""
        self._checking: set[str] = set()
        """Peers whose proofs are being checked."""
        self._liars: dict[str, None] = {}
        """Peers that told a false proof, the last MAX_SERVED: each costs a check, so they are not heard again."""

    async def serve(self, server: ContentServer) -> None:
        """Hear proofs, and serve those that hold, from now on."""
        await self._endpoint.serve(ACCUSE, self._on_accuse)
        await server.serve("proof", self._proof, MAX_CONCURRENT_UPLOADS)

    def body(self, plan: str, piece: int) -> Body | None:
        """Return an encoded update of a proof that holds, by `update_piece`."""
        return next((each.bodies[piece] for each in self._held.values() if each.plan == plan and piece in each.bodies), None)

    def proven(self) -> dict[str, str]:
        """Return the peers of which there is a proof about the last rounds, but for the owner, with the proof's id."""
        held = (each for each in self._held.values() if self._is_recent(each.proof) and self._counts(each))
        return {each.peer: each.proof.id for each in held if each.peer != owner_of(self._log.genesis)}

    def accused(self, commit: Commit) -> tuple[Accused, ...]:
        """Return whom the proposal after this commit excludes: as many as it may."""
        accused: list[Accused] = []
        for peer, proof in sorted(self.proven().items()):
            if may_exclude(commit, [*(each.peer for each in accused), peer]):
                accused.append(Accused(peer, proof))
        return tuple(accused)

    async def require(self, proposal: Proposal) -> None:
        """Raise Refused unless there is a proof against each accused peer of a proposal."""
        others = [proposal.ballot.coordinator, *(each.peer for each in proposal.announcements)]
        donors = [peer for peer in others if peer != self._endpoint.peer_id]
        for accused in proposal.accused:
            if accused.proof not in self._held:
                content = single("proof", accused.proof, from_hex(accused.proof), MAX_FRAME_BYTES)
                with contextlib.suppress(PeerUnreachable, WireError):
                    body = await self._fetcher.fetch_single(content, [self._fetcher.peers(donors)])
                    await self.holds(await unpack_beside(WrongSum, bytes(body)), donors)
            held = self._held.get(accused.proof)
            if held is None or held.peer != accused.peer or not self._counts(held):
                raise Refused(Code.NOT_PROVEN, f"no proof that {accused.peer[-6:]} made a wrong mean")

    async def holds(self, proof: WrongSum, donors: Sequence[str], known: Mapping[int, Body] = NONE_KNOWN) -> bool:
        """Return whether the result, or the cell's mean, is not what its inputs give, and keep a proof that holds.

        `donors`: peers that have the updates. `known`: some of these, by `update_piece`. Raises Refused for what is no proof,
        PeerUnreachable when a piece is missing.
        """
        if proof.id in self._held:
            return True
        if not self._is_recent(proof):
            raise Refused(Code.BEHIND, f"a proof about round {proof.round}, which is not one of the last ones here")
        commit = self._log.commit_at(proof.round)
        results = await self._kept.described(commit, self._fetcher, donors)
        part = next((each for each in results.committed(commit) if each.index == proof.part), None)
        if part is None or not part.is_mean:
            raise Refused(Code.NOT_PROVEN, f"part {proof.part} of round {proof.round} is no mean")
        plan, updates = results.plan, read_inputs(proof.inputs, part, results, self._world.identity)
        if proof.cell is None:
            bodies = await self._bodies(plan, part, updates, donors, known, of_cell=False)
            result, says = await self._kept.result(results, part, self._fetcher, donors), None
        else:
            hub = proof.cell.hub
            if hub not in part.summing or hub not in updates:
                raise Refused(Code.NOT_PROVEN, f"part {part.index} has no mean of that hub")
            says, own = updates[hub].tokens, {hub: updates[hub]}
            updates = read_cell_inputs(proof.cell.inputs, part, hub, own[hub], plan, self._world.identity)
            bodies = await self._bodies(plan, part, own, donors, known, of_cell=False)
            result, part = bodies[update_piece(part.index, hub)], part.of_cell(hub)
            bodies |= await self._bodies(plan, part, updates, donors, known, of_cell=True)
        found = {i: (each.tokens, bodies[update_piece(part.index, i, says is not None)]) for i, each in updates.items()}
        wrong: bool = await self._world.run_blocking(
            is_wrong, part, plan.members, found, result, self._clips, behind_means(updates)
        )
        wrong |= says is not None and says != tokens_behind(part, plan.members, updates, self._clips)
        if wrong:
            peer = plan.members[part.reducer].peer
            logger.warning("round %d: what %s made of part %d is not the mean of its inputs", proof.round, peer, part.index)
            self._held[proof.id] = Proven(peer, plan.id, proof, bodies)
            self._held = dict(list(self._held.items())[-HELD_PROOFS:])
        return wrong

    async def tell(self, proof: WrongSum, peers: Iterable[str]) -> None:
        """Tell these peers of a proof that holds."""
        record, endpoint, turn = pack(proof), self._endpoint, asyncio.Semaphore(MAX_CONCURRENT_SENDS)

        async def tell(peer: str) -> None:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                async with turn:
                    await endpoint.ask(peer, ACCUSE, record, 2 * endpoint.silence_s)

        await asyncio.gather(*map(tell, peers))

    def _counts(self, proven: Proven) -> bool:
        """Return whether the owner has not pardoned the reducer since."""
        return proven.proof.round > pardoned_until(self._log.last.control, proven.peer)

    def _is_recent(self, proof: WrongSum) -> bool:
        """Return whether the proof is about one of the rounds whose results peers keep."""
        is_kept = max(-1, self._log.round - KEPT_ROUNDS) < proof.round <= self._log.round
        return is_kept and self._log.has(proof.commit, proof.round) and bool(self._log.commit_at(proof.round).plan)

    async def _bodies(
        self, plan: Plan, part: Part, updates: Mapping[int, Update], donors: Sequence[str], known: Mapping[int, Body],
        of_cell: bool,
    ) -> dict[int, Body]:
        """Fetch encoded updates, by `update_piece`. Raises PeerUnreachable; Refused for values that no honest reducer takes."""
        sender_of = {update_piece(part.index, i, of_cell): i for i in updates}
        found: dict[int, Body] = {index: known[index] for index in sender_of if index in known}

        async def keep(index: int, body: Body) -> None:
            found[index] = body

        def piece(index: int) -> Piece:
            return Piece(updates[sender_of[index]].digest, part.encoded_bytes)

        wanted = [index for index in sender_of if index not in found]
        if await self._fetcher.fetch(Content("updates", plan.id, piece), wanted, [self._fetcher.peers(donors)], keep):
            raise PeerUnreachable(f"nobody has the updates of part {part.index}")
        for index, body in found.items():
            if len(body) != part.encoded_bytes or not may_be_summed(part, sender_of[index], body):
                raise Refused(Code.NOT_PROVEN, f"part {part.index}: no update of this part")
        return found

    async def _on_accuse(self, stream: Stream) -> None:
        proof = await unpack_beside(WrongSum, await stream.message())
        is_heard = stream.remote not in self._checking and stream.remote not in self._liars
        if stream.remote not in self._log.last.participants or not is_heard:
            raise Refused(Code.NOT_ALLOWED, "no proof of yours is heard now")
        await stream.send(b"")
        if proof.id not in self._held:
            self._checking.add(stream.remote)
            self._spawn(self._consider(proof, stream.remote))

    async def _consider(self, proof: WrongSum, sender: str) -> None:
        """Check what another peer told."""
        try:
            if not await self.holds(proof, [sender]):
                raise Refused(Code.NOT_PROVEN, "the result is what its inputs give")
        except (PeerUnreachable, WireError) as error:
            logger.info("a proof of %s: %s", sender[-6:], error)
        except Refused as refused:
            if refused.code is Code.NOT_PROVEN:
                self._liars[sender] = None
                if len(self._liars) > MAX_SERVED:
                    del self._liars[next(iter(self._liars))]
                logger.warning("%s told a false proof: %s", sender, refused)
        finally:
            self._checking.discard(sender)

    async def _proof(self, name: str, index: int) -> Body | None:
        return pack(self._held[name].proof) if name in self._held and index == 0 else None
