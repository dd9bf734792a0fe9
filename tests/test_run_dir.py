"""A peer that died in the middle of a write, or whose files were harmed, goes on from whole state or says why it does not."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.campaign.files import CampaignFiles, keep_campaign, read_run_dir, sha256
from spes_p2p.errors import Damaged, RunDirInUse, UserError
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit
from spes_p2p.observe.events import BaseRestored
from spes_p2p.rounds.base import Base, load_base, save_base
from spes_p2p.rounds.digest import piece_digests, state_digest
from spes_p2p.session.own_state import OwnState, StateFile
from spes_p2p.session.run_dir import made_run_dir
from spes_p2p.storage.files import write_whole
from spes_p2p.storage.store import DirectoryStore, frame_record
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

POINTS = [
    ("append", "commits.log"), ("append:done", "commits.log"),
    ("write:draft", "votes"), ("write:rename", "votes"), ("write:done", "votes"),
    ("write:rename", "bodies-of-results-3"), ("write:done", "bodies-of-results-3"),
    ("write:rename", "results-3"), ("write:done", "results-3"),
    ("write:rename", "checkpoint-1.safetensors"), ("write:done", "checkpoint-1.safetensors"),
    ("write:rename", "base"), ("write:done", "base"),
]


def until_reached(swarm: VirtualSwarm, name: str, point: tuple[str, str], act: Callable[[], None]) -> list[None]:
    """`act` when this peer's store comes to a point in round 3, once; what is returned is not empty from then on."""
    reached: list[None] = []

    def fault(at: str, blob: str) -> None:
        peer = swarm.peers.get(name)
        if not reached and at == point[0] and blob.startswith(point[1]) and peer is not None and peer.replica.base.round >= 2:
            reached.append(None)
            act()

    store = swarm.stores[name]
    assert isinstance(store, MemoryStore)
    store.fault = fault
    return reached


@pytest.mark.parametrize("point", POINTS, ids=" ".join)
@pytest.mark.sampled(2)
async def test_a_peer_killed_at_any_point_of_any_write_goes_on_with_the_same_bits(point: tuple[str, str]) -> None:
    swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    reached = until_reached(swarm, "B", point, lambda: swarm.kill("B"))
    await swarm.until(lambda: bool(reached), 300)
    swarm.restart("B")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert swarm.recorders["B"].of(BaseRestored)[-1].source == "disk"


async def test_a_peer_killed_between_checkpoint_and_base_keeps_its_moments(caplog: pytest.LogCaptureFixture) -> None:
    swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    reached = until_reached(swarm, "B", ("write:draft", "base"), lambda: swarm.kill("B"))
    await swarm.until(lambda: bool(reached), 300)
    swarm.restart("B")
    await swarm.until_finished()
    assert "fresh moments" not in caplog.text


STOPPING = [(at, name) for at, name in POINTS if not at.endswith("done") and name != "votes"]


@pytest.mark.parametrize("point", STOPPING, ids=" ".join)
@pytest.mark.sampled(2)
async def test_a_peer_with_a_full_disk_stops_with_the_reason_and_goes_on_when_there_is_room(point: tuple[str, str]) -> None:
    def full() -> None:
        raise UserError(f"{point[1]}: cannot be written (No space left on device); make room")

    swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    task = swarm.tasks.pop("B")
    filling = swarm.stores["B"]
    assert isinstance(filling, MemoryStore)

    def no_room(at: str, blob: str) -> None:
        if at == point[0] and blob.startswith(point[1]) and "B" in swarm.peers and swarm.round_of("B") >= 2:
            full()

    filling.fault = no_room
    await asyncio.wait({task}, timeout=60.0)
    assert isinstance(task.exception(), UserError)
    filling.fault = None
    swarm.restart("B")
    await swarm.until_finished()
    swarm.assert_replicas_agree()


async def test_a_vote_that_finds_no_room_is_not_given_and_the_others_decide() -> None:
    def full() -> None:
        raise UserError("votes: cannot be written (No space left on device); make room")

    swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    reached = until_reached(swarm, "B", ("write:rename", "votes"), full)
    await swarm.until_finished()
    assert reached
    swarm.assert_replicas_agree()


async def test_work_in_the_background_that_finds_no_room_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    swarm = VirtualSwarm(campaign())
    swarm.start_bootstrap()
    for error in (UserError("commits.log: cannot be written"), ValueError("a bug")):
        swarm.nodes["W"].spawn(fail(error))
    await asyncio.sleep(1)
    gc.collect()
    told = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records if record.levelname == "ERROR"]
    assert told == [("commits.log: cannot be written", False), ("a bug", True)]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut to a byte": lambda content: content[:1],
    "cut in its header": lambda content: content[:40],
    "cut in the middle": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "a bit of its length": lambda content: flipped(content, 1),
    "a bit of its header": lambda content: flipped(content, 60),
    "a bit in the middle": lambda content: flipped(content, len(content) // 2),
    "a bit at the end": lambda content: flipped(content, len(content) - 1),
}
FILES = ("base", "checkpoint-1.safetensors", "commits.log", "votes", "results-3", "bodies-of-results-3")


def flipped(content: bytes, place: int) -> bytes:
    place = min(place, len(content) - 1)
    return content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]


async def at_round_3(run_dir: Path, earlier: Path) -> VirtualSwarm:
    """A swarm whose peer B lies killed in a run-dir after round 3; `earlier` has its files of round 1."""
    swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
    swarm.start_bootstrap()
    swarm.start("A")
    swarm.start("B", store=DirectoryStore(run_dir))
    await swarm.until_round(1)
    shutil.copytree(run_dir, earlier)
    await swarm.until_round(3)
    await asyncio.sleep(4)
    assert swarm.round_of("B") == 3
    swarm.kill("B")
    return swarm


async def starts_again(swarm: VirtualSwarm, run_dir: Path) -> None:
    """B on its run-dir comes to the end with the bits of the others."""
    swarm.start("B", store=DirectoryStore(run_dir), where=str(run_dir))
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [*HARMS, "deleted", "an older one"])
@pytest.mark.sampled(4)
@pytest.mark.long
async def test_a_harmed_file_of_a_run_dir_is_recovered(
    tmp_path: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, earlier = tmp_path / "run", tmp_path / "earlier"
    swarm = await at_round_3(run_dir, earlier)
    (target,) = run_dir.glob(f"{name}*")
    if harm in HARMS:
        target.write_bytes(HARMS[harm](target.read_bytes()))
    elif harm == "deleted" or not (earlier / target.name).exists():
        target.unlink()
    else:
        shutil.copy(earlier / target.name, target)
    await starts_again(swarm, run_dir)
    told = f"{run_dir / name} is damaged, or another campaign's; downloading the base again" in caplog.text
    assert told == (name == "base" and harm in HARMS)


NAMED: dict[str, Any] = {name: 20 * name.encode() for name in ("manifest", "validation_manifest", "tokenizer", "start_files")}
CAMPAIGN_FILES = ("campaign.json", "genesis", "tokenizer.json", "manifest.json", "validation_manifest.json", "start_files.json")


@pytest.mark.parametrize("name", CAMPAIGN_FILES)
@pytest.mark.parametrize("harm", [*HARMS, "deleted"])
def test_a_harmed_file_of_the_campaign_is_named_and_restored_by_the_campaign_that_the_genesis_belongs_to(
    tmp_path: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its campaign file, which is written last, a run-dir is a new one."""
    known = campaign().model_copy(update={f"{file}_sha256": sha256(content) for file, content in NAMED.items()})
    genesis = VirtualSwarm(known).genesis
    files = CampaignFiles(known, **NAMED, folders=())
    keep_campaign(files, genesis, tmp_path)
    whole = read_run_dir(tmp_path)
    assert whole is not None
    assert (whole[0].campaign, whole[1]) == (known, genesis)
    target = tmp_path / name
    content = target.read_bytes()
    target.unlink()
    if harm in HARMS:
        target.write_bytes(HARMS[harm](content))
    elif name == "campaign.json":
        assert read_run_dir(tmp_path) is None
        return
    with pytest.raises(UserError, match=str(tmp_path)) as refused:
        read_run_dir(tmp_path)
    assert "\n" not in str(refused.value)
    other = campaign(name="other").model_copy(update={f"{file}_sha256": sha256(content) for file, content in NAMED.items()})
    of_other = CampaignFiles(other, **NAMED, folders=()), VirtualSwarm(other).genesis
    for stranger in (of_other, (files, replace(genesis, step=1))):
        with pytest.raises(UserError):
            keep_campaign(*stranger, tmp_path)
    if name == "genesis":
        with pytest.raises(UserError, match="copy it from another peer's run-dir"):
            keep_campaign(files, genesis, tmp_path)
    else:
        keep_campaign(files, genesis, tmp_path)
        assert read_run_dir(tmp_path) == whole
        assert caplog.messages == [f"{tmp_path}: restored {name}, damaged or missing"]


@pytest.mark.parametrize("change", [
    lambda content: b"[null]", lambda content: content.replace(b'manifest_sha256":"', b'manifest_sha256":"0'),
    lambda content: content.replace(b'"vocab_size"', b'"vocab-size"'),
])  # fmt: skip
def test_a_campaign_file_that_is_not_the_one_of_genesis_is_what_is_damaged(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    known = campaign().model_copy(update={f"{file}_sha256": sha256(content) for file, content in NAMED.items()})
    keep_campaign(CampaignFiles(known, **NAMED, folders=()), VirtualSwarm(known).genesis, tmp_path)
    path = tmp_path / "campaign.json"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Damaged, match=f"{path}: damaged, or of another campaign than genesis; join again"):
        read_run_dir(tmp_path)


@pytest.mark.parametrize("harm", ["cut in the middle", "deleted", "another's"])
def test_a_genesis_commit_is_restored_where_the_first_commit_follows_from_it(tmp_path: Path, harm: str) -> None:
    known = campaign().model_copy(update={f"{file}_sha256": sha256(content) for file, content in NAMED.items()})
    genesis = VirtualSwarm(known).genesis
    files = CampaignFiles(known, **NAMED, folders=())
    keep_campaign(files, genesis, tmp_path)
    whole = read_run_dir(tmp_path)
    (tmp_path / "genesis").unlink()
    if harm == "another's":
        (tmp_path / "genesis").write_bytes(frame_record(pack(VirtualSwarm(campaign(name="other")).genesis)))
    if harm in HARMS:
        (tmp_path / "genesis").write_bytes(HARMS[harm](frame_record(pack(genesis))))
    for parent, is_proven in ((replace(genesis, step=1), False), (genesis, True)):
        first = CertifiedCommit(replace(genesis, round=0, parent=parent.id), Ballot(1, ""), ())
        (tmp_path / "commits.log").write_bytes(frame_record(pack(first)))
        if is_proven:
            keep_campaign(files, genesis, tmp_path)
            assert read_run_dir(tmp_path) == whole
        else:
            with pytest.raises(UserError, match="copy it from another peer's run-dir, or join with another --run-dir") as error:
                keep_campaign(files, genesis, tmp_path)
            wrong = {"deleted": "missing", "another's": "of another campaign"}.get(harm, "damaged")
            assert str(error.value).startswith(f"{tmp_path / 'genesis'}: {wrong}")


@pytest.mark.parametrize(("error", "is_kept"), [(RunDirInUse("in use"), True), (UserError("no peer answers"), False)])
def test_who_does_not_get_a_new_run_dir_leaves_it_to_the_peer_that_has_it(
    error: UserError, is_kept: bool, tmp_path: Path
) -> None:
    own = StateFile(tmp_path / "run")

    def start() -> None:
        with made_run_dir(tmp_path / "run", own.discard):
            own.write(OwnState("preparing", 0.0))
            (tmp_path / "run/identity.key").write_bytes(b"")  # of the other, which began at the same time
            raise error

    with pytest.raises(UserError, match=str(error)):
        start()
    left = sorted(path.name for path in (tmp_path / "run").glob("*"))
    assert left == (["identity.key"] if is_kept else [])


def test_a_folder_that_cannot_be_written_is_named_before_any_file_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(UserError, match=f"^{folder}: this user may not write"), made_run_dir(folder):
        write_whole(folder / "genesis", b"")


def test_a_base_of_another_model_is_called_damaged() -> None:
    store = MemoryStore()
    values = np.zeros(8, np.float32)
    save_base(store, Base("c", 3, values, state_digest(values), None, piece_digests(values)))
    with pytest.raises(Damaged, match="holds 8 values, this campaign's model has 9; start its peer again"):
        load_base(store, 9, "run")


@pytest.mark.parametrize("name", CAMPAIGN_FILES)
def test_a_folder_in_place_of_a_file_of_the_campaign_is_not_called_damage(tmp_path: Path, name: str) -> None:
    """Joining again could not restore the file."""
    known = campaign().model_copy(update={f"{file}_sha256": sha256(content) for file, content in NAMED.items()})
    files, genesis = CampaignFiles(known, **NAMED, folders=()), VirtualSwarm(known).genesis
    keep_campaign(files, genesis, tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    for use in (lambda: read_run_dir(tmp_path), lambda: keep_campaign(files, genesis, tmp_path)):
        with pytest.raises(IsADirectoryError) as refused:
            use()
        assert refused.value.filename == str(tmp_path / name)


@pytest.mark.long
async def test_a_damaged_checkpoint_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    swarm = await at_round_3(tmp_path / "run", tmp_path / "earlier")
    checkpoint = tmp_path / "run" / "checkpoint-1.safetensors"
    checkpoint.write_bytes(flipped(checkpoint.read_bytes(), checkpoint.stat().st_size - 1))
    await starts_again(swarm, tmp_path / "run")
    assert "checkpoint-1.safetensors is truncated or damaged" in caplog.text
