"""Headless Chromium for tests of pages. The module that imports it is skipped without playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.async_api", reason="needs playwright (pip install playwright)")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_BROWSER = [
    pytest.mark.network,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE_S = 240.0


@asynccontextmanager
async def browser_page(url: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> AsyncIterator[Any]:
    """The page at `url`; a script error in it fails the test."""
    errors: list[str] = []
    async with playwright.async_playwright() as engine:
        browser = await engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport=viewport, color_scheme=scheme)
            page.set_default_timeout(1000 * PATIENCE_S)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    assert errors == []


async def widths(page: Any) -> tuple[int, int]:
    """Width of the whole page, and of what is shown of it."""
    return tuple(await page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]"))


async def ink_and_paper(page: Any, selector: str) -> tuple[str, str]:
    """Colors of an element's text and of the page."""
    return tuple(await page.evaluate(
        f"[document.querySelector('{selector}'), document.body].map(e => getComputedStyle(e))"
        ".map((style, i) => i ? style.backgroundColor : style.color)"
    ))


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast of two colors, 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
