"""./tools/bench simulator [--peers 256] [--rounds 4]: where the CPU time of a virtual swarm goes, under cProfile.

A function counts for the package or library that defines it, and one written in C for its callers. cProfile makes Python code
about twice as slow, so code in C takes a larger share without it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from pathlib import Path

from bench_json import end_on_signals

import spes_p2p
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.virtual import run_seed

PACKAGE = Path(spes_p2p.__file__).parent
LEAST_SHARE = 0.01
"""Smaller areas are printed together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=256, help="default 256")
    parser.add_argument("--rounds", type=int, default=4, help="and three more, as in spes-p2p simulate (default 4)")
    arguments = parser.parse_args()
    end_on_signals()
    profile = cProfile.Profile(time.process_time)
    profile.runcall(run_seed, Scenario(peer_names(arguments.peers), arguments.rounds, fault_rate=0.0), 0)
    seconds = seconds_by_area(pstats.Stats(profile))
    total, rest = sum(seconds.values()), 0.0
    print(f"{total:.0f} s of CPU time under cProfile\n\n| area | share |\n|---|---|")
    for area, spent in seconds.most_common():
        if spent < LEAST_SHARE * total:
            rest += spent
        else:
            print(f"| {area} | {100 * spent / total:.0f} % |")
    print(f"| other | {100 * rest / total:.0f} % |")


def seconds_by_area(stats: pstats.Stats) -> Counter[str]:
    """Return the seconds spent in each area's own code."""
    seconds = Counter[str]()
    for (path, _, name), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if path == "~" and callers:
            for (caller, _, _), (_, _, of_caller, _) in callers.items():
                seconds[area_of(caller, name)] += of_caller
        else:
            seconds[area_of(path, name)] += own
    return seconds


def area_of(path: str, name: str) -> str:
    """Return the area to which a function of this file belongs."""
    place = Path(path)
    if place.is_relative_to(PACKAGE):
        return f"{place.relative_to(PACKAGE).parts[0]}/"
    if "site-packages" in place.parts:
        return place.parts[place.parts.index("site-packages") + 1]
    return "asyncio" if "asyncio" in place.parts else name if path == "~" else f"Python: {place.stem}"


if __name__ == "__main__":
    main()
