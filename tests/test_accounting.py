"""The accounting rule: nothing that was trained is counted twice, nothing is lost without being said."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from exchange_round import LAYOUT, codecs
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.peer.own_work import OwnWork
from spes_p2p.research import ledgers
from spes_p2p.research.ledgers import BufferedLedger
from spes_p2p.rounds.accounting import Ledger, TrainedTokens
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.part_table import part_table
from spes_p2p.rounds.parts import Part, part_ranges
from spes_p2p.rounds.planned import Member
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.pending import add_pending, trained_groups

TOKENS_PER_STEP, PART_BYTES = 100, 512
RANGES = part_ranges(LAYOUT, codecs("none"), PART_BYTES)


def announced_groups(ledger: Ledger) -> set[str]:
    return {group.name for group, start, _ in ledger._ranges if start in ledger.update}


class Account:
    """One peer's ledger beside a bookkeeping in float64 of where each value that it trained has gone."""

    def __init__(self, seed: int, owned: tuple[int, ...], codec: str):
        self.rng = np.random.default_rng(seed)
        self.base = self.rng.standard_normal(LAYOUT.size, np.float32)
        self.trainer = SyntheticTrainer(LAYOUT, self.base, owned, TOKENS_PER_STEP, 1.0, seed)
        self.codecs = codecs(codec)
        self.ledger = Ledger(LAYOUT, part_ranges(LAYOUT, self.codecs, PART_BYTES), self.codecs)
        self.trained = np.zeros(LAYOUT.size)
        self.entered = np.zeros(LAYOUT.size)
        self.given_up = np.zeros(LAYOUT.size)
        self.rounding = np.zeros(LAYOUT.size)
        """What the codec dropped of each value's last push that was included or discarded."""
        self.sent: dict[int, tuple[Part, np.ndarray]] = {}
        self.errors: dict[int, np.ndarray] = {}
        """What the codec drops of each of these."""
        self.is_last = False
        """Whether the round after the base is a campaign's last."""

    def train(self, steps: int) -> None:
        before = self.trainer.local
        report = self.trainer.train(Phase(1, 0, steps, steps, ()), lambda: False, lambda done, speed: None)
        self.trained += self.trainer.local - before
        self.ledger.add_phase(report)

    def push(self) -> None:
        """What an exchange would send: every part of what is pending, encoded."""
        pending = self.pending()
        self.ledger.announce(self.trainer, self.base, self.is_last)
        me = Member("me", self.ledger.announced.tokens, self.ledger.announced.routed, 1.0)
        other = Member("other", 1, (1,) * LAYOUT.num_experts, 1.0)
        self.sent = {}
        for part in part_table(LAYOUT, (me, other), self.codecs, PART_BYTES, self.is_last):
            if 0 in part.contributors:
                body = self.ledger.update.get(part.start)
                values = np.zeros(part.size, np.float32) if body is None else part.codec.decode(body, part.size)
                self.sent[part.index] = part, values
                self.errors[part.index] = np.abs(pending[part.start : part.stop] - values)

    def commit(self, included: set[int]) -> int:
        """The base moves by others' work and by what of mine is included."""
        new = self.base + np.float32(0.01) * self.rng.standard_normal(LAYOUT.size, np.float32)
        before = self.pending()
        for index in included:
            part, values = self.sent[index]
            self.entered[part.start : part.stop] += values
            before[part.start : part.stop] -= values
            self.rounding[part.start : part.stop] = self.errors[index]
        accepted = [(part, partial(np.copy, values)) for part, values in (self.sent[index] for index in included)]
        dropped = self.ledger.settle(self.trainer, self.base, new, accepted)
        for index, (part, _) in self.sent.items() if dropped else ():
            place = slice(part.start, part.stop)
            self.rounding[place] = np.maximum(self.rounding[place], self.errors[index])
        self.base, self.sent = new, {}
        self.note_given_up(before, dropped)
        return dropped

    def restart(self) -> None:
        """Continue from a checkpoint that has the pushed update apart, which is what it finds in place of the push."""
        ledger = Ledger(LAYOUT, part_ranges(LAYOUT, self.codecs, PART_BYTES), self.codecs)
        ledger.load_state(self.ledger.state(is_announced=True))
        assert (ledger.announced, ledger.pending) == (self.ledger.announced, self.ledger.pending)
        self.ledger = ledger
        ledger.announce(self.trainer, self.base, self.is_last)
        for part, values in self.sent.values():
            found = ledger.possibly_sent(self.trainer, self.base, part)
            np.testing.assert_array_equal(values, 0 if found is None else found())

    def leave_out(self) -> int:
        """A round in which nothing of mine is included."""
        self.push()
        return self.commit(set())

    def jump(self, keep: bool) -> None:
        new = self.rng.standard_normal(LAYOUT.size, np.float32)
        before = self.pending()
        dropped = self.ledger.rebase(self.trainer, self.base, new, keep)
        self.base, self.sent = new, {}
        self.note_given_up(before, dropped, is_lost=not keep)

    def own(self, owned: tuple[int, ...]) -> None:
        before = self.pending()
        self.ledger.change_owned(self.trainer, owned, self.base)
        self.note_given_up(before, 0)

    def note_given_up(self, before: np.ndarray, dropped_tokens: int, is_lost: bool = False) -> None:
        """Pending work may only disappear when that is counted.

        What a codec dropped may go uncounted: of an expert that was lost, with everything else, or with what was announced
        (`is_lost`).
        """
        gone = before - self.pending()
        if dropped_tokens == 0:
            owned = np.concatenate([np.full(g.size, g.expert is None or g.expert in self.trainer.owned) for g in LAYOUT.groups])
            allowed = np.where(owned & bool(self.pending().any()) & (not is_lost), 0, self.rounding)
            assert (np.abs(gone) <= allowed + 2e-5).all()
        self.given_up += gone

    def pending(self) -> np.ndarray:
        pending = np.zeros(LAYOUT.size)
        for group in LAYOUT.groups:
            place = slice(group.start, group.stop)
            if group.expert is None or group.expert in self.trainer.owned:
                pending[place] = self.trainer.read(group).astype(np.float64) - self.base[place]
            elif group.expert in self.ledger._handed_over:
                pending[place] = self.ledger._handed_over[group.expert]
        return pending

    def check(self) -> None:
        np.testing.assert_allclose(self.entered + self.given_up + self.pending(), self.trained, atol=1e-4)
        for group in LAYOUT.groups:
            if group.expert is not None and group.expert not in self.trainer.owned:
                np.testing.assert_array_equal(self.trainer.read(group), self.base[group.start : group.stop])


EVENTS = ["round", "round", "partial", "restart", "killed", "dropped", "aborted", "not in it", "own", "jump", "lost"]
OWNED = st.sets(st.integers(0, LAYOUT.num_experts - 1)).map(lambda experts: tuple(sorted(experts)))


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), seed=st.integers(0, 1000), codec=st.sampled_from(sorted(CODECS)))
def test_what_entered_the_base_and_what_is_pending_is_all_that_was_trained(
    data: st.DataObject, seed: int, codec: str
) -> None:
    account = Account(seed, data.draw(OWNED), codec)
    for _ in range(data.draw(st.integers(1, 12))):
        event, base = data.draw(st.sampled_from(EVENTS)), account.base
        if event in ("round", "partial", "restart", "killed", "dropped", "aborted", "not in it"):
            account.train(data.draw(st.integers(0, 3)))
        if event == "own":
            account.own(data.draw(OWNED))
        elif event in ("jump", "lost"):
            account.jump(keep=event == "jump")
        elif event == "not in it":
            account.commit(set())
        else:
            account.push()
            account.train(data.draw(st.integers(0, 2)))
            if event in ("restart", "killed"):
                account.restart()
            share = {"round": 1.0, "partial": 0.5, "restart": 0.5, "dropped": 0.0}.get(event)
            if share is not None:
                chosen = account.rng.random(len(account.sent)) < share
                account.commit({index for index, is_in in zip(account.sent, chosen, strict=True) if is_in})
        if not np.array_equal(account.base, base):
            account.is_last = data.draw(st.booleans())
        account.check()


def test_a_late_commit_of_an_aborted_looking_round_subtracts_what_was_sent_then() -> None:
    account = Account(1, (0, 1), "none")
    account.train(2)
    account.push()
    sent, account.sent = account.sent, {}
    account.train(3)
    account.sent = sent
    account.commit(set(sent))
    account.check()
    assert np.abs(account.pending()).max() > 1e-4


@pytest.mark.parametrize(("codec", "largest"), [
    ("fp16", 5e-6), ("int8", 1e-4), ("int4", 2e-3), ("ternary", 5e-2), ("sparse16", 2e-3), ("sparse", 2.5e-3),
    ("sparse64", 2.5e-3),
])
def test_what_the_codec_drops_stays_pending(codec: str, largest: float) -> None:
    account = Account(3, (0,), codec)
    account.train(1)
    account.push()
    account.commit(set(account.sent))
    account.check()
    residue = np.abs(account.pending()[: LAYOUT.group("shared").stop])
    assert 0 < residue.max() < largest


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "ternary", "sparse16", "sparse", "sparse64"])
def test_after_the_last_round_no_codec_leaves_more_than_int4_pending(codec: str) -> None:
    account, fine = Account(3, (0,), codec), Account(3, (0,), "int4")
    for each in (account, fine):
        each.is_last = True
        each.train(1)
        each.push()
        each.commit(set(each.sent))
        each.check()
    assert np.abs(account.pending()).max() <= np.abs(fine.pending()).max()


def test_an_update_from_before_a_restart_is_encoded_anew_where_the_last_round_follows_its_own() -> None:
    account = Account(3, (0,), "sparse")
    account.train(1)
    account.push()
    account.restart()
    account.is_last = True
    account.push()
    account.commit(set(account.sent))
    account.check()


class BufferedAccount(Account):
    """The account of a peer that keeps what was not sent of the shared weights in an error buffer."""

    def __init__(self, codec: str):
        super().__init__(3, (0,), codec)
        self.ledger = BufferedLedger(LAYOUT, part_ranges(LAYOUT, self.codecs, PART_BYTES), self.codecs)

    def pending(self) -> np.ndarray:
        pending, buffer = super().pending(), self.ledger._buffer  # type: ignore[attr-defined]
        if buffer is not None:
            pending[: buffer.size] += buffer
        return pending


@pytest.mark.parametrize("codec", ["int4", "ternary", "sparse"])
def test_an_error_buffer_that_does_not_decay_loses_nothing_and_each_phase_begins_at_the_base(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "DECAY", np.float32(1))
    account, shared = BufferedAccount(codec), LAYOUT.group("shared")
    for share in (1.0, 0.5, 0.0, 1.0):
        account.train(2)
        account.push()
        chosen = account.rng.random(len(account.sent)) < share
        account.commit({index for index, is_in in zip(account.sent, chosen, strict=True) if is_in})
        np.testing.assert_allclose(account.trainer.read(shared), account.base[: shared.size], atol=1e-6)
        account.check()
    assert np.abs(account.given_up).max() < 1e-5
    assert np.abs(account.pending()[: shared.size]).max() > 1e-4


def test_work_that_is_left_out_of_more_than_two_rounds_is_given_up_and_counted_in_tokens() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    assert [account.leave_out() for _ in range(4)] == [0, 0, 3 * TOKENS_PER_STEP, 0]
    np.testing.assert_allclose(account.pending(), 0, atol=1e-6)
    assert account.ledger.pending.tokens == 0


def test_what_was_trained_during_the_round_in_which_older_work_is_given_up_stays() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    assert [account.leave_out() for _ in range(2)] == [0, 0]
    account.push()
    before = account.pending()
    account.train(1)
    fresh = account.pending() - before
    assert account.commit(set()) == 3 * TOKENS_PER_STEP
    np.testing.assert_allclose(account.pending(), fresh, atol=1e-6)
    assert account.ledger.pending.tokens == TOKENS_PER_STEP


def test_a_jump_that_may_hide_my_push_gives_up_what_was_announced_and_keeps_what_was_trained_since() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    account.push()
    before = account.pending()
    account.train(1)
    fresh = account.pending() - before
    account.jump(keep=False)
    np.testing.assert_allclose(account.pending(), fresh, atol=1e-5)
    assert account.ledger.pending.tokens == TOKENS_PER_STEP


def test_a_restart_knows_how_much_work_stands_behind_what_is_pending() -> None:
    account = Account(0, (0, 2), "none")
    account.train(3)
    account.own((0,))
    restarted = Ledger(LAYOUT, RANGES, codecs("none"))
    restarted.load_state(account.ledger.state())
    assert restarted.pending == account.ledger.pending
    restarted.announce(account.trainer, account.base)
    account.ledger.announce(account.trainer, account.base)
    assert announced_groups(restarted) == {"shared", "router", "expert.0", "expert.2"}
    assert restarted.update == account.ledger.update


@pytest.mark.parametrize("codec", ["int4", "ternary", "sparse", "sparse64"])
@pytest.mark.parametrize("steps", [0, 2])
def test_no_value_sent_before_a_restart_within_a_phase_is_pending_on_a_base_that_may_include_it(codec: str, steps: int) -> None:
    """The checkpoint is of `steps` steps; the update that was sent had more, so its codec may have left out other values."""
    account = Account(4, (0,), codec)
    account.train(1)
    account.push()
    account.commit(set(account.sent))
    account.train(steps)
    work = OwnWork("me", LAYOUT, account.codecs, memory_scratch, 1)
    work.trainer = SyntheticTrainer(LAYOUT, account.base, (0,), TOKENS_PER_STEP, 1.0, 0)
    for group in trained_groups(account.trainer):
        add_pending(work.trainer, group, account.pending()[group.start : group.stop].astype(np.float32))
    work.ledger.load_state(account.ledger.state())
    work.announce(account.base)
    work.sent_update_lost = True
    account.train(20)
    account.push()
    new = account.base.copy()
    for part, values in account.sent.values():
        new[part.start : part.stop] += values
    before = Base("before", 4, account.base, "", None)
    work.take_assignment = lambda base: None  # type: ignore[method-assign]
    work.rebase(before, Base("after", 9, new, "", None), keep_pending=False, rolled_back=False)
    assert work.ledger.max_pending_tokens == 0
    for part, values in account.sent.values():
        if values.any():
            place = slice(part.start - part.group.start, part.stop - part.group.start)
            pending = work.trainer.read(part.group)[place] - new[part.start : part.stop]
            np.testing.assert_allclose(pending[values != 0], 0, atol=1e-5)


@pytest.mark.parametrize("codec", ["int4", "ternary", "sparse"])
def test_the_held_out_loss_is_the_bases_without_what_the_codec_left_of_this_peers_work(codec: str) -> None:
    account = Account(4, (0,), codec)
    account.train(3)
    account.push()
    account.commit(set(account.sent))
    work = OwnWork("me", LAYOUT, account.codecs, memory_scratch, 1)
    work.trainer, work.ledger = account.trainer, account.ledger
    of_base = SyntheticTrainer(LAYOUT, account.base, (), TOKENS_PER_STEP, 1.0, 0).validation_loss()
    left = account.pending()
    assert account.trainer.validation_loss() != of_base
    assert work.validation_loss(account.base) == of_base
    np.testing.assert_allclose(account.pending(), left, atol=1e-6)


def test_a_repaired_base_does_not_include_what_was_sent_before_a_restart() -> None:
    work = OwnWork("me", LAYOUT, codecs("none"), memory_scratch, 1)
    work.trainer = SyntheticTrainer(LAYOUT, np.zeros(LAYOUT.size, np.float32), (), TOKENS_PER_STEP, 1.0, 0)
    work.sent_update_lost = True
    wrong, right, newest = (Base(commit, 4, np.zeros(LAYOUT.size, np.float32), "", None) for commit in ("at", "at", "after"))
    work.rebase(wrong, right, keep_pending=True, rolled_back=False)
    assert work.sent_update_lost, "a base after the round may include it"
    work.rebase(right, newest, keep_pending=False, rolled_back=False)
    assert not work.sent_update_lost


def test_what_was_trained_since_a_restart_is_not_taken_for_a_push_of_before() -> None:
    account = Account(0, (0,), "none")
    account.train(3)
    before, pushed = account.pending(), Ledger(LAYOUT, RANGES, codecs("none"))
    pushed.load_state(account.ledger.state())
    account.ledger = pushed
    account.ledger.announce(account.trainer, account.base)
    account.train(1)
    member = Member("me", 1, (1,) * LAYOUT.num_experts, 1.0)
    for part in part_table(LAYOUT, (member,), account.codecs, PART_BYTES):
        sent = account.ledger.possibly_sent(account.trainer, account.base, part)
        if part.group.expert in (None, 0):
            assert sent is not None
            np.testing.assert_allclose(sent(), before[part.start : part.stop], atol=1e-6)
        else:
            assert sent is None


@pytest.mark.parametrize("threads", [1, 3])
def test_where_an_update_is_not_finite_nothing_is_announced(threads: int) -> None:
    account, shared = Account(0, (0,), "int4"), LAYOUT.group("shared")
    account.ledger = Ledger(LAYOUT, part_ranges(LAYOUT, account.codecs, PART_BYTES), account.codecs, threads=threads)
    account.train(1)
    account.trainer.add(shared, np.array([np.nan], np.float32), 0)
    account.ledger.announce(account.trainer, account.base)
    assert [start for start, body in account.ledger.update.items() if not body] == [shared.start]
    for group, start, stop in part_ranges(LAYOUT, account.codecs, PART_BYTES):
        if start != shared.start and group.expert in (None, 0):
            encoded = account.codecs.of(group).encode(account.pending()[start:stop].astype(np.float32))
            assert bytes(account.ledger.update[start]) == encoded


def test_an_exchange_that_outlasts_its_round_keeps_what_it_sends() -> None:
    account = Account(0, (0,), "int4")
    account.train(1)
    account.push()
    update = account.ledger.update
    before = {start: bytes(body) for start, body in update.items()}
    account.commit(set(account.sent))
    account.train(1)
    account.push()
    assert update == before


def test_an_owner_that_lost_an_expert_contributes_it_once_more_then_none() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    account.own(())
    account.push()
    assert announced_groups(account.ledger) == {"shared", "router", "expert.2"}
    account.commit(set(account.sent))
    account.check()
    account.push()
    assert account.ledger.update == {}
    assert account.ledger.pending == TrainedTokens((0,) * LAYOUT.num_experts)


def test_of_a_lost_expert_only_the_parts_that_were_left_out_go_again() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    account.own(())
    account.push()
    its = [index for index, (part, _) in account.sent.items() if part.group.name == "expert.2"]
    left_out = account.sent[its[0]][0]
    assert account.commit(set(account.sent) - {left_out.index}) == 0
    account.check()
    account.push()
    for part, values in account.sent.values():
        assert part.group.name == "expert.2"
        assert np.abs(values).max() > 1e-3 if part.start == left_out.start else np.abs(values).max() == 0
    account.commit(set(account.sent))
    account.check()
    assert np.abs(account.given_up).max() < 1e-5


def test_a_part_that_was_never_pushed_keeps_a_lost_expert_pending() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    account.own(())
    account.push()
    unsent = next(index for index, (part, _) in account.sent.items() if part.group.name == "expert.2")
    del account.sent[unsent]
    assert account.commit(set(account.sent)) == 0
    account.check()
    account.push()
    account.commit(set(account.sent))
    account.check()
    assert np.abs(account.given_up).max() < 1e-5


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2**20 - 1)), min_size=1, max_size=6), st.booleans())
def test_a_part_weighs_what_was_trained_since_a_round_took_it_the_last_time(
    rounds: list[tuple[int, int]], trains_meanwhile: bool
) -> None:
    """`rounds`: steps before each, and which parts it takes; of each group at least the first, every second time an expert's
    parts all: nothing is given up.
    """
    account = Account(0, (0, 3), "none")
    behind = dict.fromkeys((start for _, start, _ in RANGES), 0)
    fresh = 0
    for number, (steps, taken) in enumerate(rounds):
        account.train(steps)
        account.push()
        firsts = {part.group.name: index for index, (part, _) in reversed(account.sent.items())}
        included = {index for index in account.sent if taken >> index % 20 & 1} | set(firsts.values())
        if number % 2:
            included |= {index for index, (part, _) in account.sent.items() if part.group.expert is not None}
        for index, (part, _) in account.sent.items():
            behind[part.start] += steps * TOKENS_PER_STEP + fresh
            expected = behind[part.start]
            weighs = account.ledger.tokens_behind(part)
            if part.group.expert is None:
                assert weighs == expected
            else:
                assert 0 <= weighs - expected // LAYOUT.num_experts <= 2 * len(rounds)
            if index in included:
                behind[part.start] = 0
        if trains_meanwhile:
            account.train(1)
        fresh = TOKENS_PER_STEP * trains_meanwhile
        account.commit(included)
        account.check()


def test_what_is_left_of_a_group_is_pending_though_its_tokens_count_as_included() -> None:
    account = Account(0, (), "none")
    account.train(3)
    account.push()
    left_out = next(index for index, (part, _) in account.sent.items() if part.group.kind == "router")
    account.commit(set(account.sent) - {left_out})
    assert (account.ledger.pending.tokens, account.ledger.max_pending_tokens) == (0, 3 * TOKENS_PER_STEP)
    account.train(1)
    account.push()
    account.commit(set(account.sent))
    assert (account.ledger.pending.tokens, account.ledger.max_pending_tokens) == (0, 0)
    account.check()


def test_an_expert_that_comes_back_before_it_was_sent_brings_its_work_along() -> None:
    account = Account(0, (2,), "none")
    account.train(3)
    work = account.pending()
    account.own(())
    account.own((2,))
    np.testing.assert_allclose(account.pending(), work, atol=1e-6)
    account.check()


def test_weights_are_what_was_trained_since_the_last_inclusion() -> None:
    account = Account(0, (0, 3), "none")
    for _ in range(2):
        account.train(2)
        account.push()
    assert account.ledger.announced.tokens == 4 * TOKENS_PER_STEP
    assert [count > 0 for count in account.ledger.announced.routed] == [True, False, False, True]
    account.commit(set(account.sent))
    assert account.ledger.pending == TrainedTokens((0,) * LAYOUT.num_experts)


@pytest.mark.parametrize(("others", "cosine", "shrink"), [(1.0, 1.0, 1.0), (0.0, 1.0, 0.5), (-1.0, 0.0, 0.0), (3.0, 1.0, 2.0)])
def test_drift_is_this_peers_update_beside_the_bases_step(others: float, cosine: float, shrink: float) -> None:
    account = Account(0, (0, 1), "none")
    account.train(2)
    account.push()
    account.base, new = np.zeros_like(account.base), np.zeros_like(account.base)
    for part, values in account.sent.values():
        new[part.start : part.stop] = (values + np.float32(others) * values) / 2
    accepted = [(part, partial(np.copy, values)) for part, values in account.sent.values()]
    account.ledger.settle(account.trainer, account.base, new, accepted)
    assert set(account.ledger.drift) == {"shared", "router", "expert"}
    for drift in account.ledger.drift.values():
        assert (drift.cosine, drift.shrink) == pytest.approx((cosine, shrink), abs=1e-6)
    account.ledger.settle(account.trainer, new, new, [])
    assert account.ledger.drift == {}


def test_a_phase_whose_loss_was_never_finite_spoils_no_mean() -> None:
    ledger = Ledger(LAYOUT, RANGES, codecs("none"))
    ledger.add_phase(PhaseReport(2, 100, (0,) * 4, 2.0, 0.0, 1.0, (), 0))
    ledger.add_phase(PhaseReport(2, 100, (0,) * 4, float("nan"), 0.0, 1.0, (), 2))
    assert ledger.pending.loss == 2.0
