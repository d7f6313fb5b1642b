"""Engines as written down by people: the rule for addresses, and the list in a file.

``check_address`` is the one rule of what addresses an engine may have, whoever names it.
"""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec

from router.fleet.identity import EngineAddress
from router.fleet.sources.base import DiscoveredEngine
from router.http.addresses import base_url_fault, split_address

DRAINED = "drained in the file"


class BadListError(ValueError):
    """The content is no list of engines; nothing of it counts."""


class _Entry(EngineAddress, frozen=True, forbid_unknown_fields=True):
    drain: bool = False


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engines: list[_Entry]


def check_address(engine: EngineAddress) -> None:
    """Raises ``ValueError`` for addresses that cannot be used."""
    if fault := base_url_fault(engine.base_url, "http"):
        why = "; engines are not asked over TLS" if engine.base_url.startswith("https:") else ""
        raise ValueError(f"engine {engine.base_url!r}: {fault}{why}")
    if engine.dp_rank is not None and engine.dp_rank < 0:
        raise ValueError(f"engine {engine.base_url}: dp_rank={engine.dp_rank} is negative")
    for name in ("events", "replay", "snapshot"):
        address = getattr(engine, name)
        if address is not None and (fault := _socket_fault(address)):
            raise ValueError(f"engine {engine.base_url}: {name}={address!r} {fault}")
    if engine.replay is not None and engine.events is None:
        raise ValueError(f"engine {engine.base_url}: replay= needs events=")


def _socket_fault(address: str) -> str:
    """Return the fault of a ZMQ address to connect to; "" where it can be used."""
    scheme, _, rest = address.partition("://")
    if scheme not in {"tcp", "ipc", "inproc"} or not rest:
        return "is not a tcp:// or ipc:// address"
    if scheme != "tcp":
        return ""
    if rest.startswith("*:"):
        return "is where the engine listens; give the engine's host instead of *"
    try:
        _, port = split_address(rest)
    except ValueError:
        port = 0
    return "" if port else "is not tcp://HOST:PORT"


def read_list(content: bytes, *, is_json: bool) -> list[DiscoveredEngine]:
    """The engines of a file with ``[[engines]]`` (or ``{"engines": [...]}``). Raises ``BadListError``.

    The key must be there, also for no engine at all: a file that is just being written looks empty.
    """
    try:
        tree: Any = msgspec.json.decode(content) if is_json else tomllib.loads(content.decode())
        entries = msgspec.convert(tree, _List).engines
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadListError(f"not a list of engines: {error}") from None
    found: dict[str, DiscoveredEngine] = {}
    for entry in entries:
        fields = {name: getattr(entry, name) for name in EngineAddress.__struct_fields__}
        engine = EngineAddress(**{**fields, "base_url": entry.base_url.rstrip("/")})
        if engine.engine_id in found:
            raise BadListError(f"{engine.engine_id} is listed twice")
        try:
            check_address(engine)
        except ValueError as error:
            raise BadListError(str(error)) from None
        found[engine.engine_id] = DiscoveredEngine(engine, DRAINED if entry.drain else "")
    return list(found.values())
