"""The doctor: what each finding is judged, and the whole of it against a real bootstrap peer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network_swarm import LOOPBACK, LocalPeer, LocalPeers, call

from spes_p2p.client.doctor_checks import (
    SET_THE_CLOCK,
    Check,
    judge_bandwidth,
    judge_clock,
    judge_dht,
    judge_nat,
    judge_reachability,
    judge_space,
    judge_versions,
    render_checks,
)
from spes_p2p.messages.methods import OLDEST_PROTOCOL, PROTOCOL_VERSION
from spes_p2p.messages.presence import Clock, DialBack
from spes_p2p.net import dht
from spes_p2p.net.checkup import Skew

CLOCK = Clock(0.0, "0.1.0", PROTOCOL_VERSION)
A, B = "/ip4/203.0.113.7/tcp/1/p2p/A", "/ip4/203.0.113.8/tcp/1/p2p/B"
OPEN = DialBack(("/ip4/198.51.100.4/tcp/4001",), (4001,))
CLOSED = DialBack(("/ip4/198.51.100.4/tcp/4001",), ())
CLOSED_ELSEWHERE = DialBack(("/ip4/198.51.100.4/tcp/50001",), ())
RELAYED = DialBack(("/ip4/203.0.113.7/tcp/1/p2p/A/p2p-circuit",), ())
OWN = frozenset({"127.0.0.1", "198.51.100.4"})
BEHIND = frozenset({"127.0.0.1", "192.168.0.4"})


# Verdicts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_s", "uncertainty_s", "result", "words"), [
    (0.2, 0.01, "pass", "0.20 s behind"),
    (-0.2, 0.01, "pass", "0.20 s ahead of"),
    (1.5, 0.01, "warning", "1.50 s behind"),
    (3.5, 1.0, "warning", "3.50 s behind"),
    (-3.5, 0.01, "failure", "3.50 s ahead of"),
])
def test_a_clock_may_differ_by_less_than_the_dht_allows(ahead_s: float, uncertainty_s: float, result: str, words: str) -> None:
    check = judge_clock("QmPeer", Skew(ahead_s, uncertainty_s, CLOCK))
    assert (check.result, words in check.found) == (result, True), check
    assert ("set-ntp" in check.advice) == (result != "pass")


def test_only_a_protocol_that_is_not_spoken_any_more_is_a_failure() -> None:
    assert judge_versions([CLOCK, Clock(0.0, "9.9", PROTOCOL_VERSION)], "2").result == "pass"
    check = judge_versions([CLOCK, Clock(0.0, "9.9", PROTOCOL_VERSION + 1)], "2")
    assert (check.result, f"9.9, protocol {PROTOCOL_VERSION + 1}" in check.found) == ("warning", True)
    check = judge_versions([CLOCK, Clock(0.0, "0.0.1", OLDEST_PROTOCOL - 1)], "2")
    advice = "type in your clone: git fetch && git checkout v0.0.1 && pip install -c constraints.txt ."
    assert (check.result, check.advice) == ("failure", advice)


@pytest.mark.parametrize(("seen", "result", "words"), [
    ({A: frozenset("AX")}, "pass", "2 peers"),
    ({A: frozenset("ABX"), B: frozenset("AB")}, "pass", "2 addresses lead to one DHT"),
    ({A: frozenset("AX"), B: frozenset("BX")}, "failure", "does not see the peers of the other addresses"),
    ({A: frozenset("AB"), B: frozenset("B")}, "failure", f"{B} does not see"),
    ({A: frozenset({"A", "B", *map(str, range(99))}), B: frozenset({"1", "2"})}, "pass", "2 addresses lead to one DHT"),
    ({A: frozenset({"A", "B", *map(str, range(99))}), B: frozenset({"B", "X"})}, "pass", "2 addresses lead to one DHT"),
    ({A: frozenset({"A", *map(str, range(99))}), B: frozenset({"B", "X"})}, "failure", "does not see"),
    ({A: frozenset()}, "failure", "no peer"),
    ({A: frozenset("A"), B: "no peer answers"}, "failure", f"{B}: no peer answers"),
])
def test_addresses_lead_to_one_dht_when_each_sees_the_peers_of_all(seen: Any, result: str, words: str) -> None:
    check = judge_dht(seen)
    assert (check.result, words in check.found) == (result, True), check


def test_an_address_is_not_to_blame_for_a_wrong_clock() -> None:
    wrong = dht._not_admitted([B], "peer local time is 9 s ahead")
    assert judge_dht({A: frozenset("A"), B: wrong}).advice == SET_THE_CLOCK
    assert judge_dht({A: wrong, B: "no peer answers"}).advice.startswith("omit this address")


@pytest.mark.parametrize(("answers", "relays", "result", "words"), [
    ({"A": OPEN}, [], "pass", "dialled back on port 4001"),
    ({"A": RELAYED, "B": OPEN}, [], "pass", "4001"),
    ({"A": CLOSED, "B": OPEN}, [], "warning", "by 1 of 2 peers"),
    ({"A": CLOSED}, ["/p2p-circuit"], "warning", "through a relay"),
    ({"A": CLOSED}, [], "warning", "cannot be dialled on port 4001, 4002"),
    ({}, [], "warning", "no peer could try"),
])
def test_who_cannot_be_dialled_learns_what_to_open(answers: Any, relays: list[str], result: str, words: str) -> None:
    check = judge_reachability(answers, (4001, 4002), relays)
    assert (check.result, words in check.found) == (result, True), check
    assert ("forward a TCP port" in check.advice) == (result != "pass" and bool(answers))


@pytest.mark.parametrize(("answers", "own", "result", "words"), [
    ({"A": OPEN}, OWN, "pass", "none"),
    ({"A": OPEN}, BEHIND, "pass", "a forwarded port"),
    ({"A": CLOSED}, BEHIND, "warning", "keeps the port"),
    ({"A": CLOSED_ELSEWHERE}, BEHIND, "warning", "changes the port"),
    ({"A": CLOSED, "B": CLOSED_ELSEWHERE}, BEHIND, "warning", "symmetric"),
    ({"A": RELAYED}, BEHIND, "warning", "unknown"),
])
def test_nat_is_told_from_what_peers_see(answers: Any, own: frozenset[str], result: str, words: str) -> None:
    check = judge_nat(answers, own, (4001,))
    assert (check.result, words in check.found) == (result, True), check


@pytest.mark.parametrize(("up", "result"), [(100e6, "pass"), (2e6, "warning"), (0.1e6, "failure")])
def test_a_link_is_judged_by_the_time_of_an_exchange(up: float, result: str) -> None:
    check = judge_bandwidth(up, 100e6, 500_000_000, 500_000_000, 20_000_000)
    assert check.result == result
    assert check.values["round_s"] == pytest.approx(4e9 / up)


def test_too_little_space_is_a_failure() -> None:
    assert judge_space("disk", 10, 11, "").result == "pass"
    assert judge_space("disk", 12, 11, "make room") == Check(
        "disk", "failure", "11 B free, 12 B needed", "make room", {"needed_bytes": 12, "free_bytes": 11}
    )


def test_advice_stands_below_its_finding_and_markup_is_not_obeyed() -> None:
    text = render_checks([Check("disk", "failure", "[red]no[/red]", "make room"), Check("clock", "pass", "0 s")]).plain
    first, advice, last = text.splitlines()
    assert first.split() == ["failure", "disk", "[red]no[/red]"]
    assert advice.strip() == "-> make room"
    assert last.split() == ["pass", "clock", "0", "s"]


def test_on_a_terminal_long_findings_are_wrapped_below_their_beginning() -> None:
    found = [Check("device", "pass", "cpu with 21.9 GB free trains 8 of 8 experts", "join with a longer advice than fits")]
    wrapped = render_checks(found, 60).plain
    assert wrapped.split() == render_checks(found).plain.split()
    assert all(len(line) <= 60 for line in wrapped.splitlines())
    assert [line[:22].split() for line in wrapped.splitlines()] == [["pass", "device"], *[[]] * (len(wrapped.splitlines()) - 1)]
    assert len(wrapped.splitlines()) > 2
    assert len(render_checks(found).plain.splitlines()) == 2


# The whole of it --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrap(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeer]:
    with LocalPeers(tmp_path_factory.mktemp("running")) as peers:
        yield peers.bootstrap(campaign)


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    ended = call("doctor", *arguments, "--json")
    report = json.loads(ended.stdout)
    assert report["result"] in ("pass", "warning", "failure")
    return ended.code, {check["name"]: check for check in report["checks"]}


@pytest.mark.network
def test_a_good_machine_passes(bootstrap: LocalPeer, tmp_path: Path) -> None:
    code, checks = examine(bootstrap.address, "--run-dir", str(tmp_path / "run"))
    assert {name: check["result"] for name, check in checks.items()} == dict.fromkeys(
        ["versions", "clock", "dht", "reachability", "nat", "device", "disk", "bandwidth"], "pass"
    )
    assert code == 0
    assert checks["device"]["values"]["experts"] == 4
    assert checks["dht"]["values"] == {bootstrap.address: [bootstrap.peer_id]}
    assert abs(checks["clock"]["values"]["ahead_s"]) < 1
    assert checks["bandwidth"]["values"]["down_bits_per_second"] > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.network
def test_a_machine_that_cannot_be_dialled_is_warned(bootstrap: LocalPeer, tmp_path: Path) -> None:
    """Nobody listens on the port that it announces."""
    code, checks = examine(bootstrap.address, "--announce", "/ip4/127.0.0.1/tcp/9", "--run-dir", str(tmp_path / "run"))
    assert (code, checks["reachability"]["result"]) == (0, "warning")
    assert "cannot be dialled on port 9" in checks["reachability"]["found"]


@pytest.mark.network
def test_a_clock_that_is_off_is_found_and_join_refuses_it(campaign: Path, tmp_path: Path) -> None:
    """The other machine's clock is ten seconds ahead; the doctor says so where the DHT only refuses."""
    program = "import time; real = time.time; time.time = lambda: real() + 10; from spes_p2p.cli import main; main()"
    with LocalPeers(tmp_path) as peers:
        arguments = ["bootstrap", "--config", str(campaign), "--listen", LOOPBACK]
        ahead = peers.run("ahead", arguments, program=("-c", program))
        peers.wait(lambda: ahead.address or not ahead.is_running, 90, "it says its address")
        code, checks = examine(ahead.address, "--run-dir", str(tmp_path / "run"))
        assert (code, checks["clock"]["result"], checks["dht"]["result"]) == (1, "failure", "failure")
        assert 9 < -checks["clock"]["values"]["ahead_s"] < 11
        ended = call("join", ahead.address, "--run-dir", str(tmp_path / "run"))
        # The line that says what is looked for, then the error.
        assert (ended.code, ended.stderr.count("\n")) == (2, 2), ended
        error = ended.stderr.splitlines()[-1]
        assert "clock differs" in error
        assert "timedatectl" in error
        assert not (tmp_path / "run").exists()
