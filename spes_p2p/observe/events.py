"""What a peer tells its observers (metrics, console, history). Observers are told; they ask nobody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

BEFORE_TRAINING = -1
"""`round` of base 0. Round 0 assembles the swarm and leaves base 0 as it is; rounds 1 to total_rounds move weights."""


@dataclass(frozen=True)
class PhaseEntered:
    """What this peer does from now on."""

    name: str
    """joining, downloading, training, announcing, exchanging, committing, applying, evaluating, waiting, paused, leaving."""


@dataclass(frozen=True)
class BaseRestored:
    """A base is in place without a round having run here: at every start of a peer, and after a repair."""

    round: int
    """The last round that is in this base; -1 for base 0."""
    campaign_step: int
    total_steps: int
    total_tokens: int
    """Included since the campaign began."""
    base_digest: str
    source: str
    """disk, download, reform, rollback."""
    owners: tuple[tuple[str, ...], ...] = ()
    """For each expert, who trains it; empty when it is not known yet."""
    total_rounds: int = 0
    """The last round, as things stand; 0: as the campaign was planned."""


@dataclass(frozen=True)
class TrainingProgress:
    """After a local step."""

    round: int
    """The round that it works towards, from 1."""
    steps_done: int
    steps_planned: int
    tokens_per_second: float


@dataclass(frozen=True)
class PhaseTrained:
    """The local steps between two rounds are done."""

    round: int
    """The round that they work towards, from 1."""
    steps: int
    tokens: int
    loss: float
    aux_loss: float
    seconds: float
    skipped_steps: int
    flops_per_second: float = 0.0
    """Floating-point operations that the steps needed, a second; 0 when it is not known."""
    mfu: float = math.nan
    """Model FLOPs utilisation, 0 to 1; NaN when the device's peak is not known."""
    load_violation: tuple[float, ...] = ()
    """For each layer, on this peer's tokens: those of the busiest expert over the mean, less 1."""
    owned_routing: float = math.nan
    """Share of this peer's routing that went to experts that it trains."""


@dataclass(frozen=True)
class RoundCommitted:
    """A new base is in place."""

    round: int
    """0 for the round that assembled the swarm: it gives assignments and moves no weights."""
    campaign_step: int
    total_steps: int
    tokens: int
    """Trained by all members and included in this round."""
    total_tokens: int
    """Included since the campaign began."""
    loss: float
    """Token-weighted mean of the members' training losses in this phase (NaN when nobody trained)."""
    members: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]
    """For each expert, who trains it from now on."""
    base_digest: str
    parts: int
    dropped_parts: int
    sent_bytes: int
    received_bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: announce, exchange, commit, apply."""
    merge_alpha: float = 0.0
    learning_rate: float = 0.0
    contributions: tuple[tuple[str, int, int], ...] = ()
    """For each member: peer id, tokens, local steps times experts trained in them."""
    total_rounds: int = 0
    """The last round, as things stand; 0: as the campaign was planned."""
    control: str = ""
    """What the campaign's owner has ordered, in words; empty for nothing."""


@dataclass(frozen=True)
class Controlled:
    """An order of the campaign's owner holds from now on, for everybody alike."""

    round: int
    """The last round in this peer's base."""
    number: int
    """Of the control record."""
    state: str
    """running, paused, stopped."""
    order: str = ""
    """All that it says, in words."""


@dataclass(frozen=True)
class Drift:
    """Over the weights of one kind (shared, router, expert) that a peer sent in a round and the round took in."""

    sent: float
    """L2 norm of the peer's update."""
    step: float
    """L2 norm of the base's step, merge and outer momentum included."""
    cosine: float
    """Of the two; 0 where one of them is 0."""

    @property
    def shrink(self) -> float:
        """Length of the base's step over that of the peer's update; 0 without an update."""
        return self.step / self.sent if self.sent else 0.0


@dataclass(frozen=True)
class RoundMeasured:
    """What a committed round did to the work that was sent to it."""

    round: int
    drift: Mapping[str, Drift]
    """By kind of weights (shared, router, expert): this peer's update beside the base's step; empty when it sent none."""
    expert_tokens: tuple[int, ...]
    """For each expert, summed over layers: tokens on which its owners trained it, as the plan counts them."""


@dataclass(frozen=True)
class RoundFailed:
    """An attempt that did not commit. Nothing was applied."""

    round: int
    """The round that was attempted."""
    attempt: int
    reason: str
    """A short word for the metric: coordinator_lost, quorum_lost, refused, malformed, exchange, timeout."""
    detail: str


@dataclass(frozen=True)
class WorkDropped:
    """Pending work that was given up, in tokens."""

    round: int
    """The last round in this peer's base."""
    tokens: int
    reason: str


@dataclass(frozen=True)
class DigestMismatch:
    """My base differs from what the members agreed on; it is downloaded again."""

    round: int
    """The last round in the base."""
    mine: str
    agreed: str


@dataclass(frozen=True)
class Evaluated:
    """Held-out loss of the base after a round."""

    round: int
    """The last round in that base; up to 0, nothing was trained yet."""
    validation_loss: float


@dataclass(frozen=True)
class PeersSeen:
    """Living peers as the registry shows them."""

    trainers: int
    helpers: int
    living: tuple[str, ...] = ()
    """Ids of them all."""
    electorate: tuple[str, ...] = ()
    """Whose majority decides the next round."""


@dataclass(frozen=True)
class DownloadProgress:
    """Of something that takes long to fetch."""

    what: str
    done: int
    total: int
    """In the same unit as `done`; both equal at the end."""


@dataclass(frozen=True)
class BytesMoved:
    """Payload bytes that crossed the transport."""

    kind: str
    """push, pull, download, control."""
    sent: int
    received: int


def sync_phases(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of a round's seconds by phase, those without training (PhaseTrained tells that)."""
    return {phase: spent for phase, spent in seconds.items() if phase != "train"}


Event = (
    PhaseEntered
    | BaseRestored
    | TrainingProgress
    | PhaseTrained
    | RoundCommitted
    | Controlled
    | RoundMeasured
    | RoundFailed
    | WorkDropped
    | DigestMismatch
    | Evaluated
    | PeersSeen
    | DownloadProgress
    | BytesMoved
)


class Observer(Protocol):
    """Anything that wants to know."""

    def tell(self, event: Event) -> None:
        """Called on the event loop; must return at once."""


class Observers:
    """Tells several."""

    def __init__(self, *observers: Observer):
        self._observers = observers

    def tell(self, event: Event) -> None:
        """Pass the event on to each."""
        for observer in self._observers:
            observer.tell(event)
