"""Who may take part follows from the campaign's rule and the owner's signature, and is checked wherever a peer acts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_swarm import call
from recorded_run import CONFIG, run_dir

from spes_p2p.campaign.files import read_run_dir
from spes_p2p.campaign.invitations import from_text, keep_invitation, kept, parse_guest, read_option, to_text
from spes_p2p.consensus.admission import check_admission, signed_invitation, utc
from spes_p2p.consensus.control import signed
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import CONTROL
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.admission import Invitation, Role
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot, Control, Prepare
from spes_p2p.messages.methods import PREPARE, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.interfaces import World
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.storage.store import DirectoryStore, frame_record
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

SWARM = VirtualSwarm(campaign(admission="invite"))
OWNER = SimulatedIdentity("W")
LATER = 2**40
PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def invitation(peer: str = "", *roles: Role, expires: int = LATER, campaign_hash: str = "", signer: str = "W") -> Invitation:
    """As the owner's command makes it."""
    made = Invitation(campaign_hash or SWARM.campaign.hash, peer, roles or ("trainer",), expires, b"")
    return signed_invitation(made, SimulatedIdentity(signer))


def refusal(peer: str, given: Invitation | None, trains: bool = True, rule: str = "invite", now_s: float = 1000.0) -> str:
    """Why the peer is refused; "" when it is admitted."""
    try:
        check_admission(rule, peer, trains, given, SWARM.genesis, None, SimulatedIdentity("anybody"), now_s)
    except Refused as refused:
        return refused.detail if refused.code is Code.NOT_ADMITTED else f"another refusal: {refused.code}"
    return ""


ELECTOR: tuple[Role, ...] = ("trainer", "elector")


@pytest.mark.parametrize(("peer", "given", "trains", "expected"), [
    ("A", invitation(), True, ""),
    ("A", invitation("A"), True, ""),
    ("A", invitation("A", *ELECTOR), True, ""),
    ("H", invitation("H", "helper"), False, ""),
    ("W", None, False, ""),
    ("A", None, True, "by invitation only"),
    ("H", None, False, "by invitation only"),
    ("B", invitation("A"), True, "the invitation is for A"),
    ("A", invitation(expires=1000), True, "expired at 1970-01-01 00:16 UTC, by a clock that says 1970-01-01 00:16 UTC"),
    ("A", invitation(campaign_hash="0" * 64), True, "to another campaign"),
    ("A", invitation(signer="B"), True, "did not sign"),
    ("A", replace(invitation("A"), roles=ELECTOR), True, "did not sign"),
    ("A", replace(invitation(expires=10), expires=LATER), True, "did not sign"),
    ("B", replace(invitation("A"), peer="B"), True, "did not sign"),
    ("H", invitation("H"), False, "not for a helper, but for: trainer"),
    ("A", invitation("A", "helper"), True, "not for a trainer, but for: helper"),
    ("A", invitation("", *ELECTOR), True, "must name its peer"),
    ("H", invitation("", "helper"), False, "must name its peer"),
])  # fmt: skip
def test_an_invitation_admits_whom_the_owner_named_in_the_roles_that_it_names(
    peer: str, given: Invitation | None, trains: bool, expected: str
) -> None:
    found = refusal(peer, given, trains)
    assert (expected in found) if expected else not found


def test_among_friends_nobody_needs_an_invitation_and_a_wrong_one_harms_nobody() -> None:
    for given_one in (None, invitation(signer="B"), invitation("B", expires=1), invitation(expires=2**63 - 1)):
        assert not refusal("A", given_one, rule="friends")
        assert not refusal("A", given_one, trains=False, rule="friends")
    assert utc(2**63 - 1) == "9999-12-31 23:59 UTC", "join says until when it holds"


def test_an_open_campaign_admits_every_trainer_but_no_false_invitation_and_no_helper_without_one() -> None:
    assert not refusal("A", None, rule="open")
    assert not refusal("A", invitation("A", *ELECTOR), rule="open")
    assert not refusal("H", invitation("H", "helper"), trains=False, rule="open")
    assert "admits helpers by invitation only" in refusal("H", None, trains=False, rule="open")
    assert "did not sign" in refusal("A", invitation("A", *ELECTOR, signer="A"), rule="open")
    assert "must name its peer" in refusal("A", invitation("", *ELECTOR), rule="open")


@given(st.text(max_size=40), st.integers(0, 2**62), st.sets(st.sampled_from(["trainer", "elector", "helper"])))
def test_an_invitation_survives_being_pasted(peer: str, expires: int, roles: set[Role]) -> None:
    made = Invitation("c" * 64, peer, tuple(sorted(roles)), expires, bytes(550))
    assert from_text(f" {to_text(made)}\n", "test") == made


@given(st.data())
def test_a_damaged_text_is_one_line_for_its_user(data: st.DataObject) -> None:
    text = to_text(invitation("A"))
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = data.draw(st.sampled_from([text[:place], text[:place] + "!" + text[place:], text + "A" * 9000]))
    with pytest.raises(UserError, match="not an invitation") as caught:
        from_text(damaged, "--invite")
    assert "\n" not in str(caught.value)


def test_an_invitation_is_kept_for_its_user_alone_and_replaced_as_a_whole(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    for each in (invitation("A"), invitation("B")):
        keep_invitation(each, tmp_path)
        assert kept(tmp_path) == each
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_option(str(file)) == invitation("B")
    for damaged in (b"", file.read_bytes()[:-9], b"\xff"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{file}: damaged; give the invitation again with --invite, or delete the file"):
            kept(tmp_path)
    with pytest.raises(UserError, match="neither an invitation nor a file"):
        read_option(str(tmp_path / "nothing"))


@pytest.mark.parametrize(("options", "told"), [
    ((), "invitation for whoever holds it, as trainer, until "),
    (("--peer", PEER, "--roles", "trainer,elector"), f"invitation for {PEER}, as trainer and elector, until "),
])
def test_the_owner_is_told_on_stderr_what_an_invitation_allows(options: tuple[str, ...], told: str, tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    config = CONFIG.model_copy(update={"admission": "invite"})
    folder = run_dir(tmp_path, [], config=config, owner=RSAIdentity(key).peer_id)
    ended = call("invite", str(folder), "--key", str(key), "--expires", "12h", *options)
    assert ended.code == 0, ended.stderr
    made = from_text(ended.stdout, "stdout")
    assert abs(made.expires - time.time() - 12 * 3600) < 600
    assert ended.stderr == told + time.strftime("%Y-%m-%d %H:%M UTC\n", time.gmtime(made.expires))


def test_the_owner_is_told_that_a_guest_is_banned(tmp_path: Path) -> None:
    owner = RSAIdentity(tmp_path / "identity.key")
    folder = run_dir(tmp_path, [], config=CONFIG.model_copy(update={"admission": "invite"}), owner=owner.peer_id)
    known = read_run_dir(folder)
    assert known is not None
    order = signed(Control(known[1].campaign, 1, "running", (), -1, b"", banned=(PEER,)), owner)
    DirectoryStore(folder).write(CONTROL, [frame_record(pack(order))])
    for options, is_told in ((("--peer", PEER), True), (("--peer", owner.peer_id), False), ((), False)):
        ended = call("invite", str(folder), "--key", str(owner.path), *options)
        assert (ended.code, "note: you banned this peer" in ended.stderr) == (0, is_told)


@pytest.mark.parametrize(("peer", "roles", "expected"), [
    (None, "trainer,elector", "whoever finds this invitation could vote"),
    (None, "helper", "whoever finds this invitation could vote"),
    ("Qm" + "x" * 44, "elector", "give --roles trainer,elector"),
    ("Qm" + "x" * 44, "owner", "unknown role 'owner'"),
    ("Qm", "trainer", "not the whole id of a peer"),
])  # fmt: skip
def test_an_owner_cannot_sign_what_nobody_would_take(peer: str | None, roles: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse_guest(peer, roles, 60)


# Swarms -----------------------------------------------------------------------------------------------------------------


def invited_swarm(invitations: dict[str, Invitation], rule: str = "invite", **sections: Any) -> VirtualSwarm:
    """A swarm with these trainers."""
    swarm = VirtualSwarm(campaign(admission=rule, **{"sync": {"min_peers": len(invitations)}, **sections}))
    swarm.invitations = {
        name: signed_invitation(replace(each, campaign=swarm.campaign.hash), OWNER) for name, each in invitations.items()
    }
    swarm.start_all("".join(invitations))
    return swarm


async def announce(swarm: VirtualSwarm, name: str, like: str, **changes: Any) -> str:
    """Announce under this name to whoever coordinates; return why that was refused."""
    identity = SimulatedIdentity(name)
    announcement = replace(read_signed(Announcement, swarm.peers[like].announcer.announcement(0), identity), **changes)
    coordinator = swarm.nodes[like].coordinators()[0]
    with pytest.raises(Refused) as refused:
        await RpcEndpoint(swarm.network.transport(name), 5.0).ask(coordinator, ROUND, pack(sign(announcement, identity)), 5.0)
    assert refused.value.code is Code.NOT_ADMITTED
    return refused.value.detail


@pytest.mark.long
async def test_only_invited_peers_are_members_and_only_electors_vote_and_coordinate() -> None:
    swarm = invited_swarm({"A": invitation(), "B": invitation("B", *ELECTOR), "C": invitation("C", *ELECTOR)})
    swarm.start("X")
    life = swarm.tasks.pop("X")
    swarm.peers.pop("X")
    await swarm.until_finished()
    with pytest.raises(UserError, match="this campaign admits by invitation only"):
        await life
    commits = [decided.commit for decided in swarm.nodes["W"].log.since(-1)]
    assert {peer for commit in commits for peer in commit.members} == set("WABC")
    assert all("A" in commit.members and set(commit.electorate) == set("WBC") for commit in commits)
    assert not any("A" in coordinator_order(commit) for commit in commits)
    swarm.assert_replicas_agree()


async def test_a_stranger_is_refused_whatever_it_does() -> None:
    swarm = invited_swarm({"A": invitation("A", *ELECTOR), "B": invitation("B")}, training={"total_steps": 10_000})
    await swarm.until_round(1)
    mine = {"W": invitation(), "A": swarm.invitations["A"], "B": swarm.invitations["B"]}
    for like in ("A", "B"):
        assert "by invitation only" in await announce(swarm, "X", like, invitation=None)
        assert f"is for {like}" in await announce(swarm, "X", like, invitation=mine[like])
        assert "did not sign" in await announce(swarm, "X", like, invitation=replace(mine[like], peer="X"))
        assert "another campaign" in await announce(swarm, "X", like, invitation=mine["W"])
        serves = {"trains": False, "capacity": 0, "tokens": 0, "routed": (0,) * 4}
        assert "not for a helper" in await announce(swarm, "B", "B", **serves)
    commit = swarm.nodes["W"].log.last
    for name in ("X", "B"):
        for elector in commit.electorate:
            request = pack(Prepare(commit.round + 1, commit.id, Ballot(1, name)))
            with pytest.raises(Refused):
                await RpcEndpoint(swarm.network.transport(name), 5.0).ask(elector, PREPARE, request, 5.0)


@pytest.mark.long
async def test_a_peer_whose_invitation_expires_hands_back_its_work_and_says_so() -> None:
    swarm = invited_swarm({"A": invitation("A", *ELECTOR), "B": invitation("B", *ELECTOR)},
                          training={"total_steps": 200})
    await swarm.until_round(1)
    ends = int(swarm.nodes["B"].world.wall_time()) + 30
    swarm.kill("B")
    swarm.invitations["B"] = signed_invitation(replace(swarm.invitations["B"], expires=ends, signature=b""), OWNER)
    swarm.start_again("B")
    life = swarm.tasks.pop("B")
    swarm.peers.pop("B")
    await asyncio.wait({life}, timeout=200)
    with pytest.raises(UserError, match="the invitation expired at "):
        life.result()
    assert "B" in swarm.nodes["W"].departures.gone(swarm.nodes["W"].log.last.id), "it hands back its samples"
    number = swarm.round_of("A")
    await swarm.until_round(number + 3)
    assert "B" not in swarm.nodes["A"].log.last.members
    await swarm.until_finished()


@pytest.mark.long
async def test_a_coordinator_whose_clock_is_ahead_says_so_once_and_rounds_go_on_when_it_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swarm = VirtualSwarm(campaign(admission="open", sync={"min_peers": 1}))
    swarm.invitations = {"A": swarm.invitation("A", ELECTOR)}
    ahead_s = 2.0**41

    def around(world: World) -> World:
        return replace(world, wall_time=lambda: swarm.network.wall_time() + ahead_s)

    swarm.around["W"] = around
    swarm.start_all("A")
    await asyncio.sleep(60)
    assert swarm.nodes["A"].log.round == -1
    said = [each.getMessage() for each in caplog.records if "clock is ahead" in each.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("refused A: the invitation expired at ")
    ahead_s = 0.0
    await swarm.until_round(1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", ["invite", "open"])
@pytest.mark.long
async def test_when_a_majority_of_the_electors_is_away_rounds_wait_and_go_on_when_it_is_back(rule: str) -> None:
    swarm = invited_swarm(
        {"A": invitation("A", *ELECTOR), "B": invitation("B", *ELECTOR), "C": invitation(), "D": invitation()},
        rule, training={"total_steps": 250}, sync={"min_peers": 4, "reform_after_s": 10_000.0},
    )
    await swarm.until_round(1)
    assert set(swarm.nodes["C"].log.last.electorate) == set("WAB")
    for name in "WA":
        swarm.kill(name)
    await asyncio.sleep(30)
    number = swarm.nodes["C"].log.round
    await asyncio.sleep(200)
    assert swarm.nodes["C"].log.round == number, "C and D, without a seat, decide nothing"
    swarm.start_again("W")
    await swarm.until(lambda: swarm.nodes["C"].log.round > number + 1)
    swarm.start_again("A")
    await swarm.until_finished()
    swarm.assert_replicas_agree()


async def test_a_lone_elector_does_not_decide_alone_while_others_train() -> None:
    swarm = invited_swarm({"A": invitation("A", *ELECTOR), "B": invitation()}, training={"total_steps": 200})
    await swarm.until_round(2)
    assert swarm.nodes["A"].log.last.electorate == ("W",), "a second vote would only raise the majority"
    swarm.kill("A")
    await swarm.until(lambda: all(task.done() for name, task in swarm.tasks.items() if name == "B"))
