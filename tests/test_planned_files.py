"""What the planner says of a peer's disk is what a peer of a real campaign has, counted as it writes."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.campaign.planner import DiskBytes, bootstrap_disk_bytes, disk_bytes
from spes_p2p.campaign.room import Choice
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.consensus.output import VOTES
from spes_p2p.content.bases import PINNED_S
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import layout_of
from spes_p2p.model.memory import Setup, device_bytes
from spes_p2p.rounds.archive import NO_ARCHIVE, Archive
from spes_p2p.storage.store import SMALLEST_SPARE_BYTES, DirectoryStore
from spes_p2p.testing.simulate.swarm import EXPERTS, NUM_SAMPLES, VirtualSwarm, campaign, simulate
from spes_p2p.training.interface import Phase, PhaseReport
from spes_p2p.training.trainer import TorchTrainer

MODEL = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1024}
OWNED = EXPERTS // 2


class Text:
    """Samples that count upwards from the position."""

    num_samples = NUM_SAMPLES

    def read(self, interval: Interval) -> np.ndarray:
        return (np.arange(interval.start, interval.stop)[:, None] + np.arange(16)) % 1000

    def read_spread(self, count: int) -> np.ndarray:
        return self.read(Interval(0, 0, count))


class Trainer(TorchTrainer):
    """The real one, in virtual time."""

    samples_by_round: Any

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        report = super().train(phase, should_stop, on_step)
        return replace(report, seconds=float(report.steps))


class Lives:
    """Two trainers, A's run-dir and the bootstrap's a folder each, looked at whenever one of them flushes a file."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        archive: Archive = NO_ARCHIVE,
        **sections: dict[str, Any],
    ):
        training = {"sync_steps": 2, "warmup_steps": 0, "total_steps": 14, **sections.pop("training", {})}
        sync = {"min_peers": 2, **sections.pop("sync", {})}
        self.campaign = campaign(24, "int8", model=MODEL, training=training, sync=sync, **sections)
        self.layout = layout_of(self.config.model)
        assert 4 * self.layout.size > SMALLEST_SPARE_BYTES
        self.run_dirs = {name: folder / name for name in "WA"}
        self.on_disk = dict.fromkeys("WA", 0)
        self._flush = os.fsync
        monkeypatch.setattr("spes_p2p.storage.store.os.fsync", self._look_at_disk)
        self._archive = archive

    @property
    def config(self) -> CampaignConfig:
        return self.campaign.config

    async def go(self) -> None:
        self.swarm = VirtualSwarm(
            self.campaign, seconds_per_step=PINNED_S, archive=self._archive, layout=self.layout,
            make_trainer=lambda base, owned: Trainer(self.config, base, owned, Text(), Text()),
        )
        disk, votes = DirectoryStore(self.run_dirs["W"]), self.swarm.stores["W"].read(VOTES)
        assert votes is not None
        # Or the bootstrap would be an elector that lost its disk, and the swarm would begin with a reform.
        disk.write(VOTES, [votes])
        self.swarm.stores["W"] = disk  # type: ignore[assignment]
        self.swarm.start_bootstrap()
        self.swarm.start("A", experts=OWNED, store=DirectoryStore(self.run_dirs["A"]))
        self.swarm.start("B", experts=OWNED)
        await self.swarm.until_finished()
        await asyncio.sleep(1)

    def _look_at_disk(self, descriptor: int) -> None:
        """Nothing that is about to be replaced is gone, and what replaces it is whole."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        for name, run_dir in self.run_dirs.items():
            sizes = {entry.inode(): entry.stat().st_size for entry in os.scandir(run_dir)} if run_dir.exists() else {}
            self.on_disk[name] = max(self.on_disk[name], sum((sizes | mapped_files(run_dir, maps)).values()))
        self._flush(descriptor)


def mapped_files(folder: Path, maps: list[str]) -> dict[int, int]:
    """Size of each file of this folder that this process maps (`maps`: its list of mappings), by inode, removed ones too."""
    found: dict[int, int] = {}
    for line in maps:
        if f" {folder}/" in line:
            addresses, _, _, _, inode, _ = line.split(maxsplit=5)
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found[int(inode)] = stop - start
    return found


def planned(config: CampaignConfig) -> DiskBytes:
    setup = Setup(OWNED, "fp32", "adamw", 2, "cpu", bf16=False, muon=config.training.optimizer == "muon")
    choice = Choice(setup, device_bytes(config.model, config.training.sequence_length, setup))
    return disk_bytes(config, choice)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"sync": {"overlap": True}},
    "outer momentum": {"outer": {"shared_momentum": 0.9, "experts_momentum": 0.9}},
    "muon": {"training": {"optimizer": "muon", "embedding_lr_ratio": 0.5}},
}


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """A ring of references to what a round had keeps its files until it is found: there must be none."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name == "plain" else pytest.mark.slow) for name in VARIANTS]
)
def test_the_disk_of_a_peer_holds_what_is_planned(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(tmp_path, monkeypatch, **VARIANTS[variant])
    simulate(lives.go)
    disk = planned(lives.config)
    assert lives.on_disk["A"] == pytest.approx(disk.total - disk.download, rel=0.03)


@pytest.mark.slow
def test_a_bootstrap_peer_keeps_the_bases_that_it_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(tmp_path, monkeypatch, Archive(2, 3))
    simulate(lives.go)
    disk = bootstrap_disk_bytes(lives.config, 3)
    planned = disk.total - disk.download  # for a bootstrap peer that reduces nearly all parts; here it reduces a third
    assert 0.85 * planned < lives.on_disk["W"] < planned
