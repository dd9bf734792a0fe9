"""The command line: one function per command, which reads options and prints results.

Invalid input prints one line and exits with code 2. Commands check their arguments before they import torch and hivemind, which
takes seconds, so that a typo is reported at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from spes_p2p import __version__
from spes_p2p.client.exit_codes import exit_with

COMMANDS = {
    "init": "owner", "bootstrap": "owner", "join": "volunteer", "pause": "volunteer", "resume": "volunteer", "me": "volunteer",
    "swarm": "trials", "status": "watching", "control": "owner", "audit": "owner", "invite": "owner", "identity": "volunteer",
    "simulate": "trials", "doctor": "volunteer", "dashboard": "watching", "directory": "watching", "plan": "owner",
    "tokenize": "text", "describe": "text", "export": "model", "report": "watching", "evaluate": "model", "generate": "model",
}
"""The module of each command, in the order of `--help`."""


def make_app(command: str | None = None) -> typer.Typer:
    """Return the program, with no more than this command if it is one of COMMANDS: all take a quarter of a second to build."""
    app = typer.Typer(
        help="Peer-to-peer training of mixture-of-experts language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common)  # without it, a single command would have no name
    alone = command in COMMANDS
    if not alone:
        app.command()(version)
    for name, module in COMMANDS.items():
        if not alone or name == command:
            app.command()(getattr(importlib.import_module(f"spes_p2p.cli.{module}"), name))
    if not alone:
        app.add_typer(importlib.import_module("spes_p2p.cli.service").app, name="service")
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


def _common(version: Version = False) -> None:
    pass


def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:] or ["--help"]
    exit_with(lambda: make_app(arguments[0])(arguments, standalone_mode=False, prog_name="spes-p2p"))
