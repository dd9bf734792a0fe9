"""The events of one peer: state, commits, failures, downloads, and bytes that crossed the transport."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping

from spes_p2p.consensus.control import describe, describe_news, number_of
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.consensus import Commit, Control
from spes_p2p.messages.fields import MAX_NAMES, MAX_SERVED
from spes_p2p.messages.methods import SPEED
from spes_p2p.messages.rounds import Announcement
from spes_p2p.observe.events import (
    BaseRestored,
    BytesMoved,
    CaughtUp,
    Controlled,
    DownloadProgress,
    Evaluated,
    Observer,
    RoundCommitted,
    RoundFailed,
    RoundMeasured,
    StandingChanged,
    StateEntered,
    StepsRejected,
    UpdatesClipped,
    VerdictsTaken,
)
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Applied, Replica
from spes_p2p.rounds.commit import clipped_parts, contributions
from spes_p2p.rounds.ownership import owners_of
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.remembered import remembered
from spes_p2p.rounds.runaway import HeldOut
from spes_p2p.rounds.schedule import last_round
from spes_p2p.training.rates import learning_rate

logger = logging.getLogger(__name__)

BYTES_BY_KIND = {"push": "push", "pull": "pull", "parts": "pull", **dict.fromkeys(
    ("file", "snapshot", "base_hashes", "base", "token_hashes", "tokens"), "download")}


class EventReporter:
    """Tells the observer what happens to one peer."""

    def __init__(self, node: Node, replica: Replica, observer: Observer):
        self.state = "joining"
        self._node = node
        self._replica = replica
        self._observer = observer
        self.evaluated_round = -1
        """The last round whose held-out loss was reported."""
        self._control: Control | None = None
        self._names: dict[str, tuple[str, str]] = {}
        self._standing: str | None = None
        self._moved: Counter[tuple[str, bool]] = Counter()

    def set_state(self, state: str) -> None:
        """Report the peer's new state."""
        self.state = state
        self._observer(StateEntered(state))

    def failed(self, round_number: int, attempt: int, reason: str, detail: str) -> None:
        """Report an attempt at a round that failed."""
        self._observer(RoundFailed(round_number, attempt, reason, detail))

    def evaluated(self, round_number: int, validation_loss: float) -> None:
        """Report the held-out loss of a round's base, measured here or by another peer."""
        self.evaluated_round = round_number
        self._observer(Evaluated(round_number, validation_loss))

    def caught_up(self, since: int, seconds: float) -> None:
        """Report that this peer's base is that of the last round again; `since`: the round of the base before."""
        self._observer(CaughtUp(since, self._replica.base.round, seconds))

    def restored(self, source: str) -> None:
        """Report a base that no applied round gave: from "disk", "download", "reform" or "rollback"."""
        commit = self._node.log.commit_at(self._replica.base.round)
        self._observer(
            BaseRestored(
                round=commit.round,
                campaign_step=commit.step,
                total_steps=self._node.training_after(commit).total_steps,
                total_tokens=commit.tokens,
                base_digest=self._replica.base.digest,
                source=source,
                owners=owners_of(commit),
                total_rounds=self._total_rounds(commit),
            )
        )
        self._report_control(commit)

    def committed(self, applied: Applied, seconds: Mapping[str, float], evaluation: HeldOut | None) -> None:
        """Report a round that was applied; `seconds` by part of the round. `evaluation`: of the base before."""
        commit, plan = applied.decided.commit, applied.plan
        training = self._node.training_after(commit)
        sent, received = self._bytes()
        if evaluation is not None and self.evaluated_round != evaluation.round:
            self._observer(Evaluated(evaluation.round, evaluation.loss))
        clipped = clipped_parts(commit, applied.results)
        if clipped or applied.bounded:
            self._observer(UpdatesClipped(commit.round, clipped, applied.bounded))
        if idle := [f"{member.peer[-6:]} ({member.demoted})" for member in plan.members if member.demoted]:
            logger.info("round %d: reduced nothing: %s", commit.round, ", ".join(idle))
        self._observer(
            RoundCommitted(
                round=commit.round,
                campaign_step=commit.step,
                total_steps=training.total_steps,
                tokens=commit.tokens - self._node.log.commit_at(commit.round - 1).tokens,
                total_tokens=commit.tokens,
                loss=plan.loss if plan.tokens else float("nan"),
                members=trainers_of(plan),
                owners=owners_of(commit),
                base_digest=applied.base_digest,
                parts=len(applied.results.parts),
                dropped_parts=len(applied.results.parts) - len(applied.results.committed(commit)),
                sent_bytes=sent,
                received_bytes=received,
                seconds=dict(seconds),
                merge_alpha=plan.merge.alpha if plan.merge is not None else 0.0,
                learning_rate=learning_rate(commit.step, training),
                contributions=contributions(commit, applied.results, training.batch_size * training.sequence_length),
                total_rounds=self._total_rounds(commit),
                control=describe(commit.control, commit.round),
                upload=self._node.endpoint.upload.reliable_bytes_per_s,
                median_upload=median_upload(plan, self._node.peer_id),
                names=self._new_names(plan),
                lost=tuple(commit.members[i] for lost in commit.lost for i in lost),
                disputed=tuple(commit.members[i] for i in commit.disputed),
            )
        )
        self._report_control(commit)
        if commit.rejected:
            self._observer(StepsRejected(commit.round, tuple(commit.members[i] for i in commit.rejected)))
        if commit.verdicts or commit.convicted:
            convicted = tuple(commit.members[i] for i in commit.convicted)
            self._observer(VerdictsTaken(commit.round, audits_in(plan, self._node.world.identity), convicted))
        self._report_standing(plan)
        if commit.round == self._replica.base.round:
            drift = dict(self._replica.ledger.drift) if self._replica.trainer is not None else {}
            self._observer(RoundMeasured(commit.round, drift, expert_tokens_of(plan)))

    def downloading(self, done: int, total: int) -> None:
        """Report the progress of a base's download, in bytes."""
        self._observer(DownloadProgress("the base", done, total))

    def _total_rounds(self, commit: Commit) -> int:
        return last_round(commit, self._node.campaign.config)[1]

    def _report_control(self, commit: Commit) -> None:
        """Report the commit's control record, once."""
        control = commit.control
        if control is not None and control.number != number_of(self._control):
            order, news = describe(control, commit.round), describe_news(control, self._control, commit.round)
            self._control = control
            self._observer(Controlled(commit.round, control.number, control.state, order, news))

    def _report_standing(self, plan: Plan) -> None:
        """Report that this peer's probation has ended, or begun again."""
        for found in (each.standing for each in plan.members if each.peer == self._node.peer_id):
            if self._standing not in (None, found):
                self._observer(StandingChanged(plan.round, found))
            self._standing = found

    def _new_names(self, plan: Plan) -> tuple[tuple[str, str, str], ...]:
        """Return members that call themselves otherwise than was reported here before: id, name, team.

        This peer counts as one after each start, since it may have had a name before.
        """
        said = {each.peer: (each.name, each.team) for each in plan.members if each.trains}
        known = dict.fromkeys(said.keys() - {self._node.peer_id}, ("", "")) | self._names
        changed = [peer for peer, named in said.items() if named != known.get(peer)][:MAX_NAMES]
        self._names.update((peer, said[peer]) for peer in changed)
        for peer in list(self._names)[:-MAX_SERVED]:
            del self._names[peer]
        return tuple((peer, *said[peer]) for peer in changed)

    def _bytes(self) -> tuple[int, int]:
        """Report the bytes that crossed the transport since the last call; return (sent, received) without measurements."""
        totals = [0, 0]
        endpoint = self._node.endpoint
        for method in set(endpoint.sent) | set(endpoint.received):
            sent = endpoint.sent[method] - self._moved[method, True]
            received = endpoint.received[method] - self._moved[method, False]
            self._moved[method, True] += sent
            self._moved[method, False] += received
            if method != SPEED:
                totals[0] += sent
                totals[1] += received
            self._observer(BytesMoved(BYTES_BY_KIND.get(method, "control"), sent, received))
        return totals[0], totals[1]


def audits_in(plan: Plan, identity: Identity) -> tuple[tuple[str, Audited], ...]:
    """Return the audits whose verdicts a plan takes up, by auditor."""
    said = {
        (signed.peer, each.peer, each.round): each
        for signed in plan.proposal.announcements for each in read_signed(Announcement, signed, identity).audited
    }
    return tuple((each.auditor, said[each.auditor, each.peer, each.round]) for each in plan.verdicts)


@remembered(2)
def trainers_of(plan: Plan) -> tuple[str, ...]:
    """Return the ids of the members that train."""
    return tuple(member.peer for member in plan.members if member.trains)


def median_upload(plan: Plan, peer: str) -> float:
    """Return the median upload of the other trainers that announced one, in bytes per second; 0 if there is none.

    A helper that has sent little announces what is assumed of a line.
    """
    trainers = (member for member in plan.members if member.trains and member.peer != peer)
    uploads = [member.bandwidth for member in trainers if member.bandwidth > 0]
    return statistics.median(uploads) if uploads else 0.0


@remembered(2)
def expert_tokens_of(plan: Plan) -> tuple[int, ...]:
    """Return, for each expert, the tokens on which the members trained it."""
    return tuple(map(sum, zip(*(member.routed for member in plan.members), strict=True)))
