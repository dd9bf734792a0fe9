"""Coordinators and electors that lie about what is decided, with no other key than their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.electorate import incarnations_of
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import (
    Accept,
    Ballot,
    CertifiedCommit,
    Commit,
    Leave,
    Prepare,
    Promise,
    Signed,
    Vote,
)
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import ACCEPT, PING, PREPARE, ROUND
from spes_p2p.messages.rounds import Announcement, Evidence, Pong, Proposal, Staged
from spes_p2p.net.interfaces import Channel, Handler, World
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.wrapped import Wrapped

HIGH = 2**31
"""A ballot number that outbids honest ones, within what electors take at once."""
HELD_HEARTBEAT_S = 0.5
"""Heartbeats of a stream that a silent coordinator holds."""
MOST_BIDS = 20
"""Against one coordinator in one round; an honest one prepares a few ballots."""
OTHER_LIFE = "1" * 16
"""An incarnation that no vote file has."""

# Lies -------------------------------------------------------------------------------------------------------------------

CommitLie = Callable[[Commit, str], dict[str, Any]]
"""(The honest commit, the liar) -> fields with other values."""


def to_itself(commit: Commit, liar: str) -> dict[str, Any]:
    """Make the liar the electorate."""
    return {"electorate": (liar,), "incarnations": ("0" * 16,)}


COMMIT_LIES: dict[str, CommitLie] = {
    "electorate": to_itself,
    "tokens": lambda commit, liar: {"tokens": commit.tokens + 1},
    "members": lambda commit, liar: {"members": tuple(sorted({*commit.members, "X"}))},
    "step": lambda commit, liar: {"step": commit.step + 10},
    "owners": lambda commit, liar: {"owners": ((commit.members.index(liar),),) * len(commit.owners)},
    "dropped": lambda commit, liar: {"dropped": (0,)},
    "incarnations": lambda commit, liar: {"incarnations": ("1" * 16,) * len(commit.electorate)},
    "base_digest": lambda commit, liar: {"base_digest": "0" * 64},
}
"""By the field that the refusal names."""

ProposalLie = Callable[[Proposal, Proposal, Identity], Proposal]
"""(The honest proposal, that of an earlier round, the liar) -> what the liar sends."""


def altered(signed: Signed, identity: Identity, signer: Identity | None = None, **changes: Any) -> Signed:
    """Return the announcement with other content: with its old signature, or signed by `signer`."""
    made = replace(read_signed(Announcement, signed, identity), **changes)
    return Signed(signed.peer, pack(made), sign(made, signer).signature if signer else signed.signature)


def _other(proposal: Proposal, liar: Identity) -> int:
    return next(i for i, each in enumerate(proposal.announcements) if each.peer != liar.peer_id)


def _with_announcement(proposal: Proposal, place: int, signed: Signed) -> Proposal:
    before = proposal.announcements
    return replace(proposal, announcements=(*before[:place], signed, *before[place + 1 :]))


def forge_tokens(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Change another member's tokens."""
    place = _other(proposal, liar)
    return _with_announcement(proposal, place, altered(proposal.announcements[place], liar, tokens=1))


def forge_name(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Sign an announcement in another member's name."""
    place = _other(proposal, liar)
    return _with_announcement(proposal, place, altered(proposal.announcements[place], liar, liar, tokens=1))


def replay(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Use another member's announcement of an earlier round."""
    place = _other(proposal, liar)
    known = {each.peer: each for each in before.announcements}
    peer = proposal.announcements[place].peer
    return _with_announcement(proposal, place, known.get(peer, proposal.announcements[place]))


def invent_leave(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Say that another member left."""
    gone = proposal.announcements[_other(proposal, liar)].peer
    leave = replace(sign(Leave(proposal.parent, ()), liar), peer=gone)
    kept = tuple(each for each in proposal.announcements if each.peer != gone)
    return replace(proposal, announcements=kept, returned=(leave,))


def nobody(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Leave everybody out."""
    return replace(proposal, announcements=())


def strange_donors(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Merge experts that the model does not have."""
    return replace(proposal, donors=(((9,),),))


def another_round(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Propose a round that is far ahead."""
    return replace(proposal, round=proposal.round + 5)


PROPOSAL_LIES: dict[str, tuple[ProposalLie, str]] = {
    "token counts of another": (forge_tokens, "is not signed by it"),
    "an announcement in another's name": (forge_name, "is not signed by it"),
    "an announcement of the round before": (replay, "is for another round"),
    "the statement of a peer that stays": (invent_leave, "is not signed by it"),
    "no announcements": (nobody, "without a trainer"),
    "donors of another model": (strange_donors, "its merge"),
    "another round": (another_round, "does not follow this log"),
}
"""Each with what honest members answer."""


class LyingCoordinator(Tamper):
    """Tells each lie in turn when it coordinates: a proposal, a commit for the electors' votes, a forged certificate."""

    def __init__(self, identity: Identity):
        self._identity = identity
        self._before: Proposal | None = None
        lies = [("certificate", "")]
        lies += [("commit", name) for name in COMMIT_LIES]
        lies += [("proposal", name) for name in PROPOSAL_LIES]
        self._lies = itertools.cycle(lies[::3] + lies[1::3] + lies[2::3])
        self._told: dict[int, tuple[str, str]] = {}
        """By round: the lie."""

    async def send(self, frame: Frame) -> Frame:
        """Change proposals and commits on their way to members and electors."""
        if frame.method == ROUND and frame.is_answer and frame.kind == Kind.PROPOSAL:
            return changed(frame, Proposal, self._proposal)
        if frame.method == ROUND and frame.is_answer and frame.kind == Kind.DECIDED:
            return changed(frame, CertifiedCommit, self._certificate)
        if frame.method == ACCEPT and not frame.is_answer:
            return changed(frame, Accept, lambda asked: replace(asked, commit=self._commit(asked.commit)))
        return frame

    def _lie(self, round_number: int) -> tuple[str, str]:
        if round_number not in self._told:
            self._told[round_number] = next(self._lies)
        return self._told[round_number]

    def _proposal(self, proposal: Proposal) -> Proposal:
        what, name = self._lie(proposal.round)
        before, self._before = self._before or proposal, proposal
        return PROPOSAL_LIES[name][0](proposal, before, self._identity) if what == "proposal" else proposal

    def _commit(self, commit: Commit) -> Commit:
        what, name = self._lie(commit.round)
        return replace(commit, **COMMIT_LIES[name](commit, self._identity.peer_id)) if what == "commit" else commit

    def _certificate(self, decided: CertifiedCommit) -> CertifiedCommit:
        if self._lie(decided.commit.round)[0] != "certificate":
            return decided
        return replace(decided, commit=replace(decided.commit, **to_itself(decided.commit, self._identity.peer_id)))


class LyingElector(Tamper):
    """Answers coordinators in turn with nothing, a ballot that outbids theirs, an invented accepted commit, and a vote that is
    not signed.
    """

    def __init__(self, identity: Identity):
        self._identity = identity
        self._asked = 0
        self._known: Commit | None = None
        """A commit that was decided."""

    def receive(self, frame: Frame) -> Frame:
        """Remember a decided commit."""
        if frame.method == ROUND and frame.kind == Kind.DECIDED:
            changed(frame, CertifiedCommit, self._learn)
        return frame

    async def send(self, frame: Frame) -> Frame | None:
        """Change promises and votes."""
        if frame.is_answer and frame.method == PREPARE:
            self._asked += 1
            return None if self._asked % 3 == 0 else changed(frame, Promise, self._promise)
        if frame.is_answer and frame.method == ACCEPT:
            return changed(frame, Vote, lambda vote: replace(vote, signature=bytes(len(vote.signature))))
        return frame

    def _learn(self, decided: CertifiedCommit) -> CertifiedCommit:
        self._known = decided.commit
        return decided

    def _promise(self, promise: Promise) -> Promise:
        if self._asked % 3 == 1 or self._known is None:
            return replace(promise, granted=False, promised=Ballot(HIGH, self._identity.peer_id))
        known, ballot = self._known, Ballot(1, self._identity.peer_id)
        made = replace(known, round=known.round + 1, parent=known.id, **to_itself(known, self._identity.peer_id))
        return replace(promise, accepted_ballot=ballot, accepted=made, evidence=b"")


class Outbidding(Tamper):
    """An elector that asks all others to promise a higher ballot of its own whenever a coordinator asks it for a promise, up to
    MOST_BIDS times in a round: two of them would outbid each other for ever.
    """

    def __init__(self, world: World):
        self._world = world
        self._electors: tuple[str, ...] = ()
        self._bids: Counter[tuple[int, str]] = Counter()
        """By round and coordinator."""
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, frame: Frame) -> Frame:
        """Learn who votes, and bid more than a coordinator."""
        if frame.method == ROUND and frame.kind == Kind.DECIDED:
            changed(frame, CertifiedCommit, self._learn)
        if frame.method == PREPARE and not frame.is_answer:
            changed(frame, Prepare, self._outbid)
        return frame

    def _learn(self, decided: CertifiedCommit) -> CertifiedCommit:
        self._electors = decided.commit.electorate
        return decided

    def _outbid(self, asked: Prepare) -> Prepare:
        coordinator = asked.round, asked.ballot.coordinator
        self._bids[coordinator] += 1
        if self._bids[coordinator] > MOST_BIDS:
            return asked
        ballot = Ballot(asked.ballot.number + 1, self._world.transport.peer_id)
        for elector in set(self._electors) - {self._world.transport.peer_id}:
            self.tell(f"prepare {ballot.number} {elector}")
            task = asyncio.ensure_future(self._ask(elector, replace(asked, ballot=ballot)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return asked

    async def _ask(self, elector: str, request: Prepare) -> None:
        with contextlib.suppress(PeerUnreachable):
            channel = await self._world.transport.open(elector, PREPARE)
            await channel.send(pack(request))
            await channel.receive()
            channel.abort()


class Equivocation(Tamper):
    """As coordinator, proposes to half of the members a plan without some member, or has half of the electors vote on a second
    valid commit in the same ballot and gives members one or the other; as elector, votes for whatever it is asked.
    """

    def __init__(self, identity: Identity):
        self._identity = identity
        self._coordinated: list[int] = []
        """Rounds, in order; in every second one it tells of two commits, in the others of two plans."""
        self.second: dict[int, tuple[Accept, dict[str, Vote]]] = {}
        """By round: the second commit with its evidence, and the votes for it."""

    def handler(self, method: str, honest: Handler) -> Handler:
        """Vote without looking."""
        return self._vote if method == ACCEPT else honest

    async def _vote(self, channel: Channel) -> None:
        message = await channel.receive()
        if message is not None:
            asked = unpack(Accept, message.body)
            self.tell(f"vote {asked.commit.id[:8]}")
            await channel.send(pack(self._signed_vote(asked)))

    def _signed_vote(self, asked: Accept) -> Vote:
        message = vote_message(asked.ballot, asked.commit.id)
        return Vote(self._identity.peer_id, self._identity.sign(message))

    async def send(self, frame: Frame) -> Frame:
        """Tell the peers of one half something else."""
        if not self._is_other_half(frame.receiver):
            return frame
        if frame.method == ROUND and frame.is_answer and frame.kind == Kind.PROPOSAL:
            return changed(frame, Proposal, self._shorter)
        if frame.method == ACCEPT and not frame.is_answer:
            return changed(frame, Accept, self._other)
        if frame.method == ROUND and frame.is_answer and frame.kind == Kind.DECIDED:
            return changed(frame, CertifiedCommit, self._other_certificate)
        return frame

    def receive(self, frame: Frame) -> Frame:
        """Collect the votes for the second commits."""
        if frame.method == ACCEPT and frame.is_answer and frame.kind == Kind.MESSAGE:
            changed(frame, Vote, self._collect)
        return frame

    def _is_other_half(self, peer: str) -> bool:
        return sum(peer.encode()) % 2 == 1

    def _has_two_commits(self, round_number: int) -> bool:
        if round_number not in self._coordinated:
            self._coordinated.append(round_number)
        return self._coordinated.index(round_number) % 2 == 0

    def _shorter(self, proposal: Proposal) -> Proposal:
        """Return a proposal without one member: a valid one."""
        if self._has_two_commits(proposal.round) or len(proposal.announcements) < 3:
            return proposal
        return replace(proposal, announcements=proposal.announcements[:-1])

    def _other(self, asked: Accept) -> Accept:
        """Return a request for votes on another valid commit, one in a round."""
        number = asked.commit.round
        if self._has_two_commits(number) and number not in self.second:
            made = self._in_another_life(asked)
            self.second[number] = made, {self._identity.peer_id: self._signed_vote(made)}
        made, _ = self.second.get(number, (asked, {}))
        return made if made.ballot == asked.ballot else asked

    def _in_another_life(self, asked: Accept) -> Accept:
        """Return the request that follows if this peer's report names another incarnation of its votes.

        It can change no other report, and leave none out: a report counts only beside those of all reducers that it names.
        """
        me, commit = self._identity.peer_id, asked.commit
        names = {**incarnations_of(commit), me: OTHER_LIFE}
        reports = [
            sign(replace(read_signed(Staged, each, self._identity), incarnation=OTHER_LIFE), self._identity)
            if each.peer == me else each
            for each in unpack(Evidence, asked.evidence).reports
        ]  # fmt: skip
        other = replace(commit, incarnations=tuple(names[elector] for elector in commit.electorate))
        return Accept(asked.ballot, other, pack(Evidence(tuple(reports))))

    def _collect(self, vote: Vote) -> Vote:
        for asked, votes in self.second.values():
            if self._identity.verify(vote.elector, vote_message(asked.ballot, asked.commit.id), vote.signature):
                votes[vote.elector] = vote
        return vote

    def _other_certificate(self, decided: CertifiedCommit) -> CertifiedCommit:
        asked, votes = self.second.get(decided.commit.round, (None, {}))
        if asked is None:
            return decided
        return CertifiedCommit(asked.commit, asked.ballot, tuple(votes[peer] for peer in sorted(votes)))


class SilentCoordinator(Tamper):
    """Coordinates, lives, and never proposes a plan, or never has one decided. It answers pings as one that goes on."""

    def __init__(self, proposes: bool):
        self._proposes = proposes

    def handler(self, method: str, honest: Handler) -> Handler:
        """Hold members' streams open, whatever becomes of the attempt."""

        async def hold(channel: Channel) -> None:
            self.tell(f"hold {channel.remote}")
            if self._proposes:
                with contextlib.suppress(PeerUnreachable):
                    await honest(cast(Channel, _Held(channel)))
            with contextlib.suppress(PeerUnreachable):
                while True:
                    await channel.send(kind=Kind.HEARTBEAT)
                    await asyncio.sleep(HELD_HEARTBEAT_S)

        return hold if method == ROUND else honest

    async def send(self, frame: Frame) -> Frame | None:
        """Ask for no votes, and deny failures."""
        if frame.method == ACCEPT and not frame.is_answer:
            return None
        if frame.method == PING and frame.is_answer:
            return changed(frame, Pong, lambda pong: replace(pong, failed_to_coordinate=-1))
        return frame


class _Held(Wrapped):
    """A member's stream that no refusal and no decision ends."""

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        if kind not in (Kind.REFUSAL, Kind.DECIDED):
            await self._inner.send(*pieces, kind=kind)

    async def finish(self) -> None:
        pass

    def abort(self) -> None:
        pass


def lying_coordinator(liar: Liar) -> World:
    """Wrap the world of a coordinator that lies."""
    return tampered(liar, LyingCoordinator(liar.world.identity))


def unproposing(liar: Liar) -> World:
    """Wrap the world of a coordinator that never proposes."""
    return tampered(liar, SilentCoordinator(proposes=False))


def undeciding(liar: Liar) -> World:
    """Wrap the world of a coordinator that proposes and never decides."""
    return tampered(liar, SilentCoordinator(proposes=True))


def lying_elector(liar: Liar) -> World:
    """Wrap the world of an elector that lies."""
    return tampered(liar, LyingElector(liar.world.identity))


def outbidding(liar: Liar) -> World:
    """Wrap the world of an elector that outbids every coordinator."""
    return tampered(liar, Outbidding(liar.world))


def equivocating(liar: Liar) -> World:
    """Wrap the world of a coordinator and elector that says one thing to some and another to others."""
    return tampered(liar, Equivocation(liar.world.identity))
