"""What ``kvatlas engine`` does: settings from the command line, then one simulated engine until SIGTERM."""

from __future__ import annotations

import msgspec

from publisher.engine import EngineSettings, run
from router.config.checks import ConfigError


def run_engine(host: str, port: int, assignments: list[str]) -> int:
    """Run the engine. Raises ``ConfigError`` naming the setting that cannot be used."""
    run(engine_settings(host, port, assignments))
    return 0


def engine_settings(host: str, port: int, assignments: list[str]) -> EngineSettings:
    """Settings from ``KEY=VALUE`` texts; ``none`` stands for no value."""
    values: dict[str, object] = {"host": host, "port": port}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or key not in EngineSettings.__struct_fields__:
            known = ", ".join(EngineSettings.__struct_fields__)
            raise ConfigError(f"--set {text!r}: expected KEY=VALUE with a KEY of {known}")
        values[key] = None if value.lower() == "none" else value
    try:
        return msgspec.convert(values, EngineSettings, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"engine settings: {error}") from None
