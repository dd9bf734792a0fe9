"""The command line: one function a command, no logic. Bad input ends with one line and exit code 2.

A command looks at its arguments before it imports torch and hivemind, which takes seconds: a typing error shows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from spes_p2p.config.addresses import check_peer_addresses
from spes_p2p.errors import UserError

if TYPE_CHECKING:
    from spes_p2p.campaign.files import CampaignFiles
    from spes_p2p.client.export import Exportable

app = typer.Typer(
    help="Peer-to-peer training of mixture-of-experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str | None, typer.Option(
    help="Where the folder of the token files will be published: https://, s3://, gs:// or hf://datasets/OWNER/NAME/...; "
         "volunteers read there what no peer gives.")]
ConfigFile = Annotated[Path, typer.Option("--config", help="Campaign file (YAML).")]
RunDir = Annotated[Path, typer.Option(help="Where the peer keeps its state; started on it again, the peer continues.")]


def _peers(addresses: list[str] | None) -> list[str] | None:
    check_peer_addresses(addresses or ())
    return addresses


def _peer(address: str) -> str:
    check_peer_addresses([address])
    return address


Addresses = Annotated[
    list[str], typer.Argument(metavar="ADDRESS...", help="Of any peer of the campaign: /ip4/.../p2p/...", callback=_peers)
]
FromAddresses = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="ADDRESS", help="Of any peer of a running swarm; several are possible.", callback=_peers),
]
Listen = Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on; may be given several times.")]
Announce = Annotated[list[str] | None, typer.Option(help="Multiaddr that others should dial, behind NAT.")]
MaxUpload = Annotated[str | None, typer.Option(help="Bits a second to send at most: 20mbit.")]
MaxDownload = Annotated[str | None, typer.Option(help="Bits a second to receive at most: 50mbit.")]
IdentityFile = Annotated[Path | None, typer.Option(help="Private key of the peer's id. Default: identity.key in the run-dir.")]
MetricsPort = Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port; 0: any.")]
MetricsHost = Annotated[str | None, typer.Option(help="Address to serve the metrics on. Default: 127.0.0.1.")]
TrackerName = Annotated[str | None, typer.Option("--tracker", help="none, wandb or trackio: gets numbers once a round.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point."""
    exit_with(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where the campaign is written.")],
    text: Annotated[list[Path] | None, typer.Option(
        help="Text to train on: .jsonl (also .gz, .zst), .parquet, .txt; can be repeated.")] = None,
    held_out: Annotated[list[Path] | None, typer.Option(help="Text to evaluate on; can be repeated.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, or a number: train one of so many ids.")] = None,
    size: Annotated[str | None, typer.Option(help="Model: tiny, small, medium, 1b or 7b.")] = None,
    peers: Annotated[int | None, typer.Option(help="Trainers that you expect.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often the text is trained on.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the campaign. Default: the folder's.")] = None,
    url: Url = None,
) -> None:
    """Write a campaign: a commented file, token files, tokenizer. Without --text it asks, on a terminal."""
    from spes_p2p.campaign.init import CAMPAIGN_YAML, Answers, ask, check_place, make_campaign, parse_answer

    asks = sys.stdin.isatty() and not text
    name = name or folder.resolve().name
    check_place(folder, name)
    answers = Answers(
        folder=folder,
        name=name,
        size=size or ask("size", asks),
        texts=tuple(text or ask("text", asks)),
        held_out=tuple(held_out or ask("held-out", asks)),
        tokenizer=parse_answer("tokenizer", tokenizer) if tokenizer else ask("tokenizer", asks),
        peers=peers if peers is not None else ask("peers", asks),
        epochs=epochs if epochs is not None else ask("epochs", asks),
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
        list[str] | None, typer.Option(help="Address of another bootstrap peer; can be repeated.", callback=_peers)
    ] = None,
    archive_every: Annotated[int | None, typer.Option(help="Rounds between two kept bases; 0: none. Default: 50.")] = None,
    archive_keep: Annotated[int | None, typer.Option(help="How many of them are kept. Default: 2.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    identity: IdentityFile = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    tracker: TrackerName = None,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Be the first node of a campaign: publish it, make its base 0, vote. Prints the line that volunteers copy.

    With --peer: be one more bootstrap peer of a campaign that another one has begun, from the same files.
    """
    from spes_p2p.campaign.files import read_campaign
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(
        run_dir=run_dir, listen=listen, announce=announce, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=_rate(max_upload, "--max-upload"), max_download=_rate(max_download, "--max-download"),
        archive_every=archive_every, archive_keep=archive_keep,
    )
    files = read_campaign(config)
    _log(settings.log_level, log_json)
    with _waiting("starting"):
        from spes_p2p.session.run import run_bootstrap

    def show(address: str) -> None:
        (run_dir / "address").write_text(address + "\n")
        print(f"spes-p2p join {address}", flush=True)

    _run(run_bootstrap(files, settings, peer or (), show))


@app.command()
def join(
    addresses: Addresses,
    run_dir: RunDir = Path("runs/peer"),
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    experts: Annotated[str | None, typer.Option(help="Most experts to train: auto or a number.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that auto counts on: 12GiB. Default: what is free.")] = None,
    stored: Annotated[str | None, typer.Option(help="How foreign experts are kept: auto, fp32, bf16 or int8.")] = None,
    stored_on: Annotated[str | None, typer.Option(help="Where they are kept: device or host.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, grouped_mm, eager or megablocks.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, or adamw8bit (needs torchao).")] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Compute activations twice: less memory, more time.")
    ] = False,
    micro_batch_size: Annotated[int | None, typer.Option(help="Samples in one forward pass.")] = None,
    base: Annotated[str | None, typer.Option(help="What the base is read from: disk, or ram (4 bytes a value).")] = None,
    data_dir: Annotated[
        list[Path] | None, typer.Option(help="Where the campaign's token files lie on this machine; can be repeated.")
    ] = None,
    token_cache: Annotated[str | None, typer.Option(help="Disk that fetched text takes at most. Default: 16GiB.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    identity: IdentityFile = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    tracker: TrackerName = None,
    log_level: LogLevel = None,
    log_json: LogJson = False,
) -> None:
    """Train in a campaign. An address is all it needs. Ctrl-C leaves politely."""
    from spes_p2p.config.campaign import make_peer_config
    from spes_p2p.config.quantities import parse_bytes

    settings = make_peer_config(
        run_dir=run_dir, device=device, experts=_number_or_word(experts),
        memory_bytes=None if memory is None else parse_bytes(memory, "--memory"),
        stored=stored, stored_on=stored_on, backend=backend,
        optimizer=optimizer, activation_checkpointing=activation_checkpointing, micro_batch_size=micro_batch_size,
        base=base, data_dir=data_dir,
        token_cache_bytes=None if token_cache is None else parse_bytes(token_cache, "--token-cache"),
        listen=listen, announce=announce, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=_rate(max_upload, "--max-upload"), max_download=_rate(max_download, "--max-download"),
    )
    _log(settings.log_level, log_json)
    with _waiting("looking for the campaign") as end_waiting:
        from spes_p2p.session.run import run_join

        def show(files: CampaignFiles, address: str) -> None:
            end_waiting()
            print(f"joined campaign {files.campaign.config.name} ({files.campaign.hash[:12]}) as {address}", flush=True)

        _run(run_join(addresses, settings, show))


@app.command()
def swarm(
    config: ConfigFile,
    peers: Annotated[int, typer.Option(help="Trainer peers.")],
    run_dir: RunDir = Path("runs/swarm"),
    rounds: Annotated[int | None, typer.Option(help="Stop after so many rounds. Default: the whole campaign.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a bootstrap peer and trainers on this machine, watched. Exit code 1 if a peer failed or digests differ."""
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
    addresses: Addresses,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it until the campaign is done; a line a round when not a terminal.")
    ] = False,
) -> None:
    """Show a running swarm: round, peers, experts and owners, speed, loss, traffic."""
    _log("warning", False)
    with _waiting("looking for the swarm") as end_waiting:
        from spes_p2p.client.watch import look_once, watch_swarm
        from spes_p2p.observe.status import swarm_status
        from spes_p2p.observe.table import render_status

        if watch:
            _run(watch_swarm(addresses, as_json, end_waiting))
            return
        statuses = _run(look_once(addresses))
    if not statuses:
        raise UserError(f"{addresses[0]}: reached, but no peer of the campaign answers; try again in a moment")
    if as_json:
        print(json.dumps(swarm_status(statuses), indent=2))
    else:
        Console().print(render_status(statuses))


@app.command()
def control(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Of any peer of the campaign: /ip4/.../p2p/...", callback=_peer)
    ],
    key: Annotated[Path, typer.Option(help="identity.key of the bootstrap peer that began the campaign: it is the owner's.")],
    order: Annotated[
        list[str], typer.Argument(metavar="ORDER...", help="pause, resume, stop, rollback ROUND, schedule ROUND NAME=VALUE...")
    ],
) -> None:
    """Order your campaign to pause, resume, stop, go back to a round, or change its schedule: all peers in the same round."""
    from spes_p2p.campaign.orders import parse_order

    make = parse_order(order)
    _log("warning", False)
    with _waiting("looking for the swarm"):
        from spes_p2p.client.owner import give_order

        given = _run(give_order([address], key, make))
    taken = f"{given.taken} of {given.peers} peers have record {given.control.number}"
    print(f"{' '.join(order)}: {taken}; it holds as soon as a round after {given.round} is committed")


@app.command()
def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario file (YAML); options below go on top of it.")] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="In this process, in virtual time: fast.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="As real processes: one run, minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs, each with another seed (virtual form).")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed; the same seed is the same run.")] = 0,
    peers: Annotated[int | None, typer.Option(help="Trainers at the start.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run.")] = None,
    fault_rate: Annotated[float | None, typer.Option(help="Chance of a random fault in each round, 0 to 1.")] = None,
    faults: Annotated[str | None, typer.Option(help="Kinds of the random faults, separated by commas. Default: all.")] = None,
    points: Annotated[str | None, typer.Option(help="Points at which they strike, separated by commas. Default: all.")] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="Rounds go on while peers train (sync.overlap).")] = False,
    jobs: Annotated[int | None, typer.Option(help="Seeds run at the same time. Default: one a core.")] = None,
    event_log: Annotated[Path | None, typer.Option(help="Write the event log of a single seed to this file.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder of the processes' run-dirs; must be new.")] = Path("runs/simulate"),
    config: Annotated[Path | None, typer.Option(help="Campaign file of the processes. Default: a tiny one is made.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a swarm on this machine under faults, and check its invariants. Exit code 1 if one was broken."""
    if virtual == processes:
        raise UserError("simulate: give one of --virtual and --processes")
    from spes_p2p.testing.simulate.command import simulate_processes, simulate_virtual

    options = {
        "peers": peers, "rounds": rounds, "fault_rate": fault_rate,
        "kinds": faults.split(",") if faults is not None else None, "points": points.split(",") if points is not None else None,
        "overlap": overlap or None,
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
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    as_json: AsJson = False,
) -> None:
    """Say whether this machine can train in a campaign, and what to mend. Exit code 1 if something must be mended."""
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(run_dir=run_dir, device=device, listen=listen, announce=announce)
    _log("error", False)
    with _waiting("examining this machine and the way to the swarm"):
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
    addresses: Addresses,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free one.")] = 8700,
    host: Annotated[str, typer.Option(help="Address to serve it on; 0.0.0.0: every interface.")] = "127.0.0.1",
) -> None:
    """Show a running swarm as a web page that stays live. Ctrl-C ends it."""
    _log("warning", False)
    with _waiting("starting") as end_waiting:
        from spes_p2p.client.dashboard.server import run_dashboard

        def show(url: str) -> None:
            end_waiting()
            print(f"dashboard on {url}", flush=True)

        _run(run_dashboard(addresses, host, port, show))


@app.command()
def plan(
    config: ConfigFile,
    memory: Annotated[str, typer.Option(help="Memory of the GPU: 24GiB, 24GB.")],
    bandwidth: Annotated[str, typer.Option(help="Of the internet link, each way: 100mbit, 1gbit.")] = "100mbit",
    peers: Annotated[int | None, typer.Option(help="Peers alike in the swarm. Default: enough to train all experts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits on a GPU, and what a peer needs of host memory, disk and link. Allocates nothing."""
    from spes_p2p.config.campaign import load_campaign_config
    from spes_p2p.config.quantities import parse_bits_per_second, parse_bytes

    memory_bytes, line = parse_bytes(memory, "--memory"), parse_bits_per_second(bandwidth, "--bandwidth")
    campaign = load_campaign_config(config)
    from spes_p2p.campaign.plan_table import plan_json, render_plan
    from spes_p2p.campaign.planner import Device, plan_peer

    made = plan_peer(campaign, Device("cuda", memory_bytes), line, peers, "--memory")
    if as_json:
        print(json.dumps(plan_json(made), indent=2))
    else:
        Console().print(render_plan(made))


@app.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help=".jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt files.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json")],
    output: Annotated[Path, typer.Option(help="Folder of the token files and their manifest.")],
    prefix: Annotated[str, typer.Option(help="Start of the files' names.")] = "",
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    text_field: Annotated[str, typer.Option(help="Field of the text in JSON and Parquet.")] = "text",
    shard_tokens: Annotated[int | None, typer.Option(help="Tokens in one file at most.")] = None,
    url: Url = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files that are there.")] = False,
) -> None:
    """Turn text into token files and a manifest."""
    from spes_p2p.data import tokenizing
    from spes_p2p.data.manifest import MANIFEST_NAME

    if shard_tokens is not None and shard_tokens < 1:
        raise UserError(f"--shard-tokens {shard_tokens}: a file holds at least one token; give a positive number")
    with _ProgressBar("tokenizing") as update:
        manifest = tokenizing.tokenize(
            inputs, tokenizer, output, eos_token=eos_token, text_field=text_field, prefix=prefix, overwrite=overwrite,
            shard_tokens=shard_tokens or tokenizing.DEFAULT_SHARD_TOKENS, url=url,
            on_progress=lambda p: update(p.bytes_done, p.bytes_total),
        )
    print(f"{manifest.tokens} tokens in {len(manifest.files)} files: {output / f'{prefix}{MANIFEST_NAME}'}")


@app.command()
def describe(
    files: Annotated[list[Path], typer.Argument(help="Token files that exist already (SPES, OLMo).")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json they were made with.")],
    manifest: Annotated[Path, typer.Option(help="Manifest to write.")],
    eos_token: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    dtype: Annotated[str | None, typer.Option(help="uint16 or uint32. Default: detected.")] = None,
    url: Url = None,
) -> None:
    """Write a manifest for token files that exist already."""
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
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint; must not exist.")],
    run_dir: Annotated[Path | None, typer.Option(help="Run-dir of a peer.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", help="A round that the run-dir's archive keeps.")] = None,
    addresses: FromAddresses = None,
    push_to: Annotated[str | None, typer.Option(help="Upload it to this repository of the Hub: OWNER/NAME.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository private when it is new.")] = False,
) -> None:
    """Write a committed base as a Hugging Face checkpoint with a model card: of a run-dir, or of a running swarm."""
    if (run_dir is None) == (not addresses):
        raise UserError("export: give either --run-dir of a peer or --from with an address of the swarm")
    if output.exists():
        raise UserError(f"{output}: exists already; give another output directory or remove it")
    if round_number is not None and run_dir is None:
        raise UserError("export: --round is looked for in an archive; give the --run-dir of a bootstrap peer")
    with _waiting("starting"):
        from spes_p2p.client.export import from_run_dir, push_to_hub

    made = from_run_dir(run_dir, round_number) if run_dir is not None else _download_base(addresses or [])
    made.write(output)
    print(f"base of round {made.origin.round} (digest {made.origin.digest[:12]}): {output}")
    if push_to is not None:
        print(push_to_hub(output, push_to, private))


@app.command()
def evaluate(
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, separated by commas.")],
    model_dir: Annotated[Path | None, typer.Argument(help="A Hugging Face checkpoint.")] = None,
    addresses: FromAddresses = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt. Default: the task's own number.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of task definitions of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task at most.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Write the results to this file as JSON.")] = None,
) -> None:
    """Evaluate a checkpoint, or the newest base of a running swarm, with lm-eval."""
    from spes_p2p.client import evaluate as evaluation

    if (model_dir is None) == (not addresses):
        raise UserError("evaluate: give either a checkpoint folder or --from with an address of the swarm")
    evaluation.check_options(num_fewshot, limit, device)
    named = [task for task in tasks.split(",") if task]
    with tempfile.TemporaryDirectory(prefix="spes-evaluate-") as folder:
        origin = {}
        if model_dir is None:
            made, model_dir = _download_base(addresses or []), Path(folder) / "checkpoint"
            made.write(model_dir)
            origin = {"model": made.files.campaign.config.name, "round": made.origin.round, "digest": made.origin.digest}
        results = {**evaluation.evaluate(model_dir, named, num_fewshot, include_path, limit, device), **origin}
    text = json.dumps(results, indent=2)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    print(text)


def _download_base(addresses: list[str]) -> Exportable:
    _log("warning", False)
    with _waiting("starting"):
        from spes_p2p.client.export import from_swarm

    with _ProgressBar("downloading the base") as update:
        made: Exportable = _run(from_swarm(addresses, update))
    return made


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run on uvloop."""
    import uvloop

    uvloop.install()
    return asyncio.run(work)


class _ProgressBar:
    """A progress bar for a person, nothing otherwise; gives `update(done, total)`."""

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
    """Say to a person at a terminal that something is under way; gives what ends that before the block does."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with console.status(for_what) as status:
        yield status.stop


def _log(level: str, as_json: bool) -> None:
    from spes_p2p.observe.log import setup_logging

    setup_logging(level, as_json)


def _number_or_word(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else text


def _rate(text: str | None, option: str) -> float | None:
    from spes_p2p.config.quantities import parse_bits_per_second

    return None if text is None else parse_bits_per_second(text, option)
