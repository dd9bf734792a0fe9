"""Events that a peer sends to its observers (log, history, metrics, status, tracker)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spes_p2p.messages.audits import Audited

BEFORE_TRAINING = -1
"""`round` of base 0. Round 0 assembles the swarm and leaves base 0 as it is; rounds 1 to total_rounds move weights."""


class Event:
    """Something that happens to a peer."""


@dataclass(frozen=True)
class PeerStarted(Event):
    """A peer starts with its run-dir: what follows in the journal is of this identity."""

    peer_id: str


@dataclass(frozen=True)
class StateEntered(Event):
    """This peer enters a stage."""

    name: str
    """joining, downloading, training, announcing, exchanging, committing, applying, evaluating, waiting, paused, leaving."""


PAUSE_REASONS = ("user", "hours", "busy", "battery", "quota")


@dataclass(frozen=True)
class Paused(Event):
    """This peer left because its user, or a rule that the user gave, wants it to; it comes back by itself."""

    reason: str
    """One of PAUSE_REASONS."""


@dataclass(frozen=True)
class QuotaForecast(Event):
    """How far the day's traffic quota is used, and when it will pause this trainer."""

    quota_bytes: int
    used_bytes: int
    pauses_at: float
    """Unix time; infinite: not today, NaN: not known yet."""
    line: str
    """For people."""


@dataclass(frozen=True)
class BaseRestored(Event):
    """A base is in place that no round on this peer produced: at each start and after a repair."""

    round: int
    """The last round that is in this base; -1 for base 0."""
    campaign_step: int
    total_steps: int
    total_tokens: int
    """Tokens in the base, since the start of the campaign."""
    base_digest: str
    source: str
    """disk, download, reform, rollback."""
    owners: tuple[tuple[str, ...], ...] = ()
    """Owners of each expert; empty if not known yet."""
    total_rounds: int = 0
    """Number of the last round under the owner's orders; 0: as planned."""


@dataclass(frozen=True)
class CaughtUp(Event):
    """This peer follows the others again: it has applied rounds that were decided without it, or taken a later base.

    The events of these rounds follow, or BaseRestored.
    """

    since: int
    """The last round in the base before."""
    round: int
    """The last round in the base now."""
    seconds: float


@dataclass(frozen=True)
class TrainingProgress(Event):
    """A local step is done."""

    round: int
    """The round at the end of this phase, from 1."""
    steps_done: int
    steps_planned: int
    tokens_per_second: float


@dataclass(frozen=True)
class PhaseTrained(Event):
    """The local steps between two rounds are done."""

    round: int
    """The round at the end of this phase, from 1."""
    steps: int
    tokens: int
    loss: float
    aux_loss: float
    seconds: float
    skipped_steps: int
    flops_per_second: float = 0.0
    """Floating-point operations per second; 0: unknown."""
    mfu: float = math.nan
    """Model FLOPs utilisation, 0 to 1; NaN if the device's peak is unknown."""
    load_violation: tuple[float, ...] = ()
    """By layer: tokens of the busiest expert over the mean, minus 1, on this peer's tokens."""
    owned_routing: float = math.nan
    """Share of this peer's token routings that go to experts it trains."""


@dataclass(frozen=True)
class RoundCommitted(Event):
    """A new base is in place."""

    round: int
    """0: the round that assembled the swarm, which moves no weights."""
    campaign_step: int
    total_steps: int
    tokens: int
    """Tokens of all members in this round."""
    total_tokens: int
    """Tokens in the base, since the start of the campaign."""
    loss: float
    """Token-weighted mean of the members' training losses in this phase; NaN without training."""
    members: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]
    """Owners of each expert in the next phase."""
    base_digest: str
    parts: int
    dropped_parts: int
    sent_bytes: int
    received_bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: announce, exchange, commit, apply."""
    merge_alpha: float = 0.0
    learning_rate: float = 0.0
    contributions: tuple[tuple[str, int, int], ...] = ()
    """By member: peer id, tokens, local steps times experts trained in them."""
    total_rounds: int = 0
    """Number of the last round under the owner's orders; 0: as planned."""
    control: str = ""
    """Description of the owner's orders; empty if there are none."""
    upload: float = 0.0
    """Measured upload rate of this peer's link, in bytes per second; 0: unknown."""
    median_upload: float = 0.0
    """The same of the other trainers, as announced; 0: unknown."""
    names: tuple[tuple[str, str, str], ...] = ()
    """Peer id, name and team of members that this process had not seen under that name; empty: none."""
    lost: tuple[str, ...] = ()
    """Members that were lost as reducers in this round."""
    disputed: tuple[str, ...] = ()
    """Reducers that did not show their checker the inputs, and these checkers."""


@dataclass(frozen=True)
class Controlled(Event):
    """An order of the campaign's owner takes effect, on all peers in the same round."""

    round: int
    """The last round in this peer's base."""
    number: int
    """Number of the control record."""
    state: str
    """running, paused, stopped."""
    order: str = ""
    """Description of all that is ordered now."""
    news: str = ""
    """Description of what this order changes."""


@dataclass(frozen=True)
class Drift:
    """A peer's update compared with the base's step, over the weights of one kind that the round accepted."""

    sent: float
    """L2 norm of the peer's update."""
    step: float
    """L2 norm of the base's step, merge and outer momentum included."""
    cosine: float
    """Cosine similarity of the two; 0 if either is 0."""

    @property
    def shrink(self) -> float:
        """Norm of the base's step over that of the peer's update; 0 without an update."""
        return self.step / self.sent if self.sent else 0.0


@dataclass(frozen=True)
class RoundMeasured(Event):
    """Measurements of a committed round."""

    round: int
    drift: Mapping[str, Drift]
    """By kind of weights (shared, router, expert); empty if this peer sent no update."""
    expert_tokens: tuple[int, ...]
    """By expert, summed over layers: tokens on which its owners trained it, as counted in the plan."""


@dataclass(frozen=True)
class RoundFailed(Event):
    """An attempt did not commit. Nothing was applied."""

    round: int
    """The attempted round."""
    attempt: int
    reason: str
    """Label of the metric: coordinator_lost, quorum_lost, refused, malformed, exchange, timeout."""
    detail: str


@dataclass(frozen=True)
class WorkDropped(Event):
    """Pending work was discarded."""

    round: int
    """The last round in this peer's base."""
    tokens: int
    reason: str


@dataclass(frozen=True)
class UpdatesClipped(Event):
    """Updates in a committed round stood out and were clipped; what was clipped is gone."""

    round: int
    parts: tuple[tuple[str, int], ...]
    """By member: parts in which a reducer clipped its update."""
    groups: tuple[tuple[str, float], ...]
    """By name: groups whose step all members scaled down, and the factor."""


@dataclass(frozen=True)
class ResultsChecked(Event):
    """This peer made some means of a committed round again, to check their reducers."""

    round: int
    results: int
    """How many it drew."""
    wrong: tuple[str, ...]
    """Reducers whose result is not the mean of its inputs: proven, so the next commits exclude them."""
    unanswered: tuple[str, ...]
    """Reducers that did not show the inputs, after a restart for instance: neither they nor this peer reduce for a while.
    Without those that left."""


@dataclass(frozen=True)
class StepsJudged(Event):
    """This peer, whom the owner vouches for, measured what experts' steps do to the held-out loss, before the round's vote."""

    round: int
    scores: tuple[tuple[str, float], ...]
    """By member: nats per token by which the steps of its experts lower the loss, on average; negative: harm."""
    harmful: tuple[str, ...]
    """Names of the groups whose step it finds harmful."""


@dataclass(frozen=True)
class StepsRejected(Event):
    """A round left out experts whose step made the held-out loss worse."""

    round: int
    peers: tuple[str, ...]
    """Members that trained them."""


@dataclass(frozen=True)
class PhaseAudited(Event):
    """This peer, whom the owner vouches for, trained a member's phase again and compared the updates."""

    audit: Audited


@dataclass(frozen=True)
class VerdictsTaken(Event):
    """A committed round took up audits of training."""

    round: int
    audits: tuple[tuple[str, Audited], ...]
    """By auditor."""
    convicted: tuple[str, ...]
    """Members that enough auditors failed: they get no work for some rounds, and begin their probation again."""


@dataclass(frozen=True)
class StandingChanged(Event):
    """A committed round found this stranger in an open campaign past its probation, or on probation again."""

    round: int
    standing: str
    """proven, newcomer."""


@dataclass(frozen=True)
class DigestMismatch(Event):
    """This peer's base differs from the one the members agreed on; it is downloaded again."""

    round: int
    """The last round in the base."""
    mine: str
    agreed: str


@dataclass(frozen=True)
class Evaluated(Event):
    """Held-out loss of the base after a round."""

    round: int
    """The last round in that base; up to 0, it is untrained."""
    validation_loss: float


@dataclass(frozen=True)
class TasksEvaluated(Event):
    """This peer ran the campaign's lm-eval tasks on a base."""

    round: int
    """The last round in that base."""
    scores: tuple[tuple[str, str, float, float], ...]
    """Task, metric, value, standard error (NaN if unknown)."""


@dataclass(frozen=True)
class PromptsContinued(Event):
    """This peer had a base continue the campaign's prompts."""

    round: int
    """The last round in that base."""
    continuations: tuple[str, ...]
    """In the order of the prompts, each in one printable line."""


@dataclass(frozen=True)
class PeersSeen(Event):
    """Living peers in the registry."""

    trainers: int
    helpers: int
    living: tuple[str, ...] = ()
    """Peer ids."""
    electorate: tuple[str, ...] = ()
    """The electors of the next round."""
    vouched: int | None = None
    """Trainers that say that the owner vouches for them; None where the schedule needs none."""


@dataclass(frozen=True)
class DownloadProgress(Event):
    """Progress of a long download."""

    what: str
    done: int
    total: int
    """In the unit of `done`; equal to `done` at the end."""


@dataclass(frozen=True)
class BytesMoved(Event):
    """Payload bytes over the transport."""

    kind: str
    """push, pull, download, control."""
    sent: int
    received: int


def seconds_by_stage(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a round by stage, without training, which PhaseTrained reports."""
    return {stage: spent for stage, spent in seconds.items() if stage != "train"}


Observer = Callable[[Event], None]
"""Receives events on the event loop; must not block."""


def to_all(*observers: Observer) -> Observer:
    """Return an observer that passes each event on to all of these."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe
