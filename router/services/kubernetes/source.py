"""Engines in Kubernetes: reflectors of pods and slices, one per namespace, and the engines they show.

The watched pods are configured, or given by an InferencePool, which is watched too: when its selector
changes, a new watch of pods starts, and the engines stay as last known until it has listed them. Engines of
one namespace count even while another cannot be read. Invariant: the published engines are those of the
objects as last known, and change only when the objects did.

If configured, the costs of losing engines are written to their pods. A pod is patched at most once per
interval, and only if its cost changed enough; failures are counted and change nothing else.

A reflector keeps a copy of one list of objects: it lists, then watches from there, and lists again when the
history has expired. Invariants: while the API server is down, refuses or sends invalid data, the objects stay
as last known. Pauses between attempts grow up to a bound, with jitter, and are at least as long as the server
requested. A broken watch continues from its last event, so nothing is missed and no new list is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, ConfigError

from kvatlas.router.fleet.engines import Costs, DiscoveredEngine, Publish, SourceStats
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.services.kubernetes.access import AccessError, find_access
from kvatlas.router.services.kubernetes.object_store import T
from kvatlas.router.services.kubernetes.objects import (
    EndpointSlice,
    InferencePool,
    Pod,
    Received,
    ReceivedPod,
    ReceivedPool,
    ReceivedSlice,
)
from kvatlas.router.services.kubernetes.pool_engines import (
    DELETION_COST,
    PoolView,
    changed_costs,
    read_cluster,
    read_pool,
)
from kvatlas.router.services.kubernetes.reflector import Reflector, _log
from kvatlas.router.services.kubernetes.transport import BadAnswerError, RefusedError, make_client

_NOT_WRITTEN = (
    RefusedError,
    BadAnswerError,
    AccessError,
    ConfigError,
    ApiError,
    httpx2.HTTPError,
    OSError,
    msgspec.MsgspecError,
    KeyError,
    TypeError,
    ValueError,
)
_REPLACED = frozenset({404, 409})
# Between two comparisons of the costs; no pod is written more often.
_COSTS_EVERY_S = 60.0
"""Statuses of a patch whose pod is gone or another one."""


class KubernetesSource:
    """Engines in Kubernetes; a ``Source``."""

    name = "kubernetes"

    def __init__(
        self, settings: KubernetesSettings, *, costs: Costs = dict, jitter: random.Random | None = None
    ) -> None:
        self._costs = costs
        self.stats = SourceStats()
        self._settings = settings
        self._jitter = jitter or random.Random()
        self._pods: list[Reflector[Pod]] = []
        self._slices: list[Reflector[EndpointSlice]] = []
        self._pool: Reflector[InferencePool] | None = None
        self._pool_view: PoolView | None = None  # the pool whose pods are watched
        self._watching_pods: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._published: list[DiscoveredEngine] | None = None
        self._problems: set[str] = set()

    async def run(self, publish: Publish) -> None:
        """Watch the cluster and report the engines, until cancelled."""
        try:
            client = make_client(find_access(self._settings))
        except AccessError as error:
            self.stats.failed("access", str(error))
            raise
        async with client, asyncio.TaskGroup() as tasks:
            self._reflect(client, tasks)
            if self._settings.deletion_costs:
                tasks.create_task(self._write_costs(client))
            while True:
                await self._changed.wait()
                self._changed.clear()
                problem = "" if self._pool is None else self._follow_pool(self._pool, client, tasks)
                self._look(publish, problem)

    def _reflect(self, client: AsyncClient, tasks: asyncio.TaskGroup) -> None:
        settings = self._settings
        namespaces = settings.namespaces or (client.namespace,)
        self._watch_pods(settings.selector, client, tasks)
        self._slices = []
        for namespace in namespaces if settings.service_selector else ():
            slices = self._reflector(
                client, ReceivedSlice, EndpointSlice, namespace, settings.service_selector
            )
            self._slices.append(slices)
            tasks.create_task(slices.run())
        self._pool = self._pool_view = None
        if settings.inference_pool:
            name = settings.inference_pool
            self._pool = self._reflector(client, ReceivedPool, InferencePool, namespaces[0], name=name)
            tasks.create_task(self._pool.run())

    def _watch_pods(self, selector: str, client: AsyncClient, tasks: asyncio.TaskGroup) -> None:
        for task in self._watching_pods:
            task.cancel()
        self._pods = [
            self._reflector(client, ReceivedPod, Pod, namespace, selector)
            for namespace in (self._settings.namespaces or (client.namespace,) if selector else ())
        ]
        self._watching_pods = [tasks.create_task(one.run()) for one in self._pods]

    def _follow_pool(
        self, pool: Reflector[InferencePool], client: AsyncClient, tasks: asyncio.TaskGroup
    ) -> str:
        """Watch the pods that the pool selects now. Returns the problem, if any; an invalid pool changes
        nothing."""
        name = self._settings.inference_pool
        try:
            now = read_pool(pool.store, name)
        except ValueError as error:
            return str(error)
        before, self._pool_view = self._pool_view, now
        if (now and now.selector) != (before and before.selector):
            self._watch_pods("" if now is None else now.selector, client, tasks)
        return f"there is no InferencePool {name}" if now is None and pool.synced else ""

    async def _write_costs(self, client: AsyncClient) -> None:
        failed = ""
        while True:
            await asyncio.sleep(_COSTS_EVERY_S)
            try:
                await self._write_changed_costs(client)
                failed = ""
            except _NOT_WRITTEN as error:
                before, failed = failed, describe_error(error)
                self.stats.complain("deletion_cost", failed)
                if failed != before:
                    _log.warning("deletion costs could not be written", problem=failed)

    async def _write_changed_costs(self, client: AsyncClient) -> None:
        costs = self._costs()
        for pods in self._pods:
            for pod, cost in list(changed_costs(pods.store, self._published or (), costs)):
                meta = pod.metadata
                # With its uid: another pod of this name is refused (409), not written.
                patch = {"metadata": {"uid": meta.uid, "annotations": {DELETION_COST: str(cost)}}}
                try:
                    written = await client.patch(ReceivedPod, meta.name, patch, namespace=meta.namespace)
                except RefusedError as error:
                    if error.status not in _REPLACED:
                        raise
                else:
                    self.stats.deletion_costs_written += 1
                    # Before its watch shows it: a late watch must not lead to a second write.
                    pods.store.put(written.read_as(Pod))

    def _reflector(
        self,
        client: AsyncClient,
        resource: type[Received],
        kind: type[T],
        namespace: str,
        selector: str = "",
        *,
        name: str = "",
    ) -> Reflector[T]:
        return Reflector(
            client,
            resource,
            kind,
            namespace,
            selector,
            name=name,
            settings=self._settings,
            stats=self.stats,
            changed=self._changed.set,
            jitter=self._jitter,
        )

    def _look(self, publish: Publish, problem: str) -> None:
        """Publish the engines if they changed; ``problem``: what is wrong with the pool."""
        states = [(one.synced, one.failing) for one in self._pods]
        states += [(one.synced, one.failing) for one in self._slices]
        if self._pool is not None:
            states.append((self._pool.synced, self._pool.failing))
        self.stats.synced = self.stats.synced or all(synced for synced, _ in states)
        if not any(failing for _, failing in states):
            self.stats.recovered()
        ports = () if self._pool_view is None else self._pool_view.ports
        seen = read_cluster(_all(self._pods), _all(self._slices), self._settings, ports)
        problems = {*seen.problems, *filter(None, (problem,))}
        for news in sorted(problems - self._problems):
            self.stats.refused += 1
            self.stats.complain("malformed", news)
            _log.warning("Kubernetes object could not be used", problem=news)
        self._problems = problems
        # Report a pool only once all of it is known; namespaces become known one by one.
        known = (all if self._pool is not None else any)(synced for synced, _ in states)
        if seen.discovered != self._published and known:
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
