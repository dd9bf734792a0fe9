"""A peer that prepares for minutes says so."""

from __future__ import annotations

import asyncio
import logging

import pytest

from spes_p2p.session import preparing


async def test_a_long_task_is_named_again_and_again_until_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "HEARTBEAT_S", 0.01)
    caplog.set_level(logging.INFO, logger="spes_p2p")
    async with preparing.still("importing torch"):
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.01)
    told = len(caplog.messages)
    await asyncio.sleep(0.05)
    assert told == len(caplog.messages)
    assert set(caplog.messages) == {"still preparing: importing torch"}
