"""The command line: one function per command, which reads options and prints results.

Invalid input prints one line and exits with code 2. Commands check their arguments before they import torch and hivemind, which
takes seconds, so that a typo is reported at once.
"""

from __future__ import annotations

import sys

import typer

from spes_p2p import __version__
from spes_p2p.cli import model, owner, service, text, trials, volunteer, watching
from spes_p2p.client.exit_codes import exit_with

app = typer.Typer(
    help="Peer-to-peer training of mixture-of-experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


for command in (
    owner.init, owner.bootstrap, volunteer.join, volunteer.pause, volunteer.resume, volunteer.me, trials.swarm, watching.status,
    owner.control, owner.audit, owner.invite, volunteer.identity, trials.simulate, volunteer.doctor, watching.dashboard,
    watching.directory, owner.plan, text.tokenize, text.describe, model.export, watching.report, model.evaluate, model.generate,
):
    app.command()(command)
app.add_typer(service.app, name="service")


def main() -> None:
    """Run the command line."""
    exit_with(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))
