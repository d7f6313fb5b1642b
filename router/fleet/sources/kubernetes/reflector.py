"""Keeps the objects of one list true: list once, then watch from there, and list again when history is gone.

Always true: while the API server is away, refuses or talks nonsense, the objects stay as last known; pauses
grow from try to try up to a bound, with jitter, and are at least what the server asked for; a watch that
breaks is continued where it was heard last, so nothing is missed and nothing is listed twice for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Generic, TypeVar

import aiohttp
import msgspec
import structlog

from router.fleet.settings import KubernetesSettings
from router.fleet.sources.base import SourceStats
from router.fleet.sources.kubernetes.access import AccessError
from router.fleet.sources.kubernetes.client import BadAnswerError, KubeClient, RefusedError
from router.fleet.sources.kubernetes.objects import EndpointSlice, Pod, Status, Versioned, WatchEvent
from router.fleet.sources.kubernetes.store import ObjectStore

_log = structlog.get_logger()
T = TypeVar("T", Pod, EndpointSlice)
_GONE = 410
_RETRY_S_MIN = 0.2
_SHORT_WATCH_S = 1.0
"""A watch that ends sooner without having told anything is not begun again at once."""
_LIST_AFTER = 3
"""Failures in a row after which to list anew: the history may be another one, as after a restored backup."""
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Reflector(Generic[T]):
    """Runs until cancelled. ``changed`` is called whenever ``store`` may differ."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        selector: str,
        kind: type[T],
        *,
        settings: KubernetesSettings,
        stats: SourceStats,
        changed: Callable[[], None],
        jitter: random.Random,
    ) -> None:
        self.store: ObjectStore[T] = ObjectStore()
        self.synced = False
        self.failing = False
        self._client = client
        self._path = path
        self._selector = selector
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._settings = settings
        self._stats = stats
        self._changed = changed
        self._jitter = jitter
        self._version: str | None = None  # heard up to here; None: list first
        self._failures = 0

    async def run(self) -> None:
        """List and watch for ever."""
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
            except AccessError as error:
                pause_s = self._failed("access", error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                pause_s = self._failed("connection", error)
            await asyncio.sleep(pause_s)

    def _failed(self, reason: str, error: Exception, *, asked_s: float = 0.0) -> float:
        """Count it; how long to wait."""
        if reason == "gone":
            self._version = None
        self._failures += 1
        if self._failures >= _LIST_AFTER:
            self._version = None
        first_gone = reason == "gone" and self._failures == 1
        if not first_gone:  # history that ran out is daily business
            self.failing = True
            text = str(error) or type(error).__name__
            if self._stats.failed(reason, text if self._path in text else f"GET {self._path}: {text}"):
                _log.warning("Kubernetes API", problem=self._stats.last_error)
        else:
            self._stats.complain(reason, str(error))
        most_s = min(self._settings.retry_s_max, _RETRY_S_MIN * 2 ** min(self._failures, 16))
        own_s = 0.0 if first_gone else self._jitter.uniform(most_s / 2, most_s)
        return max(own_s, asked_s)

    def _worked(self) -> None:
        self._failures = 0
        if self.failing:
            self.failing = False
            self._changed()

    async def _list(self) -> None:
        found: list[T] = []
        version = ""
        async for page in self._client.pages(self._path, self._selector):
            version = page.metadata.resource_version
            for raw in page.items or ():
                one = self._decode(raw)
                if one is not None:
                    found.append(one)
            if len(found) > self._settings.objects_max:
                raise BadAnswerError(
                    f"GET {self._path}: more than fleet.kubernetes.objects_max = "
                    f"{self._settings.objects_max} objects; narrow the selector"
                )
        if not version:
            raise BadAnswerError(f"GET {self._path}: a list without resourceVersion")
        self.store.replace(found)
        self._version, self.synced = version, True
        self.failing = False
        self._changed()

    async def _watch(self) -> float:
        """One watch; how long to wait before the next."""
        loop = asyncio.get_running_loop()
        began, heard = loop.time(), False
        lines = self._client.watch(self._path, self._selector, self._version or "", self._settings.watch_s)
        async for line in lines:
            heard = True
            self._hear(msgspec.json.decode(line, type=WatchEvent))
            self._worked()
        if heard or loop.time() - began >= _SHORT_WATCH_S:
            self._worked()
            return 0.0
        self._failures += 1
        return self._jitter.uniform(_SHORT_WATCH_S / 2, _SHORT_WATCH_S)

    def _hear(self, event: WatchEvent) -> None:
        """One event. Raises ``RefusedError`` for one that ends the watch."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            raise RefusedError(status.code, f"watch {self._path}: {status.reason} {status.message}")
        version = msgspec.json.decode(event.object, type=Versioned).metadata.resource_version
        if not version:
            raise BadAnswerError(f"watch {self._path}: {event.type[:40]} without resourceVersion")
        if event.type in {"ADDED", "MODIFIED", "DELETED"}:
            one = self._decode(event.object)
            if one is not None:
                news = self.store.delete(one) if event.type == "DELETED" else self.store.put(one)
                if len(self.store) > self._settings.objects_max:
                    raise BadAnswerError(f"watch {self._path}: more objects than objects_max")
                if news:
                    self._changed()
        self._version = version

    def _decode(self, raw: msgspec.Raw) -> T | None:
        """An object; one that is not understood costs only itself."""
        try:
            return self._decoder.decode(raw)
        except _BAD as error:
            self._stats.refused += 1
            self._stats.complain("malformed", f"{self._path}: {error}")
            return None


def _reason(status: int) -> str:
    """A fixed word for a status."""
    known = {401: "unauthorized", 403: "forbidden", 404: "not_found", _GONE: "gone", 429: "throttled"}
    return known.get(status, "server_error" if status >= 500 or not status else "refused")
