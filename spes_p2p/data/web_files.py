"""Opening published files at their URLs, with bounds on what a server can make a volunteer do."""

from __future__ import annotations

import ipaddress
from typing import Any

import aiohttp
import fsspec

from spes_p2p.data.pieces import PIECE_BYTES
from spes_p2p.errors import UnusableUrl
from spes_p2p.messages.content import PIECES_PER_REQUEST

MAX_RANGE_BYTES = PIECES_PER_REQUEST * PIECE_BYTES
"""The most that is asked for at once."""
ANONYMOUS: dict[str, dict[str, Any]] = {"s3": {"anon": True}, "gs": {"token": "anon"}}
"""Options that keep a volunteer's credentials from being used for the owner's files."""
WITH_IPV4 = [ipaddress.IPv6Network(each) for each in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")]
"""IPv4-compatible addresses (RFC 4291) and those of translators (RFC 2765, 6052), which have an IPv4 address at their end."""
LOCAL = [ipaddress.IPv6Network(each) for each in ("fec0::/10", "64:ff9b:1::/48")]
"""Site-local addresses (RFC 3879), and those of translators within a network (RFC 8215): global for `ipaddress`."""


def is_public(host: str) -> bool:
    """Return whether an address is one host's in the public network. With an IPv4 address in it, that one decides."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        within = address.ipv4_mapped or address.sixtofour
        if any(address in network for network in WITH_IPV4):
            within = ipaddress.IPv4Address(address.packed[-4:])
        if within is not None:
            return is_public(str(within))
        if any(address in network for network in LOCAL):
            return False
    return address.is_global and not address.is_multicast


class _PublicHosts(aiohttp.TCPConnector):
    """Connects to public addresses only, whatever a name resolves to and wherever a server redirects."""

    async def _resolve_host(self, host: str, port: int, traces: Any = None) -> Any:
        found = await super()._resolve_host(host, port, traces)
        public = [each for each in found if is_public(each["host"])]
        if not public:
            raise UnusableUrl(f"{host} is in a private network; --private-urls allows that")
        return public


class _Bounded(aiohttp.ClientResponse):
    """Reads no more than a request asks for, whatever the server sends."""

    async def read(self) -> bytes:
        """Return the body. Raises UnusableUrl for one that is too long."""
        body = bytearray()
        async for chunk in self.content.iter_any():
            body += chunk
            if len(body) > MAX_RANGE_BYTES:
                self.close()
                raise UnusableUrl("the server sends more than it is asked for")
        return bytes(body)


async def _public_client(**options: Any) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=_PublicHosts(), **options)


def open_url(url: str, allows_private: bool, range_s: float, silence_s: float) -> Any:
    """Open the URL with the file system of its scheme: fsspec's own parsing would follow chained URLs to local files.

    `range_s`, `silence_s`: timeouts of a web server for a byte range, and for its next byte.
    """
    scheme = url.partition("://")[0]
    options = ANONYMOUS.get(scheme, {})
    if scheme in ("http", "https"):
        timeout = aiohttp.ClientTimeout(total=range_s, sock_connect=silence_s, sock_read=silence_s)
        client = {"timeout": timeout, "response_class": _Bounded, "auto_decompress": False}
        options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
        if not allows_private:
            options["get_client"] = _public_client
    system = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    return system.open(url, "rb", block_size=PIECE_BYTES, cache_type="none")
