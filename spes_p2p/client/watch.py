"""A swarm in a terminal: looked at once, or again and again (`spes-p2p status`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from spes_p2p.client.visitor import visiting
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.observe.status import gather, swarm_status
from spes_p2p.observe.table import SwarmView, round_line

LOOK_EVERY_S = 1.0


async def look_once(addresses: Sequence[str]) -> list[PeerStatus]:
    """The status of every peer that answers. Raises UserError when the addresses lead nowhere."""
    async with visiting(addresses) as visit:
        return await visit.ask_all()


async def watch_swarm(addresses: Sequence[str], as_json: bool, on_reached: Callable[[], None]) -> None:
    """Show the swarm until its campaign is done: a live table, or elsewhere a line (`as_json`: of JSON) a round.

    When nobody answers any more, what was last seen stays, with a word that it is old. `on_reached` is called before
    anything is shown. Raises UserError as `look_once`.
    """
    async with visiting(addresses) as visit:
        on_reached()
        with SwarmView(line=json_line, live=False) if as_json else SwarmView(line=round_line) as view:
            seen: list[PeerStatus] = []
            while True:
                statuses = await visit.ask_all()
                seen = statuses or seen
                view.update(seen, () if statuses or as_json else ("nobody answers; looking again",))
                if statuses and gather(statuses).done:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


def json_line(statuses: Sequence[PeerStatus]) -> str:
    """`status --json` in one line."""
    return json.dumps(swarm_status(statuses), separators=(",", ":"))
