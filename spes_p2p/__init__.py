"""Peer-to-peer training of mixture-of-experts language models: no server, elastic peers, transactional rounds."""

__version__ = "0.1.0"
