"""`spes-p2p directory`: one page with the state of several campaigns. It loads nothing and runs no script."""

from __future__ import annotations

import asyncio
import html
import math
import re
import time
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from spes_p2p.client.connection import Reconnection
from spes_p2p.client.dashboard.listed import Listed, seen
from spes_p2p.client.dashboard.listed_metrics import ListedCollector
from spes_p2p.client.dashboard.poll import LOST_AFTER, NO_ANSWER_THERE, address_to_join
from spes_p2p.client.dashboard.server import NO_STORE, content_policy, listening
from spes_p2p.errors import UserError, printable
from spes_p2p.net.tasks import beside
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.units import counted, human_count, human_loss, human_rate, time_left

LOOK_EVERY_S = 15.0


async def run_directory(campaigns: Sequence[Sequence[str]], host: str, port: int, on_url: Callable[[str], None]) -> None:
    """Serve the page until cancelled. `campaigns`: checked addresses of each. Raises UserError.

    Each campaign has a connection of its own, so that none waits for another.
    """
    listed = [Listed(addresses) for addresses in campaigns]
    async with listening(directory_app(listed), host, port) as url, beside(*map(_follow, listed)):
        on_url(url)
        await asyncio.Event().wait()


def directory_app(listed: Sequence[Listed]) -> web.Application:
    """Return the application with /, /directory.json and /metrics."""
    headers = {"Content-Security-Policy": content_policy(_PAGE), "X-Content-Type-Options": "nosniff", **NO_STORE}
    registry = CollectorRegistry()
    registry.register(ListedCollector(listed))

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=directory_page(listed, time.time()), content_type="text/html", headers=headers)

    async def document(request: web.Request) -> web.Response:
        return web.json_response(to_json(listed), headers=NO_STORE)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/", page), web.get("/directory.json", document), web.get("/metrics", metrics)])
    return app


async def _follow(listed: Listed) -> None:
    """Look at one campaign until cancelled."""
    again = Reconnection()
    while True:
        try:
            async with again.connect(listed.addresses) as swarm:
                silent_looks = 0
                while silent_looks < LOST_AFTER:
                    statuses = await swarm.statuses()
                    silent_looks = 0 if statuses else silent_looks + 1
                    if statuses:
                        answering = {status.peer_id for status in statuses}
                        address, answers = await address_to_join(swarm, listed.addresses, answering)
                        listed.seen = seen(statuses, address, "" if answers else NO_ANSWER_THERE)
                        listed.updated = time.time()
                        await again.meet(swarm)
                    listed.answers, listed.problem = bool(statuses), "" if statuses else "no peer of the campaign answers"
                    await asyncio.sleep(LOOK_EVERY_S)
        except UserError as error:
            listed.answers, listed.problem = False, printable(str(error))
        await asyncio.sleep(LOOK_EVERY_S)


def directory_page(listed: Sequence[Listed], now: float) -> str:
    """Return the page. Names and figures come from peers: all of them are escaped."""
    answering = sum(each.answers for each in listed)
    head = f"{counted(len(listed), 'campaign')}, {answering} live"
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    parts = {"HEAD": head, "MADE": made, "BODY": "".join(map(_article, listed))}
    return re.sub("HEAD|MADE|BODY", lambda found: parts[found[0]], _PAGE)


def _article(listed: Listed) -> str:
    known = listed.seen
    if known is None:
        state = "no answer" if listed.problem else "looking for its peers"
        why = f"<p>{html.escape(listed.problem)}</p>" if listed.problem else ""
        address = f'<p class="soft id">{html.escape(listed.addresses[0])}</p>'
        return f'<article><header><h2>unknown campaign</h2>{_state(False, state)}</header>{address}{why}</article>'
    last = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(listed.updated))
    now = known.state
    if now == "running":
        usual = "waits" if known.waits else time_left(known.seconds_left) or "running"
        now = usual if known.trainers else "no trainers"
    share = 100 * min(1.0, known.round / max(1, known.total_rounds))
    of_round = f"round {known.validation_round}" if math.isfinite(known.validation_loss) else "not evaluated"
    figures = [
        ("round", str(known.round), f"of {known.total_rounds}"), ("held-out loss", human_loss(known.validation_loss), of_round),
        ("tokens", human_count(known.total_tokens), human_rate(known.tokens_per_second) if known.trainers else ""),
        ("trainers", str(known.trainers), counted(known.helpers, "helper")),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd><dd>{html.escape(more)}</dd></div>" for name, value, more in figures
    )
    campaign_hash = f'<span class="soft id">{html.escape(known.campaign_hash[:12])}</span>'
    return (
        f"<article><header><h2>{html.escape(known.campaign)}</h2>{campaign_hash}"
        f"{_state(listed.answers, now if listed.answers else f'no answer since {last}')}</header>"
        f'<svg viewBox="0 0 100 4" preserveAspectRatio="none" role="img" aria-label="{share:.0f} % of the rounds">'
        f'<rect class="all" width="100" height="4"/><rect class="done" width="{share:.2f}" height="4"/></svg>'
        f"<dl>{cells}</dl><p><code>{html.escape(known.command)}</code> {html.escape(known.note)}</p></article>"
    )


def _state(answers: bool, text: str) -> str:
    return f'<span class="state"><i class="dot {"live" if answers else "silent"}"></i>{html.escape(text)}</span>'


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="30">
<title>HEAD</title>
<link rel="icon" href="data:,">
<style>
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --ink: #1a1b1d; --soft: #5c6066; --line: #dedfd9; --accent: #0d6b58; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #141517; --ink: #e7e7e4; --soft: #a0a5ab; --line: #303236; --accent: #63c7ad; --bad: #ff8f85; }
}
body {
  margin: 0 auto; max-width: 860px; padding: 28px 24px 56px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
h1 { font-size: 22px; font-weight: 650; letter-spacing: -0.01em; margin: 0; }
h2 { font-size: 17px; font-weight: 650; margin: 0; }
p { margin: 8px 0 0; }
code, .id {
  font: 0.92em "JetBrains Mono", ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
code { color: var(--soft); user-select: all; }
.soft, dt, dd + dd, .state, footer { color: var(--soft); }
article { margin: 34px 0 0; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; }
.state { margin-left: auto; font-size: 13px; }
.dot { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 7px; }
.live { background: var(--accent); }
.silent { background: var(--bad); }
svg { display: block; width: 100%; height: 4px; margin: 10px 0 0; border-radius: 2px; }
.all { fill: var(--line); }
.done { fill: var(--accent); }
dl { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px 24px; margin: 12px 0 0; }
dd { margin: 0; font-size: 19px; font-weight: 600; line-height: 1.25; }
dt, dd + dd { font-size: 12.5px; font-weight: 400; }
footer { margin-top: 40px; font-size: 12.5px; }
@media (max-width: 640px) {
  body { padding: 18px 16px 40px; }
  dl { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .state { margin-left: 0; flex-basis: 100%; }
}
</style>
</head>
<body>
<h1>HEAD</h1>
BODY
<footer>As their peers say, MADE. A click on a command selects it.</footer>
</body>
</html>
"""
