"""Settings of ``SharedStoreConnector``, and the store that they describe, opened behind a circuit breaker.

A store is described by settings such as ``{"kind": "file", "path": ...}``.
"""

from __future__ import annotations

import importlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvatlas.connectors.settings import ConfigError, OffloadSettings, Options
from kvatlas.connectors.store.base import BlockStore, Counters, StoreUnavailable
from kvatlas.connectors.tier.base import StoreTierSettings
from kvatlas.connectors.worker.staged import StagingSettings

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Circuit:
    """Closed (calls pass) until ``failures_max`` calls in a row failed; then open, with occasional attempts.

    Circuit breaker of a store: after several failures in a row, calls fail immediately for a while.

    ``Circuit`` counts failures and allows a new attempt, by one caller at a time, after a pause that doubles
    with every failed attempt. ``GuardedStore`` puts one in front of any store. Both are thread-safe.
    """

    def __init__(
        self,
        name: str,
        *,
        failures_max: int = 3,
        first_pause_s: float = 0.2,
        longest_pause_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._failures_max = failures_max
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until = 0.0
        self._trying = False

    def enter(self) -> None:
        """Call it before a call to the store. Raises StoreUnavailable while the circuit is open."""
        with self._lock:
            if self._failures < self._failures_max:
                return
            if self._trying or self._clock() < self._open_until:
                raise StoreUnavailable(f"store {self._name} is left alone after {self._failures} failures")
            self._trying = True

    def succeeded(self) -> None:
        with self._lock:
            if self._failures >= self._failures_max:
                log.info("store %s answers again", self._name)
            self._failures, self._trying = 0, False

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            self._trying = False
            beyond = self._failures - self._failures_max
            if beyond < 0:
                return
            # Cap the exponent: a store may be unavailable for days.
            pause_s = min(self._longest_pause_s, self._first_pause_s * 2 ** min(beyond, 30))
            # Jitter keeps engines that lost the same store from retrying at the same time.
            self._open_until = self._clock() + pause_s * random.uniform(0.5, 1.0)
            if beyond == 0:
                log.warning("store %s does not answer, going on without it: %s", self._name, error)


class GuardedStore:
    """A ``BlockStore`` behind a circuit. Every error becomes ``StoreUnavailable``."""

    def __init__(self, store: BlockStore, circuit: Circuit | None = None) -> None:
        self._store = store
        self._circuit = circuit or Circuit(store.name)
        self._counters = Counters()
        self.name = store.name

    def register_buffer(self, buffer: memoryview) -> None:
        self._store.register_buffer(buffer)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        return self._call(lambda: self._store.exists(keys, deadline_s))

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        return self._call(lambda: self._store.put(items, deadline_s))

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        return self._call(lambda: self._store.get_into(items, deadline_s))

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        self._call(lambda: self._store.remove(keys, deadline_s))

    def counters(self) -> dict[str, int]:
        return self._store.counters() | self._counters.snapshot()

    def close(self) -> None:
        self._store.close()

    def _call(self, ask: Callable[[], Answer]) -> Answer:
        try:
            self._circuit.enter()
        except StoreUnavailable:
            self._counters.add("left_alone")
            raise
        try:
            answer = ask()
        except Exception as error:
            self._circuit.failed(error)
            self._counters.add("unavailable")
            if isinstance(error, StoreUnavailable):
                raise
            raise StoreUnavailable(f"store {self.name}: {type(error).__name__}: {error}") from error
        self._circuit.succeeded()
        return answer


# Settings and store of each kind, and the argument by which only one half sweeps or lends memory.
_CLASSES = {
    "file": ("FileSettings", "FileStore", "sweeps"),
    "mooncake": ("MooncakeSettings", "MooncakeStore", "lends"),
    "redis": ("RedisSettings", "RedisStore", ""),
}
KINDS = tuple(_CLASSES)


def open_store(config: object, *, where: str = "store", lookup_only: bool = False) -> GuardedStore:
    """Open the store that these settings describe, behind a circuit.

    ``lookup_only``: for the half that only calls ``exists``; it enforces no size limit and contributes no
    memory. ConfigError for an unknown key or an invalid value; StoreUnavailable if a directory or service
    that is needed at start is missing.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(where, config, 'give a mapping, e.g. {"kind": "file", "path": "/dev/shm/kv"}')
    options = Options(config, where)
    kind = options.text("kind", choices=KINDS)
    name = options.text("name", kind)
    settings_class, store_class, active = _CLASSES[kind]
    # Each kind has its own dependencies.
    module = importlib.import_module(f"kvatlas.connectors.store.{kind}")
    settings = getattr(module, settings_class).parse(options)
    options.finish()
    more = {active: not lookup_only} if active else {}
    return GuardedStore(getattr(module, store_class)(settings, name=name, **more))


_OWN = (
    "store",
    "label",
    "threads",
    "keep_in_host",
    "load_deadline_s",
    "store_deadline_s",
    "held_for_s",
    "absent_for_s",
    "quarantine_s",
)
_OF_HOST_TIERS = ("policy", "hint_share")


@dataclass(frozen=True)
class SharedSettings:
    """Parsed settings; ``host_bytes`` of ``offload`` is the staging memory of all ranks together."""

    offload: OffloadSettings
    tier: StoreTierSettings
    store: Mapping[str, Any]
    label: str
    """Part of the namespace: engines with different labels never share blocks."""
    staging: StagingSettings
    """Without the number of rows, which differs between ranks."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], where: str) -> SharedSettings:
        """Parse ``kv_connector_extra_config``. ConfigError for an unknown key or a value out of range."""
        for name in _OF_HOST_TIERS:
            if name in extra:
                raise ConfigError(f"{where}.{name}", extra[name], "leave it out: the store evicts by itself")
        offload = OffloadSettings.parse(extra, where, others=_OWN)
        own = Options(extra, where)
        store = extra.get("store")
        if not isinstance(store, Mapping):
            raise ConfigError(
                f"{where}.store", store, 'give e.g. {"kind": "file", "path": "/dev/shm/blocks"}'
            )
        tier, staging = StoreTierSettings, StagingSettings
        return cls(
            offload=offload,
            tier=StoreTierSettings(
                # A lookup may take two rounds (``HitResolver.lookup_keys``).
                lookup_deadline_s=offload.lookup_deadline_s / 2,
                held_for_s=own.number("held_for_s", tier.held_for_s, low=0.1, high=3600),
                absent_for_s=own.number("absent_for_s", tier.absent_for_s, low=0.1, high=3600),
                quarantine_s=own.number("quarantine_s", tier.quarantine_s, low=1, high=86400),
            ),
            store=dict(store),
            label=own.text("label", ""),
            staging=StagingSettings(
                threads=own.whole("threads", staging.threads, low=1, high=64),
                keep=own.flag("keep_in_host", default=staging.keep),
                load_deadline_s=own.number("load_deadline_s", staging.load_deadline_s, low=0.1, high=600),
                store_deadline_s=own.number("store_deadline_s", staging.store_deadline_s, low=0.1, high=600),
            ),
        )
