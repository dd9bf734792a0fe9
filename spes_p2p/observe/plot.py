"""Plot the loss curve of a campaign from the histories of its peers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from spes_p2p.errors import UserError
from spes_p2p.observe.events import BEFORE_TRAINING, BaseRestored, Evaluated, PhaseTrained, RoundCommitted
from spes_p2p.observe.history import Entry
from spes_p2p.observe.units import human_count, human_loss

TRAINING, HELD_OUT, MERGE, PEER = "#2563a8", "#c2410c", "#7c6f9c", "#9db8d6"
MARKED_POINTS = 40
"""Mark each round with a dot up to this many rounds."""

Points = list[tuple[int, float]]
"""(tokens in the base, loss in nats per token), by tokens."""


@dataclass(frozen=True)
class Curves:
    """Data of the plot."""

    training: Points
    """Loss over all members, one point per round with training."""
    held_out: Points
    by_peer: Mapping[str, Points]
    """Each peer's own training loss."""
    merges: Sequence[int]
    """Tokens at the rounds after which experts were merged."""
    rounds: int
    """The last committed round."""


def collect_curves(histories: Mapping[str, Sequence[Entry]]) -> Curves:
    """Merge the histories (by peer name), which agree on each round.

    Raises UserError if no round with training was committed.
    """
    events = {peer: [entry.event for entry in history] for peer, history in histories.items()}
    everything = list(itertools.chain.from_iterable(events.values()))
    commits = {event.round: event for event in everything if isinstance(event, RoundCommitted)}
    if not any(math.isfinite(commit.loss) for commit in commits.values()):
        raise UserError("no loss to plot: the history has no round with training; train for at least one round")
    bases = (event for event in everything if isinstance(event, (BaseRestored, RoundCommitted)))
    tokens = {BEFORE_TRAINING: 0, **{event.round: event.total_tokens for event in bases}}
    held_out = {event.round: event.validation_loss for event in everything if isinstance(event, Evaluated)}
    by_peer = {
        peer: {event.round: event.loss for event in of_peer if isinstance(event, PhaseTrained)}
        for peer, of_peer in events.items()
    }
    return Curves(
        training=_by_tokens({number: commit.loss for number, commit in commits.items()}, tokens),
        held_out=_by_tokens(held_out, tokens),
        by_peer={peer: _by_tokens(losses, tokens) for peer, losses in by_peer.items()},
        merges=sorted(commit.total_tokens for commit in commits.values() if commit.merge_alpha > 0),
        rounds=max(commits),
    )


def plot_loss(histories: Mapping[str, Sequence[Entry]], output: Path, title: str) -> None:
    """Write a PNG of training and held-out loss against tokens. Raises UserError if there is no loss, or `output` fails."""
    curves = collect_curves(histories)
    figure = Figure(figsize=(9, 5), dpi=144, layout="constrained")
    axes = figure.subplots()
    for points in curves.by_peer.values():
        axes.plot(*_columns(points), color=PEER, linewidth=0.8, alpha=0.7, zorder=1)
    _draw(axes, curves.training, TRAINING, "training", "o")
    _draw(axes, curves.held_out, HELD_OUT, "held-out", "D")
    _finish(axes, curves, title)
    try:
        figure.savefig(output, format="png", facecolor="white")
    except OSError as error:
        raise UserError(f"{output}: cannot write the plot ({error.strerror})") from None


def _draw(axes: Axes, points: Points, color: str, name: str, marker: str) -> None:
    if not points:
        return
    marked = marker if len(points) <= MARKED_POINTS else None
    label = f"{name}: {human_loss(points[0][1])} → {human_loss(points[-1][1])}"
    axes.plot(*_columns(points), color=color, linewidth=1.8, marker=marked, markersize=4, label=label, zorder=3)


def _finish(axes: Axes, curves: Curves, title: str) -> None:
    trained = sum(map(bool, curves.by_peer.values()))
    if trained > 1:
        axes.plot([], [], color=PEER, linewidth=0.8, label=f"each of {trained} peers")
    if curves.merges:
        axes.plot(curves.merges, [0.015] * len(curves.merges), "|", color=MERGE, markersize=9, label="experts merged",
                  transform=axes.get_xaxis_transform())
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title(f"{curves.rounds} rounds, {human_count(curves.training[-1][0])} tokens", loc="right", color="#666666")
    axes.set_xlabel("tokens trained by all peers")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


def _by_tokens(loss_by_round: Mapping[int, float], tokens: Mapping[int, int]) -> Points:
    known = ((tokens[number], loss) for number, loss in loss_by_round.items() if number in tokens)
    return sorted(point for point in known if math.isfinite(point[1]))


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [tokens for tokens, _ in points], [loss for _, loss in points]
