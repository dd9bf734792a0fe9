"""./tools/bench startup: seconds until commands answer, what they import, and the memory of a bootstrap peer.

The campaign is the demo's, with one trainer, on loopback. Times are of whole processes, medians of `--repeat` after one that is
not measured: wall clock, and CPU time of the process and its p2pd, which a busy machine changes less. Bytecode is cached.
`nobody` is an address that refuses connections. A bootstrap peer's memory (resident, with the pages of files that it maps) is
read after `--rounds` rounds.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import yaml
from bench_json import parser_of, tell

from spes_p2p.net.die_with_parent import under_guard

ROOT = Path(__file__).resolve().parents[1]
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HEAVY = ("torch", "transformers", "scipy", "pyarrow", "matplotlib", "numpy", "tokenizers", "aiohttp", "fsspec")
TELL_IMPORTED = """
import atexit, sys
_, file, *arguments = sys.argv
atexit.register(lambda: open(file, "w").write("\\n".join(sys.modules)))
sys.argv = ["spes-p2p", *arguments]
from spes_p2p.cli import main
main()
"""
GUARD = [*under_guard(), sys.executable]
COMMAND = [*GUARD, "-m", "spes_p2p"]
LIMIT_S = 300.0
MEGABYTE = 1e6


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="measured runs of each command (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds before memory is read (default 5)")
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        report = measure(Path(folder), arguments.repeat, arguments.rounds)
    tell(report, arguments.json)
    return 0


def measure(folder: Path, repeat: int, rounds: int) -> dict[str, Any]:
    """Return all numbers. The first run of each command is not measured."""
    report: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0)), "repeat": repeat}
    boot = ["bootstrap", "--config", str(demo_campaign(folder)), "--listen", "/ip4/127.0.0.1/tcp/0"]
    with started([*boot, "--run-dir", str(folder / "asked")]) as asked:
        address = asked.wait_for("spes-p2p join ")[1].split()[-1]
        commands = {
            "help": ["--help"],
            "status": ["status", address],
            "status_nobody": ["status", NOBODY],
            "join_nobody": ["join", NOBODY, "--run-dir", str(folder / "nobody")],
            "plan": ["plan", "--config", boot[2], "--memory", "8GiB"],
        }
        report["imports"] = {}
        for name, command in commands.items():
            measure_command(report, name, [command] * (repeat + 2), folder)
        join = ["join", address, "--run-dir"]
        joins = [first_lines([*join, str(folder / f"peer-{i}")], "", "joined ") for i in range(repeat + 1)][1:]
        report["join_first_line_s"], report["joined_s"] = (median(times) for times in zip(*joins, strict=True))
    report["bootstrap_ready_s"] = median(
        [first_lines([*boot, "--run-dir", str(folder / f"ready-{i}")], "spes-p2p join ")[0] for i in range(repeat)]
    )
    with started([*boot, "--run-dir", str(folder / "bootstrap")]) as bootstrap:
        address = bootstrap.wait_for("spes-p2p join ")[1].split()[-1]
        with started(["join", address, "--run-dir", str(folder / "trainer")]) as trainer:
            trainer.wait_for(f"round {rounds}/")
            report |= {**memory_of("bootstrap", bootstrap.process), **memory_of("trainer", trainer.process)}
    export = ["export", "--run-dir", str(folder / "bootstrap"), "--output"]
    measure_command(report, "export", [[*export, str(folder / f"checkpoint-{i}")] for i in range(repeat + 2)], folder)
    return report


def measure_command(report: dict[str, Any], name: str, calls: Sequence[Sequence[str]], folder: Path) -> None:
    """Add the times of a command that ends by itself, and what it imports, which the last call tells."""
    times = [call(each) for each in calls[:-1]][1:]
    report[f"{name}_s"], report[f"{name}_cpu_s"] = (median(each) for each in zip(*times, strict=True))
    report["imports"][name] = imports(calls[-1], folder / "imports")


def demo_campaign(folder: Path) -> Path:
    """Write the demo's campaign for one trainer, with its token files; return its path."""
    text, tokenizer = ROOT / "configs" / "demo_text", ROOT / "configs" / "demo_text" / "tokenizer.json"
    for part in ("train", "held_out"):
        inputs = map(str, sorted((text / part).glob("*.jsonl")))
        options = ["--tokenizer", str(tokenizer), "--output", str(folder), "--prefix", f"{part}_"]
        subprocess.run([*COMMAND, "tokenize", *inputs, *options], check=True, stdout=subprocess.DEVNULL)
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    config["sync"]["min_peers"] = 1
    config["data"] = {
        "manifest": "train_manifest.json", "validation_manifest": "held_out_manifest.json", "tokenizer": str(tokenizer)
    }
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Running:
    """A peer that runs, and what it prints."""

    def __init__(self, arguments: Sequence[str]):
        self._started = time.perf_counter()
        self._last: list[str] = []
        self.process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(self, words: str) -> tuple[float, str]:
        """Return the next line with these words, or that of the last call, and the seconds from the start to it."""
        assert self.process.stdout is not None
        for line in chain(self._last, self.process.stdout):
            if words in line:
                self._last = [line]
                return time.perf_counter() - self._started, line
        raise RuntimeError(f"a peer ended with code {self.process.wait()} before it printed '{words}'")


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[Running]:
    """Run a command; kill it and its p2pd at the end."""
    running = Running(arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def first_lines(arguments: Sequence[str], *words: str) -> list[float]:
    """Return the seconds to the first line with each of these words, in this order."""
    with started(arguments) as running:
        return [running.wait_for(each)[0] for each in words]


def call(arguments: Sequence[str]) -> tuple[float, float]:
    """Return the seconds, and the seconds of CPU time, that a command takes."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports(arguments: Sequence[str], file: Path) -> dict[str, Any]:
    """Return the number of modules that a command imports, and the large packages among them."""
    command = [*GUARD, "-c", TELL_IMPORTED, str(file), *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    modules = file.read_text().split()
    return {"modules": len(modules), "large": [name for name in HEAVY if name in modules]}


def memory_of(name: str, process: subprocess.Popen[str]) -> dict[str, float]:
    """Return megabytes of a peer's process: resident, its own (without mapped files), the peak; and p2pd's."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    [daemon] = psutil.Process(process.pid).children()
    measured = {
        f"{name}_{kind}_mb": round(float(fields[field].split()[0]) * 1024 / MEGABYTE, 1)
        for kind, field in (("rss", "VmRSS"), ("own", "RssAnon"), ("peak", "VmHWM"))
    }
    return {**measured, f"{name}_p2pd_rss_mb": round(daemon.memory_info().rss / MEGABYTE, 1)}


def median(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds), 2)


if __name__ == "__main__":
    sys.exit(main())
