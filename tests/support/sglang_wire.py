"""SGLang's event classes: written down here, and those of its wheel where that is at hand.

Source: srt/disaggregation/kv_events.py of SGLang 0.5.23.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import zipfile
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

WHEEL = "KVATLAS_SGLANG_WHEEL"
_EVENTS = "sglang.srt.disaggregation.kv_events"
LOADS = "sglang.srt.managers.scheduler_components.load_publisher"


class _StandIn(ModuleType):
    """A package of which every attribute exists: modules in ``real``, and else what does nothing."""

    def __init__(self, name: str, real: Collection[str]) -> None:
        super().__init__(name)
        self.__real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in self.__real:
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (), {"__init__": _nothing}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


def _nothing(*args: Any, **options: Any) -> None:
    """The constructor of a stand-in."""


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``sglang`` from its wheel: the modules in ``real``, and stand-ins for all others."""

    def __init__(self, path: str, real: Collection[str]) -> None:
        self._files = zipfile.ZipFile(path)
        self._names = set(self._files.namelist())
        self._real = real

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "sglang":
            return None
        is_package = fullname not in self._real or self._path(fullname).endswith("__init__.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in self._real else _StandIn(spec.name, self._real)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._real:
            path = self._path(module.__name__)
            exec(compile(self._files.read(path), path, "exec"), module.__dict__)

    def binary(self, name: str, directory: str) -> str:
        """Unpack a compiled module into ``directory``; returns its path."""
        start = name.replace(".", "/") + "."
        (found,) = (one for one in self._names if one.startswith(start) and one.endswith(".so"))
        return self._files.extract(found, directory)

    def _path(self, name: str) -> str:
        path = name.replace(".", "/")
        return path + ".py" if path + ".py" in self._names else path + "/__init__.py"


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


def classes(source: str, name: str = _EVENTS) -> Any:
    """The module with the classes: ``own``, or ``wheel``'s; skips the test if there is no wheel."""
    if source == "own":
        return sys.modules[__name__]
    wheel = Wheel(wheel_path(), {name})
    sys.meta_path.insert(0, wheel)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(wheel)
        # Another test imports another module as it is; struct types are resolved through ``sys.modules``.
        for known in [one for one in sys.modules if one.partition(".")[0] == "sglang" and one != name]:
            del sys.modules[known]
