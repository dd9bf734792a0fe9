"""Base class of the wrappers of a transport, channel or store."""

from __future__ import annotations

from typing import Any


class Wrapped:
    """Forwards everything to the inner object, except what a subclass overrides."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
