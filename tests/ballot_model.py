"""Every interleaving of a few decisions: the production state machines, searched to the end.

Three electors, each a `Participant`, and two coordinators, each with a `Proposer`. A state holds what each elector has on disk
and in memory, what each coordinator has in memory, and everything that was ever sent. From a state every step is taken that
could come next:

- a coordinator begins a ballot of any number up to the bound: at first, after an attempt that failed, or after a crash;
- a prepare, an accept or a certificate reaches an elector: soon, late, again, or (no step is forced) never;
- the elector makes its writes durable and answers, or crashes after any of the writes; the answer arrives, or is lost;
- an elector crashes at any other time, or loses its disk and returns with an empty one;
- an elector gives up its seat, and a coordinator has heard of that, of an earlier time, or not;
- the owner opens a term after any round of its log that is not before its milestone;
- the owner signs a milestone at any round of its log, and an elector's log begins there from any time on, or never.

Electors may lie: they send whatever their keys can sign, and need no state for it. As coordinators they propose any commit in
any ballot, valid or not, several in one; as electors they sign every vote, and promise whatever they like.

An answer arrives at once or never: a later one could only delay what the proposer sends, and that may be late anyway.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from spes_p2p.consensus.acceptor import VoteState, fresh_votes
from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.farewell import signed_farewell
from spes_p2p.consensus.milestone import signed_milestone
from spes_p2p.consensus.output import LOG, VOTES, Output
from spes_p2p.consensus.participant import Files, Participant
from spes_p2p.consensus.proposer import Proposer, ProposerState
from spes_p2p.consensus.reform import is_reform
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Commit, Farewell, Milestone, Prepare, Promise, Vote
from spes_p2p.messages.samples import Cursor
from spes_p2p.testing.simulated_identity import SimulatedIdentity

NONE = -1
ELECTORS = ("A", "B", "C")
OWNER = "A"
COORDINATORS = ("A", "B")
FORGED = "forged"
"""Names the plan of an invalid commit."""


def is_valid(commit: Commit) -> bool:
    """Whether a commit follows from its evidence."""
    return commit.plan != FORGED


@dataclass(frozen=True)
class Bounds:
    """How far a search goes; within them it leaves nothing out."""

    ballots: tuple[int, int] = (1, 1)
    """Ballots that each coordinator begins."""
    numbers: int = 2
    """Highest ballot number."""
    rounds: int = 1
    losses: int = 0
    """Disks that are lost."""
    farewells: int = 0
    """Times that an elector gives up its seat."""
    reforms: int = 0
    """Terms that are opened. With any, A is the owner, and keeps its seat and its disk."""
    milestones: int = 0
    """Milestones that the owner signs."""
    owner_loses: bool = False
    """The owner may lose its disk too."""
    cuts: int = 0
    """Times that a log loses its last commit."""
    liars: int = 0
    """Electors that lie: B, then C. Only A is an honest coordinator then."""
    one_commit: bool = True
    """Look for two commits of a round that are certified; False: only for invalid ones."""

    @property
    def lying(self) -> tuple[str, ...]:
        """The electors that lie."""
        return ELECTORS[1 : 1 + self.liars]


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    states: int
    reached: frozenset[str]
    """Kinds of states that were visited."""
    violation: str | None = None
    trace: tuple[str, ...] = ()
    """The shortest way to the violation, step by step."""


class Process(NamedTuple):
    """One elector: what is on its disk, and what a crash takes."""

    losses: int
    """Disks that it lost before this one."""
    cuts: int
    """Times that its log lost its end."""
    votes: bytes
    log: tuple[int, ...]
    """Numbers of commits, the oldest first."""
    begins: int
    """Round of the milestone that is the first of the log; NONE: the log begins after genesis."""
    memory: VoteState | None
    """Its votes where they are not what is on disk."""


class Live(NamedTuple):
    """A proposer that waits for promises, or for the commit to propose. Numbers stand for answers and memories."""

    attempt: int
    memory: int
    answers: tuple[int, ...]
    """Of each elector, NONE where none came; emptied when nobody will read them any more."""
    heard: tuple[int, ...]
    """For each elector, the commit whose farewell it has heard of it; NONE for none."""


class Attempt(NamedTuple):
    """One ballot of one coordinator, as it was sent."""

    coordinator: str
    place: int
    """Ballots that this coordinator had begun before."""
    number: int
    parent: int
    proposal: int | None
    votes: tuple[bool, ...]
    """The electors that signed the proposal in this ballot."""

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.number, self.coordinator)


class State(NamedTuple):
    """Everything at one instant."""

    electors: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]
    """For each elector, the commits after which it said farewell."""
    reforms: tuple[int, ...]
    milestones: tuple[int, ...]
    """Commits at which the owner signed one."""
    live: tuple[Live | None, ...]
    """Of each coordinator."""
    attempts: tuple[Attempt, ...]
    """Of A, then of B, in the order in which they were begun."""


class Numbers:
    """Small numbers for large things, so that states are small."""

    def __init__(self) -> None:
        self._number_of: dict[Any, int] = {}
        self.things: list[Any] = []

    def of(self, thing: Any) -> int:
        number = self._number_of.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


Step = tuple[str, State]
Certificate = tuple[Ballot, int, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Ballot and commit, who voted, who left, and whose farewells come with it."""
PER_ELECTOR = ("_answers", "_caught_up", "electorate", "_farewells")
"""Fields of a proposer that a Live keeps by elector."""


class Model:
    """The steps between states. What a state machine does with one request is computed once and remembered."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.genesis = Commit(
            campaign="c", term=0, round=-1, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0,
            members=(), owners=(), cursor=Cursor(), helpers=(OWNER,) if bounds.reforms else (), electorate=ELECTORS,
            incarnations=(_incarnation(0),) * len(ELECTORS),
        )
        self._at_once = not bounds.losses or bounds.rounds == 1
        """Does a proposer propose as soon as it may? Later is the same, unless its commit depends on losses until then."""
        symmetric = (bounds.rounds == 1 or not bounds.losses) and not bounds.liars
        self._fixed = (1 if bounds.reforms else 0) if symmetric else len(ELECTORS)
        """The number of electors, from the first on, that are told apart."""
        self._processes, self._attempts, self._commits, self._answers, self._memories, self._lives, self._sets = (
            Numbers() for _ in range(7)
        )
        self._commits.of(self.genesis)
        self._known: dict[Any, Any] = {}
        self.reached: set[str] = set()

    def key(self, state: State) -> bytes:
        """The same bytes for states that differ by the electors' names only, where no rule looks at those.

        Commits that list different incarnations of electors tell them apart, and being the owner does.
        """
        columns = [
            (e, state.left[i], *((live.answers[i] if live.answers else NONE, live.heard[i]) for live in state.live if live),
             *(attempt.votes[i] for attempt in state.attempts))
            for i, e in enumerate(state.electors)
        ]  # fmt: skip
        order = [*range(self._fixed), *sorted(range(self._fixed, len(ELECTORS)), key=columns.__getitem__)]
        numbers = [state.electors[i] for i in order]
        numbers += [self._sets.of(state.left[i]) for i in order]
        numbers += [self._sets.of(state.reforms), self._sets.of(state.milestones)]
        for live in state.live:
            if live is None:
                numbers.append(0)
            else:
                answers = tuple(live.answers[i] for i in order) if live.answers else ()
                heard = tuple(live.heard[i] for i in order)
                numbers.append(1 + self._lives.of(live._replace(answers=answers, heard=heard)))
        for attempt in state.attempts:
            numbers.append(self._attempts.of(attempt._replace(votes=tuple(attempt.votes[i] for i in order))))
        return array("I", numbers).tobytes()

    def state(self, key: bytes) -> State:
        """The state of a key."""
        numbers, many = array("I", key), len(ELECTORS)
        live = tuple(self._lives.things[n - 1] if n else None for n in numbers[2 * many + 2 : 2 * many + 4])
        left = tuple(self._sets.things[number] for number in numbers[many : 2 * many])
        attempts = tuple(self._attempts.things[number] for number in numbers[2 * many + 4 :])
        reforms, milestones = (self._sets.things[number] for number in numbers[2 * many : 2 * many + 2])
        return State(tuple(numbers[:many]), left, reforms, milestones, live, attempts)

    def first(self) -> State:
        """Nothing has happened."""
        many = len(ELECTORS)
        return State((self._processes.of(_empty_disk(0)),) * many, ((),) * many, (), (), (None,) * len(COORDINATORS), ())

    def steps(self, state: State) -> Iterator[Step]:
        """Every state that can come next, with the step that leads there."""
        yield from self._begin(state)
        yield from self._propose(state)
        for place, name in enumerate(ELECTORS):
            if name in self.bounds.lying:
                yield from self._lie(state, place)
                continue
            yield from self._crash(state, place)
            yield from self._lose_disk(state, place)
            yield from self._cut_log(state, place)
            yield from self._leave(state, place)
            yield from self._open_term(state, place)
            yield from self._sign_milestone(state, place)
            for attempt in state.attempts:
                yield from self._prepare(state, attempt, place)
                yield from self._accept(state, attempt, place)
            yield from self._learn(state, place)
            for branch in self._owners_branches(state, place):
                for after, _ in self._offered(state, place, branch):
                    yield f"{ELECTORS[place]} learns the branch {branch}", _with_elector(state, place, after)

    # Coordinators ------------------------------------------------------------------------------------------------------

    def _begin(self, state: State) -> Iterator[Step]:
        """On any certified commit, the newest or one that others have left behind, with any of the farewells."""
        parents = [n for n in (0, *sorted(self.certified(state))) if self._commits.things[n].round + 1 < self.bounds.rounds]
        for coordinator, most in zip(COORDINATORS, self.bounds.ballots, strict=True):
            index = sum(attempt.coordinator == coordinator for attempt in state.attempts)
            if index == most or coordinator in self.bounds.lying:
                continue
            for parent, number in itertools.product(parents, range(1, self.bounds.numbers + 1)):
                if coordinator in self._commits.things[parent].electorate:
                    for heard in itertools.product(*((NONE, *left) for left in state.left)):
                        live = self._begun(coordinator, index, number, parent, heard)
                        made = Attempt(coordinator, index, number, parent, None, (False,) * len(ELECTORS))
                        after = _with_live(state, coordinator, live)._replace(attempts=_ordered([*state.attempts, made]))
                        yield f"{coordinator} begins ballot {number} after commit {parent}", after

    def _begun(self, coordinator: str, index: int, number: int, parent: int, heard: tuple[int, ...]) -> Live:
        key = "begin", coordinator, index, number, parent, heard
        if key not in self._known:
            proposer = Proposer(self._log_to(parent), SimulatedIdentity(coordinator), is_valid, number - 1)
            proposer.prepare(self._farewells(heard))
            self._known[key] = self._remembered(proposer, index, heard)
        live: Live = self._known[key]
        return live

    def _propose(self, state: State) -> Iterator[Step]:
        """A coordinator with its promises proposes: what binds it, or a commit of its own."""
        for coordinator, live in zip(COORDINATORS, state.live, strict=True):
            if live is not None and not live.answers:
                yield from self._proposed(state, coordinator, live)

    def _proposed(self, state: State, coordinator: str, live: Live) -> Iterator[Step]:
        attempt = next(a for a in state.attempts if (a.coordinator, a.place) == (coordinator, live.attempt))
        proposer = self._proposer(coordinator, live, attempt.parent)
        if proposer.bound is not None:
            self.reached.add("a bound commit is proposed again")
        commits = [proposer.bound] if proposer.bound is not None else self._own_commits(state, attempt, proposer.parent)
        for commit in commits:
            (accept, *_) = self._proposer(coordinator, live, attempt.parent).propose(commit, b"", ())
            assert isinstance(accept.request, Accept)
            proposed = attempt._replace(proposal=self._commits.of(accept.request.commit))
            after = _replaced(_with_live(state, coordinator, None), attempt, proposed)
            yield f"{coordinator} proposes commit {proposed.proposal}", after

    def _own_commits(self, state: State, attempt: Attempt, parent: Commit) -> Iterator[Commit]:
        """What a coordinator that is not bound may propose: another commit in each attempt, as its plan would be another.

        It lists electors' incarnations as they are or, where it did not hear of a loss, as they were.
        """
        tokens = 10 * COORDINATORS.index(attempt.coordinator) + attempt.place + 1
        now = [_incarnation(self._processes.things[process].losses) for process in state.electors]
        listed = dict(zip(parent.electorate, parent.incarnations, strict=True))
        known = [sorted({listed.get(name, new), new}) for name, new in zip(ELECTORS, now, strict=True)]
        for disks in itertools.product(*known) if parent.round + 2 < self.bounds.rounds else [tuple(now)]:
            yield dataclasses.replace(
                parent, round=parent.round + 1, parent=parent.id, plan="p", tokens=tokens, electorate=ELECTORS,
                incarnations=disks
            )

    def _proposer(self, coordinator: str, live: Live, parent: int) -> Proposer:
        proposer = Proposer(self._log_to(parent), SimulatedIdentity(coordinator), is_valid)
        proposer.hear(self._farewells(live.heard))
        answers = zip(ELECTORS, live.answers, strict=False)
        vars(proposer).update(self._memories.things[live.memory])
        vars(proposer)["_answers"] = {name: self._answers.things[answer] for name, answer in answers if answer != NONE}
        return proposer

    def _remembered(self, proposer: Proposer, index: int, heard: tuple[int, ...]) -> Live:
        memory = {name: value for name, value in vars(proposer).items() if name not in (*PER_ELECTOR, "_log", "_identity")}
        came = vars(proposer)["_answers"] if proposer.state is ProposerState.PREPARING else {}
        answers = tuple(self._answers.of(came[name]) if name in came else NONE for name in ELECTORS)
        memory_number = self._memories.of(tuple(sorted(memory.items(), key=lambda pair: pair[0])))
        return Live(index, memory_number, answers, heard) if proposer.state is ProposerState.PREPARING else (
            Live(index, memory_number, (), (False,) * len(ELECTORS))
        )

    def _log_to(self, commit: int) -> CommitLog:
        """A log that ends with this commit."""
        chain: list[Commit] = []
        while commit:
            chain.append(self._commits.things[commit])
            commit = next(n for n, known in enumerate(self._commits.things) if known.id == chain[-1].parent)
        log = CommitLog(SimulatedIdentity("reader"), self.genesis)
        for known in reversed(chain):
            log.put(_uncertified(known))
        return log

    def _farewells(self, heard: tuple[int, ...]) -> list[Farewell]:
        said = ((name, self._commits.things[parent].id) for name, parent in zip(ELECTORS, heard, strict=True) if parent != NONE)
        return [signed_farewell(SimulatedIdentity(name), commit) for name, commit in said]

    # Liars -------------------------------------------------------------------------------------------------------------

    def _lie(self, state: State, place: int) -> Iterator[Step]:
        """Propose anything in any ballot, and promise anything to anybody."""
        liar, most = ELECTORS[place], self.bounds.ballots[1]
        made = sum(attempt.coordinator == liar for attempt in state.attempts)
        if liar in COORDINATORS and made < most:
            for number, commit in itertools.product(range(1, self.bounds.numbers + 1), self._any_commits()):
                attempt = Attempt(liar, made, number, 0, commit, (False,) * len(ELECTORS))
                yield f"{liar} proposes commit {commit} in ballot {number}", state._replace(
                    attempts=_ordered([*state.attempts, attempt])
                )
        for attempt in state.attempts:
            if attempt.coordinator in self.bounds.lying:
                continue
            parent: Commit = self._commits.things[attempt.parent]
            request = Prepare(parent.round + 1, parent.id, attempt.ballot)
            for accepted in (None, *self._any_commits()):
                named = None if accepted is None else self._commits.things[accepted]
                for number in (0,) if accepted is None else range(self.bounds.numbers + 1):
                    ballot = None if accepted is None else Ballot(number, liar)
                    promise = Promise(parent.round, True, attempt.ballot, ballot, named)
                    for then in self._hear(state, attempt, request, place, promise):
                        yield f"{liar} promises {attempt.coordinator}/{attempt.number} with commit {accepted}", then

    def _any_commits(self) -> tuple[int, ...]:
        """A commit that does not follow from any evidence, and two that do."""
        made = [
            dataclasses.replace(self.genesis, round=0, parent=self.genesis.id, plan=plan, tokens=tokens)
            for plan, tokens in ((FORGED, 10), ("p", 1), ("p", 11))
        ]
        return tuple(self._commits.of(commit) for commit in made)

    # Electors ----------------------------------------------------------------------------------------------------------

    def _prepare(self, state: State, attempt: Attempt, place: int) -> Iterator[Step]:
        parent: Commit = self._commits.things[attempt.parent]
        request = Prepare(parent.round + 1, parent.id, attempt.ballot)
        key = "prepare", attempt.number, attempt.coordinator, attempt.parent
        ends = self._handle(state, place, key, lambda elector: elector.acceptor.prepare(attempt.coordinator, request))
        what = f"the prepare of {attempt.coordinator}/{attempt.number}"
        for after, promise in ends:
            changed = _with_elector(state, place, after)
            if changed != state:
                yield f"{ELECTORS[place]} takes {what}, its answer is lost", changed
            if promise is not None:
                for then in self._hear(changed, attempt, request, place, promise):
                    yield f"{ELECTORS[place]} answers {what}", then

    def _hear(self, state: State, attempt: Attempt, request: Prepare, place: int, promise: Promise) -> Iterator[State]:
        """The answer reaches whatever proposer its coordinator runs now, also when it belongs to an earlier ballot."""
        live = state.live[COORDINATORS.index(attempt.coordinator)]
        if live is None or not live.answers or promise.round < request.round - 1:
            return
        answer = self._answers.of(promise)
        key = "hear", attempt.coordinator, live, attempt.number, attempt.parent, place, answer
        if key not in self._known:
            self._known[key] = self._heard(state, attempt.coordinator, live, request, place, promise)
        heard = self._known[key]
        if heard is None:
            return
        then, ballot = heard
        index = sum(a.coordinator == attempt.coordinator for a in state.attempts)
        if ballot is None and not then.answers and self._at_once:
            yield from (after for _, after in self._proposed(state, attempt.coordinator, then))
        elif ballot is None:
            yield _with_live(state, attempt.coordinator, then)
        elif ballot <= self.bounds.numbers and index < self.bounds.ballots[COORDINATORS.index(attempt.coordinator)]:
            self.reached.add("an outbid proposer goes on with a higher ballot")
            parent = next(a.parent for a in state.attempts if (a.coordinator, a.place) == (attempt.coordinator, live.attempt))
            made = Attempt(attempt.coordinator, index, ballot, parent, None, (False,) * len(ELECTORS))
            after = _with_live(state, attempt.coordinator, then._replace(attempt=index))
            yield after._replace(attempts=_ordered([*state.attempts, made]))

    def _heard(
        self, state: State, coordinator: str, live: Live, request: Prepare, place: int, promise: Promise
    ) -> tuple[Live, int | None] | None:
        """The proposer after the answer, and the number of its new ballot if it began one; None when nothing came of it."""
        begun = next(a for a in state.attempts if (a.coordinator, a.place) == (coordinator, live.attempt))
        proposer = self._proposer(coordinator, live, begun.parent)
        before = proposer.ballot
        proposer.receive(ELECTORS[place], request, promise)
        if proposer.state is ProposerState.FAILED:
            return None
        after = self._remembered(proposer, live.attempt, live.heard)
        if proposer.ballot != before:
            return after, proposer.ballot.number
        return (after, None) if after != live else None

    def _accept(self, state: State, attempt: Attempt, place: int) -> Iterator[Step]:
        if attempt.proposal is None:
            return
        request = Accept(attempt.ballot, self._commits.things[attempt.proposal])
        key = "accept", attempt.number, attempt.coordinator, attempt.proposal
        ends = self._handle(state, place, key, lambda elector: elector.acceptor.accept(attempt.coordinator, request))
        for after, vote in ends:
            voted = attempt if vote is None else attempt._replace(votes=_put(attempt.votes, place, True))
            if voted != attempt or after != state.electors[place]:
                what = f"commit {attempt.proposal} of {attempt.coordinator}/{attempt.number}"
                step = f"{ELECTORS[place]} {'votes for' if vote else 'crashes over'} {what}"
                yield step, _replaced(_with_elector(state, place, after), attempt, voted)

    def _learn(self, state: State, place: int) -> Iterator[Step]:
        """Somebody sends votes of one ballot as a certificate, enough of them or not, with farewells, true or forged."""
        for (ballot, commit), voters in _votes(state, self.bounds.lying).items():
            parent = self._parent(commit)
            left = tuple(name for name, after in zip(ELECTORS, state.left, strict=True) if parent in after)
            claimed = tuple(name for name in ELECTORS if name not in voters)
            for farewells in {left, claimed} if self.bounds.farewells else {left}:
                certificate = ballot, commit, voters, left, farewells
                for after, _ in self._handle(state, place, ("learn", certificate), partial(self._taught, certificate)):
                    yield f"{ELECTORS[place]} learns commit {commit}", _with_elector(state, place, after)
        for commit in state.reforms:
            reform: CertifiedCommit = self._known["reform", commit]
            for after, _ in self._handle(state, place, ("reform", commit), partial(Participant.learn, decided=reform)):
                yield f"{ELECTORS[place]} learns the reform {commit}", _with_elector(state, place, after)
        for commit in state.milestones:
            for after, _ in self._handle(state, place, ("milestone", commit), partial(self._begun_at, commit)):
                yield f"{ELECTORS[place]} begins its log at commit {commit}", _with_elector(state, place, after)

    def _owners_branches(self, state: State, place: int) -> Iterator[tuple[int, ...]]:
        """The commits up to each new term that are not in the elector's log, where it has others of an equal term instead."""
        log = self._processes.things[state.electors[place]].log
        terms = {self._commits.things[commit].round: self._commits.things[commit].term for commit in log}
        for reform in set(state.reforms).difference(log):
            branch = [reform]
            while (parent := self._parent(branch[0])) and parent not in log:
                branch.insert(0, parent)
            first: Commit = self._commits.things[branch[0]]
            if terms.get(first.round) == first.term:
                yield tuple(branch)

    def _offered(self, state: State, place: int, branch: tuple[int, ...]) -> list[tuple[int, Any]]:
        """The elector gets the whole branch, each commit with all votes of the ballot that has the most."""
        votes = _votes(state, self.bounds.lying)
        proof = tuple(max(((v, b) for (b, c), v in votes.items() if c == each), key=lambda found: len(found[0]))
                      for each in branch[:-1])  # fmt: skip
        decided = [self._certificate(commit, ballot, voters) for commit, (voters, ballot) in zip(branch, proof, strict=False)]
        whole = [*decided, self._known["reform", branch[-1]]]
        return self._handle(state, place, ("branch", branch, proof), partial(Participant.learn_branch, branch=whole))

    def _certificate(self, number: int, ballot: Ballot, voters: tuple[str, ...]) -> CertifiedCommit:
        commit: Commit = self._commits.things[number]
        message = vote_message(ballot, commit.id)
        return CertifiedCommit(commit, ballot, tuple(Vote(name, SimulatedIdentity(name).sign(message)) for name in voters))

    def _taught(self, certificate: Certificate, elector: Participant) -> Output[bool]:
        """The elector gets these votes; of the farewells only those of electors that left carry their signature."""
        ballot, commit, voters, left, farewells = certificate
        decided = self._certificate(commit, ballot, voters)
        said = [signed_farewell(SimulatedIdentity(name), decided.commit.parent) for name in farewells]
        told = [true if true.elector in left else dataclasses.replace(true, signature=b"forged") for true in said]
        return elector.learn(dataclasses.replace(decided, farewells=tuple(told)))

    def _leave(self, state: State, place: int) -> Iterator[Step]:
        if sum(map(len, state.left)) == self.bounds.farewells:
            return
        process: Process = self._processes.things[state.electors[place]]
        if _decided(process) == self.bounds.rounds:
            return
        for after, farewell in self._handle(state, place, ("leave",), lambda elector: elector.acceptor.leave()):
            changed = _with_elector(state, place, after)
            if farewell is not None:
                parent = process.log[-1] if process.log else 0
                said = tuple(sorted({*state.left[place], parent}))
                changed = changed._replace(left=_put(state.left, place, said))
            yield f"{ELECTORS[place]} leaves", changed

    def _open_term(self, state: State, place: int) -> Iterator[Step]:
        """After any round of the log. What is in the log may be told at any time, so it counts as told."""
        if len(state.reforms) >= self.bounds.reforms:
            return
        process: Process = self._processes.things[state.electors[place]]
        for number in range(-1, min(_decided(process), self.bounds.rounds - 1)):
            ends = self._handle(state, place, ("open", number), partial(Participant.open_term, round_number=number))
            opened: CertifiedCommit | None = next((decided for _, decided in ends if decided is not None), None)
            if opened is None:
                continue
            commit = self._commits.of(opened.commit)
            self._known["reform", commit] = opened
            reforms = tuple(sorted({*state.reforms, commit}))
            for after, _ in ends:
                opens = f"{ELECTORS[place]} opens a term with commit {commit}"
                yield opens, _with_elector(state, place, after)._replace(reforms=reforms)

    def _sign_milestone(self, state: State, place: int) -> Iterator[Step]:
        """At any round of the log. It may be told at any time, too."""
        process: Process = self._processes.things[state.electors[place]]
        if ELECTORS[place] != OWNER or len(state.milestones) >= self.bounds.milestones:
            return
        for commit in process.log:
            milestones = tuple(sorted({*state.milestones, commit}))
            for after, taken in self._handle(state, place, ("milestone", commit), partial(self._begun_at, commit)):
                if after != state.electors[place] or taken:
                    signs = f"{ELECTORS[place]} signs a milestone at commit {commit}"
                    yield signs, _with_elector(state, place, after)._replace(milestones=milestones)

    def _begun_at(self, commit: int, elector: Participant) -> Output[bool]:
        return elector.take_milestone(self._milestone(commit))

    def _milestone(self, commit: int) -> Milestone:
        return signed_milestone(Milestone(_uncertified(self._commits.things[commit]), (), b""), SimulatedIdentity(OWNER))

    def _crash(self, state: State, place: int) -> Iterator[Step]:
        process: Process = self._processes.things[state.electors[place]]
        if process.memory is not None:
            yield f"{ELECTORS[place]} crashes", _with_elector(state, place, self._processes.of(process._replace(memory=None)))

    def _lose_disk(self, state: State, place: int) -> Iterator[Step]:
        processes: list[Process] = [self._processes.things[process] for process in state.electors]
        spared = self.bounds.reforms and ELECTORS[place] == OWNER and not self.bounds.owner_loses
        if sum(process.losses for process in processes) < self.bounds.losses and not spared:
            empty = _empty_disk(processes[place].losses + 1)
            yield f"{ELECTORS[place]} loses its disk", _with_elector(state, place, self._processes.of(empty))

    def _cut_log(self, state: State, place: int) -> Iterator[Step]:
        """The elector restarts without the last commit of its log; its votes are whole."""
        processes: list[Process] = [self._processes.things[process] for process in state.electors]
        process = processes[place]
        if process.log and sum(each.cuts for each in processes) < self.bounds.cuts:
            cut = process._replace(cuts=process.cuts + 1, log=process.log[:-1], memory=None)
            yield f"{ELECTORS[place]} loses the end of its log", _with_elector(state, place, self._processes.of(cut))

    def _handle(
        self, state: State, place: int, what: tuple[Any, ...], handle: Callable[[Participant], Output[Any]]
    ) -> list[tuple[int, Any]]:
        """All ends of one request: the elector's next state, and its reply or None where it crashed after one of its writes."""
        process, name = state.electors[place], ELECTORS[place]
        key = what, name, process
        if key not in self._known:
            before: Process = self._processes.things[process]
            elector = self._participant(name, before)
            try:
                output = handle(elector)
            except Refused:
                output = Output(None)
            disk, ends = before._replace(memory=None), []
            for write in output.writes:
                elector.apply(write)
                if write.file == VOTES:
                    disk = disk._replace(votes=write.record)
                elif write.file == LOG:
                    log = tuple(self._commits.of(decided.commit) for decided in elector.log.since(-1))
                    disk = disk._replace(log=log, begins=elector.log.begins)
                    if disk.begins != NONE:
                        self.reached.add("a log begins at a milestone")
                ends.append((self._processes.of(self._settled(disk)), None))
            memory = None if pack(elector.acceptor.votes) == disk.votes else elector.acceptor.votes
            ends.append((self._processes.of(self._settled(disk._replace(memory=memory))), output.reply))
            self._known[key] = [end for i, end in enumerate(ends) if end != (process, None) and end not in ends[:i]]
        found: list[tuple[int, Any]] = self._known[key]
        return found

    def _participant(self, name: str, process: Process) -> Participant:
        """The elector as it recovers, with what it has in memory."""
        records = [pack(_uncertified(self._commits.things[commit])) for commit in process.log]
        if process.begins != NONE:
            records[0] = pack(self._milestone(process.log[0]))
        files = Files(process.votes, records, None)
        elector = Participant(SimulatedIdentity(name), self.genesis, files, random.Random(process.losses), is_valid)
        assert not elector.recovery
        if process.memory is not None:
            elector.acceptor.votes = process.memory
        return elector

    def _settled(self, process: Process) -> Process:
        """After the last round of the search nobody asks for votes any more: they are kept as for the next round."""
        if _decided(process) < self.bounds.rounds or self.bounds.cuts:
            return process
        commit: Commit = self._commits.things[process.log[-1]]
        unused = VoteState(_incarnation(process.losses), commit.term, commit.round + 1, commit.id, None, None, None)
        return process._replace(votes=pack(unused), memory=None)

    # What must hold ----------------------------------------------------------------------------------------------------

    def _parent(self, commit: int) -> int:
        if ("parent", commit) not in self._known:
            parent = self._commits.things[commit].parent
            self._known["parent", commit] = next(n for n, known in enumerate(self._commits.things) if known.id == parent)
        found: int = self._known["parent", commit]
        return found

    def certified(self, state: State) -> set[int]:
        """The commits that are decided, whoever knows it: by votes in one ballot of a majority of those that did not leave, or
        by the owner. Counted here once more, without the code under test."""
        found = set(state.reforms)
        for (_, commit), voters in _votes(state, self.bounds.lying).items():
            parent = self._parent(commit)
            electorate = set(self._commits.things[parent].electorate)
            left = [name for name, after in zip(ELECTORS, state.left, strict=True) if parent in after]
            for count in range(len(left) + 1):
                for gone in itertools.combinations(left, count):
                    seats = electorate - set(gone) or electorate
                    if 2 * len(seats & set(voters)) > len(seats):
                        found.add(commit)
                        if 2 * len(electorate & set(voters)) < len(electorate):
                            self.reached.add("a minority decides, as the others left")
        return found

    def violation(self, state: State) -> str | None:
        """What is wrong with this state, in words; None for nothing."""
        certified = self.certified(state)
        commits: list[Commit] = [self._commits.things[number] for number in certified]
        self._note(commits)
        if not all(map(is_valid, commits)):
            return f"commits {sorted(certified)}: one does not follow from any evidence"
        if self.bounds.one_commit and len({(commit.term, commit.round) for commit in commits}) < len(commits):
            return f"commits {sorted(certified)}: two are certified for one round of one term"
        reforms = [commit.term for commit in commits if is_reform(commit)]
        if len(set(reforms)) < len(reforms):
            return f"commits {sorted(certified)}: one term is opened twice"
        for milestone in map(self._commits.things.__getitem__, state.milestones):
            if any(is_reform(each) and each.term > milestone.term and each.round <= milestone.round for each in commits):
                return f"commits {sorted(certified)}: a term is opened before a milestone"
        processes: list[Process] = [self._processes.things[process] for process in state.electors]
        logs = [(NONE,) * max(0, process.begins) + process.log for process in processes]
        for name, log in zip(ELECTORS, logs, strict=True):
            if not certified.issuperset(set(log) - {NONE}):
                return f"{name} learned a commit that is not certified"
        for place, name in enumerate(ELECTORS):
            for branch in self._owners_branches(state, place):
                self.reached.add("liars fork a log that the owner goes on with otherwise")
                ends = self._offered(state, place, branch)
                if not ends or not set(branch) <= set(self._processes.things[ends[-1][0]].log):
                    return f"{name} cannot go over to the branch {branch}: a fork that no higher term heals"
        for one, other in itertools.combinations(logs, 2):
            fork = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1] and NONE not in pair), None)
            if fork is None or not self.bounds.one_commit:
                continue
            if self._commits.things[fork[0]].term == self._commits.things[fork[1]].term:
                return f"commits {fork}: a fork that no higher term heals"
        return None

    def _note(self, commits: list[Commit]) -> None:
        for commit in commits:
            if is_reform(commit):
                self.reached.add("a term is opened")
            else:
                self.reached.add(f"{COORDINATORS[commit.tokens // 10]} decides")
                self.reached.add(f"round {commit.round} is decided in term {commit.term}")
        if len({commit.round for commit in commits}) < len(commits):
            self.reached.add("two terms fork")


def search(bounds: Bounds) -> Outcome:
    """Breadth first over every reachable state, up to the first violation or to the end."""
    model = Model(bounds)
    first = model.key(model.first())
    came_from: dict[bytes, bytes] = {first: first}
    queue = deque([first])
    while queue:
        key = queue.popleft()
        state = model.state(key)
        violation = model.violation(state)
        if violation is not None:
            return Outcome(len(came_from), frozenset(model.reached), violation, _trace(model, came_from, key))
        for _, after in model.steps(state):
            next_key = model.key(after)
            if next_key not in came_from:
                came_from[next_key] = key
                queue.append(next_key)
    return Outcome(len(came_from), frozenset(model.reached))


def _trace(model: Model, came_from: dict[bytes, bytes], key: bytes) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came_from[key]) != key:
        steps.append(next(step for step, after in model.steps(model.state(before)) if model.key(after) == key))
        key = before
    return tuple(reversed(steps))


def _votes(state: State, lying: tuple[str, ...]) -> dict[tuple[Ballot, int], tuple[str, ...]]:
    """Who voted for which commit in which ballot. Liars have signed everything."""
    votes: dict[tuple[Ballot, int], set[str]] = {}
    for attempt in state.attempts:
        now = {*lying, *(name for name, voted in zip(ELECTORS, attempt.votes, strict=True) if voted)}
        if attempt.proposal is not None and now:
            votes.setdefault((attempt.ballot, attempt.proposal), set()).update(now)
    return {place: tuple(sorted(voters)) for place, voters in votes.items()}


def _with_elector(state: State, place: int, process: int) -> State:
    return state._replace(electors=_put(state.electors, place, process))


def _with_live(state: State, coordinator: str, live: Live | None) -> State:
    return state._replace(live=_put(state.live, COORDINATORS.index(coordinator), live))


def _replaced(state: State, attempt: Attempt, by: Attempt) -> State:
    return state._replace(attempts=tuple(by if a is attempt else a for a in state.attempts))


def _ordered(attempts: list[Attempt]) -> tuple[Attempt, ...]:
    return tuple(sorted(attempts, key=lambda attempt: attempt[:2]))


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _decided(process: Process) -> int:
    """Rounds that a process knows to be decided."""
    return max(0, process.begins) + len(process.log)


def _uncertified(commit: Commit) -> CertifiedCommit:
    """Certificates of one commit prove the same, so logs are kept without votes."""
    return CertifiedCommit(commit, Ballot(0, ""), ())


def _empty_disk(losses: int) -> Process:
    """A process on a new disk, after `losses` others were lost. Its incarnation does not depend on the elector's name."""
    return Process(losses, 0, pack(fresh_votes(random.Random(losses))), (), NONE, None)


def _incarnation(losses: int) -> str:
    return fresh_votes(random.Random(losses)).incarnation
