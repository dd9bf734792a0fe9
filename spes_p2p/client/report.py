"""`spes-p2p report`: one HTML page about the run that a run-dir holds. It loads nothing and runs no script."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from spes_p2p import __version__
from spes_p2p.campaign.files import read_run_dir
from spes_p2p.client.model_card import (
    EVALUATION_COLUMNS,
    Origin,
    conditions,
    facts,
    origin_of,
    task_metrics,
    told_missing,
    told_orders,
)
from spes_p2p.consensus.output import LOG
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe.events import Controlled, Event, RoundCommitted, TasksEvaluated
from spes_p2p.observe.history import HISTORY_FILE, read_rounds
from spes_p2p.observe.units import UNKNOWN, counted, human_bytes, human_count, human_loss, human_scores, human_seconds
from spes_p2p.session.run_dir import shown_address

Row = Sequence[str]
CONTINUED_ROUNDS = 8
"""Of the first, the last and rounds between them, the report shows what the model wrote."""


def make_report(run_dir: Path, evaluations: Iterable[Path] = ()) -> tuple[str, dict[str, Any]]:
    """Return the page, and the run's facts as JSON values. Raises UserError.

    `evaluations`: files that `evaluate --output` wrote.
    """
    known = read_run_dir(run_dir)
    if known is None:
        raise UserError(f"{run_dir}: not a peer's run-dir (it contains no campaign); give that of a trainer or bootstrap peer")
    try:
        seen = list[Event | RoundRecord]()
        records = read_rounds(run_dir, on_entry=seen.append).records
    except OSError as error:
        where = error.filename or run_dir / HISTORY_FILE
        raise UserError(f"{where}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if not records and (run_dir / LOG).exists():
        raise UserError(f"{run_dir / HISTORY_FILE}: has no round, and the log of commits has some; while this peer runs, it "
                        "asks others for the past: start it, or restore your copy of the file")
    if not records or records[-1].round < 1:
        raise UserError(f"{run_dir}: no round with training yet; wait for one")
    from spes_p2p.client.report_plots import plots  # takes seconds

    origin = origin_of(known[0].campaign, records[-1].round, records[-1].base_digest, records, journal=seen)
    measured = [event for event in seen if isinstance(event, TasksEvaluated)]
    sections = [
        ("Figures", _table((), _figures(origin, records, _course(seen, origin)))),
        ("Plots", "".join(f"<figure><figcaption>{_text(name)}</figcaption>{svg}</figure>" for name, svg in plots(records))),
        ("Evaluation", _tasks(measured) + "".join(_evaluation(path) for path in evaluations)),
        ("What the model writes", _writing(origin.campaign.config.evaluation.prompts, records)),
        ("Contributors", _contributors(origin)),
        ("Orders of the owner", _table(("from round", "order"), [(str(at), order) for at, order in told_orders(origin)])),
        ("Configuration", _configuration(origin)),
        ("Take the model", _commands(run_dir)),
    ]
    title = f"{origin.campaign.config.name}, round {origin.round}"
    body = "".join(f"<section><h2>{_text(name)}</h2>{content}</section>" for name, content in sections if content)
    made = f"spes_p2p {__version__}, {_day(time.time())}"
    return _PAGE.format(title=_text(title), body=body, made=_text(made)), facts(origin)


def _course(seen: Sequence[Event | RoundRecord], origin: Origin) -> str:
    """Return how far the campaign is, under the owner's orders that this peer saw."""
    planned, state = origin.campaign.config.total_rounds, ""
    for event in seen:
        if isinstance(event, RoundCommitted):
            planned = event.total_rounds or planned
        if isinstance(event, Controlled):
            state = "" if event.state == "running" else event.state
    state = state or ("complete" if origin.round >= planned else "")
    return f"{origin.round} of {planned} planned{f', {state}' if state else ''}"


def _figures(origin: Origin, records: Sequence[RoundRecord], course: str) -> list[Row]:
    trained, own = [record for record in records if record.round > 0], [record for record in records if not record.teller]
    held_out = [record for record in records if math.isfinite(record.validation_loss)]
    losses = [record for record in trained if math.isfinite(record.loss)]
    paces = [after.time - before.time for before, after in pairwise(records) if after.round == before.round + 1]
    members = sorted(record.members for record in trained)
    least_to_most = " to ".join(map(str, sorted({members[0], members[-1]})))
    sent, received = (human_bytes(sum(getattr(record, f"{way}_bytes") for record in own)) for way in ("sent", "received"))
    rows = [
        ("campaign", f"{origin.campaign.config.name} ({origin.campaign.hash})"),
        ("round", course),
        ("base", origin.digest),
        ("tokens", f"{human_count(records[-1].total_tokens)} ({records[-1].total_tokens:,})"),
        ("peers", f"{len(origin.totals.contributions)} contributed; {least_to_most} in a round"),
        ("time", f"{_day(records[0].time)} to {_day(records[-1].time)}, {human_seconds(records[-1].time - records[0].time)}"),
        ("seconds per round", f"{human_seconds(statistics.median(paces))} (median)" if paces else ""),
        ("training loss", _first_to_last([(record.round, record.loss) for record in losses])),
        ("held-out loss", _first_to_last([(record.round, record.validation_loss) for record in held_out])),
        ("bytes on this peer", f"{sent} sent, {received} received in {counted(len(own), 'round')}"),
        ("failed attempts on this peer", str(sum(record.failed_attempts for record in own))),
        ("parts left out", str(sum(record.dropped_parts for record in trained))),
    ]
    return [row for row in rows if row[1]]


def _first_to_last(losses: Sequence[tuple[int, float]]) -> str:
    """Nats per token in the first and the last round, and in the best one if that is another."""
    if not losses:
        return ""
    (first, at_first), (last, at_last), best = losses[0], losses[-1], min(losses, key=lambda each: each[1])
    lowest = f"; best {human_loss(best[1])} (round {best[0]})" if best[1] < at_last else ""
    return f"{human_loss(at_first)} (round {first}) to {human_loss(at_last)} (round {last}){lowest}"


def _contributors(origin: Origin) -> str:
    totals = origin.totals

    def share(tokens: int) -> tuple[str, str]:
        return f"{tokens:,}", f"{100 * tokens / max(1, totals.tokens):.1f} %"

    rows = [(named.peer, named.name, named.team, *share(each.tokens), f"{each.expert_steps:,}")
            for each in totals.ranked() for named in [totals.called(each.peer)]]
    teams = [(team, str(peers), *share(tokens)) for team, peers, tokens in totals.teams()]
    of_teams = _table(("team", "peers", "tokens", "share"), teams) if teams else ""
    note = ("<p>From the certified commits, as this peer recorded them or took them over from others: tokens whose updates are "
            "in the base, and local steps times the experts trained in them. Peers choose names and teams themselves."
            f"{told_missing(origin)}</p>")
    return note + _table(("peer", "name", "team", "tokens", "share", "expert-steps"), rows) + of_teams if rows else ""


def _writing(prompts: Sequence[str], records: Sequence[RoundRecord]) -> str:
    told = [record for record in records if len(record.continuations) == len(prompts) > 0]
    last = len(told) - 1
    places = sorted({step * last // (CONTINUED_ROUNDS - 1) for step in range(CONTINUED_ROUNDS)})
    shown = [told[place] for place in places if told]
    rows = [[(f"round {record.round}", record.continuations[i]) for record in shown] for i in range(len(prompts))]
    return "".join(f"<p>{_text(prompt)}</p>{_table((), each)}" for prompt, each in zip(prompts, rows, strict=True) if each)


def _tasks(measured: Sequence[TasksEvaluated]) -> str:
    return _table(("round", "measured by this peer during the campaign"),
                  [(str(each.round), human_scores(each.scores)) for each in measured])


def _evaluation(path: Path) -> str:
    """Return a table of the results that `evaluate` wrote. Raises UserError for any other file."""
    try:
        results: dict[str, Any] = json.loads(path.read_bytes())
        columns = [results[name] for name in ("versions", "num_fewshot", "samples")]
        rows = [
            (str(task), *(str(column.get(task)) for column in columns), task_metrics(scores))
            for task, scores in results["tasks"].items()
        ]
        of_round = f", round {int(results['round'])}" if "round" in results else ""
        note = f"{results['model']}{of_round}; {conditions(results)}"
    except OSError as error:
        raise UserError(f"--evaluation {path}: cannot be read ({error.strerror}); give a file of evaluate --output") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--evaluation {path}: not results of `spes-p2p evaluate`; give a file of its --output") from None
    return f"<p>{_text(note)}</p>" + _table(EVALUATION_COLUMNS, rows)


def _configuration(origin: Origin) -> str:
    written = json.loads(origin.campaign.canonical_json())["config"]
    return f"<p>As the owner wrote it.</p><pre>{_text(yaml.safe_dump(written, sort_keys=False, width=100))}</pre>"


def _commands(run_dir: Path) -> str:
    lines = [f"spes-p2p export --run-dir {shlex.quote(str(run_dir))} --output checkpoint"]
    if address := shown_address(run_dir):
        lines.append(f"spes-p2p export --from {address} --output checkpoint    # while the swarm runs")
    lines.append('spes-p2p generate checkpoint --prompt "Once upon a time"')
    return f"<pre>{_text(chr(10).join(lines))}</pre>"


def _table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table; nothing without rows."""
    if not rows:
        return ""
    titles = f"<tr>{''.join(f'<th>{_text(name)}</th>' for name in head)}</tr>" if head else ""
    cells = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table>{titles}{cells}</table></div>'


def _cell(text: str) -> str:
    is_number = re.fullmatch(r"[\d,.]+( %)?", text) is not None
    return f"<td{' class=number' if is_number else ''}>{_text(text)}</td>"


def _day(at: float) -> str:
    """Return a Unix time for people; a peer may not have told it."""
    if not math.isfinite(at):
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _text(text: str) -> str:
    """Escape text: names, orders and ids come from other peers."""
    return html.escape(text)


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: #fcfcfa; --ink: #1a1b1d; --soft: #5c6066; --line: #dedfd9; --faint: #efefeb; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #141517; --ink: #e7e7e4; --soft: #a0a5ab; --line: #303236; --faint: #202225; }}
}}
body {{
  margin: 0 auto; max-width: 1120px; padding: 28px 24px 56px; background: var(--paper); color: var(--ink);
  font: 14px/1.5 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}}
h1 {{ font-size: 22px; margin: 0; }}
h2 {{ font-size: 15px; margin: 32px 0 8px; }}
p, footer, figcaption, th {{ color: var(--soft); }}
.scroll, pre {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th {{ font-weight: 400; text-align: left; }}
th, td {{ padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
td {{ overflow: hidden; overflow-wrap: anywhere; min-width: 4.5em; }}
td:first-child {{ min-width: 9em; }}
td:last-child {{ min-width: 8em; }}
.number {{ white-space: nowrap; }}
pre {{ background: var(--faint); padding: 12px 14px; font-size: 12.5px; }}
figure {{ display: inline-block; width: 520px; max-width: 100%; margin: 0 12px 18px 0; vertical-align: top; }}
svg {{ width: 100%; height: auto; }}
footer {{ margin-top: 36px; }}
@media print {{ figure, tr {{ break-inside: avoid; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>{made}</footer>
</body>
</html>
"""
