"""What this peer trained and has not yet seen in a base: the accounting rule.

`pending = local - base`, always. `sent` is what was pushed, as the others decoded it. On commit, part by part: where the push
was included, `local += (base' - base) - sent`, otherwise `local += base' - base`. So a codec's rounding error stays pending
(error feedback), a part that was dropped stays pending, and nothing is counted twice.

The rule does not ask what happened between announcement and commit. A peer that trains on meanwhile (`sync.overlap`) adds to
`local` what it trains, so that stays pending and goes with the next round: with update u announced for round r on base b(r-1),
codes s decoded from it, and progress g of the phase that went on during the round,

    local  = b(r-1) + u + g                      at the end of that phase
    local += (b(r) - b(r-1)) - s                 round r is applied, one phase late
    u'     = local - b(r) = (u - s) + g          the update announced for round r+1

What is announced is therefore kept apart from what is trained afterwards: `announce` draws the line, and only what is behind
it settles, ages, or is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from spes_p2p.model.layout import Group, Layout
from spes_p2p.observe.events import Drift
from spes_p2p.sync.drift import drift_by_kind
from spes_p2p.sync.parts import Part
from spes_p2p.training.interface import PhaseReport, Trainer

MAX_PENDING_ROUNDS = 2


@dataclass(frozen=True)
class Work:
    """How much training stands behind pending weights."""

    routed: tuple[int, ...]
    """For each expert, tokens that its routers sent there."""
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean training loss; 0 without any."""
        return self.loss_sum / self.loss_tokens if self.loss_tokens else 0.0

    def plus(self, other: Work) -> Work:
        """Both together."""
        routed = tuple(a + b for a, b in zip(self.routed, other.routed, strict=True))
        losses = self.loss_sum + other.loss_sum, self.loss_tokens + other.loss_tokens
        return Work(routed, self.tokens + other.tokens, *losses)


class Ledger:
    """Pending work of one peer, and how many tokens stand behind it."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._nothing = Work((0,) * layout.num_experts)
        self._fresh = self._nothing
        """Trained since the last announcement."""
        self.announced = self._nothing
        """What the round in flight carries, and what earlier rounds left out."""
        self._update: dict[str, np.ndarray] = {}
        self.drift: dict[str, Drift] = {}
        """By kind of weights, at the last commit; empty where nothing of mine was in it."""
        self._left_behind = 0
        self._handed_over: dict[int, np.ndarray] = {}
        self._age: dict[str, int] = {}

    @property
    def pending(self) -> Work:
        """All that was not yet included."""
        return self.announced.plus(self._fresh)

    @property
    def update(self) -> Mapping[str, np.ndarray]:
        """What was announced, by group name (float32): the groups that this peer contributes to the round.

        An exchange overwrites it with what it sent.
        """
        return self._update

    def may_be_sent(self, trainer: Trainer, base: np.ndarray, group: Group) -> np.ndarray | None:
        """What a push of before a restart may have held of a group; None when nothing that is pending here."""
        if group.name in self._update:
            return self._update[group.name]
        is_fresh = self._fresh.tokens if group.expert is None else self._fresh.routed[group.expert]
        if is_fresh or (group.expert is not None and group.expert not in trainer.owned):
            return None
        values = trainer.read(group)
        values -= base[group.start : group.stop]
        return values

    def trained(self, report: PhaseReport) -> None:
        """Add a phase's work."""
        counts = report.tokens and math.isfinite(report.loss)
        losses = (report.loss * report.tokens, report.tokens) if counts else (0.0, 0)
        self._fresh = self._fresh.plus(Work(report.routed, report.tokens, *losses))

    def announce(self, trainer: Trainer, base: np.ndarray) -> None:
        """Take all that is pending now as the update of the next round. Called between two steps."""
        self.announced, self._fresh = self.pending, self._nothing
        self._update = {}
        for group in self._layout.groups:
            if self._weight(group) == 0:
                continue
            if group.expert is not None and group.expert in self._handed_over:
                self._update[group.name] = self._handed_over[group.expert].copy()
            elif group.expert is None or group.expert in trainer.owned:
                values = trainer.read(group)
                self._update[group.name] = np.subtract(values, base[group.start : group.stop], out=values)

    def change_owned(self, trainer: Trainer, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Train these experts from now on.

        An expert that is lost with pending work contributes that once more, then none; one that comes back before it did so
        goes on with that work.
        """
        for expert in set(trainer.owned) - set(owned):
            group = self._layout.expert(expert)
            if self.pending.routed[expert] > 0:
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
        self.drift = drift_by_kind(old, new, (each for accepted in my_parts.values() for each in accepted))
        for group in self._layout.groups:
            accepted = my_parts.get(group.name, [])
            self._settle_group(trainer, group, old, new, accepted)
        left_out = {part.group for part, _ in sent.values() if not included(part.index)}
        self._note_left_behind(set(my_parts), left_out)
        return self._forget_settled(trainer, set(my_parts) - {g.name for g in left_out if g.expert is not None})

    def _note_left_behind(self, included: set[str], left_out: set[Group]) -> None:
        """Remember the tokens behind what stayed pending of shared weights and routers that otherwise count as settled."""
        if any(group.expert is None for group in left_out):
            self._left_behind = max(self._left_behind, self.announced.tokens)
        elif included >= {group.name for group in self._layout.groups if group.expert is None}:
            self._left_behind = 0

    def rebase(self, trainer: Trainer, old: np.ndarray, new: np.ndarray, keep_announced: bool) -> int:
        """The base jumped (a snapshot, a repaired digest); returns the tokens of announced work that was given up, if it was.

        What was trained since the announcement is kept either way.
        """
        lost = 0
        if not keep_announced:
            lost = max(self.announced.tokens, self._left_behind, *self.announced.routed)
            for group in self._layout.groups:
                self._take_back(trainer, group)
            self.announced, self._left_behind = self._nothing, 0
            self._handed_over = {e: values for e, values in self._handed_over.items() if self._fresh.routed[e]}
            self._age.clear()
        for group in self._layout.groups:
            self._settle_group(trainer, group, old, new, [])
        return lost

    def give_up(self, trainer: Trainer, base: np.ndarray) -> int:
        """The campaign went back to an earlier base: nothing of what is pending stays. Returns its tokens."""
        lost = max(self.pending.tokens, self._left_behind, *self.pending.routed)
        trainer.load_base(base)
        self.announced = self._fresh = self._nothing
        self._left_behind = 0
        for table in (self._update, self._handed_over, self._age):
            table.clear()
        return lost

    def state(self) -> dict[str, np.ndarray]:
        """What a restart needs beside `local - base`, by name."""
        work = self.pending
        handed_over = {f"handed_over.{expert}": values for expert, values in self._handed_over.items()}
        losses = np.array([work.loss_sum, work.loss_tokens], np.float64)
        return {"tokens": np.array([work.tokens, *work.routed], np.int64), "losses": losses, **handed_over}

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Undo of `state`; all of it counts as not yet announced."""
        if "tokens" not in arrays:
            return
        tokens, *routed = map(int, arrays["tokens"])
        loss_sum, loss_tokens = map(float, arrays["losses"])
        self._fresh = Work(tuple(routed), tokens, loss_sum, int(loss_tokens))
        self._handed_over = {
            int(name.partition(".")[2]): values.copy() for name, values in arrays.items() if name.startswith("handed_over.")
        }

    def _settle_group(
        self, trainer: Trainer, group: Group, old: np.ndarray, new: np.ndarray, accepted: list[tuple[Part, np.ndarray]]
    ) -> None:
        is_trained = group.expert is None or group.expert in trainer.owned
        if is_trained:
            trainer.add(group, _less(new[group.start : group.stop] - old[group.start : group.stop], accepted))
        else:
            trainer.refresh(group, new[group.start : group.stop])
        if group.expert is not None and group.expert in self._handed_over:
            _less(self._handed_over[group.expert], accepted)
        update = self._update.get(group.name)
        if update is not None:
            for part, _ in accepted:
                update[part.start - group.start : part.stop - group.start] = 0

    def _forget_settled(self, trainer: Trainer, included: set[str]) -> int:
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
                    self._take_back(trainer, group)
                    self._clear(group)
        if self.announced.tokens == 0:
            self.announced = replace(self.announced, loss_sum=0.0, loss_tokens=0)
        return dropped

    def _take_back(self, trainer: Trainer, group: Group) -> None:
        """Give up what was announced of a group and is still pending."""
        update = self._update.pop(group.name, None)
        if update is None:
            return
        if group.expert is not None and group.expert in self._handed_over:
            self._handed_over[group.expert] -= update
        elif group.expert is None or group.expert in trainer.owned:
            trainer.add(group, -update)

    def _clear(self, group: Group) -> None:
        self._age.pop(group.name, None)
        if group.expert is not None:
            routed = tuple(0 if e == group.expert else count for e, count in enumerate(self.announced.routed))
            self.announced = replace(self.announced, routed=routed)
            if not self._fresh.routed[group.expert]:
                self._handed_over.pop(group.expert, None)
        elif group.kind == "shared":
            self.announced = replace(self.announced, tokens=0)

    def _weight(self, group: Group) -> int:
        """Of what was announced."""
        return self.announced.tokens if group.expert is None else self.announced.routed[group.expert]


def _less(values: np.ndarray, accepted: list[tuple[Part, np.ndarray]]) -> np.ndarray:
    """A group's values without what was accepted of it, in place."""
    for part, sent in accepted:
        start = part.start - part.group.start
        values[start : start + part.size] -= sent
    return values
