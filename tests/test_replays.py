"""The measurement of audits between kinds of devices: a tiny run of each optimizer."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from model_shapes import tiny_campaign, tiny_model, tiny_training

from spes_p2p.research.replays import Job, report, run
from spes_p2p.research.text import Text


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_honest_phases_pass_in_both_arithmetics_and_half_of_one_does_not(optimizer: str) -> None:
    kinds = ("CPU", "CPU bf16")
    tokens = (np.cumsum(np.random.default_rng(0).integers(0, 3, 4000)) % 64).astype(np.uint16)
    campaign = tiny_campaign(training=tiny_training(optimizer=optimizer))
    records = list(run(Job(campaign, "tiny", kinds[1], kinds, 1), Text({"a": [tokens]}, {}, "digest")))
    assert {(each["auditor"], each["sender"], each["passed"]) for each in records} == {
        (kind, sender, int(sender == "honest")) for kind in kinds for sender in ("honest", "half")
    }
    assert len({each["cosine"] for each in records}) == len(records), "each arithmetic rounds in its own way"
    assert "| CPU bf16 | " in report(records)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed (pip install torchao)")
def test_an_honest_phase_with_8_bit_moments_passes_as_one_in_float32_does() -> None:
    tokens = np.minimum(np.random.default_rng(0).zipf(1.5, 4000), 255).astype(np.uint16)
    campaign = tiny_campaign(tiny_model(vocab_size=256))
    eight, full = (
        [each for each in run(Job(campaign, "tiny", kind, ("CPU",), 2), Text({"a": [tokens]}, {}, "digest"))
         if each["sender"] == "honest"]
        for kind in ("CPU 8-bit", "CPU")
    )
    assert [each["passed"] for each in eight] == [1, 1], "rare ids have small second moments beside those of frequent ones"
    for name in ("drift", "cosine"):
        assert [each[name] for each in eight] == pytest.approx([each[name] for each in full], rel=0.05), name
