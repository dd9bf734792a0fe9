"""Plots of an experiment: held-out loss against tokens, against bytes, against memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spes_p2p.experiments.report import Outcome


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
    tokens.set_ylabel("held-out loss (nats a token)")
    memory.set_title("final loss")
    figure.suptitle(title)
    handles, labels = tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _column(outcome: Outcome, name: str, unit: float) -> list[Any]:
    return [point[name] / unit for point in outcome.first["curve"]]
