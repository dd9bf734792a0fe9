"""Alerts: what is one, and what a webhook is told of it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from synthetic_swarm import Synthetic, synthetic_swarm

from spes_p2p.client.alerts import Alert, alerts, status_document
from spes_p2p.client.dashboard.poll import Published
from spes_p2p.client.dashboard.server import serving
from spes_p2p.client.dashboard.swarm_metrics import MAX_SERIES, NAMES
from spes_p2p.client.dashboard.view import swarm_view
from spes_p2p.client.dashboard.webhook import HOLD_S, Notices, post_alerts
from spes_p2p.config.addresses import check_webhook
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.swarm_status import MAX_SILENT, gather, slow_lines
from spes_p2p.testing.simulate.swarm import campaign

pytestmark = pytest.mark.real_time
EXPERTS = Alert("experts_without_owner", "warning", "no peer trains expert 3")
ROUND_S = 21.0
"""Of a synthetic swarm, whose last round was 9 s ago."""


def found(swarm: Synthetic, later_s: float = 0.0) -> list[tuple[str, str]]:
    return [(each.kind, each.severity) for each in alerts(gather(swarm.statuses), swarm.records, swarm.now + later_s)]


def on_losses(swarm: Synthetic, records: Sequence[RoundRecord], **sections: Any) -> list[Alert]:
    """The alerts of a campaign that evaluates every five rounds."""
    config = campaign(evaluation={"every_rounds": 5}, **sections).config
    return alerts(gather(swarm.statuses), records, swarm.now, config=config)


def changed(swarm: Synthetic, **fields: Any) -> Synthetic:
    return replace(swarm, statuses=[replace(status, **fields) for status in swarm.statuses])


def test_a_healthy_swarm_has_no_alert() -> None:
    assert found(synthetic_swarm(4, 8, 30)) == []
    assert status_document(synthetic_swarm(4, 8, 30).statuses)["alerts"] == []


def test_a_swarm_of_whose_rounds_nothing_is_known_yet_has_no_alert() -> None:
    assert on_losses(synthetic_swarm(4, 8, 30), ()) == []


def test_the_held_out_loss_runs_away_when_three_evaluations_agree() -> None:
    swarm = synthetic_swarm(4, 8, 30)
    for bad_from, expected in ((22, []), (18, [("loss_runs_away", "critical")])):
        records = [
            replace(each, validation_loss=math.nan if each.round % 5 else 9.0 if each.round > bad_from else 4.0)
            for each in swarm.records
        ]
        assert [(each.kind, each.severity) for each in on_losses(swarm, records)] == expected
    [alert] = on_losses(swarm, records)
    assert alert.text == ("the held-out loss runs away: 9.000 after round 30, 4.000 at best in two evaluations in a row; "
                          "the base of round 10 was still good")


def test_the_alert_judges_the_loss_as_the_owners_guard_does() -> None:
    """Of the evaluations that are due, each confirmed by another trainer, since the owner resumed the campaign."""
    swarm = synthetic_swarm(3, 4, 60)

    def records(losses: dict[int, float], pause: int = -1, away: Sequence[int] = ()) -> list[RoundRecord]:
        return [replace(each, validation_loss=losses.get(each.round, math.nan), control="paused" if each.round == pause else "",
                        contributions=each.contributions[:2] if each.round in away else each.contributions)
                for each in swarm.records]

    runs_away = dict.fromkeys((45, 50, 55, 60), 9.0)
    course = {20: 3.70, 25: 3.66, 27: 3.66, 30: 3.832, 35: 3.72, 40: 3.77, **runs_away}
    once_the_last = records(course, away=(27,))  # so it was evaluated, by another trainer than 25
    assert on_losses(swarm, once_the_last)[0].text.endswith("the base of round 35 was still good")
    assert on_losses(swarm, records(course, pause=42)) == []
    course = {15: 3.7, 20: 3.0, 25: 3.0, 30: 3.7, 35: 3.7, 40: 3.7, **runs_away}
    assert on_losses(swarm, records(course))[0].text.endswith("the base of round 20 was still good")
    confirms_itself = records(course, away=(25,))
    assert on_losses(swarm, confirms_itself)[0].text.endswith("the base of round 35 was still good")
    assert on_losses(swarm, confirms_itself, admission="open")[0].text.endswith("the base of round 20 was still good")


@pytest.mark.parametrize(("electors", "away", "severity"), [
    (5, 0, None), (5, 1, None), (5, 2, "warning"), (5, 3, "critical"), (3, 1, "warning"), (4, 1, "warning"), (4, 2, "critical"),
    (1, 0, None), (1, 1, "critical"), (2, 0, None),
])
def test_electors_are_near_a_minority_when_one_more_stops_decisions(electors: int, away: int, severity: str | None) -> None:
    swarm = synthetic_swarm(8, 8, 12)
    ids = [status.peer_id for status in swarm.statuses]
    electorate = (*(f"Qm{'z' * 43}{i}" for i in range(away)), *ids[: electors - away])
    swarm = changed(swarm, electorate=electorate)
    assert found(swarm) == ([("electors_missing", severity)] if severity else [])
    if severity == "warning":
        [alert] = alerts(gather(swarm.statuses), swarm.records, swarm.now)
        assert alert.text.endswith("; if one more is missing, no round is decided")
    if severity == "critical":
        [alert] = alerts(gather(swarm.statuses), swarm.records, swarm.now)
        assert "or the owner's bootstrap peer reforms the swarm (start it if it is down)" in alert.text


def test_a_swarm_without_trainers_is_asleep_and_misses_no_elector() -> None:
    swarm = synthetic_swarm(3, 4, 12)
    away = [status.peer_id for status in swarm.statuses if status.role == "trainer"]
    helper = replace(swarm.statuses[0], peer_id="Qm" + "h" * 44, role="helper", electorate=tuple(away))
    asleep = replace(swarm, statuses=[helper])
    assert found(asleep) == found(asleep, 1e4) == [("no_trainers", "critical")]
    assert math.isfinite(helper.seconds_left)
    assert math.isnan(gather(asleep.statuses).seconds_left)
    assert found(changed(asleep, state="stopped")) == []
    done = changed(asleep, round=helper.total_rounds)
    assert found(done) == []


def test_a_schedule_without_a_vouched_trainer_waits() -> None:
    swarm = changed(synthetic_swarm(3, 4, 12), vouched_alive=0)
    assert found(swarm) == [("no_vouched_trainer", "warning")]
    assert found(changed(swarm, owners=((),))) == [("no_vouched_trainer", "warning")], "strangers go on without experts"
    first = changed(swarm, owners=(), round=0, campaign_step=0, total_rounds=12)
    assert found(first) == [("no_vouched_trainer", "critical")]
    assert found(changed(swarm, vouched_alive=1)) == found(changed(swarm, vouched_alive=None)) == []
    assert found(changed(swarm, round=swarm.statuses[0].total_rounds)) == found(changed(swarm, state="stopped")) == []


def test_no_round_for_three_usual_ones_and_five_minutes() -> None:
    swarm = synthetic_swarm(4, 8, 30)
    last = swarm.now - swarm.records[-1].time
    assert found(swarm, 3 * ROUND_S + 290 - last) == []
    assert found(swarm, 3 * ROUND_S + 310 - last) == [("no_round", "critical")]
    for harmless in (changed(swarm, state="paused"), changed(swarm, total_rounds=30)):
        assert found(harmless, 10_000) == []


def test_experts_without_owner_and_different_bases_are_warnings() -> None:
    swarm = synthetic_swarm(4, 8, 30)
    owners = ((), *swarm.statuses[0].owners[1:])
    swarm = changed(swarm, owners=owners)
    first, *others = swarm.statuses
    swarm = replace(swarm, statuses=[replace(first, base_digest="f" * 64), *others])
    assert found(swarm) == [("experts_without_owner", "warning"), ("bases_differ", "warning")]


# The webhook -------------------------------------------------------------------------------------------------------------


def told(notices: Notices, alert: Alert | None, now: float) -> list[tuple[str, float]]:
    return [(each.event, each.since) for each in notices.update([alert] if alert else [], now)]


def test_an_alert_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    notices = Notices()
    assert [told(notices, EXPERTS, at) for at in (100.0, 130.0, 99 + HOLD_S)] == [[], [], []]
    assert told(notices, EXPERTS, 100 + HOLD_S) == [("begin", 100.0)]
    assert told(notices, replace(EXPERTS, text="no peer trains expert 4"), 500.0) == []
    assert told(notices, None, 600.0) == []
    assert told(notices, None, 600 + HOLD_S) == [("end", 100.0)]
    assert told(notices, None, 900.0) == []


def test_flapping_is_not_told() -> None:
    notices = Notices()
    assert [told(notices, EXPERTS if at % 50 < 25 else None, float(at)) for at in range(0, 1000, 5)] == [[]] * 200
    assert told(notices, EXPERTS, 1000.0) == []
    assert told(notices, EXPERTS, 1000 + HOLD_S) == [("begin", 1000.0)]
    assert [told(notices, EXPERTS if at % 50 < 25 else None, float(at)) for at in range(1100, 2000, 5)] == [[]] * 180


class Receiver:
    """A server that takes notices, or refuses them."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refused = 0
        self.refuses = False

    async def handle(self, request: web.Request) -> web.Response:
        if self.refuses:
            self.refused += 1
            return web.Response(status=503)
        self.taken.append(await request.json())
        return web.Response(status=204)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@asynccontextmanager
async def posting(live: Published) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/secret", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/secret"
    task = asyncio.create_task(post_alerts(url, live, Notices(hold_s=0.0), retry_s=0.05))
    try:
        yield receiver
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


async def test_the_webhook_gets_json_when_an_alert_begins_and_ends() -> None:
    live = Published(state="live", known_alerts=[EXPERTS], view={"campaign": "fable", "campaign_hash": "ab", "round": 7})
    async with posting(live) as receiver:
        await receiver.until(lambda: len(receiver.taken) == 1)
        live.known_alerts = []
        await receiver.until(lambda: len(receiver.taken) == 2)
        begin, end = receiver.taken
        assert (begin.pop("event"), end.pop("event")) == ("begin", "end")
        assert begin.pop("time") <= end.pop("time")
        assert begin == end
        alert = {"kind": EXPERTS.kind, "severity": "warning", "text": EXPERTS.text}
        campaign = {"campaign": "fable", "campaign_hash": "ab", "round": 7}
        assert {name: value for name, value in begin.items() if name != "since"} == {**alert, **campaign}


async def test_a_notice_that_the_url_refuses_is_posted_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    live = Published(state="searching")
    async with posting(live) as receiver:
        receiver.refuses = True
        await receiver.until(lambda: receiver.refused >= 3)
        assert live.webhook_waiting == 1
        receiver.refuses = False
        await receiver.until(lambda: len(receiver.taken) == 1 and live.webhook_waiting == 0)
        assert receiver.taken[0]["kind"] == "nobody_answers"
    assert live.webhook_refusals >= 3
    refused, taken = [record.getMessage() for record in caplog.records if "--webhook" in record.getMessage()]
    assert "answers 503" in refused
    assert taken == "--webhook 127.0.0.1: takes alerts again"
    assert "secret" not in refused


@pytest.mark.parametrize("url", ["", "ftp://a/b", "https://", "http:/a", "https://a b/c", "file:///etc/x", "http://a:x", "a.b"])
def test_a_webhook_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=f"^--webhook {re.escape(repr(url))}: must be an http:// or https:// URL"):
        check_webhook(url)


async def scraped(live: Published) -> list[str]:
    async with serving(live, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        return (await (await session.get(f"{url}metrics")).text()).splitlines()


async def test_prometheus_can_scrape_the_alerts_and_what_a_webhook_refused() -> None:
    lines = await scraped(Published(state="live", known_alerts=[EXPERTS], webhook_refusals=3, webhook_waiting=2))
    assert 'spes_alert{kind="experts_without_owner"} 1.0' in lines
    assert 'spes_alert{kind="no_round"} 0.0' in lines
    assert {"spes_webhook_refusals_total 3.0", "spes_webhook_waiting 2.0"} <= {*lines}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {*NAMES}


async def test_prometheus_gets_the_tokens_of_the_peers_and_teams_with_most_whatever_they_call_themselves() -> None:
    swarm, hostile = synthetic_swarm(MAX_SERIES + 3, 4, 3), 'a"} 9\nspes_alert{kind="x"} 1'
    first, *others = swarm.statuses
    contributions = [replace(each, tokens=10**6 if each.peer == first.peer_id else 5) for each in swarm.totals.contributions]
    totals = replace(swarm.totals, contributions=tuple(contributions))
    view = swarm_view([replace(first, name="Ada", team="owls"), *others], {}, totals, swarm.now)
    next(each for each in view["peers"] if each["peer_id"] == first.peer_id)["name"] = hostile  # records refuse such a name
    lines = await scraped(Published(state="live", view=view))
    peers = [line for line in lines if line.startswith("spes_peer_tokens{")]
    escaped = hostile.replace('"', r'\"').replace("\n", r"\n")
    assert len(peers) == MAX_SERIES
    assert f'spes_peer_tokens{{name="{escaped}",peer="{first.peer_id}"}} 1e+06' in peers
    assert 'spes_team_tokens{team="owls"} 1e+06' in lines
    assert not [line for line in lines if line.startswith('spes_alert{kind="x"}')]


def test_what_was_wrong_when_a_swarm_fell_silent_is_still_wrong() -> None:
    live = Published(state="live", known_alerts=[EXPERTS])
    assert [each.kind for each in live.alerts] == ["experts_without_owner"]
    live.state = "silent"
    assert [each.kind for each in live.alerts] == ["nobody_answers", "experts_without_owner"]


def test_peers_that_leave_a_campaign_that_is_done_are_no_alert() -> None:
    assert Published(state="silent", view={"done": True}).alerts == ()
    assert Published(state="silent", view={"done": False}).alerts != ()


def test_status_json_has_the_alerts_that_need_no_history() -> None:
    status = replace(synthetic_swarm(1, 4, 5).statuses[0], electorate=("Qm" + "z" * 44,))
    [alert] = status_document([status])["alerts"]
    assert (alert["kind"], alert["severity"]) == ("electors_missing", "critical")


def test_a_line_that_rounds_wait_for_is_named_and_one_that_costs_little_is_not() -> None:
    swarm = synthetic_swarm(4, 8, 10)

    def measured(upload: float, exchange_s: float) -> list[tuple[str, str]]:
        seconds = {"train": 10.0, "exchange": exchange_s}
        first, *others = (replace(each, upload=12.5e6, round_seconds=seconds) for each in swarm.statuses)
        return found(replace(swarm, statuses=[replace(first, upload=upload), *others]))

    assert measured(125e3, 8.0) == [("slow_line", "warning")]
    assert measured(125e3, 1.0) == measured(5e6, 8.0) == measured(0.0, 8.0) == []


def test_a_trainer_that_audited_in_place_of_training_has_no_slow_line_for_that() -> None:
    first, *others = synthetic_swarm(4, 8, 10).statuses
    rest = [replace(each, upload=12.5e6, round_seconds={"train": 10.0, "exchange": 2.0}) for each in others]
    auditor = replace(first, upload=125e3, round_seconds={"train": 5.0, "exchange": 2.0})
    assert slow_lines([auditor, *rest]) == ()
    assert slow_lines([replace(auditor, round_seconds={"train": 5.0, "exchange": 3.0}), *rest]) == (first.peer_id,)


def test_a_line_near_the_bound_does_not_flap() -> None:
    swarm = synthetic_swarm(4, 8, 10)
    thin = swarm.statuses[0].peer_id

    def looks(*measured: tuple[float, float]) -> list[bool]:
        """Whether the line is slow at each look, by its upload in units of the bound and the seconds of an exchange."""
        slow: tuple[str, ...] = ()
        found = []
        for upload, exchange_s in measured:
            seconds = {"train": 10.0, "exchange": exchange_s}
            first, *others = (replace(each, upload=12.5e6, round_seconds=seconds) for each in swarm.statuses)
            statuses = [replace(first, upload=upload * 12.5e6 / 4), *others]
            slow = slow_lines(statuses, slow)
            found.append(slow == (thin,))
            assert [each.kind for each in alerts(gather(statuses), swarm.records, swarm.now, slow)] == ["slow_line"] * len(slow)
        return found

    others = [replace(each, upload=12.5e6) for each in swarm.statuses[1:]]
    assert slow_lines(others, (thin,)) == (thin,)
    assert len(slow_lines(others, tuple(f"gone {i}" for i in range(10 * MAX_SILENT)))) == MAX_SILENT
    assert alerts(gather(others), swarm.records, swarm.now, (thin,)) == []
    at_the_bound = ((1.1, 8.0), (0.9, 8.0), (1.1, 8.0), (1.9, 1.3), (2.1, 8.0), (1.1, 8.0))
    assert looks(*at_the_bound) == [False, True, True, True, False, False]
    assert looks((0.9, 2.6), (0.9, 1.3), (0.9, 1.2), (0.9, 2.4)) == [True, True, False, False]
