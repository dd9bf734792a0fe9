"""A peer's libp2p network alone, driven by lines of JSON on stdin: for `test_hole_punching.py`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from echo import echo

from spes_p2p.errors import PeerUnreachable
from spes_p2p.net.libp2p import Libp2p, start_libp2p
from spes_p2p.net.transport import visible_addresses


async def answer(net: Libp2p, order: dict[str, Any]) -> dict[str, Any]:
    """Tell this peer's addresses, or open a stream to another and tell how the two are connected."""
    if "peer" not in order:
        return {"addresses": await visible_addresses(net.transport.daemon)}
    peer = order["peer"]
    if order.get("afresh"):
        await net.transport.daemon.close_connections(peer)
    if order["addresses"]:
        net.transport.learn_addresses(peer, order["addresses"])
        try:
            channel = await net.transport.open(peer, "echo")
            await channel.send(bytes(order.get("bytes", 5)))
            await channel.receive()
            channel.abort()
        except PeerUnreachable as error:
            return {"error": str(error), "seen_at": []}
    return {"error": "", "seen_at": await net.transport.seen_at(peer)}


async def main(folder: str, reachability: Any, *initial_peers: str) -> None:
    net = await start_libp2p(
        Path(folder) / "identity.key", ["/ip4/0.0.0.0/tcp/31337"], (), initial_peers,
        reachability=reachability, start_timeout_s=120,
    )
    await net.transport.serve("echo", echo)
    print(json.dumps({"peer_id": net.identity.peer_id}), flush=True)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await answer(net, json.loads(line))), flush=True)
    finally:
        await net.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
