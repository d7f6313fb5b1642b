"""Runs every source of engines and merges their sets into the desired state.

Invariants: a source that fails through a bug is restarted, and the others continue; engines with invalid
addresses never reach the desired state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import structlog

from router.fleet.desired import STATIC, DesiredState
from router.fleet.identity import EngineAddress
from router.fleet.settings import FleetSettings
from router.fleet.sources import (
    CannotStartError,
    DiscoveredEngine,
    FileSource,
    Source,
    SourceStats,
    check_address,
)

_log = structlog.get_logger()
_AFTER_FAULT_S = 2.0


class FleetSources:
    """All sources of one router. ``changed`` is called when the desired state may differ."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        settings: FleetSettings,
        desired: DesiredState,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._static = SourceStats(synced=True)
        self._sources: list[Source] = list(_configured(settings))
        self._desired = desired
        self._changed = changed
        self.set_static(engines)

    def set_static(self, engines: Sequence[EngineAddress]) -> None:
        """Set the engines that the configuration lists."""
        self._static.engines = len(engines)
        self._desired.set_source(STATIC, [DiscoveredEngine(engine) for engine in engines])

    @property
    def stats(self) -> dict[str, SourceStats]:
        """Statistics by source, the static list included."""
        return {STATIC: self._static, **{source.name: source.stats for source in self._sources}}

    def unsynced(self) -> list[str]:
        """Return the sources that have not reported their whole set yet, with the reason if known."""
        return [
            f"{source.name} ({source.stats.last_error})" if source.stats.last_error else source.name
            for source in self._sources
            if not source.stats.synced
        ]

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._run_restarting(source), name=f"source {source.name}")

    async def _run_restarting(self, source: Source) -> None:
        while True:
            try:
                await source.run(lambda discovered: self._apply(source, discovered))
            except* CannotStartError as errors:
                text = str(errors.exceptions[0])
                if source.stats.failed("access", text):
                    _log.warning("source of engines cannot start", source=source.name, problem=text)
            except* Exception:  # noqa: BLE001  # whatever it is, the engines that are known stay
                source.stats.failed("fault", "internal error in the router; see its log")
                _log.exception("source of engines failed, restarting it", source=source.name)
            await asyncio.sleep(_AFTER_FAULT_S)

    def _apply(self, source: Source, discovered: Sequence[DiscoveredEngine]) -> None:
        usable = []
        for one in discovered:
            try:
                check_address(one.engine)
            except ValueError as error:
                source.stats.refused += 1
                source.stats.complain("malformed", str(error))
            else:
                usable.append(one)
        source.stats.engines = len(usable)
        self._desired.set_source(source.name, usable)
        if self._desired.left_out:
            source.stats.complain("fleet_full", f"{self._desired.left_out} servers over fleet.engines_max")
            _log.warning("more engines than fleet.engines_max", left_out=self._desired.left_out)
        self._changed()


def _configured(settings: FleetSettings) -> Iterator[Source]:
    """Yield the enabled sources.

    A library is imported only by the source that needs it: each takes 5 MiB (measured).
    """
    if settings.file.on:
        yield FileSource(settings.file)
    if settings.kubernetes.on:
        from router.fleet.kubernetes.source import KubernetesSource

        yield KubernetesSource(settings.kubernetes)
    if settings.dns.on:
        from router.fleet.sources import DnsSource

        yield DnsSource(settings.dns)
