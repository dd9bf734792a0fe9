"""Electors of an invented campaign, and commits for them to decide."""

from __future__ import annotations

import dataclasses
import random

from spes_p2p.consensus.certificate import vote_message
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Commit, Farewell, Prepare, Promise, Vote
from spes_p2p.messages.samples import Cursor
from spes_p2p.peer.durable import open_participant, perform, voter_incarnation
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulated_identity import SimulatedIdentity

ELECTORS = ("A", "B", "C")


def derived(commit: Commit) -> bool:
    """Every commit follows from its evidence."""
    return True


def genesis(electorate: tuple[str, ...] = ELECTORS, helpers: tuple[str, ...] = ("W",)) -> Commit:
    return Commit(
        campaign="c", term=0, round=-1, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0,
        members=(), owners=(), cursor=Cursor(), helpers=helpers, electorate=electorate,
        incarnations=tuple(map(incarnation, electorate)),
    )  # fmt: skip


def incarnation(name: str) -> str:
    """The first one of this elector, as `Elector` makes it."""
    return voter_incarnation(MemoryStore(), random.Random(name))


def commit_after(before: Commit, tokens: int = 0, **changes: object) -> Commit:
    commit = dataclasses.replace(before, round=before.round + 1, parent=before.id, plan="p", tokens=tokens)
    return dataclasses.replace(commit, **changes)  # type: ignore[arg-type]


class Elector:
    """A participant on a store, as the node runs it."""

    def __init__(self, name: str, store: MemoryStore | None = None, parent: Commit | None = None, seed: str | None = None):
        self.name, self.store = name, store or MemoryStore()
        rng = random.Random(seed or name)
        self.part = open_participant(self.store, SimulatedIdentity(name), parent or genesis(), rng, derived)
        self.log, self.acceptor = self.part.log, self.part.acceptor

    def prepare(self, request: Prepare) -> Promise:
        return perform(self.store, self.part, self.acceptor.prepare(request.ballot.coordinator, request))

    def accept(self, request: Accept) -> Vote:
        return perform(self.store, self.part, self.acceptor.accept(request.ballot.coordinator, request))

    def learn(self, decided: CertifiedCommit) -> bool:
        return perform(self.store, self.part, self.part.learn(decided))

    def leave(self) -> Farewell | None:
        return perform(self.store, self.part, self.acceptor.leave())

    def restarted(self) -> Elector:
        return Elector(self.name, self.store.reopen(), self.log.genesis)


def decide(commit: Commit, voters: str, ballot: Ballot | None = None, signed: Commit | None = None) -> CertifiedCommit:
    ballot = ballot or Ballot(1, "A")
    message = vote_message(ballot, (signed or commit).id)
    return CertifiedCommit(commit, ballot, tuple(Vote(name, SimulatedIdentity(name).sign(message)) for name in voters))
