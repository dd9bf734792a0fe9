"""Plots of an experiment: held-out loss against tokens, against bytes, against memory; and the rounds' diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spes_p2p.research.report import Outcome


def draw(title: str, found: Sequence[Outcome], path: Path) -> None:
    """Write one picture with three panels. Curves and points are means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tokens, sent, memory) = pyplot.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    for number, outcome in enumerate(found):
        style = {"color": colours[number % len(colours)], "label": outcome.arm}
        losses = np.mean([[point["loss"] for point in record["curve"]] for record in outcome.runs.values()], axis=0)
        tokens.plot(_column(outcome, "tokens", 1e6), losses, marker=".", **style)
        bytes_sent = _column(outcome, "sent_bytes", 1e6)
        if outcome.first["peers"] > 1:
            sent.plot(bytes_sent, losses, marker=".", **style)
        memory.plot(outcome.first["memory_bytes"] / 1e6, losses[-1], marker="o", linestyle="none", **style)
    for axes, label in ((tokens, "M tokens, all peers"), (sent, "MB sent by a peer"), (memory, "MB of training state, a peer")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    sent.set_xscale("log")
    tokens.set_ylabel("held-out loss (nats per token)")
    memory.set_title("final loss")
    figure.suptitle(title)
    handles, labels = tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


SERIES = (
    ("shrink shared", "mean update over updates, norms, shared"),
    ("load violation", "load violation on global counts, worst layer"),
    ("trained share least", "share of its tokens that trained the expert with the least"),
    ("step shared", "norm of the base's step, shared"),
)


def draw_series(title: str, found: Sequence[Outcome], path: Path) -> None:
    """Write one picture of what every round told of itself, seed 0; none where no run with several peers kept it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [outcome for outcome in found if outcome.first["peers"] > 1 and outcome.first.get("series")]
    if not shown:
        return
    figure, panels = pyplot.subplots(1, len(SERIES), figsize=(19, 4.8), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    for number, outcome in enumerate(shown):
        series, colour = outcome.first["series"], colours[number % len(colours)]
        steps = [last * outcome.first["sync_steps"] for last in series["round"]]
        for axes, (name, _) in zip(panels, SERIES, strict=True):
            axes.plot(steps, series[name], marker=".", color=colour, label=outcome.arm)
    for axes, (_, label) in zip(panels, SERIES, strict=True):
        axes.set_title(label, fontsize=9)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _column(outcome: Outcome, name: str, unit: float) -> list[Any]:
    return [point[name] / unit for point in outcome.first["curve"]]
