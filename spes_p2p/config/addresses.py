"""Syntax of the addresses that users write: of peers, to listen on, and of a webhook."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from spes_p2p.errors import UserError

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
LOOPBACK_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
EXAMPLE_ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
EXAMPLE_LISTEN = "/ip4/0.0.0.0/tcp/31337"

_TRANSPORT = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([0-9A-Za-z.:-]+)/tcp/([0-9]{1,5})")
_PEER = re.compile(r"/p2p/([^/]*)\Z")
_PEER_ID = re.compile(r"(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|1[1-9A-HJ-NP-Za-km-z]{45,51})")
"""A SHA-256 of a public key, or a short public key itself, in base58."""
_PATH = re.compile(rf"(/p2p/{_PEER_ID.pattern}/p2p-circuit)?/p2p/{_PEER_ID.pattern}")
"""All that may follow the transport: the peer, or a relay and the peer."""


def check_webhook(url: str) -> None:
    """Raise UserError unless this is a URL to post to."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or " " in url:
        raise UserError(f"--webhook {url!r}: must be an http:// or https:// URL with a host")


def check_peer_addresses(addresses: Sequence[str]) -> None:
    """Raise UserError unless each address is a multiaddr of a peer: /ip4 (or ip6, dns), /tcp and /p2p."""
    for address in addresses:
        problem = _peer_problem(address)
        if problem is not None:
            raise UserError(f"'{address}' is not the address of a peer ({problem}); example: {EXAMPLE_ADDRESS}")


def is_peer_address(address: str) -> bool:
    """Return whether `check_peer_addresses` accepts the address."""
    return _peer_problem(address) is None


def is_peer_id(text: str) -> bool:
    """Return whether the text has the form of a whole peer id."""
    return _PEER_ID.fullmatch(text) is not None


def check_listen_addresses(addresses: Sequence[str]) -> None:
    """Raise UserError unless each address is a multiaddr that libp2p can listen on over TCP."""
    for address in addresses:
        match = _TRANSPORT.fullmatch(address)
        problem = _transport_problem(match) if match else "it must be /ip4/<host>/tcp/<port>"
        if problem is not None:
            raise UserError(f"'{address}' is not an address to listen on ({problem}); example: {EXAMPLE_LISTEN}")


def is_host(kind: str, host: str) -> bool:
    """Return whether `host` is valid after /ip4/ or /ip6/; any name is valid after /dns/."""
    if kind not in ("ip4", "ip6"):
        return True
    try:
        return ipaddress.ip_address(host).version == int(kind[2])
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Return whether the multiaddr's host is a loopback address."""
    host = address.split("/")[2]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_relayed(address: str) -> bool:
    """Return whether a peer's multiaddr leads to it through a relay."""
    return "/p2p-circuit/" in address


def is_public(address: str) -> bool:
    """Return whether a peer's multiaddr leads to it over the internet, without a relay."""
    host = address.split("/")[2]
    try:
        return ipaddress.ip_address(host).is_global and not is_relayed(address)
    except ValueError:
        return not is_relayed(address)


def listen_beside(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the default addresses to listen on: loopback only if all `addresses` of the swarm are loopback."""
    return LOOPBACK_LISTEN if addresses and all(map(is_loopback, addresses)) else DEFAULT_LISTEN


def peer_of(address: str) -> str:
    """Return the peer id at the end of a peer's multiaddr."""
    return address.rsplit("/p2p/", 1)[-1]


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and TCP port of a multiaddr."""
    _, _, host, _, port, *_ = address.split("/")
    return host, int(port)


def _peer_problem(address: str) -> str | None:
    match = _TRANSPORT.match(address)
    if match is not None and (problem := _transport_problem(match)) is not None:
        return problem
    peer = _PEER.search(address)
    if peer is None:
        return "it does not end in /p2p/<peer id>"
    if match is None:
        return "it must begin with /ip4/..., /ip6/... or /dns.../..., followed by /tcp/<port>"
    if not _PEER_ID.fullmatch(peer[1]):
        return f"'{peer[1]}' is not a complete peer id"
    if not _PATH.fullmatch(address, match.end()):
        return "only a relay, /p2p/<peer id>/p2p-circuit, may stand before /p2p/<peer id>"
    return None


def _transport_problem(match: re.Match[str]) -> str | None:
    kind, host, port = match.groups()
    if not is_host(kind, host):
        return f"'{host}' is not an IPv{kind[2]} address"
    return None if int(port) <= 65535 else f"port {port} is greater than 65535"
