"""`spes-p2p status`: query a swarm once, or watch it in a terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spes_p2p.client.connection import connect

if TYPE_CHECKING:
    from spes_p2p.messages.presence import PeerStatus

LOOK_EVERY_S = 1.0
SHOWN_WITH = ("spes_p2p.client.alerts", "spes_p2p.observe.table", "rich.console")
"""Modules that show a swarm."""


async def fetch_statuses(addresses: Sequence[str], spare: Sequence[str]) -> list[PeerStatus]:
    """Return the status of every peer that answers. Raises UserError if no address leads to a campaign.

    `spare`: addresses for when nobody listens at the others.
    """
    async with connect(addresses, SHOWN_WITH, spare) as swarm:
        return await swarm.statuses()


async def watch_status(
    addresses: Sequence[str], as_json: bool, on_reached: Callable[[], None], spare: Sequence[str]
) -> None:
    """Show the swarm until its campaign is done: a live table on a terminal, otherwise one line (`as_json`: of JSON) per round.

    If no peer answers, the last state stays visible with a note. `on_reached` is called before anything is shown. Raises
    UserError as `fetch_statuses` does.
    """
    async with connect(addresses, SHOWN_WITH, spare) as swarm:
        from spes_p2p.observe.swarm_status import gather
        from spes_p2p.observe.table import SwarmView, round_line

        on_reached()
        with SwarmView(line=json_line, live=False) if as_json else SwarmView(line=round_line) as view:
            seen: list[PeerStatus] = []
            while True:
                statuses = await swarm.statuses()
                seen = statuses or seen
                view.update(seen, () if statuses or as_json else ("no peer answers; retrying",))
                if statuses and gather(statuses).done:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


def json_line(statuses: Sequence[PeerStatus]) -> str:
    """Return the document of `status --json` as one line."""
    from spes_p2p.client.alerts import status_document

    return json.dumps(status_document(statuses), separators=(",", ":"))
