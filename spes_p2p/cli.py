"""The command line: one function per command, which reads options and prints results.

Invalid input prints one line and exits with code 2. Commands check their arguments before they import torch and hivemind, which
takes seconds, so that a typo is reported at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from spes_p2p import __version__
from spes_p2p.client.exit_codes import exit_with
from spes_p2p.config.addresses import check_peer_addresses, check_webhook
from spes_p2p.errors import UserError
from spes_p2p.observe.log import json_line
from spes_p2p.storage.files import require_writable, write_whole

if TYPE_CHECKING:
    from spes_p2p.campaign.files import CampaignFiles
    from spes_p2p.client.export import Exportable
    from spes_p2p.config.quantities import Spare

logger = logging.getLogger(__name__)

MAX_LISTED_CAMPAIGNS = 64
"""Most campaigns of one directory. Bounds memory and sockets: each campaign has a connection of its own."""

app = typer.Typer(
    help="Peer-to-peer training of mixture-of-experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str | None, typer.Option(
    help="URL where you will publish the token files: https://, s3://, gs:// or hf://datasets/OWNER/NAME/...; "
         "volunteers read from it what no peer serves.")]
ConfigFile = Annotated[Path, typer.Option("--config", help="Campaign file (YAML).")]
RunDir = Annotated[Path, typer.Option(help="Folder for the peer's state; a restart with the same folder continues.")]


def _peers(addresses: list[str] | None) -> list[str] | None:
    check_peer_addresses(addresses or ())
    return addresses


def _peer(address: str) -> str:
    check_peer_addresses([address])
    return address


Addresses = Annotated[
    list[str], typer.Argument(metavar="ADDRESS...", help="Address of any peer: /ip4/.../p2p/...", callback=_peers)
]


AddressesOrRunDir = Annotated[list[str], typer.Argument(
    metavar="ADDRESS...|RUN_DIR", help="Address of any peer, or run-dir of a trainer that runs on this machine.")]


def _own_or_addresses(targets: list[str]) -> tuple[Path | None, list[str]]:
    """Return the run-dir of a running trainer, if one is given, and the addresses of its swarm. Raises UserError."""
    from spes_p2p.session.own_state import read_own_state

    own_dir = Path(targets[0])
    if not own_dir.is_dir():
        return None, _peers(targets) or []
    own = read_own_state(own_dir)
    if own is None:
        raise UserError(f"{own_dir}: no trainer runs with this run-dir; give the address of a peer")
    return own_dir, list(own.addresses)


def _task_folder(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise UserError(f"--include-path {folder}: no such folder; give the folder of the tasks' YAML files")
    return folder


FromAddresses = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="ADDRESS", help="Address of any peer of a running swarm; repeatable.", callback=_peers),
]
Listen = Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on; repeatable.")]
Announce = Annotated[list[str] | None, typer.Option(help="Multiaddr that other peers dial, for use behind NAT; repeatable.")]
Devices = Annotated[str | None, typer.Option(
    help="auto (the first GPU, or the CPU), cpu, all (every GPU), or numbers of GPUs that divide each batch: 0,1,2,3.")]
Memory = Annotated[str | None, typer.Option(help="Memory budget, of each device: 12GiB. Default: all free.")]
LeaveFree = Annotated[str | None, typer.Option(
    help="Memory of each device to leave to other programs, beside the usual reserve: 20% or 2GiB.")]
MaxUpload = Annotated[str | None, typer.Option(help="Upload limit in bits per second: 20mbit.")]
MaxDownload = Annotated[str | None, typer.Option(help="Download limit in bits per second: 50mbit.")]
EvaluateTasks = Annotated[bool, typer.Option(
    "--evaluate-tasks", help="Run the campaign's lm-eval tasks and prompts on the CPU, at lowest priority.")]
IncludePath = Annotated[Path | None, typer.Option(help="Folder with your own task definitions.", callback=_task_folder)]
DataDir = Annotated[list[Path] | None, typer.Option(help="Local folder with token files of the campaign; repeatable.")]
IdentityFile = Annotated[Path | None, typer.Option(help="Private key file of the peer. Default: identity.key in the run-dir.")]
Invite = Annotated[str | None, typer.Option(help="Invitation of the campaign's owner: the text, or a file with it.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port; 0: any free port.")]
MetricsHost = Annotated[str | None, typer.Option(help="Address to serve the metrics on. Default: 127.0.0.1.")]
TrackerName = Annotated[str | None, typer.Option("--tracker", help="Experiment tracker: none, wandb or trackio.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line."""
    exit_with(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write the campaign to.")],
    text: Annotated[list[str] | None, typer.Option(
        help="Training text: .jsonl (also .gz, .zst), .parquet or .txt; repeatable. NAME:WEIGHT=FILE makes a mix of sources, "
             "with these shares of the samples.")] = None,
    held_out: Annotated[list[Path] | None, typer.Option(help="Evaluation text; repeatable.")] = None,
    tokenizer: Annotated[str | None, typer.Option(
        help="Path of a tokenizer.json, or the vocabulary size of a tokenizer to train.")] = None,
    size: Annotated[str | None, typer.Option(help="Model size: tiny, small, medium, 1b or 7b.")] = None,
    peers: Annotated[int | None, typer.Option(help="Expected number of trainers.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training text.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the campaign. Default: name of the folder.")] = None,
    admission: Annotated[str, typer.Option(help="Who may take part: friends, invite or open.")] = "friends",
    url: Url = None,
    checkpoint: Annotated[str | None, typer.Option(
        "--from", help="Existing weights to start from: folder or Hub name (OWNER/NAME) of a Hugging Face checkpoint.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts to make of a dense checkpoint's MLP in each layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts that each token is routed to (--experts). Default: 2.")] = None,
    upcycle: Annotated[str | None, typer.Option(
        help="How --experts makes them: copy, drop or spes (docs/upcycling.md). Default: copy.")] = None,
) -> None:
    """Create a campaign: a commented config file, token files and a tokenizer. Asks for missing answers on a terminal."""
    from spes_p2p.campaign.answers import Answers
    from spes_p2p.campaign.init import CAMPAIGN_YAML, ask, check_place, make_campaign, make_start, parse_answer, parse_texts

    asks = sys.stdin.isatty() and not text
    name = name or folder.resolve().name
    check_place(folder, name)
    given = parse_answer("tokenizer", tokenizer) if tokenizer else None
    texts, sources = parse_texts(text or ())
    start = make_start(checkpoint, folder, size, given, experts, top_k, upcycle)
    answers = Answers(
        folder=folder,
        name=name,
        size="" if start else size or ask("size", asks),
        start=start,
        texts=texts or ask("text", asks),
        sources=sources,
        held_out=tuple(held_out or ask("held-out", asks)),
        tokenizer=start.tokenizer if start else given or ask("tokenizer", asks),
        peers=peers if peers is not None else ask("peers", asks),
        epochs=epochs if epochs is not None else ask("epochs", asks),
        admission=admission,
        url=url,
    )
    with _ProgressBar("tokenizing") as update:
        made = make_campaign(answers, lambda p: update(p.bytes_done, p.bytes_total))
    from spes_p2p.campaign.plan_table import describe_size

    path = folder / CAMPAIGN_YAML
    print(f"{path}: {describe_size(made.campaign.config)}, {made.training_manifest.tokens} tokens of text")
    print(f"spes-p2p bootstrap --config {path} --listen /ip4/0.0.0.0/tcp/31337 --announce /ip4/YOUR.PUBLIC.IP/tcp/31337")


@app.command()
def bootstrap(
    config: ConfigFile,
    run_dir: RunDir = Path("runs/bootstrap"),
    peer: Annotated[
        list[str] | None, typer.Option(help="Address of another bootstrap peer; repeatable.", callback=_peers)
    ] = None,
    archive_every: Annotated[int | None, typer.Option(help="Archive the base every N rounds; 0: never. Default: 50.")] = None,
    archive_keep: Annotated[int | None, typer.Option(help="Number of archived bases to keep. Default: 2.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    evaluate_tasks: EvaluateTasks = False,
    include_path: IncludePath = None,
    invite: Invite = None,
    identity: IdentityFile = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    tracker: TrackerName = None,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Start a campaign: publish its files, create base 0, vote on rounds. Prints the command with which volunteers join.

    With --peer: add another bootstrap peer to a running campaign, from the same files.
    """
    from spes_p2p.campaign.files import read_campaign
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(
        run_dir=run_dir, listen=listen, announce=announce, invite=invite, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=_rate(max_upload, "--max-upload"), max_download=_rate(max_download, "--max-download"),
        archive_every=archive_every, archive_keep=archive_keep,
        evaluate_tasks=evaluate_tasks or None, include_path=include_path,
    )
    _check_invitation(invite)
    files = read_campaign(config)
    _log(settings.log_level, log_json)
    with _waiting("starting"):
        from spes_p2p.session.run import run_bootstrap

    def show(address: str) -> None:
        (run_dir / "address").write_text(address + "\n")
        _say(f"spes-p2p join {address}", log_json)

    _run(run_bootstrap(files, settings, peer or (), show))


@app.command()
def join(
    context: typer.Context,
    addresses: Addresses,
    run_dir: RunDir = Path("runs/peer"),
    devices: Devices = None,
    experts: Annotated[str | None, typer.Option(help="Maximum number of experts to train: auto or a number.")] = None,
    memory: Memory = None,
    leave_free: LeaveFree = None,
    stored: Annotated[str | None, typer.Option(help="Format of the experts of other peers: auto, fp32, bf16 or int8.")] = None,
    stored_on: Annotated[str | None, typer.Option(help="Memory for the experts of other peers: auto, device or host.")] = None,
    backend: Annotated[str | None, typer.Option(help="Expert kernels: auto, grouped_mm, eager or megablocks.")] = None,
    compile: Annotated[str | None, typer.Option(help="Compile the other layers on a GPU if that helps: auto or off.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="auto, adamw, or adamw8bit (needs torchao).")] = None,
    activation_checkpointing: Annotated[bool | None, typer.Option(
        "--activation-checkpointing/--no-activation-checkpointing",
        help="Recompute activations: less memory, more time. Default: if experts need it.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Samples per forward pass. Default: as many as fit.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        "--from", help="Folder of the checkpoint that the campaign started from: saves a download.")] = None,
    base: Annotated[str | None, typer.Option(help="Where to keep bases and a round's data: auto, disk or ram.")] = None,
    checkpoint_minutes: Annotated[float | None, typer.Option(help="Minutes of work that a crash may lose (10).")] = None,
    data_dir: DataDir = None,
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
    listen: Listen = None,
    announce: Announce = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    evaluate_tasks: EvaluateTasks = False,
    include_path: IncludePath = None,
    invite: Invite = None,
    identity: IdentityFile = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    tracker: TrackerName = None,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Join a campaign and train. Needs only the address of a peer. Ctrl-C leaves cleanly."""
    from spes_p2p.config.campaign import make_peer_config
    from spes_p2p.config.quantities import parse_bytes_per_day, parse_hours

    settings = make_peer_config(
        run_dir=run_dir, devices=devices, experts=_number_or_word(experts),
        memory_bytes=_bytes(memory, "--memory"), leave_free=_spare(leave_free), nice=nice,
        stored=stored, stored_on=stored_on, backend=backend, compile=compile,
        optimizer=optimizer, activation_checkpointing=activation_checkpointing, micro_batch_size=micro_batch_size,
        checkpoint=checkpoint, base=base, checkpoint_minutes=checkpoint_minutes, data_dir=data_dir,
        token_cache_bytes=_bytes(token_cache, "--token-cache"),
        private_urls=private_urls or None, name=name, team=team,
        hours=None if hours is None else parse_hours(hours, "--hours"),
        only_when_idle=only_when_idle or None, evaluate_tasks=evaluate_tasks or None, include_path=include_path,
        quota=None if quota is None else parse_bytes_per_day(quota, "--quota"),
        listen=listen, announce=announce, invite=invite, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=_rate(max_upload, "--max-upload"), max_download=_rate(max_download, "--max-download"),
    )
    _check_invitation(invite)
    if context.obj is CHECK_ONLY:
        return
    _log(settings.log_level, log_json)
    logger.info("looking for the campaign at %s", ", ".join(addresses))
    with _waiting("looking for the campaign") as end_waiting:
        from spes_p2p.session.run import run_join

        def show(files: CampaignFiles, address: str) -> None:
            end_waiting()
            _say(f"joined campaign {files.campaign.config.name} ({files.campaign.hash[:12]}) as {address}", log_json)

        _run(run_join(addresses, settings, show, on_paused=end_waiting))


OwnRunDir = Annotated[Path, typer.Argument(metavar="[RUN_DIR]", help="Run-dir of a trainer on this machine.")]


@app.command()
def pause(run_dir: OwnRunDir = Path("runs/peer"), as_json: AsJson = False) -> None:
    """Pause your trainer: it leaves the swarm politely and frees the machine, until `spes-p2p resume`."""
    _order_pause(run_dir, True, as_json)


@app.command()
def resume(run_dir: OwnRunDir = Path("runs/peer"), as_json: AsJson = False) -> None:
    """Let your paused trainer go on: it joins again, catches up and trains."""
    _order_pause(run_dir, False, as_json)


@app.command()
def me(
    run_dir: OwnRunDir = Path("runs/peer"),
    worth: Annotated[bool, typer.Option(
        "--worth", help="Also measure the held-out loss without your experts, on the CPU at lowest priority.")] = False,
    data_dir: DataDir = None,
    identity: IdentityFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what your trainer has contributed: tokens, rounds, experts, hours, its share of the model, the next round."""
    from spes_p2p.client.me import look_at, render, with_worth
    from spes_p2p.observe.json_values import to_json

    found = look_at(run_dir, identity or run_dir / "identity.key")
    if worth:
        with _waiting("measuring the loss without your experts"):
            found = with_worth(found, run_dir, data_dir or ())
    print(json.dumps(to_json(found), indent=2) if as_json else render(found))


def _order_pause(run_dir: Path, pauses: bool, as_json: bool) -> None:
    from spes_p2p.client.own_peer import give_pause_order
    from spes_p2p.session.own_state import own_state_json

    with _waiting("waiting for the trainer"):
        state = give_pause_order(run_dir, pauses)
    if as_json:
        print(json.dumps(own_state_json(state), indent=2))
    elif state is None:
        later = "starts paused" if pauses else "is not paused when you start it"
        print(f"no trainer runs with {run_dir}; it {later}")
    else:
        print(state.line)


service = typer.Typer(help="Run a trainer as a systemd service of your user.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(service, name="service")
CHECK_ONLY = object()
"""Given to `join` by `service install`: check the options, and no more."""
UnitName = Annotated[str, typer.Option(help="Name of the unit, if there are several.")]


@service.command("install")
def install_service(
    arguments: Annotated[list[str], typer.Argument(metavar="-- ADDRESS...", help="What you would give to spes-p2p join.")],
    name: UnitName = "spes-p2p",
) -> None:
    """Write the unit that joins with these arguments, and start it if systemd runs for this user."""
    command = typer.main.get_command(app).commands["join"]  # type: ignore[attr-defined]
    joining = command.make_context("join", list(arguments), obj=CHECK_ONLY)
    command.invoke(joining)
    from spes_p2p.client.service import install

    print("\n".join(install(name, arguments, joining.params["run_dir"])))


@service.command("remove")
def remove_service(name: UnitName = "spes-p2p") -> None:
    """Stop the trainer, politely, and remove its unit; its run-dir stays."""
    from spes_p2p.client.service import remove

    print("\n".join(remove(name)))


@service.command("status")
def show_service(name: UnitName = "spes-p2p", as_json: AsJson = False) -> None:
    """Show whether the unit is installed and running, and what its trainer does."""
    from spes_p2p.client.service import look_at
    from spes_p2p.observe.json_values import to_json

    found = look_at(name)
    if as_json:
        print(json.dumps(to_json(found), indent=2))
    else:
        print(f"{found.unit}: {f'installed, {found.active}' if found.installed else 'not installed'}")
        print(f"trainer: {found.trainer.line if found.trainer else 'not running'}")


@app.command()
def swarm(
    config: ConfigFile,
    peers: Annotated[int, typer.Option(help="Number of trainers.")],
    run_dir: Annotated[Path, typer.Option(help="Folder for the run-dirs of all peers.")] = Path("runs/swarm"),
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds. Default: the whole campaign.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a bootstrap peer and trainers on this machine. Exits with code 1 if a peer fails or digests differ."""
    from spes_p2p.client.local_swarm import is_good, run_swarm

    _log("warning", False)
    with _waiting("starting the peers") as end_waiting:
        summary = _run(run_swarm(config, peers, run_dir, rounds, end_waiting))
    if as_json:
        print((run_dir / "summary.json").read_text(), end="")
    else:
        equal = "equal on all peers" if summary.digests_equal else "NOT EQUAL"
        done = f"{summary.rounds} rounds, {summary.tokens} tokens in {summary.seconds:.0f} s"
        print(f"{done}; digests {equal}; {run_dir}/summary.json")
        for name in summary.failed_peers:
            print(f"{name} failed: see {run_dir / name / 'log.txt'}")
    raise typer.Exit(0 if is_good(summary) else 1)


@app.command()
def status(
    targets: AddressesOrRunDir,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update until the campaign is done; without a terminal, print one line per round.")
    ] = False,
) -> None:
    """Show a running swarm: round, peers, experts and owners, speed, loss, traffic. With a run-dir: your trainer first."""
    from spes_p2p.session.own_state import own_state_json, read_own_state

    own_dir, addresses = _own_or_addresses(targets)
    own = None if own_dir is None else read_own_state(own_dir)
    if own is not None and not as_json:
        print(f"your trainer: {own.line}", flush=True)
    _log("warning", False)
    with _waiting("looking for the swarm") as end_waiting:
        from spes_p2p.client.alerts import status_document
        from spes_p2p.client.status import fetch_statuses, watch_status
        from spes_p2p.observe.status import gather
        from spes_p2p.observe.table import render_status

        if watch:
            _run(watch_status(addresses, as_json, end_waiting))
            return
        statuses = _run(fetch_statuses(addresses))
    if not statuses:
        raise UserError(f"{addresses[0]}: connected, but no peer of the campaign answers; try again in a moment")
    if as_json:
        print(json.dumps({**status_document(statuses), **({"own": own_state_json(own)} if own else {})}, indent=2))
    else:
        Console().print(render_status(statuses))
        if gather(statuses).done:
            print(f"take the model: spes-p2p export --from {addresses[0]} --output checkpoint")


@app.command()
def control(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address of any peer: /ip4/.../p2p/...", callback=_peer)
    ],
    key: Annotated[Path, typer.Option(help="The owner's key: identity.key of the bootstrap peer that started the campaign.")],
    order: Annotated[
        list[str],
        typer.Argument(
            metavar="ORDER...",
            help="pause, resume, stop, rollback ROUND, schedule ROUND NAME=VALUE..., require PROTOCOL from ROUND, ban PEER, "
                 "unban PEER, pardon PEER",
        ),
    ],
) -> None:
    """Pause, resume, stop or roll back your campaign, change its schedule, ban or pardon a peer, require a newer protocol."""
    from spes_p2p.campaign.orders import parse_order

    make = parse_order(order)
    _log("warning", False)
    with _waiting("looking for the swarm"):
        from spes_p2p.client.owner import give_order

        given = _run(give_order([address], key, make))
    accepted = f"{given.accepted} of {given.peers} peers have record {given.control.number}"
    print(f"{' '.join(order)}: {accepted}; it takes effect with the first round committed after round {given.round}")


@app.command()
def invite(
    target: Annotated[str, typer.Argument(metavar="ADDRESS|RUN_DIR", help="Address of a peer, or a run-dir of the campaign.")],
    key: Annotated[Path, typer.Option(help="The owner's key: identity.key of the bootstrap peer that started the campaign.")],
    peer: Annotated[str | None, typer.Option(
        help="Id of the peer that may use it (spes-p2p identity). Default: whoever holds the invitation.")] = None,
    roles: Annotated[str, typer.Option(help="trainer; trainer,elector; or helper. The last two need --peer.")] = "trainer",
    expires: Annotated[str, typer.Option(help="How long it holds: 90m, 12h, 30d.")] = "30d",
) -> None:
    """Invite a peer to your campaign: print the text for its `--invite`."""
    from spes_p2p.campaign.invitations import parse_guest
    from spes_p2p.config.quantities import parse_seconds

    guest = parse_guest(peer, roles, parse_seconds(expires, "--expires"))
    _log("warning", False)
    with _waiting("looking for the campaign"):
        from spes_p2p.client.invite import make_invitation

        text = _run(make_invitation(target, key, guest))
    print(text)


@app.command()
def identity(run_dir: RunDir = Path("runs/peer"), identity: IdentityFile = None) -> None:
    """Print the id of the peer with this run-dir, which an invitation names. Creates its key if there is none."""
    from spes_p2p.config.campaign import make_peer_config
    from spes_p2p.net.identity import RSAIdentity

    print(RSAIdentity(make_peer_config(run_dir=run_dir, identity=identity).identity_path).peer_id)


@app.command()
def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario file (YAML); the options below override it.")] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="Simulate in this process, in virtual time.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="Run real processes; takes minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="Number of runs, each with its own seed (--virtual).")] = 1,
    seed: Annotated[int, typer.Option(help="First seed; runs with equal seeds are identical.")] = 0,
    peers: Annotated[int | None, typer.Option(help="Number of trainers at the start.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per run.")] = None,
    fault_rate: Annotated[float | None, typer.Option(help="Probability of a random fault per round, 0 to 1.")] = None,
    faults: Annotated[str | None, typer.Option(help="Kinds of random faults, comma-separated. Default: all.")] = None,
    points: Annotated[str | None, typer.Option(help="Points where random faults occur, comma-separated. Default: all.")] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="Overlap rounds with training (sync.overlap).")] = False,
    attackers: Annotated[int | None, typer.Option(help="How many of the trainers attack; less than half.")] = None,
    attacks: Annotated[str | None, typer.Option(help="Kinds of attacks, comma-separated, or all: a run for each.")] = None,
    admission: Annotated[str | None, typer.Option(help="Who may join: friends (default) or open.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Seeds to run in parallel. Default: one per core.")] = None,
    event_log: Annotated[Path | None, typer.Option(help="Write the event log of a single seed to this file.")] = None,
    run_dir: Annotated[Path, typer.Option(help="New folder for the processes' run-dirs.")] = Path("runs/simulate"),
    config: Annotated[Path | None, typer.Option(help="Campaign file (--processes). Default: a generated one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a swarm on this machine, inject faults and check invariants. Exits with code 1 if an invariant is violated."""
    if virtual == processes:
        raise UserError("simulate: give either --virtual or --processes")
    from spes_p2p.testing.simulate.command import simulate_processes, simulate_virtual

    options = {
        "peers": peers, "rounds": rounds, "fault_rate": fault_rate,
        "kinds": faults.split(",") if faults is not None else None, "points": points.split(",") if points is not None else None,
        "overlap": overlap or None, "attackers": attackers, "admission": admission,
        "attacks": attacks.split(",") if attacks is not None else None,
    }
    progress = _ProgressBar("simulating")
    if virtual:
        found, text = simulate_virtual(scenario, options, range(seed, seed + seeds), jobs, event_log, progress)
    else:
        found, text = simulate_processes(scenario, options, seed, config, run_dir, progress)
    print(json.dumps(found, indent=2) if as_json else "\n".join(text))
    raise typer.Exit(1 if found["invariant_violations"] or found["orphan_processes"] else 0)


@app.command()
def doctor(
    addresses: Addresses,
    run_dir: RunDir = Path("runs/peer"),
    devices: Devices = None,
    memory: Memory = None,
    leave_free: LeaveFree = None,
    listen: Listen = None,
    announce: Announce = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can train in a campaign, and what to fix. Exits with code 1 if a check fails."""
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(
        run_dir=run_dir, devices=devices, memory_bytes=_bytes(memory, "--memory"), leave_free=_spare(leave_free),
        listen=listen, announce=announce,
    )
    _log("error", False)
    with _waiting("checking this machine and its connection to the swarm"):
        from spes_p2p.client.doctor import examine, report, worst
        from spes_p2p.client.doctor_checks import render_checks

        checks = _run(examine(addresses, settings))
    if as_json:
        print(json.dumps(report(checks), indent=2))
    else:
        Console(soft_wrap=True).print(render_checks(checks))
    raise typer.Exit(1 if worst(checks) == "failure" else 0)


@app.command()
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
    own_dir, addresses = _own_or_addresses(targets)
    _log("warning", False)
    with _waiting("starting") as end_waiting:
        from spes_p2p.client.dashboard.own import OwnTrainer
        from spes_p2p.client.dashboard.server import run_dashboard

        def show(url: str) -> None:
            end_waiting()
            print(f"dashboard on {url}", flush=True)

        _run(run_dashboard(addresses, host, port, show, webhook, None if own_dir is None else OwnTrainer(own_dir)))


@app.command()
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
    _log("warning", False)
    with _waiting("starting") as end_waiting:
        from spes_p2p.client.dashboard.directory import run_directory

        def show(url: str) -> None:
            end_waiting()
            print(f"directory on {url}", flush=True)

        _run(run_directory(addresses, host, port, show))


@app.command()
def plan(
    config: ConfigFile,
    memory: Annotated[str, typer.Option(help="Memory of a GPU: 24GiB, 24GB.")],
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of the internet link, each way: 100mbit, 1gbit.")] = "100mbit",
    leave_free: LeaveFree = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the peer, each with this memory.")] = 1,
    peers: Annotated[int | None, typer.Option(
        help="Identical peers in the swarm. Default: enough to train all experts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what fits on a GPU, and how much host memory, disk and bandwidth a peer needs. Allocates nothing."""
    from spes_p2p.config.campaign import load_campaign_config
    from spes_p2p.config.quantities import parse_bits_per_second, parse_bytes

    memory_bytes, line = parse_bytes(memory, "--memory"), parse_bits_per_second(bandwidth, "--bandwidth")
    campaign = load_campaign_config(config)
    from spes_p2p.campaign.plan_table import plan_json, render_plan
    from spes_p2p.campaign.planner import plan_peer
    from spes_p2p.campaign.room import Device

    device = Device("cuda", memory_bytes, gpus).leaving(_spare(leave_free))
    made = plan_peer(campaign, device, line, peers, "--memory")
    if as_json:
        print(json.dumps(plan_json(made), indent=2))
    else:
        Console().print(render_plan(made))


@app.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help=".jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt files.")],
    tokenizer: Annotated[Path, typer.Option(help="Path of the tokenizer.json.")],
    output: Annotated[Path, typer.Option(help="Folder for the token files and their manifest.")],
    prefix: Annotated[str, typer.Option(help="Prefix of the file names.")] = "",
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    text_field: Annotated[str, typer.Option(help="Name of the text field in JSON and Parquet.")] = "text",
    shard_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per file.")] = None,
    url: Url = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing token files.")] = False,
) -> None:
    """Convert text to token files and a manifest."""
    from spes_p2p.data import tokenizing
    from spes_p2p.data.manifest import MANIFEST_NAME

    if shard_tokens is not None and shard_tokens < 1:
        raise UserError(f"--shard-tokens {shard_tokens}: must be at least 1")
    with _ProgressBar("tokenizing") as update:
        manifest = tokenizing.tokenize(
            inputs, tokenizer, output, eos_token=eos_token, text_field=text_field, prefix=prefix, overwrite=overwrite,
            shard_tokens=shard_tokens or tokenizing.DEFAULT_SHARD_TOKENS, url=url,
            on_progress=lambda p: update(p.bytes_done, p.bytes_total),
        )
    print(f"{manifest.tokens} tokens in {len(manifest.files)} files: {output / f'{prefix}{MANIFEST_NAME}'}")


@app.command()
def describe(
    files: Annotated[list[Path], typer.Argument(help="Existing token files (SPES, OLMo).")],
    tokenizer: Annotated[Path, typer.Option(help="Path of the tokenizer.json that produced them.")],
    manifest: Annotated[Path, typer.Option(help="Path of the manifest to write.")],
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32. Default: detected.")] = None,
    url: Url = None,
) -> None:
    """Write a manifest for existing token files."""
    from spes_p2p.data.tokenizing import describe_token_files

    if dtype not in (None, "uint16", "uint32"):
        raise UserError(f"--dtype {dtype}: token files are uint16 or uint32; leave it out to have it detected")
    with _ProgressBar("reading") as update:
        made = describe_token_files(
            files, tokenizer, manifest, eos_token=eos_token, dtype=dtype, url=url, on_progress=update  # type: ignore[arg-type]
        )
    print(f"{made.tokens} tokens in {len(made.files)} files: {manifest}")


@app.command()
def export(
    output: Annotated[Path, typer.Option(help="Folder for the checkpoint; must not exist.")],
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", help="Archived round. Default: the last round.")] = None,
    addresses: FromAddresses = None,
    push_to: Annotated[str | None, typer.Option(help="Upload the checkpoint to this Hub repository: OWNER/NAME.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the Hub repository as private.")] = False,
    dtype: Annotated[str, typer.Option(help="fp32: the base's exact values; bf16: rounded, half the size.")] = "fp32",
) -> None:
    """Export a committed base, from a run-dir or a running swarm, as a Hugging Face checkpoint with a model card."""
    if (run_dir is None) == (not addresses):
        raise UserError("export: give either --run-dir of a peer or --from with an address of the swarm")
    if output.exists():
        raise UserError(f"{output}: already exists; name another output directory or remove it")
    require_writable(output.parent)
    if round_number is not None and run_dir is None:
        raise UserError("export: --round needs an archive; give the --run-dir of a bootstrap peer")
    if dtype not in ("fp32", "bf16"):
        raise UserError(f"--dtype {dtype}: must be fp32 or bf16")
    with _waiting("starting"):
        from spes_p2p.client.export import from_run_dir, push_to_hub

    if run_dir is not None:
        made = from_run_dir(run_dir, round_number)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        made = _download_base(addresses or [], output.parent)
    made.write(output, dtype)  # type: ignore[arg-type]
    print(f"base of round {made.origin.round} (digest {made.origin.digest[:12]}): {output}")
    if push_to is not None:
        print(push_to_hub(output, push_to, private))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Run-dir of a trainer or bootstrap peer; it may be running.")],
    output: Annotated[Path | None, typer.Option(help="File to write. Default: report.html in the run-dir.")] = None,
    evaluations: Annotated[list[Path] | None, typer.Option(
        "--evaluation", help="Results to include: a file that `evaluate --output` wrote; repeatable.")] = None,
) -> None:
    """Write one HTML page about a run: figures, plots, contributors, evaluation and config. It needs no network to read."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the run-dir of a trainer or bootstrap peer")
    target = output or run_dir / "report.html"
    if target.is_dir():
        raise UserError(f"--output {target}: is a folder; name a file")
    require_writable(target.parent)
    with _waiting("starting"):
        from spes_p2p.client.report import make_report

    write_whole(target, make_report(run_dir, evaluations or ()).encode())
    print(target)


@app.command()
def evaluate(
    tasks: Annotated[str, typer.Option(
        help="Comma-separated lm-eval tasks, each with its few-shot examples or its own number: piqa,arc_challenge:25; "
             "spes: the twelve of SPES.")],
    model_dir: Annotated[Path | None, typer.Argument(help="Folder of a Hugging Face checkpoint.")] = None,
    addresses: FromAddresses = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer, whose last base to evaluate.")] = None,
    include_path: IncludePath = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of examples per task.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32. Default: as in the checkpoint.")] = None,
    batch_size: Annotated[str, typer.Option(help="Examples per pass; auto: as many as fit the GPU.")] = "8",
    output: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
) -> None:
    """Evaluate a checkpoint, or the newest base of a running swarm, with lm-eval; an export's model card gets the results."""
    from spes_p2p.client import evaluate as evaluation
    from spes_p2p.client.task_names import check_names, parse_tasks

    if [model_dir is None, not addresses, run_dir is None].count(False) != 1:
        raise UserError("evaluate: give a checkpoint folder, --from with an address of the swarm, or --run-dir of a peer")
    _require_file(output)
    evaluation.check_options(limit, device, batch_size, dtype)
    shots = parse_tasks(tasks)
    check_names(shots, include_path)
    batch = int(batch_size) if batch_size.isdecimal() else batch_size
    with tempfile.TemporaryDirectory(prefix="spes-evaluate-") as folder:
        origin = {}
        downloaded = Path(folder) / "checkpoint"
        if model_dir is None:
            made = _download_base(addresses or [], Path(folder)) if run_dir is None else _stored_base(run_dir)
            made.write(downloaded, dtype or "fp32")  # type: ignore[arg-type]
            origin = {"model": made.files.campaign.config.name, "round": made.origin.round, "digest": made.origin.digest}
        results = {**evaluation.evaluate(model_dir or downloaded, shots, include_path, limit, device, batch, dtype), **origin}
    text = json.dumps(results, indent=2)
    print(text)  # first, so that a disk that is full by now does not cost the results
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    if model_dir is not None:
        evaluation.write_into_card(model_dir, results, tasks, include_path, limit, batch_size)


@app.command()
def generate(
    model_dir: Annotated[Path | None, typer.Argument(help="Folder of a Hugging Face checkpoint.")] = None,
    addresses: FromAddresses = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer, whose last base to continue with.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(
        "--prompt", help="Text to continue; repeatable. Default: each line that you type, or that is piped in.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per continuation.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as the model says.")] = 0.8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    follow: Annotated[bool, typer.Option(
        "--follow", help="With --from: change to each newer base as it comes, between two prompts.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write prompts and continuations to this JSON file.")] = None,
) -> None:
    """Continue text with a checkpoint, the base of a run-dir, or the newest base of a running swarm."""
    from spes_p2p.client.evaluate import check_checkpoint, check_device

    if [model_dir is None, not addresses, run_dir is None].count(False) != 1:
        raise UserError("generate: give a checkpoint folder, --from with an address of the swarm, or --run-dir of a peer")
    if follow and not addresses:
        raise UserError("generate: --follow needs --from with an address of the swarm")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
    if not 0 <= temperature <= 10:
        raise UserError(f"--temperature {temperature}: must be from 0 to 10")
    check_device(device)
    _require_file(output)
    if model_dir is not None:
        check_checkpoint(model_dir)
    with tempfile.TemporaryDirectory(prefix="spes-generate-") as folder:
        name, base_round = str(model_dir), None
        if model_dir is None:
            made = _download_base(addresses or [], Path(folder)) if run_dir is None else _stored_base(run_dir)
            name, base_round, model_dir = made.files.campaign.config.name, made.origin.round, Path(folder) / "checkpoint"
            made.write(model_dir)
            del made  # the base, which is as large as the model
            print(f"{name}, base of round {base_round}", file=sys.stderr)
        with _waiting("loading the model"):
            from spes_p2p.client.export import from_swarm
            from spes_p2p.client.generate import Continuation, following, unchanging

            model = Continuation(model_dir, device)

        def fetch(after: int) -> Coroutine[Any, Any, Exportable]:
            return from_swarm(addresses or [], Path(folder), lambda done, size: None, after)

        kept = following(fetch, Path(folder), device, base_round or 0) if follow else unchanging()
        told = []
        with kept as newer:
            for prompt in prompts or _typed_lines():
                if (found := newer()) is not None:
                    base_round, model = found
                    print(f"{name}, base of round {base_round}", file=sys.stderr)
                if prompts:
                    print(prompt, end="")
                text = model.write(prompt, max_new_tokens, temperature, lambda text: print(text, end="", flush=True))
                print()
                told.append({"round": base_round, "prompt": prompt, "text": text})
    if output is not None:
        write_whole(output, json.dumps({"model": name, "round": base_round, "continuations": told}, indent=2).encode())


def _require_file(output: Path | None) -> None:
    """Raise UserError unless a file can be written there, before the work that it is for."""
    if output is not None:
        require_writable(output.parent)
        if output.is_dir():
            raise UserError(f"--output {output}: is a folder; name a file")


def _typed_lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty; show a prompt on a terminal."""
    sign = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(sign).rstrip("\n"):
                yield line


def _download_base(addresses: list[str], folder: Path) -> Exportable:
    _log("warning", False)
    with _waiting("starting"):
        from spes_p2p.client.export import from_swarm

    with _ProgressBar("downloading the base") as update:
        made: Exportable = _run(from_swarm(addresses, folder, update))
    return made


def _stored_base(run_dir: Path) -> Exportable:
    with _waiting("starting"):
        from spes_p2p.client.export import from_run_dir

    return from_run_dir(run_dir)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    uvloop.install()
    return asyncio.run(work)


class _ProgressBar:
    """Show a progress bar on a terminal, nothing elsewhere; yields `update(done, total)`."""

    def __init__(self, what: str):
        percent = TextColumn("{task.percentage:>3.0f} %")
        columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


@contextlib.contextmanager
def _waiting(for_what: str) -> Iterator[Callable[[], None]]:
    """Show a spinner on a terminal, nothing elsewhere; yields a function that removes it early."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with console.status(for_what) as status:
        yield status.stop


def _log(level: str, as_json: bool) -> None:
    from spes_p2p.observe.log import setup_logging

    setup_logging(level, as_json)


def _say(text: str, as_json: bool) -> None:
    print(json_line(text) if as_json else text, flush=True)


def _check_invitation(given: str | None) -> None:
    from spes_p2p.campaign.invitations import read_option

    if given is not None:
        read_option(given)


def _number_or_word(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def _bytes(text: str | None, option: str) -> int | None:
    from spes_p2p.config.quantities import parse_bytes

    return None if text is None else parse_bytes(text, option)


def _spare(text: str | None) -> Spare | None:
    from spes_p2p.config.quantities import parse_spare

    return None if text is None else parse_spare(text, "--leave-free")


def _rate(text: str | None, option: str) -> float | None:
    from spes_p2p.config.quantities import parse_bits_per_second

    return None if text is None else parse_bits_per_second(text, option)
