"""A small picture of a campaign's state, to embed in a README."""

from __future__ import annotations

import html
from typing import Any

from spes_p2p.observe.units import counted, human_count, human_loss, time_left

WIDTH, HEIGHT = 420, 104
NAME_LETTERS = 40


def status_card(view: dict[str, Any] | None, state: str) -> str:
    """Return an SVG. `view`, `state`: see `Published`."""
    name, detail, figures, done = "spes_p2p", "looking for the swarm", "", 0.0
    if view is not None:
        trainers = sum(peer["role"] == "trainer" for peer in view["peers"])
        losses = [f"{what} {human_loss(loss)}" for what, loss in
                  (("loss", view["loss"]), ("held-out", view["validation_loss"])) if loss is not None]
        name, done = view["campaign"], min(1.0, view["round"] / max(1, view["total_rounds"]))
        detail = " · ".join(filter(None, (f"round {view['round']} of {view['total_rounds']}", _now(view, state))))
        figures = " · ".join((*losses, f"{human_count(view['total_tokens'])} tokens", counted(trainers, "trainer")))
    shown = name if len(name) <= NAME_LETTERS else f"{name[: NAME_LETTERS - 1]}…"
    title = html.escape(f"{name}: {detail}")
    return _CARD.format(
        width=WIDTH, height=HEIGHT, inner_width=WIDTH - 1, inner_height=HEIGHT - 1, right=WIDTH - 36,
        bar=round(done * (WIDTH - 36), 1), title=title, name=html.escape(shown), detail=html.escape(detail),
        figures=html.escape(figures), state=state,
    )


def _now(view: dict[str, Any], state: str) -> str:
    if view["done"] and view["state"] != "stopped":
        return "done"
    if state != "live":
        return "no answer"
    if view["state"] != "running":
        return str(view["state"])
    if view["waits"]:
        return "waits"
    return "" if view["seconds_left"] is None else time_left(view["seconds_left"])


_CARD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
.p {{ fill: #fcfcfa; stroke: #dedfd9; }} .i {{ fill: #1a1b1d; }} .s {{ fill: #5c6066; }} .t {{ fill: #dedfd9; }}
.b, .live {{ fill: #0d6b58; }} .silent, .searching {{ fill: #b3261e; }}
text {{ font: 13px Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
.n {{ font-size: 16px; font-weight: 650; }}
@media (prefers-color-scheme: dark) {{
.p {{ fill: #141517; stroke: #303236; }} .i {{ fill: #e7e7e4; }} .s {{ fill: #a0a5ab; }} .t {{ fill: #303236; }}
.b, .live {{ fill: #63c7ad; }} .silent, .searching {{ fill: #ff8f85; }}
}}
</style>
<rect class="p" x="0.5" y="0.5" width="{inner_width}" height="{inner_height}" rx="6"/>
<text class="i n" x="18" y="30">{name}</text>
<circle class="{state}" cx="402" cy="25" r="4"/>
<text class="s" x="18" y="52">{detail}</text>
<rect class="t" x="18" y="63" width="{right}" height="4" rx="2"/>
<rect class="b" x="18" y="63" width="{bar}" height="4" rx="2"/>
<text class="i" x="18" y="90">{figures}</text>
</svg>
"""
