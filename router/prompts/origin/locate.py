"""A tokenizer's directory: the one that is named, or one of the hub's cache, fetched in a thread.

The thread is a daemon: what a hub holds open does not hold the router at its end. Always true: one fetch at a
time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from router.prompts.config import PromptSettings
from router.prompts.origin.hub import Fetched, HubLimits, fetch, too_slow
from router.prompts.origin.problem import TokenizerProblem
from router.prompts.origin.source import TokenizerSource, has_tokenizer


class Located(NamedTuple):
    """``shown`` says where it is from: a path, or ``ORG/NAME@COMMIT``."""

    folder: Path
    shown: str


class Locator:
    """Finds directories; ``settings`` bound what is fetched."""

    def __init__(self, settings: PromptSettings) -> None:
        self._limits = HubLimits(
            settings.hub_downloads, settings.hub_endpoint, settings.hub_bytes_max, settings.hub_timeout_s
        )
        self._thread: Thread | None = None
        self._one = asyncio.Lock()

    async def locate(self, source: TokenizerSource) -> Located:
        """Where this source's files are. Raises ``TokenizerProblem``."""
        if source.kind == "repository":
            async with self._one:
                found = await self._fetch(source)
            return Located(found.folder, f"{source.name}@{found.commit[:12]}")
        folder = Path(source.name)
        if not await asyncio.to_thread(has_tokenizer, folder):
            raise TokenizerProblem(
                "not_readable",
                f"{source.name}, where the engine has its model, is no directory with a tokenizer here",
                "mount it here too, or give --tokenizer ORG/NAME or DIR",
            )
        return Located(folder, source.name)

    async def _fetch(self, source: TokenizerSource) -> Fetched:
        if self._thread is not None and self._thread.is_alive():
            raise too_slow(self._limits)  # an earlier one still waits for the hub
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Fetched] = loop.create_future()

        def deliver(found: Fetched | None, problem: Exception | None) -> None:
            if not result.done():
                if found is not None:
                    result.set_result(found)
                elif problem is not None:
                    result.set_exception(problem)

        def work() -> None:
            found, problem = None, None
            try:
                found = fetch(source, self._limits)
            except Exception as error:  # noqa: BLE001  # raised where it is awaited
                problem = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, found, problem)

        self._thread = Thread(target=work, name="tokenizer-fetch", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await asyncio.wait([result])
        except TimeoutError:
            result.cancel()  # what comes later is not used
            raise too_slow(self._limits) from None
        self._thread = None  # it delivered, and ends
        return result.result()
