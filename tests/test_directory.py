"""The page with the state of several campaigns."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest
from network_swarm import LocalPeers
from prometheus_client.parser import text_string_to_metric_families
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.dashboard.directory import directory_app, directory_page, run_directory
from spes_p2p.client.dashboard.listed import Listed, seen
from spes_p2p.client.dashboard.poll import NO_ANSWER_THERE
from spes_p2p.client.dashboard.server import listening
from spes_p2p.net.tasks import beside
from spes_p2p.observe.json_values import to_json

pytestmark = pytest.mark.real_time
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LIVE = Listed([NOBODY], answers=True, updated=1e9, seen=seen(synthetic_swarm(3, 8, 20).statuses, NOBODY))


class Texts(HTMLParser):
    """The page's tags and its texts, as a browser reads them."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_a_campaign_is_listed_with_its_state_and_the_command_to_join() -> None:
    text = Texts(directory_page([LIVE], 0.0)).text
    assert "no bootstrap peer answers" not in text
    noted = replace(LIVE, seen=seen(synthetic_swarm(3, 8, 20).statuses, NOBODY, NO_ANSWER_THERE))
    assert NO_ANSWER_THERE in Texts(directory_page([noted], 0.0)).text
    figures = ("20", "of 400", "9.83M", "3", "1 helper", "2h13m left")
    for each in ("1 campaign, 1 live", "fable-1b", *figures, f"spes-p2p join {NOBODY}"):
        assert f"{each}\n" in text
    assert "no answer" not in text


def test_a_campaign_that_is_done_offers_its_model() -> None:
    done = seen([replace(each, total_rounds=20) for each in synthetic_swarm(3, 8, 20).statuses], NOBODY)
    text = Texts(directory_page([replace(LIVE, seen=done)], 0.0)).text
    assert "done\n" in text
    assert f"spes-p2p export --from {NOBODY} --output checkpoint\n" in text


def test_one_that_does_not_answer_shows_that_with_its_last_state() -> None:
    listed = [replace(LIVE, answers=False), Listed([NOBODY], problem="it is off"), Listed([NOBODY])]
    text = Texts(directory_page(listed, 0.0)).text
    assert "3 campaigns, 0 live\n" in text
    assert "no answer since 2001-09-09 01:46 UTC\n" in text
    assert "fable-1b\n" in text
    assert f"unknown campaign\nno answer\n{NOBODY}\nit is off\n" in text
    assert "unknown campaign\nlooking for its peers\n" in text


def test_a_campaign_without_trainers_says_so() -> None:
    assert LIVE.seen is not None
    asleep = replace(LIVE, seen=replace(LIVE.seen, trainers=0, seconds_left=math.nan))
    text = Texts(directory_page([asleep, replace(LIVE, seen=replace(LIVE.seen, trainers=0, state="paused"))], 0.0)).text
    assert "no trainers\n" in text
    assert "paused\n" in text
    assert "running\n" not in text


def test_a_campaign_that_waits_has_no_time_left() -> None:
    waits = seen([replace(each, vouched_alive=0) for each in synthetic_swarm(3, 8, 20).statuses], NOBODY)
    text = Texts(directory_page([replace(LIVE, seen=waits)], 0.0)).text
    assert ("waits\n" in text, "left\n" in text) == (True, False)


def test_programs_get_no_time_of_an_answer_before_the_first() -> None:
    assert [each["updated"] for each in to_json([Listed([NOBODY]), LIVE])] == [None, 1e9]


def test_what_peers_say_is_text_and_never_markup() -> None:
    assert LIVE.seen is not None
    name = '"><script>alert(1)</script>BODY'
    hostile = replace(LIVE.seen, campaign=name, campaign_hash="<b>", state="<i>", command="<u>", validation_loss=math.nan,
                      round=2**60, total_rounds=0, total_tokens=2**62, tokens_per_second=math.inf)
    page = Texts(directory_page([replace(LIVE, seen=hostile)], 0.0))
    assert not page.tags & {"script", "b", "u"}
    for each in (name, "<b>", "<i>", "<u>"):
        assert f"{each}\n" in page.text


async def test_the_page_may_load_and_run_nothing_and_programs_get_the_same() -> None:
    async with listening(directory_app([LIVE]), "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        answer = await session.get(url)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src ;" in policy
        assert "unsafe" not in policy
        assert "fable-1b" in await answer.text()
        [entry] = await (await session.get(f"{url}directory.json")).json()
        assert (entry["answers"], entry["seen"]["round"]) == (True, 20)


async def test_prometheus_gets_each_campaigns_figures_while_it_answers() -> None:
    assert LIVE.seen is not None
    odd = replace(LIVE.seen, campaign='na"me\n\\', validation_loss=math.nan)
    listed = [LIVE, Listed(["odd"], True, 1e9, seen=odd), replace(LIVE, addresses=["silent"], answers=False), Listed(["new"])]
    async with listening(directory_app(listed), "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        text = await (await session.get(f"{url}metrics")).text()
    found = {
        (sample.name, sample.labels["address"]): (sample.value, sample.labels)
        for family in text_string_to_metric_families(text) for sample in family.samples
    }
    assert [found["spes_listed_up", each][0] for each in (NOBODY, "odd", "silent", "new")] == [1, 1, 0, 0]
    assert {address for name, address in found if name != "spes_listed_up"} == {NOBODY, "odd"}
    assert found["spes_listed_round", NOBODY][0] == 20
    assert found["spes_listed_planned_rounds", NOBODY][0] == 400
    assert [found[f"spes_listed_{role}", NOBODY][0] for role in ("trainers", "helpers")] == [3, 1]
    assert found["spes_listed_info", "odd"][1]["campaign"] == odd.campaign
    assert math.isnan(found["spes_listed_validation_loss", "odd"][0])
    documented = (Path(__file__).parents[1] / "docs" / "dashboard.md").read_text()
    for name, _ in found:
        assert name in documented or f"`{name.removeprefix('spes_listed')}`" in documented


@pytest.mark.network
async def test_a_dead_campaign_delays_no_other(campaign: Path, tmp_path: Path) -> None:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with LocalPeers(tmp_path) as peers:
        addresses = [[NOBODY], [peers.bootstrap(campaign).address]]
        async with asyncio.timeout(120), beside(run_directory(addresses, "127.0.0.1", 0, url.set_result)):
            async with aiohttp.ClientSession() as session:
                while True:
                    dead, alive = await (await session.get(f"{await url}directory.json")).json()
                    if alive["answers"] and dead["problem"]:
                        break
                    await asyncio.sleep(0.1)
            assert (dead["answers"], dead["seen"]) == (False, None)
            assert (alive["seen"]["trainers"], alive["seen"]["helpers"]) == (0, 1)
