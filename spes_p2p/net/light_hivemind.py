"""Hivemind's p2p and DHT packages without torch, netaddr and multihash.

`import hivemind` also imports its averagers, optimizers and expert servers, and with them torch and scipy: three seconds and
200 MB for every command and helper. `p2p` and `dht` need none of that, except that `hivemind.utils`, which they use, re-exports
two classes from modules that import torch. netaddr, with its tables of who has which range of addresses, would be imported to
read IP addresses, as Python's own `ipaddress` does; and multihash, multibase and multicodec, with tables of their own, to read
the peer ids in addresses, which are in base 58.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import sys
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import base58

UNUSED = {"hivemind.utils.mpfuture": "MPFuture", "hivemind.utils.tensor_descr": "TensorDescriptor"}
"""These modules, and the class that `hivemind.utils` imports from each. Only `hivemind.dht.DHT` uses one: a DHT node in another
process, where a peer's node runs in its own."""
ADDRESSES: dict[str, type[ipaddress.IPv4Address | ipaddress.IPv6Address]] = {
    "hivemind.utils.multiaddr.codecs.ip4": ipaddress.IPv4Address, "hivemind.utils.multiaddr.codecs.ip6": ipaddress.IPv6Address,
}
"""Modules that convert the IP addresses in multiaddrs, and the class that does it here."""
PEER_IDS = "hivemind.utils.multiaddr.codecs.cid"
"""The module that converts the peer ids in multiaddrs."""
CID_OF_A_KEY = bytes((1, 0x72))
"""Precedes the multihash of a key: version 1, libp2p-key."""


def skip_training_packages() -> None:
    """Make `import hivemind.dht` run neither `hivemind/__init__.py` nor the modules in UNUSED, ADDRESSES and PEER_IDS.

    Does nothing if hivemind is imported already, so a program that needs the whole of it imports it first.
    """
    spec = importlib.util.find_spec("hivemind")
    if "hivemind" in sys.modules or spec is None:
        return
    sys.modules["hivemind"] = importlib.util.module_from_spec(spec)
    for name, unused in UNUSED.items():
        module = sys.modules[name] = ModuleType(name)
        setattr(module, unused, type(unused, (), {}))
    for name, address in ADDRESSES.items():
        sys.modules[name] = _address_codec(name, address)
    sys.modules[PEER_IDS] = _peer_id_codec()
    sys.modules["multihash"] = _RunWhenUsed("multihash")  # used where an id is derived from a private key


def _address_codec(name: str, address: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(
        SIZE=8 * len(address(0).packed), IS_PATH=False, to_bytes=lambda protocol, text: address(text).packed,
        to_string=lambda protocol, packed: str(address(packed)),
    )
    return module


def _peer_id_codec() -> ModuleType:
    module = ModuleType(PEER_IDS)
    vars(module).update(SIZE=-1, IS_PATH=False, to_bytes=_id_to_bytes, to_string=_id_to_string)
    return module


def _id_to_bytes(protocol: Any, text: str) -> bytes:
    key_hash = base58.b58decode(text) if text.startswith(("Qm", "1")) else b""
    return CID_OF_A_KEY + key_hash if _is_key_hash(key_hash) else bytes(_hiveminds_codec().to_bytes(protocol, text))


def _id_to_string(protocol: Any, packed: bytes) -> str:
    key_hash = packed.removeprefix(CID_OF_A_KEY)
    if _is_key_hash(key_hash):
        return base58.b58encode(key_hash).decode()
    return str(_hiveminds_codec().to_string(protocol, packed))


def _is_key_hash(data: bytes) -> bool:
    """Return whether this is a multihash of SHA-256, or the identity of a short key."""
    return (len(data) == 34 and data[:2] == b"\x12\x20") or (2 <= len(data) <= 44 and data[0] == 0 and data[1] == len(data) - 2)


@cache
def _hiveminds_codec() -> Any:
    """Return hivemind's own conversion, for ids in another notation."""
    package = importlib.import_module(PEER_IDS.rpartition(".")[0])
    spec = PathFinder.find_spec(PEER_IDS, package.__path__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _RunWhenUsed(ModuleType):
    """A module that runs when something in it is used first; importlib's LazyLoader runs one when it is imported twice."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
