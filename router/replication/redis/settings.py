"""Settings of the shared index: URL, leases, time-outs. Neither ``repr`` nor ``str`` shows a password."""

from __future__ import annotations

import re

import msgspec

from router.replication.redis.url import SettingsError, parse_url, redacted

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


class SharedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All replicas of one fleet must agree on ``namespace``; the rest may differ.

    ``partitions`` (0: 1 on one server, 16 in a Cluster) and ``code_bytes`` are fixed by whoever opens a scope
    first; others take them over from there.
    """

    url: str
    namespace: str = "kva"
    """First part of every key; all replicas of a fleet must agree on it. Keep it short: it is stored once
    per block."""
    lease_s: float = 3.0
    """Life of the lease a replica holds on an engine's feed, in seconds; another replica takes over when
    it expires."""
    renew_s: float = 1.0
    """Seconds between two renewals of leases; must be below `lease_s`."""
    lookup_timeout_s: float = 0.005
    """Time-out of a look-up of up to 1000 blocks, in seconds; grows in proportion for more. A request
    whose look-up fails is placed by what its router knows itself."""
    write_timeout_s: float = 2.0
    """Time-out of a write, in seconds."""
    connect_timeout_s: float = 1.0
    """Time-out of a connection to the server, in seconds."""
    block_ttl_s: float = 3600.0
    """Time to live of a block's key, in seconds; writers refresh theirs three times as often."""
    partitions: int = 0
    """Number of partitions of a model's blocks: a power of two up to 64, or 0 for 1 on a single server and
    16 in a Cluster. Fixed by the first replica of a model."""
    code_bytes: int = 1
    """1 or 2: room for 255 or 65535 different sets of (medium, group) that a block can be held in. Fixed
    by the first replica of a model."""
    touched_max: int = 1 << 18
    """Most changed blocks of one engine waiting to be written; beyond it all blocks of the engine are
    written again."""
    script_blocks: int = 512
    """Blocks written by one script call; bounds how long it holds up other clients of the server (about 3
    us per block)."""

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise SettingsError(f"namespace {self.namespace!r}: 1 to 32 letters, digits, '_', '.', '-'")
        if self.code_bytes not in {1, 2}:
            raise SettingsError(f"code_bytes {self.code_bytes}: 1 or 2")
        if not 0 <= self.partitions <= 64 or self.partitions & (self.partitions - 1):
            raise SettingsError(f"partitions {self.partitions}: 0 or a power of two up to 64")
        if not 0 < self.renew_s < self.lease_s < self.block_ttl_s:
            raise SettingsError("renew_s: 0 < renew_s < lease_s < block_ttl_s must hold")
        parse_url(self.url)

    @property
    def control_ttl_s(self) -> float:
        """Time to live of a scope's books: much longer than its blocks'."""
        return 10 * self.block_ttl_s

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "url"}
        return (
            f"SharedSettings(url={redacted(self.url)!r}, {', '.join(f'{k}={v!r}' for k, v in shown.items())})"
        )

    __str__ = __repr__
