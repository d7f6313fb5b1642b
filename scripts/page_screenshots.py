"""Take the pictures of the operators' page that docs/operations.md shows, from a router at work, in Chromium.

    python -m scripts.page_screenshots [FOLDER]        # default: docs/images

Four simulated engines of two kinds of groups and one that is gone, chats with common beginnings, one answer
under way. Written: ``page-light.png`` (1,280 px) and ``page-dark-360.png`` (a telephone, dark).
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path

from router.fleet.identity import EngineAddress
from tests.support.browser import Tab, browsing
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

ROOT = Path(__file__).resolve().parent.parent
SHOTS = {"page-light.png": (1280, 1000, "light"), "page-dark-360.png": (360, 1100, "dark")}
ENGINE = {"groups": "gptoss-like", "prefill_s_per_token": 2e-5}
GONE = EngineAddress("http://127.0.0.1:9")


async def _chats(rig: Rig) -> None:
    for number in range(48):
        task = f"You work on task {number % 6}. "
        await rig.chat(task * 40 + TEXT * (20 + 10 * (number % 3)) + f"Question {number}.")
        await until(lambda: rig.idle, "request over")


async def _shoot(tab: Tab, folder: Path) -> None:
    for name, (width, height, scheme) in SHOTS.items():
        await tab.size(width, height)
        await tab.prefer(scheme)
        await tab.shows("#tree", "256 tokens")
        shot = await tab.call("Page.captureScreenshot", format="png")
        (folder / name).write_bytes(base64.b64decode(shot["data"]))


async def _main(folder: Path) -> None:
    async with (
        running(*[ENGINE] * 4) as engines,
        routing(configure(*engines, GONE), wait=False) as rig,
        browsing() as tab,
    ):
        await until(lambda: len([engine for engine in rig.router.fleet if engine.up]) == 4, "engines up")
        await _chats(rig)
        await rig.caught_up(*engines)
        stream = await rig.api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "You work on task 1. " * 40 + TEXT * 30}],
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(stream)
        await tab.open(f"{rig.ops_url}/kvatlas/")
        await tab.shows("#engines", "blocks in group 0")
        await asyncio.sleep(1.5)  # the page asks every second: two rounds, so that its rates are there
        await _shoot(tab, folder)
        await stream.close()


if __name__ == "__main__":
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    run(_main(pictures))
