"""Peers in the real world: libp2p, disk, clock, signals and observers put together around a life (`peer.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spes_p2p.addresses import listen_beside, peer_of
from spes_p2p.campaign import (
    CAMPAIGN_FILE,
    TOKENIZER_FILE,
    CampaignFiles,
    check_run_dir,
    fetch_campaign,
    keep_campaign,
    read_run_dir,
)
from spes_p2p.config import CampaignConfig, PeerConfig
from spes_p2p.data.encoding import Encoder
from spes_p2p.data.manifest import HASHES, Manifest, find_hashes, find_local, locate_file
from spes_p2p.data.pieces import pieces_of_samples
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.data.streaming import STREAMED_CHARACTERS, TextStreamer
from spes_p2p.data.tokenizers import parse_tokenizer
from spes_p2p.errors import Broken, NobodyAnswers, UserError
from spes_p2p.free_memory import choose_device, measured
from spes_p2p.genesis import make_genesis, save_base_0
from spes_p2p.model.build import initial_state, layout_of
from spes_p2p.model.stored import StoredFormat
from spes_p2p.observe.chronicle import Chronicle
from spes_p2p.observe.console import RoundLog, farewell
from spes_p2p.observe.events import Observers
from spes_p2p.observe.history import History
from spes_p2p.observe.metrics import Metrics
from spes_p2p.observe.progress import ProgressLine
from spes_p2p.observe.status import PeerStatus, StatusBoard
from spes_p2p.observe.tracker import Tracker
from spes_p2p.observe.units import short_peer
from spes_p2p.peer import NOTHING_TO_TRAIN, Capacity, Peer
from spes_p2p.plan_table import describe_setup
from spes_p2p.planner import join_options, most_experts
from spes_p2p.simulate.trial import Trial, trial_of_environment
from spes_p2p.swarm.checkup import Checkup
from spes_p2p.swarm.electors import open_votes
from spes_p2p.swarm.interfaces import Store, World
from spes_p2p.swarm.libp2p import FIND_EVERY_S, Libp2p, check_addresses, start_libp2p
from spes_p2p.swarm.limits import limited_line
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.reachability import Reachability, describe, probe_dialable
from spes_p2p.swarm.records import Head
from spes_p2p.swarm.remember import HISTORY, remember, serving
from spes_p2p.swarm.rpc import Switchboard
from spes_p2p.swarm.store import DirectoryStore
from spes_p2p.swarm.tasks import end_tasks
from spes_p2p.sync.archive import Archive, archived_rounds, load_archived
from spes_p2p.sync.base import BASE, Base, load_base
from spes_p2p.sync.digest import state_digest
from spes_p2p.sync.outer import base_size
from spes_p2p.sync.plan import Rules
from spes_p2p.sync.tokens import TokenLibrary
from spes_p2p.training.options import TrainingOptions, check_options
from spes_p2p.training.trainer import TorchTrainer

logger = logging.getLogger(__name__)

VERIFIED_FILE, TOKENS_FOLDER = "verified_files.json", "tokens"
SAY_EVERY_TRIES = 12
"""Who waits for a swarm to come back says so about once in two minutes."""
FIRST_CONTACT_SILENCE_S = 10.0


@dataclass(frozen=True)
class Watchers:
    """The observers of one peer."""

    observers: Observers
    board: StatusBoard
    chronicle: Chronicle
    trial: Trial | None
    """Of a simulation that this process is part of."""


async def run_bootstrap(
    files: CampaignFiles, settings: PeerConfig, others: Sequence[str], on_address: Callable[[str], None]
) -> None:
    """Be a bootstrap peer of a campaign until a signal comes: the first one, or one more beside `others`.

    Started again on its run-dir it goes on without the others when none of them answers. `on_address` gets the address that
    volunteers join with.
    """
    try:
        async with _connected(settings, others) as (net, dialable):
            if not dialable:
                logger.warning("others cannot dial this bootstrap peer: volunteers cannot join by its address; open its port")
            async with _beside(net.keep_finding(others)):
                await _live_as_bootstrap(net, files, settings, others, on_address)
    except NobodyAnswers as error:
        if read_run_dir(settings.run_dir) is None:
            raise
        logger.warning("%s; starting without them", error)
        async with _connected(settings, ()) as (net, _), _beside(net.keep_finding(others)):
            await _live_as_bootstrap(net, files, settings, (), on_address)


async def _live_as_bootstrap(
    net: Libp2p, files: CampaignFiles, settings: PeerConfig, others: Sequence[str], on_address: Callable[[str], None]
) -> None:
    store = DirectoryStore(settings.run_dir)
    if others:
        genesis = await _genesis_of(others, files, net, settings.run_dir)
    else:
        genesis = await asyncio.to_thread(_genesis, files, settings.run_dir, store, net.identity.peer_id)
    keep_campaign(files, genesis, settings.run_dir)
    with _watching(files, settings, net.identity.peer_id, "helper") as watchers:
        node = _node(_world(net, store, settings, watchers.trial), files, genesis, "helper", watchers)
        await _serve_checkup(net, node.board)
        await _token_library(node, await asyncio.to_thread(_text_to_serve, files, settings.run_dir))
        layout = layout_of(files.campaign.config.model)
        helper = Peer(
            node, layout, None, NOTHING_TO_TRAIN, watchers.observers,
            lambda: watchers.board.status.to_bytes(), str(settings.run_dir),
            Archive(settings.archive_every, settings.archive_keep),
        )
        _on_signals(helper.leave)
        async with _remembering(node, watchers):
            life = asyncio.ensure_future(helper.run())
            on_address(net.transport.addresses[0])
            await _with_daemon(life, net)


async def run_join(addresses: Sequence[str], settings: PeerConfig, on_joined: Callable[[CampaignFiles, str], None]) -> None:
    """Train in the campaign at these addresses until it is complete or a signal comes.

    Started again on its run-dir it waits until somebody answers there: the bootstrap peer may be away for a while too.
    """
    tries = 0
    while True:
        try:
            return await _join(addresses, settings, on_joined)
        except NobodyAnswers as error:
            if read_run_dir(settings.run_dir) is None:
                raise
            if tries % SAY_EVERY_TRIES == 0:
                logger.warning("%s; trying again until somebody answers", error)
        tries += 1
        await asyncio.sleep(FIND_EVERY_S)


async def _join(addresses: Sequence[str], settings: PeerConfig, on_joined: Callable[[CampaignFiles, str], None]) -> None:
    async with _connected(settings, addresses) as (net, dialable):
        board = Switchboard(net.transport, FIRST_CONTACT_SILENCE_S)
        files, genesis = await fetch_campaign(board, [peer_of(address) for address in addresses], settings.data_dir)
        check_run_dir(files, genesis, settings.run_dir)
        device = choose_device(settings.device)
        experts, stored, setup = _experts(settings, files, device)
        options = _training_options(settings, stored)
        check_options(files.campaign.config.model, options, device)
        shelf = await asyncio.to_thread(_open_text, files, settings.run_dir, settings.token_cache_bytes)
        keep_campaign(files, genesis, settings.run_dir)
        on_joined(files, net.transport.addresses[0])
        logger.info("room for %s", setup)
        if not dialable:
            logger.warning("%s", describe(dialable))
        config = files.campaign.config

        store = DirectoryStore(settings.run_dir)
        with _watching(files, settings, net.identity.peer_id, "trainer") as watchers:
            node = _node(_world(net, store, settings, watchers.trial), files, genesis, "trainer", watchers)
            await _serve_checkup(net, node.board)
            text, held_out = _readers(files, shelf, await _token_library(node, shelf, _streamer(files, shelf)))

            def make_trainer(base: np.ndarray, owned: tuple[int, ...]) -> TorchTrainer:
                return TorchTrainer(config, base, owned, text, held_out, device, options)

            reachability = Reachability(node.board, net.transport, node.others, node.world.rng, dialable)
            capacity = Capacity(experts, is_dialable=lambda: reachability.is_dialable)
            peer = Peer(
                node, layout_of(config.model), make_trainer, capacity, watchers.observers,
                lambda: watchers.board.status.to_bytes(), str(settings.run_dir), base_in_memory=settings.base == "ram",
            )
            _on_signals(peer.leave)
            around = (reachability.keep_measuring(), net.keep_finding(addresses))
            async with _remembering(node, watchers), _beside(*around):
                await _with_daemon(asyncio.ensure_future(peer.run()), net)
            logger.info("%s", farewell(watchers.board.status, watchers.chronicle.totals, settings.run_dir))


def load_run_dir_base(run_dir: Path, round_number: int | None = None) -> tuple[CampaignFiles, Base]:
    """The campaign and the last committed base of a run-dir, or one that is archived there.

    Raises UserError when there is none or it is damaged.
    """
    known = read_run_dir(run_dir)
    if known is None:
        raise UserError(f"{run_dir}: not a peer's run-dir (it holds no campaign); give the --run-dir of a peer")
    config = known[0].campaign.config
    store, size = DirectoryStore(run_dir), base_size(layout_of(config.model), config.outer)
    base = load_base(store, size, str(run_dir))
    if round_number is not None and (base is None or base.round != round_number):
        base = load_archived(store, round_number, size, str(run_dir))
        if base is None:
            kept = ", ".join(map(str, archived_rounds(store))) or "none"
            raise UserError(f"--round {round_number}: not kept in {run_dir}; rounds archived there: {kept}")
    if base is None:
        raise UserError(f"{run_dir}: holds no base yet; wait until the peer has downloaded one")
    return known[0], base


@contextlib.asynccontextmanager
async def _connected(settings: PeerConfig, addresses: Sequence[str]) -> AsyncIterator[tuple[Libp2p, bool]]:
    """In the swarm's DHT, as the identity of the run-dir; and whether others can dial us."""
    if settings.metrics_port:
        Metrics().serve(settings.metrics_port, settings.metrics_host).close()
    listen = settings.listen or listen_beside(addresses)
    check_addresses(listen, settings.announce, addresses)
    with _no_trace_of_a_failed_start(settings.run_dir):
        dialable = await probe_dialable(addresses, listen, settings.announce) if addresses else True
        net = await start_libp2p(
            settings.identity_path, listen, settings.announce, addresses, reachability="public" if dialable else "private"
        )
        try:
            yield net, dialable
        finally:
            await net.close()


@contextlib.contextmanager
def _no_trace_of_a_failed_start(run_dir: Path) -> Iterator[None]:
    """Make the run-dir. After a UserError, while it holds no campaign yet, what was written since is removed again.

    Raises UserError when it cannot be made.
    """
    before = set(run_dir.iterdir()) if run_dir.is_dir() else None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be a run-dir ({error.strerror}); choose another --run-dir") from None
    try:
        yield
    except UserError:
        if not (run_dir / CAMPAIGN_FILE).exists():
            for path in set(run_dir.iterdir()) - (before or set()):
                path.unlink()
            if before is None:
                run_dir.rmdir()
        raise


async def _serve_checkup(net: Libp2p, board: Switchboard) -> None:
    """Answer those who examine themselves against this peer."""
    await Checkup(time.time, net.transport.seen_at).serve(board)


def _world(net: Libp2p, store: DirectoryStore, settings: PeerConfig, trial: Trial | None) -> World:
    world = net.world(store, limited_line(settings.max_upload, settings.max_download))
    return world if trial is None else trial.around(world)


def _node(world: World, files: CampaignFiles, genesis: Head, role: str, watchers: Watchers) -> Node:
    rules = Rules(files.campaign.config, files.campaign.hash, files.num_samples)
    folders = tuple(str(folder) for folder in files.folders)
    return Node(world, files.campaign, genesis, rules, role, files.blobs, watchers.observers, folders)


@contextlib.asynccontextmanager
async def _remembering(node: Node, watchers: Watchers) -> AsyncIterator[None]:
    """Serve what this peer remembers of the rounds, and complete it from others."""
    await node.board.serve(HISTORY, serving(watchers.chronicle, time.time))
    async with _beside(remember(node, watchers.chronicle)):
        yield


@contextlib.asynccontextmanager
async def _beside(*works: Awaitable[None]) -> AsyncIterator[None]:
    """Work that has no end of its own, as long as the block runs."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        await end_tasks(tasks)


@contextlib.contextmanager
def _watching(files: CampaignFiles, settings: PeerConfig, peer_id: str, role: str) -> Iterator[Watchers]:
    config, campaign_hash = files.campaign.config, files.campaign.hash
    status = PeerStatus(
        peer_id=peer_id, role=role, campaign=config.name, campaign_hash=campaign_hash, total_rounds=config.total_rounds
    )
    board = StatusBoard(status, time.monotonic)
    metrics = Metrics(peer_id, config.name, campaign_hash)
    history = History(settings.run_dir)
    chronicle = Chronicle(peer_id, settings.run_dir)
    progress = ProgressLine(board)
    server = metrics.serve(settings.metrics_port, settings.metrics_host) if settings.metrics_port is not None else None
    if server is not None:
        logger.info("metrics on %s", server.url)
    try:
        tracker = _tracker(files, settings, f"{role} {short_peer(peer_id)}")
        trackers = [] if tracker is None else [tracker]
        trial = trial_of_environment(settings.run_dir.name)
        trials = [] if trial is None else [trial]
        log = RoundLog(board, time.monotonic)
        progress.start()
        observers = Observers(board, metrics, history, chronicle, log, progress, *trackers, *trials)
        yield Watchers(observers, board, chronicle, trial)
        if tracker is not None:
            tracker.close()
    finally:
        progress.close()
        history.close()
        chronicle.close()
        if server is not None:
            server.close()


def _tracker(files: CampaignFiles, settings: PeerConfig, name: str) -> Tracker | None:
    if settings.tracker == "none":
        return None
    config = files.campaign.config
    return Tracker(settings.tracker, config.name, name, config.model_dump(mode="json"))


def _genesis(files: CampaignFiles, run_dir: Path, store: DirectoryStore, bootstrap: str) -> Head:
    """The genesis head; base 0 is made once and kept in the run-dir."""
    config = files.campaign.config
    known = read_run_dir(run_dir)
    if known is not None:
        check_run_dir(files, known[1], run_dir)
        if store.read(BASE) is None and state_digest(values := _first_base(config, store)) == known[1].base_digest:
            save_base_0(store, known[1], values)
        return known[1]
    values = _first_base(config, store)
    genesis = make_genesis(files.campaign, bootstrap, values, open_votes(store, random.Random()).disk)
    if store.read(BASE) is None:
        save_base_0(store, genesis, values)
    return genesis


def _first_base(config: CampaignConfig, store: Store) -> np.ndarray:
    """In a file, until it is written as a base."""
    layout = layout_of(config.model)
    values = store.scratch("aside", base_size(layout, config.outer))
    initial_state(config.model, values[: layout.size])
    values[layout.size :] = 0
    return values


async def _genesis_of(others: Sequence[str], files: CampaignFiles, net: Libp2p, run_dir: Path) -> Head:
    """The genesis head that other bootstrap peers serve. Raises UserError when their campaign is not this one."""
    board = Switchboard(net.transport, FIRST_CONTACT_SILENCE_S)
    theirs, genesis = await fetch_campaign(board, [peer_of(address) for address in others], None)
    if theirs.campaign.hash != files.campaign.hash:
        raise UserError(
            f"--peer {others[0]}: has campaign {theirs.campaign.config.name} ({theirs.campaign.hash[:12]}), not "
            f"{files.campaign.config.name} ({files.campaign.hash[:12]}); give all bootstrap peers the same files"
        )
    check_run_dir(files, genesis, run_dir)
    return genesis


def _open_text(files: CampaignFiles, run_dir: Path, cache_bytes: int) -> TokenShelf:
    """What this machine has of the text, verified; the rest is fetched when it is trained on. Raises UserError."""
    local = {
        file: path
        for manifest in files.manifests
        for file, path in find_local(manifest, files.folders, run_dir / VERIFIED_FILE).items()
    }
    return _with_hash_lists(TokenShelf(files.token_files, run_dir / TOKENS_FOLDER, local, cache_bytes), files)


def _text_to_serve(files: CampaignFiles, run_dir: Path) -> TokenShelf:
    """As `_open_text`, for a peer that does not train: it verifies what it is asked for, and goes without what is not there."""
    local = {}
    for file in files.token_files:
        try:
            local[file] = locate_file(file, files.folders)
        except UserError as error:
            if file.source is None:
                logger.warning("not served to volunteers: %s", error)
    shelf = _with_hash_lists(TokenShelf(files.token_files, run_dir / TOKENS_FOLDER, local), files)
    for file in files.token_files:
        if file not in local and file.source is not None:
            if shelf.hashes(str(file.pieces_sha256)) is None:
                listed = file.path + HASHES
                logger.warning("%s cannot be streamed: %s is missing or another's; copy it to the manifest", file.path, listed)
            else:
                logger.info("%s is not here: volunteers stream it from %s", file.path, file.source.url)
    return shelf


def _with_hash_lists(shelf: TokenShelf, files: CampaignFiles) -> TokenShelf:
    """The shelf, which knows the lists of piece hashes that lie where token files are looked for."""
    for file in files.token_files:
        hashes = find_hashes(file, files.folders) if file.source is not None else None
        if hashes is not None:
            shelf.learn_hashes(str(file.pieces_sha256), hashes)
    return shelf


def _streamer(files: CampaignFiles, shelf: TokenShelf) -> TextStreamer:
    """Makes the token files that have a source, with the campaign's tokenizer."""
    tokenizer = parse_tokenizer(files.tokenizer, TOKENIZER_FILE)
    return TextStreamer(shelf, {
        file: Encoder(tokenizer, manifest.eos_token_id, STREAMED_CHARACTERS)
        for manifest in files.manifests for file in manifest.files if file.source is not None
    })


async def _token_library(node: Node, shelf: TokenShelf, streamer: TextStreamer | None = None) -> TokenLibrary:
    """Serves the shelf, and fetches or streams what it lacks."""
    library = TokenLibrary(
        shelf, node.board, lambda: (node.others("trainer"), node.others("helper")), node.world.run_blocking, node.world.rng,
        streamer,
    )
    await library.serve()
    return library


def _readers(files: CampaignFiles, shelf: TokenShelf, library: TokenLibrary) -> tuple[SampleReader, SampleReader | None]:
    """Of the training and of the held-out text. They are used in worker threads; what is missing is fetched by this loop."""
    training, data = files.campaign.config.training, files.campaign.config.data
    loop = asyncio.get_running_loop()

    def reader(manifest: Manifest, holder: str) -> SampleReader:
        def fetch(number: int, samples: npt.NDArray[np.int64]) -> None:
            file = manifest.files[number]
            if not shelf.is_local(file):
                pieces = pieces_of_samples(samples, training.sequence_length * np.dtype(file.dtype).itemsize)
                shelf.hold(holder, str(file.pieces_sha256), pieces)
                asyncio.run_coroutine_threadsafe(library.ensure(file, pieces), loop).result()

        arrays = [shelf.array(file) for file in manifest.files]
        return SampleReader(arrays, training.sequence_length, data.piece_samples, training.seed, fetch)

    held_out = files.held_out_manifest
    return reader(files.training_manifest, "training"), None if held_out is None else reader(held_out, "held-out")


def _experts(settings: PeerConfig, files: CampaignFiles, device: str) -> tuple[int, StoredFormat | None, str]:
    """Most experts that this peer trains: its own wish, else what fits in free memory; how the others are stored then; a line.

    Raises UserError when the wish is for more than there are, or when not even the shared weights fit.
    """
    config = files.campaign.config
    wanted, experts = settings.experts, config.model.moe_num_experts
    if wanted == "auto":
        free = replace(measured(device).at_most(settings.memory_bytes), base_in_memory=settings.base == "ram")
        possible = replace(
            join_options(config, free.kind),
            optimizer=(settings.optimizer,),
            stored_on=(settings.stored_on,),
            checkpointing=(settings.activation_checkpointing,),
        )
        if settings.stored != "auto":
            possible = replace(possible, stored=(settings.stored,))
        if settings.micro_batch_size is not None:
            possible = replace(possible, micro_batch=(settings.micro_batch_size,))
        named = "--memory" if free.memory == settings.memory_bytes else f"free memory ({device})"
        setup = most_experts(config, free, possible, named).setup
        return setup.owned, setup.stored, describe_setup(setup, experts)
    if wanted > experts:
        raise UserError(f"--experts {wanted}: the campaign's model has {experts} experts; give at most that, or auto")
    return wanted, None, f"{wanted} of {experts} experts, as asked for"


def _training_options(settings: PeerConfig, stored: StoredFormat | None) -> TrainingOptions:
    """What the settings say; `stored` is the format that fits where they leave it open."""
    return TrainingOptions(
        stored=stored if settings.stored == "auto" else settings.stored,
        stored_on=settings.stored_on,
        backend=settings.backend,
        optimizer=settings.optimizer,
        activation_checkpointing=settings.activation_checkpointing,
        micro_batch_size=settings.micro_batch_size,
    )


def _on_signals(leave: Callable[[], None]) -> None:
    """SIGINT and SIGTERM leave politely; the second one ends the process."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        logger.info("leaving after the current step; once more to stop at once")
        leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)


async def _with_daemon(life: asyncio.Future[None], net: Libp2p) -> None:
    """Run a life as long as its libp2p daemon lives."""
    gone = asyncio.ensure_future(net.wait_daemon_exit())
    await asyncio.wait({life, gone}, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks([gone])
    if not life.done():
        await end_tasks([life])
        raise Broken("the libp2p daemon (p2pd) ended; start this peer again on its run-dir")
    await life
