"""All checks on a CUDA device in one call: parity, steps of 1B and 7B with MFU and memory against the prediction, then parts.

./tools/bench cuda [--out FOLDER] [--only NAME ...]     writes FOLDER/cuda.json and FOLDER/cuda.md after each check
./tools/bench cuda --device cpu --small                 the same checks on a CPU with small models, to test the script

Each check is a process with a time limit, so a check that fails or hangs does not affect the others. A second call with the
same folder and other `--only` adds to the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from bench_json import end_on_signals

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "tools" / "benchmarks.py"
FORMS = ROOT / "tools" / "forms_benchmark.py"
USUAL = ("plain", "compiled", "masked", "masked_compiled")
"""Forms of a step that every card and environment has."""
TESTED = ("backends", "partitioned", "losses", "trainer", "optimizer", "ranks", "bench")
"""Test files of code that runs on the device."""
MOST_THREADS = 8

Report = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One process, and bounds on numbers in its report: name -> (minimum, maximum)."""

    command: tuple[str, ...]
    """Arguments of the interpreter; a benchmark also gets `--json FILE`."""
    limit_s: float
    bounds: Mapping[str, tuple[float, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/cuda"), metavar="FOLDER", help="default runs/cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks instead of all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small campaigns instead of the recipes")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of each comparison (default 9)")
    arguments = parser.parse_args()
    end_on_signals()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --small tries the script without one")
    checks = checks_for(arguments.device, arguments.small, arguments.rounds)
    unknown = sorted(set(arguments.only or ()) - set(checks))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: the checks are {', '.join(checks)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = earlier(arguments.out / "cuda.json", arguments.device)
    for name in arguments.only or checks:
        print(f"{name} ...", flush=True)
        results[name] = run(checks[name], arguments.device)
        print(f"{name}: {results[name]['outcome']} after {results[name]['seconds']:.0f} s", flush=True)
        write(arguments.out, {"environment": environment(arguments.device), "checks": results})
    return int(any(result["outcome"] != "ok" for result in results.values()))


def checks_for(device: str, small: bool, rounds: int) -> dict[str, Check]:
    """Return the checks by name: parity, then steps of the recipes with MFU and memory against the plan, then the rest."""
    common = ("--device", device, "--rounds", str(rounds))
    unit = tuple(f"tests/test_{name}.py" for name in TESTED)
    differences = {
        "empty_group_gradient_ours": (0, 0), "documents_masked_leak": (0, 0.01), "documents_unmasked_leak": (0.02, 2),
        "worst_difference": (0, 0.05), "usual_forms_failed": (0, 0),
    }
    checks = {
        "tests": Check(("-m", "pytest", "-rs", "-p", "no:cacheprovider", "-m", "not slow", "-k", device, *unit), 600, {}),
        "parity": Check((str(FORMS), "--only", *USUAL, *common), 1800, differences),
    }
    recipes = [("test", "4GiB")] if small else [("1b", "24GiB"), ("7b", "48GiB"), ("1b", "8GiB"), ("7b", "24GiB")]
    for recipe, card in recipes:
        command = (str(BENCHMARKS), "step", "--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--cap", card, *common)
        bounds = {"peak_vs_predicted": (0.9, 1.1)} if device == "cuda" else {}
        if (recipe, card) == ("7b", "24GiB"):
            bounds["owned"] = (5, 32)
        checks[f"{recipe}-{card}"] = Check(command, 900, bounds)
    checks |= {
        "memory": Check((str(BENCHMARKS), "memory", *common), 600, {"worst_formula_error": (0, 0.01)}),
        "experts": Check((str(BENCHMARKS), "experts", *common), 600, aims_of_experts(4) if device == "cpu" else {}),
        "step": Check((str(BENCHMARKS), "step", *common), 600, {}),
    }
    if not small:
        layer = (str(BENCHMARKS), "experts", "--shape", "7b", *common)
        checks["experts-7b-layer"] = Check(layer, 600, aims_of_experts(8))
        for recipe, card in recipes[:2]:
            forms = (str(FORMS), "--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--cap", card, *common)
            checks[f"forms-{recipe}"] = Check(forms, 1800, differences)
    return checks


def aims_of_experts(quarter: int) -> dict[str, tuple[float, float]]:
    """Return bounds on ratios for a quarter, or one, of the experts owned, where matrix products dominate."""
    return {
        f"partitioned_own{quarter}_vs_grouped": (0, 0.78), f"partitioned_own{quarter}_vs_concat": (0, 0.85),
        "partitioned_own1_vs_grouped": (0, 0.72),
    }


def run(check: Check, device: str) -> Report:
    """Return outcome (ok, missed, failed, timed out), seconds, report or end of the output, and missed bounds."""
    started = time.perf_counter()
    threads = "1" if device == "cpu" else str(min(MOST_THREADS, os.cpu_count() or 1))
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        is_benchmark = check.command[0] in (str(BENCHMARKS), str(FORMS))
        command = [sys.executable, *check.command, *(["--json", str(file)] if is_benchmark else [])]
        outcome, output = "ok", ""
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=check.limit_s, check=False, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            output = done.stdout
            outcome = "ok" if done.returncode == 0 else "failed"
        except subprocess.TimeoutExpired as error:
            outcome, output = "timed out", _text(error.stdout)
        result: Report = {"outcome": outcome, "seconds": time.perf_counter() - started}
        if file.exists() and outcome == "ok":
            result["report"] = json.loads(file.read_text())
            result["missed"] = missed(result["report"], check.bounds)
            result["outcome"] = "missed" if result["missed"] else "ok"
        else:
            result["output"] = output[-4000:]
    return result


def missed(report: Report, bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return one line for each number that is missing or out of bounds."""
    values = {**report, **report.get("setup", {})}
    lines = []
    for name, (least, most) in bounds.items():
        value = values.get(name)
        if value is None or not least <= value <= most:
            lines.append(f"{name} = {value}, not within {least:g} to {most:g}")
    return lines


def environment(device: str) -> Report:
    """Return versions of packages and properties of the device."""
    found: Report = {"python": platform.python_version(), "device": device, "cpus": os.cpu_count()}
    for package in ("torch", "transformers", "triton", "torchao", "megablocks", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found.update(card=properties.name, card_bytes=properties.total_memory, cuda=torch.version.cuda,
                     capability=f"{properties.major}.{properties.minor}")
    return found


def earlier(file: Path, device: str) -> dict[str, Report]:
    """Return the results of earlier calls on the same kind of device."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    return dict(found["checks"]) if found["environment"]["device"] == device else {}


def write(folder: Path, found: Report) -> None:
    """Write both files."""
    (folder / "cuda.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "cuda.md").write_text(markdown(found))


def markdown(found: Report) -> str:
    """Return a table of outcomes, then each check's numbers."""
    lines = ["# One peer on " + str(found["environment"].get("card", found["environment"]["device"])), ""]
    lines += [", ".join(f"{name} {value}" for name, value in found["environment"].items() if value is not None), ""]
    lines += ["| check | outcome | seconds | |", "|---|---|---|---|"]
    for name, result in found["checks"].items():
        lines.append(f"| {name} | {result['outcome']} | {result['seconds']:.0f} | {'; '.join(result.get('missed', []))} |")
    for name, result in found["checks"].items():
        lines += ["", f"## {name}", ""]
        if "report" in result:
            lines += ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in numbers(result["report"]))]
        else:
            lines += ["```", result["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


def numbers(report: Report) -> list[tuple[str, Any]]:
    """Return the report without its long lists, and with nested settings one level deep."""
    flat: list[tuple[str, Any]] = []
    for key, value in report.items():
        if isinstance(value, dict) and key not in ("bytes", "environment"):
            flat += [(f"{key}: {inner}", each) for inner, each in value.items()]
        elif not isinstance(value, dict):
            flat.append((key, value))
    return flat


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
