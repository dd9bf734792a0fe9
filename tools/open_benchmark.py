"""./tools/bench open: what an open campaign's gate and audits take of a trainer, beside the phase that it trains.

One trainer of a model with eight experts, of which it owns two, and random tokens, on this machine's CPU: processor seconds of
a step, of one evaluation of the gate, of writing a judged step and the base back, and of the state that an audited peer keeps,
with its bytes; medians. The shares are those of a phase of --phase steps: a judge's gate takes an evaluation of the base, one
of what all train, and one for each expert.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_json import parser_of, tell
from benchmarks import RandomText

from spes_p2p.config.campaign import CampaignConfig, parse_campaign_config
from spes_p2p.messages.samples import Interval
from spes_p2p.model.build import initial_state
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.gate import JUDGED_EXPERTS, JUDGED_SAMPLES
from spes_p2p.training.interface import Phase
from spes_p2p.training.moments import moments_chunks
from spes_p2p.training.trainer import TorchTrainer

BATCH, LENGTH, EXPERTS, OWNED = 8, 256, 8, 2


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--millions", type=float, default=100.0, help="about how many parameters, in millions (default 100)")
    parser.add_argument("--phase", type=int, default=100, help="steps between two rounds (default 100)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default 5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tell(costs(campaign(arguments.millions), arguments.phase, arguments.rounds), arguments.json)


def campaign(millions: float) -> CampaignConfig:
    """Return a campaign whose experts have four fifths of the model: 100 million parameters at hidden size 512."""
    hidden = 128 * max(1, round(4 * math.sqrt(millions / 100)))
    return parse_campaign_config({
        "name": "bench", "admission": "open",
        "model": {
            "vocab_size": 16 * hidden, "hidden_size": hidden, "intermediate_size": 13 * hidden // 8, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": LENGTH, "moe_num_experts": EXPERTS,
            "moe_top_k": 2,
        },
        "training": {
            "sequence_length": LENGTH, "batch_size": BATCH, "total_steps": 1000, "sync_steps": 100, "learning_rate": 1e-3,
        },
        "data": {"manifest": "-", "tokenizer": "-"},
    }, "bench")


def costs(config: CampaignConfig, phase: int, rounds: int) -> dict[str, Any]:
    """Return processor seconds, bytes and shares (module docstring)."""
    base, text = initial_state(config.model), RandomText(config)
    trainer = TorchTrainer(config, base, tuple(range(OWNED)), text, text)
    groups = trainer.layout.groups

    def step() -> None:
        work = Phase(0, 0, 100, 1, (Interval(0, 0, BATCH),))
        trainer.train(work, lambda: False, lambda done, speed: None)

    def write_groups() -> None:
        for group in groups * 2:
            trainer.write(group, base[group.start : group.stop])

    def keep() -> int:
        size = 0
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "moments").open("wb") as file:
            for chunk in moments_chunks(trainer, base, 0):
                content_digest(chunk)
                size += file.write(chunk)
        return size

    step()
    step_s, gate_s, writes_s, kept_s = (
        median_s(do, rounds) for do in (step, lambda: trainer.held_out_losses(0, JUDGED_SAMPLES), write_groups, keep)
    )
    trained = sum(group.size for group in groups if group.expert is None or group.expert < OWNED)
    evaluations = 2 + min(JUDGED_EXPERTS, EXPERTS)
    return {
        "parameters": trainer.layout.size, "trained": trained, "step_s": step_s, "evaluation_s": gate_s, "writes_s": writes_s,
        "gate_share": (evaluations * gate_s + writes_s) / (phase * step_s),
        "kept_s": kept_s, "kept_bytes": keep(), "kept_share": kept_s / (phase * step_s),
    }


def median_s(do: Callable[[], object], rounds: int) -> float:
    """Return the median of this process's processor seconds."""
    found = []
    for _ in range(rounds):
        before = time.process_time()
        do()
        found.append(time.process_time() - before)
    return statistics.median(found)


if __name__ == "__main__":
    main()
