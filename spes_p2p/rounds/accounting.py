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

A round may take one part of a group and leave another out. So the tokens behind what is pending are kept part by part: they are
what the next update of that part weighs.

What is kept lies in scratch arrays, files perhaps; everything else is done piece by piece, so that a model's size is no matter
of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.model.layout import Group, Layout
from spes_p2p.observe.events import Drift
from spes_p2p.rounds.drift import DriftSums
from spes_p2p.rounds.parts import Part
from spes_p2p.storage.scratch import Scratch, memory_scratch, side_by_side
from spes_p2p.training.interface import PhaseReport, Trainer
from spes_p2p.training.pending import add_pending, pending_of, trained_groups

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

    def of(self, group: Group) -> int:
        """Tokens that trained this group."""
        return self.tokens if group.expert is None else self.routed[group.expert]


class Ledger:
    """Pending work of one peer, and how many tokens stand behind it."""

    def __init__(self, layout: Layout, ranges: Sequence[tuple[Group, int, int]], scratch: Scratch = memory_scratch):
        """`ranges`: of all that can be parts (`part_ranges`). `scratch`: where updates are kept."""
        self._layout = layout
        self._ranges = tuple(ranges)
        self._scratch = scratch
        self._nothing = Work((0,) * layout.num_experts)
        self._fresh = self._nothing
        """Trained since the last announcement."""
        self._behind = np.zeros(len(ranges), np.int64)
        """Tokens behind what was announced of each range and is not yet included."""
        self._place = {start: place for place, (_, start, _) in enumerate(ranges)}
        self._places = _places_of_groups(ranges)
        self._losses = 0.0, 0
        """Their sum and tokens, of what was announced."""
        self._update: dict[str, np.ndarray] = {}
        self.drift: dict[str, Drift] = {}
        """By kind of weights, at the last commit; empty where nothing of mine was in it."""
        self._handed_over: dict[int, np.ndarray] = {}
        self._age: dict[str, int] = {}

    @property
    def announced(self) -> Work:
        """What the round in flight carries, and what earlier rounds left out.

        Tokens count as included with the first part of the shared weights that is, those of an expert with its last part.
        """
        experts = range(self._layout.num_experts)
        routed = tuple(int(self._behind_group(self._layout.expert(expert)).max()) for expert in experts)
        return Work(routed, int(self._behind_group(self._layout.group("shared")).min()), *self._losses)

    @property
    def pending(self) -> Work:
        """All that was not yet included."""
        return self.announced.plus(self._fresh)

    @property
    def most_behind(self) -> int:
        """Tokens behind the part that has most of them pending; 0: nothing is pending but what codecs dropped."""
        return int(self._behind_all().max())

    def behind(self, part: Part) -> int:
        """Tokens behind the part's update: its weight in the mean."""
        return int(self._behind[self._place[part.start]])

    @property
    def update(self) -> Mapping[str, np.ndarray]:
        """What was announced, by group name (float32): the groups that this peer contributes to the round.

        An exchange overwrites it with what it sent.
        """
        return self._update

    def copy_of_update(self) -> dict[str, np.ndarray]:
        """For another attempt at the round."""
        copies = side_by_side(self._scratch, "update", {name: values.size for name, values in self._update.items()})
        for name, values in self._update.items():
            np.copyto(copies[name], values)
        return copies

    def may_be_sent(self, trainer: Trainer, base: np.ndarray, group: Group) -> np.ndarray | None:
        """What a push of before a restart may have held of a group; None when nothing that is pending here."""
        if group.name in self._update:
            return self._update[group.name]
        if self._fresh.of(group) or (group.expert is not None and group.expert not in trainer.owned):
            return None
        return pending_of(trainer, base, group, self._scratch("aside", group.size))

    def trained(self, report: PhaseReport) -> None:
        """Add a phase's work."""
        counts = report.tokens and math.isfinite(report.loss)
        losses = (report.loss * report.tokens, report.tokens) if counts else (0.0, 0)
        self._fresh = self._fresh.plus(Work(report.routed, report.tokens, *losses))

    def announce(self, trainer: Trainer, base: np.ndarray) -> None:
        """Take all that is pending now as the update of the next round. Called between two steps."""
        announced, self._behind = self.pending, self._behind_all()
        self._fresh, self._losses = self._nothing, (announced.loss_sum, announced.loss_tokens)
        self._update = {}  # its file is that of the next one
        groups = [group for group in self._layout.groups if announced.of(group) and self._is_mine(trainer, group)]
        self._update = side_by_side(self._scratch, "update", {group.name: group.size for group in groups})
        for group in groups:
            handed_over = self._handed_over_of(group)
            if handed_over is not None:
                np.copyto(self._update[group.name], handed_over)
            else:
                pending_of(trainer, base, group, self._update[group.name])

    def set_aside(self, trainer: Trainer, base: np.ndarray) -> Mapping[str, np.ndarray]:
        """All that is pending in the trainer, by group name: for `put_back`, after something else was done with its weights."""
        groups = trained_groups(trainer)
        values = side_by_side(self._scratch, "aside", {group.name: group.size for group in groups})
        for group in groups:
            pending_of(trainer, base, group, values[group.name])
        return values

    def put_back(self, trainer: Trainer, set_aside: Mapping[str, np.ndarray]) -> None:
        """Undo of `set_aside`, on the same base."""
        for name, values in set_aside.items():
            add_pending(trainer, self._layout.group(name), values)

    def change_owned(self, trainer: Trainer, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Train these experts from now on.

        An expert that is lost with pending work contributes that once more, then none; one that comes back before it did so
        goes on with that work.
        """
        for expert in set(trainer.owned) - set(owned):
            group = self._layout.expert(expert)
            if self.pending.routed[expert] > 0:
                self._handed_over[expert] = pending_of(trainer, base, group, self._scratch("aside", group.size))
        trainer.assign(owned, base)
        for expert in owned:
            pending = self._handed_over.pop(expert, None)
            if pending is not None:
                add_pending(trainer, self._layout.expert(expert), pending)

    def settle(
        self,
        trainer: Trainer,
        old: np.ndarray,
        new: np.ndarray,
        accepted: Sequence[tuple[Part, np.ndarray]],
    ) -> int:
        """Account for one commit that took the base from `old` to `new`; returns the tokens of work that was given up.

        `accepted`: the parts that hold my push of the committed plan, with the decoded values that I pushed.
        """
        sent = {part.start: values for part, values in accepted}
        for part, _ in accepted:
            self._behind[self._place[part.start]] = 0
        drift = DriftSums()
        for group in self._layout.groups:
            self._settle_group(trainer, group, old, new, sent, drift)
        self.drift = drift.by_kind()
        return self._age_pending(trainer, {part.group.name for part, _ in accepted})

    def rebase(self, trainer: Trainer, old: np.ndarray, new: np.ndarray, keep_announced: bool) -> int:
        """The base jumped (a snapshot, a repaired digest); returns the tokens of announced work that was given up, if it was.

        What was trained since the announcement is kept either way.
        """
        lost = 0
        if not keep_announced:
            lost = max((self._drop(trainer, group) for group in self._layout.groups if group.name in self._update), default=0)
            self._forget_settled()
        for group in self._layout.groups:
            self._settle_group(trainer, group, old, new, {}, DriftSums())
        return lost

    def give_up(self, trainer: Trainer, base: np.ndarray) -> int:
        """The campaign went back to an earlier base: nothing of what is pending stays. Returns its tokens."""
        lost = self.most_behind
        trainer.load_base(base)
        self._fresh, self._losses = self._nothing, (0.0, 0)
        self._behind[:] = 0
        for table in (self._update, self._handed_over, self._age):
            table.clear()
        return lost

    def state(self) -> dict[str, np.ndarray]:
        """What a restart needs beside `local - base`, by name."""
        handed_over = {f"handed_over.{expert}": values for expert, values in self._handed_over.items()}
        losses = np.array([self.pending.loss_sum, self.pending.loss_tokens], np.float64)
        return {"tokens_behind": self._behind_all(), "losses": losses, **handed_over}

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Undo of `state`, before anything is announced or trained."""
        behind = arrays.get("tokens_behind")
        if behind is None or behind.shape != self._behind.shape:
            return
        self._behind = behind.copy()
        loss_sum, loss_tokens = map(float, arrays["losses"])
        self._losses = loss_sum, int(loss_tokens)
        for name, values in arrays.items():
            if name.startswith("handed_over."):
                kept = self._handed_over[int(name.partition(".")[2])] = self._scratch("aside", values.size)
                np.copyto(kept, values)

    def _settle_group(
        self, trainer: Trainer, group: Group, old: np.ndarray, new: np.ndarray, sent: Mapping[int, np.ndarray], drift: DriftSums
    ) -> None:
        """`sent`: what was included of mine, by start of its range."""
        is_trained = group.expert is None or group.expert in trainer.owned
        if not is_trained:
            trainer.refresh(group, new[group.start : group.stop])
        update, handed_over = self._update.get(group.name), self._handed_over_of(group)
        for start, stop in self._ranges_of(group):
            mine, here = sent.get(start), slice(start - group.start, stop - group.start)
            if mine is None and not is_trained:
                continue
            step = new[start:stop] - old[start:stop]
            if mine is not None:
                drift.add(group.kind, mine, step)
                if handed_over is not None:
                    handed_over[here] -= mine
                step -= mine
            if is_trained:
                trainer.add(group, step, here.start)
            if mine is not None and update is not None:
                update[here] = 0

    def _age_pending(self, trainer: Trainer, included: set[str]) -> int:
        """What more than two rounds left out is given up; returns its tokens.

        An expert of which a part was left out ages as a whole: it may be handed over before that part goes again.
        """
        dropped = 0
        for group in self._layout.groups:
            is_settled = group.expert is None and group.name in included
            if is_settled or group.name not in self._update or not self._behind_group(group).any():
                self._age.pop(group.name, None)
                continue
            self._age[group.name] = self._age.get(group.name, 0) + 1
            if self._age[group.name] > MAX_PENDING_ROUNDS:
                dropped = max(dropped, self._drop(trainer, group))
        self._forget_settled()
        return dropped

    def _forget_settled(self) -> None:
        """Nothing is left of an expert that was handed over, or of what the losses are about."""
        pending = self.pending
        self._handed_over = {expert: values for expert, values in self._handed_over.items() if pending.routed[expert]}
        if self.announced.tokens == 0:
            self._losses = 0.0, 0

    def _drop(self, trainer: Trainer, group: Group) -> int:
        """Give up what was announced of a group and is still pending; returns its tokens."""
        behind = self._behind_group(group)
        dropped = int(behind.max())
        behind[:] = 0
        self._age.pop(group.name, None)
        self._take_back(trainer, group)
        return dropped

    def _take_back(self, trainer: Trainer, group: Group) -> None:
        """What is still pending of a group's announced update leaves the local weights."""
        update = self._update.pop(group.name)
        handed_over = self._handed_over_of(group)
        if handed_over is not None:
            handed_over -= update
        elif self._is_mine(trainer, group):
            np.negative(update, out=update)
            add_pending(trainer, group, update)

    def _is_mine(self, trainer: Trainer, group: Group) -> bool:
        """Is it trained here, or was it, and there is work left?"""
        return group.expert is None or group.expert in trainer.owned or group.expert in self._handed_over

    def _handed_over_of(self, group: Group) -> np.ndarray | None:
        return None if group.expert is None else self._handed_over.get(group.expert)

    def _ranges_of(self, group: Group) -> Iterator[tuple[int, int]]:
        """Where its ranges begin and end in the flat state."""
        return ((start, stop) for _, start, stop in self._ranges[self._places[group.name]])

    def _behind_group(self, group: Group) -> np.ndarray:
        """Tokens behind each of its parts, of what was announced: a view."""
        return self._behind[self._places[group.name]]

    def _behind_all(self) -> np.ndarray:
        """Tokens behind each range, of all that is pending."""
        behind = self._behind.copy()
        for group in self._layout.groups:
            behind[self._places[group.name]] += self._fresh.of(group)
        return behind


def _places_of_groups(ranges: Sequence[tuple[Group, int, int]]) -> dict[str, slice]:
    """By group name: where its ranges stand among all of them."""
    places: dict[str, slice] = {}
    for place, (group, _, _) in enumerate(ranges):
        first = places[group.name].start if group.name in places else place
        places[group.name] = slice(first, place + 1)
    return places
