"""Take the pictures of the status page that docs/operations.md shows, from routers at work, in Chromium.

    python -m scripts.page_screenshots [FOLDER]        # default: docs/images; six minutes

Simulated engines of two kinds of groups and one that is down, five minutes of chats with common beginnings at
a changing rate by six sessions, a model that is not served now and then, one answer in progress. Written:
``page-light.png`` (1,280 px), ``page-sessions-light.png`` (the sessions below it), ``page-dark-360.png`` (a
telephone), ``page-table-dark-768.png`` (12 engines) and ``page-none-light.png`` (a router without engines).
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import openai

from kvatlas.router.fleet.engines import EngineAddress
from tests.support.browser import Tab, browsing
from tests.support.waiting import run_real, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

ROOT = Path(__file__).resolve().parent.parent
ENGINE = {"groups": "gptoss-like", "prefill_s_per_token": 2e-5}
GONE = EngineAddress("http://127.0.0.1:9")


class Shot(NamedTuple):
    """One picture: pixels, and ``light`` or ``dark``."""

    name: str
    width: int
    height: int
    scheme: str
    top: str = "body"
    """Selector of the element at the top of the picture."""


SMALL_FLEET = (
    Shot("page-light.png", 1280, 1000, "light"),
    Shot("page-sessions-light.png", 1280, 420, "light", "section[aria-labelledby=h-sessions]"),
    Shot("page-dark-360.png", 360, 1100, "dark"),
)
LARGE_FLEET = (Shot("page-table-dark-768.png", 768, 960, "dark"),)
NO_ENGINE = (Shot("page-none-light.png", 1280, 480, "light"),)


async def _chats(rig: Rig, traffic_s: float) -> None:
    loop = asyncio.get_running_loop()
    begun, number = loop.time(), 0
    while (passed := loop.time() - begun) < traffic_s:
        task = f"You work on task {number % 6}. "
        text = task * 40 + TEXT * (20 + 10 * (number % 3)) + f"Question {number}."
        await rig.chat(text, extra_headers={"x-session-id": f"task-{number % 6}"})
        await until(lambda: rig.idle, "request over")
        if number % 40 == 20:
            with suppress(openai.NotFoundError):
                await rig.chat("Hello.", model="another-model")
        number += 1
        await asyncio.sleep(0.25 + 0.2 * math.sin(passed / 6))


@asynccontextmanager
async def _page(count: int, traffic_s: float) -> AsyncIterator[Tab]:
    """The page of a router at work before this many engines and one that is down."""
    async with (
        running(*[ENGINE] * count) as engines,
        routing(configure(*engines, GONE), wait=False) as rig,
        browsing() as tab,
    ):
        await until(lambda: len([engine for engine in rig.router.fleet if engine.up]) == count, "engines up")
        await _chats(rig, traffic_s)
        await rig.caught_up(*engines)
        stream = await rig.api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "You work on task 1. " * 40 + TEXT * 30}],
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(stream)
        await tab.open(f"{rig.ops_url}/")
        await tab.shows("#live", "streaming")
        yield tab
        await stream.close()


async def _shoot(tab: Tab, folder: Path, shots: tuple[Shot, ...]) -> None:
    for name, width, height, scheme, top in shots:
        await tab.size(width, height)
        await tab.prefer(scheme)
        await until(partial(_changed, tab, await tab.text("#data")), "the page is drawn in this size")
        await tab.js(f"document.querySelector('{top}').scrollIntoView()")
        shot = await tab.call("Page.captureScreenshot", format="png")
        (folder / name).write_bytes(base64.b64decode(shot["data"]))


async def _changed(tab: Tab, before: str) -> bool:
    return await tab.text("#data") != before


async def _main(folder: Path) -> None:
    async with _page(4, 300.0) as tab:
        await _shoot(tab, folder, SMALL_FLEET)
    async with _page(11, 30.0) as tab:
        await _shoot(tab, folder, LARGE_FLEET)
    async with routing(configure(), wait=False) as rig, browsing() as tab:
        await tab.open(f"{rig.ops_url}/")
        await tab.shows("#engines", "No engines")
        await _shoot(tab, folder, NO_ENGINE)


if __name__ == "__main__":
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    run_real(_main(pictures), 480)
