"""SGLang's event classes: written down here, and those of its wheel where that is at hand.

Source: srt/disaggregation/kv_events.py of SGLang 0.5.23.
"""

from __future__ import annotations

import os
import sys
import zipfile
from types import ModuleType
from typing import Any

import msgspec
import pytest

WHEEL = "KVATLAS_SGLANG_WHEEL"
_EVENTS = "sglang/srt/disaggregation/kv_events.py"
LOADS = "sglang/srt/managers/scheduler_components/load_publisher.py"
# What the modules import and their classes do not use.
_UNUSED = (
    *("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.network", "sglang.srt.runtime_context"),
    *("sglang.srt.disaggregation", "sglang.srt.disaggregation.kv_events"),
)


class _StandIn(ModuleType):
    """A package of which every attribute exists."""

    __path__: list[str] = []  # noqa: RUF012  # as of packages

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


def wheel_path() -> str:
    """The wheel's path; skips the test if there is none."""
    path = os.environ.get(WHEEL)
    if not path:
        pytest.skip(f"{WHEEL} names no wheel of sglang 0.5.23; make test-sglang downloads it")
    return path


def classes(source: str, path_in_wheel: str = _EVENTS) -> Any:
    """The module with the classes: ``own``, or ``wheel``'s; skips the test if there is no wheel."""
    if source == "own":
        return sys.modules[__name__]
    path = wheel_path()
    module = ModuleType(path_in_wheel.replace("/", "_").removesuffix(".py"))
    # Struct types are resolved through ``sys.modules``.
    sys.modules[module.__name__] = module
    before = {name: sys.modules.get(name) for name in _UNUSED}
    try:
        for name in before:
            sys.modules[name] = _StandIn(name)
        with zipfile.ZipFile(path) as wheel:
            exec(
                compile(wheel.read(path_in_wheel), path_in_wheel, "exec"), module.__dict__
            )  # the wheel's code
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
    return module
