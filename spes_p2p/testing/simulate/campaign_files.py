"""A campaign for real processes: sentences of a small artificial language, their tokenizer, and a model that trains fast."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

from spes_p2p.data.tokenizers import train_tokenizer
from spes_p2p.data.tokenizing import tokenize
from spes_p2p.testing.simulate.scenario import Scenario

VOCABULARY = 512
DOCUMENTS = {"train": 4000, "held_out": 100}
SILENCE_S = 5.0


def write_campaign(folder: Path, scenario: Scenario, seed: int) -> Path:
    """Write campaign, tokenizer and token files to `folder`; return the path of the campaign file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"language/{seed}")
    words = ["".join(rng.choice("aeiou" if i % 2 else "bdfgklmnprstv") for i in range(rng.randint(2, 7))) for _ in range(300)]
    texts = {part: [_document(rng, words) for _ in range(count)] for part, count in DOCUMENTS.items()}
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(texts["train"][:500], VOCABULARY).save(str(tokenizer))
    for part, documents in texts.items():
        path = folder / f"{part}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        tokenize([path], tokenizer, folder, prefix=f"{part}_", overwrite=True)
    campaign = folder / "campaign.yaml"
    campaign.write_text(yaml.safe_dump(_settings(scenario, tokenizer.name), sort_keys=False))
    return campaign


def _document(rng: random.Random, words: list[str]) -> str:
    """Return sentences in which each word follows from the previous one by one of three rules, which a model can learn."""
    at, text = rng.randrange(len(words)), []
    for _ in range(rng.randint(30, 80)):
        text.append(words[at])
        at = (at * 7 + rng.choice((1, 1, 2, 5))) % len(words)
    return " ".join(text) + "."


def _settings(scenario: Scenario, tokenizer: str) -> dict[str, object]:
    return {
        "name": "simulation",
        "admission": scenario.admission,
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "moe_num_experts": 6,
            "moe_top_k": 2,
        },
        "training": {
            "sequence_length": 64, "batch_size": 4, "total_steps": 100_000, "sync_steps": 20, "learning_rate": 3e-3,
            "warmup_steps": 5, "new_owner_ramp_steps": 4,
        },
        "merge": {"merge_interval": 40, "merge_alpha_start": 0.05, "merge_decay_steps": 200},
        "sync": {
            "overlap": scenario.overlap, "min_peers": len(scenario.peer_names) - scenario.attackers, "join_grace_s": 2.0,
            "silence_s": SILENCE_S, "reform_after_s": 60.0, "audited_share": scenario.audited_share,
        },
        "evaluation": {"every_rounds": 1, "max_samples": 32},
        "data": {
            "manifest": "train_manifest.json", "validation_manifest": "held_out_manifest.json", "tokenizer": tokenizer,
        },
    }
