"""How a round is decided: single-decree Paxos among the round's electorate, and the log of what was decided.

The electorate of round r is fixed by the head of round r - 1; a majority of it decides. Two majorities share an elector, an
elector durably promises before it answers, and a coordinator whose promises bring back an accepted head must propose that one:
so no two different heads are ever decided for one round. Nobody applies a head without its certificate.

What an elector promised is on its disk, and a head lists electors together with their disks: one that lost its votes does not
vote until a commit lists its new disk. docs/safety.md has the argument.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spes_p2p.errors import Refused
from spes_p2p.swarm.control import may_follow, rolls_back
from spes_p2p.swarm.interfaces import Identity, Store
from spes_p2p.swarm.records import Ballot, Control, Decided, Farewell, Head, Vote
from spes_p2p.swarm.store import frame_record, parse_records
from spes_p2p.swarm.wire import WireError, pack, unpack

logger = logging.getLogger(__name__)

MAX_ELECTORS = 7
BALLOT_STEP = 2**32
"""A ballot is at most so much above what an elector promised before, so that nobody can use up the numbers of a round."""
DISK_ID_BYTES = 8
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
    """The next try must be above this ballot number: the highest that an answer names, or as near to it as all who answered go
    along. 0: none was named."""


@dataclass(frozen=True)
class Accept:
    """A coordinator asks for votes on one head."""

    ballot: Ballot
    head: Head


@dataclass(frozen=True)
class VoteState:
    """What an elector must remember over a crash: of the last round only, since it never goes back to an earlier one."""

    disk: str
    """Id of the disk that this was first written to."""
    epoch: int
    round: int
    """The round that is voted on: one more than its parent's."""
    parent: str
    promised: Ballot | None
    accepted_ballot: Ballot | None
    accepted: Head | None
    left: bool = False
    """Has it said farewell? Then it casts no vote in this round any more."""


def quorum(electorate: tuple[str, ...]) -> int:
    """Votes that decide: a majority."""
    return len(electorate) // 2 + 1


def open_votes(store: Store, rng: random.Random) -> VoteState:
    """What the elector of this disk remembers. Votes that are not there, or damaged, make it another disk, with a new id."""
    blob = store.read(VOTES)
    if blob is not None:
        try:
            (record,) = parse_records(bytes(blob))
            return unpack(VoteState, record)
        except ValueError:
            logger.warning("the votes of this peer are damaged")
    return renew_votes(store, rng)


def renew_votes(store: Store, rng: random.Random) -> VoteState:
    """Begin with no votes, as another disk. Durable."""
    state = VoteState(f"{rng.getrandbits(8 * DISK_ID_BYTES):0{2 * DISK_ID_BYTES}x}", 0, -1, "", None, None, None)
    _write_votes(store, state)
    return state


def _write_votes(store: Store, state: VoteState) -> None:
    store.write(VOTES, [frame_record(pack(state))])


def disks_of(head: Head) -> Mapping[str, str]:
    """The disk that each elector of the next round votes with."""
    return dict(zip(head.electorate, head.disks, strict=True))


def choose_electorate(helpers: tuple[str, ...], members: Iterable[str], last: tuple[str, ...]) -> tuple[str, ...]:
    """Electors of the next round: the helpers and the members, those that were electors before first, at most seven, sorted.

    `members`: those that can be dialled. Their number is odd: one more elector would have to be there for a majority and would
    make up for nobody. A lone trainer decides alone: nothing is safer for a second vote.
    """
    trainers = set(members) - set(helpers)
    if len(trainers) == 1:
        return tuple(trainers)
    ranked = sorted(trainers, key=lambda peer: (peer not in last, peer))
    chosen = (*helpers, *ranked)[:MAX_ELECTORS]
    return tuple(sorted(chosen if len(chosen) % 2 else chosen[:-1]))


def bound_head(granted: Iterable[Promise]) -> Head | None:
    """The head that these promises bind their coordinator to: the one accepted in the highest ballot; None leaves it free."""
    bound = [(p.accepted_ballot, p.accepted) for p in granted if p.accepted_ballot is not None]
    return max(bound, key=lambda pair: pair[0])[1] if bound else None


def weigh(answers: Iterable[Promise], electorate: tuple[str, ...]) -> Weighed:
    """What a coordinator may do after these answers to its Prepare, one of each elector that answered."""
    answers = tuple(answers)
    granted = [promise for promise in answers if promise.granted]
    named = [promise.promised.number for promise in answers if promise.promised is not None]
    highest = min(max(named), min(named) + BALLOT_STEP - 1) if named else 0
    return Weighed(len(granted) >= quorum(electorate), bound_head(granted), highest)


def is_outbid(ballot: Ballot, promises: Iterable[Promise]) -> bool:
    """Did an elector refuse this ballot because it promised itself to a higher one? A higher one still may win."""
    return any(not promise.granted and promise.promised is not None and promise.promised > ballot for promise in promises)


def vote_message(ballot: Ballot, head_id: str) -> bytes:
    """What an elector signs."""
    return b"spes accept\0" + pack(ballot) + head_id.encode()


def farewell_message(parent: str) -> bytes:
    """What an elector signs that leaves."""
    return b"spes leave\0" + parent.encode()


def remaining(head: Head, farewells: Iterable[Farewell], identity: Identity) -> tuple[str, ...]:
    """The electors of the round after `head` whose majority decides: without those who left before they cast a vote in it.

    Who left votes in no ballot of the round; so any two majorities, counted with or without it, still share an elector. When
    all left, nobody's leaving counts: a majority of nobody would prove anything.
    """
    left = {
        farewell.elector
        for farewell in farewells
        if farewell.parent == head.id and identity.verify(farewell.elector, farewell_message(head.id), farewell.signature)
    }
    return tuple(elector for elector in head.electorate if elector not in left) or head.electorate


def reform_head(parent: Head, epoch: int, helper: str, disk: str) -> Head:
    """The head by which a helper opens a new epoch: nothing moves, the helper decides.

    `parent`: its last head, or an earlier one when the bases after it are lost. `epoch`: above all that the helper knows of.
    `disk`: the helper's.
    """
    return replace(
        parent,
        epoch=epoch,
        round=parent.round + 1,
        parent=parent.id,
        plan="",
        roots=(),
        dropped=(),
        base_digest="",
        members=(),
        owners=((),) * len(parent.owners),
        electorate=(helper,),
        disks=(disk,),
    )


def rollback_head(parent: Head, control: Control, digest: str, step: int) -> Head:
    """The head by which everybody goes back to an earlier base: no work is exchanged, the same electors decide the next round.

    `digest`, `step`: of that base. Tokens and data cursor go on: what was trained since is not trained again.
    """
    return replace(
        parent,
        round=parent.round + 1,
        parent=parent.id,
        plan="",
        roots=(),
        dropped=(),
        base_digest=digest,
        step=step,
        lost=(),
        control=control,
    )


def is_rollback(head: Head) -> bool:
    """Does this head go back to an earlier base? A reform, the other one without a plan, names no digest."""
    return head.round >= 0 and not head.plan and head.base_digest != ""


def is_reform(head: Head) -> bool:
    """Does this head open a new epoch?"""
    return head.round >= 0 and not head.plan and head.base_digest == ""


def proves(decided: Decided, parent: Head, identity: Identity) -> bool:
    """Is this head decided by the electorate that its parent fixed, or a reform signed by one of the campaign's helpers?"""
    head = decided.head
    if (head.campaign, head.parent, head.round, head.helpers) != (parent.campaign, parent.id, parent.round + 1, parent.helpers):
        return False
    if not may_follow(head.control, parent, identity):
        return False
    if head.epoch != parent.epoch:
        return _proves_reform(decided, parent, identity)
    message = vote_message(decided.ballot, head.id)
    electorate = remaining(parent, decided.farewells, identity)
    valid = {
        vote.elector
        for vote in decided.votes
        if vote.elector in electorate and identity.verify(vote.elector, message, vote.signature)
    }
    return len(valid) >= quorum(electorate)


def _proves_reform(decided: Decided, parent: Head, identity: Identity) -> bool:
    head, message = decided.head, vote_message(decided.ballot, decided.head.id)
    return head.epoch > parent.epoch and any(
        vote.elector in parent.helpers
        and head == reform_head(parent, head.epoch, vote.elector, "".join(head.disks))
        and identity.verify(vote.elector, message, vote.signature)
        for vote in decided.votes
    )


def _check_ballot(ballot: Ballot, head: Head, state: VoteState) -> None:
    if ballot.coordinator not in head.electorate:
        raise Refused("a ballot of a peer that is no elector of this round")
    if ballot.number > (state.promised.number if state.promised is not None else 0) + BALLOT_STEP:
        raise Refused("a ballot far above all that I promised")


class HeadLog:
    """The heads from genesis on, each proven by its certificate. Durable.

    Of two heads for one round the one of the higher epoch wins: a reform is the only way to a fork, and this heals it.
    """

    def __init__(self, store: Store, identity: Identity, genesis: Head):
        self._store = store
        self._identity = identity
        self.genesis = genesis
        self._decided: list[Decided] = []
        self._given_up: set[str] = set()
        records = store.records(LOG)
        for place, record in enumerate(records):
            if not self._take_up(record):
                logger.warning("%s: record %d does not follow; what comes after it is learned again", LOG, place)
                store.delete(LOG)
                for whole in records[:place]:
                    store.append(LOG, whole)
                break

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

    def has(self, head: str, round_number: int) -> bool:
        """Is the head with this id the one that was decided in that round?"""
        return round_number <= self.round and self.head_at(round_number).id == head

    def gave_up(self, head: str) -> bool:
        """Was this head decided in a branch that was given up for one of a higher epoch?"""
        return head in self._given_up

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
        parent = self.head_at(head.round - 1)
        if not proves(decided, parent, self._identity) or (head.epoch == parent.epoch and not self.leads_to(parent, head)):
            raise Refused(f"the certificate of round {head.round} does not hold")
        self._store.append(LOG, pack(decided))
        self._put(decided)
        return True

    def leads_to(self, parent: Head, head: Head) -> bool:
        """Can a plan, or a record that rolls back, lead from a head of this log to this one, in the same epoch?"""
        if head.plan:
            return not rolls_back(head.control, parent)
        return head == self.rolled_back(parent, head.control)

    def rolled_back(self, parent: Head, control: Control | None) -> Head | None:
        """The head after `parent` that goes back as this record says; None when it says no such thing or that cannot be."""
        if control is None or not rolls_back(control, parent):
            return None
        digest = self._digest_of_base(control.rollback, parent)
        return rollback_head(parent, control, digest, self.head_at(control.rollback).step) if digest is not None else None

    def _digest_of_base(self, round_number: int, last: Head) -> str | None:
        """Of the base after this round, as the heads up to `last` certify it; None when they do not."""
        if round_number >= last.round:
            return None
        if is_rollback(self.head_at(round_number)):
            return self.head_at(round_number).base_digest
        for later in map(self.head_at, range(round_number + 1, last.round + 1)):
            if is_rollback(later):
                return None
            if later.plan:
                return later.base_digest
        return None

    def _take_up(self, record: bytes) -> bool:
        try:
            decided = unpack(Decided, record)
        except WireError:
            return False
        if decided.head.round > self.round + 1 or decided.head.parent != self.head_at(decided.head.round - 1).id:
            return False
        self._put(decided)
        return True

    def _put(self, decided: Decided) -> None:
        """The new last head; what stood at its round and after it in a lower epoch is given up."""
        self._given_up.update(old.head.id for old in self._decided[decided.head.round :])
        del self._decided[decided.head.round :]
        self._decided.append(decided)


class Elector:
    """One peer's votes. Every answer is durable before it is given."""

    def __init__(self, log: HeadLog, store: Store, identity: Identity, rng: random.Random):
        """`rng` makes the id of a disk that has no votes yet. Votes that are older than the log are not trusted."""
        self._log = log
        self._store = store
        self._identity = identity
        self._rng = rng
        state = open_votes(store, rng)
        if (state.epoch, state.round) < self._last_vote_in_log(state.disk):
            logger.warning("the votes of this peer are older than its log")
            renew_votes(store, rng)

    @property
    def disk(self) -> str:
        """Id of the disk that I vote with."""
        return open_votes(self._store, self._rng).disk

    @property
    def may_vote(self) -> bool:
        """Am I an elector of the next round, with the votes that I need for it?"""
        try:
            self._require_elector()
        except Refused:
            return False
        return True

    def leave(self) -> Farewell | None:
        """Give up my seat in the next round; None when I have none, or have cast a vote in it already. Durable.

        A helper keeps its seat, and so does a lone elector: somebody must be able to vote when all who left are back.
        """
        head, me = self._log.head, self._identity.peer_id
        if me in head.helpers or head.electorate == (me,):
            return None
        if not self.may_vote or (state := self._state()).promised is not None:
            return None
        self._remember(replace(state, left=True))
        return self.farewell()

    def farewell(self) -> Farewell | None:
        """What says that I gave up my seat in the next round; None when I did not."""
        head, state = self._log.head, open_votes(self._store, self._rng)
        if state.parent != head.id or not state.left:
            return None
        return Farewell(self._identity.peer_id, head.id, self._identity.sign(farewell_message(head.id)))

    def prepare(self, request: Prepare) -> Promise:
        """Promise not to accept lower ballots, and say what was accepted. Each ballot is promised once.

        A coordinator that starts over, after a crash too, thus finds a new number, and no ballot ever carries two heads.
        """
        head = self._log.head
        if request.round != head.round + 1 or request.parent != head.id:
            return Promise(head.round, False, None, None, None)
        self._require_elector()
        state = self._state()
        _check_ballot(request.ballot, head, state)
        if state.promised is not None and request.ballot <= state.promised:
            return Promise(head.round, False, state.promised, None, None)
        self._remember(replace(state, promised=request.ballot))
        return Promise(head.round, True, request.ballot, state.accepted_ballot, state.accepted)

    def accept(self, request: Accept) -> Vote:
        """Vote for a head. Raises Refused when a higher ballot was promised or the head does not follow mine."""
        head = self._log.head
        if request.head.round != head.round + 1 or request.head.parent != head.id:
            raise Refused(f"my head is round {head.round}")
        proposed = request.head
        kept = (proposed.campaign, proposed.epoch, proposed.helpers) == (head.campaign, head.epoch, head.helpers)
        if not kept or not self._log.leads_to(head, proposed) or len(proposed.disks) != len(proposed.electorate):
            raise Refused("a head that no plan of this campaign leads to")
        if not may_follow(proposed.control, head, self._identity):
            raise Refused("a control record that the owner did not sign, or an old one")
        self._require_elector()
        state = self._state()
        _check_ballot(request.ballot, head, state)
        if state.promised is not None and request.ballot < state.promised:
            raise Refused(f"promised ballot {state.promised.number}")
        self._remember(replace(state, promised=request.ballot, accepted_ballot=request.ballot, accepted=request.head))
        signature = self._identity.sign(vote_message(request.ballot, request.head.id))
        return Vote(self._identity.peer_id, signature)

    def _require_elector(self) -> None:
        head, me, state = self._log.head, self._identity.peer_id, open_votes(self._store, self._rng)
        if me not in head.electorate:
            raise Refused("not an elector of this round")
        if disks_of(head)[me] != state.disk:
            raise Refused("my votes were lost: I vote again when a commit has listed my new disk")
        if (head.epoch, head.round + 1) < (state.epoch, state.round):
            raise Refused(f"my log was cut: I voted on round {state.round} already")
        if state.parent == head.id and state.left:
            raise Refused("I left this round")

    def _state(self) -> VoteState:
        head, state = self._log.head, open_votes(self._store, self._rng)
        if state.parent == head.id:
            return state
        return VoteState(state.disk, head.epoch, head.round + 1, head.id, None, None, None)

    def _remember(self, state: VoteState) -> None:
        _write_votes(self._store, state)

    def _last_vote_in_log(self, disk: str) -> tuple[int, int]:
        """Epoch and round of the last certificate that holds a vote which I gave with this disk."""
        me = self._identity.peer_id
        for decided in reversed(self._log.since(-1)):
            parent = self._log.head_at(decided.head.round - 1)
            if decided.head.plan and disks_of(parent).get(me) == disk and any(vote.elector == me for vote in decided.votes):
                return parent.epoch, decided.head.round
        return 0, -1
