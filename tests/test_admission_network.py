"""A campaign by invitation, as its owner and its volunteers type it, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from network_swarm import LOOPBACK, Ended, LocalPeers, call
from sample_text import TEXT

pytestmark = pytest.mark.network

PATIENCE_S = 90.0


def printed(*arguments: str) -> str:
    ended = call(*arguments)
    assert ended.code == 0, ended.stderr
    return ended.stdout.strip()


def refused(ended: Ended) -> str:
    """The line by which a command was refused: the last one."""
    line = ended.stderr.splitlines()[-1]
    assert (ended.code, ended.stdout) == (2, "")
    return line


def test_the_owner_invites_and_bans_and_nobody_else_comes_in(tmp_path: Path) -> None:
    text, folder = str(TEXT / "train/wordnet.jsonl"), tmp_path / "campaign"
    made = call("init", str(folder), "--text", text, "--tokenizer", "512", "--peers", "1", "--epochs", "1000",
                "--admission", "invite")
    assert made.code == 0, made.stderr
    with LocalPeers(tmp_path) as peers:
        bootstrap = peers.bootstrap(folder / "campaign.yaml", LOOPBACK)
        key = str(bootstrap.run_dir / "identity.key")

        nobody = str(tmp_path / "nobody")
        assert "admits by invitation only; spes-p2p identity --run-dir" in refused(
            call("join", bootstrap.address, "--listen", LOOPBACK, "--run-dir", nobody))
        assert not Path(nobody).exists()
        another = str(tmp_path / "another")
        forged = printed("identity", "--run-dir", another)
        assert "the owner of campaign" in refused(
            call("invite", bootstrap.address, "--key", f"{another}/identity.key", "--peer", forged))

        ids = {name: printed("identity", "--run-dir", str(tmp_path / name)) for name in ("A", "B")}
        of_a = printed("invite", bootstrap.address, "--key", key, "--peer", ids["A"], "--roles", "trainer,elector")
        assert f"the invitation is for {ids['A']}" in refused(
            call("join", bootstrap.address, "--listen", LOOPBACK, "--run-dir", another, "--invite", of_a))
        of_anybody = tmp_path / "invitation.txt"
        of_anybody.write_text(printed("invite", str(bootstrap.run_dir), "--key", key, "--expires", "2h") + "\n")
        peers.join("A", bootstrap.address, "--invite", of_a)
        peers.join("B", bootstrap.address, "--invite", str(of_anybody))
        peers.wait_for_round(1, PATIENCE_S)
        assert {peers[name].peer_id for name in "AB"} == set(ids.values())

        peers.kill("B")
        before = peers["A"].round
        peers.join("B", bootstrap.address)
        peers.wait(lambda: any(ids["B"] in each.members for number, each in peers["A"].commits.items() if number > before + 1),
                   PATIENCE_S, "B is back, with the invitation in its run-dir")

        assert "it takes effect" in printed("control", bootstrap.address, "--key", key, "ban", ids["B"])
        peers.wait(lambda: not peers["B"].is_running, PATIENCE_S, "B ends")
        assert peers["B"].process.wait() == 2
        assert f"this peer ({ids['B']}) cannot take part: the owner of this campaign banned this peer" in peers["B"].log
        number = peers["A"].round
        peers.wait(lambda: peers["A"].round > number + 1, PATIENCE_S, "A goes on alone")
        assert ids["B"] not in peers["A"].commits[number + 1].members
        assert "banned this peer" in refused(
            call("join", bootstrap.address, "--listen", LOOPBACK, "--run-dir", str(tmp_path / "B")))


def test_a_stranger_that_joins_an_open_campaign_reads_that_it_is_on_probation(campaign: Path, tmp_path: Path) -> None:
    with LocalPeers(tmp_path) as peers:
        config = campaign.with_name("open.yaml")
        config.write_text(f"{campaign.read_text()}admission: open\n")
        address = peers.bootstrap(config, LOOPBACK).address
        peers.join("X", address)
        peers.wait(lambda: "on probation (0 of 10 rounds)" in peers["X"].log, PATIENCE_S, "X is told")
