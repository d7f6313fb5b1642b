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
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeVar, cast

import httpx2
import msgspec
import structlog
from lightkube import ApiError, AsyncClient, ConfigError, NotReadyError

from kvatlas.router.fleet.engines import Costs, DiscoveredEngine, Publish, SourceStats
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.http.error_texts import describe_error
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
from kvatlas.router.services.kubernetes.transport import (
    AccessError,
    BadAnswerError,
    RefusedError,
    WatchEndedError,
    find_access,
    make_client,
)

# All objects of one list, updated by a watch's events, in whatever order and however often they come. Pure.
#
# The newest version of an object wins, also over its deletion, so late and repeated events change nothing.
# Versions are compared as numbers, as Kubernetes' own components do and as the API guarantees since 1.35; if
# they are not numbers, the order of arrival counts. A list replaces everything.


T = TypeVar("T", Pod, EndpointSlice, InferencePool)
# Deleted objects remembered until the next list.
_DELETED_MAX = 4096


class _Known(NamedTuple, Generic[T]):
    version: str
    object: T | None
    """None: deleted."""


class ObjectStore(Generic[T]):
    """The objects of one list."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known[T]] = {}
        self._deleted: dict[tuple[str, str], None] = {}

    def __iter__(self) -> Iterator[T]:
        return (known.object for known in self._known.values() if known.object is not None)

    def __len__(self) -> int:
        return len(self._known) - len(self._deleted)

    def replace(self, objects: Iterable[T]) -> None:
        self._known = {_key(one): _Known(one.metadata.resource_version, one) for one in objects}
        self._deleted = {}

    def put(self, one: T) -> bool:
        """Add or update an object. False if the event was outdated."""
        return self._note(one, _Known(one.metadata.resource_version, one))

    def delete(self, one: T) -> bool:
        """Delete an object; ``one`` is its last state. False if the event was outdated."""
        return self._note(one, _Known(one.metadata.resource_version, None))

    def _note(self, one: T, now: _Known[T]) -> bool:
        key = _key(one)
        known = self._known.get(key)
        if known is not None and not _newer(now.version, known.version):
            return False
        self._known[key] = now
        self._deleted.pop(key, None)
        if now.object is None:
            self._deleted[key] = None
            if len(self._deleted) > _DELETED_MAX:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest], self._known[oldest]
        return True


def _key(one: Pod | EndpointSlice | InferencePool) -> tuple[str, str]:
    return one.metadata.namespace, one.metadata.name


def _newer(version: str, than: str) -> bool:
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return True


_log = structlog.get_logger()
_Events = AsyncGenerator[tuple[str, Received], None]
_GONE = 410
_RETRY_S_MIN = 0.2
# Pause between attempts while the API server refuses or does not answer, doubled up to this.
RETRY_S_MAX = 30.0
# Of each kind; a selector that matches more is probably wrong.
OBJECTS_MAX = 10_000
# A watch that ends earlier without any event is restarted only after a pause.
_SHORT_WATCH_S = 1.0
# Consecutive failures after which to list again: the history may differ, e.g. after a restored backup.
_LIST_AFTER = 3
_PAGE = 250
# Maximum duration of a list, including all its pages and a plug-in's login.
_LIST_S = 120.0
# Tolerance for the promised end of a watch.
_SILENCE_S = 15.0
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Reflector(Generic[T]):
    """Runs until cancelled. ``changed`` is called whenever ``store`` may differ; ``selector`` selects labels,
    ``name`` the only object wanted."""

    def __init__(
        self,
        client: AsyncClient,
        resource: type[Received],
        kind: type[T],
        namespace: str,
        selector: str,
        *,
        name: str = "",
        settings: KubernetesSettings,
        stats: SourceStats,
        changed: Callable[[], None],
        jitter: random.Random,
    ) -> None:
        self.store: ObjectStore[T] = ObjectStore()
        self.synced = False
        self.failing = False
        self._client = client
        self._resource = resource
        self._kind: type[T] = kind
        self._namespace = namespace
        # lightkube sends a key without a value unchanged
        self._selected: dict[str, Any] = {"labels": {selector: None}} if selector else {}
        if name:
            self._selected["fields"] = {"metadata.name": name}
        self._where = f"{client.config.cluster.server}: {kind.__name__} in {namespace}"
        self._settings = settings
        self._stats = stats
        self._changed = changed
        self._jitter = jitter
        # Last version received; None: list first.
        self._version: str | None = None
        self._failures = 0

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            pause_s = 0.0
            try:
                if self._version is None:
                    await self._list()
                pause_s = await self._watch()
            except RefusedError as error:
                pause_s = self._failed(_reason(error.status), error, asked_s=error.retry_after_s)
            except (BadAnswerError, *_BAD) as error:
                self._version = None
                pause_s = self._failed("bad_answer", error)
            except (AccessError, ConfigError) as error:
                pause_s = self._failed("access", error)
            except ApiError as error:  # in a watch
                pause_s = self._failed(_reason(error.status.code or 0), error)
            except httpx2.HTTPStatusError as error:  # the login was refused again
                pause_s = self._failed(_reason(error.response.status_code), error)
            except (KeyError, TypeError, ValueError) as error:
                user = self._client.config.user
                if user is None or user.exec is None:
                    raise
                told = AccessError(
                    f"login plug-in {user.exec.command} gave no token: {describe_error(error)}"
                )
                pause_s = self._failed("access", told)
            except (httpx2.HTTPError, TimeoutError, OSError) as error:
                pause_s = self._failed("connection", error)
            await asyncio.sleep(pause_s)

    def _failed(self, reason: str, error: Exception, *, asked_s: float = 0.0) -> float:
        """Count a failure. Returns the pause before the next attempt."""
        if reason == "gone":
            self._version = None
        self._failures += 1
        if self._failures >= _LIST_AFTER:
            self._version = None
        first_gone = reason == "gone" and self._failures == 1
        if not first_gone:  # expired history is normal
            self.failing = True
            if self._stats.failed(reason, f"{self._where}: {_text(error)}"):
                _log.warning("Kubernetes API", problem=self._stats.last_error)
        else:
            self._stats.complain(reason, str(error))
        most_s = min(RETRY_S_MAX, _RETRY_S_MIN * 2 ** min(self._failures, 16))
        own_s = 0.0 if first_gone else self._jitter.uniform(most_s / 2, most_s)
        return max(own_s, asked_s)

    def _worked(self) -> None:
        self._failures = 0
        if self.failing:
            self.failing = False
            self._changed()

    async def _list(self) -> None:
        found: list[T] = []
        listing = self._client.list(
            self._resource, namespace=self._namespace, chunk_size=_PAGE, **self._selected
        )
        async with asyncio.timeout(_LIST_S):
            async for one in listing:
                understood = self._understood(one)
                if understood is not None:
                    found.append(understood)
                if len(found) > OBJECTS_MAX:
                    raise BadAnswerError(f"more than {OBJECTS_MAX} objects; narrow the selector")
        try:
            version = listing.resourceVersion
        except NotReadyError:
            raise BadAnswerError("a list without resourceVersion") from None
        self.store.replace(found)
        self._version, self.synced = version, True
        self.failing = False
        self._changed()

    async def _watch(self) -> float:
        """Run one watch. Returns the pause before the next."""
        loop = asyncio.get_running_loop()
        began, synced, watch_s = loop.time(), False, self._settings.watch_s
        events = self._client.watch(
            self._resource,
            namespace=self._namespace,
            **self._selected,
            server_timeout=max(1, round(watch_s)),
            resource_version=self._version,
        )
        try:
            async with asyncio.timeout(watch_s + _SILENCE_S), aclosing(cast(_Events, events)):
                async for event, one in events:
                    synced = True
                    self._hear(event, one)
                    self._worked()
        except WatchEndedError:
            pass
        if synced or loop.time() - began >= _SHORT_WATCH_S:
            self._worked()
            return 0.0
        self._failures += 1
        return self._jitter.uniform(_SHORT_WATCH_S / 2, _SHORT_WATCH_S)

    def _hear(self, event: str, one: Received) -> None:
        version = one.metadata.resourceVersion
        if not version:
            raise BadAnswerError(f"{event[:40]} without resourceVersion")
        if event in {"ADDED", "MODIFIED", "DELETED"}:
            understood = self._understood(one)
            if understood is not None:
                store = self.store.delete if event == "DELETED" else self.store.put
                news = store(understood)
                if len(self.store) > OBJECTS_MAX:
                    raise BadAnswerError(f"more than {OBJECTS_MAX} objects; narrow the selector")
                if news:
                    self._changed()
        self._version = version

    def _understood(self, one: Received) -> T | None:
        """Decode an object; an invalid one affects only itself."""
        try:
            return one.read_as(self._kind)
        except _BAD as error:
            self._stats.refused += 1
            self._stats.complain("malformed", f"{self._where}: {error}")
            return None


def _text(error: Exception) -> str:
    if isinstance(error, ApiError):
        return f"{error.status.reason or error.status.code} {error.status.message or ''}".strip()
    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.text
    return describe_error(error)


def _reason(status: int) -> str:
    known = {401: "unauthorized", 403: "forbidden", 404: "not_found", _GONE: "gone", 429: "throttled"}
    return known.get(status, "server_error" if status >= 500 or not status else "refused")


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
            await asyncio.sleep(self._settings.deletion_cost_interval_s)
            try:
                await self._write_changed_costs(client)
                failed = ""
            except _NOT_WRITTEN as error:
                before, failed = failed, describe_error(error)
                self.stats.complain("deletion_cost", failed)
                if failed != before:
                    _log.warning("deletion costs could not be written", problem=failed)

    async def _write_changed_costs(self, client: AsyncClient) -> None:
        share, costs = self._settings.deletion_cost_change, self._costs()
        for pods in self._pods:
            for pod, cost in list(changed_costs(pods.store, self._published or (), costs, share)):
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
