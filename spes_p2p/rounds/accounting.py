"""Accounting of pending updates: what this peer trained and no base includes yet.

The invariant is `pending = local - base`. On commit, for each part: `local += (base' - base) - sent` if the commit includes
this peer's push, else `local += base' - base`, where `sent` is the pushed update as others decode it. So the codec's rounding
error and dropped parts stay pending (error feedback), and nothing is counted twice.

The rule also holds for a peer that trains on during a round (`sync.overlap`). With update u announced for round r on base
b(r-1), s decoded from its encoding, and progress g of the phase in parallel with the round,

    local  = b(r-1) + u + g                      at the end of that phase
    local += (b(r) - b(r-1)) - s                 round r is applied, one phase late
    u'     = local - b(r) = (u - s) + g          the update announced for round r+1

Announced updates are therefore kept apart from later training: only announced updates settle, age or are discarded.

A round may include one part of a group and drop another, so pending tokens (an update's weight in the mean) are counted by
part. An update is encoded part by part when it is announced, and kept in a scratch array, possibly in a file: memory does not
grow with the model, and all attempts at a round send the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from spes_p2p.model.layout import Group, Layout
from spes_p2p.observe.events import Drift
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.drift import DriftSums
from spes_p2p.rounds.parts import Part
from spes_p2p.storage.scratch import Scratch, memory_scratch, scratch_arrays
from spes_p2p.storage.threads import in_threads
from spes_p2p.training.interface import PhaseReport, Trainer
from spes_p2p.training.pending import add_pending, is_trained, pending_between, pending_of, pending_pieces, trained_groups

MAX_PENDING_ROUNDS = 2
"""Discard an update that more rounds than this left out: it is too stale."""

Sent = Callable[[], np.ndarray]
"""Returns what others decode of this peer's update of a part: float32 `[part.size]`."""


@dataclass(frozen=True)
class TrainedTokens:
    """The tokens and losses of the training in pending weights."""

    routed: tuple[int, ...]
    """Tokens routed to each expert."""
    tokens: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean training loss; 0 without tokens."""
        return self.loss_sum / self.loss_tokens if self.loss_tokens else 0.0

    def plus(self, other: TrainedTokens) -> TrainedTokens:
        """Return the sum of both."""
        routed = tuple(a + b for a, b in zip(self.routed, other.routed, strict=True))
        losses = self.loss_sum + other.loss_sum, self.loss_tokens + other.loss_tokens
        return TrainedTokens(routed, self.tokens + other.tokens, *losses)

    def of(self, group: Group) -> int:
        """Return the tokens that trained this group."""
        return self.tokens if group.expert is None else self.routed[group.expert]


class Ledger:
    """The pending updates of one peer, and their tokens."""

    def __init__(
        self, layout: Layout, ranges: Sequence[tuple[Group, int, int]], codecs: GroupCodecs, scratch: Scratch = memory_scratch,
        threads: int = 1,
    ):
        """`ranges`: all possible parts (`part_ranges`). `scratch` allocates the updates, which this many threads encode."""
        self._layout, self._codecs = layout, codecs
        self._ranges = tuple(ranges)
        self._scratch, self._threads = scratch, threads
        self._nothing = TrainedTokens((0,) * layout.num_experts)
        self._fresh = self._nothing
        """Training since the last announcement."""
        self._tokens = np.zeros(len(ranges), np.int64)
        """Announced tokens of each range that no base includes yet."""
        self._place = {start: place for place, (_, start, _) in enumerate(ranges)}
        self._places = _places_of_groups(ranges)
        self._losses = 0.0, 0
        """Sum and tokens of the announced losses."""
        self._update: dict[int, memoryview] = {}
        """What of the announced update no base includes yet, encoded, by start of its part; no bytes where it is not finite."""
        self.drift: dict[str, Drift] = {}
        """By kind of weights, at the last commit; empty if it included no update of this peer."""
        self._handed_over: dict[int, np.ndarray] = {}
        self._age: dict[str, int] = {}
        self._is_last = False
        """Whether the update is encoded for a campaign's last round."""
        self._is_restored = False
        """Whether the update is the one that was sent before a restart, in a round that is not settled."""

    @property
    def announced(self) -> TrainedTokens:
        """What was announced and is not yet included, from this and earlier rounds.

        Tokens count as included with the first included part of the shared weights, those of an expert with its last part.
        """
        experts = range(self._layout.num_experts)
        routed = tuple(int(self._announced_tokens(self._layout.expert(expert)).max()) for expert in experts)
        return TrainedTokens(routed, int(self._announced_tokens(self._layout.group("shared")).min()), *self._losses)

    @property
    def pending(self) -> TrainedTokens:
        """All training that no base includes yet."""
        return self.announced.plus(self._fresh)

    @property
    def max_pending_tokens(self) -> int:
        """The largest pending tokens of any part; 0: only rounding errors of codecs are pending."""
        return int(self._pending_tokens().max())

    def tokens_behind(self, part: Part) -> int:
        """Return the tokens of the part's announced update: its weight in the mean."""
        return int(self._tokens[self._place[part.start]])

    @property
    def update(self) -> Mapping[int, memoryview]:
        """The announced update, encoded, by start of its part: of all parts to which this peer contributes in the next round.

        Later rounds and announcements leave the mapping as it is. No bytes where the values are not finite.
        """
        return self._update.copy()

    def possibly_sent(self, trainer: Trainer, base: np.ndarray, part: Part) -> Sent | None:
        """Return what a push before a restart may have contained of a part; None if that is nothing.

        It is the announced update if that was sent (`continue_round`). Otherwise it is all that is pending or, if this peer has
        trained since the restart, what it announced then.
        """
        group, first = part.group, part.start - part.group.start
        if is_trained(trainer, group) and not self._fresh.of(group) and not self._is_restored:
            return partial(pending_between, trainer, base, group, first, first + part.size)
        body = self._update.get(part.start)
        return partial(part.codec.decode, body, part.size) if body else None

    def add_phase(self, report: PhaseReport) -> None:
        """Count a phase's tokens and losses; a non-finite loss is left out."""
        counts = report.tokens and math.isfinite(report.loss)
        losses = (report.loss * report.tokens, report.tokens) if counts else (0.0, 0)
        self._fresh = self._fresh.plus(TrainedTokens(report.routed, report.tokens, *losses))

    def announce(self, trainer: Trainer, base: np.ndarray, is_last: bool = False) -> None:
        """Freeze all that is pending as the update of the next round, encoded. Call between two steps.

        `is_last`: that round is the campaign's last. Changes nothing while the update from before a restart is announced,
        unless a reform has given its round up and other codecs follow.
        """
        if self._is_restored and is_last == self._is_last:
            return
        self._is_restored = False
        announced, self._tokens = self.pending, self._pending_tokens()
        self._fresh, self._losses = self._nothing, (announced.loss_sum, announced.loss_tokens)
        self._update, self._is_last = {}, is_last  # release the file for the next update
        groups = {group.name for group in self._layout.groups if announced.of(group) and self._contributes(trainer, group)}
        ranges = [each for each, tokens in zip(self._ranges, self._tokens, strict=True) if tokens and each[0].name in groups]
        if not ranges:
            return
        codec_of = partial(self._codecs.of, is_last=is_last)
        ends = list(accumulate((codec_of(group).encoded_bytes(stop - start) for group, start, stop in ranges), initial=0))
        space = self._scratch("update", -(-ends[-1] // 4)).view(np.uint8)

        def encode(each: tuple[tuple[Group, int, int], tuple[int, int]]) -> tuple[int, memoryview]:
            (group, start, stop), (begin, end) = each
            values = self._to_announce(trainer, base, group, start - group.start, stop - group.start)
            if not np.isfinite(values).all():
                return start, memoryview(b"")
            space[begin:end] = np.frombuffer(codec_of(group).encode(values), np.uint8)
            return start, space[begin:end].data

        self._update = dict(in_threads(encode, zip(ranges, pairwise(ends), strict=True), self._threads))

    def stash_pending(self, trainer: Trainer, base: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return a copy of all that is pending in the trainer, by group name, for `restore_pending`."""
        groups = trained_groups(trainer)
        values = scratch_arrays(self._scratch, "temporary", {group.name: group.size for group in groups})
        for group in groups:
            pending_of(trainer, base, group, values[group.name])
        return values

    def restore_pending(self, trainer: Trainer, stashed: Mapping[str, np.ndarray]) -> None:
        """Add stashed updates to a trainer that holds the plain base."""
        for name, values in stashed.items():
            add_pending(trainer, self._layout.group(name), values)

    def change_owned(self, trainer: Trainer, owned: tuple[int, ...], base: np.ndarray) -> None:
        """Make the trainer own these experts.

        A lost expert's pending update is handed over: announced once more. If the expert returns earlier, it keeps the update.
        """
        for expert in set(trainer.owned) - set(owned):
            group = self._layout.expert(expert)
            if self.pending.routed[expert] > 0:
                self._handed_over[expert] = pending_of(trainer, base, group, self._scratch("temporary", group.size))
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
        accepted: Sequence[tuple[Part, Sent]],
    ) -> int:
        """Account for a commit that moves the base from `old` to `new`; return the tokens that are discarded as too stale.

        `accepted`: the parts that include this peer's push of the committed plan, with what was pushed.
        """
        sent = {part.start: values for part, values in accepted}
        self._is_restored = False
        for part, _ in accepted:
            self._tokens[self._place[part.start]] = 0
        drift = DriftSums()
        for group in self._layout.groups:
            self._settle_group(trainer, group, old, new, sent, drift)
        self.drift = drift.by_kind()
        return self._age_pending(trainer, {part.group.name for part, _ in accepted})

    def rebase(
        self, trainer: Trainer, old: np.ndarray, new: np.ndarray, keep_announced: bool, is_repair: bool = False,
        sent_is_lost: bool = False,
    ) -> int:
        """Move to another base without a commit (download, repair); return the announced tokens that are discarded.

        Training since the announcement is kept in any case. `is_repair`: the round with the announced update goes on.
        `sent_is_lost`: what was sent before a restart may differ from the announced update, as in `possibly_sent`.
        """
        lost = 0
        if not keep_announced:
            lost = max((self._drop(trainer, group) for group in self._layout.groups if self._is_announced(group)), default=0)
            self._forget_settled()
            for group in trained_groups(trainer) if sent_is_lost and not self._is_restored else ():
                if not self._fresh.of(group):
                    _take_back(trainer, old, group)
        self._is_restored &= is_repair
        for group in self._layout.groups:
            self._settle_group(trainer, group, old, new, {}, DriftSums())
        return lost

    def discard_pending(self, trainer: Trainer, base: np.ndarray) -> int:
        """Discard all that is pending after a rollback; return its tokens."""
        lost = self.max_pending_tokens
        self._is_restored = False
        trainer.load_base(base)
        self._fresh, self._losses = self._nothing, (0.0, 0)
        self._tokens[:] = 0
        for table in (self._update, self._handed_over, self._age):
            table.clear()
        return lost

    def state(self, is_announced: bool = False) -> dict[str, np.ndarray]:
        """Return the arrays that a restart needs in addition to `local - base`, by name.

        `is_announced`: a round with the announced update is under way, so the state has it apart from later training.
        """
        handed_over = {f"handed_over.{expert}": values for expert, values in self._handed_over.items()}
        if not is_announced:
            losses = np.array([self.pending.loss_sum, self.pending.loss_tokens], np.float64)
            return {"tokens_behind": self._pending_tokens(), "losses": losses, **handed_over}
        fresh = self._fresh
        update = {f"update.{start}": np.asarray(body) for start, body in self._update.items() if body}
        return {
            "tokens_behind": self._tokens,
            "losses": np.array(self._losses, np.float64),
            "fresh_tokens": np.array([fresh.tokens, *fresh.routed], np.int64),
            "fresh_losses": np.array([fresh.loss_sum, fresh.loss_tokens], np.float64),
            "is_last": np.array(self._is_last, np.int64),
            **update,
            **handed_over,
        }

    def continue_round(self) -> None:
        """Take the announced update for the one that was sent before a restart."""
        self._is_restored = True

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore `state`. Call before anything is announced or trained."""
        tokens = arrays.get("tokens_behind")
        if tokens is None or tokens.shape != self._tokens.shape:
            return
        self._tokens = tokens.copy()
        loss_sum, loss_tokens = map(float, arrays["losses"])
        self._losses = loss_sum, int(loss_tokens)
        for name, values in arrays.items():
            if name.startswith("handed_over."):
                kept = self._handed_over[int(name.partition(".")[2])] = self._scratch("temporary", values.size)
                np.copyto(kept, values)
        if "fresh_tokens" in arrays:
            trained, *routed = map(int, arrays["fresh_tokens"])
            loss_sum, loss_tokens = map(float, arrays["fresh_losses"])
            self._fresh = TrainedTokens(tuple(routed), trained, loss_sum, int(loss_tokens))
            self._is_last = bool(arrays["is_last"])
            self._load_update({int(n.partition(".")[2]): body for n, body in arrays.items() if n.startswith("update.")})
            self.continue_round()

    def _load_update(self, bodies: Mapping[int, np.ndarray]) -> None:
        """Copy an encoded update, by start of its part."""
        ends = list(accumulate((body.size for body in bodies.values()), initial=0))
        space = self._scratch("update", max(1, -(-ends[-1] // 4))).view(np.uint8)
        for (start, body), (begin, end) in zip(bodies.items(), pairwise(ends), strict=True):
            space[begin:end] = body
            self._update[start] = space[begin:end].data

    def _settle_group(
        self, trainer: Trainer, group: Group, old: np.ndarray, new: np.ndarray, sent: Mapping[int, Sent], drift: DriftSums
    ) -> None:
        """Apply the accounting rule to one group. `sent`: what is included, by start of its range."""
        trained_here, handed_over = is_trained(trainer, group), self._handed_over_of(group)
        if not trained_here:
            trainer.refresh(group, new[group.start : group.stop])
        for _, start, stop in self._ranges[self._places[group.name]]:
            here = slice(start - group.start, stop - group.start)
            if start not in sent and not trained_here:
                continue
            step = new[start:stop] - old[start:stop]
            if start in sent:
                pushed = sent[start]()
                drift.add(group.kind, pushed, step)
                if handed_over is not None:
                    handed_over[here] -= pushed
                step -= pushed
                self._update.pop(start, None)
            if trained_here:
                trainer.add(group, step, here.start)

    def _age_pending(self, trainer: Trainer, included: set[str]) -> int:
        """Discard updates that more than MAX_PENDING_ROUNDS rounds left out; return their tokens.

        An expert ages until all its parts are included: it may be handed over before the rest is sent again.
        """
        dropped = 0
        for group in self._layout.groups:
            is_settled = group.expert is None and group.name in included
            if is_settled or not self._is_announced(group) or not self._announced_tokens(group).any():
                self._age.pop(group.name, None)
                continue
            self._age[group.name] = self._age.get(group.name, 0) + 1
            if self._age[group.name] > MAX_PENDING_ROUNDS:
                dropped = max(dropped, self._drop(trainer, group))
        self._forget_settled()
        return dropped

    def _forget_settled(self) -> None:
        """Drop handed-over experts and losses without pending tokens."""
        pending = self.pending
        self._handed_over = {expert: values for expert, values in self._handed_over.items() if pending.routed[expert]}
        if self.announced.tokens == 0:
            self._losses = 0.0, 0

    def _drop(self, trainer: Trainer, group: Group) -> int:
        """Discard a group's announced update, also from the local weights; return its tokens."""
        tokens = self._announced_tokens(group)
        dropped = int(tokens.max())
        tokens[:] = 0
        self._age.pop(group.name, None)
        handed_over, codec = self._handed_over_of(group), self._codecs.of(group, self._is_last)
        for _, start, stop in self._ranges[self._places[group.name]]:
            body, first = self._update.pop(start, None), start - group.start
            if not body:
                continue
            if handed_over is not None:
                handed_over[first : stop - group.start] -= codec.decode(body, stop - start)
            elif is_trained(trainer, group):
                trainer.add(group, -codec.decode(body, stop - start), first)
        return dropped

    def _to_announce(self, trainer: Trainer, base: np.ndarray, group: Group, start: int, stop: int) -> np.ndarray:
        """Return what is pending of a group's range `[start, stop)`, counted from the group's start."""
        handed_over = self._handed_over_of(group)
        return pending_between(trainer, base, group, start, stop) if handed_over is None else handed_over[start:stop]

    def _is_announced(self, group: Group) -> bool:
        return any(start in self._update for _, start, _ in self._ranges[self._places[group.name]])

    def _contributes(self, trainer: Trainer, group: Group) -> bool:
        """Return whether this peer trains the group, or has a handed-over update of it."""
        return is_trained(trainer, group) or group.expert in self._handed_over

    def _handed_over_of(self, group: Group) -> np.ndarray | None:
        return None if group.expert is None else self._handed_over.get(group.expert)

    def _announced_tokens(self, group: Group) -> np.ndarray:
        """Return the announced tokens of each of the group's ranges: a view."""
        return self._tokens[self._places[group.name]]

    def _pending_tokens(self) -> np.ndarray:
        """Return the pending tokens of each range."""
        tokens = self._tokens.copy()
        for group in self._layout.groups:
            tokens[self._places[group.name]] += self._fresh.of(group)
        return tokens


def _take_back(trainer: Trainer, base: np.ndarray, group: Group) -> None:
    """Subtract all that is pending of a trained group."""
    done = 0
    for piece in pending_pieces(trainer, base, group):
        trainer.add(group, -piece, done)
        done += piece.size


def _places_of_groups(ranges: Sequence[tuple[Group, int, int]]) -> dict[str, slice]:
    """Return the slice of each group's ranges among all ranges, by group name."""
    places: dict[str, slice] = {}
    for place, (group, _, _) in enumerate(ranges):
        first = places[group.name].start if group.name in places else place
        places[group.name] = slice(first, place + 1)
    return places
