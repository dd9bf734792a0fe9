"""`spes-p2p doctor`: measures whether this machine can train in the campaign of the peers at the given addresses."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from spes_p2p.campaign.files import CampaignFiles, fetch_campaign
from spes_p2p.campaign.free_memory import choose_devices
from spes_p2p.campaign.host_memory import host_bytes
from spes_p2p.campaign.plan_table import join_flags
from spes_p2p.campaign.planner import round_traffic
from spes_p2p.campaign.room import Choice, nearest
from spes_p2p.campaign.speed import costs_of
from spes_p2p.client.doctor_checks import (
    Check,
    judge_bandwidth,
    judge_clock,
    judge_dht,
    judge_nat,
    judge_reachability,
    judge_space,
    judge_versions,
)
from spes_p2p.config.addresses import DEFAULT_LISTEN, is_loopback, listen_beside, peer_of
from spes_p2p.config.campaign import CampaignConfig, PeerConfig
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.presence import DialBack
from spes_p2p.model.sizes import sizes_of
from spes_p2p.net.checkup import Skew, ask_dial_back, measure_clock, measure_down, measure_up
from spes_p2p.net.contacts import registry_key
from spes_p2p.net.dht import join_dht
from spes_p2p.net.identity import RSAIdentity, Visitor
from spes_p2p.net.libp2p import check_addresses
from spes_p2p.net.p2pd import relayed_by, start_daemon
from spes_p2p.net.reachability import ports_of
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.transport import Libp2pTransport
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.units import human_bytes
from spes_p2p.session.evaluation_room import evaluation_room
from spes_p2p.session.resources import Resources, choose_resources, disk_space, left_disk

START_TIMEOUT_S = 30.0
SILENCE_S = 10.0
RELAY_TIMEOUT_S = 10.0


async def examine(addresses: Sequence[str], settings: PeerConfig) -> list[Check]:
    """Run all checks. Raises UserError when the addresses lead to no campaign."""
    check_addresses((), settings.announce, addresses)
    listen = settings.listen or listen_beside(addresses)
    check_addresses(listen, (), ())
    with tempfile.TemporaryDirectory(prefix="spes-doctor-") as folder:
        async with _listening(Path(folder) / "identity.key", addresses, listen, settings.announce) as transport:
            endpoint = RpcEndpoint(transport, SILENCE_S)
            skews, silent = await _clocks(endpoint, [peer_of(address) for address in addresses])
            if not skews:
                raise UserError(f"no usable peer at {', '.join(addresses)} ({'; '.join(silent)}); "
                                "ask the campaign's owner for the address")
            checks = [judge_versions([skew.clock for skew in skews.values()], torch.__version__)]
            checks += [Check("address", "failure", why, "omit this address, or have its peer started") for why in silent]
            checks += [judge_clock(peer, skew) for peer, skew in skews.items()]
            if checks[0].result == "failure":
                return checks
            files, _ = await fetch_campaign(endpoint, list(skews), folders=settings.data_dir)
            checks.append(await _dht([a for a in addresses if peer_of(a) in skews], files.campaign.hash))
            checks += await _reachability(endpoint, transport, {peer_of(a): a for a in addresses if peer_of(a) in skews})
            checks += await _capacity(endpoint, list(skews), files, settings)
    return checks


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the document that `spes-p2p doctor --json` prints."""
    return {"result": worst(checks), "checks": to_json(list(checks))}


def worst(checks: Sequence[Check]) -> str:
    """Return the most severe result: pass, warning or failure."""
    return max((check.result for check in checks), key=("pass", "warning", "failure").index)


@contextlib.asynccontextmanager
async def _listening(
    identity: Path, addresses: Sequence[str], listen: Sequence[str], announce: Sequence[str]
) -> AsyncIterator[Libp2pTransport]:
    """Connect as a joining peer does, but without the DHT, which refuses peers with a wrong clock."""
    RSAIdentity(identity)
    public = not all(map(is_loopback, listen))
    daemon = await start_daemon(
        addresses, START_TIMEOUT_S, host_maddrs=list(listen), announce_maddrs=list(announce) or None,
        identity_path=str(identity), nat_port_map=public, auto_nat=public, use_relay=public,
    )
    try:
        visible = await daemon.get_visible_maddrs(latest=True)
        yield Libp2pTransport(daemon, tuple(str(address) for address in visible))
    finally:
        await daemon.close()


async def _clocks(endpoint: RpcEndpoint, peers: Sequence[str]) -> tuple[dict[str, Skew], list[str]]:
    """Return the clock skew of each peer that answers, and an error line for each other peer."""
    skews, silent = {}, []
    for peer in peers:
        try:
            skews[peer] = await measure_clock(endpoint, peer, time.time)
        except (PeerUnreachable, Refused, WireError) as error:
            silent.append(f"{peer}: {error}")
    return skews, silent


async def _dht(addresses: Sequence[str], campaign_hash: str) -> Check:
    seen = await asyncio.gather(*(_peers_seen_from(address, campaign_hash) for address in addresses))
    return judge_dht(dict(zip(addresses, seen, strict=True)))


async def _peers_seen_from(address: str, campaign_hash: str) -> frozenset[str] | str:
    """Return the campaign's peers in the DHT that an address leads to, or an error message."""
    daemon = None
    try:
        daemon = await start_daemon(
            [address], START_TIMEOUT_S, no_listen=True, dht_mode="client", auto_nat=False, nat_port_map=False
        )
        _, registry = await join_dht(daemon, Visitor(str(daemon.peer_id)), [address], START_TIMEOUT_S, client_mode=True)
        return frozenset(await registry.get(registry_key(campaign_hash)))
    except (UserError, PeerUnreachable) as error:
        return str(error)
    finally:
        if daemon is not None:
            await daemon.close()


async def _reachability(endpoint: RpcEndpoint, transport: Libp2pTransport, peers: Mapping[str, str]) -> list[Check]:
    """Ask each peer (address by peer id) to dial back."""
    ports = ports_of(transport.addresses)
    answers: dict[str, DialBack] = {}
    for peer in peers:
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            answers[peer] = await ask_dial_back(endpoint, peer, ports)
    needs_relay = not all(answer.reached for answer in answers.values()) and not all(map(is_loopback, transport.addresses))
    relays = await _relays(tuple(peers.values())) if needs_relay else []
    return [judge_reachability(answers, ports, relays), judge_nat(answers, _own_hosts(), ports)]


async def _relays(addresses: Sequence[str]) -> list[str]:
    """Return the circuit addresses that these peers offer to a peer that cannot be dialled."""
    daemon = await start_daemon(
        addresses, START_TIMEOUT_S, host_maddrs=list(DEFAULT_LISTEN), dht_mode="client", auto_nat=False, nat_port_map=False,
        use_relay=True, force_reachability="private", **relayed_by(addresses),
    )
    deadline = time.monotonic() + RELAY_TIMEOUT_S
    try:
        while True:
            visible = [str(address) for address in await daemon.get_visible_maddrs(latest=True)]
            relays = [address for address in visible if "p2p-circuit" in address]
            if relays or time.monotonic() > deadline:
                return relays
            await asyncio.sleep(0.2)
    finally:
        await daemon.close()


async def _capacity(endpoint: RpcEndpoint, peers: Sequence[str], files: CampaignFiles, settings: PeerConfig) -> list[Check]:
    """Check what this machine would train, and whether memory, disk and bandwidth suffice for it."""
    config = files.campaign.config
    try:
        resources = choose_resources(choose_devices(settings.devices), settings, config)
    except UserError as error:
        found, _, advice = str(error).partition("; ")
        return [Check("device", "failure", found, advice)]
    device, choice = resources.device, resources.choice
    checks = [device_check(resources, settings, config)]
    if device.kind != "cpu":
        available = psutil.virtual_memory().available
        needed = host_bytes(config, choice.setup, device.base_in_memory).total
        checks.append(judge_space("host memory", needed, available, "close other programs"))
    checks.append(judge_space("disk", *disk_space(files, settings, resources), "free disk space, or choose another --run-dir"))
    left = resources.left_memory(config), left_disk(files, settings, resources)
    checks += tasks_check(config, *left)
    return [*checks, await _bandwidth(endpoint, peers, files, choice)]


def device_check(resources: Resources, settings: PeerConfig, config: CampaignConfig) -> Check:
    """Say what this device trains; warn if that is no expert, or slow."""
    device, setup = resources.device, resources.choice.setup
    kind = device.kind if device.ranks == 1 else f"each of {device.ranks} {device.kind} devices"
    found = f"{kind} with {human_bytes(device.memory)} free trains {resources.description}"
    values = {
        "device": device.kind, "devices": device.ranks, "free_bytes": device.memory, "experts": setup.owned,
        "join_with": join_flags(setup, settings.devices), "slowdown_estimated": costs_of(config, setup).total,
    }
    advice = [resources.warning] * bool(resources.warning)
    if setup.owned == 0:
        advice.append(f"it trains only the shared weights; to train an expert: {nearest(config, device, {}, 1)}")
    return Check("device", "warning" if advice else "pass", found, "; ".join(advice), values)


def tasks_check(config: CampaignConfig, memory: int, disk: int) -> list[Check]:
    """Say what `join --evaluate-tasks` takes, if the campaign names tasks or prompts; nobody has to offer it."""
    if not (config.evaluation.tasks or config.evaluation.prompts):
        return []
    try:
        room = evaluation_room(config, sizes_of(config.model).size, memory, disk)
    except UserError as error:
        return [Check("tasks", "pass", f"--evaluate-tasks is not for this machine: {error}")]
    values = {"memory_bytes": room.memory, "disk_bytes": room.disk, "dtype": room.dtype}
    return [Check("tasks", "pass", f"--evaluate-tasks takes up to {room}", values=values)]


async def _bandwidth(endpoint: RpcEndpoint, peers: Sequence[str], files: CampaignFiles, choice: Choice) -> Check:
    config = files.campaign.config
    problem = ""
    for peer in peers:
        try:
            up, down = await measure_up(endpoint, peer), await measure_down(endpoint, peer)
        except (PeerUnreachable, Refused, WireError) as error:
            problem = str(error)
            continue
        others = max(2, config.sync.min_peers)
        traffic = round_traffic(config, choice.setup.owned, others, up.bits_per_second)
        base_bytes = 4 * sizes_of(config.model).size
        return judge_bandwidth(up.bits_per_second, down.bits_per_second, traffic.up_bytes, traffic.down_bytes, base_bytes)
    return Check("bandwidth", "warning", f"not measured ({problem})", "try again in a moment")


def _own_hosts() -> frozenset[str]:
    """Return the IP addresses of this machine's interfaces."""
    return frozenset(entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
