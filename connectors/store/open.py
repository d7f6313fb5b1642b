"""From the settings under ``store`` to a store: ``{"kind": "file", "path": ...}`` and its like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connectors.errors import ConfigError
from connectors.store.base import BlockStore
from connectors.store.circuit import GuardedStore
from connectors.store.options import Options

KINDS = ("file", "mooncake", "redis")


def open_store(config: object, *, where: str = "store", lookup_only: bool = False) -> GuardedStore:
    """The store these settings describe, behind a circuit.

    ``lookup_only``: for the half that only asks what exists; it keeps no caps and lends no memory.
    ConfigError for an unknown key or a value that cannot work; StoreUnavailable where a directory or service
    must be there at start and is not.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(where, config, 'give a mapping, e.g. {"kind": "file", "path": "/dev/shm/kv"}')
    options = Options(config, where)
    kind = options.text("kind", choices=KINDS)
    name = options.text("name", kind)
    return GuardedStore(_OPEN[kind](options, name, lookup_only))


def _open_file(options: Options, name: str, lookup_only: bool) -> BlockStore:
    from connectors.store.file import FileSettings, FileStore  # noqa: PLC0415

    settings = FileSettings.parse(options)
    options.finish()
    return FileStore(settings, sweeps=not lookup_only, name=name)


def _open_redis(options: Options, name: str, lookup_only: bool) -> BlockStore:
    from connectors.store.redis import RedisSettings, RedisStore  # noqa: PLC0415

    del lookup_only
    settings = RedisSettings.parse(options)
    options.finish()
    return RedisStore(settings, name=name)


def _open_mooncake(options: Options, name: str, lookup_only: bool) -> BlockStore:
    from connectors.store.mooncake import MooncakeSettings, MooncakeStore  # noqa: PLC0415

    settings = MooncakeSettings.parse(options)
    options.finish()
    return MooncakeStore(settings, lends=not lookup_only, name=name)


_OPEN: dict[str, Any] = {"file": _open_file, "mooncake": _open_mooncake, "redis": _open_redis}
