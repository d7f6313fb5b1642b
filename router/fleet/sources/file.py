"""Engines from a watched file.

The file is read again and again, since time stamps miss quick changes and a mounted ConfigMap is swapped by
its directory. Always true: content counts only after two readings in a row gave the same bytes, so a file
that is just being written is not believed; content that cannot be read or understood changes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from router.fleet.settings import FileSettings
from router.fleet.sources.base import DiscoveredEngine, Publish, SourceStats
from router.fleet.sources.engine_list import BadListError, read_list
from router.http.reasons import reason_of

_log = structlog.get_logger()


class FileSource:
    """See the module; a ``Source``. ``settings.path`` must be given."""

    name = "file"

    def __init__(self, settings: FileSettings) -> None:
        if settings.path is None:
            raise ValueError("fleet.file.path: not set")
        self.stats = SourceStats()
        self._path = Path(settings.path)
        self._settings = settings
        self._latest: bytes | None = None  # as read last
        self._settled: bytes | None = None  # as last taken up, whether it made sense or not
        self._known: list[DiscoveredEngine] | None = None

    async def run(self, publish: Publish) -> None:
        """See ``Source``."""
        while True:
            try:
                content = await asyncio.to_thread(self._read)
            except (OSError, ValueError) as error:
                self._latest = None
                self._fail("unreadable", f"{self._path}: {reason_of(error)}")
            else:
                self._apply(content, publish)
            await asyncio.sleep(self._settings.interval_s)

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            content = file.read(self._settings.bytes_max + 1)
        if len(content) > self._settings.bytes_max:
            raise ValueError(f"over fleet.file.bytes_max = {self._settings.bytes_max}")
        return content

    def _apply(self, content: bytes, publish: Publish) -> None:
        twice, self._latest = content == self._latest or self._known is None, content
        if not twice or (content == self._settled and not self.stats.failing):
            return
        fresh, self._settled = content != self._settled, content
        try:
            discovered = read_list(content, is_json=self._path.suffix == ".json")
        except BadListError as error:
            if fresh or not self.stats.failing:
                self._fail("malformed", f"{self._path}: {error}; the engines stay as last read")
            return
        self.stats.recovered()
        if discovered != self._known:
            self._known = discovered
            self.stats.synced = True
            self.stats.updates += 1
            _log.info("engine file read", path=str(self._path), engines=len(discovered))
            publish(discovered)

    def _fail(self, reason: str, text: str) -> None:
        if self.stats.failed(reason, text):
            _log.warning("engine file not usable", problem=self.stats.last_error)
