"""``kvatlas engine``: settings from the command line, then one simulated engine until SIGTERM."""

from __future__ import annotations

import msgspec

from kvatlas.publisher.simulator.server import run
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.http.setting_texts import meant, misfit


def run_engine(host: str, port: int, assignments: list[str]) -> int:
    """Run the engine. Raises ``ConfigError`` naming the setting, ``OSError`` if the port is in use."""
    settings = engine_settings(host, port, assignments)
    try:
        run(settings)
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from None
    return 0


def engine_settings(host: str, port: int, assignments: list[str]) -> EngineSettings:
    """Parse settings from ``KEY=VALUE`` strings; ``none`` means no value."""
    values: dict[str, object] = {"host": host, "port": port}
    kinds = {field.name: field.type for field in msgspec.structs.fields(EngineSettings)}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or key not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(f"--set {text!r}: expected KEY=VALUE with a KEY of {known}{meant(key, kinds)}")
        try:
            values[key] = msgspec.convert(
                None if value.lower() == "none" else value, kinds[key], strict=False
            )
        except (msgspec.ValidationError, ValueError):
            raise ConfigError(f"--set {text!r}: {misfit(value, kinds[key])}") from None
    return EngineSettings(**values)  # type: ignore[arg-type]  # each was checked above
