"""Summarize the runs of a simulation: figures for `--json`, lines for a person, and the commands that replay violations."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spes_p2p.testing.simulate.audit import Figures, Violation


@dataclass(frozen=True)
class RunReport:
    """Result of one run: one seed of the virtual form, or one run of processes."""

    seed: int
    figures: Figures
    violations: tuple[Violation, ...]
    faults: dict[str, int]
    """Faults that struck, by kind."""
    points: dict[str, int]
    """The same by point."""
    orphan_processes: int = 0
    virtual_s: float = 0.0
    control_bytes: int = 0
    """Maximum number of bytes that one peer sent in one round besides parts and pieces of a base (virtual form)."""
    log: tuple[str, ...] = field(default=(), repr=False)
    """The event log (virtual form)."""

    @property
    def log_sha256(self) -> str:
        """Hex digest of the event log: equal logs are equal runs."""
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()


def summary(form: str, peers: int, runs: Sequence[RunReport], seconds: float, replay: str) -> dict[str, Any]:
    """Return the document of `--json`. `replay`: the command that runs one seed again, without the seed."""
    figures: dict[str, Any] = {}
    for each in fields(Figures):
        values = [getattr(run.figures, each.name) for run in runs]
        if isinstance(values[0], list):
            figures |= _spread(each.name, (value for of_run in values for value in of_run))
        else:
            figures[each.name] = sum(values)
    violations = [
        {"seed": run.seed, **asdict(violation), "replay": f"{replay} --seed {run.seed}"}
        for run in runs
        for violation in run.violations
    ]
    return {
        "form": form,
        "peers": peers,
        "seeds": len(runs),
        **figures,
        "invariant_violations": len(violations),
        "orphan_processes": sum(run.orphan_processes for run in runs),
        "faults": _sum(run.faults for run in runs),
        "faults_at": _sum(run.points for run in runs),
        "seconds": round(seconds, 1),
        "rounds_per_s": round(figures["rounds_committed"] / seconds, 1) if seconds > 0 else 0.0,
        "violations": violations,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the summary in lines for a person."""
    faults = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items()) or "none"
    shown = [
        f"{found['rounds_committed']} rounds committed by {found['peers']} peers in {found['seeds']} runs, "
        f"{found['rounds_retried']} of them retried ({found['seconds']:.0f} s)",
        f"faults: {faults}",
        f"digest mismatches {found['digest_mismatches']}, orphan processes {found['orphan_processes']}, "
        f"tokens lost {found['work_lost_tokens']} of {found['tokens_trained']} trained",
    ]
    for name, unit in (
        ("exclude_s", "s until a lost peer delays no round"), ("reown_rounds", "rounds until its experts have new owners"),
        ("joiner_first_contribution_s", "s until a joiner's first tokens are included"),
    ):
        if found[f"{name}_max"] is not None:
            shown.append(f"{found[f'{name}_median']:g} (worst {found[f'{name}_max']:g}) {unit}")
    shown.append(f"invariant violations: {found['invariant_violations']}")
    for each in found["violations"][:20]:
        shown.append(f"seed {each['seed']}, {each['time_s']:.1f} s: {each['rule']}: {each['detail']}")
        shown.append(f"    replay: {each['replay']}")
    return shown


def _spread(name: str, values: Iterable[float]) -> dict[str, float | None]:
    """Return median and maximum; None without values."""
    known = sorted(values)
    return {
        f"{name}_median": round(statistics.median(known), 3) if known else None,
        f"{name}_max": round(known[-1], 3) if known else None,
    }


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))
