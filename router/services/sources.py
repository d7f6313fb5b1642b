"""The sources of engines that a configuration turns on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvatlas.router.fleet.engines import CannotStartError, Costs, Source
from kvatlas.router.fleet.file_source import FileSource
from kvatlas.router.fleet.settings import FleetSettings


def configured_sources(settings: FleetSettings, costs: Costs = dict) -> Iterator[Source]:
    """Make each source that is on; ``costs`` are those of losing each server, if this router reports them."""
    # A library is imported only by the source that needs it: each takes 5 MiB (measured).
    if settings.file.on:
        yield FileSource(settings.file)
    if settings.kubernetes.on:
        with _extra("kubernetes"):
            from kvatlas.router.services.kubernetes.source import KubernetesSource

        yield KubernetesSource(settings.kubernetes, costs=costs)
    if settings.dns.on:
        with _extra("dns"):
            from kvatlas.router.services.dns_source import DnsSource

        yield DnsSource(settings.dns)


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Say which extra brings a missing library, and the setting that needs it: they have the same name."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise CannotStartError(
            f"fleet.{name}: needs the Python module {missing.name!r}, which the extra {name!r} brings: "
            f"python -m pip install 'FILE.whl[{name}]', in a checkout '.[{name}]'"
        ) from None
