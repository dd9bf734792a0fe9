"""Malicious peers for simulations, experiments and tests: each lies by a wrapper around its own world. See `kinds.py`."""
