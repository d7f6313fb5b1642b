"""Settings of ``SharedStoreConnector``: those of both halves, those of the store, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connectors.settings import ConfigError, OffloadSettings
from connectors.store.base import Options
from connectors.tier.base import StoreTierSettings
from connectors.worker.staged import StagingSettings

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
    threads: int
    keep_in_host: bool
    """Whether staging memory keeps values for later loads."""
    load_deadline_s: float
    store_deadline_s: float

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
            threads=own.whole("threads", staging.threads, low=1, high=64),
            keep_in_host=own.flag("keep_in_host", default=staging.keep),
            load_deadline_s=own.number("load_deadline_s", staging.load_deadline_s, low=0.1, high=600),
            store_deadline_s=own.number("store_deadline_s", staging.store_deadline_s, low=0.1, high=600),
        )

    def staging(self, rows: int) -> StagingSettings:
        """Settings of one rank with this many rows."""
        return StagingSettings(
            rows, self.threads, self.keep_in_host, self.load_deadline_s, self.store_deadline_s
        )
