"""Experiment files: arms with their learning rates and seeds, and the resulting runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spes_p2p.config.campaign import CampaignConfig, parse_campaign_config
from spes_p2p.config.problems import broken_rule, validated
from spes_p2p.config.section import Section
from spes_p2p.config.types import Count, Positive, PositiveNumber, Text
from spes_p2p.config.yaml_file import read_yaml_mapping
from spes_p2p.errors import UserError
from spes_p2p.testing.attacks.kinds import AttackKind

Overrides = dict[str, dict[str, Any]]


class Yardstick(Section):
    """The two arms between which the share of the gap is measured."""

    alone: Text
    centralised: Text


class First(Section):
    """Train a smaller model first, then split its experts (`upcycle.py`).

    The learning rate schedule spans both stages; moments and the merging schedule start again, and the result's `series` is
    that of the second stage.
    """

    steps: Positive
    """Number of the arm's steps; the large model trains for the rest."""
    model: dict[str, Any]
    """Fields of the smaller model that differ: `{moe_num_experts: 4, moe_top_k: 1}`."""


class Arm(Section):
    """One way to train, compared with others on equal data and schedule."""

    name: Text
    mode: Literal["centralised", "diloco", "spes"] = "spes"
    """centralised: one peer with the whole batch; diloco: each peer trains all weights; spes: only owned experts."""
    peers: Positive = 4
    batch: Positive = 8
    """Samples per step of one peer; a centralised arm uses peers x batch."""
    sync_steps: Positive = 30
    owners: Positive = 1
    """Owners per expert (spes)."""
    learning_rates: tuple[PositiveNumber, ...]
    """All are run with the first seed, the best one with the other seeds."""
    seeds: Positive = 1
    domains: Literal["mixed", "one a peer"] = "mixed"
    """Text of each peer: all domains, or one domain per peer."""
    donors: Literal["base", "aggregate"] = "base"
    """Which experts a merge compares: those of the base before the round, or, as SPES does, of the one after it."""
    error_buffer: bool = False
    """SparseLoCo's error feedback for the shared weights (`ledgers.py`)."""
    attack: AttackKind | None = None
    attackers: Count = 1
    """Peers that attack, the last ones by number, if there is an `attack`."""
    campaign: Overrides = Field(default_factory=dict)
    """Campaign settings that differ: `outer: {shared_momentum: 0.9}`."""
    first: First | None = None
    """None: train the same model from the start."""
    yardstick: Yardstick | None = None
    """Overrides the experiment's, for an arm with a change that centralised training could make too."""


class Experiment(Section):
    """An experiment file."""

    name: Text
    text: Text
    """Path of the prepared text, relative to the experiment file."""
    text_sha256: str | None = None
    """Digest of the text behind the results (`text_digest`), so that `report` works where the text is not."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of all arms, which store foreign experts in float32."""
    campaign: Overrides
    """Campaign settings that all arms share: model, training."""
    yardstick: Yardstick | None = None
    evaluations: Positive = 12
    """Number of evenly spaced measurements of the held-out loss."""
    samples: Positive = 32
    """Held-out samples per domain for each measurement."""
    final_samples: Positive = 128
    """The same for the last measurement."""
    test_samples: Count = 0
    """Others per domain, for the tables: learning rates are chosen by the last measurement. 0: it serves for both."""
    measured_rounds: Count = 6
    """Number of rounds with diagnostics."""
    pictured: tuple[Text, ...] = ()
    """Arms in the plots; empty: all. The tables have all arms."""
    note: str = ""
    """Text below the report's tables."""
    arms: tuple[Arm, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise broken_rule("two arms have the same name", "arms", next(name for name in names if names.count(name) > 1))
        for name in self.pictured:
            if name not in names:
                raise broken_rule("must be the name of an arm of this file", "pictured", name)
        return self


@dataclass(frozen=True)
class Run:
    """One training run: an arm at a learning rate, with a seed."""

    experiment: Experiment
    arm: Arm
    rate: float
    seed: int

    @property
    def config(self) -> CampaignConfig:
        """The run's campaign. Raises UserError for invalid settings."""
        return parse_campaign_config(_campaign(self), f"arm {self.arm.name}")

    @property
    def members(self) -> int:
        """Number of trainers."""
        return 1 if self.arm.mode == "centralised" else self.arm.peers

    @property
    def experts_per_peer(self) -> int:
        """Maximum number of experts that one peer trains."""
        experts = self.config.model.moe_num_experts
        return experts if self.arm.mode != "spes" else -(-experts * min(self.arm.owners, self.members) // self.members)

    @property
    def stages(self) -> tuple[tuple[Run, int], ...]:
        """Consecutive stages, each with its first step."""
        first, total = self.arm.first, self.config.training.total_steps
        if first is None:
            return ((self, 0),)
        few = self._changed({"model": first.model, "training": {"total_steps": first.steps}})
        return (few, 0), (self._changed({"training": {"total_steps": total - first.steps}}), first.steps)

    def _changed(self, sections: Overrides) -> Run:
        campaign = {name: dict(values) for name, values in self.arm.campaign.items()}
        for section, values in sections.items():
            campaign[section] = {**campaign.get(section, {}), **values}
        return replace(self, arm=self.arm.model_copy(update={"first": None, "campaign": campaign}))

    def key(self, text_digest: str) -> str:
        """Return a hash of the inputs of the result; a run whose key is in the results is not repeated.

        Only settings in the files count, so a new setting with a neutral default keeps old results valid.
        """
        config = self.config.model_dump(mode="json", exclude={"name": True, "evaluation": True}, exclude_unset=True)
        samples = self.experiment.final_samples
        unusual: list[Any] = [v for v, usual in ((self.experiment.device, "cpu"), (self.arm.domains, "mixed")) if v != usual]
        if self.experiment.test_samples:
            unusual.append(f"tested on {self.experiment.test_samples}")
        if self.arm.donors != "base":
            unusual.append(f"donors of the {self.arm.donors}")
        if self.arm.error_buffer:
            unusual.append("error buffer")
        if self.arm.attack is not None:
            unusual += [self.arm.attack, self.arm.attackers]
        if self.arm.first is not None:
            unusual.append(self.arm.first.model_dump(mode="json"))
        content = json.dumps([config, self.members, self.experts_per_peer, samples, text_digest, *unusual], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file. Raises UserError naming file, field and valid values."""
    file = read_yaml_mapping(path, "experiment file")
    experiment = validated(Experiment, file.values, file.where)
    for arm in experiment.arms:
        try:
            for stage, _ in Run(experiment, arm, arm.learning_rates[0], 0).stages:
                parse_campaign_config(_campaign(stage), f"arm {arm.name}")
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return experiment


def runs_of(experiment: Experiment, arm: Arm) -> list[Run]:
    """Return the arm's runs at all rates and seeds."""
    return [Run(experiment, arm, rate, seed) for rate in arm.learning_rates for seed in range(arm.seeds)]


def open_runs(experiment: Experiment, losses: Mapping[tuple[str, float, int], float]) -> Iterator[Run]:
    """Yield the open runs, most informative first. `losses`: final losses of finished runs by (arm, rate, seed).

    First with seed 0 each arm's first learning rate, then the second ones, and so on; then the other seeds at the best rates.
    """
    for place in range(max(len(arm.learning_rates) for arm in experiment.arms)):
        for arm in experiment.arms:
            for rate in arm.learning_rates[place : place + 1]:
                if (arm.name, rate, 0) not in losses:
                    yield Run(experiment, arm, rate, 0)
    for seed in range(1, max(arm.seeds for arm in experiment.arms)):
        for arm in experiment.arms:
            best = best_rate(arm, losses)
            if seed < arm.seeds and best is not None and (arm.name, best, seed) not in losses:
                yield Run(experiment, arm, best, seed)


def best_rate(arm: Arm, losses: Mapping[tuple[str, float, int], float]) -> float | None:
    """Return the learning rate with the lowest final loss at seed 0; None if the sweep is incomplete."""
    swept = {rate: losses[arm.name, rate, 0] for rate in arm.learning_rates if (arm.name, rate, 0) in losses}
    return min(swept, key=lambda rate: swept[rate]) if len(swept) == len(arm.learning_rates) else None


def _campaign(run: Run) -> dict[str, Any]:
    arm, central = run.arm, run.arm.mode == "centralised"
    sections: Overrides = {section: dict(values) for section, values in run.experiment.campaign.items()}
    for section, values in _of_mode(run).items():
        sections[section] = {**sections.get(section, {}), **values}
    for section, values in arm.campaign.items():
        sections[section] = {**sections.get(section, {}), **values}
    batch = arm.batch * (arm.peers if central else 1)
    training = sections["training"]
    micro = training.get("micro_batch_size")
    training |= {"batch_size": batch, "sync_steps": arm.sync_steps, "learning_rate": run.rate, "seed": run.seed}
    training["micro_batch_size"] = min(micro, batch) if micro is not None else None
    sections["model"] = {**sections["model"], "seed": run.seed}
    return {"name": "experiment", "data": {"manifest": "-", "tokenizer": "-"}, **sections}


def _of_mode(run: Run) -> Overrides:
    evaluation = {"every_rounds": 0, "max_samples": run.experiment.samples}
    sync = {"min_peers": run.members, "join_grace_s": 0.0}
    if run.arm.mode == "centralised":
        return {"evaluation": evaluation, "sync": {**sync, "codec": "none"}, "experts": {"redundancy": 1}}
    owners = run.arm.peers if run.arm.mode == "diloco" else run.arm.owners
    return {"evaluation": evaluation, "sync": sync, "experts": {"redundancy": owners}}


def arm_named(experiment: Experiment, name: str) -> Arm:
    """Return the arm of this name. Raises UserError if there is none."""
    for arm in experiment.arms:
        if arm.name == name:
            return arm
    raise UserError(f"experiment {experiment.name}: has no arm {name!r}")
