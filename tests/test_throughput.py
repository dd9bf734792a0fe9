"""The estimate of a line is what it carried while it was full."""

from __future__ import annotations

import pytest

from spes_p2p.net.throughput import FASTEST_BYTES_PER_S, UNKNOWN_BYTES_PER_S, Throughput


def send(line: Throughput, size: int, bytes_per_s: float, begin_s: float, frame: int = 10_000) -> None:
    """A transfer that fills a line of this rate."""
    now = begin_s
    for _ in range(size // frame):
        line.count(frame, now, now + frame / bytes_per_s)
        now += frame / bytes_per_s


@pytest.mark.parametrize("begin_s", [0.0, 3.3])
@pytest.mark.parametrize("rate", [2e5, 2.5e6, 2e7])
def test_a_long_transfer_says_what_the_line_carries(rate: float, begin_s: float) -> None:
    line = Throughput()
    send(line, int(3 * rate), rate, begin_s)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("mbit", [1, 2, 8, 20, 100])
def test_parts_that_take_a_thin_line_for_seconds_are_measured_too(mbit: float, streams: int) -> None:
    """Several streams at once share the line."""
    line, rate, part = Throughput(), 125e3 * mbit, 2**19
    for stream in range(streams):
        send(line, 20 * part, rate / streams, 10 + 0.1 * stream, part)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.15)


def test_what_buffers_take_at_once_counts_little() -> None:
    line, rate = Throughput(), 2.5e6
    for at_once in (0.2, 0.3, 0.4):
        line.count(1_000_000, at_once, at_once)
    send(line, int(20 * rate), rate, 0.4)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


def test_buffers_that_are_filled_a_moment_after_the_beginning_do_not_double_the_estimate() -> None:
    line, rate = Throughput(), 2.5e6
    line.count(1000, 0.3, 0.3)
    line.count(2_000_000, 0.7, 0.7)
    send(line, int(20 * rate), rate, 0.7)
    assert line.bytes_per_s() < 1.9 * rate


def test_a_short_transfer_says_nothing() -> None:
    line = Throughput()
    send(line, 100_000, 1e6, 0.2)
    assert line.bytes_per_s() == UNKNOWN_BYTES_PER_S


def test_a_trickle_of_small_messages_says_nothing() -> None:
    line = Throughput()
    for tenth in range(100):
        line.count(300, tenth / 10, tenth / 10)
    assert line.bytes_per_s() == UNKNOWN_BYTES_PER_S


def test_a_limit_is_believed_before_anything_was_sent() -> None:
    assert Throughput(2.5e6).bytes_per_s() == 2.5e6


def test_the_estimate_follows_a_line_that_changes() -> None:
    line, begin_s = Throughput(), 0.0
    for rate, rounds in ((1e7, 1), (1e6, 6)):
        for _ in range(rounds):
            send(line, int(3 * rate), rate, begin_s)
            begin_s += 20
            found = line.bytes_per_s()
    assert found == pytest.approx(1e6, rel=0.2)


def test_nobody_calls_a_line_slow_after_one_or_two_measurements() -> None:
    line = Throughput()
    told = []
    for begin_s in (0, 20, 40):
        send(line, 300_000, 1e5, begin_s)
        assert line.bytes_per_s() == pytest.approx(1e5, rel=0.1)
        told.append(line.reliable_bytes_per_s)
    assert told == [0, 0, line.last_bytes_per_s]


@pytest.mark.parametrize(("limit", "is_called_slow"), [(None, False), (1e5, True)])
def test_nobody_calls_a_line_slow_for_what_went_to_peers_on_the_same_machine(limit: float | None, is_called_slow: bool) -> None:
    line = Throughput(limit)
    for begin_s in (0, 20, 40, 60):
        send(line, 300_000, 1e5, begin_s)
        for half in range(2 * begin_s, 2 * begin_s + 10):
            line.see({"eth0": 1000 * half}, half / 2)
        assert line.bytes_per_s() == pytest.approx(1e5, rel=0.1), "what a busy processor sent"
    assert (line.reliable_bytes_per_s > 0) is is_called_slow


def test_what_interfaces_sent_counts_where_buffers_took_a_round_at_once() -> None:
    line, rate = Throughput(), 625e3
    line.count(5_000_000, 10.0, 10.2)
    for half in range(60):
        sent = min(max(0, half - 20) * rate / 2, 5_200_000)
        line.see({"eth0": int(sent), "tun0": int(0.9 * sent)}, half / 2)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("busy_s", [2, 8])
def test_pauses_of_an_interface_do_not_count(busy_s: int) -> None:
    line, rate, sent = Throughput(), 2.5e6, 0.0
    for half in range(40):
        line.see({"eth0": int(sent)}, half / 2)
        sent += rate / 2 if 10 <= half < 10 + 2 * busy_s else 500
    line.count(int(busy_s * rate), 5.0, 5.3)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


def test_an_interface_that_peers_on_this_machine_do_not_use_says_nothing() -> None:
    line, rate = Throughput(), 1e7
    send(line, int(8 * rate), rate, 0.0)
    for half in range(20):
        line.see({"eth0": half * 50_000}, half / 2)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("others", [1e5, 2e7])
def test_what_other_programs_send_or_buffers_took_before_says_nothing(others: float) -> None:
    line = Throughput(2.5e6)
    send(line, 1_000_000, 1e5, 0.0)
    for half in range(40):
        line.see({"eth0": int(half / 2 * (1.5e5 + others))}, half / 2)
    assert line.bytes_per_s() == 2.5e6


def test_lines_that_are_faster_than_processors_count_as_alike() -> None:
    found = []
    for rate in (3e7, 3e8):
        line = Throughput(1e9)
        send(line, int(3 * rate), rate, 0.0)
        found.append(line.bytes_per_s())
    assert found == [FASTEST_BYTES_PER_S, FASTEST_BYTES_PER_S]


def buffered_round(line: Throughput, begin_s: float, confirmed: dict[int, float]) -> None:
    """Buffers take 0.8 MB of updates and 1.4 MB of results within two seconds. `confirmed`: bytes by the seconds until then."""
    for tenth in range(20):
        line.count(110_000, begin_s + tenth / 10, begin_s + tenth / 10)
    for size, seconds in confirmed.items():
        line.confirm(size, begin_s, begin_s + seconds)


def test_buffers_that_take_a_whole_round_do_not_hide_a_thin_line() -> None:
    line = Throughput()
    buffered_round(line, 10.0, {300_000: 8.0, 500_000: 14.0})
    assert 125e3 < line.bytes_per_s() < 300e3


def test_a_receiver_that_is_slow_by_itself_says_nothing_about_the_line() -> None:
    alone, line = Throughput(), Throughput()
    buffered_round(alone, 10.0, {})
    buffered_round(line, 10.0, {300_000: 14.0, 500_000: 0.4})
    assert line.bytes_per_s() == alone.bytes_per_s() > 5e5


def test_small_and_prompt_confirmations_change_nothing() -> None:
    alone, line = Throughput(), Throughput()
    buffered_round(alone, 10.0, {})
    buffered_round(line, 10.0, {1000: 14.0, 500_000: 0.9})
    assert line.bytes_per_s() == alone.bytes_per_s()


def test_pauses_in_a_transfer_over_a_line_that_no_buffer_hides_change_nothing() -> None:
    line, rate = Throughput(), 1.25e7
    for begin_s in (10.0, 30.0):
        send(line, int(8 * rate), rate, begin_s)
    line.confirm(int(16 * rate), 10.0, 38.0)
    assert line.bytes_per_s() == pytest.approx(rate, rel=0.1)


def test_a_line_that_was_thin_for_a_busy_moment_is_not_thin_any_more_when_transfers_are_confirmed_promptly() -> None:
    line = Throughput()
    buffered_round(line, 10.0, {300_000: 8.0, 500_000: 14.0})
    thin = line.bytes_per_s()
    for begin_s in (40.0, 60.0, 80.0, 100.0):
        line.count(500_000, begin_s, begin_s)  # too short for a window
        line.confirm(500_000, begin_s, begin_s + 0.1)
        found = line.bytes_per_s()
    assert found > 10 * thin


def test_a_burst_that_a_shaper_lets_pass_makes_no_thin_line_fast() -> None:
    line = Throughput()
    buffered_round(line, 10.0, {300_000: 8.0, 500_000: 14.0, 200_000: 0.05})
    thin = line.bytes_per_s()
    assert thin < 300e3
    line.confirm(200_000, 40.0, 40.05)
    assert line.bytes_per_s() == thin
