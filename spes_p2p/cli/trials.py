"""Commands that run whole swarms on this machine: swarm, simulate."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from spes_p2p.cli import options
from spes_p2p.cli.terminal import ProgressBar, ended_by_signals, run, waiting
from spes_p2p.config.yaml_file import read_yaml_mapping
from spes_p2p.errors import UserError
from spes_p2p.observe.log import setup_logging


@ended_by_signals()
def swarm(
    config: options.ConfigFile,
    peers: Annotated[int, typer.Option(help="Number of trainers.")],
    run_dir: Annotated[Path, typer.Option(help="Folder for the run-dirs of all peers.")] = Path("runs/swarm"),
    rounds: Annotated[int | None, typer.Option(help="Stop after this many rounds. Default: the whole campaign.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a bootstrap peer and trainers on this machine. Exits with code 1 if a peer fails or digests differ."""
    from spes_p2p.client.local_swarm import closing_line, is_good, run_swarm

    setup_logging("warning", False)
    with waiting("starting the peers") as end_waiting:
        summary = run(run_swarm(config, peers, run_dir, rounds, end_waiting))
    if as_json:
        print((run_dir / "summary.json").read_text(), end="")
    else:
        print(f"{closing_line(summary)}; {run_dir}/summary.json")
        for name in summary.failed_peers:
            print(f"{name} failed: see {run_dir / name / 'log.txt'}")
    raise typer.Exit(0 if is_good(summary) else 1)


@ended_by_signals()
def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="Scenario file (YAML); the options below override it.")] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="Simulate in this process, in virtual time.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="Run real processes; takes minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="Number of runs, each with its own seed (--virtual).")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="First seed; runs with equal seeds are identical.")] = 0,
    peers: Annotated[int | None, typer.Option(help="Number of trainers at the start.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds per run with faults; a few quiet ones follow.")] = None,
    fault_rate: Annotated[float | None, typer.Option(help="Probability of a random fault per round, 0 to 1.")] = None,
    faults: Annotated[str | None, typer.Option(help="Kinds of random faults, comma-separated. Default: all.")] = None,
    points: Annotated[str | None, typer.Option(help="Points where random faults occur, comma-separated. Default: all.")] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="Overlap rounds with training (sync.overlap).")] = False,
    churn: Annotated[float | None, typer.Option(help="Peers come and go like volunteers; seconds of a day.")] = None,
    attackers: Annotated[int | None, typer.Option(help="How many of the trainers attack; less than half.")] = None,
    attacks: Annotated[str | None, typer.Option(help="Kinds of attacks, comma-separated, or all: a run for each.")] = None,
    admission: Annotated[str | None, typer.Option(help="Who may join: friends (default) or open.")] = None,
    audited_share: Annotated[float | None, typer.Option(
        help="Share of the phases that audits draw with --admission open. Default: half, since runs are short.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Seeds to run in parallel. Default: one per core.")] = None,
    event_log: Annotated[Path | None, typer.Option(help="Write the event log of a single seed to this file.")] = None,
    run_dir: Annotated[Path, typer.Option(help="New folder for the processes' run-dirs.")] = Path("runs/simulate"),
    config: Annotated[Path | None, typer.Option(
        help="Campaign file: of the processes, or of what peers train beside --attackers. Default: a small one.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run a swarm on this machine, inject faults and check invariants. Exits with code 1 if an invariant is violated."""
    if scenario is not None:
        read_yaml_mapping(scenario, "scenario file")
    if virtual == processes:
        raise UserError("simulate: give either --virtual or --processes")
    from spes_p2p.testing.simulate.command import simulate_processes, simulate_virtual

    given = {
        "peers": peers, "rounds": rounds, "fault_rate": fault_rate,
        "kinds": faults.split(",") if faults is not None else None, "points": points.split(",") if points is not None else None,
        "overlap": overlap or None, "churn": churn, "attackers": attackers, "admission": admission,
        "audited_share": audited_share,
        "attacks": attacks.split(",") if attacks is not None else None,
    }
    progress = partial(ProgressBar, unit="with the quiet ones at the end")
    if virtual:
        found, text = simulate_virtual(scenario, given, range(seed, seed + seeds), jobs, config, event_log, progress)
    else:
        found, text = simulate_processes(scenario, given, seed, config, run_dir, progress)
    print(json.dumps(found, indent=2) if as_json else "\n".join(text))
    raise typer.Exit(1 if found["invariant_violations"] or found["orphan_processes"] else 0)
