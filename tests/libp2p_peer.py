"""A process that runs one real peer, for tests that end it: `python libp2p_peer.py IDENTITY_FILE [INITIAL_PEER...]`.

Prints the daemon's pid and its own address, serves `echo`, and on SIGINT prints what the registry still answers, then closes.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop
from echo import echo

from spes_p2p.net.libp2p import start_libp2p


async def main(identity_file: Path, initial_peers: list[str]) -> None:
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    libp2p = await start_libp2p(identity_file, ["/ip4/127.0.0.1/tcp/0"], initial_peers=initial_peers)
    await libp2p.transport.serve("echo", echo)
    await libp2p.registry.put("peers", b"here", 60)
    print(libp2p.daemon_pid, libp2p.transport.addresses[0], flush=True)
    await interrupted.wait()
    await libp2p.registry.put("peers", b"goodbye", 60)
    print((await libp2p.registry.get("peers"))[libp2p.identity.peer_id].decode(), flush=True)
    await libp2p.close()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2:]))
