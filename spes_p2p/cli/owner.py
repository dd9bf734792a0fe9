"""Commands of a campaign's owner: init, plan, bootstrap, control, audit, invite."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import ProgressBar, ended_by_signals, run, run_peer, say, waiting
from spes_p2p.config.addresses import is_peer_id
from spes_p2p.errors import UserError
from spes_p2p.observe.log import setup_logging
from spes_p2p.storage.files import write_whole


@ended_by_signals()
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
    line: Annotated[str | None, typer.Option(
        help="Internet lines of the trainers, each way: 20mbit, 100mbit. Chooses phase length and codecs for GPUs of 24 GB, as "
             "`plan` does (docs/campaign.md). Default: those of the size.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the campaign. Default: name of the folder.")] = None,
    admission: Annotated[str, typer.Option(help="Who may take part: friends, invite or open.")] = "friends",
    url: options.Url = None,
    checkpoint: Annotated[str | None, typer.Option(
        "--from", help="Existing weights to start from: folder or Hub name (OWNER/NAME) of a Hugging Face checkpoint.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts to make of a dense checkpoint's MLP in each layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts that each token is routed to (--experts). Default: 2.")] = None,
    upcycle: Annotated[str | None, typer.Option(
        help="How --experts makes them: copy, drop or spes (docs/upcycling.md). Default: copy.")] = None,
) -> None:
    """Create a campaign: a commented config file, token files and a tokenizer. Asks for missing answers on a terminal."""
    from spes_p2p.campaign.answers import Answers
    from spes_p2p.campaign.init import CAMPAIGN_YAML, ask, check_choices, make_campaign, make_start, parse_answer, parse_texts
    from spes_p2p.data.documents import check_text_files

    setup_logging("warning", False)
    asks = sys.stdin.isatty() and not text
    name = name or folder.resolve().name
    check_choices(folder, name, admission, peers, epochs, url)
    given = parse_answer("tokenizer", tokenizer) if tokenizer else None
    bits_per_second = options.line_limit(line, "--line")
    texts, sources = parse_texts(text or ())
    check_text_files((*texts, *(held_out or ())))  # before a checkpoint is downloaded
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
        line=bits_per_second,
    )
    with ProgressBar("tokenizing", "training the tokenizer" if isinstance(answers.tokenizer, int) else "") as update:
        made = make_campaign(answers, lambda p: update(p.bytes_done, p.bytes_total))
    from spes_p2p.campaign.plan_table import describe_size

    path = folder / CAMPAIGN_YAML
    print(f"{path}: {describe_size(made.campaign.config)}, {made.training_manifest.tokens} tokens of text")
    if admission == "open":
        print("let a trainer of your own vouch for the others' work: invite it as an elector (docs/admission.md)")
    print(f"spes-p2p bootstrap --config {shlex.quote(str(path))} --listen /ip4/0.0.0.0/tcp/31337 "
          "--announce /ip4/YOUR.PUBLIC.IP/tcp/31337")


def bootstrap(
    config: options.ConfigFile,
    run_dir: options.RunDir = Path("runs/bootstrap"),
    peer: Annotated[
        list[str] | None, typer.Option(help="Address of another bootstrap peer; repeatable.", callback=options.checked_peers)
    ] = None,
    archive_every: Annotated[int | None, typer.Option(help="Archive the base every N rounds; 0: never. Default: 50.")] = None,
    archive_keep: Annotated[int | None, typer.Option(help="Number of archived bases to keep. Default: 2.")] = None,
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
    """Start a campaign: publish its files, create base 0, vote on rounds. Prints the command with which volunteers join.

    With --peer: add another bootstrap peer to a running campaign, from the same files.
    """
    from spes_p2p.campaign.files import read_campaign
    from spes_p2p.config.campaign import make_peer_config

    settings = make_peer_config(
        run_dir=run_dir, listen=listen, announce=announce, invite=invite, identity=identity, metrics_port=metrics_port,
        metrics_host=metrics_host, tracker=tracker, log_level=log_level,
        max_upload=options.line_limit(max_upload, "--max-upload"),
        max_download=options.line_limit(max_download, "--max-download"),
        archive_every=archive_every, archive_keep=archive_keep,
        evaluate_tasks=evaluate_tasks or None, include_path=include_path,
    )
    options.check_invitation(invite)
    files = read_campaign(config)
    setup_logging(settings.log_level, log_json)
    with waiting("starting"):
        from spes_p2p.session.run import run_bootstrap

    def show(address: str) -> None:
        write_whole(run_dir / "address", f"{address}\n".encode())
        say(f"spes-p2p join {address}", log_json)

    run_peer(run_bootstrap(files, settings, peer or (), show))


AddressOrRunDir = Annotated[str, typer.Argument(
    metavar="ADDRESS|RUN_DIR", help="Address of any peer, or run-dir of a peer that runs on this machine.")]


def control(
    target: AddressOrRunDir,
    key: Annotated[Path, typer.Option(help="The owner's key: identity.key of the bootstrap peer that started the campaign.")],
    order: Annotated[
        list[str],
        typer.Argument(
            metavar="ORDER...",
            help="pause, resume, stop, rollback ROUND, schedule ROUND NAME=VALUE..., schedule ROUND (takes that back), require "
                 "PROTOCOL from ROUND, require none, ban PEER, unban PEER, pardon PEER, audit PEER, unaudit PEER",
        ),
    ],
) -> None:
    """Pause, resume, stop or roll back your campaign, change its schedule, ban or pardon a peer, require a newer protocol."""
    from spes_p2p.campaign.orders import parse_order
    from spes_p2p.consensus.control import TAKEN_BACK

    own, addresses = options.own_or_addresses([target])
    make = parse_order(order)
    setup_logging("warning", False)
    with waiting("looking for the swarm"):
        from spes_p2p.client.owner import give_order

        given = run(give_order(addresses, key, make, own.spare_addresses if own else ()))
    accepted = f"{given.accepted} of {given.peers} peers have order {given.control.number}"
    when = "is decided" if order[0] in ("schedule", "require") else "takes effect"
    taken_back = f", instead of {given.revoked}, which had no effect yet" if given.revoked else ""
    news = given.news if given.news.startswith(TAKEN_BACK) else f"ordered: {given.news or 'as before'}"
    print(f"{news}{taken_back}; {accepted}; it {when} with the first round committed after round {given.round}")
    if given.unreached:
        print(f"note: {given.unreached}")


def audit(
    target: AddressOrRunDir,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Whole id of the peer, as status --json shows it.")],
    as_json: options.AsJson = False,
) -> None:
    """Show what auditors of an open campaign found when they trained a peer's phases again.

    Exits with code 1 if it failed the last audit or gets no work, with 2 if there is none.
    """
    own, addresses = options.own_or_addresses([target])
    if not is_peer_id(peer):
        raise UserError(f"audit: {peer!r} is no peer's id; give the whole id, as spes-p2p status --json shows it: Qm...")
    setup_logging("warning", False)
    with waiting("looking for the swarm"):
        from spes_p2p.client.audit import fetch_audits, render_audits
        from spes_p2p.observe.json_values import to_json

        found = run(fetch_audits(addresses, peer, own.spare_addresses if own else ()))
    if as_json:
        print(json.dumps({**to_json(found), "passed": found.passed}, indent=2))
    else:
        from rich.console import Console

        Console().print(render_audits(found))
    raise typer.Exit(0 if found.passed else 1)


def invite(
    target: Annotated[str, typer.Argument(metavar="ADDRESS|RUN_DIR", help="Address of a peer, or a run-dir of the campaign.")],
    key: Annotated[Path, typer.Option(help="The owner's key: identity.key of the bootstrap peer that started the campaign.")],
    peer: Annotated[str | None, typer.Option(
        help="Id of the peer that may use it (spes-p2p identity). Default: whoever holds the invitation.")] = None,
    roles: Annotated[str, typer.Option(help="trainer; trainer,elector; or helper. The last two need --peer.")] = "trainer",
    expires: Annotated[str, typer.Option(help="How long it holds: 90m, 12h, 30d.")] = "30d",
) -> None:
    """Invite a peer to your campaign: print the text for its `--invite`."""
    from spes_p2p.campaign.invitations import describe, parse_guest, to_text
    from spes_p2p.config.quantities import parse_seconds

    guest = parse_guest(peer, roles, parse_seconds(expires, "--expires"))
    setup_logging("warning", False)
    with waiting("looking for the campaign"):
        from spes_p2p.client.invite import make_invitation

        made, is_banned = run(make_invitation(target, key, guest))
    print(f"invitation {describe(made)}", file=sys.stderr)
    if is_banned:
        print(f"note: you banned this peer; it is refused until spes-p2p control lifts that: unban {peer}", file=sys.stderr)
    print(to_text(made))


def plan(
    config: options.ConfigFile,
    memory: Annotated[str, typer.Option(help="Memory of a GPU: 24GiB, 24GB.")],
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of the internet link, each way: 100mbit, 1gbit.")] = "100mbit",
    leave_free: options.LeaveFree = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the peer, each with this memory.")] = 1,
    peers: Annotated[int | None, typer.Option(
        help="Identical peers in the swarm. Default: enough to train all experts.")] = None,
    tokens_per_second: Annotated[float | None, typer.Option(
        min=1, max=1e9, help="Measured speed of one peer, as its log says. Default: an estimate for a consumer card.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what fits on a GPU, and how much host memory, disk and bandwidth a peer needs. Allocates nothing.

    A second table has the phase length and codecs that suit lines of several speeds (docs/campaign.md).
    """
    from spes_p2p.config.campaign import load_campaign_config
    from spes_p2p.config.model import TransformersModel
    from spes_p2p.config.quantities import parse_bytes

    memory_bytes, line = parse_bytes(memory, "--memory"), options.bandwidth(bandwidth, "--bandwidth")
    campaign = load_campaign_config(config)
    if isinstance(campaign.model, TransformersModel):
        from spes_p2p.model.families import check_family  # with torch: takes seconds

        check_family(campaign.model)
    from spes_p2p.campaign.lines import LINES_BITS, assumption, paces, seconds_of_a_step
    from spes_p2p.campaign.plan_table import pace_json, plan_json, render_lines, render_plan
    from spes_p2p.campaign.planner import plan_peer
    from spes_p2p.campaign.room import Device, check_ranks

    check_ranks(campaign, gpus, f"--gpus {gpus}")
    device = Device("cuda", memory_bytes, gpus).leaving(options.spare(leave_free))
    made = plan_peer(campaign, device, line, peers, "--memory")
    step_s = seconds_of_a_step(campaign, made.choice, tokens_per_second)
    chosen = paces(campaign, made.choice.setup.owned, made.traffic.peers, step_s, sorted({*LINES_BITS, line}))
    if as_json:
        print(json.dumps({**plan_json(made), "lines": [pace_json(pace) for pace in chosen]}, indent=2))
    else:
        from rich.console import Console

        Console().print(render_plan(made))
        Console().print(render_lines(made.campaign, chosen, assumption(tokens_per_second)))
