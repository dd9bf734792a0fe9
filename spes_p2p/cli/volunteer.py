"""Commands of a volunteer: doctor, join, pause, resume, me, identity."""

from __future__ import annotations

import json
import logging
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import ProgressBar, run, run_peer, say_waiting, waiting
from spes_p2p.errors import UserError
from spes_p2p.observe.log import setup_logging

if TYPE_CHECKING:
    from spes_p2p.campaign.files import CampaignFiles

logger = logging.getLogger(__name__)

CHECK_ONLY = object()
"""Given to `join` by `service install`: check the options, and no more."""

OwnRunDir = Annotated[Path, typer.Argument(metavar="[RUN_DIR]", help="Run-dir of a trainer on this machine.")]


def doctor(
    addresses: options.Addresses,
    run_dir: options.RunDir = Path("runs/peer"),
    devices: options.Devices = None,
    memory: options.Memory = None,
    leave_free: options.LeaveFree = None,
    listen: options.Listen = None,
    announce: options.Announce = None,
    as_json: options.AsJson = False,
) -> None:
    """Check whether this machine can train in a campaign, and what to fix. Exits with code 1 if a check fails."""
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(
        run_dir=run_dir, devices=devices, memory_bytes=options.byte_count(memory, "--memory"),
        leave_free=options.spare(leave_free), listen=listen, announce=announce,
    )
    options.check_devices(devices)
    setup_logging("error", False)
    with waiting("checking this machine and its connection to the swarm"):
        from spes_p2p.client.doctor import examine, report, worst
        from spes_p2p.client.doctor_checks import render_checks

        checks = run(examine(addresses, settings))
    if as_json:
        print(json.dumps(report(checks), indent=2))
    else:
        from rich.console import Console

        console = Console(soft_wrap=True)
        console.print(render_checks(checks, console.width if console.is_terminal else None))
    raise typer.Exit(1 if worst(checks) == "failure" else 0)


def join(
    context: typer.Context,
    addresses: options.Addresses,
    run_dir: options.RunDir = Path("runs/peer"),
    devices: options.Devices = None,
    experts: Annotated[str | None, typer.Option(help="Maximum number of experts to train: auto or a number.")] = None,
    memory: options.Memory = None,
    leave_free: options.LeaveFree = None,
    stored: Annotated[str | None, typer.Option(help="Format of the experts of other peers: auto, fp32, bf16 or int8.")] = None,
    stored_on: Annotated[str | None, typer.Option(help="Memory for the experts of other peers: auto, device or host.")] = None,
    backend: Annotated[str | None, typer.Option(help="Expert kernels: auto, grouped_mm, eager or megablocks.")] = None,
    compile: Annotated[str | None, typer.Option(help="Compile the other layers on a GPU if that helps: auto or off.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="auto, adamw, or adamw8bit (needs torchao).")] = None,
    activation_checkpointing: Annotated[bool | None, typer.Option(
        "--activation-checkpointing/--no-activation-checkpointing",
        help="Recompute activations: less memory, more time. Default: if experts need it.")] = None,
    sharding: Annotated[bool | None, typer.Option(
        "--sharding/--no-sharding",
        help="Divide the layers among several devices: less memory, more time. Default: if that trains more experts.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Samples per forward pass. Default: as many as fit.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        "--from", help="Folder of the checkpoint that the campaign started from: saves a download.")] = None,
    base: Annotated[str | None, typer.Option(help="Where to keep bases and a round's data: auto, disk or ram.")] = None,
    checkpoint_minutes: Annotated[float | None, typer.Option(help="Minutes of work that a crash may lose (10).")] = None,
    data_dir: options.DataDir = None,
    token_cache: Annotated[str | None, typer.Option(help="Maximum disk space for downloaded text. Default: 16GiB.")] = None,
    hours: Annotated[str | None, typer.Option(help="Hours of the day in which to train, local time: 22-8.")] = None,
    only_when_idle: Annotated[bool, typer.Option(
        "--only-when-idle", help="Pause while other programs use CPU or GPUs, and on battery.")] = False,
    nice: Annotated[int | None, typer.Option(help="Niceness of training, 0 to 19; the network keeps its priority.")] = None,
    quota: Annotated[str | None, typer.Option(help="Most traffic, both directions together: 20GB/day.")] = None,
    name: Annotated[str | None, typer.Option(help="What lists of contributors call this peer. Default: its id.")] = None,
    team: Annotated[str | None, typer.Option(help="Team whose tokens yours count for in these lists.")] = None,
    private_urls: Annotated[
        bool, typer.Option("--private-urls", help="Read text also from URLs in this machine's local network.")
    ] = False,
    listen: options.Listen = None,
    announce: options.Announce = None,
    max_upload: options.MaxUpload = None,
    max_download: options.MaxDownload = None,
    evaluate_tasks: options.EvaluateTasks = False,
    include_path: options.IncludePath = None,
    invite: options.Invite = None,
    identity: options.IdentityFile = None,
    metrics_port: options.MetricsPort = None,
    metrics_host: options.MetricsHost = None,
    tracker: options.TrackerName = None,
    log_level: options.LogLevel = None,
    log_json: options.LogJson = False,
) -> None:
    """Join a campaign and train. Needs only the address of a peer. Ctrl-C leaves cleanly."""
    from spes_p2p.config.campaign import make_peer_config
    from spes_p2p.config.quantities import parse_bytes_per_day, parse_hours

    settings = make_peer_config(
        run_dir=run_dir, devices=devices, experts=_number_or_word(experts),
        memory_bytes=options.byte_count(memory, "--memory"), leave_free=options.spare(leave_free), nice=nice,
        stored=stored, stored_on=stored_on, backend=backend, compile=compile,
        optimizer=optimizer, activation_checkpointing=activation_checkpointing, sharding=sharding,
        micro_batch_size=micro_batch_size,
        checkpoint=checkpoint, base=base, checkpoint_minutes=checkpoint_minutes, data_dir=data_dir,
        token_cache_bytes=options.byte_count(token_cache, "--token-cache"),
        private_urls=private_urls or None, name=name, team=team,
        hours=None if hours is None else parse_hours(hours, "--hours"),
        only_when_idle=only_when_idle or None, evaluate_tasks=evaluate_tasks or None, include_path=include_path,
        quota=None if quota is None else parse_bytes_per_day(quota, "--quota"),
        listen=listen, announce=announce, invite=invite, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=options.line_limit(max_upload, "--max-upload"),
        max_download=options.line_limit(max_download, "--max-download"),
    )
    options.check_invitation(invite)
    options.check_data_folders(data_dir)
    options.check_identity(identity)
    options.check_checkpoint(checkpoint)
    options.check_devices(devices)
    if context.obj is CHECK_ONLY:
        return
    from spes_p2p.session.own_state import require_unused

    require_unused(run_dir)
    setup_logging(settings.log_level, log_json)
    logger.info("looking for the campaign at %s", ", ".join(addresses))
    with waiting("joining") as end_waiting:
        from spes_p2p.session.run import run_join

        def show(files: CampaignFiles, address: str) -> None:
            end_waiting()
            logger.info("joined campaign %s (%s) as %s", files.campaign.config.name, files.campaign.hash[:12], address)

        run_peer(run_join(addresses, settings, show, on_paused=end_waiting))


def pause(run_dir: OwnRunDir = Path("runs/peer"), as_json: options.AsJson = False) -> None:
    """Pause your trainer: it leaves the swarm politely and frees the machine, until `spes-p2p resume`."""
    _order_pause(run_dir, True, as_json)


def resume(run_dir: OwnRunDir = Path("runs/peer"), as_json: options.AsJson = False) -> None:
    """Let your paused trainer go on: it joins again, catches up and trains."""
    _order_pause(run_dir, False, as_json)


def me(
    run_dir: OwnRunDir = Path("runs/peer"),
    worth: Annotated[bool, typer.Option(
        "--worth", help="Also measure the held-out loss without your experts, on the CPU at lowest priority.")] = False,
    data_dir: options.DataDir = None,
    identity: options.IdentityFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what your trainer has contributed: tokens, rounds, experts, time, its share of the model, the next round."""
    options.check_data_folders(data_dir)

    from spes_p2p.client.me import as_the_swarm_says, look_at, look_at_worth, render, with_standing
    from spes_p2p.observe.json_values import to_json

    found, unmeasured = look_at(run_dir, identity), None
    if worth:
        for_what = "measuring the loss without your experts"
        say_waiting(f"{for_what}, at the lowest priority")
        with ProgressBar(for_what, "loading the model, at the lowest priority") as update:
            try:
                found = look_at_worth(run_dir, identity, data_dir or (), update)
            except UserError as error:
                unmeasured = error
    if found.state == "paused":
        setup_logging("warning", False)
        with waiting("asking the swarm how far it is"):
            found = run(as_the_swarm_says(found, run_dir))
    found = with_standing(found, run_dir)
    print(json.dumps(to_json(found), indent=2) if as_json else render(found))
    if unmeasured is not None:
        raise unmeasured


def _order_pause(run_dir: Path, pauses: bool, as_json: bool) -> None:
    from spes_p2p.client.own_peer import give_pause_order
    from spes_p2p.session.own_state import own_state_json

    for_what = f"waiting for the trainer to {'end its step and leave' if pauses else 'join again and train'}"
    with waiting(for_what):
        state = give_pause_order(run_dir, pauses, partial(say_waiting, for_what))
    if as_json:
        print(json.dumps(own_state_json(state), indent=2))
    elif state is None:
        later = f"starts paused, until spes-p2p resume {shlex.quote(str(run_dir))}" if pauses else "does not start paused"
        print(f"no trainer runs with {run_dir} now; the next one {later}")
    elif pauses and state.is_preparing:
        print("ordered; the trainer is still preparing and pauses before it trains")
    elif not pauses and state.trains:
        print("running: it trains")
    elif not pauses and state.waits_for_owner:
        print("your pause is over; the campaign itself is paused, and the trainer goes on when that ends")
    elif not pauses and not state.reason:
        print(f"{state.line}; it trains after that")
    else:
        print(state.line if pauses else f"your pause is over, but the trainer stays {state.line}")
    if state is not None and state.reason and not pauses:
        raise typer.Exit(1)  # a script that resumes is to know


def identity(run_dir: options.RunDir = Path("runs/peer"), identity: options.IdentityFile = None) -> None:
    """Print the id of the peer with this run-dir, which an invitation names. Creates its key if there is none."""
    from spes_p2p.config.campaign import make_peer_config
    from spes_p2p.net.identity import RSAIdentity

    path = make_peer_config(run_dir=run_dir, identity=identity).identity_path
    is_new = not path.exists()
    peer_id = RSAIdentity(path).peer_id
    if is_new:
        typer.echo(f"{path}: made a new key; it is this peer's identity, so keep it", err=True)
    print(peer_id)


def _number_or_word(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text
