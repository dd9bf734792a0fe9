"""Members that follow the protocol and lie about their training: what they send in place of what they trained, and claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import ROUND
from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Group
from spes_p2p.net.interfaces import World
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.training.interface import Phase, PhaseReport, Trainer

SCALE, FLIP, NOISE = 1000.0, -10.0, 1.0
TOKENS, BANDWIDTH = 2**40, 1e15
"""Claims of `zero` and `weight`."""

Before = dict[Group, np.ndarray]
Instead = Callable[[Group, np.ndarray, np.random.Generator], np.ndarray]
"""(Group, honest update, random numbers) -> what is sent in its place."""


def scaled(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A thousand times the update."""
    return update * np.float32(SCALE)


def flipped(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ten times the opposite update."""
    return update * np.float32(FLIP)


def zero(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """No update."""
    return np.zeros_like(update)


def noise(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Normal deviates in the attacker's experts."""
    return update if group.expert is None else rng.standard_normal(update.size, np.float32) * np.float32(NOISE)


def honest(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The update itself."""
    return update


@dataclass
class UpdateLiar:
    """Trains like an honest peer, or less, and then replaces its update and its report."""

    instead: Instead = honest
    claims_tokens: bool = False
    """Claim TOKENS."""
    is_lazy: bool = False
    """Train one step, and claim the whole phase."""
    copies: bool = False
    """Send what the last round moved. Implies one step of training for the figures of the report."""
    _last: Before | None = None
    """Weights at the start of the last phase."""

    def around(self, liar: Liar) -> World:
        """Wrap the attacker's world."""
        world = liar.world

        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            if getattr(function, "__name__", "") != "train":
                return await world.run_blocking(function, *args)
            liar.tell("update")
            return await self._train(world.run_blocking, function, *args)

        return replace(world, run_blocking=run_blocking)

    async def _train(
        self, run: Callable[..., Awaitable[Any]], train: Callable[..., PhaseReport], phase: Phase,
        should_stop: Callable[[], bool], on_step: Callable[[int, float], None],
    ) -> PhaseReport:
        trainer: Trainer = train.__self__  # type: ignore[attr-defined]
        groups = [group for group in trainer.layout.groups if group.expert is None or group.expert in trainer.owned]
        before = {group: trainer.read(group) for group in groups}
        stops = _after_one_step() if self.is_lazy or self.copies else should_stop
        report: PhaseReport = await run(train, phase, stops, on_step)
        rng = np.random.default_rng(phase.round)
        for group, start in before.items():
            update = trainer.read(group) - start
            trainer.add(group, self._sent(group, start, update, rng) - update)
        self._last = before
        return self._claim(phase, trainer.owned, report)

    def _sent(self, group: Group, start: np.ndarray, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.copies:
            last = (self._last or {}).get(group)
            return np.zeros_like(update) if last is None else start - last
        return self.instead(group, update, rng)

    def _claim(self, phase: Phase, owned: Sequence[int], report: PhaseReport) -> PhaseReport:
        if self.claims_tokens:
            routed = tuple(TOKENS if expert in owned else 0 for expert in range(len(report.routed)))
            return replace(report, tokens=TOKENS, routed=routed)
        if (self.is_lazy or self.copies) and report.steps:
            tokens = report.tokens // report.steps * phase.steps
            routed = tuple(count * phase.steps for count in report.routed)
            return replace(report, steps=phase.steps, tokens=tokens, routed=routed, untrained=())
        return report


def _after_one_step() -> Callable[[], bool]:
    asked = iter((False,))
    return lambda: next(asked, True)


class ClaimedBandwidth(Tamper):
    """Claims so much bandwidth that it would reduce everything."""

    def __init__(self, identity: Identity):
        self._identity = identity

    async def send(self, frame: Frame) -> Frame:
        """Change the announcement."""
        if (frame.method, frame.is_answer, frame.kind) != (ROUND, False, Kind.MESSAGE):
            return frame
        return changed(frame, Signed, self._with_bandwidth)

    def _with_bandwidth(self, signed: Signed) -> Signed:
        announcement = read_signed(Announcement, signed, self._identity)
        return sign(replace(announcement, bandwidth=BANDWIDTH), self._identity)


def with_bandwidth(liar: Liar, world: World | None = None) -> World:
    """Claim BANDWIDTH, in the liar's world or in `world`."""
    return tampered(liar, ClaimedBandwidth(liar.world.identity), world)


def with_false_weight(liar: Liar) -> World:
    """Claim TOKENS behind an honest update, and BANDWIDTH."""
    return with_bandwidth(liar, UpdateLiar(claims_tokens=True).around(liar))
