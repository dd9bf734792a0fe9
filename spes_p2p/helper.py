"""A helper: a peer that does not train. The bootstrap peer is one: it makes base 0, serves the campaign, and votes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from spes_p2p.config import Campaign
from spes_p2p.data.slices import Cursor
from spes_p2p.errors import Refused
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import Observer, PhaseEntered
from spes_p2p.swarm.node import Hooks, Node
from spes_p2p.swarm.records import Head
from spes_p2p.sync.codecs import codec_named
from spes_p2p.sync.digest import state_digest
from spes_p2p.sync.merge import Donors
from spes_p2p.sync.results import Results
from spes_p2p.sync.snapshot import PIECES, SNAPSHOT, Snapshots


def make_genesis(campaign: Campaign, bootstrap: str, base0: np.ndarray) -> Head:
    """The head before round 0: base 0, made once, and the bootstrap peer as the only elector."""
    return Head(
        campaign=campaign.hash,
        epoch=0,
        round=-1,
        parent="",
        plan="",
        roots=(),
        dropped=(),
        base_digest=state_digest(base0),
        step=0,
        tokens=0,
        members=(),
        owners=((),) * campaign.config.model.moe_num_experts,
        cursor=Cursor(),
        helpers=(bootstrap,),
        electorate=(bootstrap,),
    )


class Helper:
    """The bootstrap peer's life: serve and vote until asked to leave."""

    def __init__(self, node: Node, layout: Layout, base0: np.ndarray, observer: Observer, status: Callable[[], bytes]):
        self.node = node
        self._layout = layout
        self._observer = observer
        self._status = status
        self._leaving = asyncio.Event()
        self._snapshots = Snapshots()
        self._snapshots.publish(node.log.genesis.id, -1, base0)

    def leave(self) -> None:
        """End `run`."""
        self._leaving.set()

    async def run(self) -> None:
        """Serve until `leave`."""
        sync = self.node.campaign.config.sync
        hooks = Hooks(
            results_of=lambda plan: Results.empty(plan, self._layout, codec_named(sync.codec), sync.part_bytes),
            donors=self._donors,
            status=self._status,
        )
        board = self.node.board
        await board.serve(SNAPSHOT, self._snapshots.on_snapshot)
        await board.serve(PIECES, self._snapshots.on_pieces)
        await self.node.start(hooks)
        self._observer.tell(PhaseEntered("waiting"))
        try:
            await self._leaving.wait()
        finally:
            await self.node.close()

    async def _donors(self) -> Donors:
        raise Refused("a helper holds no base to compare experts in")
