"""What every tool that asks a running router knows: where its ops port is, its token, what a refusal says."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from rich.console import Console

from publisher.engine import EngineSettings, run
from router.config.errors import ConfigError, meant, misfit
from router.config.schema import OPS_PORT

OPS_URL = f"http://127.0.0.1:{OPS_PORT}"
TOKEN_VARIABLE = "KVATLAS_OPS_TOKEN"  # noqa: S105  # its name
"""The environment variable with the token of a router that wants one (``server.ops_token_file``)."""
_TEXT_MAX = 300


def ops_headers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers for a router's ops port; to be sent to nobody else."""
    token = environ.get(TOKEN_VARIABLE, "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}


def reason(body: bytes, code: str = "") -> str:
    """The message of an error in OpenAI's shape (with this code, where given); "" where it is none."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"])[:_TEXT_MAX] if code in {"", error.get("code")} else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return ""


# What ``kvatlas engine`` does: settings from the command line, then one simulated engine until SIGTERM.


def run_engine(host: str, port: int, assignments: list[str]) -> int:
    """Run the engine. Raises ``ConfigError`` naming the setting at fault, ``OSError`` for a taken port."""
    settings = engine_settings(host, port, assignments)
    try:
        run(settings)
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from None
    return 0


def engine_settings(host: str, port: int, assignments: list[str]) -> EngineSettings:
    """Settings from ``KEY=VALUE`` texts; ``none`` stands for no value."""
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


# Where tables are printed: as wide as the terminal, and whole where output goes into a file or a pipe.


WIDTH_PIPED = 1000
"""Wider than any table here: nothing is folded for somebody who greps."""


def output_console() -> Console:
    """Standard output. ``COLUMNS`` in the environment sets another width."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(width=WIDTH_PIPED)
