"""The model card of an exported base: its origin, training and contributors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p import __version__
from spes_p2p.config.campaign import Campaign, CampaignConfig
from spes_p2p.messages.presence import Contribution, PeerStatus, RoundRecord
from spes_p2p.observe.events import Controlled, Event
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.rounds import Totals, totals_of
from spes_p2p.observe.units import human_count

if TYPE_CHECKING:
    from spes_p2p.model.export import ExportDtype

CARD_FILE, FACTS_FILE = "README.md", "spes_p2p.json"
HUB_CHECKPOINT = re.compile(r"(\w[\w.-]*/[\w.-]+)@[\w.-]+")
"""What `init --from` writes of a checkpoint on the Hub: its name and commit; of a folder, a path."""


@dataclass(frozen=True)
class Origin:
    """Origin of a base."""

    campaign: Campaign
    round: int
    digest: str
    """Digest of its float32 values in the commit."""
    record: RoundRecord | None
    """Record of the base's round; None if no queried peer has it."""
    held_out: tuple[int, float] | None
    """(round, held-out loss) of the last evaluated base up to this one."""
    totals: Totals
    """Contributions to the recorded rounds up to this one."""
    orders: tuple[tuple[int, str], ...] = ()
    """(first round committed under the order, description of the order), by round."""
    news: Mapping[int, str] = field(default_factory=dict)
    """What an order changed, by the same round, as far as a journal says."""


def origin_of(
    campaign: Campaign, round_number: int, digest: str, records: Iterable[RoundRecord], living: Iterable[PeerStatus] = (),
    journal: Iterable[Event | RoundRecord] = (),
) -> Origin:
    """Return the origin of this round's base (base 0 is that of round 0, which moves no weights). `records`: by round.

    `living`: peers, whose own names count first. `journal`: what a peer wrote down of the orders. A rollback is a round without
    training, which has no record.
    """
    past = [record for record in records if record.round <= round_number]
    controlled = [each for each in journal if isinstance(each, Controlled) and each.round <= round_number]
    told, news = {each.round: each.order for each in controlled}, {each.round: each.news for each in reversed(controlled)}
    told |= {record.round: record.control for record in past}
    held_out = [(record.round, record.validation_loss) for record in past if math.isfinite(record.validation_loss)]
    orders: list[tuple[int, str]] = []
    for number, order in sorted(told.items()):
        if order != (orders[-1][1] if orders else ""):
            orders.append((number, order))
    last = past[-1] if past and past[-1].round == round_number else None
    totals, newest = totals_of(past).named_by(living), held_out[-1] if held_out else None
    return Origin(campaign, max(0, round_number), digest, last, newest, totals, tuple(orders), news)


def told_orders(origin: Origin) -> list[tuple[int, str]]:
    """Return the orders as a person reads them: what each changed, as in `control` and in the log, or else all that holds."""
    told, was_paused = list[tuple[int, str]](), False
    for number, order in origin.orders:
        is_paused = order.startswith("paused")
        resumed = ["resumed"] if was_paused and not is_paused and not order.startswith("stopped") else []
        holds = ", ".join([*resumed, *([order] if order else [])]) or "as planned"
        told.append((number, origin.news.get(number) or holds))
        was_paused = is_paused
    return told


def card_files(origin: Origin, dtype: ExportDtype = "fp32") -> dict[str, str]:
    """The card and the same facts for programs, by file name."""
    return {CARD_FILE: model_card(origin, dtype), FACTS_FILE: json.dumps(facts(origin), indent=2, allow_nan=False) + "\n"}


def facts(origin: Origin) -> dict[str, Any]:
    """Return JSON values; null if unknown."""
    record, config = origin.record, origin.campaign.config
    document: dict[str, Any] = to_json(
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
            "names": origin.totals.names,
            "made_with": f"spes_p2p {__version__}",
            "config": json.loads(config.model_dump_json()),
        }
    )
    return document


def model_card(origin: Origin, dtype: ExportDtype) -> str:
    """Return Markdown with the front matter that the Hub reads."""
    config = origin.campaign.config
    name = config.name
    terms = ", with the low-rank terms added to the experts' matrices" if config.model.moe_low_rank else ""
    precision = "exact float32 values" if dtype == "fp32" else "values, rounded to bfloat16,"
    return "\n".join(
        [
            "---", "library_name: transformers", "pipeline_tag: text-generation", *_base_model(config), "tags:",
            "- mixture-of-experts", "- decentralized-training", "- spes_p2p", "---", "",
            f"# {name}, round {origin.round}", "",
            f"A mixture-of-experts language model with {config.model.moe_num_experts} experts in each of "
            f"{config.model.num_hidden_layers} layers, trained from {_beginning(config)}, peer to peer, with "
            f"spes_p2p {__version__}.",
            f"The weights are the {precision} that the swarm committed in this round{terms}.", "",
            *_table(origin), "",
            *_orders(origin),
            *_contributors(origin), "",
            "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
            'model = AutoModelForCausalLM.from_pretrained("PATH")',
            'tokenizer = AutoTokenizer.from_pretrained("PATH")', "```", "",
            f"`{FACTS_FILE}` contains the facts of this page and the campaign's configuration.", "",
        ]
    )


def exported_round(folder: Path) -> int | None:
    """Return the round of the base that `export` wrote to this folder; None if it was written by something else."""
    try:
        found = json.loads((folder / FACTS_FILE).read_bytes())["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


EVALUATION_COLUMNS = ("task", "version", "shots", "examples", "result ± standard error")


def evaluation_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return what `evaluate` found in each task, in these columns, without a group's subtasks."""
    within = {subtask for subtasks in results["groups"].values() for subtask in subtasks}
    return [
        (task, *(str(found) for found in (results["versions"].get(task), results["num_fewshot"].get(task),
                                          scores.get("sample_len"))), task_metrics(scores))
        for task, scores in results["tasks"].items() if task not in within
    ]


def conditions(results: Mapping[str, Any]) -> str:
    """Return with what `evaluate` came to its results."""
    return f"lm-eval {results['lm_eval']}, weights in {results['dtype']}, on {results['device']}"


def with_evaluation(card: str, results: dict[str, Any], command: str, own_tasks: str | None) -> str:
    """Return the card with a section for the results of `evaluate`, in place of an earlier one of the same command.

    The command is one line. `own_tasks`: the folder with tasks that lm-eval does not have.
    """
    head = f"Evaluation\n\n```sh\n{command}\n```\n"
    others = [section for section in card.split("\n## ") if not section.startswith(head)]
    rows = [f"| {' | '.join(row)} |" for row in (EVALUATION_COLUMNS, 5 * ("---",), *evaluation_rows(results))]
    ask = f"The tasks in `{own_tasks}` are not lm-eval's own: ask whoever evaluated for that folder."
    source = [ask, ""] if own_tasks else []
    table = ["", f"PATH is the folder with this page. {conditions(results)}.", "", *source, *rows, ""]
    return "\n## ".join([*others, head + "\n".join(table)])


def task_metrics(scores: dict[str, Any]) -> str:
    """Return a task's metrics as `evaluate` wrote them, with their errors."""
    texts = []
    for name, value in scores.items():
        metric, comma, variant = name.partition(",")
        error = scores.get(f"{metric}_stderr{comma}{variant}")
        if value is not None and name != "sample_len" and not metric.endswith("_stderr"):
            texts.append(f"{name} {value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
    return ", ".join(texts)


def _base_model(config: CampaignConfig) -> list[str]:
    """Return the line by which the Hub links a model to the one that it was made from; none where that has no name there."""
    hub = HUB_CHECKPOINT.fullmatch(config.start.checkpoint) if config.start is not None else None
    return [f"base_model: {json.dumps(hub[1])}"] if hub else []


def _beginning(config: CampaignConfig) -> str:
    """Return what base 0 was."""
    if config.start is None:
        return "scratch"
    how = f", upcycled ({config.start.upcycle})" if config.start.upcycle else ""
    return f"`{config.start.checkpoint.rpartition('/')[2] or config.start.checkpoint}`{how}"


def _table(origin: Origin) -> list[str]:
    config, record, totals = origin.campaign.config, origin.record, origin.totals
    held_out = f"{origin.held_out[1]:.4f} nats per token, round {origin.held_out[0]}" if origin.held_out else "not evaluated"
    contributors = sum(each.tokens > 0 for each in totals.contributions)
    rows = [
        ("campaign", config.name),
        ("config hash", f"`{origin.campaign.hash}`"),
        ("round", str(origin.round) if origin.orders else f"{origin.round} of {config.total_rounds}"),
        ("tokens", f"{record.total_tokens} ({human_count(record.total_tokens)})" if record else "unknown"),
        ("peers that contributed", str(contributors) if contributors else "unknown"),
        ("training loss", f"{record.loss:.4f} nats per token" if record and math.isfinite(record.loss) else "unknown"),
        ("held-out loss", held_out),
        ("digest", f"`{origin.digest}`"),
        ("training manifest", f"`{origin.campaign.manifest_sha256}`"),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _orders(origin: Origin) -> list[str]:
    """Return the section on the owner's orders; empty if there were none."""
    if not origin.orders:
        return []
    rows = [f"- round {number}: {order}" for number, order in told_orders(origin)]
    return ["## Orders of the campaign's owner", "",
            "Each order applies from its round on. Token counts include rounds that a rollback discarded.", "",
            *rows, ""]


def told_missing(origin: Origin) -> str:
    """Return a sentence on the tokens of rounds whose records are missing; empty if none are."""
    missing = origin.record.total_tokens - origin.totals.tokens if origin.record else 0
    return f" Rounds with {missing:,} tokens are left out: their records are missing." if missing > 0 else ""


def _contributors(origin: Origin) -> list[str]:
    """Return one row per peer, by decreasing tokens."""
    totals = origin.totals
    if not totals.contributions:
        return ["No queried peer has a record of the contributions."]

    def share(tokens: int) -> str:
        return f"{tokens} | {100 * tokens / max(1, totals.tokens):.1f} %"

    def row(each: Contribution) -> str:
        named = totals.called(each.peer)
        return f"| `{each.peer}` | {_chosen(named.name)} | {_chosen(named.team)} | {share(each.tokens)} | {each.expert_steps} |"

    teams = [f"| {_chosen(team)} | {peers} | {share(tokens)} |" for team, peers, tokens in totals.teams()]
    of_teams = ["", "| team | peers | tokens | share |", "|---|---|---|---|", *teams] if teams else []
    return [
        f"## Contributions up to round {totals.round}", "",
        "Tokens count training whose updates are in the base; expert-steps are local steps times experts trained in them. "
        f"Peers choose names and teams themselves.{told_missing(origin)}", "",
        "| peer | name | team | tokens | share | expert-steps |", "|---|---|---|---|---|---|", *map(row, totals.ranked()),
        *of_teams,
    ]


def _chosen(name: str) -> str:
    """Return a name that a peer chose as code: Markdown would make a link of `www.example.org` and set `__name__` in bold."""
    return f"`{name}`" if name else ""
