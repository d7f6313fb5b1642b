"""What of another configuration a running router can take, and what waits for its next start.

Pure. ``LIVE`` says it; all that follows from a key that is not there (sockets, the shared index, memory that
was laid out) stays as it is. Always true: the configuration that comes out is one that ``check_config``
accepts; keys are named as users write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from router.config.checks import check_config
from router.config.schema import Config

LIVE = frozenset(
    {
        *("engines", "models", "aliases", "policy", "proxy", "listen", "keys", "queue", "pd"),
        *("server.log_level", "server.log_format", "server.log_requests"),
        *("server.expose_decision", "server.check_every", "sidecar.prefills"),
        *("fleet.poll_interval_s", "fleet.poll_down_interval_s", "fleet.poll_timeout_s"),
        *("fleet.polls_missed_max", "fleet.gauge_interval_s", "fleet.answer_bytes_max"),
    }
)
"""Whole sections, and keys of others. Two exceptions are in ``_stays``."""


class Change(msgspec.Struct, frozen=True):
    """``config`` is the running one with all that it can take; ``taken`` are the keys in which it differs,
    ``waiting`` those that need a new start."""

    config: Config
    taken: tuple[str, ...]
    waiting: tuple[str, ...]


def changes(running: Config, wanted: Config) -> Change:
    """From one to the other. Raises ``ConfigError`` where what can be taken does not go with what stays."""
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
            waiting += _leaves(key, getattr(old, name), getattr(new, name))
    return msgspec.structs.replace(old, **values) if values else old


def _stays(key: str, running: Config, wanted: Config) -> bool:
    """Keys are asked for everywhere or nowhere, from the first request on; and what replicas share about
    models was written as they were."""
    if key == "keys.file":
        return (running.keys.file is None) != (wanted.keys.file is None)
    return key == "models" and running.index.is_shared


def _entries(section: str, old: Any, new: Any) -> Iterator[str]:
    """Of a table by name, the entries that differ; else the whole."""
    if not isinstance(old, dict):
        yield section
        return
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield f'{section}."{name}"'


def _leaves(key: str, old: Any, new: Any) -> Iterator[str]:
    if not isinstance(old, msgspec.Struct):
        yield key
        return
    for name in old.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            yield from _leaves(f"{key}.{name}", getattr(old, name), getattr(new, name))
