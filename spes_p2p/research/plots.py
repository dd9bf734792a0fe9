"""Plot an experiment: held-out loss against tokens, bytes and memory, and the diagnostics of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spes_p2p.research.report import Outcome

SERIES = (
    ("shrink shared", "mean update over updates, norms, shared"),
    ("load violation", "load violation on global counts, worst layer"),
    ("trained share least", "share of its tokens that trained the expert with the least"),
    ("step shared", "norm of the base's step, shared"),
)


def draw(title: str, shown: Sequence[Outcome], path: Path, found: Sequence[Outcome] = ()) -> None:
    """Write a plot with three panels. Curves and points are means over seeds.

    The panel of bytes also has the end of every other arm of `found`, and a line for each shown arm that sends nothing. Losses
    are those on the validation samples, which are the only ones of experiments without test samples.
    """
    labels = ("M tokens, all peers", "MB sent by a peer", "MB of training state, a peer")
    figure, (tokens, sent, memory) = _panels(title, labels)
    others = [each for each in found if each.first["peers"] > 1 and each.arm not in {of.arm for of in shown}]
    ends = [(each.first["sent_bytes"] / 1e6, _mean_losses(each)[-1]) for each in others]
    if ends:
        sent.plot(*zip(*ends, strict=True), marker=".", linestyle="none", color="0.6", label="another arm")
        sent.plot([], [], linestyle=":", color="0.6", label="sends nothing")
        sent.legend(fontsize=8, loc="upper left")
    for outcome, style in _styled(shown):
        losses = _mean_losses(outcome)
        tokens.plot(_column(outcome, "tokens"), losses, marker=".", **style)
        if outcome.first["peers"] > 1:
            sent.plot(_column(outcome, "sent_bytes"), losses, marker=".", **style)
        else:
            sent.axhline(losses[-1], linestyle=":", color=style["color"])
        memory.plot(outcome.first["memory_bytes"] / 1e6, losses[-1], marker="o", linestyle="none", **style)
    sent.set_xscale("log")
    has_test_samples = any("test_loss" in outcome.first for outcome in shown)
    tokens.set_ylabel(f"{'validation' if has_test_samples else 'held-out'} loss (nats per token)")
    memory.set_title("final loss")
    _save(figure, tokens, path)


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


def _column(outcome: Outcome, name: str) -> list[float]:
    """Return a quantity in millions at each point of the first run's curve."""
    return [point[name] / 1e6 for point in outcome.first["curve"]]
