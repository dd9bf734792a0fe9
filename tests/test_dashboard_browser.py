"""The dashboard in headless Chromium, on a real swarm and on synthetic ones."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from headless import DESKTOP, IN_BROWSER, PATIENCE_S, PHONE, browser_page, contrast, ink_and_paper, luminance, widths
from network_swarm import LocalPeer, LocalPeers, call, write_variant
from recorded_run import run_dir
from synthetic_swarm import Synthetic, synthetic_swarm

from spes_p2p.client.alerts import alerts
from spes_p2p.client.dashboard.own import OwnTrainer
from spes_p2p.client.dashboard.poll import Published
from spes_p2p.client.dashboard.server import serving
from spes_p2p.client.dashboard.view import series, swarm_view
from spes_p2p.client.me import own_share
from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.presence import PeerStatus, Probation
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.tasks import beside
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.swarm_status import gather, slow_lines
from spes_p2p.session.own_state import OwnState, StateFile, is_pause_ordered

pytestmark = IN_BROWSER
CONFIG = load_campaign_config(Path(__file__).parents[1] / "configs/test.yaml")


def look_at(swarm: Synthetic, look: Callable[[Any, Published], Awaitable[None]], **options: Any) -> None:
    """Show a synthetic swarm and look at the page."""

    async def run() -> None:
        live = Published(command="spes-p2p join /ip4/203.0.113.7/tcp/31337/p2p/Qm")
        show(live, swarm)
        async with serving(live, "127.0.0.1", 0) as url, browser_page(url, **options) as page:
            await page.wait_for_selector("#peers tr")
            await look(page, live)

    asyncio.run(run())


def show(live: Published, swarm: Synthetic) -> None:
    live.view = swarm_view(
        swarm.statuses, swarm.by_peer, swarm.totals, swarm.now, slow_lines(swarm.statuses)
    )
    live.by_peer = swarm.by_peer
    live.known_alerts = alerts(gather(swarm.statuses), swarm.records, swarm.now)
    live.curves = series(swarm.records, {}, CONFIG)
    live.curves_version += 1
    live.updated = time.time()
    live.set_state("live", "")


async def value(page: Any, name: str) -> Any:
    return json.loads(await page.get_attribute(f"#{name}", "data-value"))


async def until(page: Any, condition: str) -> None:
    """Wait for a JavaScript condition (the page's own policy forbids playwright's way of doing that)."""
    deadline = time.monotonic() + PATIENCE_S
    while not await page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_64_peers_and_128_experts_fit(viewport: dict[str, int], scheme: str) -> None:
    async def look(page: Any, live: Published) -> None:
        assert await page.locator("#peers tr").count() == 65
        assert await page.locator("#grid .cell").count() == 128
        assert await page.locator("#timeline rect").count() > 64 * 8
        scrolled, shown = await widths(page)
        assert scrolled <= shown
        assert await page.locator("#chart-loss path").count() >= 2

    look_at(synthetic_swarm(64, 128, 380), look, viewport=viewport, scheme=scheme)


def test_light_and_dark_are_readable() -> None:
    papers = []
    for scheme in ("light", "dark"):
        async def look(page: Any, live: Published) -> None:
            for name in ("loss", "campaign_hash", "validation_round"):
                ink, paper = await ink_and_paper(page, f"#{name}")
                assert contrast(ink, paper) >= 4.5
            papers.append(paper)

        look_at(synthetic_swarm(2, 4, 5), look, scheme=scheme)
    assert luminance(papers[0]) > 0.9
    assert luminance(papers[1]) < 0.05


def test_what_peers_say_is_text_and_never_markup() -> None:
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>\"'&"

    def poison(status: PeerStatus) -> PeerStatus:
        return replace(
            status, stage=evil, role="trainer", peer_id=f"{evil}{status.peer_id[-4:]}", campaign=evil, campaign_hash=evil,
            base_digest=evil, failing={evil: 3}, failures={"old": 6}, pending=evil, round_seconds={evil: 1.0},
            owners=((evil,),), electorate=(evil,), task_scores=((evil, evil, 0.5, 0.1),),
        )

    honest = synthetic_swarm(3, 8, 12)
    swarm = replace(honest, statuses=[poison(status) for status in honest.statuses])

    async def look(page: Any, live: Published) -> None:
        assert await page.text_content("#campaign") == evil
        assert await page.locator("img").count() == 0
        assert await page.locator("script").count() == 2  # what is known at first, and the program
        assert "owned" not in (await page.title()).replace(evil, "")
        assert f"{evil} {evil} 0.500 ± 0.100" in await page.text_content("#task_scores")
        assert await page.text_content("#failure_reasons") == f"at round 13, {evil.replace('_', ' ')} 3"
        assert await page.text_content("#control") == f"ordered, not in effect yet: {evil}"

    look_at(swarm, look)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_rounds_and_experts_call_peers_as_the_other_tables_do(viewport: dict[str, int]) -> None:
    named = synthetic_swarm(3, 8, 12)
    peers = [status.peer_id[-6:] for status in named.statuses if status.role == "trainer"]
    names = dict(zip(peers, ("Ada L.", "", "x" * 24), strict=True))
    swarm = replace(named, statuses=[
        replace(status, name=names.get(status.peer_id[-6:], ""), team="") for status in named.statuses
    ])

    async def look(page: Any, live: Published) -> None:
        for chart in ("timeline", "grid"):
            labels = await page.eval_on_selector_all(f"#{chart} text.id", "all => all.map(each => each.firstChild.textContent)")
            assert sorted(labels) == sorted([f"Ada L. {peers[0]}", peers[1], f"{'x' * 9}… {peers[2]}"])
        ends = await page.eval_on_selector_all("#grid text.id", "all => all.map(each => each.getBoundingClientRect().right)")
        assert max(ends) < (await page.locator("#grid .row").first.bounding_box())["x"]
        scrolled, shown = await widths(page)
        assert scrolled <= shown

    look_at(swarm, look, viewport=viewport)


def test_before_the_first_round_the_page_says_how_many_trainers_it_waits_for() -> None:
    made = synthetic_swarm(3, 8, 0)
    waiting = replace(made, statuses=[replace(each, owners=(), owned=(), min_peers=5) for each in made.statuses])

    async def look(page: Any, live: Published) -> None:
        assert await page.text_content("#seconds_left") == "assembling, 3 of 5 trainers so far"

    look_at(waiting, look)


def test_the_page_follows_without_reloading_and_says_when_nobody_answers() -> None:
    async def look(page: Any, live: Published) -> None:
        await page.evaluate("window.loadedOnce = true")
        show(live, synthetic_swarm(4, 8, 21))
        await until(page, "document.getElementById('round').dataset.value === '21'")
        assert await page.locator("#peers tr").count() == 5
        live.set_state("silent", "no peer of the campaign answers; trying again")
        await page.wait_for_selector("#banner:not([hidden])")
        assert "No peer has answered since" in await page.text_content("#banner")
        assert await page.is_visible("#main")
        show(live, synthetic_swarm(4, 8, 22))
        await page.wait_for_selector("#banner", state="hidden")
        assert await page.evaluate("window.loadedOnce")
        assert not await page.is_visible("#note")
        live.note = "no bootstrap peer answers at this address now"
        live.publish()
        await page.wait_for_selector("#note:not([hidden])")
        assert await page.text_content("#note") == live.note

    look_at(synthetic_swarm(3, 8, 20), look)


def test_trouble_is_said_at_the_top() -> None:
    honest = synthetic_swarm(3, 8, 12)
    electorate = ("Qm" + "z" * 44, honest.statuses[0].peer_id, honest.statuses[1].peer_id)
    statuses = [replace(s, owners=((), *s.owners[1:]), electorate=electorate) for s in honest.statuses]

    async def look(page: Any, live: Published) -> None:
        banner = await page.text_content("#banner")
        assert "no peer trains expert 0" in banner
        assert "no answer from 1 of 3 electors (zzzzzz)" in banner
        assert await page.locator("#grid .ownerless").count() == 1

    look_at(replace(honest, statuses=statuses), look)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_peer_has_a_page_with_its_last_rounds_and_an_address(viewport: dict[str, int]) -> None:
    swarm = synthetic_swarm(3, 8, 12)
    status = sorted(swarm.statuses[:3], key=lambda each: each.peer_id)[1]

    async def look(page: Any, live: Published) -> None:
        row = page.locator(f"#peers tr[data-peer='{status.peer_id}']")
        await row.click()
        assert await page.evaluate("location.hash") == f"#peer={status.peer_id}"
        await until(page, "document.querySelectorAll('#peer-rounds tr').length === 9")
        told = await page.text_content("#peer")
        for text in (status.peer_id, " ".join(map(str, status.owned)), "exchange", " up, "):
            assert text in told
        first = await page.locator("#peer-rounds tr").first.inner_text()
        assert first.startswith("12\t")
        assert "164k" in first
        assert await page.locator("#peer-rounds tr").first.locator("rect").count() == 5
        scrolled, shown = await widths(page)
        assert scrolled <= shown
        assert not await page.is_visible("#peers")
        await page.reload()
        await until(page, "document.querySelectorAll('#peer-rounds tr').length === 9")
        await page.click("#peer-page a")
        await row.wait_for(state="visible")
        assert not await page.is_visible("#peer")
        await page.evaluate("location.hash = 'peer=<img src=x>'")
        await until(page, "document.getElementById('peer-now').textContent === 'not among the peers of this campaign'")
        assert await page.locator("img").count() == 0

    look_at(swarm, look, viewport=viewport)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_an_open_campaigns_page_says_whom_the_owner_vouches_for_and_how_far_the_others_are(viewport: dict[str, int]) -> None:
    swarm = synthetic_swarm(4, 8, 30)
    vouched, waiting, past, failed, helper = swarm.statuses
    told = (Audited(29, failed.peer_id, False, 4, 0.31, 1.0), Audited(28, waiting.peer_id, True, 4, 0.978, 1.0))
    of_open = [
        replace(vouched, standing="vouched", audits=told),
        replace(waiting, standing="newcomer", probation=Probation(4, 10, 0, 1)),
        replace(past, standing="proven", probation=Probation(30, 10, 2, 1)),
        replace(failed, standing="newcomer", probation=Probation(12, 10, 0, 1)), helper,
    ]

    async def look(page: Any, live: Published) -> None:
        assert await page.locator("th:visible", has_text="standing").count() == 0
        show(live, replace(swarm, statuses=of_open))
        await until(page, "document.body.classList.contains('open-campaign')")

        async def cells(peer: str) -> list[str]:
            row = page.locator(f"#peers tr[data-peer='{peer}']")
            return [await row.locator("td.open").nth(place).text_content() for place in (0, 2)]

        ids = [each.peer_id for each in of_open]
        assert [await cells(peer) for peer in ids] == [
            ["vouched", "-"], ["4/10 rounds + audit", "passed 0.98"], ["past probation", "passed"],
            ["10/10 rounds + audit", "failed 0.31"], ["-", "-"],
        ]
        title = await page.locator(f"#peers tr[data-peer='{ids[2]}'] td.open").nth(2).get_attribute("title")
        assert title == "2 audits passed; the last is some rounds ago"
        assert await page.locator("th:visible", has_text="standing").count() == 1
        scrolled, shown = await widths(page)
        assert scrolled <= shown
        await page.click(f"#peers tr[data-peer='{ids[1]}']")
        await page.wait_for_selector("#peer > *")
        facts = await page.inner_text("#peer")
        assert "on probation: work in 4 of 10 rounds, and needs a passed audit" in facts
        assert "passed the audit of round 28: its update has cosine 0.98 with that of training its phase again" in facts

    look_at(swarm, look, viewport=viewport)


def test_two_rounds_are_compared_and_thin_lines_come_first() -> None:
    swarm = synthetic_swarm(4, 8, 30)
    uploads = (30e6, 1e6, 20e6, 30e6, 0.0)
    swarm = replace(swarm, statuses=[replace(each, upload=up) for each, up in zip(swarm.statuses, uploads, strict=True)])

    async def look(page: Any, live: Published) -> None:
        parts = {record.round: {"a": {"train": 1.0 * record.round, "exchange": 2.0}} for record in swarm.records}
        live.curves = series(swarm.records, {}, CONFIG, stages=parts)
        live.curves_version += 1
        live.publish()
        await until(page, "document.querySelector('#round-b').closest('tr').children[1].textContent === '32.0 s'")
        await page.fill("#round-a", "10")
        change = "round 30 against round 10: train +20.0 s"
        await until(page, f"document.querySelector('#compare-readout').textContent === '{change}'")
        assert await page.locator("#round-a").locator("xpath=../..").locator("rect").count() == 5
        await page.fill("#round-a", "99999")
        await until(page, "document.querySelector('#round-a').closest('tr').children[1].textContent === '32.0 s'")
        first = await page.locator("#lines tr").first.inner_text()
        assert first.startswith(swarm.statuses[1].peer_id[-6:])
        assert "8.00 Mbit/s, rounds wait for it" in first

    look_at(swarm, look)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_one_moves_through_what_the_model_wrote(viewport: dict[str, int]) -> None:
    evil, swarm = "<img src=x onerror=document.title='owned'>", synthetic_swarm(2, 4, 30)
    told = {10: ("one", evil), 20: ("two", evil), 30: ("three" + 300 * "y", evil)}

    async def look(page: Any, live: Published) -> None:
        assert not await page.is_visible("#writes-panel")
        records = [replace(record, continuations=told.get(record.round, ())) for record in swarm.records]
        idle = "nothing else on their machines wants"
        for newest, every, late in ((9, 10, "nothing yet: peers"), (10, 5, "; nothing newer: peers"), (20, 5, ""), (30, 5, "")):
            evaluation = CONFIG.evaluation.model_copy(update={"prompts": ("The house", evil), "every_rounds": every})
            live.curves = series(records[: newest + 1], {}, CONFIG.model_copy(update={"evaluation": evaluation}))
            live.curves_version += 1
            live.publish()
            last = newest // 10 * 10 or "null"
            await until(page, f"document.querySelector('#writes-readout').dataset.value === '{last}'")
            readout = await page.inner_text("#writes-readout")
            assert (late in readout, idle in readout) == (True, newest < 20)
        scrolled, shown = await widths(page)
        assert scrolled <= shown
        await page.focus("#writes-round")
        await page.keyboard.press("ArrowLeft")
        assert await value(page, "writes-readout") == 20
        assert await page.locator("#writes div").all_inner_texts() == ["The housetwo", evil + evil]
        await page.keyboard.press("Home")
        live.curves_version += 1
        live.publish()
        await asyncio.sleep(0.2)
        assert await value(page, "writes-readout") == 10
        assert await page.locator("img").count() == 0

    look_at(swarm, look, viewport=viewport)


def test_a_click_pauses_and_resumes_ones_own_trainer_with_the_token_of_the_address(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, synthetic_swarm(2, 4, 3).records)
    state = StateFile(folder)
    state.write(OwnState("running", 0.0))
    RSAIdentity(folder / "identity.key")

    async def run() -> None:
        live, own = Published(), OwnTrainer(folder)
        live.set_state("searching", "")
        async with serving(live, "127.0.0.1", 0, own) as url, beside(own.watch(live)):
            async with browser_page(url) as page:
                await page.wait_for_selector("#own-state >> text=running")
                assert not await page.is_visible("#own-order")
            async with browser_page(f"{url}#token={own.token}") as page:
                assert own.token not in await page.evaluate("location.href")
                for label, pauses in (("Pause", True), ("Resume", False)):
                    await page.click(f"#own-order >> text={label}")
                    await until(page, f"document.getElementById('own-order').textContent !== '{label}'")
                    assert is_pause_ordered(folder) == pauses

    asyncio.run(run())
    state.close()


def test_ones_own_trainer_is_paused_and_has_not_left() -> None:
    swarm = synthetic_swarm(3, 4, 5)
    mine, other, *here = swarm.statuses

    async def look(page: Any, live: Published) -> None:
        share = own_share([], mine.peer_id, 5, OwnState("paused", 0.0), 0.0)
        live.own = {"state": "paused: until 22:00 (--hours 22-8)", "pauses": False, "share": to_json(share)}
        show(live, replace(swarm, statuses=here))
        await until(page, "document.querySelectorAll('#peers tr.gone').length === 2")
        for peer, state in ((mine, "paused"), (other, "left")):
            assert await page.locator(f'#peers tr[data-peer="{peer.peer_id}"] td').nth(1).inner_text() == state
        assert await page.inner_text("#peers-note") == "1 peer that contributed has left; the work stays in the base"

    look_at(swarm, look)


def test_the_first_paint_shows_what_is_known_before_any_event_comes() -> None:
    evil, swarm = "</script><img src=x onerror=document.title='owned'>", synthetic_swarm(2, 4, 30)
    live = Published()
    show(live, replace(swarm, statuses=[replace(each, campaign=evil) for each in swarm.statuses]))

    async def run() -> None:
        async with serving(live, "127.0.0.1", 0) as url, browser_page("about:blank") as page:
            await page.route("**/events", lambda route: None)
            await page.goto(url)
            assert await page.inner_text("#round") == f"round 30 of {swarm.statuses[0].total_rounds}"
            assert await page.inner_text("#campaign") == evil
            assert await page.locator("#chart-loss path").count() == 2
            assert "live" in await page.inner_text("#state")

    asyncio.run(run())


def test_a_dashboard_without_a_swarm_looks_for_it() -> None:
    async def run() -> None:
        live = Published()
        live.set_state("searching", "no peer answers at /ip4/127.0.0.1/tcp/9; tried 3 times, trying again")
        async with serving(live, "127.0.0.1", 0) as url, browser_page(url) as page:
            await until(page, "document.getElementById('searching-message').textContent.includes('tried 3 times')")
            assert "Looking for the swarm" in await page.text_content("#searching")
            assert await page.evaluate("document.querySelector('header').offsetHeight") < 60
            assert not await page.is_visible("#main")

    asyncio.run(run())


def test_the_join_line_is_copied() -> None:
    async def look(page: Any, live: Published) -> None:
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.click("#copy")
        await until(page, "document.getElementById('copy').textContent === 'Copied'")
        assert await page.evaluate("navigator.clipboard.readText()") == live.command

    look_at(synthetic_swarm(2, 4, 5), look)


def test_a_complete_campaign_without_trainers_offers_the_model_and_shows_no_missing_owners() -> None:
    async def look(page: Any, live: Published) -> None:
        assert await page.is_hidden("#take")
        assert await page.is_visible("#experts-panel")
        swarm = synthetic_swarm(2, 4, 5)
        done = [replace(each, round=each.total_rounds) for each in swarm.statuses if each.role != "trainer"]
        show(live, replace(swarm, statuses=done))
        await until(page, "!document.getElementById('take').hidden")
        assert await page.is_hidden("#experts-panel")
        assert await page.is_hidden("#rounds-panel")
        assert await page.text_content("#electors") == "1 helper · 3 electors"

    look_at(synthetic_swarm(2, 4, 5), look)


# A real swarm behind it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swarm(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """Two trainers in a campaign whose rounds last longer than a look at them."""
    training, merge = {"total_steps": 400_000, "sync_steps": 800}, {"merge_interval": 800}
    config = write_variant(campaign, "long.yaml", training=training, merge=merge)
    with LocalPeers(tmp_path_factory.mktemp("swarm")) as peers:
        address = peers.bootstrap(config).address
        for name in ("peer-0", "peer-1"):
            peers.join(name, address)
        peers.wait_for_round(1, 240)
        yield peers


@pytest.fixture(scope="module")
def dashboard(swarm: LocalPeers) -> LocalPeer:
    """The command, as a user starts it."""
    process = swarm.run("dashboard", ["dashboard", swarm["bootstrap"].address, "--port", "0"], run_dir_option=False)
    swarm.wait(lambda: dashboard_url(process), PATIENCE_S, "the dashboard says its address")
    return process


def dashboard_url(process: LocalPeer) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/", process.log)
    return found.group() if found else ""


SAME = (
    "campaign", "campaign_hash", "round", "campaign_step", "total_tokens", "loss", "validation_loss", "validation_round",
    "round_tokens", "base_digest", "digests_equal",
)


@pytest.mark.slow
def test_values_on_the_page_equal_status_json(swarm: LocalPeers, dashboard: LocalPeer) -> None:
    async def run() -> None:
        async with browser_page(dashboard_url(dashboard)) as page:
            await page.wait_for_selector("#peers tr")
            deadline = time.monotonic() + PATIENCE_S
            while True:
                before = await asyncio.to_thread(status, swarm)
                shown = {name: await value(page, name) for name in SAME}
                owners = await page.eval_on_selector_all("#grid .cell", "cells => cells.map(c => +c.dataset.expert)")
                peers = await page.eval_on_selector_all("#peers tr", "rows => rows.map(row => row.dataset.peer)")
                traffic = await value(page, "traffic")
                different = {name: (before[name], shown[name]) for name in SAME if before[name] != shown[name]}
                if not different:
                    break
                assert time.monotonic() < deadline, different
            assert sorted(owners) == [0, 1, 2, 3]
            assert sorted(peers) == sorted(peer["peer_id"] for peer in before["peers"])
            assert traffic == before["round_sent_bytes"]
            assert swarm["bootstrap"].address in await page.text_content("#command")

    asyncio.run(run())


@pytest.mark.slow
def test_it_shows_the_next_round_by_itself_with_its_curve_and_stages(swarm: LocalPeers, dashboard: LocalPeer) -> None:
    async def run() -> None:
        async with browser_page(dashboard_url(dashboard)) as page:
            await page.wait_for_selector("#peers tr")
            seen = await value(page, "round")
            await until(page, f"+document.getElementById('round').dataset.value > {seen}")
            await page.wait_for_selector("#timeline .f-exchange")
            assert await page.locator("#chart-loss path.s-blue").count() == 1
            shares = [json.loads(text) for text in await page.eval_on_selector_all(
                "#peers b", "cells => cells.map(cell => cell.dataset.value)")]
            assert sum(shares) == pytest.approx(1.0)

    asyncio.run(run())


def status(swarm: LocalPeers) -> dict[str, Any]:
    ended = call("status", swarm["bootstrap"].address, "--json")
    assert ended.code == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document
