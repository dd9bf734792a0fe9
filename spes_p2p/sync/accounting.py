"""What this peer trained and has not yet seen in a base: the accounting rule.

`pending = local - base`, always. `sent` is what was pushed, as the others decoded it. On commit, part by part: where the push
was included, `local += (base' - base) - sent`, otherwise `local += base' - base`. So a codec's rounding error stays pending
(error feedback), a part that was dropped stays pending, and nothing is counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from spes_p2p.model.layout import Group, Layout
from spes_p2p.sync.parts import Part
from spes_p2p.training.interface import PhaseReport, Trainer

MAX_PENDING_ROUNDS = 2


class Ledger:
    """Pending work of one peer, and how many tokens stand behind it."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self.tokens = 0
        self.routed = [0] * layout.num_experts
        self.loss_sum = 0.0
        self.loss_tokens = 0
        self._left_behind = 0
        self._handed_over: dict[int, np.ndarray] = {}
        self._age: dict[str, int] = {}

    @property
    def loss(self) -> float:
        """Mean training loss of what was not yet included; 0 without any."""
        return self.loss_sum / self.loss_tokens if self.loss_tokens else 0.0

    def trained(self, report: PhaseReport) -> None:
        """Add a phase's work."""
        self.tokens += report.tokens
        self.routed = [a + b for a, b in zip(self.routed, report.routed, strict=True)]
        if report.tokens and math.isfinite(report.loss):
            self.loss_sum += report.loss * report.tokens
            self.loss_tokens += report.tokens

    def pending(self, trainer: Trainer, base: np.ndarray) -> dict[str, np.ndarray]:
        """Pending updates by group name (float32, own copies): the groups that this peer contributes to the next round."""
        found: dict[str, np.ndarray] = {}
        for group in self._layout.groups:
            if self._weight(group) == 0:
                continue
            if group.expert in self._handed_over:
                found[group.name] = self._handed_over[group.expert].copy()
            elif group.expert is None or group.expert in trainer.owned:
                values = trainer.read(group)
                found[group.name] = np.subtract(values, base[group.start : group.stop], out=values)
        return found

    def change_owned(self, trainer: Trainer, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Train these experts from now on.

        An expert that is lost with pending work contributes that once more, then none; one that comes back before it did so
        goes on with that work.
        """
        for expert in set(trainer.owned) - set(owned):
            group = self._layout.expert(expert)
            if self.routed[expert] > 0:
                self._handed_over[expert] = trainer.read(group) - base[group.start : group.stop]
        trainer.assign(owned, base)
        for expert in owned:
            pending = self._handed_over.pop(expert, None)
            if pending is not None:
                trainer.add(self._layout.expert(expert), pending)

    def settle(
        self,
        trainer: Trainer,
        old: np.ndarray,
        new: np.ndarray,
        sent: Mapping[int, tuple[Part, np.ndarray]],
        included: Callable[[int], bool],
    ) -> int:
        """Account for one commit that took the base from `old` to `new`; returns the tokens of work that was given up.

        `sent`: by part index, the part and the decoded values that I pushed in the committed plan (empty when I was not in it).
        `included(part index)`: does the commit say that my push is in the result?
        """
        my_parts: dict[str, list[tuple[Part, np.ndarray]]] = {}
        for part, values in sent.values():
            if included(part.index):
                my_parts.setdefault(part.group.name, []).append((part, values))
        for group in self._layout.groups:
            accepted = my_parts.get(group.name, [])
            self._settle_group(trainer, group, old, new, accepted)
        left_out = {part.group for part, _ in sent.values() if not included(part.index)}
        self._note_left_behind(set(my_parts), left_out)
        return self._forget_settled(trainer, new, set(my_parts) - {g.name for g in left_out if g.expert is not None})

    def _note_left_behind(self, included: set[str], left_out: set[Group]) -> None:
        """Remember the tokens behind what stayed pending of shared weights and routers that otherwise count as settled."""
        if any(group.expert is None for group in left_out):
            self._left_behind = max(self._left_behind, self.tokens)
        elif included >= {group.name for group in self._layout.groups if group.expert is None}:
            self._left_behind = 0

    def rebase(self, trainer: Trainer, old: np.ndarray, new: np.ndarray, keep_pending: bool) -> int:
        """The base jumped (a snapshot, a repaired digest); returns the tokens of work that was given up if nothing is kept."""
        if keep_pending:
            for group in self._layout.groups:
                self._settle_group(trainer, group, old, new, [])
            return 0
        lost = max(self.tokens, self._left_behind, *self.routed)
        trainer.load_base(new)
        self._reset()
        return lost

    def _settle_group(
        self, trainer: Trainer, group: Group, old: np.ndarray, new: np.ndarray, accepted: list[tuple[Part, np.ndarray]]
    ) -> None:
        if group.expert is not None and group.expert not in trainer.owned:
            trainer.refresh(group, new[group.start : group.stop])
            handed_over = self._handed_over.get(group.expert)
            if handed_over is not None:
                for part, values in accepted:
                    handed_over[part.start - group.start : part.stop - group.start] -= values
            return
        delta = new[group.start : group.stop] - old[group.start : group.stop]
        for part, values in accepted:
            delta[part.start - group.start : part.stop - group.start] -= values
        trainer.add(group, delta)

    def _forget_settled(self, trainer: Trainer, base: np.ndarray, included: set[str]) -> int:
        """Work that was included is no longer pending; work that more than two rounds left out is given up.

        An expert of which a part was left out stays pending as a whole: it may be handed over before that part goes again.
        """
        dropped = 0
        weights = {group.name: self._weight(group) for group in self._layout.groups}
        for group in self._layout.groups:
            if group.name in included:
                self._clear(group)
            elif weights[group.name] > 0:
                self._age[group.name] = self._age.get(group.name, 0) + 1
                if self._age[group.name] > MAX_PENDING_ROUNDS:
                    dropped = max(dropped, weights[group.name])
                    self._drop(trainer, group, base)
        if self.tokens == 0:
            self.loss_sum, self.loss_tokens = 0.0, 0
        return dropped

    def _drop(self, trainer: Trainer, group: Group, base: np.ndarray) -> None:
        if group.expert is None or group.expert in trainer.owned:
            trainer.add(group, base[group.start : group.stop] - trainer.read(group))
        self._clear(group)

    def _clear(self, group: Group) -> None:
        self._age.pop(group.name, None)
        if group.expert is not None:
            self.routed[group.expert] = 0
            self._handed_over.pop(group.expert, None)
        elif group.kind == "shared":
            self.tokens = 0

    def _weight(self, group: Group) -> int:
        return self.tokens if group.expert is None else self.routed[group.expert]

    def _reset(self) -> None:
        self.tokens, self.loss_sum, self.loss_tokens, self._left_behind = 0, 0.0, 0, 0
        self.routed = [0] * self._layout.num_experts
        self._handed_over.clear()
        self._age.clear()
