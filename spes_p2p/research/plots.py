"""Plot an experiment: held-out loss against tokens and bytes, and the diagnostics of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spes_p2p.research.report import Outcome
from spes_p2p.research.spec import Experiment

SERIES = (
    ("shrink shared", "mean update over updates, norms, shared"),
    ("load violation", "load violation on global counts, worst layer"),
    ("trained share least", "share of its tokens that trained the expert with the least"),
    ("step shared", "norm of the base's step, shared"),
)
Point = tuple[float, float, str]
"""Bytes a token, final loss, name of the arm."""
LEAST_GAIN = 0.01
"""Nats."""


def draw(title: str, shown: Sequence[Outcome], path: Path) -> None:
    """Write a plot with two panels, means over seeds, and a line for each arm that sends nothing.

    Losses are those on the validation samples, which are the only ones of experiments without test samples.
    """
    figure, (tokens, sent) = _panels(title, ("M tokens, all peers", "MB sent by a peer"))
    for outcome, style in _styled(shown):
        losses = _mean_losses(outcome)
        tokens.plot(_column(outcome, "tokens"), losses, marker=".", **style)
        if outcome.first["peers"] > 1:
            sent.plot(_column(outcome, "sent_bytes"), losses, marker=".", **style)
        else:
            sent.axhline(losses[-1], linestyle=":", color=style["color"])
    sent.set_xscale("log")
    has_test_samples = any("test_loss" in outcome.first for outcome in shown)
    tokens.set_ylabel(f"{'validation' if has_test_samples else 'held-out'} loss (nats per token)")
    _save(figure, tokens, path)


def draw_front(experiment: Experiment, found: Sequence[Outcome], path: Path) -> None:
    """Write a plot of all arms' final losses against what they send for each token; nothing without ends to compare with.

    Arms with the same ends have the same colour. A line joins those of `front_of`.
    """
    yardsticks = {arm.name: arm.yardstick or experiment.yardstick for arm in experiment.arms}
    by_name = {outcome.arm: outcome for outcome in found}
    kinds = {(each.alone, each.centralised) for each in yardsticks.values() if each is not None}
    ends = sorted(kind for kind in kinds if by_name.keys() >= set(kind))
    if not ends:
        return
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    axes, numbered = figure.subplots(), 0
    for kind, colour in zip(ends, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=False):
        alone, centralised = (fmean(by_name[name].losses.values()) for name in kind)
        for name, loss in zip(kind, (alone, centralised), strict=True):
            axes.axhline(loss, linestyle=":", color=colour)
            place = ("axes fraction", "data")
            axes.annotate(name, (1, loss), xycoords=place, fontsize=8, color=colour, ha="right", va="bottom")
        swarms = [each for each in found if each.first["peers"] > 1 and (of := yardsticks[each.arm]) is not None
                  and (of.alone, of.centralised) == kind]
        points = sorted((_bytes_per_token(each), fmean(each.losses.values()), each.arm) for each in swarms)
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=14, color=colour, alpha=0.6)
        front = front_of(points, alone)
        for x, y, name in front:
            numbered += 1
            axes.scatter(x, y, s=14, color=colour, label=f"{numbered}: {name}")
            axes.annotate(f"{numbered}", (x, y), (-3, -5), textcoords="offset points", fontsize=9, color=colour, ha="right",
                          va="top")
        axes.plot([x for x, _, _ in front], [y for _, y, _ in front], color=colour, alpha=0.6)
    highest = max(fmean(by_name[alone].losses.values()) for alone, _ in ends)
    lowest = min(fmean(by_name[centralised].losses.values()) for _, centralised in ends)
    axes.set_ylim(lowest - 0.15 * (highest - lowest), highest + 0.35 * (highest - lowest))
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a peer sends for each token that it trains")
    axes.set_ylabel("final held-out loss (nats per token)")
    axes.grid(alpha=0.3)
    _save(figure, axes, path)


def front_of(points: Sequence[Point], alone: float) -> list[Point]:
    """Return those that are better than one peer alone and all with fewer bytes by LEAST_GAIN. `points`: by bytes."""
    front: list[Point] = []
    for point in points:
        if point[1] < (front[-1][1] if front else alone) - LEAST_GAIN:
            front.append(point)
    return front


def draw_series(title: str, found: Sequence[Outcome], path: Path) -> None:
    """Write a plot of each round's measurements, seed 0; nothing if no run with several peers has them."""
    shown = [outcome for outcome in found if outcome.first["peers"] > 1 and outcome.first.get("series")]
    if not shown:
        return
    figure, panels = _panels(title, ["step"] * len(SERIES))
    for outcome, style in _styled(shown):
        series = outcome.first["series"]
        steps = [last * outcome.first["sync_steps"] for last in series["round"]]
        for axes, (name, _) in zip(panels, SERIES, strict=True):
            axes.plot(steps, series[name], marker=".", **style)
    for axes, (_, label) in zip(panels, SERIES, strict=True):
        axes.set_title(label, fontsize=9)
    _save(figure, panels[0], path)


def _panels(title: str, labels: Sequence[str]) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(3 + 4 * len(labels), 4.8), layout="constrained")
    figure.suptitle(title)
    panels: Sequence[Axes] = figure.subplots(1, len(labels))
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    return figure, panels


def _styled(found: Sequence[Outcome]) -> list[tuple[Outcome, dict[str, Any]]]:
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    return [(each, {"color": colours[number % len(colours)], "label": each.arm}) for number, each in enumerate(found)]


def _save(figure: Figure, labelled: Axes, path: Path) -> None:
    figure.legend(*labelled.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=90)


def _mean_losses(outcome: Outcome) -> np.ndarray:
    """Return the held-out loss at each point of the curve, the mean over seeds."""
    losses: np.ndarray = np.mean([[point["loss"] for point in record["curve"]] for record in outcome.runs.values()], axis=0)
    return losses


def _bytes_per_token(outcome: Outcome) -> float:
    """Return what a peer sends for each token that it trains."""
    first = outcome.first
    return float(fmean(run["sent_bytes"] for run in outcome.runs.values()) * first["peers"] / first["tokens"])


def _column(outcome: Outcome, name: str) -> list[float]:
    """Return a quantity in millions at each point of the first run's curve."""
    return [point[name] / 1e6 for point in outcome.first["curve"]]
