"""The text that the project carries, tokenized for a test, and a campaign on it."""

from pathlib import Path

import yaml

from spes_p2p.data.tokenizing import tokenize

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TEXT = CONFIGS / "demo_text"


def write_test_campaign(folder: Path) -> Path:
    """`test.yaml` in `folder`, with its token files and tokenizer beside it: a campaign that can start. Under a second."""
    raw = yaml.safe_load((CONFIGS / "test.yaml").read_text())
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes((CONFIGS / raw["data"]["tokenizer"]).read_bytes())
    for part in ("train", "held_out"):
        tokenize([TEXT / part / "wordnet.jsonl"], tokenizer, folder, prefix=f"{part}_")
    raw["data"] |= {"manifest": "train_manifest.json", "validation_manifest": "held_out_manifest.json"}
    raw["data"]["tokenizer"] = tokenizer.name
    campaign = folder / "test.yaml"
    campaign.write_text(yaml.safe_dump(raw, sort_keys=False))
    return campaign
