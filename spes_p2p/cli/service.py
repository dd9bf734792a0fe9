"""`spes-p2p service`: a trainer as a systemd service of its user."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.volunteer import CHECK_ONLY, join

if TYPE_CHECKING:
    from spes_p2p.client.service import Service

app = typer.Typer(help="Run a trainer as a systemd service of your user.", rich_markup_mode=None)
UnitName = Annotated[str, typer.Option(help="Name of the unit, if there are several.")]


@app.command("install")
def install_service(
    arguments: Annotated[list[str], typer.Argument(metavar="-- ADDRESS...", help="What you would give to spes-p2p join.")],
    name: UnitName = "spes-p2p",
    as_json: options.AsJson = False,
) -> None:
    """Write the unit that joins with these arguments, and start it if systemd runs for this user."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command("join")(join)
    command = typer.main.get_command(alone)
    joining = command.make_context("join", list(arguments), obj=CHECK_ONLY)
    command.invoke(joining)
    from spes_p2p.client.service import install

    _tell(install(name, arguments, joining.params["run_dir"]), name, as_json)


@app.command("remove")
def remove_service(name: UnitName = "spes-p2p", as_json: options.AsJson = False) -> None:
    """Stop the trainer, politely, and remove its unit; its run-dir stays."""
    from spes_p2p.client.service import remove

    _tell(remove(name), name, as_json)


@app.command("status")
def show_service(name: UnitName = "spes-p2p", as_json: options.AsJson = False) -> None:
    """Show whether the unit is installed and running, and what its trainer does."""
    from spes_p2p.client.service import look_at

    found = look_at(name)
    if as_json:
        _print_json(found)
    else:
        print(f"{found.unit}: {found.line}")
        print(f"trainer: {found.trainer.line if found.trainer else 'not running'}")


def _tell(told: list[str], name: str, as_json: bool) -> None:
    """Print what was done; as JSON what `status` finds now, and `told`."""
    if as_json:
        from spes_p2p.client.service import look_at

        _print_json(look_at(name), told=told)
    else:
        print("\n".join(told))


def _print_json(found: Service, **more: list[str]) -> None:
    from spes_p2p.observe.json_values import to_json

    print(json.dumps({**to_json(found), **more}, indent=2))
