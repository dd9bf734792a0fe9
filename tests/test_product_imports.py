"""What a peer runs imports no fault injection and no simulated world: a trial wraps the world from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "spes_p2p"
TESTING = (
    "simulate", "swarm.latency", "swarm.memory", "swarm.memory_store", "swarm.simulated_identity", "swarm.wrapped",
    "training.synthetic",
)
"""Fault injection, simulated worlds and synthetic work."""
TESTERS = (*TESTING, "experiments")
"""Modules that may import them."""
COMMANDS = {("cli", "simulate.command")}
"""The command line starts the simulator, in the function of its command."""


def is_within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def imported(source: str) -> Iterator[str]:
    """Modules of the package that a module imports anywhere, functions and type checking included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        yield from (name.removeprefix("spes_p2p.") for name in names if name.startswith("spes_p2p."))


def product() -> list[str]:
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    return sorted(module for module in modules if not is_within(module, TESTERS))


def test_what_may_not_be_imported_is_there() -> None:
    for module in TESTING:
        path = PACKAGE / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module


def test_no_product_module_imports_fault_injection() -> None:
    found = {}
    for module in product():
        path = PACKAGE / module.replace(".", "/")
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        wrong = {name for name in imported(source) if is_within(name, TESTING)}
        wrong -= {name for name in wrong for user, used in COMMANDS if module == user and is_within(name, (used,))}
        if wrong:
            found[module] = wrong
    assert not found


def test_messages_import_nothing_of_the_product() -> None:
    paths = sorted((PACKAGE / "messages").glob("*.py"))
    assert paths
    assert not {name for path in paths for name in imported(path.read_text()) if not is_within(name, ("messages",))}
