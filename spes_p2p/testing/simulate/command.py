"""`spes-p2p simulate`: run a simulation with the given options."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from spes_p2p.campaign.files import read_campaign
from spes_p2p.errors import UserError
from spes_p2p.observe.units import counted
from spes_p2p.storage.files import require_place
from spes_p2p.testing.simulate.report import RunReport, lines, summary
from spes_p2p.testing.simulate.scenario import OPTIONS, Scenario, load_scenario, runs_of
from spes_p2p.testing.simulate.virtual import run_seeds

UNATTACKED, SEATED = "unattacked", "seated"
"""Folder of the run that attacked ones are compared with."""
Progress = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]
"""Shows how many rounds of how many are done, after these words."""


def simulate_virtual(
    path: Path | None, options: Mapping[str, Any], seeds: range, jobs: int | None, config: Path | None, event_log: Path | None,
    progress: Progress,
) -> tuple[dict[str, Any], list[str]]:
    """Run the seeds; return the summary, and its lines for a person. Raises UserError."""
    if not seeds:
        raise UserError(f"--seeds {len(seeds)}: give at least 1")
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: give at least 1")
    if event_log is not None and len(seeds) > 1:
        raise UserError(f"--event-log {event_log}: holds one run; give --seeds 1 with it")
    scenario = replace(load_scenario(path, options), config=config)
    if config is not None and not scenario.attackers:
        raise UserError(f"--config {config}: virtual peers train a model only with attackers; give --attackers too, or omit it")
    if config is not None:
        from spes_p2p.testing.simulate.language import settings_of  # importing torch takes seconds

        settings_of(config)
    if event_log is not None and scenario.attackers:
        raise UserError(f"--event-log {event_log}: holds one run; attackers take two or more of a seed, so leave them out")
    if event_log is not None and not (event_log.is_fifo() or event_log.is_char_device()):
        require_place(event_log, "--event-log")
    started = time.monotonic()
    with progress(_what(len(seeds), scenario)) as update:
        found = run_seeds(scenario, seeds, jobs or os.cpu_count() or 1, update)
    if event_log is not None:
        _write(event_log, found[0].log)
    replay = partial(_replay, "--virtual", path, {**options, "config": config})
    made = summary("virtual", len(scenario.peer_names), found, time.monotonic() - started, replay)
    made |= _totals(found)
    return made, lines(made)


def _totals(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Return what only the virtual form measures: seconds of all runs together, and of the rest the most of any run."""
    control, control_median, registry = (
        [max(values) for values in zip(*(getattr(run, name) for run in runs), strict=True)]
        for name in ("control_bytes", "control_bytes_median", "registry_bytes_per_min")
    )
    most = ("relayed_bytes", "connections_max", "connections_max_trainer", "connections_median")
    return {
        "virtual_s": round(sum(run.virtual_s for run in runs), 1),
        "control_bytes_max": control[0],
        "control_bytes_median": control_median[0],
        "control_received_bytes_max": control[1],
        "control_received_bytes_median": control_median[1],
        "sent_bytes_per_round_median": max(run.sent_bytes_per_round for run in runs),
        "registry_sent_bytes_per_min_max": registry[0],
        "registry_received_bytes_per_min_median": registry[1],
        **{name: max(getattr(run, name) for run in runs) for name in most},
        "cpu_s": round(sum(run.cpu_s for run in runs), 1),
        "memory_peak_bytes": max(run.memory_peak_bytes for run in runs),
        "log_sha256": runs[0].log_sha256 if len(runs) == 1 else None,
    }


def simulate_processes(
    path: Path | None, options: Mapping[str, Any], seed: int, config: Path | None, run_dir: Path, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    """Run real processes, with attackers once for each kind; return the summary, and its lines for a person.

    Raises UserError.
    """
    # Only real processes need hivemind and torch, whose imports take seconds.
    from spes_p2p.client.local_swarm import check_memory
    from spes_p2p.testing.simulate.campaign_files import write_campaign
    from spes_p2p.testing.simulate.process_injector import possible
    from spes_p2p.testing.simulate.processes import run_processes

    wanted = load_scenario(path, options)
    scenario = possible(wanted)
    if config is not None:
        read_campaign(config)
    if config is not None and scenario.overlap:
        raise UserError(f"--config {config}: the campaign file sets sync.overlap; omit --overlap")
    if config is not None and scenario.admission != "friends":
        raise UserError(f"--config {config}: the campaign file sets admission; omit --admission")
    if config is not None and options.get("audited_share") is not None:
        raise UserError(f"--config {config}: the campaign file sets sync.audited_share; omit --audited-share")
    check_memory(len(scenario.peer_names), psutil.virtual_memory().available)
    started = time.monotonic()
    folder = run_dir.with_name(f"{run_dir.name}-campaign")
    campaign = config or write_campaign(folder, scenario, seed)
    planned, found = runs_of(scenario), list[tuple[RunReport, list[dict[str, float]]]]()
    with progress(_what(1, scenario)) as update:

        def on_round(number: int, rounds: int) -> None:
            update(len(found) * rounds + number, len(planned) * rounds)

        for each in planned:
            place = run_dir / (each.attack or (SEATED if each.seated else UNATTACKED)) if scenario.attackers else run_dir
            found.append(run_processes(each, campaign, place, seed, on_round))
    replay = partial(_replay, "--processes", path, options)
    made = summary("processes", len(scenario.peer_names), [run for run, _ in found], time.monotonic() - started, replay)
    made["val_losses"] = found[0][1]
    if scenario.attackers:
        made["attacks_left_out"] = [kind for kind in wanted.attacks if kind not in scenario.attacks]
    (run_dir / "summary.json").write_text(json.dumps(made, indent=2) + "\n")
    return made, lines(made)


def _what(seeds: int, scenario: Scenario) -> str:
    """Say where the number of all rounds comes from."""
    return f"simulating {counted(seeds * len(runs_of(scenario)), 'run')} of {counted(scenario.rounds, 'round')}"


def _replay(form: str, path: Path | None, options: Mapping[str, Any], run: RunReport) -> str:
    """Return the command that repeats a run."""
    if run.attacked is not None and run.attacked.attack is not None:
        options = {**options, "attacks": [run.attacked.attack]}
    words = ["spes-p2p", "simulate", form, *([str(path)] if path is not None else [])]
    for name, value in options.items():
        if value is not None:
            option = OPTIONS.get(name, name).replace("_", "-")
            shown = ",".join(value) if isinstance(value, list) else str(value)
            words += [f"--{option}"] if value is True else [f"--{option}", shown]
    return shlex.join([*words, "--seed", str(run.seed)])


def _write(path: Path, log: Sequence[str]) -> None:
    try:
        path.write_text("\n".join(log) + "\n")
    except OSError as error:
        raise UserError(f"--event-log {path}: cannot be written ({error.strerror}); name another file") from None
