"""Puts the runs of a simulation together: figures for `--json`, lines for a person, and how to replay what went wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spes_p2p.testing.simulate.audit import Figures, Violation


@dataclass(frozen=True)
class RunReport:
    """One run: of a seed in the virtual form, or of real processes."""

    seed: int
    figures: Figures
    violations: tuple[Violation, ...]
    faults: dict[str, int]
    points: dict[str, int]
    orphan_processes: int = 0


def summary(form: str, peers: int, runs: Sequence[RunReport], seconds: float, replay: str) -> dict[str, Any]:
    """What `--json` prints. `replay`: the command that runs one seed again, but for the seed."""
    figures = [run.figures for run in runs]
    rounds = sum(each.rounds_committed for each in figures)
    violations = [
        {"seed": run.seed, **asdict(violation), "replay": f"{replay} --seed {run.seed}"}
        for run in runs
        for violation in run.violations
    ]
    return {
        "form": form,
        "peers": peers,
        "seeds": len(runs),
        "rounds_committed": rounds,
        "rounds_retried": sum(each.rounds_retried for each in figures),
        "attempts_failed": sum(each.attempts_failed for each in figures),
        "digest_mismatches": sum(each.digest_mismatches for each in figures),
        "invariant_violations": len(violations),
        "orphan_processes": sum(run.orphan_processes for run in runs),
        "repairs": sum(each.repairs for each in figures),
        "reforms": sum(each.reforms for each in figures),
        **_spread("exclude_s", (value for each in figures for value in each.exclude_s)),
        **_spread("no_majority_s", (value for each in figures for value in each.no_majority_s)),
        **_spread("reown_rounds", (value for each in figures for value in each.reown_rounds)),
        **_spread("joiner_first_contribution_s", (value for each in figures for value in each.joiner_first_contribution_s)),
        **_spread("round_s", (value for each in figures for value in each.round_s)),
        "tokens_trained": sum(each.tokens_trained for each in figures),
        "tokens_included": sum(each.tokens_included for each in figures),
        "work_lost_tokens": sum(each.work_lost_tokens for each in figures),
        "tokens_dropped": sum(each.tokens_dropped for each in figures),
        "faults": dict(sorted(_sum(run.faults for run in runs).items())),
        "faults_at": dict(sorted(_sum(run.points for run in runs).items())),
        "seconds": round(seconds, 1),
        "rounds_per_s": round(rounds / seconds, 1) if seconds > 0 else 0.0,
        "violations": violations,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a person."""
    faults = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items()) or "none"
    shown = [
        f"{found['rounds_committed']} rounds committed by {found['peers']} peers in {found['seeds']} runs, "
        f"{found['rounds_retried']} of them retried ({found['seconds']:.0f} s)",
        f"faults: {faults}",
        f"digest mismatches {found['digest_mismatches']}, orphan processes {found['orphan_processes']}, "
        f"tokens lost {found['work_lost_tokens']} of {found['tokens_trained']} trained",
    ]
    for name, unit in (
        ("exclude_s", "s until a lost peer holds nobody up"), ("reown_rounds", "rounds until its experts have new owners"),
        ("joiner_first_contribution_s", "s until a joiner's first tokens are in"),
    ):
        if found[f"{name}_max"] is not None:
            shown.append(f"{found[f'{name}_median']:g} (worst {found[f'{name}_max']:g}) {unit}")
    shown.append(f"invariant violations: {found['invariant_violations']}")
    for each in found["violations"][:20]:
        shown.append(f"seed {each['seed']}, {each['time_s']:.1f} s: {each['rule']}: {each['detail']}")
        shown.append(f"    replay: {each['replay']}")
    return shown


def _spread(name: str, values: Iterable[float]) -> dict[str, float | None]:
    """Median and maximum; None where nothing was measured."""
    known = sorted(values)
    return {
        f"{name}_median": round(statistics.median(known), 3) if known else None,
        f"{name}_max": round(known[-1], 3) if known else None,
    }


def _sum(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
