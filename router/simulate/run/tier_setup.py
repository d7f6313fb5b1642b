"""What memory there is outside the GPUs: how much, how fast, what a load costs the engine; from flags too.

``64GiB``, ``20000`` (blocks) or ``400%`` (of what the GPUs have: of an engine's pool for host memory, of the
fleet's for a store) says how much; what follows a colon sets the link: ``400%:gbit_s=25+latency_ms=2``.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from publisher.groups import Family, GroupSpec

Medium = Literal["CPU", "STORAGE"]
KV_KIB_PER_TOKEN = 100.0
"""As the router's own ``policy.load_s_per_token`` supposes."""
_BLOCKS_MAX = 1 << 31
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks`` of host memory per engine, or of the whole store. Rates in bytes per second."""

    blocks: int
    bytes_per_s: float
    """Of an engine's link."""
    total_bytes_per_s: float = math.inf
    """Of the store's own link; host memory has none."""
    latency_s: float = 0.0
    busy_share: float = 0.0
    """What a load takes away from computing: this share of the seconds that its bytes are on the link."""

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= _BLOCKS_MAX:
            raise ValueError(f"capacity must be 1 to {_BLOCKS_MAX} blocks, got {self.blocks}")
        for name in ("bytes_per_s", "total_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.latency_s < 3600:
            raise ValueError(f"latency_s must be 0 to 3600, got {self.latency_s}")
        if not 0 <= self.busy_share <= 1:
            raise ValueError(f"busy_share must be 0 to 1, got {self.busy_share}")


class TierSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What there is beside the GPUs. ``block_bytes``: of a block, which is the same in every group."""

    block_bytes: int
    host: TierSpec | None = None
    store: TierSpec | None = None

    def load_s_per_token(self, medium: Medium, groups: tuple[GroupSpec, ...]) -> float:
        """Seconds of a long load per token: of full attention's blocks, or of the finest group's."""
        spec = self.host if medium == "CPU" else self.store
        if spec is None:
            return 0.0
        full = [group.block_size for group in groups if group.family is Family.FULL]
        blocks = sum(1 / size for size in full) or 1 / min(group.block_size for group in groups)
        return blocks * self.block_bytes / min(spec.bytes_per_s, spec.total_bytes_per_s)

    @property
    def any(self) -> bool:
        return self.host is not None or self.store is not None


HOST_LINK = {"gbyte_s": 45.0, "latency_ms": 0.1, "busy": 0.0}
"""PCIe 5 x16 as pinned copies reach it; x16 of generation 4 comes to about 20."""
STORE_LINK = {"gbit_s": 100.0, "total_gbit_s": math.inf, "latency_ms": 2.0, "busy": 0.0}


def block_bytes(groups: tuple[GroupSpec, ...], kv_kib_per_token: float) -> int:
    """Of a block of any group, where a token takes so much in one of full attention (else the finest)."""
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(1, round(min(sizes) * kv_kib_per_token * 1024))


def read_host(text: str, gpu_blocks: int, bytes_per_block: int) -> TierSpec:
    """Host memory of one engine; ``gpu_blocks`` are its pool's. Raises ``ValueError``."""
    capacity, link = _split(text, HOST_LINK)
    return TierSpec(
        blocks=_blocks(capacity, gpu_blocks, bytes_per_block),
        bytes_per_s=link["gbyte_s"] * 1e9,
        latency_s=link["latency_ms"] / 1e3,
        busy_share=link["busy"],
    )


def read_store(text: str, gpu_blocks: int, bytes_per_block: int) -> TierSpec:
    """The store that all share; ``gpu_blocks`` are the fleet's. Raises ``ValueError``."""
    capacity, link = _split(text, STORE_LINK)
    return TierSpec(
        blocks=_blocks(capacity, gpu_blocks, bytes_per_block),
        bytes_per_s=link["gbit_s"] * 1e9 / 8,
        total_bytes_per_s=link["total_gbit_s"] * 1e9 / 8,
        latency_s=link["latency_ms"] / 1e3,
        busy_share=link["busy"],
    )


def _split(text: str, defaults: dict[str, float]) -> tuple[str, dict[str, float]]:
    capacity, _, options = text.partition(":")
    link = dict(defaults)
    for option in filter(None, options.split("+")):
        key, _, value = option.partition("=")
        if key not in defaults:
            raise ValueError(f"{option!r}: there are {', '.join(defaults)}")
        try:
            link[key] = float(value)
        except ValueError:
            raise ValueError(f"{option!r}: expected a number") from None
    return capacity.strip(), link


def _blocks(text: str, gpu_blocks: int, bytes_per_block: int) -> int:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "%" if text.endswith("%") else "")
    try:
        value = float(text.removesuffix(unit))
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ValueError(
            f"{text!r}: expected a size such as 64GiB, a share of the GPUs' such as 400%, or blocks"
        )
    if unit == "%":
        return int(value / 100 * gpu_blocks)
    return int(value * _UNITS[unit] / bytes_per_block) if unit else int(value)
