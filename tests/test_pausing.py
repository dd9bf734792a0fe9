"""A trainer whose user wants the machine back leaves politely, and trains again when it may."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from network_swarm import Ended, LocalPeer, LocalPeers, call, free_port, write_variant
from recorded_run import run_dir

from spes_p2p.client import own_peer
from spes_p2p.client.own_peer import give_pause_order
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.config.campaign import PeerConfig, make_peer_config
from spes_p2p.errors import NobodyAnswers, UserError
from spes_p2p.observe.events import BaseRestored, RoundFailed, StateEntered
from spes_p2p.session.own_state import OWNERS_PAUSE, OwnState, StateFile, order_pause, read_own_state
from spes_p2p.session.pausing import Pauses
from spes_p2p.session.run import run_join, with_met
from spes_p2p.storage.files import write_whole

START_S = 90.0
TRAINERS = ("peer-0", "peer-1", "peer-2")


def endless(campaign: Path) -> Path:
    """The campaign with more steps than a test waits for."""
    return write_variant(
        campaign, "long.yaml", training={"total_steps": 400_000, "sync_steps": 10}, merge={"merge_interval": 10}
    )


def works_again(peer: LocalPeer, after: int) -> bool:
    """Whether the work of this peer is in a round after this one."""
    commits = [commit for number, commit in peer.commits.items() if number > after]
    return any(who == peer.peer_id and tokens > 0 for commit in commits for who, tokens, _ in commit.contributions)


@pytest.mark.network
def test_a_trainer_that_is_paused_leaves_and_trains_again_after_resume(campaign: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(endless(campaign)).address
        port = str(free_port())
        for name in TRAINERS:
            swarm.join(name, address, *(("--metrics-port", port) if name == "peer-1" else ()))
        swarm.wait_for_round(2, START_S)
        sleeper, others = swarm["peer-1"], [swarm["peer-0"], swarm["peer-2"]]

        paused = call("pause", str(sleeper.run_dir), "--json")
        assert paused.code == 0, paused.stderr
        assert json.loads(paused.stdout)["state"] == "paused"
        assert json.loads(paused.stdout)["reason"] == "user"
        assert sleeper.children() == [], "its network and its trainer have ended"
        assert f"paused: until you type: spes-p2p resume {sleeper.run_dir}" in sleeper.log
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        assert 'spes_paused{reason="user"} 1.0' in metrics

        seen = call("status", str(sleeper.run_dir), "--json")
        assert json.loads(seen.stdout)["own"]["state"] == "paused", seen.stderr
        assert sleeper.peer_id not in [peer["peer_id"] for peer in json.loads(seen.stdout)["peers"]]

        mine = json.loads(call("me", str(sleeper.run_dir), "--json").stdout)
        assert (mine["state"], mine["round"], mine["experts"]) == ("paused", sleeper.round, [])
        included = [each for commit in sleeper.commits.values() for each in commit.contributions if each[0] == sleeper.peer_id]
        assert mine["tokens"] == sum(tokens for _, tokens, _ in included) > 0
        assert 0 < mine["share"] < 1

        at = sleeper.round
        swarm.wait_for_round(swarm.newest_round() + 4, 60, others)
        assert sleeper.round == at
        assert sleeper.peer_id not in swarm.commit(swarm.newest_round()).members
        for peer in (*others, swarm["bootstrap"]):
            assert peer.events(RoundFailed) == []
            assert "warning" not in peer.log
        later = json.loads(call("me", str(sleeper.run_dir), "--json").stdout)
        assert (later["round"], later["tokens"], later["share_round"] > at) == (at, mine["tokens"], True)
        assert later["share"] < mine["share"], "the others have gone on"

        left_at = swarm.newest_round()
        resumed = call("resume", str(sleeper.run_dir))
        assert (resumed.code, resumed.stdout) == (0, "running: it trains\n")
        swarm.wait(lambda: works_again(sleeper, left_at), 60, "the paused peer's work is in a round again")
        assert sleeper.events(BaseRestored)[-1].source in ("disk", "download")
        assert "no checkpoint of round" not in sleeper.log, "it kept its moments"
        assert {len(found) for found in swarm.digests().values()} == {1}
        assert swarm.terminate("peer-1") == 0
        assert re.search(r"^[\d:]{8} joined campaign test", sleeper.log, re.MULTILINE)
        bootstrap = swarm["bootstrap"]
        assert swarm.terminate("bootstrap") == 0
        seen = call("status", str(swarm["peer-0"].run_dir), "--json")
        assert seen.code == 0, seen.stderr
        assert swarm["peer-2"].peer_id in [peer["peer_id"] for peer in json.loads(seen.stdout)["peers"]]

        homeless = swarm["peer-2"]
        assert call("pause", str(homeless.run_dir)).code == 0
        assert call("resume", str(homeless.run_dir)).code == 0
        swarm.wait(lambda: homeless.log.count("joined campaign test") == 2, 60, "it is back without the bootstrap peer")
        assert f"left · to continue, start it again with --run-dir {bootstrap.run_dir}" in bootstrap.log


def test_orders_touch_no_folder_but_a_trainers_and_no_file_but_their_own(tmp_path: Path) -> None:
    (tmp_path / "pause").write_text("precious")
    for order in ("pause", "resume"):
        ended = call(order, str(tmp_path))
        assert (ended.code, ended.stderr.count("\n")) == (2, 1)
        assert "no trainer has used this folder" in ended.stderr
    (tmp_path / "own_state.json").touch()
    for order in ("pause", "resume"):
        ended = call(order, str(tmp_path))
        assert (ended.code, "was not written by spes-p2p pause" in ended.stderr) == (2, True)
    assert (tmp_path / "pause").read_text() == "precious"


def test_a_pause_while_no_trainer_runs_says_that_it_holds_for_the_next_one(tmp_path: Path) -> None:
    run_dir = tmp_path / "my peer"
    run_dir.mkdir()
    (run_dir / "own_state.json").touch()
    ended = call("pause", str(run_dir))
    later = f"the next one starts paused, until spes-p2p resume '{run_dir}'"
    assert (ended.code, ended.stdout) == (0, f"no trainer runs with {run_dir} now; {later}\n")
    assert (run_dir / "pause").exists()


def test_a_link_in_the_run_dir_leads_to_no_other_file_of_the_user(tmp_path: Path) -> None:
    other, run_dir = tmp_path / "other", tmp_path / "run"
    other.write_text("precious")
    run_dir.mkdir()
    for name in ("own_state.json", f"kept.{os.getpid()}.tmp"):
        (run_dir / name).symlink_to(other)
    with pytest.raises(UserError, match=r"own_state.json: is no regular file; remove it"):
        StateFile(run_dir).write(OwnState("running", 0.0))
    write_whole(run_dir / "kept", b"new")
    assert (other.read_text(), (run_dir / "kept").read_bytes()) == ("precious", b"new")


@pytest.mark.parametrize("content", [b"garbage", b'{"state": "x", "since": 1, "addresses": ["zzz"]}'])
def test_an_absurd_state_names_no_address_and_nothing_reaches_the_terminal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own_state.json").write_bytes(content)
    with (tmp_path / "own_state.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_own_state(tmp_path) == OwnState("running", 0.0)
    assert OwnState("running", 0.0, detail="\x1b[31m", trains=True).line == "running: ?[31m"
    (tmp_path / "own_state.json").unlink()
    os.mkfifo(tmp_path / "own_state.json")
    with pytest.raises(UserError, match="is no regular file"):
        read_own_state(tmp_path)


def test_a_trainer_that_does_not_obey_in_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_peer, "OBEYS_WITHIN_S", 0.3)
    state = StateFile(tmp_path)
    state.write(OwnState("running", 0.0))
    ended = call("pause", str(tmp_path))
    state.close()
    assert ended.code == 1
    waits, told = ended.stderr.splitlines()
    assert waits == "waiting for the trainer to end its step and leave"
    assert "the trainer was ordered to pause and has not done so after 0.3 s" in told


def test_a_trainer_that_prepares_is_told_to_pause_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_peer, "OBEYS_WITHIN_S", 0.3)
    state = StateFile(tmp_path)
    state.write(OwnState("preparing", 0.0, detail="importing torch"))
    ended, again = call("pause", str(tmp_path)), call("resume", str(tmp_path))
    state.write(OwnState("running", 0.0, trains=True))
    trains = call("resume", str(tmp_path))
    state.close()
    assert (ended.code, ended.stdout) == (0, "ordered; the trainer is still preparing and pauses before it trains\n")
    assert (again.code, again.stdout) == (0, "preparing: importing torch; it trains after that\n")
    assert (trains.code, trains.stdout) == (0, "running: it trains\n")
    assert (ended.stderr, trains.stderr) == ("", ""), "neither waits"
    assert again.stderr == "waiting for the trainer to join again and train\n"


QUOTA = OwnState("paused", 0.0, reason="quota", detail="until midnight: 3.0 MB of 3.0 MB used today (--quota)")


def test_resume_says_what_a_trainer_waits_for_that_its_quota_still_pauses(tmp_path: Path) -> None:
    """The order is gone, the other reason is not."""
    state = StateFile(tmp_path)
    state.write(QUOTA)
    ended = call("resume", str(tmp_path))
    state.close()
    assert (ended.code, ended.stdout, ended.stderr) == (1, f"your pause is over, but the trainer stays {QUOTA.line}\n", "")


def test_resume_says_at_once_that_the_owners_pause_holds(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.write(OwnState("running", 0.0, detail=OWNERS_PAUSE))
    ended = call("resume", str(tmp_path))
    state.close()
    told = "your pause is over; the campaign itself is paused, and the trainer goes on when that ends\n"
    assert ended == Ended(0, told, "")


def test_pause_answers_when_a_trainer_that_was_paused_already_says_that_the_order_holds(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.write(QUOTA)
    ordered = OwnState("paused", 0.0, reason="user", detail="until you type: spes-p2p resume")
    with contextlib.closing(state):
        assert give_pause_order(tmp_path, True, lambda: state.write(ordered)) == ordered


async def test_a_trainer_that_pauses_does_not_train(tmp_path: Path) -> None:
    pauses, said = Pauses(make_peer_config(run_dir=tmp_path), ()), []
    with contextlib.closing(pauses):
        pauses.begin()
        for event in (BaseRestored(-1, 0, 50, 0, "d", "disk"), StateEntered("training")):
            pauses.observe(event)
        for pause in (False, True):
            order_pause(tmp_path, pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(pauses.watch(lambda: None, lambda event: None), 0.2)
            own = read_own_state(tmp_path)
            assert own is not None
            said.append((own.state, own.reason, own.trains))
    assert said == [("running", "", True), ("pausing", "user", False)]


def test_a_trainer_says_where_else_the_swarm_is_found_also_after_it_left(tmp_path: Path) -> None:
    async def run(other: str) -> list[tuple[str, ...]]:
        pauses, said = Pauses(make_peer_config(run_dir=tmp_path), ()), []
        with contextlib.closing(pauses):
            for in_swarm in (False, True, False):
                assert await pauses.over()
                if in_swarm:
                    pauses.in_swarm((EXAMPLE_ADDRESS,), lambda: (other,))
                pauses.prepares("getting the newest base")
                own = read_own_state(tmp_path)
                assert own is not None
                said.append(own.spare_addresses)
        return said

    first, second = ("/ip4/127.0.0.1/tcp/" + port + EXAMPLE_ADDRESS[EXAMPLE_ADDRESS.index("/p2p/") :] for port in ("1", "2"))
    assert asyncio.run(run(first)) == [(), (EXAMPLE_ADDRESS, first), (first,)]
    assert asyncio.run(run(second)) == [(first,), (EXAMPLE_ADDRESS, second, first), (second, first)], "after a restart"


@pytest.mark.parametrize(("listens", "asked"), [("first", [["first"]]), ("met", [["first", "met"]]), ("", [["first"]])])
def test_a_trainer_that_comes_back_asks_peers_that_it_met_where_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: str, asked: list[list[str]]
) -> None:
    tried, state = [], StateFile(tmp_path)
    state.write(OwnState("running", 0.0, (EXAMPLE_ADDRESS,), met_addresses=(f"{EXAMPLE_ADDRESS[:-1]}9",)))
    state.close()
    names = {EXAMPLE_ADDRESS: "first", f"{EXAMPLE_ADDRESS[:-1]}9": "met"}

    async def is_any_listening(addresses: Sequence[str]) -> bool:
        return listens in [names[address] for address in addresses]

    def ends(settings: PeerConfig, addresses: Sequence[str]) -> NoReturn:
        tried.append([names[address] for address in addresses])
        raise UserError("ends")

    monkeypatch.setattr("spes_p2p.session.run.is_any_listening", is_any_listening)
    monkeypatch.setattr("spes_p2p.session.run.connected", ends)
    with pytest.raises(UserError, match="ends"):
        asyncio.run(run_join([EXAMPLE_ADDRESS], make_peer_config(run_dir=tmp_path), lambda files, own: None))
    assert tried == asked


def test_after_the_campaign_nobody_is_told_to_start_the_trainer_again(tmp_path: Path) -> None:
    pauses = Pauses(make_peer_config(run_dir=tmp_path), (EXAMPLE_ADDRESS,))
    with contextlib.closing(pauses):
        pauses.begin()
        pauses.campaign_ended()
        assert pauses.ending.is_made
    ended = call("status", str(tmp_path))
    export = f"export the model with spes-p2p export --run-dir {tmp_path} --output checkpoint"
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == (f"error: {tmp_path}: the campaign is over, and the trainer with this run-dir has ended; {export}, "
                            "or give the address of a peer\n")


def test_the_run_dir_of_a_bootstrap_peer_stands_for_its_address(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9{EXAMPLE_ADDRESS[EXAMPLE_ADDRESS.index('/p2p/'):]}"
    (tmp_path / "address").write_text(nobody + "\n")
    assert f"no peer answers at {nobody};" in call("status", str(tmp_path)).stderr
    (tmp_path / "address").write_text("\x1b[31m\n")
    assert call("status", str(tmp_path)).stderr.startswith(f"error: {tmp_path / 'address'}: damaged; start this bootstrap peer")


async def test_a_trainer_says_what_it_waits_for_until_it_trains(tmp_path: Path) -> None:
    pauses, said = Pauses(make_peer_config(run_dir=tmp_path), ()), []
    paused, training = StateEntered("paused"), StateEntered("training")
    events = (None, BaseRestored(-1, 0, 50, 0, "d", "disk"), paused, training, paused)
    with contextlib.closing(pauses):
        pauses.begin()
        pauses.prepares("getting the newest base")
        for event in events:
            if event is not None:
                pauses.observe(event)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(pauses.watch(lambda: None, lambda event: None), 0.2)
            own = read_own_state(tmp_path)
            assert own is not None
            said.append((own.line, own.trains))
    assert said == [
        ("preparing: getting the newest base", False), ("waiting: for a round that gives it work", False),
        ("waiting: the campaign is paused", False), ("running", True),
        ("waiting: the campaign is paused", False),
    ]


async def test_a_pause_that_was_ordered_while_the_trainer_prepared_comes_before_training(tmp_path: Path) -> None:
    pauses = Pauses(make_peer_config(run_dir=tmp_path), ())
    with contextlib.closing(pauses):
        assert await pauses.over()
        pauses.prepares("importing torch")
        own = read_own_state(tmp_path)
        assert own is not None
        assert own.line == "preparing: importing torch"
        assert not await pauses.is_due()
        order_pause(tmp_path, True)
        assert await pauses.is_due()
        assert pauses.follows


def test_a_trainer_that_looks_for_its_campaign_can_be_paused_and_leaves_no_trace_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "peer"

    def nobody(settings: PeerConfig, addresses: Sequence[str]) -> NoReturn:
        ordered = give_pause_order(folder, True)
        assert ordered is not None
        assert (ordered.state, ordered.addresses) == ("preparing", (EXAMPLE_ADDRESS,))
        raise NobodyAnswers("no peer answers")

    monkeypatch.setattr("spes_p2p.session.run.connected", nobody)
    with pytest.raises(NobodyAnswers):
        asyncio.run(run_join([EXAMPLE_ADDRESS], make_peer_config(run_dir=folder), lambda files, own: None))
    assert not folder.exists()


def test_who_joins_in_the_run_dir_of_a_running_trainer_is_refused_before_looking_for_the_campaign(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.write(OwnState("running", 0.0))
    ended = call("join", EXAMPLE_ADDRESS, "--run-dir", str(tmp_path))
    state.close()
    told = f"error: {tmp_path}: a running peer uses this run-dir; stop it, or give this one another --run-dir\n"
    assert (ended.code, ended.stderr) == (2, told)


def test_a_trainer_that_ends_while_it_is_paused_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "own_state.json").touch()
    order_pause(tmp_path, True)
    caplog.set_level("INFO")

    def interrupt() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    settings = make_peer_config(run_dir=tmp_path, identity=tmp_path / "my.key")
    asyncio.run(run_join([EXAMPLE_ADDRESS], settings, lambda files, own: None, on_paused=interrupt))
    assert caplog.messages[-1] == f"left · to continue, join again with --run-dir {tmp_path} --identity {tmp_path / 'my.key'}"


def test_who_joins_in_another_peers_run_dir_is_told_and_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_dir(tmp_path, [])
    before = sorted(folder.iterdir())

    def refused(settings: PeerConfig, addresses: Sequence[str]) -> NoReturn:
        raise UserError("a running peer uses this identity")

    monkeypatch.setattr("spes_p2p.session.run.connected", refused)
    with pytest.raises(UserError, match="a running peer"):
        asyncio.run(run_join([EXAMPLE_ADDRESS], make_peer_config(run_dir=folder), lambda files, own: None))
    assert sorted(folder.iterdir()) == before
    assert [message for message in caplog.messages if "used with another identity before" in message] == caplog.messages[:1]


def test_a_trainer_that_does_not_run_starts_paused(tmp_path: Path) -> None:
    (tmp_path / "own_state.json").touch()
    assert "no trainer runs" in call("pause", str(tmp_path)).stdout
    assert (tmp_path / "pause").stat().st_mode & 0o777 == 0o600
    assert json.loads(call("resume", str(tmp_path), "--json").stdout) == {"state": "not running"}
    assert not (tmp_path / "pause").exists()


@pytest.mark.network
def test_a_machine_that_slept_catches_up_and_trains_again(campaign: Path, tmp_path: Path) -> None:
    """Asleep for longer than others wait: it is given up, and its rounds are decided without it."""
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(endless(campaign)).address
        for name in TRAINERS:
            swarm.join(name, address)
        swarm.wait_for_round(2, START_S)
        sleeper, others = swarm["peer-1"], [swarm["peer-0"], swarm["peer-2"]]
        asleep = [psutil.Process(sleeper.process.pid), *sleeper.children()]
        for process in asleep:
            process.suspend()
        gone = swarm.newest_round() + 1

        def is_given_up() -> bool:
            return any(sleeper.peer_id not in peer.commits[peer.round].members for peer in others if peer.round > gone)

        swarm.wait(is_given_up, 120, "the others go on without it")
        swarm.wait_for_round(swarm.newest_round() + 20, 60, others)
        left_at = swarm.newest_round()
        for process in asleep:
            process.resume()
        swarm.wait(lambda: works_again(sleeper, left_at), 90, "its work is in a round again")
        assert sleeper.is_running
        assert {len(found) for found in swarm.digests().values()} == {1}


@pytest.mark.network
def test_a_trainer_pauses_at_its_quota_and_stays_so_after_a_restart(campaign: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(endless(campaign)).address
        options = ("--quota", "3MB/day")
        swarm.join("peer-0", address)
        thrifty = swarm.join("peer-1", address, *options)
        swarm.wait(lambda: "paused: until midnight" in thrifty.log, START_S + 60, "peer-1 has used its quota")
        assert thrifty.round > 2
        traffic = json.loads((thrifty.run_dir / "traffic.json").read_text())
        # Rounds of this model are shorter than the second between two looks, and leaving takes another one.
        assert 0 < traffic["round_bytes"] < 3e6 / 5
        assert 1.5e6 < traffic["used_bytes"] < 3e6 + 4 * traffic["round_bytes"]

        assert swarm.terminate("peer-1") == 0
        again = swarm.join("peer-1", address, *options)
        swarm.wait(lambda: "paused: until midnight" in again.log, 30, "it is still used up")
        assert "joined campaign" not in again.log


@pytest.mark.network
def test_a_trainer_gives_way_and_says_what_its_quota_leaves(campaign: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path, niceness=3) as swarm:
        address = swarm.bootstrap(endless(campaign)).address
        port = str(free_port())
        options = ("--nice", "17", "--leave-free", "100MiB", "--quota", "100GB/day", "--metrics-port", port)
        polite = swarm.join("peer-0", address, *options)
        swarm.join("peer-1", address)
        swarm.wait_for_round(2, START_S)
        swarm.wait(lambda: "; that lasts for the day" in polite.log, 60, "the quota's forecast is logged")
        assert "quota: " in polite.log
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        gauges = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("spes_quota"))
        assert float(gauges["spes_quota_bytes"]) == 100e9
        assert 0 < float(gauges["spes_quota_used_bytes"]) < 1e9
        process = psutil.Process(polite.process.pid)
        niceness = {thread.id: os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()}
        others = niceness[process.pid]
        assert 17 in niceness.values()
        assert others < 17, "streams and heartbeats keep their priority"
        assert {child.nice() for child in polite.children()} == {others}, "so does p2pd"


@pytest.mark.real_time
async def test_that_a_trainer_joins_through_peers_that_it_met_is_not_told_at_each_try(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        met = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/QmMet"
        for tells in (True, False, False):
            assert await with_met(["/ip4/127.0.0.1/tcp/9/p2p/QmOwner"], [met], tells)
    assert caplog.text.count("joining through peers that this trainer met before") == 1
