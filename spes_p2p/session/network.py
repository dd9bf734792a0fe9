"""A peer's libp2p network, world and node; the peer ends if its daemon does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from spes_p2p.campaign.files import CampaignFiles
from spes_p2p.config.addresses import listen_beside
from spes_p2p.config.campaign import PeerConfig
from spes_p2p.errors import Broken
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.consensus import Commit
from spes_p2p.net.checkup import Checkup
from spes_p2p.net.interface_bytes import sent_by_interfaces
from spes_p2p.net.interfaces import World
from spes_p2p.net.libp2p import Libp2p, check_addresses, start_libp2p
from spes_p2p.net.limits import limited_line
from spes_p2p.net.reachability import probe_dialable
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.tasks import end_tasks
from spes_p2p.observe.events import Observer
from spes_p2p.observe.metrics import Metrics
from spes_p2p.peer.node import Node
from spes_p2p.rounds.plan import Rules
from spes_p2p.session.run_dir import made_run_dir
from spes_p2p.storage.interfaces import Store

FIRST_CONTACT_SILENCE_S = 10.0
"""Silence timeout until the campaign's own is known."""


@contextlib.asynccontextmanager
async def connected(settings: PeerConfig, addresses: Sequence[str]) -> AsyncIterator[tuple[Libp2p, bool]]:
    """Join the swarm's DHT, or start one where there are no addresses; yield the network and whether others can dial this peer.

    Raises UserError, also if the metrics port is in use, which is checked first.
    """
    if settings.metrics_port:
        Metrics().serve(settings.metrics_port, settings.metrics_host).close()
    listen = settings.listen or listen_beside(addresses)
    check_addresses(listen, settings.announce, addresses)
    with made_run_dir(settings.run_dir):
        dialable = await probe_dialable(addresses, listen, settings.announce) if addresses else True  # nobody to ask yet
        net = await start_libp2p(
            settings.identity_path, listen, settings.announce, addresses, reachability="public" if dialable else "private"
        )
        try:
            yield net, dialable
        finally:
            await net.close()


def first_contact(net: Libp2p) -> RpcEndpoint:
    """Return an endpoint for requests before there is a node."""
    return RpcEndpoint(net.transport, FIRST_CONTACT_SILENCE_S)


def world_of(net: Libp2p, store: Store, settings: PeerConfig) -> World:
    """Return the real world of a peer, with the rate limits of the settings."""
    return net.world(store, limited_line(settings.max_upload, settings.max_download, sent_by_interfaces))


async def make_node(
    net: Libp2p,
    world: World,
    files: CampaignFiles,
    genesis: Commit,
    role: str,
    observer: Observer,
    invitation: Invitation | None,
    named: tuple[str, str] = ("", ""),
) -> Node:
    """Return a node of the campaign that serves the measurements of `spes-p2p doctor`."""
    rules = Rules(files.campaign.config, files.campaign.hash, files.num_samples)
    node = Node(world, files.campaign, genesis, rules, role, files.blobs, observer, invitation, named)
    await Checkup(time.time, net.transport.seen_at).serve(node.endpoint)
    return node


async def live_on(net: Libp2p, life: Coroutine[Any, Any, None]) -> None:
    """Run a peer's life. Raises Broken if the libp2p daemon exits first."""
    living = asyncio.ensure_future(life)
    gone = asyncio.ensure_future(net.wait_daemon_exit())
    await asyncio.wait({living, gone}, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks([gone])
    if not living.done():
        await end_tasks([living])
        raise Broken("the libp2p daemon (p2pd) exited; start this peer again with the same run-dir")
    await living
