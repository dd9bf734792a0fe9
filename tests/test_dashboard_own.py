"""The user's own trainer on the dashboard: shown, paused and resumed by its user's page, and by nobody else's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from network_swarm import call
from observed_events import commit
from recorded_run import run_dir
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.dashboard.own import OwnTrainer, require_loopback
from spes_p2p.client.dashboard.poll import Published
from spes_p2p.client.dashboard.server import run_dashboard, serving
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.errors import UserError
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.tasks import beside
from spes_p2p.observe.history import History
from spes_p2p.session.own_state import OwnState, StateFile, is_pause_ordered

pytestmark = pytest.mark.real_time


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Path]:
    """The run-dir of a trainer that runs, with a round of its work."""
    folder = run_dir(tmp_path / "peer", synthetic_swarm(2, 4, 3).records)
    peer, state = RSAIdentity(folder / "identity.key").peer_id, StateFile(folder)
    state.write(OwnState("running", 0.0, detail="1.00 GB of 2.00 GB used today", trains=True))
    history = History(peer, folder)
    history.record(replace(commit(4), contributions=((peer, 1000, 10),), members=(peer,)))
    history.close()
    yield folder
    state.close()


@asynccontextmanager
async def page_of(folder: Path, view: Any = None) -> AsyncIterator[tuple[str, OwnTrainer, aiohttp.ClientSession]]:
    published, own = Published(view=view), OwnTrainer(folder)
    async with serving(published, "127.0.0.1", 0, own) as url, beside(own.watch(published)):
        while published.own is None:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            yield url, own, session


async def test_its_page_pauses_and_resumes_it(trainer: Path) -> None:
    async with page_of(trainer) as (url, own, session):
        headers = {"X-Spes-Token": own.token, "Origin": url.rstrip("/")}
        async with session.get(f"{url}view.json") as answer:
            seen = json.loads(await answer.text())["own"]
        assert (seen["state"], seen["pauses"]) == ("running: 1.00 GB of 2.00 GB used today", False)
        assert (seen["share"]["tokens"], seen["share"]["rounds"]) == (1000, 1)
        assert own.token not in json.dumps(seen)
        for order, pauses in (("pause", True), ("resume", False)):
            async with session.post(f"{url}own/{order}", headers=headers) as answer:
                assert (answer.status, (await answer.json())["pauses"]) == (200, pauses)
            assert is_pause_ordered(trainer) == pauses


async def test_beside_the_button_to_resume_the_page_names_no_command(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, synthetic_swarm(2, 4, 3).records)
    RSAIdentity(folder / "identity.key")
    state = StateFile(folder)
    state.write(OwnState("paused", 0.0, reason="user", detail="until you type: spes-p2p resume runs/peer"))
    async with page_of(folder) as (url, _, session), session.get(f"{url}view.json") as answer:
        assert json.loads(await answer.text())["own"]["state"] == "paused"
    state.close()


@pytest.mark.parametrize(("number", "share"), [(9, 1000 / 8000), (4, 1000 / 4000), (3, 1000 / 4000)])
async def test_the_share_of_a_trainer_that_is_paused_is_one_of_the_swarms_newest_base(
    trainer: Path, number: int, share: float
) -> None:
    view = {"round": number, "total_tokens": 8000, "done": False}
    async with page_of(trainer, view) as (url, _, session), session.get(f"{url}view.json") as answer:
        assert json.loads(await answer.text())["own"]["share"]["share"] == share


async def test_a_run_dir_that_was_moved_away_is_told_and_found_again(trainer: Path) -> None:
    async with page_of(trainer) as (url, _, session):
        async def until(state: str) -> None:
            seen = {"state": ""}
            while state not in seen["state"]:
                async with session.get(f"{url}view.json") as answer:
                    seen = json.loads(await answer.text())["own"]
                await asyncio.sleep(0.01)

        away = trainer.rename(trainer.with_name("away"))
        await until(str(trainer))
        away.rename(trainer)
        await until("running")


@pytest.mark.parametrize("wrong", [
    {"X-Spes-Token": ""}, {"X-Spes-Token": "0" * 32}, {"Origin": "https://example.org"}, {"Origin": "null"}, {"Origin": ""},
    {"Host": "example.org"}, {"Host": "example.org:80", "Origin": "http://example.org:80"},
])
async def test_orders_of_other_sites_and_without_the_token_are_refused(trainer: Path, wrong: dict[str, str]) -> None:
    async with page_of(trainer) as (url, own, session):
        right = {"X-Spes-Token": own.token, "Origin": url.rstrip("/")}
        headers = {name: value for name, value in {**right, **wrong}.items() if value}
        async with session.post(f"{url}own/pause", headers=headers) as answer:
            assert answer.status == 403
        async with session.get(f"{url}own/pause", headers=right) as answer:
            assert answer.status == 405
        assert not is_pause_ordered(trainer)


async def test_another_name_for_this_machine_reads_nothing(trainer: Path) -> None:
    async with page_of(trainer) as (url, _, session):
        for path in ("", "view.json", "events"):
            async with session.get(url + path, headers={"Host": "example.org"}) as answer:
                assert answer.status == 403


async def test_the_page_looks_for_the_swarm_at_ones_own_trainer_when_nobody_answers_elsewhere(tmp_path: Path) -> None:
    folder, state = run_dir(tmp_path / "peer", synthetic_swarm(2, 4, 3).records), StateFile(tmp_path / "peer")
    peer, reached = RSAIdentity(folder / "identity.key").peer_id, asyncio.Event()

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        state.write(OwnState("running", 0.0, met_addresses=(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",)))
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{peer}"
        async with beside(run_dashboard([nobody], "127.0.0.1", 0, lambda url: None, own=OwnTrainer(folder))):
            await asyncio.wait_for(reached.wait(), 30)
    state.close()


async def test_a_dashboard_without_an_own_trainer_takes_no_orders() -> None:
    async with serving(Published(), "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:
        answer = await session.post(f"{url}own/pause", headers={"Origin": url.rstrip("/")})
        assert answer.status == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_the_page_of_ones_own_trainer_is_for_this_machine_only(host: str) -> None:
    with pytest.raises(UserError, match=r"^--host .*: a page that pauses your trainer is for this machine only"):
        require_loopback(host)
    for local in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        require_loopback(local)


def test_a_run_dir_in_which_no_trainer_runs_is_refused(tmp_path: Path) -> None:
    folder = str(run_dir(tmp_path, synthetic_swarm(2, 4, 3).records))
    unused = call("dashboard", folder)
    state = StateFile(tmp_path)
    state.write(OwnState("running", 0.0, (EXAMPLE_ADDRESS,)))
    state.close()
    used = call("dashboard", folder)
    (tmp_path / "own_state.json").write_text("{}")
    unknown = call("dashboard", folder)
    assert (unused.code, used.code, unknown.code) == (2, 2, 2)
    assert unused.stderr == f"error: {folder}: no trainer has used this folder; give the run-dir of your trainer\n"
    again = "no trainer runs with this run-dir; start it with spes-p2p join {} --run-dir {}, or give the address of a peer\n"
    assert used.stderr == f"error: {folder}: {again.format(EXAMPLE_ADDRESS, folder)}"
    assert unknown.stderr == f"error: {folder}: {again.format('ADDRESS', folder)}"


def test_the_page_waits_for_a_trainer_that_still_prepares(tmp_path: Path) -> None:
    folder, waits = tmp_path / "peer", threading.Event()
    state = StateFile(folder)
    state.write(OwnState("preparing", 0.0))
    RSAIdentity(folder / "identity.key")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(OwnTrainer.once_prepared, folder, waits.set)
        assert waits.wait(60)
        run_dir(folder, synthetic_swarm(2, 4, 3).records)
        assert found.result(60).token
    state.close()


def test_the_page_does_not_wait_for_a_trainer_that_ended_before_it_had_its_campaign(tmp_path: Path) -> None:
    (tmp_path / "own_state.json").touch()
    with pytest.raises(UserError, match="ended or paused before it had its campaign"):
        OwnTrainer.once_prepared(tmp_path, lambda: None)
