"""Judge the measurements of `spes-p2p doctor`: each check passes, warns or fails, with advice."""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Literal

from rich.text import Text

from spes_p2p import __version__
from spes_p2p.config.addresses import peer_of
from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.errors import version_advice
from spes_p2p.messages.methods import OLDEST_PROTOCOL, PROTOCOL_VERSION
from spes_p2p.messages.presence import Clock, DialBack
from spes_p2p.net.checkup import Skew, direct_host
from spes_p2p.net.contacts import MANY_CONTACTS
from spes_p2p.observe.units import counted, human_bytes, human_count, human_seconds, short_peer

Result = Literal["pass", "warning", "failure"]

MAX_SKEW_S, GOOD_SKEW_S = 3.0, 1.0
"""The DHT refuses peers whose clocks differ by more than MAX_SKEW_S."""
SLOW_EXCHANGE_S = 600.0
"""Warn when an exchange takes longer than this: the others may have links twice as fast, and wait as long again at most."""
FINDINGS_AT, LEAST_COLUMNS = 22, 30
"""Column at which findings begin, and the least width that they get, also on a narrower terminal."""
SET_THE_CLOCK = "synchronize the clock: timedatectl set-ntp true"
OPEN_PER_PORT = ("forward a TCP port to this machine in the router (and open it in the firewall), and join with "
               "--listen /ip4/0.0.0.0/tcp/PORT --announce /ip4/YOUR.PUBLIC.IP/tcp/PORT")
TRAINS_ONLY = f"it can train, but does not reduce parts for other peers; to help more, {OPEN_PER_PORT}"


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    result: Result
    found: str
    """The finding, in one line."""
    advice: str = ""
    """How to fix it; empty if the check passes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Measurements, for --json."""


def judge_versions(clocks: Sequence[Clock], torch_version: str) -> Check:
    """Compare the protocol version with that of the peers."""
    here = f"spes_p2p {__version__}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}, torch {torch_version}"
    there = sorted({f"{clock.version}, protocol {clock.protocol}" for clock in clocks})
    values = {"version": __version__, "protocol": PROTOCOL_VERSION, "theirs": there}
    strange = next((clock for clock in clocks if clock.protocol < OLDEST_PROTOCOL), None)
    if strange is not None:
        advice = version_advice(PROTOCOL_VERSION, strange.protocol, strange.version)
        return Check("versions", "failure", f"{here}; the swarm has {' and '.join(there)}", advice, values)
    newest = max((clock.protocol for clock in clocks), default=0)
    if newest > PROTOCOL_VERSION:
        advice = f"a newer version is in use; {version_advice(PROTOCOL_VERSION, newest)}"
        return Check("versions", "warning", f"{here}; the swarm has {' and '.join(there)}", advice, values)
    return Check("versions", "pass", here, values=values)


def judge_clock(peer: str, skew: Skew) -> Check:
    """Compare this machine's clock with a peer's."""
    ahead = skew.ahead_s
    found = f"{abs(ahead):.2f} s {'behind' if ahead > 0 else 'ahead of'} {short_peer(peer)} (±{skew.uncertainty_s:.2f} s)"
    values = {"peer": peer, "ahead_s": -ahead, "uncertainty_s": skew.uncertainty_s}
    if abs(ahead) - skew.uncertainty_s > MAX_SKEW_S:
        advice = f"the swarm refuses peers whose clocks differ by more than {MAX_SKEW_S:g} s; {SET_THE_CLOCK}"
        return Check("clock", "failure", found, advice, values)
    if abs(ahead) > GOOD_SKEW_S:
        return Check("clock", "warning", found, f"the limit is {MAX_SKEW_S:g} s; {SET_THE_CLOCK}", values)
    return Check("clock", "pass", found, values=values)


def judge_dht(seen: Mapping[str, frozenset[str] | str]) -> Check:
    """Check that all addresses lead to one DHT. `seen`: by address, the campaign's peers in its DHT, or an error message.

    Among many peers, most of them are seen only from the owner's bootstrap peer.
    """
    values = {address: sorted(peers) if isinstance(peers, frozenset) else peers for address, peers in seen.items()}
    broken = [f"{address}: {why}" for address, why in seen.items() if isinstance(why, str)]
    if broken:
        is_clock = all("set the clock" in why for why in seen.values() if isinstance(why, str))
        advice = SET_THE_CLOCK if is_clock else "omit this address, or have its peer fixed"
        return Check("dht", "failure", "; ".join(broken), advice, values)
    sets = [peers for peers in seen.values() if isinstance(peers, frozenset)]
    everybody = frozenset().union(*sets)
    if not everybody:
        advice = "try again in a few seconds; if it persists, restart the bootstrap peer: it cannot write to its own DHT"
        return Check("dht", "failure", "the registry has no peer of the campaign", advice, values)
    see_some = len(everybody) > MANY_CONTACTS and all(one & other for one in sets for other in sets)
    apart = [] if see_some else [at for at, peers in seen.items() if not all(peer_of(other) in peers for other in seen)]
    if len(seen) > 1 and apart:
        advice = "these are separate swarms: start each bootstrap peer with --peer and the address of another one"
        return Check("dht", "failure", f"{apart[0]} does not see the peers of the other addresses", advice, values)
    one = f"; {len(seen)} addresses lead to one DHT" if len(seen) > 1 else ""
    return Check("dht", "pass", f"{counted(len(everybody), 'peer')} of the campaign in the registry{one}", values=values)


def judge_reachability(answers: Mapping[str, DialBack], ports: Sequence[int], relays: Sequence[str]) -> Check:
    """Check whether peers can dial this machine. `answers`: by the peer that tried; `relays`: own circuit addresses."""
    seen_at = {peer: list(answer.seen_at) for peer, answer in answers.items()}
    values = {"tried": list(ports), "seen_at": seen_at, "relays": list(relays)}
    reached = sorted({port for answer in answers.values() for port in answer.reached})
    failed = [peer for peer, answer in answers.items() if any(map(direct_host, answer.seen_at)) and not answer.reached]
    values["reached"] = reached
    if not answers:
        return Check("reachability", "warning", "no peer could try to dial back", "try again in a moment", values)
    if reached and failed:
        found = f"dialled back on port {reached[0]} by {len(answers) - len(failed)} of {len(answers)} peers: not reachable"
        return Check("reachability", "warning", found, TRAINS_ONLY, values)
    if reached:
        near = "" if _is_far(answers) else ", from the same network: not tested from the internet"
        return Check("reachability", "pass", f"dialled back on port {reached[0]}{near}", values=values)
    found = f"cannot be dialled on port {', '.join(map(str, ports))}"
    way = "peers reach it through a relay" if relays else "no relay: only peers that it dials can reach it"
    return Check("reachability", "warning", f"{found}; {way}", TRAINS_ONLY, values)


def judge_nat(answers: Mapping[str, DialBack], own_hosts: frozenset[str], ports: Sequence[int]) -> Check:
    """Infer the kind of NAT from the addresses at which the peers see this machine."""
    seen = [address for answer in answers.values() for address in answer.seen_at if direct_host(address) is not None]
    hosts = {str(direct_host(address)) for address in seen}
    values = {"seen_at": seen, "own": sorted(own_hosts)}
    if not seen:
        return Check("nat", "warning", "unknown: no peer sees this machine directly", "see reachability", values)
    if hosts <= own_hosts:
        return Check("nat", "pass", f"none: peers see {', '.join(sorted(hosts))}, an address of this machine", values=values)
    outside = {int(address.split("/")[4]) for address in seen}
    if any(answer.reached for answer in answers.values()):
        return Check("nat", "pass", f"behind NAT, with a forwarded port ({', '.join(sorted(hosts))})", values=values)
    if len(answers) > 1 and len(outside) > 1:
        kind, advice = "maps each peer to another port (symmetric)", f"hole punching cannot work: {OPEN_PER_PORT}"
    elif outside <= set(ports):
        kind, advice = "keeps the port", "see reachability"
    else:
        kind, advice = "changes the port", "see reachability"
    return Check("nat", "warning", f"behind NAT ({', '.join(sorted(hosts))}), which {kind}", advice, values)


def judge_bandwidth(up: float, down: float, up_bytes: int, down_bytes: int, base_bytes: int) -> Check:
    """Compare measured rates (bit/s) with the traffic of one peer per round (bytes), and with the slowest usable link."""
    seconds = 8 * max(up_bytes / max(up, 1.0), down_bytes / max(down, 1.0))
    base_s = 8 * base_bytes / max(down, 1.0)
    found = (f"{human_count(up)}bit/s up, {human_count(down)}bit/s down: "
             f"on this line a round's updates take {human_seconds(seconds)} "
             f"({human_bytes(up_bytes)} up, {human_bytes(down_bytes)} down), without computing and waiting for others; "
             f"the base {human_seconds(base_s)}")
    values = {"up_bits_per_second": up, "down_bits_per_second": down, "round_up_bytes": up_bytes,
              "round_down_bytes": down_bytes, "round_s": seconds, "base_s": base_s}
    advice = "train fewer experts (--experts N), or use a faster link"
    if min(up, down) < SLOWEST_LINE_BITS:
        slowest = f"{human_count(SLOWEST_LINE_BITS)}bit/s"
        return Check("bandwidth", "failure", f"{found}; below {slowest} others take it to stall", advice, values)
    if seconds > SLOW_EXCHANGE_S:
        return Check("bandwidth", "warning", f"{found}; others may not wait for it", advice, values)
    return Check("bandwidth", "pass", found, values=values)


def judge_space(name: str, needed: int, free: int, advice: str) -> Check:
    """Compare free bytes with what training needs."""
    values = {"needed_bytes": needed, "free_bytes": free}
    found = f"{human_bytes(free)} free, {human_bytes(needed)} needed"
    return Check(name, "failure", found, advice, values) if free < needed else Check(name, "pass", found, values=values)


def render_checks(checks: Sequence[Check], width: int | None = None) -> Text:
    """Render one line per check: result, name, finding; advice on a second line. Lines of more than `width` are wrapped."""
    colours = {"pass": "green", "warning": "yellow", "failure": "red"}

    def indented(text: str) -> str:
        if width is None:
            return text
        columns = max(width - FINDINGS_AT, LEAST_COLUMNS)
        return f"\n{'':{FINDINGS_AT}}".join(wrap(text, columns, break_on_hyphens=False, break_long_words=False))

    lines = []
    for check in checks:
        head = (f"{check.result:8}", colours[check.result])
        lines.append(Text.assemble(head, f"{check.name:13} {indented(check.found)}"))
        if check.advice:
            lines.append(Text(f"{'':{FINDINGS_AT}}{indented(f'-> {check.advice}')}"))
    return Text("\n").join(lines)


def _is_far(answers: Mapping[str, DialBack]) -> bool:
    """Return whether any of these peers sees this machine at a public address."""
    hosts = (direct_host(address) for answer in answers.values() for address in answer.seen_at)
    return any(host is not None and ipaddress.ip_address(host).is_global for host in hosts)
