"""The dashboard's web server: one page, its data as JSON, and server-sent events for updates."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from spes_p2p.client.dashboard.card import status_card
from spes_p2p.client.dashboard.own import OwnTrainer, refuse_other_names, require_loopback
from spes_p2p.client.dashboard.poll import Published, watch
from spes_p2p.client.dashboard.swarm_metrics import SwarmCollector
from spes_p2p.client.dashboard.view import peer_rounds
from spes_p2p.client.dashboard.webhook import post_alerts
from spes_p2p.config.addresses import check_peer_addresses
from spes_p2p.errors import UserError, cannot_listen
from spes_p2p.net.tasks import beside

KEEP_ALIVE_S = 15.0
NO_STORE = {"Cache-Control": "no-store"}
CARD_HEADERS = {
    "Cache-Control": "public, max-age=60", "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
KNOWN = '<script id="known" type="application/json"></script>'
"""Where the page gets what is known when it is opened; the browser does not run it."""
PUBLISHED = web.AppKey("published", Published)


async def run_dashboard(
    addresses: Sequence[str], host: str, port: int, on_url: Callable[[str], None], webhook: str | None = None,
    own: OwnTrainer | None = None,
) -> None:
    """Serve the page and post alerts to `webhook` until cancelled. `own`: the user's trainer, which the page then pauses.

    Raises UserError for a malformed address, an unavailable port, or an own trainer on a page that others could open.
    """
    check_peer_addresses(addresses)
    if own is not None:
        require_loopback(host)
    published = Published(message=f"looking for a peer at {', '.join(addresses)}")
    async with serving(published, host, port, own) as url:
        on_url(f"{url}#token={own.token}" if own else url)
        beside_it = [*([post_alerts(webhook, published)] if webhook else []), *([own.watch(published)] if own else [])]
        async with beside(*beside_it):
            await (watch(addresses, published, own.spare_addresses, own.peer_id) if own else watch(addresses, published))


def serving(
    published: Published, host: str, port: int, own: OwnTrainer | None = None
) -> contextlib.AbstractAsyncContextManager[str]:
    """Serve what is `published`; yield the URL. Raises UserError if the port is not available."""
    return listening(make_app(published, own), host, port)


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve an application; yield the URL. Raises UserError if the port is not available."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be 0 to 65535")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error) from None
    try:
        bound = runner.addresses[0][1]
        yield f"http://{host}:{bound}/"
    finally:
        await runner.cleanup()


def make_app(published: Published, own: OwnTrainer | None = None) -> web.Application:
    """Return the application with /, /card.svg, /metrics, /view.json, /series.json, /status.json, /peers/ID.json and /events.

    With the user's own trainer also /own/pause and /own/resume.
    """
    app = web.Application(middlewares=[refuse_other_names] if own else [])
    app.add_routes(own.routes(published) if own else [])
    app[PUBLISHED] = published
    page = files("spes_p2p.client.dashboard").joinpath("page.html").read_text(encoding="utf-8")
    registry = CollectorRegistry()
    registry.register(SwarmCollector(published))
    headers = {"Content-Security-Policy": content_policy(page), "X-Content-Type-Options": "nosniff", **NO_STORE}

    async def index(request: web.Request) -> web.Response:
        known = _json({"view": published.document(), "series": published.curves}).replace("<", r"\u003c")
        text = page.replace(KNOWN, KNOWN.replace("><", f">{known}<"))
        return web.Response(text=text, content_type="text/html", headers=headers)

    def as_json(document: Callable[[], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(document(), headers=NO_STORE)

        return handle

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def card(request: web.Request) -> web.Response:
        text = status_card(published.view, published.state)
        return web.Response(text=text, content_type="image/svg+xml", headers=CARD_HEADERS)

    async def of_peer(request: web.Request) -> web.Response:
        peer = request.match_info["peer"]
        return web.json_response(peer_rounds(peer, published.by_peer.get(peer, ())), headers=NO_STORE)

    app.add_routes([
        web.get("/", index), web.get("/peers/{peer}.json", of_peer),
        web.get("/events", _events), web.get("/view.json", as_json(published.document)),
        web.get("/metrics", metrics), web.get("/card.svg", card),
        web.get("/series.json", as_json(lambda: published.curves)), web.get("/status.json", as_json(lambda: published.status)),
    ])
    return app


def content_policy(page: str) -> str:
    """Return a policy that lets the browser run only the page's own script and style, whatever a peer sends."""

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _events(request: web.Request) -> web.StreamResponse:
    """Send a `view` event after every poll, and a `series` event when the curves change."""
    published = request.app[PUBLISHED]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **NO_STORE})
    await response.prepare(request)
    sent_curves = -1
    with contextlib.suppress(ConnectionError):
        while True:
            version = published.version
            if published.curves is not None and published.curves_version != sent_curves:
                sent_curves = published.curves_version
                await response.write(_event("series", published.curves))
            await response.write(_event("view", published.document()))
            while published.version == version:
                try:
                    await asyncio.wait_for(published.changed(version), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")
    return response


def _event(name: str, document: Any) -> bytes:
    return f"event: {name}\ndata: {_json(document)}\n\n".encode()


def _json(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)
