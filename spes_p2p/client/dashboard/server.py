"""The dashboard's web server: one page, its data as JSON, and server-sent events for updates."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from aiohttp import web

from spes_p2p.client.dashboard.poll import Live, json_of, watch
from spes_p2p.config.addresses import check_peer_addresses
from spes_p2p.errors import UserError

KEEP_ALIVE_S = 15.0
NO_STORE = {"Cache-Control": "no-store"}
LIVE = web.AppKey("live", Live)


async def run_dashboard(addresses: Sequence[str], host: str, port: int, on_url: Callable[[str], None]) -> None:
    """Serve the page until cancelled. Raises UserError for a malformed address or an unavailable port."""
    check_peer_addresses(addresses)
    live = Live(message=f"looking for a peer at {', '.join(addresses)}")
    async with serving(live, host, port) as url:
        on_url(url)
        await watch(addresses, live)


@contextlib.asynccontextmanager
async def serving(live: Live, host: str, port: int) -> AsyncIterator[str]:
    """Serve what is published in `live`; yields the URL. Raises UserError if the port is not available."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be 0 to 65535")
    runner = web.AppRunner(make_app(live), access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        why = "it is in use" if error.errno == errno.EADDRINUSE else str(error)
        raise UserError(f"--port {port}: cannot listen on {host}:{port} ({why}); choose another --port or --host") from None
    try:
        bound = runner.addresses[0][1]
        yield f"http://{host}:{bound}/"
    finally:
        await runner.cleanup()


def make_app(live: Live) -> web.Application:
    """The routes: /, /view.json, /series.json, /status.json (as `status --json`), /events."""
    app = web.Application()
    app[LIVE] = live
    page = files("spes_p2p.client.dashboard").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": content_policy(page), "X-Content-Type-Options": "nosniff", **NO_STORE}

    async def index(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def view(request: web.Request) -> web.Response:
        return _json(json_of(live))

    async def curves(request: web.Request) -> web.Response:
        return _json(live.curves)

    async def status(request: web.Request) -> web.Response:
        return _json(live.status)

    app.add_routes([
        web.get("/", index), web.get("/view.json", view), web.get("/series.json", curves),
        web.get("/status.json", status), web.get("/events", _events),
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
    live = request.app[LIVE]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **NO_STORE})
    await response.prepare(request)
    sent_curves = -1
    with contextlib.suppress(ConnectionError):
        while True:
            version = live.version
            if live.curves is not None and live.curves_version != sent_curves:
                sent_curves = live.curves_version
                await response.write(_event("series", live.curves))
            await response.write(_event("view", json_of(live)))
            while live.version == version:
                try:
                    await asyncio.wait_for(live.changed(version), KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")
    return response


def _event(name: str, document: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def _json(document: Any) -> web.Response:
    return web.json_response(document, headers=NO_STORE)
