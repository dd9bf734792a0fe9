"""What tests share: how hypothesis searches, how long a test may take, and a campaign on disk."""

from __future__ import annotations

import asyncio
import inspect
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from sample_text import write_test_campaign

LONG_TIMEOUT_S = 1800
"""For tests of real processes and long ones: above the sum of their own deadlines, so that those report first."""

# No deadline for an example: a busy machine takes any time for one. `./tools/test --all` chooses `full`.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("everyday", BUSY, max_examples=25)
settings.register_profile("full", BUSY, max_examples=250)
settings.load_profile("everyday")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; a test's processes would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in virtual time unless its marks say otherwise."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if pyfuncitem.get_closest_marker("network") or pyfuncitem.get_closest_marker("real_time"):
        asyncio.run(pyfuncitem.obj(**arguments))
    else:
        from spes_p2p.testing.simulate.swarm import simulate  # other tests do not wait for it

        simulate(partial(pyfuncitem.obj, **arguments))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        _keep_a_sample_everyday(family)
    for item in items:
        is_long = item.get_closest_marker("network") or item.get_closest_marker("slow")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def _keep_a_sample_everyday(family: list[pytest.Item]) -> None:
    """Mark as slow all but some of one test's parameters, evenly spaced."""
    marker = family[0].get_closest_marker("sampled")
    assert marker is not None
    (size,) = marker.args
    everyday = {k * len(family) // size for k in range(size)}
    for index, item in enumerate(family):
        if index not in everyday:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a campaign that can start."""
    return write_test_campaign(tmp_path_factory.mktemp("campaign"))
