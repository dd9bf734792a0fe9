"""The plots of a run's report, as SVG elements that a page can contain."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from spes_p2p.client.dashboard.view import thinned
from spes_p2p.messages.presence import RoundRecord

MAX_POINTS = 600
"""Maximum number of rounds per curve; more are not visible."""
BLUE, ORANGE, GREEN = "#3f74ba", "#d18f2f", "#4c9581"
STAGES = {"train": GREEN, "announce": "#a9aca6", "exchange": ORANGE, "commit": "#8672b8", "apply": BLUE}
INK, LINE = "#010203", "#7f7f7e"
"""INK stands for the page's text color and is replaced by `currentColor`."""

Points = Sequence[tuple[float, float]]


def plots(records: Sequence[RoundRecord]) -> list[tuple[str, str]]:
    """Return (caption, SVG). `records`: by round; those that this peer wrote itself have no teller."""
    trained = [record for record in records if record.round > 0]
    kept = [trained[i] for i in thinned(len(trained), MAX_POINTS)]
    evaluated = [record for record in records if math.isfinite(record.validation_loss)]
    held_out = [evaluated[i] for i in thinned(len(evaluated), MAX_POINTS)]
    own = [record for record in kept if not record.teller]
    measured = {record.round: record for record in trained if not record.teller}

    def losses(x: Callable[[RoundRecord], float]) -> Callable[[Axes], None]:
        return lambda axes: _lines(
            axes, ("training", BLUE, [(x(record), record.loss) for record in kept]),
            ("held-out", ORANGE, [(x(record), record.validation_loss) for record in held_out]),
        )

    def traffic(axes: Axes) -> None:
        first, last = trained[0].round, trained[-1].round
        numbers = [first + i for i in thinned(last - first + 1, MAX_POINTS)]

        def in_each_round(count: Callable[[RoundRecord], int]) -> Points:
            return [(number, count(measured[number]) if number in measured else math.nan) for number in numbers]

        _lines(axes, ("sent", BLUE, in_each_round(lambda record: record.sent_bytes)),
               ("received", ORANGE, in_each_round(lambda record: record.received_bytes)), has_gaps=True)
        _from_zero(axes)

    drawn = [
        ("Loss over tokens, nats per token", True, True, losses(lambda record: record.total_tokens)),
        ("Loss over rounds, nats per token", True, False, losses(lambda record: record.round)),
        ("Members of each round", True, False, lambda axes: _members(axes, kept)),
        ("Seconds of each round on this peer, by part", bool(own), False, lambda axes: _seconds(axes, own)),
        ("Bytes of each round on this peer", bool(own), False, traffic),
    ]
    return [(caption, _svg(draw, caption, tokens)) for caption, has_data, tokens, draw in drawn if has_data]


def _lines(axes: Axes, *lines: tuple[str, str, Points], has_gaps: bool = False) -> None:
    """Draw (name, color, points). Where a value is unknown, a line goes on, or ends if it `has_gaps`."""
    for name, color, points in lines:
        known = [point for point in points if math.isfinite(point[1])]
        if known:
            axes.plot(*zip(*(points if has_gaps else known), strict=True), color=color, linewidth=1.6, label=name,
                      marker="o" if len(known) <= 40 else None, markersize=3)
    if len(axes.lines) > 1:
        _legend(axes)


def _members(axes: Axes, records: Sequence[RoundRecord]) -> None:
    axes.step([record.round for record in records], [record.members for record in records], where="mid", color=GREEN)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.1 * max(record.members for record in records) or 1)


def _seconds(axes: Axes, records: Sequence[RoundRecord]) -> None:
    by_stage = [dict(record.seconds) for record in records]
    named = [name for name in STAGES if any(name in seconds for seconds in by_stage)]
    below = [0.0] * len(records)
    for name in named:
        heights = [seconds.get(name, 0.0) for seconds in by_stage]
        axes.bar([record.round for record in records], heights, width=0.9, bottom=below, color=STAGES[name], label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if named:
        _legend(axes)


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter("B"))


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=INK, ncols=5, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1)


def _svg(draw: Callable[[Axes], None], name: str, tokens: bool) -> str:
    """Return a figure as one element. `name` keeps the ids of several figures on a page apart."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel("tokens of all peers" if tokens else "round", color=INK)
        if tokens:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(colors=INK)
        axes.grid(color=LINE, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(LINE)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg"):].replace(INK, "currentColor")
