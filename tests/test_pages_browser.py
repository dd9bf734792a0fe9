"""Pages without a script in headless Chromium: a report and a directory fit a phone and are readable in the dark."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from headless import DESKTOP, IN_BROWSER, PHONE, browser_page, contrast, ink_and_paper, luminance, widths
from recorded_run import run_dir
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.dashboard.directory import directory_app
from spes_p2p.client.dashboard.listed import Listed, seen
from spes_p2p.client.dashboard.server import listening
from spes_p2p.client.report import make_report

pytestmark = IN_BROWSER
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@asynccontextmanager
async def report(folder: Path) -> AsyncIterator[str]:
    spent = (("train", 15.0), ("exchange", 4.0))
    records = [replace(record, teller="", seconds=spent) for record in synthetic_swarm(4, 16, 60).records]
    page, _ = make_report(run_dir(folder / "run", records))
    (folder / "report.html").write_text(page)
    yield (folder / "report.html").as_uri()


@asynccontextmanager
async def directory(folder: Path) -> AsyncIterator[str]:
    known = seen(synthetic_swarm(4, 16, 60).statuses, ADDRESS)
    named = replace(known, campaign="a-name-" * 8, command=f"spes-p2p export --from {ADDRESS} --output checkpoint")
    now, where = time.time(), [ADDRESS]
    listed = [Listed(where, True, now, seen=known), Listed(where, updated=now - 7200, seen=named), Listed(where, problem="off")]
    async with listening(directory_app(listed), "127.0.0.1", 0) as url:
        yield url


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("serve", "soft"), [(report, "figcaption"), (directory, "code")], ids=["report", "directory"])
def test_a_page_fits_and_is_readable(
    serve: Callable[[Path], AbstractAsyncContextManager[str]], soft: str, scheme: str, viewport: dict[str, int], tmp_path: Path
) -> None:
    async def look() -> None:
        async with serve(tmp_path) as url, browser_page(url, viewport, scheme) as page:
            scrolled, shown = await widths(page)
            assert scrolled <= shown
            for selector in ("h1", soft):
                ink, paper = await ink_and_paper(page, selector)
                assert contrast(ink, paper) >= 4.5
            assert (luminance(paper) < 0.05) == (scheme == "dark")
            assert await page.locator("svg").count() >= 2
            for place in await page.locator("svg").all():
                box = await place.bounding_box()
                assert 0 <= box["x"] < box["x"] + box["width"] <= shown

    asyncio.run(look())
