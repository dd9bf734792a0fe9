"""Base class of transports that wrap another one."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.net.interfaces import Channel, Handler, Transport


class WrappedTransport:
    """Forwards everything to the inner transport; subclasses override `serve` and `open`."""

    def __init__(self, inner: Transport):
        self._inner = inner

    @property
    def peer_id(self) -> str:
        """See Transport."""
        return self._inner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return self._inner.addresses

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """See Transport."""
        self._inner.learn_addresses(peer, addresses)

    async def serve(self, method: str, handler: Handler) -> None:
        """See Transport."""
        await self._inner.serve(method, handler)

    async def open(self, peer: str, method: str) -> Channel:
        """See Transport."""
        return await self._inner.open(peer, method)

    async def close(self) -> None:
        """See Transport."""
        await self._inner.close()
