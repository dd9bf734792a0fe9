"""Runs many seeds of the virtual form, on several cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from spes_p2p.net.die_with_parent import die_with
from spes_p2p.testing.simulate.scenario import Scenario
from spes_p2p.testing.simulate.virtual import SeedResult, run_seed


def run_seeds(
    scenario: Scenario, seeds: range, jobs: int, on_done: Callable[[SeedResult], None] = lambda result: None
) -> list[SeedResult]:
    """Run each seed; results by seed. The processes have one hash seed, so that a seed is the same run on every call; none of
    them outlives this one."""
    with _environment(PYTHONHASHSEED="0", OMP_NUM_THREADS="1"):
        context = multiprocessing.get_context("spawn")
        results = []
        with ProcessPoolExecutor(min(jobs, len(seeds)), context, die_with, (os.getpid(),)) as pool:
            for future in as_completed([pool.submit(run_seed, scenario, seed) for seed in seeds]):
                results.append(future.result())
                on_done(results[-1])
    return sorted(results, key=lambda result: result.seed)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
