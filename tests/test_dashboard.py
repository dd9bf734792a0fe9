"""The dashboard's data and server, without a browser: what a page is told of swarms of any size, and of none."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import aiohttp
import pytest
from electors import commit_after, genesis
from network_swarm import COMMAND_TIMEOUT_S, START_TIMEOUT_S, LocalPeers, call, write_variant
from synthetic_swarm import synthetic_swarm

from spes_p2p.client import connection
from spes_p2p.client.alerts import alerts, status_document
from spes_p2p.client.dashboard.card import status_card
from spes_p2p.client.dashboard.poll import Published, SwarmHistory
from spes_p2p.client.dashboard.schedule import schedule
from spes_p2p.client.dashboard.server import content_policy, make_app, run_dashboard, serving
from spes_p2p.client.dashboard.view import MAX_GONE, MAX_POINTS, peer_rounds, series, swarm_view, thinned
from spes_p2p.config.campaign import load_campaign_config
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Change, Control
from spes_p2p.messages.presence import Contact, Contribution, HistoryPage, Named, PeerStatus
from spes_p2p.net.tasks import beside
from spes_p2p.observe.rounds import totals_of
from spes_p2p.observe.swarm_status import gather, swarm_status

pytestmark = pytest.mark.real_time
CONFIG = load_campaign_config(Path(__file__).parents[1] / "configs/test.yaml")
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PAGE = Path(__file__).parents[1] / "spes_p2p/client/dashboard/page.html"


LEFT_OUT = ("owners", "members", "electorate", "stages", "scores", "audits", "continuations", "name", "team")


def view_of(peers: int, experts: int, rounds: int = 20) -> dict[str, Any]:
    swarm = synthetic_swarm(peers, experts, rounds)
    return swarm_view(swarm.statuses, swarm.by_peer, swarm.totals, swarm.now)


def as_json(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def test_the_view_says_the_same_as_status_json() -> None:
    swarm = synthetic_swarm(5, 16, 30)
    view = swarm_view(swarm.statuses, swarm.by_peer, swarm.totals, swarm.now)
    status = swarm_status(swarm.statuses)
    different = {"peers", "owners"}
    assert {name: view[name] for name in status if name not in different} == {
        name: value for name, value in status.items() if name not in different
    }
    ids = [peer["peer_id"] for peer in view["peers"]]
    assert [[ids[place] for place in owners] for owners in view["owners"]] == status["owners"]
    for shown, said in zip(view["peers"], status["peers"], strict=True):
        assert {name: shown[name] for name in said if name not in LEFT_OUT} == {
            name: value for name, value in said.items() if name not in LEFT_OUT
        }


@pytest.mark.long
def test_64_peers_and_128_experts_are_a_message_of_moderate_size() -> None:
    swarm = synthetic_swarm(64, 128, 2000, total_rounds=4000)
    view = swarm_view(swarm.statuses, swarm.by_peer, swarm.totals, swarm.now)
    curves = series(swarm.records, {}, CONFIG)
    assert (len(view["peers"]), len(view["owners"])) == (65, 128)
    assert len(as_json(view)) < 300_000
    assert len(as_json(curves)) < 100_000
    assert len(curves["rounds"]["round"]) == MAX_POINTS
    assert curves["rounds"]["round"][-1] == 2000


def test_what_the_model_writes_is_sent_for_a_bounded_number_of_rounds() -> None:
    records = [replace(record, continuations=(400 * "x",)) for record in synthetic_swarm(2, 4, 500).records]
    evaluation = CONFIG.evaluation.model_copy(update={"prompts": ("The house",)})
    curves = series(records, {}, CONFIG.model_copy(update={"evaluation": evaluation}))
    rounds = [number for number, texts in curves["continuations"] if texts == [400 * "x"]]
    assert curves["prompts"] == ["The house"]
    assert (len(rounds), rounds[-1], rounds == sorted(set(rounds))) == (100, 500, True)
    assert series(synthetic_swarm(2, 4, 5).records, {}, CONFIG)["continuations"] == []


def test_a_timeline_is_made_of_spans_that_follow_each_other_and_end_now() -> None:
    for peer in view_of(3, 4)["peers"][:3]:
        spans = peer["timeline"]
        assert spans[-1][0] == "train"
        assert spans[-1][2] == 0
        assert all(began >= ended for _, began, ended in spans)
        assert [phase for phase, _, _ in spans[:5]] == ["train", "announce", "exchange", "commit", "apply"]
        for before, after in pairwise(spans[:5]):
            assert before[2] == pytest.approx(after[1], abs=0.02)


def test_the_round_under_way_is_on_the_timeline_too() -> None:
    swarm = synthetic_swarm(1, 1, 2)
    waits = replace(swarm.statuses[0], stage="exchanging", stages=(("training", 9.0), ("announcing", 3.0), ("exchanging", 1.0)))
    [peer] = swarm_view([waits], {}, swarm.totals, swarm.now)["peers"]
    assert peer["timeline"] == [("train", 9.0, 3.0), ("announce", 3.0, 1.0), ("exchange", 1.0, 0.0)]


def test_who_is_gone_keeps_its_share_of_the_work() -> None:
    swarm = synthetic_swarm(4, 8, 10)
    left = swarm.statuses[0].peer_id
    view = swarm_view([status for status in swarm.statuses if status.peer_id != left], swarm.by_peer, swarm.totals, swarm.now)
    assert [peer["peer_id"] for peer in view["gone"]] == [left]
    assert sum(peer["tokens"] for peer in (*view["peers"], *view["gone"])) == view["total_tokens"]


def test_strangers_that_come_and_go_do_not_lengthen_the_page_for_ever() -> None:
    swarm = synthetic_swarm(4, 8, 3)
    strangers = [Contribution(f"stranger {i}", i, 1) for i in range(1, 10 * MAX_GONE)]
    names = {each.peer: Named(each.peer, f"name {each.tokens}", f"team {each.tokens}") for each in strangers}
    totals = replace(swarm.totals, contributions=(*swarm.totals.contributions, *strangers), names=names)
    view = swarm_view(swarm.statuses, swarm.by_peer, totals, swarm.now)
    assert (len(view["gone"]), len(view["teams"]), view["left"]) == (MAX_GONE, MAX_GONE, len(strangers))
    assert view["gone"][0]["peer_id"] == strangers[-1].peer
    assert view["contributed"] == totals.tokens, "the shares are of all"


def test_peers_here_and_gone_have_their_names_and_count_for_their_teams() -> None:
    swarm = synthetic_swarm(4, 8, 10)
    left, here = (status.peer_id for status in swarm.statuses[:2])
    totals = replace(swarm.totals, names={left: Named(left, "Ada", "owls"), here: Named(here, "", "Owls")})
    view = swarm_view(swarm.statuses[1:], swarm.by_peer, totals, swarm.now)
    shown = {peer["peer_id"]: (peer["name"], peer["team"]) for peer in (*view["peers"], *view["gone"])}
    assert {peer: called for peer, called in shown.items() if any(called)} == {left: ("Ada", "owls"), here: ("", "Owls")}
    tokens = sum(peer["tokens"] for peer in (*view["peers"], *view["gone"]) if peer["peer_id"] in (left, here))
    [(_, members, of_team)] = view["teams"]
    assert (members, of_team) == (2, tokens)


def test_tokens_a_second_are_a_rounds_tokens_by_the_time_since_the_round_before() -> None:
    records = synthetic_swarm(2, 4, 6).records
    curves = series([record for record in records if record.round != 3], {5: {"a": (10, 1), "b": (20, 3)}}, CONFIG)["rounds"]
    at = {number: i for i, number in enumerate(curves["round"])}
    expected = records[2].tokens / (records[2].time - records[1].time)
    assert curves["tokens_per_second"][at[2]] == pytest.approx(expected)
    assert curves["tokens_per_second"][at[4]] is None
    assert (curves["sent_bytes"][at[5]], curves["received_bytes"][at[5]], curves["sent_bytes"][at[4]]) == (15, 2, None)


def test_the_parts_of_a_round_are_means_over_the_peers_that_trained() -> None:
    told = {2: {"a": {"train": 4.0, "apply": 1.0}, "b": {"train": 8.0}, "helper": {"apply": 9.0}}}
    rounds = series(synthetic_swarm(2, 4, 3).records, {}, CONFIG, stages=told)["rounds"]
    assert (rounds["train"], rounds["apply"]) == ([None, None, 6.0, None], [None, None, 0.5, None])


def test_the_schedule_reaches_from_the_first_step_to_the_last() -> None:
    points = schedule([], CONFIG, None)
    assert (points[0][:2], points[-1][:2]) == ((0, 0), (CONFIG.total_rounds, CONFIG.training.total_steps))
    assert points[0][3] == CONFIG.merge.merge_alpha_start
    assert points[-1][3] == 0
    assert points[-1][2] == pytest.approx(CONFIG.training.learning_rate * CONFIG.training.min_lr_ratio)


def ordered(*changes: tuple[int, str]) -> Control:
    return Control("c", 1, "running", tuple(Change(number, training) for number, training in changes), -1, b"")


def test_the_schedule_follows_the_owners_orders() -> None:
    step, control = CONFIG.training.sync_steps, ordered((4, '{"learning_rate": 1e-5, "sync_steps": 10}'))
    points = schedule([], CONFIG, control)
    before = [point for point in schedule([], CONFIG, None) if point[0] <= 3]
    assert [point for point in points if point[0] < 3] == [point for point in before if point[0] < 3]
    assert all(rate <= 1e-5 for number, _, rate, _ in points if number > 3)
    assert {at for number, at, _, _ in points if number == 3} == {3 * step}
    assert points[-1][0] == 3 + (CONFIG.training.total_steps - 3 * step) / 10


def test_the_schedule_of_the_past_is_what_was_trained_with() -> None:
    records = [replace(record, learning_rate=record.round * 1e-4) for record in synthetic_swarm(2, 4, 6).records]
    points = schedule(records, CONFIG, ordered((2, '{"learning_rate": 1e-5}')))
    assert [point[2] for point in points[: len(records)]] == [record.learning_rate for record in records]
    assert all(rate <= 1e-5 for _, _, rate, _ in points[len(records) :])


def test_an_order_can_end_the_campaign_before_the_round_of_another() -> None:
    total = CONFIG.training.total_steps
    last = schedule([], CONFIG, ordered((2, f'{{"total_steps": {total // 2}}}'), (10**6, '{"learning_rate": 1}')))[-1]
    assert last[1] == total // 2


@pytest.mark.parametrize("count", [0, 1, 599, 600, 601, 1201, 10_000])
def test_a_thinned_curve_ends_where_the_whole_one_does(count: int) -> None:
    kept = thinned(count, 600)
    assert len(kept) == min(count, 600)
    assert kept == sorted(set(kept))
    assert not count or kept[-1] == count - 1


def test_records_are_put_on_our_clock() -> None:
    record = synthetic_swarm(1, 1, 1).records[1]
    memory = SwarmHistory()
    [heard] = memory.add(HistoryPage(record.time + 5.0, (record,)), now=1000.0)
    assert heard.time == pytest.approx(995.0)
    assert memory.rounds.records[0].time == heard.time


@pytest.mark.parametrize("seconds", [math.nan, 5e-324, -5e-324, -0.0, 1e15, -1e15])
def test_no_number_that_a_member_says_keeps_the_page_from_being_made(seconds: float) -> None:
    swarm = synthetic_swarm(3, 4, 5)
    spent = dict.fromkeys(("train", "announce", "exchange", "commit", "apply"), seconds)
    told = {"loss", "local_loss", "validation_loss", "learning_rate", "merge_alpha", "tokens_per_second", "seconds_left",
            "stage_seconds", "uptime_s", "upload"}
    said: Any = {**dict.fromkeys(told, seconds), "round_seconds": spent, "stages": (("training", seconds),)}
    liar = PeerStatus.from_bytes(replace(swarm.statuses[0], **said, round_received_bytes=2**63 - 1).to_bytes())
    statuses = [liar, *swarm.statuses[1:]]
    records = [replace(record, time=seconds, seconds=tuple(spent.items()), teller=liar.peer_id) for record in swarm.records[1:]]
    memory = SwarmHistory()
    memory.by_peer[liar.peer_id] = memory.add(HistoryPage(5e-324, (swarm.records[0], *records)), swarm.now)
    page = Published(view=swarm_view(statuses, memory.by_peer, totals_of(memory.rounds.records), swarm.now))
    drawn = series(memory.rounds.records, memory.traffic, CONFIG, None, memory.stages)
    warned = status_document(statuses, alerts(gather(statuses), memory.rounds.records, swarm.now, (), CONFIG))
    assert all(map(as_json, (page.document(), drawn, warned, peer_rounds(liar.peer_id, memory.by_peer[liar.peer_id]))))
    assert gather(statuses).tokens_per_second >= gather(swarm.statuses[1:]).tokens_per_second


# The server --------------------------------------------------------------------------------------------------------------


def published(peers: int = 3, experts: int = 8) -> Published:
    swarm = synthetic_swarm(peers, experts, 20)
    live = Published(command="spes-p2p join somewhere")
    live.view = swarm_view(swarm.statuses, swarm.by_peer, swarm.totals, swarm.now)
    live.status = swarm_status(swarm.statuses)
    live.curves, live.curves_version = series(swarm.records, {}, CONFIG), 1
    live.set_state("live", "")
    return live


@asynccontextmanager
async def visiting(live: Published) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with serving(live, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session, asyncio.timeout(20):
        yield session, url


async def test_the_card_has_the_state_of_the_campaign_and_may_be_cached() -> None:
    live = published()
    assert live.view is not None
    async with visiting(live) as (session, url):
        answer = await session.get(f"{url}card.svg")
        assert answer.content_type == "image/svg+xml"
        assert answer.headers["Cache-Control"] == "public, max-age=60"
        assert live.view is not None
        texts = [text.text or "" for text in ElementTree.fromstring(await answer.text()).iter() if "text" in text.tag]
        assert texts[0] == live.view["campaign"]
        assert texts[1] == "round 20 of 400 · 2h13m left"
        assert texts[2].startswith(f"loss {live.view['loss']:.3f} · held-out ")
        assert texts[2].endswith(" · 9.83M tokens · 3 trainers")


@pytest.mark.parametrize(("state", "fields", "detail"), [
    ("live", {"done": True}, "done"), ("live", {"state": "paused"}, "paused"),
    ("live", {"state": "stopped", "done": True}, "stopped"),
    ("silent", {}, "no answer"), ("silent", {"done": True}, "done"), ("live", {"seconds_left": None}, ""),
    ("live", {"waits": True}, "waits"),
])
def test_the_card_says_why_no_time_is_left(state: str, fields: dict[str, Any], detail: str) -> None:
    card = ElementTree.fromstring(status_card({**view_of(2, 4), **fields}, state))
    texts = [text.text or "" for text in card.iter() if "text" in text.tag]
    assert texts[1] == " · ".join(filter(None, ("round 20 of 400", detail)))


def test_a_card_holds_any_name_as_text_and_none_without_a_swarm() -> None:
    name = "</text><script>alert(1)</script>" * 3
    card = ElementTree.fromstring(status_card({**view_of(2, 4), "campaign": name, "loss": None}, "live"))
    assert not [each for each in card.iter() if "script" in each.tag]
    assert any(str(each.text).startswith("</text><script>") and str(each.text).endswith("…") for each in card.iter())
    assert "looking for the swarm" in status_card(None, "searching")


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    name = (await response.content.readline()).decode().removeprefix("event: ").strip()
    data = (await response.content.readuntil(b"\n\n")).decode().removeprefix("data: ")
    return name, json.loads(data)


async def test_every_document_is_served() -> None:
    live = published()
    async with visiting(live) as (session, url):
        for path, expected in (("status.json", live.status), ("series.json", live.curves)):
            async with session.get(url + path) as response:
                assert await response.json() == json.loads(as_json(expected))
        async with session.get(url + "view.json") as response:
            document = await response.json()
        assert (document["state"], document["command"]) == ("live", "spes-p2p join somewhere")
        assert document["swarm"] == json.loads(as_json(live.view))
        async with session.get(url + "nothing") as response:
            assert response.status == 404


async def test_news_reach_an_open_page() -> None:
    live = published()
    async with visiting(live) as (session, url), session.get(url + "events") as response:
        assert (await next_event(response))[0] == "series"
        name, document = await next_event(response)
        assert (name, document["state"]) == ("view", "live")
        live.set_state("silent", "gone")
        assert (await next_event(response))[1]["state"] == "silent"
        live.curves_version += 1
        live.publish()
        assert (await next_event(response))[0] == "series"


async def test_the_page_brings_everything_and_may_load_nothing() -> None:
    async with visiting(Published()) as (session, url):
        async with session.get(url) as response:
            assert response.content_type == "text/html"
            policy = response.headers["Content-Security-Policy"]
            page = await response.text()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page


def test_the_page_has_no_way_to_turn_text_into_markup() -> None:
    page = PAGE.read_text()
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "DOMParser", "srcdoc")
    assert [way for way in ways if way in page] == []
    assert content_policy(page).count("sha256-") == 2


async def test_a_used_port_is_named_and_nothing_else_is_said(recwarn: pytest.WarningsRecorder) -> None:
    async with serving(Published(), "127.0.0.1", 0) as url:
        port = int(url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port} \(it is in use\); choose another --port"):
            await run_dashboard([NOBODY], "127.0.0.1", port, print, webhook="http://127.0.0.1:9/")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "'nonsense': no such folder, and not the address of a peer"),
        ([NOBODY, "--port", "99999"], "--port 99999: must be 0 to 65535"),
        ([NOBODY, "--port", "many"], "--port"),
        ([], "Missing argument"),
        ([NOBODY, "--host", "no.such.host.invalid", "--port", "0"], "--host no.such.host.invalid: not an address"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(arguments: list[str], expected: str) -> None:
    ended = call("dashboard", *arguments)
    assert ended.code == 2
    assert expected in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.network
async def test_without_a_swarm_it_says_so_and_keeps_trying() -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.timeout(60),
        beside(run_dashboard([NOBODY], "127.0.0.1", 0, url.set_result)),
        aiohttp.ClientSession() as session,
        session.get(await url + "events") as response,
    ):
        _, document = await next_event(response)
        assert (document["state"], document["swarm"]) == ("searching", None)
        assert NOBODY in document["message"]
        while "tried 2 times" not in document["message"]:
            _, document = await next_event(response)
        told = f"no peer that has the campaign answers at {NOBODY}; tried 2 times, retrying"
        assert document["message"] == told, "advice for who typed a command that ended has no place on the page"


@pytest.mark.parametrize(("admission", "members"), [("friends", "AB"), ("open", "A")])
async def test_it_connects_again_through_members_and_to_no_other_campaign(
    admission: str, members: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = {peer: f"/ip4/192.0.2.1/tcp/{port}/p2p/Qm{peer * 44}" for port, peer in enumerate("ABC", 1)}
    seen = {peer: Contact("c", 10, "trainer", 0, "", (address,)) for peer, address in at.items()}
    last = commit_after(genesis(("A",)), members=("A", "B"))
    begins, asked = genesis(), list[tuple[str, ...]]()

    async def contacts() -> dict[str, Contact]:
        return seen

    @asynccontextmanager
    async def connected(addresses: Sequence[str], spare: tuple[str, ...]) -> AsyncIterator[Any]:
        asked.append(spare)
        campaign = SimpleNamespace(config=SimpleNamespace(admission=admission))
        yield SimpleNamespace(genesis=begins, log=SimpleNamespace(last=last), campaign=campaign, contacts=contacts)

    monkeypatch.setattr(connection, "connect", connected)
    again = connection.Reconnection()
    async with again.connect([NOBODY], ("own",)) as swarm:
        await again.meet(swarm)
        seen = {}  # who is not seen for a moment stays known
        await again.meet(swarm)
    begins = genesis(helpers=("X",))
    with pytest.raises(UserError, match="another campaign than before"):
        async with again.connect([NOBODY]):
            pass
    assert asked == [("own",), tuple(at[peer] for peer in members)]


@pytest.mark.network
def test_it_finds_the_swarm_again_after_the_only_peer_it_was_given_has_left(campaign: Path, tmp_path: Path) -> None:
    config = write_variant(campaign, "alone.yaml", training={"total_steps": 400_000}, sync={"min_peers": 1})
    with LocalPeers(tmp_path) as peers:
        address = peers.bootstrap(config).address
        peers.join("peer-0", address)
        page = peers.run("dashboard", ["dashboard", address, "--port", "0"], run_dir_option=False)
        peers.wait(lambda: "http://" in page.log, START_TIMEOUT_S, "the dashboard says its address")
        url = page.log[page.log.index("http://") :].split()[0]

        def shown() -> dict[str, Any]:
            with urllib.request.urlopen(f"{url}view.json", timeout=COMMAND_TIMEOUT_S) as answer:
                document: dict[str, Any] = json.load(answer)
                return document

        peers.wait(lambda: shown()["state"] == "live" and shown()["swarm"]["round"] > 0, 240, "a round on the page")
        peers.terminate("bootstrap")
        for daemon in page.children():  # as when its machine sleeps, its connections are gone
            daemon.kill()
        peers.wait(lambda: shown()["state"] == "silent", 60, "the page says that nobody answers")
        seen = shown()["swarm"]["round"]
        peers.wait(lambda: shown()["state"] == "live" and shown()["swarm"]["round"] > seen, 60, "later rounds on the page")


def test_unknown_numbers_are_null() -> None:
    assert math.isnan(synthetic_swarm(1, 1, 1).statuses[-1].local_loss)
    assert view_of(1, 1)["peers"][-1]["local_loss"] is None
    assert make_app(Published()) is not None
