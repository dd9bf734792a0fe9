"""Run a peer on a real machine: libp2p, disk, clock, signals and observers around its life (`peer/life.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import psutil

from spes_p2p.campaign.files import CAMPAIGN_FILE, CampaignFiles, check_run_dir, fetch_campaign, keep_campaign, read_genesis
from spes_p2p.campaign.invitations import keep_invitation
from spes_p2p.config.addresses import is_loopback, peer_of
from spes_p2p.config.campaign import PeerConfig
from spes_p2p.consensus.control import owner_of
from spes_p2p.content.bases import newest_bases
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.errors import NobodyAnswers
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.consensus import Commit
from spes_p2p.net.contacts import direct, met_addresses
from spes_p2p.net.daemon_process import is_any_listening
from spes_p2p.net.interfaces import World
from spes_p2p.net.libp2p import FIND_EVERY_S, Libp2p
from spes_p2p.net.reachability import Reachability, describe
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.tasks import beside
from spes_p2p.observe.console import farewell, farewell_of_bootstrap, to_continue
from spes_p2p.observe.events import Observer
from spes_p2p.observe.swarm_status import own_standing
from spes_p2p.peer.announcing import NOTHING_TO_TRAIN, Capacity
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.life import Peer
from spes_p2p.rounds.archive import Archive
from spes_p2p.rounds.base import stored_round
from spes_p2p.session.admission import admitted, standing_in
from spes_p2p.session.apart import run_apart
from spes_p2p.session.downstream import evaluations_of
from spes_p2p.session.evaluation_room import free_disk
from spes_p2p.session.genesis import (
    fetch_genesis,
    join_with_base_0,
    load_or_make_genesis,
    make_layout,
    require_checkpoint,
    warn_of_earlier_start,
)
from spes_p2p.session.network import connected, first_contact, live_on, make_node, world_of
from spes_p2p.session.observers import observing, sharing_history
from spes_p2p.session.pausing import Pauses, call_on_signals
from spes_p2p.session.preparing import still
from spes_p2p.session.run_dir import made_run_dir
from spes_p2p.session.same_identity import require_same_identity
from spes_p2p.session.text import keep_checking, make_readers, open_text, serve_text, text_to_serve
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.storage.threads import keep_loaded_objects, nice_executor

if TYPE_CHECKING:
    import torch

    from spes_p2p.session.resources import Resources

logger = logging.getLogger(__name__)

LEAVING = "leaving after the current step"
DAEMON_COLLECTS_AT = "50"
"""Percent by which the memory of a bootstrap peer's daemon grows between two collections; Go's default, 100, trades memory for
time, of which this peer has more than a trainer."""
STARTING_S = 120.0
"""Wait for a bootstrap peer that was just started: on a busy machine it serves its campaign after tens of seconds."""
WARN_EVERY_TRIES = 12
"""While no peer answers, warn about every two minutes."""


@dataclass(frozen=True)
class Extension:
    """Hooks with which the caller extends a peer: a wrapper for its world, and more observers."""

    around: Callable[[World], World] = lambda world: world
    observers: tuple[Observer, ...] = ()


NO_EXTENSION = Extension()


async def run_bootstrap(
    files: CampaignFiles,
    settings: PeerConfig,
    others: Sequence[str],
    on_address: Callable[[str], None],
    extension: Extension = NO_EXTENSION,
) -> None:
    """Run a bootstrap peer until a signal: the first of a campaign, or an additional one to `others`.

    After a restart with the same run-dir it continues even if none of the others answers. `on_address` receives the address
    for volunteers. Raises UserError if it would be another peer than before.
    """
    os.environ.setdefault("GOGC", DAEMON_COLLECTS_AT)
    require_same_identity(settings, begins=not others)
    try:
        async with connected(settings, others) as (net, dialable):
            if not dialable:
                logger.warning("other peers cannot dial this bootstrap peer: volunteers cannot join through it; open its port")
            async with beside(net.keep_finding(others)):
                await _live_as_bootstrap(net, files, settings, others, on_address, extension)
    except NobodyAnswers as error:
        if read_genesis(settings.run_dir) is None:
            raise
        logger.warning("%s; starting without them", error.problem)
        async with connected(settings, ()) as (net, _), beside(net.keep_finding(others)):
            await _live_as_bootstrap(net, files, settings, (), on_address, extension)


async def _live_as_bootstrap(
    net: Libp2p,
    files: CampaignFiles,
    settings: PeerConfig,
    others: Sequence[str],
    on_address: Callable[[str], None],
    extension: Extension,
) -> None:
    known = read_genesis(settings.run_dir)
    is_owner = not others and (known is None or owner_of(known) == net.identity.peer_id)
    shelf = await asyncio.to_thread(text_to_serve, files, settings.run_dir, is_owner)
    if others:
        genesis = await fetch_genesis(first_contact(net), others, files, settings.run_dir)
        layout = await asyncio.to_thread(run_apart, make_layout, files.campaign.config.model)
    else:
        me = net.identity.peer_id
        task = "making base 0" if known is None else "loading the model's layout"
        logger.info("%s", task)
        async with still(task):
            layout, genesis = await asyncio.to_thread(run_apart, load_or_make_genesis, files, settings.run_dir, me)
    store = await asyncio.to_thread(DirectoryStore, settings.run_dir)  # deletes what a dead process left
    invitation = admitted(settings, files, genesis, net.identity, trains=False)
    keep_campaign(files, genesis, settings.run_dir)
    keep_invitation(invitation, settings.run_dir)
    free = psutil.virtual_memory().available, free_disk(settings.run_dir)
    evaluations = evaluations_of(files.campaign.config, settings, layout.size, *free)
    more = (evaluations.observe, *extension.observers)
    with observing(files, settings, net.identity.peer_id, "helper", more) as observers:
        world = extension.around(world_of(net, store, settings))
        node = await make_node(net, world, files, genesis, "helper", observers.all, invitation)
        await serve_text(node, shelf)
        helper = Peer(
            node, layout, None, NOTHING_TO_TRAIN, observers.all, observers.status,
            str(settings.run_dir), Archive(settings.archive_every, settings.archive_keep), key=str(settings.identity_path),
        )
        call_on_signals(helper.leave, "leaving")
        around = [evaluations.run(observers.all), keep_checking(shelf, world.run_blocking, world.rng)]
        if known is None and not others:
            around.append(warn_of_earlier_start(node))
        async with sharing_history(node, observers.history), beside(*around):
            on_address(net.transport.addresses[0])
            await live_on(net, helper.run())
        logger.info("%s", farewell_of_bootstrap(observers.board.status, settings.run_dir, settings.identity))


async def run_join(
    addresses: Sequence[str],
    settings: PeerConfig,
    on_joined: Callable[[CampaignFiles, str], None],
    extension: Extension = NO_EXTENSION,
    on_paused: Callable[[], None] = lambda: None,
) -> None:
    """Train in the campaign at these addresses until it is complete or a signal arrives, with pauses that the user wants.

    After a pause, or a restart with the same run-dir, it retries until a peer answers, be it one that it met before: the
    bootstrap peer may be down too.
    """
    if settings.nice:
        asyncio.get_running_loop().set_default_executor(nice_executor(settings.nice))
    if (settings.run_dir / CAMPAIGN_FILE).exists() and not settings.identity_path.exists():
        logger.warning("%s: used with another identity before; joining as a new peer (to be the earlier one again, give its "
                       "--identity)", settings.run_dir)
    pauses, tries = Pauses(settings, addresses, on_paused), 0
    with contextlib.closing(pauses):
        while await pauses.over():
            try:
                asked = addresses
                if tries or not await is_any_listening(addresses):
                    asked = await with_met(addresses, pauses.met, tells=tries % WARN_EVERY_TRIES == 0)
                await _join(asked, settings, on_joined, extension, pauses)
                if not pauses.follows:
                    return
                tries = 0
            except NobodyAnswers as error:
                if not (settings.run_dir / CAMPAIGN_FILE).exists():
                    raise
                if tries % WARN_EVERY_TRIES == 0:
                    logger.warning("%s; retrying until a peer answers", error.problem)
                tries += 1
                await asyncio.sleep(FIND_EVERY_S)
        logger.info("left · %s", to_continue(settings.run_dir, settings.identity))


async def with_met(addresses: Sequence[str], met: Sequence[str], tells: bool) -> Sequence[str]:
    """Return these addresses, and those of peers that the trainer met before if one of these listens. `tells`: it says so."""
    if not await is_any_listening(met):
        return addresses
    log = logger.info if tells else logger.debug
    log("no peer answers at %s; joining through peers that this trainer met before", ", ".join(addresses))
    return *addresses, *(address for address in met if address not in addresses)


async def _join(
    addresses: Sequence[str],
    settings: PeerConfig,
    on_joined: Callable[[CampaignFiles, str], None],
    extension: Extension,
    pauses: Pauses,
) -> None:
    with made_run_dir(settings.run_dir, pauses.gives_up):
        pauses.begin()
        async with connected(settings, addresses) as (net, dialable):
            ready = await _prepare(net, addresses, settings, on_joined, pauses)
            if await pauses.is_due():
                return
            if not dialable:
                logger.warning("%s", describe(dialable))
            await _live_as_trainer(net, dialable, addresses, settings, ready, extension, pauses)


@dataclass(frozen=True)
class _Ready:
    """What a volunteer needs to train, before it meets the swarm."""

    files: CampaignFiles
    genesis: Commit
    invitation: Invitation | None
    devices: Sequence[torch.device]
    resources: Resources
    shelf: TokenShelf
    store: DirectoryStore


async def _prepare(
    net: Libp2p,
    addresses: Sequence[str],
    settings: PeerConfig,
    on_joined: Callable[[CampaignFiles, str], None],
    pauses: Pauses,
) -> _Ready:
    """Fetch the campaign, choose what to train, and open the run-dir; make base 0 there if all that it takes is at hand."""
    peers = [peer_of(address) for address in addresses]
    files, genesis = await fetch_campaign(first_contact(net), peers, net.registry, settings.data_dir, STARTING_S)
    check_run_dir(files, genesis, settings.run_dir)
    pauses.prepares("preparing to train")
    pauses.count(net.daemon_pid)
    invitation = admitted(settings, files, genesis, net.identity, trains=True)
    logger.info("found campaign %s; preparing to train", files.campaign.config.name)
    async with still("importing torch", pauses.prepares):
        await asyncio.to_thread(import_module, "spes_p2p.training.trainer")  # streams go on meanwhile
    from spes_p2p.campaign.free_memory import choose_devices
    from spes_p2p.session.resources import choose_resources, join_bytes, require_disk, require_quota, round_bytes

    require_checkpoint(settings, files.campaign.config)
    devices = choose_devices(settings.devices)
    resources = choose_resources(devices, settings, files.campaign.config)
    require_disk(files, settings, resources)
    expected = round_bytes(files.campaign.config, resources.experts)
    async with still("verifying the text on this machine", pauses.prepares):
        shelf = await asyncio.to_thread(open_text, files, settings.run_dir, settings.token_cache_bytes)
    require_quota(settings, files, shelf, expected)
    keep_campaign(files, genesis, settings.run_dir)
    keep_invitation(invitation, settings.run_dir)
    on_joined(files, net.transport.addresses[0])
    store = await asyncio.to_thread(DirectoryStore, settings.run_dir)  # deletes what a dead process left
    async with still("making base 0", pauses.prepares):
        await join_with_base_0(first_contact(net), peers, files, genesis, settings, store)
    missed = None if settings.quota is None else await _missed_rounds(first_contact(net), peers, store)
    pauses.expect(expected, join_bytes(files, shelf, expected, missed))
    tell_room(resources)
    pauses.prepares("getting the newest base")
    keep_loaded_objects()
    return _Ready(files, genesis, invitation, devices, resources, shelf, store)


def tell_room(resources: Resources) -> None:
    """Log what was chosen, and what is slow about it."""
    logger.info("room for %s", resources.description)
    if resources.warning:
        logger.warning("%s", resources.warning)


async def _missed_rounds(endpoint: RpcEndpoint, peers: Sequence[str], store: DirectoryStore) -> int | None:
    """Return the number of rounds since this run-dir's base, as these peers say; None without a base."""
    own = stored_round(store)
    if own is None:
        return None
    return max((info.round - own for info in await newest_bases(endpoint, peers)), default=0)


async def _live_as_trainer(
    net: Libp2p,
    dialable: bool,
    addresses: Sequence[str],
    settings: PeerConfig,
    ready: _Ready,
    extension: Extension,
    pauses: Pauses,
) -> None:
    from spes_p2p.model.build import layout_of
    from spes_p2p.session.ranks import started
    from spes_p2p.session.resources import left_disk
    from spes_p2p.training.trainer import TorchTrainer

    files, resources, config = ready.files, ready.resources, ready.files.campaign.config
    left = resources.left_memory(config), left_disk(files, settings, resources)
    evaluations = evaluations_of(config, settings, layout_of(config.model).size, *left)
    more = (pauses.observe, evaluations.observe, *extension.observers)
    with observing(files, settings, net.identity.peer_id, "trainer", more) as observers:
        world = extension.around(world_of(net, ready.store, settings))
        named = settings.name or "", settings.team or ""
        node = await make_node(net, world, files, ready.genesis, "trainer", observers.all, ready.invitation, named)
        standing, probation = standing_in(node.log, node.peer_id, config, ready.invitation)
        if standing == "newcomer":
            logger.info("%s", own_standing(standing, probation))
        pauses.in_swarm(
            direct(net.transport.addresses),
            lambda: met_addresses(node.log.last, node.contacts, config.admission, node.peer_id),
        )
        library = await serve_text(node, ready.shelf, settings.private_urls or all(map(is_loopback, addresses)))
        leave = LeaveRequest()
        text, held_out = make_readers(files, ready.shelf, library, leave)
        eos = files.training_manifest.eos_token_id

        def make_trainer(base: np.ndarray, owned: tuple[int, ...]) -> TorchTrainer:
            return TorchTrainer(config, base, owned, text, held_out, ready.devices[0], resources.options, ranks, eos)

        reachability = Reachability(node.endpoint, net.transport, node.others, node.world.rng, dialable)
        capacity = Capacity(resources.experts, is_dialable=lambda: reachability.is_dialable)
        peer = Peer(
            node, layout_of(config.model), make_trainer, capacity, observers.all, observers.status,
            str(settings.run_dir), base_in_memory=resources.base_in_memory, arrays_in_memory=resources.arrays_in_memory,
            checkpoint_every_s=60 * settings.checkpoint_minutes, leave=leave,
        )

        def end() -> None:
            pauses.ending.make()
            peer.leave()

        net.keep_few_connections(addresses)
        searching = (reachability.keep_measuring(), net.keep_finding(addresses))
        around = (*searching, pauses.watch(peer.leave, observers.all), evaluations.run(observers.all))
        followers = started(ready.devices, config, resources.options, settings.nice)
        call_on_signals(end, LEAVING)
        async with followers as ranks, sharing_history(node, observers.history), beside(*around):
            await live_on(net, peer.run())
        if peer.finished:
            pauses.campaign_ended()
        if not pauses.follows:
            records = observers.history.rounds.records
            logger.info("%s", farewell(observers.board.status, records, settings.run_dir, settings.identity))
