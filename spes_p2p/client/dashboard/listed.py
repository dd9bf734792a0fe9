"""One campaign of a directory: what its peers say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe.swarm_status import gather


@dataclass(frozen=True)
class Seen:
    """What the peers of a campaign say of it."""

    campaign: str
    campaign_hash: str
    state: str
    """running, paused, stopped; done."""
    round: int
    total_rounds: int
    trainers: int
    helpers: int
    total_tokens: int
    tokens_per_second: float
    validation_loss: float
    validation_round: int
    seconds_left: float
    waits: bool
    """Whether its rounds or its schedule wait for peers."""
    command: str
    """To take part, or to take the model once the campaign is done."""
    note: str
    """What is wrong with the address in it."""


@dataclass
class Listed:
    """One entry of the directory."""

    addresses: Sequence[str]
    answers: bool = False
    updated: float = math.nan
    """Unix time of the last answer; NaN before the first."""
    problem: str = ""
    """Why the last try failed."""
    seen: Seen | None = None
    """What the last answer said."""


def seen(statuses: Sequence[PeerStatus], address: str, note: str = "") -> Seen:
    """Sum up the answers of one campaign's peers. `note`: what is wrong with this address to join."""
    swarm = gather(statuses)
    peers = [each for each in statuses if each.base_digest] or statuses  # others are joining, or only say so
    trainers = sum(each.role == "trainer" for each in peers)
    take = f"spes-p2p export --from {address} --output checkpoint"
    return Seen(
        swarm.campaign, swarm.campaign_hash, "done" if swarm.done and swarm.state != "stopped" else swarm.state, swarm.round,
        swarm.total_rounds, trainers, len(peers) - trainers, swarm.total_tokens, swarm.tokens_per_second,
        swarm.validation_loss, swarm.validation_round, swarm.seconds_left, swarm.waits,
        take if swarm.done else f"spes-p2p join {address}", note,
    )
