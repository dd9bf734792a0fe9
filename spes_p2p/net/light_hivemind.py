"""Hivemind's p2p and DHT packages without torch.

`import hivemind` also imports its averagers, optimizers and expert servers, and with them torch and scipy: three seconds and
200 MB for every command and helper. `p2p` and `dht` need none of that, except that `hivemind.utils`, which they use, re-exports
two classes from modules that import torch.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

UNUSED = {"hivemind.utils.mpfuture": "MPFuture", "hivemind.utils.tensor_descr": "TensorDescriptor"}
"""These modules, and the class that `hivemind.utils` imports from each. Only `hivemind.dht.DHT` uses one: a DHT node in another
process, where a peer's node runs in its own."""


def skip_training_packages() -> None:
    """Make `import hivemind.dht` run neither `hivemind/__init__.py` nor the modules in UNUSED.

    Does nothing if hivemind is imported already, so a program that needs the whole of it imports it first.
    """
    spec = importlib.util.find_spec("hivemind")
    if "hivemind" in sys.modules or spec is None:
        return
    sys.modules["hivemind"] = importlib.util.module_from_spec(spec)
    for name, unused in UNUSED.items():
        module = sys.modules[name] = ModuleType(name)
        setattr(module, unused, type(unused, (), {}))
