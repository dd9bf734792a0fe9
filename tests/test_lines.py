"""The choice of phase length and codecs for a line: what the rule says, from the bytes that the planner says."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from model_shapes import tiny_campaign

from spes_p2p.campaign.lines import (
    CODECS_BY_BYTES,
    EXCHANGE_SHARE,
    LOSS_OF_CODECS,
    LOSS_OF_PHASE,
    LOSS_OF_TOKENS,
    SHORTEST_PHASE,
    WORTHWHILE,
    paces,
    with_codec,
)
from spes_p2p.campaign.planner import round_traffic
from spes_p2p.config.campaign import CampaignConfig, ExpertsConfig, load_campaign_config
from spes_p2p.rounds.audits import are_audited

ROOT = Path(__file__).parents[1]
STEP_S = st.floats(1e-4, 1e4)
LINE_BITS = st.floats(1e6, 1e10)


def with_optimizer(config: CampaignConfig, optimizer: str) -> CampaignConfig:
    return config.model_copy(update={"training": config.training.model_copy(update={"optimizer": optimizer})})


@given(step_s=STEP_S, line=LINE_BITS, peers=st.sampled_from([2, 4]))
def test_the_phase_is_the_shortest_whose_exchange_takes_its_share_of_the_time(step_s: float, line: float, peers: int) -> None:
    (pace,) = paces(tiny_campaign(), 2, peers, step_s, [line])
    traffic = round_traffic(with_codec(tiny_campaign(), pace.codec), 2, peers, line)
    assert (pace.up_bytes, pace.down_bytes) == (traffic.up_bytes, traffic.down_bytes)
    assert pace.exchange_seconds == pytest.approx(traffic.seconds)
    assert pace.exchange_share <= EXCHANGE_SHARE * (1 + 1e-9)
    if pace.sync_steps > SHORTEST_PHASE:
        assert pace.exchange_seconds > EXCHANGE_SHARE * (pace.exchange_seconds + (pace.sync_steps - 1) * step_s) * (1 - 1e-9)


@given(step_s=STEP_S, line=LINE_BITS, optimizer=st.sampled_from(sorted(LOSS_OF_CODECS)))
@example(step_s=1e-4, line=20e6, optimizer="adamw")
@example(step_s=1e-4, line=20e6, optimizer="muon")
def test_codecs_of_fewer_bytes_are_for_lines_on_which_they_lower_the_loss(step_s: float, line: float, optimizer: str) -> None:
    config = with_optimizer(tiny_campaign(), optimizer)

    def loss(index: int) -> float:
        traffic = round_traffic(with_codec(config, CODECS_BY_BYTES[index]), 2, 4, line)
        steps = max(SHORTEST_PHASE, -int(-traffic.seconds * (1 / EXCHANGE_SHARE - 1) / step_s // 1))
        cost = LOSS_OF_CODECS[optimizer][index]
        return cost + LOSS_OF_PHASE * math.log(steps) + LOSS_OF_TOKENS * math.log(1 + traffic.seconds / (steps * step_s))

    (pace,) = paces(config, 2, 4, step_s, [line])
    best = 0
    for index in range(1, len(CODECS_BY_BYTES)):
        best = index if loss(best) - loss(index) >= WORTHWHILE else best
    assert pace.codec == CODECS_BY_BYTES[best]


def test_with_muon_ternary_is_for_slower_lines_than_with_adamw() -> None:
    config = load_campaign_config(ROOT / "configs/9b.yaml")
    adamw, muon = (paces(with_optimizer(config, name), 3, 4, 22.4, [20e6, 100e6]) for name in ("adamw", "muon"))
    assert [pace.codec.shared for pace in adamw] == ["ternary", "ternary"]
    assert [pace.codec.shared for pace in muon] == ["int4", "int4"]


def test_no_phase_is_longer_than_asked() -> None:
    (pace,) = paces(tiny_campaign(), 2, 4, 1e-4, [1e6], longest=40)
    assert pace.sync_steps == 40
    assert pace.exchange_share > EXCHANGE_SHARE


def test_with_the_batch_of_spes_a_round_takes_a_small_share_of_an_hour() -> None:
    config = load_campaign_config(ROOT / "configs/9b.yaml")
    home, fast = paces(config, 3, 4, 709.0, [20e6, 1e9])
    assert (home.codec.experts, fast.codec.experts) == ("sparse", "int4")
    assert (home.sync_steps, fast.sync_steps) == (5, 5)
    assert home.tokens_per_day == pytest.approx(4.6e8, rel=0.01)


def test_an_open_campaign_keeps_its_audits_however_slow_the_line() -> None:
    config = load_campaign_config(ROOT / "configs/9b.yaml").model_copy(update={"admission": "open"})
    (pace,) = paces(config, 3, 4, 709.0, [20e6])
    assert are_audited(with_codec(config, pace.codec))


def test_experts_with_several_owners_are_sent_whole_however_slow_the_line() -> None:
    config = load_campaign_config(ROOT / "configs/9b.yaml")
    two_owners = config.model_copy(update={"experts": ExpertsConfig(redundancy=2)})
    (one,), (two,) = (paces(each, 3, 4, 709.0, [1e6]) for each in (config, two_owners))
    assert (one.codec.experts, two.codec.experts) == ("sparse64", "int4")


@given(step_s=st.floats(0.1, 100), line=LINE_BITS, factor=st.floats(1.3, 4))
@pytest.mark.long
@example(step_s=68.02294705613043, line=429900214.0, factor=1.3125)
def test_no_other_phase_reaches_a_loss_sooner(step_s: float, line: float, factor: float) -> None:
    """By more than the rounding to whole steps explains, where there are few."""
    (pace,) = paces(load_campaign_config(ROOT / "configs/9b.yaml"), 3, 4, step_s, [line])
    longer, shorter = round(pace.sync_steps * factor), round(pace.sync_steps / factor)
    assert 1.005 * pace.speedup > pace.of_steps(longer).speedup
    if shorter >= SHORTEST_PHASE:
        assert 1.005 * pace.speedup > pace.of_steps(shorter).speedup


def test_on_a_fast_line_four_peers_are_as_fast_as_the_small_model_learned() -> None:
    (pace,) = paces(tiny_campaign(), 2, 4, 1e4, [1e10])
    assert pace.sync_steps == SHORTEST_PHASE
    assert pace.speedup == pytest.approx(math.exp((4.367 - 4.080) / LOSS_OF_TOKENS), rel=0.01)
    assert pace.of_steps(30).speedup == pytest.approx(1.8, abs=0.1)


def test_plan_lists_the_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plan", "--config", "configs/1b.yaml", "--memory", "24GiB", "--bandwidth", "50mbit"]
    arguments += ["--tokens-per-second", "5000"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["spes-p2p", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("spes_p2p", run_name="__main__")
    assert not ended.value.code
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert [each["bits_per_second"] for each in lines] == [20e6, 50e6, 100e6, 1e9]
    assert all(each["phase_seconds"] == pytest.approx(each["tokens"] / 5000) for each in lines)
    assert all(each["codec"]["router"] == "none" for each in lines)
