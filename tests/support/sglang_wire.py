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
# What the module imports and its classes do not use.
_UNUSED = {"sglang.srt.runtime_context": "get_parallel", "sglang.srt.utils.network": "NetworkAddress"}


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


def classes(source: str) -> Any:
    """The module with the classes: ``own``, or ``wheel``'s; skips the test if there is no wheel."""
    if source == "own":
        return sys.modules[__name__]
    path = wheel_path()
    module = ModuleType("kv_events_of_the_wheel")
    # Struct types are resolved through ``sys.modules``.
    sys.modules[module.__name__] = module
    before = {name: sys.modules.get(name) for name in ("sglang", "sglang.srt", "sglang.srt.utils", *_UNUSED)}
    try:
        for name in before:
            sys.modules[name] = stand_in = ModuleType(name)
            stand_in.__path__ = []
            if name in _UNUSED:
                setattr(stand_in, _UNUSED[name], object)
        with zipfile.ZipFile(path) as wheel:
            exec(compile(wheel.read(_EVENTS), _EVENTS, "exec"), module.__dict__)  # the wheel's code
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
    return module
