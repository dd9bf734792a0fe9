"""Cheap diagnostics of every round: the peers' measurements of their updates, and their routers' counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from spes_p2p.observe.events import RoundMeasured
from spes_p2p.training.balance import load_violation, share_of
from spes_p2p.training.interface import PhaseReport

POINTS = 40
"""Average the rounds into at most this many points."""


class RoundSeries:
    """Collects numbers by round and name, and averages those with the same round and name."""

    def __init__(self) -> None:
        self._numbers: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._reports: dict[int, list[tuple[PhaseReport, tuple[int, ...]]]] = defaultdict(list)

    def trained(self, round_number: int, report: PhaseReport, owned: tuple[int, ...]) -> None:
        """Record a peer's phase before this round."""
        self._reports[round_number].append((report, owned))

    def measured(self, event: RoundMeasured) -> None:
        """Record a peer's measurements of a committed round."""
        for kind, drift in event.drift.items():
            self._note(event.round, f"cosine {kind}", drift.cosine)
            self._note(event.round, f"shrink {kind}", drift.shrink)
            self._note(event.round, f"update {kind}", drift.sent)
            self._note(event.round, f"step {kind}", drift.step)
        reports = self._reports.pop(event.round, [])
        if reports:
            self._note_routing(event, reports)

    def columns(self) -> dict[str, list[float]]:
        """Return, by name, a number for each of at most POINTS ranges of rounds; `round` is the last of a range."""
        known = {number: values for number, values in sorted(self._numbers.items()) if values}
        names = sorted({name for values in known.values() for name in values})
        stretches = [s for s in np.array_split(np.array(list(known)), min(POINTS, len(known)) or 1) if len(s)]
        columns: dict[str, list[float]] = {"round": [float(stretch[-1]) for stretch in stretches]}
        for name in names:
            columns[name] = [_mean([x for n in stretch for x in known[int(n)].get(name, [])]) for stretch in stretches]
        return columns

    def _note(self, round_number: int, name: str, value: float) -> None:
        self._numbers[round_number][name].append(value)

    def _note_routing(self, event: RoundMeasured, reports: Sequence[tuple[PhaseReport, tuple[int, ...]]]) -> None:
        """Record balance, and the share of each expert's tokens that trained it, from the counts of all peers."""
        counts = np.sum([report.assignments for report, _ in reports], axis=0)  # [L, E]
        routed = counts.sum(axis=0)
        share = np.array(event.expert_tokens) / np.maximum(routed, 1)
        violations = load_violation(counts.tolist())
        self._note(event.round, "load violation", max(violations))
        for layer, violation in enumerate(violations):
            self._note(event.round, f"load violation layer {layer}", violation)
        self._note(event.round, "owned share", float(np.mean([share_of(r.assignments, owned) for r, owned in reports])))
        self._note(event.round, "owned share global",
                   float(np.mean([share_of(counts.tolist(), owned) for _, owned in reports])))
        self._note(event.round, "expert tokens", float(np.mean(event.expert_tokens)))
        self._note(event.round, "expert tokens least", float(np.min(event.expert_tokens)))
        self._note(event.round, "trained share", float(share.mean()))
        self._note(event.round, "trained share least", float(share.min()))


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4) if values else float("nan")
