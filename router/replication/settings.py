"""The ``index`` section of the configuration; without a URL a router keeps its own index in memory."""

from __future__ import annotations

from router.replication.redis.settings import SettingsError, SharedSettings


class IndexSettings(SharedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Residency index that several replicas share through Redis or Valkey."""

    url: str = ""
    """URL of the shared index (forms: docs/redis.md); empty: each router keeps an index of its own in
    memory. Give a URL with a password only in a file (``--index-file``), the environment
    (``KVATLAS_INDEX_URL``) or the configuration file."""
    replica: str = ""
    """Name of this replica, unique among all replicas; derived from host name and process id where empty."""

    def __post_init__(self) -> None:
        if self.url:
            super().__post_init__()
        if len(self.replica) > 200 or not self.replica.isprintable():
            raise SettingsError(f"replica {self.replica[:50]!r}: up to 200 printable characters")

    @property
    def is_shared(self) -> bool:
        return bool(self.url)
