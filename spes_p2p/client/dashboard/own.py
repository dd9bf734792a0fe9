"""One's own trainer on the dashboard: its state, what it has contributed, and orders to pause and go on.

Orders come from the user's own page only. The server listens on this machine and takes requests for its own names alone, not
for one that a site points here. An order carries the page's origin, and a token that stands only in the URL which the command
printed. So neither another site nor another user of the machine gives any.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from spes_p2p.client.dashboard.poll import Published
from spes_p2p.client.me import StillPreparing, as_of, look_at
from spes_p2p.errors import UserError
from spes_p2p.observe.history import HISTORY_FILE
from spes_p2p.observe.json_values import to_json
from spes_p2p.session.own_state import is_pause_ordered, order_pause, read_own_state

LOOK_EVERY_S = 1.0
TOKEN_HEADER = "X-Spes-Token"
"""A header that another site's form cannot set."""
ORDERS = {"pause": True, "resume": False}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_loopback(host: str) -> None:
    """Raise UserError unless the dashboard of one's own trainer listens on this machine only."""
    if not _is_local(host):
        raise UserError(f"--host {host}: a page that pauses your trainer is for this machine only; leave --host out, or give "
                        "an address of the swarm in place of the run-dir")


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OwnTrainer:
    """The trainer with a run-dir, as the page shows it, and the orders that the page gives it."""

    def __init__(self, run_dir: Path):
        """Raises UserError if no trainer has used the run-dir, StillPreparing if it has no campaign yet."""
        self._run_dir, self._share = run_dir, look_at(run_dir)
        self._read_at: object = None
        self.peer_id = self._share.peer_id
        self.token = secrets.token_urlsafe(24)

    @classmethod
    def once_prepared(cls, run_dir: Path, on_wait: Callable[[], None]) -> OwnTrainer:
        """Wait until the trainer has its campaign; `on_wait` is called if it has none yet. Raises UserError."""
        try:
            return cls(run_dir)
        except StillPreparing:
            on_wait()
        while True:
            time.sleep(LOOK_EVERY_S)
            with contextlib.suppress(StillPreparing):
                return cls(run_dir)

    def spare_addresses(self) -> tuple[str, ...]:
        """Return where the swarm is found if nobody answers at the addresses of the trainer's own start."""
        state = read_own_state(self._run_dir)
        return state.spare_addresses if state else ()

    async def watch(self, published: Published) -> None:
        """Keep `published.own` current. Never returns."""
        while True:
            try:
                seen = await asyncio.to_thread(self._look, published)
            except UserError as error:  # a run-dir that was moved away may come back
                seen = {"state": str(error), "pauses": False, "share": self._share_of(published)}
            if seen != published.own:
                published.own = seen
                published.publish()
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, published: Published) -> dict[str, Any]:
        """Return the state, and the figures of the journal, which is read when it has grown."""
        journal = self._run_dir / HISTORY_FILE
        size = journal.stat().st_size if journal.exists() else None
        state = read_own_state(self._run_dir)
        if (size, state) != self._read_at:
            self._read_at, self._share = (size, state), look_at(self._run_dir)
        line, pauses = state.line if state else "not running", is_pause_ordered(self._run_dir)
        if state is not None and state.reason == "user":
            line = state.state  # the button to resume stands beside it, so no command is needed
        return {"state": line, "pauses": pauses, "share": self._share_of(published)}

    def _share_of(self, published: Published) -> dict[str, Any]:
        """Return what it contributed, as a share of the swarm's newest base where that is known: its own may be old."""
        view = published.view
        share: dict[str, Any] = to_json(as_of(self._share, view["round"], view["total_tokens"]) if view else self._share)
        return share

    def routes(self, published: Published) -> list[web.RouteDef]:
        """Return the routes of the orders."""
        return [web.post("/own/{order:pause|resume}", partial(self._order, published))]

    async def _order(self, published: Published, request: web.Request) -> web.Response:
        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise web.HTTPForbidden(text="open the page with the address that the command printed: it has the token")
        if request.headers.get("Origin") != f"http://{request.host}":
            raise web.HTTPForbidden(text="orders come from this page only")
        try:
            await asyncio.to_thread(order_pause, self._run_dir, ORDERS[request.match_info["order"]])
        except UserError as error:
            raise web.HTTPConflict(text=str(error)) from None
        return web.json_response(await asyncio.to_thread(self._look, published))


@web.middleware
async def refuse_other_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests for names that are not this machine's own: a site could point one of its names here."""
    if not _is_local(request.url.host or ""):
        raise web.HTTPForbidden(text="this page is for this machine only")
    return await handler(request)
