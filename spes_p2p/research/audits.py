"""Can an auditor tell a trained update from one that was not trained? Measured on the simulator's language and model.

    python -m spes_p2p.research.audits [--seeds 3] [--jobs 2] [--optimizer muon] [--replays] [--json FILE]

Honest peers with own moments, speeds, experts and a codec's error feedback train real rounds; beside them, cheats of each kind
make updates that never enter the base. Each update is scored by what an auditor could compute: it knows the base, the claimed
samples, and the update as it was sent, in four bits. By forward passes a score is high for an honest update. `--replays` also
trains each phase again from the moments to which its peer committed, for honest peers in other arithmetics too, and the update
of shared weights and router passes or not by the rule of `rounds/audits.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.data.samples import Samples
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.audits import Replayed, compared, has_passed
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.testing.simulate.language import SETTINGS, LanguageTrainer, Sentences, first_weights
from spes_p2p.testing.simulate.swarm import EXPERTS, campaign
from spes_p2p.training import trainer as real
from spes_p2p.training.interface import Phase, Trainer
from spes_p2p.training.moments import (
    TINY,
    are_plausible,
    load_moments,
    moments_chunks,
    plausibility,
    read_moments,
)
from spes_p2p.training.pending import PENDING

ROUNDS = {4: 6, 16: 5, 64: 2}
"""Rounds to train, by steps between two of them."""
FORWARD_SAMPLES = (16, 64)
BLOCK, BLOCKS_SHARE = 64, 3
"""One reducer has every third block of an update, in expectation."""
CODEC = CODECS["int4"]
UNASSIGNED, PER_ROUND = 10**6, 1000
"""Epochs of text that nobody is assigned begin here; epochs of a round."""
ALL_EXPERTS = tuple(range(EXPERTS))
PLACES = ("", ", a third, next base")
ARITHMETICS = ("", ", bfloat16", ", two threads", ", other attention")
"""How an auditor's device may differ from that of the audited peer."""
SHOWN = (
    *(f"z {FORWARD_SAMPLES[-1]}{place}" for place in PLACES), *(f"cosine{how}" for how in ARITHMETICS),
    *(f"norm ratio{how}" for how in ARITHMETICS), "drift", "second moments", "passed",
)
"""Scores in the tables; the JSON has all."""

Arrays = dict[str, np.ndarray]
Record = dict[str, float | int | str]


@dataclass(frozen=True)
class Machine:
    """An honest peer."""

    owned: tuple[int, ...]
    speed: float = 1.0
    is_stopped: bool = False
    """Stopped after a random step of each phase; it claims only what it trained."""


HONEST = {
    "auditor": Machine(ALL_EXPERTS), "second": Machine(ALL_EXPERTS), "slow": Machine((0, 1), 0.25), "equal": Machine((2, 3)),
    "fast": Machine((0, 2), 4.0), "stopped": Machine((1, 3), is_stopped=True),
}
MODEL = "equal"
"""The honest peer whose experts the cheats own and whose norms they imitate."""
CHEATS = (
    "zero", "one step", "one step, scaled", "half the steps", "half, scaled", "last round's move", "another's update", "noise",
    "invented moments",
)
DRIFT = 4.0
"""Invented first moments have this many times the mean of m^2 / v that honest ones have."""


@dataclass
class Trained:
    """One peer across rounds: its trainer, and what the codec left pending."""

    trainer: LanguageTrainer
    owned: tuple[int, ...]
    residual: State


@dataclass
class World:
    """One run's campaign and text."""

    config: CampaignConfig
    layout: Layout
    seed: int
    text: Sentences = field(init=False)

    def __post_init__(self) -> None:
        self.text = Sentences(self.seed)

    def trainer(self, base: State, owned: Sequence[int]) -> LanguageTrainer:
        """Return a new trainer."""
        made = LanguageTrainer(self.config, base, tuple(owned), self.text)
        made.seconds_per_step = 1.0
        return made

    def groups(self, owned: Sequence[int]) -> list[Group]:
        """Return what the owner of these experts trains."""
        return [group for group in self.layout.groups if group.expert is None or group.expert in owned]

    def change(self, trainer: LanguageTrainer, base: State, owned: Sequence[int]) -> State:
        """Return local weights minus base, 0 for other experts."""
        found = np.zeros(self.layout.size, np.float32)
        for group in self.groups(owned):
            found[group.start : group.stop] = trainer.read(group) - base[group.start : group.stop]
        return found

    def sent(self, update: State, owned: Sequence[int]) -> State:
        """Return the update as it is decoded."""
        found = np.zeros_like(update)
        for group in self.groups(owned):
            place = slice(group.start, group.stop)
            found[place] = CODEC.decode(CODEC.encode(update[place]), group.size)
        return found

    def train(self, trainer: LanguageTrainer, start: State, number: int, steps: int, epoch: int, first: int = 0) -> None:
        """Train from these weights on, on the samples of this epoch that follow `first` steps."""
        trainer.load_base(start)
        size = self.config.training.batch_size
        slices = (Interval(epoch, first * size, (first + steps) * size),)
        sync_steps = self.config.training.sync_steps
        trainer.train(Phase(number, number * sync_steps, sync_steps, steps, slices), lambda: False, lambda done, speed: None)


@dataclass(frozen=True)
class Claim:
    """What an auditor has of one update."""

    sender: str
    is_honest: bool
    owned: tuple[int, ...]
    update: State
    epoch: int
    """Epoch of the samples."""
    steps: int
    moments: Arrays
    """To which it commits (`training/moments.py`)."""


def moments_of(trainer: Trainer, base: State) -> Arrays:
    """Return what a peer commits to before a phase."""
    return read_moments(b"".join(map(bytes, moments_chunks(trainer, base, 0))))


def run(sync_steps: int, seed: int, optimizer: str, replays: bool) -> list[Record]:
    """Train one swarm; return each update's scores, with `replays` also those of training again."""
    training = {**SETTINGS["training"], "sync_steps": sync_steps, "optimizer": optimizer}
    settings: dict[str, Any] = {**SETTINGS, "training": training}
    config = campaign(10**6 // sync_steps * sync_steps, admission="open", merge={"merge_interval": None}, **settings).config
    layout, base = first_weights(config)
    base = base.copy()
    world, rng = World(config, layout, seed), np.random.default_rng(seed)
    peers = {name: Trained(world.trainer(base, each.owned), each.owned, np.zeros_like(base)) for name, each in HONEST.items()}
    lazy = {name: world.trainer(base, HONEST[MODEL].owned) for name in ("one step", "half the steps")}
    moved, records = np.zeros_like(base), list[Record]()
    for number in range(ROUNDS[sync_steps]):
        claims = [_honest(world, name, peers[name], base, number, rng) for name in HONEST]
        claims += _cheats(world, lazy, base, moved, claims, number, rng)
        moved = _mean(world, [claim for claim in claims if claim.is_honest])
        for claim in claims if number else ():
            label: Record = {"sync_steps": sync_steps, "seed": seed, "round": number, "sender": claim.sender}
            scores = _forward(world, base, base + moved, claim, UNASSIGNED + number, rng)
            if replays:
                scores |= _replays(world, base, number, claim, rng)
            records.append({**label, "honest": int(claim.is_honest), "steps": claim.steps, **scores})
        base += moved
    return records


def _honest(world: World, name: str, peer: Trained, base: State, number: int, rng: np.random.Generator) -> Claim:
    machine = HONEST[name]
    peer.trainer.load_base(base + peer.residual)
    before = moments_of(peer.trainer, base)
    steps = max(1, round(world.config.training.sync_steps * machine.speed))
    if machine.is_stopped:
        steps = int(rng.integers(1, steps + 1))
    epoch = number * PER_ROUND + list(HONEST).index(name)
    world.train(peer.trainer, base + peer.residual, number, steps, epoch)
    update = world.change(peer.trainer, base, peer.owned)
    sent = world.sent(update, peer.owned)
    peer.residual = update - sent
    return Claim(name, True, peer.owned, sent, epoch, steps, before)


def _cheats(
    world: World, lazy: Mapping[str, LanguageTrainer], base: State, moved: State, honest: Sequence[Claim], number: int,
    rng: np.random.Generator,
) -> list[Claim]:
    model = next(claim for claim in honest if claim.sender == MODEL)
    steps = world.config.training.sync_steps
    epochs = {name: number * PER_ROUND + len(HONEST) + place for place, name in enumerate(CHEATS)}
    epochs["one step, scaled"], epochs["half, scaled"] = epochs["one step"], epochs["half the steps"]
    trained, before = {}, dict[str, Arrays]()
    for name, trainer in lazy.items():
        trainer.load_base(base)
        before[name] = moments_of(trainer, base)
        world.train(trainer, base, number, 1 if name == "one step" else max(1, steps // 2), epochs[name])
        trained[name] = world.change(trainer, base, model.owned)
    own = np.zeros_like(base, dtype=bool)
    noise = np.zeros_like(base)
    for group in world.groups(model.owned):
        place = slice(group.start, group.stop)
        own[place] = True
        noise[place] = rng.standard_normal(group.size) * np.linalg.norm(model.update[place]) / math.sqrt(group.size)
    one, half = trained["one step"], trained["half the steps"]
    moments = dict.fromkeys(CHEATS, model.moments) | before
    moments["one step, scaled"], moments["half, scaled"] = before["one step"], before["half the steps"]
    moments["invented moments"], drift = _invented(world, model, rng)
    updates = {
        "zero": np.zeros_like(base), "one step": one, "half the steps": half, "noise": noise,
        "one step, scaled": _as_long_as(model.update, one), "half, scaled": _as_long_as(model.update, half),
        "last round's move": np.where(own, moved, np.float32(0)), "another's update": model.update,
        "invented moments": _as_long_as(model.update, drift),
    }
    return [
        Claim(name, False, model.owned, world.sent(updates[name], model.owned), epochs[name], steps, moments[name])
        for name in CHEATS
    ]


def _as_long_as(model: State, update: State) -> State:
    size = float(np.linalg.norm(update))
    return update * np.float32(np.linalg.norm(model) / size) if size else update


def _invented(world: World, model: Claim, rng: np.random.Generator) -> tuple[Arrays, State]:
    """Return moments that move the weights in a random direction by themselves, and that direction."""
    found, drift = dict(model.moments), np.zeros_like(model.update)
    for name, second in model.moments.items():
        kind, _, of = name.partition("/")
        if kind == "exp_avg_sq":
            first, root = model.moments[f"exp_avg/{of}"], np.sqrt(second)
            size = math.sqrt(DRIFT * float((np.square(first) / np.maximum(second, TINY)).mean()))
            found[f"exp_avg/{of}"] = np.float32(size) * root * rng.choice((-1, 1), second.shape).astype(np.float32)
            placed = world.layout.by_name[of]
            drift[placed.start : placed.stop] = -np.sign(found[f"exp_avg/{of}"]).reshape(-1)
    return found, drift


def _replays(world: World, base: State, number: int, claim: Claim, rng: np.random.Generator) -> Record:
    """Train again as an auditor does, which reduced a third of the update of shared weights and router."""
    mask = np.repeat(rng.random(-(-world.layout.size // BLOCK)) * BLOCKS_SHARE < 1, BLOCK)[: world.layout.size]
    pending = np.zeros_like(base)
    for name, values in claim.moments.items():
        if name.startswith(PENDING):
            group = world.layout.group(name.removeprefix(PENDING))
            pending[group.start : group.stop] = values
    places = [
        (each.kind, np.flatnonzero(mask[each.start : each.stop]) + each.start)
        for each in world.layout.groups if each.expert is None
    ]
    common = {name: each for name, each in claim.moments.items() if _is_common(world, name)}
    scores: Record = {}
    for how in ARITHMETICS if claim.is_honest else ARITHMETICS[:1]:
        again = world.trainer(base, claim.owned)
        load_moments(again, base, claim.moments)
        with _arithmetic(again, how):
            world.train(again, base + pending, number, claim.steps, claim.epoch)
        made, sent = world.change(again, base, claim.owned) - pending, claim.update - pending
        score = compared(
            claim.steps, [Replayed(sent[i], made[i], np.zeros_like(made[i]), kind=kind) for kind, i in places if i.size]
        )
        moments = common, again.optimizer_state(), world.config.training.beta2**claim.steps
        passed = has_passed(score) and are_plausible(*moments)
        scores |= {f"cosine{how}": score.cosine, f"norm ratio{how}": score.norm_ratio}
        scores |= {f"router's cosine{how}": score.router[0], f"router's ratio{how}": score.router[1]}
        scores["passed"] = min(int(passed), int(scores.get("passed", 1)))
        scores["drift"], scores["second moments"] = plausibility(*moments)
    return scores


def _is_common(world: World, name: str) -> bool:
    placed = world.layout.by_name.get(name.partition("/")[2])
    return placed is not None and placed.spec.expert is None


@contextlib.contextmanager
def _arithmetic(made: LanguageTrainer, how: str) -> Iterator[None]:
    """Train on a device that differs in this way."""
    if "attention" in how:
        made.model.set_attn_implementation("eager")
    precision = vars(real)["autocast"]
    if "bfloat16" in how:
        vars(real)["autocast"] = lambda device: torch.autocast("cpu", torch.bfloat16)
    torch.set_num_threads(2 if "threads" in how else 1)
    yield
    torch.set_num_threads(1)
    vars(real)["autocast"] = precision


def _forward(world: World, base: State, new: State, claim: Claim, other: int, rng: np.random.Generator) -> Record:
    """Compare the gain on claimed samples with that on others: from the round's base, and on top of the next one."""
    trainer, size = world.trainer(base, ()), world.config.training.batch_size
    claimed = claim.steps * size
    most = max(FORWARD_SAMPLES)
    chosen = rng.permutation(claimed)[:most]
    assigned = np.concatenate([_sample(world, claim.epoch, int(place)) for place in chosen])
    apart = np.concatenate([_sample(world, other, 10**5 + place) for place in range(most)])
    blocks = rng.random(-(-claim.update.size // BLOCK)) * BLOCKS_SHARE < 1
    third = np.where(np.repeat(blocks, BLOCK)[: claim.update.size], claim.update, np.float32(0))
    scores: Record = {}
    for where, start in (("", base), (", next base", new)):
        trainer.load_base(start)
        before = trainer.losses_of(assigned), trainer.losses_of(apart)
        for part, update in (("", claim.update), (", a third", third)):
            trainer.load_base(start + update)
            gains = [old - trainer.losses_of(samples) for old, samples in zip(before, (assigned, apart), strict=True)]
            for count in FORWARD_SAMPLES:
                ours, others = gains[0][:count], gains[1][:count]
                error = math.sqrt(sum(float(each.var(ddof=1)) / each.size for each in (ours, others)))
                effect = float(ours.mean() - others.mean())
                found = {"effect": effect, "error": error, "z": effect / error if error else 0.0}
                scores |= {f"{name} {count}{part}{where}": value for name, value in found.items()}
    return scores


def _sample(world: World, epoch: int, place: int) -> Samples:
    return world.text.read(Interval(epoch, place, place + 1))


def _mean(world: World, claims: Sequence[Claim]) -> State:
    """Return the round's mean, by steps."""
    mean = np.zeros(world.layout.size, np.float32)
    for group in world.layout.groups:
        owners = [each for each in claims if group.expert is None or group.expert in each.owned]
        total = sum(each.steps for each in owners)
        for each in owners:
            mean[group.start : group.stop] += each.update[group.start : group.stop] * np.float32(each.steps / total)
    return mean


def auc(honest: Sequence[float], cheats: Sequence[float]) -> float:
    """Return the chance that an honest score is above a cheat's; ties count half."""
    a, b = np.array(honest)[:, None], np.array(cheats)[None]
    return float(((a > b) + 0.5 * (a == b)).mean())


def report(records: Sequence[Record]) -> str:
    """Return a table for each score: how it separates honest updates from each cheat's."""
    lines = []
    for name in dict.fromkeys(name for record in records for name in record):
        if name not in SHOWN:
            continue
        lines += [f"\n{name}\n", f"| steps | honest | {' | '.join(CHEATS)} |", "|---" * (len(CHEATS) + 2) + "|"]
        for steps in sorted({int(record["sync_steps"]) for record in records}):
            scored = [record for record in records if record["sync_steps"] == steps and name in record]
            honest = [float(record[name]) for record in scored if record["honest"] and record["sender"] != "auditor"]
            cells = ["{:.2f}, {:.2f}, {:.2f}".format(*np.quantile(honest, (0.01, 0.5, 0.99)))]
            for cheat in CHEATS:
                found = [float(record[name]) for record in scored if record["sender"] == cheat]
                cells.append(f"{np.median(found):.2f}, {np.max(found):.2f}, {auc(honest, found):.2f}" if found else "-")
            lines.append(f"| {steps} | {' | '.join(cells)} |")
    lines.append("\nHonest: 1st, 50th, 99th percentile. Cheats: median, maximum, area under the ROC curve against all honest.")
    for place in PLACES:
        lines += ["", f"Mean effect on 64 samples{place}, in thousandths of a nat, with the standard error of one audit", ""]
        lines += [f"| steps | {' | '.join((*HONEST, *CHEATS))} |", "|---" * (len(HONEST) + len(CHEATS) + 1) + "|"]
        for steps in sorted({int(record["sync_steps"]) for record in records}):
            cells = [_effect(records, steps, sender, place) for sender in (*HONEST, *CHEATS)]
            lines.append(f"| {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _effect(records: Sequence[Record], steps: int, sender: str, place: str) -> str:
    found = [record for record in records if (record["sync_steps"], record["sender"]) == (steps, sender)]
    means = (np.mean([float(record[f"{name} 64{place}"]) for record in found]) for name in ("effect", "error"))
    return " ± ".join(f"{1000 * mean:.0f}" for mean in means)


def _run(arguments: tuple[int, int, str, bool]) -> list[Record]:
    torch.set_num_threads(1)
    return run(*arguments)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, nargs="+", choices=sorted(ROUNDS), default=sorted(ROUNDS))
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--replays", action="store_true", help="also train each phase again")
    parser.add_argument("--json", type=Path, help="also write each update's scores here, one a line")
    arguments = parser.parse_args()
    how = arguments.optimizer, arguments.replays
    runs = [(steps, seed, *how) for seed in range(arguments.seeds) for steps in arguments.steps]
    with ProcessPoolExecutor(min(arguments.jobs, len(runs)), get_context("spawn")) as pool:
        records = list[Record]()
        for found in pool.map(_run, runs):
            records += found
            if arguments.json is not None:
                arguments.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
