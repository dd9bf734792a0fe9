"""How a round is decided: single-decree Paxos among the round's electorate, and the log of what was decided.

The electorate of round r is fixed by the head of round r - 1; a majority of it decides. Two majorities share an elector, an
elector durably promises before it answers, and a coordinator whose promises bring back an accepted head must propose that one:
so no two different heads are ever decided for one round. Nobody applies a head without its certificate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spes_p2p.errors import Refused
from spes_p2p.swarm.interfaces import Identity, Store
from spes_p2p.swarm.records import Ballot, Decided, Head, Vote
from spes_p2p.swarm.wire import WireError, pack, unpack

MAX_ELECTORS = 7
LOG, VOTES = "heads.log", "votes"


@dataclass(frozen=True)
class Prepare:
    """A coordinator asks for promises: nobody will accept a lower ballot in this round."""

    round: int
    parent: str
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """An elector's answer to Prepare."""

    round: int
    """Last round that the elector knows as decided; to one that is behind, the coordinator sends the missing heads first."""
    granted: bool
    promised: Ballot | None
    """The highest ballot that it has promised in this round."""
    accepted_ballot: Ballot | None
    accepted: Head | None


@dataclass(frozen=True)
class Weighed:
    """What the answers to a Prepare come to."""

    won: bool
    """A majority promised: the coordinator may propose."""
    bound: Head | None
    """What it must propose; None leaves it free."""
    highest: int
    """The highest ballot number that an answer names: the next try must be above it. 0: none was named."""


@dataclass(frozen=True)
class Accept:
    """A coordinator asks for votes on one head."""

    ballot: Ballot
    head: Head


@dataclass(frozen=True)
class VoteState:
    """What an elector must remember over a crash."""

    parent: str
    promised: Ballot | None
    accepted_ballot: Ballot | None
    accepted: Head | None


def quorum(electorate: tuple[str, ...]) -> int:
    """Votes that decide: a majority."""
    return len(electorate) // 2 + 1


def choose_electorate(helpers: tuple[str, ...], members: Iterable[str], last: tuple[str, ...]) -> tuple[str, ...]:
    """Electors of the next round: the helpers and the members, those that were electors before first, at most seven, sorted.

    `members`: those that can be dialled. A lone trainer decides alone: nothing is safer for a second vote.
    """
    trainers = set(members) - set(helpers)
    if len(trainers) == 1:
        return tuple(trainers)
    ranked = sorted(trainers, key=lambda peer: (peer not in last, peer))
    return tuple(sorted((*helpers, *ranked)[:MAX_ELECTORS]))


def bound_head(granted: Iterable[Promise]) -> Head | None:
    """The head that these promises bind their coordinator to: the one accepted in the highest ballot; None leaves it free."""
    bound = [(p.accepted_ballot, p.accepted) for p in granted if p.accepted_ballot is not None]
    return max(bound, key=lambda pair: pair[0])[1] if bound else None


def weigh(answers: Iterable[Promise], electorate: tuple[str, ...]) -> Weighed:
    """What a coordinator may do after these answers to its Prepare, one of each elector that answered."""
    answers = tuple(answers)
    granted = [promise for promise in answers if promise.granted]
    highest = max((promise.promised.number for promise in answers if promise.promised is not None), default=0)
    return Weighed(len(granted) >= quorum(electorate), bound_head(granted), highest)


def vote_message(ballot: Ballot, head_id: str) -> bytes:
    """What an elector signs."""
    return b"spes accept\0" + pack(ballot) + head_id.encode()


def reform_head(parent: Head, helper: str) -> Head:
    """The head by which a helper opens a new epoch when the electorate lost its majority: nothing moves, the helper decides."""
    return replace(
        parent,
        epoch=parent.epoch + 1,
        round=parent.round + 1,
        parent=parent.id,
        plan="",
        roots=(),
        dropped=(),
        base_digest="",
        members=(),
        owners=((),) * len(parent.owners),
        electorate=(helper,),
    )


def proves(decided: Decided, parent: Head, identity: Identity) -> bool:
    """Is this head decided by the electorate that its parent fixed, or a reform signed by one of the campaign's helpers?"""
    head = decided.head
    if (head.campaign, head.parent, head.round) != (parent.campaign, parent.id, parent.round + 1):
        return False
    if head.epoch != parent.epoch:
        return _proves_reform(decided, parent, identity)
    message = vote_message(decided.ballot, head.id)
    valid = {
        vote.elector
        for vote in decided.votes
        if vote.elector in parent.electorate and identity.verify(vote.elector, message, vote.signature)
    }
    return len(valid) >= quorum(parent.electorate)


def _proves_reform(decided: Decided, parent: Head, identity: Identity) -> bool:
    head, message = decided.head, vote_message(decided.ballot, decided.head.id)
    return any(
        vote.elector in parent.helpers
        and head == reform_head(parent, vote.elector)
        and identity.verify(vote.elector, message, vote.signature)
        for vote in decided.votes
    )


class HeadLog:
    """The heads from genesis on, each proven by its certificate. Durable.

    Of two heads for one round the one of the higher epoch wins: a reform is the only way to a fork, and this heals it.
    """

    def __init__(self, store: Store, identity: Identity, genesis: Head):
        self._store = store
        self._identity = identity
        self.genesis = genesis
        self._decided: list[Decided] = []
        for record in store.records(LOG):
            try:
                decided = unpack(Decided, record)
            except WireError:
                break
            if decided.head.round > self.round + 1 or decided.head.parent != self.head_at(decided.head.round - 1).id:
                break
            self._put(decided)

    @property
    def head(self) -> Head:
        """The last decided head (genesis before round 0)."""
        return self._decided[-1].head if self._decided else self.genesis

    @property
    def round(self) -> int:
        """Number of the last decided round; -1 before round 0."""
        return self.head.round

    def at(self, round_number: int) -> Decided:
        """The certificate of a round; IndexError when it is not known."""
        if not 0 <= round_number < len(self._decided):
            raise IndexError(round_number)
        return self._decided[round_number]

    def head_at(self, round_number: int) -> Head:
        """The head of a round; round -1 is genesis."""
        return self.genesis if round_number < 0 else self.at(round_number).head

    def since(self, round_number: int) -> tuple[Decided, ...]:
        """All certificates after that round."""
        return tuple(self._decided[max(-1, round_number) + 1 :])

    def append(self, decided: Decided) -> bool:
        """Add the next head. False when it is known already; Refused when it does not follow or is not proven."""
        head = decided.head
        if head.round <= self.round:
            if head.id == self.head_at(head.round).id:
                return False
            if head.epoch <= self.head_at(head.round).epoch:
                raise Refused(f"round {head.round} was decided otherwise")
        if head.round > self.round + 1:
            raise Refused(f"round {head.round} does not follow round {self.round}")
        if not proves(decided, self.head_at(head.round - 1), self._identity):
            raise Refused(f"the certificate of round {head.round} does not hold")
        self._store.append(LOG, pack(decided))
        self._put(decided)
        return True

    def _put(self, decided: Decided) -> None:
        """The new last head; what stood at its round and after it in a lower epoch is given up."""
        del self._decided[decided.head.round :]
        self._decided.append(decided)


class Elector:
    """One peer's votes. Every answer is durable before it is given."""

    def __init__(self, log: HeadLog, store: Store, identity: Identity):
        self._log = log
        self._store = store
        self._identity = identity

    def prepare(self, request: Prepare) -> Promise:
        """Promise not to accept lower ballots, and say what was accepted. Each ballot is promised once.

        A coordinator that starts over, after a crash too, thus finds a new number, and no ballot ever carries two heads.
        """
        head = self._log.head
        if request.round != head.round + 1 or request.parent != head.id:
            return Promise(head.round, False, None, None, None)
        self._require_elector()
        if request.ballot.coordinator not in head.electorate:
            raise Refused("a ballot of a peer that is no elector of this round")
        state = self._state()
        if state.promised is not None and request.ballot <= state.promised:
            return Promise(head.round, False, state.promised, None, None)
        self._remember(VoteState(head.id, request.ballot, state.accepted_ballot, state.accepted))
        return Promise(head.round, True, request.ballot, state.accepted_ballot, state.accepted)

    def accept(self, request: Accept) -> Vote:
        """Vote for a head. Raises Refused when a higher ballot was promised or the head does not follow mine."""
        head = self._log.head
        if request.head.round != head.round + 1 or request.head.parent != head.id:
            raise Refused(f"my head is round {head.round}")
        proposed = request.head
        kept = (proposed.campaign, proposed.epoch, proposed.helpers) == (head.campaign, head.epoch, head.helpers)
        if not kept or not proposed.plan:
            raise Refused("a head that no plan of this campaign leads to")
        self._require_elector()
        if request.ballot.coordinator not in head.electorate:
            raise Refused("a ballot of a peer that is no elector of this round")
        state = self._state()
        if state.promised is not None and request.ballot < state.promised:
            raise Refused(f"promised ballot {state.promised.number}")
        self._remember(VoteState(head.id, request.ballot, request.ballot, request.head))
        signature = self._identity.sign(vote_message(request.ballot, request.head.id))
        return Vote(self._identity.peer_id, signature)

    def _require_elector(self) -> None:
        if self._identity.peer_id not in self._log.head.electorate:
            raise Refused("not an elector of this round")

    def _state(self) -> VoteState:
        blob = self._store.read(VOTES)
        state = unpack(VoteState, bytes(blob)) if blob is not None else None
        if state is None or state.parent != self._log.head.id:
            return VoteState(self._log.head.id, None, None, None)
        return state

    def _remember(self, state: VoteState) -> None:
        self._store.write(VOTES, [pack(state)])
