"""./tools/bench round: one round of N = 4 processes on loopback, ours with each codec, hivemind's dense averager, and a gRPC
parameter server equivalent to SPES's: seconds, CPU seconds, bytes, peak memory.

The contenders run in turn, each in its own processes, repeatedly; the first rounds are not measured. A round lasts from the end
of all members' training until the last one has the new base. Hivemind's search for a group is not measured. The parameter
server's clients poll every 0.05 s (SPES's every 20 s). Our run-dirs are in memory (--folder), since four machines would not
share one disk.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import IO, Any

import psutil
from bench_json import parser_of, tell
from round_contenders import EXPERTS, MEMBERS, Report, our_campaign, our_layout, tensor_sizes

from spes_p2p.net.die_with_parent import under_guard

MIXED = "ternary+sparse64"
CODECS: dict[str, Any] = {
    **{name: name for name in ("none", "fp16", "int8", "int4", "sparse")},
    MIXED: {"shared": "ternary", "experts": "sparse64"},
}
"""`sync.codec` by contender."""
UNBOUNDED, UNSIGNED, UNDEFENDED = "unbounded", "unsigned", "undefended"
"""`int4` with `sync.bound_influence: false`, without signatures and checks of reducers, and without all of these."""
DEFENCES: dict[str, dict[str, Any]] = {
    UNBOUNDED: {"sync": {"bound_influence": False}},
    UNSIGNED: {"sync": {}, "signs": False},
    UNDEFENDED: {"sync": {"bound_influence": False}, "signs": False},
}
CONTENDERS = (*CODECS, *DEFENCES, "dense", "server")
BASELINES = ("dense", "server")
WARM_UP, OUR_WARM_UP = dict.fromkeys(BASELINES, 1), 5
"""Our peers keep the results of four rounds, then reuse the files."""
MOST_VISITS = 3
PROGRAM = Path(__file__).with_name("round_contenders.py")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as PNG")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each contender, at least 5 (default 5)")
    parser.add_argument("--megabytes", type=int, default=400, help="fp32 state (default 400)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where run-dirs are made and removed")
    parser.add_argument("--base", choices=("disk", "ram"), default="disk", help="what our peers read the base from")
    arguments = parser.parse_args()
    elements = arguments.megabytes * 10**6 // 4
    measured: dict[str, list[Report]] = {name: [] for name in arguments.only}
    for number in range(arguments.rounds):
        for name in arguments.only:
            measured[name].append(one_visit(name, elements, arguments.folder, arguments.base))
            print(f"{number + 1}/{arguments.rounds} {name}: {one_line(measured[name][-1])}", file=sys.stderr)
    report = summary(measured, elements)
    tell(report, arguments.json)
    if arguments.plot is not None:
        plot(report, arguments.plot)
    return 0


def command_of(program: Path) -> list[str]:
    """Return the command of a process that Ctrl-C does not reach and that the kernel kills when this one dies."""
    guard = under_guard()
    return [*guard, sys.executable, str(program)]


def one_visit(name: str, elements: int, folder: Path, base: str) -> Report:
    """Run unmeasured rounds and a measured one in fresh processes; repeat if a member missed a round on a busy machine."""
    for _ in range(MOST_VISITS):
        try:
            return _visit(name, elements, folder, base)
        except MissedError:
            print(f"{name}: a member missed a round; again", file=sys.stderr)
    raise RuntimeError(f"{name}: no round with all members in {MOST_VISITS} visits")


def _visit(name: str, elements: int, folder: Path, base: str) -> Report:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as place, started(PROGRAM, Path(place)) as start:
        members = MAKERS.get(name, our_members)(partial(start, elements=elements, base=base), name)
        for _ in range(WARM_UP.get(name, OUR_WARM_UP)):
            one_round(members)
        return one_round(members)


class MissedError(Exception):
    """A member started its next phase without committing the round."""


@dataclass
class Process:
    """One contender's process."""

    child: subprocess.Popen[str]
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def stdin(self) -> IO[str]:
        assert self.child.stdin is not None
        return self.child.stdin

    def send(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def next_report(self) -> Report:
        """Return its next report."""
        assert self.child.stdout is not None
        while line := self.child.stdout.readline():
            if line.startswith("{"):
                heard: Report = json.loads(line)
                return heard
        raise RuntimeError(f"{self.spec['kind']} ended early with {self.child.wait()}")


@contextmanager
def started(program: Path, place: Path) -> Iterator[Callable[..., Process]]:
    """Yield a function that starts processes, each with a folder and a log of its own; end them all.

    If one fails, so do the others: they may wait for it for ever.
    """
    processes: list[Process] = []

    def end_with(child: subprocess.Popen[str]) -> None:
        if child.wait():
            for process in processes:
                process.child.terminate()

    def start(kind: str, member: int, before: Sequence[str] = (), **more: Any) -> Process:
        """`before`: a command prefix such as `ip netns exec NAME`."""
        own = place / f"{kind}{member}"
        own.mkdir()
        command = [*before, *command_of(program)]
        with (own / "log").open("w") as log:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        process = Process(child, {"kind": kind, "member": member, "folder": str(own), **more})
        processes.append(process)
        threading.Thread(target=end_with, args=(child,), daemon=True).start()
        process.send(json.dumps(process.spec))
        return process

    try:
        yield start
    except RuntimeError:
        for log in sorted(place.glob("*/log")):
            print(log.parent.name, log.read_text()[-3000:], sep="\n", file=sys.stderr)
        raise
    finally:
        end_all(processes)


def end_all(processes: Iterable[Process]) -> None:
    """Terminate the processes, and kill them after 10 s. Also remove what hivemind leaves: processes and shared memory."""
    children: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            children += psutil.Process(process.child.pid).children(recursive=True)
    for process in processes:
        process.child.terminate()
    for process in processes:
        try:
            process.child.wait(10)
        except subprocess.TimeoutExpired:
            process.child.kill()
            process.child.wait()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    for pid in (*(process.child.pid for process in processes), *(child.pid for child in children)):
        for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
            left.unlink(missing_ok=True)


def rules_of(name: str) -> dict[str, Any]:
    """Return the part of our processes' spec that differs between contenders."""
    return {"codec": "int4", **DEFENCES[name]} if name in DEFENCES else {"codec": CODECS[name], "sync": {}}


def our_members(start: Any, name: str) -> list[Process]:
    rules = rules_of(name)
    first = start("bootstrap", MEMBERS, **rules)
    found = first.next_report()
    return [start("ours", i, addresses=[found["address"]], genesis=found["genesis"], **rules) for i in range(MEMBERS)]


def dense_members(start: Any, name: str) -> list[Process]:
    first = start("dense", 0)
    address = first.next_report()["address"]
    others = [start("dense", i, addresses=[address]) for i in range(1, MEMBERS)]
    for other in others:
        other.next_report()
    return [first, *others]


def server_and_clients(start: Any, name: str) -> list[Process]:
    serving = start("server", 0)
    address = serving.next_report()["address"]
    return [*(start("client", i, addresses=[address]) for i in range(MEMBERS)), serving]


MAKERS: dict[str, Any] = {"dense": dense_members, "server": server_and_clients}


def one_round(members: list[Process]) -> Report:
    for member in members:
        if "trains" in member.next_report():
            member.send("go")
            member.next_report()
    began = monotonic()
    for member in members:
        member.send("go")
    costs = [member.next_report() for member in members]
    if not all("digest" in cost for cost in costs):
        raise MissedError
    peers = [cost for cost in costs if cost["digest"]]
    return {
        "seconds": max(cost["end"] for cost in costs) - began,
        "cpu_seconds": sum(cost["cpu_seconds"] for cost in costs),
        "sent_bytes": statistics.mean(cost["sent_bytes"] for cost in peers),
        "most_sent_bytes": max(cost["sent_bytes"] for cost in peers),
        "peak_bytes": max(cost["peak_bytes"] for cost in costs),
        "peer_peak_bytes": max(cost["peak_bytes"] for cost in peers),
        "extra_bytes": max(cost["extra_bytes"] for cost in peers),
        "identical": len({cost["digest"] for cost in peers}) == 1,
        "phases": costs[0].get("phases", {}),
    }


def summary(measured: dict[str, list[Report]], elements: int) -> Report:
    """Return medians of each contender, and ratios between them."""
    numbers = ("seconds", "cpu_seconds", "sent_bytes", "most_sent_bytes", "peak_bytes", "peer_peak_bytes", "extra_bytes")
    contenders = {
        name: {key: statistics.median(run[key] for run in runs) for key in numbers}
        | {"seconds_of_each_round": [round(run["seconds"], 3) for run in runs]}
        | {"identical": all(run["identical"] for run in runs)}
        for name, runs in measured.items()
    }

    def ratio(one: str, key: str, other: str) -> float | None:
        return contenders[one][key] / contenders[other][key] if one in contenders and other in contenders else None

    floor = floor_bytes(elements)
    report: Report = {
        "fp32_vs_dense_seconds": ratio("none", "seconds", "dense"),
        "fp32_vs_dense_cpu": ratio("none", "cpu_seconds", "dense"),
        "int8_vs_dense_seconds": ratio("int8", "seconds", "dense"),
        "fp32_vs_server_seconds": ratio("none", "seconds", "server"),
        "fp32_vs_server_memory": ratio("none", "peak_bytes", "server"),
        "sparse_vs_int4_seconds": ratio("sparse", "seconds", "int4"),
        f"{MIXED}_vs_int4_seconds": ratio(MIXED, "seconds", "int4"),
        "bounded_vs_unbounded_seconds": ratio("int4", "seconds", UNBOUNDED),
        "bounded_vs_unbounded_cpu": ratio("int4", "cpu_seconds", UNBOUNDED),
    }
    for figure in ("seconds", "cpu_seconds", "sent_bytes", "peak_bytes"):
        report[f"defended_vs_undefended_{figure}"] = ratio("int4", figure, UNDEFENDED)
        report[f"defended_vs_unsigned_{figure}"] = ratio("int4", figure, UNSIGNED)
    for codec, name in {**{name: name for name in CODECS}, "none": "fp32"}.items():
        sent = contenders[codec]["sent_bytes"] if codec in contenders else None
        report[f"bytes_vs_floor_{name}"] = sent and sent / floor
        planned, checks = planned_bytes(codec, elements)
        report[f"bytes_vs_plan_{name}"] = sent and sent / planned
        report[f"bytes_vs_plan_and_checks_{name}"] = sent and sent / (planned + checks)
    report["replicas_identical"] = all(entry["identical"] for name, entry in contenders.items() if name not in BASELINES)
    return {**report, "state_bytes": 4 * elements, "members": MEMBERS, "floor_bytes": floor, "contenders": contenders}


def plot(report: Report, file: Path) -> None:
    """Plot seconds, CPU seconds and bytes sent by one peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(report["contenders"])
    panels = (
        ("seconds", "seconds", 1.0),
        ("cpu_seconds", "CPU seconds, all processes", 1.0),
        ("sent_bytes", "MB sent by a peer", 1e6),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.2), sharey=True, constrained_layout=True)
    for axis, (key, label, unit) in zip(axes, panels, strict=True):
        colors = ["tab:gray" if name in BASELINES else "tab:blue" for name in names]
        axis.barh(names, [report["contenders"][name][key] / unit for name in names], color=colors)
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    figure.suptitle(f"One round, {report['members']} peers, {report['state_bytes'] / 1e6:.0f} MB of float32 state, loopback")
    figure.savefig(file, dpi=120)


def floor_bytes(elements: int) -> float:
    """Return what each member must send in fp32: 2 S (N - 1) / N of the shared weights, E (N - 1) / N of the experts."""
    shared, size = tensor_sizes(elements)[0], int(our_layout(elements).size)
    return 4 * (2 * shared + size - shared) * (MEMBERS - 1) / MEMBERS


def planned_bytes(name: str, elements: int) -> tuple[int, float]:
    """Return what `spes-p2p plan` says that a peer sends in a round of these sizes, and what it sends for checks of its means.

    The plan leaves out checks: a 64th of a large model's means, but one mean of each reducer where they are few.
    """
    from spes_p2p.campaign.planner import round_traffic
    from spes_p2p.rounds.checks import expected_checks
    from spes_p2p.rounds.codecs import group_codecs
    from spes_p2p.rounds.part_table import part_table
    from spes_p2p.rounds.planned import Member

    config, layout = our_campaign(rules_of(name)).config, our_layout(elements)
    members = tuple(Member(str(member), 1, (int(member == 0),) * EXPERTS, 1.0) for member in range(MEMBERS))
    means = [part for part in part_table(layout, members, group_codecs(config.sync.codec)) if len(part.inputs) > 1]
    of_reducers = Counter(part.reducer for part in means).values()
    checked = sum(expected_checks(count, len(of_reducers)) for count in of_reducers)
    update_bytes = statistics.fmean(part.encoded_bytes for part in means)
    # A check moves the updates of all members.
    return round_traffic(config, EXPERTS // MEMBERS, MEMBERS, 1.0, layout).up_bytes, checked * update_bytes


def one_line(run: Report) -> str:
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in run["phases"].items())
    sent = f"{run['sent_bytes'] / 1e6:.0f} MB up (most {run['most_sent_bytes'] / 1e6:.0f})"
    return (f"{run['seconds']:.2f} s, {run['cpu_seconds']:.1f} CPU-s, {sent}, "
            f"peak {run['peak_bytes'] / 1e6:.0f} MB (+{run['extra_bytes'] / 1e6:.0f}) {phases}")


if __name__ == "__main__":
    assert EXPERTS % MEMBERS == 0
    sys.exit(main())
