"""Summarize the runs of a simulation: figures for `--json`, lines for a person, and the commands that replay violations."""

from __future__ import annotations

import hashlib
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spes_p2p.messages.consensus import Commit
from spes_p2p.observe.units import counted
from spes_p2p.rounds.audits import convicted_in
from spes_p2p.testing.attacks.kinds import AttackKind
from spes_p2p.testing.simulate.audit import Figures, Violation


@dataclass(frozen=True)
class Attacked:
    """What an attack did in one run, or the same figures of the run without attack."""

    attack: AttackKind | None
    loss: float | None
    """Held-out loss of the base of the scenario's last round, in nats a token; None when it was not reached."""
    memory_bytes: int | None
    """Growth of the resident memory after the first rounds: of the simulating process with all peers, or of the honest peer
    whose processes grew most. None when the run did not get past these rounds."""
    lies: int = 0
    """Lies that attackers told, or attacks that they made; 0 would mean that nothing was tried."""
    attackers_banned: int = 0
    honest_banned: int = 0
    attackers_convicted: int = 0
    """By audits of their training, in any round."""
    honest_failed: int = 0
    """Others that failed an audit, whether or not it convicted them."""
    banned_round: int | None = None
    """The first round whose commit excludes an attacker."""
    are_captured: bool = False
    """Whether the owner of an open campaign vouches for the attackers."""


def found_out(logs: Iterable[Sequence[Commit]], liars: Collection[str]) -> dict[str, Any]:
    """Return the fields of `Attacked` that commits tell. `logs`: those of each honest peer, in order."""
    known = [log for log in logs if log]
    commits = [each for log in known for each in log]
    banned = {peer for log in known for peer in _banned_in(log[-1])}
    convicted = {peer for each in commits for peer in convicted_in(each)}
    failed = {verdict.peer for each in commits for verdict in each.verdicts if not verdict.passed}
    return {
        "attackers_banned": len(banned.intersection(liars)),
        "honest_banned": len(banned.difference(liars)),
        "attackers_convicted": len(convicted.intersection(liars)),
        "honest_failed": len(failed.difference(liars)),
        "banned_round": min((each.round for each in commits if not _banned_in(each).isdisjoint(liars)), default=None),
    }


def _banned_in(commit: Commit) -> set[str]:
    """Return the peers that a commit excludes by proof or by the owner's order."""
    return {*commit.excluded, *(commit.control.banned if commit.control else ())}


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
    control_bytes: tuple[int, int] = (0, 0)
    """Maximum number of bytes that one peer sent, and that one received, in one round besides parts and pieces of a base
    (virtual form)."""
    control_bytes_median: tuple[int, int] = (0, 0)
    """Medians over rounds of what the peer that sent most in a round sent so, and the one that received most received."""
    sent_bytes_per_round: int = 0
    """What the median peer sends in a round, of all kinds other than the registry's, over the whole run (virtual form)."""
    registry_bytes_per_min: tuple[float, float] = (0.0, 0.0)
    """Over the whole run: what the peer that sends most of the registry's records sends, and what the median peer receives
    (virtual form)."""
    relayed_bytes: int = 0
    """What relays passed on for peers that others cannot dial, over the whole run (virtual form)."""
    connections_max: int = 0
    """The most other peers with which one peer had open streams, or exchanged contacts lately, at a time (virtual form)."""
    connections_max_trainer: int = 0
    """The same without the owner's bootstrap peer."""
    connections_median: int = 0
    """The same of the median peer."""
    cpu_s: float = 0.0
    """Processor seconds of this run (virtual form)."""
    memory_peak_bytes: int = 0
    """Most resident memory of the simulating process, in this run or an earlier one (virtual form)."""
    log: tuple[str, ...] = field(default=(), repr=False)
    """The event log (virtual form)."""
    attacked: Attacked | None = None
    """None where the scenario has no attackers."""

    @property
    def log_sha256(self) -> str:
        """Hex digest of the event log: equal logs are equal runs."""
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()


def summary(
    form: str, peers: int, runs: Sequence[RunReport], seconds: float, replay: Callable[[RunReport], str]
) -> dict[str, Any]:
    """Return the document of `--json`. `replay`: the command that repeats a run."""
    figures: dict[str, Any] = {}
    for each in fields(Figures):
        values = [getattr(run.figures, each.name) for run in runs]
        if isinstance(values[0], list):
            figures |= _spread(each.name, (value for of_run in values for value in of_run))
        else:
            figures[each.name] = sum(values)
    times = [seconds for run in runs for seconds in run.figures.round_s]
    figures["round_s_mean"] = round(statistics.mean(times), 3) if times else None
    figures["beyond_training"] = beyond_training(runs) if times else None
    violations = [
        {"seed": run.seed, **asdict(violation), "replay": replay(run)}
        for run in runs
        for violation in run.violations
    ]
    return {
        "form": form,
        "peers": peers,
        "seeds": len({run.seed for run in runs}),
        **figures,
        "invariant_violations": len(violations),
        "orphan_processes": sum(run.orphan_processes for run in runs),
        "faults": _sum(run.faults for run in runs),
        "faults_at": _sum(run.points for run in runs),
        "seconds": round(seconds, 1),
        "rounds_per_s": round(figures["rounds_committed"] / seconds, 1) if seconds > 0 else 0.0,
        "violations": violations,
        **(attack_figures(runs) if runs[0].attacked is not None else {}),
    }


def beyond_training(runs: Iterable[RunReport]) -> float:
    """Return the share of all rounds' seconds that they took beyond the median phase of each."""
    figures = [run.figures for run in runs]
    trained_s = sum(sum(each.training_s) for each in figures)
    return round(1.0 - trained_s / sum(sum(each.round_s) for each in figures), 4)


def attack_figures(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Return what attacks did, by kind and over all kinds.

    Each is compared with the run of the same seed, and with the same seats, without attack.
    """
    known = [(run, run.attacked) for run in runs if run.attacked is not None]
    clean = {(run.seed, each.are_captured): run for run, each in known if each.attack is None}
    by_kind: dict[str, list[tuple[RunReport, RunReport]]] = {}
    for run, each in known:
        if each.attack is not None:
            by_kind.setdefault(each.attack, []).append((run, clean[run.seed, each.are_captured]))
    attacks = {kind: _attack(pairs) for kind, pairs in by_kind.items()}
    return {
        "attacks": attacks,
        "attackers_banned": sum(each["attackers_banned"] for each in attacks.values()),
        "honest_banned": sum(each["honest_banned"] for each in attacks.values()),
        "attackers_convicted": sum(each["attackers_convicted"] for each in attacks.values()),
        "honest_failed": sum(each["honest_failed"] for each in attacks.values()),
        **{
            name: _worst([each[name] for each in attacks.values()])
            for name in ("loss_over_clean", "rounds_delayed_s_max", "memory_over_clean_max")
        },
    }


def _attack(pairs: Sequence[tuple[RunReport, RunReport]]) -> dict[str, Any]:
    """Return the figures of one kind. `pairs`: each attacked run, and the one without attack."""
    ratios, delays, growths, banned, honest = list[float | None](), list[float | None](), list[float | None](), 0, 0
    slower = list[float | None]()
    for run, before in pairs:
        assert run.attacked is not None
        assert before.attacked is not None
        ratios.append(_both(operator.truediv, run.attacked.loss, before.attacked.loss))
        growths.append(_both(operator.sub, run.attacked.memory_bytes, before.attacked.memory_bytes))
        times, times_before = run.figures.round_s, before.figures.round_s
        delays.append(_both(operator.sub, max(times, default=None), max(times_before, default=None)))
        means = (statistics.mean(each) if each else None for each in (times, times_before))
        slower.append(_both(operator.truediv, *means))
        banned += run.attacked.attackers_banned
        honest += run.attacked.honest_banned
    bans = [run.attacked.banned_round for run, _ in pairs if run.attacked is not None]
    return {
        "lies": sum(run.attacked.lies for run, _ in pairs if run.attacked is not None),
        "loss_over_clean": _worst(ratios, 4),
        "rounds_delayed_s_max": _worst(delays),
        "round_s_over_clean": _worst(slower),
        "memory_over_clean_max": _worst(growths),
        "attackers_banned": banned,
        "attackers_banned_round_max": max((number for number in bans if number is not None), default=None),
        "honest_banned": honest,
        "attackers_convicted": sum(run.attacked.attackers_convicted for run, _ in pairs if run.attacked is not None),
        "honest_failed": sum(each.attacked.honest_failed for pair in pairs for each in pair if each.attacked is not None),
        "invariant_violations": sum(len(run.violations) for run, _ in pairs),
    }


def _both(compare: Callable[[float, float], float], one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else compare(one, other)


def _worst(values: Sequence[float | None], digits: int = 3) -> float | None:
    """Return the greatest value; None when one is unknown, since that run may be the worst."""
    known = [value for value in values if value is not None]
    return round(max(known), digits) if known and len(known) == len(values) else None


def lines(found: dict[str, Any]) -> list[str]:
    """Return the summary in lines for a person."""
    faults = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items()) or "none"
    shown = [
        f"{found['rounds_committed']} rounds, with the quiet ones at the end, committed by {found['peers']} peers in "
        f"{counted(found['seeds'], 'run')}, {found['rounds_retried']} of them retried ({found['seconds']:.0f} s)",
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
    for kind, each in found.get("attacks", {}).items():
        ratio, delay_s, grown = (each[name] for name in ("loss_over_clean", "rounds_delayed_s_max", "memory_over_clean_max"))
        loss = "last round not reached" if ratio is None else f"loss {ratio:.3f} of the clean run's"
        slowest = "a run without a round" if delay_s is None else f"slowest round {delay_s:+.1f} s"
        memory = "memory not measured" if grown is None else f"memory {grown / 2**20:+.0f} MiB"
        shown.append(
            f"{kind}: {loss}, {slowest}, {memory}, {each['attackers_banned']} attackers and "
            f"{each['honest_banned']} others banned, {each['attackers_convicted']} and {each['honest_failed']} failed audits"
        )
    if found.get("attacks_left_out"):
        shown.append(f"left out, since they take too many processes: {', '.join(found['attacks_left_out'])}; use --virtual")
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
