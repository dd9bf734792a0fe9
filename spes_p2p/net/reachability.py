"""Can others open connections to this peer? Some peers are asked to try.

A peer that cannot be dialled trains like the others. It reduces nothing and is no elector, since those that would have to dial
it could not; it opens the connections of a round itself, and is reached through the relay of a peer that can be dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.config.addresses import is_loopback, peer_of
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.presence import DialBack
from spes_p2p.net.checkup import ask_dial_back, direct_host
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.p2pd import start_daemon
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.transport import Libp2pTransport

logger = logging.getLogger(__name__)

PEERS_ASKED = 3
MEASURE_EVERY_S = 300.0
PROBE_TIMEOUT_S, PROBE_SILENCE_S = 30.0, 10.0


class Reachability:
    """Whether a running peer can be dialled, measured again now and then: routers are set, reset and replaced."""

    def __init__(
        self,
        endpoint: RpcEndpoint,
        transport: Libp2pTransport,
        peers: Callable[[], Sequence[str]],
        rng: random.Random,
        dialable: bool,
    ):
        """`peers`: whom to ask. `dialable`: what was measured before this peer appeared in the swarm."""
        self.is_dialable = dialable
        self._endpoint, self._transport, self._peers, self._rng = endpoint, transport, peers, rng

    async def keep_measuring(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(MEASURE_EVERY_S)
            peers = list(self._peers())
            asked = self._rng.sample(peers, min(PEERS_ASKED, len(peers)))
            found = await measure_dialable(self._endpoint, self._transport.addresses, asked)
            if found is not None and found != self.is_dialable:
                self.is_dialable = found
                logger.warning("%s", describe(found))


async def measure_dialable(endpoint: RpcEndpoint, addresses: Sequence[str], peers: Sequence[str]) -> bool | None:
    """Return whether all of these peers that can try reach this peer's ports; None if none can try."""
    ports = ports_of(addresses)
    answers = await asyncio.gather(*(_dial_back(endpoint, peer, ports) for peer in peers))
    tried = [answer for answer in answers if answer is not None and any(map(direct_host, answer.seen_at))]
    return all(answer.reached for answer in tried) if tried else None


async def probe_dialable(initial_peers: Sequence[str], listen: Sequence[str], announce: Sequence[str]) -> bool:
    """As `measure_dialable`, before a peer starts and under a name of its own; if no peer can try, the answer is no.

    Raises UserError when no initial peer can be dialled.
    """
    if all(map(is_loopback, listen)):
        return True
    with tempfile.TemporaryDirectory(prefix="spes-probe-") as folder:
        identity = Path(folder) / "identity.key"
        RSAIdentity(identity)
        daemon = await start_daemon(
            initial_peers, PROBE_TIMEOUT_S, host_maddrs=list(listen), announce_maddrs=list(announce) or None,
            identity_path=str(identity), nat_port_map=True, auto_nat=False, use_relay=True, dht_mode="client",
        )
        try:
            addresses = tuple(str(address) for address in await daemon.get_visible_maddrs(latest=True))
            endpoint = RpcEndpoint(Libp2pTransport(daemon, addresses), PROBE_SILENCE_S)
            asked = [peer_of(address) for address in initial_peers[:PEERS_ASKED]]
            return bool(await measure_dialable(endpoint, addresses, asked))
        finally:
            await daemon.close()


def ports_of(addresses: Sequence[str]) -> tuple[int, ...]:
    """TCP ports of the direct ones among these multiaddrs."""
    direct = [address.split("/") for address in addresses if direct_host(address) is not None]
    return tuple(dict.fromkeys(int(parts[4]) for parts in direct if parts[3] == "tcp"))


def describe(dialable: bool) -> str:
    """For the log."""
    if dialable:
        return "others can dial this peer: it reduces parts of rounds"
    return "others cannot dial this peer: it trains all the same, over its own connections and relays (spes-p2p doctor: advice)"


async def _dial_back(endpoint: RpcEndpoint, peer: str, ports: tuple[int, ...]) -> DialBack | None:
    with contextlib.suppress(PeerUnreachable, Refused, WireError):
        return await ask_dial_back(endpoint, peer, ports)
    return None
