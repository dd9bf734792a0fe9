"""Every interleaving of one decision: three electors and two coordinators, the real rules on real stores, searched to the end.

A state holds what each elector has on disk and in memory, and each ballot that a coordinator began: who answered, what it
proposed, who voted. From a state every step is taken that could come next:

- a coordinator begins a ballot of any number up to the bound: after an attempt that failed, or a crash that forgot the last;
- a prepare, an accept or a certificate reaches an elector: soon, late, again, or (no step is forced) never;
- the elector answers, or crashes at a named point of its store's write and restarts: the answer is lost then;
- an elector crashes at any other time, or loses its disk and comes back with an empty one;
- the coordinator goes on with any of the answers that it got: the others are lost, or come too late.

An answer belongs to the talk that asked for it: one to a ballot whose coordinator has begun another is read by nobody.
A coordinator reads a set of answers, not their order, so that their arrivals need no steps of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from spes_p2p.data.slices import Cursor
from spes_p2p.errors import Refused
from spes_p2p.swarm.electors import (
    LOG,
    VOTES,
    Accept,
    Elector,
    HeadLog,
    Prepare,
    Promise,
    VoteState,
    Weighed,
    open_votes,
    quorum,
    vote_message,
    weigh,
)
from spes_p2p.swarm.identity import SimulatedIdentity
from spes_p2p.swarm.records import Ballot, Decided, Head, Vote
from spes_p2p.swarm.store import MemoryStore, frame_record
from spes_p2p.swarm.wire import pack

NONE = -1
ELECTORS = ("A", "B", "C")
COORDINATORS = ("A", "B")


class Crash(BaseException):
    """The process ends here."""


@dataclass(frozen=True)
class Rules:
    """The code under test. A test that breaks a rule puts its own here."""

    elector: type[Elector] = Elector
    log: type[HeadLog] = HeadLog
    weigh: Callable[..., Weighed] = weigh


@dataclass(frozen=True)
class Bounds:
    """How far the search goes; within them it leaves nothing out."""

    ballots: tuple[int, int] = (2, 2)
    """Ballots that each coordinator begins."""
    numbers: int = 2
    """Highest ballot number."""
    rounds: int = 1
    losses: int = 0
    """Disks that are lost."""


class Process(NamedTuple):
    """One elector: what is on its disk, and what a crash takes."""

    losses: int
    """Disks that it lost before this one."""
    votes: bytes
    log: tuple[bytes, ...]
    memory: tuple[tuple[str, Any], ...]


class Attempt(NamedTuple):
    """One ballot of one coordinator. Small numbers stand for electors' answers, heads and votes (`Model` knows which)."""

    coordinator: str
    index: int
    """How many ballots this coordinator had begun before."""
    number: int
    parent: int
    running: bool
    """Its coordinator still listens; False after it began another one."""
    answers: tuple[int, ...]
    """Of each elector, NONE where none came; emptied when nobody will read them any more."""
    proposal: int | None
    votes: tuple[bool, ...]

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.number, self.coordinator)


class State(NamedTuple):
    """Everything at one instant."""

    electors: tuple[int, ...]
    attempts: tuple[Attempt, ...]
    """Of A, then of B, in the order in which they were begun."""


@dataclass(frozen=True)
class Outcome:
    """What a search found."""

    states: int
    decided: frozenset[str]
    """Coordinators whose own head was decided in some state."""
    violation: str | None
    trace: tuple[str, ...]
    """The shortest way there, step by step."""


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


class Model:
    """The steps between states. What the real code does to one elector with one request is computed once and remembered."""

    def __init__(self, rules: Rules, bounds: Bounds):
        self.rules, self.bounds = rules, bounds
        self.genesis = Head(
            campaign="c", epoch=0, round=-1, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0,
            members=(), owners=(), cursor=Cursor(), helpers=(), electorate=ELECTORS, disks=(_disk(0),) * len(ELECTORS),
        )
        self._symmetric = bounds.rounds == 1 or not bounds.losses
        self._processes, self._attempts, self._heads, self._answers = (Numbers() for _ in range(4))
        self._heads.of(self.genesis)
        self._known: dict[Any, list[tuple[int, Any]]] = {}
        self._logs: dict[int, frozenset[int]] = {}

    def key(self, state: State) -> bytes:
        """The same bytes for states that differ by the electors' names only: no rule looks at those.

        Heads that list different disks for electors tell them apart.
        """
        columns = [(e, *((a.answers[i] if a.answers else NONE, a.votes[i]) for a in state.attempts))
                   for i, e in enumerate(state.electors)]
        order = range(len(ELECTORS))
        if self._symmetric:
            order = sorted(order, key=columns.__getitem__)
        numbers = [state.electors[i] for i in order]
        for attempt in state.attempts:
            answers = tuple(attempt.answers[i] for i in order) if attempt.answers else ()
            votes = tuple(attempt.votes[i] for i in order)
            numbers.append(self._attempts.of(attempt._replace(answers=answers, votes=votes)))
        return array("H", numbers).tobytes()

    def state(self, key: bytes) -> State:
        """The state of a key."""
        numbers = array("H", key)
        attempts = tuple(self._attempts.things[number] for number in numbers[len(ELECTORS) :])
        return State(tuple(numbers[: len(ELECTORS)]), attempts)

    def first(self) -> State:
        """Nothing has happened."""
        return State((self._processes.of(_empty_disk(0)),) * len(ELECTORS), ())

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every state that can come next, with the step that leads there."""
        yield from self._begin(state)
        yield from self._propose(state)
        for place, name in enumerate(ELECTORS):
            yield from self._crash(state, place)
            yield from self._lose_disk(state, place)
            for attempt in state.attempts:
                yield from self._prepare(state, attempt, place, name)
                yield from self._accept(state, attempt, place, name)
            yield from self._learn(state, place, name)

    # Coordinators ------------------------------------------------------------------------------------------------------

    def _begin(self, state: State) -> Iterator[tuple[str, State]]:
        """On any decided head, the newest or one that others have left behind."""
        parents = [n for n in (0, *self.certified(state)) if self._heads.things[n].round + 1 < self.bounds.rounds]
        for coordinator, most in zip(COORDINATORS, self.bounds.ballots, strict=True):
            index = sum(attempt.coordinator == coordinator for attempt in state.attempts)
            if index == most:
                continue
            others = [_given_up(a) if a.coordinator == coordinator else a for a in state.attempts]
            for parent, number in itertools.product(parents, range(1, self.bounds.numbers + 1)):
                nobody = (NONE,) * len(ELECTORS)
                made = Attempt(coordinator, index, number, parent, True, nobody, None, (False,) * len(ELECTORS))
                yield f"{coordinator} begins ballot {number} after head {parent}", _with_attempts(state, [*others, made])

    def _propose(self, state: State) -> Iterator[tuple[str, State]]:
        """A coordinator stops waiting for promises and goes on with some of those that came."""
        for attempt in state.attempts:
            if not attempt.running or attempt.proposal is not None:
                continue
            came = [answer for answer in attempt.answers if answer != NONE]
            parent: Head = self._heads.things[attempt.parent]
            for count in range(1, len(came) + 1):
                for chosen in itertools.combinations(came, count):
                    answers = [self._answers.things[answer] for answer in chosen]
                    weighed = self.rules.weigh(answers, parent.electorate)
                    if not weighed.won:
                        continue
                    for head in [weighed.bound] if weighed.bound is not None else self._own_heads(state, attempt, parent):
                        proposed = attempt._replace(answers=(), proposal=self._heads.of(head))
                        yield f"{attempt.coordinator} proposes head {proposed.proposal}", _replaced(state, attempt, proposed)

    def _own_heads(self, state: State, attempt: Attempt, parent: Head) -> Iterator[Head]:
        """What a coordinator that is not bound may propose: another head in each attempt, as its plan would be another.

        It lists electors' disks as they are or, where it did not hear of a loss, as they were.
        """
        tokens = 10 * COORDINATORS.index(attempt.coordinator) + attempt.index + 1
        now = tuple(_disk(self._processes.things[process].losses) for process in state.electors)
        known = [{old, new} for old, new in zip(parent.disks, now, strict=True)]
        for disks in itertools.product(*known) if parent.round + 2 < self.bounds.rounds else [parent.disks]:
            yield dataclasses.replace(
                parent, round=parent.round + 1, parent=parent.id, plan="p", tokens=tokens, disks=tuple(disks)
            )

    # Electors ----------------------------------------------------------------------------------------------------------

    def _prepare(self, state: State, attempt: Attempt, place: int, name: str) -> Iterator[tuple[str, State]]:
        for after, promise in self._deliver("prepare", name, state.electors[place], attempt.ballot, attempt.parent):
            heard = attempt
            awaited = attempt.running and attempt.proposal is None and attempt.answers[place] == NONE
            if awaited and promise is not None and promise.granted:
                heard = attempt._replace(answers=_put(attempt.answers, place, self._answers.of(promise)))
            if heard is not attempt or after != state.electors[place]:
                what = f"the prepare of {attempt.coordinator}/{attempt.number}"
                step = f"an elector {'answers' if promise else 'crashes over'} {what}"
                yield step, _replaced(_with_elector(state, place, after), attempt, heard)

    def _accept(self, state: State, attempt: Attempt, place: int, name: str) -> Iterator[tuple[str, State]]:
        if attempt.proposal is None:
            return
        for after, vote in self._deliver("accept", name, state.electors[place], attempt.ballot, attempt.proposal):
            heard = attempt if vote is None else attempt._replace(votes=_put(attempt.votes, place, True))
            if heard != attempt or after != state.electors[place]:
                what = f"head {attempt.proposal} of {attempt.coordinator}/{attempt.number}"
                step = f"an elector {'votes for' if vote else 'crashes over'} {what}"
                yield step, _replaced(_with_elector(state, place, after), attempt, heard)

    def _learn(self, state: State, place: int, name: str) -> Iterator[tuple[str, State]]:
        """Somebody sends the votes of one ballot as a certificate, enough of them or not."""
        for (ballot, head), voters in _votes(state).items():
            for after, _ in self._deliver("learn", name, state.electors[place], ballot, head, voters):
                yield f"an elector learns head {head}", _with_elector(state, place, after)

    def _crash(self, state: State, place: int) -> Iterator[tuple[str, State]]:
        process: Process = self._processes.things[state.electors[place]]
        if process.memory:
            yield "an elector crashes", _with_elector(state, place, self._processes.of(process._replace(memory=())))

    def _lose_disk(self, state: State, place: int) -> Iterator[tuple[str, State]]:
        processes: list[Process] = [self._processes.things[process] for process in state.electors]
        if sum(process.losses for process in processes) < self.bounds.losses:
            empty = _empty_disk(processes[place].losses + 1)
            yield "an elector loses its disk", _with_elector(state, place, self._processes.of(empty))

    def _deliver(
        self, what: str, name: str, process: int, ballot: Ballot, head: int, voters: tuple[str, ...] = ()
    ) -> list[tuple[int, Any]]:
        """All ends of one delivery: the elector's next state, and its reply or None where there is none."""
        key = what, name, process, ballot.number, ballot.coordinator, head, voters
        if key not in self._known:
            request = self._request(what, ballot, self._heads.things[head], voters)
            passed: list[str] = []
            ends = [self._run(name, process, request, passed.append)]
            ends += [self._run(name, process, request, _die_at(point)) for point in passed]
            self._known[key] = [end for i, end in enumerate(ends) if end != (process, None) and end not in ends[:i]]
        return self._known[key]

    def _request(self, what: str, ballot: Ballot, head: Head, voters: tuple[str, ...]) -> Prepare | Accept | Decided:
        if what == "prepare":
            return Prepare(head.round + 1, head.id, ballot)
        if what == "accept":
            return Accept(ballot, head)
        message = vote_message(ballot, head.id)
        return Decided(head, ballot, tuple(Vote(voter, SimulatedIdentity(voter).sign(message)) for voter in voters))

    def _run(
        self, name: str, process: int, request: Prepare | Accept | Decided, at: Callable[[str], None]
    ) -> tuple[int, Promise | Vote | None]:
        """The real code; `at` is told the points of the store's writes that it passes, and ends the process when it raises."""
        before: Process = self._processes.things[process]
        store = _disk_of(before)
        identity = SimulatedIdentity(name)
        log = self.rules.log(store, identity, self.genesis)
        elector = self.rules.elector(log, store, identity, random.Random(before.losses))
        usual = set(vars(elector))
        vars(elector).update(before.memory)

        store.fault = lambda point, _: at(point)
        reply: Promise | Vote | None = None
        memory: dict[str, Any] = {}
        try:
            if isinstance(request, Decided):
                log.append(request)
            else:
                reply = elector.prepare(request) if isinstance(request, Prepare) else elector.accept(request)
            memory = {name: value for name, value in vars(elector).items() if name not in usual}
        except Refused:
            memory = {name: value for name, value in vars(elector).items() if name not in usual}
        except Crash:
            memory = {}
        return self._processes.of(self._after(before.losses, store, memory)), reply

    def _after(self, losses: int, store: MemoryStore, memory: dict[str, Any]) -> Process:
        """A process as a value.

        Certificates of one head prove the same, so that the log is kept without votes; behind the last round of the search
        nobody asks for votes any more, so that they are kept as for the next round.
        """
        store.fault = None
        disk = store.reopen()
        log = HeadLog(disk, SimulatedIdentity("reader"), self.genesis)
        records = tuple(pack(Decided(decided.head, Ballot(0, ""), ())) for decided in log.since(-1))
        if log.round + 1 == self.bounds.rounds:
            unused = VoteState(_disk(losses), 0, log.round + 1, log.head.id, None, None, None)
            disk.write(VOTES, [frame_record(pack(unused))])
        return Process(losses, bytes(disk.read(VOTES) or b""), records, tuple(sorted(memory.items())))

    # What must hold ----------------------------------------------------------------------------------------------------

    def _learned(self, process: int) -> frozenset[int]:
        """The heads in an elector's log."""
        if process not in self._logs:
            log = HeadLog(_disk_of(self._processes.things[process]), SimulatedIdentity("reader"), self.genesis)
            self._logs[process] = frozenset(self._heads.of(decided.head) for decided in log.since(-1))
        return self._logs[process]

    def certified(self, state: State) -> set[int]:
        """The heads for which a majority has signed in one ballot, whoever knows it."""
        return {
            number
            for (_, number), voters in _votes(state).items()
            if len(voters) >= quorum(ELECTORS)
        }

    def violation(self, state: State) -> str | None:
        """What is wrong with this state, in words; None for nothing."""
        certified = self.certified(state)
        rounds = [self._heads.things[number].round for number in certified]
        if len(set(rounds)) < len(rounds):
            return f"heads {sorted(certified)} are certified for one round"
        for name, process in zip(ELECTORS, state.electors, strict=True):
            if not self._learned(process) <= certified:
                return f"{name} learned a head that is not certified"
        return None

    def owners(self, state: State) -> set[str]:
        """Coordinators whose own head is decided in this state."""
        return {COORDINATORS[self._heads.things[number].tokens // 10] for number in self.certified(state)}


def search(rules: Rules, bounds: Bounds) -> Outcome:
    """Breadth first over every reachable state, up to the first violation or to the end."""
    model = Model(rules, bounds)
    first = model.key(model.first())
    came_from: dict[bytes, bytes] = {first: first}
    queue = deque([first])
    decided: set[str] = set()
    while queue:
        key = queue.popleft()
        state = model.state(key)
        violation = model.violation(state)
        if violation is not None:
            return Outcome(len(came_from), frozenset(decided), violation, _trace(model, came_from, key))
        decided |= model.owners(state)
        for _, after in model.steps(state):
            next_key = model.key(after)
            if next_key not in came_from:
                came_from[next_key] = key
                queue.append(next_key)
    return Outcome(len(came_from), frozenset(decided), None, ())


def _trace(model: Model, came_from: dict[bytes, bytes], key: bytes) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came_from[key]) != key:
        steps.append(next(step for step, after in model.steps(model.state(before)) if model.key(after) == key))
        key = before
    return tuple(reversed(steps))


def _votes(state: State) -> dict[tuple[Ballot, int], tuple[str, ...]]:
    """Who voted for which head in which ballot."""
    votes: dict[tuple[Ballot, int], tuple[str, ...]] = {}
    for attempt in state.attempts:
        if attempt.proposal is not None and any(attempt.votes):
            before = votes.get((attempt.ballot, attempt.proposal), ())
            now = [name for name, voted in zip(ELECTORS, attempt.votes, strict=True) if voted or name in before]
            votes[attempt.ballot, attempt.proposal] = tuple(now)
    return votes


def _die_at(where: str) -> Callable[[str], None]:
    def die(point: str) -> None:
        if point == where:
            raise Crash

    return die


def _given_up(attempt: Attempt) -> Attempt:
    return attempt._replace(running=False, answers=())


def _with_elector(state: State, place: int, process: int) -> State:
    return state._replace(electors=_put(state.electors, place, process))


def _with_attempts(state: State, attempts: list[Attempt]) -> State:
    return state._replace(attempts=tuple(sorted(attempts, key=lambda attempt: attempt[:2])))


def _replaced(state: State, attempt: Attempt, by: Attempt) -> State:
    return state if by is attempt else _with_attempts(state, [by if a is attempt else a for a in state.attempts])


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _empty_disk(losses: int) -> Process:
    """A process on a new disk, after so many were lost. Its id does not depend on the elector's name."""
    store = MemoryStore()
    open_votes(store, random.Random(losses))
    return Process(losses, bytes(store.read(VOTES) or b""), (), ())


def _disk(losses: int) -> str:
    return open_votes(MemoryStore(), random.Random(losses)).disk


def _disk_of(process: Process) -> MemoryStore:
    store = MemoryStore()
    store.write(VOTES, [process.votes])
    for record in process.log:
        store.append(LOG, record)
    return store
