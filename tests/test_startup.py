"""What a command or a helper does not use is not imported: libraries take seconds and hundreds of megabytes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import COMMAND_TIMEOUT_S, ENVIRONMENT, ROOT

from spes_p2p.net.light_hivemind import UNUSED

HEAVY = {"torch", "transformers", "scipy", "pyarrow", "matplotlib"}
FOR_STATUS = {*HEAVY, "numpy", "tokenizers", "spes_p2p.config.campaign", "spes_p2p.peer.node"}
IMPORTED = "\nimport sys; print(*sys.modules)"


def imported_by(program: str) -> set[str]:
    """Modules that a new process has imported at the end of this program."""
    ended = subprocess.run(
        [sys.executable, "-c", program + IMPORTED], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=COMMAND_TIMEOUT_S, check=True,
    )
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("module", "unused"),
    [("spes_p2p.cli", FOR_STATUS | {"hivemind"}), ("spes_p2p.client.status", FOR_STATUS), ("spes_p2p.peer.life", HEAVY)],
)
def test_importing_this_imports_nothing_heavy(module: str, unused: set[str]) -> None:
    imported = imported_by(f"import {module}")
    assert module in imported
    assert not unused & imported


def test_what_hivemind_gets_a_placeholder_for_is_used_by_nothing_that_we_import() -> None:
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    names = re.compile("|".join(UNUSED.values()))
    users = {
        str(path.relative_to(package)) for folder in ("p2p", "dht", "utils") for path in package.glob(f"{folder}/**/*.py")
        if names.search(path.read_text())
    }
    assert users == {"dht/dht.py", "utils/__init__.py", "utils/mpfuture.py", "utils/tensor_descr.py"}


def test_all_of_hivemind_is_there_for_a_program_that_imports_it_first() -> None:
    assert {"hivemind.averaging", "torch"} <= imported_by("import hivemind, spes_p2p.net.libp2p; hivemind.DHT")
