"""Peer-to-peer training of mixture-of-experts language models: no server, elastic peers, transactional rounds."""

import logging

__version__ = "0.1.0"

# transformers imports torchao where it is installed, which then tells on every start which GPU kernels it cannot load here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
