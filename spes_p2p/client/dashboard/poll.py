"""Poll a swarm and publish its state; reconnect as long as it is unreachable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spes_p2p.client.alerts import NOBODY_ANSWERS, Alert, alerts, status_document
from spes_p2p.client.chronicle import Chronicle, owners_first
from spes_p2p.client.connection import Reconnection, SwarmConnection
from spes_p2p.client.dashboard.view import TIMELINE_ROUNDS, series, swarm_view
from spes_p2p.client.proven import kept_rounds
from spes_p2p.config.addresses import is_peer_address, peer_of
from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.errors import NobodyAnswers, UserError
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.fields import Continuations
from spes_p2p.messages.presence import HistoryPage, PeerStatus, RoundRecord
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.rounds import Rounds, totals_of
from spes_p2p.observe.swarm_status import MAX_SILENT, believed_of, gather, slow_lines
from spes_p2p.observe.units import counted

LOOK_EVERY_S = 1.0
"""Poll interval in a swarm of up to PEERS_PER_SECOND peers; larger swarms are polled less often."""
PEERS_PER_SECOND = 16
RETRY_S = 3.0
HEADER = ("state", "message", "since", "updated", "command", "note", "alerts", "own")
NO_ANSWER_THERE = "no bootstrap peer answers at this address now"
LOST_AFTER = 5
"""Reconnect after this many polls without an answer: the addresses may lead to other peers by now."""


@dataclass
class Published:
    """What the web server serves, and a way to wait for changes."""

    state: str = "searching"
    """searching: no peer found yet; live; silent: no peer answers any more."""
    message: str = ""
    since: float = 0.0
    """Unix time at which this state began."""
    updated: float = 0.0
    """Unix time of the last answer; 0 before the first."""
    command: str = ""
    """The command to copy: `join`, or `export` once the campaign is done."""
    note: str = ""
    """What is wrong with the address in it."""
    view: dict[str, Any] | None = None
    known_alerts: Sequence[Alert] = ()
    """Alerts of the last answer."""
    slow: tuple[str, ...] = ()
    """Trainers whose lines hold rounds up."""
    by_peer: Mapping[str, Sequence[RoundRecord]] = field(default_factory=dict)
    """Each peer's own records of the last rounds."""
    own: dict[str, Any] | None = None
    """The user's own trainer (`own.py`), if the dashboard is of one."""
    status: dict[str, Any] | None = None
    """The document of `status --json`."""
    curves: dict[str, Any] | None = None
    curves_version: int = 0
    webhook_refusals: int = 0
    """Posts that the webhook's URL did not take."""
    webhook_waiting: int = 0
    """Notices that wait for it."""
    version: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts now. What was wrong when the swarm fell silent still is, as far as anyone knows."""
        is_fine = self.state == "live" or (self.view is not None and self.view["done"])
        return (*(() if is_fine else (NOBODY_ANSWERS,)), *self.known_alerts)

    def document(self) -> dict[str, Any]:
        """Return state, message, times, the command to copy, alerts, the own trainer, and the swarm, without the curves."""
        header = {name: getattr(self, name) for name in HEADER}
        document: dict[str, Any] = to_json({**header, "swarm": self.view})
        return document

    def set_state(self, state: str, message: str) -> None:
        """Change the state and publish it."""
        if state != self.state or not self.since:
            self.since = time.time()
        self.state, self.message = state, message
        self.publish()

    def lost(self, message: str) -> None:
        """Publish that no peer answers."""
        self.set_state("silent" if self.view else "searching", message)

    def publish(self) -> None:
        """Wake all waiters."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, version: int) -> None:
        """Wait for a newer version."""
        while self.version == version:
            await self._changed.wait()


@dataclass
class SwarmHistory:
    """Records of the rounds so far."""

    rounds: Rounds = field(default_factory=lambda: Rounds(""))
    """Records with times by the local clock."""
    traffic: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    stages: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    by_peer: dict[str, tuple[RoundRecord, ...]] = field(default_factory=dict)
    """Each peer's own records of the last rounds."""
    control: Control | None = None
    """The owner's newest control record."""
    asked_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By peer: the round and the evaluated round in its status at the last history request."""
    wrote: dict[str, Continuations] = field(default_factory=dict)
    """By peer: the continuations in its status when all of its rounds were last read."""

    def add(
        self, page: HistoryPage, now: float, is_measured: bool = True, is_believed: bool = True
    ) -> tuple[RoundRecord, ...]:
        """Add a page received at `now` (Unix time); return its records by the local clock.

        `is_measured`: its bytes and seconds count in the means over peers. `is_believed`: it says when a round was.
        """
        ahead_s = page.now - now
        records = tuple(replace(record, time=min(now, record.time - ahead_s)) for record in page.records)
        for record in records:
            if is_believed:
                self.rounds.add(record)
            if is_measured:
                self.traffic.setdefault(record.round, {})[record.teller] = (record.sent_bytes, record.received_bytes)
                self.stages.setdefault(record.round, {})[record.teller] = dict(record.seconds)
        return records

    def forget_all_but(self, peers: Collection[str]) -> None:
        """Forget the rounds of peers that do not answer, but for the newest MAX_SILENT: strangers come under ever new names."""
        for of_peers in (self.by_peer, self.asked_at, self.wrote):
            for peer in [peer for peer in of_peers if peer not in peers][:-MAX_SILENT]:
                del of_peers[peer]


async def watch(
    addresses: Sequence[str], published: Published, spare: Callable[[], Sequence[str]] = tuple, own: str = ""
) -> None:
    """Poll the swarm until cancelled. `spare` returns addresses for when nobody listens at the others.

    `own`: the user's own peer, which is believed what no certificate covers.
    """
    tries = 0
    history, again = SwarmHistory(), Reconnection()
    while True:
        try:
            async with again.connect(addresses, spare()) as swarm:
                tries = 0
                await _look(swarm, again, addresses, history, published, own)
        except UserError as error:
            tries += 1
            published.lost(_still_searching(addresses, tries) if isinstance(error, NobodyAnswers) else str(error))
        await asyncio.sleep(RETRY_S)


def _still_searching(addresses: Sequence[str], tries: int) -> str:
    """Say what a page that goes on says: the error's advice is for who typed a command that has ended."""
    return f"no peer that has the campaign answers at {', '.join(addresses)}; tried {counted(tries, 'time')}, retrying"


async def _look(
    swarm: SwarmConnection, again: Reconnection, addresses: Sequence[str], history: SwarmHistory, published: Published,
    own: str,
) -> None:
    """Publish the state of the swarm until no peer answers any more."""
    config, silent_polls = (await swarm.files()).campaign.config, 0
    chronicle = Chronicle(swarm, config, own)
    while silent_polls < LOST_AFTER:
        statuses = await swarm.statuses()
        if statuses:
            silent_polls = 0
            await _learn_rounds(swarm, chronicle, statuses, history)
            history.control = await swarm.newest_order(history.control)
            address, answers = await address_to_join(swarm, addresses, {status.peer_id for status in statuses})
            published.note = "" if answers else NO_ANSWER_THERE
            _publish(statuses, config, history, published, address)
            await again.meet(swarm)
        else:
            silent_polls += 1
            published.lost("no peer of the campaign answers; retrying")
        await asyncio.sleep(max(LOOK_EVERY_S, len(statuses) / PEERS_PER_SECOND))


def _publish(
    statuses: Sequence[PeerStatus], config: CampaignConfig, history: SwarmHistory, published: Published, address: str
) -> None:
    now = time.time()
    records = history.rounds.records
    published.slow = slow_lines(statuses, published.slow)
    published.view = swarm_view(statuses, history.by_peer, totals_of(records), now, published.slow)
    published.by_peer = history.by_peer
    published.known_alerts = alerts(gather(statuses), records, now, published.slow, config)
    published.status = status_document(statuses, published.known_alerts)
    take = f"spes-p2p export --from {address} --output checkpoint"
    published.command = take if published.view["done"] else f"spes-p2p join {address}"
    curves = series(records, history.traffic, config, history.control, history.stages)
    if curves != published.curves:
        published.curves = curves
        published.curves_version += 1
    published.updated = now
    published.set_state("live", "")


async def address_to_join(swarm: SwarmConnection, addresses: Sequence[str], answering: Collection[str]) -> tuple[str, bool]:
    """Return the announced address of one of the owner's helpers, a given address, or that of another helper that has voted
    lately, and whether that peer is `answering`.

    People copy it into a shell: nothing but a peer's address is in it, and the address is of that peer.
    """
    contacts, log = await swarm.contacts(), swarm.log
    voters = {peer for number in kept_rounds(log) for peer in log.commit_at(number).electorate}

    def announced(peers: Iterable[str]) -> list[str]:
        found = [(peer, address) for peer in peers if peer in contacts for address in contacts[peer].addresses]
        return [address for peer, address in found if is_peer_address(address) and peer_of(address) == peer]

    others = announced(peer for peer in sorted(voters) if peer in contacts and contacts[peer].role == "helper")
    known = (*announced(swarm.genesis.helpers), *addresses, *others)
    living = [address for address in known if peer_of(address) in answering]
    return (living or addresses)[0], bool(living)


async def _learn_rounds(
    swarm: SwarmConnection, chronicle: Chronicle, statuses: Sequence[PeerStatus], history: SwarmHistory
) -> None:
    """Request new records from peers with a new commit or evaluation, and at first the whole history from one peer."""
    statuses = [status for status in statuses if status.base_digest]  # no outsiders (`proven.py`)
    believed = {chronicle.own, *(status.peer_id for status in believed_of(statuses))}
    if not history.rounds.records:
        await _learn_past(swarm, chronicle, statuses, history)
    news = [status for status in statuses if history.asked_at.get(status.peer_id) != (status.round, status.validation_round)]
    await asyncio.gather(*(_learn_newest(swarm, chronicle, status, history, status.peer_id in believed) for status in news))
    history.forget_all_but({status.peer_id for status in statuses})


async def _learn_past(
    swarm: SwarmConnection, chronicle: Chronicle, statuses: Sequence[PeerStatus], history: SwarmHistory
) -> None:
    """Learn all rounds: what they were from the owner's helpers if these answer, what they cost from one trainer.

    That is the user's own if it answers, otherwise in an open campaign a vouched one.
    """
    trainers = [status for status in statuses if status.role == "trainer"]
    own = [status for status in trainers if status.peer_id == chronicle.own]
    trainers = own + sorted((each for each in believed_of(trainers) if each not in own), key=lambda status: -status.uptime_s)
    helpers = owners_first(swarm, [status.peer_id for status in statuses if status.role != "trainer"])
    for peer in helpers:
        if history.rounds.missing(chronicle.rounds):
            await _learn_all(swarm, chronicle, peer, history, is_measured=False)
    for status in trainers:
        await _learn_all(swarm, chronicle, status.peer_id, history)
        if not history.rounds.missing(chronicle.rounds):
            return


async def _learn_all(
    swarm: SwarmConnection, chronicle: Chronicle, peer: str, history: SwarmHistory, is_measured: bool = True
) -> None:
    async for page in chronicle.pages(swarm, peer):
        history.add(page, time.time(), is_measured)


async def _learn_newest(
    swarm: SwarmConnection, chronicle: Chronicle, status: PeerStatus, history: SwarmHistory, is_believed: bool
) -> None:
    peer = status.peer_id
    if is_believed and status.continuations and history.wrote.get(peer) != status.continuations:
        # Only this peer has what the model wrote, and for which round, which may be long ago.
        await _learn_all(swarm, chronicle, peer, history, is_measured=False)
        history.wrote[peer] = status.continuations
    page = await anext(chronicle.pages(swarm, peer, max(-1, status.round - TIMELINE_ROUNDS - 1)), None)
    if page is None:
        return
    history.asked_at[peer] = min(status.round, chronicle.log.round), status.validation_round
    records = history.add(page, time.time(), is_believed=is_believed)
    history.by_peer[peer] = tuple(record for record in records if record.teller == peer)
