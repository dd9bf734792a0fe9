"""Attacks by a member that follows the protocol: what it sends after a phase instead of what it trained, and what it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np

from spes_p2p.model.layout import Group
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

AttackKind = Literal["scale", "flip", "zero", "noise", "weight"]
"""scale: 1000 times the update. flip: the opposite update, ten times. zero: none, with the tokens of `weight`. noise: random
values in the attacker's experts. weight: 2^40 tokens behind an honest update."""

SCALE, FLIP, NOISE, TOKENS = 1000.0, -10.0, 1.0, 2**40
LIES = ("zero", "weight")
T = TypeVar("T", bound=TorchTrainer)


def attacking(honest: type[T], kind: AttackKind) -> type[T]:
    """Return a trainer that trains like `honest` and then replaces its update."""

    class Attacker(honest):  # type: ignore[misc, valid-type]
        def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
            groups = [g for g in self.layout.groups if g.expert is None or g.expert in self.owned]
            before = {group: self.read(group) for group in groups}
            report: PhaseReport = super().train(phase, should_stop, on_step)
            rng = np.random.default_rng(phase.round)
            for group, start in before.items():
                update = self.read(group) - start
                self.add(group, _sent(kind, group, update, rng) - update)
            if kind not in LIES:
                return report
            routed = tuple(TOKENS if expert in self.owned else 0 for expert in range(len(report.routed)))
            return replace(report, tokens=TOKENS, routed=routed)

    return Attacker


def _sent(kind: AttackKind, group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return what the attacker sends in place of a group's update."""
    if kind == "scale":
        return update * np.float32(SCALE)
    if kind == "flip":
        return update * np.float32(FLIP)
    if kind == "zero":
        return np.zeros_like(update)
    if kind == "noise" and group.expert is not None:
        return rng.standard_normal(update.size, np.float32) * np.float32(NOISE)
    return update
