"""Tables of an experiment's results: loss, bytes, memory, the share of the gap that is closed, and diagnostics."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.research.spec import Experiment, Yardstick, best_rate, runs_of

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Results of one arm."""

    arm: str
    sweep: Mapping[float, float]
    """Final loss by learning rate, for seed 0."""
    rate: float
    """The best learning rate, used for all seeds."""
    runs: Mapping[int, Record]
    """By seed, at that rate."""

    @property
    def losses(self) -> dict[int, float]:
        """Final held-out loss by seed, on the test samples where the experiment has them."""
        return {seed: record["test_loss" if "test_loss" in record else "loss"] for seed, record in self.runs.items()}

    @property
    def first(self) -> Record:
        """Run with the lowest seed."""
        return self.runs[min(self.runs)]


def outcomes(experiment: Experiment, records: Sequence[Record], text_digest: str) -> list[Outcome]:
    """Return the outcome of each arm with a result, in the file's order. Incomplete sweeps count as they are."""
    by_key = {record["key"]: record for record in records}
    found = []
    for arm in experiment.arms:
        keys = {(run.rate, run.seed): run.key(text_digest) for run in runs_of(experiment, arm)}
        runs = {name: by_key[key] for name, key in keys.items() if key in by_key}
        sweep = {rate: record["loss"] for (rate, seed), record in runs.items() if seed == 0}
        if sweep:
            losses = {(arm.name, rate, 0): loss for rate, loss in sweep.items()}
            rate = best_rate(arm.model_copy(update={"learning_rates": tuple(sweep)}), losses)
            assert rate is not None
            found.append(Outcome(arm.name, sweep, rate, {s: record for (r, s), record in runs.items() if r == rate}))
    return found


def pictured(experiment: Experiment, found: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes to plot: those that the file names, or all if none of them has a result."""
    return [outcome for outcome in found if outcome.arm in experiment.pictured] or list(found)


def share_closed(alone: float, arm: float, centralised: float) -> float:
    """Return the share of the gap between one peer alone (0) and centralised training (1) that an arm closes."""
    return (alone - arm) / (alone - centralised)


def shares(outcome: Outcome, yardstick: Yardstick, by_name: Mapping[str, Outcome]) -> list[float]:
    """Return the share for each seed that the arm and both ends of the yardstick have."""
    alone, centralised = by_name.get(yardstick.alone), by_name.get(yardstick.centralised)
    if alone is None or centralised is None:
        return []
    seeds = sorted(set(outcome.losses) & set(alone.losses) & set(centralised.losses))
    return [share_closed(alone.losses[s], outcome.losses[s], centralised.losses[s]) for s in seeds]


def report(experiment: Experiment, found: Sequence[Outcome]) -> str:
    """Return Markdown: results, learning rate sweeps, losses by domain, diagnostics, and the file's note."""
    tables = results_table(experiment, found), sweep_table(found), domains_table(found), diagnostics_table(found)
    return "\n\n".join([*tables, experiment.note]).rstrip() + "\n"


def results_table(experiment: Experiment, found: Sequence[Outcome]) -> str:
    """Return one row per arm: mean and spread over seeds, the yardstick, bytes and memory."""
    by_name = {outcome.arm: outcome for outcome in found}
    yardsticks = {arm.name: arm.yardstick or experiment.yardstick for arm in experiment.arms}
    header = ("arm", "inner rate", "seeds", "M tokens", "held-out loss", "over centralised", "gap closed", "MB sent a peer",
              "MB of training state")
    rows = []
    for outcome in found:
        first, yardstick = outcome.first, yardsticks[outcome.arm]
        sent = statistics.fmean(run["sent_bytes"] for run in outcome.runs.values())
        centralised = by_name.get(yardstick.centralised) if yardstick else None
        over = "" if centralised is None else "-"
        if centralised is not None and outcome is not centralised:
            seeds = set(outcome.losses) & set(centralised.losses)
            mean, base = (statistics.fmean(of.losses[seed] for seed in seeds) for of in (outcome, centralised))
            over = f"{100 * (mean / base - 1):+.1f} %"
        closed = shares(outcome, yardstick, by_name) if yardstick else []
        rows.append((
            outcome.arm, f"{outcome.rate:g}", str(len(outcome.runs)), f"{first['tokens'] / 1e6:.2f}",
            _mean_spread(list(outcome.losses.values()), "{:.3f}"), over,
            _mean_spread([100 * share for share in closed], "{:.0f}", " %") if closed else "",
            f"{sent / 1e6:.1f}" if first["peers"] > 1 else "0",
            f"{first['memory_bytes'] / 1e6:.1f}",
        ))
    return _table(header, rows)


def sweep_table(found: Sequence[Outcome]) -> str:
    """Return final losses for seed 0 by learning rate."""
    rates = sorted({rate for outcome in found for rate in outcome.sweep})
    rows = [(o.arm, *(f"{o.sweep[rate]:.3f}" if rate in o.sweep else "" for rate in rates)) for o in found]
    return _table(("held-out loss, seed 0, by inner rate", *(f"{rate:g}" for rate in rates)), rows)


def domains_table(found: Sequence[Outcome]) -> str:
    """Return final held-out losses by domain, mean over seeds."""
    def of(run: Record) -> dict[str, float]:
        losses: dict[str, float] = run["test_domains" if "test_domains" in run else "domains"]
        return losses

    domains = sorted({domain for outcome in found for domain in outcome.first.get("domains", {})})
    rows = [
        (o.arm, *(f"{statistics.fmean(of(run)[domain] for run in o.runs.values()):.3f}" for domain in domains))
        for o in found if o.first.get("domains")
    ]
    return _table(("held-out loss by domain", *domains), rows)


def evaluation_table(tasks: Sequence[str], scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return lm-eval's accuracy with its standard error by arm and task. `scores[arm][task][metric]`."""
    rows = []
    for arm, by_task in scores.items():
        cells = []
        for task in tasks:
            accuracy, error = by_task[task].get("acc"), by_task[task].get("acc_stderr")
            spread = f" ± {error:.3f}" if isinstance(error, float) else ""
            cells.append(f"{accuracy:.3f}{spread}" if isinstance(accuracy, float) else "")
        rows.append((arm, *cells))
    return _table(("accuracy", *tasks), rows)


def diagnostics_table(found: Sequence[Outcome]) -> str:
    """Return one row per arm with several peers: means over its measured rounds, seed 0."""
    rows = [
        (outcome.arm, *(_cell(outcome.first["rounds"], value, form) for _, value, form in DIAGNOSTICS))
        for outcome in found if outcome.first["peers"] > 1 and outcome.first["rounds"]
    ]
    return _table(("arm", *(title for title, _, _ in DIAGNOSTICS)), rows)


def _drift(kind: str, what: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found = record["drift"].get(kind)
        return None if found is None else float(found[what])

    return value


DIAGNOSTICS: tuple[tuple[str, Callable[[Record], float | None], str], ...] = (
    ("cosine of updates, shared", _drift("shared", "cosine"), "{:.2f}"),
    ("mean / mean norm, shared", _drift("shared", "shrink"), "{:.2f}"),
    ("cosine, experts", _drift("expert", "cosine"), "{:.2f}"),
    ("loss before round", lambda r: float(r["loss_before"]), "{:.3f}"),
    ("after", lambda r: float(r["loss_after"]), "{:.3f}"),
    ("an expert's tokens that trained it", lambda r: statistics.fmean(r["owner_share"]), "{:.2f}"),
    ("top-k agreement, local and new base", lambda r: float(r["topk_agreement_local"]), "{:.2f}"),
    ("load violation", lambda r: float(max(r["load_violation"])), "{:.2f}"),
    ("owned share of routing, local - global", lambda r: float(r["owned_share_local"] - r["owned_share_global"]), "{:+.3f}"),
    ("cosine of two experts", lambda r: float(r["expert_similarity"]), "{:.3f}"),
    ("norm of update, shared", lambda r: float(r["update_norms"]["shared"]), "{:.2f}"),
    ("experts", lambda r: float(r["update_norms"]["expert"]), "{:.2f}"),
)


def _cell(rounds: Sequence[Record], value: Callable[[Record], float | None], form: str) -> str:
    values = [found for record in rounds if (found := value(record)) is not None]
    return form.format(statistics.fmean(values)) if values else ""


def _mean_spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Return `mean ± standard deviation`, or the only value."""
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}{unit}" if len(values) > 1 else f"{mean}{unit}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
