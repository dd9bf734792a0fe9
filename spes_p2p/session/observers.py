"""The observers of one peer: status, metrics, journal, console and tracker."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.campaign.files import CampaignFiles
from spes_p2p.config.campaign import PeerConfig
from spes_p2p.messages.methods import HISTORY
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.net.tasks import beside
from spes_p2p.observe.console import RoundLog
from spes_p2p.observe.events import Observer, PeerStarted, to_all
from spes_p2p.observe.history import History
from spes_p2p.observe.metrics import Metrics
from spes_p2p.observe.progress import ProgressLine
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.tracker import Tracker
from spes_p2p.observe.units import short_peer
from spes_p2p.peer.history_sync import fill_history, serving
from spes_p2p.peer.node import Node

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerObservers:
    """All observers of a peer, and those that answer requests."""

    all: Observer
    board: StatusBoard
    history: History

    def status(self) -> bytes:
        """Return the answer to a status request."""
        return self.board.status.to_bytes()


@contextlib.contextmanager
def observing(
    files: CampaignFiles, settings: PeerConfig, peer_id: str, role: str, more: Sequence[Observer] = ()
) -> Iterator[PeerObservers]:
    """Run the observers that the settings select, and `more`."""
    config, campaign_hash = files.campaign.config, files.campaign.hash
    history = History(peer_id, settings.run_dir)
    history.record(PeerStarted(peer_id))
    status = PeerStatus(
        peer_id=peer_id, role=role, campaign=config.name, campaign_hash=campaign_hash, total_rounds=config.total_rounds,
        name=settings.name or "", team=settings.team or "", min_peers=config.sync.min_peers, **history.rounds.last_round(),
    )
    board = StatusBoard(status, time.monotonic)
    metrics = Metrics(peer_id, config.name, campaign_hash)
    metrics.follow(history.contributed, settings.run_dir)
    progress = ProgressLine(board)
    server = metrics.serve(settings.metrics_port, settings.metrics_host) if settings.metrics_port is not None else None
    if server is not None:
        logger.info("metrics on %s", server.url)
    try:
        tracker = _tracker(files, settings, f"{role} {short_peer(peer_id)}")
        trackers = [] if tracker is None else [tracker.log]
        log = RoundLog(board, time.monotonic, config.sync.min_peers)
        progress.start()
        all_of_them = to_all(board.update, metrics.update, history.record, log.show, progress.update, *trackers, *more)
        yield PeerObservers(all_of_them, board, history)
        if tracker is not None:
            tracker.close()
    finally:
        progress.close()
        history.close()
        if server is not None:
            server.close()


@contextlib.asynccontextmanager
async def sharing_history(node: Node, history: History) -> AsyncIterator[None]:
    """Serve this peer's round records, and fetch missing ones from other peers."""
    await node.endpoint.serve(HISTORY, serving(history.rounds, time.time))
    async with beside(fill_history(node, history)):
        yield


def _tracker(files: CampaignFiles, settings: PeerConfig, name: str) -> Tracker | None:
    if settings.tracker == "none":
        return None
    config = files.campaign.config
    return Tracker(settings.tracker, config.name, name, config.model_dump(mode="json"))
