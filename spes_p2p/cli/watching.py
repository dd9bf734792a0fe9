"""Commands that show a campaign: status, dashboard, directory, report."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import run, say_waiting, waiting
from spes_p2p.config.addresses import check_peer_addresses, check_webhook, peer_of
from spes_p2p.errors import UserError
from spes_p2p.observe.log import setup_logging
from spes_p2p.storage.files import require_place, write_whole

MAX_LISTED_CAMPAIGNS = 64
"""Most campaigns of one directory. Bounds memory and sockets: each campaign has a connection of its own."""

AddressesOrRunDir = Annotated[list[str], typer.Argument(
    metavar="ADDRESS...|RUN_DIR", help="Address of any peer, or run-dir of a peer that runs on this machine.")]


def status(
    targets: AddressesOrRunDir,
    as_json: options.AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update until the campaign is done; without a terminal, print one line per round.")
    ] = False,
) -> None:
    """Show a running swarm: round, peers, experts and owners, speed, loss, traffic. With a run-dir: your trainer first."""
    own, addresses = options.own_or_addresses(targets)
    spare = own.spare_addresses if own else ()
    if own is not None and not as_json:
        print(f"your trainer: {own.line}", flush=True)
    setup_logging("warning", False)
    with waiting("looking for the swarm") as end_waiting:
        from spes_p2p.client.status import fetch_statuses, watch_status

        if watch:
            run(watch_status(addresses, as_json, end_waiting, spare))
            return
        statuses = run(fetch_statuses(addresses, spare))
    from spes_p2p.client.alerts import status_document
    from spes_p2p.observe.swarm_status import gather
    from spes_p2p.observe.table import render_status

    if not statuses:
        raise UserError(f"{addresses[0]}: connected, but no peer of the campaign answers; try again in a moment")
    if as_json:
        from spes_p2p.session.own_state import own_state_json

        print(json.dumps({**status_document(statuses), **({"own": own_state_json(own)} if own else {})}, indent=2))
    else:
        from rich.console import Console

        Console().print(render_status(statuses))
        if gather(statuses).done:
            print(f"take the model: spes-p2p export --from {addresses[0]} --output checkpoint")


def dashboard(
    targets: AddressesOrRunDir,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8700,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every interface.")] = "127.0.0.1",
    webhook: Annotated[str | None, typer.Option(
        help="URL that gets a POST with JSON when an alert begins and when it ends.")] = None,
) -> None:
    """Serve a live web page about a running swarm. With a run-dir: also your trainer, which it can pause. Ctrl-C ends it."""
    if webhook is not None:
        check_webhook(webhook)
    own, addresses = options.own_or_addresses(targets)
    prepares = own is not None and own.is_preparing
    for_what = "waiting for the trainer, which is still preparing" if prepares else "starting"
    setup_logging("warning", False)
    with waiting(for_what) as end_waiting:
        from spes_p2p.client.dashboard.own import OwnTrainer
        from spes_p2p.client.dashboard.server import run_dashboard

        trainer = None if own is None else OwnTrainer.once_prepared(Path(targets[0]), partial(say_waiting, for_what))

        def show(url: str) -> None:
            end_waiting()
            print(f"dashboard on {url}", flush=True)

        run(run_dashboard(addresses, host, port, show, webhook, trainer))


def directory(
    campaigns: Annotated[list[str], typer.Argument(
        metavar="CAMPAIGN...", help="Address of a peer of each campaign; several of the same campaign separated by commas.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8701,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every interface.")] = "127.0.0.1",
) -> None:
    """Serve a web page that lists several campaigns, each with its state and the command to join. Ctrl-C ends it."""
    addresses = [campaign.split(",") for campaign in campaigns]
    check_peer_addresses([each for campaign in addresses for each in campaign])
    if len(campaigns) > MAX_LISTED_CAMPAIGNS:
        raise UserError(f"{len(campaigns)} campaigns: at most {MAX_LISTED_CAMPAIGNS}; run a second directory")
    peers = Counter(peer for campaign in addresses for peer in {peer_of(each) for each in campaign})
    for peer in (peer for peer, entries in peers.items() if entries > 1):
        raise UserError(f"{peer}: a peer of {peers[peer]} campaigns; give each campaign once, its addresses between commas")
    setup_logging("warning", False)
    with waiting("starting") as end_waiting:
        from spes_p2p.client.dashboard.directory import run_directory

        def show(url: str) -> None:
            end_waiting()
            print(f"directory on {url}", flush=True)

        run(run_directory(addresses, host, port, show))


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run-dir of a trainer or bootstrap peer; it may be running.")],
    output: Annotated[Path | None, typer.Option(help="File to write. Default: report.html in the run-dir.")] = None,
    evaluations: Annotated[list[Path] | None, typer.Option(
        "--evaluation", help="Results to include: a file that `evaluate --output` wrote; repeatable.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Write one HTML page about a run: figures, plots, contributors, evaluation and config. It needs no network to read."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the run-dir of a trainer or bootstrap peer")
    target = output or run_dir / "report.html"
    require_place(target, "--output")
    with waiting("starting"):
        from spes_p2p.client.report import make_report

    page, facts = make_report(run_dir, evaluations or ())
    write_whole(target, page.encode())
    print(json.dumps({"report": str(target), **facts}, indent=2) if as_json else target)
