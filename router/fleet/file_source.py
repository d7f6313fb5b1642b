"""Engines from a watched file.

The file is read periodically, since timestamps miss quick changes and a mounted ConfigMap is replaced
through its directory. Invariants: content counts only after two consecutive readings returned the same
bytes, so a file that is being written is not used; content that cannot be read or parsed changes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvatlas.router.fleet.engines import (
    DiscoveredEngine,
    Publish,
    SourceStats,
)
from kvatlas.router.fleet.settings import FileSettings
from kvatlas.router.fleet.sources import BadListError, read_list
from kvatlas.router.http.error_texts import describe_error

_log = structlog.get_logger()


# Of a list of engines: some 5,000 entries with all addresses.
FILE_BYTES_MAX = 1 << 20


class FileSource:
    """Engines from a watched file; a ``Source``. ``settings.path`` is required."""

    name = "file"

    def __init__(self, settings: FileSettings) -> None:
        if settings.path is None:
            raise ValueError("fleet.file.path: not set")
        self.stats = SourceStats()
        self._path = Path(settings.path)
        self._settings = settings
        self._latest: bytes | None = None  # last content read
        # Last content evaluated, valid or not.
        self._settled: bytes | None = None
        self._known: list[DiscoveredEngine] | None = None

    async def run(self, publish: Publish) -> None:
        """Watch the source and report its engines, until cancelled."""
        while True:
            try:
                content = await asyncio.to_thread(self._read)
            except (OSError, ValueError) as error:
                self._latest = None
                self._fail("unreadable", f"{self._path}: {describe_error(error)}")
            else:
                self._apply(content, publish)
            await asyncio.sleep(self._settings.interval_s)

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
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
