"""Run many seeds of the virtual form on several cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from unittest.mock import patch

from spes_p2p.net.die_with_parent import die_with
from spes_p2p.testing.simulate.report import RunReport
from spes_p2p.testing.simulate.scenario import Scenario
from spes_p2p.testing.simulate.virtual import run_seed


def run_seeds(
    scenario: Scenario, seeds: range, jobs: int, on_done: Callable[[RunReport], None] = lambda result: None
) -> list[RunReport]:
    """Run each seed; return the results by seed. The worker processes end with this one.

    All workers have the same hash seed, so that a seed gives the same run on every call.
    """
    with patch.dict(os.environ, PYTHONHASHSEED="0", OMP_NUM_THREADS="1"):
        results = []
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(seeds)), spawning, die_with, (os.getpid(),)) as pool:
            for future in as_completed([pool.submit(run_seed, scenario, seed) for seed in seeds]):
                results.append(future.result())
                on_done(results[-1])
    return sorted(results, key=lambda result: result.seed)
