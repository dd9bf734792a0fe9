"""How far is an honest peer's update from that of an auditor that trains the phase again on another kind of device?

    python -m spes_p2p.research.replays --text FOLDER [--size demo|hundred] [--steps 30 100] [--rounds N] [--seeds S]
        [--optimizers adamw muon] [--kinds CPU GPU ...] [--jobs N] [--json FILE]

FOLDER is one that `tools/experiments prepare` wrote. A peer that owns two experts trains a few phases as each kind of trainer,
with a codec's error feedback, on a model whose experts have all been trained before. Each kind then trains these phases again
from the moments to which the peer committed, and the rule of `rounds/audits.py` decides. The other end: an update of half of
the steps. Each process computes with OMP_NUM_THREADS threads, one by default.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import State, initial_state
from spes_p2p.research.audits import CODEC, Arrays, Record, moments_of
from spes_p2p.research.spec import Run, load_experiment
from spes_p2p.research.text import Text, open_text
from spes_p2p.rounds.audits import Replayed, compared, has_passed
from spes_p2p.training import trainer as real
from spes_p2p.training.batches import Reader
from spes_p2p.training.interface import Phase
from spes_p2p.training.moments import are_plausible, load_moments, plausibility
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.pending import PENDING, trained_groups
from spes_p2p.training.trainer import TorchTrainer

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
FILES = {"demo": "tiny.yaml", "hundred": "hundred.yaml"}
"""Experiments with the models, learning rates and beta2 of the sizes."""
STEP_TOKENS = 2048
OWNED = (0, 1)


@dataclass(frozen=True)
class Kind:
    """A device and its arithmetic."""

    device: str
    dtype: torch.dtype | None = None
    """In which products are computed; None: as a peer does there."""
    options: TrainingOptions = field(default_factory=TrainingOptions)


KINDS = {
    "CPU": Kind("cpu"),
    "CPU bf16": Kind("cpu", torch.bfloat16),
    "CPU 8-bit": Kind("cpu", options=TrainingOptions(optimizer="adamw8bit")),
    "GPU": Kind("cuda"),
    "GPU uncompiled": Kind("cuda", options=TrainingOptions(compiles=False)),
    "GPU float32": Kind("cuda", torch.float32, TrainingOptions(compiles=False, stored="fp32")),
    "GPU 8-bit": Kind("cuda", options=TrainingOptions(optimizer="adamw8bit")),
}


@dataclass(frozen=True)
class Job:
    """One peer's run, and the audits of its phases."""

    config: CampaignConfig
    size: str
    audited: str
    auditors: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Claim:
    """What an auditor has of one phase."""

    phase: Phase
    base: State
    moments: Arrays
    sent: Mapping[str, Arrays]
    """By sender, `honest` or `half`: the update as it is decoded, by group."""


def available() -> list[str]:
    """Return the kinds that this machine has."""
    has_8bit, has_gpu = importlib.util.find_spec("torchao") is not None, torch.cuda.is_available()
    return [
        name for name, kind in KINDS.items()
        if (kind.device == "cpu" or has_gpu) and (kind.options.optimizer == "adamw" or has_8bit)
    ]


def config_of(size: str, optimizer: str, steps: int, seed: int) -> CampaignConfig:
    """Return a campaign with rounds every `steps` steps, at nearly the peak learning rate after the first."""
    experiment = load_experiment(EXPERIMENTS / FILES[size])
    arm, training = experiment.arms[0], experiment.campaign["training"]
    training = {**training, **arm.campaign.get("training", {}), "optimizer": optimizer, "total_steps": 20 * steps}
    changes = {
        "mode": "spes", "batch": STEP_TOKENS // training["sequence_length"], "sync_steps": steps,
        "campaign": {"training": training | {"warmup_steps": steps // 2}},
    }
    config = Run(experiment, arm.model_copy(update=changes), arm.learning_rates[0], seed).config
    return config.model_copy(update={"admission": "open"})  # whose phases are audited


def run(job: Job, text: Text) -> Iterator[Record]:
    """Train and audit; yield each comparison."""
    config = job.config
    reader = text.reader(config.training.sequence_length, config.training.seed)
    claims = _claims(job, reader)
    for name in job.auditors:
        try:
            trainer = _trainer(config, KINDS[name], claims[0].base, OWNED, reader)
            for claim in claims:
                began_at = time.perf_counter()
                load_moments(trainer, claim.base, claim.moments)
                _train(trainer, KINDS[name], claim.phase)
                seconds = time.perf_counter() - began_at
                label: Record = {
                    "size": job.size, "optimizer": config.training.optimizer, "steps": claim.phase.steps,
                    "seed": config.training.seed, "round": claim.phase.round, "audited": job.audited, "auditor": name,
                    "seconds": seconds,
                }
                yield from (label | _score(config, trainer, claim, sender) for sender in claim.sent)
        except (UserError, RuntimeError) as error:
            print(f"{job.audited} audited by {name}: {error}", file=sys.stderr)


def _trainer(config: CampaignConfig, kind: Kind, base: State, owned: Sequence[int], reader: Reader) -> TorchTrainer:
    return TorchTrainer(config, base, tuple(owned), reader, device=kind.device, options=kind.options)


def _train(trainer: TorchTrainer, kind: Kind, phase: Phase, on_step: Callable[[int], None] = lambda done: None) -> None:
    usual = vars(real)["autocast"]
    if kind.dtype is not None:
        is_mixed = kind.dtype != torch.float32
        vars(real)["autocast"] = lambda device: torch.autocast(device.type, torch.bfloat16, is_mixed, cache_enabled=False)
    try:
        trainer.train(phase, lambda: False, lambda done, speed: on_step(done))
    finally:
        vars(real)["autocast"] = usual


def _claims(job: Job, reader: Reader) -> list[Claim]:
    """Train all experts for one phase, then two of them as this kind; the claims of all but the first phase of the latter."""
    config, kind = job.config, KINDS[job.audited]
    steps, size = config.training.sync_steps, config.training.batch_size
    phases = [Phase(n, n * steps, steps, steps, (Interval(n, 0, steps * size),)) for n in range(job.rounds + 2)]
    base, has_gpu = initial_state(config.model), any(KINDS[name].device == "cuda" for name in (job.audited, *job.auditors))
    usual = KINDS["GPU uncompiled" if has_gpu else "CPU"]
    everyone = _trainer(config, usual, base, range(config.model.moe_num_experts), reader)
    _train(everyone, usual, phases[0])
    for group in everyone.layout.groups:
        base[group.start : group.stop] = everyone.read(group)
    del everyone
    trainer, claims = _trainer(config, kind, base, OWNED, reader), []
    for phase in phases[1:]:
        moments, before, sent = moments_of(trainer, base), base.copy(), dict[str, Arrays]()

        def keep(done: int, before: State = before, sent: dict[str, Arrays] = sent) -> None:
            for sender, at in (("half", steps // 2), ("honest", steps)):
                if done == at:
                    sent[sender] = _sent(trainer, before)

        _train(trainer, kind, phase, keep)
        for group in trained_groups(trainer):
            base[group.start : group.stop] += sent["honest"][group.name]
        claims.append(Claim(phase, before, moments, sent))
    return claims[1:]


def _sent(trainer: TorchTrainer, base: State) -> Arrays:
    found = {}
    for group in trained_groups(trainer):
        update = trainer.read(group) - base[group.start : group.stop]
        found[group.name] = CODEC.decode(CODEC.encode(update), group.size)
    return found


def _score(config: CampaignConfig, trainer: TorchTrainer, claim: Claim, sender: str) -> Record:
    """Compare as an auditor does that has all parts of shared weights and router."""
    parts = []
    for group in trainer.layout.groups:
        if group.expert is None:
            pending = claim.moments.get(PENDING + group.name, np.zeros(group.size, np.float32))
            made = trainer.read(group) - claim.base[group.start : group.stop] - pending
            parts.append(Replayed(claim.sent[sender][group.name], made, pending, kind=group.kind))
    score, tensors = compared(claim.phase.steps, parts), trainer.layout.by_name
    of = {name: name.partition("/")[2] for name in claim.moments}
    common = {n: each for n, each in claim.moments.items() if of[n] in tensors and tensors[of[n]].spec.expert is None}
    moments = common, trainer.optimizer_state(in_full=True), config.training.beta2**claim.phase.steps
    drift, second = plausibility(*moments)
    return {
        "sender": sender, "cosine": score.cosine, "norm_ratio": score.norm_ratio, "pending": score.pending,
        "direction": score.direction, "drift": drift, "second": second,
        "passed": int(has_passed(score) and are_plausible(*moments)),
    }


def report(records: Sequence[Record]) -> str:
    """Return a table for each size, optimizer and number of steps."""
    lines = []
    for case in dict.fromkeys((each["size"], each["optimizer"], each["steps"]) for each in records):
        found = [each for each in records if (each["size"], each["optimizer"], each["steps"]) == case]
        kinds = [name for name in KINDS if any(name in (each["audited"], each["auditor"]) for each in found)]
        lines += ["\n{}, {}, {} steps\n".format(*case), f"| audited | {' | '.join(kinds)} | half of the steps, all auditors |"]
        lines.append("|---" * (len(kinds) + 2) + "|")
        for audited in kinds:
            of = [each for each in found if each["audited"] == audited]
            honest = [each for each in of if each["sender"] == "honest"]
            cells = [_cell([each for each in honest if each["auditor"] == name], min) for name in kinds]
            lines.append(f"| {audited} | {' | '.join(cells)} | {_cell([e for e in of if e['sender'] == 'half'], max)} |")
    lines.append("\nCosine and ratio of the norms, lowest for honest peers, highest for half of the steps; audits passed.")
    return "\n".join(lines)


def _cell(records: Sequence[Record], extreme: Callable[[Iterable[float]], float]) -> str:
    if not records:
        return "-"
    cosine, ratio = (extreme(float(each[name]) for each in records) for name in ("cosine", "norm_ratio"))
    return f"{cosine:.4f} / {ratio:.3f}, {sum(int(each['passed']) for each in records)} of {len(records)}"


def _run(job: Job, folder: Path, output: Path | None) -> list[Record]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    records = []
    for record in run(job, open_text(folder)):
        records.append(record)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:  # one write a line, also beside other processes
                file.write(json.dumps(record) + "\n")
    return records


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--size", choices=FILES, default="demo")
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--rounds", type=int, default=2, help="audited phases of each peer")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all that this machine has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also append each comparison here at once, one a line")
    arguments = parser.parse_args()
    records = list[Record]()
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        kinds = tuple(arguments.kinds or pool.submit(available).result())
        jobs = [
            Job(config_of(arguments.size, optimizer, steps, seed), arguments.size, kind, kinds, arguments.rounds)
            for steps in sorted(arguments.steps, reverse=True) for seed in range(arguments.seeds)
            for optimizer in arguments.optimizers for kind in kinds
        ]
        running = {pool.submit(_run, job, arguments.text, arguments.json): job for job in jobs}
        for done in as_completed(running):
            if (error := done.exception()) is not None:
                print(f"{running[done].audited}: {error}", file=sys.stderr)
            else:
                records += done.result()
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
