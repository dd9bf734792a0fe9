"""The progress bars of libraries, which are noise where no terminal shows them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def library_bars() -> Iterator[None]:
    """Show the bars of tqdm, which all these libraries use, on a terminal only.

    No environment variable hides those that a library asks for by an argument, as lm-eval does.
    """
    from tqdm import tqdm

    shown = tqdm.__init__

    def hidden(self: Any, *arguments: Any, **options: Any) -> None:
        shown(self, *arguments, **{**options, "disable": True})

    if not sys.stderr.isatty():
        tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.__init__ = shown
