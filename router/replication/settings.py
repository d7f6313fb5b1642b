"""The ``index`` section of the configuration: URL, leases, timeouts. Without a URL a router keeps its own
index.

Neither ``repr`` nor ``str`` of a URL's settings shows a password.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvatlas.router.replication.index_url import SettingsError, parse_url, redacted

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class SharedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the shared index.

    All replicas of one fleet must agree on ``namespace``; the rest may differ.

    ``partitions`` (0: 1 on one server, 16 in a Cluster) and ``code_bytes`` are fixed by the replica that
    opens a scope first; others use its values.
    """

    url: str
    namespace: str = "kva"
    """First part of every key; all replicas of a fleet must agree on it. Keep it short: it is stored once per
    block. Change it if two fleets share one server."""
    lease_s: float = 3.0
    """Life of the lease a replica holds on an engine's feed, in seconds; another replica takes over when it
    expires. Raise it if replicas pause for longer, or the server is far away; lower it for a faster
    takeover."""
    # Not a key of the configuration: config/removed.py.
    renew_s: float | None = None
    """Seconds between two renewals of leases; None: as ``renewal_s`` derives it."""
    lookup_timeout_s: float = 0.005
    """Timeout of a lookup of up to 1000 blocks, in seconds; proportionally longer for more.

    If it fails, the request is placed by the router's local knowledge. Raise it to ten round trips if the
    server is not in the same data centre."""
    # Not a key of the configuration: config/removed.py.
    write_timeout_s: float = 2.0
    """Timeout of a write, in seconds."""
    # Not a key of the configuration: config/removed.py.
    connect_timeout_s: float = 1.0
    """Timeout of a connection to the server, in seconds."""
    # Not a key of the configuration: config/removed.py.
    block_ttl_s: float = 3600.0
    """Time to live of a block's key, in seconds; writers refresh theirs three times as often."""
    # Not a key of the configuration: config/removed.py.
    partitions: int = 0
    """Number of partitions of a model's blocks: a power of two up to 64, or 0 for 1 on a single server and
    16 in a Cluster. Fixed by the first replica of a model."""
    code_bytes: int = 1
    """1 or 2: room for 255 or 65535 different sets of (medium, group) that a block can be held in. Fixed by
    the first replica of a model. Set 2 for models with many groups on engines with several connectors."""

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise SettingsError(f"namespace {self.namespace!r}: 1 to 32 letters, digits, '_', '.', '-'")
        if self.code_bytes not in {1, 2}:
            raise SettingsError(f"code_bytes {self.code_bytes}: 1 or 2")
        if not 0 <= self.partitions <= 64 or self.partitions & (self.partitions - 1):
            raise SettingsError(f"partitions {self.partitions}: 0 or a power of two up to 64")
        if not 0 < self.lease_s < self.block_ttl_s:
            raise SettingsError(
                f"lease_s = {self.lease_s}: expected more than 0 and less than {self.block_ttl_s:g}"
            )
        if not 0 < self.renewal_s < self.lease_s:
            raise SettingsError(f"renew_s = {self.renew_s}: expected more than 0 and less than lease_s")
        parse_url(self.url)

    @property
    def renewal_s(self) -> float:
        """Seconds between two renewals of leases: two may fail before a lease ends."""
        return self.lease_s / 3 if self.renew_s is None else self.renew_s

    @property
    def control_ttl_s(self) -> float:
        """Time to live of a scope's registry: much longer than that of its blocks."""
        return 10 * self.block_ttl_s

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "url"}
        return (
            f"SharedSettings(url={redacted(self.url)!r}, {', '.join(f'{k}={v!r}' for k, v in shown.items())})"
        )

    __str__ = __repr__


class IndexSettings(SharedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Residency index that several replicas share through Redis or Valkey."""

    url: str = ""
    """URL of the shared index (forms: docs/redis.md); empty: each router keeps an index of its own in memory.
    Give a URL with a password only in a file (``--index-file``), the environment (``KVATLAS_INDEX_URL``) or
    the configuration file. Set it when there are several routers."""
    replica: str = ""
    """Name of this replica, unique among all replicas; derived from host name and process id where empty. Set
    it for names in logs that survive a restart."""

    share: Literal["blocks", "load"] = "blocks"
    """Content of the exchange through ``url``. ``blocks``: who holds which block, each engine followed by one
    replica. ``load``: load, prompts in flight, limits and deaths only, every replica following all engines as
    workers do. Set ``load`` below about thirty replicas (docs/redis.md#share-load-only)."""

    def __post_init__(self) -> None:
        if self.url:
            super().__post_init__()
        for key, default in (("code_bytes", 1), ("lookup_timeout_s", 0.005)):
            if self.share == "load" and getattr(self, key) != default:
                raise SettingsError(f"{key} = {getattr(self, key)}: is for look-ups of blocks, and there are "
                                    "none with share = 'load'; remove one of the two")  # fmt: skip
        if len(self.replica) > 200 or not self.replica.isprintable():
            raise SettingsError(f"replica {self.replica[:50]!r}: up to 200 printable characters")

    @property
    def is_shared(self) -> bool:
        return bool(self.url)

    @property
    def shares_blocks(self) -> bool:
        return self.is_shared and self.share == "blocks"
