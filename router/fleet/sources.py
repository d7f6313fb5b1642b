"""Sources of engines: the rules for addresses, the list in a file, and all sources of one router.

A source reports its complete set whenever that changes. Invariants: while a source fails it reports nothing,
so its last set stays; every failure is counted by its reason, and the last one is kept as text; the size of a
set is bounded.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from kvatlas.router.fleet.engines import (
    STATIC,
    CannotStartError,
    DesiredState,
    DiscoveredEngine,
    EngineAddress,
    Source,
    SourceStats,
)
from kvatlas.router.http.addresses import base_url_fault, split_address
from kvatlas.router.http.setting_texts import meant, misfit

_log = structlog.get_logger()
DRAINED = "drained in the file"


class BadListError(ValueError):
    """The content is not a list of engines; no part of it is used."""


class _Entry(EngineAddress, frozen=True):
    drain: bool = False


# Of an unknown key, in the text about it.
_KEY_CHARS_MAX = 60
_KINDS = {field.name: field.type for field in msgspec.structs.fields(_Entry)}


def check_address(engine: EngineAddress) -> None:
    """Raise ``ValueError`` for addresses that cannot be used; the rules of all sources."""
    if fault := base_url_fault(engine.base_url, "http", "https"):
        raise ValueError(f"engine {engine.base_url!r}: {fault}")
    if engine.dp_rank is not None and engine.dp_rank < 0:
        raise ValueError(f"engine {engine.base_url}: dp_rank={engine.dp_rank} is negative")
    for name in ("events", "replay", "snapshot"):
        address = getattr(engine, name)
        if address is not None and (fault := socket_fault(address)):
            raise ValueError(f"engine {engine.base_url}: {name}={address!r} {fault}")
    if engine.kv_source is not None and not _is_host_port(engine.kv_source):
        raise ValueError(f"engine {engine.base_url}: kv_source={engine.kv_source!r} is not HOST:PORT")
    if engine.replay is not None and engine.events is None:
        raise ValueError(f"engine {engine.base_url}: replay= needs events=")


def socket_fault(address: str) -> str:
    """Return the fault of a ZMQ address to connect to; "" if there is none."""
    scheme, _, rest = address.partition("://")
    if scheme not in {"tcp", "ipc", "inproc"} or not rest:
        return "is not a tcp:// or ipc:// address"
    if scheme != "tcp":
        return ""
    if rest.startswith("*:"):
        return "is where the engine listens; give the engine's host instead of *"
    return "" if _is_host_port(rest) else "is not tcp://HOST:PORT"


def _is_host_port(text: str) -> bool:
    try:
        host, port = split_address(text)
    except ValueError:
        return False
    return bool(host and port)


def read_list(content: bytes, *, is_json: bool) -> list[DiscoveredEngine]:
    """Read the engines of a file with ``[[engines]]`` (or ``{"engines": [...]}``).

    Raises ``BadListError``.
    """
    # The key is required even without any engine: a file that is being written looks empty.
    try:
        tree: Any = msgspec.json.decode(content) if is_json else tomllib.loads(content.decode())
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadListError(f"not a list of engines: {error}") from None
    found: dict[str, DiscoveredEngine] = {}
    for number, given in enumerate(_given(tree)):
        entry = _entry(given, f"engines[{number}]")
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


def _given(tree: Any) -> list[Any]:
    if not isinstance(tree, dict):
        raise BadListError(f"expected a table with the key engines, got {tree!r}")
    for key in tree:
        _check_key(key, ("engines",), "")
    engines = tree.get("engines")
    if engines is None:
        raise BadListError("engines must be given; of no engine it is an empty list")
    if not isinstance(engines, list):
        raise BadListError(f"engines = {engines!r}: expected a list of tables")
    return engines


def _entry(given: Any, name: str) -> _Entry:
    if not isinstance(given, dict):
        raise BadListError(f"{name} = {given!r}: expected a table")
    for key, value in given.items():
        _check_key(key, _KINDS, f"{name}.")
        try:
            msgspec.convert(value, _KINDS[key])
        except msgspec.ValidationError:
            raise BadListError(f"{name}.{key} = {value!r}: {misfit(value, _KINDS[key])}") from None
    if "base_url" not in given:
        raise BadListError(f"{name}: base_url must be given")
    return _Entry(**given)


def _check_key(key: str, known: Iterable[str], prefix: str) -> None:
    if key not in known:
        name = f"{prefix}{key[:_KEY_CHARS_MAX]}"
        near = meant(name, [f"{prefix}{one}" for one in known], prefix=prefix)
        raise BadListError(f"unknown key {name}{near or ';'} known: {', '.join(sorted(known))}")


_AFTER_FAULT_S = 2.0


class FleetSources:
    """The static list and all ``sources`` of one router. ``changed`` is called when the desired state may
    differ.

    Runs every source of engines and merges their sets into the desired state.

    Invariants: a source that fails through a bug is restarted, and the others continue; engines with invalid
    addresses never reach the desired state.
    """

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        sources: Iterable[Source],
        desired: DesiredState,
        *,
        changed: Callable[[], None],
    ) -> None:
        self._static = SourceStats(synced=True)
        self._sources = list(sources)
        self._desired = desired
        self._changed = changed
        self.set_static(engines)

    def set_static(self, engines: Sequence[EngineAddress]) -> None:
        self._static.engines = len(engines)
        self._desired.set_source(STATIC, [DiscoveredEngine(engine) for engine in engines])

    @property
    def stats(self) -> dict[str, SourceStats]:
        """Statistics by source, the static list included."""
        return {STATIC: self._static, **{source.name: source.stats for source in self._sources}}

    def unsynced(self) -> list[str]:
        """Return the sources that have not reported their whole set yet, with the reason if known."""
        return [
            f"{source.name} ({source.stats.last_error})" if source.stats.last_error else source.name
            for source in self._sources
            if not source.stats.synced
        ]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._run_restarting(source), name=f"source {source.name}")

    async def _run_restarting(self, source: Source) -> None:
        while True:
            try:
                await source.run(lambda discovered: self._apply(source, discovered))
            except* CannotStartError as errors:
                text = str(errors.exceptions[0])
                if source.stats.failed("access", text):
                    _log.warning("source of engines cannot start", source=source.name, problem=text)
            except* Exception:  # noqa: BLE001  # whatever it is, the engines that are known stay
                source.stats.failed("fault", "internal error in the router; see its log")
                _log.exception("source of engines failed, restarting it", source=source.name)
            await asyncio.sleep(_AFTER_FAULT_S)

    def _apply(self, source: Source, discovered: Sequence[DiscoveredEngine]) -> None:
        usable = []
        for one in discovered:
            try:
                check_address(one.engine)
            except ValueError as error:
                source.stats.refused += 1
                source.stats.complain("malformed", str(error))
            else:
                usable.append(one)
        source.stats.engines = len(usable)
        self._desired.set_source(source.name, usable)
        if self._desired.left_out:
            source.stats.complain("fleet_full", f"{self._desired.left_out} servers over fleet.engines_max")
            _log.warning("more engines than fleet.engines_max", left_out=self._desired.left_out)
        self._changed()
