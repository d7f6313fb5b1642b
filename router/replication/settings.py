"""The ``index`` section of the configuration: without a URL a router has an index of its own, in memory."""

from __future__ import annotations

from router.replication.redis.settings import SettingsError, SharedSettings


class IndexSettings(SharedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index that several replicas share through Redis or Valkey, and this replica's part in it."""

    url: str = ""
    """Where the shared index lies (docs/redis.md); "" for an index of this router's own. With a password
    only in a file (``--index-file``), the environment (``KVATLAS_INDEX_URL``) or the configuration file."""
    replica: str = ""
    """This replica's name, of its own among all; made from host name and process where not given."""
    load_interval_s: float = 0.05
    """In-flight load is told to the other replicas at most so often."""

    def __post_init__(self) -> None:
        if self.url:
            super().__post_init__()
        if len(self.replica) > 200 or not self.replica.isprintable():
            raise SettingsError(f"replica {self.replica[:50]!r}: up to 200 printable characters")

    @property
    def is_shared(self) -> bool:
        return bool(self.url)
