"""A run-dir with the records of a campaign that never ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spes_p2p.campaign.files import CampaignFiles, keep_campaign, sha256
from spes_p2p.campaign.genesis import make_genesis
from spes_p2p.config.campaign import Campaign, CampaignConfig, load_campaign_config
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.events import Event
from spes_p2p.observe.history import History

CONFIG = load_campaign_config(Path(__file__).parents[1] / "configs/test.yaml")


def run_dir(
    folder: Path, records: list[RoundRecord], *events: Event, config: CampaignConfig = CONFIG, owner: str = "QmOwner"
) -> Path:
    """Write the run-dir of a peer that took over `records` from others; return the folder."""
    content = {name: name.encode() for name in ("manifest", "tokenizer")}
    hashes = {f"{name}_sha256": sha256(content[name]) for name in content}
    campaign = Campaign(config=config, validation_manifest_sha256=None, **hashes)
    files = CampaignFiles(campaign, content["manifest"], None, content["tokenizer"], ())
    keep_campaign(files, make_genesis(campaign, owner, np.zeros(4, np.float32), "0" * 32), folder)
    history = History("QmMe", folder)
    history.add(records)
    for event in events:
        history.record(event)
    history.close()
    return folder
