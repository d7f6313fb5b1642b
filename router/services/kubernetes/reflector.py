"""One list of the API server, kept current by watches and read again where a watch breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, cast

import httpx2
import msgspec
import structlog
from lightkube import ApiError, AsyncClient, ConfigError, NotReadyError

from kvatlas.router.fleet.engines import SourceStats
from kvatlas.router.fleet.settings import KubernetesSettings
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.services.kubernetes.access import AccessError
from kvatlas.router.services.kubernetes.object_store import ObjectStore, T
from kvatlas.router.services.kubernetes.objects import Received
from kvatlas.router.services.kubernetes.transport import BadAnswerError, RefusedError, WatchEndedError

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
