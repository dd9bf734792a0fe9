"""Options that several commands have, and what turns their text into values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spes_p2p.config.addresses import EXAMPLE_ADDRESS, check_peer_addresses
from spes_p2p.config.quantities import Spare, parse_bits_per_second, parse_bytes, parse_spare
from spes_p2p.errors import UserError

if TYPE_CHECKING:
    from spes_p2p.session.own_state import OwnState

Url = Annotated[str | None, typer.Option(
    help="URL where you will publish the token files: https://, s3://, gs:// or hf://datasets/OWNER/NAME/...; "
         "volunteers read from it what no peer serves.")]
ConfigFile = Annotated[Path, typer.Option("--config", help="Campaign file (YAML).")]
RunDir = Annotated[Path, typer.Option(help="Folder for the peer's state; a restart with the same folder continues.")]


def checked_peers(addresses: list[str] | None) -> list[str] | None:
    """Return the addresses. Raises UserError if one is no peer's."""
    check_peer_addresses(addresses or ())
    return addresses


Addresses = Annotated[
    list[str], typer.Argument(metavar="ADDRESS...", help="Address of any peer: /ip4/.../p2p/...", callback=checked_peers)
]


def own_or_addresses(targets: list[str]) -> tuple[OwnState | None, list[str]]:
    """Return the state of the running trainer with this run-dir, if one is given, and addresses of its swarm.

    In the run-dir of a bootstrap peer is its address.
    """
    run_dir = Path(targets[0])
    if not run_dir.is_dir():
        if len(targets) == 1 and not targets[0].startswith(("/ip4/", "/ip6/", "/dns")):
            raise UserError(f"'{targets[0]}': no such folder, and not the address of a peer; example: {EXAMPLE_ADDRESS}")
        return None, checked_peers(targets) or []
    from spes_p2p.session.own_state import STATE_FILE, require_running
    from spes_p2p.session.run_dir import ADDRESS_FILE, shown_address

    address = shown_address(run_dir)
    if address is not None and not (run_dir / STATE_FILE).exists():
        if not address:
            raise UserError(f"{run_dir / ADDRESS_FILE}: damaged; start this bootstrap peer again, or give a peer's address")
        return None, [address]
    own = require_running(run_dir)
    return own, list(own.addresses)


def _task_folder(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise UserError(f"--include-path {folder}: no such folder; give the folder of the tasks' YAML files")
    return folder


FromAddresses = Annotated[list[str] | None, typer.Option(
    "--from", metavar="ADDRESS", help="Address of any peer of a running swarm; repeatable.", callback=checked_peers)]
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
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line, to stderr: 2>log.jsonl.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_data_folders(folders: Sequence[Path] | None) -> None:
    """Raise UserError unless what --data-dir gives is there: a misspelt folder would cost a download of the text."""
    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"--data-dir {folder}: no such folder; give a folder with token files, or leave the option out")


def check_identity(given: Path | None) -> None:
    """Raise UserError unless what --identity gives is there: with a misspelt file a volunteer would join as somebody else."""
    if given is not None and not given.exists():
        raise UserError(f"--identity {str(given)!r}: no such file; give your peer's key, or make one with spes-p2p identity "
                        "and the same option")


def check_devices(given: str | None) -> None:
    """Raise UserError unless this machine has the GPUs that --devices names. Only then does it import torch, in seconds."""
    if given is not None and given != "auto" and not given.startswith("cpu"):
        from spes_p2p.campaign.free_memory import choose_devices

        choose_devices(given)


def check_checkpoint(given: Path | None) -> None:
    """Raise UserError unless what the `--from` of `join` gives is there."""
    if given is not None and not given.is_dir():
        raise UserError(f"--from {given}: no such checkpoint folder; give that of the checkpoint that the campaign started "
                        "from, or leave the option out")


def check_invitation(given: str | None) -> None:
    """Raise UserError unless what --invite gives can be read."""
    from spes_p2p.campaign.invitations import read_option

    if given is not None:
        read_option(given)


def byte_count(text: str | None, option: str) -> int | None:
    """Return what the option gives, in bytes."""
    return None if text is None else parse_bytes(text, option)


def spare(text: str | None) -> Spare | None:
    """Return what --leave-free gives."""
    return None if text is None else parse_spare(text, "--leave-free")


def line_limit(text: str | None, option: str) -> float | None:
    """Return `bandwidth` of what the option gives, if it gives any."""
    return None if text is None else bandwidth(text, option)


def bandwidth(text: str, option: str) -> float:
    """Return what the option gives, in bits per second. Raises UserError for less than the slowest line of a peer."""
    from spes_p2p.config.campaign import SLOWEST_LINE_BITS

    bits_per_second = parse_bits_per_second(text, option)
    if bits_per_second < SLOWEST_LINE_BITS:
        raise UserError(f"{option} {text!r}: must be at least {SLOWEST_LINE_BITS / 1e6:g}mbit")
    return bits_per_second
