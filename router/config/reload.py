"""Changes of the configuration that a running router can apply, and those that need a restart.

Pure. ``LIVE`` lists the former; everything else (sockets, the shared index, preallocated memory) stays as
it is. Invariants: the resulting configuration passes ``check_config``; keys have the names that users
write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.router.config.checks import check_config
from kvatlas.router.config.schema import Config

# Whole sections, and keys of others. ``_stays`` has two exceptions.
LIVE = frozenset(
    {
        "engines",
        "stores",
        "models",
        "aliases",
        "policy",
        "proxy",
        "listen",
        "keys",
        "queue",
        "pd",
        "pull",
        "server.log_level",
        "server.log_format",
        "server.log_requests",
        "server.expose_decision",
        "server.check_every",
        "fleet.poll_interval_s",
        "fleet.poll_timeout_s",
    }
)


class Change(msgspec.Struct, frozen=True):
    """``config``: the running configuration with all applicable changes; ``taken``: changed keys that are
    applied; ``waiting``: changed keys that need a restart."""

    config: Config
    taken: tuple[str, ...]
    waiting: tuple[str, ...]


def changes(running: Config, wanted: Config) -> Change:
    """Compare two configurations. Raises ``ConfigError`` if applicable changes contradict what stays."""
    taken: list[str] = []
    waiting: list[str] = []
    values: dict[str, Any] = {}
    for section in Config.__struct_fields__:
        old, new = getattr(running, section), getattr(wanted, section)
        if isinstance(old, msgspec.Struct):
            values[section] = _section(section, old, new, (running, wanted), taken, waiting)
        elif old == new:
            values[section] = old
        elif section in LIVE and not _stays(section, running, wanted):
            values[section] = new
            taken += _entries(section, old, new)
        else:
            values[section] = old
            waiting += _entries(section, old, new)
    config = Config(**values)
    check_config(config)
    return Change(config, tuple(taken), tuple(waiting))


def _section(
    section: str,
    old: msgspec.Struct,
    new: msgspec.Struct,
    configs: tuple[Config, Config],
    taken: list[str],
    waiting: list[str],
) -> msgspec.Struct:
    values = {}
    for name in old.__struct_fields__:
        if getattr(old, name) == getattr(new, name):
            continue
        key = f"{section}.{name}"
        if (section in LIVE or key in LIVE) and not _stays(key, *configs):
            taken.append(key)
            values[name] = getattr(new, name)
        else:
            waiting += _changed_leaves(key, getattr(old, name), getattr(new, name))
    return msgspec.structs.replace(old, **values) if values else old


def _stays(key: str, running: Config, wanted: Config) -> bool:
    """Whether a change needs a restart after all: keys are required for all requests or none, and caches are
    isolated for all or none; replicas share facts of models as they were written."""
    if key.startswith("keys.isolate") or key in ("keys.client_salts", "keys.secret_file"):
        return True
    if key == "keys.file":
        return (running.keys.file is None) != (wanted.keys.file is None)
    return key == "models" and running.index.shares_blocks


def _entries(section: str, old: Any, new: Any) -> Iterator[str]:
    """Return the changed entries of a table by name, or else the whole."""
    if not isinstance(old, dict):
        yield section
        return
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield f'{section}."{name}"'


def _changed_leaves(key: str, old: Any, new: Any) -> Iterator[str]:
    if not isinstance(old, msgspec.Struct):
        yield key
        return
    for name in old.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            yield from _changed_leaves(f"{key}.{name}", getattr(old, name), getattr(new, name))
