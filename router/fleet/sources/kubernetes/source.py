"""Engines in Kubernetes: reflectors of pods and slices, one per namespace, and what their objects show.

What one namespace shows counts also while another cannot be read. Always true: the picture told is that of
the objects as last known, and changes only when theirs did.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

import structlog
from lightkube import AsyncClient

from router.fleet.settings import KubernetesSettings
from router.fleet.sources.base import DiscoveredEngine, Publish, SourceStats
from router.fleet.sources.kubernetes.access import AccessError, find_access
from router.fleet.sources.kubernetes.cluster_view import read_cluster
from router.fleet.sources.kubernetes.objects import EndpointSlice, Pod, Received, ReceivedPod, ReceivedSlice
from router.fleet.sources.kubernetes.reflector import Reflector, T
from router.fleet.sources.kubernetes.transport import make_client

_log = structlog.get_logger()


class KubernetesSource:
    """See the module; a ``Source``."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, *, jitter: random.Random | None = None) -> None:
        self.stats = SourceStats()
        self._settings = settings
        self._jitter = jitter or random.Random()
        self._pods: list[Reflector[Pod]] = []
        self._slices: list[Reflector[EndpointSlice]] = []
        self._changed = asyncio.Event()
        self._published: list[DiscoveredEngine] | None = None
        self._problems: set[str] = set()

    async def run(self, publish: Publish) -> None:
        """See ``Source``."""
        try:
            client = make_client(find_access(self._settings))
        except AccessError as error:
            self.stats.failed("access", str(error))
            raise
        async with client, asyncio.TaskGroup() as tasks:
            self._reflect(client)
            for work in [*(one.run() for one in self._pods), *(one.run() for one in self._slices)]:
                tasks.create_task(work)
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._look(publish)

    def _reflect(self, client: AsyncClient) -> None:
        settings = self._settings
        self._pods, self._slices = [], []
        for namespace in settings.namespaces or (client.namespace,):
            if settings.selector:
                pods = self._reflector(client, ReceivedPod, Pod, namespace, settings.selector)
                self._pods.append(pods)
            if settings.service_selector:
                slices = self._reflector(
                    client, ReceivedSlice, EndpointSlice, namespace, settings.service_selector
                )
                self._slices.append(slices)

    def _reflector(
        self, client: AsyncClient, resource: type[Received], kind: type[T], namespace: str, selector: str
    ) -> Reflector[T]:
        return Reflector(
            client,
            resource,
            kind,
            namespace,
            selector,
            settings=self._settings,
            stats=self.stats,
            changed=self._changed.set,
            jitter=self._jitter,
        )

    def _look(self, publish: Publish) -> None:
        """Tell of the picture, if it is another one."""
        states = [(one.synced, one.failing) for one in self._pods]
        states += [(one.synced, one.failing) for one in self._slices]
        self.stats.synced = self.stats.synced or all(synced for synced, _ in states)
        if not any(failing for _, failing in states):
            self.stats.recovered()
        seen = read_cluster(_all(self._pods), _all(self._slices), self._settings)
        for problem in sorted(set(seen.problems) - self._problems):
            self.stats.refused += 1
            self.stats.complain("malformed", problem)
            _log.warning("Kubernetes object could not be parsed", problem=problem)
        self._problems = set(seen.problems)
        if seen.discovered != self._published and any(synced for synced, _ in states):
            self._published = seen.discovered
            self.stats.updates += 1
            _log.info(
                "engines in Kubernetes",
                engines=len(seen.discovered),
                held=sum(bool(one.held) for one in seen.discovered),
            )
            publish(seen.discovered)


def _all(reflectors: list[Reflector[T]]) -> Iterator[T]:
    return itertools.chain.from_iterable(reflector.store for reflector in reflectors)
