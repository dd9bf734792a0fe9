"""A transport around another one: what is to be done to its channels is added by a subclass."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.net.interfaces import Channel, Handler, Transport


class WrappedTransport:
    """The same transport; subclasses change `serve` and `open`."""

    def __init__(self, inner: Transport):
        self._inner = inner

    @property
    def peer_id(self) -> str:
        """As the one inside."""
        return self._inner.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """As the one inside."""
        return self._inner.addresses

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """As the one inside."""
        self._inner.learn_addresses(peer, addresses)

    async def serve(self, method: str, handler: Handler) -> None:
        """As the one inside."""
        await self._inner.serve(method, handler)

    async def open(self, peer: str, method: str) -> Channel:
        """As the one inside."""
        return await self._inner.open(peer, method)

    async def close(self) -> None:
        """As the one inside."""
        await self._inner.close()
