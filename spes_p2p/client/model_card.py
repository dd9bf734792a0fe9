"""The model card of an exported base: what it is, how it was made, and who made it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spes_p2p import __version__
from spes_p2p.config.campaign import Campaign
from spes_p2p.messages.presence import Contribution, RoundRecord
from spes_p2p.observe.plain import plain
from spes_p2p.observe.rounds import Totals, totals_of
from spes_p2p.observe.units import human_count

CARD_FILE, FACTS_FILE = "README.md", "spes_p2p.json"


@dataclass(frozen=True)
class Origin:
    """Where a base comes from."""

    campaign: Campaign
    round: int
    digest: str
    """Of its float32 values, as the members agreed on it."""
    record: RoundRecord | None
    """Of the base's round; None when nobody who was asked remembers it."""
    held_out: tuple[int, float] | None
    """(round, held-out loss) of the last evaluated base up to this one."""
    totals: Totals
    """Of the rounds up to this one that anybody remembers."""
    orders: tuple[tuple[int, str], ...] = ()
    """(first round that was committed under it, what the owner had ordered), in order."""


def origin_of(campaign: Campaign, round_number: int, digest: str, records: Iterable[RoundRecord]) -> Origin:
    """Pick what belongs to the base of this round. `records`: by round."""
    past = [record for record in records if record.round <= round_number]
    held_out = [(record.round, record.validation_loss) for record in past if math.isfinite(record.validation_loss)]
    orders: list[tuple[int, str]] = []
    for record in past:
        if record.control != (orders[-1][1] if orders else ""):
            orders.append((record.round, record.control))
    last = past[-1] if past and past[-1].round == round_number else None
    return Origin(
        campaign, round_number, digest, last, held_out[-1] if held_out else None, totals_of(past), tuple(orders)
    )


def card_files(origin: Origin) -> dict[str, str]:
    """The card and the same facts for programs, by file name."""
    return {CARD_FILE: model_card(origin), FACTS_FILE: json.dumps(facts(origin), indent=2, allow_nan=False) + "\n"}


def facts(origin: Origin) -> dict[str, Any]:
    """JSON values; null for what nobody remembers."""
    record, config = origin.record, origin.campaign.config
    document: dict[str, Any] = plain(
        {
            "campaign": config.name,
            "config_hash": origin.campaign.hash,
            "round": origin.round,
            "total_rounds": config.total_rounds,
            "campaign_step": record.campaign_step if record else None,
            "tokens": record.total_tokens if record else None,
            "training_loss": record.loss if record else None,
            "held_out_loss": origin.held_out[1] if origin.held_out else None,
            "held_out_round": origin.held_out[0] if origin.held_out else None,
            "digest": origin.digest,
            "members_of_last_round": record.members if record else None,
            "orders": [{"from_round": number, "order": order} for number, order in origin.orders],
            "contributions_up_to_round": origin.totals.round,
            "contributions": origin.totals.contributions,
            "made_with": f"spes_p2p {__version__}",
            "config": json.loads(config.model_dump_json()),
        }
    )
    return document


def model_card(origin: Origin) -> str:
    """Markdown with the front matter that the Hub reads."""
    config = origin.campaign.config
    name = config.name
    terms = ", with the experts' terms of low rank added to their matrices" if config.model.moe_low_rank else ""
    return "\n".join(
        [
            "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- mixture-of-experts",
            "- decentralized-training", "- spes_p2p", "---", "",
            f"# {name}, round {origin.round}", "",
            f"A mixture-of-experts language model with {config.model.moe_num_experts} experts in each of "
            f"{config.model.num_hidden_layers} layers, trained from scratch, peer to peer, with spes_p2p {__version__}.",
            f"These are the exact float32 values that the members of the swarm agreed on after this round{terms}.", "",
            *_table(origin), "",
            *_orders(origin),
            *_contributors(origin.totals), "",
            "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            'model = AutoModelForCausalLM.from_pretrained("PATH")',
            'tokenizer = AutoTokenizer.from_pretrained("PATH")', "```", "",
            f"`{FACTS_FILE}` holds this page's facts and the whole configuration of the campaign.", "",
        ]
    )


def _table(origin: Origin) -> list[str]:
    config, record, totals = origin.campaign.config, origin.record, origin.totals
    held_out = f"{origin.held_out[1]:.4f} nats a token, round {origin.held_out[0]}" if origin.held_out else "not evaluated"
    contributors = sum(each.tokens > 0 for each in totals.contributions)
    rows = [
        ("campaign", config.name),
        ("config hash", f"`{origin.campaign.hash}`"),
        ("round", str(origin.round) if origin.orders else f"{origin.round} of {config.total_rounds}"),
        ("tokens", f"{record.total_tokens} ({human_count(record.total_tokens)})" if record else "not known"),
        ("peers that contributed", str(contributors) if contributors else "not known"),
        ("training loss", f"{record.loss:.4f} nats a token" if record and math.isfinite(record.loss) else "not known"),
        ("held-out loss", held_out),
        ("digest", f"`{origin.digest}`"),
        ("training manifest", f"`{origin.campaign.manifest_sha256}`"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _orders(origin: Origin) -> list[str]:
    """What the owner changed while the campaign ran; nothing where it ran as it was planned."""
    if not origin.orders:
        return []
    rows = [f"- round {number}: {order or 'as planned'}" for number, order in origin.orders]
    return ["## Orders of the campaign's owner", "",
            "From these rounds on. Tokens of rounds that a rollback gave up are counted above, but are not in the weights.", "",
            *rows, ""]


def _contributors(totals: Totals) -> list[str]:
    """A row a peer, the one with the most tokens first."""
    if not totals.contributions:
        return ["Nobody who was asked remembers the contributions."]

    def row(each: Contribution) -> str:
        return f"| `{each.peer}` | {each.tokens} | {100 * each.tokens / max(1, totals.tokens):.1f} % | {each.expert_steps} |"

    ranked = sorted(totals.contributions, key=lambda each: (-each.tokens, each.peer))
    return [
        f"## Contributions up to round {totals.round}", "",
        "Tokens are those whose updates are in the base; expert-steps are local steps times the experts trained in them.", "",
        "| peer | tokens | share | expert-steps |", "|---|---|---|---|", *(row(each) for each in ranked),
    ]
