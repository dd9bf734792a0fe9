"""A peer that is connected through a relay only is dialled directly, if it can be and no stream is interrupted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from spes_p2p.net.connections import Uses
from spes_p2p.net.p2pd import Daemon
from spes_p2p.net.transport import Libp2pTransport

RELAYED = "/ip4/203.0.114.1/tcp/1/p2p/QmRelay/p2p-circuit"
PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
DIRECT, PRIVATE = f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}", f"/ip4/192.168.1.2/tcp/1/p2p/{PEER}"


class Connected:
    """A daemon that has these connections with PEER, and dials as libp2p does: not while there is one."""

    peer_id = "me"

    def __init__(self, *addresses: str):
        self.uses, self.addresses, self.closed = Uses(), list(addresses), 0

    async def connections(self) -> dict[str, list[str]]:
        return {PEER: list(self.addresses)} if self.addresses else {}

    async def close_connections(self, peer: str) -> None:
        self.addresses, self.closed = [], self.closed + 1

    async def connect(self, peer: str, addresses: tuple[str, ...], timeout_s: float) -> None:
        self.addresses = self.addresses or [DIRECT]

    async def open_stream(self, peer: str, protocol: str, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        return None


async def opened(daemon: Connected, *known: str, times: int = 1) -> Libp2pTransport:
    transport = Libp2pTransport(cast(Daemon, daemon), ())
    transport.learn_addresses(PEER, known)
    await asyncio.gather(*(transport._open(PEER, "ping") for _ in range(times)))
    return transport


@pytest.mark.parametrize(("before", "known", "closed"), [
    ([RELAYED], [DIRECT], 1),
    ([RELAYED], [PRIVATE, f"{RELAYED}/p2p/{PEER}"], 0),
    ([RELAYED, DIRECT], [DIRECT], 0),
    ([], [DIRECT], 0),
])
def test_a_relayed_connection_is_closed_only_for_a_direct_one(before: list[str], known: list[str], closed: int) -> None:
    daemon = Connected(*before)
    asyncio.run(opened(daemon, *known, times=3))
    assert daemon.closed == closed


def test_a_relayed_connection_in_use_stays_until_it_is_unused() -> None:
    async def main() -> None:
        daemon = Connected(RELAYED)
        with daemon.uses.of(PEER):
            transport = await opened(daemon, DIRECT)
            assert daemon.closed == 0
        await transport._open(PEER, "ping")
        assert daemon.closed == 0
        transport.dial_again([(PEER, [RELAYED])])
        await transport._open(PEER, "ping")
        assert (daemon.closed, daemon.addresses) == (1, [DIRECT])
        transport.dial_again([(PEER, [RELAYED]), (PEER, [DIRECT])])
        assert PEER in transport._dialled

    asyncio.run(main())


def test_addresses_are_known_of_the_peers_that_were_named_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can have contacts of ever new peers in the registry."""
    monkeypatch.setattr("spes_p2p.net.transport.KNOWN_PEERS", 8)

    async def main() -> None:
        transport = await opened(Connected(), DIRECT)
        for number in range(20):
            transport.learn_addresses(f"other {number}", [DIRECT])
            transport.learn_addresses(PEER, [DIRECT])
        assert [*transport._known] == [*(f"other {number}" for number in range(13, 20)), PEER]
        assert transport._dialled == {PEER}
        for number in range(20, 28):
            transport.learn_addresses(f"other {number}", [DIRECT])
        assert not transport._dialled | transport._dials.keys()

    asyncio.run(main())
