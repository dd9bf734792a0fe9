"""When a trainer pauses by itself: rules over given times and measurements."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spes_p2p.campaign.files import read_campaign
from spes_p2p.config.campaign import make_peer_config
from spes_p2p.config.quantities import parse_bytes_per_day, parse_hours
from spes_p2p.data.url_donor import UrlDonor
from spes_p2p.errors import UserError
from spes_p2p.model.build import layout_of
from spes_p2p.observe.events import PAUSE_REASONS, BaseRestored
from spes_p2p.rounds.outer import base_size
from spes_p2p.session.machine_use import CpuTimes, MachineUse, cpu_of_others, gpu_of_others
from spes_p2p.session.own_state import order_pause
from spes_p2p.session.pause_rules import (
    BUSY_S,
    IDLE_S,
    IdleRule,
    Pause,
    Traffic,
    Use,
    outside_hours,
    over_quota,
    quota_forecast,
)
from spes_p2p.session.pausing import Pauses
from spes_p2p.session.resources import join_bytes, require_quota, round_bytes
from spes_p2p.session.text import open_text
from spes_p2p.session.traffic import TrafficMeter

GB = 10**9
NOON = datetime(2026, 3, 1, 12)


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-03-01T{clock}")


# Hours ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hours", "inside", "outside"), [
    ("22-8", ["22:00", "23:59", "00:00", "07:59"], ["08:00", "12:00", "21:59"]),
    ("8-22", ["08:00", "21:59"], ["22:00", "00:00", "07:59"]),
    ("22:30-7:15", ["22:30", "07:14"], ["22:29", "07:15"]),
    ("0-6", ["00:00", "05:59"], ["06:00", "23:59"]),
    ("18-24", ["18:00", "23:59"], ["00:00", "17:59"]),
])
def test_a_trainer_runs_in_its_hours_and_in_no_others(hours: str, inside: list[str], outside: list[str]) -> None:
    parsed = parse_hours(hours, "--hours")
    assert [outside_hours(parsed, at(clock)) for clock in inside] == [None] * len(inside)
    for clock in outside:
        pause = outside_hours(parsed, at(clock))
        assert pause is not None
        assert pause.reason == "hours"


def test_a_pause_says_until_when() -> None:
    pause = outside_hours(parse_hours("22:05-8", "--hours"), NOON)
    assert pause is not None
    assert pause.detail == "until 22:05 (--hours 22:05-8:00)"


@pytest.mark.parametrize("text", ["22", "8-8", "0-24", "25-3", "8-24:30", "8:60-9", "late-early", ""])
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--hours .*22-8"):
        parse_hours(text, "--hours")


# Others use the machine -----------------------------------------------------------------------------------------------

IDLE, BUSY, GAME = Use(0.05), Use(0.5), Use(0.05, gpu=0.6)


def pauses(uses: list[tuple[float, Use]]) -> list[bool]:
    rule, found = IdleRule(), []
    for now_s, use in uses:
        rule.see(use, now_s)
        found.append(rule.pause() is not None)
    return found


@pytest.mark.parametrize("use", [BUSY, GAME])
def test_it_pauses_when_others_use_the_machine_for_long_and_goes_on_when_it_was_idle_for_long(use: Use) -> None:
    back = BUSY_S + 1 + IDLE_S
    seen = [(0, IDLE), (1, use), (BUSY_S, use), (BUSY_S + 1, use), (BUSY_S + 2, IDLE), (back, IDLE), (back + 1, IDLE)]
    assert pauses(seen) == [False, False, False, True, True, True, False]


def test_a_short_burst_neither_starts_nor_ends_a_pause() -> None:
    assert pauses([(0, IDLE), (1, BUSY), (BUSY_S, IDLE), (BUSY_S + 1, BUSY), (2 * BUSY_S, BUSY)]) == [False] * 5
    late = IDLE_S - 1
    assert pauses([(0, BUSY), (1, IDLE), (late, BUSY), (late + 1, IDLE), (2 * late, IDLE)]) == [True] * 5


def test_it_starts_paused_on_a_machine_in_use() -> None:
    assert pauses([(100, BUSY)]) == [True]


@pytest.mark.parametrize(("use", "told"), [
    (BUSY, "until others use at most 20 % of all cores (now 50 %) for 5 min (--only-when-idle)"),
    (GAME, "until others use at most 20 % of all cores (now 5 %) and 10 % of a GPU (now 60 %) for 5 min (--only-when-idle)"),
])
def test_it_says_what_others_use_while_it_waits_for_them(use: Use, told: str) -> None:
    rule = IdleRule()
    rule.see(use, 0)
    assert rule.pause() == Pause("busy", told)


def test_it_pauses_on_battery_at_once_and_no_longer() -> None:
    assert pauses([(0, IDLE), (1, Use(0.0, on_battery=True)), (2, IDLE)]) == [False, True, False]


def test_the_use_by_others_is_all_but_the_own_processes() -> None:
    before, after = CpuTimes(1000, 800, {1: 50.0, 2: 3.0}), CpuTimes(1100, 830, {1: 90.0, 3: 5.0})
    assert cpu_of_others(before, after) == pytest.approx((100 - 30 - 40 - 5) / 100)
    assert cpu_of_others(after, after) == 0


LISTING = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1200     C     98     60      -      -      -      -    python
    0       1300     G     12      4      -      -      -      -    Xorg
    1       1400     C+G   30      9      -      -      -      -    game
    1       1500     G      -      -      -      -      -      -    browser
    2          -     -      -      -      -      -      -      -    -
"""


def test_the_use_of_gpus_by_others_is_that_of_the_busiest() -> None:
    assert gpu_of_others(LISTING, {1200}) == pytest.approx(0.30)
    assert gpu_of_others(LISTING, {1200, 1400}) == pytest.approx(0.12)
    assert gpu_of_others(LISTING, set()) == 1.0
    assert gpu_of_others("NVIDIA-SMI has failed\n", set()) == 0
    assert gpu_of_others("", set()) == 0


@pytest.mark.parametrize(("script", "share"), [
    (f"cat <<'END'\n{LISTING}END", 1.0),
    ("echo NVIDIA-SMI has failed; exit 9", 0.0),
    ("exec sleep 60", 0.0),
], ids=["listing", "failing", "hanging"])
@pytest.mark.long
def test_a_driver_is_asked_what_others_use_and_not_waited_for(
    script: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\n{script}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("spes_p2p.session.machine_use.DRIVER_TIMEOUT_S", 0.5 if "sleep" in script else 10.0)
    assert MachineUse().measure().gpu == share


@pytest.mark.long
def test_this_machine_can_be_measured() -> None:
    use = MachineUse().measure()
    assert 0 <= use.cpu <= 1
    assert 0 <= use.gpu <= 1


# A quota --------------------------------------------------------------------------------------------------------------


def test_it_pauses_before_the_round_that_would_exceed_the_quota() -> None:
    assert over_quota(20 * GB, Traffic("2026-03-01", 18 * GB, GB), NOON) is None
    pause = over_quota(20 * GB, Traffic("2026-03-01", 19 * GB, GB), NOON)
    assert pause is not None
    assert pause.reason == "quota"
    assert "19.0 GB of 20.0 GB" in pause.detail


def test_a_round_that_has_begun_within_the_quota_is_ended() -> None:
    began = Traffic("2026-03-01", round(18.5 * GB), GB, round_began_bytes=18 * GB)
    for used in (round(18.5 * GB), round(19.9 * GB)):
        assert over_quota(20 * GB, replace(began, used_bytes=used), NOON) is None
    assert over_quota(20 * GB, replace(began, used_bytes=20 * GB), NOON) is not None
    assert over_quota(20 * GB, replace(began, round_began_bytes=19 * GB), NOON) is not None
    assert over_quota(20 * GB, replace(began, used_bytes=round(19.5 * GB), round_began_bytes=None), NOON) is not None


def test_a_quota_that_joining_uses_up_is_refused_and_the_one_that_is_named_suffices(campaign: Path, tmp_path: Path) -> None:
    files = replace(read_campaign(campaign), folders=())
    config, shelf = files.campaign.config, open_text(files, tmp_path, None)
    base, one_round = 4 * base_size(layout_of(config.model), config.outer), round_bytes(config, 1)
    text = sum(file.num_bytes for file in files.token_files)  # it is shorter than what a phase may read
    joining = join_bytes(files, shelf, one_round)
    assert joining == round(1.05 * (base + text)) + one_round
    require_quota(make_peer_config(run_dir=tmp_path, quota=joining + 3 * one_round), files, shelf, one_round)
    require_quota(make_peer_config(run_dir=tmp_path), files, shelf, one_round)
    with pytest.raises(UserError, match=r"--quota .*/day: does not suffice to join, .*; give \S+/day or more") as refused:
        require_quota(make_peer_config(run_dir=tmp_path, quota=joining + 3 * one_round - 1), files, shelf, one_round)
    enough = parse_bytes_per_day(str(refused.value).partition("; give ")[2].split()[0], "--quota")
    require_quota(make_peer_config(run_dir=tmp_path, quota=enough), files, shelf, one_round)
    assert "(for joining and about 20 rounds on the first day), or no quota" in str(refused.value)
    assert enough > joining + 20 * 1.5 * one_round, "rounds of small models take more than is planned"


def test_what_joining_takes_is_the_text_that_is_not_here_and_the_rounds_that_were_missed(
    campaign: Path, tmp_path: Path
) -> None:
    files = read_campaign(campaign)
    base = round(1.05 * 4 * base_size(layout_of(files.campaign.config.model), files.campaign.config.outer))
    shelf = open_text(files, tmp_path, None)
    assert join_bytes(files, shelf, 1000) == base + 1000
    assert [join_bytes(files, shelf, 1000, missed) for missed in (0, 2, 5)] == [0, 2000, base + 1000]


def test_joining_is_not_begun_without_quota_for_it_and_counts_in_the_forecast(tmp_path: Path) -> None:
    meter = TrafficMeter(tmp_path)
    meter.follow(os.getpid())
    meter.expect(GB, 5 * GB)
    today = meter.read(NOON)
    assert over_quota(6 * GB, today, NOON) is not None
    assert over_quota(7 * GB, today, NOON) is None
    assert over_quota(7 * GB, replace(today, used_bytes=6 * GB - 1), NOON) is None, "what has begun is ended"
    assert over_quota(7 * GB, replace(today, used_bytes=7 * GB), NOON) is not None
    pause = over_quota(6 * GB, replace(today, used_bytes=GB, joined_bytes=6 * GB), NOON)
    assert pause is not None
    assert pause.detail == "until midnight: 1.00 GB of 6.00 GB used today, joining takes about 5.00 GB (--quota)"
    line = quota_forecast(20 * GB, Traffic("2026-03-01", GB, GB, None, 6 * GB), 0.0, NOON).line
    assert line.startswith("1.00 GB of 20.0 GB used today; joining takes about 5.00 GB; ")
    assert line.endswith("; the rest lasts for 14 or more rounds of at most 1.00 GB")
    tomorrow = replace(today, used_bytes=2 * GB, joined_bytes=6 * GB).on(NOON + timedelta(days=1))
    assert (tomorrow.used_bytes, tomorrow.joining_bytes) == (0, 4 * GB)
    meter.see(BaseRestored(1, 10, 200, 1000, "d", "download"), NOON)
    assert meter.read(NOON).joining_bytes == 0


def test_the_first_round_after_the_base_is_reserved(tmp_path: Path) -> None:
    meter = TrafficMeter(tmp_path)
    meter.follow(os.getpid())
    assert meter.read(NOON).round_began_bytes is None
    meter.see(BaseRestored(1, 10, 200, 1000, "d", "download"), NOON)
    began, now = meter.read(NOON).round_began_bytes, meter.read(NOON).used_bytes
    assert began is not None
    assert now - 10**6 < began <= now


def test_text_from_urls_counts_and_a_round_is_expected_until_one_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = TrafficMeter(tmp_path)
    meter.expect(GB, 0)
    meter.follow(os.getpid())
    before = meter.read(NOON).used_bytes
    monkeypatch.setattr(UrlDonor, "fetched_bytes", UrlDonor.fetched_bytes + 10**9)
    assert meter.read(NOON).used_bytes - before == pytest.approx(1.05e9, rel=0.01)
    assert meter.read(NOON).round_bytes == GB
    line = quota_forecast(20 * GB, Traffic("2026-03-01", 2 * GB, GB), 0.0, NOON).line
    assert "; the rest lasts for 18 or more rounds" in line


def test_the_quota_is_new_the_next_day() -> None:
    used = Traffic("2026-03-01", 25 * GB, GB)
    assert over_quota(20 * GB, used, at("23:59")) is not None
    assert over_quota(20 * GB, used, at("23:59") + timedelta(minutes=1)) is None


@pytest.mark.parametrize(("used", "rate", "end"), [
    (10 * GB, 9 * GB / 7200, "pauses about 14:00, at the mean rate so far"),
    (10 * GB, 1.0, "that lasts for the day"),
    (0, 0.0, "0 B of 20.0 GB used today; the rest lasts for 20 or more rounds of at most 1.00 GB"),
])
def test_it_says_when_the_quota_will_be_used_up(used: int, rate: float, end: str) -> None:
    assert quota_forecast(20 * GB, Traffic("2026-03-01", used, GB), rate, NOON).line.endswith(end)


def test_the_count_survives_a_restart(tmp_path: Path) -> None:
    meter = TrafficMeter(tmp_path)
    meter.follow(os.getpid())
    (tmp_path / "data").write_bytes(bytes(10**6))
    used = meter.read(NOON).used_bytes
    assert used >= 10**6
    meter.save(NOON)
    again = TrafficMeter(tmp_path)
    assert again.read(NOON).used_bytes == used
    assert again.read(NOON + timedelta(days=1)).used_bytes == 0


def test_a_damaged_count_starts_again_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert TrafficMeter(tmp_path).read(NOON).used_bytes == 0
    assert caplog.messages == []
    (tmp_path / "traffic.json").write_bytes(b"\0")
    assert TrafficMeter(tmp_path).read(NOON).used_bytes == 0
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path / 'traffic.json'}: damaged")


NO_QUOTAS = ["20GB", "20GB/week", "0GB/day", "much/day", "-1GB/day", "1e999GB/day", "20GBps/day", "20GB/s/day", "\u0662GB/day"]


@pytest.mark.parametrize("text", NO_QUOTAS)
def test_what_is_no_quota_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--quota {re.escape(repr(text))}: must be a size per day such as 20GB/day"):
        parse_bytes_per_day(text, "--quota")


# Together -------------------------------------------------------------------------------------------------------------


def reason_to_pause(tmp_path: Path, clock: str, **options: object) -> str:
    """Why a trainer does not start at this time; empty if it does."""

    async def start() -> str:
        with closing(Pauses(make_peer_config(run_dir=tmp_path, **options), (), wall_time=at(clock).timestamp)) as pauses:
            pauses.ending.make()
            assert await pauses.over() is (pauses.pause is None)
            return pauses.pause.reason if pauses.pause else ""

    return asyncio.run(start())


@pytest.mark.long
def test_the_reason_is_the_first_that_holds(tmp_path: Path) -> None:
    hours = parse_hours("22-8", "--hours")
    assert reason_to_pause(tmp_path, "23:00", hours=hours) == ""
    assert reason_to_pause(tmp_path, "12:00", hours=hours) == "hours"
    (tmp_path / "traffic.json").write_text('{"day": "2026-03-01", "used_bytes": 100, "round_bytes": 10}')
    assert reason_to_pause(tmp_path, "23:00", hours=hours, quota=105) == "quota"
    (tmp_path / "own_state.json").touch()
    order_pause(tmp_path, True)
    assert reason_to_pause(tmp_path, "12:00", hours=hours, quota=105) == "user"
    assert set(PAUSE_REASONS) == {"user", "hours", "busy", "battery", "quota"}
