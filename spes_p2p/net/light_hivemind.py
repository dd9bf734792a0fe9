"""Hivemind's p2p and DHT packages without torch and netaddr.

`import hivemind` also imports its averagers, optimizers and expert servers, and with them torch and scipy: three seconds and
200 MB for every command and helper. `p2p` and `dht` need none of that, except that `hivemind.utils`, which they use, re-exports
two classes from modules that import torch. netaddr, with its tables of who has which range of addresses, would be imported to
read IP addresses, as Python's own `ipaddress` does.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import sys
from types import ModuleType

UNUSED = {"hivemind.utils.mpfuture": "MPFuture", "hivemind.utils.tensor_descr": "TensorDescriptor"}
"""These modules, and the class that `hivemind.utils` imports from each. Only `hivemind.dht.DHT` uses one: a DHT node in another
process, where a peer's node runs in its own."""
ADDRESSES: dict[str, type[ipaddress.IPv4Address | ipaddress.IPv6Address]] = {
    "hivemind.utils.multiaddr.codecs.ip4": ipaddress.IPv4Address, "hivemind.utils.multiaddr.codecs.ip6": ipaddress.IPv6Address,
}
"""Modules that convert the IP addresses in multiaddrs, and the class that does it here."""


def skip_training_packages() -> None:
    """Make `import hivemind.dht` run neither `hivemind/__init__.py` nor the modules in UNUSED and ADDRESSES.

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


def _address_codec(name: str, address: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(
        SIZE=8 * len(address(0).packed), IS_PATH=False, to_bytes=lambda protocol, text: address(text).packed,
        to_string=lambda protocol, packed: str(address(packed)),
    )
    return module
