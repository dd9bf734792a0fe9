"""How often a swarm should meet, and in which codecs, on lines of several speeds.

**The rule.** The phase is the shortest whose exchange takes at most EXCHANGE_SHARE of the time, and at least SHORTEST_PHASE
steps. Of CODECS_BY_BYTES the first is taken, and a later one where it lowers the loss after a given time by at least WORTHWHILE
nats, but not with several owners for each expert, who would agree on few of its values, and none that would end an open
campaign's audits.

The share follows from how the loss of a small model changes (docs/learning.md): by LOSS_OF_PHASE for each factor e in the
tokens between rounds, and by LOSS_OF_TOKENS for each factor e in the tokens trained. With an exchange of x times a phase's
training, tokens in a given time go with 1 / (1 + x), and x with the phase's inverse. So the loss is least where the exchange's
share of the time, x / (1 + x), is the ratio of both. Neither was measured for a large model.

Step times are those of `speed.py` for an assumed card, unless a peer's speed is given. What a round computes beside the
exchange is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spes_p2p.campaign.planner import round_traffic
from spes_p2p.campaign.room import Choice
from spes_p2p.campaign.speed import FLOPS, step_seconds
from spes_p2p.config.campaign import CampaignConfig, CodecConfig
from spes_p2p.observe.units import human_count
from spes_p2p.rounds.audits import are_audited

LOSS_OF_PHASE, LOSS_OF_TOKENS = 0.058, 0.327
"""Four peers, 512 tokens a step: from 5 to 288 steps a phase, and from 0.74 M to 2.95 M tokens of one machine."""
LOSS_OF_PEERS = 0.207
"""From one peer alone to four that meet every 5 steps, for each factor e in the number of peers."""
EXCHANGE_SHARE = LOSS_OF_PHASE / LOSS_OF_TOKENS
SHORTEST_PHASE = 5
"""Steps below which more rounds gained nothing."""
CODECS_BY_BYTES = (
    CodecConfig(),
    CodecConfig(shared="int4", experts="sparse"),
    CodecConfig(shared="ternary", experts="sparse64"),
)
"""Those of most bytes first."""
LOSS_OF_CODECS = {"adamw": (0.0, 0.0, 0.019), "muon": (0.0, 0.009, 0.086)}
"""Nats that each costs over the first in rounds of 30 steps, by optimizer. The last was measured with 3.9 M parameters
(with 0.7 M it costs 0.0 and 0.035), the second with 0.7 M."""
WORTHWHILE = 0.02
"""Seeds differ by as much."""
LINES_BITS = (20e6, 100e6, 1e9)
DAY_S = 86400


@dataclass(frozen=True)
class Pace:
    """A phase length and codecs for a line, and what follows from them."""

    bits_per_second: float
    codec: CodecConfig
    sync_steps: int
    up_bytes: int
    """Sent in a round by the peer that sends most."""
    down_bytes: int
    exchange_seconds: float
    phase_seconds: float
    peers: int
    tokens: int
    """Of a phase, by one peer."""
    loss_of_codec: float
    """Nats that the codecs cost."""

    def of_steps(self, steps: int) -> Pace:
        """Return the same with another phase length."""
        ratio = steps / self.sync_steps
        tokens = self.tokens * steps // self.sync_steps
        return replace(self, sync_steps=steps, phase_seconds=ratio * self.phase_seconds, tokens=tokens)

    @property
    def exchange_share(self) -> float:
        """Share of the time that the exchange takes."""
        return self.exchange_seconds / (self.exchange_seconds + self.phase_seconds)

    @property
    def tokens_per_day(self) -> float:
        """Tokens that the swarm trains in a day."""
        return self.peers * self.tokens * DAY_S / (self.exchange_seconds + self.phase_seconds)

    @property
    def speedup(self) -> float:
        """How much sooner the swarm reaches a loss than one of its peers alone, by the small model's losses."""
        lost = LOSS_OF_PHASE * math.log(self.sync_steps / SHORTEST_PHASE) + self.loss_of_codec
        gained = LOSS_OF_PEERS * math.log(self.peers) - lost
        return (1 - self.exchange_share) * math.exp(gained / LOSS_OF_TOKENS)

    def lowers_loss_of(self, other: Pace) -> float:
        """Return by how many nats the loss after a given time is lower than with another pace."""
        return LOSS_OF_TOKENS * math.log(self.speedup / other.speedup)


def seconds_of_a_step(config: CampaignConfig, choice: Choice, tokens_per_second: float | None) -> float:
    """Return the seconds of a peer's step: at its speed, where that is known, or of the assumed card."""
    if tokens_per_second is None:
        return step_seconds(config, choice.setup)
    return config.training.batch_size * config.training.sequence_length / tokens_per_second


def paces(
    config: CampaignConfig, owned: int, peers: int, step_s: float, lines: Sequence[float],
    longest: int | None = None,
) -> tuple[Pace, ...]:
    """Return the rule's choice for each line, in bits per second. `longest`: the longest phase, in steps; default: any.

    `owned`: experts that each of the `peers` can train.
    """
    has_audits = are_audited(with_codec(config, CODECS_BY_BYTES[0]))
    codecs = [codec for codec in CODECS_BY_BYTES if are_audited(with_codec(config, codec)) or not has_audits]
    if config.experts.redundancy > 1:
        codecs = codecs[:1]
    traffics = [(codec, _bytes(config, codec, owned, peers)) for codec in codecs]
    found = []
    for line in lines:
        chosen: Pace | None = None
        for codec, moved in traffics:
            pace = _pace(config, codec, moved, peers, step_s, line)
            if chosen is None or pace.lowers_loss_of(chosen) >= WORTHWHILE:
                chosen = pace
        assert chosen is not None
        found.append(chosen.of_steps(min(chosen.sync_steps, longest or chosen.sync_steps)))
    return tuple(found)


def assumption(tokens_per_second: float | None) -> str:
    """Return where the seconds of a step come from, for a table's title."""
    if tokens_per_second is None:
        return f"steps at {human_count(FLOPS)} operations/s, an assumed consumer card"
    return f"{human_count(tokens_per_second)} tokens/s a peer"


def with_codec(config: CampaignConfig, codec: CodecConfig) -> CampaignConfig:
    """Return the campaign with these codecs."""
    return config.model_copy(update={"sync": config.sync.model_copy(update={"codec": codec})})


def _bytes(config: CampaignConfig, codec: CodecConfig, owned: int, peers: int) -> tuple[int, int]:
    traffic = round_traffic(with_codec(config, codec), owned, peers, 1.0)
    return traffic.up_bytes, traffic.down_bytes


def _pace(
    config: CampaignConfig, codec: CodecConfig, moved: tuple[int, int], peers: int, step_s: float, line: float
) -> Pace:
    exchange = 8 * max(moved) / line
    steps = max(SHORTEST_PHASE, math.ceil(exchange * (1 / EXCHANGE_SHARE - 1) / step_s))
    tokens = steps * config.training.batch_size * config.training.sequence_length
    lost = LOSS_OF_CODECS[config.training.optimizer][CODECS_BY_BYTES.index(codec)]
    return Pace(line, codec, steps, *moved, exchange, steps * step_s, peers, tokens, lost)
