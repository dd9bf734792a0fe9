"""The layout of the code: each package imports only itself and lower layers, and no imports run in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "spes_p2p"

LAYERS = [
    "messages", "errors", "config", "storage", "consensus", "observe", "data", "model", "training", "rounds", "net", "content",
    "campaign", "peer", "session", "client", "testing", "research", "cli",
]
"""From the lowest to the highest."""


@cache
def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports() -> dict[str, set[str]]:
    """Modules of the project that each module imports, anywhere in it; what only a type checker reads counts too."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "spes_p2p"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "spes_p2p":
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {each if each in modules() else str(node.module) for each in inside}
    return found


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_package_is_a_layer() -> None:
    assert {layer(name) for name in modules()} - {"", "__main__"} == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_imports_go_down_only(name: str) -> None:
    allowed = {"", *LAYERS[: LAYERS.index(name) + 1]}
    upwards = [
        f"{module} imports {other}"
        for module, others in imports().items() if layer(module) == name
        for other in others if layer(other) not in allowed
    ]
    assert upwards == []


def test_no_imports_run_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join((*path[path.index(module):], module))}"
        if module not in done:
            for other in sorted(imports().get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(modules()):
        visit(module, ())


def test_the_product_knows_no_fault_injection() -> None:
    """A trial wraps the world of a peer from outside; the command line starts the simulator, in the function of its command."""
    users = {
        (module, other) for module, others in imports().items() for other in others
        if layer(other) == "testing" and layer(module) not in ("testing", "research")
    }
    assert users == {("spes_p2p.cli.trials", "spes_p2p.testing.simulate.command")}


def test_the_code_map_names_the_layers_in_this_order() -> None:
    code_map = (ROOT / "docs/architecture.md").read_text().partition("## 3. Code map")[2]
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \|", code_map, re.MULTILINE) == LAYERS
